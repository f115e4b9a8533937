"""Hot loops of the group codec's encoder, one head at a time; the bitstream is described in `pltpack.codec.group`.

All arithmetic on values is single binary32 operations in the order written; nothing is contracted or reassociated.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from pltpack.codec.levels import CLASSES, POWERS, RAW_BITS, STEP_CODES
from pltpack.codec.tokens import EXACT, FINEST

#: A quantized value beyond this makes its token exact.
LARGEST = 32000


@numba.njit(nogil=True, cache=True, inline="always")
def step_size(code: int) -> Any:
    """The step of a code; see `pltpack.codec.levels.step_of`."""
    return POWERS[code & 7] * np.float32(2.0 ** (code >> 3))


@numba.njit(nogil=True, cache=True, inline="always")
def table_class(base: Any, rank: Any) -> Any:
    """Of a token: `rank` is its class, plus its shift where it has one."""
    return max(min(np.int64(base) + np.int64(rank), np.int64(CLASSES - 1)), np.int64(0))


@numba.njit(nogil=True, cache=True)
def energy(x: Any, prediction: Any, moving: int, classes: Any, out: Any) -> None:
    """Sum over coded tokens of squared residuals per channel, float64 ``[D]``, in token order."""
    out[:] = 0.0
    for t in range(x.shape[0]):
        if classes[t] > FINEST:
            continue
        row = prediction[t * moving]
        for d in range(x.shape[1]):
            e = np.float64(x[t, d]) - np.float64(row[d])
            out[d] += e * e


@numba.njit(nogil=True, cache=True)
def quantize(x: Any, prediction: Any, moving: int, classes: Any, code: int, q: Any, wide: Any) -> float:
    """Quantize one head; mark tokens that do not fit in `wide`; give the mean magnitude in steps of class 0."""
    total, count = 0.0, 0
    for t in range(x.shape[0]):
        if classes[t] > FINEST:
            continue
        step = step_size(code - 4 * classes[t])
        row = prediction[t * moving]
        part = 0.0
        for d in range(x.shape[1]):
            f = np.rint((x[t, d] - row[d]) / step)
            if not abs(f) <= LARGEST:
                wide[t] = True
                f = np.float32(0)
            q[t, d] = np.int32(f)
            part += abs(f)
        total += part * 2.0 ** (-0.5 * classes[t])
        count += x.shape[1]
    return total / count if count else 0.0


@numba.njit(nogil=True, cache=True, inline="always")
def _nibble(q: int, r: int) -> int:
    c = ((q + ((1 << r) >> 1)) >> r) + 8
    return c if 1 <= c <= 15 else 0


@numba.njit(nogil=True, cache=True, inline="always")
def symbol_of(row: Any, j: int, half: int, r: int) -> int:
    """The symbol of pair `j` of a row of quantized values, with `r` low bits."""
    a = _nibble(row[j], r)
    b = _nibble(row[j + half], r) if j + half < row.size else 8
    return a | (b << 4) if a and b else 0


@numba.njit(nogil=True, cache=True)
def cost(q: Any, classes: Any, ranks: Any, base: int, half: int, costs: Any) -> int:
    """Code length of one head with base class `base`, in 1/256 bit; `ranks` ``[T]`` as of `table_class`."""
    total = 0
    for t in range(q.shape[0]):
        if classes[t] > FINEST:
            continue
        k = table_class(base, ranks[t])
        r = RAW_BITS[k]
        line = costs[k]
        for j in range(half):
            total += line[symbol_of(q[t], j, half, r)]
        total += 512 * half * r
    return total


@numba.njit(nogil=True, cache=True)
def emit(q: Any, classes: Any, ranks: Any, base: int, half: int, freqs: Any, symbols: Any, low: Any,
         escapes: Any) -> int:  # fmt: skip
    """Write one head's symbols, low-bit planes and escaped pairs; give the number of escaped values."""
    width = (2 * half + 7) // 8
    rows = 0
    at = 0
    escaped = 0
    for t in range(q.shape[0]):
        if classes[t] > FINEST:
            continue
        k = table_class(base, ranks[t])
        r = RAW_BITS[k]
        for j in range(half):
            s = symbol_of(q[t], j, half, r)
            if freqs[k, s] == 0:
                s = 0
            symbols[rows, j] = s
            if s == 0:
                escapes[escaped] = q[t, j]
                escapes[escaped + 1] = q[t, j + half] if j + half < q.shape[1] else 0
                escaped += 2
        for d in range(q.shape[1]):
            u = q[t, d] + ((1 << r) >> 1)
            for p in range(r):
                low[at + p * width + d // 8] |= ((u >> p) & 1) << (d % 8)
        at += r * width
        rows += 1
    return escaped


@numba.njit(cache=True)
def plan(classes: Any, ranks: Any, codes: Any, bases: Any, key_half: int, value_half: int, tables: Any) -> Any:
    """Tables of all symbol rows, keys' quantized, values' quantized, keys' exact, values' exact.

    Returns
    -------
    (int, int, int, int)
        Numbers of coded and exact tokens, and bytes of the keys' and the values' low-bit planes. The first is -1 if a
        step code or a table class does not exist.
    """
    heads = bases.size // 2
    for h in range(bases.size):
        if codes[h] < STEP_CODES[0] or codes[h] > STEP_CODES[1] or bases[h] >= CLASSES:
            return -1, 0, 0, 0
    row = 0
    sizes = (0, 0)
    for part in range(2):
        width = (2 * (key_half if part == 0 else value_half) + 7) // 8
        size = 0
        for h in range(heads):
            base = bases[part * heads + h]
            for t in range(classes.size):
                if classes[t] <= FINEST:
                    k = table_class(base, ranks[t])
                    tables[row] = part * CLASSES + k
                    size += RAW_BITS[k] * width
                    row += 1
        sizes = (size, 0) if part == 0 else (sizes[0], size)
    exact = 0
    for t in range(classes.size):
        exact += classes[t] == EXACT
    for part in range(2):
        for _ in range(2 * heads * exact):
            tables[row] = 2 * CLASSES + part
            row += 1
    coded = (row - 4 * heads * exact) // max(2 * heads, 1)
    return coded, exact, sizes[0], sizes[1]
