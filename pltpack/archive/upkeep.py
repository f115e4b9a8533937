"""Centroid upkeep: a node that has predicted many sessions is written anew as the mean of all it served.

Two sessions differ from each other twice as much as each from what they have in common, so later ones are nearer to
the mean than to the session that a node came from (docs/reuse.md, "Upkeep and budget"). Old shards keep the old node.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from pltpack.archive.decoding import decode_layers
from pltpack.archive.encoding import Promise, in_order
from pltpack.archive.library import Library
from pltpack.archive.means import Mean, with_part
from pltpack.archive.prepared import WANTED_BY, Prepared
from pltpack.archive.reader import Archive
from pltpack.archive.segment_writer import node_bytes
from pltpack.archive.shard import Shard
from pltpack.archive.sharing import NewNode, Role, Run, Sharing, exact_rows
from pltpack.archive.trial import Text, Trial
from pltpack.codec.base import KeyValue
from pltpack.codec.transform import TransformCodec
from pltpack.format import tables
from pltpack.snapshot import Snapshot
from pltpack.trie.matching import Match

#: Sessions that a mean is taken of, the latest; more bring it hardly nearer.
MOST_MEMBERS = 16
#: Rows of new sessions that are tried to tell whether a mean pays, and the part of a prediction's bytes that one may
#: save at most: a sixth was measured.
TRIED_ROWS, HOPE = 6, 0.33
#: Raw bytes of the largest node that is written anew.
MOST_BYTES = 1 << 28

Key = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Member:
    """Where a session has tokens of a node: its own `start` and `length`, and the node's `node_start`."""

    start: int
    length: int
    node_start: int
    shard: Shard | None = None
    snapshot: Snapshot | None = None

    @property
    def session(self) -> int:
        """What all members of one session have in common."""
        return id(self.shard if self.shard is not None else self.snapshot)

    @property
    def tokens(self) -> int:
        """Tokens of the whole session."""
        return len(self.shard.tokens if self.shard is not None else self.snapshot or ())

    def values(self) -> list[KeyValue]:
        """Keys and values of all layers: as captured, or as an old shard gives them."""
        stop = self.start + self.length
        if self.shard is not None:
            return decode_layers(self.shard, range(len(self.shard.identity.layers)), self.start, stop)
        assert self.snapshot is not None
        return [self.snapshot.layer(layer, self.start, stop) for layer in range(len(self.snapshot.identity.layers))]


@dataclasses.dataclass(frozen=True)
class Renewal:
    """A node to be written anew.

    Attributes
    ----------
    node : NewNode
    rows : list of (int, int, Run)
        Session, number of its row, and the row that it gets instead, whose node is not numbered yet.
    predicted : int
        Tokens that the old node had predicted.
    """

    node: NewNode
    rows: list[tuple[int, int, Run]]
    predicted: int


class Usage:
    """What an archive's sessions take from each node of its library, by their mapping tables.

    Parameters
    ----------
    archive : Archive
    """

    def __init__(self, archive: Archive) -> None:
        self._libraries = archive.libraries
        number = {id(library): index for index, library in enumerate(archive.libraries)}
        self._predicted: dict[Key, int] = {}
        self._members: dict[Key, list[Member]] = {}
        for shard in map(archive.shard, archive.sessions):
            exact = {row.session_start for row in exact_rows(shard)}
            for row in shard.runs:
                key = number[id(shard.libraries[row["library"]])], int(row["node"])
                start, length = int(row["session_start"]), int(row["length"])
                if start not in exact:
                    self._predicted[key] = self._predicted.get(key, 0) + length
                self._members.setdefault(key, []).append(Member(start, length, int(row["node_start"]), shard))
        self._equal: dict[tuple[bytes, object], list[Key]] = {}
        for index, library in enumerate(archive.libraries):
            for node in range(len(library.nodes)):
                self._equal.setdefault(self._text(index, node), []).append((index, node))

    def _text(self, index: int, node: int) -> tuple[bytes, object]:
        library = self._libraries[index]
        record = library.nodes[node]
        return node_tokens(library, node).tobytes(), library.salts[record["tenant"]]

    def predicted(self, library: Library, node: int) -> int:
        """Tokens predicted from a node; what a newer node of equal tokens took over counts there."""
        return self._predicted.get((self._libraries.index(library), node), 0)

    def newest(self, library: Library, node: int) -> bool:
        """Whether no later node of the tenant has the same tokens."""
        key = self._libraries.index(library), node
        return self._equal[self._text(*key)][-1] == key

    def members(self, library: Library, node: int) -> list[Member]:
        """Where sessions have tokens of a node or of one that it took over from, the latest sessions first."""
        key = self._libraries.index(library), node
        found = [member for each in self._equal[self._text(*key)] for member in self._members.get(each, ())]
        return found[::-1]


