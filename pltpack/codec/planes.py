"""Compiled loops of the lossless codec: channel rows, and the split of words into symbols and low bits.

All kernels release the GIL and work on unsigned views of the cache: uint8, uint16 or uint32 words. Their callers check
shapes and lengths; `merge`, which reads an untrusted list, checks that itself.
"""

from __future__ import annotations

import functools
from typing import Any

import numba
import numpy as np

from pltpack.codec import tiles

_BLOCK = 32


@numba.njit(nogil=True, cache=True)
def _to_rows(words: Any, rows: Any) -> None:
    heads, tokens, dim = words.shape
    for h in range(heads):
        for t0 in range(0, tokens, _BLOCK):
            t1 = min(t0 + _BLOCK, tokens)
            for d in range(dim):
                row = rows[h * dim + d]
                for t in range(t0, t1):
                    row[t] = words[h, t, d]


@numba.njit(nogil=True, cache=True)
def _from_rows(rows: Any, words: Any) -> None:
    heads, tokens, dim = words.shape
    for h in range(heads):
        for t0 in range(0, tokens, _BLOCK):
            t1 = min(t0 + _BLOCK, tokens)
            for d in range(dim):
                row = rows[h * dim + d]
                for t in range(t0, t1):
                    words[h, t, d] = row[t]


@functools.cache
def by_four(word_bits: int) -> tuple[Any, Any]:
    """Both transposes for words of 8 or 16 bits, four of them taken as one: a quarter of the items to move."""
    one, two, three = (np.uint64(i * word_bits) for i in (1, 2, 3))

    @numba.njit(nogil=True, cache=True)
    def to(packed, rows):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        heads, tokens, quads = packed.shape
        for h in range(heads):
            for q in range(quads):
                r = 4 * (h * quads + q)
                row0, row1, row2, row3 = rows[r], rows[r + 1], rows[r + 2], rows[r + 3]
                for t in range(tokens):
                    word = np.uint64(packed[h, t, q])
                    row0[t] = word
                    row1[t] = word >> one
                    row2[t] = word >> two
                    row3[t] = word >> three

    @numba.njit(nogil=True, cache=True)
    def back(rows, packed):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        heads, tokens, quads = packed.shape
        for h in range(heads):
            for q in range(quads):
                r = 4 * (h * quads + q)
                row0, row1, row2, row3 = rows[r], rows[r + 1], rows[r + 2], rows[r + 3]
                for t in range(tokens):
                    low = np.uint64(row0[t]) | (np.uint64(row1[t]) << one)
                    packed[h, t, q] = low | (np.uint64(row2[t]) << two) | (np.uint64(row3[t]) << three)

    return to, back


def _quads(words: np.ndarray) -> np.ndarray | None:
    if words.itemsize > 2 or words.shape[2] % 4 or words.strides[2] != words.itemsize:
        return None
    return words.view(f"u{4 * words.itemsize}")


def to_rows(words: np.ndarray, rows: np.ndarray) -> None:
    """Copy ``[H, T, D]``, any strides, to channel rows ``[H * D, T]``."""
    if tiles.fits(words) and rows.strides[1] == 2:
        tiles.to_rows(words, rows)
        return
    packed = _quads(words)
    if packed is None:
        _to_rows(words, rows)
    else:
        by_four(8 * words.itemsize)[0](packed, rows)


def from_rows(rows: np.ndarray, words: np.ndarray) -> None:
    """Inverse of `to_rows`."""
    if tiles.fits(words) and rows.strides[1] == 2:
        tiles.from_rows(rows, words)
        return
    packed = _quads(words)
    if packed is None:
        _from_rows(rows, words)
    else:
        by_four(8 * words.itemsize)[1](rows, packed)


@numba.njit(nogil=True, cache=True)
def equal_pairs(plane: Any, step: int) -> tuple[int, int]:
    """Number of every `step`-th byte of a plane ``[N]``, and of ordered pairs of them that are equal."""
    counts = np.zeros(256, dtype=np.int64)
    size = pairs = 0
    for i in range(0, plane.size, step):
        pairs += 2 * counts[plane[i]]
        counts[plane[i]] += 1
        size += 1
    return size, pairs


