"""Kernels of the group codec (tiers q1 to q4); bitstream in `pltpack.codec.group`, on the CPU `pltpack.codec.quantize`.

A *part* is the keys or the values of a unit. One grid row (``blockIdx.y``) serves one part, one warp one symbol row at
a time. Decoding: `tables_kernel` says which table each row has, rANS gives symbols, `dequantize_kernel` binary32
vectors, `place.store_kernel` rotates and rounds them, and `exact_kernel` puts the exact tokens over them. Encoding:
`place.load_kernel`, `quantize_kernel`, `emit_kernel`, `escapes_kernel`, rANS.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda, types

from pltpack.codec.levels import CLASSES, UNIT_CLASS
from pltpack.codec.quantize import LARGEST
from pltpack.gpu.arithmetic import float_of, nearest, over, plus, times
from pltpack.gpu.place import place_of

# Columns of a table of parts, int64: heads, coded and exact tokens, and where their numbers begin; where classes and
# ranks of the unit's tokens begin, and step codes and table classes of the part's heads; the first coded and the first
# exact row; the first symbol of both; dimension; where low bits, escapes (bytes of the payloads) and the exact tokens'
# other bytes begin; escapes in the payload; the stream whose escapes come before (-1 for none); where means, and
# decoded vectors, begin, and how far means are from head to head and from token to token; tokens; 0 for keys, else 1.
(HEADS, CODED, EXACT, CODED_AT, EXACT_AT, CLASSES_AT, HEADS_AT, ROW, EXACT_ROW, SYMBOL, EXACT_SYMBOL, WIDTH) = range(12)
(LOW, ESCAPES, REST, ESCAPE_COUNT, BEFORE, MEANS, MEANS_HEAD, MEANS_TOKEN, VECTORS, TOKENS, KIND) = range(12, 23)
PART_COLUMNS = 23
#: Table classes that are tried for a head.
CANDIDATES = 5

_ALL = 0xFFFFFFFF


@cuda.jit(device=True)
def _step(powers: Any, code: Any) -> Any:
    """The step of a code: see `pltpack.codec.levels.step_of`; a power of two multiplies exactly."""
    return times(powers[code & 7], float_of(np.uint32((np.int64(127) + (code >> 3)) << 23)))


@cuda.jit(device=True)
def _low_bits(kind: Any) -> Any:
    return max(np.int32(0), np.int32((kind - UNIT_CLASS) >> 1))


@cuda.jit(device=True)
def _i16(data: Any, at: Any) -> Any:
    word = np.int32(data[at]) | np.int32(np.int32(data[at + 1]) << 8)
    return np.int32(word - 65536) if word >= 32768 else np.int32(word)


@cuda.jit
def tables_kernel(parts: Any, tokens: Any, ranks: Any, bases: Any, table_of_row: Any) -> None:
    """Tables of all symbol rows.

    Parameters
    ----------
    parts : int64 ``[n, PART_COLUMNS]``
    tokens : int32 ``[...]``
        Numbers of coded and of exact tokens.
    ranks : int16 ``[...]``
        Of all tokens: class, plus shift.
    bases : uint8 ``[...]``
        Table classes of heads.
    table_of_row : uint8 ``[...]``
        Filled.
    """
    part = parts[cuda.blockIdx.y]
    coded, kind = part[CODED], part[KIND]
    rows, exact = part[HEADS] * coded, 2 * part[HEADS] * part[EXACT]
    start, step = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x, cuda.gridDim.x * cuda.blockDim.x
    for row in range(start, rows + exact, step):
        if row < rows:
            token = tokens[part[CODED_AT] + row % coded]
            found = np.int64(bases[part[HEADS_AT] + row // coded]) + np.int64(ranks[part[CLASSES_AT] + token])
            table_of_row[part[ROW] + row] = kind * CLASSES + max(min(found, CLASSES - 1), 0)
        else:
            table_of_row[part[EXACT_ROW] + row - rows] = 2 * CLASSES + kind


@cuda.jit(device=True)
def _digits(data: Any, at: Any, width: Any, channel: Any, raw: Any) -> Any:
    found = np.int32(0)
    for plane in range(raw):
        byte = np.int32(data[at + plane * width + (channel >> 3)])
        found = np.int32(found | ((byte >> (channel & 7)) & 1) << plane)
    return found


@cuda.jit(device=True)
def _level(nibble: Any, raw: Any, low: Any, shrink: Any) -> Any:
    if raw > 0:
        return np.float32(np.int32((nibble - 8) << raw) + low - np.int32(1 << (raw - 1)))
    f = np.float32(nibble - 8)
    return plus(f, -times(shrink, min(max(f, np.float32(-1)), np.float32(1))))


@cuda.jit
def dequantize_kernel(
    data: Any, parts: Any, tokens: Any, classes: Any, codes: Any, table_of_row: Any, symbols: Any, escapes_before: Any,
    planes_before: Any, escapes_of: Any, powers: Any, shrink: Any, means: Any, vectors: Any
) -> None:  # fmt: skip
    """Vectors of all coded tokens.

    Parameters
    ----------
    data : uint8 ``[...]``
        Payloads.
    parts, tokens, table_of_row
        As of `tables_kernel`.
    classes : uint8 ``[...]``, codes : int16 ``[...]``
        Of tokens, and step codes of heads.
    symbols, escapes_before, planes_before, escapes_of
        What `rans.decode_kernel` gives, with the number of low-bit planes as a table's weight.
    powers, shrink : float32 ``[8]``, ``[54]``
    means : float32 ``[...]``
    vectors : float32 ``[...]``
        Filled where tokens are coded: ``[H, T, D]`` from each part's place on.
    """
    part = parts[cuda.blockIdx.y]
    lane = np.int32(cuda.threadIdx.x & 31)
    below = np.uint32((np.int64(1) << np.int64(lane)) - 1)
    warps = cuda.blockDim.x >> 5
    coded, dim = part[CODED], part[WIDTH]
    half = (dim + 1) >> 1
    width = (2 * half + 7) >> 3
    before = np.int64(0)
    if part[BEFORE] >= 0:
        before = np.int64(escapes_of[part[BEFORE]])
    first_planes = np.int64(planes_before[part[ROW]]) if coded > 0 else np.int64(0)
    for number in range(cuda.blockIdx.x * warps + (cuda.threadIdx.x >> 5), part[HEADS] * coded, cuda.gridDim.x * warps):
        head, token = number // coded, np.int64(tokens[part[CODED_AT] + number % coded])
        row = part[ROW] + number
        table = np.int32(table_of_row[row])
        raw = _low_bits(table - np.int32(part[KIND]) * np.int32(CLASSES))
        code = np.int64(codes[part[HEADS_AT] + head]) - 4 * np.int64(classes[part[CLASSES_AT] + token])
        step = _step(powers, code)
        low_at = part[LOW] + (np.int64(planes_before[row]) - first_planes) * width
        used = before + np.int64(escapes_before[row])
        centre = part[MEANS] + head * part[MEANS_HEAD] + token * part[MEANS_TOKEN]
        to = part[VECTORS] + (head * part[TOKENS] + token) * dim
        for first in range(0, half, 32):
            j = first + lane
            symbol = np.int32(8 | 8 << 4)
            if j < half:
                symbol = np.int32(symbols[part[SYMBOL] + number * half + j])
            escaped = np.uint32(cuda.ballot_sync(_ALL, symbol == 0))
            if j < half:
                x, y = np.float32(0), np.float32(0)
                if symbol == 0:
                    pair = 2 * (used + np.int64(cuda.popc(escaped & below)))
                    if pair + 2 <= part[ESCAPE_COUNT]:
                        x = np.float32(_i16(data, part[ESCAPES] + 2 * pair))
                        y = np.float32(_i16(data, part[ESCAPES] + 2 * pair + 2))
                else:
                    x = _level(symbol & 15, raw, _digits(data, low_at, width, j, raw), shrink[table])
                    y = _level(symbol >> 4, raw, _digits(data, low_at, width, half + j, raw), shrink[table])
                vectors[to + j] = plus(times(x, step), means[centre + j])
                if half + j < dim:
                    vectors[to + half + j] = plus(times(y, step), means[centre + half + j])
            used += np.int64(cuda.popc(escaped))


@cuda.jit
def exact_kernel(
    data: Any, parts: Any, targets: Any, tokens: Any, symbols: Any, pages: Any, itemsize: Any, words: Any
) -> None:
    """Words of the exact tokens: the highest byte of each is a symbol, the others stand in the payload."""
    part, target = parts[cuda.blockIdx.y], targets[cuda.blockIdx.y]
    lane, warps = cuda.threadIdx.x & 31, cuda.blockDim.x >> 5
    exact, dim = part[EXACT], part[WIDTH]
    span = 2 * ((dim + 1) >> 1)
    for number in range(cuda.blockIdx.x * warps + (cuda.threadIdx.x >> 5), part[HEADS] * exact, cuda.gridDim.x * warps):
        token = np.int64(tokens[part[EXACT_AT] + number % exact])
        to = place_of(target, pages, number // exact, token)
        for d in range(lane, dim, 32):
            word = np.int64(symbols[part[EXACT_SYMBOL] + number * span + d])
            rest = part[REST] + (number * dim + d) * (itemsize - 1)
            for i in range(itemsize - 1):
                word = word << 8 | np.int64(data[rest + itemsize - 2 - i])
            words[to + d] = word


@cuda.jit
def quantize_kernel(
    vectors: Any, parts: Any, classes: Any, codes: Any, powers: Any, means: Any, quantized: Any, wide: Any
) -> None:
    """Quantize all coded tokens.

    Parameters
    ----------
    vectors : float32 ``[...]``
        ``[H, T, D]`` of each part, keys without their rotation.
    parts, classes, codes, powers, means
        As of `dequantize_kernel`.
    quantized : int32 ``[...]``
        Filled where tokens are coded; in the places of `vectors`.
    wide : uint8 ``[...]``
        Set to 1 for tokens (in the places of `classes`) with a value that does not fit.
    """
    part = parts[cuda.blockIdx.y]
    lane, warps = cuda.threadIdx.x & 31, cuda.blockDim.x >> 5
    tokens, dim = part[TOKENS], part[WIDTH]
    for number in range(cuda.blockIdx.x * warps + (cuda.threadIdx.x >> 5), part[HEADS] * tokens,
                        cuda.gridDim.x * warps):  # fmt: skip
        head, token = number // tokens, number % tokens
        kind = np.int64(classes[part[CLASSES_AT] + token])
        if kind <= 10:
            step = _step(powers, np.int64(codes[part[HEADS_AT] + head]) - 4 * kind)
            centre = part[MEANS] + head * part[MEANS_HEAD] + token * part[MEANS_TOKEN]
            at = part[VECTORS] + number * dim
            for d in range(lane, dim, 32):
                f = nearest(over(plus(vectors[at + d], -means[centre + d]), step))
                if not abs(f) <= np.float32(LARGEST):
                    wide[part[CLASSES_AT] + token] = 1
                    f = np.float32(0)
                quantized[at + d] = np.int32(f)


@cuda.jit(device=True)
def _nibble(q: Any, raw: Any) -> Any:
    found = np.int32(((q + ((np.int32(1) << raw) >> 1)) >> raw) + 8)
    return found if found >= 1 and found <= 15 else np.int32(0)


@cuda.jit
def costs_kernel(
    quantized: Any, parts: Any, tokens: Any, ranks: Any, firsts: Any, costs: Any, totals: Any
) -> None:
    """Code lengths of all heads with each of the table classes that may be theirs: `pltpack.codec.quantize.cost`.

    Parameters
    ----------
    quantized : int32 ``[...]``
    parts, tokens, ranks
        As of `tables_kernel`.
    firsts : int32 ``[heads, 2]``
        First class to try for each head, and how many.
    costs : int32 ``[54, 256]``
        In 1/256 bit.
    totals : int64 ``[heads, CANDIDATES]``
        Added to.
    """
    part = parts[cuda.blockIdx.y]
    lane, warps = np.int32(cuda.threadIdx.x & 31), cuda.blockDim.x >> 5
    coded, dim = part[CODED], part[WIDTH]
    half = (dim + 1) >> 1
    for number in range(cuda.blockIdx.x * warps + (cuda.threadIdx.x >> 5), part[HEADS] * coded, cuda.gridDim.x * warps):
        head, token = part[HEADS_AT] + number // coded, np.int64(tokens[part[CODED_AT] + number % coded])
        at = part[VECTORS] + (number // coded * part[TOKENS] + token) * dim
        rank = np.int64(ranks[part[CLASSES_AT] + token])
        for choice in range(firsts[head, 1]):
            kind = max(min(np.int64(firsts[head, 0]) + choice + rank, np.int64(CLASSES - 1)), np.int64(0))
            raw = _low_bits(np.int32(kind))
            total = np.int64(0)
            for j in range(lane, half, 32):
                a = _nibble(quantized[at + j], raw)
                b = np.int32(8)
                if half + j < dim:
                    b = _nibble(quantized[at + half + j], raw)
                symbol = np.int32(a | b << 4) if a > 0 and b > 0 else np.int32(0)
                total += np.int64(costs[part[KIND] * CLASSES + kind, symbol])
            if lane == 0:
                total += np.int64(512) * half * np.int64(raw)
            cuda.atomic.add(totals, (head, choice), total)


@cuda.jit
def emit_kernel(
    quantized: Any, parts: Any, tokens: Any, table_of_row: Any, planes_before: Any, coded_symbols: Any, symbols: Any,
    low: Any, escapes_in: Any
) -> None:  # fmt: skip
    """Symbols and low-bit planes of all coded tokens, and how many pairs of each row escape.

    Parameters
    ----------
    quantized : int32 ``[...]``
    parts, tokens, table_of_row
        As of `tables_kernel`; `LOW` is a place in `low`.
    planes_before : int32 ``[rows]``
        Low-bit planes of the part's rows before each row.
    coded_symbols : uint8 ``[54, 256]``
        1 for symbols with a frequency.
    symbols, low : uint8 ``[...]``
        Filled.
    escapes_in : int32 ``[rows]``
        Filled.
    """
    part = parts[cuda.blockIdx.y]
    lane, warps = np.int32(cuda.threadIdx.x & 31), cuda.blockDim.x >> 5
    coded, dim = part[CODED], part[WIDTH]
    half = (dim + 1) >> 1
    width = (2 * half + 7) >> 3
    for number in range(cuda.blockIdx.x * warps + (cuda.threadIdx.x >> 5), part[HEADS] * coded, cuda.gridDim.x * warps):
        head, token = number // coded, np.int64(tokens[part[CODED_AT] + number % coded])
        row = part[ROW] + number
        table = np.int32(table_of_row[row])
        raw = _low_bits(table - np.int32(part[KIND]) * np.int32(CLASSES))
        at = part[VECTORS] + (head * part[TOKENS] + token) * dim
        escaped = np.int32(0)
        for first in range(0, half, 32):
            j = first + lane
            zero = False
            if j < half:
                a = _nibble(quantized[at + j], raw)
                b = np.int32(8)
                if half + j < dim:
                    b = _nibble(quantized[at + half + j], raw)
                symbol = np.int32(a | b << 4) if a > 0 and b > 0 else np.int32(0)
                if coded_symbols[table, symbol] == 0:
                    symbol = np.int32(0)
                zero = symbol == 0
                symbols[part[SYMBOL] + number * half + j] = symbol
            escaped = np.int32(escaped + np.int32(cuda.popc(np.uint32(cuda.ballot_sync(_ALL, zero)))))
        if lane == 0:
            escapes_in[row] = escaped
        low_at = part[LOW] + np.int64(planes_before[row]) * width
        for byte in range(lane, raw * width, 32):
            plane, found = byte // width, np.int32(0)
            for bit in range(8):
                d = 8 * (byte % width) + bit
                if d < dim:
                    u = quantized[at + d] + ((np.int32(1) << raw) >> 1)
                    found = np.int32(found | ((u >> plane) & 1) << bit)
            low[low_at + byte] = found


@cuda.jit
def escapes_kernel(quantized: Any, parts: Any, tokens: Any, symbols: Any, escapes_before: Any, escapes: Any) -> None:
    """Escaped values int16, in order; `escapes_before` are pairs of all rows before each row."""
    part = parts[cuda.blockIdx.y]
    lane, warps = np.int32(cuda.threadIdx.x & 31), cuda.blockDim.x >> 5
    below = np.uint32((np.int64(1) << np.int64(lane)) - 1)
    coded, dim = part[CODED], part[WIDTH]
    half = (dim + 1) >> 1
    for number in range(cuda.blockIdx.x * warps + (cuda.threadIdx.x >> 5), part[HEADS] * coded, cuda.gridDim.x * warps):
        token = np.int64(tokens[part[CODED_AT] + number % coded])
        at = part[VECTORS] + (number // coded * part[TOKENS] + token) * dim
        used = np.int64(escapes_before[part[ROW] + number])
        for first in range(0, half, 32):
            j = first + lane
            zero = False
            if j < half:
                zero = symbols[part[SYMBOL] + number * half + j] == 0
            votes = np.uint32(cuda.ballot_sync(_ALL, zero))
            if zero:
                pair = 2 * (used + np.int64(cuda.popc(votes & below)))
                escapes[pair] = quantized[at + j]
                other = np.int32(0)
                if half + j < dim:
                    other = quantized[at + half + j]
                escapes[pair + 1] = other
            used += np.int64(cuda.popc(votes))


_TABLE, _BYTES, _SHORTS, _INTS = types.int64[:, ::1], types.uint8[::1], types.int16[::1], types.int32[::1]
_FLOATS = types.float32[::1]
SIGNATURES = {
    tables_kernel: (_TABLE, _INTS, _SHORTS, _BYTES, _BYTES),
    dequantize_kernel: (_BYTES, _TABLE, _INTS, _BYTES, _SHORTS, _BYTES, _BYTES, _INTS, _INTS, _INTS, _FLOATS, _FLOATS,
                        _FLOATS, _FLOATS),
    exact_kernel: (_BYTES, _TABLE, _TABLE, _INTS, _BYTES, _INTS, types.int32, types.uint16[::1]),
    quantize_kernel: (_FLOATS, _TABLE, _BYTES, _SHORTS, _FLOATS, _FLOATS, _INTS, _BYTES),
    costs_kernel: (_INTS, _TABLE, _INTS, _SHORTS, types.int32[:, ::1], types.int32[:, ::1], types.int64[:, ::1]),
    emit_kernel: (_INTS, _TABLE, _INTS, _BYTES, _INTS, types.uint8[:, ::1], _BYTES, _BYTES, _INTS),
    escapes_kernel: (_INTS, _TABLE, _INTS, _BYTES, _INTS, _SHORTS),
}  # fmt: skip
