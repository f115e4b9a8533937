"""Read archives: sessions, random access by layer and token range, statistics."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from pltpack.archive.segments import Library, Segment, Shard
from pltpack.codec.base import KeyValue
from pltpack.errors import FormatError, NotFoundError, UnsupportedError
from pltpack.format.manifest import Manifest
from pltpack.format.tables import FLAG_REFERENCE
from pltpack.snapshot import DTYPES, Identity, LayerGeometry, Snapshot

#: Layers that a sequential reader decodes ahead of the one it is asked for.
LOOKAHEAD = 3
#: Longer token ranges of one layer are decoded in pieces of this many tokens, in parallel.
PIECE_TOKENS = 4096


class Archive:
    """An open archive; use as a context manager. Reading is safe from several threads.

    Parameters
    ----------
    path : path-like
        Archive folder.
    identity : Identity, optional
        The loader's own identity: every session read must agree with it, salt included.
    accept_unknown : iterable of str
        Fields of `identity` that the archive need not know.

    Raises
    ------
    FormatError
        If the manifest or a library segment is damaged.
    IdentityError
        If the archive belongs to another model.
    """

    def __init__(
        self, path: str | os.PathLike[str], identity: Identity | None = None, accept_unknown: Iterable[str] = ()
    ) -> None:
        self.path = Path(path)
        self.manifest = Manifest.load(self.path)
        self._loader, self._accept = identity, tuple(accept_unknown)
        if identity is not None:
            own = Identity(**{**self.manifest.identity.__dict__, "salt": identity.salt})
            own.require_loadable(identity, self._accept, str(self.path))
        self._entries = {entry.session: entry for entry in self.manifest.sessions}
        self._shards: dict[str, Shard] = {}
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self.libraries: list[Library] = []
        try:
            for entry in self.manifest.libraries:
                self.libraries.append(Library(self.path, entry, self.manifest.identity))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Archive:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all files; harmless when repeated."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None
        for segment in (*self.libraries, *self._shards.values()):
            segment.close()
        self.libraries, self._shards = [], {}

    @property
    def identity(self) -> Identity:
        """Identity that all sessions share (salts apart)."""
        return self.manifest.identity

    @property
    def sessions(self) -> list[str]:
        """Session names, in the order in which they were added."""
        return list(self._entries)

    @property
    def pool(self) -> ThreadPoolExecutor:
        """Threads that decode units: one per core."""
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="pltpack")
            return self._pool

    def shard(self, session: str) -> Shard:
        """A session's shard, opened once.

        Raises
        ------
        NotFoundError
            If the archive has no such session.
        """
        with self._lock:
            if session not in self._shards:
                if session not in self._entries:
                    raise NotFoundError(f"no session {session!r}", self.path)
                self._shards[session] = Shard(self.path, self._entries[session], self.identity, self.libraries)
            return self._shards[session]

    def snapshot(self, session: str) -> Snapshot:
        """A session as a snapshot that decodes on demand, layer by layer.

        Raises
        ------
        NotFoundError, FormatError
        IdentityError
            If the session's salt is not the loader's.
        """
        shard = self.shard(session)
        identity = Identity(**{**self.identity.__dict__, "salt": shard.entry.salt})
        if self._loader is not None:
            identity.require_loadable(self._loader, self._accept, str(shard.container.path))
        return Snapshot(session, shard.tokens, identity, ShardSource(self, shard), str(shard.container.path))

    def read(self, session: str, layers: range | None = None, tokens: slice | None = None) -> Snapshot:
        """Decode a session, or a part of it, into memory.

        Parameters
        ----------
        session : str
        layers : range, optional
            Layers to decode; the result's layer 0 is the first of them.
        tokens : slice, optional
            Token range, without step; keys stay rotated to their positions in the session.

        Raises
        ------
        NotFoundError, FormatError, IdentityError
        UnsupportedError
            If a range is empty, reversed, stepped or outside the session.
        """
        whole = self.snapshot(session)
        chosen = check_layers(layers, len(self.identity.layers))
        start, stop = check_tokens(tokens, len(whole))
        arrays = _one_buffer([self.identity.layers[index] for index in chosen], stop - start)
        shard = self.shard(session)

        def fill(layer: int, at: int, out: KeyValue) -> None:
            into = slice(at - start, at - start + PIECE_TOKENS)
            decode_layer(shard, layer, at, min(at + PIECE_TOKENS, stop), (out[0][:, into], out[1][:, into]))

        starts = range(start, stop, PIECE_TOKENS)
        work = [self.pool.submit(fill, i, at, out) for i, out in zip(chosen, arrays, strict=True) for at in starts]
        try:
            for future in work:
                future.result()
        finally:
            for future in work:
                future.cancel()
        identity = Identity(**{**whole.identity.__dict__, "layers": tuple(self.identity.layers[i] for i in chosen)})
        return Snapshot.from_arrays(session, whole.tokens[start:stop], arrays, identity, origin=whole.origin)

    def stats(self) -> dict[str, Any]:
        """Sizes and the four figures: see `pltpack.archive.stats.archive_stats`."""
        from pltpack.archive.stats import archive_stats

        return archive_stats(self)

    def describe(self) -> dict[str, Any]:
        """Everything `pltpack inspect --json` shows: see `pltpack.archive.stats.describe`."""
        from pltpack.archive.stats import describe

        return describe(self)


class ShardSource:
    """A `LayerSource` that decodes a session's units on demand and, read in order, a few layers ahead."""

    def __init__(self, archive: Archive, shard: Shard) -> None:
        self._archive, self._shard = archive, shard
        self._ahead: dict[tuple[int, int, int], Future[KeyValue]] = {}
        self._lock = threading.Lock()

    def layer(self, index: int, start: int, stop: int) -> KeyValue:
        """See `pltpack.snapshot.LayerSource.layer`."""
        if stop - start > PIECE_TOKENS:
            return self._in_pieces(index, start, stop)
        with self._lock:
            wanted = range(index, min(index + LOOKAHEAD, len(self._archive.identity.layers)))
            for stale in [key for key in self._ahead if key[0] not in wanted or key[1:] != (start, stop)]:
                self._ahead.pop(stale).cancel()
            for ahead in wanted:
                if (ahead, start, stop) not in self._ahead:
                    self._ahead[ahead, start, stop] = self._archive.pool.submit(self._decode, ahead, start, stop)
            future = self._ahead.pop((index, start, stop))
        return future.result()

    def _in_pieces(self, index: int, start: int, stop: int) -> KeyValue:
        # A long layer keeps all threads busy by itself; decoding other layers ahead would only take memory.
        starts = range(start, stop, PIECE_TOKENS)
        pool = self._archive.pool
        pieces = [pool.submit(self._decode, index, at, min(at + PIECE_TOKENS, stop)) for at in starts]
        done = [piece.result() for piece in pieces]
        return np.concatenate([keys for keys, _ in done], axis=1), np.concatenate([v for _, v in done], axis=1)

    def _decode(self, layer: int, start: int, stop: int) -> KeyValue:
        return decode_layer(self._shard, layer, start, stop)


