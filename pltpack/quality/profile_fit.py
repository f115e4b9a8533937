"""From windows to a profile: statistics, bases, scales, importance and tables, each in one pass over what it needs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator

import numpy as np

from pltpack.codec import importance
from pltpack.codec.base import SINK_TOKENS
from pltpack.codec.dual import dual
from pltpack.errors import UnsupportedError
from pltpack.quality import bases, entropy_fit, importance_fit, sensitivity
from pltpack.quality.rows import Blocks, log_norms
from pltpack.quality.windows import Windows

#: Most rows of a layer group: the covariance of more would need over a gigabyte.
MAX_GROUP_ROWS = 16384
#: Windows from which scales and tables are counted, every how many of their tokens, and of all for the covariance.
TABLE_WINDOWS, TABLE_STEP, COVARIANCE_STEP = 10, 2, 3
# Tokens whose products are made at once.
_PIECE = 4096

Stage = Callable[[str, int, int], None]


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
        learned = self._importance(energy)
        self._bases()
        floor = self._scales_and_tables()
        return Fitted(self.arrays, floor, self.layer_group, learned)

    def _moments(self) -> list[np.ndarray]:
        """The mean, and every block's covariance."""
        blocks, count = self.blocks, 0
        total, squares = np.zeros(blocks.rows), [np.zeros((w, w)) for w in blocks.widths]
        origin: np.ndarray | None = None
        for rows in self._each("mean"):
            # About a point near the mean, squares in single precision lose nothing that matters.
            origin = rows.mean(axis=0) if origin is None else origin
            rows -= origin
            total += rows.sum(axis=0, dtype=np.float64)
            for first, parts in blocks.split(rows):
                for block, product in enumerate(parts.transpose(0, 2, 1) @ parts, first):
                    squares[block] += product
            count += len(rows)
        if count < 2 or origin is None:
            raise UnsupportedError("too few tokens to calibrate on")
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

    def _importance(self, energy: list[np.ndarray] | None) -> importance_fit.Fit | None:
        learned = None
        if energy is None:
            weights = importance_fit.ordinary(len(self.blocks.widths) + 5)
        else:
            self._stage("importance", 0, 1)
            learned = importance_fit.fit([self._features(i, self.cut) for i in range(self.windows.count)], energy)
            weights = learned.weights
        self.weights = weights
        self.arrays.update({f"importance.{name}": value for name, value in weights.items()})
        return learned

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
            own = []
            for (a, b), covariance in zip(self._layers(first, last), layers, strict=True):
                columns = bases.residual_components(covariance, vectors[a - first : b - first], values)
                quantized, own_scale = bases.quantize_local(np.ascontiguousarray(columns.T))
                local.append(quantized.reshape(-1))
                local_scales.append(own_scale)
                own.append(dual(quantized * own_scale[:, None]))
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
            for piece in self._pieces(first, last, "covariance"):
                total += piece.T @ piece
                tokens += len(piece)
            total /= tokens
            self._stage("basis", 0, 1)
            return *bases.eigen(total, rank), [total[a:b, a:b] for a, b in spans]
        layers = [np.zeros((b - a, b - a), np.float32) for a, b in spans]
        tokens = 0

        def pieces() -> Iterator[np.ndarray]:
            nonlocal tokens
            for piece in self._pieces(first, last, "covariance"):
                # Whitened rows take as long to make as these products: they are made once for both.
                for (a, b), sum_ in zip(spans, layers, strict=True):
                    sum_ += piece[:, a:b].T @ piece[:, a:b]
                tokens += len(piece)
                yield piece
            self._stage("basis", 0, 1)

        found = bases.subspace(self._sample(first, last, bases.sample_size(rank)), rank, pieces)
        return *found, [sum_ / tokens for sum_ in layers]

    def _sample(self, first: int, last: int, count: int) -> np.ndarray:
        """Whitened rows of about so many tokens of all windows, evenly."""
        each = -(-count // self.windows.count)
        parts = [self.windows.some_rows(index, each, slice(first, last)) for index in range(self.windows.count)]
        return self._white(np.concatenate(parts)[:count], first)

    def _pieces(self, first: int, last: int, stage: str) -> Iterator[np.ndarray]:
        """Whitened rows of a group, every `COVARIANCE_STEP`-th token, some windows at a time."""
        held, count = [], 0
        for index in range(self.windows.count):
            self._stage(stage, index, self.windows.count)
            held.append(self._white(self.windows.rows(index, step=COVARIANCE_STEP, part=slice(first, last)), first))
            count += len(held[-1])
            if count >= _PIECE or index == self.windows.count - 1:
                yield np.concatenate(held)
                held, count = [], 0

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
        classes = {i: importance.classes(importance.predict(self.weights, self._features(i, None)))[::TABLE_STEP]
                   for i in chosen}  # fmt: skip
        shared_logs, local_logs = [], []
        counts: np.ndarray | None = None
        for group, parts in enumerate(self.groups):
            found, part = {}, slice(parts.first, parts.last)
            for done, index in enumerate(chosen):
                self._stage("tables", group * len(chosen) + done, len(self.groups) * len(chosen))
                found[index] = self.coefficients(self.windows.rows(index, step=TABLE_STEP, part=part), group)
            mean = sum(np.abs(c).sum(axis=0, dtype=np.float64) for c in found.values())
            logs = entropy_fit.as_logs(mean / sum(map(len, found.values())))
            counter = entropy_fit.Counter(logs)
            for index, coefficients in found.items():
                for step in entropy_fit.STEPS:
                    counter.add(coefficients, classes[index], step)
            counts = counter.counts if counts is None else counts + counter.counts
            shared_logs.append(logs[: len(parts.shared)])
            local_logs.append(logs[len(parts.shared) :])
        assert counts is not None
        counter.counts = counts
        self.arrays["basis.log"], self.arrays["local.log"] = np.concatenate(shared_logs), np.concatenate(local_logs)
        self.arrays["tables"], floor = counter.tables()
        return floor

    def _each(self, name: str) -> Iterator[np.ndarray]:
        for index, rows in enumerate(self.windows.all_rows()):
            self._stage(name, index, self.windows.count)
            yield rows


def _as_half(root: np.ndarray) -> np.ndarray:
    """A symmetric matrix as the profile's numbers are, float16; computed with in float64."""
    half = root.astype(np.float16).astype(np.float64)
    return (half + half.T) / 2
