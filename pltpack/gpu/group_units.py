"""Decoding of the group codec's units on a device: what the host reads of their payloads, and the kernels' order.

Fixed parts of payloads, about a hundredth of them, are read here in one compiled call; everything that kernels are told
about places in a payload has been checked by then. Units with a reference are left to the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np

from pltpack.codec import quantize, tokens
from pltpack.codec import rans as host_rans
from pltpack.codec.group import GroupCodec
from pltpack.codec.group_decode import HEADER, MEAN_UNIT, OWN_MEANS
from pltpack.codec.levels import CLASSES, POWERS, RAW_BITS, TABLES
from pltpack.codec.tokens import EXACT, FINEST
from pltpack.gpu import device, group, place, rans
from pltpack.gpu.group import PART_COLUMNS
from pltpack.gpu.jobs import Job, Staged, UnitDecoder
from pltpack.gpu.rans import STREAM_COLUMNS
from pltpack.snapshot import DTYPES

_HEADER_BYTES = HEADER.size
# Columns of a table of units: heads, dimensions, tokens, bytes of a word, where the layer's means begin.
_UNIT_HEADS, _UNIT_KEYS, _UNIT_VALUES, _UNIT_TOKENS, _UNIT_ITEM, _UNIT_MEANS, _UNIT_COLUMNS = range(7)


@numba.njit(nogil=True, cache=True, inline="always")
def _u32(data: Any, at: int) -> Any:
    low = np.int64(data[at]) | np.int64(data[at + 1]) << 8
    return low | np.int64(data[at + 2]) << 16 | np.int64(data[at + 3]) << 24


@numba.njit(nogil=True, cache=True, inline="always")
def _i16(data: Any, at: int) -> Any:
    return np.int16(np.uint16(data[at]) | np.uint16(data[at + 1]) << 8)


@numba.njit(nogil=True, cache=True)
def _list_tokens(classes: Any, out: Any) -> tuple[int, int]:
    """Numbers of the coded tokens, then those of the exact ones; how many of each."""
    coded = exact = 0
    for t in range(classes.size):
        if classes[t] <= FINEST:
            out[coded] = t
            coded += 1
    for t in range(classes.size):
        if classes[t] == EXACT:
            out[coded + exact] = t
            exact += 1
    return coded, exact


@numba.njit(nogil=True, cache=True)
def _means(data: Any, at: int, codes: Any, heads: int, dims: Any, out: Any) -> None:
    """A payload's own means, each head's row with an even number of channels."""
    to = 0
    for h in range(codes.size):
        dim = dims[0] if h < heads else dims[1]
        scale = MEAN_UNIT * quantize.step_size(np.int64(codes[h]))
        for d in range(dim):
            out[to + d] = np.float32(_i16(data, at)) * scale
            at += 2
        to += (dim + 1) // 2 * 2


@numba.njit(nogil=True, cache=True)
def _plan(
    data: Any, offsets: Any, units: Any, token_at: Any, head_at: Any, mean_at: Any, classes: Any, numbers: Any,
    codes: Any, bases: Any, means: Any, origin: int, kinds: Any, parts: Any, streams: Any,
    stream_unit: Any, sizes: Any, good: Any
) -> None:  # fmt: skip
    """Read the fixed parts of payloads and fill the kernels' tables.

    `good` tells which units are sound so far; others get parts without rows. `sizes` gives the number of streams, of
    rows and of symbols.
    """
    count = row = symbol = 0
    dims = np.zeros(2, np.int64)
    for i in range(len(units)):
        heads, length = units[i, _UNIT_HEADS], units[i, _UNIT_TOKENS]
        dims[0], dims[1] = units[i, _UNIT_KEYS], units[i, _UNIT_VALUES]
        payload = data[offsets[i] : offsets[i + 1]]
        mine = classes[token_at[i] : token_at[i] + length]
        steps, tables = codes[head_at[i] : head_at[i] + 2 * heads], bases[head_at[i] : head_at[i] + 2 * heads]
        good[i] = False
        for part in range(2):
            parts[2 * i + part, :] = 0
            parts[2 * i + part, group.BEFORE] = -1
        at = _HEADER_BYTES + 6 * heads
        if payload.size < at:
            continue
        flags, runs, escapes, first = _u32(payload, 0), _u32(payload, 4), _u32(payload, 8), _u32(payload, 12)
        if (flags != 0 and flags != OWN_MEANS) or escapes % 2 or runs > payload.size - at:
            continue
        for h in range(2 * heads):
            steps[h] = _i16(payload, _HEADER_BYTES + 2 * h)
            tables[h] = payload[_HEADER_BYTES + 4 * heads + h]
        if tokens.unpack(payload[at : at + runs], False, mine) != length:
            continue
        halves = (dims + 1) // 2
        coded, exact, key_low, value_low = quantize.plan(mine, mine, steps, tables, halves[0], halves[1], kinds)
        if coded < 0:
            continue
        own = at + runs
        escape = own + (2 * heads * (dims[0] + dims[1]) if flags == OWN_MEANS else 0)
        low = escape + 2 * escapes
        rest = low + key_low + value_low
        item = units[i, _UNIT_ITEM] - 1
        stream = rest + heads * exact * (dims[0] + dims[1]) * item
        joint = halves[0] == halves[1]
        second = stream + first
        if second > payload.size or (joint and second != payload.size):
            continue
        if first < host_rans.HEADER_BYTES or first % 2:
            continue
        last = payload.size - second
        if not joint and (last < host_rans.HEADER_BYTES or last % 2):
            continue
        good[i] = True
        if flags == OWN_MEANS:
            _means(payload, own, steps, heads, dims, means[mean_at[i] :])
        _list_tokens(mine, numbers[token_at[i] :])
        for part in range(2):
            line = parts[2 * i + part]
            line[group.HEADS], line[group.CODED], line[group.EXACT] = heads, coded, exact
            line[group.CODED_AT], line[group.EXACT_AT] = token_at[i], token_at[i] + coded
            line[group.CLASSES_AT], line[group.HEADS_AT] = token_at[i], head_at[i] + part * heads
            line[group.WIDTH], line[group.TOKENS], line[group.KIND] = dims[part], length, part
            line[group.LOW] = offsets[i] + low + part * key_low
            line[group.ESCAPES], line[group.ESCAPE_COUNT] = offsets[i] + escape, escapes
            line[group.REST] = offsets[i] + rest + part * heads * exact * dims[0] * item
            start = origin + mean_at[i] if flags == OWN_MEANS else units[i, _UNIT_MEANS]
            line[group.MEANS] = start + part * heads * 2 * halves[0]
            line[group.MEANS_HEAD] = 2 * halves[part]
        rows, tops = heads * coded, 2 * heads * exact
        keys, values = parts[2 * i], parts[2 * i + 1]
        if joint:
            half = halves[0]
            starts = (row, row + rows, row + 2 * rows, row + 2 * rows + tops)
            keys[group.ROW], values[group.ROW], keys[group.EXACT_ROW], values[group.EXACT_ROW] = starts
            keys[group.SYMBOL], values[group.SYMBOL] = symbol, symbol + rows * half
            keys[group.EXACT_SYMBOL] = symbol + 2 * rows * half
            values[group.EXACT_SYMBOL] = symbol + (2 * rows + tops) * half
        for part in range(1 if joint else 2):
            line = streams[count]
            line[rans.AT] = offsets[i] + (stream if part == 0 else second)
            size = first if part == 0 else last
            line[rans.WORDS] = (size - host_rans.HEADER_BYTES) // 2
            line[rans.ROWS] = 2 * (rows + tops) if joint else rows + tops
            line[rans.FIRST_ROW], line[rans.TABLES] = row, row
            line[rans.COLUMNS], line[rans.SYMBOLS] = halves[part], symbol
            if not joint:
                mine_ = parts[2 * i + part]
                mine_[group.ROW], mine_[group.EXACT_ROW] = row, row + rows
                mine_[group.SYMBOL], mine_[group.EXACT_SYMBOL] = symbol, symbol + rows * halves[part]
                mine_[group.BEFORE] = count - 1 if part == 1 else -1
            stream_unit[count] = i
            row += line[rans.ROWS]
            symbol += line[rans.ROWS] * halves[part]
            count += 1
    sizes[0], sizes[1], sizes[2] = count, row, symbol


class GroupDecoder(UnitDecoder):
    """Decodes units of one started group codec on the device; see `pltpack.gpu.jobs.UnitDecoder`."""

    def __init__(self, codec: GroupCodec) -> None:
        self._layers = codec._layers
        self._cumulative = device.put(rans.starts(codec._freqs))
        escape = np.full(TABLES, -1, np.int32)
        escape[: 2 * CLASSES] = 0
        self._escape = device.put(escape)
        self._planes = device.put(np.concatenate([RAW_BITS, RAW_BITS, [0, 0]]).astype(np.int32))
        self._powers, self._shrink = device.put(POWERS), device.put(codec._shrink)
        flat, self._mean_at, at = [np.zeros(1, np.float32)], [], 1
        for layer in self._layers:
            self._mean_at.append(at)
            flat += [part.reshape(-1) for part in layer.means]
            at += sum(part.size for part in layer.means)
        self._means = np.concatenate(flat)
        self._device_means = device.put(self._means)

    def decode(self, jobs: Sequence[Job]) -> list[int]:
        """See `UnitDecoder.decode`."""
        kinds: dict[tuple[int, str], list[int]] = {}
        for number, job in enumerate(jobs):
            kinds.setdefault((id(job.places[0].words), job.unit.geometry.dtype), []).append(number)
        left = []
        for (_, dtype), numbers in kinds.items():
            some = [jobs[number] for number in numbers]
            left += [numbers[i] for i in self._decode(some, dtype, some[0].places[0].words)]
        return sorted(left)

    def _decode(self, jobs: Sequence[Job], dtype: str, words: Any) -> list[int]:
        staged = Staged([job.payload for job in jobs], [job.kept for job in jobs])
        found = _Tables(jobs, staged, [self._mean_at[job.unit.layer] for job in jobs], len(self._means))
        targets = self._targets(jobs, found)
        xp = device.arrays()
        means = self._device_means
        if found.own_means.size:
            means = xp.concatenate([means, device.put(found.own_means)])
        parts, streams = device.put(found.parts), found.streams
        numbers, ranks = device.put(found.numbers), device.put(found.classes.astype(np.int16))
        classes, codes, bases = device.put(found.classes), device.put(found.codes), device.put(found.bases)
        kinds = xp.empty(max(1, found.rows), np.uint8)
        lines = device.lines_of(len(found.parts), found.most_rows)
        device.mark("plan")
        group.tables_kernel[lines](parts, numbers, ranks, bases, kinds)
        decoded = rans.decode(staged.data, streams, kinds, self._cumulative, self._escape, self._planes)
        device.mark("entropy")
        vectors = xp.empty(max(1, targets.elements), np.float32)
        group.dequantize_kernel[lines](
            staged.data, parts, numbers, classes, codes, kinds, decoded.symbols, decoded.escapes_before,
            decoded.weight_before, decoded.escapes_of, self._powers, self._shrink, means, vectors
        )  # fmt: skip
        device.mark("dequantize")
        placed = targets.upload()
        # BF16 has binary32's exponents: what rounds to infinity is infinite, as on the CPU.
        place.store(vectors, targets, placed, dtype, words, clamped=dtype not in ("BF16", "F32"))
        group.exact_kernel[lines](staged.data, parts, placed[0], numbers, decoded.symbols, placed[3],
                                  np.int32(DTYPES[dtype].itemsize), words)  # fmt: skip
        device.mark("place")
        return found.left(device.get(decoded.damaged), device.get(decoded.escapes_of))

    def _targets(self, jobs: Sequence[Job], found: _Tables) -> place.Targets:
        targets = place.Targets()
        for i, job in enumerate(jobs):
            g, unit, where = job.unit.geometry, job.unit, job.places[0]
            # A unit that is left to the CPU must not be touched: it gets no tokens.
            count = unit.tokens if found.good[i] else 0
            turn = self._layers[unit.layer].rotation
            for part, (pages, dim) in enumerate(((where.keys, g.k_dim), (where.values, g.v_dim))):
                at = targets.add(g.heads, count, dim, pages, job.slot, None if part else turn, unit.position)
                found.parts[2 * i + part, group.VECTORS] = at
        return targets


class _Tables:
    """What `_plan` finds in a batch of payloads."""

    def __init__(self, jobs: Sequence[Job], staged: Staged, mean_at: Sequence[int], means: int) -> None:
        units = np.zeros((len(jobs), _UNIT_COLUMNS), np.int64)
        for i, job in enumerate(jobs):
            g = job.unit.geometry
            units[i] = g.heads, g.k_dim, g.v_dim, job.unit.tokens, DTYPES[g.dtype].itemsize, mean_at[i]
        heads, length = 2 * units[:, _UNIT_HEADS], units[:, _UNIT_TOKENS]
        pairs = (units[:, _UNIT_KEYS] + 1) // 2 + (units[:, _UNIT_VALUES] + 1) // 2
        channels = 2 * units[:, _UNIT_HEADS] * pairs
        own = np.array([len(p.payload) > 0 and p.payload[0] == OWN_MEANS for p in jobs])
        channels = np.where(own, channels, 0)
        token_at, head_at, own_at = (np.cumsum(x) - x for x in (length, heads, channels))
        self.classes, self.numbers = np.zeros(length.sum(), np.uint8), np.zeros(length.sum(), np.int32)
        self.codes, self.bases = np.zeros(heads.sum(), np.int16), np.zeros(heads.sum(), np.uint8)
        self.own_means = np.zeros(channels.sum(), np.float32)
        self.parts = np.zeros((2 * len(jobs), PART_COLUMNS), np.int64)
        streams = np.zeros((2 * len(jobs), STREAM_COLUMNS), np.int64)
        self._unit = np.zeros(2 * len(jobs), np.int64)
        self.good, sizes = np.zeros(len(jobs), np.bool_), np.zeros(3, np.int64)
        scratch = np.empty(2 * int((heads * length).max(initial=1)), np.int64)
        # Means of payloads follow those of the state.
        _plan(staged.host, staged.offsets, units, token_at, head_at, own_at, self.classes, self.numbers, self.codes,
              self.bases, self.own_means, means, scratch, self.parts, streams, self._unit, sizes,
              self.good)  # fmt: skip
        self.streams, self.rows = streams[: sizes[0]], int(sizes[1])
        self._escapes = self.parts[::2, group.ESCAPE_COUNT]
        rows = self.parts[:, group.HEADS] * (self.parts[:, group.CODED] + 2 * self.parts[:, group.EXACT])
        self.most_rows = int(rows.max(initial=1))

    def left(self, damaged: np.ndarray, escapes: np.ndarray) -> list[int]:
        """Numbers of the units that did not decode as they must."""
        good, used = self.good.copy(), np.zeros(len(self.good), np.int64)
        for number, unit in enumerate(self._unit[: len(self.streams)].tolist()):
            good[unit] &= not damaged[number]
            used[unit] += 2 * int(escapes[number])
        good &= used == self._escapes
        found: list[int] = np.flatnonzero(~good).tolist()
        return found
