"""Read archives: sessions, random access by layer and token range, statistics."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from pltpack.archive import profiles
from pltpack.archive.ahead import announce
from pltpack.archive.backends import backend_of
from pltpack.archive.decoded import DecodedUnits
from pltpack.archive.decoding import decode_layers, one_buffer, span_pieces
from pltpack.archive.library import Library
from pltpack.archive.parts import check_layers, check_tokens
from pltpack.archive.recompute import Rebuild
from pltpack.archive.segments import Segment
from pltpack.archive.shard import Shard
from pltpack.archive.spans import SpanSource
from pltpack.archive.threads import together
from pltpack.codec.base import KeyValue, State
from pltpack.errors import ConflictError, FormatError, NotFoundError, UnsupportedError
from pltpack.format.container import GoneError
from pltpack.format.manifest import Manifest
from pltpack.snapshot import Identity, Snapshot
from pltpack.store import Store, Stored, open_store

if TYPE_CHECKING:
    from pltpack.serve.loader import Loader

Result = TypeVar("Result")

#: Layers that a sequential reader decodes ahead of the one it is asked for.
LOOKAHEAD = 3
#: Longer token ranges of one layer are decoded in pieces of this many tokens, in parallel.
PIECE_TOKENS = 4096
#: A thread decodes several small layers in one task, at most this many bytes.
TASK_BYTES = 1 << 24
#: Segments and shards that an archive keeps open; further ones are opened for every read.
MAX_OPEN = 128
#: Newer generations that a reader follows in a row before it gives up.
MAX_FOLLOWED = 8


class Archive:
    """An open archive; use as a context manager. Reading is safe from several threads.

    Where `compact` takes away files that are still to be opened, the reader goes on in the new generation, in which the
    sessions are the same.

    Parameters
    ----------
    path : path-like or Store
        Archive folder or URL, see `pltpack.store.open_store`.
    identity : Identity, optional
        The loader's own identity: every session read must agree with it, salt included.
    accept_unknown : iterable of str
        Fields of `identity` that the archive need not know.
    profile : path-like, optional
        The profile of an archive that refers to one outside; else it is looked for by its digest.
    manifest : Manifest, optional
        Of a generation that is written but not committed yet.
    device : str
        Where units are decoded: ``cpu``, ``cuda``, ``cuda:N``, or ``auto`` for CUDA where there is a device. What is
        read is on the host in any case.
    rebuild : Rebuild, optional
        Runs the model for sessions that are made again by one; see `pltpack.quality.recompute.Rebuilder`.

    Raises
    ------
    FormatError
        If the manifest or a library segment is damaged.
    IdentityError
        If the archive belongs to another model.
    UnsupportedError
        If the device is not known, or cannot be used here.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Store,
        identity: Identity | None = None,
        accept_unknown: Iterable[str] = (),
        profile: str | os.PathLike[str] | None = None,
        manifest: Manifest | None = None,
        device: str = "cpu",
        rebuild: Rebuild | None = None,
    ) -> None:
        self.store = open_store(path)
        self.path: Any = self.store.location
        self._rebuild, self._profile = rebuild, profile
        self.backend = backend_of(device)
        #: The generation that was opened first.
        self.base = self.store.load() if manifest is None else Stored(manifest, len(manifest.to_bytes()))
        self.manifest, self.manifest_bytes = self.base.manifest, self.base.bytes
        self._loader, self._accept = identity, tuple(accept_unknown)
        if identity is not None:
            own = Identity(**{**self.manifest.identity.__dict__, "salt": identity.salt})
            own.require_loadable(identity, self._accept, str(self.path))
        self._entries = {entry.session: entry for entry in self.manifest.sessions}
        self._shards: dict[str, Shard] = {}
        self._retired: list[Segment] = []
        self._decoded = DecodedUnits()
        self._lock, self.closed = threading.Lock(), False
        self._loaders: weakref.WeakSet[Loader] = weakref.WeakSet()
        self._pool: ThreadPoolExecutor | None = None
        self.libraries: list[Library] = []
        try:
            try:
                self.libraries = self._open_libraries(self.manifest)
            except GoneError as error:
                self._follow(error)
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
        self.closed = True
        for loader in list(self._loaders):
            loader.close()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None
        for segment in (*self.libraries, *self._shards.values(), *self._retired):
            segment.close()
        self.libraries, self._shards, self._retired = [], {}, []
        self._decoded.clear()

    def _open_libraries(self, manifest: Manifest) -> list[Library]:
        opened: list[Library] = []
        try:
            for entry in manifest.libraries:
                opened.append(Library(self.store, entry, manifest.identity, self._find_profile, self.backend,
                                      manifest.seal))  # fmt: skip
                opened[-1].decoded = self._decoded
                if len(opened) > MAX_OPEN:
                    opened[-1].container.release()
        except BaseException:
            for library in opened:
                library.close()
            raise
        return opened

    def _find_profile(self, digest: str) -> State:
        for library in self.libraries:
            for state in range(len(library.states)):
                if library.profile_digest(state) == digest and library.embeds(state):
                    return library.state(state)
        return profiles.find(digest, self._profile, self.store.folder)[1]

    def at(self, manifest: Manifest) -> Archive:
        """Another reader of the same folder, for a generation that is written but not committed."""
        return Archive(self.store, profile=self._profile, manifest=manifest)

    def follow(self, generation: int, error: GoneError) -> None:
        """Go on in a newer generation than `generation`, or raise `error` if there is none."""
        with self._lock:
            if self.manifest.generation == generation:
                self._follow(error)

    def in_one_generation(self, work: Callable[[], Result]) -> Result:
        """What `work` returns if this reader stays in one generation meanwhile; it is called anew if not.

        Raises
        ------
        GoneError
            If a file is missing and no newer generation has taken its place.
        ConflictError
            If newer generations take files away again and again.
        """
        for _ in range(MAX_FOLLOWED):
            generation = self.manifest.generation
            try:
                result = work()
            except GoneError as error:
                self.follow(generation, error)
                continue
            if self.manifest.generation == generation:
                return result
        raise ConflictError("it is compacted faster than it can be read", self.path)

    def _follow(self, error: GoneError) -> None:
        for _ in range(MAX_FOLLOWED):
            stored = self.store.load()
            manifest = stored.manifest
            if manifest.generation <= self.manifest.generation or manifest.identity != self.identity:
                raise error
            try:
                libraries = self._open_libraries(manifest)
            except GoneError as again:
                self.manifest, error = manifest, again
                continue
            # Snapshots may be reading from the former files in other threads.
            self._retired += [*self.libraries, *self._shards.values()]
            self.manifest, self.libraries, self._shards = manifest, libraries, {}
            self.manifest_bytes = stored.bytes
            self._entries = {entry.session: entry for entry in manifest.sessions}
            return
        raise error

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
            while session not in self._shards:
                if self.closed:
                    raise UnsupportedError("the archive is closed", self.path)
                if session not in self._entries:
                    raise NotFoundError(f"no session {session!r}", self.path)
                try:
                    shard = Shard(self.store, self._entries[session], self.identity, self.libraries,
                                  self.manifest.seal)  # fmt: skip
                except GoneError as error:
                    self._follow(error)
                    continue
                shard.rebuild = self._rebuild
                if len(self._shards) + len(self.libraries) > MAX_OPEN:
                    shard.container.release()
                self._shards[session] = shard
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
        if not isinstance(session, str):
            raise NotFoundError(f"no session {session!r}", self.path)
        whole = self.snapshot(session)
        chosen = check_layers(layers, len(self.identity.layers), str(self.path))
        start, stop = check_tokens(tokens, len(whole), whole.origin)
        arrays = one_buffer([self.identity.layers[index] for index in chosen], stop - start)
        source = whole.source
        assert isinstance(source, ShardSource)

        def fill(task: tuple[range, int, int]) -> None:
            group, at, end = task
            out = [(keys[:, at - start : end - start], values[:, at - start : end - start])
                   for keys, values in arrays[group.start - chosen.start : group.stop - chosen.start]]  # fmt: skip
            source.decode_layers(group, at, end, out)

        announce(self.shard(session), chosen, start, stop)
        tasks = span_pieces(self.shard(session), chosen, start, stop)
        if not tasks:
            groups = self._groups(chosen, min(stop - start, PIECE_TOKENS))
            starts = range(start, stop, PIECE_TOKENS)
            tasks = [(group, at, min(at + PIECE_TOKENS, stop)) for group in groups for at in starts]
        together(fill, tasks, self.pool, (os.cpu_count() or 1) - 1)
        identity = Identity(**{**whole.identity.__dict__, "layers": tuple(self.identity.layers[i] for i in chosen)})
        return Snapshot.from_arrays(session, whole.tokens[start:stop], arrays, identity, origin=whole.origin)

    def _groups(self, layers: range, tokens: int) -> list[range]:
        """Cut layers into tasks of a thread, smaller and smaller so that all threads end together."""
        largest = max(self.identity.layers[index].bytes_per_token for index in layers) * max(tokens, 1)
        out, at = [], 0
        while at < len(layers):
            share = (len(layers) - at) // (os.cpu_count() or 1)
            count = max(1, min(share, TASK_BYTES // largest))
            out.append(layers[at : at + count])
            at += count
        return out

    def loader(self, device: str = "cpu", **settings: Any) -> Loader:
        """A streaming loader of this archive, closed with it: see `pltpack.serve.loader.Loader` for the settings."""
        # The one name that an upper floor has here: it is where users look for it.
        from pltpack.serve.loader import Loader

        loader = Loader(self, device, **{"identity": self._loader, "accept_unknown": self._accept} | settings)
        self._loaders.add(loader)
        return loader

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
        self._archive, self._session, self._tokens = archive, shard.entry.session, shard.tokens
        self._ahead: dict[tuple[int, int, int], Future[KeyValue]] = {}
        self._lock = threading.Lock()
        self._spans = SpanSource(archive, shard, self.decode_layers)

    def layer(self, index: int, start: int, stop: int) -> KeyValue:
        """See `pltpack.snapshot.LayerSource.layer`."""
        held = self._spans.layer(index, start, stop)
        if held is not None:
            return held
        if stop - start > PIECE_TOKENS:
            return self._in_pieces(index, start, stop)
        with self._lock:
            wanted = range(index, min(index + LOOKAHEAD, len(self._archive.identity.layers)))
            for stale in [key for key in self._ahead if key[0] not in wanted or key[1:] != (start, stop)]:
                self._ahead.pop(stale).cancel()
            for ahead in wanted:
                if (ahead, start, stop) not in self._ahead:
                    self._ahead[ahead, start, stop] = self._archive.pool.submit(self.decode, ahead, start, stop)
            future = self._ahead.pop((index, start, stop))
        return future.result()

    def _in_pieces(self, index: int, start: int, stop: int) -> KeyValue:
        # A long layer keeps all threads busy by itself; decoding other layers ahead would only take memory.
        starts = range(start, stop, PIECE_TOKENS)
        pool = self._archive.pool
        pieces = [pool.submit(self.decode, index, at, min(at + PIECE_TOKENS, stop)) for at in starts]
        done = [piece.result() for piece in pieces]
        return np.concatenate([keys for keys, _ in done], axis=1), np.concatenate([v for _, v in done], axis=1)

    def decode(self, layer: int, start: int, stop: int) -> KeyValue:
        """Decode one layer in this thread."""
        return self.decode_layers([layer], start, stop)[0]

    def decode_layers(
        self, layers: Sequence[int], start: int, stop: int, out: Sequence[KeyValue] | None = None
    ) -> list[KeyValue]:
        """Decode in this thread; arguments as of `pltpack.archive.decoding.decode_layers`."""
        while True:
            generation = self._archive.manifest.generation
            shard = self._archive.shard(self._session)
            if shard.tokens is not self._tokens and not np.array_equal(shard.tokens, self._tokens):
                raise FormatError("the archive was replaced while it was open", self._archive.path)
            try:
                return decode_layers(shard, layers, start, stop, out)
            except GoneError as error:
                self._archive.follow(generation, error)
