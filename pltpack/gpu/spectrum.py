"""Kernels of the transform codec; bitstream in spec/codecs.md, section "transform", on the CPU `coefficients`, `bases`.

Coefficients are coded in classes, class after class, 32 to a row of symbols, so that one warp serves a row and all its
lanes share a table, a number of low bits and a place in the order. Decoding: rANS, `values_kernel` (symbols to dense
coefficients), a product with the basis, `center_kernel`, `place.store_kernel`. Encoding: a product, `quantize_kernel`,
`symbols_kernel`, `escapes_kernel`, rANS.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda, types

from pltpack.codec.coefficients import ESCAPE
from pltpack.gpu import device
from pltpack.gpu.arithmetic import nearest, plus, times

# Columns of a table of units, int64: classes of coefficients and of tokens (as many as occur); where the unit's tables
# begin in `index` (see `Places`); the first row and symbol; where escapes and low bits begin (bytes) and how many
# escapes there are; the unit's first token in arrays of tokens; components, of which shared; rows of the model; where
# the order of the components begins.
(CLASSES, GROUPS, INDEX, ROW, ROWS, SYMBOL, ESCAPES, ESCAPE_COUNT, LOW, TOKEN, RANK, SPAN, ORDER) = range(13)
UNIT_COLUMNS = 13

_ALL = 0xFFFFFFFF
TILE = 16
_TILES = (TILE, TILE + 1)


class Places:
    """A unit's order of coefficients as kernels take it: one int32 array of several tables.

    For K classes and G groups of tokens (those of one token class): the first row of each class ``[K + 1]``, its values
    ``[K]``, its first low bit ``[K]``, its low bits per value ``[K]``, its values before each group ``[K, G + 1]``, the
    components of each group that are of a higher class ``[G, K + 1]``, the first token of each group ``[G + 1]``, and
    the tokens ``[T]``, group after group.
    """

    def __init__(self, order: Any, raw: np.ndarray) -> None:
        counts, bounds = order.counts, order.bounds
        sizes = np.diff(order.firsts)
        some = np.flatnonzero(sizes)
        self.rows = -(-counts // 32)
        inside = sizes[some, None] * (bounds[some, :-1] - bounds[some, 1:])
        before = np.concatenate([np.zeros((1, len(counts)), np.int64), np.cumsum(inside, axis=0)]).T
        firsts = np.append(order.firsts[some], order.firsts[-1])
        bits = counts * raw
        parts = [np.append(0, np.cumsum(self.rows)), counts, np.cumsum(bits) - bits, raw, before.reshape(-1),
                 bounds[some].reshape(-1), firsts, order.tokens]  # fmt: skip
        self.groups = len(some)
        self.index = np.concatenate(parts).astype(np.int32)
        self.table_of_row = np.repeat(np.arange(len(counts)), self.rows).astype(np.uint8)


@cuda.jit(device=True)
def _place(index: Any, unit: Any, kind: Any, number: Any) -> tuple[Any, Any]:
    """Token and component (in their order) of a value of a class."""
    classes, groups = unit[CLASSES], unit[GROUPS]
    before = unit[INDEX] + 4 * classes + 1 + kind * (groups + 1)
    low, high = np.int64(0), groups
    while high - low > 1:
        middle = (low + high) >> 1
        if np.int64(index[before + middle]) <= number:
            low = middle
        else:
            high = middle
    # Groups without values of this class begin where the next one does: the last that begins here has them.
    bounds = unit[INDEX] + 4 * classes + 1 + classes * (groups + 1)
    bound = bounds + low * (classes + 1) + kind
    first, last = np.int64(index[bound + 1]), np.int64(index[bound])
    rest, count = number - np.int64(index[before + low]), max(last - first, 1)
    firsts = bounds + groups * (classes + 1)
    token = index[firsts + groups + 1 + np.int64(index[firsts + low]) + rest // count]
    return np.int64(token), first + rest % count


@cuda.jit(device=True)
def _i32(data: Any, at: Any) -> Any:
    word = np.int64(data[at]) | np.int64(data[at + 1]) << 8
    word |= np.int64(data[at + 2]) << 16 | np.int64(data[at + 3]) << 24
    return word - (np.int64(1) << 32) if word >> 31 != 0 else word


@cuda.jit
def values_kernel(
    data: Any, units: Any, index: Any, table_of_row: Any, symbols: Any, escapes_before: Any, widths: Any, order: Any,
    shared: Any, own: Any
) -> None:  # fmt: skip
    """Coefficients of all tokens from symbols, low bits and escapes: dense, times their token's step.

    Parameters
    ----------
    data : uint8 ``[...]``
        Payloads, and eight bytes more.
    units : int64 ``[n, UNIT_COLUMNS]``
    index : int32 ``[...]``
        See `Places`.
    table_of_row, symbols, escapes_before
        Of `rans.decode_kernel`.
    widths : float32 ``[tokens]``
        Step of each token.
    order : int32 ``[...]``
        Number of each component, in the order of their scales: shared ones before `RANK`.
    shared, own : float32 ``[tokens, RANK]``, ``[tokens, SPAN]``
        Filled where values are coded; the rest must be 0.
    """
    unit = units[cuda.blockIdx.y]
    lane, warps = np.int32(cuda.threadIdx.x & 31), cuda.blockDim.x >> 5
    below = np.uint32((np.int64(1) << np.int64(lane)) - 1)
    classes = unit[CLASSES]
    for number in range(cuda.blockIdx.x * warps + (cuda.threadIdx.x >> 5), unit[ROWS], cuda.gridDim.x * warps):
        row = unit[ROW] + number
        kind = np.int64(table_of_row[row])
        at = unit[INDEX] + kind
        value = (number - np.int64(index[at])) * 32 + lane
        inside = value < np.int64(index[at + classes + 1])
        raw = np.int64(index[at + 3 * classes + 1])
        symbol = np.int32(0)
        if inside:
            symbol = np.int32(symbols[unit[SYMBOL] + number * 32 + lane])
        votes = np.uint32(cuda.ballot_sync(_ALL, symbol == ESCAPE))
        if inside:
            found = np.int64(0)
            if symbol == ESCAPE:
                # Escapes among the padding of a row come last.
                escape = np.int64(escapes_before[row]) + np.int64(cuda.popc(votes & below))
                if escape < unit[ESCAPE_COUNT]:
                    found = _i32(data, unit[ESCAPES] + 4 * escape)
            else:
                high = np.int64((symbol + 1) >> 1) if symbol & 1 == 1 else -np.int64(symbol >> 1)
                bit = np.int64(index[at + 2 * classes + 1]) + value * raw
                byte = unit[LOW] + (bit >> 3)
                low = (_i32(data, byte) >> (bit & 7)) & ((np.int64(1) << raw) - 1)
                found = (high << raw) | low
            token, component = _place(index, unit, kind, value)
            target = np.int64(order[unit[ORDER] + component])
            # The product of an integer below 2**24 and a binary32 number, rounded once.
            coefficient = np.float32(np.float64(found) * np.float64(widths[unit[TOKEN] + token]))
            if target < unit[RANK]:
                shared[unit[TOKEN] + token, target] = coefficient
            else:
                own[unit[TOKEN] + token, target - unit[RANK]] = coefficient


@cuda.jit
def product_kernel(a: Any, b: Any, out: Any, first: Any, depth: Any, to: Any) -> None:
    """``out[:, to : to + N] += a[:, first : first + depth] b[:depth]``, where there is no cuBLAS.

    Tiles of 16 by 16 go through shared memory.

    Parameters
    ----------
    a, b, out : float32 ``[M, >= first + depth]``, ``[>= depth, N]``, ``[M, >= to + N]``
    first, depth, to : int
    """
    left = cuda.shared.array(_TILES, types.float32)
    right = cuda.shared.array(_TILES, types.float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    column, row = cuda.blockIdx.x * TILE + x, cuda.blockIdx.y * TILE + y
    total = np.float32(0)
    for step in range((depth + TILE - 1) // TILE):
        k = step * TILE
        left[y, x] = a[row, first + k + x] if row < a.shape[0] and k + x < depth else np.float32(0)
        right[y, x] = b[k + y, column] if k + y < depth and column < b.shape[1] else np.float32(0)
        cuda.syncthreads()
        for i in range(TILE):
            total += left[y, i] * right[i, x]
        cuda.syncthreads()
    if row < out.shape[0] and column < b.shape[1]:
        out[row, to + column] += total


@cuda.jit
def center_kernel(rows: Any, mean: Any, reference: Any, shares: Any) -> None:
    """Add each token's center: ``mean + share · (reference - mean)``, or the mean where the share is 0.

    Parameters
    ----------
    rows : float32 ``[T, R]``
        Changed.
    mean : float32 ``[R]``
    reference : float32 ``[T, R]``
        A centroid's rows; looked at where shares are above 0.
    shares : float32 ``[T]``
    """
    span = rows.shape[1]
    for i in range(cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x, rows.shape[0] * span,
                   cuda.gridDim.x * cuda.blockDim.x):  # fmt: skip
        t, r = i // span, i % span
        center = mean[r]
        if shares[t] > np.float32(0):
            center = plus(times(plus(reference[t, r], -mean[r]), shares[t]), mean[r])
        rows[t, r] = plus(rows[t, r], center)


@cuda.jit
def quantize_kernel(found: Any, inverse: Any, quantized: Any) -> None:
    """Coefficients over their token's step, rounded, ``int32 [T, N]``: `inverse` is 1 over the step, 0 for none."""
    count = found.shape[1]
    for i in range(cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x, found.shape[0] * count,
                   cuda.gridDim.x * cuda.blockDim.x):  # fmt: skip
        t = i // count
        quantized[t, i % count] = np.int32(nearest(times(found[t, i % count], inverse[t])))


