"""The model of the lossless codec's mode *predicted*: how far a unit's words are from its reference's.

See `pltpack.codec.predicted` for what the model means. How an encoder finds it is its own affair; here it is means of
magnitudes by row and by column, in turns. Only comparisons and single IEEE operations decide, in a stated order.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import ml_dtypes
import numba
import numpy as np

from pltpack.codec.predicted_tables import MANTISSA

_FLOATS = {"BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16)}
_BIAS = {"BF16": 127, "F16": 15}
#: Range of a model's base.
BASES = (-1024, 1024)
#: A t variable's scale over its mean magnitude.
_SCALE = 1.131
#: What an offset must save.
_OFFSET_BITS = 5.0
#: Half octaves below all others that a channel without differences is put at.
_STILL = 60
#: Scale of a channel without differences.
_NONE = -10000


class Model(NamedTuple):
    """uint8 `channel` and int8 `offset` ``[R]``, int8 `token` ``[N]``."""

    base: int
    channel: np.ndarray
    offset: np.ndarray
    token: np.ndarray

    @property
    def scales(self) -> np.ndarray:
        """Base and channel together: int32 ``[R]``."""
        found: np.ndarray = self.base + self.channel.astype(np.int32)
        return found


def predict(rows: np.ndarray, model: Model, dtype: str) -> np.ndarray:
    """Words of the predictions, a new array, from those of the reference: uint16 ``[R, N]``."""
    exponents = (model.scales >> 1) - 2 - _BIAS[dtype]
    with np.errstate(over="ignore", under="ignore"):
        offsets = np.ldexp(model.offset.astype(np.float64), exponents).astype(np.float32)
    out = np.empty_like(rows)
    if dtype == "BF16":
        _move_bfloat(rows, model.offset, offsets, out)
        return out
    out[...] = rows
    moved = np.flatnonzero(model.offset)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        sums = (rows[moved].view(np.float16).astype(np.float32) + offsets[moved, None]).astype(np.float16)
    top = np.uint16(0x8000 - (1 << MANTISSA[dtype]))
    out[moved] = np.where(rows[moved] & top == top, rows[moved], sums.view(np.uint16))
    return out


@numba.njit(nogil=True, cache=True)
def _move_bfloat(rows: Any, offset: Any, offsets: Any, out: Any) -> None:
    values = np.empty(rows.shape[1], np.float32)
    bits = values.view(np.uint32)
    for r in range(rows.shape[0]):
        row, line, add = rows[r], out[r], offsets[r]
        if offset[r] == 0:
            line[:] = row
            continue
        for n in range(row.size):
            bits[n] = np.uint32(row[n]) << np.uint32(16)
        for n in range(row.size):
            values[n] = values[n] + add
        for n in range(row.size):
            kept = row[n] & np.uint16(0x7F80) == np.uint16(0x7F80)
            rounded = bits[n] + np.uint32(0x7FFF) + ((bits[n] >> np.uint32(16)) & np.uint32(1))
            line[n] = row[n] if kept else np.uint16(rounded >> np.uint32(16))


@numba.njit(nogil=True, cache=True)
def _half_octaves(value: float) -> int:
    """``2 * log2(value)``, rounded, of a number above 0: comparisons only, so the same everywhere."""
    fraction, exponent = math.frexp(value)
    # 2^-3/4 and 2^-1/4.
    return 2 * exponent - (2 if fraction < 0.5946035575013605 else 1 if fraction < 0.8408964152537145 else 0)


@numba.njit(nogil=True, cache=True)
def _power(half_octaves: int) -> float:
    return math.ldexp(1.4142135623730951 if half_octaves & 1 else 1.0, half_octaves >> 1)


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _measure(differences: Any, shift: Any, channel: Any, token: Any, rounds: int) -> None:
    """Fit scales of rows, int32 ``[R]`` in half octaves, and, but for the last round, of columns.

    `shift` float64 ``[R]`` is taken off the differences.
    """
    rows, columns = differences.shape
    weights, sums, line = np.empty(columns), np.empty(columns), np.zeros(-(-columns // 4) * 4)
    for turn in range(rounds):
        for n in range(columns):
            weights[n] = _power(-token[n])
        sums[:] = 0
        live = 0
        for r in range(rows):
            row, off = differences[r], shift[r]
            for n in range(columns):
                line[n] = abs(row[n] - off) * weights[n]
            # Four sums side by side: one addition need not wait for the one before.
            a = b = c = d = 0.0
            for n in range(0, line.size, 4):
                a += line[n]
                b += line[n + 1]
                c += line[n + 2]
                d += line[n + 3]
            total = (a + b) + (c + d)
            channel[r] = _half_octaves(total * (_SCALE / columns)) if total > 0 else _NONE
            if total > 0 and turn < rounds - 1:
                live += 1
                factor = _power(-channel[r])
                for n in range(columns):
                    sums[n] += abs(row[n] - off) * factor
        if turn < rounds - 1:
            for n in range(columns):
                token[n] = 0 if live == 0 else -12
                if sums[n] > 0:
                    token[n] = min(max(_half_octaves(sums[n] * (_SCALE / live)), -12), 100)


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _means(differences: Any, token: Any, out: Any) -> None:
    """Means of the rows' differences, float64 ``[R]``, each column weighted by its precision."""
    rows, columns = differences.shape
    weights = np.empty(columns)
    for n in range(columns):
        weights[n] = _power(-2 * token[n])
    whole = weights.sum()
    for r in range(rows):
        row = differences[r]
        a = b = 0.0
        for n in range(0, columns - 1, 2):
            a += row[n] * weights[n]
            b += row[n + 1] * weights[n + 1]
        if columns % 2:
            a += row[columns - 1] * weights[columns - 1]
        out[r] = (a + b) / whole


