"""Rotary position embedding (RoPE, arXiv 2104.09864): rotate keys to their positions and back.

Frequencies are correctly rounded to binary64, angles are one product in binary64, cosines and sines are correctly
rounded to binary32; each rotated component is two products and one sum in binary32. So the bits do not depend on a
machine's mathematical library. Spec: spec/codecs.md, section "RoPE".
"""

from __future__ import annotations

import decimal
import functools
import json
import math
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any, TypeGuard

import numpy as np

#: More digits than any rounding here needs.
_EXACT = decimal.Context(prec=60)
#: Larger numbers are of no known embedding.
_LARGEST = 1e300
_PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899862803483")


def frequencies(rope: Mapping[str, Any] | None, head_dim: int) -> np.ndarray | None:
    """Angular frequency per rotated pair, binary64 ``[dim / 2]`` in radians per position.

    Parameters
    ----------
    rope : mapping or None
        ``theta``; optional ``dim`` below the head dimension for partial rotary; ``style`` ``half`` or ``interleaved``;
        ``type`` and what it needs besides:

        - ``default``;
        - ``linear``: ``factor`` (position interpolation, arXiv 2306.15595);
        - ``llama3``: ``factor``, ``low_freq_factor``, ``high_freq_factor``, ``original_max_position``;
        - ``dynamic``: ``factor``, ``original_max_position``, optional ``length``;
        - ``yarn`` (arXiv 2309.00071): ``factor``, ``original_max_position``, optional ``beta_fast``, ``beta_slow``,
          ``truncate``. The attention factor is no part of the rotation: it stays in the keys;
        - ``longrope`` (arXiv 2402.13753): ``short_factor``, ``long_factor``, ``original_max_position``, optional
          ``length``.

        ``length`` is the length of the sequence whose keys these are, in tokens; up to ``original_max_position`` if
        absent.
    head_dim : int
        Key dimension.

    Returns
    -------
    ndarray or None
        None where the parameters are absent or of a kind this version does not know: keys then stay as they are.
    """
    if rope is None or rope.get("style", "half") not in ("half", "interleaved"):
        return None
    kind, theta, dim = rope.get("type", "default"), rope.get("theta"), rope.get("dim", head_dim)
    if type(dim) is not int or not 0 < dim <= head_dim or dim % 2 or not _number(theta) or float(theta) < 1:
        return None
    scale = _KINDS.get(kind) if isinstance(kind, str) else None
    if kind == "dynamic":
        theta = _stretched(rope, float(theta), dim)
    if scale is None or theta is None:
        return None
    return scale(rope, np.array([_power(float(theta), -i, dim) for i in range(0, dim, 2)]), float(theta))


def _default(rope: Mapping[str, Any], base: np.ndarray, theta: float) -> np.ndarray:
    return base


def _linear(rope: Mapping[str, Any], base: np.ndarray, theta: float) -> np.ndarray | None:
    factor = _factor(rope)
    return None if factor is None else np.asarray(base / factor)


def _llama3(rope: Mapping[str, Any], base: np.ndarray, theta: float) -> np.ndarray | None:
    factor = _factor(rope)
    numbers = _numbers(rope, "low_freq_factor", "high_freq_factor", "original_max_position")
    if factor is None or numbers is None:
        return None
    low, high, context = numbers
    if low == high or context <= 0:
        return None
    wavelength = 2 * math.pi / base
    smooth = np.clip((context / wavelength - low) / (high - low), 0.0, 1.0)
    return np.asarray((1 - smooth) * base / factor + smooth * base)


def _yarn(rope: Mapping[str, Any], base: np.ndarray, theta: float) -> np.ndarray | None:
    factor, truncate = _factor(rope), rope.get("truncate", True)
    rope = {"beta_fast": 32, "beta_slow": 1, **rope}
    numbers = _numbers(rope, "beta_fast", "beta_slow", "original_max_position")
    if factor is None or numbers is None or min(numbers) <= 0 or theta == 1 or not isinstance(truncate, bool):
        return None
    fast, slow, context = numbers
    low, high = (_turning(turns, context, theta, 2 * len(base)) for turns in (fast, slow))
    if truncate:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, 2.0 * len(base) - 1)
    with np.errstate(over="ignore"):
        ramp = np.clip((np.arange(len(base)) - low) / (high - low if high != low else 0.001), 0.0, 1.0)
    return np.asarray(base / factor * ramp + base * (1 - ramp))


