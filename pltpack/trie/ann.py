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

from collections.abc import Hashable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numba
import numpy as np

from pltpack.trie.distance import TAU, plt_distances
from pltpack.trie.distributions import Distributions
from pltpack.trie.matching import WINDOW, WINDOWS, Match

TAUS = (0.1, 0.3)
DIMENSIONS = 256
#: A signature's length; its square bounds every partial sum of an inner product, by Cauchy's inequality.
SCALE = 2048
#: Up to so many windows of one group are searched exhaustively, 8 million tokens of them: below about twice as many the
#: graph takes more time to build and to search, and FAISS should decide nothing that can be had exactly.
FEW = 1 << 17
#: Three standard deviations of an inner product of projected unit vectors are 0.19; a window missed costs little.
_SLACK = 0.15
#: Decimals of a distance: logarithms may differ in the last bit from machine to machine.
_DIGITS = 6
#: Vectors to a side of a matrix of inner products.
_SQUARE = 2048

Search = Literal["auto", "exact", "hnsw"]


class _Windows(NamedTuple):
    """Windows of all texts in order: `text`, `start` int64 ``[n]``; `bounds` int64 ``[texts + 1]`` parts the texts."""

    text: np.ndarray
    start: np.ndarray
    bounds: np.ndarray


@numba.njit(nogil=True, cache=True)
def _project(ids: Any, probabilities: Any, tails: Any, starts: Any, width: Any, scale: Any, out: Any) -> None:
    most, size = ids.shape[1], out.shape[1]
    sums = np.empty(size, dtype=np.float64)
    for n in range(starts.size):
        sums[:] = 0.0
        for w in range(width):
            row = starts[n] + w
            for k in range(most + 1):
                share = tails[row] if k == most else probabilities[row, k]
                if share <= 0.0:
                    continue
                # No token has the tail's id.
                token = np.uint64(0xFFFFFFFF) if k == most else np.uint64(ids[row, k]) & np.uint64(0x7FFFFFFF)
                key = ((np.uint64(w) << np.uint64(32)) | token) * np.uint64(0x9E3779B97F4A7C15)
                key = (key ^ (key >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
                sign = 1.0 if key >> np.uint64(63) else -1.0
                sums[np.int64((key >> np.uint64(24)) % np.uint64(size))] += sign * np.sqrt(share)
        norm = 0.0
        for i in range(size):
            norm += sums[i] * sums[i]
        for i in range(size):
            out[n, i] = np.rint(sums[i] * (scale / np.sqrt(norm))) if norm > 0.0 else 0.0


def signatures(predictions: Distributions, starts: np.ndarray, window: int, dimensions: int = DIMENSIONS) -> np.ndarray:
    """Project windows onto vectors of whole numbers of length `SCALE`.

    ``a @ b / SCALE**2`` estimates the mean Bhattacharyya coefficient over the positions of two windows, with a standard
    deviation near ``dimensions ** -0.5``.

    Parameters
    ----------
    predictions : Distributions
        N positions.
    starts : int64 ``[n]``
        First positions of the windows.
    window : int
        Positions per window.
    dimensions : int

    Returns
    -------
    float32 ``[n, dimensions]``

    Raises
    ------
    ValueError
        If a window leaves its positions.
    """
    starts = np.asarray(starts, dtype=np.int64)
    if window < 1 or (starts < 0).any() or (starts > len(predictions) - window).any():
        raise ValueError(f"windows of {window} positions do not lie within {len(predictions)}")
    out = np.empty((len(starts), dimensions), dtype=np.float32)
    p = predictions
    _project(p.ids, p.probabilities, p.tail, starts, window, float(SCALE), out)
    return out


class _Index(Protocol):
    def add(self, vectors: np.ndarray) -> None: ...

    def search(self, queries: np.ndarray, most: int, floor: float) -> np.ndarray:
        """Vectors by number, int64 ``[q, most]``: the best from `floor` on, of equal ones the first; -1 for none."""
        ...


def _best(rows: np.ndarray, places: np.ndarray, scores: np.ndarray, most: int) -> tuple[np.ndarray, ...]:
    """(row, place, score, rank) of the `most` best of each row."""
    order = np.lexsort((places, -scores, rows))
    rows, places, scores = rows[order], places[order], scores[order]
    rank = np.arange(len(rows)) - np.searchsorted(rows, rows)
    kept = rank < most
    return rows[kept], places[kept], scores[kept], rank[kept]


def _table(rows: np.ndarray, places: np.ndarray, scores: np.ndarray, queries: int, most: int) -> np.ndarray:
    rows, places, _, rank = _best(rows, places, scores, most)
    out = np.full((queries, most), -1, dtype=np.int64)
    out[rows, rank] = places
    return out


class _Exhaustive:
    """Every inner product."""

    def __init__(self, capacity: int) -> None:
        self._vectors = np.empty((capacity, DIMENSIONS), dtype=np.float32)
        self._count = 0

    def add(self, vectors: np.ndarray) -> None:
        self._vectors[self._count : self._count + len(vectors)] = vectors
        self._count += len(vectors)

    def search(self, queries: np.ndarray, most: int, floor: float, before: bool = False) -> np.ndarray:
        """As in `_Index`; with `before`, query i finds only what was added before vector i."""
        empty = np.empty(0, dtype=np.int64)
        found = [(empty, empty, np.empty(0, dtype=np.float32))]
        # Squares of products, so that memory is bounded; the best of each compete in the end.
        for first in range(0, len(queries), _SQUARE):
            for low in range(0, self._count, _SQUARE):
                scores = queries[first : first + _SQUARE] @ self._vectors[low : min(low + _SQUARE, self._count)].T
                rows, places = np.nonzero(scores >= floor)
                if before:
                    earlier = low + places < first + rows
                    rows, places = rows[earlier], places[earlier]
                rows, places, near, _ = _best(rows, places, scores[rows, places], most)
                found.append((first + rows, low + places, near))
        rows, places, near = (np.concatenate(column) for column in zip(*found, strict=True))
        return _table(rows, places, near, len(queries), most)


class _Graph:
    """FAISS's HNSW."""

    def __init__(self, faiss: Any) -> None:
        self._faiss = faiss
        self._index = faiss.IndexHNSWFlat(DIMENSIONS, 32, faiss.METRIC_INNER_PRODUCT)
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

    def search(self, queries: np.ndarray, most: int, floor: float) -> np.ndarray:
        scores, places = self._index.search(np.ascontiguousarray(queries), most)
        rows, columns = np.nonzero((places >= 0) & (scores >= floor))
        return _table(rows, places[rows, columns], scores[rows, columns], len(queries), most)


def _index(search: Search, capacity: int) -> _Index:
    if search == "exact" or (search == "auto" and capacity <= FEW):
        return _Exhaustive(capacity)
    try:
        import faiss
    except ModuleNotFoundError:
        if search == "hnsw":
            raise
        return _Exhaustive(capacity)
    return _Graph(faiss)


def find_similar(predictions: Sequence[Distributions], starts: Sequence[Any], groups: Sequence[Hashable],
                 targets: Sequence[int], *, window: int = WINDOW, tau: float = TAU, neighbours: int = 8,
                 search: Search = "auto") -> list[list[Match]]:  # fmt: skip
    """Find the windows that an earlier window predicts, though their tokens differ.

    A window is a source only if nothing predicts it, so predictions do not chain; windows that `find_matches` has
    covered are left out by the caller (`open_windows`). Of the candidates within `tau` the nearest is taken, of equal
    ones the first. Neighbouring windows with neighbouring sources make one match.

    Memory is 1 KiB per window (HNSW: 1.3 KiB). Exhaustive search takes 8 ns of one core per pair of windows; HNSW 1 ms
    per window, whatever their number.

    Parameters
    ----------
    predictions : sequence of Distributions
        Per text, one row per token: what is expected after it.
    starts : sequence of array_like
        Per text, first tokens of its windows, ascending, without overlaps; may be empty.
    groups : sequence of hashable
        One per text: only texts of equal groups match.
    targets : sequence of int
        Indices of the texts to be predicted; windows of the others are sources only.
    window : int
        Tokens per window, 32 to 128.
    tau : float
        Greatest PLT distance of a match, 0.1 to 0.3.
    neighbours : int
        Candidates per window from earlier texts, and as many from its own.
    search : {"auto", "exact", "hnsw"}
        ``auto`` searches up to `FEW` windows of a group exhaustively, more by HNSW if FAISS is installed.

    Returns
    -------
    list of list of Match
        One list per target, in order, without overlaps; lengths are multiples of the window.

    Raises
    ------
    ValueError
        If windows are not in order or leave their text, or an argument is out of its range.
    """
    windows = _windows(predictions, starts, groups, window)
    if not TAUS[0] <= tau <= TAUS[1]:
        raise ValueError(f"tau {tau} is not in {TAUS[0]} to {TAUS[1]}")
    if neighbours < 1:
        raise ValueError(f"{neighbours} neighbours")
    capacity: dict[Hashable, int] = {}
    for group, count in zip(groups, np.diff(windows.bounds).tolist(), strict=True):
        capacity[group] = capacity.get(group, 0) + count
    indices = {group: _index(search, most) for group, most in capacity.items()}
    # Windows in each index, in the order in which they were added.
    members = {group: np.empty(most, dtype=np.int64) for group, most in capacity.items()}
    counts = dict.fromkeys(capacity, 0)
    floor = (1 - tau - _SLACK) * SCALE**2
    wanted, found = set(targets), {}
    for i, group in enumerate(groups):
        own = np.arange(windows.bounds[i], windows.bounds[i + 1])
        vectors = signatures(predictions[i], windows.start[own], window)
        if i in wanted and len(own):
            places = _candidates(vectors, own, indices[group], members[group], neighbours, floor)
            source = _choose(windows, own, places, _distances(predictions, windows, own, places, window), tau)
            found[i] = _merged(windows, own, source, window)
            own, vectors = own[source < 0], vectors[source < 0]
        indices[group].add(vectors)
        members[group][counts[group] : counts[group] + len(own)] = own
        counts[group] += len(own)
    return [found.get(i, []) for i in targets]


def open_windows(tokens: int, own_from: int, matches: Sequence[Match], window: int = WINDOW) -> np.ndarray:
    """Starts of windows that no match touches, int64: end to end from `own_from` and from each match's end on."""
    starts = [np.empty(0, dtype=np.int64)]
    first = own_from
    for start, stop in [(m.start, m.start + m.length) for m in matches] + [(tokens, tokens)]:
        starts.append(np.arange(first, start - window + 1, window, dtype=np.int64))
        first = stop
    return np.concatenate(starts)


def _windows(predictions: Sequence[Distributions], starts: Sequence[Any], groups: Sequence[Hashable],
             window: int) -> _Windows:  # fmt: skip
    if not len(predictions) == len(starts) == len(groups):
        raise ValueError(f"{len(predictions)} texts, {len(starts)} lists of windows, {len(groups)} groups")
    if not WINDOWS[0] <= window <= WINDOWS[1]:
        raise ValueError(f"window of {window} tokens is not in {WINDOWS[0]} to {WINDOWS[1]}")
    arrays = [np.asarray(start, dtype=np.int64).reshape(-1) for start in starts]
    if any((np.diff(array) < window).any() for array in arrays):
        raise ValueError("windows are not in order, or overlap")
    sizes = np.array([len(array) for array in arrays], dtype=np.int64)
    return _Windows(np.repeat(np.arange(len(arrays)), sizes), np.concatenate([*arrays, np.empty(0, dtype=np.int64)]),
                    np.concatenate([[0], np.cumsum(sizes)]))  # fmt: skip


def _candidates(vectors: np.ndarray, own: np.ndarray, index: _Index, members: np.ndarray, neighbours: int,
                floor: float) -> np.ndarray:  # fmt: skip
    """Windows that may predict each of a text's windows, int64 ``[len(own), 2 * neighbours]``, -1 for none."""
    earlier = index.search(vectors, neighbours, floor)
    mine = _Exhaustive(len(own))
    mine.add(vectors)
    same = mine.search(vectors, neighbours, floor, before=True)
    return np.hstack([np.where(earlier < 0, -1, members[earlier]), np.where(same < 0, -1, own[same])])


def _distances(predictions: Sequence[Distributions], windows: _Windows, own: np.ndarray, places: np.ndarray,
               window: int) -> np.ndarray:  # fmt: skip
    """PLT distances of a text's windows to their candidates, float64 like `places`, infinite for none."""
    far = np.full(places.shape, np.inf)
    rows, columns = np.nonzero(places >= 0)
    others = places[rows, columns]
    pairs = np.stack([windows.start[own[rows]], windows.start[others]], axis=1)
    text = windows.text[others]
    for other in np.unique(text).tolist():
        at = text == other
        mine = predictions[int(windows.text[own[0]])]
        far[rows[at], columns[at]] = np.round(plt_distances(mine, predictions[other], pairs[at], window), _DIGITS)
    return far


def _choose(windows: _Windows, own: np.ndarray, places: np.ndarray, far: np.ndarray, tau: float) -> np.ndarray:
    """The nearest free candidate of each window within `tau`, of equal ones the first; -1 for none."""
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


def _merged(windows: _Windows, own: np.ndarray, source: np.ndarray, window: int) -> list[Match]:
    matches: list[Match] = []
    for mine, other in zip(own.tolist(), source.tolist(), strict=True):
        if other < 0:
            continue
        new = Match(int(windows.text[mine]), int(windows.start[mine]), window, int(windows.text[other]),
                    int(windows.start[other]))  # fmt: skip
        if matches:
            last = matches[-1]
            if (last.start + last.length, last.source, last.source_start + last.length) == (new.start, *new[3:]):
                matches[-1] = last._replace(length=last.length + window)
                continue
        matches.append(new)
    return matches
