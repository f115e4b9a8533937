"""Layers out of units that hold many: their entropy coding is undone first, then early layers come before late ones.

Units that are predicted from others (spec/format.md, "Mapping table") get their references in the same way: the library
units behind them hold the same layers, and are begun with them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from pltpack.archive.decoding import own_units
from pltpack.archive.mapped import mapped_units, move_keys, overlapping, reference_values, units_of_run
from pltpack.archive.segments import Segment, fresh
from pltpack.archive.shard import Shard
from pltpack.codec.base import Begun, KeyValue
from pltpack.codec.rows import small
from pltpack.format.tables import FLAG_REFERENCE
from pltpack.serve.plan import Piece
from pltpack.snapshot import LayerGeometry

#: Most bytes of coefficients of a step that is decoded like this, estimated; larger ones go unit by unit.
MOST_BYTES = 1 << 29
#: Layers that are decoded together at most; the first ones come alone.
TOGETHER = 4


class _Source:
    """A library unit, from which several places take values; decoded layer by layer unless it is kept already."""

    def __init__(self, segment: Segment, record: np.void) -> None:
        self._segment, self._record = segment, record
        unit = segment.unit(record)
        self._layer, self._layers, self.tokens = unit.layer, unit.layers, unit.tokens
        resident, self._payload = segment.resident, None
        self._kept = None if resident is None else resident.find(segment, record)
        if self._kept is None and resident is not None:
            self._payload = resident.payload(segment, record)
        self._begun = None if self._kept is not None else segment.begin_span(record, self._payload)
        self._whole = self._offered()
        self._left, self._lock = len(unit.layers), threading.Lock()

    def _offered(self) -> list[KeyValue] | None:
        """Arrays for all layers, if they are to be kept."""
        resident = self._segment.resident
        if self._kept is not None or resident is None or not resident.wants(self._segment, self._record):
            return None
        return [fresh(layer, self.tokens) for layer in self._layers]

    def finish(self, layers: range) -> list[KeyValue]:
        """Some of the layers, each asked for once by whoever decodes them; not to be changed."""
        part = slice(layers.start - self._layer, layers.stop - self._layer)
        if self._kept is not None:
            return self._kept[part]
        assert self._begun is not None
        out = [fresh(g, self.tokens) for g in self._layers[part]] if self._whole is None else self._whole[part]
        self._begun.finish(layers, out)
        if self._whole is not None:
            with self._lock:
                self._left -= len(layers)
                complete = self._left == 0
            if complete and self._segment.resident is not None:
                self._segment.resident.offer(self._segment, self._record, self._whole, self._payload)
        return out

    def is_small(self, tokens: slice) -> bool:
        """Whether some tokens can be predicted from, in all layers; see `Begun.small`."""
        if self._kept is not None:
            return all(small(array[:, tokens]) for pair in self._kept for array in pair)
        return self._begun is not None and self._begun.small


class _Taken(NamedTuple):
    """Tokens `part` of a source, which go to `room` of what is filled; keys are moved by `shift` from `position` on."""

    source: _Source
    part: slice
    room: slice
    position: int
    shift: int


class _Own(NamedTuple):
    """A session's unit; the piece takes its tokens `part` to `room`."""

    begun: Begun
    tokens: int
    part: slice
    room: slice
    #: Where its reference comes from, or all of it and what `Begun.finite` says.
    taken: Sequence[_Taken]
    whole: tuple[int, list[KeyValue], np.ndarray] | None


def is_layered(shard: Shard, pieces: Sequence[Piece]) -> bool:
    """Whether a step's pieces are made of nothing but units that can be had layer by layer."""
    layers = pieces[0].layers
    wide = sum(shard.identity.layers[layer].elements_per_token for layer in layers)
    tokens = sum(piece.stop - piece.start for piece in pieces)
    if len(layers) == 1 or 8 * wide * tokens > MOST_BYTES:
        return False
    return all(_suits(shard, piece) for piece in pieces)


def _suits(shard: Shard, piece: Piece) -> bool:
    covered = np.zeros(piece.stop - piece.start, bool)
    for segment, record, first, last in _units(shard, piece):
        if not _holds(segment, record, piece.layers):
            return False
        if record["flags"] & FLAG_REFERENCE and not _has_reference(shard, record, piece.layers):
            return False
        covered[first - piece.start : last - piece.start] = True
    return bool(covered.all())


def _holds(segment: Segment, record: np.void, layers: range) -> bool:
    first = int(record["layer"])
    return first <= layers.start and first + int(record["layer_count"]) >= layers.stop and segment.codec_of(
        record).layered  # fmt: skip


def _has_reference(shard: Shard, record: np.void, layers: range) -> bool:
    """Whether a unit's reference, of just these layers, lies in units that can be had layer by layer."""
    start, stop = int(record["token_start"]), int(record["token_start"]) + int(record["token_count"])
    covered = np.zeros(stop - start, bool)
    for row in shard.runs[overlapping(shard.runs, start, stop)]:
        for library, unit, _, first, last in units_of_run(row, shard.libraries, layers, start, stop):
            if not _holds(library, unit, layers):
                return False
            covered[first - start : last - start] = True
    return len(layers) == record["layer_count"] and bool(covered.all())