def _differences(rows: np.ndarray, reference: np.ndarray, dtype: str) -> np.ndarray:
    """Words less the reference's, float64 ``[R, N]``; 0 where one is not finite."""
    if dtype == "BF16":
        out = np.empty(rows.shape)
        _subtract_bfloat(rows, reference, out)
        return out
    with np.errstate(invalid="ignore"):
        out = rows.view(np.float16).astype(np.float64) - reference.view(np.float16).astype(np.float64)
    out[~np.isfinite(out)] = 0
    return out


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
            found = np.float64(ours[n]) - np.float64(theirs[n])
            line[n] = found if abs(found) < np.inf else 0.0


def fit(rows: np.ndarray, reference: np.ndarray, dtype: str) -> Model:
    """The model of a unit's words, uint16 ``[R, N]``."""
    differences = _differences(rows, reference, dtype)
    count, columns = differences.shape
    scales, token, means = np.empty(count, np.int32), np.zeros(columns, np.int32), np.empty(count)
    _measure(differences, np.zeros(count), scales, token, 3)
    _means(differences, token, means)
    live = scales > _NONE
    steps = np.ldexp(1.0, (np.where(live, scales, 0) >> 1) - 2)
    offset = np.rint(np.where(live, means, 0) / steps)
    # An offset of q quarters of the scale saves about q^2 / 32 bits a token.
    means[offset * offset * (columns / 32) < _OFFSET_BITS] = 0
    _measure(differences, means, scales, token, 2)
    live &= scales > _NONE
    scales += 2 * _BIAS[dtype]
    base = min(max(int(scales[live].min()) - _STILL if live.any() else 0, BASES[0]), BASES[1])
    channel = np.where(live, np.clip(scales - base, 0, 255), 0).astype(np.uint8)
    # The step follows the scale, which is smaller now that the mean is taken off.
    steps = np.ldexp(1.0, ((base + channel.astype(np.int32)) >> 1) - 2 - _BIAS[dtype])
    offset = np.clip(np.rint(np.where(live, means, 0) / steps), -127, 127)
    return Model(base, channel, offset.astype(np.int8), token.astype(np.int8))
