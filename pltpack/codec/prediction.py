"""Coding against a reference: how far each token trusts it, and which integers its coefficients become.

Bitstream: spec/codecs.md, section "transform", *Prediction_Classes*. A token of prediction class p is centered at
``mean + α (reference - mean)`` and what is left is expected to be ``2^(p/3)`` times smaller than the token itself. A
reference that leaves the share ρ² of a token's energy is best taken ``1 - ρ²`` times (Wiener), so that one number says
both: ``ρ = 2^(-p/3)``. Class 0 is a token without a prediction.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from pltpack.codec.coefficients import CLASS_WIDTH, ESCAPE, LARGEST, MAX_VALUE, OCTAVE, Tables, bounds_of, cost_tables
from pltpack.codec.importance import CLASSES as TOKEN_CLASSES
from pltpack.codec.rate import value_of

#: Prediction classes: thirds of an octave of what a prediction leaves.
CLASSES = 16
#: Squared error, in squared steps, that is worth a bit when classes are chosen, once more if a unit then had more error
#: than without a reference however it is rounded. 2 ln 2 / 12 = 0.12 is the slope of plain rounding at fine steps.
_CHOOSING = (0.08, 0.03, 0.01)
#: The same when coefficients are rounded: the highest is taken that keeps the unit's error. What a prediction leaves is
#: alike in neighbouring tokens, and attention sums it: at higher prices KL grows faster than the squared error.
_ROUNDING = (0.0, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07, 0.08)
#: Farthest that a value may be from its integer, in steps, for the price of one bit or more.
_REACH = 0.8
#: Class that the first token is tried with.
_FIRST = 4
_jit = numba.njit(cache=True, nogil=True, error_model="numpy")


def shares() -> np.ndarray:
    """α of each prediction class: float32 ``[CLASSES]``."""
    left = np.exp2(-2.0 * CLASS_WIDTH * np.arange(CLASSES) / OCTAVE)
    return (1 - left).astype(np.float32)


def joint(token_classes: np.ndarray, predicted: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Number of a token's pair of classes: ``16 p + j`` for token class j; 256 for exact tokens."""
    pairs = token_classes + TOKEN_CLASSES * predicted.astype(np.int64)
    return np.where(exact, TOKEN_CLASSES * CLASSES, pairs)


def lowered(steps: np.ndarray) -> np.ndarray:
    """Steps to which components are compared, by `joint` class: int32 logarithms in 1/24 octave.

    A scale that is lower by some octaves over a step is the scale itself over a step that is higher by as many.
    """
    found: np.ndarray = (steps[None] + CLASS_WIDTH * np.arange(CLASSES)[:, None]).astype(np.int32).reshape(-1)
    return found


def choose(
    found: np.ndarray,
    guess: np.ndarray,
    token_classes: np.ndarray,
    exact: np.ndarray,
    steps: np.ndarray,
    logs: np.ndarray,
    tables: Tables,
) -> tuple[np.ndarray, np.ndarray]:
    """Choose prediction classes and quantize, with no more squared error in the unit than without a reference.

    Errors count in squared steps of their token: a step is finer where errors weigh more.

    Parameters
    ----------
    found, guess : ndarray
        Coefficients of the tokens and of their reference, both around the mean: float32 ``[T, N]``.
    token_classes, exact : ndarray
        ``[T]``; exact tokens are left out.
    steps, logs : ndarray
        As of `Order.of`, by token class.
    tables : Tables

    Returns
    -------
    classes : ndarray
        uint8 ``[T]``.
    quantized : ndarray
        int32 ``[T, N]``.
    """
    bounds = bounds_of(logs, lowered(steps), tables).reshape(CLASSES, len(steps), -1)
    inverse = np.where(exact, 0, 1 / value_of(steps)[token_classes]).astype(np.float32)
    given = (found, guess, inverse, shares(), token_classes, bounds, tables.raw, cost_tables(tables))
    classes = np.zeros(len(found), np.uint8)
    out = np.zeros(found.shape, np.int32)
    rest = np.zeros(len(found))
    for price in _CHOOSING:
        allowed = _choose(*given, price, classes, rest)
        low, high = 0, len(_ROUNDING)
        while low < high:
            middle = (low + high) // 2
            fits = _quantize(*given, _ROUNDING[middle], classes, rest, out) <= allowed
            low, high = (middle + 1, high) if fits else (low, middle)
        if low:
            _quantize(*given, _ROUNDING[low - 1], classes, rest, out)
            return classes, out
    classes[:] = 0
    _quantize(*given, 0.0, classes, rest, out)
    return classes, out


