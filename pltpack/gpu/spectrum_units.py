"""Decoding of the transform codec's units on a device, predicted ones included.

Headers, orders of coefficients and exact tokens are read on the host, as on the CPU; symbols, coefficients, products,
rotation and rounding are the device's. Units of one layer group share their products. References come from the host;
those that take the mean's place (format 1.1) are left to the CPU.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from pltpack.codec import coefficients, exact_tokens, prediction, rate, scaling, transform, unit_head
from pltpack.codec import rans as host_rans
from pltpack.codec.begun import geometries
from pltpack.codec.coefficients import ESCAPE, Order
from pltpack.codec.payload import Reader
from pltpack.codec.rope import Rotation
from pltpack.codec.rows import to_rows
from pltpack.codec.transform import EXACT, TransformCodec
from pltpack.gpu import device, place, rans, spectrum
from pltpack.gpu.copies import put_layer
from pltpack.gpu.jobs import Job, Staged, UnitDecoder
from pltpack.gpu.rans import STREAM_COLUMNS
from pltpack.gpu.spectrum import UNIT_COLUMNS, Places
from pltpack.snapshot import DTYPES, LayerGeometry

_HEADER = struct.Struct("<BhH")
#: Flags of a unit that is coded around a share of its reference.
_PREDICTED = 3
#: Device bytes for dense coefficients and rows at a time.
_WORKSPACE = 1 << 30


class _Unit(NamedTuple):
    """What the host reads of a payload: order, step of each token, where streams and exact tokens are."""

    order: Order
    places: Places
    widths: np.ndarray
    stream: int
    length: int
    escapes: int
    low: int
    marks: np.ndarray
    exact: np.ndarray
    shares: np.ndarray


class _Group:
    """One layer group's bases on the device."""

    def __init__(self, bases: Any) -> None:
        shared, local = bases._synthesis
        self.shared, self.local = device.put(shared), [device.put(basis) for basis in local]
        self.order = device.put(bases._order.astype(np.int32))
        self.host_mean, self.rank, self.span = bases.mean, bases.rank, shared.shape[1]
        self.mean = device.put(bases.mean)
        self.reach = bases._reach


