"""Which nodes of the library are worth their bytes: the information that sessions share through them.

The paper on probabilistic language tries (arXiv 2604.15356) takes d_T(s, s') = -log2 P_M(s ∧ s') for a distance, with
s ∧ s' the longest common prefix. It is none (`pltpack.trie.distance` says why), but it is the right measure of how much
two sessions share: the bits that the common prefix carries. By the chain rule it is a sum over the nodes on the way, of
the information of each one's own tokens given those before. So each node has a score of its own, and a long run of what
anyone would have guessed counts less than a rare passage that comes back.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np

from pltpack.trie.radix import token_array


def shared_information(first: Any, second: Any, information: Any) -> float:
    """-log2 P(s ∧ s'): the bits that the common prefix of two texts carries.

    Parameters
    ----------
    first, second : array_like
        Token ids ``[T]`` and ``[T']``.
    information : array_like
        Bits of each token of `first` given those before it, ``[T]``
        (`pltpack.trie.probabilities.Probabilities.information`).

    Returns
    -------
    float
        0 where nothing is shared; for ``first == second`` all of its information, which is why this is no distance.
    """
    one, other, bits = token_array(first), token_array(second), np.asarray(information, dtype=np.float64)
    if len(bits) != len(one):
        raise ValueError(f"information of {len(bits)} tokens for a text of {len(one)}")
    shorter = min(len(one), len(other))
    differ = np.flatnonzero(one[:shorter] != other[:shorter])
    return float(bits[: differ[0] if len(differ) else shorter].sum())


def admission_scores(information: Any, visits: Any, nbytes: Any) -> np.ndarray:
    """Score of each node: bits shared, times the visits that share them, per byte that the node takes.

    Parameters
    ----------
    information : array_like
        Bits that a node's own tokens carry given those before them, ``[N]``, 0 or more.
    visits : array_like
        Sessions that use the node, ``[N]``.
    nbytes : array_like
        What the node takes in the library, ``[N]``; 0 counts as 1.

    Returns
    -------
    ndarray
        Float64 ``[N]``, bits per byte; the higher, the sooner a node is admitted and the later evicted.

    Raises
    ------
    ValueError
        If the lengths differ, or a number is negative or not finite.
    """
    bits, count, size = (np.asarray(x, dtype=np.float64).reshape(-1) for x in (information, visits, nbytes))
    if not len(bits) == len(count) == len(size):
        raise ValueError(f"{len(bits)} scores of information, {len(count)} of visits, {len(size)} sizes")
    if not all((np.isfinite(x) & (x >= 0)).all() for x in (bits, count, size)):
        raise ValueError("information, visits or bytes are negative or not finite")
    return np.asarray(bits * count / np.maximum(size, 1.0))


def admitted(scores: Any, nbytes: Any, budget: int, parents: Sequence[int] | None = None) -> np.ndarray:
    """Nodes that fit a byte budget, taken by falling score; of equal scores the smaller node, then the earlier one.

    Parameters
    ----------
    scores : array_like
        As of `admission_scores`, ``[N]``.
    nbytes : array_like
        ``[N]``.
    budget : int
        Bytes that all admitted nodes take at most.
    parents : sequence of int, optional
        Per node, the node that it needs, or -1: a node is taken only after that one, since a prefix is of no use
        without its beginning. All are free if not given.

    Returns
    -------
    ndarray
        Bool ``[N]``; false for the nodes to evict.
    """
    worth, size = np.asarray(scores, dtype=np.float64), np.asarray(nbytes, dtype=np.int64)
    needs = np.full(len(worth), -1) if parents is None else np.asarray(parents, dtype=np.int64)
    if not len(worth) == len(size) == len(needs):
        raise ValueError(f"{len(worth)} scores, {len(size)} sizes, {len(needs)} parents")
    if ((needs < -1) | (needs >= len(worth))).any() or (size < 0).any():
        raise ValueError("a parent is no node, or a size is negative")
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(needs.tolist()):
        children.setdefault(parent, []).append(node)
    out, left = np.zeros(len(worth), bool), int(budget)
    ready = [(-worth[node], int(size[node]), node) for node in children.get(-1, ())]
    heapq.heapify(ready)
    while ready:
        _, taken, node = heapq.heappop(ready)
        if taken > left:
            continue
        out[node], left = True, left - taken
        for child in children.get(node, ()):
            heapq.heappush(ready, (-worth[child], int(size[child]), child))
    return out
