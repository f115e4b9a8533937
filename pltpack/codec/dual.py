"""Coefficients by least squares: the dual of a basis that quantization has made slightly oblique."""

from __future__ import annotations

import numpy as np

# Components whose products are made in double precision.
_FEW = 512


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
    try:
        if len(basis) <= _FEW:
            found = np.linalg.solve(basis.astype(np.float64) @ basis.T.astype(np.float64), basis)
        else:
            # Nearly the identity, so its inverse is as exact as a solution, and a product is the fastest of all.
            found = np.linalg.inv(basis @ basis.T) @ basis
    except np.linalg.LinAlgError:
        found = np.full(basis.shape, np.nan)
    if not np.isfinite(found).all():
        raise ValueError("the components of a basis depend on each other")
    return np.asarray(found, np.float32)
