"""Rotary position embedding (RoPE, arXiv 2104.09864): rotate keys to their positions and back.

Angles are computed in binary64 and the cosines and sines rounded once to binary32; each rotated component is two
products and one sum in binary32. Spec: spec/codecs.md, section "RoPE".
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np


def frequencies(rope: Mapping[str, Any] | None, head_dim: int) -> np.ndarray | None:
    """Angular frequency per rotated pair, binary64 ``[dim / 2]`` in radians per position.

    Parameters
    ----------
    rope : mapping or None
        ``type`` ``default``, ``linear`` (``factor``) or ``llama3`` (``factor``, ``low_freq_factor``,
        ``high_freq_factor``, ``original_max_position``); ``theta``; optional ``dim`` below the head dimension for
        partial rotary; ``style`` ``half`` or ``interleaved``.
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
    if not _number(theta) or theta <= 0 or not isinstance(dim, int) or not 0 < dim <= head_dim or dim % 2:
        return None
    base = float(theta) ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    if kind == "default":
        return base
    factor = rope.get("factor")
    if not _number(factor) or factor <= 0:
        return None
    if kind == "linear":
        return base / factor
    if kind == "llama3":
        names = ("low_freq_factor", "high_freq_factor", "original_max_position")
        if not all(_number(rope.get(n)) for n in names):
            return None
        low, high, context = (float(rope[n]) for n in names)
        if low == high or context <= 0:
            return None
        wavelength = 2 * math.pi / base
        smooth = np.clip((context / wavelength - low) / (high - low), 0.0, 1.0)
        return (1 - smooth) * base / factor + smooth * base
    return None


def _number(value: Any) -> bool:  # noqa: ANN401
    # An integer beyond binary64 would raise wherever it meets a float.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300


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
        if keys != "rotated":
            return None
        freqs = frequencies(rope, head_dim)
        if freqs is None or rope is None:
            return None
        return _shared(json.dumps(dict(rope), sort_keys=True), head_dim)

    def _tables(self, position: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        angles = np.arange(position, position + tokens, dtype=np.float64)[:, None] * self._freqs
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
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
def _shared(rope_json: str, head_dim: int) -> Rotation:
    rope = json.loads(rope_json)
    freqs = frequencies(rope, head_dim)
    assert freqs is not None
    return Rotation(freqs, rope.get("style", "half") == "interleaved")