def node_tokens(library: Library, node: int) -> np.ndarray:
    """Token ids of a node, int32 ``[T]``."""
    first = int(library.nodes[node]["token_offset"])
    return library.tokens[first : first + int(library.nodes[node]["length"])]


def renewals(
    archive: Archive, sharing: Sharing, snapshots: Sequence[Snapshot], every: int, prepared: Prepared, block: int,
    pool: ThreadPoolExecutor,
) -> list[Renewal]:  # fmt: skip
    """Nodes of the archive that new sessions make due, and that pay for being written anew.

    A node is due each time that the tokens predicted from it pass a multiple of `every`. It pays by what it saves the
    new sessions, and as many tokens again as were predicted so far: of these a trial tells, which predicts new sessions
    from the mean of the old ones only.

    Parameters
    ----------
    archive : Archive
        The present generation.
    sharing : Sharing
        What new sessions are predicted from.
    snapshots : sequence of Snapshot
        The new sessions.
    every : int
        Tokens.
    prepared : Prepared
    block : int
        Tokens per block.
    pool : ThreadPoolExecutor
    """
    asked: dict[Key, list[tuple[int, int, Run]]] = {}
    nodes: dict[Key, tuple[Library, int]] = {}
    for session, runs in enumerate(sharing.runs):
        for index, run in enumerate(runs):
            if run.role is Role.NEAR and run.library is not None:
                asked.setdefault((id(run.library), run.node), []).append((session, index, run))
                nodes[id(run.library), run.node] = run.library, run.node
    if not asked:
        return []
    usage, out = Usage(archive), []
    upkeep = _Upkeep(usage, snapshots, prepared, block, pool)
    for key, rows in asked.items():
        before = usage.predicted(*nodes[key])
        if before // every < (before + sum(run.length for _, _, run in rows)) // every and usage.newest(*nodes[key]):
            found = upkeep.renewal(*nodes[key], rows)
            if found is not None:
                out.append(found)
    return out


