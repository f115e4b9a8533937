"""The safetensors container: header checked before any data is touched, and header made for streaming writes.

The rules are those of the safetensors README: 8-byte little-endian length, a JSON object of at most 100,000,000 bytes,
tensors that cover the rest of the file without holes or overlaps, no duplicate names.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pltpack.dumps.base import FileStamp
from pltpack.errors import DumpError, PltpackError, UnsupportedError

#: Longest header that the format allows, in bytes.
MAX_HEADER = 100_000_000
# Parsed JSON is larger than its text; these bound it to a few hundred MB even for a header made to swell.
_MAX_BRACKETS = 1_000_000
_MAX_COMMAS = 1 << 23
_MAX_AXES = 16

_ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: dtype by its safetensors name, shape, and the file offset and length of its bytes."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    length: int


@dataclasses.dataclass(frozen=True)
class Header:
    """A checked header: tensors by name, string metadata, and the stamp of the file it came from."""

    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]
    stamp: FileStamp


def looks_like_safetensors(path: Path, head: bytes) -> bool:
    """Whether a file is meant to be safetensors, by name or by its first bytes."""
    plausible = len(head) > 8 and head[8:9] == b"{" and struct.unpack("<Q", head[:8])[0] <= MAX_HEADER
    return plausible or path.suffix.lower() == ".safetensors"


def holds_no_caches(path: Path, head: bytes) -> bool:
    """Whether a file is sound safetensors in which no tensor has the three axes that any cache has."""
    if not looks_like_safetensors(path, head):
        return False
    try:
        return all(len(tensor.shape) < 3 for tensor in read_header(path).tensors.values())
    except PltpackError:
        return False


def read_header(path: Path) -> Header:
    """Read and check a header against the file's size.

    Raises
    ------
    DumpError
        If the header breaks a rule of the format.
    UnsupportedError
        If a tensor has a dtype unknown here.
    """
    with open(path, "rb") as file:
        stamp = FileStamp.of(file.fileno())
        prefix = file.read(8)
        if len(prefix) < 8:
            raise DumpError("is too short for a safetensors file", path)
        (length,) = struct.unpack("<Q", prefix)
        if length > MAX_HEADER or 8 + length > stamp.size:
            raise DumpError(f"safetensors header of {length} bytes in a file of {stamp.size} bytes", path)
        text = file.read(length)
    if len(text) != length:
        raise DumpError("the file changed while it was read", path)
    try:
        data = _parse(text)
        metadata = _metadata(data.pop("__metadata__", {}))
        tensors = {name: _entry(name, entry, 8 + length) for name, entry in data.items()}
        _check_cover(tensors, 8 + length, stamp.size)
    except PltpackError as error:
        raise error.at(path) from None
    return Header(tensors, metadata, stamp)


def make_header(
    tensors: Sequence[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, TensorEntry]]:
    """Lay out a file.

    Wider dtypes come first, as the safetensors library has it, so that every tensor is aligned to its item size.

    Parameters
    ----------
    tensors : sequence of (name, dtype, shape)
    metadata : mapping of str to str

    Returns
    -------
    header : bytes
        Length prefix and JSON, padded with spaces to a multiple of 8.
    entries : dict
        Where each tensor's bytes go; the last one ends the file.
    """
    data: dict[str, Any] = {"__metadata__": dict(metadata)}
    relative: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
    end = 0
    for name, dtype, shape in sorted(tensors, key=lambda tensor: -_ITEM_BYTES[tensor[1]]):
        size = math.prod(shape) * _ITEM_BYTES[dtype]
        data[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        relative[name] = (dtype, tuple(shape), end, size)
        end += size
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise UnsupportedError(f"a safetensors header of {len(text)} bytes is longer than the format allows")
    start = 8 + len(text)
    entries = {
        name: TensorEntry(dtype, shape, start + offset, size) for name, (dtype, shape, offset, size) in relative.items()
    }
    return struct.pack("<Q", len(text)) + text, entries


def read_into(fd: int, offset: int, buffer: memoryview, path: str | os.PathLike[str]) -> None:
    """Fill `buffer` from a file offset; a file that ends early is a DumpError, not a short array."""
    done = 0
    while done < len(buffer):
        count = os.preadv(fd, [buffer[done : done + (1 << 30)]], offset + done)
        if count == 0:
            raise DumpError("the file ends before its data", path)
        done += count


def _parse(text: bytes) -> dict[str, Any]:
    if text.count(b"{") + text.count(b"[") > _MAX_BRACKETS or text.count(b",") > _MAX_COMMAS:
        raise DumpError("safetensors header has too many entries")
    if not text.startswith(b"{"):
        raise DumpError("safetensors header is not a JSON object")
    try:
        data = json.loads(text.decode(), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError):
        raise DumpError("safetensors header is not valid JSON") from None
    return dict(data)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        raise ValueError("duplicate name")
    return data


def _metadata(data: Any) -> dict[str, str]:
    if not isinstance(data, dict) or not all(isinstance(value, str) for value in data.values()):
        raise DumpError("safetensors metadata is not an object of strings")
    return data


def _entry(name: str, data: Any, start: int) -> TensorEntry:
    if not isinstance(data, dict) or set(data) != {"dtype", "shape", "data_offsets"}:
        raise DumpError(f"tensor {name!r} is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = data["dtype"], data["shape"], data["data_offsets"]
    if not (_is_sizes(shape) and len(shape) <= _MAX_AXES and _is_sizes(offsets) and len(offsets) == 2):
        raise DumpError(f"tensor {name!r} has a malformed shape or range")
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise UnsupportedError(f"tensor {name!r} has the unknown dtype {dtype!r}")
    first, last = offsets
    if last - first != math.prod(shape) * _ITEM_BYTES[dtype]:
        raise DumpError(f"tensor {name!r} is {dtype}{shape} but has {last - first} bytes")
    return TensorEntry(dtype, tuple(shape), start + first, last - first)


def _is_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 63 for value in values)


def _check_cover(tensors: Mapping[str, TensorEntry], start: int, size: int) -> None:
    end = start
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].length)):
        if tensor.offset != end:
            raise DumpError(f"tensor {name!r} leaves a hole or overlaps another")
        end += tensor.length
    if end != size:
        raise DumpError(f"tensors end at byte {end} of a file of {size} bytes")
