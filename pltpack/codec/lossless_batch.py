"""Encoding of many units of the lossless codec in one compiled call; the bitstream is in `pltpack.codec.lossless`.

Here is the usual kind, bfloat16 that the state's tables fit, without a reference and in the mode `static`. Any other is
left to `pltpack.codec.lossless`, which writes the same bytes for the usual kind too.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numba
import numpy as np

from pltpack.codec import planes, rans, rans_scalar, rans_simd
from pltpack.codec.base import EncodeJob
from pltpack.codec.classes import LAYOUTS, Rows, Tables
from pltpack.codec.compiled import address_of, head_stride, items_at
from pltpack.codec.rans_scalar import LANES, STATE_LOW
from pltpack.snapshot import LayerGeometry

_LAYOUT = LAYOUTS["BF16"]
_SYMBOLS, _ESCAPES = planes.split(_LAYOUT.word_bits, _LAYOUT.low)
_NIBBLES = planes.nibbles_plane(0)[0]
_TO_ROWS = planes.by_four(_LAYOUT.word_bits)[0]
#: Mode byte, counts, kind of the plane.
_FIXED = 10
_BFLOAT = np.dtype(ml_dtypes.bfloat16)

# Columns of the table of units; the first channel is that of the layer among all layers'.
_KEYS, _VALUES, _KEY_STRIDE, _VALUE_STRIDE, _TOKENS, _HEADS, _KEY_DIM, _VALUE_DIM, _CHANNEL, _OUT = range(10)


@numba.njit(nogil=True, cache=True)
def _scratch(units: Any) -> Any:
    """Arrays large enough for any of the units."""
    size = channels = 0
    for i in range(len(units)):
        count = units[i, _HEADS] * (units[i, _KEY_DIM] + units[i, _VALUE_DIM])
        channels, size = max(channels, count), max(size, count * units[i, _TOKENS])
    return (np.empty(size, np.uint16), np.empty(size, np.uint8), np.empty(channels, np.uint8),
            np.empty(channels, np.uint8), np.empty(size, np.uint16), np.empty(LANES, np.uint32))  # fmt: skip


@numba.njit(nogil=True, cache=True)
def _fill(address: int, heads: int, stride: int, count: int, dim: int, rows: Any) -> None:
    # Only words of the first `count` tokens of a head are sure to be there.
    quads = items_at(address, np.uint64(0), heads * stride // 4)
    _TO_ROWS(quads.reshape((heads, stride // dim, dim // 4))[:, :count], rows)


@numba.njit(nogil=True, cache=True)
def _begin(unit: Any, scratch: Any, start: Any, mirror: Any, table: Any, escape: Any) -> tuple[int, int]:
    """Make a unit's symbols; its numbers of channels and tokens."""
    words, symbols, far = scratch[:3]
    heads, count, dims = unit[_HEADS], unit[_TOKENS], (unit[_KEY_DIM], unit[_VALUE_DIM])
    middle, channels = heads * dims[0], heads * (dims[0] + dims[1])
    rows = words[: channels * count].reshape((channels, count))
    _fill(unit[_KEYS], heads, unit[_KEY_STRIDE], count, dims[0], rows[:middle])
    _fill(unit[_VALUES], heads, unit[_VALUE_STRIDE], count, dims[1], rows[middle:])
    mine = slice(unit[_CHANNEL], unit[_CHANNEL] + channels)
    out = symbols[: channels * count].reshape((channels, count))
    _SYMBOLS(rows, start[mine], mirror[mine], table[mine], escape, out, far)
    return channels, count


@numba.njit(nogil=True, cache=True)
def _put(out: Any, at: int, value: int) -> None:
    for i in range(4):
        out[at + i] = (value >> 8 * i) & 255


