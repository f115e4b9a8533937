"""The trie of an archive as a tree to look at: library nodes, the sessions behind them, probabilities, bytes saved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pltpack.archive.likelihood import Read, likelihoods
from pltpack.format.tables import NO_NODE

if TYPE_CHECKING:
    from pltpack.archive.reader import Archive
    from pltpack.archive.shard import Shard

#: Tokens at the beginning of a node that the view names.
FIRST_TOKENS = 16

Text = Callable[[Sequence[int]], str]
Key = tuple[int, int]


def trie_view(archive: Archive, text: Text | None = None) -> dict[str, Any]:
    """Nodes of the library and tails of sessions, parents before children.

    Parameters
    ----------
    archive : Archive
    text : callable, optional
        Turns token ids into text.

    Returns
    -------
    dict
        ``tokens``; ``captured_tokens``, those whose probability was captured, for the others are estimated
        (interpolated Kneser-Ney over the archive's own tokens); ``nodes``, a list of: ``kind`` (``library`` or
        ``session``), ``library`` (file), ``node``, ``session``, ``parent`` (index in the list), ``depth``,
        ``position``, ``tokens``, ``visits`` (sessions that have its values), ``predictions`` (sessions of which it
        predicts units of their own), ``bytes`` (what its units take), ``saved_bytes`` (bytes times visits less one,
        where sessions visit all of it; what predictions save is not in it), ``probability`` (of its first token),
        ``information`` (``-log2`` of the probability of all its tokens, in bits, both given the tokens before them),
        ``first_tokens``, and ``text`` of these.
    """
    return _View(archive).to_json(text)


class _View:
    """Nodes of the view by key: (segment number, node) of the library, (-1, session number) of sessions."""

    def __init__(self, archive: Archive) -> None:
        self._libraries = archive.libraries
        self._shards = [archive.shard(name) for name in archive.sessions]
        self._number = {id(library): index for index, library in enumerate(archive.libraries)}
        self._probabilities, self._captured = likelihoods([Read.of_shard(shard) for shard in self._shards])
        self._nodes: dict[Key, dict[str, Any]] = {}
        self._add_library()
        for index, shard in enumerate(self._shards):
            self._visit(shard, self._probabilities[index])
        for index, shard in enumerate(self._shards):
            self._add_tail(index, shard, self._probabilities[index])

    def _add_library(self) -> None:
        files = {library.entry.head_sha256: index for index, library in enumerate(self._libraries)}
        for index, library in enumerate(self._libraries):
            for node, record in enumerate(library.nodes):
                above: Key | None = None
                if record["parent"] != NO_NODE:
                    file = int(record["parent_library"])
                    # A segment may name one that is gone by now.
                    other = index if file == 0 else files.get(library.others[file - 1], -1)
                    above = None if other < 0 else (other, int(record["parent"]))
                first, length = int(record["token_offset"]), int(record["length"])
                self._nodes[index, node] = {
                    "kind": "library", "library": library.entry.file, "node": node, "session": None, "above": above,
                    "position": int(record["position"]), "tokens": length, "visits": 0, "predictions": 0, "mapped": 0,
                    "bytes": int(library.units_of(node)["length"].sum()), "p": np.full(length, np.nan),
                    "first_tokens": library.tokens[first : first + min(length, FIRST_TOKENS)].tolist(),
                }  # fmt: skip

    def _key(self, shard: Shard, row: np.void) -> Key:
        return self._number[id(shard.libraries[row["library"]])], int(row["node"])

    def _visit(self, shard: Shard, p: np.ndarray) -> None:
        for rows, what in ((shard.exact_runs, "visits"), (shard.predicted_runs, "predictions")):
            for key in {self._key(shard, row) for row in rows}:
                self._nodes[key][what] += 1
        above, end = None, 0
        for row in shard.exact_runs:
            key = self._key(shard, row)
            node = self._nodes[key]
            at, start, length = (int(row[name]) for name in ("node_start", "session_start", "length"))
            node["mapped"] += length
            if start == end:
                # Parents need not be recorded.
                if node["above"] is None and at == 0:
                    node["above"] = above
                above, end = key, start + length
            # Visits of equal prefixes have equal values; of others the first counts.
            part = node["p"][at : at + length]
            part[:] = np.where(np.isnan(part), p[start : start + length], part)

    def _add_tail(self, index: int, shard: Shard, p: np.ndarray) -> None:
        own, above, end = np.ones(len(p), bool), None, 0
        for row in shard.exact_runs:
            start, length = int(row["session_start"]), int(row["length"])
            own[start : start + length] = False
            if start == end:
                above, end = self._key(shard, row), start + length
        tokens = shard.tokens[own]
        self._nodes[-1, index] = {
            "kind": "session", "library": None, "node": None, "session": shard.entry.session, "above": above,
            "position": int(np.argmax(own)) if len(tokens) else len(p), "tokens": len(tokens), "visits": 1,
            "predictions": 0, "mapped": len(tokens), "bytes": int(shard.units["length"].sum()), "p": p[own],
            "first_tokens": tokens[:FIRST_TOKENS].tolist(),
        }  # fmt: skip

    def to_json(self, text: Text | None) -> dict[str, Any]:
        children: dict[Key | None, list[Key]] = {}
        for key, node in self._nodes.items():
            children.setdefault(node["above"], []).append(key)
        nodes: list[dict[str, Any]] = []
        waiting: list[tuple[Key, int | None, int]] = [(key, None, 0) for key in reversed(self._sorted(children, None))]
        while waiting:
            key, parent, depth = waiting.pop()
            below = self._sorted(children, key)
            waiting += [(child, len(nodes), depth + 1) for child in reversed(below)]
            nodes.append(_shown(self._nodes[key], parent, depth, text))
        return {
            "tokens": sum(len(shard.tokens) for shard in self._shards), "captured_tokens": self._captured,
            "nodes": nodes,
        }  # fmt: skip

    def _sorted(self, children: dict[Key | None, list[Key]], key: Key | None) -> list[Key]:
        """Library nodes first, what saves most in front; then sessions as the archive has them."""
        return sorted(children.get(key, ()), key=lambda child: (child[0] < 0, -_saved(self._nodes[child]), child))


def _saved(node: dict[str, Any]) -> int:
    visited = node["mapped"] / node["tokens"] if node["tokens"] else 0.0
    return max(0, round(node["bytes"] * (visited - 1)))


def _shown(node: dict[str, Any], parent: int | None, depth: int, text: Text | None) -> dict[str, Any]:
    p = node["p"]
    known = len(p) > 0 and not np.isnan(p).any()
    shown = {name: node[name] for name in ("kind", "library", "node", "session")}
    shown |= {"parent": parent, "depth": depth}
    shown |= {name: node[name] for name in ("position", "tokens", "visits", "predictions", "bytes")}
    shown["saved_bytes"] = _saved(node)
    shown["probability"] = float(p[0]) if known else None
    # The least positive number stands for what was rounded to none.
    shown["information"] = float(-np.log2(np.maximum(p, np.finfo(np.float64).tiny)).sum()) if known else None
    shown["first_tokens"] = node["first_tokens"]
    if text is not None:
        shown["text"] = text(node["first_tokens"])
    return shown
