"""Write one generation: a library segment if something new is shared or learnt, one shard per new session, a manifest.

Everything is written beside what exists and becomes visible by the manifest alone (spec/format.md, "Commit").
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from pltpack.archive.budget import admit
from pltpack.archive.captured import shard_tensors
from pltpack.archive.crew import Crew, Threads
from pltpack.archive.distributed import Distributed
from pltpack.archive.draft import Draft
from pltpack.archive.encoding import UNIT_TOKENS, Progress, UnitEncoder, UnitJob, UnitWriter, write_all
from pltpack.archive.files import HIDDEN, container_metadata, header_reserve, raised, session_entry, shard_path
from pltpack.archive.library import Library
from pltpack.archive.near import add_near
from pltpack.archive.places import Places, keeps
from pltpack.archive.prepared import Prepared
from pltpack.archive.publish import published
from pltpack.archive.reader import Archive
from pltpack.archive.recompute import of_archive
from pltpack.archive.sampling import TokenRange
from pltpack.archive.segment_writer import Output, write_library
from pltpack.archive.segments import dumps_json
from pltpack.archive.settings import TOLERANCE, UNUSED, MissedError, Settings, Volume
from pltpack.archive.sharing import Role, Sharing, prefix_end, run_records, share
from pltpack.archive.sink import Sink
from pltpack.archive.tally import Tally
from pltpack.archive.upkeep import renewals, with_renewals
from pltpack.archive.volume import expected
from pltpack.codec.base import Codec
from pltpack.codec.profile import Profile
from pltpack.errors import ConflictError, DumpError, UnsupportedError
from pltpack.format import tables
from pltpack.format.container import ContainerInfo
from pltpack.format.manifest import FileEntry, Manifest, SessionEntry
from pltpack.names import session_to_file
from pltpack.snapshot import Identity, Snapshot, token_ids
from pltpack.store import Writing

#: Attempts to meet a target.
_TRIES = 4


class GenerationWriter:
    """Adds snapshots to an archive as one generation.

    Parameters
    ----------
    writing : Writing
        Where the generation goes.
    archive : Archive or None
        The present generation, opened; None for a new archive.
    settings : Settings
    progress : callable
        Told ``(stage, raw bytes done, raw bytes in all)``.

    Attributes
    ----------
    report : dict
        What was written besides what the archive's statistics say: with a budget ``admission``, see
        `pltpack.archive.budget.admit`; ``recomputed``, a list of the nodes that were written anew: ``tokens``,
        ``sessions`` (of which they are the mean), ``predicted_tokens`` (what the old node had predicted).
    """

    def __init__(self, writing: Writing, archive: Archive | None, settings: Settings, progress: Progress) -> None:
        settings.check()
        self._writing, self._archive, self._settings, self._progress = writing, archive, settings, progress
        self._seal = archive.manifest.seal if archive else writing.seal
        self.report: dict[str, Any] = {}
        self._libraries: list[Library] = list(archive.libraries) if archive else []
        self._opened: Library | None = None
        self._paths: set[Path] = set()
        # Tokens encoded; payload bytes and bytes in all that were written, the profile left out.
        self._encoded = self._payload = self._bytes = 0
        # Of the attempts before: payloads of those that missed the target, and of the last one that left room the scale
        # and how much; the scale of the next, and which part of the target it may leave unused.
        self._smallest, self._largest = float("inf"), 0.0
        self._good: tuple[float, float] | None = None
        self._scale, self._unused = 1.0, 1.0

    def add(self, snapshots: Sequence[Snapshot]) -> Manifest:
        """Write the sessions and the next manifest; returns the manifest, already committed. Raises as `write`."""
        manifest = self.write(snapshots)
        self._writing.commit(manifest)
        return manifest

    def write(self, snapshots: Sequence[Snapshot]) -> Manifest:
        """Write the sessions; returns the manifest that would make them the next generation.

        Raises
        ------
        IdentityError
            If a snapshot belongs to another model than the archive or the first snapshot.
        ConflictError
            If a session of that name is in the archive.
        """
        identity = self.check(snapshots)
        if self._archive is None:
            return self._attempts(snapshots, identity)
        if of_archive([self._archive.shard(name) for name in self._archive.sessions]):
            raise UnsupportedError("holds sessions that a model makes again, with which other tiers do not mix",
                                   self._archive.path)  # fmt: skip
        with published(self._archive, snapshots, self._settings) as base:
            self._archive, self._libraries = base, list(base.libraries)
            return self._attempts(snapshots, identity)

    def write_state(self, identity: Identity) -> Manifest:
        """Write the tier's codec state, for sessions to come, unless the archive has it; returns as `write` does."""
        self._settings = dataclasses.replace(self._settings, near=False)
        return self._attempt([], identity)

    def _attempts(self, snapshots: Sequence[Snapshot], identity: Identity) -> Manifest:
        for tries in range(_TRIES):
            # Predictions make sessions smaller than steps were chosen for: then these are to be finer.
            self._unused = UNUSED if tries < _TRIES - 2 else 1.0
            try:
                return self._attempt(snapshots, identity)
            except MissedError as missed:
                self._again(missed, _TRIES - 1 - tries)
        raise AssertionError

    def _again(self, missed: MissedError, left: int) -> None:
        """Choose the scale of the next attempt of those left, or raise what the last one missed."""
        # The estimate does not know how sharing cuts sessions; what was written tells.
        scale = self._scale * missed.room * (1 - TOLERANCE / 4)
        if missed.room > 1:
            if self._payload <= self._largest:
                # Steps cannot be finer: nothing is gained by more attempts.
                scale = self._scale
            self._good = (self._scale, missed.room)
            self._largest = self._payload
        elif self._good:
            # Between what left room and what took too much.
            low, room = self._good
            part = np.log(room) / (np.log(room) - np.log(max(missed.room, 1e-9))) if left > 1 else 0.0
            scale = low * float((self._scale / low) ** part)
        elif not left or self._payload >= self._smallest or scale <= 0:
            raise missed
        else:
            self._smallest = self._payload
        self._scale = scale
        self._forget()

    def _attempt(self, snapshots: Sequence[Snapshot], identity: Identity) -> Manifest:
        threads = os.cpu_count() or 1
        with ThreadPoolExecutor(threads, thread_name_prefix="pltpack-encode") as pool, Sink(self._seal) as self._sink:
            try:
                return self._add(snapshots, identity, pool)
            finally:
                if self._opened is not None:
                    self._opened.close()

    def _forget(self) -> None:
        """Remove what was written, none of which is committed."""
        if self._opened is not None:
            self._paths.add(Path(self._opened.container.path))
            self._libraries.remove(self._opened)
        for path in self._paths:
            path.unlink(missing_ok=True)
        self._paths, self._opened = set(), None
        self._encoded = self._payload = self._bytes = 0

    def _add(self, snapshots: Sequence[Snapshot], identity: Identity, pool: ThreadPoolExecutor) -> Manifest:
        settings, tier = self._settings, self._settings.codec(scale=self._scale)
        places = Places(self._libraries, settings)
        sharing = Sharing([], [[] for _ in snapshots])
        if settings.dedup:
            sharing = share(self._archive, snapshots, settings.block, lambda library, node: keeps(library, node, tier))
        tier = settings.codec(self._volume(identity, snapshots, sharing, tier, places), self._scale)
        self._expect(snapshots, sharing)
        place = places.find(tier) or places.start(
            tier, _ranges(snapshots, sharing), identity, lambda: self._progress("learn", 0, self._total)
        )
        prepared = Prepared(place.codec)
        crew: Crew = Threads(pool)
        if settings.engine is not None:
            crew = Distributed(settings.engine, place, prepared, identity)
        crew.prepare(snapshots)
        if settings.dedup and settings.near:
            self._progress("match", 0, self._total)
            sharing = add_near(sharing, self._archive, snapshots, settings, place, prepared, pool, crew)
        sharing = self._upkeep(sharing, snapshots, prepared, pool)
        self._expect(snapshots, sharing)
        if not any(run.role is Role.NEAR for runs in sharing.runs for run in runs):
            self._unused = 1.0
        output = Output(self._writing.folder, identity, settings.block, self._libraries, place, prepared, self._sink,
                        crew, self._advance, settings.backend)  # fmt: skip
        new_entry = None
        if place.library is None or sharing.nodes:
            self._opened, info = write_library(output, sharing.nodes)
            new_entry = self._opened.entry
            self._encoded += sum(node.stop - node.position for node in sharing.nodes)
            self._payload += info.payload_bytes
            self._bytes += info.size - place.packed.nbytes
        entries = self._shards(snapshots, sharing, output)
        return self._manifest(identity, new_entry, entries)

    def _upkeep(
        self, sharing: Sharing, snapshots: Sequence[Snapshot], prepared: Prepared, pool: ThreadPoolExecutor
    ) -> Sharing:
        """Add nodes that are to be written anew, and keep what the library has room for."""
        settings, due = self._settings, []
        self.report = {}
        if self._archive is not None and settings.recompute is not None:
            due = renewals(self._archive, sharing, snapshots, settings.recompute, prepared, settings.block, pool)
        if settings.library_budget is None:
            sharing = with_renewals(sharing, due)
        else:
            sharing, self.report["admission"] = admit(sharing, due, snapshots, self._archive, prepared, settings.block,
                                                      settings.library_budget)  # fmt: skip
        means = [{"tokens": r.node.stop - r.node.position, "sessions": r.node.visits, "predicted_tokens": r.predicted}
                 for r in due if any(node is r.node for node in sharing.nodes)]  # fmt: skip
        if means:
            self.report["recomputed"] = means
        return sharing

    def _expect(self, snapshots: Sequence[Snapshot], sharing: Sharing) -> None:
        """How much raw data will be gone through."""
        shared = sum(_raw(node.owner, node.position, node.stop) for node in sharing.nodes)
        self._total = shared + sum(_raw(s, 0, len(s)) for s in snapshots)
        self._done = 0

    def _shards(self, snapshots: Sequence[Snapshot], sharing: Sharing, output: Output) -> list[SessionEntry]:
        owners = [node.owner for node in sharing.nodes]
        written: dict[UnitWriter, Callable[[], Future[ContainerInfo]]] = {}
        places: list[Path] = []
        infos: list[Future[ContainerInfo]] = []
        library_bytes = self._opened.entry.bytes if self._opened else 0
        tally = Tally(self._progress, snapshots, sharing, library_bytes)
        tally.tell(infos)

        drafts = []
        for snapshot, runs in zip(snapshots, sharing.runs, strict=True):
            mine = [dataclasses.replace(r, library=r.library or self._opened) for r in runs]
            drafts.append(Draft(snapshot, mine, self._libraries, self._opened, owners))
        # Exact codecs correct what is not equal; the rows of others must be near.
        stays = iter([]) if output.place.codec.exact else output.crew.near(drafts)

        def shards() -> Iterator[tuple[UnitWriter, Iterable[UnitJob]]]:
            for draft in drafts:
                path, writer, jobs, commit = self._shard(draft, next(stays, None), output)
                places.append(path)
                written[writer] = commit
                yield writer, jobs

        def finished(writer: UnitWriter) -> None:
            infos.append(written.pop(writer)())
            tally.tell(infos)

        write_all(shards(), output.crew.encode, self._advance, finished)
        # In the order of writing, so that the first error is the one that is told.
        self._sink.finish()
        self._payload += sum(info.result().payload_bytes for info in infos)
        self._bytes += sum(info.result().size for info in infos)
        tally.tell(infos)
        return [
            session_entry(path, info.result(), snapshot.session, len(snapshot), snapshot.identity.salt)
            for snapshot, path, info in zip(snapshots, places, infos, strict=True)
        ]

    def _manifest(self, identity: Identity, library: FileEntry | None, entries: Sequence[SessionEntry]) -> Manifest:
        old = self._archive.manifest if self._archive else None
        manifest = Manifest(
            generation=old.generation + 1 if old else 1,
            identity=identity,
            block=self._settings.block,
            quality=old.quality if old else self._settings.quality,
            dedup=old.dedup if old else self._settings.dedup,
            libraries=(*(old.libraries if old else ()), *([library] if library else ())),
            sessions=(*(old.sessions if old else ()), *entries),
            seal=self._seal,
        )
        before = len(old.to_bytes()) if old else 0
        besides = len(manifest.to_bytes()) - before + self._bytes - self._payload
        written = Volume(self._encoded * _per_token(identity), self._payload, besides)
        self._settings.target.check(written, self._unused)
        return manifest

    def _volume(
        self, identity: Identity, snapshots: Sequence[Snapshot], sharing: Sharing, tier: Codec, places: Places
    ) -> Volume | None:
        """What is to be written, if the target is a size."""
        if self._settings.target.size is None:
            return None
        groups = len(Profile(places.profile(tier)[0], identity.layers).groups)
        return expected(identity, snapshots, sharing, groups, self._archive is None)

    def check(self, snapshots: Sequence[Snapshot]) -> Identity:
        """The identity of the archive, after a look at whether it can take the sessions; raises as `write`."""
        if not snapshots:
            raise DumpError("no sessions to write")
        first = dataclasses.replace(snapshots[0].identity, salt=None)
        identity = self._archive.identity if self._archive else first
        if len(identity.layers) == 0:
            raise DumpError("the session has no layers", snapshots[0].origin)
        if len(identity.layers) > tables.MAX_LAYERS:
            raise UnsupportedError(f"{len(identity.layers)} layers exceed the limit", snapshots[0].origin)
        largest = max(layer.bytes_per_token for layer in identity.layers) * max(self._settings.block, UNIT_TOKENS)
        if largest > tables.MAX_UNIT_BYTES:
            raise UnsupportedError(f"units of {largest} bytes exceed the limit (try a smaller block)")
        held = {e.session for e in self._archive.manifest.sessions} if self._archive else set()
        seen = set(held)
        for snapshot in snapshots:
            snapshot.identity.check(snapshot.origin)
            token_ids(snapshot.tokens, snapshot.origin)
            identity.require_same(snapshot.identity, snapshot.origin)
            if snapshot.session in seen:
                where = "is in the archive already" if snapshot.session in held else "is given twice"
                raise ConflictError(f"session {snapshot.session!r} {where}", snapshot.origin)
            if len(snapshot) > tables.MAX_TOKENS:
                raise UnsupportedError(f"{len(snapshot)} tokens exceed the limit", snapshot.origin)
            session_to_file(snapshot.session)
            seen.add(snapshot.session)
        return identity

    def _advance(self, raw_bytes: int) -> None:
        self._done += raw_bytes
        self._progress("encode", self._done, self._total)

    def _shard(
        self, draft: Draft, stays: Sequence[bool] | None, output: Output
    ) -> tuple[Path, UnitWriter, Iterable[UnitJob], Callable[[], Future[ContainerInfo]]]:
        """A new session's shard: its path, its open writer, the jobs for it, and what commits it after them."""
        place, snapshot, identity = output.place, draft.snapshot, output.identity
        library = place.library or self._opened
        assert library is not None
        path = shard_path(self._writing.folder, HIDDEN if self._seal else snapshot.session, self._paths)
        self._paths.add(path)
        if stays is None:
            self._advance(sum(_raw(snapshot, r.session_start, r.stop) for r in draft.runs if r.role is Role.SOURCE))
        else:
            draft.keep(stays, self._advance)
        self._encoded += len(snapshot) - draft.mapped
        used = [lib for lib in self._libraries if lib is library or any(r.library is lib for r in draft.runs)]
        metadata = {
            **container_metadata("shard", identity, draft.minor(place.codec)),
            "session": snapshot.session,
            "libraries": dumps_json([lib.entry.head_sha256 for lib in used]),
            "states": dumps_json([[used.index(library), place.state]]),
        }
        if snapshot.identity.salt is not None:
            metadata["salt"] = snapshot.identity.salt
        container = self._sink.open(path, header_reserve(metadata))
        writer = UnitWriter(container, self._sink, UnitEncoder(output.prepared, 0))
        groups = place.codec.layer_groups(len(identity.layers))
        jobs = draft.jobs(self._settings.block, corrections=place.codec.exact, groups=groups)

        def commit() -> Future[ContainerInfo]:
            found = {
                "tokens": np.ascontiguousarray(snapshot.tokens, np.int32),
                "map": tables.as_bytes(run_records(draft.runs, used)),
                "unit.index": writer.table(),
                **shard_tensors(snapshot),
            }
            return self._sink.commit(container, found, raised(metadata, writer.minor))

        return path, writer, jobs, commit


def _ranges(snapshots: Sequence[Snapshot], sharing: Sharing) -> list[TokenRange]:
    """What is encoded, exact prefixes once."""
    ranges = [TokenRange(n.owner, n.position, n.stop) for n in sharing.nodes]
    return ranges + [TokenRange(s, prefix_end(runs), len(s)) for s, runs in zip(snapshots, sharing.runs, strict=True)]


def _per_token(identity: Identity) -> int:
    return sum(layer.elements_per_token for layer in identity.layers)


def _raw(snapshot: Snapshot, start: int, stop: int) -> int:
    return (stop - start) * sum(layer.bytes_per_token for layer in snapshot.identity.layers)