@cuda.jit
def symbols_kernel(
    quantized: Any, units: Any, index: Any, table_of_row: Any, limits: Any, symbols: Any, low: Any, escapes_in: Any
) -> None:
    """Symbols and low bits of all values, and how many of each row escape.

    Parameters
    ----------
    quantized : int32 ``[tokens, N]``
        Components in the order of their scales.
    units, index, table_of_row
        As of `values_kernel`; `LOW` counts 32-bit words of `low`.
    limits : int32 ``[K]``
        Largest shifted magnitude with a symbol, by class.
    symbols : uint8 ``[...]``
        Filled, padding with 0.
    low : uint32 ``[...]``
        Low bits are added; 0 before.
    escapes_in : int32 ``[rows]``
        Filled.
    """
    unit = units[cuda.blockIdx.y]
    lane, warps = np.int32(cuda.threadIdx.x & 31), cuda.blockDim.x >> 5
    classes = unit[CLASSES]
    for number in range(cuda.blockIdx.x * warps + (cuda.threadIdx.x >> 5), unit[ROWS], cuda.gridDim.x * warps):
        kind = np.int64(table_of_row[unit[ROW] + number])
        at = unit[INDEX] + kind
        place = (number - np.int64(index[at])) * 32 + lane
        escaped, symbol = False, np.int64(0)
        if place < np.int64(index[at + classes + 1]):
            raw = np.int64(index[at + 3 * classes + 1])
            token, component = _place(index, unit, kind, place)
            value = np.int64(quantized[unit[TOKEN] + token, component])
            high = value >> raw
            symbol = 2 * high - 1 if high > 0 else -2 * high
            escaped = bool(abs(high) > np.int64(limits[kind]))
            if escaped:
                symbol = np.int64(ESCAPE)
            bit = np.int64(index[at + 2 * classes + 1]) + place * raw
            bits = (value & ((np.int64(1) << raw) - 1)) << (bit & 31)
            word = unit[LOW] + (bit >> 5)
            if bits & 0xFFFFFFFF != 0:
                cuda.atomic.or_(low, word, np.uint32(bits & 0xFFFFFFFF))
            if bits >> 32 != 0:
                cuda.atomic.or_(low, word + 1, np.uint32(bits >> 32))
        symbols[unit[SYMBOL] + number * 32 + lane] = symbol
        votes = np.uint32(cuda.ballot_sync(_ALL, escaped))
        if lane == 0:
            escapes_in[unit[ROW] + number] = np.int32(cuda.popc(votes))


