"""Decode token ranges of one layer from mapped library units and a shard's own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from pltpack.archive.batch import Batch
from pltpack.archive.library import Library
from pltpack.archive.segments import Segment, fresh
from pltpack.archive.shard import Shard
from pltpack.codec.base import KeyValue
from pltpack.errors import FormatError
from pltpack.format.tables import FLAG_REFERENCE
from pltpack.snapshot import DTYPES, LayerGeometry


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
    targets = [
        _Target(shard, layer, start, stop, arrays)
        for layer, arrays in zip(layers, [None] * len(layers) if out is None else out, strict=True)
    ]
    batch, spans = Batch(), Spans()
    corrections = []
    for target in targets:
        for segment, record, first, last in mapped_units(shard.runs, shard.libraries, target.layer, start, stop):
            spans.put(target, batch, segment, record, first, last)
        for record in own_units(shard, target.layer, start, stop):
            if record["flags"] & FLAG_REFERENCE:
                corrections.append((target, record))
                continue
            first = int(record["token_start"])
            spans.put(target, batch, shard, record, max(first, start), min(first + int(record["token_count"]), stop))
    batch.run()
    spans.run()
    for target, record in corrections:
        first = int(record["token_start"])
        last = first + int(record["token_count"])
        inside = start <= first and last <= stop
        reference = target.copy(first, last) if inside else _mapped(shard, target.layer, first, last)
        target.put(batch, shard, record, max(first, start), min(last, stop), reference)
    batch.run()
    return [target.finish() for target in targets]


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
        self._units: dict[tuple[int, int], tuple[Segment, np.void, int, int, list[_Target]]] = {}

    def put(self, target: _Target, batch: Batch, segment: Segment, record: np.void, first: int, last: int) -> None:
        """Have a unit's tokens ``[first, last)`` decoded: by the batch if it holds one layer, else by `run`."""
        if record["layer_count"] == 1 and not segment.codec_of(record).spans:
            target.put(batch, segment, record, first, last)
            return
        key = (id(segment), int(record["offset"]))
        self._units.setdefault(key, (segment, record, first, last, []))[-1].append(target)

    def run(self) -> None:
        """Decode what was put."""
        units, self._units = self._units, {}
        for segment, record, first, last, targets in units.values():
            whole = last - first == record["token_count"]
            rooms = {target.layer: target.room(first, last) for target in targets}
            unit, at = segment.unit(record), segment.position_of(record)
            out = [
                rooms[layer] if whole and layer in rooms else fresh(geometry, unit.tokens)
                for layer, geometry in enumerate(unit.layers, unit.layer)
            ]
            segment.decode_span(record, out)
            if not whole:
                part = slice(first - at, last - at)
                for layer, (keys, values) in rooms.items():
                    keys[:], values[:] = (array[:, part] for array in out[layer - unit.layer])


def _mapped(shard: Shard, layer: int, start: int, stop: int) -> KeyValue:
    """The values that the mapping table gives for a token range of one layer, as a codec's reference."""
    target, batch, spans = _Target(shard, layer, start, stop), Batch(), Spans()
    for segment, record, first, last in mapped_units(shard.runs, shard.libraries, layer, start, stop):
        spans.put(target, batch, segment, record, first, last)
    batch.run()
    spans.run()
    return target.finish()


def own_units(shard: Shard, layer: int, start: int, stop: int) -> np.ndarray:
    """Records of the shard's units that overlap a token range of one layer, in token order."""
    first, last = shard.layer_bounds[layer]
    units = shard.units[first:last]
    if start == 0 and stop >= len(shard.tokens):
        return units
    starts = units["token_start"].astype(np.int64)
    return units[(starts < stop) & (starts + units["token_count"] > start)]


def mapped_units(
    runs: np.ndarray, libraries: Sequence[Library], layer: int, start: int, stop: int
) -> Iterator[tuple[Library, np.void, int, int]]:
    """Library units that a token range of one layer maps to, with the session tokens ``[first, last)`` each gives.

    Parameters
    ----------
    runs : ndarray
        `pltpack.format.tables.RUN` records; their library field indexes `libraries`.
    """
    for run in runs:
        run_start = int(run["session_start"])
        low, high = max(run_start, start), min(run_start + int(run["length"]), stop)
        if low >= high:
            continue
        library = libraries[run["library"]]
        units = library.units_of(int(run["node"]))
        starts = units["token_start"].astype(np.int64) + int(library.nodes[run["node"]]["position"])
        held = (units["layer"] <= layer) & (layer < units["layer"].astype(np.int64) + units["layer_count"])
        for record in units[held & (starts < high) & (starts + units["token_count"] > low)]:
            at = library.position_of(record)
            yield library, record, max(at, low), min(at + int(record["token_count"]), high)


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


def _touched(shard: Shard, layers: range, start: int, stop: int) -> Iterator[tuple[np.void, int]]:
    """Records of the units that hold a part, each at least once, with the session token that they begin at."""
    layer = layers.start
    while layer < layers.stop:
        following = layers.stop
        for _, record, first, _ in mapped_units(shard.runs, shard.libraries, layer, start, stop):
            following = min(following, int(record["layer"]) + int(record["layer_count"]))
            yield record, first
        for record in own_units(shard, layer, start, stop):
            following = min(following, int(record["layer"]) + int(record["layer_count"]))
            yield record, int(record["token_start"])
        layer = following
