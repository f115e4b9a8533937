"""Take archives apart and put them together again with every digest recomputed, to break what is behind the digests."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from pltpack.format import state as state_format
from pltpack.format import tables

Bytes = Callable[[bytes], bytes]
DTYPES = {"U8": "u1", "I32": "<i4", "U32": "<u4", "U64": "<u8"}
RECORDS = {"unit.index": tables.UNIT, "map": tables.RUN, "trie.nodes": tables.NODE}


@dataclasses.dataclass
class Part:
    """One container taken apart.

    Attributes
    ----------
    metadata : dict
    tensors : dict
        Arrays by name, in the order of the file.
    header : callable or None
        Changes the header's JSON object before it is written.
    text : callable or None
        Changes the header's bytes.
    raw : callable or None
        Changes the whole file before its digests are computed.
    after : callable or None
        Changes the whole file afterwards: the digests no longer fit.
    missing : bool
        Do not write the file.
    """

    metadata: dict[str, str]
    tensors: dict[str, np.ndarray]
    header: Callable[[dict[str, Any]], None] | None = None
    text: Bytes | None = None
    raw: Bytes | None = None
    after: Bytes | None = None
    missing: bool = False

    @classmethod
    def read(cls, path: Path) -> Part:
        """Take a sound file apart."""
        data = path.read_bytes()
        (length,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8 : 8 + length])
        metadata = header.pop("__metadata__")
        tensors = {}
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            first, last = entry["data_offsets"]
            body = data[8 + length + first : 8 + length + last]
            tensors[name] = np.frombuffer(body, DTYPES[entry["dtype"]]).reshape(entry["shape"]).copy()
        return cls(metadata, tensors)

    def table(self, name: str) -> np.ndarray:
        """A view of a table's records, to be changed."""
        return self.tensors[name].reshape(-1).view(RECORDS[name])

    def replace(self, name: str, records: np.ndarray) -> None:
        """Put other records in a table's place."""
        self.tensors[name] = tables.as_bytes(records).copy()

    def items(self, key: str) -> list[Any]:
        """A list in the metadata."""
        return list(json.loads(self.metadata[key]))

    def set_items(self, key: str, items: Any) -> None:
        """Change a list in the metadata."""
        self.metadata[key] = json.dumps(items, separators=(",", ":"))

    def payload(self, index: int) -> bytes:
        """The payload of a unit."""
        unit = self.table("unit.index")[index]
        first = int(unit["offset"])
        return self.tensors["unit.payload"][first : first + int(unit["length"])].tobytes()

    def set_payload(self, index: int, payload: bytes) -> None:
        """Change the payload of a unit, its checksum and what follows from its length."""
        count = len(self.table("unit.index"))
        parts = [payload if i == index else self.payload(i) for i in range(count)]
        units = self.table("unit.index")
        units["length"] = [len(part) for part in parts]
        units["offset"] = np.cumsum(units["length"]) - units["length"]
        units["checksum"][index] = xxhash.xxh3_64_intdigest(payload)
        self.tensors["unit.payload"] = np.frombuffer(b"".join(parts), np.uint8)

    def change_state(self, change: Callable[[dict[str, np.ndarray]], Any], index: int = 0) -> None:
        """Change the arrays of a codec state."""
        arrays = {k: v.copy() for k, v in state_format.unpack(self.tensors[f"codec.state.{index}"]).items()}
        change(arrays)
        self.tensors[f"codec.state.{index}"] = state_format.pack(arrays)

    def build(self) -> tuple[bytes, str, str]:
        """The file, and the digests of its head and of its payload."""
        header: dict[str, Any] = {"__metadata__": self.metadata}
        names = {np.dtype(kind): name for name, kind in DTYPES.items()}
        chunks, at = [], 0
        for name, array in self.tensors.items():
            data = array.tobytes()
            if name == "padding":
                # Tables stay aligned when a payload changes its length.
                data = bytes(-at % 8)
                if not data:
                    continue
            shape = [len(data)] if name == "padding" else list(array.shape)
            header[name] = {"dtype": names[array.dtype], "shape": shape, "data_offsets": [at, at + len(data)]}
            chunks.append(data)
            at += len(data)
        if self.header is not None:
            self.header(header)
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        text = text if self.text is None else self.text(text)
        data = struct.pack("<Q", len(text)) + text + b"".join(chunks)
        size = len(self.tensors["unit.payload"]) if "unit.payload" in self.tensors else 0
        split = 8 + len(text)
        payload = hashlib.sha256(data[split : split + size]).hexdigest()
        data = data if self.raw is None else self.raw(data)
        head = hashlib.sha256(data[:split] + data[split + size :]).hexdigest()
        return data, head, payload


class Surgery:
    """An archive taken apart.

    Attributes
    ----------
    body : dict
        Of the manifest.
    parts : dict of str to Part
        Containers by file name.
    manifest : callable or None
        Changes the manifest's bytes, whose checksum no longer fits.
    entries : callable or None
        Changes the body after the digests of files have been put in.
    last : callable or None
        Changes the finished folder.
    """

    def __init__(self, archive: Path) -> None:
        self.body: dict[str, Any] = json.loads((archive / "MANIFEST.json").read_text())["body"]
        entries = [*self.body["libraries"], *self.body["sessions"]]
        self.parts = {entry["file"]: Part.read(archive / entry["file"]) for entry in entries}
        self.manifest: Bytes | None = None
        self.entries: Callable[[dict[str, Any]], Any] | None = None
        self.last: Callable[[Path], Any] | None = None

    @property
    def library(self) -> Part:
        """The first library segment."""
        return self.parts[self.body["libraries"][0]["file"]]

    def shard(self, index: int = 0) -> Part:
        """A session's shard."""
        return self.parts[self.body["sessions"][index]["file"]]

    def save(self, folder: Path) -> None:
        """Write the archive; references between files follow their new digests."""
        (folder / "shards").mkdir(parents=True)
        renamed: dict[str, str] = {}
        for entry in [*self.body["libraries"], *self.body["sessions"]]:
            part = self.parts[entry["file"]]
            if "libraries" in part.metadata:
                part.set_items("libraries", [renamed.get(digest, digest) for digest in part.items("libraries")])
            data, head, payload = part.build()
            renamed[entry["head_sha256"]] = head
            entry.update(bytes=len(data), head_sha256=head, payload_sha256=payload)
            if not part.missing:
                (folder / entry["file"]).write_bytes(data if part.after is None else part.after(data))
        if self.entries is not None:
            self.entries(self.body)
        data = manifest_bytes(self.body)
        (folder / "MANIFEST.json").write_bytes(data if self.manifest is None else self.manifest(data))
        if self.last is not None:
            self.last(folder)


def manifest_bytes(body: Any) -> bytes:
    """A manifest whose checksum fits."""
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    return json.dumps({"body": body, "sha256": digest}, indent=1, sort_keys=True).encode() + b"\n"


def make_pipe(path: Path) -> None:
    """Put a named pipe in a file's place."""
    path.unlink()
    os.mkfifo(path)
