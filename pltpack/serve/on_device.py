"""The device's side of a load: pieces are decoded to memory of the device, and put from there where they belong.

The stages, their threads and queues are those of every load (`pltpack.serve.stream`); these are the decode and scatter
stages of one on a device. A piece that has a unit with a reference is decoded by the CPU's codecs and copied over.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from pltpack.archive.decoding import decode_layers, own_units
from pltpack.archive.mapped import mapped_units
from pltpack.archive.segments import Segment
from pltpack.archive.shard import Shard
from pltpack.codec.base import Codec
from pltpack.errors import FormatError
from pltpack.format.tables import FLAG_REFERENCE
from pltpack.gpu.backend import CudaBackend
from pltpack.gpu.jobs import Job, LayerPlace, places_of
from pltpack.gpu.place import Pages
from pltpack.serve.centroids import Centroids
from pltpack.serve.plan import Piece
from pltpack.snapshot import DTYPES, LayerGeometry

#: Words of one layer on the device: keys and values ``[H, T, D]``.
WordPair = tuple[Any, Any]


class _Source(NamedTuple):
    """A unit of a piece: it gives the session's tokens ``[first, last)`` and begins, there, at token `at`."""

    segment: Segment
    record: np.void
    first: int
    last: int
    at: int


class _Kept(NamedTuple):
    """A payload on the host, which reads its fixed parts, and its copy on the device."""

    host: bytes
    on_device: Any


class _Place:
    """Where the centroids of a device are: see `pltpack.serve.centroids.Place`."""

    def __init__(self, stages: DeviceStages) -> None:
        # They hold the centroids.
        self._stages = weakref.proxy(stages)

    def keep(self, payload: bytes | memoryview | _Kept) -> _Kept:
        """See `Place.keep`."""
        if isinstance(payload, _Kept):
            return payload
        host = bytes(payload)
        return _Kept(host, self._stages.backend.put(np.frombuffer(host, np.uint8)))

    def decode(self, segment: Segment, record: np.void, payload: Any) -> list[WordPair]:
        """See `Place.decode`."""
        host, there = payload if isinstance(payload, _Kept) else (payload, _there(segment, record))
        found: list[WordPair] = self._stages.decode_centroid(segment, record, memoryview(host), there)
        return found


