"""Differences to a reference: the part of the lossless codec that codes a prefix that another session stores too.

Equal tokens behind equal prefixes give equal caches up to kernel noise: a few words in ten thousand differ by one unit
in the last place. Words are mapped to integers in the order of the numbers they stand for, ``~w`` for a set sign bit
and ``w + 2^(W-1)`` otherwise, subtracted modulo ``2^W``, and folded to ``z``: 0, -1, 1, -2, ... become 0, 1, 2, 3, ...

Sparse body (few differences): element indices run over the keys ``[H, T, D_k]`` and then the values, in C order.

| bytes | content |
|---|---|
| 4 | u32 number of differences, at most a 64th of the elements |
| rest | per difference: LEB128 of ``4 * gap + min(z - 1, 3)``, and LEB128 of ``z - 4`` if ``z >= 4`` |

`gap` is the number of equal elements since the previous difference (since the start for the first).

Dense body: ``W / 8`` byte planes of all z, lowest byte first, in channel rows ``[R, N]``; per plane:

| bytes | content |
|---|---|
| 1 | 0: all bytes are zero, nothing follows; 1: ``R * N`` bytes follow; 2: rANS |
| 4, F | rANS only: u32 length F and zstd frame of u16 ``[2, 256]`` frequencies, of key rows and of value rows |
| 4, Z | rANS only: u32 length Z and the stream ``[R, N]`` |
"""

from __future__ import annotations

import struct
from typing import Any

import numba
import numpy as np

from pltpack.codec import planes, rans
from pltpack.codec.payload import Reader, expand, squeeze

#: Sparse bodies hold at most one difference per this many elements.
SPARSE = 64
#: One token in so many is looked at to estimate differences.
_SAMPLED = 32
_ZERO, _RAW, _RANS = 0, 1, 2

Words = tuple[np.ndarray, np.ndarray]


def ordered(words: np.ndarray) -> np.ndarray:
    """Words as unsigned integers in the order of their numbers."""
    sign = words.dtype.type(1 << (8 * words.itemsize - 1))
    out: np.ndarray = np.where(words & sign, ~words, words | sign)
    return out


def unordered(values: np.ndarray) -> np.ndarray:
    """Inverse of `ordered`."""
    sign = values.dtype.type(1 << (8 * values.itemsize - 1))
    return np.where(values & sign, values ^ sign, ~values)


