"""What the library keeps under a budget: admission while writing, eviction while compacting.

Both take nodes by falling score, the information that sessions share through a node per byte (`pltpack.trie.score`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from pltpack.archive.library import Library
from pltpack.archive.likelihood import Read, bits_of, likelihoods
from pltpack.archive.prepared import Prepared
from pltpack.archive.reader import Archive
from pltpack.archive.segment_writer import node_bytes
from pltpack.archive.shard import Shard, TokenCount
from pltpack.archive.sharing import NewNode, Role, Run, Sharing
from pltpack.archive.upkeep import Renewal, node_tokens, with_renewals
from pltpack.format import tables
from pltpack.snapshot import Snapshot
from pltpack.trie.score import admission_scores, admitted

NodeKey = tuple[int, int]


def payload(archive: Archive | None) -> int:
    """Bytes of all units in an archive's library."""
    return sum(int(library.units["length"].sum()) for library in archive.libraries) if archive is not None else 0


def admit(
    sharing: Sharing, due: Sequence[Renewal], snapshots: Sequence[Snapshot], archive: Archive | None,
    prepared: Prepared, block: int, budget: int,
) -> tuple[Sharing, dict[str, Any]]:  # fmt: skip
    """The sharing with those of its nodes, and of nodes written anew, that fit a budget; parents before children.

    Every node is encoded once to know its size. What sessions were to take from a node that is not admitted stays in
    their shards, or is predicted from the old node.

    Parameters
    ----------
    sharing : Sharing
    due : sequence of Renewal
    snapshots : sequence of Snapshot
        The new sessions.
    archive : Archive or None
        The present generation: its library counts, too, and stays.
    prepared : Prepared
    block : int
        Tokens per block.
    budget : int
        Bytes of units.

    Returns
    -------
    Sharing
    dict
        ``budget``, ``admitted_nodes``, ``admitted_bytes``, ``refused_nodes``, ``refused_bytes``.
    """
    whole = with_renewals(sharing, due)
    sizes = [node_bytes(node, prepared, block) for node in whole.nodes]
    bits = _information(sharing, whole.nodes, snapshots, archive)
    scores = admission_scores(bits, _visits(whole, due), sizes)
    prefixes = {run.node for runs in whole.runs for run in runs if run.library is None and run.role is Role.PREFIX}
    parents = [-1 if node.parent is None or node.parent.library is not None or index not in prefixes
               else node.parent.node for index, node in enumerate(whole.nodes)]  # fmt: skip
    kept = admitted(scores, sizes, max(0, budget - payload(archive)), parents)
    renewed = [renewal for renewal, fits in zip(due, kept[len(sharing.nodes) :], strict=True) if fits]
    own = np.append(kept[: len(sharing.nodes)], np.ones(len(renewed), bool))
    taken = int(np.sum(np.asarray(sizes, np.int64)[kept]))
    return restricted(with_renewals(sharing, renewed), own), {
        "budget": budget, "admitted_nodes": int(kept.sum()), "admitted_bytes": taken,
        "refused_nodes": int((~kept).sum()), "refused_bytes": sum(sizes) - taken,
    }  # fmt: skip


def _visits(sharing: Sharing, due: Sequence[Renewal]) -> list[float]:
    """Sessions that use each node, one that uses part of it in part; of a mean those it is a mean of."""
    tokens = [0] * len(sharing.nodes)
    for run in (run for runs in sharing.runs for run in runs if run.library is None):
        tokens[run.node] += run.length
    visits = [count / (node.stop - node.position) for node, count in zip(sharing.nodes, tokens, strict=True)]
    visits[len(visits) - len(due) :] = [float(renewal.node.visits) for renewal in due]
    return visits


def restricted(sharing: Sharing, kept: np.ndarray) -> Sharing:
    """The sharing with some of its nodes only, bool ``[N]``, and the rows of these."""
    number = np.cumsum(kept) - 1

    def still(run: Run | None) -> Run | None:
        if run is None or run.library is not None:
            return run
        return dataclasses.replace(run, node=int(number[run.node])) if kept[run.node] else None

    nodes = [dataclasses.replace(node, parent=still(node.parent))
             for node, fits in zip(sharing.nodes, kept, strict=True) if fits]  # fmt: skip
    return Sharing(nodes, [[found for run in runs if (found := still(run)) is not None] for runs in sharing.runs])


