"""Compiled loops of the lossless codec's mode *predicted*: words to tables, symbols and low bits, and back.

Loops over one row do one thing to all of it without a branch, for the compiler to work on many words at once; what
depends on the word before, the place of its low bits, has loops of its own.
"""

from __future__ import annotations

import functools
from typing import Any

import numba
import numpy as np

from pltpack.codec.predicted_tables import BELOW, FAR, RATIOS

_LEAST_RATIO, _MOST_RATIO = RATIOS
_RATIOS = _MOST_RATIO - _LEAST_RATIO + 1
_I32 = np.int32


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

    Fills symbols and low bits (`rest`), uint8 ``[R, N]``, and the escaped words; gives their number. `coded` says which
    symbols have a code and are no escapes, uint8 ``[256 K]``.
    """
    tables, down = 2 * mantissa + 4, mantissa - 3
    mask = (1 << (18 - mantissa)) - 1

    @numba.njit(nogil=True, cache=True)
    def kernel(rows, predictions, scales, token, kinds, coded, symbols, rest, escapes):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        count = 0
        codes = np.empty(rows.shape[1], np.uint16)
        for r in range(rows.shape[0]):
            row, guess, kind, base = rows[r], predictions[r], kinds[r], scales[r]
            line, low = symbols[r], rest[r]
            for n in range(row.size):
                word, prediction, table = _I32(row[n]), _I32(guess[n]), _I32(kind[n])
                below = -(prediction >> _I32(15))
                ours = word ^ (_I32(0x8000) | -(word >> _I32(15)))
                theirs = prediction ^ (_I32(0x8000) | below)
                # Away from zero, the nearer way round.
                step = _I32(((_I32(ours - theirs) ^ below) - below) << _I32(16)) >> _I32(16)
                # As `shift_of` has it for tables of near words.
                width = max(table >> _I32(1), _I32(8)) - _I32(8)
                place = _I32((step >> width) + _I32(128))
                place = place if _I32(0) < place < _I32(256) else _I32(0)
                start = _I32(8) * (((base + _I32(token[n])) >> _I32(1)) - _I32(BELOW))
                t = _I32((((word & _I32(0x7FFF)) >> _I32(down)) - start) & _I32(mask))
                far = t | (((word ^ prediction) & _I32(0x8000)) >> _I32(8))
                far = far if t < _I32(128) else _I32(0)
                symbol = place if table < _I32(tables) else far
                line[n] = np.uint8(symbol)
                codes[n] = np.uint16(table << _I32(8) | symbol)
                near = step & _I32((_I32(1) << width) - _I32(1))
                low[n] = np.uint8(near if table < _I32(tables) else word & _I32((1 << down) - 1))
            for n in range(row.size):
                if coded[codes[n]] == 0:
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
    tables, down = 2 * mantissa + 4, mantissa - 3
    mask = (1 << (18 - mantissa)) - 1

    @numba.njit(nogil=True, cache=True)
    def kernel(symbols, rest, kinds, scales, token, escapes, rows):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        count = 0
        for r in range(rows.shape[0]):
            row, line, low, kind, base = rows[r], symbols[r], rest[r], kinds[r], scales[r]
            escaped = np.uint8(0)
            for n in range(row.size):
                symbol, prediction, table = _I32(line[n]), _I32(row[n]), _I32(kind[n])
                width = max(table >> _I32(1), _I32(8)) - _I32(8)
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
def _bits_of_fours(kind: Any, mantissa: int, width: Any, pairs: Any, fours: Any) -> None:
    """Low bits of a row's words, of each pair of them and of each four; `width` is 0 behind the row."""
    tables, far = np.uint8(2 * mantissa + 4), np.uint8(mantissa - 3)
    for n in range(kind.size):
        # As `shift_of` has it, for a table of a near word.
        near = np.uint8(max(np.uint8(kind[n] >> np.uint8(1)), np.uint8(8)) - np.uint8(8))
        width[n] = near if kind[n] < tables else far
    two = width.view(np.uint16)
    for n in range(two.size):
        pairs[n] = np.uint16((two[n] & np.uint16(255)) + (two[n] >> np.uint16(8)))
    two_pairs = pairs.view(np.uint32)
    for n in range(two_pairs.size):
        fours[n] = np.uint32((two_pairs[n] & np.uint32(0xFFFF)) + (two_pairs[n] >> np.uint32(16)))


