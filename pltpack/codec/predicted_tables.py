"""The static tables of the lossless codec's mode *predicted*: what a word is, given its prediction and a scale.

A word is modelled as its prediction plus noise under Student's t distribution with 8 degrees of freedom, whose
distribution function takes nothing but single IEEE operations and a square root: so a reader makes the same tables
everywhere, and a payload needs none. Spec: spec/codecs.md, section "lossless", *Predicted*.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from pltpack.codec import rans, rans_mixed

#: Mantissa bits of the dtypes that the mode takes.
MANTISSA = {"BF16": 7, "F16": 10}
#: Half octaves of the scale over the prediction's octave from which on words are coded by their magnitude.
FAR = -4
#: Octaves of the window of magnitudes below the scale's.
BELOW = 12
#: Range of the ratio of scale to prediction, in quarter octaves.
RATIOS = (-11, 12)
ESCAPE_SLOTS = 3
_SQRT2 = 1.4142135623730951


@dataclasses.dataclass(frozen=True)
class Static:
    """Tables of one dtype, ready for rANS.

    Attributes
    ----------
    near : int
        Number of the tables for words near their predictions, which come first.
    freqs : ndarray
        uint16 ``[K, 256]``; symbol 0 is the escape.
    coded : ndarray
        1 for symbols that have a frequency and are not the escape, else 0: uint8 ``[256 K]``.
    coding, slots : ndarray
        From `pltpack.codec.rans.encode_tables` and `pltpack.codec.rans_mixed.symbols_of_slots`.
    """

    near: int
    freqs: np.ndarray
    coded: np.ndarray
    coding: np.ndarray
    slots: np.ndarray


def shift_of(octaves: int, mantissa: int) -> int:
    """Low bits of a near word whose scale is ``2 ** (octaves / 2)`` of its prediction's octave."""
    return max(0, octaves // 2 + mantissa - 4)


@functools.cache
def static(mantissa: int) -> Static:
    """The tables for words with so many mantissa bits."""
    near = [_near(octaves, mantissa) for octaves in range(-2 * mantissa - 8, FAR)]
    far = [_far(odd, ratio) for odd in range(2) for ratio in range(RATIOS[0], RATIOS[1] + 1)]
    freqs = np.array(near + far, dtype=np.uint16)
    coded = (freqs > 0).astype(np.uint8)
    coded[:, 0] = 0
    return Static(len(near), freqs, coded.ravel(), rans.encode_tables(freqs), rans_mixed.symbols_of_slots(freqs))


def _distribution(z: np.ndarray) -> np.ndarray:
    r = 8.0 + z * z
    c = 8.0 / r
    term = total = np.ones_like(z)
    for weight in (1 / 2, 3 / 4, 5 / 6):
        term = term * c * weight
        total = total + term
    out: np.ndarray = 0.5 + 0.5 * (z / np.sqrt(r)) * total
    return out


def _value(places: np.ndarray, mantissa: int) -> np.ndarray:
    """The number so many words above 1."""
    octave = places >> mantissa
    out: np.ndarray = np.ldexp(1.0 + (places - (octave << mantissa)) / (1 << mantissa), octave)
    return out


def _near(octaves: int, mantissa: int) -> np.ndarray:
    scale = 2.0 ** (octaves // 2) * (_SQRT2 if octaves % 2 else 1.0)
    steps = (np.arange(1, 257) - 128) << shift_of(octaves, mantissa)
    weights = np.zeros(255)
    for j in range(8):
        prediction = (2 * j + 1) << (mantissa - 4)
        edges = (_value(prediction + steps, mantissa) + _value(prediction + steps - 1, mantissa)) / 2
        at = _distribution((edges - _value(np.array(prediction), mantissa)) / scale)
        weights = weights + (at[1:] - at[:-1])
    return _frequencies(weights)


def _far(odd: int, ratio: int) -> np.ndarray:
    scale = _SQRT2 if odd else 1.0
    prediction = np.ldexp(1.0 + (2 * (-ratio & 3) + 1) / 8, -ratio >> 2)
    edges = _value(np.arange(129) - 8 * BELOW, 3)
    same, other = (_distribution((edges + side) / scale) for side in (-prediction, prediction))
    return _frequencies(np.concatenate([same[1:] - same[:-1], other[1:] - other[:-1]])[1:])


def _frequencies(weights: np.ndarray) -> np.ndarray:
    """Frequencies of the escape and of symbols 1 to 255, by rounding their running sum."""
    running = np.cumsum(weights)
    ends = np.floor(running * ((rans.PROB_SCALE - ESCAPE_SLOTS) / running[-1]) + 0.5)
    return np.concatenate([[ESCAPE_SLOTS], np.diff(ends, prepend=0.0)])
