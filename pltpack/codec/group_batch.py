"""Decoding of many units of the group codec in one compiled call; the bitstream is in `pltpack.codec.group`.

A unit is decoded in a tenth of a millisecond: calls from Python and hand-offs of its lock would take as long again.
Here is the usual kind, bfloat16 with one even dimension. What is of another kind, or damaged in any way, is left to
`pltpack.codec.group_decode`, which takes everything and says what is wrong. Payloads are untrusted: `_parse` places
every part inside the payload before one is read.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numba
import numpy as np

from pltpack.codec import dequantize, quantize, rans, rans_scalar, rans_simd, tokens, vectors
from pltpack.codec.base import DecodeJob
from pltpack.codec.compiled import address_of, head_stride, items_at
from pltpack.codec.group_decode import HEADER, MEAN_UNIT, OWN_MEANS, REFERENCED, SHIFTED, Layer
from pltpack.codec.rans_scalar import LANES, STATE_LOW
from pltpack.codec.rope import Rotation
from pltpack.codec.tokens import COPY, EXACT, SHIFTS
from pltpack.codec.vectors import BLOCK

_HEADER_BYTES = HEADER.size
_RANS_HEADER = rans.HEADER_BYTES

# Columns of the table of units. Addresses are those of arrays that the caller holds; a stride is in words.
_PAYLOAD, _LENGTH, _TOKENS, _HEADS, _DIM, _MEANS, _VALUE_MEANS, _TURN, _TURNED, _COS, _SIN = range(11)
_KEYS, _VALUES, _KEY_STRIDE, _VALUE_STRIDE = range(11, 15)
# Of the reference: addresses 0 if there is none.
_NEAR_KEYS, _NEAR_VALUES, _NEAR_KEY_STRIDE, _NEAR_VALUE_STRIDE = range(15, 19)
# What `_parse` finds: flags, offsets in the payload, then counts.
_FLAGS, _OWN, _LOW, _REST, _STREAM, _CODED, _EXACT_COUNT, _KEY_LOW, _VALUE_LOW, _ESCAPES, _PLACES = range(11)


@numba.njit(nogil=True, cache=True, inline="always")
def _u32(data: Any, at: int) -> Any:
    low = np.int64(data[at]) | np.int64(data[at + 1]) << 8
    return low | np.int64(data[at + 2]) << 16 | np.int64(data[at + 3]) << 24


@numba.njit(nogil=True, cache=True, inline="always")
def _i16(data: Any, at: int) -> Any:
    return np.int16(np.uint16(data[at]) | np.uint16(data[at + 1]) << 8)


@numba.njit(nogil=True, cache=True)
def _parse(data: Any, heads: int, dim: int, near: bool, classes: Any, ranks: Any, codes: Any, bases: Any, kinds: Any,
           places: Any) -> Any:  # fmt: skip
    """Read the fixed part of a payload and place the others; tell whether they fill the payload exactly."""
    runs_at = _HEADER_BYTES + 6 * heads
    if data.size < runs_at:
        return False
    flags, runs, escapes, stream = _u32(data, 0), _u32(data, 4), _u32(data, 8), _u32(data, 12)
    referenced = flags == REFERENCED or flags == REFERENCED | SHIFTED
    if not (flags == 0 or flags == OWN_MEANS or (referenced and near)) or escapes % 2 or runs > data.size - runs_at:
        return False
    for h in range(2 * heads):
        codes[h] = _i16(data, _HEADER_BYTES + 2 * h)
        bases[h] = data[_HEADER_BYTES + 4 * heads + h]
    if tokens.unpack(data[runs_at : runs_at + runs], referenced, classes) != classes.size:
        return False
    own = runs_at + runs
    for t in range(classes.size):
        ranks[t] = classes[t]
    if flags & SHIFTED:
        if (classes.size + 1) // 2 > data.size - own:
            return False
        for t in range(classes.size):
            ranks[t] += np.int16((data[own + t // 2] >> (t % 2 * 4)) & 15) + np.int16(SHIFTS[0])
        own += (classes.size + 1) // 2
    coded, exact, key_low, value_low = quantize.plan(classes, ranks, codes, bases, dim // 2, dim // 2, kinds)
    if coded < 0:
        return False
    places[_FLAGS], places[_OWN] = flags, own
    places[_ESCAPES] = own + (4 * heads * dim if flags == OWN_MEANS else 0)
    places[_LOW] = places[_ESCAPES] + 2 * escapes
    places[_REST] = places[_LOW] + key_low + value_low
    places[_STREAM] = places[_REST] + 2 * heads * exact * dim
    places[_CODED], places[_EXACT_COUNT], places[_KEY_LOW], places[_VALUE_LOW] = coded, exact, key_low, value_low
    return places[_STREAM] + stream == data.size


@numba.njit(nogil=True, cache=True)
def _own_means(data: Any, at: int, codes: Any, dim: int, means: Any) -> None:
    for h in range(codes.size):
        scale = MEAN_UNIT * quantize.step_size(np.int64(codes[h]))
        for d in range(dim):
            means[h * dim + d] = np.float32(_i16(data, at + 2 * (h * dim + d))) * scale


@numba.njit(nogil=True, cache=True)
def _place_exact(symbols: Any, rest: Any, classes: Any, heads: int, dim: int, words: Any) -> None:
    at = 0
    for h in range(heads):
        for t in range(classes.size):
            if classes[t] == EXACT:
                for d in range(dim):
                    words[h, t, d] = np.uint16(symbols[at + d]) << 8 | np.uint16(rest[at + d])
                at += dim


@numba.njit(nogil=True, cache=True)
def _scratch(units: Any) -> Any:
    """Arrays large enough for any of the units."""
    count = heads = dim = symbols = length = near = 0
    for i in range(len(units)):
        count, heads, dim = max(count, units[i, _TOKENS]), max(heads, units[i, _HEADS]), max(dim, units[i, _DIM])
        length = max(length, units[i, _LENGTH])
        size = units[i, _TOKENS] * units[i, _HEADS] * units[i, _DIM]
        symbols, near = max(symbols, 2 * size), max(near, size if units[i, _NEAR_KEYS] else 0)
    return (
        np.empty(count, np.uint8), np.empty(2 * heads, np.int16), np.empty(2 * heads, np.uint8),
        np.empty(4 * heads * count, np.int64), np.empty(_PLACES, np.int64), np.empty(LANES, np.uint32),
        np.empty(2 * dim + 4 * LANES, np.uint8), np.empty(symbols, np.uint8), np.empty(2 * heads * dim, np.float32),
        np.empty(length // 2 + 1, np.int16), np.empty(count, np.int16), np.empty(near, np.float32),
        np.empty(near, np.float32),
    )  # fmt: skip


@numba.njit(nogil=True, cache=True)
def _words(unit: Any, places: Any) -> Any:
    """The words of a unit's rANS stream."""
    return items_at(unit[_PAYLOAD], np.uint8(0), unit[_LENGTH])[places[_STREAM] + _RANS_HEADER :]


