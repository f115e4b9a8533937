"""Containers whose units, tables and metadata are encrypted one by one (spec/format.md, "Encryption").

What lies above sees plaintext: payload offsets and lengths are those of the units before they were sealed, which made
each 16 bytes longer.
"""

from __future__ import annotations

import bisect
import os
import struct
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from pltpack.errors import FormatError
from pltpack.format.header import DTYPES
from pltpack.format.sealing import NONCE, TAG_BYTES, FileSeal, altered, canonical, decoded, encoded, parsed

#: Metadata keys of an encrypted container.
HEADER, SEALED = "encryption", "sealed"
# As much as readers ask for at once, and its tags.
_MOST_SCRATCH = 1 << 21
_BOUND = struct.Struct("<QQ")
_UNIT = b"unit"
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# Where a record of the unit index has its offset and length (spec/format.md, "Unit index").
_RECORD = np.dtype({"names": ["offset", "length"], "formats": ["<u8", "<u8"], "offsets": [0, 8], "itemsize": 48})


def seal_unit(seal: FileSeal, number: int, offset: int, payload: bytes | memoryview) -> memoryview:
    """A unit's bytes in the file, valid in this thread until the next call."""
    out = scratch.view(len(payload) + TAG_BYTES)
    seal.seal_into(_UNIT, number, payload, out, _BOUND.pack(offset, len(payload)))
    return out