@functools.cache
def measure(word_bits: int, low: int, step_bits: int) -> Any:
    """The kernel ``(rows, scale, normal, negative)`` that adds up what places a channel's window.

    Per row of `rows` ``[R, N]``: the sum of the exponents and the number of words whose exponent is not 0, and the
    number of words with a set sign; int64 ``[R]`` each.
    """
    mask = (1 << (word_bits - low - 1 - step_bits)) - 1
    down = low + step_bits
    sign = word_bits - 1

    @numba.njit(nogil=True, cache=True)
    def kernel(rows, scale, normal, negative):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        for r in range(rows.shape[0]):
            row = rows[r]
            total, count, signs = np.uint32(0), np.uint32(0), np.uint32(0)
            for n in range(row.size):
                exponent = np.uint32((row[n] >> down) & mask)
                total += exponent
                count += np.uint32(exponent > 0)
                signs += np.uint32(row[n] >> sign)
            scale[r] += total
            normal[r] += count
            negative[r] += signs

    return kernel


@functools.cache
def count(word_bits: int, low: int) -> Any:
    """The kernel ``(rows, start, mirror, counts)`` that counts symbols.

    `start` and `mirror` are those of `split`; `counts` is uint32 ``[R, 257]``, the last for words outside the window.
    """
    mask = np.uint16((1 << (word_bits - low - 1)) - 1)
    down = word_bits - low - 8

    @numba.njit(nogil=True, cache=True)
    def kernel(rows, start, mirror, counts):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        for r in range(rows.shape[0]):
            row, bins, first, flip = rows[r], counts[r], start[r], mirror[r]
            for n in range(row.size):
                top = np.uint16(row[n] >> low)
                t = np.uint16(np.uint16(top - first) & mask)
                symbol = np.int64((t & 127) | (((top >> down) & 128) ^ flip))
                bins[symbol if t < 128 else 256] += np.uint32(1)

    return kernel


@functools.cache
def split(word_bits: int, low: int) -> tuple[Any, Any]:
    """The kernels that split words of one width into window symbols and escaped tops.

    ``symbols(rows, base, mirror, table, escape, out, far)``: `rows` ``[R, N]``; `base` and `mirror` uint16 ``[R]``
    (window start; 128 where signs are mirrored); `table` ``[R]``; `escape` uint8 ``[C]``; `out` uint8 ``[R, N]`` is
    filled, with the escape symbol where a word is outside the window; `far` uint8 ``[R]`` tells which rows have such a
    word. The shift is a constant of the kernel, since a variable one keeps the compiler from working on 16-bit lanes.

    ``escapes(rows, base, table, plain, symbols, marked, out)`` collects the tops of all words in the rows `marked`
    (uint8 ``[R]``) that are outside the window, or whose symbol may not stand for itself (`plain`, bool ``[C, 256]``),
    in `out` uint16 ``[R * N]``; it returns their number.
    """
    mask = np.uint16((1 << (word_bits - low - 1)) - 1)
    down = word_bits - low - 8

    @numba.njit(nogil=True, cache=True)
    def symbols(rows, base, mirror, table, escape, out, far):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        for r in range(rows.shape[0]):
            row, line = rows[r], out[r]
            start, flip = base[r], mirror[r]
            widest = np.uint16(0)
            for n in range(row.size):
                top = np.uint16(row[n] >> low)
                t = np.uint16(np.uint16(top - start) & mask)
                widest |= t
                line[n] = np.uint8((t & 127) | (((top >> down) & 128) ^ flip))
            far[r] = widest >= 128
            if widest >= 128:
                for n in range(row.size):
                    t = np.uint16(np.uint16(np.uint16(row[n] >> low) - start) & mask)
                    if t >= 128:
                        line[n] = escape[table[r]]

    @numba.njit(nogil=True, cache=True)
    def escapes(rows, base, table, plain, symbols, marked, out):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        count = 0
        for r in range(rows.shape[0]):
            if marked[r]:
                row, line, allowed, start = rows[r], symbols[r], plain[table[r]], base[r]
                for n in range(row.size):
                    top = np.uint16(row[n] >> low)
                    if not allowed[line[n]] or np.uint16(np.uint16(top - start) & mask) >= 128:
                        out[count] = top
                        count += 1
        return count

    return symbols, escapes


