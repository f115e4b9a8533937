"""Layers out of units that hold many: their entropy coding is undone first, then early layers come before late ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from pltpack.archive.decoding import own_units
from pltpack.archive.mapped import mapped_units
from pltpack.archive.segments import Segment, fresh
from pltpack.archive.shard import Shard
from pltpack.codec.base import Begun, KeyValue
from pltpack.format.tables import FLAG_REFERENCE
from pltpack.serve.plan import Piece

#: Most bytes of coefficients of a step that is decoded like this, estimated; larger ones go unit by unit.
MOST_BYTES = 1 << 29
#: Layers that are decoded together at most; the first ones come alone.
TOGETHER = 4


class _Part(NamedTuple):
    """A unit's tokens ``[first, last)`` of a piece; the unit begins at token `at` and has `tokens`."""

    begun: Begun | _Kept
    at: int
    tokens: int
    first: int
    last: int


class _Kept:
    """A unit that is decoded already, for another load."""

    def __init__(self, layer: int, arrays: Sequence[KeyValue]) -> None:
        self._layer, self._arrays = layer, arrays

    def finish(self, layers: range, out: Sequence[KeyValue]) -> None:
        for layer, pair in zip(layers, out, strict=True):
            for target, array in zip(pair, self._arrays[layer - self._layer], strict=True):
                target[:] = array


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
        whole = record["layer"] <= piece.layers.start
        whole &= record["layer"].astype(int) + record["layer_count"] >= piece.layers.stop
        if not whole or record["flags"] & FLAG_REFERENCE or not segment.codec_of(record).layered:
            return False
        covered[first - piece.start : last - piece.start] = True
    return bool(covered.all())


def _units(shard: Shard, piece: Piece) -> Iterator[tuple[Segment, np.void, int, int]]:
    """Units of the first layer: where each holds all layers of the piece, those of the others."""
    start, stop, layer = piece.start, piece.stop, piece.layers.start
    yield from mapped_units(shard.exact_runs, shard.libraries, layer, start, stop)
    for record in own_units(shard, layer, start, stop):
        first = int(record["token_start"])
        yield shard, record, max(first, start), min(first + int(record["token_count"]), stop)


class LayeredPiece:
    """A piece that is begun.

    Raises
    ------
    FormatError
        If a unit is damaged.
    """

    def __init__(self, shard: Shard, piece: Piece) -> None:
        self._identity = shard.identity
        self._parts = []
        for segment, record, first, last in _units(shard, piece):
            begun: Begun | _Kept
            if segment.resident is not None:
                begun = _Kept(int(record["layer"]), segment.resident.get(segment, record))
            else:
                begun = segment.begin_span(record)
            at, tokens = segment.position_of(record), int(record["token_count"])
            self._parts.append(_Part(begun, at, tokens, first, last))

    def finish(self, layers: range, out: Sequence[KeyValue]) -> None:
        """Decode some of the layers to arrays ``[H, T, D]`` of the session's tokens from the first one on."""
        for begun, at, tokens, first, last in self._parts:
            rooms = [(keys[:, first:last], values[:, first:last]) for keys, values in out]
            if last - first == tokens:
                begun.finish(layers, rooms)
                continue
            whole = [fresh(self._identity.layers[layer], tokens) for layer in layers]
            begun.finish(layers, whole)
            for room, pair in zip(rooms, whole, strict=True):
                for target, array in zip(room, pair, strict=True):
                    target[:] = array[:, first - at : last - at]


def cut(layers: range) -> list[range]:
    """Layers in the order in which they are needed: one by one at first, then several at once, which costs less."""
    out, at, size = [], layers.start, 1
    while at < layers.stop:
        out.append(range(at, min(at + size, layers.stop)))
        at += size
        size = min(TOGETHER, 1 + len(out) // 2)
    return out
