"""Encoding by an engine's workers: sessions are scanned, judged and encoded there, and written here.

Workers get paths of dumps, states of codecs and segments of the library, and give back payloads: values never leave the
machine that reads them. Files are made by the calling process alone, in the order and with the bytes that its own
threads would give, so that an archive does not show who encoded it.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import pickle
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import numpy as np

from pltpack.archive import distributed_worker as worker
from pltpack.archive.distributed_worker import (
    CodecParts,
    EncodeParts,
    FoundParts,
    JobParts,
    LibraryParts,
    RowParts,
    SessionParts,
    StateParts,
    TextParts,
    TryParts,
)
from pltpack.archive.draft import Draft
from pltpack.archive.embeddings import as_known
from pltpack.archive.encoding import Done, Task, UnitJob, UnitWriter
from pltpack.archive.engine import Engine
from pltpack.archive.library import Library
from pltpack.archive.mapped import References
from pltpack.archive.near import Attempt
from pltpack.archive.places import CodecPlace, codec_state
from pltpack.archive.prepared import Prepared
from pltpack.archive.promotion import Candidate
from pltpack.archive.sharing import Role
from pltpack.codec.base import State
from pltpack.dumps import TokenLookup
from pltpack.dumps.registry import Formats, PathLike, distinct, dump_files, read_dump
from pltpack.dumps.reopened import DumpFile
from pltpack.errors import UnsupportedError
from pltpack.format import state as state_format
from pltpack.snapshot import Identity, Snapshot
from pltpack.trie.matching import Match

#: Raw bytes of one call: seconds of work, so that a call's own cost does not show and a lost one is soon made up for.
CALL_BYTES = 1 << 25
#: Matches that one call tries: those of one source follow each other, and it is decoded once in a call.
CALL_MATCHES = 4


class Distributed:
    """Encodes one attempt at a generation by an engine's workers.

    Parameters
    ----------
    engine : Engine
    place : CodecPlace
    prepared : Prepared
        Of the place's codec; what others want of sessions is known before these are encoded.
    identity : Identity
        The archive's.
    """

    def __init__(self, engine: Engine, place: CodecPlace, prepared: Prepared, identity: Identity) -> None:
        self._engine, self._prepared = engine, prepared
        self._shared: dict[str, Any] = {}
        # What parts were made of is kept, so that its id is not given to something else.
        self._keys: dict[tuple[str, int], tuple[object, str]] = {}
        self._codec = self._share_codec(place, identity)

    def encode(self, tasks: Iterator[Task]) -> Iterator[Done]:
        """Encode groups of jobs; an `pltpack.archive.encoding.Encode`."""
        ahead: collections.deque[tuple[UnitWriter, int]] = collections.deque()

        def calls() -> Iterator[tuple[Any, ...]]:
            for writer, groups in _gathered(tasks):
                ahead.append((writer, len(groups)))
                if groups:
                    yield self._call(writer, groups)

        def ended() -> Iterator[Done]:
            while ahead and not ahead[0][1]:
                yield ahead.popleft()[0], None

        for found in self._engine.in_order(worker.encode, calls()):
            yield from ended()
            writer, _ = ahead.popleft()
            for group in found:
                yield writer, group
        yield from ended()

    def near(self, drafts: Sequence[Draft]) -> Iterator[list[bool]]:
        """Which mapping rows of each draft stay; see `Draft.near`."""
        return self._engine.in_order(worker.judge, map(self._judge_call, drafts))

    def prepare(self, snapshots: Sequence[Snapshot]) -> None:
        """Prepare the codec for whole sessions; see `Prepared.of`."""
        if not self._prepared.codec.calibrated:
            return

        def calls() -> Iterator[tuple[Any, ...]]:
            for snapshot in snapshots:
                session = self._session(snapshot)
                yield self._codec[0], session, len(snapshot), *self._parts([*self._codec, session])

        for snapshot, found in zip(snapshots, self._engine.in_order(worker.prepare, calls()), strict=True):
            self._prepared.adopt(snapshot, {len(snapshot): found})

    def attempts(self, attempt: Attempt, matches: Sequence[Match], weigh: bool = False) -> Iterator[Candidate]:
        """See `pltpack.archive.near.Tries.attempts`."""
        calls = (self._try_call(attempt, matches[at : at + CALL_MATCHES], weigh)
                 for at in range(0, len(matches), CALL_MATCHES))  # fmt: skip
        found = (each for several in self._engine.in_order(worker.attempts, calls) for each in several)
        for match, (promise, saved) in zip(matches, found, strict=True):
            yield attempt.candidate(match, promise, saved)

    def _try_call(self, attempt: Attempt, matches: Sequence[Match], weigh: bool) -> tuple[Any, ...]:
        needed, sources = [*self._codec], {}
        for match in matches:
            text = attempt.texts[match.source]
            session = library = None
            if text.snapshot is not None:
                session = self._session(text.snapshot)
                needed += [session, self._found(text.snapshot)]
            elif text.library is not None:
                library, more = self._library(text.library)
                needed += more
            sources[match.source] = TextParts(session, library, text.position, text.node, text.cut)
            needed += [self._session(attempt.session(match)), self._found(attempt.session(match))]
        pairs = [(self._session(attempt.session(match)), match) for match in matches]
        return TryParts(self._codec[0], weigh, pairs, sources), *self._parts(needed)

    def _judge_call(self, draft: Draft) -> tuple[Any, ...]:
        rows, needed = [], [self._session(draft.snapshot)]
        for run in draft.runs:
            library = owner = None
            if run.role is Role.PREFIX:
                if run.library is draft.opened:
                    owner = self._session(draft.owners[run.node])
                    needed.append(owner)
                elif run.library is not None:
                    library, more = self._library(run.library)
                    needed += more
            fields = (run.session_start, run.length, run.node, run.node_start, run.shift)
            rows.append(RowParts(fields, run.role, library, owner))
        return needed[0], rows, *self._parts(needed)

    def _call(self, writer: UnitWriter, groups: Sequence[Sequence[UnitJob]]) -> tuple[Any, ...]:
        encoder, needed = writer.encoder, [*self._codec]
        runs = None
        libraries: dict[int, str] = {}
        owners: dict[tuple[int, int], str] = {}
        bare: list[list[JobParts]] = []
        for group in groups:
            bare.append([])
            for job in group:
                session = self._session(job.snapshot)
                needed += [session, self._found(job.snapshot)]
                fields = (job.layer, job.start, job.stop, job.base, job.boundary, job.node, job.layers)
                bare[-1].append(JobParts(session, job.reference is not None, fields, job.promise))
                if job.reference is not None and runs is None:
                    assert isinstance(job.reference, References)
                    runs = job.reference.runs
                    libraries, owners, more = self._references(job.reference)
                    needed += more
        call = EncodeParts(self._codec[0], encoder.state, encoder.measure, bare, runs, libraries, owners)
        return call, *self._parts(needed)

    def _references(self, given: References) -> tuple[dict[int, str], dict[tuple[int, int], str], list[str]]:
        """Keys of segments by number, of owners by number and node, and of all that is needed."""
        libraries: dict[int, str] = {}
        owners: dict[tuple[int, int], str] = {}
        needed: list[str] = []
        for number, node in sorted(set(zip(*(given.runs[name].tolist() for name in ("library", "node")), strict=True))):
            library = given.libraries[number]
            owner = given.owner(library, node) if given.owner is not None else None
            if owner is not None:
                owners[number, node] = self._session(owner)
                needed.append(owners[number, node])
            elif number not in libraries:
                libraries[number], more = self._library(library)
                needed += more
        return libraries, owners, needed

    def _parts(self, keys: Sequence[str]) -> list[Any]:
        return [self._shared[key] for key in dict.fromkeys(keys)]

    def _share_codec(self, place: CodecPlace, identity: Identity) -> list[str]:
        codec, profile = place.codec, place.entry.get("profile")
        if place.library is not None:
            identity = as_known(place.library.identity, place.library.minor)
        if codec.calibrated:
            state = self._state(str(profile), codec_state(codec))
        elif place.library is not None:
            state = self._state(_new_key(), place.library.state(place.state))
        else:
            state = self._state(_new_key(), state_format.unpack(place.packed))
        key = _new_key()
        self._shared[key] = self._engine.share(CodecParts(key, codec.codec_id, codec.get_config(), state, identity))
        return [key, state]

    def _state(self, key: str, arrays: State) -> str:
        if key not in self._shared:
            self._shared[key] = self._engine.share(StateParts(key, dict(arrays)))
        return key

    def _session(self, snapshot: Snapshot) -> str:
        def share(key: str) -> SessionParts:
            # What only the writer needs stays here.
            return SessionParts(key, dataclasses.replace(snapshot, logprobs=None, logprob_ids=None))

        try:
            return self._once("session", snapshot, share)
        except (TypeError, pickle.PicklingError) as error:
            raise UnsupportedError(f"session {snapshot.session!r} cannot go to another process ({error})",
                                   snapshot.origin) from error  # fmt: skip

    def _found(self, snapshot: Snapshot) -> str:
        def share(key: str) -> FoundParts:
            prepared = self._prepared
            return FoundParts(key, self._session(snapshot), prepared.found(snapshot), prepared.wanted(snapshot))

        # Trials come before others have said what they want of a session.
        stage = "found" if not self._prepared.wanted(snapshot) else "wanted"
        return self._once(stage, snapshot, share)

    def _library(self, library: Library) -> tuple[str, list[str]]:
        """The key of a segment, and those of all that it needs."""
        profiles = {}
        for index in range(len(library.states)):
            digest = library.profile_digest(index)
            if digest is not None and not library.embeds(index):
                profiles[digest] = self._state(digest, library.state(index))

        def share(key: str) -> LibraryParts:
            source = library.container.source
            data = np.frombuffer(source.read(0, source.size), np.uint8)
            return LibraryParts(key, library.entry, PurePath(os.fspath(source.path)), data, library.identity, profiles,
                                library.decoded is not None, library.container.seal)  # fmt: skip

        key = self._once("library", library, share)
        return key, [key, *profiles.values()]

    def _once(self, what: str, of: object, share: Callable[[str], object]) -> str:
        if (what, id(of)) not in self._keys:
            key = _new_key()
            self._shared[key] = self._engine.share(share(key))
            self._keys[what, id(of)] = (of, key)
        return self._keys[what, id(of)][1]


def _new_key() -> str:
    return uuid.uuid4().hex


def _gathered(tasks: Iterator[Task]) -> Iterator[tuple[UnitWriter, list[list[UnitJob]]]]:
    """Groups of one writer for one call; after a writer's last call, none."""
    groups: list[list[UnitJob]] = []
    size = 0
    for writer, group in tasks:
        if group is not None:
            groups.append(group)
            size += sum(job.raw_bytes for job in group)
        if groups and (group is None or size >= CALL_BYTES):
            yield writer, groups
            groups, size = [], 0
        if group is None:
            yield writer, []


def scanned(
    engine: Engine,
    paths: Sequence[PathLike],
    format: str | None = None,
    tokens: PathLike | None = None,
    options: Mapping[str, str] | None = None,
    preferred: Mapping[str, str] | None = None,
    identity: Identity | None = None,
) -> Iterator[Snapshot]:
    """`pltpack.dumps.open_dumps` by an engine's workers: the snapshots can go to other processes.

    Dumps must be at the same paths, with the same bytes, on all machines.
    """
    formats, lookup = Formats(format, options, preferred, identity), TokenLookup(tokens)
    found = list(dump_files(paths, formats))
    files = [DumpFile.of(path, reader, tokens, identity) for path, reader in found]
    read: Iterable[Iterable[Snapshot]]
    if tokens is None:
        read = engine.in_order(worker.scan, ((file,) for file in files))
    else:
        # One list of token ids must not serve two dumps: that is seen where all are read.
        read = (map(file.reopened, read_dump(path, reader, lookup, identity))
                for file, (path, reader) in zip(files, found, strict=True))  # fmt: skip
    yield from distinct(zip([path for path, _ in found], read, strict=True))
