"""Encoding in another process: what it is given, and the functions that an engine calls there.

What is given says how to make the real thing: a codec from its state, a library segment from its file's bytes, a
session from the path of its dump. A process keeps what it made, as calls come again and again with the same values.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePath
from typing import Any, cast

import numpy as np

from pltpack.archive.decoded import DecodedUnits
from pltpack.archive.draft import Draft
from pltpack.archive.encoding import Encoded, Promise, UnitEncoder, UnitJob
from pltpack.archive.library import Library
from pltpack.archive.mapped import References
from pltpack.archive.prepared import Prepared
from pltpack.archive.sharing import Role, Run
from pltpack.archive.trial import Text, Trial
from pltpack.codec import registry
from pltpack.codec.base import State
from pltpack.dumps.reopened import DumpFile
from pltpack.errors import FormatError
from pltpack.format.manifest import FileEntry
from pltpack.format.sealing import FileSeal
from pltpack.format.source import Source
from pltpack.snapshot import Identity, Snapshot
from pltpack.store import Store
from pltpack.trie.matching import Match

#: Codecs, sessions and segments that a process keeps.
_KEPT = 32


@dataclasses.dataclass(frozen=True)
class StateParts:
    """Arrays of a codec's state or of a profile; `key` names them in calls, as in all parts."""

    key: str
    arrays: dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class CodecParts:
    """A started codec: its configuration, the key of its state, and the identity that it was started for."""

    key: str
    codec_id: str
    config: Mapping[str, Any]
    state: str
    identity: Identity


@dataclasses.dataclass(frozen=True)
class SessionParts:
    """A session."""

    key: str
    snapshot: Snapshot


@dataclasses.dataclass(frozen=True)
class FoundParts:
    """What codecs found of a session, and what others want of it; see `Prepared`."""

    key: str
    session: str
    found: Mapping[int, dict[str, Any]]
    wanted: Mapping[int, np.ndarray]


@dataclasses.dataclass(frozen=True)
class LibraryParts:
    """A library segment: its file, the keys of the profiles that are elsewhere, by digest, and what opens the file."""

    key: str
    entry: FileEntry
    path: PurePath
    data: np.ndarray
    identity: Identity
    profiles: Mapping[str, str]
    remember: bool
    seal: FileSeal | None


@dataclasses.dataclass(frozen=True)
class JobParts:
    """A `UnitJob`: the key of its session, whether the mapping predicts it, and the other fields."""

    session: str
    predicted: bool
    fields: tuple[int, ...]
    promise: Promise | None


@dataclasses.dataclass(frozen=True)
class EncodeParts:
    """Groups of jobs of one writer, and what predicts them.

    Keys of segments are by their number in `runs`; those of sessions that have a node's very values by segment and
    node.
    """

    codec: str
    state: int
    measure: bool
    groups: list[list[JobParts]]
    runs: np.ndarray | None
    libraries: Mapping[int, str]
    owners: Mapping[tuple[int, int], str]


@dataclasses.dataclass(frozen=True)
class RowParts:
    """A mapping row before libraries are numbered; `library` is a key, None of the segment being written."""

    fields: tuple[int, ...]
    role: Role
    library: str | None
    owner: str | None


@dataclasses.dataclass(frozen=True)
class TextParts:
    """A `Text` of a session or of a library's node, by key."""

    session: str | None
    library: str | None
    position: int
    node: int | None
    cut: int


@dataclasses.dataclass(frozen=True)
class TryParts:
    """Matches to try, or to weigh, of sessions by key; sources by their number in the matches."""

    codec: str
    weigh: bool
    matches: list[tuple[str, Match]]
    sources: Mapping[int, TextParts]


class _Bytes(Source):
    """A file in memory."""

    def __init__(self, path: PurePath, data: np.ndarray) -> None:
        self.path, self.size, self._data = path, len(data), memoryview(data.data)

    def read(self, offset: int, length: int) -> bytes:
        """See `Source.read`."""
        return bytes(self.mapped(offset, length))

    def mapped(self, offset: int, length: int) -> memoryview:
        """See `Source.mapped`."""
        if offset + length > self.size:
            raise FormatError("file ends early", self.path)
        return self._data[offset : offset + length]

    def close(self) -> None:
        """See `Source.close`."""


@dataclasses.dataclass(eq=False)
class _Unread:
    """Stands for a segment of which every node's values are at hand."""

    identity: Identity


class _Made:
    """What a process made of parts, the latest ones."""

    def __init__(self) -> None:
        self._held: collections.OrderedDict[str, Any] = collections.OrderedDict()

    def get(self, key: str, make: Callable[[], Any]) -> Any:
        if key not in self._held:
            self._held[key] = make()
            while len(self._held) > _KEPT:
                self._held.popitem(last=False)
        self._held.move_to_end(key)
        return self._held[key]


_made = _Made()


