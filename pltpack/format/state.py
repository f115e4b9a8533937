"""Codec states: named arrays in one compressed blob (spec/format.md, "Codec states")."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import zstandard

from pltpack.format import json_text

#: Most bytes of one state, decompressed.
MAX_STATE_BYTES = 1 << 28
#: Longest header of a state.
MAX_HEADER_BYTES = 1 << 20
MAX_AXES = 4
_DTYPES: dict[str, np.dtype[Any]] = {
    "U8": np.dtype("u1"), "I8": np.dtype("i1"), "U16": np.dtype("<u2"), "I16": np.dtype("<i2"),
    "U32": np.dtype("<u4"), "I32": np.dtype("<i4"), "F16": np.dtype("<f2"), "F32": np.dtype("<f4"),
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
# From this size on, what takes a fifth of the time of level 12 and is as small on profiles: few long matches among
# small integers, which an entropy coder serves best.
_LARGE = 1 << 20
_SHAPE = {"window_log": 20, "hash_log": 18, "chain_log": 18, "search_log": 5, "min_match": 6}


def pack(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """Pack named arrays: a zstd frame of u32 header length, JSON ``[[name, dtype, shape], …]``, data in that order."""
    items = sorted(arrays.items())
    header = json.dumps(
        [[name, _NAMES[array.dtype.newbyteorder("<") if array.dtype.itemsize > 1 else array.dtype], list(array.shape)]
         for name, array in items],
        separators=(",", ":"),
    ).encode()  # fmt: skip
    body = b"".join(np.ascontiguousarray(a, a.dtype.newbyteorder("<")).tobytes() for _, a in items)
    data = struct.pack("<I", len(header)) + header + body
    return np.frombuffer(_compressor(len(data)).compress(data), np.uint8)


def unpack(blob: np.ndarray) -> dict[str, np.ndarray]:
    """Inverse of `pack`.

    Raises
    ------
    ValueError
        If the blob is damaged or larger than allowed.
    """
    frame = blob.tobytes()
    try:
        size = zstandard.frame_content_size(frame)
        if not 4 <= size <= MAX_STATE_BYTES:
            raise ValueError("codec state has a size out of range")
        data = zstandard.ZstdDecompressor().decompress(frame, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError:
        raise ValueError("codec state is not a valid zstd frame") from None
    if len(data) != size:
        raise ValueError("codec state is truncated")
    (length,) = struct.unpack_from("<I", data)
    if length > min(MAX_HEADER_BYTES, size - 4):
        raise ValueError("codec state has a header of a length out of range")
    try:
        header = json_text.parse(data[4 : 4 + length])
        out: dict[str, np.ndarray] = {}
        offset = 4 + length
        for name, dtype_name, shape in header:
            dtype = _DTYPES[dtype_name]
            if not (isinstance(name, str) and isinstance(shape, list) and len(shape) <= MAX_AXES and name not in out
                    and all(type(n) is int and 0 <= n < 1 << 31 for n in shape)):  # fmt: skip
                raise ValueError("codec state is malformed")
            count = 1
            for side in shape:
                count *= side
            if offset + count * dtype.itemsize > size:
                raise ValueError("codec state is truncated")
            out[name] = np.frombuffer(data, dtype, count, offset).reshape(shape)
            offset += count * dtype.itemsize
    except (TypeError, KeyError):
        raise ValueError("codec state is malformed") from None
    if offset != size:
        raise ValueError("codec state has trailing bytes")
    return out


def _compressor(size: int) -> zstandard.ZstdCompressor:
    if size < _LARGE:
        return zstandard.ZstdCompressor(level=12)
    settings = zstandard.ZstdCompressionParameters(strategy=zstandard.STRATEGY_GREEDY, **_SHAPE)
    return zstandard.ZstdCompressor(compression_params=settings)
