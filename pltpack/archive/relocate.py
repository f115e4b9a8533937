"""Move whole units of shards to a new library segment, as they are, and write the shards anew without them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from pltpack.archive.captured import kept_tensors
from pltpack.archive.embeddings import merged_minor
from pltpack.archive.files import (
    carried_minor,
    container_metadata,
    header_reserve,
    next_library,
    session_entry,
    shard_path,
    shown,
)
from pltpack.archive.guard_record import kept_metadata
from pltpack.archive.library import Library
from pltpack.archive.merge import copy_units
from pltpack.archive.reader import Archive
from pltpack.archive.segments import dumps_json
from pltpack.archive.shard import Shard
from pltpack.errors import UnsupportedError
from pltpack.format import tables
from pltpack.format.container import MINOR_GROUPS, ContainerWriter
from pltpack.format.manifest import FileEntry, Manifest, SessionEntry
from pltpack.snapshot import Snapshot


@dataclasses.dataclass(frozen=True)
class Part:
    """Tokens ``[start, stop)`` of a session, whole units in every layer, that move.

    `user` is a new session that has tokens ``[wanted_start, wanted_stop)`` of them from `user_start` on; `errors` gives
    the relative RMS error that units are said to have, by their first layer and their codec state in the shard, none if
    they are exact.
    """

    shard: Shard
    start: int
    stop: int
    user: Snapshot
    user_start: int
    wanted_start: int
    wanted_stop: int
    errors: dict[tuple[int, int], float] = dataclasses.field(default_factory=dict)

    @property
    def units(self) -> np.ndarray:
        """Records of the units, as in the shard."""
        found: np.ndarray = self.shard.units[_inside(self.shard, self.start, self.stop)].copy()
        return found


def relocate(archive: Archive, parts: Sequence[Part]) -> Manifest | None:
    """Write a segment with parts of shards, and these shards anew; the generation that holds them is not committed.

    Parameters
    ----------
    archive : Archive
        The present generation; the caller holds the writer's lock.
    parts : sequence of Part
        Without overlaps.

    Returns
    -------
    Manifest or None
        The present one with the new files in place of the old ones; None if one segment cannot hold all parts.
    """
    segment, folder = _Segment(archive, parts), archive.store.folder
    assert folder is not None, "the archive is open for writing"
    try:
        library = segment.write(next_library(folder, archive.libraries))
    except UnsupportedError:
        return None
    entries: dict[str, SessionEntry] = {}
    taken: set[Path] = set()
    for name in {part.shard.entry.session for part in parts}:
        shard = archive.shard(name)
        path = shard_path(folder, shown(archive.manifest, name), taken)
        taken.add(path)
        mine = [(part, node) for node, part in enumerate(segment.parts) if part.shard.entry.session == name]
        entries[name] = _write_shard(archive, shard, mine, path, library)
    sessions = tuple(entries.get(entry.session, entry) for entry in archive.manifest.sessions)
    return dataclasses.replace(archive.manifest, libraries=(*archive.manifest.libraries, library), sessions=sessions)


class _Segment:
    """The segment that parts move to, one node each."""

    def __init__(self, archive: Archive, parts: Sequence[Part]) -> None:
        self._archive = archive
        self.parts = list(parts)
        self._states: dict[tuple[int, int], int] = {}
        self._number = {id(library): index for index, library in enumerate(archive.libraries)}

    def _state(self, shard: Shard, state: int) -> int:
        library, number = shard.states[state]
        key = self._number[id(shard.libraries[library])], number
        return self._states.setdefault(key, len(self._states))

    def write(self, path: Path) -> FileEntry:
        records = [part.units for part in self.parts]
        for part, units in zip(self.parts, records, strict=True):
            units["error"] = [part.errors.get(key, 0.0) for key in units[["layer", "state"]].tolist()]
            units["state"] = [self._state(part.shard, int(state)) for state in units["state"]]
        held = [(self._archive.libraries[library], state) for library, state in self._states]
        grouped = any((units["layer_count"] != 1).any() for units in records)
        grouped |= any(library.profile_digest(state) is not None for library, state in held)
        codecs = ((library.codec(state), library.minor) for library, state in held)
        minor = max(MINOR_GROUPS if grouped else 0, merged_minor(self._archive.identity, codecs),
                    carried_minor(part.shard for part in self.parts))  # fmt: skip
        salts = sorted({part.shard.entry.salt for part in self.parts}, key=lambda salt: (salt is not None, salt))
        parents = [_parent(part) for part in self.parts]
        others = list(dict.fromkeys(library for library, _ in filter(None, parents)))
        metadata = {
            **container_metadata("library", self._archive.identity, minor),
            "states": dumps_json([library.states[state] for library, state in held]),
            "libraries": dumps_json([library.entry.head_sha256 for library in others]),
            "salts": dumps_json(salts),
        }
        container = ContainerWriter(path, header_reserve(metadata, len(held)), self._archive.manifest.seal)
        try:
            for part, units in zip(self.parts, records, strict=True):
                copy_units(container, [(part.shard, record) for record in units])
            tenants = [salts.index(part.shard.entry.salt) for part in self.parts]
            places = [(0, tables.NO_NODE) if parent is None else (1 + others.index(parent[0]), parent[1])
                      for parent in parents]  # fmt: skip
            nodes = list(self._nodes(records, tenants, places))
            info = container.commit(
                {
                    "unit.index": tables.as_bytes(np.concatenate(records)),
                    "trie.nodes": tables.as_bytes(np.array(nodes, tables.NODE)),
                    "trie.tokens": np.concatenate([p.shard.tokens[p.start : p.stop] for p in self.parts]),
                    **{f"codec.state.{i}": _blob(*each) for i, each in enumerate(held)},
                },
                metadata,
            )
        finally:
            container.abort()
        return FileEntry(path.name, info.size, info.head_sha256, info.payload_sha256)

    def _nodes(
        self, records: Sequence[np.ndarray], tenants: Sequence[int], parents: Sequence[tuple[int, int]]
    ) -> Iterator[tuple[int, ...]]:
        offset = first = 0
        for index, (part, units) in enumerate(zip(self.parts, records, strict=True)):
            units["token_start"] -= np.uint32(part.start)
            units["node"] = index
            yield (offset, *parents[index], part.start, part.stop - part.start, 2, first, len(units), tenants[index])
            offset += part.stop - part.start
            first += len(units)


def _inside(shard: Shard, start: int, stop: int) -> np.ndarray:
    """Which of a shard's units lie within some tokens."""
    first = shard.units["token_start"].astype(np.int64)
    return (first >= start) & (first + shard.units["token_count"] <= stop)


