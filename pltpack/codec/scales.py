"""Which step each head of keys and values gets, from how its channels spread; no model is asked.

Within a head every channel has the same step: the directions in which keys spread widest are those the queries look
along, so they are worth the most bits. A head whose spread is concentrated in few channels (root mean square far above
the geometric mean) attends sharply, and a small error in it moves much attention: it gets a finer step, and its values
too. Only ratios inside a head, or to the model's other heads, count: a model that scales keys down and queries up
by the same factor is the same model. Values with a large spread get a step that grows only with its root, as they add
into one residual stream.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

_KEY_POWER = 3.0
_VALUE_POWER = 1.5
_SPREAD_POWER = 0.5
_LIMITS = (1 / 8, 2.0)
#: A channel's deviation counts as at least this share of the head's, and of its own mean: bfloat16 resolves no less.
_FLOOR = 0.05
_RESOLUTION = 2.0**-9


@dataclasses.dataclass(frozen=True)
class Usual:
    """What is usual in a model: medians over heads.

    Attributes
    ----------
    ratio : float
        Root mean square over geometric mean of a key head's channel deviations.
    size : float
        Root mean square of a value head's channel deviations.
    """

    ratio: float
    size: float

    @classmethod
    def of(cls, layers: Sequence[tuple[Spread, Spread]]) -> Usual:
        """Over the keys and values of at least one layer."""
        ratios = np.concatenate([keys.ratio for keys, _ in layers])
        return cls(float(np.median(ratios)), float(np.median(np.concatenate([values.rms for _, values in layers]))))


@dataclasses.dataclass(frozen=True)
class Spread:
    """Deviation of a layer's key or value heads.

    Attributes
    ----------
    geometric, rms : ndarray
        Geometric mean and root mean square of the channels' standard deviations, float64 ``[H]``.
    """

    geometric: np.ndarray
    rms: np.ndarray

    @classmethod
    def of(cls, mean: np.ndarray, deviation: np.ndarray) -> Spread:
        """From channel means and standard deviations, float64 ``[H, D]``."""
        deviation = np.maximum(deviation, _RESOLUTION * np.abs(mean))
        rms = np.sqrt(np.mean(np.square(deviation), axis=1))
        floored = np.maximum(deviation, np.maximum(_FLOOR * rms, np.finfo(np.float32).tiny)[:, None])
        return cls(np.exp(np.mean(np.log(floored), axis=1)), rms)

    @property
    def ratio(self) -> np.ndarray:
        """How concentrated the deviations are, at least about 1; float64 ``[H]``."""
        ratio: np.ndarray = np.maximum(self.rms / self.geometric, 1e-3)
        return ratio


def steps(base: float, keys: Spread, values: Spread, usual: Usual) -> np.ndarray:
    """Steps of token class 0, float64 ``[2 H]``: key heads, then value heads.

    Parameters
    ----------
    base : float
        The tier's step over a usual head's geometric deviation.
    keys, values : Spread
        One layer.
    usual : Usual
        Of the model, or of this layer where nothing else is known.
    """
    ratio = keys.ratio / usual.ratio
    size = np.maximum(values.rms / usual.size if usual.size > 0 else np.ones_like(values.rms), 1e-6)
    key_factor = np.clip(ratio**-_KEY_POWER, *_LIMITS)
    value_factor = np.clip(ratio**-_VALUE_POWER * size**-_SPREAD_POWER, *_LIMITS)
    out: np.ndarray = base * np.concatenate([keys.geometric * key_factor, values.geometric * value_factor])
    return out