@functools.cache
def merge(word_bits: int, low: int) -> Any:
    """The inverse of `split`: adds tops to `rows`, which hold the low bits.

    Called as ``kernel(symbols, base, mirror, table, escape, escapes, rows)``. Returns the number of escapes used, or -1
    if there are too few or one is out of range.
    """
    mask = np.uint16((1 << (word_bits - low - 1)) - 1)
    up = word_bits - low - 8
    limit = 1 << (word_bits - low)
    keep = (1 << low) - 1

    @numba.njit(nogil=True, cache=True)
    def kernel(symbols, base, mirror, table, escape, escapes, rows):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        count = 0
        for r in range(symbols.shape[0]):
            row, line = rows[r], symbols[r]
            start, flip, code = base[r], mirror[r], escape[table[r]]
            escaped = np.uint8(0)
            for n in range(line.size):
                symbol = np.uint16(line[n])
                top = np.uint16(np.uint16((symbol & 127) + start) & mask) | (((symbol & 128) ^ flip) << up)
                row[n] |= top << low
                escaped |= np.uint8(line[n] == code)
            if escaped:
                for n in range(line.size):
                    if line[n] == code:
                        if count >= escapes.size or escapes[count] >= limit:
                            return -1
                        row[n] = (row[n] & keep) | (np.uint32(escapes[count]) << low)
                        count += 1
        return count

    return kernel


@functools.cache
def bytes_plane(shift: int) -> tuple[Any, Any]:
    """Kernels ``take(rows, plane)`` and ``give(plane, rows)`` of bits ``shift … shift + 7``; `give` adds to `rows`.

    `plane` is uint8 ``[R, N]``.
    """

    @numba.njit(nogil=True, cache=True)
    def take(rows, plane):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        for r in range(rows.shape[0]):
            row, out = rows[r], plane[r]
            for n in range(row.size):
                out[n] = np.uint8((row[n] >> shift) & 255)

    @numba.njit(nogil=True, cache=True)
    def give(plane, rows):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        for r in range(rows.shape[0]):
            row, line = rows[r], plane[r]
            for n in range(row.size):
                row[n] |= np.uint32(line[n]) << shift

    return take, give


@functools.cache
def nibbles_plane(shift: int) -> tuple[Any, Any]:
    """Kernels like `bytes_plane` for bits ``shift … shift + 3``.

    `plane` is uint8 ``[R, ceil(N / 2)]``: byte j holds column j in its low half and column ``j + ceil(N / 2)`` above.
    """

    @numba.njit(nogil=True, cache=True)
    def take(rows, plane):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        half = plane.shape[1]
        for r in range(rows.shape[0]):
            row, out, upper = rows[r], plane[r], rows[r, half:]
            for n in range(upper.size):
                out[n] = np.uint8(((row[n] >> shift) & 15) | (((upper[n] >> shift) & 15) << 4))
            if upper.size < half:
                out[half - 1] = np.uint8((row[half - 1] >> shift) & 15)

    @numba.njit(nogil=True, cache=True)
    def give(plane, rows):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        half = plane.shape[1]
        for r in range(rows.shape[0]):
            row, line, upper = rows[r], plane[r], rows[r, half:]
            for n in range(half):
                row[n] |= np.uint32(line[n] & 15) << shift
            for n in range(upper.size):
                upper[n] |= np.uint32(line[n] >> 4) << shift

    return take, give
