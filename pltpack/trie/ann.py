"""Windows whose tokens differ but whose predictions agree: signatures, nearest neighbours, the PLT distance as judge.

The Bhattacharyya coefficient of two distributions is the inner product of their square roots, and one less it is the
squared Hellinger distance H², which bounds the Jensen–Shannon divergence in bits, term by term, from both sides:
H² ≤ JSD ≤ H² / ln 2. So the square roots of all predicted probabilities of a window, projected by signed feature
hashing (K. Weinberger et al., "Feature hashing for large scale multitask learning", ICML 2009), make a vector whose
inner product with another window's estimates one less their distance. Candidates by inner product are then measured.

Signatures consist of whole numbers small enough that inner products are exact in binary32 in any order of summation:
candidates do not depend on the machine or the BLAS. Few windows are searched exhaustively; many by FAISS (extra
``ann``), in a graph (HNSW) built by one thread from fixed seeds; exhaustively too, if FAISS is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numba
import numpy as np

from pltpack.trie.matching import Match

TAU = 0.2
TAUS = (0.1, 0.3)
DIMENSIONS = 256
#: A signature's length; its square bounds every partial sum of an inner product, by Cauchy's inequality.
SCALE = 2048
#: Exhaustive search below so many windows of one group, so that FAISS decides nothing in small archives.
FEW = 4096
#: Three standard deviations of an inner product of projected unit vectors are 0.19; a window missed costs little.
_SLACK = 0.15
_PAIRS = 1024

#: PLT distances, float ``[n]``, of windows a and b: (ids a, probabilities a, ids b, probabilities b), ``[n, W, k]``.
Distance = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], np.ndarray]
Search = Literal["auto", "exact", "hnsw"]


class Windows(NamedTuple):
    """Windows of W tokens with the distributions predicted after each token.

    Attributes
    ----------
    text : int64 ``[n]``
        Index of each window's text, ascending.
    start : int64 ``[n]``
        Its first token, ascending within a text, without overlaps.
    ids : int32 ``[n, W, k]``
        The likeliest next tokens at each position, likeliest first; negative where there are fewer.
    probabilities : float32 ``[n, W, k]``
        Theirs; 0 where there are fewer. What is missing to 1 is the tail's.
    """

    text: np.ndarray
    start: np.ndarray
    ids: np.ndarray
    probabilities: np.ndarray


@numba.njit(nogil=True, cache=True)
def _project(ids: Any, probabilities: Any, scale: Any, out: Any) -> None:
    windows, width, most = ids.shape
    size = out.shape[1]
    sums = np.empty(size, dtype=np.float64)
    for n in range(windows):
        sums[:] = 0.0
        for w in range(width):
            tail = 1.0
            for k in range(most + 1):
                share = tail if k == most else np.float64(probabilities[n, w, k])
                if share <= 0.0:
                    continue
                tail -= share
                # No token has the tail's id.
                token = np.uint64(0xFFFFFFFF) if k == most else np.uint64(ids[n, w, k]) & np.uint64(0x7FFFFFFF)
                key = (np.uint64(w) << np.uint64(32) | token) * np.uint64(0x9E3779B97F4A7C15)
                key = (key ^ (key >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
                sign = 1.0 if key >> np.uint64(63) else -1.0
                sums[np.int64((key >> np.uint64(24)) % np.uint64(size))] += sign * np.sqrt(share)
        norm = 0.0
        for i in range(size):
            norm += sums[i] * sums[i]
        for i in range(size):
            out[n, i] = np.rint(sums[i] * (scale / np.sqrt(norm))) if norm > 0.0 else 0.0


def signatures(ids: np.ndarray, probabilities: np.ndarray, dimensions: int = DIMENSIONS) -> np.ndarray:
    """Project windows onto vectors of whole numbers of length `SCALE`.

    ``a @ b / SCALE**2`` estimates the mean Bhattacharyya coefficient over the positions of two windows, with a standard
    deviation near ``dimensions ** -0.5``.

    Parameters
    ----------
    ids, probabilities : int32, float32 ``[n, W, k]``
        As in `Windows`.
    dimensions : int

    Returns
    -------
    float32 ``[n, dimensions]``

    Raises
    ------
    ValueError
        If the shapes are not those, or a probability is not finite or outside 0 to 1.
    """
    if ids.ndim != 3 or ids.shape != probabilities.shape:
        raise ValueError(f"ids of shape {ids.shape} and probabilities of shape {probabilities.shape}")
    if not ((probabilities >= 0) & (probabilities <= 1.001)).all():
        raise ValueError("a probability is not between 0 and 1")
    out = np.empty((len(ids), dimensions), dtype=np.float32)
    _project(ids, probabilities, float(SCALE), out)
    return out


class _Index(Protocol):
    def add(self, vectors: np.ndarray) -> None: ...

    def search(self, queries: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
        """(scores, positions) ``[q, most]``, the best first, of equal ones the first added; position -1 for none."""
        ...


def _ranked(scores: np.ndarray, places: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    order = np.lexsort((places, -scores), axis=-1)[:, :most]
    return np.take_along_axis(scores, order, axis=1), np.take_along_axis(places, order, axis=1)


class _Exhaustive:
    """Every inner product."""

    def __init__(self, capacity: int, dimensions: int) -> None:
        self._vectors = np.empty((capacity, dimensions), dtype=np.float32)
        self._count = 0

    def add(self, vectors: np.ndarray) -> None:
        self._vectors[self._count : self._count + len(vectors)] = vectors
        self._count += len(vectors)

    def search(self, queries: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
        scores = np.full((len(queries), most), -np.inf, dtype=np.float32)
        places = np.full((len(queries), most), -1, dtype=np.int64)
        # Some stored vectors at a time bound the memory; the best so far compete with the next ones.
        for first in range(0, self._count, FEW):
            part = queries @ self._vectors[first : min(first + FEW, self._count)].T
            here = np.broadcast_to(np.arange(first, first + part.shape[1]), part.shape)
            scores, places = _ranked(np.hstack([scores, part]), np.hstack([places, here]), most)
        return scores, places


class _Graph:
    """FAISS's HNSW."""

    def __init__(self, faiss: Any, dimensions: int) -> None:
        self._faiss = faiss
        self._index = faiss.IndexHNSWFlat(dimensions, 32, faiss.METRIC_INNER_PRODUCT)
        self._index.hnsw.efConstruction = 128
        self._index.hnsw.efSearch = 128

    def add(self, vectors: np.ndarray) -> None:
        if len(vectors) == 0:
            return
        # Several threads would link the graph in the order in which they happen to run.
        threads = self._faiss.omp_get_max_threads()
        self._faiss.omp_set_num_threads(1)
        try:
            self._index.add(np.ascontiguousarray(vectors))
        finally:
            self._faiss.omp_set_num_threads(threads)

    def search(self, queries: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
        scores, places = self._index.search(np.ascontiguousarray(queries), most)
        return _ranked(np.where(places < 0, -np.inf, scores).astype(np.float32), places, most)


def _index(search: Search, capacity: int) -> _Index:
    if search == "exact" or (search == "auto" and capacity <= FEW):
        return _Exhaustive(capacity, DIMENSIONS)
    try:
        import faiss
    except ModuleNotFoundError:
        if search == "hnsw":
            raise
        return _Exhaustive(capacity, DIMENSIONS)
    return _Graph(faiss, DIMENSIONS)


def find_similar(windows: Windows, groups: Sequence[Hashable], targets: Sequence[int], distance: Distance, *,
                 tau: float = TAU, neighbours: int = 8, search: Search = "auto") -> list[list[Match]]:  # fmt: skip
    """Find the windows that an earlier window predicts, though their tokens differ.

    A window is a source only if nothing predicts it, so predictions do not chain; windows that `find_matches` has
    covered are left out by the caller. Neighbouring windows with neighbouring sources make one match.

    Memory is 1 KiB per window (HNSW: 1.3 KiB); time is linear up to `FEW` windows and with FAISS nearly so.

    Parameters
    ----------
    windows : Windows
    groups : sequence of hashable
        One per text: only texts of equal groups match.
    targets : sequence of int
        Ascending indices of the texts to be predicted; windows of the others are sources only.
    distance : callable
        The PLT distance of pairs of windows, 0 to 1.
    tau : float
        Greatest distance of a match, 0.1 to 0.3.
    neighbours : int
        Candidates per window from earlier texts, and as many from its own.
    search : {"auto", "exact", "hnsw"}
        ``auto`` searches up to `FEW` windows of a group exhaustively, more by HNSW if FAISS is installed.

    Returns
    -------
    list of list of Match
        One list per target, in order, without overlaps; lengths are multiples of W.

    Raises
    ------
    ValueError
        If the windows are not in order, a shape is wrong, or `tau` or `neighbours` is out of range.
    """
    _check(windows, groups, tau, neighbours)
    vectors = signatures(windows.ids, windows.probabilities)
    bounds = np.searchsorted(windows.text, np.arange(len(groups) + 1))
    capacity: dict[Hashable, int] = {}
    for i, group in enumerate(groups):
        capacity[group] = capacity.get(group, 0) + int(bounds[i + 1] - bounds[i])
    indices = {group: _index(search, most) for group, most in capacity.items()}
    # Windows in each index, in the order in which they were added.
    members: dict[Hashable, list[np.ndarray]] = {group: [np.empty(0, dtype=np.int64)] for group in indices}
    floor = np.float32((1 - tau - _SLACK) * SCALE**2)
    wanted, found = set(targets), {}
    for i, group in enumerate(groups):
        own = np.arange(bounds[i], bounds[i + 1])
        if i in wanted and len(own):
            places = _candidates(vectors, own, indices[group], np.concatenate(members[group]), neighbours, floor)
            source = _choose(windows, own, places, distance, tau)
            found[i] = _merged(windows, own, source)
            own = own[source < 0]
        indices[group].add(vectors[own])
        members[group].append(own)
    return [found.get(i, []) for i in targets]


def _check(windows: Windows, groups: Sequence[Hashable], tau: float, neighbours: int) -> None:
    text, start, ids, _ = windows
    if not text.shape == start.shape == ids.shape[:1]:
        raise ValueError(f"{text.shape} texts, {start.shape} starts and ids of shape {ids.shape}")
    if len(text) and not 0 <= int(text.min()) <= int(text.max()) < len(groups):
        raise ValueError(f"a window of a text that is not one of {len(groups)}")
    new = np.diff(text) > 0
    if (np.diff(text) < 0).any() or (np.diff(start)[~new] < ids.shape[1]).any():
        raise ValueError("windows are not in order, or overlap")
    if not TAUS[0] <= tau <= TAUS[1]:
        raise ValueError(f"tau {tau} is not in {TAUS[0]} to {TAUS[1]}")
    if neighbours < 1:
        raise ValueError(f"{neighbours} neighbours")


def _candidates(vectors: np.ndarray, own: np.ndarray, index: _Index, members: np.ndarray, neighbours: int,
                floor: np.float32) -> np.ndarray:  # fmt: skip
    """Windows that may predict each of a text's windows, int64 ``[len(own), 2 * neighbours]``, -1 for none."""
    out = np.full((len(own), 2 * neighbours), -1, dtype=np.int64)
    scores, places = index.search(vectors[own], neighbours)
    near = (places >= 0) & (scores >= floor)
    out[:, :neighbours][near] = members[places[near]]
    scores = vectors[own] @ vectors[own].T
    scores[np.triu_indices(len(own))] = -np.inf
    places = np.broadcast_to(np.arange(len(own)), scores.shape)
    scores, places = _ranked(scores, places, neighbours)
    near = scores >= floor
    out[:, neighbours : neighbours + scores.shape[1]][near] = own[places[near]]
    return out


def _choose(windows: Windows, own: np.ndarray, places: np.ndarray, distance: Distance, tau: float) -> np.ndarray:
    """The nearest free candidate of each window within `tau`, of equal ones the first; -1 for none."""
    rows, columns = np.nonzero(places >= 0)
    far = np.full(places.shape, np.inf)
    for first in range(0, len(rows), _PAIRS):
        at = slice(first, first + _PAIRS)
        a, b = own[rows[at]], places[rows[at], columns[at]]
        far[rows[at], columns[at]] = distance(
            windows.ids[a], windows.probabilities[a], windows.ids[b], windows.probabilities[b]
        )
    source = np.full(len(own), -1, dtype=np.int64)
    for row in np.flatnonzero((far <= tau).any(axis=1)):
        choices = [
            (far[row, c], places[row, c]) for c in np.flatnonzero(far[row] <= tau)
            # A window of the same text that has a source itself is none.
            if places[row, c] < own[0] or source[places[row, c] - own[0]] < 0
        ]  # fmt: skip
        if choices:
            source[row] = min(choices)[1]
    return source


def _merged(windows: Windows, own: np.ndarray, source: np.ndarray) -> list[Match]:
    width = windows.ids.shape[1]
    matches: list[Match] = []
    for window, other in zip(own.tolist(), source.tolist(), strict=True):
        if other < 0:
            continue
        new = Match(int(windows.text[window]), int(windows.start[window]), width, int(windows.text[other]),
                    int(windows.start[other]))  # fmt: skip
        if matches:
            last = matches[-1]
            if (last.start + last.length, last.source, last.source_start + last.length) == (new.start, *new[3:]):
                matches[-1] = last._replace(length=last.length + width)
                continue
        matches.append(new)
    return matches
