"""The PLT distance: how differently two windows of text predict what comes next.

Definition. Let P and Q be the next-token distributions at two aligned positions, each cut to its k most probable tokens
and one bucket for all others, so that both live on one alphabet: the vocabulary and the bucket. With M = (P + Q) / 2,

    JSD(P, Q) = (KL(P || M) + KL(Q || M)) / 2    in bits, from 0 to 1

summed over the union of the two supports and the bucket; the PLT distance of two windows is its mean over the
positions. A token that only one side names counts as 0 on the other, whose bucket holds it: each side is then one fixed
distribution whatever it is compared with, and the square root of the distance is a metric (Endres & Schindelin, IEEE
Trans. Information Theory 49, 2003), being Euclidean over the positions in the metric √JSD.

Source: probabilistic language tries, arXiv 2604.15356, which clusters sequences by d_T(s, s') = -log2 P_M(s ∧ s'), with
s ∧ s' the longest common prefix. We depart from it: d_T is not a metric. It is not 0 at s = s' (there it is the
information of all of s), and it grows the more two sequences share. It measures the information that they share, and as
such it scores prefixes (`pltpack.trie.score`); how near two windows are is said by the divergence of their predictions.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from pltpack.trie.distributions import Distributions

#: Windows this near may predict one another, by default.
TAU = 0.2


def plt_distance(first: Distributions, second: Distributions) -> float:
    """PLT distance of two windows of equal length, in bits, from 0 to 1.

    Raises
    ------
    ValueError
        If the windows are empty or their lengths differ.
    """
    if len(first) != len(second) or not len(first):
        raise ValueError(f"windows of {len(first)} and {len(second)} positions")
    return float(plt_distances(first, second, [(0, 0)], len(first))[0])


def plt_distances(first: Distributions, second: Distributions, pairs: Any, window: int) -> np.ndarray:
    """PLT distances of many pairs of windows.

    Parameters
    ----------
    first, second : Distributions
        Positions that the windows are cut from; may be the same.
    pairs : array_like
        ``[P, 2]``: first positions of a window in `first` and of one in `second`.
    window : int
        Positions per window.

    Returns
    -------
    ndarray
        Float64 ``[P]``, bits from 0 to 1.

    Raises
    ------
    ValueError
        If a window leaves its positions.
    """
    starts = np.asarray(pairs, dtype=np.int64).reshape(-1, 2)
    limits = np.array([len(first), len(second)]) - window
    if window < 1 or (starts < 0).any() or (starts > limits).any():
        raise ValueError(f"windows of {window} positions do not lie within {len(first)} and {len(second)}")
    out = np.empty(len(starts))
    _distances(first.ids, first.probabilities, first.tail, second.ids, second.probabilities, second.tail, starts,
               window, out)  # fmt: skip
    return out


def divergences(first: Distributions, second: Distributions) -> np.ndarray:
    """Jensen-Shannon divergence at each of N aligned positions, bits, float64 ``[N]``."""
    if len(first) != len(second):
        raise ValueError(f"{len(first)} and {len(second)} positions")
    at = np.arange(len(first))
    return plt_distances(first, second, np.stack([at, at], axis=1), 1)


@numba.njit(nogil=True, cache=True)
def _part(p: Any, q: Any) -> Any:
    """What one token adds to twice the divergence; the same both ways round."""
    if p == q:
        return 0.0
    half = 0.5 * (p + q)
    if half == 0:
        return 0.0
    a = p * np.log2(p / half) if p > 0 else 0.0
    b = q * np.log2(q / half) if q > 0 else 0.0
    return a + b


@numba.njit(nogil=True, cache=True)
def _distances(ids_a: Any, p_a: Any, tail_a: Any, ids_b: Any, p_b: Any, tail_b: Any, starts: Any, window: Any,
               out: Any) -> None:  # fmt: skip
    k, m = ids_a.shape[1], ids_b.shape[1]
    for pair in range(len(starts)):
        total = 0.0
        for t in range(window):
            a, b = starts[pair, 0] + t, starts[pair, 1] + t
            twice = _part(tail_a[a], tail_b[b])
            i = j = 0
            # Rows are ascending; what stands for no token comes first and has no probability.
            while i < k or j < m:
                if j == m or (i < k and ids_a[a, i] < ids_b[b, j]):
                    twice += _part(p_a[a, i], 0.0)
                    i += 1
                elif i == k or ids_b[b, j] < ids_a[a, i]:
                    twice += _part(0.0, p_b[b, j])
                    j += 1
                else:
                    twice += _part(p_a[a, i], p_b[b, j])
                    i += 1
                    j += 1
            total += min(max(0.5 * twice, 0.0), 1.0)
        out[pair] = total / window
