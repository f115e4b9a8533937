"""From windows to a profile: statistics, bases, scales, importance and tables, each in one pass over what it needs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from pltpack.codec import importance
from pltpack.codec.base import SINK_TOKENS
from pltpack.codec.dual import dual
from pltpack.errors import UnsupportedError
from pltpack.quality import bases, entropy_fit, importance_fit, sensitivity
from pltpack.quality.rows import Blocks, log_norms
from pltpack.quality.threads import mapped
from pltpack.quality.windows import Windows

#: Most rows of a layer group: the covariance of more would need over a gigabyte.
MAX_GROUP_ROWS = 16384
#: Windows from which scales and tables are counted, every how many of their tokens, and of all for the covariance.
TABLE_WINDOWS, TABLE_STEP, COVARIANCE_STEP = 10, 3, 3
# Tokens, at least, whose products are made at once.
_PIECE = 1536

Stage = Callable[[str, int, int], None]
Item = TypeVar("Item")


@dataclasses.dataclass(frozen=True)
class Fitted:
    """Arrays of a profile but for ``about`` and sinks, and what is reported of them."""

    arrays: dict[str, np.ndarray]
    floor: int
    layer_group: int
    importance: importance_fit.Fit | None


class _Group:
    """Rows ``first … last - 1``, their quantized shared basis, and what coefficients are made with."""

    def __init__(self, first: int, last: int, shared: np.ndarray, own_duals: list[np.ndarray]) -> None:
        self.first, self.last, self.shared, self.own_duals = first, last, shared, own_duals
        self.dual = dual(shared)


def group_size(blocks: Blocks, wanted: int | None) -> int:
    """Layers of a group: `wanted`, else as many as fit `MAX_GROUP_ROWS`.

    Raises
    ------
    UnsupportedError
        If a group would be too large.
    """
    size = min(wanted or len(blocks.layers), len(blocks.layers))
    largest = MAX_GROUP_ROWS if wanted is None else 2 * MAX_GROUP_ROWS
    while _largest_group(blocks, size) > largest:
        if wanted is not None:
            raise UnsupportedError(f"layer groups of {wanted} have more than {largest} rows")
        size -= 1
        if size == 0:
            raise UnsupportedError(f"a layer has more than {largest} rows")
    return size


def _largest_group(blocks: Blocks, size: int) -> int:
    return max(last - first for first, last in _spans(blocks, size))


def _spans(blocks: Blocks, size: int) -> list[tuple[int, int]]:
    """First and last row of each group."""
    count = len(blocks.layers)
    return [(blocks.layer_rows[i], blocks.layer_rows[min(i + size, count)]) for i in range(0, count, size)]


class Fitter:
    """Fits a profile to windows.

    Parameters
    ----------
    windows : Windows
    layer_group : int
    rank : int
        Shared components of a group at most.
    cut : int or None
        Tokens before which a window's gradients were taken; None if there are no gradients.
    stage : callable
        ``stage(name, done, total)``.
    """

    def __init__(self, windows: Windows, layer_group: int, rank: int, cut: int | None, stage: Stage) -> None:
        self.windows, self.blocks = windows, windows.blocks
        self.layer_group, self.rank, self.cut = layer_group, rank, cut
        self._stage = stage
        self.arrays: dict[str, np.ndarray] = {}

    def fit(self) -> Fitted:
        """All of it."""
        covariances = self._moments()
        energy = self._sensitivity(covariances)
        # Training takes one core, and some of the work on bases too: one fills the other's gaps.
        with ThreadPoolExecutor(1, thread_name_prefix="pltpack-importance") as aside:
            learning = self._learning(energy, aside)
            self._bases()
            learned = learning.result() if learning is not None else None
        self.weights = importance_fit.ordinary(len(self.blocks.widths) + 5) if learned is None else learned.weights
        self.arrays.update({f"importance.{name}": value for name, value in self.weights.items()})
        floor = self._scales_and_tables()
        return Fitted(self.arrays, floor, self.layer_group, learned)

    def _moments(self) -> list[np.ndarray]:
        """The mean, and every block's covariance."""
        blocks = self.blocks
        count = sum(max(self.windows.tokens(index) - SINK_TOKENS, 0) for index in range(self.windows.count))
        if count < 2:
            raise UnsupportedError("too few tokens to calibrate on")
        total, squares = np.zeros(blocks.rows), [np.zeros((w, w)) for w in blocks.widths]
        # About a point near the mean, squares in single precision lose nothing that matters.
        origin = self.windows.rows(0).mean(axis=0)

        def moments(index: int) -> tuple[np.ndarray, list[np.ndarray]]:
            rows = self.windows.rows(index)
            rows -= origin
            return rows.sum(axis=0, dtype=np.float64), blocks.squares(rows)

        for part, products in mapped(moments, self._staged("mean", range(self.windows.count))):
            total += part
            for square, product in zip(squares, products, strict=True):
                square += product
        shift = total / count
        self.arrays["mean"] = (origin + shift).astype(np.float32)
        shifts = [shift[a:b] for a, b in itertools.pairwise(blocks.starts)]
        return [square / count - np.outer(part, part) for square, part in zip(squares, shifts, strict=True)]

    def _sensitivity(self, covariances: list[np.ndarray]) -> list[np.ndarray] | None:
        """Roots of F, scaled so that whitened keys have variance 1; energy of the tokens with gradients."""
        energy = None
        if self.cut is None:
            roots = sensitivity.by_variance(covariances, self.blocks)
        else:
            self._stage("sensitivity", 0, 1)
            found = sensitivity.measure(self.windows.gradients, self.windows.count, self.blocks)
            roots, energy = found.roots, found.energy
        variance = sum(float(np.trace(root @ c @ root)) for root, c, key in self._keys(roots, covariances) if key)
        scale = np.sqrt(int(self.blocks.is_key.sum()) / variance) if variance > 0 else 1.0
        self.roots = [_as_half(root * scale) for root in roots]
        self.arrays["whiten"] = np.concatenate([root.astype("<f2").reshape(-1) for root in self.roots])
        return energy

    def _keys(
        self, roots: list[np.ndarray], covariances: list[np.ndarray]
    ) -> Iterator[tuple[np.ndarray, np.ndarray, bool]]:
        starts = self.blocks.starts[:-1]
        yield from zip(roots, covariances, self.blocks.is_key[starts].tolist(), strict=True)

    def _learning(
        self, energy: list[np.ndarray] | None, aside: ThreadPoolExecutor
    ) -> Future[importance_fit.Fit] | None:
        if energy is None:
            return None
        self._stage("importance", 0, 1)
        features = list(mapped(lambda index: self._features(index, self.cut), range(self.windows.count)))
        return aside.submit(importance_fit.fit, features, energy)

    def _features(self, index: int, cut: int | None) -> np.ndarray:
        """Features of a window's tokens after the sinks, up to `cut`, where the cache ends."""
        rows = self.windows.rows(index, first=0)[:cut]
        at = np.arange(len(rows))
        found = importance.features(log_norms(rows, self.blocks), importance.distances(len(rows), ()), at)
        return found[SINK_TOKENS:]

    def _bases(self) -> None:
        shared, scales, ranks = [], [], []
        local: list[np.ndarray] = []
        local_scales = []
        self.groups: list[_Group] = []
        spans = _spans(self.blocks, self.layer_group)
        for first, last in spans:
            rank = min(self.rank, last - first)
            values, vectors, layers = self._eigenvectors(first, last, rank)
            deviation = np.sqrt(np.maximum(values, 0))
            entries, scale = bases.quantize_shared(np.ascontiguousarray(vectors.T), deviation)
            self._stage("basis", 0, 1)
            own = []
            parts = [vectors[a - first : b - first] for a, b in self._layers(first, last)]
            residual = functools.partial(_own_basis, values=values)
            for quantized, own_scale, own_dual in mapped(residual, zip(layers, parts, strict=True)):
                local.append(quantized.reshape(-1))
                local_scales.append(own_scale)
                own.append(own_dual)
            shared.append(entries.reshape(-1))
            scales.append(scale)
            ranks.append(rank)
            self.groups.append(_Group(first, last, entries * scale[:, None], own))
        self.arrays["basis.rank"] = np.array(ranks, "<u4")
        self.arrays["basis"], self.arrays["basis.scale"] = np.concatenate(shared), np.concatenate(scales)
        self.arrays["local"], self.arrays["local.scale"] = np.concatenate(local), np.concatenate(local_scales)

    def _layers(self, first: int, last: int) -> list[tuple[int, int]]:
        edges = [row for row in self.blocks.layer_rows if first <= row <= last]
        return list(itertools.pairwise(edges))

    def _eigenvectors(self, first: int, last: int, rank: int) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        """Of a group's whitened rows: eigenvalues, eigenvectors, and the covariance of each layer."""
        spans = [(a - first, b - first) for a, b in self._layers(first, last)]
        if not bases.is_wide(last - first, rank):
            total, tokens = np.zeros((last - first, last - first), np.float32), 0
            for rows in self._staged("covariance", self._pieces(first, last)):
                piece = rows()
                total += piece.T @ piece
                tokens += len(piece)
            total /= tokens
            return *bases.eigen(total, rank), [total[a:b, a:b] for a, b in spans]
        start = self._sample(first, last, bases.sample_size(rank))
        return bases.subspace(start, rank, self._staged("covariance", self._pieces(first, last)), spans)

    def _sample(self, first: int, last: int, count: int) -> np.ndarray:
        """Whitened rows of about so many tokens of all windows, evenly."""
        each = -(-count // self.windows.count)
        parts = [self.windows.some_rows(index, each, slice(first, last)) for index in range(self.windows.count)]
        return self._white(np.concatenate(parts)[:count], first)

    def _pieces(self, first: int, last: int) -> list[Callable[[], np.ndarray]]:
        """Whitened rows of a group, every `COVARIANCE_STEP`-th token, some windows at a time."""
        pieces: list[list[int]] = [[]]
        for index in range(self.windows.count):
            if sum(self.windows.tokens(i) for i in pieces[-1]) >= COVARIANCE_STEP * _PIECE:
                pieces.append([])
            pieces[-1].append(index)

        def rows(windows: list[int]) -> np.ndarray:
            found = [self.windows.rows(index, step=COVARIANCE_STEP, part=slice(first, last)) for index in windows]
            return self._white(np.concatenate(found), first)

        return [functools.partial(rows, windows) for windows in pieces]

    def _white(self, rows: np.ndarray, first: int) -> np.ndarray:
        mean = self.arrays["mean"][first : first + rows.shape[1]]
        return self.blocks.multiply(rows - mean, self.roots, first)

    def coefficients(self, rows: np.ndarray, group: int) -> np.ndarray:
        """Coefficients of un-rotated rows ``[T, rows of the group]``: shared ones, then the layers' own."""
        parts = self.groups[group]
        white = self._white(rows, parts.first)
        found = [white @ parts.dual.T]
        white -= found[0] @ parts.shared
        for (a, b), own in zip(self._layers(parts.first, parts.last), parts.own_duals, strict=True):
            found.append(white[:, a - parts.first : b - parts.first] @ own.T)
        return np.concatenate(found, axis=1)

    def _scales_and_tables(self) -> int:
        chosen = np.unique(np.linspace(0, self.windows.count - 1, TABLE_WINDOWS).round().astype(int))
        classes = list(mapped(self._classes, chosen))
        shared_logs, local_logs = [], []
        counts: np.ndarray | None = None
        for group, parts in enumerate(self.groups):
            self._stage("tables", group, len(self.groups))
            found = list(mapped(functools.partial(self._some_coefficients, group), chosen))
            mean = sum(np.abs(c).sum(axis=0, dtype=np.float64) for c in found)
            logs = entropy_fit.as_logs(mean / sum(map(len, found)))
            counter = entropy_fit.Counter(logs)
            for more in mapped(functools.partial(_counts, logs), zip(found, classes, strict=True)):
                counter.counts += more
            counts = counter.counts if counts is None else counts + counter.counts
            shared_logs.append(logs[: len(parts.shared)])
            local_logs.append(logs[len(parts.shared) :])
        assert counts is not None
        counter.counts = counts
        self.arrays["basis.log"], self.arrays["local.log"] = np.concatenate(shared_logs), np.concatenate(local_logs)
        self.arrays["tables"], floor = counter.tables()
        return floor

    def _classes(self, index: int) -> np.ndarray:
        """Token classes of what tables are counted on in a window."""
        return importance.classes(importance.predict(self.weights, self._features(index, None)))[::TABLE_STEP]

    def _some_coefficients(self, group: int, index: int) -> np.ndarray:
        part = slice(self.groups[group].first, self.groups[group].last)
        return self.coefficients(self.windows.rows(index, step=TABLE_STEP, part=part), group)

    def _staged(self, name: str, items: Sequence[Item]) -> Iterator[Item]:
        for index, item in enumerate(items):
            self._stage(name, index, len(items))
            yield item


def _counts(logs: np.ndarray, found: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """Symbols of coefficients of tokens of classes, counted at all steps."""
    counter = entropy_fit.Counter(logs)
    for step in entropy_fit.STEPS:
        counter.add(*found, step)
    return counter.counts


def _own_basis(layer: tuple[np.ndarray, np.ndarray], values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A layer's own quantized basis, its scales and its dual, of the layer's covariance and shared eigenvectors."""
    entries, scale = bases.quantize_local(np.ascontiguousarray(bases.residual_components(*layer, values).T))
    return entries, scale, dual(entries * scale[:, None])


def _as_half(root: np.ndarray) -> np.ndarray:
    """A symmetric matrix as the profile's numbers are, float16; computed with in float64."""
    half = root.astype(np.float16).astype(np.float64)
    return (half + half.T) / 2
