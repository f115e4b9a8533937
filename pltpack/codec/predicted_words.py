"""Compiled loops of the lossless codec's mode *predicted*: words to tables, symbols and low bits, and back.

Loops over one row do one thing to all of it without a branch, for the compiler to work on many words at once; what
depends on the word before, the place of its low bits, has loops of its own.
"""

from __future__ import annotations

import functools
from typing import Any

import numba
import numpy as np

from pltpack.codec.predicted_tables import BELOW, FAR, RATIOS, shift_of

_LEAST_RATIO, _MOST_RATIO = RATIOS
_RATIOS = _MOST_RATIO - _LEAST_RATIO + 1
_I32 = np.int32


@functools.cache
def widths(mantissa: int) -> np.ndarray:
    """Low bits of the words of each table: int64 ``[K]``."""
    near = [shift_of(octaves, mantissa) for octaves in range(-2 * mantissa - 8, FAR)]
    out = np.array(near + 2 * _RATIOS * [mantissa - 3], dtype=np.int64)
    out.flags.writeable = False
    return out


@functools.cache
def to_kinds(mantissa: int) -> Any:
    """Kernel ``(predictions, scales, token, kinds)`` that fills the tables of all words ``[R, N]``."""
    least, tables = -2 * mantissa - 8, 2 * mantissa + 4
    down = mantissa - 2

    @numba.njit(nogil=True, cache=True)
    def kernel(predictions, scales, token, kinds):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        for r in range(predictions.shape[0]):
            row, out, base = predictions[r], kinds[r], scales[r]
            for n in range(row.size):
                magnitude = _I32(row[n] & np.uint16(0x7FFF))
                scale = _I32(base + _I32(token[n]))
                octaves = _I32(scale - _I32(2) * max(magnitude >> _I32(mantissa), _I32(1)))
                near = _I32(max(octaves, _I32(least)) - _I32(least))
                ratio = _I32(_I32(4) * (scale >> _I32(1)) - (magnitude >> _I32(down)))
                ratio = _I32(min(max(ratio, _I32(_LEAST_RATIO)), _I32(_MOST_RATIO)) - _I32(_LEAST_RATIO))
                far = _I32(_I32(tables) + _I32(_RATIOS) * (scale & _I32(1)) + ratio)
                out[n] = np.uint8(near if octaves < _I32(FAR) else far)

    return kernel


@functools.cache
def to_symbols(mantissa: int) -> Any:
    """Kernel ``(rows, predictions, scales, token, kinds, coded, symbols, rest, escapes) -> escapes``.

    Fills symbols and low bits (`rest`), uint8 ``[R, N]``, and the escaped words; gives their number. `coded` is what
    symbols are coded with, uint32 ``[K, 256]``: one whose low half is 0 has no code.
    """
    least, tables, down = -2 * mantissa - 8, 2 * mantissa + 4, mantissa - 3
    mask = (1 << (18 - mantissa)) - 1

    @numba.njit(nogil=True, cache=True)
    def kernel(rows, predictions, scales, token, kinds, coded, symbols, rest, escapes):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        count = 0
        steps = np.empty(rows.shape[1], np.int32)
        for r in range(rows.shape[0]):
            row, guess, kind, base = rows[r], predictions[r], kinds[r], scales[r]
            line, low = symbols[r], rest[r]
            for n in range(row.size):
                word, prediction = _I32(row[n]), _I32(guess[n])
                ours = word ^ (_I32(0xFFFF) if word & _I32(0x8000) else _I32(0x8000))
                theirs = prediction ^ (_I32(0xFFFF) if prediction & _I32(0x8000) else _I32(0x8000))
                step = _I32(theirs - ours) if prediction & _I32(0x8000) else _I32(ours - theirs)
                # The nearer way round.
                steps[n] = _I32(((step + _I32(0x8000)) & _I32(0xFFFF)) - _I32(0x8000))
            for n in range(row.size):
                table = _I32(kind[n])
                width = max(_I32(((table + _I32(least)) >> _I32(1)) + _I32(mantissa - 4)), _I32(0))
                place = _I32((steps[n] >> width) + _I32(128))
                place = place if _I32(0) < place < _I32(256) else _I32(0)
                word = _I32(row[n])
                start = _I32(8) * (((base + _I32(token[n])) >> _I32(1)) - _I32(BELOW))
                t = _I32((((word & _I32(0x7FFF)) >> _I32(down)) - start) & _I32(mask))
                other = ((word ^ _I32(guess[n])) & _I32(0x8000)) >> _I32(8)
                far = t | other if t < _I32(128) else _I32(0)
                line[n] = np.uint8(place if table < _I32(tables) else far)
            for n in range(row.size):
                table = _I32(kind[n])
                width = max(_I32(((table + _I32(least)) >> _I32(1)) + _I32(mantissa - 4)), _I32(0))
                near = steps[n] & _I32((_I32(1) << width) - _I32(1))
                low[n] = np.uint8(near if table < _I32(tables) else _I32(row[n]) & _I32((1 << down) - 1))
            for n in range(row.size):
                if coded[kind[n], line[n]] & np.uint32(0xFFFF) == 0 or line[n] == 0:
                    line[n] = low[n] = 0
                    escapes[count] = row[n]
                    count += 1
        return count

    return kernel


