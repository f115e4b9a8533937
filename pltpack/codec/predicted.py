"""The lossless codec's mode *predicted*: words near those of a reference, as of the same passage at another position.

The unit is in channel rows ``[R, N]``. A model tells how far words are from the reference: word n of row r by about
``2^(s / 2)`` with ``s = base + channel[r] + token[n]``, in units in which the exponent field e of a word stands for
``2^e``; and by ``offset[r]`` on average. M is the number of mantissa bits (BF16 7, F16 10; other dtypes lack the mode).

Body: u32 number of escapes X, u32 length of the stream Z, u32 number of low bytes B, u32 length F of the frame, then

| bytes | content |
|---|---|
| F | zstd frame of i16 `base` (-1024 to 1024), u8 `channel` ``[R]``, i8 `offset` ``[R]``, i8 `token` ``[N]`` |
| 2 X | u16 escapes |
| Z | rANS stream of symbols ``[R, N]``, the table of each being that of its word |
| B | low bits of all words, rows in order, the lowest first, bit i in bit ``i mod 8`` of byte ``i div 8`` |

**Prediction** p: the reference's word, or, if `offset` is not 0 and the word is finite, that of its value plus
``offset * 2^(floor((base + channel) / 2) - 2 - bias)``, each rounded to binary32 and the sum then to the dtype.

**Tables.** With m the magnitude of p, ``e = max(m >> M, 1)`` and ``k = s - 2 e``: if ``k < -4``, the word is *near*;
with ``k' = max(k, -2 M - 8)`` it has table ``k' + 2 M + 8`` and ``max(0, floor(k' / 2) + M - 4)`` low bits. Else it is
*far* and has M - 3 low bits; with ``h = floor(s / 2)`` and ``q = min(max(4 h - (m >> (M - 2)), -11), 12)``, its table
is ``2 M + 4 + 24 (s mod 2) + q + 11``. The tables are static (`pltpack.codec.predicted_tables`).

**Words.** Symbol 0 is an escape: the word is the next escape, whatever its low bits. A near word is ``d`` places above
p in the order of the numbers (`pltpack.codec.delta`), below if p has a sign bit, modulo 2^16, with
``d = ((symbol - 128) << low bits) + low``. A far word has the magnitude ``t << (M - 3) | low`` with
``t = (symbol mod 128 + 8 (h - 12)) mod 2^(18 - M)``, and p's sign, or the opposite if the symbol is 128 or above.
"""

from __future__ import annotations

import functools
import math
import struct
from typing import Any, NamedTuple

import ml_dtypes
import numba
import numpy as np

from pltpack.codec import delta, rans_mixed
from pltpack.codec.delta import Words
from pltpack.codec.payload import Reader, expand, squeeze
from pltpack.codec.predicted_tables import BELOW, FAR, MANTISSA, RATIOS, static

