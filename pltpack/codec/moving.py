"""Move rotated keys to other positions, in their stored dtype (spec/format.md, "Mapping table").

Bits are those of `pltpack.codec.rope.Rotation.shift`, rounded; for BF16 a compiled loop gives them sooner.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numba
import numpy as np

from pltpack.codec import vectors
from pltpack.codec.rope import Rotation

_BF16 = np.dtype(ml_dtypes.bfloat16)
#: Tokens that are moved at once: tables of angles are kept for later ones, and must stay small.
_TOKENS = 256


def move(keys: np.ndarray, rotation: Rotation, position: int, target: int, out: np.ndarray | None = None) -> None:
    """Move keys to other positions, in place unless there is an `out`.

    Components that are not finite become 0: what a machine gives for them would not be the same everywhere. All are
    clamped to the largest finite value of the dtype.

    Parameters
    ----------
    keys : ndarray
        ``[H, T, D]`` in the stored dtype, at ``position, position + 1, …``; may be strided along the token axis.
    rotation : Rotation
    position, target : int
        Positions of the first token before and after.
    out : ndarray, optional
        Where the moved keys go, of the same shape and dtype; may be strided along the token axis.
    """
    for at in range(0, keys.shape[1], _TOKENS):
        part = keys[:, at : at + _TOKENS]
        room = part if out is None else out[:, at : at + _TOKENS]
        if keys.dtype == _BF16 and part.strides[2] == room.strides[2] == _BF16.itemsize:
            tokens = part.shape[1]
            tables = *rotation.tables(position + at, tokens), *rotation.tables(target + at, tokens)
            _move_bf16(part.view(np.uint16), *tables, rotation.interleaved, room.view(np.uint16))
        else:
            _move(part, rotation, position + at, target + at, room)


def _move(keys: np.ndarray, rotation: Rotation, position: int, target: int, out: np.ndarray) -> None:
    limit = float(ml_dtypes.finfo(keys.dtype).max)  # type: ignore[no-untyped-call]
    with np.errstate(over="ignore", invalid="ignore"):
        moved = rotation.shift(keys.astype(np.float32), position, target)
        moved[~np.isfinite(moved)] = 0
        out[:] = np.clip(moved, -limit, limit).astype(keys.dtype)


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _move_bf16(words: Any, cos: Any, sin: Any, to_cos: Any, to_sin: Any, interleaved: Any, out: Any) -> None:
    heads, tokens, dim = words.shape
    half = cos.shape[1]
    # The first and the second of each pair, and what is not rotated: loops over neighbours only.
    line = np.empty(dim, np.float32)
    bits = line.view(np.uint32)
    first, second, rest = bits[:half], bits[half : 2 * half], bits[2 * half :]
    u, v = line[:half], line[half : 2 * half]
    # Whole blocks of pairs and nothing else, as in most models: no memory between words and words.
    usual = not interleaved and half % vectors.BLOCK == 0 and 2 * half == dim
    for h in range(heads):
        for t in range(tokens):
            row, target = words[h, t], out[h, t]
            if usual:
                for i in range(0, half, vectors.BLOCK):
                    vectors.move(row, i, half + i, cos[t], sin[t], to_cos[t], to_sin[t], i, target, i, half + i)
                continue
            if interleaved:
                for i in range(half):
                    first[i] = np.uint32(row[2 * i]) << np.uint32(16)
                    second[i] = np.uint32(row[2 * i + 1]) << np.uint32(16)
                for i in range(rest.size):
                    rest[i] = np.uint32(row[2 * half + i]) << np.uint32(16)
            else:
                for i in range(dim):
                    bits[i] = np.uint32(row[i]) << np.uint32(16)
            back_cos, back_sin, on_cos, on_sin = cos[t], sin[t], to_cos[t], to_sin[t]
            for i in range(half):
                x = u[i] * back_cos[i] + v[i] * back_sin[i]
                y = v[i] * back_cos[i] - u[i] * back_sin[i]
                u[i] = x * on_cos[i] - y * on_sin[i]
                v[i] = y * on_cos[i] + x * on_sin[i]
            for i in range(dim):
                bits[i] = _rounded(bits[i])
            if interleaved:
                for i in range(half):
                    target[2 * i] = first[i]
                    target[2 * i + 1] = second[i]
                for i in range(rest.size):
                    target[2 * half + i] = rest[i]
            else:
                for i in range(dim):
                    target[i] = bits[i]


@numba.njit(cache=True, nogil=True, inline="always")
def _rounded(word: Any) -> Any:
    """The upper half of a binary32 number, rounded to even; see `move` for what is out of range."""
    rounded = (word + np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    # Rounding up the largest finite numbers would make infinities.
    if (rounded & np.uint32(0x7F80)) == np.uint32(0x7F80):
        rounded = (word >> np.uint32(16)) & np.uint32(0x8000) | np.uint32(0x7F7F)
    return np.uint32(0) if (word & np.uint32(0x7F800000)) == np.uint32(0x7F800000) else rounded
