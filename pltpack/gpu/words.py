"""Kernels of the lossless codec: words split into symbols and low bits, and merged again, bit by bit.

Bitstream: `pltpack.codec.lossless`; on the CPU `pltpack.codec.planes`. Between symbols and the cache, words lie in
channel rows ``[R, N]``, a row of all tokens for each channel: one warp serves a row, and tiles of 32 by 32 words go
through shared memory between these rows and the vectors of a cache, so that both sides are read and written in runs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda, types

from pltpack.gpu import arithmetic  # noqa: F401 - teaches the simulator warps
from pltpack.gpu.device import WARPS
from pltpack.gpu.place import DIM, HEADS, SOURCE, TOKENS, place_of

# Columns of a table of units, int64: channels, tokens, the first of the unit's rows in arrays of rows, the first of
# its symbols and words, its channels' place in tables of channels, where its escapes (bytes) begin and how many they
# are, and where its planes of low bits begin (bytes).
(ROWS, LENGTH, ROW, WORD, CHANNEL, ESCAPES, ESCAPE_COUNT, PLANE0, PLANE1, PLANE2, UNIT_COLUMNS) = range(11)

_ALL = 0xFFFFFFFF
_TILE = 32
#: A tile for each warp of a block; a pitch of 33 keeps columns in different banks.
_TILES = (WARPS * _TILE, 33)


@cuda.jit(device=True)
def _low(data: Any, at: Any, row: Any, n: Any, length: Any, width: Any) -> Any:
    """Bits of column n of a row of a plane."""
    if width == 8:
        return np.int64(data[at + row * length + n])
    half = (length + 1) >> 1
    if n < half:
        return np.int64(data[at + row * half + n]) & 15
    return np.int64(data[at + row * half + n - half]) >> 4


@cuda.jit
def merge_kernel(
    data: Any, units: Any, start: Any, mirror: Any, table: Any, escape: Any, planes: Any, layout: Any, symbols: Any,
    escapes_before: Any, rows: Any, damaged: Any
) -> None:  # fmt: skip
    """Words in channel rows from symbols, escapes and low bits.

    Parameters
    ----------
    data : uint8 ``[...]``
        Payloads.
    units : int64 ``[n, UNIT_COLUMNS]``
    start, mirror : uint16 ``[channels]``
        See `pltpack.codec.planes.split`.
    table : uint8 ``[channels]``
    escape : int32 ``[C]``
    planes : int32 ``[3, 2]``
        Shift and width of each plane of low bits, width 0 for none.
    layout : int32 ``[2]``
        Bits of a word, and how many of them are low.
    symbols, escapes_before
        From `rans.decode_kernel`.
    rows : uint8, uint16 or uint32 ``[...]``
        Filled.
    damaged : uint8 ``[n]``
        Set to 1 where an escape is out of range.
    """
    unit = units[cuda.blockIdx.y]
    lane, warps = np.int32(cuda.threadIdx.x & 31), cuda.blockDim.x >> 5
    below = np.uint32((np.int64(1) << np.int64(lane)) - 1)
    bits, low, length = np.int64(layout[0]), np.int64(layout[1]), unit[LENGTH]
    top_bits = bits - low
    mask = (np.int64(1) << (top_bits - 1)) - 1
    for row in range(cuda.blockIdx.x * warps + (cuda.threadIdx.x >> 5), unit[ROWS], cuda.gridDim.x * warps):
        channel = unit[CHANNEL] + row
        first_top, flip, code = np.int64(start[channel]), np.int64(mirror[channel]), escape[table[channel]]
        used = np.int64(escapes_before[unit[ROW] + row])
        for first in range(0, length, 32):
            n = first + lane
            symbol = np.int64(-2)
            if n < length:
                symbol = np.int64(symbols[unit[WORD] + row * length + n])
            votes = np.uint32(cuda.ballot_sync(_ALL, symbol == code))
            if n < length:
                top = (((symbol & 127) + first_top) & mask) | (((symbol & 128) ^ flip) << (top_bits - 8))
                if symbol == code:
                    number = used + np.int64(cuda.popc(votes & below))
                    top = np.int64(0)
                    if number < unit[ESCAPE_COUNT]:
                        at = unit[ESCAPES] + 2 * number
                        top = np.int64(data[at]) | np.int64(data[at + 1]) << 8
                    if top >> top_bits != 0:
                        damaged[cuda.blockIdx.y] = 1
                        top = np.int64(0)
                word = top << low
                for plane in range(3):
                    if planes[plane, 1] > 0:
                        found = _low(data, unit[PLANE0 + plane], row, n, length, planes[plane, 1])
                        word |= found << np.int64(planes[plane, 0])
                rows[unit[WORD] + row * length + n] = word
            used += np.int64(cuda.popc(votes))


@cuda.jit
def spread_kernel(rows: Any, targets: Any, pages: Any, words: Any) -> None:
    """Channel rows to vectors in their places: ``[H · D, T]`` from each target's source on (see `place`)."""
    tile = cuda.shared.array(_TILES, types.uint32)
    target = targets[cuda.blockIdx.y]
    lane, warp, warps = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5, cuda.blockDim.x >> 5
    dim, tokens = target[DIM], target[TOKENS]
    wide, long = (dim + 31) >> 5, (tokens + 31) >> 5
    for number in range(cuda.blockIdx.x * warps + warp, target[HEADS] * wide * long, cuda.gridDim.x * warps):
        head, rest = number // (wide * long), number % (wide * long)
        d0, t0 = (rest // long) << 5, (rest % long) << 5
        for i in range(min(32, dim - d0)):
            if t0 + lane < tokens:
                tile[warp * _TILE + i, lane] = rows[target[SOURCE] + (head * dim + d0 + i) * tokens + t0 + lane]
        cuda.syncwarp()
        for j in range(min(32, tokens - t0)):
            if d0 + lane < dim:
                words[place_of(target, pages, head, t0 + j) + d0 + lane] = tile[warp * _TILE + lane, j]
        cuda.syncwarp()


@cuda.jit
def gather_kernel(words: Any, targets: Any, pages: Any, rows: Any) -> None:
    """Inverse of `spread_kernel`."""
    tile = cuda.shared.array(_TILES, types.uint32)
    target = targets[cuda.blockIdx.y]
    lane, warp, warps = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5, cuda.blockDim.x >> 5
    dim, tokens = target[DIM], target[TOKENS]
    wide, long = (dim + 31) >> 5, (tokens + 31) >> 5
    for number in range(cuda.blockIdx.x * warps + warp, target[HEADS] * wide * long, cuda.gridDim.x * warps):
        head, rest = number // (wide * long), number % (wide * long)
        d0, t0 = (rest // long) << 5, (rest % long) << 5
        for j in range(min(32, tokens - t0)):
            if d0 + lane < dim:
                tile[warp * _TILE + j, lane] = words[place_of(target, pages, head, t0 + j) + d0 + lane]
        cuda.syncwarp()
        for i in range(min(32, dim - d0)):
            if t0 + lane < tokens:
                rows[target[SOURCE] + (head * dim + d0 + i) * tokens + t0 + lane] = tile[warp * _TILE + lane, i]
        cuda.syncwarp()


@cuda.jit
def split_kernel(
    rows: Any, units: Any, start: Any, mirror: Any, table: Any, escape: Any, plain: Any, planes: Any, layout: Any,
    symbols: Any, low_bits: Any, escapes_in: Any
) -> None:  # fmt: skip
    """Symbols and planes of low bits of words in channel rows, and how many words of each row escape.

    Parameters
    ----------
    rows, units, start, mirror, table, escape, planes, layout
        As of `merge_kernel`; planes are places in `low_bits`.
    plain : uint8 ``[C, 256]``
        1 for symbols that stand for themselves.
    symbols, low_bits : uint8 ``[...]``
        Filled.
    escapes_in : int32 ``[rows]``
        Filled.
    """
    unit = units[cuda.blockIdx.y]
    lane, warps = np.int32(cuda.threadIdx.x & 31), cuda.blockDim.x >> 5
    bits, low, length = np.int64(layout[0]), np.int64(layout[1]), unit[LENGTH]
    top_bits = bits - low
    mask = (np.int64(1) << (top_bits - 1)) - 1
    half = (length + 1) >> 1
    for row in range(cuda.blockIdx.x * warps + (cuda.threadIdx.x >> 5), unit[ROWS], cuda.gridDim.x * warps):
        channel = unit[CHANNEL] + row
        first_top, flip = np.int64(start[channel]), np.int64(mirror[channel])
        kind = np.int64(table[channel])
        at, escaped = unit[WORD] + row * length, np.int32(0)
        for first in range(0, length, 32):
            n = first + lane
            far = False
            if n < length:
                top = np.int64(rows[at + n]) >> low
                t = (top - first_top) & mask
                symbol = (t & 127) | (((top >> (top_bits - 8)) & 128) ^ flip)
                far = bool(t >= 128 or plain[kind, symbol] == 0)
                if far:
                    symbol = np.int64(escape[kind])
                symbols[at + n] = symbol
            escaped = np.int32(escaped + np.int32(cuda.popc(np.uint32(cuda.ballot_sync(_ALL, far)))))
        if lane == 0:
            escapes_in[unit[ROW] + row] = escaped
        for plane in range(3):
            shift, width = np.int64(planes[plane, 0]), planes[plane, 1]
            if width == 8:
                for column in range(lane, length, 32):
                    byte = (np.int64(rows[at + column]) >> shift) & 255
                    low_bits[unit[PLANE0 + plane] + row * length + column] = byte
            elif width == 4:
                for column in range(lane, half, 32):
                    byte = (np.int64(rows[at + column]) >> shift) & 15
                    if half + column < length:
                        byte |= ((np.int64(rows[at + half + column]) >> shift) & 15) << 4
                    low_bits[unit[PLANE0 + plane] + row * half + column] = byte


@cuda.jit
def escapes_kernel(
    rows: Any, units: Any, start: Any, table: Any, escape: Any, layout: Any, symbols: Any, escapes_before: Any,
    escapes: Any
) -> None:  # fmt: skip
    """Tops of the words that escape, uint16, in order; `escapes_before` counts those of all rows before each row."""
    unit = units[cuda.blockIdx.y]
    lane, warps = np.int32(cuda.threadIdx.x & 31), cuda.blockDim.x >> 5
    below = np.uint32((np.int64(1) << np.int64(lane)) - 1)
    low, length = np.int64(layout[1]), unit[LENGTH]
    for row in range(cuda.blockIdx.x * warps + (cuda.threadIdx.x >> 5), unit[ROWS], cuda.gridDim.x * warps):
        code = escape[table[unit[CHANNEL] + row]]
        at, used = unit[WORD] + row * length, np.int64(escapes_before[unit[ROW] + row])
        for first in range(0, length, 32):
            n = first + lane
            far = False
            if n < length:
                far = symbols[at + n] == code
            votes = np.uint32(cuda.ballot_sync(_ALL, far))
            if far:
                escapes[used + np.int64(cuda.popc(votes & below))] = np.int64(rows[at + n]) >> low
            used += np.int64(cuda.popc(votes))


_TABLE, _BYTES, _SHORTS, _INTS = types.int64[:, ::1], types.uint8[::1], types.uint16[::1], types.int32[::1]
_PLANES, _PLAIN = types.int32[:, ::1], types.uint8[:, ::1]
SIGNATURES = {
    merge_kernel: (_BYTES, _TABLE, _SHORTS, _SHORTS, _BYTES, _INTS, _PLANES, _INTS, _BYTES, _INTS, _SHORTS, _BYTES),
    spread_kernel: (_SHORTS, _TABLE, _INTS, _SHORTS),
    gather_kernel: (_SHORTS, _TABLE, _INTS, _SHORTS),
    split_kernel: (_SHORTS, _TABLE, _SHORTS, _SHORTS, _BYTES, _INTS, _PLAIN, _PLANES, _INTS, _BYTES, _BYTES, _INTS),
    escapes_kernel: (_SHORTS, _TABLE, _SHORTS, _BYTES, _INTS, _INTS, _BYTES, _INTS, _SHORTS),
}
