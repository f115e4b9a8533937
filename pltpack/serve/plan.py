"""How a load is cut: steps of layers that become ready together, and the pieces of work that each is made of."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from pltpack.archive.decoding import own_units, span_pieces
from pltpack.archive.mapped import mapped_units
from pltpack.archive.segments import Segment
from pltpack.archive.shard import Shard

#: A layer of a long session is decoded in pieces of at most this many tokens.
PIECE_TOKENS = 8192
#: Layers that are loaded together, the last number again and again: the first come soon, and to hand a piece from stage
#: to stage takes as long as to decode a small layer.
LAYERS_TOGETHER = 1, 1, 2, 3, 4
#: Decoded bytes that layers loaded together have at most, and those of one below which it is not worth it.
TOGETHER_BYTES, LEAST_BYTES = 1 << 22, 1 << 16


class Piece(NamedTuple):
    """A part of a step that is read, checked, decoded and scattered at once: session tokens ``[start, stop)``."""

    step: int
    layers: range
    start: int
    stop: int
    last: bool

    @property
    def label(self) -> str:
        """What a plot calls it."""
        first, last = self.layers.start, self.layers.stop - 1
        return f"{first}" if first == last else f"{first}-{last}:{self.start}"


def pieces_of(shard: Shard, tokens: int, together: bool = False) -> list[Piece]:
    """All pieces of the first `tokens` tokens of a session, in the order of their layers; small ones maybe together."""
    cut = span_pieces(shard, range(len(shard.identity.layers)), 0, tokens)
    if not cut:
        ends = [*range(0, tokens, PIECE_TOKENS), tokens]
        cut = [
            (layers, first, last)
            for layers in _layers_of(shard, tokens if together else 0)
            for first, last in itertools.pairwise(ends)
        ]
    groups = [list(group) for _, group in itertools.groupby(cut, key=lambda piece: piece[0])]
    return [
        Piece(step, *piece, last=index == len(group) - 1)
        for step, group in enumerate(groups)
        for index, piece in enumerate(group)
    ]


def _layers_of(shard: Shard, tokens: int) -> Iterator[range]:
    at, sizes = 0, [layer.bytes_per_token * tokens for layer in shard.identity.layers]
    counts = itertools.chain(LAYERS_TOGETHER, itertools.repeat(LAYERS_TOGETHER[-1]))
    while at < len(sizes):
        most = min(next(counts), TOGETHER_BYTES // max(sizes[at], 1)) if sizes[at] >= LEAST_BYTES else 1
        stop = min(at + max(most, 1), len(sizes))
        yield range(at, stop)
        at = stop


def units_of(shard: Shard, piece: Piece) -> list[tuple[Segment, np.void]]:
    """Units whose payload decoding a piece needs, each once, but for those that are decoded in memory."""
    found: dict[tuple[int, int, int], tuple[Segment, np.void]] = {}
    for segment, record in _units_of(shard, piece):
        found.setdefault((id(segment), int(record["offset"]), int(record["layer"])), (segment, record))
    return list(found.values())


def _units_of(shard: Shard, piece: Piece) -> Iterator[tuple[Segment, np.void]]:
    start, stop = piece.start, piece.stop
    for layer in piece.layers:
        for record in own_units(shard, layer, start, stop):
            yield shard, record
        for runs in (shard.exact_runs, shard.predicted_runs):
            for library, record, _, _ in mapped_units(runs, shard.libraries, range(layer, layer + 1), start, stop):
                if library.resident is None or not library.resident.holds(library, record):
                    yield library, record