def _one_buffer(layers: Sequence[LayerGeometry], tokens: int) -> list[KeyValue]:
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
    units = shard.units
    return units[(units["layer"] == layer) & (units["token_start"] < stop)
                 & (units["token_start"].astype(np.int64) + units["token_count"] > start)]  # fmt: skip


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
        for record in library.units_of(int(run["node"])):
            at = library.position_of(record)
            first, last = max(at, low), min(at + int(record["token_count"]), high)
            if record["layer"] == layer and first < last:
                yield library, record, first, last


def check_layers(layers: range | None, count: int) -> range:
    """A checked layer range (`None` is all)."""
    if layers is None:
        return range(count)
    if layers.step != 1 or not 0 <= layers.start < layers.stop <= count:
        raise UnsupportedError(f"layers {layers.start}:{layers.stop} are not a range within 0:{count}")
    return layers


def check_tokens(tokens: slice | None, count: int) -> tuple[int, int]:
    """A checked token range (`None` is all)."""
    if tokens is None:
        return 0, count
    start = 0 if tokens.start is None else tokens.start
    stop = count if tokens.stop is None else tokens.stop
    if tokens.step not in (None, 1) or not 0 <= start <= stop <= count or (start == stop and count):
        raise UnsupportedError(f"tokens {start}:{stop} are not a range within 0:{count}")
    return start, stop
