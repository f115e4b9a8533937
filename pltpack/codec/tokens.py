"""How finely each token of a unit must be kept, judged without a model.

Attention sinks inside the text are tokens that a model parks attention on; their value vectors are far shorter than
the median (as in arXiv 2309.17453 and 2402.17762, where sinks have tiny value norms), and an error in them spreads to
every later token. The last tokens before a cut are read by whatever comes next. Both get a finer step.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from pltpack.codec.base import SINK_TOKENS, Unit

#: Token classes: 0 to `FINEST` divide the step by ``2^(class / 2)``; then a copy of the reference, and exact words.
FINEST = 10
COPY = 14
EXACT = 15
#: Range of the shifts of a token's tables.
SHIFTS = (-8, 7)

#: A value norm below ``SHORT`` times the median marks a sink; its step shrinks with the norm's 3/2 power.
_SHORT = 0.5
_SHORT_CLASSES = 8
# Class k from squared norm ratio r2: round(3 * log2(1 / sqrt(r2))) >= k, for sinks only.
_NORM_LIMITS = np.array([2.0 ** (-(2 * k - 1) / 3) for k in range(1, _SHORT_CLASSES + 1)])
#: Class k holds up to this distance to the cut, the last token's being 1: the step falls as its 0.35th power, from 256.
_DISTANCE_LIMITS = np.array([156, 57, 21, 8, 2, 1])


@numba.njit(nogil=True, cache=True)
def squared_norms(values: Any, out: Any) -> None:
    """Sum over heads and channels of squares, values float32 ``[H, T, D]`` to float64 ``[T]``, in index order."""
    for t in range(out.size):
        total = 0.0
        for h in range(values.shape[0]):
            for d in range(values.shape[2]):
                x = np.float64(values[h, t, d])
                total += x * x
        out[t] = total


def classes(unit: Unit, norms: np.ndarray, finite: np.ndarray, median: float) -> np.ndarray:
    """Token classes of a unit, uint8 ``[T]``.

    Parameters
    ----------
    unit : Unit
    norms : ndarray
        Squared value norms, float64 ``[T]``.
    finite : ndarray
        Whether all of a token's elements are finite, bool ``[T]``.
    median : float
        Usual squared value norm in this layer.
    """
    ratio = norms / median if median > 0 else np.ones(unit.tokens)
    short = (ratio[:, None] <= _NORM_LIMITS).sum(axis=1)
    short[~(ratio < _SHORT**2)] = 0
    distance = unit.tokens - np.arange(unit.tokens) + unit.boundary
    out: np.ndarray = np.minimum(short + (distance[:, None] <= _DISTANCE_LIMITS).sum(axis=1), FINEST).astype(np.uint8)
    out[~finite] = EXACT
    out[: max(0, SINK_TOKENS - unit.position)] = EXACT
    return out


def pack_runs(found: np.ndarray) -> np.ndarray:
    """Run-length bytes of token classes: class in the high half, run length - 1 (up to 15) in the low half."""
    starts = np.flatnonzero(np.diff(found, prepend=found[0] ^ 1))
    runs = []
    for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), len(found)], strict=True):
        kind = int(found[start]) << 4
        full, rest = divmod(stop - start, 16)
        runs += [kind | 15] * full + ([kind | rest - 1] if rest else [])
    return np.array(runs, dtype=np.uint8)


@numba.njit(cache=True)
def unpack(runs: Any, copies: bool, out: Any) -> Any:
    """Unpack runs to token classes; gives the number of tokens, -1 if damaged. See `unpack_runs`."""
    at: Any = 0
    for i in range(runs.size):
        kind, length = runs[i] >> 4, np.int64(runs[i] & 15) + 1
        if FINEST < kind < COPY or (kind == COPY and not copies) or at + length > out.size:
            return -1
        for t in range(at, at + length):
            out[t] = kind
        at += length
    return at


def unpack_runs(runs: np.ndarray, tokens: int, copies: bool = True) -> np.ndarray:
    """Inverse of `pack_runs`, uint8 ``[tokens]``.

    Raises
    ------
    ValueError
        If the runs do not cover the tokens exactly, or name a class that does not exist or (`copies` false) a copy.
    """
    out = np.empty(tokens, dtype=np.uint8)
    if unpack(runs, copies, out) != tokens:
        raise ValueError("token classes are damaged")
    return out


def pack_shifts(shifts: np.ndarray) -> np.ndarray:
    """Shifts of tokens' tables as bytes, the first of two in the low half, 8 standing for none: uint8."""
    found = np.full(-(-len(shifts) // 2) * 2, 8, dtype=np.uint8)
    found[: len(shifts)] += shifts.astype(np.uint8)
    out: np.ndarray = found[::2] | found[1::2] << 4
    return out


def unpack_shifts(packed: np.ndarray, tokens: int) -> np.ndarray:
    """Inverse of `pack_shifts`, int16 ``[tokens]``."""
    out = np.empty(2 * len(packed), dtype=np.int16)
    out[::2], out[1::2] = packed & 15, packed >> 4
    found: np.ndarray = out[:tokens] - np.int16(8)
    return found