@_jit
def _code(values: Any, guess: Any, share: Any, bounds: Any, raw: Any, costs: Any, price: Any, out: Any) -> Any:
    """Quantize a token: its squared error and its bits. Values and guess are in steps; what is coded is in `out`."""
    squared, bits = 0.0, 0.0
    for kind in range(len(raw)):
        for i in range(bounds[kind + 1], bounds[kind]):
            x = values[i] - share * guess[i] if share > 0 else values[i]
            if not abs(x) < MAX_VALUE:
                return np.inf, np.inf
            whole = np.rint(x)
            q = np.int32(whole)
            gap = np.float64(x - whole)
            high = q >> raw[kind]
            symbol = (2 * high - 1 if high > 0 else -2 * high) if -LARGEST <= high <= LARGEST else ESCAPE
            error, cost = gap * gap, costs[kind, symbol]
            if price > 0 and q != 0:
                less = q - 1 if q > 0 else q + 1
                gap = np.float64(x - less)
                high = less >> raw[kind]
                symbol = (2 * high - 1 if high > 0 else -2 * high) if -LARGEST <= high <= LARGEST else ESCAPE
                other = costs[kind, symbol]
                if abs(gap) < _REACH and gap * gap + price * other < error + price * cost:
                    q, error, cost = less, gap * gap, other
            out[i] = q
            squared += error
            bits += cost
    return squared, bits


@_jit
def _scaled(row: Any, inverse: Any, count: Any, out: Any) -> None:
    for i in range(count):
        out[i] = row[i] * inverse


@_jit
def _tails(values: Any, guess: Any, out: Any) -> None:
    """Sums over the components from each one on: of squares, of products and of the guess's squares."""
    out[:, len(values)] = 0.0
    a, b, c = 0.0, 0.0, 0.0
    for i in range(len(values) - 1, -1, -1):
        v, g = np.float64(values[i]), np.float64(guess[i])
        a += v * v
        b += v * g
        c += g * g
        out[0, i], out[1, i], out[2, i] = a, b, c


@_jit
def _tail(tails: Any, at: Any, share: Any, inverse: Any) -> Any:
    """Squared error of the components from one on if they are not coded, in squared steps."""
    left = tails[0, at]
    if share > 0:
        left += share * (share * tails[2, at] - 2 * tails[1, at])
        if not left < np.inf:
            return np.inf
    return max(left, 0.0) * np.float64(inverse) ** 2


@_jit
def _choose(
    found: Any, guess: Any, inverse: Any, shares: Any, kinds: Any, bounds: Any, raw: Any, costs: Any, price: Any,
    classes: Any, rest: Any,
) -> Any:  # fmt: skip
    """Choose each token's class by error and bits; gives the squared error of all tokens without a reference.

    The error of components that are then not coded is put in `rest`.
    """
    count = found.shape[1]
    values, other = np.empty(count, np.float32), np.empty(count, np.float32)
    tails, scratch = np.empty((3, count + 1)), np.empty(count, np.int32)
    scores = np.empty(len(shares))
    total, at = 0.0, _FIRST
    for t in range(len(found)):
        if inverse[t] == 0:
            continue
        live = bounds[0, kinds[t], 0]
        _scaled(found[t], inverse[t], live, values)
        _scaled(guess[t], inverse[t], live, other)
        _tails(found[t], guess[t], tails)
        squared, bits = _code(values, other, np.float32(0), bounds[0, kinds[t]], raw, costs, 0.0, scratch)
        squared += _tail(tails, live, shares[0], inverse[t])
        total += squared
        scores[:] = -1.0
        scores[0] = squared + price * bits
        # Neighbours are alike, and the score has one minimum but for noise: walk downhill from the token before.
        while True:
            for p in (at - 1, at, at + 1):
                if 0 < p < len(shares) and scores[p] < 0:
                    limits = bounds[p, kinds[t]]
                    squared, bits = _code(values, other, shares[p], limits, raw, costs, price, scratch)
                    scores[p] = squared + _tail(tails, limits[0], shares[p], inverse[t]) + price * bits
            low = at
            for p in (at - 1, at + 1):
                if 0 < p < len(shares) and scores[p] < scores[low]:
                    low = p
            if low == at:
                break
            at = low
        p = at if scores[at] < scores[0] else 0
        classes[t] = p
        rest[t] = _tail(tails, bounds[p, kinds[t], 0], shares[p], inverse[t])
    return total


@_jit
def _quantize(
    found: Any, guess: Any, inverse: Any, shares: Any, kinds: Any, bounds: Any, raw: Any, costs: Any, price: Any,
    classes: Any, rest: Any, out: Any,
) -> Any:  # fmt: skip
    """Quantize tokens of known classes; gives their squared error. Tokens without a prediction are only rounded."""
    count = found.shape[1]
    values, other = np.empty(count, np.float32), np.empty(count, np.float32)
    total = 0.0
    for t in range(len(found)):
        if inverse[t] == 0:
            continue
        p = classes[t]
        limits = bounds[p, kinds[t]]
        _scaled(found[t], inverse[t], limits[0], values)
        _scaled(guess[t], inverse[t], limits[0], other)
        squared, _ = _code(values, other, shares[p], limits, raw, costs, price if p else 0.0, out[t])
        total += squared + rest[t]
    return total