@numba.njit(nogil=True, cache=True)
def _finish(unit: Any, scratch: Any, first: int, start: Any, table: Any, plain: Any, least: int, out: Any) -> int:
    """Write a unit's payload; its length, or 0 if the unit is not of the usual kind."""
    words, symbols, far, marks, coded, states = scratch
    heads, count = unit[_HEADS], unit[_TOKENS]
    channels = heads * (unit[_KEY_DIM] + unit[_VALUE_DIM])
    size = channels * count
    stream = 4 * LANES + 2 * (size - first)
    marked = 0
    for r in range(channels):
        marks[r] |= far[r]
        marked += marks[r]
    # The escapes go where they belong: behind them there is room for what follows, whatever their number.
    at, half = unit[_OUT] + 9, (count + 1) // 2
    mine = slice(unit[_CHANNEL], unit[_CHANNEL] + channels)
    rows = words[:size].reshape((channels, count))
    escapes = np.empty(marked * count, np.uint16)
    found = _ESCAPES(rows, start[mine], table[mine], plain, symbols[:size].reshape((channels, count)), marks, escapes)
    if 64 * found > size or 16 * stream > 15 * size + 64 * LANES:
        return 0
    out[unit[_OUT]] = 2
    _put(out, unit[_OUT] + 1, found)
    _put(out, unit[_OUT] + 5, stream)
    out[at : at + 2 * found] = escapes[:found].view(np.uint8)
    at += 2 * found
    out[at : at + 4 * LANES] = states.view(np.uint8)
    at += 4 * LANES
    out[at : at + 2 * (size - first)] = coded[first:size].view(np.uint8)
    at += 2 * (size - first)
    out[at] = 0
    plane = out[at + 1 : at + 1 + channels * half]
    _NIBBLES(rows, plane.reshape((channels, half)))
    sample, pairs = planes.equal_pairs(plane, max(1, plane.size // least))
    if 256 * pairs > (5 * sample * (sample - 1)) // 4:
        return 0
    length = at + 1 + plane.size - unit[_OUT]
    return length if length <= 2 * size else 0


# The two loops differ in the rANS loop only: numba's cache cannot tell functions apart that a factory made.
@numba.njit(nogil=True, cache=True)
def _encode_portable(units: Any, start: Any, mirror: Any, table: Any, escape: Any, plain: Any, coding: Any, least: int,
                     out: Any, lengths: Any) -> None:  # fmt: skip
    scratch = _scratch(units)
    _, symbols, _, marks, coded, states = scratch
    for i in range(len(units)):
        channels, count = _begin(units[i], scratch, start, mirror, table, escape)
        size, at = channels * count, units[i, _CHANNEL]
        states[:] = STATE_LOW
        first = rans_scalar.encode_rows(symbols[:size].reshape((channels, count)), table[at : at + channels], coding,
                                        coded[:size], states, marks)  # fmt: skip
        lengths[i] = _finish(units[i], scratch, first, start, table, plain, least, out)


@numba.njit(nogil=True, cache=True)
def _encode_avx512(units: Any, start: Any, mirror: Any, table: Any, escape: Any, plain: Any, coding: Any, least: int,
                   out: Any, lengths: Any) -> None:  # fmt: skip
    scratch = _scratch(units)
    _, symbols, _, marks, coded, states = scratch
    for i in range(len(units)):
        channels, count = _begin(units[i], scratch, start, mirror, table, escape)
        size, at = channels * count, units[i, _CHANNEL]
        states[:] = STATE_LOW
        first = rans_simd.encode_rows_avx512(symbols[:size].reshape((channels, count)), table[at : at + channels],
                                             coding, coded[:size], states, marks)  # fmt: skip
        lengths[i] = _finish(units[i], scratch, first, start, table, plain, least, out)


_LOOPS = {"avx512": _encode_avx512, "avx2": _encode_portable, "portable": _encode_portable}


class Batch:
    """Encodes units with one started codec's channels and tables.

    Parameters
    ----------
    layers : sequence of LayerGeometry
    channels : sequence of Rows
        Per layer.
    tables : Tables
    probe : int
        Bytes looked at to tell whether a plane is worth a try with zstd.
    """

    def __init__(self, layers: Sequence[LayerGeometry], channels: Sequence[Rows], tables: Tables, probe: int) -> None:
        self._layers, self._tables, self._probe = layers, tables, probe
        self._first = np.cumsum([0, *(len(rows.table) for rows in channels)]).tolist()
        self._start, self._mirror, self._table = (
            np.concatenate([getattr(rows, name) for rows in channels]) for name in ("start", "mirror", "table")
        )
        self._loop = _LOOPS[rans.KERNEL]

    def encode(self, jobs: Sequence[EncodeJob]) -> list[bytes | None]:
        """Payloads; None for units of another kind."""
        out: list[bytes | None] = [None] * len(jobs)
        rows, places = [], []
        end = 0
        for number, job in enumerate(jobs):
            row = self._row(job, end)
            if row is not None:
                rows.append(row)
                places.append(number)
                elements = job.unit.tokens * job.unit.geometry.elements_per_token
                # Fixed part, words and plane at their largest, and the most escapes that are usual.
                end += _FIXED + 4 * LANES + 3 * elements + job.unit.geometry.elements_per_token
        if rows:
            target, lengths = np.empty(end, np.uint8), np.zeros(len(rows), np.int64)
            tables = self._tables
            self._loop(np.array(rows, np.int64), self._start, self._mirror, self._table, tables.escape, tables.plain,
                       tables.coding, self._probe, target, lengths)  # fmt: skip
            for number, row, length in zip(places, rows, lengths.tolist(), strict=True):
                if length:
                    out[number] = target[row[_OUT] : row[_OUT] + length].tobytes()
        return out

    def _row(self, job: EncodeJob, at: int) -> tuple[int, ...] | None:
        """A unit's row of the table, or None if it is of another kind."""
        unit, keys, values, reference = job
        g = unit.geometry
        if reference is not None or not 0 <= unit.layer < len(self._layers) or self._layers[unit.layer] != g:
            return None
        if g.dtype != "BF16" or g.k_dim % 4 or g.v_dim % 4 or sys.byteorder != "little":
            return None
        strides = [
            head_stride(array, (g.heads, unit.tokens, dim), _BFLOAT)
            for array, dim in ((keys, g.k_dim), (values, g.v_dim))
        ]
        addresses = [address_of(keys), address_of(values)]
        if not all(strides) or any(address % 8 for address in addresses):
            return None
        return (*addresses, *strides, unit.tokens, g.heads, g.k_dim, g.v_dim, self._first[unit.layer], at)
