"""How much the model feels a token's error: predicted from norms and from the distance to the next cut.

Importance I = gᵀF⁻¹g of a token, g the gradient of the log-likelihood with respect to its keys and values, spans many
octaves: some tokens in mid-text are attention sinks of their own. A step proportional to I^-½ spends bits where they
count. The encoder knows I without the model from a small network of the logarithms of the norms, one a head, and of
recency; the profile holds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from pltpack.codec.base import KeyValue

#: Token classes: half-octaves of the step.
CLASSES = 16
#: Class of a token of importance 1, the geometric mean; class c has importance ``2 ** (c - ORDINARY)``.
ORDINARY = 6
_LEAST_NORM = 1e-4


def norms(arrays: KeyValue) -> np.ndarray:
    """Natural logarithms of the norms: float32 ``[T, 2 H]``, key heads then value heads.

    Parameters
    ----------
    arrays : (ndarray, ndarray)
        Keys ``[H, T, D_k]``, rotated or not, and values ``[H, T, D_v]``. What is not finite counts as 0.
    """
    parts = []
    for array in arrays:
        x = np.nan_to_num(array.astype(np.float32), copy=False, nan=0.0, posinf=0.0, neginf=0.0)
        parts.append(np.sqrt(np.einsum("htd,htd->ht", x, x, dtype=np.float64)).T)
    found = np.log(np.maximum(np.concatenate(parts, axis=1), _LEAST_NORM))
    out: np.ndarray = found.astype(np.float32)
    return out


def distances(tokens: int, cuts: Iterable[int]) -> np.ndarray:
    """Distance of each token to the next place where the cache may be cut: at least 1, float64 ``[T]``.

    Parameters
    ----------
    tokens : int
        Length of the session, whose end is a cut.
    cuts : iterable of int
        Positions before which the cache may end.
    """
    places = np.unique([cut for cut in (*cuts, tokens) if 0 < cut <= tokens])
    if not len(places):
        return np.ones(tokens)
    at = np.arange(tokens)
    found: np.ndarray = (places[np.searchsorted(places, at, side="right")] - at).astype(np.float64)
    return found


def features(log_norms: np.ndarray, distance: np.ndarray, position: np.ndarray) -> np.ndarray:
    """Inputs of the prediction: float32 ``[T, F]``, the norms of all layers and five numbers of recency.

    Parameters
    ----------
    log_norms : ndarray
        ``[T, F - 5]``, layer after layer as `norms` gives them.
    distance, position : ndarray
        ``[T]``: see `distances`; positions count from 0.
    """
    recency = np.stack(
        [np.log(distance), np.exp(-distance / 4), np.exp(-distance / 16), np.exp(-distance / 64), np.log1p(position)],
        axis=1,
    )
    return np.concatenate([log_norms, recency.astype(np.float32)], axis=1)


def predict(weights: Mapping[str, np.ndarray], found: np.ndarray) -> np.ndarray:
    """Predicted importance as its binary logarithm: float32 ``[T]``, 0 for the geometric mean of calibration.

    Parameters
    ----------
    weights : mapping
        ``mean``, ``scale``, ``linear`` ``[F]``; ``hidden`` ``[N, F]``, ``bias``, ``out`` ``[N]``; ``center`` ``[1]``.
    found : ndarray
        `features`.
    """
    z = np.clip((found - weights["mean"]) / np.maximum(weights["scale"], 1e-6), -6, 6)
    inner = z @ weights["hidden"].T + weights["bias"]
    inner *= 1 / (1 + np.exp(-np.clip(inner, -60, 60)))
    natural = z @ weights["linear"] + inner @ weights["out"] + weights["center"][0]
    result: np.ndarray = np.nan_to_num(natural / np.float32(np.log(2))).astype(np.float32)
    return result


def classes(log2_importance: Any) -> np.ndarray:
    """Token classes, uint8 ``[T]``, of binary logarithms of importance."""
    found = np.clip(np.rint(np.asarray(log2_importance, np.float64)) + ORDINARY, 0, CLASSES - 1)
    out: np.ndarray = found.astype(np.uint8)
    return out
