"""Static tables of the coefficient coder, counted on quantized coefficients of calibration text."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from pltpack.codec import importance, rans
from pltpack.codec.coefficients import CLASS_WIDTH, ESCAPE, LARGEST, OCTAVE, SYMBOLS, raw_bits

#: Base steps at which coefficients are quantized for the tables, in whitened units.
STEPS = (0.35, 0.6, 1.0, 1.5)
#: Least probability of a value other than zero for a class to be coded at all.
LEAST = 5e-5
#: Lowest class that is looked at begins here, the highest one ends there; logarithms in `OCTAVE`.
_LOWEST, _HIGHEST = -12 * OCTAVE, 12 * OCTAVE
#: Weight of the Laplace distribution that the counts of a class are added to, in values.
_PRIOR = 64.0


class Counter:
    """Counts symbols by class.

    Parameters
    ----------
    logs : ndarray
        Scales of the components, int32 ``[N]`` in 1/24 octave.
    """

    def __init__(self, logs: np.ndarray) -> None:
        self._logs = np.asarray(logs, np.int64)
        self._kinds = (_HIGHEST - _LOWEST) // CLASS_WIDTH
        self._raw = raw_bits(np.arange(self._kinds), _LOWEST)
        self.counts = np.zeros((self._kinds, SYMBOLS))

    def add(self, coefficients: np.ndarray, token_class: np.ndarray, step: float) -> None:
        """Quantize coefficients ``[T, N]`` of tokens of classes ``[T]`` at a base step, and count."""
        base = round(OCTAVE * float(np.log2(step)))
        for kind in np.unique(token_class):
            log_step = base - OCTAVE // 2 * (int(kind) - importance.ORDINARY)
            classes = (self._logs - log_step - _LOWEST) // CLASS_WIDTH
            live = np.flatnonzero((classes >= 0) & (classes < self._kinds))
            tokens, scale = np.flatnonzero(token_class == kind), 2.0 ** (-log_step / OCTAVE)
            _count(coefficients, tokens, live, classes[live], scale, self._raw, self.counts)

    def tables(self) -> tuple[np.ndarray, int]:
        """Frequencies uint16 ``[K, 64]``, and the logarithm at which class 0 begins."""
        first = self._first()
        floor = _LOWEST + CLASS_WIDTH * first
        counts = self.counts[first:]
        priors = np.stack([_laplace(floor + CLASS_WIDTH * (k + 0.5), int(raw))
                           for k, raw in enumerate(self._raw[first:])])  # fmt: skip
        wide = np.zeros((len(counts), 256))
        wide[:, :SYMBOLS] = _thinned(counts + _PRIOR * priors + 1e-9)
        return np.ascontiguousarray(rans.normalize(wide)[:, :SYMBOLS]), floor

    def _first(self) -> int:
        total = self.counts.sum(axis=1)
        fires = total - self.counts[:, 0] >= LEAST * total
        # Rare classes say little: the lowest of which all above that are well known fire, too.
        known = np.flatnonzero(total >= 10 / LEAST)
        silent = known[~fires[known]]
        quiet = int(silent.max()) + 1 if len(silent) else -(_LOWEST // CLASS_WIDTH) - 3 * 4
        return min(quiet, self._kinds - 1)


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _count(found: Any, tokens: Any, live: Any, classes: Any, scale: float, raw: Any, counts: Any) -> None:
    for t in tokens:
        for i in range(len(live)):
            kind = classes[i]
            high = np.int64(np.rint(found[t, live[i]] * scale)) >> raw[kind]
            if high > LARGEST or high < -LARGEST:
                counts[kind, ESCAPE] += 1
            else:
                counts[kind, 2 * high - 1 if high > 0 else -2 * high] += 1


def _thinned(counts: np.ndarray) -> np.ndarray:
    """Give what is rarer than half a slot to the escape: a slot each would cost the zeros more than it saves."""
    out = counts.copy()
    for row, share in zip(out, counts / counts.sum(axis=1, keepdims=True), strict=True):
        pairs = np.minimum(share[1:ESCAPE:2], share[2:ESCAPE:2])
        rare = np.flatnonzero(pairs < 0.5 / rans.PROB_SCALE)
        first = 1 + 2 * (max(int(rare[0]), 1) if len(rare) else LARGEST)
        row[ESCAPE] += row[first:ESCAPE].sum()
        row[first:ESCAPE] = 0
    return out


def _laplace(log_mean: float, raw: int) -> np.ndarray:
    """Symbol probabilities of rounded Laplace numbers of that mean magnitude, `raw` low bits taken off."""
    mean = 2.0 ** (log_mean / OCTAVE)
    high = np.arange(-LARGEST, LARGEST + 1)
    low_edge, high_edge = (high << raw) - 0.5, ((high + 1) << raw) - 0.5
    found = _distribution(high_edge / mean) - _distribution(low_edge / mean)
    out = np.zeros(SYMBOLS)
    out[np.where(high > 0, 2 * high - 1, -2 * high)] = found
    out[ESCAPE] = max(1 - found.sum(), 1e-6)
    return out / out.sum()


def _distribution(x: np.ndarray) -> np.ndarray:
    return np.where(x < 0, 0.5 * np.exp(np.minimum(x, 0)), 1 - 0.5 * np.exp(-np.maximum(x, 0)))


def as_logs(magnitudes: np.ndarray) -> np.ndarray:
    """Magnitudes as int16 logarithms in 1/24 octave, within ±30 octaves."""
    return np.clip(np.rint(OCTAVE * np.log2(np.maximum(magnitudes, 1e-12))), -30 * OCTAVE, 30 * OCTAVE).astype(np.int16)
