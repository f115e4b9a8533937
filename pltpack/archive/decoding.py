"""Decode token ranges of layers from mapped library units and a shard's own."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from pltpack.archive.ahead import announce
from pltpack.archive.batch import Batch, at_once
from pltpack.archive.decoded import DecodedUnits
from pltpack.archive.mapped import Making, mapped_units
from pltpack.archive.segments import Segment, fresh
from pltpack.archive.shard import Shard
from pltpack.codec.base import KeyValue
from pltpack.errors import FormatError
from pltpack.format.tables import FLAG_REBUILT, FLAG_REFERENCE
from pltpack.snapshot import DTYPES, LayerGeometry

#: Raw bytes of references that are made at once, unless one unit is larger.
REFERENCE_BYTES = 1 << 26


def one_buffer(layers: Sequence[LayerGeometry], tokens: int) -> list[KeyValue]:
    """Arrays of several layers in one allocation: large enough for huge pages, whose first touch costs far less."""
    sizes = [tokens * layer.bytes_per_token for layer in layers]
    buffer = np.empty(sum(sizes) + 64 * len(sizes), np.uint8)
    out, offset = [], 0
    for layer, size in zip(layers, sizes, strict=True):
        dtype = DTYPES[layer.dtype]
        middle = layer.heads * tokens * layer.k_dim * dtype.itemsize
        part = buffer[offset : offset + size]
        out.append((part[:middle].view(dtype).reshape(layer.heads, tokens, layer.k_dim),
                    part[middle:].view(dtype).reshape(layer.heads, tokens, layer.v_dim)))  # fmt: skip
        offset += -(-size // 64) * 64
    return out


def decode_layers(
    shard: Shard, layers: Sequence[int], start: int, stop: int, out: Sequence[KeyValue] | None = None
) -> list[KeyValue]:
    """Keys and values of several layers' tokens ``[start, stop)``: mapped library units, then the shard's own.

    Parameters
    ----------
    shard : Shard
    layers : sequence of int
    start, stop : int
    out : sequence of (ndarray, ndarray), optional
        Where to decode to, per layer ``[H, stop - start, D]`` each; fresh arrays by default.

    Raises
    ------
    FormatError
        If a unit is damaged, or the units do not cover the range.
    """
    announce(shard, layers, start, stop)
    targets = [
        _Target(shard, layer, start, stop, arrays)
        for layer, arrays in zip(layers, [None] * len(layers) if out is None else out, strict=True)
    ]
    if shard.recipe is not None:
        _rebuild(shard, targets, start, stop)
        return [target.finish() for target in targets]
    own = [own_units(shard, target.layer, start, stop) for target in targets]
    with at_once(shard, own):
        _decode(shard, targets, own, start, stop)
    return [target.finish() for target in targets]


def _decode(shard: Shard, targets: Sequence[_Target], own: Sequence[np.ndarray], start: int, stop: int) -> None:
    batch, spans = Batch(), Spans()
    wanted = {target.layer: target for target in targets}
    held_layers = range(min(wanted), max(wanted) + 1) if wanted else range(0)
    for segment, record, first, last in mapped_units(shard.exact_runs, shard.libraries, held_layers, start, stop):
        layer = int(record["layer"])
        inside = [wanted[at] for at in range(layer, layer + int(record["layer_count"])) if at in wanted]
        if segment.resident is not None:
            found = segment.resident.get(segment, record) if inside else None
        else:
            # What references were made of need not be decoded again.
            found = segment.decoded.held(segment, record) if isinstance(segment.decoded, DecodedUnits) else None
        for target in inside:
            if found is None:
                spans.put(target, batch, segment, record, first, last)
            else:
                target.fill(found[target.layer - layer], segment.position_of(record), first, last)
    # Own units come after: they may replace mapped values.
    batch.run()
    spans.run()
    corrections, predicted = [], Predicted(shard)
    for target, units in zip(targets, own, strict=True):
        for record in units:
            first = int(record["token_start"])
            last = first + int(record["token_count"])
            part = max(first, start), min(last, stop)
            if not record["flags"] & FLAG_REFERENCE:
                spans.put(target, batch, shard, record, *part)
            elif start <= first and last <= stop and not predicted.needs(record):
                corrections.append((target, record, part))
            else:
                predicted.put(target, record, *part)
    batch.run()
    spans.run()
    for target, record, part in corrections:
        target.put(batch, shard, record, *part, target.copy(*part))
    batch.run()
    predicted.run()


def _rebuild(shard: Shard, targets: Sequence[_Target], start: int, stop: int) -> None:
    """Fill with what a model makes of the tokens, and with the shard's own units, which are relative to that."""
    batch = Batch()
    for target in targets:
        target.fill(shard.rebuilt(target.layer, start, stop), start, start, stop)
        for record in own_units(shard, target.layer, start, stop):
            first, last = int(record["token_start"]), int(record["token_start"]) + int(record["token_count"])
            assert record["flags"] & FLAG_REBUILT
            reference = shard.rebuilt(target.layer, first, last)
            target.put(batch, shard, record, max(first, start), min(last, stop), reference)
    batch.run()


