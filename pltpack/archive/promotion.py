"""Which matches pay for what must move to the library for them, and the nodes and mapping rows that they become."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

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
    """Tokens ``[start, stop)`` of a session that move to the library.

    `branch`: sessions part at its end that have all its tokens and those before, and one of them may end there.
    """

    start: int
    stop: int
    branch: bool = False


class Intervals:
    """What moves to the library of one session.

    Parameters
    ----------
    candidates : iterable of Candidate
        Those that the session is the source of.
    """

    def __init__(self, candidates: Iterable[Candidate]) -> None:
        mine = [(c.match.source_start, c.match.source_start + c.match.length, c.promise is None) for c in candidates]
        places = sorted({place for start, stop, exact in mine if exact for place in (start, stop)})
        exact = _merged(sorted((start, stop) for start, stop, exact in mine if exact))
        branches = [
            Interval(low, high, True)
            for low, high in itertools.pairwise(places)
            if any(start <= low and high <= stop for start, stop in exact)
        ]
        near = _merged(sorted((start, stop) for start, stop, exact in mine if not exact))
        free = [Interval(*piece) for start, stop in near for piece in _without(start, stop, exact)]
        self._set([*branches, *free])

    def _set(self, intervals: Iterable[Interval]) -> None:
        self.all = sorted(intervals, key=lambda each: each.start)
        self._starts = [each.start for each in self.all]

    def grow(self, taken: Iterable[tuple[int, int]], end: int) -> None:
        """Take in what would be left alone between intervals, tokens that are `taken`, and the session's `end`."""
        branches = [each for each in self.all if each.branch]
        fixed = sorted([*taken, *((each.start, each.stop) for each in branches)])
        free = [(each.start, each.stop) for each in self.all if not each.branch]
        self._set([*branches, *(Interval(*each) for each in _grown(free, fixed, end))])

    def pieces(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Tokens ``[start, stop)``, cut where intervals end: (index of the interval, start, stop)."""
        at, out = bisect.bisect_right(self._starts, start) - 1, []
        while start < stop:
            end = min(self.all[at].stop, stop)
            out.append((at, start, end))
            start, at = end, at + 1
        return out


def _merged(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    out: list[tuple[int, int]] = []
    for start, stop in ranges:
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], stop))
        else:
            out.append((start, stop))
    return out


def _without(start: int, stop: int, ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """What is left of tokens ``[start, stop)`` without ranges, which are in order."""
    for low, high in ranges:
        if low < stop and start < high:
            if start < low:
                yield start, low
            start = high
    if start < stop:
        yield start, stop


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


def by_source(candidates: Iterable[Candidate]) -> dict[int, list[Candidate]]:
    """Candidates of each source, sources ascending."""
    out: dict[int, list[Candidate]] = {}
    for candidate in candidates:
        out.setdefault(candidate.match.source, []).append(candidate)
    return dict(sorted(out.items()))


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
    paying: list[Candidate] = []
    total = 0.0
    for mine in by_source(c for c in candidates if c.match.source in sessions).values():
        for exact in (True, False):
            same = [c for c in mine if (c.promise is None) == exact]
            for group in connected(same):
                start = min(c.match.source_start for c in group)
                stop = max(c.match.source_start + c.match.length for c in group)
                net = sum(c.gain for c in group) - len(Intervals(group).all) * node_bytes - 4 * (stop - start)
                if net > 0:
                    total += net
                    paying += group
    return free + paying if total > fixed else free


def connected(candidates: Sequence[Candidate]) -> list[list[Candidate]]:
    """Candidates by what their sources merge to."""
    out: list[list[Candidate]] = []
    end = -1
    for candidate in sorted(candidates, key=lambda c: (c.match.source_start, c.match.session, c.match.start)):
        match = candidate.match
        if match.source_start > end:
            out.append([])
        out[-1].append(candidate)
        end = max(end, match.source_start + match.length)
    return out


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
    taken: list[list[tuple[int, int]]] = [[(0, prefix_end(runs))] for runs in sharing.runs]
    for candidate in kept:
        match = candidate.match
        taken[match.session - first].append((match.start, match.start + match.length))
    nodes, runs = list(sharing.nodes), [list(rows) for rows in sharing.runs]
    for source, mine in by_source(kept).items():
        if source < first:
            for candidate in mine:
                runs[candidate.match.session - first].append(_row(candidate, texts[source], None, 0))
            continue
        owner = snapshots[source - first]
        intervals = Intervals(mine)
        intervals.grow(taken[source - first], len(owner))
        users: list[set[int]] = [{source} for _ in intervals.all]
        for candidate in mine:
            match = candidate.match
            for index, start, stop in intervals.pieces(match.source_start, match.source_start + match.length):
                users[index].add(match.session)
                piece = match._replace(start=match.start + start - match.source_start, length=stop - start,
                                       source_start=start)  # fmt: skip
                row = _row(dataclasses.replace(candidate, match=piece), texts[source], len(nodes) + index,
                           intervals.all[index].start)  # fmt: skip
                runs[match.session - first].append(row)
        before = max(sharing.runs[source - first], key=lambda run: run.stop, default=None)
        for each, sessions in zip(intervals.all, users, strict=True):
            length, parent = each.stop - each.start, before if before and before.stop == each.start else None
            row = Run(each.start, length, None, len(nodes), 0, role=Role.SOURCE)
            boundary = len(owner) - each.stop
            if each.branch:
                boundary = min(len(snapshots[user - first]) for user in sessions) - each.stop
            nodes.append(NewNode(owner, each.start, each.stop, len(sessions), parent, boundary))
            runs[source - first].append(row)
            before = row
    return Sharing(nodes, [sorted(rows, key=lambda run: run.session_start) for rows in runs])


def _row(candidate: Candidate, source: Text, node: int | None, node_start: int) -> Run:
    """A candidate's mapping row; `node` and where it starts in its text, if the source is a session."""
    match = candidate.match
    shift = match.start - source.position - match.source_start
    role = Role.PREFIX if candidate.promise is None else Role.NEAR
    number = source.node if node is None else node
    assert number is not None
    return Run(match.start, match.length, source.library, number, match.source_start - node_start, shift, role,
               candidate.promise)  # fmt: skip