def fold(words: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """The folded differences z, in the words' own type."""
    one, last = words.dtype.type(1), words.dtype.type(8 * words.itemsize - 1)
    step = ordered(words) - ordered(reference)
    out: np.ndarray = (step << one) ^ (words.dtype.type(0) - (step >> last))
    return out


def unfold(folded: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Inverse of `fold`."""
    one = folded.dtype.type(1)
    step = (folded >> one) ^ (folded.dtype.type(0) - (folded & one))
    return unordered(ordered(reference) + step)


@numba.njit(nogil=True, cache=True)
def _put(out: Any, at: int, value: Any) -> int:
    while value >= np.uint64(128):
        out[at] = np.uint8(value & np.uint64(127)) | np.uint8(128)
        value >>= np.uint64(7)
        at += 1
    out[at] = np.uint8(value)
    return at + 1


@numba.njit(nogil=True, cache=True)
def _write(positions: Any, folded: Any, out: Any) -> int:
    at, next_position = 0, 0
    for i in range(positions.size):
        z = np.uint64(folded[i])
        short = min(z - np.uint64(1), np.uint64(3))
        at = _put(out, at, np.uint64(positions[i] - next_position) * np.uint64(4) + short)
        if short == 3:
            at = _put(out, at, z - np.uint64(4))
        next_position = positions[i] + 1
    return at


@numba.njit(nogil=True, cache=True)
def _get(data: Any, at: int) -> tuple[int, Any]:
    value, shift = np.uint64(0), np.uint64(0)
    while at < data.size and shift < np.uint64(42):
        byte = np.uint64(data[at])
        at += 1
        value |= (byte & np.uint64(127)) << shift
        if byte < np.uint64(128):
            return at, value
        shift += np.uint64(7)
    return -1, value


@numba.njit(nogil=True, cache=True)
def _read(data: Any, elements: int, largest: int, positions: Any, folded: Any) -> int:
    """Bytes read, or -1 if an index or a difference is out of range or the data end early."""
    at, next_position = 0, np.int64(0)
    for i in range(positions.size):
        at, code = _get(data, at)
        if at < 0:
            return -1
        position = next_position + np.int64(code >> np.uint64(2))
        z = np.int64(code & np.uint64(3)) + 1
        if z == 4:
            at, extra = _get(data, at)
            if at < 0:
                return -1
            z += np.int64(extra)
        if position >= elements or z > largest:
            return -1
        positions[i], folded[i] = position, z
        next_position = position + 1
    return at


def encode_sparse(words: Words, reference: Words) -> bytes | None:
    """The sparse body, empty if nothing differs, or None if too much differs."""
    differs = [np.flatnonzero(a != b) for a, b in zip(words, reference, strict=True)]
    count = len(differs[0]) + len(differs[1])
    if count * SPARSE > words[0].size + words[1].size:
        return None
    if count == 0:
        return b""
    folded = []
    for ours, theirs, at in zip(words, reference, differs, strict=True):
        where = np.unravel_index(at, ours.shape)
        folded.append(fold(ours[where], theirs[where]))
    positions = np.concatenate([differs[0], differs[1] + np.int64(words[0].size)])
    out = np.empty(12 * count, dtype=np.uint8)
    end = _write(positions, np.concatenate(folded).astype(np.uint64), out)
    return struct.pack("<I", count) + out[:end].tobytes()


def decode_sparse(reader: Reader, words: Words, reference: Words) -> None:
    """Fill `words` from the reference and a sparse body."""
    elements = words[0].size + words[1].size
    count = reader.u32()
    if not 0 < count * SPARSE <= elements:
        raise ValueError("number of differences is out of range")
    rest = reader.rest()
    positions, folded = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
    data = np.frombuffer(rest, dtype=np.uint8)
    data.flags.writeable = False
    if _read(data, elements, (1 << 8 * words[0].itemsize) - 1, positions, folded) != len(data):
        raise ValueError("differences are damaged")
    split = int(np.searchsorted(positions, words[0].size))
    for out, base, at, z in ((words[0], reference[0], positions[:split], folded[:split]),
                             (words[1], reference[1], positions[split:] - words[0].size, folded[split:])):  # fmt: skip
        np.copyto(out, base)
        where = np.unravel_index(at, out.shape)
        out[where] = unfold(z.astype(out.dtype), base[where])


def channel_rows(words: Words) -> np.ndarray:
    """Keys ``[H, T, D_k]`` and values ``[H, T, D_v]`` as rows ``[H * (D_k + D_v), T]``."""
    channels = words[0].shape[0] * (words[0].shape[2] + words[1].shape[2])
    rows = np.empty((channels, words[0].shape[1]), dtype=words[0].dtype)
    fill_rows(words, rows)
    return rows


def fill_rows(words: Words, rows: np.ndarray) -> None:
    """As `channel_rows`, into an array."""
    split = words[0].shape[0] * words[0].shape[2]
    planes.to_rows(words[0], rows[:split])
    planes.to_rows(words[1], rows[split:])


def spread_rows(rows: np.ndarray, words: Words) -> None:
    """Inverse of `channel_rows`."""
    split = words[0].shape[0] * words[0].shape[2]
    planes.from_rows(rows[:split], words[0])
    planes.from_rows(rows[split:], words[1])


@numba.njit(nogil=True, cache=True)
def fold_in_place(rows: Any, reference: Any) -> None:
    """As `fold`, for rows ``[R, N]`` of words of 16 bits, in place."""
    for r in range(rows.shape[0]):
        row, base = rows[r], reference[r]
        for n in range(row.size):
            a, b = np.int32(row[n]), np.int32(base[n])
            a ^= np.int32(0x8000) | -(a >> np.int32(15))
            b ^= np.int32(0x8000) | -(b >> np.int32(15))
            step = np.int32((a - b) << np.int32(16)) >> np.int32(16)
            row[n] = np.uint16(step << np.int32(1) ^ step >> np.int32(31))


@numba.njit(nogil=True, cache=True)
def _counts(plane: Any) -> Any:
    counts = np.zeros(256, np.int64)
    for r in range(plane.shape[0]):
        row = plane[r]
        for n in range(row.size):
            counts[row[n]] += 1
    return counts


def encode_dense(words: Words, reference: Words) -> bytes:
    """The dense body."""
    rows, base = channel_rows(words), channel_rows(reference)
    if rows.dtype == np.uint16:
        fold_in_place(rows, base)
        folded = rows
    else:
        folded = fold(rows, base)
    split = words[0].shape[0] * words[0].shape[2]
    out = []
    for byte in range(folded.itemsize):
        plane = (folded >> folded.dtype.type(8 * byte)).astype(np.uint8)
        if not plane.any():
            out.append(bytes([_ZERO]))
            continue
        counts = [_counts(part) for part in (plane[:split], plane[split:])]
        freqs = rans.normalize(np.array(counts))
        stream = rans.encode(plane, _table_of_row(len(plane), split), freqs)
        model = squeeze(freqs.astype("<u2").tobytes())
        if len(model) + len(stream) + 8 < plane.size:
            out += [bytes([_RANS]), struct.pack("<I", len(model)), model, struct.pack("<I", len(stream)), stream]
        else:
            out.append(bytes([_RAW]) + plane.tobytes())
    return b"".join(out)


def size_of(words: Words, reference: Words) -> float:
    """Bits of a folded difference without its leading zeros, on average over a part of the words of 16 bits."""
    bits: float = sum(float(_bits(a, b)) for a, b in zip(words, reference, strict=True))
    sampled: int = -(-words[0].shape[1] // _SAMPLED)
    return bits / max(sampled * int(sum(part.shape[0] * part.shape[2] for part in words)), 1)


@numba.njit(nogil=True, cache=True)
def _bits(words: Any, reference: Any) -> Any:
    total = np.int64(0)
    floats = np.empty(words.shape[2], np.float32)
    bits = floats.view(np.uint32)
    for h in range(words.shape[0]):
        for t in range(0, words.shape[1], _SAMPLED):
            row, base = words[h, t], reference[h, t]
            for d in range(row.size):
                a, b = np.int32(row[d]), np.int32(base[d])
                a = np.int32(0xFFFF) - a if a & np.int32(0x8000) else a | np.int32(0x8000)
                b = np.int32(0xFFFF) - b if b & np.int32(0x8000) else b | np.int32(0x8000)
                floats[d] = np.float32(np.int32(2) * abs(a - b))
            for d in range(row.size):
                # The exponent tells how many bits an integer has.
                total += max(np.int32(bits[d] >> np.uint32(23)) - np.int32(126), np.int32(0))
    return total


def decode_dense(reader: Reader, words: Words, reference: Words) -> None:
    """Fill `words` from the reference and a dense body."""
    base = channel_rows(reference)
    split = words[0].shape[0] * words[0].shape[2]
    folded = np.zeros_like(base)
    for byte in range(base.itemsize):
        kind = reader.u8()
        if kind == _ZERO:
            continue
        if kind == _RAW:
            plane = reader.array(base.size, "u1").reshape(base.shape)
        elif kind == _RANS:
            model = expand(reader.take(reader.u32()), 1024)
            tables = rans.decode_tables(np.frombuffer(model, dtype="<u2").reshape(2, 256))
            plane = np.empty(base.shape, dtype=np.uint8)
            rans.decode(reader.take(reader.u32()), _table_of_row(len(base), split), tables, plane)
        else:
            raise ValueError("difference plane is of an unknown kind")
        folded |= plane.astype(base.dtype) << base.dtype.type(8 * byte)
    reader.end()
    spread_rows(unfold(folded, base), words)


def _table_of_row(rows: int, split: int) -> np.ndarray:
    return (np.arange(rows) >= split).astype(np.int64)
