"""The streaming loader: look a prompt up, and bring the stored prefix to where an engine wants it, layer by layer."""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pltpack.archive.backends import backend_of
from pltpack.archive.shard import Shard
from pltpack.errors import FormatError, PltpackError, UnsupportedError
from pltpack.format.container import GoneError
from pltpack.serve.arguments import any_hit, called, field_names, hit_of, of_kind, positive, rise_of, whole
from pltpack.serve.centroids import Centroids, keys_of
from pltpack.serve.counters import Counters
from pltpack.serve.fallback import Fallbacks
from pltpack.serve.guard import Alert, AlertLimits, LoadGuard
from pltpack.serve.into import destination_of
from pltpack.serve.job import Job
from pltpack.serve.misses import LASTING, MissError, Misses, reason_of
from pltpack.serve.prefixes import Hit, PrefixIndex, library_paths
from pltpack.serve.preparation import prepare_loader
from pltpack.serve.staged import Reads, direct_to, staged, staged_shard
from pltpack.serve.stream import LoadedLayer, Stream, Work
from pltpack.snapshot import Identity
from pltpack.snapshot import token_ids as checked_ids

if TYPE_CHECKING:
    from pltpack.archive.reader import Archive
    from pltpack.gpu.backend import Backend
    from pltpack.serve.on_device import DeviceStages

#: Share of the memory given that centroids may take.
CENTROID_SHARE = 0.8
#: Most units in flight.
MAX_DEPTH = 64
#: Most threads that decode one load.
MAX_WORKERS = 1024


