"""Between a unit's arrays and its rows: un-rotated float32 ``[T, rows]``, layer after layer, keys then values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numba
import numpy as np

from pltpack.codec.base import KeyValue
from pltpack.codec.rope import Rotation
from pltpack.codec.vectors import BLOCK, finite_bfloat, turned_bfloat
from pltpack.snapshot import Identity, LayerGeometry

_BF16 = np.dtype(ml_dtypes.bfloat16)
_jit = numba.njit(cache=True, nogil=True, error_model="numpy")
#: Squares of what may still be coded must not overflow.
LIMIT = 1e15
#: What rotating and rounding cannot bring to the limit.
SMALL = 1e14


def to_rows(
    arrays: Sequence[KeyValue], layers: Sequence[LayerGeometry], identity: Identity, position: int
) -> tuple[np.ndarray, np.ndarray]:
    """Rows of a unit's tokens, and which tokens are finite throughout.

    Parameters
    ----------
    arrays : sequence of (ndarray, ndarray)
        Per layer keys ``[H, T, D_k]`` and values ``[H, T, D_v]`` in the stored dtype.
    layers : sequence of LayerGeometry
    identity : Identity
    position : int
        Of the first token.

    Returns
    -------
    rows : ndarray
        float32 ``[T, rows]``; 0 in tokens that are not finite.
    finite : ndarray
        bool ``[T]``.
    """
    tokens = arrays[0][0].shape[1]
    rows = np.empty((tokens, sum(layer.elements_per_token for layer in layers)), np.float32)
    at = 0
    for (keys, values), layer in zip(arrays, layers, strict=True):
        rotation = Rotation.of(identity.rope, identity.keys, layer.k_dim)
        width = layer.heads * layer.k_dim
        _put(keys.astype(np.float32), rotation, position, rows[:, at : at + width])
        at += width
        width = layer.heads * layer.v_dim
        _put(values.astype(np.float32), None, position, rows[:, at : at + width])
        at += width
    finite = np.abs(rows).max(axis=1, initial=0) < LIMIT
    rows[~finite] = 0
    return rows, finite


def small(array: np.ndarray) -> bool:
    """Whether all values, of any dtype, are finite and below `SMALL`."""
    with np.errstate(invalid="ignore"):
        return bool((np.abs(array.astype(np.float32)) < SMALL).all())


def _put(x: np.ndarray, rotation: Rotation | None, position: int, out: np.ndarray) -> None:
    if rotation is None:
        out[:] = x.transpose(1, 0, 2).reshape(out.shape)
        return
    cos, sin = rotation.tables(position, x.shape[1])
    _unrotate(np.ascontiguousarray(x), cos, sin, rotation.interleaved, out)


def from_rows(
    rows: np.ndarray, out: Sequence[KeyValue], layers: Sequence[LayerGeometry], identity: Identity, position: int
) -> None:
    """Inverse of `to_rows` up to rounding to the stored dtype, into `out`."""
    at = 0
    for (keys, values), layer in zip(out, layers, strict=True):
        rotation = Rotation.of(identity.rope, identity.keys, layer.k_dim)
        for array, turn in ((keys, rotation), (values, None)):
            _take(rows, at, turn, position, array)
            at += layer.heads * array.shape[2]


def _take(rows: np.ndarray, first: int, rotation: Rotation | None, position: int, out: np.ndarray) -> None:
    heads, tokens, dim = out.shape
    if rotation is None:
        cos = sin = np.zeros((tokens, 0), np.float32)
        interleaved = False
    else:
        cos, sin = rotation.tables(position, tokens)
        interleaved = rotation.interleaved
    if out.dtype == _BF16:
        _rotate_bf16(rows, first, cos, sin, interleaved, out.view(np.uint16))
        return
    wide = np.empty((heads, tokens, dim), np.float32)
    _rotate(rows[:, first : first + heads * dim], cos, sin, interleaved, wide)
    with np.errstate(over="ignore"):
        limit = float(ml_dtypes.finfo(out.dtype).max)  # type: ignore[no-untyped-call]
        out[:] = np.clip(wide, -limit, limit).astype(out.dtype)


@_jit
def _turn(source: Any, cos: Any, sin: Any, sign: Any, interleaved: Any, target: Any) -> None:
    """Rotate one head of one token, ``[D]``, by its angles; back if `sign` is -1."""
    half = len(cos)
    for i in range(half):
        a = 2 * i if interleaved else i
        b = 2 * i + 1 if interleaved else i + half
        u, v, turned = source[a], source[b], sin[i] * sign
        target[a] = u * cos[i] - v * turned
        target[b] = v * cos[i] + u * turned
    for i in range(2 * half, len(source)):
        target[i] = source[i]


@_jit
def _unrotate(x: Any, cos: Any, sin: Any, interleaved: Any, out: Any) -> None:
    heads, tokens, dim = x.shape
    for h in range(heads):
        for t in range(tokens):
            _turn(x[h, t], cos[t], sin[t], np.float32(-1), interleaved, out[t, h * dim : (h + 1) * dim])


@_jit
def _rotate(rows: Any, cos: Any, sin: Any, interleaved: Any, out: Any) -> None:
    heads, tokens, dim = out.shape
    for h in range(heads):
        for t in range(tokens):
            _turn(rows[t, h * dim : (h + 1) * dim], cos[t], sin[t], np.float32(1), interleaved, out[h, t])


@_jit
def _rotate_bf16(rows: Any, first: Any, cos: Any, sin: Any, interleaved: Any, out: Any) -> None:
    heads, tokens, dim = out.shape
    half = cos.shape[1]
    # In whole vectors: halves that are rotated, and what is not.
    turned = 0 if interleaved else half // BLOCK * BLOCK
    plain = 2 * half + (dim - 2 * half) // BLOCK * BLOCK
    line = np.empty(dim, np.float32)
    for h in range(heads):
        at = first + h * dim
        for t in range(tokens):
            place, angle = t * (rows.strides[0] // 4) + at, t * (cos.strides[0] // 4)
            to = h * (out.strides[0] // 2) + t * (out.strides[1] // 2)
            for i in range(0, turned, BLOCK):
                turned_bfloat(rows, place + i, place + half + i, cos, sin, angle + i, out, to + i, to + half + i)
            for i in range(2 * half, plain, BLOCK):
                finite_bfloat(rows, place + i, out, to + i)
            if turned < half or plain < dim:
                _turn(rows[t, at : at + dim], cos[t], sin[t], np.float32(1), interleaved, line)
                _round_rest(line, turned, half, plain, out[h, t])


@_jit
def _round_rest(line: Any, turned: Any, half: Any, plain: Any, out: Any) -> None:
    words = line.view(np.uint32)
    for i in range(len(line)):
        if (i < 2 * half and i % half >= turned) or i >= plain:
            word = words[i]
            # Rounding up the largest finite numbers would make infinities.
            rounded = (word + np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
            if (rounded & np.uint32(0x7F80)) == np.uint32(0x7F80):
                rounded = (word >> np.uint32(16)) & np.uint32(0x8000) | np.uint32(0x7F7F)
            out[i] = np.uint16(rounded)