@cuda.jit
def escapes_kernel(
    quantized: Any, units: Any, index: Any, table_of_row: Any, symbols: Any, escapes_before: Any, escapes: Any
) -> None:
    """Escaped values int32, in order; `escapes_before` counts those of all rows before each row."""
    unit = units[cuda.blockIdx.y]
    lane, warps = np.int32(cuda.threadIdx.x & 31), cuda.blockDim.x >> 5
    below = np.uint32((np.int64(1) << np.int64(lane)) - 1)
    for number in range(cuda.blockIdx.x * warps + (cuda.threadIdx.x >> 5), unit[ROWS], cuda.gridDim.x * warps):
        row = unit[ROW] + number
        escaped = symbols[unit[SYMBOL] + number * 32 + lane] == ESCAPE
        votes = np.uint32(cuda.ballot_sync(_ALL, escaped))
        if escaped:
            kind = np.int64(table_of_row[row])
            place = (number - np.int64(index[unit[INDEX] + kind])) * 32 + lane
            token, component = _place(index, unit, kind, place)
            to = np.int64(escapes_before[row]) + np.int64(cuda.popc(votes & below))
            escapes[to] = quantized[unit[TOKEN] + token, component]


def product(a: Any, b: Any, depth: int) -> Any:
    """``a[:, :depth] b[:depth]``, a new array."""
    if device.has_blas():
        return a[:, :depth] @ b[:depth]
    out = device.arrays().zeros((a.shape[0], b.shape[1]), np.float32)
    add_product(a, b, out, 0, depth, 0)
    return out