def _parent(part: Part) -> tuple[Library, int] | None:
    """The node that holds the tokens before a part, if the session has it to its end."""
    for row in part.shard.exact_runs:
        library = part.shard.libraries[row["library"]]
        ends = int(row["node_start"]) + int(row["length"]) == library.nodes[row["node"]]["length"]
        if int(row["session_start"]) + int(row["length"]) == part.start and ends:
            return library, int(row["node"])
    return None


def _blob(library: Library, state: int) -> np.ndarray:
    """What the segment stores of a state: a profile, which is large, is in another segment or outside already."""
    if library.profile_digest(state) is not None:
        return np.empty(0, np.uint8)
    return library.container.array(f"codec.state.{state}", "U8")


def _write_shard(
    archive: Archive, shard: Shard, parts: Sequence[tuple[Part, int]], path: Path, library: FileEntry
) -> SessionEntry:
    """Write a session's shard with rows for its parts, which are nodes of the new segment, instead of their units."""
    gone = np.zeros(len(shard.units), bool)
    for part, _ in parts:
        gone |= _inside(shard, part.start, part.stop)
    units = shard.units[~gone].copy()
    new = np.array([(part.start, part.stop - part.start, len(shard.libraries), node, 0, 0) for part, node in parts],
                   tables.RUN)  # fmt: skip
    runs = np.concatenate([shard.runs, new])
    metadata = {
        **container_metadata("shard", archive.identity, shard.minor),
        "session": shard.entry.session,
        "libraries": dumps_json([*(each.entry.head_sha256 for each in shard.libraries), library.head_sha256]),
        "states": dumps_json([list(pair) for pair in shard.states]),
    }
    if shard.entry.salt is not None:
        metadata["salt"] = shard.entry.salt
    metadata |= kept_metadata(shard)
    container = ContainerWriter(path, header_reserve(metadata), archive.manifest.seal)
    try:
        copy_units(container, [(shard, record) for record in units])
        info = container.commit(
            {
                "tokens": shard.tokens,
                "map": tables.as_bytes(runs[np.argsort(runs["session_start"], kind="stable")]),
                "unit.index": tables.as_bytes(units),
                **kept_tensors(shard),
            },
            metadata,
        )
    finally:
        container.abort()
    return session_entry(path, info, shard.entry.session, len(shard.tokens), shard.entry.salt)
