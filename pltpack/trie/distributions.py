"""Predicted next-token distributions of many positions, cut to their most probable tokens: a structure of arrays."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

#: Token ids stored in the probability tables end here; it stands for no token.
NO_TOKEN = -1


@dataclasses.dataclass(frozen=True)
class Distributions:
    """Top-k next-token distributions at N positions.

    Attributes
    ----------
    ids : ndarray
        Token ids, int32 ``[N, k]``, ascending within a row; `NO_TOKEN` where a row has fewer than k tokens.
    probabilities : ndarray
        Float64 ``[N, k]``, 0 where there is no token.
    tail : ndarray
        Float64 ``[N]``: the probability of all other tokens together.
    """

    ids: np.ndarray
    probabilities: np.ndarray
    tail: np.ndarray

    @classmethod
    def of(cls, ids: Any, probabilities: Any) -> Distributions:
        """Distributions of tokens and their probabilities, in any order within a row.

        Parameters
        ----------
        ids : array_like
            Integers ``[N, k]``, no token twice in a row; negative ones stand for no token.
        probabilities : array_like
            ``[N, k]``, each from 0 to 1. A row that exceeds 1 in sum, as rounded ones do, is scaled down to it.

        Raises
        ------
        ValueError
            If shapes differ, a probability is out of range, or a row names a token twice.
        """
        tokens, p = np.asarray(ids), np.array(probabilities, dtype=np.float64)
        if tokens.ndim != 2 or tokens.shape != p.shape or tokens.dtype.kind not in "iu":
            raise ValueError(f"token ids {tokens.dtype} {list(tokens.shape)} and probabilities {list(p.shape)}")
        if not ((p >= 0) & (p <= 1.001)).all():
            raise ValueError("a probability is not from 0 to 1")
        empty = tokens < 0
        p[empty] = 0.0
        order = np.argsort(np.where(empty, NO_TOKEN, tokens), axis=1, kind="stable")
        tokens = np.take_along_axis(np.where(empty, NO_TOKEN, tokens), order, axis=1).astype(np.int32)
        p = np.take_along_axis(p, order, axis=1)
        if ((tokens[:, 1:] == tokens[:, :-1]) & (tokens[:, 1:] != NO_TOKEN)).any():
            raise ValueError("a row names a token twice")
        total = p.sum(axis=1)
        p /= np.maximum(total, 1.0)[:, None]
        return cls(np.ascontiguousarray(tokens), np.ascontiguousarray(p), np.maximum(1.0 - total, 0.0))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, rows: slice) -> Distributions:
        """A range of positions."""
        return Distributions(self.ids[rows], self.probabilities[rows], self.tail[rows])

    def cut(self, top: int) -> Distributions:
        """The same distributions with at most `top` tokens each, the most probable; of equal ones the lower ids."""
        if top >= self.ids.shape[1]:
            return self
        kept = np.sort(np.argsort(-self.probabilities, axis=1, kind="stable")[:, :top], axis=1)
        p = np.take_along_axis(self.probabilities, kept, axis=1)
        tail = np.maximum(1.0 - p.sum(axis=1), 0.0)
        return Distributions(np.take_along_axis(self.ids, kept, axis=1), p, tail)

    def of_tokens(self, tokens: np.ndarray) -> np.ndarray:
        """Probability of one token per position, float64 ``[N]``; NaN where it is not among the tokens named."""
        hit = (self.ids == tokens[:, None]) & (self.ids != NO_TOKEN)
        return np.where(hit.any(axis=1), (self.probabilities * hit).sum(axis=1), np.nan)
