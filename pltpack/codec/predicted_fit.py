"""How an encoder finds the model of the lossless codec's mode *predicted*: means of magnitudes by row and by column.

A few rows give a first scale of each token; with it, all rows give offsets and the tokens' scales anew; with these, the
channels' scales are final. Only comparisons and single IEEE operations decide, in a stated order, so that the same
model is found everywhere.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np

from pltpack.codec.predicted_model import BASES, BIAS, Model

#: A t variable's scale over its mean magnitude.
_SCALE = 1.131
#: What an offset must save; one of q quarters of the scale saves about q^2 / 32 bits a token.
_OFFSET_BITS = 5.0
#: Half octaves below all others that a channel without differences is put at.
_STILL = 60
#: Scale of a channel without differences.
_NONE = -10000
#: One row in so many gives the tokens' first scales.
_FEW = 4
#: Differences are between these magnitudes, or 0: sums and weighted ones then fit binary32.
_LEAST, _MOST = np.float32(2.0**-100), np.float32(2.0**100)
_LEAST_BASE, _MOST_BASE = BASES
#: Powers of two by half octaves, from the least to the largest of binary32.
_ZERO = 252
_POWERS = np.array([math.ldexp(1.4142135623730951 if n & 1 else 1.0, n >> 1) for n in range(-_ZERO, _ZERO)], np.float32)


def fit(rows: np.ndarray, reference: np.ndarray, dtype: str, differences: np.ndarray) -> Model:
    """The model of a unit's words, uint16 ``[R, N]``; `differences` is float32 ``[R, N]``, overwritten."""
    if dtype == "BF16":
        _subtract_bfloat(rows, reference, differences)
    else:
        with np.errstate(invalid="ignore"):
            ours, theirs = (words.view(np.float16).astype(np.float32) for words in (rows, reference))
            np.subtract(ours, theirs, out=differences)
        differences[~np.isfinite(differences)] = 0
    count, columns = rows.shape
    channel, offset, token = np.empty(count, np.uint8), np.empty(count, np.int8), np.zeros(columns, np.int8)
    return Model(int(_fit(differences, BIAS[dtype], channel, offset, token)), channel, offset, token)


@numba.njit(nogil=True, cache=True)
def _subtract_bfloat(rows: Any, reference: Any, out: Any) -> None:
    ours, theirs = np.empty(rows.shape[1], np.float32), np.empty(rows.shape[1], np.float32)
    our_bits, their_bits = ours.view(np.uint32), theirs.view(np.uint32)
    for r in range(rows.shape[0]):
        row, base, line = rows[r], reference[r], out[r]
        for n in range(row.size):
            our_bits[n] = np.uint32(row[n]) << np.uint32(16)
            their_bits[n] = np.uint32(base[n]) << np.uint32(16)
        for n in range(row.size):
            found = ours[n] - theirs[n]
            line[n] = found if _LEAST < abs(found) < _MOST else np.float32(0)


@numba.njit(nogil=True, cache=True)
def _half_octaves(value: float) -> int:
    """``2 * log2(value)``, rounded, of a number above 0: comparisons only, so the same everywhere."""
    fraction, exponent = math.frexp(value)
    # 2^-3/4 and 2^-1/4.
    return 2 * exponent - (2 if fraction < 0.5946035575013605 else 1 if fraction < 0.8408964152537145 else 0)


@numba.njit(nogil=True, cache=True)
def _sum(line: Any) -> Any:
    """Sum of an array of whole blocks of 16, which is overwritten: its halves are added until one number is left."""
    blocks = line.size // 16
    while blocks > 1:
        half = (blocks + 1) >> 1
        for n in range(16 * (blocks - half)):
            line[n] += line[16 * half + n]
        blocks = half
    for n in range(8):
        line[n] += line[n + 8]
    for n in range(4):
        line[n] += line[n + 4]
    return (line[0] + line[2]) + (line[1] + line[3])


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _fit(differences: Any, bias: int, channel: Any, offset: Any, token: Any) -> Any:
    """Fill a model's arrays; its base."""
    rows, columns = differences.shape
    scales, means = np.empty(rows, np.int64), np.zeros(rows, np.float32)
    weights, sums = np.empty(columns, np.float32), np.empty(columns, np.float32)
    # Zeros behind the columns stay zeros.
    line = np.zeros((columns + 15) // 16 * 16, np.float32)
    for turn in range(3):
        for n in range(columns):
            weights[n] = _POWERS[_ZERO - token[n]]
            line[n] = weights[n] * weights[n]
        whole = _sum(line)
        sums[:] = 0
        live = 0
        for r in range(0, rows, 1 if turn else _FEW):
            row = differences[r]
            if turn == 1:
                for n in range(columns):
                    line[n] = row[n] * (weights[n] * weights[n])
                means[r] = _sum(line) / whole
            mean = means[r]
            for n in range(columns):
                line[n] = abs(row[n] - mean) * weights[n]
            total = np.float64(_sum(line))
            scales[r] = scale = _half_octaves(total * (_SCALE / columns)) if total > 0 else _NONE
            if turn == 1 and total > 0:
                quarters = np.rint(mean * (4 * _POWERS[_ZERO - 2 * (scale >> 1)]))
                if quarters * quarters * columns < 32 * _OFFSET_BITS:
                    means[r] = 0
            if turn < 2 and total > 0:
                live += 1
                factor = _POWERS[_ZERO - scale]
                for n in range(columns):
                    sums[n] += abs(row[n] - mean) * factor
        if turn < 2:
            for n in range(columns):
                token[n] = 0 if live == 0 else -12
                if sums[n] > 0:
                    token[n] = min(max(_half_octaves(np.float64(sums[n]) * (_SCALE / live)), -12), 100)
    return _quantize(scales, means, bias, channel, offset)


@numba.njit(nogil=True, cache=True)
def _quantize(scales: Any, means: Any, bias: int, channel: Any, offset: Any) -> Any:
    """Fill the channels' numbers; the base."""
    least = 1 << 20
    for r in range(scales.size):
        if scales[r] != _NONE:
            least = min(least, scales[r] + 2 * bias)
    base = 0 if least == 1 << 20 else min(max(least - _STILL, _LEAST_BASE), _MOST_BASE)
    for r in range(scales.size):
        channel[r] = offset[r] = 0
        if scales[r] != _NONE:
            channel[r] = min(max(scales[r] + 2 * bias - base, 0), 255)
            # The step follows the scale, which is smaller now that the mean is taken off.
            step = math.ldexp(1.0, ((base + int(channel[r])) >> 1) - 2 - bias)
            offset[r] = min(max(np.rint(means[r] / step), -127), 127)
    return base