def add_product(a: Any, b: Any, out: Any, first: int, depth: int, to: int) -> None:
    """What `product_kernel` does: by cuBLAS on a device that has it."""
    if device.has_blas():
        out[:, to : to + b.shape[1]] += a[:, first : first + depth] @ b[:depth]
        return
    add_product_without_blas(a, b, out, first, depth, to)


def add_product_without_blas(a: Any, b: Any, out: Any, first: int, depth: int, to: int) -> None:
    """Run `product_kernel`."""
    grid = max(1, -(-b.shape[1] // TILE)), max(1, -(-out.shape[0] // TILE))
    product_kernel[grid, (TILE, TILE), device.stream(), 0](a, b, out, first, depth, to)


_TABLE, _BYTES, _INTS, _FLOATS = types.int64[:, ::1], types.uint8[::1], types.int32[::1], types.float32[::1]
_MATRIX, _WHOLE = types.float32[:, ::1], types.int32[:, ::1]
SIGNATURES = {
    values_kernel: (_BYTES, _TABLE, _INTS, _BYTES, _BYTES, _INTS, _FLOATS, _INTS, _MATRIX, _MATRIX),
    product_kernel: (_MATRIX, _MATRIX, _MATRIX, types.int64, types.int64, types.int64),
    center_kernel: (_MATRIX, _FLOATS, _MATRIX, _FLOATS),
    quantize_kernel: (_MATRIX, _FLOATS, _WHOLE),
    symbols_kernel: (_WHOLE, _TABLE, _INTS, _BYTES, _INTS, _BYTES, types.uint32[::1], _INTS),
    escapes_kernel: (_WHOLE, _TABLE, _INTS, _BYTES, _BYTES, _INTS, _INTS),
}
