"""Blocks as vLLM's attention on CPUs packs them, and how to tell which packing a dump has.

A block of N tokens and one head holds N D packed key elements, then N D packed value elements (vLLM ``csrc/cpu``):

- ``cpu-vec`` (any dtype): keys ``[D][N]``, values ``[N][D]``;
- ``cpu-amx`` (2-byte dtypes, processors with AMX): keys ``[N/16][D/2][16][2]``, values ``[D/16][N/2][16][2]``.

``plain`` is a row of keys and a row of values per token, as on GPUs. Nothing in a dump says which it is, but in the
first layer a token's values depend on the token alone: under the right packing, equal tokens have equal values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from pltpack.errors import UnsupportedError

PLAIN, VEC, AMX = "plain", "cpu-vec", "cpu-amx"
#: Largest share of the variance that may lie within equal tokens under the right packing, and the least under others.
_EQUAL, _MIXED = 0.05, 0.3
#: Tokens that must come again before a packing is told by them.
_REPEATS = 4
_TOKENS = 512


@dataclasses.dataclass(frozen=True, slots=True)
class Packing:
    """A layout's name and the tokens of a block, 1 where blocks do not matter."""

    name: str
    block: int = 1

    def check(self, tokens: int, dim: int, item: int) -> None:
        """Raise UnsupportedError unless caches of this shape can be packed so."""
        amx = self.name == AMX
        if tokens % self.block or (self.name != PLAIN and self.block % 16):
            raise UnsupportedError(f"{tokens} tokens are not whole blocks of {self.block} as {self.name} packs them")
        if amx and (item != 2 or dim % 16 or self.block % 32):
            raise UnsupportedError(f"{self.name} packs 2-byte dtypes, dimensions in 16s and blocks in 32s, not "
                                   f"{item} bytes, {dim} and {self.block}")  # fmt: skip

    def unpack(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values ``[H, T, D]`` of rows ``[T, H, 2 D]``, T whole blocks."""
        count, heads, width = rows.shape
        dim, n = width // 2, self.block
        if self.name == PLAIN:
            plain = rows.transpose(1, 0, 2)
            return np.ascontiguousarray(plain[..., :dim]), np.ascontiguousarray(plain[..., dim:])
        flat = rows.reshape(-1, n, heads, width).transpose(2, 0, 1, 3).reshape(heads, -1, 2, n * dim)
        keys, values = flat[:, :, 0], flat[:, :, 1]
        if self.name == AMX:
            keys = keys.reshape(heads, -1, n // 16, dim // 2, 16, 2).transpose(0, 1, 2, 4, 3, 5)
            values = values.reshape(heads, -1, dim // 16, n // 2, 16, 2).transpose(0, 1, 3, 5, 2, 4)
        else:
            keys = keys.reshape(heads, -1, dim, n).swapaxes(2, 3)
        return keys.reshape(heads, count, dim), values.reshape(heads, count, dim)

    def pack(self, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Inverse of `unpack`: rows ``[T, H, 2 D]``."""
        heads, count, dim = keys.shape
        n = self.block
        if self.name == PLAIN:
            return np.ascontiguousarray(np.concatenate([keys, values], axis=2).transpose(1, 0, 2))
        if self.name == AMX:
            keys = keys.reshape(heads, -1, n // 16, 16, dim // 2, 2).transpose(0, 1, 2, 4, 3, 5)
            values = values.reshape(heads, -1, n // 2, 2, dim // 16, 16).transpose(0, 1, 4, 2, 5, 3)
        else:
            keys = keys.reshape(heads, -1, n, dim).swapaxes(2, 3)
        halves = [part.reshape(heads, -1, 1, n * dim) for part in (keys, values)]
        flat = np.concatenate(halves, axis=2).reshape(heads, -1, n, 2 * dim)
        return np.ascontiguousarray(flat.transpose(1, 2, 0, 3)).reshape(count, heads, 2 * dim)


def candidates(tokens: int, dim: int, item: int) -> Iterator[Packing]:
    """Packings that so many tokens may have."""
    yield Packing(PLAIN)
    for block in range(16, min(tokens, _TOKENS) + 1, 16):
        for name in (VEC, AMX):
            packing = Packing(name, block)
            try:
                packing.check(tokens, dim, item)
            except UnsupportedError:
                continue
            yield packing


def told_packing(read: Callable[[int], np.ndarray], tokens: np.ndarray, dim: int, item: int) -> Packing | None:
    """The packing under which equal tokens have equal values in the first layer; None where that cannot be told.

    Parameters
    ----------
    read : callable
        ``read(count)``: the first rows ``[count, H, 2 D]`` of the first layer.
    tokens : ndarray
        Int32 ``[T]``.
    dim, item : int
        Head dimension, and bytes per element.
    """
    rows: dict[int, np.ndarray] = {}

    def values(packing: Packing) -> np.ndarray:
        count = min(len(tokens), _TOKENS)
        count -= count % packing.block
        if count not in rows:
            rows[count] = read(count)
        return packing.unpack(rows[count])[1]

    packings = list(candidates(len(tokens), dim, item))
    told = told_order([values(packing) for packing in packings], tokens)
    return None if told is None else packings[told]


def told_order(readings: Sequence[np.ndarray], tokens: np.ndarray) -> int | None:
    """Which of several readings of the first layer's values is right: the one in which equal tokens have equal values.

    Parameters
    ----------
    readings : sequence of ndarray
        ``[H, T', D]`` each, of the first T' tokens.
    tokens : ndarray
        Int32 ``[T]``.

    Returns
    -------
    int or None
        None where too few tokens come again, or the readings do not differ enough.
    """
    scores = []
    for index, values in enumerate(readings):
        count = values.shape[1]
        # Wrong readings, and damaged ones, may be anything.
        with np.errstate(invalid="ignore", over="ignore"):
            score = _within(values.transpose(1, 0, 2).reshape(count, -1).astype(np.float64), tokens[:count])
        if score is None:
            return None
        scores.append((score, index))
    scores.sort()
    if scores[0][0] > _EQUAL or (len(scores) > 1 and scores[1][0] < _MIXED):
        return None
    return scores[0][1]


def _within(values: np.ndarray, tokens: np.ndarray) -> float | None:
    """Variance of values ``[T, E]`` among equal tokens, as a share of all variance of these tokens."""
    if not np.isfinite(values).all():
        return 1.0
    _, group, counts = np.unique(tokens, return_inverse=True, return_counts=True)
    again = counts[group] > 1
    if again.sum() - (counts > 1).sum() < _REPEATS or (counts > 1).sum() < 2:
        return None
    sums = np.zeros((len(counts), values.shape[1]))
    np.add.at(sums, group, values)
    means = sums[group] / counts[group][:, None]
    total = float(((values[again] - values[again].mean(axis=0)) ** 2).sum())
    return float(((values[again] - means[again]) ** 2).sum()) / total if total > 0 else None