@functools.cache
def to_words(mantissa: int) -> Any:
    """Kernel ``(symbols, rest, kinds, scales, token, escapes, rows) -> escapes``, the inverse of `to_symbols`.

    Turns predictions, in `rows`, to words; gives the number of escapes met, which may be more than there are.
    """
    least, tables, down = -2 * mantissa - 8, 2 * mantissa + 4, mantissa - 3
    mask = (1 << (18 - mantissa)) - 1

    @numba.njit(nogil=True, cache=True)
    def kernel(symbols, rest, kinds, scales, token, escapes, rows):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        count = 0
        for r in range(rows.shape[0]):
            row, line, low, kind, base = rows[r], symbols[r], rest[r], kinds[r], scales[r]
            escaped = np.uint8(0)
            for n in range(row.size):
                symbol, prediction, table = _I32(line[n]), _I32(row[n]), _I32(kind[n])
                width = max(_I32(((table + _I32(least)) >> _I32(1)) + _I32(mantissa - 4)), _I32(0))
                step = _I32(((symbol - _I32(128)) << width) + _I32(low[n]))
                place = prediction ^ (_I32(0xFFFF) if prediction & _I32(0x8000) else _I32(0x8000))
                place = _I32((place - step if prediction & _I32(0x8000) else place + step) & _I32(0xFFFF))
                near = place ^ (_I32(0x8000) if place & _I32(0x8000) else _I32(0xFFFF))
                start = _I32(8) * (((base + _I32(token[n])) >> _I32(1)) - _I32(BELOW))
                t = _I32(((symbol & _I32(127)) + start) & _I32(mask))
                far = (t << _I32(down)) | _I32(low[n]) | ((prediction ^ (symbol << _I32(8))) & _I32(0x8000))
                row[n] = np.uint16(near if table < _I32(tables) else far)
            for n in range(row.size):
                escaped |= np.uint8(line[n] == 0)
            if escaped:
                for n in range(row.size):
                    if line[n] == 0:
                        row[n] = escapes[count] if count < escapes.size else 0
                        count += 1
        return count

    return kernel


@numba.njit(nogil=True, cache=True)
def pack(rest: Any, kinds: Any, widths: Any, out: Any) -> Any:
    """Write the low bits of all words to `out`, zeros before; the number of bits."""
    at = held = np.int64(0)
    bits = np.uint64(0)
    for r in range(rest.shape[0]):
        for n in range(rest.shape[1]):
            bits |= np.uint64(rest[r, n]) << np.uint64(held)
            held += widths[kinds[r, n]]
            if held >= 32:
                for i in range(4):
                    out[at + i] = np.uint8((bits >> np.uint64(8 * i)) & np.uint64(255))
                bits >>= np.uint64(32)
                held -= 32
                at += 4
    for i in range((held + 7) // 8):
        out[at + i] = np.uint8((bits >> np.uint64(8 * i)) & np.uint64(255))
    return 8 * at + held


@numba.njit(nogil=True, cache=True)
def bits_of(kinds: Any, widths: Any) -> Any:
    """How many low bits words of these tables have."""
    total = np.int64(0)
    for r in range(kinds.shape[0]):
        row = kinds[r]
        for n in range(row.size):
            total += widths[row[n]]
    return total


@numba.njit(nogil=True, cache=True)
def unpack(data: Any, kinds: Any, widths: Any, rest: Any) -> None:
    """The inverse of `pack`; `data` has one byte more than it needs."""
    at = np.int64(0)
    for r in range(rest.shape[0]):
        for n in range(rest.shape[1]):
            width = widths[kinds[r, n]]
            byte = at >> 3
            pair = np.int64(data[byte]) | np.int64(data[byte + 1]) << 8
            rest[r, n] = np.uint8((pair >> (at & 7)) & ((1 << width) - 1))
            at += width