class _Upkeep:
    """Makes and tries means."""

    def __init__(
        self, usage: Usage, snapshots: Sequence[Snapshot], prepared: Prepared, block: int, pool: ThreadPoolExecutor
    ) -> None:
        self._usage, self._snapshots, self._prepared, self._block, self._pool = usage, snapshots, prepared, block, pool
        self._trial = Trial(prepared, len(snapshots[0].identity.layers))

    def renewal(self, library: Library, node: int, rows: list[tuple[int, int, Run]]) -> Renewal | None:
        """A node written anew, if it pays."""
        tokens = node_tokens(library, node)
        base = self._base(rows, len(tokens))
        if base is None or len(tokens) * sum(each.bytes_per_token for each in library.identity.layers) > MOST_BYTES:
            return None
        predicted, now = self._usage.predicted(library, node), sum(run.length for _, _, run in rows)
        some = sorted(rows, key=lambda row: -row[2].length)[:TRIED_ROWS]
        most = HOPE * self._trial.share * _mean(some, [_least(run.promise) for _, _, run in some if run.promise])
        if (predicted + 2 * now) * most <= int(library.units_of(node)["length"].sum()):
            return None
        old = _latest(self._usage.members(library, node))
        text = self._text(base, tokens, old, rows)
        less, cost = _mean(some, [less for _, less in self._tried(text, some)]), self._cost(text)
        # Of those that it is a mean of, a mean is twice as near as of others.
        if (predicted + now) * less + 2 * now * less <= cost:
            return None
        new = [Member(run.session_start, run.length, run.node_start, snapshot=self._snapshots[session])
               for session, _, run in rows]  # fmt: skip
        members = _latest([*new, *old])
        text = self._text(base, tokens, members, rows)
        changes, saved = [], 0.0
        for (session, index, run), (promise, gain) in zip(rows, self._tried(text, rows), strict=True):
            if gain > 0:
                shift = run.session_start - text.position - run.node_start
                changes.append((session, index, dataclasses.replace(run, library=None, shift=shift, promise=promise)))
                saved += gain * run.length
        if (predicted + now) * less + saved <= cost:
            return None
        sessions = len({member.session for member in members})
        return Renewal(self._new(text, sessions), changes, predicted)

    def _base(self, rows: Sequence[tuple[int, int, Run]], length: int) -> tuple[Snapshot, int] | None:
        """A new session that has room for all of a node where part of it stands, and where it begins there."""
        fitting = [
            (run.length, session, run.session_start - run.node_start)
            for session, _, run in rows
            if 0 <= run.session_start - run.node_start <= len(self._snapshots[session]) - length
        ]
        best = max(fitting, key=lambda each: each[0], default=None)
        return None if best is None else (self._snapshots[best[1]], best[2])

    def _text(
        self, base: tuple[Snapshot, int], tokens: np.ndarray, members: Sequence[Member],
        rows: Sequence[tuple[int, int, Run]],
    ) -> Text:  # fmt: skip
        """The mean of members, in place of what a new session has there, coded as finely as those rows need it."""
        within, position = base
        mean = Mean(within.identity, position, len(tokens), self._prepared.codec)
        for member in members:
            mean.add(member.values(), member.start, member.node_start, member.tokens)
        owner = with_part(within, tokens, mean.layers(within), position)
        self._refine(owner, position, rows)
        return Text(tokens, owner.identity.salt, owner.identity, position, node=0, snapshot=owner, cut=len(owner))

    def _refine(self, owner: Snapshot, position: int, rows: Sequence[tuple[int, int, Run]]) -> None:
        if not isinstance(self._prepared.codec.on_host, TransformCodec):
            return
        # More sessions will come, as those that are here.
        for session, _, run in itertools.islice(itertools.cycle(rows), max(len(rows), WANTED_BY)):
            codec = self._prepared.of(self._snapshots[session], len(self._snapshots[session])).on_host
            assert isinstance(codec, TransformCodec)
            steps = codec.token_steps[run.session_start : run.stop]
            self._prepared.refine(owner, len(owner), position + run.node_start, steps)

    def _tried(self, text: Text, rows: Sequence[tuple[int, int, Run]]) -> Iterator[tuple[Promise, float]]:
        """Of each row, what a trial finds, and bytes that a token takes less than it does with the old node."""

        def attempt(row: tuple[int, int, Run]) -> tuple[Promise, float]:
            session, _, run = row
            match = Match(session, run.session_start, run.length, 0, run.node_start)
            promise, _ = self._trial(self._snapshots[session], match, text)
            assert run.promise is not None
            return promise, self._trial.share * (_least(run.promise) - _least(promise))

        return in_order(attempt, rows, self._pool)

    def _new(self, text: Text, sessions: int) -> NewNode:
        owner = text.snapshot
        assert owner is not None
        stop = text.position + len(text.tokens)
        return NewNode(owner, text.position, stop, sessions, None, len(owner) - stop)

    def _cost(self, text: Text) -> int:
        records = tables.NODE.itemsize + 4 * len(text.tokens)
        return records + node_bytes(self._new(text, 1), self._prepared, self._block)


def _latest(members: Sequence[Member]) -> list[Member]:
    """Those of the first `MOST_MEMBERS` sessions."""
    sessions = list(dict.fromkeys(member.session for member in members))[:MOST_MEMBERS]
    return [member for member in members if member.session in sessions]


def _mean(rows: Sequence[tuple[int, int, Run]], per_token: Sequence[float]) -> float:
    """What a token has of something, on average over rows."""
    lengths = [run.length for _, _, run in rows]
    return sum(n * x for n, x in zip(lengths, per_token, strict=True)) / sum(lengths)


def _least(promise: Promise) -> float:
    return sum(min(pair) for pair in zip(promise.predicted, promise.plain, strict=True))


def with_renewals(sharing: Sharing, found: Sequence[Renewal]) -> Sharing:
    """The sharing with renewed nodes behind its own, and the rows that are to use them."""
    runs = [list(rows) for rows in sharing.runs]
    for number, renewal in enumerate(found, len(sharing.nodes)):
        for session, index, row in renewal.rows:
            runs[session][index] = dataclasses.replace(row, node=number)
    return Sharing([*sharing.nodes, *(renewal.node for renewal in found)], runs)