class _Target:
    """Arrays being filled with a token range of one layer."""

    def __init__(self, shard: Shard, layer: int, start: int, stop: int, out: KeyValue | None = None) -> None:
        self.layer = layer
        self._shard, self._start = shard, start
        self._keys, self._values = out or fresh(shard.identity.layers[layer], stop - start)
        self._covered = np.zeros(stop - start, dtype=bool)

    def put(self, batch: Batch, segment: Segment, record: np.void, first: int, last: int,
            reference: KeyValue | None = None) -> None:  # fmt: skip
        """Have a unit's tokens ``[first, last)`` decoded, by the batch and straight in place when they are all."""
        into = slice(first - self._start, last - self._start)
        if last - first == record["token_count"]:
            batch.add(segment, record, (self._keys[:, into], self._values[:, into]), reference)
        else:
            at = segment.position_of(record)
            keys, values = segment.decode(record, reference)
            part = slice(first - at, last - at)
            self._keys[:, into], self._values[:, into] = keys[:, part], values[:, part]
        self._covered[into] = True

    def fill(self, found: KeyValue, at: int, first: int, last: int) -> None:
        """Copy tokens ``[first, last)`` of a decoded unit whose first token is `at`."""
        for room, array in zip(self.room(first, last), found, strict=True):
            room[:] = array[:, first - at : last - at]

    def room(self, first: int, last: int) -> KeyValue:
        """Where tokens ``[first, last)`` go, about to be filled."""
        into = slice(first - self._start, last - self._start)
        self._covered[into] = True
        return self._keys[:, into], self._values[:, into]

    def copy(self, first: int, last: int) -> KeyValue:
        """The values so far of tokens ``[first, last)``; what was given to the batch must have been run."""
        part = slice(first - self._start, last - self._start)
        self._check(part)
        return self._keys[:, part].copy(), self._values[:, part].copy()

    def finish(self) -> KeyValue:
        """The arrays, complete."""
        self._check(slice(None))
        return self._keys, self._values

    def _check(self, part: slice) -> None:
        covered = self._covered[part]
        if not covered.all():
            gap = self._start + (part.start or 0) + int(np.argmin(covered))
            raise FormatError(f"no unit holds layer {self.layer}, token {gap}", self._shard.container.path)


