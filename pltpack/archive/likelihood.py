"""Probabilities of the tokens of an archive's sessions: captured ones where there are some, else estimated.

What is estimated comes from the sessions' own tokens, tenant by tenant (docs/trie.md, "Probabilities").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pltpack.archive.captured import captured_probabilities, token_probabilities
from pltpack.trie.kneser_ney import KneserNey
from pltpack.trie.probabilities import mean_over_visits

if TYPE_CHECKING:
    from pltpack.archive.shard import Shard
    from pltpack.snapshot import Snapshot

#: Length of the n-grams that estimate what was not captured, and tokens they are counted in at most.
ORDER, ESTIMATE_TOKENS = 4, 1 << 22


class Read(NamedTuple):
    """A session as it is read for its probabilities.

    Attributes
    ----------
    tokens : ndarray
        int32 ``[T]``.
    salt : str or None
    captured : ndarray
        Float64 ``[T]``, see `pltpack.archive.captured.token_probabilities`.
    in_tail : ndarray
        bool ``[T]``.
    """

    tokens: np.ndarray
    salt: str | None
    captured: np.ndarray
    in_tail: np.ndarray

    @classmethod
    def of_shard(cls, shard: Shard) -> Read:
        """A session of an archive."""
        return cls(shard.tokens, shard.entry.salt, *token_probabilities(shard))

    @classmethod
    def of_snapshot(cls, snapshot: Snapshot) -> Read:
        """A session that is about to be written."""
        return cls(snapshot.tokens, snapshot.identity.salt, *captured_probabilities(snapshot))


def likelihoods(
    sessions: Sequence[Read], counted: Sequence[tuple[np.ndarray, object]] | None = None
) -> tuple[list[np.ndarray], int]:
    """P of each session's tokens given those before, and how many were captured.

    Parameters
    ----------
    sessions : sequence of Read
    counted : sequence of (ndarray, salt), optional
        Token ids ``[T]`` that the estimate counts, tenant by tenant, instead of the sessions.

    Returns
    -------
    list of ndarray
        Float64 ``[T]`` each.
    int
    """
    out: list[np.ndarray] = [np.empty(0)] * len(sessions)
    captured = 0
    # Tenants learn nothing from each other.
    for salt in dict.fromkeys(session.salt for session in sessions):
        mine = [index for index, session in enumerate(sessions) if session.salt == salt]
        texts = [sessions[index].tokens for index in mine]
        vocabulary = 1 + max((int(tokens.max()) for tokens in texts if len(tokens)), default=0)
        learnt = texts if counted is None else [tokens for tokens, of in counted if of == salt]
        starts = np.cumsum([0, *map(len, learnt)])
        learnt = [tokens[: max(0, ESTIMATE_TOKENS - at)] for tokens, at in zip(learnt, starts.tolist(), strict=False)]
        estimate = KneserNey(learnt, ORDER, vocabulary)
        estimated = [estimate.probabilities(tokens) for tokens in texts]
        # Of a tail, a token has the share that the estimate gives it.
        own = [np.where(sessions[index].in_tail, sessions[index].captured * p, sessions[index].captured)
               for index, p in zip(mine, estimated, strict=True)]  # fmt: skip
        for index, mean, p in zip(mine, mean_over_visits(texts, own), estimated, strict=True):
            captured += int((~np.isnan(mean)).sum())
            out[index] = np.where(np.isnan(mean), p, mean)
    return out, captured


def bits_of(p: np.ndarray) -> float:
    """Information of tokens in bits, ``-log2`` of their probabilities ``[T]``, summed; NaN counts for nothing."""
    known = p[~np.isnan(p)]
    # The least positive number stands for what was rounded to none.
    return float(-np.log2(np.maximum(known, np.finfo(np.float64).tiny)).sum())
