"""Container files: safetensors with the unit payload first, checked before use (spec/format.md, "Containers").

The payload streams to disk while units are encoded, so its size is not known when the header is written: the header is
padded with spaces to a reserved length and filled in at the end, as safetensors allows.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from pltpack.errors import FormatError, UnsupportedError
from pltpack.format import durable
from pltpack.format.header import DTYPES, parse_header
from pltpack.format.sealed_container import HEADER, SealedUnits, open_tables, scratch, seal_tables, seal_unit
from pltpack.format.sealing import TAG_BYTES, FileSeal, Seal, parsed
from pltpack.format.source import FileSource, GoneError, Source

__all__ = ["Container", "ContainerInfo", "ContainerWriter", "GoneError"]

#: Longest header, as in safetensors.
MAX_HEADER_BYTES = 100_000_000
#: Most bytes of tables (everything but the payload) that a reader takes into memory.
MAX_TABLE_BYTES = 1 << 29
PAYLOAD = "unit.payload"
FORMAT_VERSION = (1, 0)
#: Minor version from which on containers may hold units of layer groups, and states that are profiles.
MINOR_GROUPS = 1
#: Minor version from which on shards may map tokens to other tokens or positions, as predictions of their own units.
MINOR_PREDICTIONS = 2
#: Minor version from which on shards may leave it to a model to make their values.
MINOR_RECOMPUTE = 3
#: The same for units of `transform` that move the scales of their components.
MINOR_SCALED = 3
#: Minor version of containers that are encrypted; what is sealed in them has a version of its own.
MINOR_ENCRYPTION = 4

# Of these are opened at once as many bytes as stay in a processor's cache.
_OPENED_BYTES = 1 << 18
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class ContainerWriter:
    """Write one container: payload bytes as they come, tables and metadata at the end.

    The file appears under its name only when `commit` returns; until then it is a temporary file in the same folder.

    Parameters
    ----------
    path : Path
        Final name; must not exist.
    reserve : int
        Upper bound of the header in bytes.
    seal : Seal, optional
        Encrypt for this archive; then every append is one unit.
    """

    def __init__(self, path: Path, reserve: int, seal: Seal | None = None) -> None:
        self.path = path
        self._seal = None if seal is None else seal.fresh()
        if seal is not None:
            # Metadata is in base64, and says the form of every tensor.
            reserve = 2 * reserve + 1024
        self._units = 0
        self._reserve = (reserve + 7) // 8 * 8
        self._temp = durable.temp_name(path)
        self._payload_hash = hashlib.sha256()
        self.payload_bytes = 0
        self._check_size("header", self._reserve, MAX_HEADER_BYTES)
        self._file: BinaryIO | None = open(self._temp, "xb")  # noqa: SIM115
        try:
            with durable.naming(path):
                self._file.write(bytes(8 + self._reserve))
        except BaseException:
            self.abort()
            raise

    def append(self, payload: bytes | memoryview) -> int:
        """Add payload bytes; returns their offset in the payload."""
        offset = self.payload_bytes
        self.write(payload)
        self.digest(payload)
        return offset

    def write(self, payload: bytes | memoryview) -> None:
        """The one half of `append`; another thread may be at the other."""
        assert self._file is not None
        stored: bytes | memoryview = payload
        if self._seal is not None:
            stored = seal_unit(self._seal, self._units, self.payload_bytes, payload)
            self._payload_hash.update(stored)
            self._units += 1
        with durable.naming(self.path):
            self._file.write(stored)
        self.payload_bytes += len(payload)

    def digest(self, payload: bytes | memoryview) -> None:
        """The other half of `append`; what is encrypted is hashed when it is written."""
        if self._seal is None:
            self._payload_hash.update(payload)

    def commit(self, tables: Mapping[str, np.ndarray], metadata: Mapping[str, str], sync: bool = True) -> ContainerInfo:
        """Write tables and header, sync, and give the file its name.

        Parameters
        ----------
        tables : mapping of str to ndarray
            Arrays of dtype uint8, int32, uint32 or uint64.
        metadata : mapping of str to str
        sync : bool
            If false, the file has its name at once but is not durable before `sync` has returned.
        """
        assert self._file is not None
        if self._seal is not None:
            version = f"{FORMAT_VERSION[0]}.{MINOR_ENCRYPTION}"
            tables, metadata = seal_tables(self._seal, version, tables, metadata)
        stored = self.payload_bytes + (TAG_BYTES * self._units if self._seal is not None else 0)
        header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
        header[PAYLOAD] = {"dtype": "U8", "shape": [stored], "data_offsets": [0, stored]}
        padding = -stored % 8
        chunks, offset = [], stored
        if padding:
            # safetensors allows no holes, so the alignment of the tables is a tensor of its own.
            header["padding"] = {"dtype": "U8", "shape": [padding], "data_offsets": [offset, offset + padding]}
            chunks.append(bytes(padding))
            offset += padding
        for name, array in sorted(tables.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])):
            dtype = array.dtype.newbyteorder("<") if array.dtype.itemsize > 1 else array.dtype
            data = np.ascontiguousarray(array, dtype=dtype).tobytes()
            header[name] = {"dtype": _NAMES[dtype], "shape": list(array.shape),
                            "data_offsets": [offset, offset + len(data)]}  # fmt: skip
            chunks.append(data)
            offset += len(data)
        encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=True).encode()
        if len(encoded) > self._reserve:
            raise FormatError(f"header of {len(encoded)} bytes exceeds the {self._reserve} reserved", self.path)
        head = struct.pack("<Q", self._reserve) + encoded.ljust(self._reserve, b" ")
        tail = b"".join(chunks)
        self._check_size("tables", len(tail), MAX_TABLE_BYTES)
        with durable.naming(self.path):
            self._file.write(tail)
            self._file.seek(0)
            self._file.write(head)
            size = self._file.seek(0, os.SEEK_END)
            if sync:
                durable.sync_file(self._file)
                self._file.close()
                self._file = None
                durable.publish(self._temp, self.path)
            else:
                self._file.flush()
                os.replace(self._temp, self.path)
        head_digest = hashlib.sha256(head + tail).hexdigest()
        return ContainerInfo(size, head_digest, self._payload_hash.hexdigest(), stored)

    def sync(self) -> None:
        """Make a file durable that was committed without."""
        assert self._file is not None
        with durable.naming(self.path):
            durable.sync_file(self._file)
            self._file.close()
            self._file = None
            durable.sync_folder(self.path.parent)

    def abort(self) -> None:
        """Remove the temporary file; harmless after `commit`."""
        if self._file is not None:
            file, self._file = self._file, None
            # Closing writes what is buffered, which a full disk refuses once more.
            with contextlib.suppress(OSError):
                file.close()
            self._temp.unlink(missing_ok=True)

    def _check_size(self, what: str, size: int, limit: int) -> None:
        if size > limit:
            raise UnsupportedError(f"{what} of {size} bytes would exceed the format's limit of {limit}", self.path)


class ContainerInfo:
    """Size and digests of a written container, as the manifest records them.

    Attributes
    ----------
    size : int
        File size in bytes.
    head_sha256 : str
        SHA-256 of everything but the payload: the file's identity in references.
    payload_sha256 : str
        SHA-256 of the payload.
    """

    def __init__(self, size: int, head_sha256: str, payload_sha256: str, payload_bytes: int) -> None:
        self.size, self.head_sha256, self.payload_sha256 = size, head_sha256, payload_sha256
        self.payload_bytes = payload_bytes


class Container:
    """An open container: header and tables in memory, payload read on demand by position.

    Parameters
    ----------
    source : Source or Path
        The open file, which is closed with the container, or the path of one.
    size : int
        Size the manifest gives.
    head_sha256 : str
        Digest the manifest gives.
    seal : Seal or FileSeal, optional
        The archive's, if it is encrypted, or the file's own.

    Attributes
    ----------
    seal : FileSeal or None
        Of an encrypted file.

    Raises
    ------
    GoneError
        If the file is missing.
    FormatError
        If it has another size, breaks the container rules, or its head has another digest.
    """

    def __init__(self, source: Source | Path, size: int, head_sha256: str, seal: Seal | FileSeal | None = None) -> None:
        self.source = source if isinstance(source, Source) else FileSource(source)
        self.path = self.source.path
        try:
            self._open(size, head_sha256)
            self._unseal(seal)
        except BaseException:
            self.close()
            raise

    def _open(self, size: int, head_sha256: str) -> None:
        if self.source.size != size:
            raise FormatError(f"file has {self.source.size} bytes, the manifest says {size}", self.path)
        prefix = self.source.read(0, min(8, size))
        header_size = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
        if not 2 <= header_size <= min(MAX_HEADER_BYTES, size - 8):
            raise FormatError("header length is out of range", self.path)
        header_bytes = self.source.read(8, header_size)
        entries, self.metadata = parse_header(header_bytes, size - 8 - header_size, self.path)
        dtype, _, begin, end = entries.get(PAYLOAD, ("", (), 0, -1))
        if dtype != "U8" or begin != 0 or end < 0:
            raise FormatError("unit.payload is missing or does not come first", self.path)
        self._payload_at, self.payload_bytes = 8 + header_size, end
        tail_bytes = size - 8 - header_size - end
        if tail_bytes > MAX_TABLE_BYTES:
            raise FormatError(f"tables of {tail_bytes} bytes exceed the limit", self.path)
        tail = self.source.read(8 + header_size + end, tail_bytes)
        if hashlib.sha256(prefix + header_bytes + tail).hexdigest() != head_sha256:
            raise FormatError("header and tables do not have the digest that the manifest gives", self.path)
        self.tables: dict[str, np.ndarray] = {}
        for name, (dtype, shape, first, last) in entries.items():
            if name not in (PAYLOAD, "padding"):
                self.tables[name] = np.frombuffer(tail[first - end : last - end], DTYPES[dtype]).reshape(shape)

    def _unseal(self, seal: Seal | FileSeal | None) -> None:
        self._stored_bytes, self._sealed, self.seal = self.payload_bytes, None, None
        if (HEADER in self.metadata) != (seal is not None):
            state = "encrypted" if seal is None else "not encrypted"
            raise FormatError(f"it is {state}, unlike the archive", self.path)
        if seal is None:
            return
        if self.metadata.get("format_version") != f"{FORMAT_VERSION[0]}.{MINOR_ENCRYPTION}":
            raise FormatError(f"format version {self.metadata.get('format_version')!r} is not supported", self.path)
        self.seal = seal.opened(parsed(self.metadata[HEADER].encode(), self.path), self.path)
        self.tables, self.metadata = open_tables(self.seal, self.tables, self.metadata, self.path)
        self._sealed = SealedUnits(self.seal, self.tables.get("unit.index"), self._stored_bytes, self.path)
        self.payload_bytes = self._sealed.payload_bytes

    def release(self) -> None:
        """Keep nothing open from now on but open the file for every read, for archives of very many files.

        Call it before others read the container.
        """
        self.source.release()

    @property
    def at_hand(self) -> bool:
        """Whether a read is done in no time."""
        return not self.source.distant

    @property
    def authentic(self) -> bool:
        """Whether payload bytes that are read have passed a check that is stronger than their units' checksums."""
        return self._sealed is not None

    def payload(self, offset: int, length: int) -> bytes:
        """Payload bytes ``[offset, offset + length)``; the range has been checked against `payload_bytes`."""
        if self._sealed is None:
            return self.source.read(self._payload_at + offset, length)
        return bytes(self._opened(offset, length))

    def _opened(self, offset: int, length: int) -> bytes | memoryview:
        assert self._sealed is not None
        first, last = self._sealed.covering(offset, offset + length)
        if not length or first >= last:
            return b""
        return self._sealed.open(first, last, self._stored(first, last), offset, offset + length)

    def _stored(self, first: int, last: int) -> memoryview:
        """Sealed bytes of units ``[first, last)``, valid in this thread until the next call."""
        assert self._sealed is not None
        begin, end = self._sealed.stored(first, last)
        stored = scratch.view(end - begin)
        self.source.read_into(stored, self._payload_at + begin)
        return stored

    def payload_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` with payload bytes from `offset` on; the range has been checked against `payload_bytes`."""
        if self._sealed is None:
            self.source.read_into(buffer, self._payload_at + offset)
            return
        end = offset + len(buffer)
        first, last = self._sealed.covering(offset, end)
        if not self._sealed.are_whole(first, last, offset, end):
            buffer[:] = self._opened(offset, len(buffer))
            return
        most = _OPENED_BYTES if self.at_hand else end - offset
        for begin, stop, part in self._sealed.runs(first, last, most):
            self._sealed.open_into(begin, stop, self._stored(begin, stop), buffer[part])

    def will_need(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Have payload bytes ``[begin, end)`` read ahead, where that can be."""
        if self._sealed is not None:
            spans = [self._sealed.covering(begin, end) for begin, end in ranges if end > begin]
            ranges = [self._sealed.stored(first, last) for first, last in spans if last > first]
        self.source.will_need([(self._payload_at + begin, self._payload_at + end) for begin, end in ranges])

    def mapped(self, offset: int, length: int) -> memoryview:
        """Payload bytes as `payload` gives them, in place, valid until `close`.

        Whoever shortens the file after this takes the process down that touches them.

        Raises
        ------
        FormatError
            If the file has become shorter.
        """
        if self._sealed is not None:
            return memoryview(self._opened(offset, length))
        return self.source.mapped(self._payload_at + offset, length)

    def in_file(self, offset: int) -> tuple[FileSource, int] | None:
        """The open file of this machine that holds the payload as it is, and where; None if there is none such."""
        if self._sealed is None and isinstance(self.source, FileSource) and self.source.fd >= 0:
            return self.source, self._payload_at + offset
        return None

    def payload_sha256(self) -> str:
        """SHA-256 of the payload as it is stored, read in pieces."""
        digest = hashlib.sha256()
        for offset in range(0, self._stored_bytes, 1 << 22):
            digest.update(self.source.read(self._payload_at + offset, min(1 << 22, self._stored_bytes - offset)))
        return digest.hexdigest()

    def table(self, name: str, dtype: np.dtype[Any]) -> np.ndarray:
        """A table of fixed-size records, stored as U8 ``[n, dtype.itemsize]``.

        Raises
        ------
        FormatError
            If it is missing or does not have that record size.
        """
        array = self.tables.get(name)
        if array is None or array.dtype != np.uint8 or array.ndim != 2 or array.shape[1] != dtype.itemsize:
            raise FormatError(f"table {name!r} is missing or malformed", self.path)
        return np.frombuffer(array.tobytes(), dtype)

    def array(self, name: str, dtype: str) -> np.ndarray:
        """A one-dimensional tensor of the given safetensors dtype.

        Raises
        ------
        FormatError
            If it is missing or has another dtype or rank.
        """
        array = self.tables.get(name)
        if array is None or array.dtype != DTYPES[dtype] or array.ndim != 1:
            raise FormatError(f"tensor {name!r} is missing or malformed", self.path)
        return array

    def close(self) -> None:
        """Close the file; harmless when repeated."""
        self.source.close()
