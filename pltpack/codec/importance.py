"""How much the model feels a token's error: predicted from norms and from the distances to where a cache may be cut.

Importance I = gᵀF⁻¹g of a token, g the gradient of the log-likelihood with respect to its keys and values, spans many
octaves: some tokens in mid-text are attention sinks of their own. A step proportional to I^-½ spends bits where they
count. The encoder knows I without the model from a small network of the logarithms of the norms, one a head, and of
recency; the profile holds it. What the network cannot learn from running text is added here: what a last turn asks,
other places of a cut, and how far the strongest sinks lie beyond what is seen of them (docs/transform.md).
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
#: Octaves by which classes lie lower: an ordinary token has class ``ORDINARY - SHIFT``, so that sinks have one too.
SHIFT = 3
LEAST_NORM = 1e-4
#: Magnitude bound of a logarithm of importance.
_MOST = 60.0
#: Sinks are felt more than what is predicted: octaves from which on they are, and by how much for each of them.
_SINK, _SINK_GAIN = 5.0, 0.3
#: Distances of tokens that are felt an octave more than in running text, which calibration knows.
_RECENT = (8, 64)
#: Octaves of a turn that is answered next, its last tokens aside, and tokens that may follow it: a header.
_TURN_GAIN, _TURN_TAIL, _TURN_HEADER = 3.0, 6, 8
#: Octaves by which errors before a turn's end, and before a block's, count for less than before the session's end.
_TURN_LESS, _BLOCK_LESS = 3.0, 7.0
# Tokens whose inputs are in memory at once.
_PIECE = 4096
#: Tokens of a block, as the archive has them unless told otherwise.
_BLOCK = 32


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
    found = np.log(np.maximum(np.concatenate(parts, axis=1), LEAST_NORM))
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


def expected(
    weights: Mapping[str, np.ndarray],
    log_norms: np.ndarray,
    cuts: Iterable[int] = (),
    ends: Iterable[int] = (),
    captured: np.ndarray | None = None,
) -> np.ndarray:
    """Importance over all places where the cache may be cut, as its binary logarithm: float64 ``[T]``.

    Errors before each of these places add up, those before places that are rarely cut with less weight.

    Parameters
    ----------
    weights : mapping
        As in `predict`.
    log_norms : ndarray
        ``[T, F - 5]``, layer after layer as `norms` gives them.
    cuts, ends : iterable of int
        Positions before which the cache will be cut (its end is one of them), and ends of turns.
    captured : ndarray, optional
        Importance of all tokens that was measured at the session's end, ``[T]``, instead of what would be predicted
        there. Its scale is its own: its median is put where that of the prediction is.
    """
    tokens, turns = len(log_norms), np.unique([end for end in ends if 0 < end <= len(log_norms)]).astype(np.int64)
    if not tokens:
        return np.zeros(0)
    places = [*cuts, tokens]
    last = _seen(weights, log_norms, distances(tokens, places))
    last += _TURN_GAIN * _answered(tokens, places, turns)
    if captured is not None:
        measured = np.log2(np.maximum(np.nan_to_num(captured.astype(np.float64)), 1e-30))
        last = np.clip(measured - np.median(measured) + np.median(last), -_MOST, _MOST)
    total = np.exp2(last)
    if len(turns):
        total += np.exp2(_seen(weights, log_norms, distances(tokens, turns.tolist())) - _TURN_LESS)
    blocks = distances(tokens, range(_BLOCK, tokens, _BLOCK))
    total += np.exp2(_seen(weights, log_norms, blocks, recent=0) - _BLOCK_LESS)
    found: np.ndarray = np.log2(total)
    return found


def _seen(
    weights: Mapping[str, np.ndarray], log_norms: np.ndarray, distance: np.ndarray, recent: int = 1
) -> np.ndarray:
    """Predicted logarithm at distances to a cut, with what running text does not tell: float64 ``[T]``."""
    found = np.empty(len(distance))
    for start in range(0, len(distance), _PIECE):
        part, position = slice(start, start + _PIECE), np.arange(start, min(start + _PIECE, len(distance)))
        found[part] = predict(weights, features(log_norms[part], distance[part], position))
    found += _SINK_GAIN * np.maximum(found - _SINK, 0)
    found += recent * ((distance >= _RECENT[0]) & (distance < _RECENT[1]))
    # Sums of what is weighed by them stay finite whatever a profile holds.
    limited: np.ndarray = np.clip(found, -_MOST, _MOST)
    return limited


def _answered(tokens: int, cuts: Iterable[int], turns: np.ndarray) -> np.ndarray:
    """Which tokens are of a turn that ends at a cut, or a header before it; bool ``[T]``."""
    found = np.zeros(tokens, bool)
    for cut in cuts:
        start = answered(cut, turns)
        if start is not None:
            found[start : max(start, cut - _TURN_TAIL + 1)] = True
    return found


def answered(cut: int, turns: np.ndarray) -> int | None:
    """Where the turn begins that ends at a cut, but for a header; None if the cut is in mid-text.

    Parameters
    ----------
    cut : int
    turns : ndarray
        Ends of turns, ascending, int ``[N]``. The first one ends what is no turn to be answered.
    """
    index = int(np.searchsorted(turns, cut, side="right")) - 1
    return int(turns[index - 1]) if index >= 1 and cut - turns[index] <= _TURN_HEADER else None


def classes(log2_importance: Any) -> np.ndarray:
    """Token classes, uint8 ``[T]``, of binary logarithms of importance."""
    found = np.clip(np.rint(np.asarray(log2_importance, np.float64)) + ORDINARY, 0, CLASSES - 1)
    out: np.ndarray = found.astype(np.uint8)
    return out
