"""Trials of matches: a part of each is encoded with its prediction and without, before anything is written."""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Sequence

import numpy as np

from pltpack.archive.decoding import decode_layers
from pltpack.archive.encoding import Promise
from pltpack.archive.library import Library
from pltpack.archive.mapped import move_keys, reference_values
from pltpack.archive.prepared import Prepared
from pltpack.archive.segments import fresh
from pltpack.archive.shard import Shard
from pltpack.codec.base import Codec, KeyValue, Unit
from pltpack.format import tables
from pltpack.snapshot import Identity, Snapshot
from pltpack.trie.matching import Match

#: Tokens of a match that are tried, fewer of codecs that span layers, as all layers are coded then; and the grid on
#: which they begin in the source: other matches of it want the same.
TRIED_TOKENS, TRIED_SPAN_TOKENS = 64, 32
GRID = 32
#: Layer groups that are tried.
TRIED_GROUPS = 6
#: Decoded parts of sources that are kept for the next match.
_KEPT = 4 * TRIED_GROUPS


@dataclasses.dataclass(frozen=True, eq=False)
class Text:
    """Tokens that may predict others: a node of the library, one to be written, or a new session's own.

    Attributes
    ----------
    tokens : ndarray
        int32 ``[T]``.
    salt : str or None
    identity : Identity
    position : int
        Of its first token.
    own_from : int
        First token that no other text has.
    library, node : Library and int, or None
        Where a node is; library None is the segment to be written. Both None for a session.
    snapshot : Snapshot or None
        Whose values they are, where they are not written yet.
    cut : int
        Where that session may be cut, for the codec.
    shard : Shard or None
        An earlier session's, whose own units they are; `position` is where it has them.
    """

    tokens: np.ndarray
    salt: object
    identity: Identity
    position: int = 0
    own_from: int = 0
    library: Library | None = None
    node: int | None = None
    snapshot: Snapshot | None = None
    cut: int = 0
    shard: Shard | None = None


class Trial:
    """Tries matches, in any thread.

    Attributes
    ----------
    share : float
        Layer groups for each one that is tried.

    Parameters
    ----------
    prepared : Prepared
    layers : int
        Number of layers of the model.
    """

    def __init__(self, prepared: Prepared, layers: int) -> None:
        self._prepared = prepared
        self._tokens = TRIED_SPAN_TOKENS if prepared.codec.spans else TRIED_TOKENS
        groups = prepared.codec.layer_groups(layers)
        count = min(len(groups), TRIED_GROUPS)
        self._tried = [groups[i * (len(groups) - 1) // max(count - 1, 1)] for i in range(count)]
        self.share = len(groups) / count
        self._lock = threading.Lock()
        self._sources: collections.OrderedDict[tuple[int, ...], list[KeyValue]] = collections.OrderedDict()

    def __call__(self, snapshot: Snapshot, match: Match, source: Text) -> tuple[Promise, float]:
        """Try a match of a session.

        Returns
        -------
        Promise
        float
            Bytes that the tokens tried take less in all layers, where each unit is coded in the better way.
        """
        skip, count = _part(match.source_start, match.length, self._tokens)
        start, source_start = match.start + skip, match.source_start + skip
        # So few tokens are not worth the way to a device.
        codec = self._prepared.of(snapshot, len(snapshot)).on_host
        predicted, plain = [], []
        for layers in self._tried:
            unit = _unit(snapshot, layers, start, count, len(snapshot) - start - count)
            unit = dataclasses.replace(unit, near=True)
            arrays = [snapshot.layer(layer, start, start + count) for layer in layers]
            reference = self._moved(source, layers, source_start, count, start)
            if codec.spans:
                sizes = [len(found) for found in codec.encode_both(unit, arrays, reference)]
            else:
                sizes = [len(_encode(codec, unit, arrays, given)) for given in (reference, None)]
            predicted.append(sizes[0])
            plain.append(sizes[1])
        saved = sum(max(without - size, 0) for size, without in zip(predicted, plain, strict=True))
        promise = Promise(tuple(layers.start for layers in self._tried), tuple(size / count for size in predicted),
                          tuple(size / count for size in plain))  # fmt: skip
        return promise, saved * self.share

    def plain(self, snapshot: Snapshot, start: int, count: int) -> float:
        """Bytes that a few tokens of a session take as a unit in each layer group."""
        codec, size = self._prepared.of(snapshot, len(snapshot)).on_host, 0
        for layers in self._tried:
            unit = _unit(snapshot, layers, start, count, len(snapshot) - start - count)
            arrays = [snapshot.layer(layer, start, start + count) for layer in layers]
            size += len(_encode(codec, unit, arrays, None))
        return size * self.share

    def _moved(self, source: Text, layers: range, start: int, count: int, target: int) -> list[KeyValue]:
        """What the source will give once it is decoded, moved to the target's positions."""
        found = self._decoded(source, layers, start, count)
        position = source.position + start
        if position == target:
            return found
        out = []
        for keys, values in found:
            moved = np.empty(keys.shape, keys.dtype)
            move_keys(keys, source.identity, position, target, moved)
            out.append((moved, values))
        return out

    def _decoded(self, source: Text, layers: range, start: int, count: int) -> list[KeyValue]:
        key = (id(source), layers.start, start, count)
        with self._lock:
            if key in self._sources:
                self._sources.move_to_end(key)
                return self._sources[key]
        found = self._decode(source, layers, source.position + start, count)
        with self._lock:
            self._sources[key] = found
            while len(self._sources) > _KEPT:
                self._sources.popitem(last=False)
        return found

    def _decode(self, source: Text, layers: range, start: int, count: int) -> list[KeyValue]:
        if source.shard is not None:
            return decode_layers(source.shard, layers, start, start + count)
        if source.library is not None:
            row = np.array([(start, count, 0, source.node, start - source.position, 0)], tables.RUN)
            return reference_values(row, [source.library], layers, start, start + count)
        snapshot = source.snapshot
        assert snapshot is not None
        arrays = [snapshot.layer(layer, start, start + count) for layer in layers]
        if self._prepared.codec.exact:
            return arrays
        codec = self._prepared.of(snapshot, source.cut).on_host
        unit = _unit(snapshot, layers, start, count, source.cut - start - count)
        payload = memoryview(_encode(codec, unit, arrays, None))
        out = [fresh(snapshot.identity.layers[layer], count) for layer in layers]
        if codec.spans:
            codec.decode_span(payload, unit, out)
        else:
            codec.decode(payload, unit, *out[0])
        return out


def _part(source_start: int, length: int, most: int) -> tuple[int, int]:
    """Tokens of a match that are tried, `most` if there are so many: how many are skipped, and how many follow."""
    skip = -source_start % GRID
    return (skip, most) if skip + most <= length else (0, min(length, most))


def _unit(snapshot: Snapshot, layers: range, start: int, count: int, boundary: int) -> Unit:
    geometries = snapshot.identity.layers[layers.start : layers.stop]
    return Unit(layers.start, geometries[0], start, count, boundary, geometries)


def _encode(codec: Codec, unit: Unit, arrays: Sequence[KeyValue], reference: Sequence[KeyValue] | None) -> bytes:
    if codec.spans:
        return codec.encode_span(unit, arrays, reference)
    ((keys, values),) = arrays
    return codec.encode(dataclasses.replace(unit, layers=()), keys, values, reference[0] if reference else None)
