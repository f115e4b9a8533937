"""What the model feels of an error, per layer and head: F = E[g gᵀ] over tokens of equal say, and its roots.

Some tokens' gradients are a thousand times as large as others'. In a plain mean a few of them would decide; here each
token's gᵀF⁻¹g enters with the power `EQUALITY`, and F is the fixed point of that (in the manner of Tyler's estimator,
Annals of Statistics 15, 1987).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from pltpack.quality.gradients import RIDGE
from pltpack.quality.rows import Blocks
from pltpack.quality.threads import mapped

#: Tokens are weighted by their energy to the minus this: 0 is the plain mean, 1 counts all alike.
EQUALITY = 0.5
_ITERATIONS = 2
# Windows from which on half of them say enough.
_MANY = 16


@dataclasses.dataclass(frozen=True)
class Sensitivity:
    """F of all blocks.

    Attributes
    ----------
    roots, inverse_roots : list of ndarray
        Symmetric ``(F + ridge)^½`` and ``(F + ridge)^-½``, float64 ``[width, width]`` per block.
    energy : list of ndarray
        gᵀF⁻¹g of each token, summed over blocks, one float64 array per window.
    """

    roots: list[np.ndarray]
    inverse_roots: list[np.ndarray]
    energy: list[np.ndarray]


def measure(gradients: Callable[[int], np.ndarray], count: int, blocks: Blocks) -> Sensitivity:
    """Measure F.

    Parameters
    ----------
    gradients : callable
        Gives the gradients of a window by its number: float32 ``[T, rows]``, sinks left out.
    count : int
        Of windows. Of many, F is the mean over every other one.
    blocks : Blocks
    """
    sample = range(0, count, 2 if count >= _MANY else 1)
    fisher = _mean(gradients, sample, blocks, None)
    for _ in range(_ITERATIONS):
        fisher = _mean(gradients, sample, blocks, _roots(fisher)[1])
    roots, inverse = _roots(fisher)
    energy = mapped(lambda index: _energy(gradients(index), blocks, inverse), range(count))
    return Sensitivity(roots, inverse, list(energy))


def by_variance(covariances: Sequence[np.ndarray], blocks: Blocks) -> list[np.ndarray]:
    """Roots where no gradients are known: each layer's keys, and its values, are divided by their deviation."""
    roots = []
    at = 0
    for layer in blocks.layers:
        for width in (layer.k_dim, layer.v_dim):
            found = covariances[at : at + layer.heads]
            variance = float(np.mean([np.trace(c) for c in found])) / width
            scale = 1 / np.sqrt(variance) if variance > 0 else 1.0
            roots += [np.eye(width) * scale] * layer.heads
            at += layer.heads
    return roots


def _mean(
    gradients: Callable[[int], np.ndarray], windows: Iterable[int], blocks: Blocks, inverse: list[np.ndarray] | None
) -> list[np.ndarray]:
    """Mean of g gᵀ per block, weighted by the energy that inverse roots of F give, or plain."""

    def moments(index: int) -> tuple[list[np.ndarray], int]:
        window = gradients(index)
        if inverse is not None:
            weight = (blocks.rows / np.maximum(_energy(window, blocks, inverse), 1e-30)) ** (EQUALITY / 2)
            window = window * weight[:, None].astype(np.float32)
        return blocks.squares(window), len(window)

    sums = [np.zeros((width, width)) for width in blocks.widths]
    count = 0
    for products, tokens in mapped(moments, windows):
        for total, product in zip(sums, products, strict=True):
            total += product
        count += tokens
    return [total / max(count, 1) for total in sums]


def _roots(fisher: Sequence[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Roots and inverse roots; a block that nothing depends on gets the least trace of all others."""
    means = [float(np.trace(f)) / len(f) for f in fisher]
    least = min((mean for mean in means if mean > 0), default=1.0)
    roots, inverse = [], []
    for matrix, mean in zip(fisher, means, strict=True):
        values, vectors = np.linalg.eigh(matrix)
        values = np.sqrt(np.maximum(values, 0) + RIDGE * max(mean, 1e-6 * least))
        roots.append((vectors * values) @ vectors.T)
        inverse.append((vectors / values) @ vectors.T)
    return roots, inverse


def _energy(window: np.ndarray, blocks: Blocks, inverse: Sequence[np.ndarray]) -> np.ndarray:
    found = np.zeros(len(window))
    for first, parts in blocks.split(window):
        whitened = parts @ np.stack(inverse[first : first + len(parts)]).astype(np.float32)
        found += np.einsum("btw,btw->t", whitened, whitened)
    return found