@numba.njit(nogil=True, cache=True)
def _tokens(unit: Any, address: int, stride: int) -> Any:
    """Words ``[H, T, D]`` of a unit's arrays, by the columns of their address and their stride."""
    heads, dim, step = unit[_HEADS], unit[_DIM], unit[stride]
    # The arrays cover whole strides: only the first tokens of a head are sure to be there.
    return items_at(unit[address], np.uint16(0), heads * step).reshape((heads, step // dim, dim))[:, : unit[_TOKENS]]


@numba.njit(nogil=True, cache=True)
def _centres(words: Any, turn: int, cos: Any, sin: Any, out: Any) -> None:
    """A reference's values in binary32 ``[H, T, D]``, without their rotation."""
    bits, half, dim = out.view(np.uint32), cos.shape[1] if turn else 0, out.shape[2]
    # What is turned by whole blocks of pairs, and what is turned otherwise or not at all.
    pairs = half // BLOCK * BLOCK if turn == 1 else 0
    first = 2 * half if turn == 1 and pairs == half else 0
    whole = dim // BLOCK * BLOCK
    for h in range(out.shape[0]):
        for t in range(out.shape[1]):
            row, line, wide = words[h, t], out[h, t], bits[h, t]
            if first < dim:
                for d in range(0, whole, BLOCK):
                    vectors.widen(row, d, line, d)
                for d in range(whole, dim):
                    wide[d] = np.uint32(row[d]) << np.uint32(16)
            for i in range(0, pairs, BLOCK):
                vectors.unturn(row, i, half + i, cos[t], sin[t], i, line, i, half + i)
            for i in range(pairs, half):
                at, other = (2 * i, 2 * i + 1) if turn == 2 else (i, half + i)
                x, y, c, s = line[at], line[other], cos[t, i], sin[t, i]
                line[at] = x * c + y * s
                line[other] = y * c - x * s


@numba.njit(nogil=True, cache=True)
def _copy(source: Any, classes: Any, words: Any) -> None:
    for t in range(classes.size):
        if classes[t] == COPY:
            for h in range(words.shape[0]):
                for d in range(words.shape[2]):
                    words[h, t, d] = source[h, t, d]


@numba.njit(nogil=True, cache=True)
def _begin(unit: Any, scratch: Any) -> tuple[int, int]:
    """Prepare a unit's rANS stream: number of its rows, -1 if damaged, and the first word that `tail` holds."""
    classes, codes, bases, kinds, places, states, tail = scratch[:7]
    data, heads, half = items_at(unit[_PAYLOAD], np.uint8(0), unit[_LENGTH]), unit[_HEADS], unit[_DIM] // 2
    count, ranks = unit[_TOKENS], scratch[10]
    if not _parse(data, heads, 2 * half, unit[_NEAR_KEYS] != 0, classes[:count], ranks[:count], codes[: 2 * heads],
                  bases[: 2 * heads], kinds, places):  # fmt: skip
        return -1, 0
    stream = data[places[_STREAM] :]
    if stream.size < _RANS_HEADER or stream.size % 2:
        return -1, 0
    for lane in range(LANES):
        states[lane] = np.uint32(_u32(stream, 4 * lane))
    words = stream[_RANS_HEADER:]
    start = max(0, words.size // 2 - half - LANES)
    last = words.size - 2 * start
    tail[:last] = words[2 * start :]
    tail[last:] = 0
    return 2 * heads * (places[_CODED] + 2 * places[_EXACT_COUNT]), start


@numba.njit(nogil=True, cache=True)
def _finish(unit: Any, scratch: Any, used: int, shrink: Any) -> bool:
    """Turn a unit's symbols into words, in place; tell whether stream and escapes were as long as they should be."""
    classes, codes, bases, _, places, states, _, symbols, means, escapes, ranks, key_near, value_near = scratch
    stream_words = (unit[_LENGTH] - places[_STREAM] - _RANS_HEADER) // 2
    if used != stream_words or (states != np.uint32(STATE_LOW)).any():
        return False
    data = items_at(unit[_PAYLOAD], np.uint8(0), unit[_LENGTH])
    heads, dim, count = unit[_HEADS], unit[_DIM], unit[_TOKENS]
    classes, ranks, codes, bases = classes[:count], ranks[:count], codes[: 2 * heads], bases[: 2 * heads]
    size, shape = heads * dim, (heads, 1, dim)
    turned = unit[_TURNED]
    cos = items_at(unit[_COS], np.float32(0), count * turned).reshape((count, turned))
    sin = items_at(unit[_SIN], np.float32(0), count * turned).reshape((count, turned))
    moving = places[_FLAGS] & REFERENCED != 0
    if moving:
        size, shape = heads * count * dim, (heads, count, dim)
        key_means, value_means = key_near[:size].reshape(shape), value_near[:size].reshape(shape)
        _centres(_tokens(unit, _NEAR_KEYS, _NEAR_KEY_STRIDE), unit[_TURN], cos, sin, key_means)
        _centres(_tokens(unit, _NEAR_VALUES, _NEAR_VALUE_STRIDE), 0, cos, sin, value_means)
    elif places[_OWN] < places[_ESCAPES]:
        _own_means(data, places[_OWN], codes, dim, means)
        key_means, value_means = means[:size].reshape(shape), means[size : 2 * size].reshape(shape)
    else:
        key_means = items_at(unit[_MEANS], np.float32(0), size).reshape(shape)
        value_means = items_at(unit[_VALUE_MEANS], np.float32(0), size).reshape(shape)
    given = (places[_LOW] - places[_ESCAPES]) // 2
    for i in range(given):
        escapes[i] = _i16(data, places[_ESCAPES] + 2 * i)
    key_words, value_words = _tokens(unit, _KEYS, _KEY_STRIDE), _tokens(unit, _VALUES, _VALUE_STRIDE)
    none = np.empty((0, 0, 0), dtype=np.float32)
    rows, half = heads * places[_CODED], dim // 2
    low, middle = places[_LOW], places[_LOW] + places[_KEY_LOW]
    end = dequantize.dequantize(
        symbols[: rows * half].reshape((rows, half)), symbols[rows * half : 2 * rows * half].reshape((rows, half)),
        classes, ranks, bases, codes, shrink, key_means, value_means, moving, data[low:middle],
        data[middle : places[_REST]], escapes[:given], unit[_TURN], cos, sin, key_words, value_words, none, none,
    )  # fmt: skip
    if end != given:
        return False
    exact = heads * places[_EXACT_COUNT] * dim
    if exact:
        at, rest = 2 * rows * half, data[places[_REST] : places[_STREAM]]
        _place_exact(symbols[at : at + exact], rest[:exact], classes, heads, dim, key_words)
        _place_exact(symbols[at + exact : at + 2 * exact], rest[exact:], classes, heads, dim, value_words)
    if moving:
        _copy(_tokens(unit, _NEAR_KEYS, _NEAR_KEY_STRIDE), classes, key_words)
        _copy(_tokens(unit, _NEAR_VALUES, _NEAR_VALUE_STRIDE), classes, value_words)
    return True


# The three loops differ in the rANS loop only: numba's cache cannot tell functions apart that a factory made.
@numba.njit(nogil=True, cache=True)
def _decode_portable(units: Any, tables: Any, shrink: Any, done: Any) -> None:
    scratch = _scratch(units)
    kinds, places, states, tail, symbols = scratch[3:8]
    for i in range(len(units)):
        rows, start = _begin(units[i], scratch)
        if rows >= 0:
            half = units[i, _DIM] // 2
            out = symbols[: rows * half].reshape((rows, half))
            used = rans_scalar.decode_rows(_words(units[i], places), tail, start, states, tables, kinds, out)
            done[i] = _finish(units[i], scratch, used, shrink)


@numba.njit(nogil=True, cache=True)
def _decode_avx2(units: Any, tables: Any, shrink: Any, done: Any) -> None:
    scratch = _scratch(units)
    kinds, places, states, tail, symbols = scratch[3:8]
    for i in range(len(units)):
        rows, start = _begin(units[i], scratch)
        if rows >= 0:
            half = units[i, _DIM] // 2
            out = symbols[: rows * half].reshape((rows, half))
            used = rans_simd.decode_rows_avx2(_words(units[i], places), tail, start, states, tables, kinds, out)
            done[i] = _finish(units[i], scratch, used, shrink)


@numba.njit(nogil=True, cache=True)
def _decode_avx512(units: Any, tables: Any, shrink: Any, done: Any) -> None:
    first, second = _scratch(units), _scratch(units)
    kinds, places, states, tail, symbols = first[3:8]
    kinds2, places2, states2, tail2, symbols2 = second[3:8]
    i = 0
    while i < len(units):
        rows, start = _begin(units[i], first)
        half = units[i, _DIM] // 2
        out = symbols[: max(rows, 0) * half].reshape((max(rows, 0), half))
        rows2, start2 = -1, 0
        if i + 1 < len(units) and units[i + 1, _DIM] == units[i, _DIM]:
            rows2, start2 = _begin(units[i + 1], second)
        out2 = symbols2[: max(rows2, 0) * half].reshape((max(rows2, 0), half))
        if rows >= 0 and rows2 >= 0:
            used, used2 = rans_simd.decode_two_avx512(
                tables, _words(units[i], places), tail, start, states, kinds, out, _words(units[i + 1], places2), tail2,
                start2, states2, kinds2, out2,
            )  # fmt: skip
            done[i], done[i + 1] = _finish(units[i], first, used, shrink), _finish(units[i + 1], second, used2, shrink)
            i += 2
            continue
        if rows >= 0:
            used = rans_simd.decode_rows_avx512(_words(units[i], places), tail, start, states, tables, kinds, out)
            done[i] = _finish(units[i], first, used, shrink)
        i += 1


_LOOPS = {"avx512": _decode_avx512, "avx2": _decode_avx2, "portable": _decode_portable}
_BFLOAT = np.dtype(ml_dtypes.bfloat16)
_NO_TURN = np.zeros(1, dtype=np.float32)


class Batch:
    """Decodes units with one started codec's layers, rANS look-up tables and shrink."""

    def __init__(self, layers: Sequence[Layer], tables: np.ndarray, shrink: np.ndarray) -> None:
        self._layers, self._tables, self._shrink = layers, tables, shrink
        self._loop = _LOOPS[rans.KERNEL]
        self._fixed = [_fixed(layer) for layer in layers]
        self._turn = functools.lru_cache(maxsize=256)(_turn)

    def decode(self, jobs: Sequence[DecodeJob]) -> list[DecodeJob]:
        """Decode what is of the usual kind and sound; give back the others, whose arrays may have been written to."""
        rows, taken, left = [], [], []
        # What the rows have addresses of.
        held: list[object] = []
        for job in jobs:
            row = self._row(job, held)
            if row is None:
                left.append(job)
            else:
                rows.append(row)
                taken.append(job)
        if rows:
            done = np.zeros(len(rows), dtype=np.bool_)
            self._loop(np.array(rows, dtype=np.int64), self._tables, self._shrink, done)
            if not done.all():
                left += [job for job, good in zip(taken, done.tolist(), strict=True) if not good]
        return left

    def _row(self, job: DecodeJob, held: list[object]) -> tuple[int, ...] | None:
        """A unit's row of the table, or None if it is of another kind; `held` keeps its arrays alive."""
        payload, unit, keys, values, reference = job
        fixed = self._fixed[unit.layer]
        if fixed is None or not len(payload):
            return None
        heads, dim = fixed[:2]
        shape = heads, unit.tokens, dim
        near: tuple[int, ...] = (0, 0, 0, 0)
        if reference is not None:
            near = (*map(address_of, reference), *(head_stride(array, shape, _BFLOAT) for array in reference))
            if not (near[2] and near[3]):
                return None
        strides = head_stride(keys, shape, _BFLOAT), head_stride(values, shape, _BFLOAT)
        if not all(strides) or not (keys.flags.writeable and values.flags.writeable):
            return None
        address, data = _place(payload)
        turn = self._turn(self._layers[unit.layer].rotation, unit.position, unit.tokens)
        held += [data, turn]
        return (
            address,
            len(payload),
            unit.tokens,
            *fixed,
            *turn[0],
            address_of(keys),
            address_of(values),
            *strides,
            *near,
        )


def _place(payload: memoryview) -> tuple[int, object]:
    """Address of a payload, and what holds it there."""
    if payload.readonly:
        data = np.frombuffer(payload, np.uint8)
        return address_of(data), data
    # Several times faster, but only for memory that may be written to.
    first = ctypes.c_char.from_buffer(payload)
    return ctypes.addressof(first), first


def _fixed(layer: Layer) -> tuple[int, int, int, int] | None:
    """The columns from heads to means of a layer's units, or None if they are of another kind."""
    g = layer.geometry
    if g.dtype != "BF16" or g.k_dim != g.v_dim or g.k_dim % 2:
        return None
    return g.heads, g.k_dim, address_of(layer.means[0]), address_of(layer.means[1])


def _turn(rotation: Rotation | None, position: int, count: int) -> tuple[tuple[int, int, int, int], object]:
    """The columns of a unit's rotation, and the arrays that they have addresses of."""
    if rotation is None:
        return (0, 0, address_of(_NO_TURN), address_of(_NO_TURN)), _NO_TURN
    cos, sin = rotation.tables(position, count)
    return (2 if rotation.interleaved else 1, cos.shape[1], address_of(cos), address_of(sin)), (cos, sin)