def _units(shard: Shard, piece: Piece) -> Iterator[tuple[Segment, np.void, int, int]]:
    """Units of the first layer: where each holds all layers of the piece, those of the others."""
    start, stop, layer = piece.start, piece.stop, piece.layers.start
    yield from mapped_units(shard.exact_runs, shard.libraries, range(layer, layer + 1), start, stop)
    for record in own_units(shard, layer, start, stop):
        first = int(record["token_start"])
        yield shard, record, max(first, start), min(first + int(record["token_count"]), stop)


class LayeredStep:
    """A step that is begun piece by piece, by any thread; its layers are then decoded in any order."""

    def __init__(self, shard: Shard) -> None:
        self._shard, self._lock = shard, threading.Lock()
        self._sources: dict[tuple[int, int, int], _Source] = {}
        self._mapped: list[_Taken] = []
        self._own: list[_Own] = []

    def begin(self, piece: Piece) -> None:
        """Begin a piece.

        Raises
        ------
        FormatError
            If a unit is damaged.
        """
        for segment, record, first, last in _units(self._shard, piece):
            if segment is self._shard:
                self._own.append(self._begun(record, piece.layers, first, last))
                continue
            at, source = segment.position_of(record), self._source(segment, record)
            self._mapped.append(_Taken(source, slice(first - at, last - at), slice(first, last), first, 0))

    def _source(self, segment: Segment, record: np.void) -> _Source:
        key = id(segment), int(record["offset"]), int(record["layer"])
        with self._lock:
            if key not in self._sources:
                self._sources[key] = _Source(segment, record)
            return self._sources[key]

    def _begun(self, record: np.void, layers: range, first: int, last: int) -> _Own:
        at, tokens, shard = int(record["token_start"]), int(record["token_count"]), self._shard
        begun, taken, whole = shard.begin_span(record), list[_Taken](), None
        if record["flags"] & FLAG_REFERENCE:
            taken = list(self._reference(layers, at, at + tokens))
            if not all(each.source.is_small(each.part) for each in taken):
                # A token that is not finite in one layer is not predicted in any.
                values = reference_values(shard.runs, shard.libraries, layers, at, at + tokens)
                whole = layers.start, values, begun.finite(values)
        return _Own(begun, tokens, slice(first - at, last - at), slice(first, last), taken, whole)

    def _reference(self, layers: range, start: int, stop: int) -> Iterator[_Taken]:
        shard = self._shard
        for row in shard.runs[overlapping(shard.runs, start, stop)]:
            for library, record, begin, first, last in units_of_run(row, shard.libraries, layers, start, stop):
                yield _Taken(self._source(library, record), slice(first - begin, last - begin),
                             slice(first - start, last - start), first, int(row["position_shift"]))  # fmt: skip

    def finish(self, layers: range, out: Sequence[KeyValue]) -> None:
        """Decode some of the layers to arrays ``[H, T, D]`` of the session's tokens from the first one on."""
        # All units' products with one layer's basis follow each other: it is larger than a core's caches.
        for index, layer in enumerate(layers):
            self._finish(range(layer, layer + 1), out[index : index + 1])

    def _finish(self, layers: range, out: Sequence[KeyValue]) -> None:
        geometries = self._shard.identity.layers[layers.start : layers.stop]
        found = {id(source): source.finish(layers) for source in self._sources.values()}
        for taken in self._mapped:
            _copy(found[id(taken.source)], taken, out)
        for own in self._own:
            reference, finite = self._reference_of(own, layers, geometries, found)
            rooms = [(keys[:, own.room], values[:, own.room]) for keys, values in out]
            if own.part == slice(0, own.tokens):
                own.begun.finish(layers, rooms, reference, finite)
                continue
            whole = [fresh(geometry, own.tokens) for geometry in geometries]
            own.begun.finish(layers, whole, reference, finite)
            for room, pair in zip(rooms, whole, strict=True):
                for target, array in zip(room, pair, strict=True):
                    target[:] = array[:, own.part]

    def _reference_of(
        self, own: _Own, layers: range, geometries: Sequence[LayerGeometry], found: dict[int, list[KeyValue]]
    ) -> tuple[list[KeyValue] | None, np.ndarray | None]:
        if own.whole is not None:
            first, values, finite = own.whole
            return values[layers.start - first : layers.stop - first], finite
        if not own.taken:
            return None, None
        out = [fresh(geometry, own.tokens) for geometry in geometries]
        for taken in own.taken:
            _copy(found[id(taken.source)], taken, out)
            if taken.shift:
                for keys, _ in out:
                    move_keys(keys[:, taken.room], self._shard.identity, taken.position - taken.shift, taken.position)
        return out, None


def _copy(values: Sequence[KeyValue], taken: _Taken, out: Sequence[KeyValue]) -> None:
    for pair, room in zip(values, out, strict=True):
        for array, target in zip(pair, room, strict=True):
            target[:, taken.room] = array[:, taken.part]


def cut(layers: range) -> list[range]:
    """Layers in the order in which they are needed: one by one at first, then several at once, which costs less."""
    out, at, size = [], layers.start, 1
    while at < layers.stop:
        out.append(range(at, min(at + size, layers.stop)))
        at += size
        size = min(TOGETHER, 1 + len(out) // 2)
    return out
