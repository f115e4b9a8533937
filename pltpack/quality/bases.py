"""Bases of whitened rows: one shared by the layers of a group, and each layer's own for what is left; quantized.

An entry of component i costs an error of its coefficient, σᵢ at a time, in each row: steps in proportion to 1/σᵢ spread
the errors evenly, and few levels are enough where a component is weak. A profile's arrays are compressed, so small
integers are cheap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from pltpack.quality.threads import mapped

#: Step of a shared component's entries over 1/σ, in whitened units (mean variance of keys: 1).
STEP = 2e-3
#: Coarsest step of a component's entries in parts of their root mean square, for the shared and for the layers' own.
COARSEST, COARSEST_LOCAL = 1.0, 0.3
# Directions beyond those wanted that the search for a subspace carries along: a share of them, and how many at least.
_MORE, _LEAST_MORE = 0.08, 8
# What is added to all eigenvalues while they are searched for, in parts of the mean of those carried along.
_SHIFT = 1e-6
# Where one of the tokens that the search starts from lies in the span of others, in parts of the largest.
_DEPENDENT = 1e-3
# Lines that are multiplied in double precision at once.
_LINES = 2048


def is_wide(rows: int, count: int) -> bool:
    """Whether `count` eigenvectors of so many rows are better searched for than all of them computed."""
    return count <= rows // 3


def eigen(covariance: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Largest eigenvalues ``[count]``, falling, and their eigenvectors ``[rows, count]``; all are computed."""
    values, vectors = np.linalg.eigh(covariance)
    return values[::-1][:count].copy(), np.ascontiguousarray(vectors[:, ::-1][:, :count])


def sample_size(count: int) -> int:
    """Tokens that a search for `count` eigenvectors starts from."""
    return count + max(int(_MORE * count), _LEAST_MORE)


def subspace(
    start: np.ndarray, count: int, pieces: Iterable[Callable[[], np.ndarray]], spans: Sequence[tuple[int, int]] = ()
) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Largest eigenvalues of C = E[x xᵀ], float32 ``[count]``, and nearly their eigenvectors, ``[rows, count]``.

    The Nyström approximation ``C Q (Qᵀ C Q)⁻¹ Qᵀ C`` (Tropp, Yurtsever, Udell & Cevher, arXiv 1706.05736) of the
    matrix, which is never made: it is `rows` wide, and products with the tokens themselves take half the time. Q is
    from tokens, which are worth half an iteration of a search for the subspace, and the eigenvectors are combinations
    of C Q, so that all tokens are looked at once and decide as they would in another iteration.

    Parameters
    ----------
    start : ndarray
        float32 ``[sample_size(count), rows]``: tokens; where there are not so many, chance directions fill up.
    count : int
    pieces : iterable of callable
        They give all tokens, float32 ``[T, rows]`` at a time; each is called once.
    spans : sequence of (int, int)
        Rows whose blocks of C are made besides.

    Returns
    -------
    (ndarray, ndarray, list of ndarray)
        Eigenvalues, eigenvectors, and the blocks.
    """
    missing = sample_size(count) - len(start)
    if missing > 0:
        chance = np.random.default_rng(0).standard_normal((missing, start.shape[1]), np.float32)
        start = np.concatenate([start, chance])
    basis = _orthonormal(start)
    turned, small, tokens = np.zeros_like(basis), np.zeros((basis.shape[1], basis.shape[1])), 0
    blocks = [np.zeros((b - a, b - a), np.float32) for a, b in spans]

    def products(piece: Callable[[], np.ndarray]) -> tuple[np.ndarray, np.ndarray, int, list[np.ndarray]]:
        rows = piece()
        found = rows @ basis
        return rows.T @ found, found.T @ found, len(rows), [rows[:, a:b].T @ rows[:, a:b] for a, b in spans]

    for more_turned, more_small, more_tokens, more_blocks in mapped(products, pieces):
        turned += more_turned
        small += more_small
        tokens += more_tokens
        for block, more in zip(blocks, more_blocks, strict=True):
            block += more
    # A little of the identity keeps directions that no token has from being divided by nothing.
    shift = _SHIFT * float(np.trace(small)) / len(small)
    small[np.diag_indices_from(small)] += shift
    turned += np.float32(shift) * basis
    root = np.linalg.cholesky(small)
    factor = turned @ np.linalg.inv(root).T.astype(np.float32)
    gram = np.zeros(small.shape)
    for at in range(0, len(factor), _LINES):
        part = factor[at : at + _LINES].astype(np.float64)
        gram += part.T @ part
    values, vectors = np.linalg.eigh(gram)
    values, vectors = values[::-1][:count], vectors[:, ::-1][:, :count]
    chosen = np.ascontiguousarray(vectors / np.sqrt(np.maximum(values, 1e-30)), dtype=np.float32)
    eigenvalues = (np.maximum(values - shift, 0) / tokens).astype(np.float32)
    return eigenvalues, factor @ chosen, [block / tokens for block in blocks]


def _orthonormal(start: np.ndarray) -> np.ndarray:
    """Orthonormal columns ``[rows, n]`` that span the rows of `start`, by Cholesky's factor where that can do it.

    The approximation does not depend on which basis of the span it is, so that rounding does not matter much.
    """
    gram = start @ start.T
    try:
        lower = np.linalg.cholesky(gram.astype(np.float64))
    except np.linalg.LinAlgError:
        return np.linalg.qr(start.T)[0]
    diagonal = np.diag(lower)
    if diagonal.min() < _DEPENDENT * diagonal.max():
        return np.linalg.qr(start.T)[0]
    found: np.ndarray = np.ascontiguousarray((np.linalg.inv(lower).astype(np.float32) @ start).T)
    return found


def residual_components(block: np.ndarray, shared: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Eigenvectors (columns), strongest first, of a layer's covariance without what the shared basis explains.

    Parameters
    ----------
    block : ndarray
        Covariance of the layer's whitened rows ``[R, R]``.
    shared : ndarray
        The layer's rows of the shared eigenvectors, ``[R, k]``.
    values : ndarray
        Their eigenvalues.
    """
    left = block - (shared * values) @ shared.T
    _, vectors = np.linalg.eigh((left + left.T) / 2)
    found: np.ndarray = vectors[:, ::-1]
    return found


def quantize_shared(components: np.ndarray, deviation: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantize a shared basis.

    Parameters
    ----------
    components : ndarray
        float32 ``[components, rows]``.
    deviation : ndarray
        σ of each component's coefficients.

    Returns
    -------
    (ndarray, ndarray)
        int16 entries, and the float32 scale of each component.
    """
    step = np.minimum(STEP / np.maximum(deviation, 1e-6), COARSEST * _typical(components))
    return _quantized(components, step, np.int16)


def quantize_local(components: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantize a layer's own basis, as `quantize_shared` does."""
    return _quantized(components, COARSEST_LOCAL * _typical(components), np.int8)


def _typical(components: np.ndarray) -> np.ndarray:
    return np.sqrt(np.einsum("ij,ij->i", components, components) / components.shape[1])


def _quantized(components: np.ndarray, step: np.ndarray, kind: type[np.signedinteger]) -> tuple[np.ndarray, np.ndarray]:
    limit, largest = np.iinfo(kind).max, np.abs(components).max(axis=1)
    scale = np.maximum(np.maximum(step, largest / limit), 1e-12).astype(np.float32)
    return np.clip(np.rint(components / scale[:, None]), -limit, limit).astype(kind), scale