def seal_tables(
    seal: FileSeal, version: str, tables: Mapping[str, np.ndarray], metadata: Mapping[str, str]
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Tables and metadata as the file holds them."""
    out, shapes = {}, {}
    for number, (name, array) in enumerate(sorted(tables.items())):
        dtype = array.dtype.newbyteorder("<") if array.dtype.itemsize > 1 else array.dtype
        data = np.ascontiguousarray(array, dtype).tobytes()
        out[name] = np.frombuffer(seal.seal(b"tabl", number, data, name.encode()), np.uint8)
        shapes[name] = [_NAMES[dtype], list(array.shape)]
    kind = metadata["kind"]
    inner = canonical({"metadata": dict(metadata), "tensors": shapes})
    return out, {"format_version": version, "kind": kind, HEADER: canonical(seal.header).decode(),
                 SEALED: encoded(seal.seal(b"head", 0, inner, kind.encode()))}  # fmt: skip


def open_tables(
    seal: FileSeal, tables: Mapping[str, np.ndarray], metadata: Mapping[str, str], path: os.PathLike[str]
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Inverse of `seal_tables`.

    Raises
    ------
    FormatError
        If anything was altered, or is not in the form that it must have.
    """
    kind = metadata.get("kind", "")
    inner = parsed(seal.open(b"head", 0, decoded(metadata.get(SEALED), path), path, kind.encode()), path)
    if not isinstance(inner, dict) or set(inner) != {"metadata", "tensors"}:
        raise FormatError("the sealed head is malformed", path)
    plain, shapes = inner["metadata"], inner["tensors"]
    whole = isinstance(plain, dict) and isinstance(shapes, dict) and all(isinstance(v, str) for v in plain.values())
    if not whole or set(shapes) != set(tables) or plain.get("kind") != kind:
        raise FormatError("the sealed head does not fit the file", path)
    out = {}
    for number, name in enumerate(sorted(tables)):
        data = seal.open(b"tabl", number, tables[name].tobytes(), path, name.encode())
        out[name] = _array(data, shapes[name], name, path)
    return out, dict(plain)


def _array(data: bytes, form: Any, name: str, path: os.PathLike[str]) -> np.ndarray:
    try:
        dtype, shape = DTYPES[form[0]], tuple(form[1])
        if len(form) == 2 and len(shape) <= 2 and all(type(side) is int and side >= 0 for side in shape):
            return np.frombuffer(data, dtype).reshape(shape)
    except (KeyError, TypeError, IndexError, ValueError):
        pass
    raise FormatError(f"tensor {name!r} does not have the form that the sealed head gives", path)


class SealedUnits:
    """Where the units of an encrypted payload are.

    Parameters
    ----------
    seal : FileSeal
    index : ndarray or None
        The unit index, as stored: U8 ``[n, 48]``.
    stored_bytes : int
        Size of the payload in the file.
    path : path-like

    Raises
    ------
    FormatError
        If the units do not cover the payload.
    """

    def __init__(self, seal: FileSeal, index: np.ndarray | None, stored_bytes: int, path: os.PathLike[str]) -> None:
        if index is None or index.dtype != np.uint8 or index.ndim != 2 or index.shape[1] != _RECORD.itemsize:
            raise FormatError("table 'unit.index' is missing or malformed", path)
        records = np.frombuffer(index.tobytes(), _RECORD)
        if (records["length"] > stored_bytes).any() or float(records["length"].sum(dtype=np.float64)) > stored_bytes:
            raise FormatError("units do not cover the payload", path)
        self._path = path
        ends = np.cumsum(records["length"].astype(np.int64))
        starts = ends - records["length"].astype(np.int64)
        self.payload_bytes = int(ends[-1]) if len(records) else 0
        if self.payload_bytes + TAG_BYTES * len(records) != stored_bytes or (records["offset"] != starts).any():
            raise FormatError("units do not cover the payload", path)
        # Lists and bytes: a small unit opens in less time than it takes to get one number out of an array.
        self._starts: list[int] = starts.tolist()
        self._ends: list[int] = ends.tolist()
        self._nonces = _with(_UNIT, np.arange(len(records), dtype=">u8"))
        self._bounds = _with(seal.bound_to(_UNIT), starts.astype("<u8"), (ends - starts).astype("<u8"))
        self._bound_bytes = len(seal.bound_to(_UNIT)) + _BOUND.size
        self._cipher, self._errors = seal.cipher, seal.errors

    def covering(self, offset: int, end: int) -> tuple[int, int]:
        """Numbers ``[first, last)`` of the units that hold payload bytes ``[offset, end)``."""
        first = bisect.bisect_right(self._ends, offset)
        return first, bisect.bisect_left(self._starts, end, first)

    def stored(self, first: int, last: int) -> tuple[int, int]:
        """Where units ``[first, last)`` are in the stored payload."""
        return self._starts[first] + TAG_BYTES * first, self._ends[last - 1] + TAG_BYTES * last

    def open(self, first: int, last: int, data: memoryview, offset: int, end: int) -> bytes | memoryview:
        """Payload bytes ``[offset, end)`` of stored units ``[first, last)``; `FormatError` if one was altered."""
        if last - first == 1:
            try:
                whole: bytes | bytearray = self._cipher.decrypt(self._nonce(first), data, self._bound(first))
            except self._errors:
                raise altered(_UNIT, first, self._path) from None
        else:
            whole = bytearray(self._ends[last - 1] - self._starts[first])
            self.open_into(first, last, data, memoryview(whole))
        begin = self._starts[first]
        if isinstance(whole, bytes) and (offset, end) == (begin, begin + len(whole)):
            return whole
        return memoryview(whole)[offset - begin : end - begin]

    def open_into(self, first: int, last: int, data: memoryview, out: memoryview) -> None:
        """All payload bytes of stored units ``[first, last)``; errors as of `open`."""
        # One loop over names of its own: at a few microseconds a unit, each look-up and each call is felt.
        decrypt, nonces, bounds, width, size = (
            self._cipher.decrypt_into, self._nonces, self._bounds, NONCE.size, self._bound_bytes
        )  # fmt: skip
        at, base = 0, self._starts[first]
        number = first
        try:
            for number, end in enumerate(self._ends[first:last], first):
                filled, end = self._starts[number] - base, end - base
                after = at + end - filled + TAG_BYTES
                decrypt(nonces[number * width : (number + 1) * width], data[at:after],
                        bounds[number * size : (number + 1) * size], out[filled:end])  # fmt: skip
                at = after
        except self._errors:
            raise altered(_UNIT, number, self._path) from None

    def _nonce(self, number: int) -> bytes:
        return self._nonces[number * NONCE.size : (number + 1) * NONCE.size]

    def _bound(self, number: int) -> bytes:
        return self._bounds[number * self._bound_bytes : (number + 1) * self._bound_bytes]

    def runs(self, first: int, last: int, most: int) -> Iterator[tuple[int, int, slice]]:
        """Cut units ``[first, last)`` into runs of at most so many bytes, or one unit; with their places in it."""
        base = self._starts[first]
        while first < last:
            stop = max(first + 1, bisect.bisect_right(self._ends, self._starts[first] + most, first, last))
            yield first, stop, slice(self._starts[first] - base, self._ends[stop - 1] - base)
            first = stop

    def are_whole(self, first: int, last: int, offset: int, end: int) -> bool:
        """Whether units ``[first, last)`` are just the payload bytes ``[offset, end)``."""
        return first < last and (self._starts[first], self._ends[last - 1]) == (offset, end)


def _with(prefix: bytes, *columns: np.ndarray) -> bytes:
    """Rows of numbers, each behind a prefix."""
    numbers = [(f"{number}", column.dtype) for number, column in enumerate(columns)]
    rows = np.empty(len(columns[0]), [("prefix", f"V{len(prefix)}"), *numbers])
    rows["prefix"] = np.void(prefix)
    for number, column in enumerate(columns):
        rows[f"{number}"] = column
    return rows.tobytes()


class Scratch(threading.local):
    """Memory in which a thread has sealed bytes, again and again: fresh pages cost more than to seal or open them."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def view(self, size: int) -> memoryview:
        """Some bytes, valid until the next call."""
        if size > _MOST_SCRATCH:
            return memoryview(bytearray(size))
        if len(self._bytes) < size:
            self._bytes = bytearray(_MOST_SCRATCH)
        return memoryview(self._bytes)[:size]


scratch = Scratch()