class SpectrumDecoder(UnitDecoder):
    """Decodes units of one started transform codec on the device; see `jobs.UnitDecoder`."""

    references = True

    def __init__(self, codec: TransformCodec) -> None:
        self._codec, self._tables = codec, codec._tables
        self._groups: dict[int, _Group] = {}
        count = len(self._tables.freqs)
        self._cumulative = device.put(rans.starts(self._tables.freqs, coefficients.SYMBOLS))
        self._escape = device.put(np.full(count, ESCAPE, np.int32))
        self._weight = device.put(np.zeros(count, np.int32))

    def decode(self, jobs: Sequence[Job]) -> list[int]:
        """See `UnitDecoder.decode`."""
        kinds: dict[tuple[int, int], list[int]] = {}
        for number, job in enumerate(jobs):
            kinds.setdefault((job.unit.layer, len(job.unit.layers)), []).append(number)
        left = []
        for numbers in kinds.values():
            for some in self._pieces(jobs, numbers):
                left += [some[i] for i in self._decode([jobs[number] for number in some])]
        return sorted(left)

    def _pieces(self, jobs: Sequence[Job], numbers: Sequence[int]) -> Iterator[list[int]]:
        """Jobs of one layer group in runs whose coefficients and rows take no more than `_WORKSPACE`."""
        piece: list[int] = []
        used = 0
        for number in numbers:
            unit = jobs[number].unit
            # Shared coefficients, own ones, rows: four bytes each.
            size = 12 * unit.tokens * sum(g.elements_per_token for g in geometries(unit))
            if piece and used + size > _WORKSPACE:
                yield piece
                piece, used = [], 0
            piece.append(number)
            used += size
        yield piece

    def _decode(self, jobs: Sequence[Job]) -> list[int]:
        bases, layers = self._codec._bases_of(jobs[0].unit), geometries(jobs[0].unit)
        first = jobs[0].unit.layer
        if first not in self._groups:
            self._groups[first] = _Group(bases)
        group = self._groups[first]
        read = [self._read(job, bases, layers) for job in jobs]
        taken = [i for i, unit in enumerate(read) if unit is not None]
        if not taken:
            return list(range(len(jobs)))
        mine, some = [unit for unit in read if unit is not None], [jobs[i] for i in taken]
        staged = Staged([job.payload for job in some], [job.kept for job in some])
        units, streams = self._plan(mine, some, staged, group)
        wrong, rows = self._rows(mine, units, streams, staged, group, self._reference(some, group, layers))
        self._store(rows, some, units, layers)
        _place_exact(mine, some, layers)
        device.mark("place")
        damaged = {taken[i] for i in np.flatnonzero(wrong).tolist()}
        return sorted(damaged | (set(range(len(jobs))) - set(taken)))

    def _plan(self, units: Sequence[_Unit], jobs: Sequence[Job], staged: Staged,
              group: _Group) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
        lines = np.zeros((len(units), UNIT_COLUMNS), np.int64)
        streams = np.zeros((len(units), STREAM_COLUMNS), np.int64)
        index = row = token = 0
        for i, (unit, job) in enumerate(zip(units, jobs, strict=True)):
            at, rows = int(staged.offsets[i]), len(unit.places.table_of_row)
            lines[i] = (len(unit.order.counts), unit.places.groups, index, row, rows, 32 * row,
                        at + unit.stream + unit.length, unit.escapes, at + unit.low, token, group.rank, group.span,
                        0)  # fmt: skip
            streams[i] = (at + unit.stream, (unit.length - host_rans.HEADER_BYTES) // 2, rows, row, host_rans.LANES,
                          32 * row, row)  # fmt: skip
            index, row, token = index + len(unit.places.index), row + rows, token + job.unit.tokens
        return lines, streams

    def _reference(self, jobs: Sequence[Job], group: _Group, layers: Sequence[LayerGeometry]) -> Any:
        """Rows of the units' references, un-rotated on the host; the mean in tokens without a finite one."""
        if all(job.reference is None for job in jobs):
            return device.arrays().zeros((1, 1), np.float32)
        rows = np.tile(group.host_mean, (sum(job.unit.tokens for job in jobs), 1))
        at = 0
        for job in jobs:
            if job.reference is not None:
                mine = rows[at : at + job.unit.tokens]
                found, finite = to_rows(job.reference, layers, self._codec._identity, job.unit.position)
                mine[finite] = found[finite]
            at += job.unit.tokens
        return device.put(rows)

    def _rows(self, units: Sequence[_Unit], lines: np.ndarray, streams: np.ndarray, staged: Staged, group: _Group,
              reference: Any) -> tuple[np.ndarray, Any]:  # fmt: skip
        """Which units are damaged, and un-rotated rows of all tokens."""
        xp = device.arrays()
        kinds = device.put(np.concatenate([*(unit.places.table_of_row for unit in units), np.zeros(1, np.uint8)]))
        device.mark("plan")
        decoded = rans.decode(staged.data, streams, kinds, self._cumulative, self._escape, self._weight)
        device.mark("entropy")
        index = device.put(np.concatenate([unit.places.index for unit in units]))
        widths = np.concatenate([unit.widths for unit in units])
        shared = xp.zeros((len(widths), max(1, group.rank)), np.float32)
        own = xp.zeros((len(widths), group.span), np.float32)
        most = max(1, int(lines[:, spectrum.ROWS].max()))
        spectrum.values_kernel[device.lines_of(len(lines), most)](
            staged.data, device.put(lines), index, kinds, decoded.symbols, decoded.escapes_before, device.put(widths),
            group.order, shared, own
        )  # fmt: skip
        device.mark("coefficients")
        live = max(int(unit.order.live.max(initial=0)) for unit in units)
        need = int(group.reach[live - 1]) if live else 0
        rows = spectrum.product(shared, group.shared, need)
        if live > need:
            at = 0
            for basis in group.local:
                spectrum.add_product(own, basis, rows, at, len(basis), at)
                at += len(basis)
        shares = device.put(np.concatenate([unit.shares for unit in units]))
        spectrum.center_kernel[device.loop_of(rows.size)](rows, group.mean, reference, shares)
        device.mark("product")
        escapes = device.get(decoded.escapes_of)[: len(units)]
        wrong = (device.get(decoded.damaged)[: len(units)] != 0) | (escapes != lines[:, spectrum.ESCAPE_COUNT])
        return wrong, rows

    def _read(self, job: Job, bases: Any, layers: Sequence[LayerGeometry]) -> _Unit | None:
        """Of a payload; None if it is malformed, or its reference takes the mean's place."""
        unit, reader = job.unit, Reader(job.payload)
        try:
            flags, log_step, count = _HEADER.unpack(reader.take(_HEADER.size))
            marks = reader.array(count, "<u2").astype(np.int64)
            ordered = not count or (marks[-1] < unit.tokens and (np.diff(marks) > 0).all())
            scaled, flags = flags & transform.FLAG_SCALED, flags & ~transform.FLAG_SCALED
            known = flags == (0 if job.reference is None else _PREDICTED)
            if not known or abs(log_step) > rate.MAX_LOG_STEP or not ordered:
                return None
            classes = unit_head.unpack_nibbles(reader.take((unit.tokens + 1) // 2), unit.tokens)
            steps = widths = rate.steps(log_step)
            shares = np.zeros(unit.tokens, np.float32)
            if flags:
                predicted = unit_head.unpack_nibbles(reader.take((unit.tokens + 1) // 2), unit.tokens)
                exact_ = np.zeros(unit.tokens, np.bool_)
                exact_[marks] = True
                classes = prediction.joint(classes, predicted, exact_)
                steps, widths = prediction.lowered(steps), np.tile(steps, prediction.CLASSES)
                shares = prediction.shares()[predicted]
            else:
                classes[marks] = EXACT
            logs = unit_head.read_logs(reader, bases.logs) if scaled else bases.logs
            order = Order.of(logs, steps, classes, self._tables)
            length, escapes, low = (reader.u32() for _ in range(3))
            raw = self._tables.raw
            if escapes > order.counts.sum() or low != (int((order.counts * raw).sum()) + 7) // 8:
                return None
            if length < host_rans.HEADER_BYTES or length % 2:
                return None
            moved = (scaling.count(logs) + 1) // 2 if scaled else 0
            stream = _HEADER.size + 2 * count + (unit.tokens + 1) // 2 * (2 if flags else 1) + moved + 12
            low_at = stream + length + 4 * escapes
            reader.take(length + 4 * escapes + low)
            exact = np.zeros((count, bases.group.last - bases.group.first), _widest(layers))
            if count:
                layout = self._codec._exact_layout(bases, layers)
                exact_tokens.decode(reader, exact, unit.position + marks, *layout, self._tables)
            reader.end()
        except ValueError:
            return None
        values = np.append(rate.value_of(widths), 0.0).astype(np.float32)[classes]
        return _Unit(order, Places(order, raw), values, stream, length, escapes, low_at, marks, exact, shares)

    def _store(self, rows: Any, jobs: Sequence[Job], lines: np.ndarray, layers: Sequence[LayerGeometry]) -> None:
        identity = self._codec._identity
        at = 0
        for number, g in enumerate(layers):
            rotation = Rotation.of(identity.rope, identity.keys, g.k_dim)
            buffers: dict[int, tuple[Any, place.Targets]] = {}
            for job, line in zip(jobs, lines, strict=True):
                where, first = job.places[number], int(line[spectrum.TOKEN]) * rows.shape[1] + at
                _, targets = buffers.setdefault(id(where.words), (where.words, place.Targets()))
                targets.add(g.heads, job.unit.tokens, g.k_dim, where.keys, job.slot, rotation, job.unit.position,
                            (first, g.k_dim, rows.shape[1]))  # fmt: skip
                targets.add(g.heads, job.unit.tokens, g.v_dim, where.values, job.slot,
                            source=(first + g.heads * g.k_dim, g.v_dim, rows.shape[1]))  # fmt: skip
            for words, targets in buffers.values():
                place.store(rows.reshape(-1), targets, targets.upload(), g.dtype, words)
            at += g.elements_per_token


def _widest(layers: Sequence[LayerGeometry]) -> np.dtype[Any]:
    return np.dtype(f"u{max(DTYPES[layer.dtype].itemsize for layer in layers)}")


def _place_exact(units: Sequence[_Unit], jobs: Sequence[Job], layers: Sequence[LayerGeometry]) -> None:
    """Put the exact tokens' words over what was decoded for them."""
    at = 0
    for number, g in enumerate(layers):
        for job, unit in zip(jobs, units, strict=True):
            if not len(unit.marks):
                continue
            pair, start = [], at
            for dim in (g.k_dim, g.v_dim):
                block = unit.exact[:, start : start + g.heads * dim].reshape(len(unit.marks), g.heads, dim)
                pair.append(block.transpose(1, 0, 2).astype(f"<u{DTYPES[g.dtype].itemsize}"))
                start += g.heads * dim
            where = job.places[number]
            put_layer(where.words, (where.keys, where.values), (pair[0], pair[1]), unit.marks, job.unit.tokens,
                      job.slot)  # fmt: skip
        at += g.elements_per_token


def encode_values(quantized: Any, orders: Sequence[Order], tables: coefficients.Tables) -> list[bytes]:
    """Value streams of units' quantized coefficients; the bytes of `pltpack.codec.coefficients.encode` for each.

    Parameters
    ----------
    quantized : array
        int32 ``[tokens of all units, N]`` on the device, components in the order of their scales.
    orders : sequence of Order
    tables : Tables
    """
    xp, all_places = device.arrays(), [Places(order, tables.raw) for order in orders]
    lines = np.zeros((len(orders), UNIT_COLUMNS), np.int64)
    streams = np.zeros((len(orders), STREAM_COLUMNS), np.int64)
    index = row = token = low = 0
    sizes = []
    for i, (order, places) in enumerate(zip(orders, all_places, strict=True)):
        rows, bits = len(places.table_of_row), int((order.counts * tables.raw).sum())
        lines[i] = len(order.counts), places.groups, index, row, rows, 32 * row, 0, 0, low, token, 0, 0, 0
        streams[i] = 0, 0, rows, row, host_rans.LANES, 32 * row, row
        sizes.append((bits + 7) // 8)
        index, row, token = index + len(places.index), row + rows, token + len(order.tokens)
        low += (bits + 31) // 32 + 1
    kinds = device.put(np.concatenate([*(places.table_of_row for places in all_places), np.zeros(1, np.uint8)]))
    tables_of = device.put(np.concatenate([places.index for places in all_places]))
    symbols, bits_ = xp.zeros(32 * max(row, 1), np.uint8), xp.zeros(max(low, 1), np.uint32)
    escapes_in, on_device = xp.zeros(max(row, 1), np.int32), device.put(lines)
    shape = device.lines_of(len(lines), max(1, int(lines[:, spectrum.ROWS].max())))
    spectrum.symbols_kernel[shape](quantized, on_device, tables_of, kinds, device.put(tables.limit.astype(np.int32)),
                                   symbols, bits_, escapes_in)  # fmt: skip
    before = (xp.cumsum(escapes_in) - escapes_in).astype(np.int32)
    escapes = xp.empty(max(1, int(escapes_in.sum())), np.int32)
    spectrum.escapes_kernel[shape](quantized, on_device, tables_of, kinds, symbols, before, escapes)
    coded = rans.encode(symbols, streams, kinds, device.put(rans.starts(tables.freqs, coefficients.SYMBOLS)))
    counts, values = device.get(escapes_in), device.get(escapes).astype("<i4")
    packed, out, at = device.get(bits_).astype("<u4").view(np.uint8), [], 0
    for line, stream, size in zip(lines, coded, sizes, strict=True):
        used = int(counts[line[spectrum.ROW] : line[spectrum.ROW] + line[spectrum.ROWS]].sum())
        first = 4 * int(line[spectrum.LOW])
        out.append(struct.pack("<3I", len(stream), used, size) + stream + values[at : at + used].tobytes()
                   + packed[first : first + size].tobytes())  # fmt: skip
        at += used
    return out
