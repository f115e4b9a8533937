"""Rewrite sessions with one library segment that holds just what they use; units are copied, never re-encoded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence, Set
from pathlib import Path

import numpy as np

from pltpack.archive import recompute
from pltpack.archive.budget import NodeKey, parent_of
from pltpack.archive.captured import kept_tensors
from pltpack.archive.embeddings import merged_minor
from pltpack.archive.files import carried_minor, container_metadata, header_reserve, session_entry
from pltpack.archive.guard_record import kept_metadata
from pltpack.archive.library import Library
from pltpack.archive.reader import Archive
from pltpack.archive.recompute import Recipe
from pltpack.archive.segments import Segment, dumps_json
from pltpack.archive.shard import Shard
from pltpack.codec import registry
from pltpack.codec.base import Codec
from pltpack.codec.recompute import RecomputeCodec, pack
from pltpack.format import state as state_format
from pltpack.format import tables
from pltpack.format.container import MINOR_GROUPS, MINOR_PREDICTIONS, MINOR_RECOMPUTE, ContainerWriter
from pltpack.format.manifest import FileEntry, SessionEntry


class Merger:
    """Collects the nodes and codec states that some sessions use, and writes them and the sessions anew.

    Parameters
    ----------
    archive : Archive
    sessions : sequence of str
    embed : bool
        Take in profiles that the archive refers to.
    evicted : set of (int, int)
        Segment number and node: what is left out of the library, its units going to the shards that map to it
        (`pltpack.archive.budget.evictions` says what can be).
    spare : bool
        Take in the archive's newest profile even if none of the sessions uses one: those to come may.
    """

    def __init__(
        self, archive: Archive, sessions: Sequence[str], embed: bool = False, evicted: Set[NodeKey] = frozenset(),
        spare: bool = False,
    ) -> None:  # fmt: skip
        self._archive, self._embed, self._evicted = archive, embed, evicted
        self._shards = [archive.shard(name) for name in sessions]
        self._number = {id(library): index for index, library in enumerate(archive.libraries)}
        self._states: list[tuple[dict[str, object], np.ndarray]] = []
        self._state_index: dict[tuple[int, int], int] = {}
        self._nodes: dict[NodeKey, int] = {}
        self._texts: dict[str, int | None] = {}
        self._recode()
        for shard in self._shards:
            for library, state in shard.states:
                self._state(shard.libraries[library], state)
            for run in shard.runs:
                self._node(shard.libraries[run["library"]], int(run["node"]))
        if spare and not any("profile" in entry for entry, _ in self._states):
            self._spare()

    def _spare(self) -> None:
        held = [(library, state) for library in self._archive.libraries for state in range(len(library.states))
                if library.profile_digest(state) is not None]  # fmt: skip
        if held:
            self._state(*held[-1])

    def _recode(self) -> None:
        """Make one state of the tokens that models' sessions have in libraries: no other session's may go with them."""
        mine = [shard for shard in self._shards if shard.recipe is not None and shard.recipe.text is not None]
        if not any(shard.recipe is not None for shard in self._shards):
            return
        salts = list(dict.fromkeys(shard.entry.salt for shard in mine))
        groups = [[shard for shard in mine if shard.entry.salt == salt] for salt in salts]
        state, places = pack([[shard.tokens for shard in group] for group in groups])
        for group, found in zip(groups, places, strict=True):
            self._texts.update({shard.entry.session: text for shard, text in zip(group, found, strict=True)})
        self._states.append(({"codec": RecomputeCodec.codec_id, "config": {}}, state_format.pack(state)))

    def _state(self, library: Library, index: int) -> int:
        key = (self._number[id(library)], index)
        if key not in self._state_index:
            codec, config = library.state_entry(index)
            if codec == RecomputeCodec.codec_id:
                self._state_index[key] = 0
                return 0
            entry: dict[str, object] = {"codec": codec, "config": config}
            blob = library.container.array(f"codec.state.{index}", "U8")
            profile = library.profile_digest(index)
            if profile is not None:
                entry["profile"] = profile
                blob = self._profile_blob(profile, library, index)
            # A profile may be here already, and its blob then be empty.
            equal = [i for i, (e, b) in enumerate(self._states)
                     if e == entry and (profile is not None or np.array_equal(b, blob))]  # fmt: skip
            if not equal:
                self._states.append((entry, blob))
            self._state_index[key] = equal[0] if equal else len(self._states) - 1
        return self._state_index[key]

    def _profile_blob(self, digest: str, library: Library, index: int) -> np.ndarray:
        """What the segment stores of a profile: all of it once, if the archive has it or must not do without."""
        nothing = np.empty(0, np.uint8)
        if any(entry.get("profile") == digest and len(blob) for entry, blob in self._states):
            return nothing
        for other in self._archive.libraries:
            for state in range(len(other.states)):
                if other.profile_digest(state) == digest and other.embeds(state):
                    return other.container.array(f"codec.state.{state}", "U8")
        return state_format.pack(library.state(index)) if self._embed else nothing

    def _node(self, library: Library, index: int) -> None:
        key = (self._number[id(library)], index)
        if key in self._nodes:
            return
        for state in np.unique(library.units_of(index)["state"]):
            self._state(library, int(state))
        if key in self._evicted:
            return
        parent = parent_of(self._archive, key)
        if parent is not None:
            self._node(self._archive.libraries[parent[0]], parent[1])
        self._nodes[key] = len(self._nodes)

    def _codecs(self) -> Iterator[tuple[Codec, int]]:
        for number, state in self._state_index:
            library = self._archive.libraries[number]
            yield registry.codec(*library.state_entry(state)), library.minor

    def write_library(self, path: Path, progress: Callable[[int], None]) -> FileEntry:
        """Write the segment; `progress` is told the payload bytes copied."""
        libraries = self._archive.libraries
        used = [(libraries[lib], node) for lib, node in self._nodes]
        salts = sorted({lib.salts[lib.nodes[n]["tenant"]] for lib, n in used}, key=lambda s: (s is not None, str(s)))
        groups = any(_grouped(library.units_of(node)) for library, node in used)
        groups |= any("profile" in entry for entry, _ in self._states)
        minor = max(MINOR_GROUPS if groups else 0, merged_minor(self._archive.identity, self._codecs()),
                    carried_minor(library for library, _ in used))  # fmt: skip
        if any(shard.recipe is not None for shard in self._shards):
            minor = MINOR_RECOMPUTE
        metadata = {
            **container_metadata("library", self._archive.identity, minor),
            "states": dumps_json([entry for entry, _ in self._states]),
            "libraries": "[]",
            "salts": dumps_json(salts),
        }
        container = ContainerWriter(path, header_reserve(metadata, len(self._states)), self._archive.manifest.seal)
        try:
            nodes: list[np.void] = []
            units: list[np.ndarray] = []
            tokens = [np.empty(0, np.int32)]
            offset = 0
            for library, index in used:
                old = library.nodes[index].copy()
                records = library.units_of(index).copy()
                copy_units(container, [(library, record) for record in records], progress)
                records["node"] = len(nodes)
                records["state"] = [self._state(library, int(s)) for s in records["state"]]
                parent = parent_of(self._archive, (self._number[id(library)], index))
                first = sum(len(u) for u in units)
                start = int(old["token_offset"])
                tokens.append(library.tokens[start : start + int(old["length"])])
                old["token_offset"], old["first_unit"], old["parent_library"] = offset, first, 0
                old["parent"] = tables.NO_NODE if parent is None else self._nodes.get(parent, tables.NO_NODE)
                old["tenant"] = salts.index(library.salts[old["tenant"]])
                offset += int(old["length"])
                nodes.append(old)
                units.append(records)
            info = container.commit(
                {
                    "unit.index": tables.as_bytes(np.concatenate([np.empty(0, tables.UNIT), *units])),
                    "trie.nodes": tables.as_bytes(np.array(nodes, tables.NODE)),
                    "trie.tokens": np.concatenate(tokens),
                    **{f"codec.state.{i}": blob for i, (_, blob) in enumerate(self._states)},
                },
                metadata,
            )
        finally:
            container.abort()
        return FileEntry(path.name, info.size, info.head_sha256, info.payload_sha256)

    def write_shard(
        self, shard: Shard, path: Path, library: FileEntry, progress: Callable[[int], None]
    ) -> SessionEntry:
        """Write a session's shard so that it refers to the merged segment."""
        if shard.recipe is not None:
            return self._write_rebuilt(shard, shard.recipe, path, library, progress)
        units, stored = self._units(shard)
        own = {self._state(shard.libraries[lib], state) for lib, state in shard.states}
        states = sorted(own | set(units["state"].tolist()))
        groups = _grouped(units) or any("profile" in self._states[state][0] for state in states)
        minor = MINOR_PREDICTIONS if shard.has_predictions else MINOR_GROUPS if groups else 0
        minor = max(minor, carried_minor(segment for segment, _ in stored))
        metadata = {
            **container_metadata("shard", self._archive.identity, minor),
            "session": shard.entry.session,
            "libraries": dumps_json([library.head_sha256]),
            "states": dumps_json([[0, state] for state in states]),
        }
        if shard.entry.salt is not None:
            metadata["salt"] = shard.entry.salt
        metadata |= kept_metadata(shard)
        container = ContainerWriter(path, header_reserve(metadata), self._archive.manifest.seal)
        try:
            copy_units(container, stored, progress)
            units["offset"] = [record["offset"] for _, record in stored]
            units["state"] = np.searchsorted(states, units["state"])
            runs = shard.runs[~self._gone(shard)]
            runs["node"] = [self._nodes[self._key(shard, row)] for row in runs]
            runs["library"] = 0
            info = container.commit(
                {
                    "tokens": shard.tokens,
                    "map": tables.as_bytes(runs),
                    "unit.index": tables.as_bytes(units),
                    **kept_tensors(shard),
                },
                metadata,
            )
        finally:
            container.abort()
        return session_entry(path, info, shard.entry.session, len(shard.tokens), shard.entry.salt)

    def _write_rebuilt(
        self, shard: Shard, recipe: Recipe, path: Path, library: FileEntry, progress: Callable[[int], None]
    ) -> SessionEntry:
        units = shard.units.copy()
        states = [self._state(shard.libraries[lib], state) for lib, state in shard.states]
        metadata = dict(shard.container.metadata)
        metadata["libraries"] = dumps_json([library.head_sha256])
        metadata["states"] = dumps_json([[0, state] for state in states])
        text = self._texts.get(shard.entry.session)
        metadata[recompute.METADATA] = dataclasses.replace(recipe, text=text).to_text()
        container = ContainerWriter(path, header_reserve(metadata, recompute=True), self._archive.manifest.seal)
        try:
            copy_units(container, [(shard, record) for record in units], progress)
            kept = {name: shard.container.tables[name] for name in (recompute.DIGESTS, recompute.CODED)
                    if name in shard.container.tables}  # fmt: skip
            found = {"map": tables.as_bytes(shard.runs), "unit.index": tables.as_bytes(units)}
            info = container.commit({**found, **kept}, metadata)
        finally:
            container.abort()
        return session_entry(path, info, shard.entry.session, shard.entry.tokens, shard.entry.salt)

    def _key(self, shard: Shard, row: np.void) -> NodeKey:
        return self._number[id(shard.libraries[row["library"]])], int(row["node"])

    def _gone(self, shard: Shard) -> np.ndarray:
        """Which mapping rows lead to nodes that are left out."""
        return np.array([self._key(shard, row) in self._evicted for row in shard.runs], bool)

    def _units(self, shard: Shard) -> tuple[np.ndarray, list[tuple[Segment, np.void]]]:
        """A shard's new unit records, states numbered as in the merged segment, and where their payloads are."""
        parts, stored = [shard.units.copy()], [(shard, record) for record in shard.units.copy()]
        own = [self._state(shard.libraries[lib], state) for lib, state in shard.states]
        parts[0]["state"] = [own[state] for state in shard.units["state"]]
        found: list[tuple[Segment, np.void]] = list(stored)
        for row in shard.runs[self._gone(shard)]:
            library = shard.libraries[row["library"]]
            units = library.units_of(int(row["node"]))
            starts = units["token_start"].astype(np.int64) - int(row["node_start"])
            units, starts = (x[(starts >= 0) & (starts < int(row["length"]))] for x in (units, starts))
            found += [(library, record) for record in units.copy()]
            moved = units.copy()
            moved["token_start"] = starts + int(row["session_start"])
            moved["state"] = [self._state(library, int(state)) for state in units["state"]]
            moved["node"] = tables.NO_NODE
            parts.append(moved)
        joined = np.concatenate(parts)
        order = np.lexsort((joined["token_start"], joined["layer"]))
        return joined[order], [found[index] for index in order.tolist()]

    @property
    def shards(self) -> list[Shard]:
        """The sessions' shards."""
        return self._shards

    @property
    def payload_bytes(self) -> int:
        """Payload bytes that will be copied."""
        nodes = sum(int(self._archive.libraries[lib].units_of(n)["length"].sum()) for lib, n in self._nodes)
        return nodes + sum(int(self._units(shard)[0]["length"].sum()) for shard in self._shards)


def _grouped(units: np.ndarray) -> bool:
    return bool((units["layer_count"] != 1).any())


def copy_units(
    container: ContainerWriter, units: Sequence[tuple[Segment, np.void]], progress: Callable[[int], None] | None = None
) -> None:
    """Append units' payloads in order; their records get the new offsets."""
    for segment, record in units:
        payload = segment.checked_payload(record)
        record["offset"] = container.append(payload)
        if progress is not None:
            progress(len(payload))
