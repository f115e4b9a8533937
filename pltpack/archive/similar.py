"""Windows of new sessions whose tokens differ but whose captured predictions agree (`pltpack.trie.ann`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pltpack.errors import DumpError
from pltpack.snapshot import Snapshot
from pltpack.trie.ann import find_similar, open_windows
from pltpack.trie.distributions import Distributions
from pltpack.trie.matching import Match


def similar_matches(
    snapshots: Sequence[Snapshot], own_from: Sequence[int], found: Sequence[Sequence[Match]], first: int, window: int,
    tau: float,
) -> list[Match]:  # fmt: skip
    """Matches among what no tokens match, of sessions whose dumps hold log-probabilities.

    Parameters
    ----------
    snapshots : sequence of Snapshot
        The new sessions.
    own_from : sequence of int
        Tokens of their exact prefixes.
    found : sequence of sequence of Match
        Matches of tokens, session by session.
    first : int
        Index of the first session's text in matches.
    window, tau : int, float

    Raises
    ------
    DumpError
        If log-probabilities are none.
    """
    captured = [index for index, snapshot in enumerate(snapshots) if snapshot.logprobs is not None]
    if not captured:
        return []
    predictions = [_distributions(snapshots[index]) for index in captured]
    starts = [open_windows(len(snapshots[index]), own_from[index], found[index], window) for index in captured]
    salts = [snapshots[index].identity.salt for index in captured]
    near = find_similar(predictions, starts, salts, range(len(captured)), window=window, tau=tau)
    sources: dict[int, list[Match]] = {}
    for match in (match for each in found for match in each):
        sources.setdefault(match.source, []).append(match)
    out = []
    for match in (match for each in near for match in each):
        session, source = first + captured[match.session], first + captured[match.source]
        start, stop = match.start, match.start + match.length
        # What predicts others is not predicted.
        if not any(m.source_start < stop and start < m.source_start + m.length for m in sources.get(session, ())):
            out.append(match._replace(session=session, source=source))
    return out


def _distributions(snapshot: Snapshot) -> Distributions:
    logprobs, ids = snapshot.logprobs, snapshot.logprob_ids
    if logprobs is None or ids is None:
        raise DumpError("log-probabilities without token ids", snapshot.origin)
    try:
        return Distributions.of(ids, np.exp(np.minimum(np.asarray(logprobs, np.float64), 0.0)))
    except ValueError as error:
        raise DumpError(f"log-probabilities of session {snapshot.session!r}: {error}", snapshot.origin) from None
