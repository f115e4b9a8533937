"""What others do to a cache: the raw values, zstd, a cast to fp8, and KIVI-style integers in groups of 32.

Each baseline gives back the layers of a snapshot in their stored dtype and counts the bits that their values take;
tokens and file headers are not counted. PCA stands in `pltpack.quality.pca`; TurboQuant is a tier of pltpack's own.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence

import numpy as np
import zstandard

from pltpack.quality.rebuilt import Rate
from pltpack.snapshot import Snapshot

#: Values that share a scale and a zero point in KIVI.
GROUP = 32
_F16_MAX = 65504.0
_E4M3_MAX = 448.0


class Baseline(abc.ABC):
    """A `pltpack.quality.rebuilt.Rebuilt` that works layer by layer and needs no calibration."""

    name: str
    family: str

    def __init__(self) -> None:
        self._bits, self._raw, self._elements = 0, 0, 0

    def rebuild(self, original: Snapshot) -> Snapshot:
        """See `Rebuilt.rebuild`; counts towards `rate`."""
        layers = []
        for index in range(len(original.identity.layers)):
            keys, values, bits = self.layer(*original.layer(index))
            layers.append((keys, values))
            self._bits += bits
        self._raw += original.raw_bytes
        self._elements += original.elements
        return Snapshot.from_arrays(original.session, original.tokens, layers, original.identity)

    def rate(self) -> Rate:
        """Over all snapshots that were rebuilt."""
        return Rate(self._bits / 8, self._raw, self._elements)

    @abc.abstractmethod
    def layer(self, keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
        """One layer ``[H, T, D]`` after the way there and back, and the bits that it takes."""


class Raw(Baseline):
    """The values as they are."""

    name = family = "raw"

    def layer(self, keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
        """See `Baseline.layer`."""
        return keys, values, 8 * (keys.nbytes + values.nbytes)


class Zstd(Baseline):
    """zstd of each layer's keys and values: bit-exact."""

    family = "zstd"

    def __init__(self, level: int) -> None:
        super().__init__()
        self.name = f"zstd -{level}"
        self._coder = zstandard.ZstdCompressor(level=level)

    def layer(self, keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
        """See `Baseline.layer`."""
        return keys, values, 8 * len(self._coder.compress(keys.tobytes() + values.tobytes()))


class Fp8(Baseline):
    """A saturating cast to fp8 e4m3, without scales."""

    name = family = "fp8 e4m3"

    def layer(self, keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
        """See `Baseline.layer`."""
        return fp8(keys), fp8(values), 8 * (keys.size + values.size)


class Kivi(Baseline):
    """KIVI (arXiv 2402.02750) without its full-precision residual: see `kivi`."""

    family = "KIVI"

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.name = f"KIVI int{bits}"
        self._width = bits

    def layer(self, keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
        """See `Baseline.layer`."""
        return kivi(keys, values, self._width)


def fp8(values: np.ndarray) -> np.ndarray:
    """Values of any shape after a saturating cast to fp8 e4m3, in their own dtype."""
    import ml_dtypes

    near = np.clip(values.astype(np.float32), -_E4M3_MAX, _E4M3_MAX)
    return near.astype(ml_dtypes.float8_e4m3fn).astype(values.dtype)


def kivi(keys: np.ndarray, values: np.ndarray, bits: int, group: int = GROUP) -> tuple[np.ndarray, np.ndarray, int]:
    """Asymmetric integers with an fp16 scale and zero point per group.

    Parameters
    ----------
    keys, values : ndarray
        ``[H, T, D]``. Keys are grouped along tokens, channel by channel; values along channels, token by token. A last
        group may be shorter.
    bits : int
    group : int

    Returns
    -------
    keys, values : ndarray
        As rebuilt, in the dtype given.
    bits : int
        ``bits`` for every element and 32 for every group: 5 or 3 per element at groups of 32.
    """
    near_keys, key_groups = grouped(keys, 1, bits, group)
    near_values, value_groups = grouped(values, 2, bits, group)
    return near_keys, near_values, bits * (keys.size + values.size) + 32 * (key_groups + value_groups)


def grouped(array: np.ndarray, axis: int, bits: int, group: int) -> tuple[np.ndarray, int]:
    """Round an array to 2**bits even levels between the least and the largest value of each group along `axis`.

    Returns
    -------
    ndarray
        As rebuilt, in the dtype given.
    int
        Number of groups.
    """
    x = array.astype(np.float32)
    starts = np.arange(0, x.shape[axis], group)
    sizes = np.minimum(group, x.shape[axis] - starts)
    low, high = (reduce.reduceat(x, starts, axis) for reduce in (np.minimum, np.maximum))
    top = 2**bits - 1
    scale = _as_f16((high - low) / top)
    zero = _as_f16(low)
    wide_scale, wide_zero = (np.repeat(part, sizes, axis) for part in (scale, zero))
    level = np.divide(x - wide_zero, wide_scale, out=np.zeros_like(x), where=wide_scale > 0)
    near = np.clip(np.rint(level), 0, top) * wide_scale + wide_zero
    return near.astype(array.dtype), low.size


def _as_f16(values: np.ndarray) -> np.ndarray:
    return np.clip(values, -_F16_MAX, _F16_MAX).astype(np.float16).astype(np.float32)


def plain() -> Sequence[Baseline]:
    """One of each baseline that needs no calibration, fresh."""
    return (Raw(), Zstd(3), Zstd(19), Fp8(), Kivi(4), Kivi(2))
