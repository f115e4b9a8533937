"""Probabilities on the edges of the trie: next-token distributions at every position of every text.

Where a model's top-k log-probabilities were captured, they are the distribution: the k tokens with what the model gave
them, averaged over all texts that come by (equal prefixes are one place in the trie), and one tail for all others.
Elsewhere the interpolated Kneser-Ney estimate over the texts themselves stands in. A token in the tail of a captured
distribution gets its share of the tail as Kneser-Ney divides it, so everything sums to 1 over the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pltpack.trie.distributions import NO_TOKEN, Distributions
from pltpack.trie.kneser_ney import KneserNey
from pltpack.trie.radix import RadixTrie, token_array

#: Captured distribution of one text: token ids and log-probabilities in nats, ``[T, k]`` each.
Captured = tuple[Any, Any]


#: Captured log-probabilities are binary32: what they leave to other tokens is known to this only, and never nothing.
_LEAST_TAIL = 2.0**-24


class Probabilities:
    """P(next token | all tokens before it) in a set of texts.

    Attributes
    ----------
    texts : list of ndarray
        Token ids, int32 ``[T]``.
    estimate : KneserNey
        What stands in where nothing was captured.

    Parameters
    ----------
    texts : sequence of array_like
        Token ids ``[T]``.
    captured : sequence of (array_like, array_like) or None, optional
        Per text, ids and log-probabilities ``[T, k]``: row t is what the model expects after ``text[: t + 1]``. None
        for texts without.
    order : int
        Of the n-grams that stand in.
    vocabulary : int, optional
        Tokens are 0 to ``vocabulary - 1``; one more than the largest in sight if not given.

    Raises
    ------
    ValueError
        If tokens are not ids, or what was captured does not fit its text.
    """

    def __init__(
        self,
        texts: Sequence[Any],
        captured: Sequence[Captured | None] | None = None,
        *,
        order: int = 4,
        vocabulary: int | None = None,
    ) -> None:
        self.texts = [token_array(text) for text in texts]
        given = [None] * len(self.texts) if captured is None else list(captured)
        if len(given) != len(self.texts):
            raise ValueError(f"{len(given)} captured distributions for {len(self.texts)} texts")
        tops = [None if one is None else _top(text, *one) for text, one in zip(self.texts, given, strict=True)]
        if vocabulary is None:
            named = [*self.texts, *(top.ids.reshape(-1) for top in tops if top is not None)]
            vocabulary = 1 + max((int(ids.max()) for ids in named if ids.size), default=0)
        self.estimate = KneserNey(self.texts, order, vocabulary)
        self._places = _places(self.texts)
        self._captured, self._row_of = _averaged(tops, self._places)

    @property
    def vocabulary(self) -> int:
        """Number of tokens that there are."""
        return self.estimate.vocabulary

    def captured(self, text: int) -> np.ndarray:
        """Whether the distribution after each token comes from captured log-probabilities, bool ``[T]``."""
        return self._row_of[self._places[text]] >= 0

    def distributions(self, text: int, k: int, start: int = 0, stop: int | None = None) -> Distributions:
        """Distributions after each of the tokens ``[start, stop)`` of a text, at most k tokens each."""
        rows = self._row_of[self._places[text]][start:stop]
        if len(rows) and (rows >= 0).all():
            return _taken(self._captured, rows).cut(k)
        ids = np.full((len(rows), k), NO_TOKEN, np.int32)
        p = np.zeros((len(rows), k))
        seen = rows >= 0
        if seen.any():
            top = _taken(self._captured, rows[seen]).cut(k)
            ids[seen, : top.ids.shape[1]], p[seen, : top.ids.shape[1]] = top.ids, top.probabilities
        top = self.estimate.top(self.texts[text][:stop], k, start)
        ids[~seen], p[~seen] = top.ids[~seen], top.probabilities[~seen]
        return Distributions.of(ids, p)

    def of_text(self, text: int) -> np.ndarray:
        """P(text[t] | text[:t]) for every t, float64 ``[T]``; above 0. The first token is estimated always."""
        tokens = self.texts[text]
        p = self.estimate.probabilities(tokens)
        if len(tokens) < 2:
            return p
        rows = self._row_of[self._places[text]][:-1]
        at = np.flatnonzero(rows >= 0)
        if len(at):
            top = _taken(self._captured, rows[at])
            p[at + 1] = self._in_captured(text, at, top, p[at + 1])
        return p

    def _in_captured(self, text: int, at: np.ndarray, top: Distributions, estimated: np.ndarray) -> np.ndarray:
        tokens = self.texts[text]
        p = top.of_tokens(tokens[at + 1])
        for i in np.flatnonzero(np.isnan(p)):
            outside = self._outside(tokens[: at[i] + 1], top.ids[i])
            p[i] = top.tail[i] * estimated[i] / outside
        return p

    def _outside(self, context: np.ndarray, ids: np.ndarray) -> float:
        """What the estimate gives to all tokens but these."""
        whole = self.estimate.distribution(context)
        whole[ids[ids != NO_TOKEN]] = 0.0
        return max(float(whole.sum()), np.finfo(np.float64).tiny)

    def distribution(self, text: int, at: int) -> np.ndarray:
        """P(next token | text[: at + 1]) of the whole vocabulary, float64 ``[vocabulary]``; it sums to 1."""
        whole = self.estimate.distribution(self.texts[text][: at + 1])
        row = int(self._row_of[self._places[text][at]])
        if row < 0:
            return whole
        ids, p = self._captured.ids[row], self._captured.probabilities[row]
        named = ids != NO_TOKEN
        whole[ids[named]] = 0.0
        rest = whole.sum()
        whole *= self._captured.tail[row] / rest if rest > 0 else 0.0
        whole[ids[named]] = p[named]
        return np.asarray(whole / whole.sum())

    def information(self, text: int) -> np.ndarray:
        """Bits of each token given those before it, ``-log2 P(text[t] | text[:t])``, float64 ``[T]``."""
        return np.asarray(-np.log2(self.of_text(text)))


def _top(text: np.ndarray, ids: Any, logprobs: Any) -> Distributions:
    tokens, values = np.asarray(ids), np.asarray(logprobs, dtype=np.float64)
    if tokens.ndim != 2 or len(tokens) != len(text) or tokens.shape != values.shape or not tokens.shape[1]:
        raise ValueError(f"log-probabilities {list(values.shape)} and ids {list(tokens.shape)} for {len(text)} tokens")
    if np.isnan(values).any() or (values > 1e-3).any():
        raise ValueError("a log-probability is not 0 or less")
    return Distributions.of(tokens, np.exp(values) * (1 - _LEAST_TAIL))


def _places(texts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Per text and position, the number of its token in a trie: equal for equal prefixes only."""
    trie = RadixTrie.build(texts)
    out = []
    for text in texts:
        _, end = trie.lookup(text)
        edges = [np.arange(trie.offset[node], trie.offset[node] + trie.length[node]) for node in trie.path(end)]
        out.append(np.concatenate([np.empty(0, np.int64), *edges]))
    return out


