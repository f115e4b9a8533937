"""Of equal passages the one that must be finest predicts the others, wherever it stands.

Matches name the first occurrence of a passage as the source of all. Where tokens have steps of their own, those of the
passage nearest to its session's end are finest (docs/reuse.md): coarse ones are then predicted nearly for free, while a
fine one that is predicted from a coarse one costs almost what it costs alone.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from pltpack.archive.promotion import Candidate, by_source, connected
from pltpack.trie.matching import Match

#: Shorter parts of a passage, which not all its occurrences have, are left to those that lie beside them.
SHORTEST = 32


@dataclasses.dataclass(frozen=True)
class Part:
    """Tokens ``[start, stop)`` of a session that predict others, and the candidate that is to be the source instead."""

    start: int
    stop: int
    root: Candidate | None


class Roots:
    """Chooses sources anew.

    Parameters
    ----------
    sessions : range
        Texts that are new sessions: only what is predicted from them can be predicted from another.
    steps : callable
        Steps of a text's tokens: int32 ``[T]``, logarithms in 1/24 octave.
    attempt : callable
        Tries matches, in their order.
    """

    def __init__(
        self,
        sessions: range,
        steps: Callable[[int], np.ndarray],
        attempt: Callable[[Sequence[Match]], Iterable[Candidate]],
    ) -> None:
        self._sessions, self._steps, self._attempt = sessions, steps, attempt

    def choose(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Candidates that predict the same passages, each from its finest occurrence.

        Parameters
        ----------
        candidates : sequence of Candidate
            Matches that were tried and pay.
        """
        sources = by_source(c for c in candidates if c.match.source in self._sessions)
        plans = [(group, self._parts(source, group)) for source, mine in sources.items() for group in connected(mine)]
        turned = [_turned(part.root, part) for _, parts in plans for part in parts if part.root is not None]
        tried = iter(self._attempt(turned))
        out = [c for c in candidates if c.match.source not in self._sessions]
        for group, parts in plans:
            kept: list[Part] = []
            for part in parts:
                if part.root is not None:
                    # The other members are as near to the new source as this one is, or were tried in vain.
                    back = next(tried)
                    if back.gain > 0:
                        out.append(back)
                    else:
                        part = dataclasses.replace(part, root=None)
                _add(kept, part)
            out += [moved for c in group for part in kept if c is not part.root for moved in _moved(c, part)]
        return out

    def _parts(self, source: int, group: Sequence[Candidate]) -> list[Part]:
        """What predicts, cut where candidates begin and end, with the source that each part is to have."""
        places = sorted({place for c in group for place in (_begin(c), _end(c))})
        pieces = list(itertools.pairwise(places))
        # Those that are long enough for themselves, in order; what lies between goes with one beside it.
        chosen = {i: self._finest(source, group, *pieces[i]) for i in range(len(pieces))
                  if pieces[i][1] - pieces[i][0] >= SHORTEST}  # fmt: skip
        parts: list[Part] = []
        for index, (start, stop) in enumerate(pieces):
            near = sorted(chosen, key=lambda i: abs(i - index))[:2]
            fitting = [root for root in map(chosen.__getitem__, near) if root is None or _covers(root, start, stop)]
            if not fitting and near:
                continue
            _add(parts, Part(start, stop, fitting[0] if fitting else None))
        return parts

    def _finest(self, source: int, group: Sequence[Candidate], start: int, stop: int) -> Candidate | None:
        """The candidate with the finest steps at tokens of the source; None: the source itself."""
        best, least = None, float(self._steps(source)[start:stop].mean())
        for candidate in group:
            if _covers(candidate, start, stop):
                at = candidate.match.start + start - _begin(candidate)
                mean = float(self._steps(candidate.match.session)[at : at + stop - start].mean())
                if mean < least:
                    best, least = candidate, mean
        return best


def _add(parts: list[Part], part: Part) -> None:
    """Append a part, or lengthen the last one by it."""
    if parts and parts[-1].root is part.root and parts[-1].stop == part.start:
        part = dataclasses.replace(part, start=parts.pop().start)
    parts.append(part)


def _begin(candidate: Candidate) -> int:
    return candidate.match.source_start


def _end(candidate: Candidate) -> int:
    return candidate.match.source_start + candidate.match.length


def _covers(candidate: Candidate, start: int, stop: int) -> bool:
    return _begin(candidate) <= start and stop <= _end(candidate)


def _turned(root: Candidate, part: Part) -> Match:
    """What was the source, predicted from the root."""
    at = root.match.start + part.start - _begin(root)
    return Match(root.match.source, part.start, part.stop - part.start, root.match.session, at)


def _moved(candidate: Candidate, part: Part) -> Iterable[Candidate]:
    """A candidate's share of a part, predicted from the part's root."""
    match, start, stop = candidate.match, max(_begin(candidate), part.start), min(_end(candidate), part.stop)
    if start >= stop:
        return
    source, source_start = match.source, start
    if part.root is not None:
        source, source_start = part.root.match.session, part.root.match.start + start - _begin(part.root)
    moved = Match(match.session, match.start + start - match.source_start, stop - start, source, source_start)
    # What was tried is one part of the match: the others are as good.
    yield dataclasses.replace(candidate, match=moved, gain=candidate.gain * (stop - start) / match.length)
