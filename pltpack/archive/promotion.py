"""Which matches pay for what must move to the library for them, and the nodes and mapping rows that they become."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable, Sequence

from pltpack.archive.encoding import Promise
from pltpack.archive.sharing import NewNode, Role, Run, Sharing, prefix_end
from pltpack.archive.trial import Text
from pltpack.snapshot import Snapshot
from pltpack.trie.matching import Match

#: Between what moves to the library and other such, or a place where the session is cut anyway, so many tokens move
#: with it: units of a few tokens cost more.
ABSORBED = 32


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A match that was tried.

    Attributes
    ----------
    match : Match
        Its session and source are indices of texts.
    promise : Promise or None
        None: the tokens before are equal, too, so that the values need no prediction.
    gain : float
        Bytes that it saves for certain, less those of its row and its cuts.
    """

    match: Match
    promise: Promise | None
    gain: float


@dataclasses.dataclass(frozen=True)
class Interval:
    """Tokens ``[start, stop)`` of a text, a new session, that move to the library."""

    text: int
    start: int
    stop: int


class Intervals:
    """What candidates are predicted from, merged.

    Parameters
    ----------
    candidates : iterable of Candidate
        Those whose sources are new sessions.
    """

    def __init__(self, candidates: Iterable[Candidate]) -> None:
        ranges: dict[int, list[tuple[int, int]]] = {}
        for candidate in candidates:
            match = candidate.match
            ranges.setdefault(match.source, []).append((match.source_start, match.source_start + match.length))
        self._of = {text: _merged(sorted(each)) for text, each in sorted(ranges.items())}
        self._index()

    def _index(self) -> None:
        self.all = [Interval(text, *each) for text, ranges in self._of.items() for each in ranges]
        firsts = [0]
        for ranges in self._of.values():
            firsts.append(firsts[-1] + len(ranges))
        self._first = dict(zip(self._of, firsts, strict=False))

    def grow(self, text: int, taken: Sequence[tuple[int, int]], end: int) -> None:
        """Take in what would be left alone between a text's intervals, its `taken` tokens, in order, and its ends."""
        if text in self._of:
            self._of[text] = _grown(self._of[text], taken, end)
            self._index()

    def number(self, candidate: Candidate) -> int:
        """Index in `all` of what holds a candidate's source."""
        match = candidate.match
        at = bisect.bisect_right(self._of[match.source], match.source_start, key=lambda each: each[0]) - 1
        return self._first[match.source] + at


def _merged(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    out: list[tuple[int, int]] = []
    for start, stop in ranges:
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], stop))
        else:
            out.append((start, stop))
    return out


def _grown(ranges: Sequence[tuple[int, int]], taken: Sequence[tuple[int, int]], end: int) -> list[tuple[int, int]]:
    starts = [start for start, _ in taken]
    out: list[tuple[int, int]] = []
    for start, stop in ranges:
        after = bisect.bisect_right(starts, start)
        low = taken[after - 1][1] if after else 0
        high = starts[after] if after < len(starts) else end
        if out and out[-1][1] >= low and start - out[-1][1] <= ABSORBED:
            start, before = out.pop()
            stop = max(stop, before)
        elif start - low <= ABSORBED:
            start = low
        out.append((start, high if high - stop <= ABSORBED else stop))
    return out


def worth(candidates: Sequence[Candidate], sessions: range, node_bytes: int, fixed: int) -> list[Candidate]:
    """Candidates that pay for the nodes made for them.

    Parameters
    ----------
    candidates : sequence of Candidate
    sessions : range
        Texts that are new sessions: what is predicted from them moves to the library.
    node_bytes : int
        Bytes of a node besides its units and tokens, and of the row of the session it comes from.
    fixed : int
        Bytes that are spent if there is any node.
    """
    free = [c for c in candidates if c.match.source not in sessions]
    moving = [c for c in candidates if c.match.source in sessions]
    intervals = Intervals(moving)
    net = [-node_bytes - 4.0 * (each.stop - each.start) for each in intervals.all]
    for candidate in moving:
        net[intervals.number(candidate)] += candidate.gain
    if sum(gain for gain in net if gain > 0) <= fixed:
        return free
    return free + [c for c in moving if net[intervals.number(c)] > 0]


def promote(
    sharing: Sharing, texts: Sequence[Text], snapshots: Sequence[Snapshot], kept: Sequence[Candidate]
) -> Sharing:
    """The sharing with nodes and rows for candidates.

    Parameters
    ----------
    sharing : Sharing
        Exact prefixes.
    texts : sequence of Text
        The last ones are the new sessions.
    snapshots : sequence of Snapshot
        The new sessions.
    kept : sequence of Candidate
    """
    first = len(texts) - len(snapshots)
    moving = [c for c in kept if c.match.source >= first]
    intervals = Intervals(moving)
    taken: list[list[tuple[int, int]]] = [[(0, prefix_end(runs))] for runs in sharing.runs]
    for candidate in kept:
        match = candidate.match
        taken[match.session - first].append((match.start, match.start + match.length))
    for index, snapshot in enumerate(snapshots):
        intervals.grow(first + index, sorted(taken[index]), len(snapshot))
    users: list[set[int]] = [{each.text} for each in intervals.all]
    for candidate in moving:
        users[intervals.number(candidate)].add(candidate.match.session)
    nodes, runs = list(sharing.nodes), [list(rows) for rows in sharing.runs]
    for each, sessions in zip(intervals.all, users, strict=True):
        owner, length = snapshots[each.text - first], each.stop - each.start
        runs[each.text - first].append(Run(each.start, length, None, len(nodes), 0, role=Role.SOURCE))
        nodes.append(NewNode(owner, each.start, each.stop, len(sessions), None, len(owner) - each.stop))
    for candidate in kept:
        match, text = candidate.match, texts[candidate.match.source]
        node, start = text.node, match.source_start
        if node is None:
            number = intervals.number(candidate)
            node, start = len(sharing.nodes) + number, start - intervals.all[number].start
        shift = match.start - text.position - match.source_start
        role = Role.PREFIX if candidate.promise is None else Role.NEAR
        runs[match.session - first].append(
            Run(match.start, match.length, text.library, node, start, shift, role, candidate.promise)
        )
    return Sharing(nodes, [sorted(rows, key=lambda run: run.session_start) for rows in runs])