def _averaged(tops: Sequence[Distributions | None], places: Sequence[np.ndarray]) -> tuple[Distributions, np.ndarray]:
    """One captured distribution per place, the mean over all visits; and per place its row, or -1.

    The mean keeps as many tokens as the widest capture has: those that it gives most.
    """
    row_of = np.full(1 + max((int(place.max()) for place in places if len(place)), default=0), -1, np.int64)
    k = max((top.ids.shape[1] for top in tops if top is not None), default=1)
    held = [(top, place) for top, place in zip(tops, places, strict=True) if top is not None]
    where = np.concatenate([np.empty(0, np.int64), *(place for _, place in held)])
    found, first, visits = np.unique(where, return_index=True, return_counts=True)
    row_of[found] = np.arange(len(found))
    ids, p = np.full((len(where), k), NO_TOKEN, np.int32), np.zeros((len(where), k))
    at = 0
    for top, place in held:
        rows = slice(at, at + len(place))
        ids[rows, : top.ids.shape[1]], p[rows, : top.ids.shape[1]] = top.ids, top.probabilities
        at += len(place)
    out_ids, out_p = ids[first], p[first]
    several = np.flatnonzero(visits > 1)
    if len(several):
        mean_of = row_of[where]
        shared = visits[mean_of] > 1
        mixed = _mixed(mean_of[shared], ids[shared], p[shared] / visits[mean_of[shared], None], k)
        out_ids[several], out_p[several] = mixed
    return Distributions.of(out_ids, out_p), row_of


def _mixed(rows: np.ndarray, ids: np.ndarray, p: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Sums per row and token, cut to the k largest per row, rows in ascending order."""
    row, token, part = np.repeat(rows, ids.shape[1]), ids.reshape(-1), p.reshape(-1)
    order = np.lexsort((token, row))
    row, token, part = row[order], token[order], part[order]
    fresh = np.concatenate([[True], (row[1:] != row[:-1]) | (token[1:] != token[:-1])])
    total = np.add.reduceat(part, np.flatnonzero(fresh))
    row, token = row[fresh], token[fresh]
    order = np.lexsort((token, -total, row))
    row, token, total = row[order], token[order], total[order]
    numbers, starts, counts = np.unique(row, return_index=True, return_counts=True)
    rank = np.arange(len(row)) - np.repeat(starts, counts)
    out_ids, out_p = np.full((len(numbers), k), NO_TOKEN, np.int32), np.zeros((len(numbers), k))
    kept = rank < k
    line = np.repeat(np.arange(len(numbers)), counts)[kept]
    out_ids[line, rank[kept]], out_p[line, rank[kept]] = token[kept], total[kept]
    return out_ids, out_p


def _taken(of: Distributions, rows: np.ndarray) -> Distributions:
    return Distributions(of.ids[rows], of.probabilities[rows], of.tail[rows])


def mean_over_visits(texts: Sequence[Any], values: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Per text and token, the mean of what all texts with the same prefix, that token included, have there.

    Parameters
    ----------
    texts : sequence of array_like
        Token ids ``[T]``.
    values : sequence of ndarray
        Float64 ``[T]`` per text; NaN counts as nothing.

    Returns
    -------
    list of ndarray
        Float64 ``[T]`` per text; NaN where no text has anything.
    """
    places = _places([token_array(text) for text in texts])
    size = 1 + max((int(place.max()) for place in places if len(place)), default=0)
    total, count = np.zeros(size), np.zeros(size)
    for place, value in zip(places, values, strict=True):
        known = ~np.isnan(value)
        total[place[known]] += value[known]
        count[place[known]] += 1
    mean = np.divide(total, count, out=np.full(size, np.nan), where=count > 0)
    return [mean[place] for place in places]
