"""Coefficients by least squares: the dual of a basis that quantization has made slightly oblique."""

from __future__ import annotations

import numpy as np


def dual(basis: np.ndarray) -> np.ndarray:
    """The matrix W of ``c = x Wᵀ``, the coefficients for which ``c basis`` is nearest to x.

    Rounding the entries of an orthonormal basis turns its components a little towards each other; products with the
    basis itself would then leak the strong components into all weak ones, which costs over a tenth of the bits.

    Parameters
    ----------
    basis : ndarray
        float32 ``[components, rows]``.

    Returns
    -------
    ndarray
        float32 ``[components, rows]``.

    Raises
    ------
    ValueError
        If the components depend on each other.
    """
    gram = basis.astype(np.float64) @ basis.T.astype(np.float64) if len(basis) <= 512 else basis @ basis.T
    try:
        found = np.linalg.solve(gram, basis)
    except np.linalg.LinAlgError:
        found = np.full(basis.shape, np.nan)
    if not np.isfinite(found).all():
        raise ValueError("the components of a basis depend on each other")
    return np.asarray(found, np.float32)
