"""Write one generation: a library segment if something new is shared or learnt, one shard per new session, a manifest.

Everything is written beside what exists and becomes visible by the manifest alone (spec/format.md, "Commit").
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from pltpack.archive.draft import Draft
from pltpack.archive.encoding import UNIT_TOKENS, Progress, UnitJob, UnitWriter, split, write_all
from pltpack.archive.files import container_metadata, header_reserve, next_library, session_entry, shard_path
from pltpack.archive.library import Library
from pltpack.archive.profiles import digest
from pltpack.archive.reader import Archive
from pltpack.archive.sampling import JobSamples, TokenRange
from pltpack.archive.segments import dumps_json
from pltpack.archive.settings import TOLERANCE, MissedError, Settings, Volume
from pltpack.archive.sharing import NewNode, Run, Sharing, run_records, share
from pltpack.archive.sink import Sink
from pltpack.archive.volume import expected
from pltpack.codec.base import Codec, State
from pltpack.codec.profile import Profile
from pltpack.errors import ConflictError, DumpError, UnsupportedError
from pltpack.format import state as state_format
from pltpack.format import tables
from pltpack.format.container import ContainerInfo
from pltpack.format.manifest import SHARDS, FileEntry, Manifest
from pltpack.names import session_to_file
from pltpack.snapshot import Identity, Snapshot, token_ids

#: Attempts to meet a target.
_TRIES = 3


@dataclasses.dataclass(frozen=True)
class _CodecPlace:
    """A started codec and where its state is: library None is the segment being written."""

    codec: Codec
    library: Library | None
    state: int


class GenerationWriter:
    """Adds snapshots to an archive folder as one generation.

    Parameters
    ----------
    folder : Path
        Archive folder; the caller holds its writer lock.
    archive : Archive or None
        The present generation, opened; None for a new archive.
    settings : Settings
    progress : callable
        Told ``(stage, raw bytes done, raw bytes in all)``.
    """

    def __init__(self, folder: Path, archive: Archive | None, settings: Settings, progress: Progress) -> None:
        settings.check()
        self._folder, self._archive, self._settings, self._progress = folder, archive, settings, progress
        self._libraries: list[Library] = list(archive.libraries) if archive else []
        self._opened: Library | None = None
        self._paths: set[Path] = set()
        # Tokens encoded; payload bytes and bytes in all that were written, the profile left out.
        self._encoded = self._payload = self._bytes = 0
        # Of the attempts before, at which part of the target.
        self._smallest, self._scale = float("inf"), 1.0

    def add(self, snapshots: Sequence[Snapshot]) -> Manifest:
        """Write the sessions and the next manifest; returns the manifest, already committed.

        Raises
        ------
        IdentityError
            If a snapshot belongs to another model than the archive or the first snapshot.
        ConflictError
            If a session of that name is in the archive.
        """
        identity = self._check(snapshots)
        if self._archive is None:
            (self._folder / SHARDS).mkdir()
        for tries in range(_TRIES):
            try:
                return self._attempt(snapshots, identity)
            except MissedError as missed:
                # The estimate does not know how sharing cuts sessions; what was written tells.
                room = missed.room * (1 - TOLERANCE / 4)
                if tries == _TRIES - 1 or self._payload >= self._smallest or room <= 0:
                    raise
                self._forget()
                self._scale *= room
        raise AssertionError

    def _attempt(self, snapshots: Sequence[Snapshot], identity: Identity) -> Manifest:
        threads = os.cpu_count() or 1
        with ThreadPoolExecutor(threads, thread_name_prefix="pltpack-encode") as pool, Sink() as self._sink:
            try:
                return self._add(snapshots, identity, pool)
            finally:
                if self._opened is not None:
                    self._opened.close()

    def _forget(self) -> None:
        """Remove what was written, none of which is committed."""
        if self._opened is not None:
            self._paths.add(self._opened.container.path)
            self._libraries.remove(self._opened)
        for path in self._paths:
            path.unlink(missing_ok=True)
        self._smallest = self._payload
        self._paths, self._opened = set(), None
        self._encoded = self._payload = self._bytes = 0

    def _add(self, snapshots: Sequence[Snapshot], identity: Identity, pool: ThreadPoolExecutor) -> Manifest:
        tier = self._settings.codec(scale=self._scale)
        sharing = Sharing([], [[] for _ in snapshots])
        if self._settings.dedup:
            sharing = share(self._archive, snapshots, self._settings.block,
                            lambda library, node: _keeps(library, node, tier))  # fmt: skip
        tier = self._settings.codec(self._volume(identity, snapshots, sharing, tier), self._scale)
        place = self._find_codec(tier)
        shared = [runs[-1].session_start + runs[-1].length if runs else 0 for runs in sharing.runs]
        total = sum(_raw(n.owner, n.position, n.stop) for n in sharing.nodes)
        self._total = total + sum(_raw(s, 0, len(s)) for s in snapshots)
        self._done = 0
        new_entry = None
        if place is None or sharing.nodes:
            ranges = [TokenRange(n.owner, n.position, n.stop) for n in sharing.nodes]
            ranges += [TokenRange(s, start, len(s)) for s, start in zip(snapshots, shared, strict=True)]
            new_entry, place = self._write_library(sharing.nodes, ranges, place, tier, identity, pool)
        assert place is not None
        owners = [node.owner for node in sharing.nodes]
        written: dict[UnitWriter, Callable[[], Future[ContainerInfo]]] = {}
        places: list[Path] = []
        infos: list[Future[ContainerInfo]] = []

        def shards() -> Iterator[tuple[UnitWriter, Iterable[UnitJob]]]:
            for snapshot, runs in zip(snapshots, sharing.runs, strict=True):
                mine = [dataclasses.replace(r, library=r.library or self._opened) for r in runs]
                path, writer, jobs, commit = self._shard(snapshot, mine, owners, place, identity, pool)
                places.append(path)
                written[writer] = commit
                yield writer, jobs

        write_all(shards(), pool, self._advance, lambda writer: infos.append(written.pop(writer)()))
        # In the order of writing, so that the first error is the one that is told.
        self._sink.finish()
        self._payload += sum(info.result().payload_bytes for info in infos)
        self._bytes += sum(info.result().size for info in infos)
        entries = [
            session_entry(path, info.result(), snapshot.session, len(snapshot), snapshot.identity.salt)
            for snapshot, path, info in zip(snapshots, places, infos, strict=True)
        ]
        old = self._archive.manifest if self._archive else None
        manifest = Manifest(
            generation=old.generation + 1 if old else 1,
            identity=identity,
            block=self._settings.block,
            quality=old.quality if old else self._settings.quality,
            dedup=old.dedup if old else self._settings.dedup,
            libraries=(*(old.libraries if old else ()), *([new_entry] if new_entry else ())),
            sessions=(*(old.sessions if old else ()), *entries),
        )
        before = len(old.to_bytes()) if old else 0
        besides = len(manifest.to_bytes()) - before + self._bytes - self._payload
        self._settings.target.check(Volume(self._encoded * _per_token(identity), self._payload, besides))
        manifest.commit(self._folder)
        return manifest

    def _volume(
        self, identity: Identity, snapshots: Sequence[Snapshot], sharing: Sharing, tier: Codec
    ) -> Volume | None:
        """What is to be written, if the target is a size."""
        if self._settings.target.size is None:
            return None
        groups = len(Profile(self._find_profile(tier)[0], identity.layers).groups)
        return expected(identity, snapshots, sharing, groups, self._archive is None)

    def _check(self, snapshots: Sequence[Snapshot]) -> Identity:
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

    def _find_codec(self, tier: Codec) -> _CodecPlace | None:
        given = None if self._settings.profile is None or not tier.calibrated else digest(self._settings.profile)
        for library in reversed(self._libraries):
            for state in range(len(library.states)):
                if given is not None and library.profile_digest(state) != given:
                    continue
                if library.state_entry(state) == (tier.codec_id, tier.get_config()):
                    return _CodecPlace(library.codec(state), library, state)
        return None

    def _find_profile(self, tier: Codec) -> tuple[State, bool]:
        """A profile for a new codec state, and whether the archive can do without another copy of it."""
        held = [
            (library, state)
            for library in self._libraries
            for state in range(len(library.states))
            if library.profile_digest(state) is not None
        ]
        given = self._settings.profile
        if given is not None:
            wanted = digest(given)
            return given, self._settings.external or any(lib.profile_digest(state) == wanted for lib, state in held)
        if held:
            library, state = held[-1]
            return library.state(state), True
        raise UnsupportedError(f"tier {self._settings.quality!r} needs a profile (make one with pltpack calibrate)")

    def _advance(self, raw_bytes: int) -> None:
        self._done += raw_bytes
        self._progress("encode", self._done, self._total)

    def _write_library(
        self,
        nodes: Sequence[NewNode],
        ranges: Sequence[TokenRange],
        place: _CodecPlace | None,
        tier: Codec,
        identity: Identity,
        pool: ThreadPoolExecutor,
    ) -> tuple[FileEntry, _CodecPlace]:
        # The segment carries its own copy of the state, so that it can be decoded, exported and compacted alone; of a
        # profile, which is large, its digest if another segment has the arrays.
        entry: dict[str, object] = {"codec": tier.codec_id, "config": tier.get_config()}
        if place is None and tier.calibrated:
            arrays, embedded = self._find_profile(tier)
            entry["profile"] = digest(arrays)
            packed = np.empty(0, np.uint8) if embedded else state_format.pack(arrays)
            try:
                tier.start(arrays, identity)
            except ValueError as error:
                raise UnsupportedError(f"the profile does not serve these sessions: {error}") from None
            codec = tier
        elif place is None:
            self._progress("learn", 0, self._total)
            arrays = tier.learn(JobSamples(ranges), identity)
            packed = state_format.pack(arrays)
            tier.start(state_format.unpack(packed), identity)
            codec = tier
        else:
            assert place.library is not None
            profile = place.library.profile_digest(place.state)
            packed = place.library.container.array(f"codec.state.{place.state}", "U8")
            if profile is not None:
                entry["profile"], packed = profile, np.empty(0, np.uint8)
            codec = place.codec
        path = next_library(self._folder, self._libraries)
        salts = sorted({n.owner.identity.salt for n in nodes}, key=lambda s: (s is not None, s))
        others = [lib for lib in self._libraries if any(n.parent and n.parent.library is lib for n in nodes)]
        metadata = {
            **container_metadata("library", identity, codec.spans or codec.calibrated),
            "states": dumps_json([entry]),
            "libraries": dumps_json([lib.entry.head_sha256 for lib in others]),
            "salts": dumps_json(salts),
        }
        container = self._sink.open(path, header_reserve(metadata))
        writer = UnitWriter(container, self._sink, codec, 0, pool, measure=True)
        records = []
        offset = 0
        for index, node in enumerate(nodes):
            first = len(writer)
            tokens = TokenRange(node.owner, node.position, node.stop)
            groups = codec.layer_groups(len(identity.layers))
            jobs = (split(tokens, layers, self._settings.block, node.position, index) for layers in groups)
            writer.write(itertools.chain.from_iterable(jobs), self._advance)
            parent = _parent(node.parent, others)
            records.append((offset, *parent, node.position, node.stop - node.position, node.visits, first,
                            len(writer) - first, salts.index(node.owner.identity.salt)))  # fmt: skip
            offset += node.stop - node.position
        parts = [np.empty(0, np.int32), *(n.owner.tokens[n.position : n.stop] for n in nodes)]
        info = self._sink.place(
            container,
            {
                "unit.index": writer.table(),
                "trie.nodes": tables.as_bytes(np.array(records, tables.NODE)),
                "trie.tokens": np.concatenate(parts),
                "codec.state.0": packed,
            },
            metadata,
        )
        self._encoded += sum(node.stop - node.position for node in nodes)
        self._payload += info.payload_bytes
        self._bytes += info.size - packed.nbytes
        written = FileEntry(path.name, info.size, info.head_sha256, info.payload_sha256)
        self._opened = Library(self._folder, written, identity, lambda _: codec_state(codec))
        self._libraries.append(self._opened)
        return written, place or _CodecPlace(codec, self._opened, 0)

    def _shard(
        self,
        snapshot: Snapshot,
        runs: list[Run],
        owners: Sequence[Snapshot],
        place: _CodecPlace,
        identity: Identity,
        pool: ThreadPoolExecutor,
    ) -> tuple[Path, UnitWriter, Iterable[UnitJob], Callable[[], Future[ContainerInfo]]]:
        """A new session's shard: its path, its open writer, the jobs for it, and what commits it after them."""
        library = place.library or self._opened
        assert library is not None
        path = shard_path(self._folder, snapshot.session, self._paths)
        self._paths.add(path)
        draft = Draft(snapshot, runs, self._libraries, self._opened, owners)
        if not place.codec.exact:
            draft.keep_near(pool, self._advance)
        self._encoded += len(snapshot) - draft.mapped
        used = [lib for lib in self._libraries if lib is library or any(r.library is lib for r in draft.runs)]
        metadata = {
            **container_metadata("shard", identity, place.codec.spans or place.codec.calibrated),
            "session": snapshot.session,
            "libraries": dumps_json([lib.entry.head_sha256 for lib in used]),
            "states": dumps_json([[used.index(library), place.state]]),
        }
        if snapshot.identity.salt is not None:
            metadata["salt"] = snapshot.identity.salt
        container = self._sink.open(path, header_reserve(metadata))
        writer = UnitWriter(container, self._sink, place.codec, 0, pool)
        groups = place.codec.layer_groups(len(identity.layers))
        jobs = draft.jobs(self._settings.block, corrections=place.codec.exact, groups=groups)

        def commit() -> Future[ContainerInfo]:
            found = {
                "tokens": np.ascontiguousarray(snapshot.tokens, np.int32),
                "map": tables.as_bytes(run_records(draft.runs, used)),
                "unit.index": writer.table(),
            }
            return self._sink.commit(container, found, metadata)

        return path, writer, jobs, commit


def codec_state(codec: Codec) -> State:
    """The profile of a started codec."""
    profile = getattr(codec, "profile", None)
    if profile is None:
        raise UnsupportedError(f"codec {codec.codec_id!r} has no profile")
    found: State = profile.arrays
    return found


def _keeps(library: Library, node: int, tier: Codec) -> bool:
    """Whether sessions of a tier may map to a node: its codec is exact or the tier's own."""
    for state in np.unique(library.units_of(node)["state"]):
        entry = library.state_entry(int(state))
        if entry != (tier.codec_id, tier.get_config()) and not library.codec(int(state)).exact:
            return False
    return True


def _per_token(identity: Identity) -> int:
    return sum(layer.elements_per_token for layer in identity.layers)


def _raw(snapshot: Snapshot, start: int, stop: int) -> int:
    return (stop - start) * sum(layer.bytes_per_token for layer in snapshot.identity.layers)


def _parent(parent: Run | None, others: list[Library]) -> tuple[int, int]:
    if parent is None:
        return 0, tables.NO_NODE
    return (0 if parent.library is None else 1 + others.index(parent.library)), parent.node
