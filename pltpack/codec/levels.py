"""Step sizes, table classes and static tables of the group codec.

A *step code* c stands for the step ``POWERS[c mod 8] * 2^floor(c / 8)``, eighth octaves in binary32. A *table class* k
stands for values whose standard deviation is ``2^(k / 2 - 4)`` steps. Tables are learnt per class from scaled samples,
so that every class has one, whatever steps and tokens the sample holds.
"""

from __future__ import annotations

import numpy as np

from pltpack.codec import rans

#: ``2^(i / 8)`` rounded to binary32.
POWERS = np.exp2(np.arange(8) / 8).astype(np.float32)
#: Step codes of a head lie in this range, so that no step of a row is subnormal or infinite.
STEP_CODES = (-928, 960)

#: Table classes; class `UNIT_CLASS` has a standard deviation of one step.
CLASSES = 27
UNIT_CLASS = 8
#: Tables: classes for keys, classes for values, then the exact tables of keys and of values.
TABLES = 2 * CLASSES + 2
#: Mean magnitude to standard deviation of a Gaussian, sqrt(pi / 2).
DEVIATION = 1.2533141373155001

#: A symbol expected less often than once in this many is left to the escape.
_RARE = 2 * rans.PROB_SCALE
#: Weight of the synthetic sample against real pairs.
_PRIOR = 0.02
_PRIOR_PAIRS = 1 << 15
_PAIRS = 1 << 18


def raw_bits(table_class: int) -> int:
    """Low bits of a value that are stored as they are: the coarse part keeps a deviation of 1 to 1.41."""
    return max(0, (table_class - UNIT_CLASS) // 2)


#: `raw_bits` of every class, int64 ``[27]``.
RAW_BITS = np.array([raw_bits(k) for k in range(CLASSES)], dtype=np.int64)


def step_of(code: int) -> np.float32:
    """The step of a code, exactly ``POWERS[code mod 8] * 2^floor(code / 8)``."""
    return np.float32(POWERS[code & 7] * np.float32(2.0 ** (code >> 3)))


def step_code(step: float) -> int:
    """The code of the nearest step, kept in `STEP_CODES`; 0 or NaN give the smallest."""
    if not step > 0:
        return STEP_CODES[0]
    return int(np.clip(np.rint(8 * np.log2(step)), *STEP_CODES))


def prior_pairs() -> np.ndarray:
    """Synthetic pairs of unit deviation, float64 ``[N, 2]``: a Gaussian whose scale differs from pair to pair."""
    # Midpoint quantiles of a mixture of scales, shuffled by a fixed stride: no generator whose stream could change.
    count = _PRIOR_PAIRS
    uniform = (np.arange(count) + 0.5) / count
    radius = np.sqrt(-2 * np.log(uniform))
    angle = 2 * np.pi * ((np.arange(count) * 0.6180339887498949) % 1)
    scale = np.array([0.6, 0.9, 1.1, 1.5])[(np.arange(count) * 7919) % 4] / 1.07
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1) * scale[:, None]


def thin(pairs: np.ndarray, limit: int = _PAIRS) -> np.ndarray:
    """At most `limit` pairs, evenly taken."""
    return pairs if len(pairs) <= limit else pairs[np.linspace(0, len(pairs) - 1, limit).astype(np.int64)]


def learn(pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Symbol frequencies and shrink of all classes, from residual pairs of unit deviation.

    Parameters
    ----------
    pairs : ndarray
        float ``[N, 2]``: the two values of one symbol, over their head's deviation; N may be 0.

    Returns
    -------
    freqs : ndarray
        uint16 ``[27, 256]``.
    shrink : ndarray
        float32 ``[27]``: how far, in steps, decoded values move from the middle of their interval towards zero.
    """
    counts = np.zeros((CLASSES, 256))
    shrink = np.zeros(CLASSES, dtype=np.float32)
    parts = [(prior_pairs(), _PRIOR if len(pairs) else 1.0), (thin(np.asarray(pairs, np.float64)), 1.0)]
    for k in range(CLASSES):
        moved = total = 0.0
        for sample, weight in parts:
            if not len(sample):
                continue
            # A class serves deviations within a quarter octave of its own.
            spread = np.exp2(((np.arange(len(sample)) % 5) - 2) / 10)[:, None]
            scaled = sample * (spread * 2.0 ** ((k - UNIT_CLASS) / 2))
            q = np.rint(scaled)
            counts[k] += _count(q, k) * (weight / len(sample))
            moved += weight * float(np.sum(np.abs(q) - np.sign(q) * scaled)) / len(sample)
            total += weight * float(np.sum(q != 0)) / len(sample)
        if total > 0 and raw_bits(k) == 0:
            shrink[k] = np.clip(moved / total, 0, 0.375)
    return rans.normalize(_with_escape(counts)), shrink


def _count(q: np.ndarray, k: int) -> np.ndarray:
    r = raw_bits(k)
    coarse = (np.clip(q, -30000, 30000).astype(np.int64) + (1 << r >> 1)) >> r
    inside = (np.abs(coarse) <= 7).all(axis=1)
    symbol = np.where(inside, (coarse[:, 0] + 8) | (coarse[:, 1] + 8) << 4, 0)
    return np.bincount(symbol, minlength=256)[:256].astype(np.float64)


def _with_escape(counts: np.ndarray) -> np.ndarray:
    counts = counts / counts.sum(axis=1, keepdims=True)
    rare = counts < 1 / _RARE
    rare[:, 0] = False
    counts[:, 0] += np.where(rare, counts, 0).sum(axis=1) + 1e-6
    counts[rare] = 0
    return counts


def learn_exact(counts: np.ndarray) -> np.ndarray:
    """Frequencies ``[256]`` of the highest bytes of exact tokens' words, from counts; every byte keeps a chance."""
    freqs: np.ndarray = rans.normalize(counts + 0.1 + counts.sum() / 20000)[0]
    return freqs


def bit_costs(freqs: np.ndarray) -> np.ndarray:
    """Code length of every symbol in 1/256 bit, int32 ``[S, 256]``; a symbol without frequency costs an escape."""
    f = freqs.astype(np.float64)
    cost = np.where(f > 0, -np.log2(np.maximum(f, 1) / rans.PROB_SCALE), 0)
    cost = np.where(f > 0, cost, cost[:, :1] + 32)
    cost[:, 0] += 32
    rounded: np.ndarray = np.rint(256 * cost).astype(np.int32)
    return rounded
