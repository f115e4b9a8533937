"""What stands in a unit of the transform codec before its coefficients (spec/codecs.md), and nibbles."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from pltpack.codec import rate, scaling
from pltpack.codec.base import KeyValue
from pltpack.codec.payload import Reader

#: Flags, base step, and the number of exact tokens.
HEADER = struct.Struct("<BhH")


def exact_rows(arrays: Sequence[KeyValue]) -> np.ndarray:
    """Bits of a unit's tokens, ``[T, rows]``, keys as they are stored; a copy, of the widest of the dtypes."""
    parts = []
    for keys, values in arrays:
        for array in (keys, values):
            kind = np.dtype(f"u{array.dtype.itemsize}")
            parts.append(np.ascontiguousarray(array.transpose(1, 0, 2)).view(kind).reshape(array.shape[1], -1))
    return np.concatenate(parts, axis=1)


def unit_head(payload: memoryview, tokens: int) -> tuple[int, int, np.ndarray, np.ndarray]:
    """What a unit's payload says before its coefficients: flags, base step, exact tokens, and classes of all.

    Raises
    ------
    ValueError
        If it is malformed.
    """
    return read_head(Reader(payload), tokens)


def read_head(reader: Reader, tokens: int) -> tuple[int, int, np.ndarray, np.ndarray]:
    """See `unit_head`; the reader goes on behind it."""
    flags, log_step, count = HEADER.unpack(reader.take(HEADER.size))
    if abs(log_step) > rate.MAX_LOG_STEP:
        raise ValueError("unit has a step out of range")
    marks = reader.array(count, "<u2").astype(np.int64)
    if count and (marks[-1] >= tokens or (np.diff(marks) <= 0).any()):
        raise ValueError("exact tokens are out of order")
    return flags, log_step, marks, unpack_nibbles(reader.take((tokens + 1) // 2), tokens)


def read_logs(reader: Reader, logs: np.ndarray) -> np.ndarray:
    """Scales moved by what a payload says next."""
    count = scaling.count(logs)
    return scaling.shifted(logs, unpack_nibbles(reader.take((count + 1) // 2), count))


def pack_nibbles(values: np.ndarray) -> bytes:
    """Numbers below 16, two a byte, the first in the low half."""
    padded = np.zeros((len(values) + 1) // 2 * 2, np.uint8)
    padded[: len(values)] = values
    return (padded[::2] | padded[1::2] << 4).tobytes()


def unpack_nibbles(data: memoryview, count: int) -> np.ndarray:
    """Inverse of `pack_nibbles`: int64."""
    raw = np.frombuffer(data, np.uint8)
    found: np.ndarray = np.stack([raw & 15, raw >> 4], axis=1).reshape(-1)[:count].astype(np.int64)
    return found
