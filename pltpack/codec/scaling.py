"""Scales of components as a session has them: text of other kinds than the calibration's moves them by whole octaves.

Bitstream: spec/codecs.md, section "transform", *Scale_Shifts*. Coefficients are coded by tables of expected magnitude,
and in text that calibration did not see they are half an octave to an octave larger: by the tables that fit, code and
chats take a tenth to a seventh less (docs/transform.md).
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from pltpack.codec.coefficients import CLASS_WIDTH, ESCAPE, LARGEST, Tables, cost_tables

#: Components, in order of falling scale, that are moved together.
BLOCK = 256
#: A number of 4 bits says by how many classes a block is moved; this one, by none.
NONE = 8
#: The format's minor version that knows of shifts.
MINOR = 3
#: Squared error, in squared steps, that is worth a bit; see `pltpack.codec.prediction`.
_PRICE = 0.08
#: Tokens of a sample that are looked at, every so many.
_EVERY = 4
#: Part of the bits that must be saved.
_WORTH = 0.01
_jit = numba.njit(cache=True, nogil=True, error_model="numpy")


def shifted(logs: np.ndarray, shifts: np.ndarray) -> np.ndarray:
    """Scales moved by blocks, descending still: int32 ``[N]`` logarithms in 1/24 octave.

    Parameters
    ----------
    logs : ndarray
        int32 ``[N]``, descending.
    shifts : ndarray
        Numbers 0 to 15, ``[ceil(N / 256)]``.
    """
    moved = logs + CLASS_WIDTH * (np.repeat(shifts.astype(np.int32), BLOCK)[: len(logs)] - NONE)
    found: np.ndarray = np.minimum.accumulate(moved).astype(np.int32)
    return found


def count(logs: np.ndarray) -> int:
    """Number of shifts for that many components."""
    return -(-len(logs) // BLOCK)


def choose(
    found: np.ndarray,
    classes: np.ndarray,
    steps: np.ndarray,
    widths: np.ndarray,
    logs: np.ndarray,
    tables: Tables,
) -> np.ndarray | None:
    """Shifts by which a sample of tokens is coded best, by bits and by the error of what is not coded.

    Parameters
    ----------
    found : ndarray
        Coefficients, float32 ``[T, N]``.
    classes : ndarray
        Token classes, ``[T]``.
    steps, widths : ndarray
        Steps of the token classes: int32 logarithms, and themselves.
    logs : ndarray
        int32 ``[N]``.
    tables : Tables

    Returns
    -------
    ndarray or None
        uint8 ``[ceil(N / 256)]``; None if nothing much is gained.
    """
    costs = np.zeros((count(logs), 2 * NONE))
    inverse = (1 / widths).astype(np.float32)
    _costs(found[::_EVERY], classes[::_EVERY].astype(np.int64), inverse, steps.astype(np.int64), logs.astype(np.int64),
           tables.floor, tables.raw, cost_tables(tables), 1 / _PRICE, costs)  # fmt: skip
    best = costs.argmin(axis=1)
    saved = costs[:, NONE].sum() - costs.min(axis=1).sum()
    if saved <= _WORTH * costs[:, NONE].sum():
        return None
    shifts: np.ndarray = best.astype(np.uint8)
    return shifts


@_jit
def _costs(
    found: Any, classes: Any, inverse: Any, steps: Any, logs: Any, floor: Any, raw: Any, costs: Any, weight: Any,
    out: Any,
) -> None:  # fmt: skip
    kinds = len(raw)
    for t in range(len(found)):
        j = classes[t]
        scale = inverse[j]
        for i in range(found.shape[1]):
            x = found[t, i] * scale
            near = np.rint(x)
            q = np.int64(near)
            gap = np.float64(x - near) * np.float64(x - near)
            apart = logs[i] - steps[j] - floor
            row = out[i // BLOCK]
            for shift in range(2 * NONE):
                kind = min((apart + CLASS_WIDTH * (shift - NONE)) // CLASS_WIDTH, kinds - 1)
                if kind < 0:
                    row[shift] += weight * np.float64(x) * np.float64(x)
                else:
                    high = q >> raw[kind]
                    symbol = (2 * high - 1 if high > 0 else -2 * high) if -LARGEST <= high <= LARGEST else ESCAPE
                    row[shift] += costs[kind, symbol] + weight * gap