def _information(
    sharing: Sharing, nodes: Sequence[NewNode], snapshots: Sequence[Snapshot], archive: Archive | None
) -> list[float]:
    """Bits of each node's tokens given those before them."""
    if not nodes:
        return []
    old = [Read.of_shard(archive.shard(name)) for name in archive.sessions] if archive is not None else []
    once = _once(archive) if archive is not None else []
    once += [(node.owner.tokens[node.position : node.stop], node.owner.identity.salt) for node in sharing.nodes]
    for snapshot, runs in zip(snapshots, sharing.runs, strict=True):
        rows = [(run.session_start, run.stop) for run in runs]
        once += [(part, snapshot.identity.salt) for part in _between(snapshot.tokens, rows)]
    found, _ = likelihoods([*old, *map(Read.of_snapshot, snapshots)], once)
    # A mean stands in a session of the same name.
    of = {snapshot.session: p for snapshot, p in zip(snapshots, found[len(old) :], strict=True)}
    return [bits_of(of[node.owner.session][node.position : node.stop]) for node in nodes]


def _once(archive: Archive) -> list[tuple[np.ndarray, object]]:
    """An archive's token ids with their tenants, shared ones once.

    What many sessions share would else be thought easy to guess, just because they have it.
    """
    out: list[tuple[np.ndarray, object]] = []
    for library in archive.libraries:
        out += [(node_tokens(library, node), library.salts[record["tenant"]])
                for node, record in enumerate(library.nodes)]  # fmt: skip
    for shard in map(archive.shard, archive.sessions):
        rows = [(int(row["session_start"]), int(row["session_start"]) + int(row["length"])) for row in shard.runs]
        out += [(part, shard.entry.salt) for part in _between(shard.tokens, rows)]
    return out


def _between(tokens: np.ndarray, rows: Sequence[tuple[int, int]]) -> list[np.ndarray]:
    """What is left of tokens without rows, which are in order."""
    starts, stops = [0, *(stop for _, stop in rows)], [*(start for start, _ in rows), len(tokens)]
    return [tokens[start:stop] for start, stop in zip(starts, stops, strict=True) if start < stop]


@dataclasses.dataclass(frozen=True)
class Evictions:
    """What leaves the library.

    Attributes
    ----------
    nodes : frozenset of (int, int)
        Segment number and node.
    report : dict
        ``budget``, ``kept_nodes``, ``kept_bytes``, of these ``pinned_nodes`` and ``pinned_bytes``; ``evicted_nodes``,
        ``evicted_bytes``, and ``evicted``, a list of: ``library`` (file), ``node``, ``tokens``, ``sessions``,
        ``bytes``, ``score`` (bits per byte).
    """

    nodes: frozenset[NodeKey]
    report: dict[str, Any]


def evictions(archive: Archive, budget: int) -> Evictions:
    """Nodes of lowest score, without which the library's units take no more than a budget; children before parents.

    Only what can be moved to shards as it is can go: a node stays if a session is predicted from it or corrects it, or
    takes a part of one of its units.
    """
    view = _View(archive)
    keys = sorted(view.visitors)
    movable = [key for key in keys if key not in view.pinned]
    size = {key: int(archive.libraries[key[0]].units_of(key[1])["length"].sum()) for key in keys}
    visits = [view.used[key] / int(archive.libraries[key[0]].nodes[key[1]]["length"]) for key in movable]
    scores = admission_scores([view.information(key) for key in movable], visits, [size[key] for key in movable])
    number = {key: index for index, key in enumerate(movable)}
    parents = [number.get(parent, -1) if (parent := parent_of(archive, key)) is not None else -1 for key in movable]
    pinned_bytes = sum(size[key] for key in view.pinned)
    stays = admitted(scores, [size[key] for key in movable], max(0, budget - pinned_bytes), parents)
    gone = [(key, float(score)) for key, score, fits in zip(movable, scores, stays, strict=True) if not fits]
    evicted = [
        {"library": archive.libraries[library].entry.file, "node": node,
         "tokens": int(archive.libraries[library].nodes[node]["length"]),
         "sessions": len(view.visitors[library, node]), "bytes": size[library, node], "score": score}
        for (library, node), score in gone
    ]  # fmt: skip
    evicted_bytes = sum(size[key] for key, _ in gone)
    return Evictions(frozenset(key for key, _ in gone), {
        "budget": budget, "kept_nodes": len(keys) - len(gone), "kept_bytes": sum(size.values()) - evicted_bytes,
        "pinned_nodes": len(view.pinned), "pinned_bytes": pinned_bytes,
        "evicted_nodes": len(gone), "evicted_bytes": evicted_bytes, "evicted": evicted,
    })  # fmt: skip