class Spans:
    """Units that hold several layers: each is decoded once for all targets that want a layer of it."""

    def __init__(self) -> None:
        self._units: dict[tuple[int, ...], _SpanUnit] = {}

    def put(self, target: _Target, batch: Batch, segment: Segment, record: np.void, first: int, last: int,
            reference: Sequence[KeyValue] | None = None) -> None:  # fmt: skip
        """Have a unit's tokens ``[first, last)`` decoded: by the batch if it holds one layer, else by `run`."""
        if record["layer_count"] == 1 and not segment.codec_of(record).spans:
            target.put(batch, segment, record, first, last, reference[0] if reference else None)
            return
        # Several rows may map to one unit; units without bytes have one offset.
        key = (id(segment), int(record["offset"]), int(record["layer"]), int(record["token_start"]), first)
        if key not in self._units:
            self._units[key] = _SpanUnit(segment, record, first, last, [], reference)
        self._units[key].targets.append(target)

    def run(self) -> None:
        """Decode what was put."""
        units, self._units = self._units, {}
        for segment, record, first, last, targets, reference in units.values():
            whole = last - first == record["token_count"]
            rooms = {target.layer: target.room(first, last) for target in targets}
            unit, at = segment.unit(record), segment.position_of(record)
            out = [
                rooms[layer] if whole and layer in rooms else fresh(geometry, unit.tokens)
                for layer, geometry in enumerate(unit.layers, unit.layer)
            ]
            segment.decode_span(record, out, reference)
            if not whole:
                part = slice(first - at, last - at)
                for layer, (keys, values) in rooms.items():
                    keys[:], values[:] = (array[:, part] for array in out[layer - unit.layer])


class _SpanUnit(NamedTuple):
    segment: Segment
    record: np.void
    first: int
    last: int
    targets: list[_Target]
    reference: Sequence[KeyValue] | None


class Predicted:
    """Units of a shard whose references must be made apart, for all of the unit's tokens and layers."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._units: dict[tuple[int, int], tuple[np.void, int, int, list[_Target]]] = {}
        self._predicts = functools.cache(shard.predicts)

    def needs(self, record: np.void) -> bool:
        """Whether a unit with a reference cannot take it from what exact rows have given."""
        first = int(record["token_start"])
        if record["layer_count"] > 1 or self._shard.codec_of(record).spans:
            return True
        return self._predicts(first, first + int(record["token_count"]))

    def put(self, target: _Target, record: np.void, first: int, last: int) -> None:
        """Have a unit's tokens ``[first, last)`` decoded by `run`."""
        key = (int(record["layer"]), int(record["token_start"]))
        self._units.setdefault(key, (record, first, last, []))[-1].append(target)

    def run(self) -> None:
        """Decode what was put: references are made for several units at once."""
        units, self._units = [self._units[key] for key in sorted(self._units)], {}
        at = 0
        while at < len(units):
            count = self._together([record for record, *_ in units[at:]])
            self._decode(units[at : at + count])
            at += count

    def _together(self, records: Sequence[np.void]) -> int:
        """How many units, from the first on, are to have their references made at once."""
        ends = np.cumsum([0, *(layer.bytes_per_token for layer in self._shard.identity.layers)])
        layers, counts = (np.array([record[name] for record in records], np.int64) for name in ("layer", "layer_count"))
        tokens = np.array([record["token_count"] for record in records], np.int64)
        sizes = np.cumsum(tokens * (ends[layers + counts] - ends[layers]))
        return max(1, int(np.searchsorted(sizes, REFERENCE_BYTES, "right")))

    def _decode(self, units: Sequence[tuple[np.void, int, int, list[_Target]]]) -> None:
        shard = self._shard
        areas, area_of = _areas([record for record, *_ in units])
        making = Making(shard.libraries)
        made = [making.add(shard.runs, *area) for area in areas]
        making.run()
        batch, spans = Batch(), Spans()
        for (record, first, last, targets), index in zip(units, area_of, strict=True):
            layers, start, _ = areas[index]
            at, layer = int(record["token_start"]) - start, int(record["layer"]) - layers.start
            part = slice(at, at + int(record["token_count"]))
            values = made[index][layer : layer + int(record["layer_count"])]
            reference = [(k[:, part], v[:, part]) for k, v in values]
            for target in targets:
                spans.put(target, batch, shard, record, first, last, reference)
        batch.run()
        spans.run()


