"""Interpolated Kneser-Ney: next-token probabilities from the counts of token n-grams.

For a context of the last k tokens, with counts c and a discount D per order,

    P_k(w | context) = max(c(context, w) - D, 0) / c(context) + D * types(context) / c(context) * P_{k-1}(w | context')

where types is the number of distinct tokens seen after the context, and context' lacks its oldest token. The highest
order counts occurrences; lower ones count how many different tokens came before (Kneser & Ney 1995). The lowest is
interpolated with the uniform distribution over the vocabulary, so every token has a probability and all sum to 1. D is
estimated from the counts of counts of its order, n_1 / (n_1 + 2 n_2). Source: Chen & Goodman, "An empirical study of
smoothing techniques for language modeling", Computer Speech & Language 13, 1999, section 2.7 and its interpolated form.
Texts begin with markers that are never predicted, so first tokens have full contexts too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numba
import numpy as np

from pltpack.trie.distributions import NO_TOKEN, Distributions
from pltpack.trie.radix import token_array

#: Longer n-grams hardly repeat but as copies, which the trie finds by itself.
MAX_ORDER = 8
#: Both what was seen and what was not keep a share where counts of counts are degenerate.
_DISCOUNTS = (0.05, 0.95)
#: Dense number of the marker before a text, and of tokens that no text has.
_MARKER, _UNSEEN = 0, -1


class KneserNey:
    """Next-token probabilities learnt from texts; does not change afterwards.

    Attributes
    ----------
    order : int
        Length of the longest n-grams: contexts have up to ``order - 1`` tokens.
    vocabulary : int
        Tokens are 0 to ``vocabulary - 1``.
    discounts : ndarray
        Float64 ``[order]``: D per number of context tokens.

    Parameters
    ----------
    texts : iterable of array_like
        Token ids ``[T]``.
    order : int
        From 1 to `MAX_ORDER`.
    vocabulary : int, optional
        One more than the largest token of the texts if not given.

    Raises
    ------
    ValueError
        If tokens are not ids within the vocabulary, or the order is out of range.
    """

    def __init__(self, texts: Iterable[Any], order: int = 4, vocabulary: int | None = None) -> None:
        if not 1 <= order <= MAX_ORDER:
            raise ValueError(f"order {order} is not from 1 to {MAX_ORDER}")
        arrays = [token_array(text) for text in texts]
        tokens = np.concatenate([*arrays, np.empty(0, np.int32)])
        largest = int(tokens.max()) if len(tokens) else 0
        self.order, self.vocabulary = order, largest + 1 if vocabulary is None else vocabulary
        if (tokens < 0).any() or largest >= self.vocabulary:
            raise ValueError(f"a token is not from 0 to {self.vocabulary - 1}")
        self._known = np.unique(tokens)
        self._count(arrays)

    def _count(self, arrays: list[np.ndarray]) -> None:
        stream = np.concatenate([np.empty(0, np.int64), *map(self._padded, arrays)])
        event = stream != _MARKER
        width = len(self._known) + 1
        context = np.zeros(len(stream), np.int64)
        keys: list[np.ndarray] = [np.zeros(1, np.int64)]
        rows: list[tuple[np.ndarray, np.ndarray]] = []
        for k in range(self.order):
            if k:
                # A context of k tokens is the one of k - 1 tokens that ends one token earlier, and the last token.
                found, inverse = np.unique(context[:-1] * width + stream[:-1], return_inverse=True)
                context = np.concatenate([np.zeros(min(1, len(stream)), np.int64), inverse.reshape(-1)])
                keys.append(found)
            rows.append(np.unique((context * width + stream)[event], return_inverse=True))
        levels = []
        for k, (grams, inverse) in enumerate(rows):
            if k + 1 < self.order:
                # One per different token in front: n-grams that end in this one, each taken where it first occurs.
                longer, first = np.unique(rows[k + 1][1], return_index=True)
                counts = np.bincount(inverse[first], minlength=len(grams))
                assert len(longer) == len(rows[k + 1][0])
            else:
                counts = np.bincount(inverse, minlength=len(grams))
            levels.append((grams // width, grams % width, counts))
        self._tables(levels, keys)

    def _tables(self, levels: list[tuple[np.ndarray, np.ndarray, np.ndarray]], keys: list[np.ndarray]) -> None:
        self.discounts = np.array([_discount(counts) for _, _, counts in levels])
        starts, share, rest = [], [], []
        at = 0
        for (context, _, counts), d, known in zip(levels, self.discounts, keys, strict=True):
            size = len(known)
            total = np.bincount(context, counts, size)
            types = np.bincount(context, minlength=size)
            starts.append(at + np.concatenate([[0], np.cumsum(types)[:-1]]))
            share.append(np.maximum(counts - d, 0.0) / total[context])
            # A context that nothing followed says nothing.
            rest.append(np.divide(d * types, total, out=np.ones(size), where=total > 0))
            at += len(counts)
        self._base = np.concatenate([[0], np.cumsum([len(known) for known in keys])]).astype(np.int64)
        self._keys = np.concatenate(keys)
        self._starts = np.append(np.concatenate(starts), at).astype(np.int64)
        self._tokens = np.concatenate([tokens for _, tokens, _ in levels]).astype(np.int64)
        self._share, self._rest = np.concatenate(share), np.concatenate(rest)
        # Probabilities without any context, by dense number; markers have none.
        self._floor = float(self._rest[0]) / self.vocabulary
        self._plain = np.full(len(self._known) + 1, self._floor)
        self._plain[_MARKER] = 0.0
        first = slice(0, self._starts[1])
        self._plain[self._tokens[first]] += self._share[first]
        self._likely = np.argsort(-self._plain, kind="stable")[: len(self._known)]

    def _dense(self, tokens: np.ndarray) -> np.ndarray:
        at = np.searchsorted(self._known, tokens)
        found = np.zeros(len(tokens), bool)
        inside = at < len(self._known)
        found[inside] = self._known[at[inside]] == tokens[inside]
        return np.where(found, at + 1, _UNSEEN).astype(np.int64)

    def _padded(self, text: np.ndarray) -> np.ndarray:
        return np.concatenate([np.full(self.order - 1, _MARKER, np.int64), self._dense(text)])

    def probabilities(self, text: Any) -> np.ndarray:
        """P(text[t] | text[:t]) for every t, float64 ``[T]``.

        Parameters
        ----------
        text : array_like
            Token ids ``[T]``, any; those outside the vocabulary have probability 0.
        """
        tokens = token_array(text)
        out = np.empty(len(tokens))
        _probabilities(self._padded(tokens), self.order, self._known.size + 1, self._base, self._keys, self._starts,
                       self._tokens, self._share, self._rest, self._plain, self._floor, out)  # fmt: skip
        out[(tokens < 0) | (tokens >= self.vocabulary)] = 0.0
        return out

    def distribution(self, context: Any) -> np.ndarray:
        """P(next token | context) of the whole vocabulary, float64 ``[vocabulary]``."""
        chain = np.empty((1, self.order), np.int64)
        tokens = token_array(context)
        padded = self._padded(tokens[max(0, len(tokens) - self.order + 1) :])
        _chains(padded, np.array([len(padded)]), self.order, self._known.size + 1, self._base, self._keys, chain)
        dense = self._plain.copy()
        floor = self._floor
        for place in chain[0, 1:]:
            if place >= 0:
                row = slice(self._starts[place], self._starts[place + 1])
                dense *= self._rest[place]
                floor *= self._rest[place]
                dense[self._tokens[row]] += self._share[row]
        out = np.full(self.vocabulary, floor)
        out[self._known] = dense[1:]
        return out

    def top(self, text: Any, k: int, start: int = 0) -> Distributions:
        """What is expected after ``text[: t + 1]`` for every t from `start` on, as the k most probable tokens.

        Parameters
        ----------
        text : array_like
            Token ids ``[T]``.
        k : int
            At least 1. Of equally probable tokens those with lower ids are taken; only tokens of the learnt texts are.
        start : int

        Returns
        -------
        Distributions
            Of ``T - start`` positions.
        """
        if k < 1:
            raise ValueError(f"top {k} tokens")
        tokens = token_array(text)
        padded = self._padded(tokens)
        ends = np.arange(start + self.order, len(padded) + 1)
        chains = np.empty((len(ends), self.order), np.int64)
        _chains(padded, ends, self.order, self._known.size + 1, self._base, self._keys, chains)
        # The longest known context says which the shorter ones are.
        _, first, inverse = np.unique(chains.max(axis=1, initial=0), return_index=True, return_inverse=True)
        ids = np.empty((len(first), k), np.int64)
        p = np.empty((len(first), k))
        _tops(chains[first], self._starts, self._tokens, self._share, self._rest, self._plain, self._likely, ids, p)
        named = np.where(ids > 0, self._known[np.maximum(ids, 1) - 1] if len(self._known) else NO_TOKEN, NO_TOKEN)
        found = Distributions.of(named, p)
        rows = inverse.reshape(-1)
        return Distributions(found.ids[rows], found.probabilities[rows], found.tail[rows])


def _discount(counts: np.ndarray) -> float:
    once, twice = int((counts == 1).sum()), int((counts == 2).sum())
    return float(np.clip(once / (once + 2 * twice) if once else 0.0, *_DISCOUNTS))


@numba.njit(nogil=True, cache=True)
def _context(stream: Any, end: Any, k: Any, width: Any, base: Any, keys: Any) -> Any:
    """Place of the context ``stream[end - k : end]``, or -1 if no text has it."""
    place = np.int64(0)
    for j in range(1, k + 1):
        token = stream[end - k + j - 1]
        if token < 0:
            return np.int64(-1)
        key = place * width + token
        low, high = base[j], base[j + 1]
        while low < high:
            middle = (low + high) >> 1
            if keys[middle] < key:
                low = middle + 1
            else:
                high = middle
        if low == base[j + 1] or keys[low] != key:
            return np.int64(-1)
        place = low - base[j]
    return base[k] + place


@numba.njit(nogil=True, cache=True)
def _chains(stream: Any, ends: Any, order: Any, width: Any, base: Any, keys: Any, out: Any) -> None:
    """Places of the contexts of 0 to ``order - 1`` tokens that end at `ends`; -1 for those that no text has."""
    for i in range(ends.size):
        for k in range(order):
            out[i, k] = _context(stream, ends[i], k, width, base, keys)


@numba.njit(nogil=True, cache=True)
def _probabilities(stream: Any, order: Any, width: Any, base: Any, keys: Any, starts: Any, tokens: Any, share: Any,
                   rest: Any, plain: Any, floor: Any, out: Any) -> None:  # fmt: skip
    for t in range(out.size):
        at = t + order - 1
        token = stream[at]
        p = floor if token < 0 else plain[token]
        for k in range(1, order):
            place = _context(stream, at, k, width, base, keys)
            if place < 0:
                continue
            p *= rest[place]
            low, end = starts[place], starts[place + 1]
            high = end
            while low < high:
                middle = (low + high) >> 1
                if tokens[middle] < token:
                    low = middle + 1
                else:
                    high = middle
            if low < end and tokens[low] == token:
                p += share[low]
        out[t] = p


@numba.njit(nogil=True, cache=True)
def _keep(ids: Any, p: Any, token: Any, value: Any) -> None:
    """Put a token into a row sorted by falling probability, then by rising id; ids of 0 are empty."""
    k = ids.size
    if ids[k - 1] != 0 and (value < p[k - 1] or (value == p[k - 1] and token > ids[k - 1])):
        return
    i = k - 1
    while i > 0 and (ids[i - 1] == 0 or value > p[i - 1] or (value == p[i - 1] and token < ids[i - 1])):
        ids[i], p[i] = ids[i - 1], p[i - 1]
        i -= 1
    ids[i], p[i] = token, value


@numba.njit(nogil=True, cache=True)
def _tops(chains: Any, starts: Any, tokens: Any, share: Any, rest: Any, plain: Any, likely: Any, ids: Any,
          p: Any) -> None:  # fmt: skip
    """The most probable tokens, by dense number, for each chain of contexts."""
    mass = np.zeros(plain.size)
    touched = np.empty(plain.size, np.int64)
    for i in range(len(chains)):
        ids[i], p[i] = 0, 0.0
        count, weight = 0, 1.0
        for k in range(chains.shape[1] - 1, 0, -1):
            place = chains[i, k]
            if place < 0:
                continue
            for at in range(starts[place], starts[place + 1]):
                token = tokens[at]
                if mass[token] == 0.0:
                    touched[count] = token
                    count += 1
                mass[token] += weight * share[at]
            weight *= rest[place]
        for j in range(count):
            token = touched[j]
            _keep(ids[i], p[i], token, mass[token] + weight * plain[token])
        taken = 0
        for token in likely:
            if taken == ids.shape[1]:
                break
            if mass[token] == 0.0:
                _keep(ids[i], p[i], token, weight * plain[token])
                taken += 1
        for j in range(count):
            mass[touched[j]] = 0.0