_FLOATS = {"BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16)}
_BIAS = {"BF16": 127, "F16": 15}
_BASES = (-1024, 1024)
_MOST_RATIO = RATIOS[1] - RATIOS[0]
#: A t variable's scale over its mean magnitude.
_SCALE = 1.131
#: What an offset must save.
_OFFSET_BITS = 5.0
#: Half octaves below all others that a channel without differences is put at.
_STILL = 60


class _Model(NamedTuple):
    """See the module's text; `scales` is int32 ``[R]``, base and channel together."""

    base: int
    channel: np.ndarray
    offset: np.ndarray
    token: np.ndarray

    @property
    def scales(self) -> np.ndarray:
        found: np.ndarray = self.base + self.channel.astype(np.int32)
        return found


def supports(dtype: str) -> bool:
    """Whether the mode exists for a dtype."""
    return dtype in MANTISSA


def encode(words: Words, reference: Words, dtype: str) -> bytes:
    """The body for words ``[H, N, D]`` of a dtype that has the mode."""
    rows, base = delta.channel_rows(words), delta.channel_rows(reference)
    model = _fit(rows.view(_FLOATS[dtype]).astype(np.float32), base.view(_FLOATS[dtype]).astype(np.float32), dtype)
    predictions = _predict(base, model, dtype)
    mantissa = MANTISSA[dtype]
    tables = static(mantissa)
    kinds, symbols = np.empty(rows.shape, np.uint8), np.empty(rows.shape, np.uint8)
    escapes, low = np.empty(rows.size, np.uint16), np.zeros(2 * rows.size + 8, np.uint8)
    count, size = _to_symbols(mantissa)(rows, predictions, model.scales, model.token, tables.freqs, kinds, symbols,
                                        escapes, low)  # fmt: skip
    stream = rans_mixed.encode(symbols, kinds, tables.coding)
    frame = squeeze(struct.pack("<h", model.base) + b"".join(part.tobytes() for part in model[1:]))
    return b"".join([struct.pack("<4I", count, len(stream), size, len(frame)), frame,
                     escapes[:count].astype("<u2", copy=False).tobytes(), stream, low[:size].tobytes()])  # fmt: skip


def decode(reader: Reader, words: Words, reference: Words, dtype: str) -> None:
    """Fill `words` from the reference and a body.

    Raises
    ------
    ValueError
        If the body is malformed.
    """
    base = delta.channel_rows(reference)
    count, length, size, packed = (reader.u32() for _ in range(4))
    if count > base.size:
        raise ValueError("number of escapes is out of range")
    model = _read_model(reader.take(packed), base.shape)
    escapes = reader.array(count, "<u2").astype(np.uint16)
    stream, low = reader.take(length), reader.array(size, "u1")
    reader.end()
    mantissa = MANTISSA[dtype]
    tables = static(mantissa)
    predictions = _predict(base, model, dtype)
    kinds = np.empty(base.shape, np.uint8)
    if _to_kinds(mantissa)(predictions, model.scales, model.token, kinds) != size:
        raise ValueError("low bits do not fit the unit")
    symbols = rans_mixed.decode(stream, kinds, tables.slots)
    padded = np.zeros(size + 8, np.uint8)
    padded[:size] = low
    rows = predictions
    if _to_words(mantissa)(symbols, kinds, model.scales, model.token, escapes, padded, rows) != count:
        raise ValueError("escapes are damaged")
    delta.spread_rows(rows, words)


def _read_model(frame: memoryview, shape: tuple[int, int]) -> _Model:
    channels, tokens = shape
    reader = Reader(memoryview(expand(frame, 2 + 2 * channels + tokens)))
    base = int(reader.array(1, "<i2")[0])
    if not _BASES[0] <= base <= _BASES[1]:
        raise ValueError("scale of the differences is out of range")
    return _Model(base, reader.array(channels, "u1"), reader.array(channels, "i1"), reader.array(tokens, "i1"))


def _predict(rows: np.ndarray, model: _Model, dtype: str) -> np.ndarray:
    """Words of the predictions, a new array, from those of the reference."""
    out = rows.copy()
    moved = np.flatnonzero(model.offset)
    if len(moved):
        exponents = (model.scales[moved] >> 1) - 2 - _BIAS[dtype]
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            offsets = np.ldexp(model.offset[moved].astype(np.float64), exponents).astype(np.float32)
            values = rows[moved].view(_FLOATS[dtype])
            sums = (values.astype(np.float32) + offsets[:, None]).astype(values.dtype).view(np.uint16)
        top = np.uint16(0x8000 - (1 << MANTISSA[dtype]))
        out[moved] = np.where(rows[moved] & top == top, rows[moved], sums)
    return out


# --- the encoder's model -------------------------------------------------------------------------------------------


@numba.njit(nogil=True, cache=True)
def _half_octaves(value: float) -> int:
    """``2 * log2(value)``, rounded, of a number above 0: comparisons only, so the same everywhere."""
    fraction, exponent = math.frexp(value)
    # 2^-3/4 and 2^-1/4.
    return 2 * exponent - (2 if fraction < 0.5946035575013605 else 1 if fraction < 0.8408964152537145 else 0)


@numba.njit(nogil=True, cache=True)
def _powers() -> Any:
    """``2^(i / 2)`` for i from -127 to 127."""
    out = np.empty(255, np.float64)
    for i in range(-127, 128):
        out[i + 127] = 2.0 ** (i >> 1) * (1.4142135623730951 if i & 1 else 1.0)
    return out


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _measure(differences: Any, channel: Any, token: Any, rounds: int) -> None:
    """Fit scales of rows, int32 ``[R]`` in half octaves (very low where all differences are 0), and of columns."""
    rows, columns = differences.shape
    powers = _powers()
    sums = np.empty(columns, np.float64)
    for turn in range(rounds):
        for r in range(rows):
            total = 0.0
            for n in range(columns):
                total += abs(differences[r, n]) * powers[127 - token[n]]
            channel[r] = _half_octaves(total * (_SCALE / columns)) if total > 0 else -10000
        if turn == rounds - 1:
            break
        sums[:] = 0
        live = 0
        for r in range(rows):
            if channel[r] > -10000:
                live += 1
                fraction, exponent = (1.4142135623730951 if channel[r] & 1 else 1.0), channel[r] >> 1
                factor = math.ldexp(1.0 / fraction, -exponent)
                for n in range(columns):
                    sums[n] += abs(differences[r, n]) * factor
        for n in range(columns):
            token[n] = min(max(_half_octaves(sums[n] * (_SCALE / live)), -12), 100) if sums[n] > 0 else -12
        if live == 0:
            token[:] = 0


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _offsets(differences: Any, token: Any, out: Any) -> None:
    """Means of the rows' differences, float64 ``[R]``, each column weighted by its precision."""
    rows, columns = differences.shape
    powers = _powers()
    for r in range(rows):
        total = weights = 0.0
        for n in range(columns):
            weight = powers[127 - token[n]] ** 2
            total += differences[r, n] * weight
            weights += weight
        out[r] = total / weights


def _fit(values: np.ndarray, reference: np.ndarray, dtype: str) -> _Model:
    """The model of the differences between two matrices, float32 ``[R, N]``."""
    with np.errstate(invalid="ignore", over="ignore"):
        differences = values.astype(np.float64) - reference
    differences[~np.isfinite(differences)] = 0
    rows, columns = differences.shape
    scales, token, means = np.empty(rows, np.int32), np.zeros(columns, np.int32), np.empty(rows)
    _measure(differences, scales, token, 3)
    _offsets(differences, token, means)
    steps = np.ldexp(1.0, (np.maximum(scales, -2000) >> 1) - 2)
    offset = np.clip(np.rint(means / steps), -127, 127)
    # An offset of q quarters of the scale saves about q^2 / 32 bits a token.
    offset[(offset * offset * (columns / 32) < _OFFSET_BITS) | (scales < -4000)] = 0
    if offset.any():
        _measure(differences - (offset * steps)[:, None], scales, token, 2)
    scales = scales + 2 * _BIAS[dtype]
    live = scales > -4000
    base = max(int(scales[live].min()) - _STILL if live.any() else 0, _BASES[0])
    channel = np.where(live, np.clip(scales - base, 0, 255), 0).astype(np.uint8)
    found = base + channel.astype(np.int32)
    # The step follows the scale, which is smaller now that the mean is taken off.
    steps = np.ldexp(1.0, (found >> 1) - 2 - _BIAS[dtype])
    offset = np.clip(np.rint(np.where((offset != 0) & live, means, 0) / steps), -127, 127)
    return _Model(base, channel, offset.astype(np.int8), token.astype(np.int8))


# --- words and symbols ---------------------------------------------------------------------------------------------


@numba.njit(nogil=True, cache=True, inline="always")
def _ordered(word: Any) -> Any:
    word = np.int64(word)
    return 65535 - word if word & 0x8000 else word | 0x8000


@functools.cache
def _kind(mantissa: int) -> Any:
    """The table of a word and its number of low bits, from prediction and scale; a far word's is M - 3."""
    least, tables = -2 * mantissa - 8, 2 * mantissa + 4

    @numba.njit(nogil=True, cache=True, inline="always")
    def kernel(prediction, scale):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        magnitude = np.int64(prediction) & 0x7FFF
        octaves = scale - 2 * max(magnitude >> mantissa, 1)
        near = max(octaves, least)
        ratio = min(max(4 * (scale >> 1) - (magnitude >> (mantissa - 2)), RATIOS[0]), RATIOS[1]) - RATIOS[0]
        far = tables + (_MOST_RATIO + 1) * (scale & 1) + ratio
        return (near - least, max(0, (near >> 1) + mantissa - 4)) if octaves < FAR else (far, mantissa - 3)

    return kernel


@functools.cache
def _to_kinds(mantissa: int) -> Any:
    """Kernel that fills the tables of all words; gives the number of bytes of low bits."""
    kind = _kind(mantissa)

    @numba.njit(nogil=True, cache=True)
    def kernel(predictions, scales, token, kinds):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        bits = np.int64(0)
        for r in range(predictions.shape[0]):
            row, out, base = predictions[r], kinds[r], np.int64(scales[r])
            for n in range(row.size):
                table, low = kind(row[n], base + np.int64(token[n]))
                out[n] = np.uint8(table)
                bits += low
        return (bits + 7) // 8

    return kernel


@functools.cache
def _to_symbols(mantissa: int) -> Any:
    """Kernel that makes tables, symbols, escapes and low bits; gives the number of escapes and bytes of low bits."""
    kind = _kind(mantissa)
    tables, down = 2 * mantissa + 4, mantissa - 3
    mask = (1 << (18 - mantissa)) - 1

    @numba.njit(nogil=True, cache=True)
    def kernel(rows, predictions, scales, token, freqs, kinds, symbols, escapes, low):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        count, at, held, bits = 0, 0, np.uint64(0), np.uint64(0)
        for r in range(rows.shape[0]):
            row, guess, base = rows[r], predictions[r], np.int64(scales[r])
            for n in range(row.size):
                scale = base + np.int64(token[n])
                table, width = kind(guess[n], scale)
                word, prediction = np.int64(row[n]), np.int64(guess[n])
                if table < tables:
                    step = _ordered(word) - _ordered(prediction)
                    step = -step if prediction & 0x8000 else step
                    # The nearer way round.
                    step = ((step + 0x8000) & 0xFFFF) - 0x8000
                    symbol = (step >> width) + 128
                    symbol = symbol if 0 < symbol < 256 else 0
                    rest = step & ((1 << width) - 1)
                else:
                    t = (((word & 0x7FFF) >> down) - 8 * ((scale >> 1) - BELOW)) & mask
                    symbol = t | ((word ^ prediction) & 0x8000) >> 8 if t < 128 else 0
                    rest = word & ((1 << down) - 1)
                if symbol == 0 or freqs[table, symbol] == 0:
                    symbol, rest = 0, 0
                    escapes[count] = word
                    count += 1
                kinds[r, n], symbols[r, n] = np.uint8(table), np.uint8(symbol)
                bits |= np.uint64(rest) << held
                held += np.uint64(width)
                while held >= np.uint64(8):
                    low[at] = np.uint8(bits & np.uint64(255))
                    bits >>= np.uint64(8)
                    held -= np.uint64(8)
                    at += 1
        if held > np.uint64(0):
            low[at] = np.uint8(bits)
            at += 1
        return count, at

    return kernel


@functools.cache
def _to_words(mantissa: int) -> Any:
    """Kernel that turns predictions, in `rows`, to words; gives the number of escapes met, which may be too many."""
    tables, down = 2 * mantissa + 4, mantissa - 3
    least = -2 * mantissa - 8
    mask = (1 << (18 - mantissa)) - 1

    @numba.njit(nogil=True, cache=True)
    def kernel(symbols, kinds, scales, token, escapes, low, rows):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        count, at, held, bits = 0, 0, np.int64(0), np.uint64(0)
        for r in range(rows.shape[0]):
            row, line, kind, base = rows[r], symbols[r], kinds[r], np.int64(scales[r])
            for n in range(row.size):
                table, symbol, prediction = np.int64(kind[n]), np.int64(line[n]), np.int64(row[n])
                near = table < tables
                width = max(0, ((table + least) >> 1) + mantissa - 4) if near else down
                while held < width:
                    bits |= np.uint64(low[at]) << np.uint64(held)
                    held += 8
                    at += 1
                rest = np.int64(bits & np.uint64((1 << width) - 1))
                bits >>= np.uint64(width)
                held -= width
                if symbol == 0:
                    row[n] = escapes[count] if count < escapes.size else 0
                    count += 1
                elif near:
                    step = ((symbol - 128) << width) + rest
                    place = _ordered(prediction) + (-step if prediction & 0x8000 else step)
                    place &= 0xFFFF
                    row[n] = np.uint16(place ^ 0x8000 if place & 0x8000 else 65535 - place)
                else:
                    scale = base + np.int64(token[n])
                    t = ((symbol & 127) + 8 * ((scale >> 1) - BELOW)) & mask
                    row[n] = np.uint16(t << down | rest | ((prediction ^ (symbol << 8)) & 0x8000))
        return count

    return kernel