class _View:
    """Who uses the nodes of an archive's library, and how."""

    def __init__(self, archive: Archive) -> None:
        self._archive = archive
        number = {id(library): index for index, library in enumerate(archive.libraries)}
        shards = [archive.shard(name) for name in archive.sessions]
        self.visitors: dict[NodeKey, set[str]] = {}
        self.pinned: set[NodeKey] = set()
        self.used: dict[NodeKey, int] = {}
        self._p: dict[NodeKey, np.ndarray] = {}
        probabilities, _ = likelihoods([Read.of_shard(shard) for shard in shards], _once(archive))
        for shard, p in zip(shards, probabilities, strict=True):
            rules = _Rules(shard)
            for row, predicts in zip(shard.runs, shard.predicted_rows, strict=True):
                library = shard.libraries[row["library"]]
                key = number[id(library)], int(row["node"])
                self.visitors.setdefault(key, set()).add(shard.entry.session)
                self.used[key] = self.used.get(key, 0) + int(row["length"])
                if predicts or not rules.takes(library, row):
                    self.pinned.add(key)
                self._read(key, row, p)

    def _read(self, key: NodeKey, row: np.void, p: np.ndarray) -> None:
        length = int(self._archive.libraries[key[0]].nodes[key[1]]["length"])
        mine = self._p.setdefault(key, np.full(length, np.nan))
        at, start, count = (int(row[name]) for name in ("node_start", "session_start", "length"))
        part = mine[at : at + count]
        part[:] = np.where(np.isnan(part), p[start : start + count], part)

    def information(self, key: NodeKey) -> float:
        """Bits of a node's tokens, as the first session that has them says."""
        return bits_of(self._p[key])


class _Rules:
    """Which nodes' units a shard can take as its own (spec/format.md, "Shards")."""

    def __init__(self, shard: Shard) -> None:
        self._own = shard.units
        self._groups = _groups(shard.units)
        self._taken: frozenset[tuple[int, int]] | None = None

    def takes(self, library: Library, row: np.void) -> bool:
        """Whether the shard has no units for a row's tokens, and the node whole ones, of the shard's layer groups."""
        start, stop = int(row["session_start"]), int(row["session_start"]) + int(row["length"])
        inside = TokenCount(np.array([start]), np.array([stop - start]))
        first = self._own["token_start"].astype(np.int64)
        if inside.within(first, first + self._own["token_count"]).any():
            return False
        units = library.units_of(int(row["node"]))
        groups = _groups(units)
        if not self._groups <= groups or self._taken not in (None, groups) or not _whole(units, row):
            return False
        self._taken = groups
        return True


def _groups(units: np.ndarray) -> frozenset[tuple[int, int]]:
    return frozenset((int(layer), int(count)) for layer, count in units[["layer", "layer_count"]].tolist())


def _whole(units: np.ndarray, row: np.void) -> bool:
    """Whether a row begins and ends where units do."""
    low = int(row["node_start"])
    high, starts = low + int(row["length"]), units["token_start"].astype(np.int64)
    ends = starts + units["token_count"]
    return bool((((starts >= low) & (ends <= high)) | (ends <= low) | (starts >= high)).all())


def parent_of(archive: Archive, key: NodeKey) -> NodeKey | None:
    """The node that holds the tokens before a node's, if it is recorded and here."""
    library = archive.libraries[key[0]]
    node = library.nodes[key[1]]
    if node["parent"] == tables.NO_NODE:
        return None
    if node["parent_library"] == 0:
        return key[0], int(node["parent"])
    digest = library.others[node["parent_library"] - 1]
    for number, other in enumerate(archive.libraries):
        if other.entry.head_sha256 == digest and node["parent"] < len(other.nodes):
            return number, int(node["parent"])
    return None
