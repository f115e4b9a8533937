"""Hot loops of the group codec's decoder, one attention head at a time; see `pltpack.codec.quantize`."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from pltpack.codec import fused, vectors
from pltpack.codec.levels import CLASSES, RAW_BITS
from pltpack.codec.quantize import step_size, table_class
from pltpack.codec.tokens import FINEST
from pltpack.codec.vectors import BLOCK


@numba.njit(nogil=True, cache=True, inline="always")
def _planes(low: Any, at: int, width: int, half: int, r: int, digits: Any) -> None:
    # A block of the upper half starts at a whole byte only where half is a multiple of 8.
    blocks = half // BLOCK
    upper = blocks if half % 8 == 0 else 0
    for m in range(digits.size):
        digits[m] = 0
    for p in range(r):
        place = at + p * width
        for b in range(blocks):
            vectors.spread(low, place + 2 * b, p, digits, BLOCK * b)
        for b in range(upper):
            vectors.spread(low, place + half // 8 + 2 * b, p, digits, half + BLOCK * b)
        for d in range(BLOCK * blocks, half):
            digits[d] |= ((low[place + d // 8] >> (d % 8)) & 1) << p
        for d in range(half + BLOCK * upper, 2 * half):
            digits[d] |= ((low[place + d // 8] >> (d % 8)) & 1) << p


@numba.njit(nogil=True, cache=True, inline="always")
def _plain(symbols: Any, at: int, step: Any, shrink: Any, centres: Any, centre: int, line: Any) -> bool:
    half = line.size // 2
    whole = half // BLOCK * BLOCK
    escapes = False
    for j in range(0, whole, BLOCK):
        escapes |= vectors.expand(symbols, at + j, line, j, half + j, step, shrink, centres, centre)
    for j in range(whole, half):
        s = np.int32(symbols[at + j])
        escapes |= s == 0
        a, b = np.float32((s & 15) - 8), np.float32((s >> 4) - 8)
        line[j] = (a - shrink * min(max(a, np.float32(-1)), np.float32(1))) * step + centres[centre + j]
        line[half + j] = (b - shrink * min(max(b, np.float32(-1)), np.float32(1))) * step + centres[centre + half + j]
    return escapes


@numba.njit(nogil=True, cache=True, inline="always")
def _with_digits(symbols: Any, at: int, step: Any, r: int, digits: Any, centres: Any, centre: int, line: Any) -> bool:
    half = line.size // 2
    whole = half // BLOCK * BLOCK
    escapes = False
    for j in range(0, whole, BLOCK):
        escapes |= vectors.expand_digits(symbols, at + j, line, j, half + j, step, r, digits, centres, centre)
    offset = (1 << r) >> 1
    for j in range(whole, half):
        s = np.int64(symbols[at + j])
        escapes |= s == 0
        a = (((s & 15) - 8) << r) + np.int64(digits[j]) - offset
        b = (((s >> 4) - 8) << r) + np.int64(digits[half + j]) - offset
        line[j] = np.float32(a) * step + centres[centre + j]
        line[half + j] = np.float32(b) * step + centres[centre + half + j]
    return escapes


@numba.njit(nogil=True, cache=True, inline="always")
def _rotate(line: Any, cos: Any, sin: Any, at: int, half: int, neighbours: bool) -> None:
    whole = 0 if neighbours else half // BLOCK * BLOCK
    for i in range(0, whole, BLOCK):
        vectors.rotate(line, i, half + i, cos, sin, at + i)
    for i in range(whole, half):
        first, second = (2 * i, 2 * i + 1) if neighbours else (i, half + i)
        x, y = line[first], line[second]
        line[first] = x * cos[at + i] - y * sin[at + i]
        line[second] = y * cos[at + i] + x * sin[at + i]


@numba.njit(nogil=True, cache=True, inline="always")
def _bfloat(bits: Any) -> Any:
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return np.uint16(rounded >> np.uint32(16))


@numba.njit(nogil=True, cache=True, inline="always")
def _store_bfloat(line: Any, bits: Any, words: Any, h: int, t: int) -> None:
    dim = words.shape[2]
    whole = dim // BLOCK * BLOCK
    at = h * (words.strides[0] // 2) + t * dim
    for d in range(0, whole, BLOCK):
        vectors.to_bfloat(line, d, words, at + d)
    for d in range(whole, dim):
        words[h, t, d] = _bfloat(bits[d])


@numba.njit(nogil=True, cache=True)
def _escaped_pairs(symbols: Any, place: int, half: int, step: Any, centres: Any, centre: int, escapes: Any, used: int,
                   turned: bool, cos: Any, sin: Any, turn: int, line: Any, bits: Any, words: Any, h: int,
                   t: int) -> int:  # fmt: skip
    """Write the words of a row's escaped pairs; the escaped values used by then, -1 if there are too few."""
    for j in range(half):
        if symbols[place + j] == 0:
            if used + 2 > escapes.size:
                return -1
            x = np.float32(escapes[used]) * step + centres[centre + j]
            y = np.float32(escapes[used + 1]) * step + centres[centre + half + j]
            line[0], line[1] = x, y
            if turned:
                c, s = cos[turn + j], sin[turn + j]
                line[0], line[1] = x * c - y * s, y * c + x * s
            words[h, t, j], words[h, t, half + j] = _bfloat(bits[0]), _bfloat(bits[1])
            used += 2
    return used


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _heads(
    symbols: Any,
    classes: Any,
    ranks: Any,
    bases: Any,
    codes: Any,
    shrink: Any,
    centres: Any,
    moving: bool,
    low: Any,
    escapes: Any,
    used: int,
    rotation: int,
    cos: Any,
    sin: Any,
    words: Any,
    floats: Any,
) -> int:
    half = symbols.shape[1]
    symbols, centres = symbols.reshape(symbols.size), centres.reshape(centres.size)
    cos, sin = cos.reshape(cos.size), sin.reshape(sin.size)
    width = (2 * half + 7) // 8
    turned = cos.size // classes.size
    # Tables have up to 9 low bits.
    digits = np.zeros(2 * half, dtype=np.uint16)
    line = np.zeros(2 * half, dtype=np.float32)
    bits = line.view(np.uint32)
    marks = np.empty(classes.size, dtype=np.uint8)
    # The usual case needs no memory between symbols and words: whole blocks, and RoPE on a symbol's own pairs.
    usual = half % BLOCK == 0 and words.size > 0 and words.shape[2] == 2 * half
    usual = usual and (rotation == 0 or (rotation == 1 and turned == half))
    steps = np.empty(FINEST + 1, dtype=np.float32)
    row = at = 0
    for h in range(bases.size):
        for c in range(FINEST + 1):
            steps[c] = step_size(np.int64(codes[h]) - 4 * c)
        t = 0
        while t < classes.size:
            token = np.int64(classes[t])
            if token > FINEST:
                t += 1
                continue
            k = table_class(bases[h], ranks[t])
            r = RAW_BITS[k]
            step = steps[token]
            place = row * half
            centre = (h * classes.size + t if moving else h) * 2 * half
            if usual and r <= fused.WIDEST:
                end = t + 1
                while end < classes.size and classes[end] == token and ranks[end] == ranks[t]:
                    end += 1
                fused.rows(symbols, place, low, at, r, half, step, shrink[k], centres, centre, 2 * half * moving,
                           rotation == 1, cos, sin, t * turned, words, h * (words.strides[0] // 2) + t * 2 * half,
                           end - t, marks)  # fmt: skip
                for i in range(end - t):
                    if marks[i]:
                        used = _escaped_pairs(
                            symbols, place + i * half, half, step, centres, centre + 2 * half * moving * i, escapes,
                            used, rotation == 1, cos, sin, (t + i) * turned, line, bits, words, h, t + i,
                        )  # fmt: skip
                        if used < 0:
                            return used
                at += (end - t) * r * width
                row += end - t
                t = end
                continue
            if r == 0:
                escaped = _plain(symbols, place, step, shrink[k], centres, centre, line)
            else:
                _planes(low, at, width, half, r, digits)
                at += r * width
                escaped = _with_digits(symbols, place, step, r, digits, centres, centre, line)
            if escaped:
                for j in range(half):
                    if symbols[place + j] == 0:
                        if used + 2 > escapes.size:
                            return -1
                        line[j] = np.float32(escapes[used]) * step + centres[centre + j]
                        line[half + j] = np.float32(escapes[used + 1]) * step + centres[centre + half + j]
                        used += 2
            if rotation:
                _rotate(line, cos, sin, t * turned, turned, rotation == 2)
            if words.size:
                _store_bfloat(line, bits, words, h, t)
            else:
                for d in range(floats.shape[2]):
                    floats[h, t, d] = line[d]
            row += 1
            t += 1
    return used


@numba.njit(nogil=True, cache=True)
def dequantize(
    key_symbols: Any,
    value_symbols: Any,
    classes: Any,
    ranks: Any,
    bases: Any,
    codes: Any,
    shrink: Any,
    key_centres: Any,
    value_centres: Any,
    moving: bool,
    key_low: Any,
    value_low: Any,
    escapes: Any,
    rotation: int,
    cos: Any,
    sin: Any,
    key_words: Any,
    value_words: Any,
    key_floats: Any,
    value_floats: Any,
) -> Any:
    """Decode all heads of a unit.

    Parameters
    ----------
    key_symbols, value_symbols : ndarray
        uint8 ``[H * coded tokens, P]``, heads in order.
    classes : ndarray
        Token classes, uint8 ``[T]``; rows of exact and copied tokens are left as they are.
    ranks : ndarray
        Token classes plus shifts of their tables, ``[T]``.
    bases, codes : ndarray
        Table classes (uint8) and step codes (int16) of all heads ``[2 H]``.
    shrink : ndarray
        float32 ``[54]``.
    key_centres, value_centres : ndarray
        Predictions, float32 ``[H, 1, 2 P]``, or ``[H, T, 2 P]`` when `moving`.
    key_low, value_low, escapes : ndarray
        The planes (uint8), as many as `plan` counted, and the escaped values (int16).
    rotation : int
        0 none, 1 halves, 2 neighbouring pairs, with `cos` and `sin` float32 ``[T, dim / 2]``.
    key_words, value_words, key_floats, value_floats : ndarray
        uint16 or float32 ``[H, T, D]``; of each two, the one that is not empty is filled. The last two axes of words
        are contiguous.

    Returns
    -------
    int
        Escaped values used; -1 if there are too few.
    """
    heads = bases.size // 2
    used = _heads(key_symbols, classes, ranks, bases[:heads], codes[:heads], shrink[:CLASSES], key_centres, moving,
                  key_low, escapes, 0, rotation, cos, sin, key_words, key_floats)  # fmt: skip
    if used < 0:
        return used
    return _heads(value_symbols, classes, ranks, bases[heads:], codes[heads:], shrink[CLASSES:], value_centres,
                  moving, value_low, escapes, used, 0, cos, sin, value_words, value_floats)  # fmt: skip
