"""Move rotated keys to other positions, in their stored dtype (spec/format.md, "Mapping table").

Bits are those of `pltpack.codec.rope.Rotation.shift`, rounded; for BF16 a compiled loop gives them sooner.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numba
import numpy as np

from pltpack.codec.rope import Rotation

_BF16 = np.dtype(ml_dtypes.bfloat16)
#: Tokens that are moved at once: tables of angles are kept for later ones, and must stay small.
_TOKENS = 256


def move(keys: np.ndarray, rotation: Rotation, position: int, target: int) -> None:
    """Move keys to other positions, in place.

    Components that are not finite become 0: what a machine gives for them would not be the same everywhere. All are
    clamped to the largest finite value of the dtype.

    Parameters
    ----------
    keys : ndarray
        ``[H, T, D]`` in the stored dtype, at ``position, position + 1, …``; may be strided along the token axis.
    rotation : Rotation
    position, target : int
        Positions of the first token before and after.
    """
    for at in range(0, keys.shape[1], _TOKENS):
        part = keys[:, at : at + _TOKENS]
        if keys.dtype == _BF16:
            tokens = part.shape[1]
            tables = *rotation.tables(position + at, tokens), *rotation.tables(target + at, tokens)
            _move_bf16(part.view(np.uint16), *tables, rotation.interleaved)
        else:
            _move(part, rotation, position + at, target + at)


def _move(keys: np.ndarray, rotation: Rotation, position: int, target: int) -> None:
    limit = float(ml_dtypes.finfo(keys.dtype).max)  # type: ignore[no-untyped-call]
    with np.errstate(over="ignore", invalid="ignore"):
        moved = rotation.shift(keys.astype(np.float32), position, target)
        moved[~np.isfinite(moved)] = 0
        keys[:] = np.clip(moved, -limit, limit).astype(keys.dtype)


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _move_bf16(words: Any, cos: Any, sin: Any, to_cos: Any, to_sin: Any, interleaved: Any) -> None:
    heads, tokens, dim = words.shape
    half = cos.shape[1]
    line = np.empty(dim, np.float32)
    bits = line.view(np.uint32)
    for h in range(heads):
        for t in range(tokens):
            for i in range(dim):
                bits[i] = np.uint32(words[h, t, i]) << np.uint32(16)
            for i in range(half):
                a = 2 * i if interleaved else i
                b = 2 * i + 1 if interleaved else i + half
                u, v = line[a], line[b]
                x = u * cos[t, i] + v * sin[t, i]
                y = v * cos[t, i] - u * sin[t, i]
                line[a] = x * to_cos[t, i] - y * to_sin[t, i]
                line[b] = y * to_cos[t, i] + x * to_sin[t, i]
            for i in range(dim):
                word = bits[i]
                # Rounding up the largest finite numbers would make infinities.
                rounded = (word + np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
                if (word & np.uint32(0x7F800000)) == np.uint32(0x7F800000):
                    rounded = np.uint32(0)
                elif (rounded & np.uint32(0x7F80)) == np.uint32(0x7F80):
                    rounded = (word >> np.uint32(16)) & np.uint32(0x8000) | np.uint32(0x7F7F)
                words[h, t, i] = np.uint16(rounded)
