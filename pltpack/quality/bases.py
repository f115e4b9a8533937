"""Bases of whitened rows: one shared by the layers of a group, and each layer's own for what is left; quantized.

An entry of component i costs an error of its coefficient, σᵢ at a time, in each row: steps in proportion to 1/σᵢ spread
the errors evenly, and few levels are enough where a component is weak. A profile's arrays are compressed, so small
integers are cheap.
"""

from __future__ import annotations

import numpy as np

#: Step of a shared component's entries over 1/σ, in whitened units (mean variance of keys: 1).
STEP = 2e-3
#: Coarsest step of a component's entries in parts of their root mean square, for the shared and for the layers' own.
COARSEST, COARSEST_LOCAL = 1.0, 0.3
_ITERATIONS = 2


def top_components(covariance: np.ndarray, count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Largest eigenvalues, float32 ``[count]`` falling, and nearly their eigenvectors, ``[rows, count]``.

    Subspace iteration from a random start (Halko, Martinsson & Tropp, arXiv 0909.4061).
    """
    rows = len(covariance)
    if count > rows // 3:
        values, vectors = np.linalg.eigh(covariance)
        return values[::-1][:count].copy(), np.ascontiguousarray(vectors[:, ::-1][:, :count])
    basis = np.random.default_rng(seed).standard_normal((rows, count), np.float32)
    for _ in range(_ITERATIONS):
        basis, _ = np.linalg.qr(covariance @ basis)
    small = basis.T @ (covariance @ basis)
    values, vectors = np.linalg.eigh((small + small.T) / 2)
    return values[::-1].copy(), basis @ vectors[:, ::-1]


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