class _Given:
    """The parts that came with a call, as what they are parts of."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self._parts = {part.key: part for part in parts}

    def prepared(self, key: str) -> Prepared:
        def make() -> Prepared:
            about = self._parts[key]
            codec = registry.codec(about.codec_id, about.config)
            codec.start(self._state(about.state), about.identity)
            return Prepared(codec)

        prepared = cast(Prepared, _made.get(key, make))
        for parts in self._parts.values():
            if isinstance(parts, FoundParts):
                prepared.adopt(self.session(parts.session), parts.found, parts.wanted)
        return prepared

    def session(self, key: str) -> Snapshot:
        return cast(Snapshot, _made.get(key, lambda: self._parts[key].snapshot))

    def library(self, key: str) -> Library:
        parts = self._parts[key]

        def make() -> Library:
            # A segment reads no other file of its store.
            store = cast(Store, _OneFile(_Bytes(parts.path, parts.data)))
            found = Library(store, parts.entry, parts.identity, lambda digest: self._state(parts.profiles[digest]),
                            seal=parts.seal)  # fmt: skip
            for index in range(len(found.states)):
                # Later calls may come without the profile.
                if found.profile_digest(index) is not None and not found.embeds(index):
                    found.codec(index)
            if parts.remember:
                found.decoded = DecodedUnits()
            return found

        return cast(Library, _made.get(key, make))

    def text(self, text: TextParts) -> Text:
        snapshot = None if text.session is None else self.session(text.session)
        library = None if text.library is None else self.library(text.library)
        of = snapshot or library
        assert of is not None
        # Trials look at values alone.
        return Text(np.empty(0, np.int32), None, of.identity, text.position, library=library, node=text.node,
                    snapshot=snapshot, cut=text.cut)  # fmt: skip

    def _state(self, key: str) -> State:
        return cast(State, self._parts[key].arrays)


class _OneFile:
    def __init__(self, source: Source) -> None:
        self._source = source

    def open(self, _: str) -> Source:
        return self._source


def encode(call: EncodeParts, *parts: Any) -> list[list[Encoded]]:
    """Encode groups of jobs."""
    given = _Given(parts)
    prepared = given.prepared(call.codec)
    encoder = UnitEncoder(prepared, call.state, call.measure)
    values = None
    if call.runs is not None:
        owners = {place: given.session(key) for place, key in call.owners.items()}
        held: dict[int, Any] = {number: _Unread(owner.identity) for (number, _), owner in owners.items()}
        held |= {number: given.library(key) for number, key in call.libraries.items()}
        numbers = {id(library): number for number, library in held.items()}
        values = References(call.runs, cast(Sequence[Library], held),
                            lambda library, node: owners.get((numbers[id(library)], node)))  # fmt: skip

    def job(parts: JobParts) -> UnitJob:
        layer, start, stop, base, boundary, node, layers = parts.fields
        return UnitJob(given.session(parts.session), layer, start, stop, base, boundary, node,
                       values if parts.predicted else None, layers, parts.promise)  # fmt: skip

    return [encoder.encode([job(each) for each in group]) for group in call.groups]


def prepare(codec: str, session: str, cut: int, *parts: Any) -> dict[str, Any]:
    """What the codec finds of a session."""
    given = _Given(parts)
    return given.prepared(codec).of(given.session(session), cut).found


def attempts(call: TryParts, *parts: Any) -> list[tuple[Promise | None, float]]:
    """What trials say of matches; see `pltpack.archive.trial.Trial`."""
    given = _Given(parts)
    prepared = given.prepared(call.codec)
    texts = {number: given.text(text) for number, text in call.sources.items()}
    out: list[tuple[Promise | None, float]] = []
    trial = None
    for key, match in call.matches:
        snapshot = given.session(key)
        trial = trial or Trial(prepared, len(snapshot.identity.layers))
        if call.weigh:
            out.append((None, trial.plain(snapshot, match.start, match.length)))
        else:
            out.append(trial(snapshot, match, texts[match.source]))
    return out


def judge(session: str, rows: Sequence[RowParts], *parts: Any) -> list[bool]:
    """Which mapping rows of a session stay; see `Draft.near`."""
    given, opened = _Given(parts), cast(Library, object())
    libraries = {row.library: given.library(row.library) for row in rows if row.library is not None}
    owners: dict[int, Snapshot] = {}
    runs = []
    for row in rows:
        start, length, node, node_start, shift = row.fields
        if row.owner is not None:
            owners[node] = given.session(row.owner)
        library = opened if row.library is None else libraries[row.library]
        runs.append(Run(start, length, library, node, node_start, shift, row.role))
    draft = Draft(given.session(session), runs, [*libraries.values(), opened], opened,
                  cast(Sequence[Snapshot], owners))  # fmt: skip
    with ThreadPoolExecutor(1) as pool:
        return draft.near(pool)


def scan(file: DumpFile) -> list[Snapshot]:
    """The snapshots of a dump, their token ids among what is read."""
    return file.scan()