@numba.njit(nogil=True, cache=True)
def pack(rest: Any, kinds: Any, mantissa: int, out: Any) -> Any:
    """Write the low bits of all words to `out`, uint32, the lowest first; the number of bits.

    Four words are put together before one waits for the place of those before it: they have 28 bits at most.
    """
    columns = rest.shape[1]
    # Whole vectors, as loops over a few words take longer than over all lanes; slices would be copied byte by byte.
    size, filled = (columns + 63) // 64 * 16, (columns + 3) // 4
    low, width = np.zeros(4 * size, np.uint8), np.zeros(4 * size, np.uint8)
    two, pairs, fours = np.empty(2 * size, np.uint16), np.empty(2 * size, np.uint16), np.empty(size, np.uint32)
    ones, joined = low.view(np.uint16), two.view(np.uint32)
    first = width.view(np.uint16)
    parts = np.zeros(size, np.uint32)
    at = held = bits = np.uint64(0)
    for r in range(rest.shape[0]):
        _bits_of_fours(kinds[r], mantissa, width, pairs, fours)
        row = rest[r]
        for n in range(columns):
            low[n] = row[n]
        for n in range(2 * size):
            word = np.uint32(ones[n])
            two[n] = np.uint16(word & np.uint32(255) | (word >> np.uint32(8)) << np.uint32(first[n] & np.uint16(255)))
        for n in range(size):
            word = joined[n]
            parts[n] = word & np.uint32(0xFFFF) | (word >> np.uint32(16)) << np.uint32(pairs[2 * n])
        for n in range(filled):
            bits |= np.uint64(parts[n]) << held
            held += np.uint64(fours[n])
            out[at] = np.uint32(bits & np.uint64(0xFFFFFFFF))
            full = held & np.uint64(32)
            bits >>= full
            held &= np.uint64(31)
            at += full >> np.uint64(5)
    out[at] = np.uint32(bits)
    return np.int64(at) * 32 + np.int64(held)


@numba.njit(nogil=True, cache=True)
def unpack(data: Any, kinds: Any, mantissa: int, rest: Any) -> Any:
    """The inverse of `pack`; the number of bits, which may be more than there are in `data`."""
    columns, last = rest.shape[1], np.int64(len(data) - 2)
    # Whole vectors, as loops over a few words take longer than over all lanes; slices would be copied byte by byte.
    size, filled = (columns + 63) // 64 * 16, (columns + 3) // 4
    low, width = np.zeros(4 * size, np.uint8), np.zeros(4 * size, np.uint8)
    two, pairs, fours = np.empty(2 * size, np.uint16), np.empty(2 * size, np.uint16), np.empty(size, np.uint32)
    ones, joined = low.view(np.uint16), two.view(np.uint32)
    first = width.view(np.uint16)
    parts = np.zeros(size, np.uint32)
    one = np.uint32(1)
    at = np.int64(0)
    for r in range(rest.shape[0]):
        _bits_of_fours(kinds[r], mantissa, width, pairs, fours)
        for n in range(filled):
            place: Any = min(at >> 5, last)
            pair = np.uint64(data[place]) | np.uint64(data[place + 1]) << np.uint64(32)
            parts[n] = np.uint32((pair >> np.uint64(at & 31)) & np.uint64(0xFFFFFFFF))
            at += np.int64(fours[n])
        for n in range(size):
            count = np.uint32(pairs[2 * n])
            upper = (parts[n] >> count) & ((one << np.uint32(pairs[2 * n + 1])) - one)
            joined[n] = parts[n] & ((one << count) - one) | upper << np.uint32(16)
        for n in range(2 * size):
            word = np.uint32(two[n])
            count = np.uint32(first[n] & np.uint16(255))
            ones[n] = np.uint16(word & ((one << count) - one) | (word >> count) << np.uint32(8))
        row = rest[r]
        for n in range(columns):
            row[n] = low[n]
    return at
