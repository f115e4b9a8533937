"""How the group codec's encoder uses a reference that is near: the same passage at another position, not a copy.

What such a reference leaves is smaller than a step in many heads, where rounding to it loses less than rounding to a
mean does, and differs from token to token, most at a passage's start. So steps are raised to the loss that a unit would
have without the reference, and each token shifts its tables.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from pltpack.codec.base import KeyValue
from pltpack.codec.group_decode import pairs
from pltpack.codec.levels import CLASSES, DEVIATION, RAW_BITS, STEP_CODES, UNIT_CLASS
from pltpack.codec.quantize import step_size, symbol_of
from pltpack.codec.tokens import COPY, FINEST, SHIFTS

#: Most step codes that a step is raised by.
_RAISE = 4
#: Times that table classes are chosen, each but the last with new shifts after it.
_TURNS = 3


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _loss(x: Any, prediction: Any, moving: int, classes: Any, code: int, shrink: Any) -> float:
    """Squared error of one head, each token's over its share of the squared step, with about the tables it will get."""
    dim = x.shape[1]
    levels, errors = np.empty(x.shape, np.float32), np.empty(x.shape, np.float32)
    total, count = 0.0, 0
    for t in range(x.shape[0]):
        if classes[t] <= FINEST:
            step, row, mine = step_size(code - 4 * classes[t]), prediction[t * moving], x[t]
            level, error = levels[t], errors[t]
            for d in range(dim):
                f = (mine[d] - row[d]) / step
                level[d] = np.rint(f)
                error[d] = f - level[d]
            total += _four(np.abs(level)) * 2.0 ** (-0.5 * classes[t])
            count += dim
    base = np.rint(UNIT_CLASS + 2 * np.log2(max(total / max(count, 1), 1e-3) * DEVIATION))
    loss, unit = 0.0, np.float64(step_size(code))
    for t in range(x.shape[0]):
        if classes[t] <= FINEST:
            k = np.int64(min(max(base + classes[t], 0), CLASSES - 1))
            less = np.float32(shrink[k]) if RAW_BITS[k] == 0 else np.float32(0)
            level, error = levels[t], errors[t]
            for d in range(dim):
                e = error[d] + less * min(max(level[d], np.float32(-1)), np.float32(1))
                level[d] = e * e
            loss += _four(level)
    return loss * unit * unit


@numba.njit(nogil=True, cache=True)
def _four(line: Any) -> float:
    """A sum as four side by side: one addition need not wait for the one before."""
    a = b = c = d = 0.0
    whole = line.size // 4 * 4
    for i in range(0, whole, 4):
        a += line[i]
        b += line[i + 1]
        c += line[i + 2]
        d += line[i + 3]
    for i in range(whole, line.size):
        a += line[i]
    return (a + b) + (c + d)


def raised(x: KeyValue, prediction: KeyValue, plain: KeyValue, classes: np.ndarray, codes: np.ndarray,
           shrink: np.ndarray) -> np.ndarray:  # fmt: skip
    """Step codes for a near prediction: each head's largest at which it loses no more than with the plain one."""
    out = codes.copy()
    heads = x[0].shape[0]
    for part in (0, 1):
        mine = shrink[part * CLASSES : (part + 1) * CLASSES]
        moving = [int(centre[part].shape[1] > 1) for centre in (prediction, plain)]
        for h in range(heads):
            at = part * heads + h
            values = x[part][h]
            limit = _loss(values, plain[part][h], moving[1], classes, int(codes[at]), mine)
            for code in range(int(codes[at]) + 1, min(int(codes[at]) + _RAISE, STEP_CODES[1]) + 1):
                if not _loss(values, prediction[part][h], moving[0], classes, code, mine) <= limit:
                    break
                out[at] = code
    return out


def copy_zeros(q: list[np.ndarray], classes: np.ndarray) -> None:
    """Make copies of coded tokens whose values all round to the reference's."""
    still = classes <= FINEST
    for part in q:
        still &= ~part.any(axis=(0, 2))
    classes[still] = COPY


def tables(q: list[np.ndarray], dims: tuple[int, int], classes: np.ndarray,
           costs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """The cheapest table classes of heads and shifts of tokens, in turns: uint8 ``[2 H]`` and int16 ``[T]``."""
    heads, count = q[0].shape[0], len(classes)
    bits = np.zeros((2 * heads, CLASSES, count), np.int64)
    for part, values in enumerate(q):
        mine = np.zeros((256, 32), np.int32)
        mine[:, :CLASSES] = costs[part * CLASSES : (part + 1) * CLASSES].T
        for h in range(heads):
            _token_costs(values[h][:, : dims[part]], classes, pairs(dims[part]), mine, bits[part * heads + h])
    bases, found = np.zeros(2 * heads, np.int64), np.zeros(count, np.int64)
    _choose(bits, classes, bases, found)
    return bases.astype(np.uint8), found.astype(np.int16)


@numba.njit(nogil=True, cache=True)
def _choose(bits: Any, classes: Any, bases: Any, found: Any) -> None:
    """Fill table classes ``[2 H]`` and shifts ``[T]`` from the code lengths ``[2 H, 27, T]``."""
    heads, _, count = bits.shape
    sums, choices = np.empty(CLASSES, np.int64), np.empty(SHIFTS[1] - SHIFTS[0] + 1, np.int64)
    for turn in range(_TURNS):
        for h in range(heads):
            sums[:] = 0
            for t in range(count):
                if classes[t] <= FINEST:
                    rank = classes[t] + found[t]
                    for k in range(CLASSES):
                        sums[k] += bits[h, max(min(k + rank, CLASSES - 1), 0), t]
            bases[h] = np.argmin(sums)
        if turn == _TURNS - 1:
            break
        for t in range(count):
            if classes[t] <= FINEST:
                choices[:] = 0
                for h in range(heads):
                    rank = bases[h] + classes[t] + SHIFTS[0]
                    for i in range(choices.size):
                        choices[i] += bits[h, max(min(rank + i, CLASSES - 1), 0), t]
                # Of equal costs the one without a shift.
                choices[-SHIFTS[0]] -= 1
                found[t] = np.argmin(choices) + SHIFTS[0]


@numba.njit(nogil=True, cache=True)
def _token_costs(q: Any, classes: Any, half: int, costs: Any, out: Any) -> None:
    """Code length of each token of one head in every table class, 1/256 bit, to ``[27, T]``.

    `costs` is int32 ``[256, 32]``, the last 5 columns idle. Classes whose low bits hold all of a token are not looked
    at one by one: each of their low bits is one more than it needs.
    """
    line = np.empty(UNIT_CLASS + 2, np.int32)
    for t in range(q.shape[0]):
        if classes[t] > FINEST:
            continue
        row = q[t]
        largest = 0
        for d in range(row.size):
            largest = max(largest, abs(row[d]))
        line[:] = 0
        for j in range(half):
            mine = costs[symbol_of(row, j, half, 0)]
            for k in range(UNIT_CLASS + 2):
                line[k] += mine[k]
        for k in range(UNIT_CLASS + 2):
            out[k, t] = line[k]
        first = second = np.int64(0)
        for r in range(1, 10):
            at = UNIT_CLASS + 2 * r
            if 1 << r <= 4 * largest:
                first = second = np.int64(0)
                for j in range(half):
                    mine = costs[symbol_of(row, j, half, r)]
                    first += mine[at]
                    second += mine[at + 1]
            elif r == 1:
                first = second = np.int64(line[UNIT_CLASS + 1])
            out[at, t] = first + 512 * half * r
            if at + 1 < CLASSES:
                out[at + 1, t] = second + 512 * half * r
