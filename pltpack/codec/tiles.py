"""Transposes of 16-bit words by tiles of 16 times 16 that stay in registers, emitted as LLVM IR vectors.

A compiler moves the words of a transpose one by one. LLVM splits these vectors for whatever processor it compiles for.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types
from numba.extending import intrinsic

SIDE = 16

_I16, _I32 = ir.IntType(16), ir.IntType(32)
_LINE = ir.VectorType(_I16, SIDE)


@intrinsic
def _tile(typing: Any, source: Any, at: Any, stride: Any, target: Any, to: Any, pitch: Any) -> Any:
    """``target[to + pitch * j + i] = source[at + stride * i + j]`` for i and j below 16; offsets in words."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def line(array: int, first: int, number: int) -> Any:
            data = context.make_array(signature.args[array])(context, builder, arguments[array]).data
            begin, step = (
                context.cast(builder, arguments[i], signature.args[i], types.int64) for i in (first, first + 1)
            )
            place = builder.add(begin, builder.mul(step, ir.Constant(step.type, number)))
            return builder.bitcast(builder.gep(data, [place]), _LINE.as_pointer())

        lines = [builder.load(line(0, 1, i), align=1) for i in range(SIDE)]
        half = SIDE // 2
        picks = [
            ir.Constant(ir.VectorType(_I32, SIDE), [x for i in range(half) for x in (first + i, SIDE + first + i)])
            for first in (0, half)
        ]
        # Each round joins lines half the tile apart, word by word; after as many rounds as bits, columns are lines.
        for _ in range(SIDE.bit_length() - 1):
            lines = [builder.shuffle_vector(lines[i], lines[half + i], pick) for i in range(half) for pick in picks]
        for i, value in enumerate(lines):
            builder.store(value, line(3, 4, i), align=1)
        return context.get_dummy_value()

    return types.none(source, at, stride, target, to, pitch), emit


def fits(words: np.ndarray) -> bool:
    """Whether words ``[H, T, D]`` can be taken in tiles: 16 bits, contiguous tokens."""
    return words.dtype == np.uint16 and words.strides[1:] == (2 * words.shape[2], 2)


@numba.njit(nogil=True, cache=True)
def to_rows(words: Any, rows: Any) -> None:
    """Copy ``[H, T, D]`` that `fits` to channel rows ``[H * D, T]`` with contiguous columns."""
    heads, count, dim = words.shape
    stride, pitch = words.strides[0] // 2, rows.strides[0] // 2
    tokens, channels = count // SIDE * SIDE, dim // SIDE * SIDE
    for h in range(heads):
        for d in range(0, channels, SIDE):
            for t in range(0, tokens, SIDE):
                _tile(words, h * stride + t * dim + d, dim, rows, (h * dim + d) * pitch + t, pitch)
        for d in range(dim):
            for t in range(tokens if d < channels else 0, count):
                rows[h * dim + d, t] = words[h, t, d]


@numba.njit(nogil=True, cache=True)
def from_rows(rows: Any, words: Any) -> None:
    """Inverse of `to_rows`."""
    heads, count, dim = words.shape
    stride, pitch = words.strides[0] // 2, rows.strides[0] // 2
    tokens, channels = count // SIDE * SIDE, dim // SIDE * SIDE
    for h in range(heads):
        for t in range(0, tokens, SIDE):
            for d in range(0, channels, SIDE):
                _tile(rows, (h * dim + d) * pitch + t, pitch, words, h * stride + t * dim + d, dim)
        for d in range(dim):
            for t in range(tokens if d < channels else 0, count):
                words[h, t, d] = rows[h * dim + d, t]