def _longrope(rope: Mapping[str, Any], base: np.ndarray, theta: float) -> np.ndarray | None:
    length, lists = _length(rope), [rope.get(name) for name in ("short_factor", "long_factor")]
    for factors in lists:
        if not isinstance(factors, list) or len(factors) != len(base):
            return None
        if not all(_number(factor) and factor >= 0.5 for factor in factors):
            return None
    if length is None:
        return None
    return base / np.array(lists[length[0] > length[1]], dtype=np.float64)


_KINDS: dict[str, Callable[[Mapping[str, Any], np.ndarray, float], np.ndarray | None]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "dynamic": _default,
    "yarn": _yarn,
    "longrope": _longrope,
}


def _stretched(rope: Mapping[str, Any], theta: float, dim: int) -> float | None:
    """Theta of dynamic NTK scaling, which grows with the sequence beyond the original length."""
    factor, length = _factor(rope), _length(rope)
    if factor is None or length is None or dim < 4:
        return None
    tokens, context = length
    if tokens <= context:
        return theta
    with decimal.localcontext(_EXACT):
        growth = Decimal(factor) * Decimal(tokens) / Decimal(context) - (Decimal(factor) - 1)
        stretched = Decimal(theta) * growth ** (Decimal(dim) / Decimal(dim - 2))
        return float(stretched) if stretched < _LARGEST else None


def _turning(turns: float, context: float, theta: float, dim: int) -> float:
    """The dimension whose pair turns this often within the original length; correctly rounded."""
    with decimal.localcontext(_EXACT):
        ratio = Decimal(context) / (Decimal(turns) * 2 * _PI)
        return float(dim * ratio.ln() / (2 * Decimal(theta).ln()))


def _factor(rope: Mapping[str, Any]) -> float | None:
    factor = rope.get("factor")
    return float(factor) if _number(factor) and float(factor) >= 1 else None


def _length(rope: Mapping[str, Any]) -> tuple[float, float] | None:
    """Length of the sequence and of those the model was made for, in tokens."""
    context = rope.get("original_max_position")
    length = rope.get("length", context)
    if not _number(context) or not _number(length) or context <= 0 or length <= 0:
        return None
    return float(length), float(context)


def _numbers(rope: Mapping[str, Any], *names: str) -> list[float] | None:
    numbers = [float(number) for name in names if _number(number := rope.get(name))]
    return numbers if len(numbers) == len(names) else None


def _number(value: Any) -> TypeGuard[float]:
    # An integer beyond binary64 would raise wherever it meets a float.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _LARGEST


def _power(theta: float, numerator: int, denominator: int) -> float:
    """``theta ** (numerator / denominator)``, correctly rounded."""
    return float(_EXACT.power(Decimal(theta), _EXACT.divide(Decimal(numerator), Decimal(denominator))))


def _round(values: np.ndarray, angles: np.ndarray, exact: Callable[[float], np.float32]) -> np.ndarray:
    """Round sines or cosines to binary32 as if they had been exact.

    A binary64 function is off by a few units of its last place, which matters to binary32 only beside the middle
    between two neighbours: there the exact value decides.
    """
    low = values.view(np.uint64) & np.uint64((1 << 29) - 1)
    out = values.astype(np.float32)
    for index in np.argwhere(np.abs(low.astype(np.int64) - (1 << 28)) <= 16):
        at = tuple(index)
        out[at] = exact(float(angles[at]))
    return out


