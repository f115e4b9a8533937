"""Encoding of many units of the lossless codec in one compiled call; the bitstream is in `pltpack.codec.lossless`.

Here is the usual kind, bfloat16 that the state's tables fit, without a reference and in the mode `static`. Any other is
left to `pltpack.codec.lossless`, which writes the same bytes for the usual kind too.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numba
import numpy as np

from pltpack.codec import planes, rans, rans_scalar, rans_simd, tiles
from pltpack.codec.base import EncodeJob
from pltpack.codec.classes import LAYOUTS, Rows, Tables
from pltpack.codec.compiled import address_of, copy_bytes, head_stride, items_at
from pltpack.codec.rans_scalar import LANES, STATE_LOW
from pltpack.snapshot import LayerGeometry

_LAYOUT = LAYOUTS["BF16"]
_SYMBOLS, _ESCAPES = planes.split(_LAYOUT.word_bits, _LAYOUT.low)
_NIBBLES = planes.nibbles_plane(0)[0]
#: Mode byte, counts, kind of the plane.
_FIXED = 10
_BFLOAT = np.dtype(ml_dtypes.bfloat16)

# Columns of the table of units; the first channel is that of the layer among all layers'.
_KEYS, _VALUES, _KEY_STRIDE, _VALUE_STRIDE, _TOKENS, _HEADS, _KEY_DIM, _VALUE_DIM, _CHANNEL = range(9)


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
    words = items_at(address, np.uint16(0), heads * stride)
    tiles.to_rows(words.reshape((heads, stride // dim, dim))[:, :count], rows)


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
def _finish(unit: Any, scratch: Any, first: int, start: Any, table: Any, plain: Any, least: int, out: Any,
            begin: int) -> int:  # fmt: skip
    """Write a unit's payload from `begin` on; its length, or 0 if the unit is not of the usual kind."""
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
    at, half = begin + 9, (count + 1) // 2
    mine = slice(unit[_CHANNEL], unit[_CHANNEL] + channels)
    rows = words[:size].reshape((channels, count))
    escapes = np.empty(marked * count, np.uint16)
    found = _ESCAPES(rows, start[mine], table[mine], plain, symbols[:size].reshape((channels, count)), marks, escapes)
    if 64 * found > size or 16 * stream > 15 * size + 64 * LANES:
        return 0
    out[begin] = 2
    _put(out, begin + 1, found)
    _put(out, begin + 5, stream)
    copy_bytes(escapes.view(np.uint8), 0, out, at, 2 * found)
    at += 2 * found
    copy_bytes(states.view(np.uint8), 0, out, at, 4 * LANES)
    at += 4 * LANES
    copy_bytes(coded.view(np.uint8), 2 * first, out, at, 2 * (size - first))
    at += 2 * (size - first)
    out[at] = 0
    plane = out[at + 1 : at + 1 + channels * half]
    _NIBBLES(rows, plane.reshape((channels, half)))
    sample, pairs = planes.equal_pairs(plane, max(1, plane.size // least))
    if 256 * pairs > (5 * sample * (sample - 1)) // 4:
        return 0
    length = at + 1 + plane.size - begin
    return length if length <= 2 * size else 0


# The two loops differ in the rANS loop only: numba's cache cannot tell functions apart that a factory made.
@numba.njit(nogil=True, cache=True)
def _encode_portable(units: Any, start: Any, mirror: Any, table: Any, escape: Any, plain: Any, coding: Any, least: int,
                     out: Any, lengths: Any) -> None:  # fmt: skip
    scratch = _scratch(units)
    _, symbols, _, marks, coded, states = scratch
    end = 0
    for i in range(len(units)):
        channels, count = _begin(units[i], scratch, start, mirror, table, escape)
        size, at = channels * count, units[i, _CHANNEL]
        states[:] = STATE_LOW
        first = rans_scalar.encode_rows(symbols[:size].reshape((channels, count)), table[at : at + channels], coding,
                                        coded[:size], states, marks)  # fmt: skip
        lengths[i] = _finish(units[i], scratch, first, start, table, plain, least, out, end)
        end += lengths[i]


@numba.njit(nogil=True, cache=True)
def _encode_avx512(units: Any, start: Any, mirror: Any, table: Any, escape: Any, plain: Any, coding: Any, least: int,
                   out: Any, lengths: Any) -> None:  # fmt: skip
    scratch = _scratch(units)
    _, symbols, _, marks, coded, states = scratch
    end = 0
    for i in range(len(units)):
        channels, count = _begin(units[i], scratch, start, mirror, table, escape)
        size, at = channels * count, units[i, _CHANNEL]
        states[:] = STATE_LOW
        first = rans_simd.encode_rows_avx512(symbols[:size].reshape((channels, count)), table[at : at + channels],
                                             coding, coded[:size], states, marks)  # fmt: skip
        lengths[i] = _finish(units[i], scratch, first, start, table, plain, least, out, end)
        end += lengths[i]


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
        self._memory = threading.local()

    def encode(self, jobs: Sequence[EncodeJob]) -> list[bytes | None]:
        """Payloads; None for units of another kind."""
        out: list[bytes | None] = [None] * len(jobs)
        rows, places = [], []
        end = 0
        for number, job in enumerate(jobs):
            row = self._row(job)
            if row is not None:
                rows.append(row)
                places.append(number)
                elements = job.unit.tokens * job.unit.geometry.elements_per_token
                # Fixed part, words and plane at their largest, and the most escapes that are usual.
                end += _FIXED + 4 * LANES + 3 * elements + job.unit.geometry.elements_per_token
        if rows:
            target, lengths = self._buffer(end), np.zeros(len(rows), np.int64)
            tables = self._tables
            self._loop(np.array(rows, np.int64), self._start, self._mirror, self._table, tables.escape, tables.plain,
                       tables.coding, self._probe, target, lengths)  # fmt: skip
            at, view = 0, target.data
            for number, length in zip(places, lengths.tolist(), strict=True):
                if length:
                    out[number] = bytes(view[at : at + length])
                    at += length
        return out

    def _buffer(self, size: int) -> np.ndarray:
        """Memory of the thread, used again and again: fresh pages cost as much as what is written to them."""
        found: np.ndarray | None = getattr(self._memory, "buffer", None)
        if found is None or found.size < size:
            found = self._memory.buffer = np.empty(size, np.uint8)
        return found

    def _row(self, job: EncodeJob) -> tuple[int, ...] | None:
        """A unit's row of the table, or None if it is of another kind."""
        unit, keys, values, reference = job
        g = unit.geometry
        if reference is not None or not 0 <= unit.layer < len(self._layers) or self._layers[unit.layer] != g:
            return None
        if g.dtype != "BF16" or sys.byteorder != "little":
            return None
        strides = [
            head_stride(array, (g.heads, unit.tokens, dim), _BFLOAT)
            for array, dim in ((keys, g.k_dim), (values, g.v_dim))
        ]
        addresses = [address_of(keys), address_of(values)]
        if not all(strides) or any(address % 2 for address in addresses):
            return None
        return (*addresses, *strides, unit.tokens, g.heads, g.k_dim, g.v_dim, self._first[unit.layer])
