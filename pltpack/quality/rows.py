"""Rows of a cache: all layers of a token as one vector, in the order of profiles (spec/profile.md), and its blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from pltpack.codec.importance import LEAST_NORM
from pltpack.codec.profile import blocks_of, rows_of
from pltpack.snapshot import LayerGeometry

# Tokens whose blocks are multiplied at once: as many as caches hold.
_TOKENS = 128


class Blocks:
    """Where the blocks of a model's rows are: one per layer, kind and head.

    Parameters
    ----------
    layers : sequence of LayerGeometry

    Attributes
    ----------
    widths, starts : list of int
        Per block.
    layer_rows : list of int
        First row of each layer, and the number of all rows.
    is_key : ndarray
        bool, per row.
    """

    def __init__(self, layers: Sequence[LayerGeometry]) -> None:
        self.layers = tuple(layers)
        self.widths = [width for layer in layers for width in blocks_of(layer)]
        self.starts = np.concatenate([[0], np.cumsum(self.widths)]).astype(int).tolist()
        self.layer_rows = np.concatenate([[0], np.cumsum([rows_of(layer) for layer in layers])]).astype(int).tolist()
        kinds = [kind for layer in layers for kind in [True] * layer.heads + [False] * layer.heads]
        self.is_key = np.repeat(kinds, self.widths)

    @property
    def rows(self) -> int:
        """Rows of all layers."""
        return self.starts[-1]

    def runs(self, first: int = 0, last: int | None = None) -> Iterator[tuple[int, int, int, int]]:
        """Runs of equally wide blocks in rows ``first … last - 1``: first row, block, number of blocks, width."""
        at = self.starts.index(first)
        end = self.starts.index(self.rows if last is None else last)
        while at < end:
            width, count = self.widths[at], 1
            while at + count < end and self.widths[at + count] == width:
                count += 1
            yield self.starts[at], at, count, width
            at += count

    def split(self, x: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Blocks of rows ``[T, rows]`` by runs: number of the first block, and ``[blocks, T, width]``."""
        for start, block, count, width in self.runs():
            part = x[:, start : start + count * width].reshape(len(x), count, width)
            yield block, part.transpose(1, 0, 2)

    def squares(self, x: np.ndarray) -> list[np.ndarray]:
        """Sums of x xᵀ over the tokens of rows ``[T, rows]``, ``[width, width]`` per block."""
        return [product for _, parts in self.split(x) for product in parts.transpose(0, 2, 1) @ parts]

    def multiply(self, x: np.ndarray, matrices: Sequence[np.ndarray], first: int = 0) -> np.ndarray:
        """Each block times its matrix: float32 like `x`, ``[T, …]`` of rows from `first` on."""
        out = np.empty(x.shape, np.float32)
        for start, block, count, width in self.runs(first, first + x.shape[1]):
            at = slice(start - first, start - first + count * width)
            stacked = np.stack([np.asarray(m, np.float32) for m in matrices[block : block + count]])
            for token in range(0, len(x), _TOKENS):
                tokens = slice(token, token + _TOKENS)
                part = x[tokens, at].reshape(-1, count, width).transpose(1, 0, 2)
                out[tokens, at] = (part @ stacked).transpose(1, 0, 2).reshape(part.shape[1], -1)
        return out


def joined(keys: Sequence[np.ndarray], values: Sequence[np.ndarray]) -> np.ndarray:
    """Rows ``[T, rows]`` of arrays ``[H, T, D]`` per layer, in their dtype."""
    parts = [a.transpose(1, 0, 2).reshape(a.shape[1], -1) for pair in zip(keys, values, strict=True) for a in pair]
    return np.concatenate(parts, axis=1)


def parted(rows: np.ndarray, layers: Sequence[LayerGeometry]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Inverse of `joined`."""
    keys: list[np.ndarray] = []
    values: list[np.ndarray] = []
    at = 0
    for layer in layers:
        for side, width in ((keys, layer.k_dim), (values, layer.v_dim)):
            part = rows[:, at : at + layer.heads * width]
            side.append(part.reshape(len(rows), layer.heads, width).transpose(1, 0, 2))
            at += layer.heads * width
    return keys, values


def log_norms(rows: np.ndarray, blocks: Blocks) -> np.ndarray:
    """What `pltpack.codec.importance.norms` gives but for rounding, of all layers: float32 ``[T, blocks]``."""
    squares = np.concatenate([np.einsum("btw,btw->tb", part, part) for _, part in blocks.split(rows)], axis=1)
    found: np.ndarray = np.log(np.maximum(np.sqrt(squares.astype(np.float64)), LEAST_NORM)).astype(np.float32)
    return found


def to_bits(x: np.ndarray) -> np.ndarray:
    """Bits of float32 numbers rounded to bfloat16, ties to even: uint16. Finite numbers only."""
    wide = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((wide + (0x7FFF + ((wide >> 16) & 1))) >> 16).astype(np.uint16)


def from_bits(bits: np.ndarray) -> np.ndarray:
    """bfloat16 bits as float32 numbers."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
