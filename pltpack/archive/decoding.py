"""Decode token ranges of one layer from mapped library units and a shard's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from pltpack.archive.segments import Library, Segment, Shard
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


def decode_layer(shard: Shard, layer: int, start: int, stop: int, out: KeyValue | None = None) -> KeyValue:
    """Keys and values of one layer's tokens ``[start, stop)``: mapped library units first, then the shard's own.

    Parameters
    ----------
    shard : Shard
    layer, start, stop : int
    out : (ndarray, ndarray), optional
        Where to decode to, ``[H, stop - start, D]`` each; fresh arrays by default.

    Raises
    ------
    FormatError
        If a unit is damaged, or the units do not cover the range.
    """
    target = _Target(shard, layer, start, stop, out)
    for segment, record, first, last in mapped_units(shard.runs, shard.libraries, layer, start, stop):
        target.put(segment, record, first, last)
    for record in own_units(shard, layer, start, stop):
        first = int(record["token_start"])
        last = first + int(record["token_count"])
        reference = None
        if record["flags"] & FLAG_REFERENCE:
            inside = start <= first and last <= stop
            reference = target.copy(first, last) if inside else _mapped(shard, layer, first, last)
        target.put(shard, record, max(first, start), min(last, stop), reference)
    return target.finish()


class _Target:
    """Arrays being filled with a token range of one layer."""

    def __init__(self, shard: Shard, layer: int, start: int, stop: int, out: KeyValue | None = None) -> None:
        shape = shard.identity.layers[layer]
        dtype = DTYPES[shape.dtype]
        self._shard, self._layer, self._start = shard, layer, start
        if out is None:
            out = (np.empty((shape.heads, stop - start, shape.k_dim), dtype),
                   np.empty((shape.heads, stop - start, shape.v_dim), dtype))  # fmt: skip
        self._keys, self._values = out
        self._covered = np.zeros(stop - start, dtype=bool)

    def put(self, segment: Segment, record: np.void, first: int, last: int, reference: KeyValue | None = None) -> None:
        """Decode a unit and keep its tokens ``[first, last)``, straight in place when that is all of it."""
        at = segment.position_of(record)
        into = slice(first - self._start, last - self._start)
        if last - first == record["token_count"]:
            segment.decode(record, reference, (self._keys[:, into], self._values[:, into]))
        else:
            keys, values = segment.decode(record, reference)
            part = slice(first - at, last - at)
            self._keys[:, into], self._values[:, into] = keys[:, part], values[:, part]
        self._covered[into] = True

    def copy(self, first: int, last: int) -> KeyValue:
        """The values so far of tokens ``[first, last)``."""
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
            raise FormatError(f"no unit holds layer {self._layer}, token {gap}", self._shard.container.path)


def _mapped(shard: Shard, layer: int, start: int, stop: int) -> KeyValue:
    """The values that the mapping table gives for a token range of one layer, as a codec's reference."""
    target = _Target(shard, layer, start, stop)
    for segment, record, first, last in mapped_units(shard.runs, shard.libraries, layer, start, stop):
        target.put(segment, record, first, last)
    return target.finish()


def own_units(shard: Shard, layer: int, start: int, stop: int) -> np.ndarray:
    """Records of the shard's units that overlap a token range of one layer, in token order."""
    units = shard.units[shard.layer_bounds[layer] : shard.layer_bounds[layer + 1]]
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
        for record in units[(units["layer"] == layer) & (starts < high) & (starts + units["token_count"] > low)]:
            at = library.position_of(record)
            yield library, record, max(at, low), min(at + int(record["token_count"]), high)