def _exact_sine(angle: float, shift: int = 0) -> np.float32:
    """Sine of ``angle + shift * pi / 2``, correctly rounded."""
    with decimal.localcontext(_EXACT):
        turn = 2 * _PI
        x = Decimal(angle) + shift * _PI / 2
        x -= turn * (x / turn).to_integral_value()
        term = total = x
        for n in range(3, 99, 2):
            term *= -x * x / (n * (n - 1))
            total += term
        return _nearest(total)


def _exact_cosine(angle: float) -> np.float32:
    return _exact_sine(angle, 1)


def _nearest(value: Decimal) -> np.float32:
    """The binary32 nearest to a decimal, in one rounding."""
    rough = np.float32(float(value))
    near = [rough, np.nextafter(rough, np.float32(-2)), np.nextafter(rough, np.float32(2))]
    return min(near, key=lambda x: abs(Decimal(float(x)) - value))


class Rotation:
    """RoPE of one archive's keys for one head dimension, with cached cosine and sine tables.

    Attributes
    ----------
    dim : int
        Rotated dimensions (the first `dim` of each key).
    interleaved : bool
        Whether pairs are ``(2i, 2i + 1)`` rather than ``(i, i + dim / 2)``.
    """

    def __init__(self, freqs: np.ndarray, interleaved: bool) -> None:
        self._freqs = freqs
        self.dim = 2 * len(freqs)
        self.interleaved = interleaved
        self.tables = functools.lru_cache(maxsize=256)(self._tables)

    @classmethod
    def of(cls, rope: Mapping[str, Any] | None, keys: str | None, head_dim: int) -> Rotation | None:
        """The rotation that stored keys carry, or None when they carry none or it is not known."""
        if keys != "rotated" or rope is None:
            return None
        return _shared(json.dumps(dict(rope), sort_keys=True), head_dim)

    def _tables(self, position: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        angles = np.arange(position, position + tokens, dtype=np.float64)[:, None] * self._freqs
        cos, sin = _round(np.cos(angles), angles, _exact_cosine), _round(np.sin(angles), angles, _exact_sine)
        cos.flags.writeable = sin.flags.writeable = False
        return cos, sin

    def rotate(self, keys: np.ndarray, position: int) -> np.ndarray:
        """Rotate un-rotated keys, float32 ``[H, T, D]``, to positions ``position, position + 1, …``."""
        cos, sin = self.tables(position, keys.shape[1])
        return self._apply(keys, cos, sin)

    def unrotate(self, keys: np.ndarray, position: int) -> np.ndarray:
        """Inverse of `rotate`."""
        cos, sin = self.tables(position, keys.shape[1])
        return self._apply(keys, cos, -sin)

    def shift(self, keys: np.ndarray, from_position: int, to_position: int) -> np.ndarray:
        """Move rotated keys to other positions: rotate them back, then to where they go.

        Parameters
        ----------
        keys : ndarray
            Float32 ``[H, T, D]``, rotated to ``from_position, from_position + 1, …``.
        from_position, to_position : int
            Positions of the first token before and after.

        Returns
        -------
        ndarray
            Float32 ``[H, T, D]``, rotated to ``to_position, to_position + 1, …``. Both steps are done and rounded even
            where the two positions are equal, so what a shift gives depends on no special case.
        """
        return self.rotate(self.unrotate(keys, from_position), to_position)

    def _apply(self, keys: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
        out = np.array(keys, dtype=np.float32)
        half = self.dim // 2
        first, second = (slice(0, self.dim, 2), slice(1, self.dim, 2)) if self.interleaved else (
            slice(0, half), slice(half, self.dim))  # fmt: skip
        a, b = np.asarray(keys[..., first], np.float32), np.asarray(keys[..., second], np.float32)
        out[..., first] = a * cos - b * sin
        out[..., second] = b * cos + a * sin
        return out


@functools.lru_cache(maxsize=32)
def _shared(rope_json: str, head_dim: int) -> Rotation | None:
    rope = json.loads(rope_json)
    freqs = frequencies(rope, head_dim)
    return None if freqs is None else Rotation(freqs, rope.get("style", "half") == "interleaved")
