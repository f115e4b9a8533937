"""Archives written by hand, with mapping rows of every kind: exact, at other positions, of other tokens."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from pltpack.archive import embeddings
from pltpack.archive.files import container_metadata, session_entry
from pltpack.archive.library import Library
from pltpack.archive.mapped import reference_values
from pltpack.archive.profiles import digest
from pltpack.archive.segments import fresh
from pltpack.codec.base import Codec, KeyValue, Unit
from pltpack.format import state as state_format
from pltpack.format import tables
from pltpack.format.container import ContainerInfo, ContainerWriter
from pltpack.format.manifest import FileEntry, Manifest
from pltpack.snapshot import Identity, Snapshot
from pltpack.store import LocalStore


@dataclasses.dataclass
class Row:
    """Tokens ``[start, start + length)`` of a session from a node's tokens from `node_start` on."""

    start: int
    length: int
    node: int
    node_start: int


@dataclasses.dataclass
class Node:
    """A window of a session that goes to the library."""

    owner: Snapshot
    start: int
    stop: int

    @property
    def tokens(self) -> np.ndarray:
        """Its token ids."""
        return self.owner.tokens[self.start : self.stop]


class Builder:
    """Writes an archive with one codec, and remembers what each unit decodes to.

    Attributes
    ----------
    expected : dict
        Per session and layer, what a reader must give.
    """

    def __init__(self, folder: Path, codec: Codec, arrays: dict[str, np.ndarray], identity: Identity,
                 nodes: Sequence[Node], rng: np.random.Generator, unit: int = 24) -> None:  # fmt: skip
        (folder / "shards").mkdir(parents=True)
        self.folder, self.codec, self.identity, self.nodes, self.rng, self.unit = (
            folder,
            codec,
            identity,
            nodes,
            rng,
            unit,
        )
        codec.start(arrays, identity)
        self.groups = codec.layer_groups(len(identity.layers))
        self.minor = max(1 if codec.spans else 0, embeddings.least_minor(identity, codec))
        self.expected: dict[str, list[KeyValue]] = {}
        self.entries: list[Any] = []
        self.library = self._library(arrays)

    def _library(self, arrays: dict[str, np.ndarray]) -> Library:
        path = self.folder / "library-000001.pltlib"
        entry: dict[str, Any] = {"codec": self.codec.codec_id, "config": self.codec.get_config()}
        if self.codec.calibrated:
            entry["profile"] = digest(arrays)
        out = _Container(path, self.codec)
        records, at = [], 0
        for index, node in enumerate(self.nodes):
            first = len(out.units)
            for group in self.groups:
                for start, stop in self._cut(node.start, node.stop):
                    out.add(node.owner, group, start, stop, node.start, None, index)
            records.append((at, 0, tables.NO_NODE, node.start, node.stop - node.start, 2, first,
                            len(out.units) - first, 0))  # fmt: skip
            at += node.stop - node.start
        metadata = {**container_metadata("library", self.identity, self.minor), "states": json.dumps([entry]),
                    "libraries": "[]", "salts": "[null]"}  # fmt: skip
        tokens = [np.empty(0, np.int32), *(node.tokens for node in self.nodes)]
        info = out.commit({"trie.nodes": tables.as_bytes(np.array(records, tables.NODE)),
                           "trie.tokens": np.concatenate(tokens), "codec.state.0": state_format.pack(arrays)},
                          metadata)  # fmt: skip
        self.file = FileEntry(path.name, info.size, info.head_sha256, info.payload_sha256)
        return Library(LocalStore(self.folder), self.file, self.identity)

    def _cut(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Units of chance lengths."""
        places = [start]
        while places[-1] < stop:
            places.append(min(stop, places[-1] + int(self.rng.integers(1, self.unit + 1))))
        return list(itertools.pairwise(places))

    def add(self, snapshot: Snapshot, rows: Sequence[Row], flags: float = 0.8, exact_units: bool = False) -> None:
        """Write a session; own units over predicted rows have a reference with probability `flags`.

        `exact_units` puts some own units over exact rows too.
        """
        runs = np.array([(row.start, row.length, 0, row.node, row.node_start,
                          row.start - self.nodes[row.node].start - row.node_start) for row in rows],
                        tables.RUN).reshape(-1)  # fmt: skip
        path = self.folder / "shards" / f"{snapshot.session}.pltshard"
        out = _Container(path, self.codec)
        arrays = [fresh(layer, len(snapshot)) for layer in self.identity.layers]
        minor = self.minor
        for row, run in zip(rows, runs, strict=True):
            values = reference_values(runs, [self.library], range(len(arrays)), row.start, row.start + row.length)
            for (keys, vals), (k, v) in zip(arrays, values, strict=True):
                keys[:, row.start : row.start + row.length], vals[:, row.start : row.start + row.length] = k, v
            if self._predicts(snapshot, row, run):
                minor = 2
        for group in self.groups:
            at = 0
            for row, run in [*zip(rows, runs, strict=True), (None, None)]:
                for start, stop in self._cut(at, len(snapshot) if row is None else row.start):
                    out.add(snapshot, group, start, stop, 0, None, tables.NO_NODE, arrays)
                if row is None:
                    break
                at = row.start + row.length
                predicts = self._predicts(snapshot, row, run)
                for start, stop in self._cut(row.start, at):
                    if not predicts and not (exact_units and self.rng.random() < 0.5):
                        continue
                    values = reference_values(runs, [self.library], group, start, stop)
                    flagged = self.rng.random() < flags
                    minor = 2 if flagged and len(group) > 1 else minor
                    out.add(snapshot, group, start, stop, 0, values if flagged else None, tables.NO_NODE, arrays,
                            near=predicts and flagged)  # fmt: skip
        metadata = {**container_metadata("shard", self.identity, minor), "session": snapshot.session,
                    "libraries": json.dumps([self.file.head_sha256]), "states": "[[0,0]]"}  # fmt: skip
        info = out.commit({"tokens": snapshot.tokens, "map": tables.as_bytes(runs)}, metadata)
        self.entries.append(session_entry(path, info, snapshot.session, len(snapshot), None))
        self.expected[snapshot.session] = arrays

    def _predicts(self, snapshot: Snapshot, row: Row, run: np.void) -> bool:
        node = self.nodes[row.node].tokens[row.node_start : row.node_start + row.length]
        mine = snapshot.tokens[row.start : row.start + row.length]
        return bool(run["position_shift"]) or not np.array_equal(node, mine)

    def finish(self) -> Path:
        """Write the manifest."""
        self.library.close()
        Manifest(generation=1, identity=self.identity, block=16, quality="by hand", dedup=True,
                 libraries=(self.file,), sessions=tuple(self.entries)).commit(self.folder)  # fmt: skip
        return self.folder


class _Container:
    def __init__(self, path: Path, codec: Codec) -> None:
        self.codec, self.units = codec, []
        self._writer = ContainerWriter(path, 1 << 12)

    def add(self, snapshot: Snapshot, group: range, start: int, stop: int, base: int,
            reference: list[KeyValue] | None, node: int, out: list[KeyValue] | None = None,
            near: bool = False) -> None:  # fmt: skip
        layers = snapshot.identity.layers[group.start : group.stop]
        unit = Unit(group.start, layers[0], start, stop - start, 0, layers if self.codec.spans else (), near)
        arrays = [snapshot.layer(layer, start, stop) for layer in group]
        places = [fresh(layer, stop - start) for layer in layers]
        if self.codec.spans:
            payload = self.codec.encode_span(unit, arrays, reference)
            self.codec.decode_span(memoryview(payload), unit, places, reference)
        else:
            one = reference[0] if reference else None
            payload = self.codec.encode(unit, *arrays[0], one)
            self.codec.decode(memoryview(payload), unit, *places[0], one)
        self.units.append((self._writer.append(payload), len(payload), xxhash.xxh3_64_intdigest(payload),
                           start - base, stop - start, group.start, len(group), 0, int(reference is not None), node,
                           0.0))  # fmt: skip
        if out is not None:
            for layer, (keys, values) in zip(group, places, strict=True):
                out[layer][0][:, start:stop], out[layer][1][:, start:stop] = keys, values

    def commit(self, found: dict[str, np.ndarray], metadata: dict[str, str]) -> ContainerInfo:
        index = tables.as_bytes(np.array(self.units, tables.UNIT).reshape(-1))
        return self._writer.commit({"unit.index": index, **found}, metadata)