class Loader:
    """Loads prefixes out of an open archive; safe to use from several threads. Close it, or its archive.

    Parameters
    ----------
    archive : Archive
    device : str
        Where values are decoded and go to: ``cpu``, ``cuda``, ``cuda:N``, or ``auto`` for CUDA where there is a device.
    depth : int
        Units in flight while one is consumed: 3, or 5 to 7 for large models; at least 1.
    memory : int
        Bytes, of the device where there is one; 80 % of them for library centroids, decoded and encoded.
    workers : int, optional
        Threads that decode; as many as there are cores by default.
    identity : Identity, optional
        The engine's own; every field that it knows must agree with the archive's, and only sessions of its salt are
        found. By default what the archive was opened with.
    accept_unknown : iterable of str
        Fields of `identity` that the archive need not know.
    timeout : float, optional
        Seconds that a load may take unless it says otherwise.
    recompute_at_cut : int, optional
        Tokens that a hit leaves to the model where it does not reach the end of what is stored: see `PrefixIndex`.
    read_bytes_per_second : float, optional
        Limit for reading, to see what a slower disk would do.
    mapped : bool
        Map files instead of copying from them: see `pltpack.serve.staged.Reads`.
    direct : bool
        Read to the device by kvikio, past the host's page cache: see `pltpack.gpu.direct`.
    quality : callable, optional
        Asked for every hit that `lookup` finds: by how many percent the perplexity of who continued from its session
        rose, or None if that is not known. `report` says the same of its own accord.
    on_alert : callable, optional
        Told every `pltpack.serve.guard.Alert`.
    limits : AlertLimits, optional
        When sessions are barred, and when they are cleared.
    fallback : Archive, optional
        Holds raw or lossless caches of the same sessions, which take the place of barred ones.

    Raises
    ------
    IdentityError
        Naming the field in which the archive differs.
    UnsupportedError
        If a setting is out of range, or the device is not known or cannot be used here.
    """

    def __init__(
        self,
        archive: Archive,
        device: str = "cpu",
        depth: int = 3,
        memory: int = 1 << 30,
        workers: int | None = None,
        identity: Identity | None = None,
        accept_unknown: Iterable[str] = (),
        timeout: float | None = None,
        read_bytes_per_second: float | None = None,
        mapped: bool = False,
        direct: bool = False,
        quality: Callable[[Hit], float | None] | None = None,
        on_alert: Callable[[Alert], object] | None = None,
        limits: AlertLimits | None = None,
        fallback: Archive | None = None,
        recompute_at_cut: int | None = None,
    ) -> None:
        if not isinstance(device, str):
            raise UnsupportedError(f"device must be a name, not {device!r}")
        backend = backend_of(device)
        workers = whole("workers", (os.cpu_count() or 1) if workers is None else workers, 1, MAX_WORKERS)
        depth, memory = whole("depth", depth, 1, MAX_DEPTH), whole("memory", memory, 0)
        timeout = positive("timeout", timeout, zero=True)
        self._recompute = None if recompute_at_cut is None else whole("recompute_at_cut", recompute_at_cut, 0)
        read_bytes_per_second = positive("read_bytes_per_second", read_bytes_per_second)
        of_kind("identity", identity, Identity, "an Identity")
        of_kind("limits", limits, AlertLimits, "AlertLimits")
        of_kind("fallback", fallback, type(archive), "an open archive")
        called("quality", quality)
        called("on_alert", on_alert)
        accept_unknown = field_names("accept_unknown", accept_unknown)
        if archive.closed:
            raise UnsupportedError("the archive is closed", archive.path)
        if identity is not None:
            own = dataclasses.replace(archive.identity, salt=identity.salt)
            own.require_loadable(identity, accept_unknown, str(archive.path))
        self.archive, self.salt = archive, None if identity is None else identity.salt
        self._depth, self._workers, self._timeout = depth, workers, timeout
        self._reads = Reads(read_bytes_per_second, mapped, direct_to(backend, device) if direct else None)
        self._device = None if backend is None else _stages(backend, int(memory * CENTROID_SHARE))
        self._centroids = Centroids(int(memory * CENTROID_SHARE)) if self._device is None else self._device.centroids
        # Garbage collection may end a stream, and so a load, in the middle of anything.
        self._misses, self._lock = Misses(), threading.RLock()
        self._index: PrefixIndex | None = None
        self._running: weakref.WeakSet[Work] = weakref.WeakSet()
        self._bad: set[str] = set()
        self._closed = False
        self.counters, self._quality = Counters(), quality
        raw = None if fallback is None else fallback.loader(
            device, depth=depth, memory=memory, workers=workers, identity=identity, accept_unknown=accept_unknown,
            timeout=timeout, direct=direct,
        )  # fmt: skip
        self._fallbacks = Fallbacks(LoadGuard(limits, on_alert), raw)

    def prepare(self) -> None:
        """Open all sessions and make what the first load would make, for a process that starts before its requests.

        Raises
        ------
        FormatError, NotFoundError
            If a codec's state is damaged, or a profile is not found.
        """
        prepare_loader(self, self._prefixes(), self._device is None)

    def lookup(self, token_ids: Any) -> Hit:
        """The longest stored prefix of a prompt, over all sessions and library paths of the tenant, in whole blocks.

        Parameters
        ----------
        token_ids : array_like
            Integers ``[T]``.

        Returns
        -------
        Hit
            False as a condition if nothing is stored.
        """
        ids = checked_ids(token_ids)
        index = self._prefixes()
        hit = index.lookup(ids)
        rise = self._quality(hit) if hit and self._quality is not None else None
        if rise is not None:
            self.report(hit, rise)
        if hit and self.guard.barred(hit.session):
            hit, kind = self._fallbacks.instead(index, hit, ids)
            self.counters.add("fallbacks", kind)
        self.counters.add("lookups", "found" if hit else "not found")
        self.counters.add("tokens", "found", hit.tokens)
        self.counters.add("tokens", "not found", len(ids) - hit.tokens)
        return hit

    def report(self, hit: Hit, ppl_change_pct: float) -> Alert | None:
        """Say by how many percent the perplexity of who continued from a hit's session rose.

        Returns
        -------
        Alert or None
            If the session is barred by this, until it has proved good: see `pltpack.serve.guard`.
        """
        hit, ppl_change_pct = any_hit(hit), rise_of(ppl_change_pct)
        if hit.source or not hit:
            # Raw caches are what others are compared with.
            return None
        kind = functools.partial(self._fallbacks.kind, self._prefixes, hit.session)
        alert = self.guard.report(hit.session, ppl_change_pct, kind)
        if alert is not None:
            self.counters.add("alerts", alert.level)
        return alert

    @property
    def guard(self) -> LoadGuard:
        """What was reported of sessions, and which are barred."""
        return self._fallbacks.guard

    def stream(self, hit: Hit, into: Any = None, timeout: float | None = None) -> Stream:
        """Start loading; iterate over the result to get each layer as it becomes ready, in order.

        Parameters
        ----------
        hit : Hit
            Of this loader's `lookup`.
        into : optional
            `Contiguous`, `Paged`, another `Destination`, a pair ``(keys, values)`` for `Contiguous`, or a transformers
            ``DynamicCache`` that is empty. By default arrays ``[H, T, D]`` of the loader's own.
        timeout : float, optional
            Seconds for the whole load.

        Raises
        ------
        MissError
            If what the hit names is not there any more. Iterating raises it, too, if the load fails.
        UnsupportedError
            If the hit is empty, or does not fit its destination.
        """
        hit = hit_of(hit)
        self.counters.add("loads", hit.source or "stored")
        if hit.source and self._fallbacks.raw is not None:
            return self._fallbacks.raw.stream(dataclasses.replace(hit, source=""), into, timeout)
        index = self._prefixes()
        shard = index.sources.get(hit.session)
        if shard is None or hit.generation != index.generation or not hit.names(shard.tokens):
            stale = FormatError("the archive has changed since the look-up, or is another", self.archive.path)
            raise self._misses.add(hit.session, "stale", stale)
        destination = destination_of(into, None if self._device is None else self._device.backend)
        limit = self._timeout if timeout is None else positive("timeout", timeout, zero=True)
        try:
            destination.begin(self.archive.identity.layers, hit.tokens)
            job = Job(shard, hit.tokens, destination, self._device, self.counters.span)
            work = Work(job, self._depth, self._workers, limit, functools.partial(self._report, hit))
        except UnsupportedError:
            raise
        except (PltpackError, OSError, MemoryError) as error:
            # Codecs are started here, from tables that may be damaged and profiles that may be missing.
            raise self._report(hit, error, ()) from error
        with self._lock:
            if self._closed:
                raise self._is_closed()
            self._running.add(work)
        return Stream(work, destination, len(self.archive.identity.layers))

    def load(self, hit: Hit, into: Any = None, timeout: float | None = None) -> list[LoadedLayer]:
        """All layers of a hit; arguments and errors as of `stream`."""
        with self.stream(hit, into, timeout) as stream:
            return list(stream)

    def leave_out(self, session: str) -> None:
        """Do not offer a session any more, as a reader elsewhere found it damaged."""
        with self._lock:
            self._bad.add(session)
            if self._index is not None:
                self._index = self._index.without(session)

    def pin(self, hit: Hit) -> None:
        """Keep the library centroids that a hit maps to in memory, once decoded, until `unpin`."""
        self._centroids.pin(self._keys(any_hit(hit)))

    def unpin(self, hit: Hit) -> None:
        """Undo one `pin`."""
        self._centroids.unpin(self._keys(any_hit(hit)))

    @property
    def misses(self) -> dict[str, int]:
        """Loads that came to nothing, by reason; those of raw caches included."""
        raw = self._fallbacks.raw
        return dict(collections.Counter(self._misses.counts()) + collections.Counter(raw.misses if raw else {}))

    @property
    def read_bytes(self) -> int:
        """Payload bytes read so far."""
        return self._reads.bytes

    def in_flight(self) -> tuple[int, int]:
        """Loads under way, and units that wait between their stages."""
        with self._lock:
            queued = [work.queued for work in self._running]
        running = [units for units in queued if units is not None]
        return len(running), sum(running)

    @property
    def centroids(self) -> dict[str, int]:
        """What is kept of the library: see `Centroids.stats`."""
        return self._centroids.stats()

    def _keys(self, hit: Hit) -> list[tuple[str, int]]:
        shard = self._prefixes().sources.get(hit.session)
        if shard is None:
            return []
        return keys_of(shard.libraries, shard.exact_runs[shard.exact_runs["session_start"] < hit.tokens])

    def _prefixes(self) -> PrefixIndex:
        with self._lock:
            if self._closed:
                raise self._is_closed()
            if self._index is None or self._index.generation != self.archive.manifest.generation:
                self._index = self.archive.in_one_generation(self._build)
            return self._index

    def _is_closed(self) -> UnsupportedError:
        what = "archive is closed, and its loaders with it" if self.archive.closed else "loader is closed"
        return UnsupportedError(f"the {what}", self.archive.path)

    def _build(self) -> PrefixIndex:
        manifest, sources = self.archive.manifest, dict[str, Shard]()
        copies = {library.entry.head_sha256: staged(library, self._reads) for library in self.archive.libraries}
        for library in copies.values():
            library.resident = self._centroids
            if self._device is None:
                library.decoded = self._centroids
        for entry in manifest.sessions:
            if entry.salt != self.salt or entry.session in self._bad:
                continue
            try:
                if self.archive.shard(entry.session).recipe is not None:
                    why = "a model makes it again, which takes as long as to compute the prompt"
                    self._leave_out(entry.session, "recompute", UnsupportedError(why, self.archive.path))
                    continue
                sources[entry.session] = staged_shard(self.archive.shard(entry.session), copies, self._reads)
            except GoneError as error:
                self._leave_out(entry.session, "missing file", error)
            except PltpackError as error:
                self._leave_out(entry.session, "bad shard", error)
        for name, path in library_paths(list(copies.values()), self.salt):
            if name not in self._bad:
                sources[name] = path
        return PrefixIndex(sources, manifest.block, manifest.generation, self._recompute)

    def _leave_out(self, session: str, reason: str, error: BaseException) -> None:
        self._bad.add(session)
        self._misses.add(session, reason, error)

    def _report(self, hit: Hit, error: BaseException, blocks: Sequence[int]) -> MissError:
        reason = reason_of(error)
        moved = False
        if isinstance(error, GoneError):
            try:
                self.archive.follow(hit.generation, error)
                moved = True
            except PltpackError:
                pass
        if reason in LASTING and not moved:
            # Not offered again: one bad file must not keep a request busy for ever.
            with self._lock:
                self._bad.add(hit.session)
                if self._index is not None:
                    self._index = self._index.without(hit.session)
        return self._misses.add(hit.session, reason, error, blocks)

    def close(self) -> None:
        """Cancel what is under way and forget all; harmless when repeated."""
        with self._lock:
            self._closed, running = True, list(self._running)
        for work in running:
            work.close()
        self._centroids.clear()
        if self._device is not None:
            self._device.backend.lanes.close()
        self._reads.close()
        self._index = None
        if self._fallbacks.raw is not None:
            self._fallbacks.raw.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _stages(backend: Backend, budget: int) -> DeviceStages:
    from pltpack.gpu.backend import CudaBackend
    from pltpack.serve.on_device import DeviceStages

    assert isinstance(backend, CudaBackend)
    return DeviceStages(backend, budget)