def _areas(records: Sequence[np.void]) -> tuple[list[tuple[range, int, int]], list[int]]:
    """Layers and tokens that units, sorted by both, hold without a gap; and in which of these each unit is.

    Tokens follow each other in one layer; layers that have the same tokens are then taken together.
    """
    runs: list[tuple[range, int, int]] = []
    run_of = []
    for record in records:
        layers = range(int(record["layer"]), int(record["layer"]) + int(record["layer_count"]))
        first, last = int(record["token_start"]), int(record["token_start"]) + int(record["token_count"])
        if runs and runs[-1][0] == layers and runs[-1][2] == first:
            runs[-1] = (layers, runs[-1][1], last)
        else:
            runs.append((layers, first, last))
        run_of.append(len(runs) - 1)
    areas: list[tuple[range, int, int]] = []
    known: dict[tuple[int, int], int] = {}
    area_of_run = []
    for layers, start, stop in runs:
        index = known.get((start, stop))
        if index is not None and areas[index][0].stop == layers.start:
            areas[index] = (range(areas[index][0].start, layers.stop), start, stop)
        else:
            index = known[start, stop] = len(areas)
            areas.append((layers, start, stop))
        area_of_run.append(index)
    return areas, [area_of_run[run] for run in run_of]


def own_units(shard: Shard, layer: int, start: int, stop: int) -> np.ndarray:
    """Records of the shard's units that overlap a token range of one layer, in token order."""
    first, last = shard.layer_bounds[layer]
    units = shard.units[first:last]
    if start == 0 and stop >= shard.entry.tokens:
        return units
    starts = units["token_start"].astype(np.int64)
    return units[(starts < stop) & (starts + units["token_count"] > start)]


def span_pieces(shard: Shard, layers: range, start: int, stop: int) -> list[tuple[range, int, int]]:
    """Cut a part of a session into pieces that touch each unit of several layers once; empty if it has none.

    Layers that a unit holds together stay together, with the units of other codecs that hold one of them.

    Returns
    -------
    list of (range, int, int)
        Layers and session tokens ``[first, last)``; together all of what was asked for.
    """
    segments: list[Segment] = [shard, *(shard.libraries[index] for index in np.unique(shard.runs["library"]))]
    if not any((segment.units["layer_count"] > 1).any() for segment in segments):
        return []
    places = {start}
    # Per layer, the end of the farthest group that holds it or a layer before it.
    ends = [layer + 1 for layer in range(layers.stop)]
    for record, first in _touched(shard, layers, start, stop):
        layer, count = int(record["layer"]), int(record["layer_count"])
        if first is not None:
            places.add(max(first, start))
        for held in range(max(layer, layers.start), min(layer + count, layers.stop)):
            ends[held] = max(ends[held], min(layer + count, layers.stop))
    groups, at = [], layers.start
    while at < layers.stop:
        end = ends[at]
        while (farther := max(ends[at:end])) > end:
            end = farther
        groups.append(range(at, end))
        at = end
    cuts = [*sorted(places), stop]
    return [(group, first, last) for group in groups for first, last in itertools.pairwise(cuts)]


def _touched(shard: Shard, layers: range, start: int, stop: int) -> Iterator[tuple[np.void, int | None]]:
    """Records of the units that hold a part, each at least once, with the session token that they begin at.

    None instead of the token for units that only references are made of: of these, each unit asks for its own part.
    """
    layer = layers.start
    while layer < layers.stop:
        following = layers.stop
        for runs, cut in ((shard.exact_runs, True), (shard.predicted_runs, False)):
            for _, record, first, _ in mapped_units(runs, shard.libraries, range(layer, layer + 1), start, stop):
                following = min(following, int(record["layer"]) + int(record["layer_count"]))
                yield record, first if cut else None
        for record in own_units(shard, layer, start, stop):
            following = min(following, int(record["layer"]) + int(record["layer_count"]))
            yield record, int(record["token_start"])
        layer = following