class DeviceStages:
    """Decodes pieces of loads to a device; one for all loads of a loader.

    Parameters
    ----------
    backend : CudaBackend
    budget : int
        Bytes of centroids that are kept on the device.
    """

    def __init__(self, backend: CudaBackend, budget: int) -> None:
        self.backend = backend
        self.centroids = Centroids(budget, _Place(self))

    def decode(self, shard: Shard, piece: Piece) -> list[WordPair]:
        """Words of a piece's layers on the device.

        Raises
        ------
        FormatError
            If a unit is damaged, or the units do not cover the piece.
        MemoryError
            If the device has no room.
        """
        with self.backend.lanes:
            return self._piece(shard, piece)

    @contextlib.contextmanager
    def scattering(self) -> Iterator[None]:
        """For the scatter stage: a piece's copies on the decode stream, waited for at the end by their event."""
        with self.backend.lanes as lanes:
            yield
            lanes.wait()

    def _piece(self, shard: Shard, piece: Piece) -> list[WordPair]:
        layers = [shard.identity.layers[layer] for layer in piece.layers]
        if any(record["flags"] & FLAG_REFERENCE
               for layer in piece.layers for record in own_units(shard, layer, piece.start, piece.stop)):  # fmt: skip
            host = decode_layers(_on_host(shard), piece.layers, piece.start, piece.stop)
            return [(self.backend.put(k.view(_word(g))), self.backend.put(v.view(_word(g))))
                    for (k, v), g in zip(host, layers, strict=True)]  # fmt: skip
        out = self._fresh(layers, piece.stop - piece.start)
        mapped, own = self._sources(shard, piece)
        # Own units come after: they may replace mapped values.
        for sources in (mapped, own):
            self._fill(shard, piece, sources, out)
        return [pair for pair, _ in out]

    def _sources(self, shard: Shard, piece: Piece) -> tuple[list[_Source], list[_Source]]:
        mapped, own = dict[tuple[int, ...], _Source](), dict[tuple[int, ...], _Source]()
        for layer in piece.layers:
            covered = np.zeros(piece.stop - piece.start, bool)
            for found, part in ((mapped, _mapped(shard, piece, layer)), (own, _own(shard, piece, layer))):
                for source in part:
                    covered[source.first - piece.start : source.last - piece.start] = True
                    record = source.record
                    found.setdefault((id(source.segment), int(record["offset"]), int(record["layer"]), source.at,
                                      source.first), source)  # fmt: skip
            if not covered.all():
                gap = piece.start + int(np.argmin(covered))
                raise FormatError(f"no unit holds layer {layer}, token {gap}", shard.container.path)
        return list(mapped.values()), list(own.values())

    def _fill(self, shard: Shard, piece: Piece, sources: Sequence[_Source], out: list[Any]) -> None:
        codecs: dict[int, tuple[Segment, Codec, list[Job]]] = {}
        copies: list[tuple[_Source, list[WordPair]]] = []
        for source in sources:
            segment, record = source.segment, source.record
            if segment.resident is not None:
                copies.append((source, segment.resident.get(segment, record)))
                continue
            unit = segment.unit(record)
            layers = range(unit.layer, unit.layer + len(unit.layers or (0,)))
            inside = piece.layers.start <= layers.start and layers.stop <= piece.layers.stop
            if inside and source.last - source.first == unit.tokens:
                places = tuple(out[layer - piece.layers.start][1] for layer in layers)
                slot = source.first - piece.start
            else:
                fresh = self._fresh(unit.layers or (unit.geometry,), unit.tokens)
                places, slot = tuple(place for _, place in fresh), 0
                copies.append((source, [pair for pair, _ in fresh]))
            payload = memoryview(segment.checked_payload(record))
            job = Job(payload, unit, places, slot, kept=_there(segment, record))
            codec = segment.codec_of(record).on_host
            codecs.setdefault(id(codec), (segment, codec, []))[-1].append(job)
        for named, codec, jobs in codecs.values():
            self._run(named, codec, jobs)
        for source, pairs in copies:
            layer = int(source.record["layer"])
            for index, pair in enumerate(pairs, layer):
                if index in piece.layers:
                    part = slice(source.first - source.at, source.last - source.at)
                    room = slice(source.first - piece.start, source.last - piece.start)
                    for target, array in zip(out[index - piece.layers.start][0], pair, strict=True):
                        target[:, room] = array[:, part]

    def _run(self, segment: Segment, codec: Codec, jobs: Sequence[Job]) -> None:
        try:
            self.backend.decode_units(codec, jobs)
        except ValueError as error:
            raise FormatError(f"a unit cannot be decoded: {error}", segment.container.path) from None

    def decode_centroid(self, segment: Segment, record: np.void, payload: memoryview, there: Any) -> list[WordPair]:
        """A library unit on the device, from its payload and what is there of it already."""
        unit = segment.unit(record)
        fresh = self._fresh(unit.layers or (unit.geometry,), unit.tokens)
        job = Job(payload, unit, tuple(place for _, place in fresh), kept=there)
        self._run(segment, segment.codec_of(record).on_host, [job])
        return [pair for pair, _ in fresh]

    def _fresh(self, layers: Sequence[LayerGeometry], tokens: int) -> list[tuple[WordPair, LayerPlace]]:
        """Arrays for some layers, a buffer for each dtype: their words, and the places in it."""
        dtypes, out = {layer.dtype for layer in layers}, {}
        for dtype in dtypes:
            some = [index for index, layer in enumerate(layers) if layer.dtype == dtype]
            chosen = [layers[index] for index in some]
            words = self.backend.buffer(tokens * sum(g.elements_per_token for g in chosen), dtype)
            for index, place in zip(some, places_of(chosen, tokens, words), strict=True):
                out[index] = (_view(words, place.keys, layers[index].heads, tokens, layers[index].k_dim),
                              _view(words, place.values, layers[index].heads, tokens, layers[index].v_dim)), place
        return [out[index] for index in range(len(layers))]


def _there(segment: Segment, record: np.void) -> Any:
    """A unit's payload where a direct read has brought it to the device; else None."""
    container: Any = segment.container
    return container.on_device(int(record["offset"]), int(record["length"]))


def _view(words: Any, pages: Pages, heads: int, tokens: int, dim: int) -> Any:
    return words[pages.base : pages.base + heads * tokens * dim].reshape(heads, tokens, dim)


def _mapped(shard: Shard, piece: Piece, layer: int) -> Iterator[_Source]:
    layers = range(layer, layer + 1)
    for library, record, first, last in mapped_units(
        shard.exact_runs, shard.libraries, layers, piece.start, piece.stop
    ):
        yield _Source(library, record, first, last, library.position_of(record))


def _own(shard: Shard, piece: Piece, layer: int) -> Iterator[_Source]:
    for record in own_units(shard, layer, piece.start, piece.stop):
        at = int(record["token_start"])
        yield _Source(shard, record, max(at, piece.start), min(at + int(record["token_count"]), piece.stop), at)


def _on_host(shard: Shard) -> Shard:
    """The shard over libraries whose decoded units are not looked for on the device."""
    found = copy.copy(shard)
    found.libraries = []
    for library in shard.libraries:
        again = copy.copy(library)
        again.resident = None
        found.libraries.append(again)
    return found


def _word(geometry: LayerGeometry) -> np.dtype[Any]:
    return np.dtype(f"u{DTYPES[geometry.dtype].itemsize}")
