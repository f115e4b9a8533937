"""Kernels of TurboQuant: random rotations and look-ups; on the CPU `pltpack.codec.sphere`, whose bits these give.

One warp rotates one vector, in shared memory: a Hadamard step is ``log2 P`` passes of butterflies, 32 at a time. One
grid row (``blockIdx.y``) serves the keys or the values of one unit.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import cuda, types

from pltpack.gpu import device
from pltpack.gpu.arithmetic import float_of, over, plus, times, to_bf16
from pltpack.gpu.place import place_of

# Columns of a table of parts, int64: heads, coded and exact tokens, where their numbers begin, tokens, dimension, where
# norms, packed indices and the words of exact tokens begin (bytes), where vectors (and indices of the encoder) begin,
# and bits of an index.
(HEADS, CODED, EXACT, CODED_AT, EXACT_AT, TOKENS, WIDTH, NORMS, INDICES, WORDS, VECTORS, BITS, PART_COLUMNS) = range(13)


def shared_bytes(dim: int) -> int:
    """Dynamic shared memory of the kernels that rotate: a vector and a spare one for each warp of a block."""
    warps = device.SIMULATED_WARPS if device.is_simulated() else device.WARPS
    return 8 * dim * warps


@cuda.jit(device=True)
def _hadamard(buffer: Any, at: Any, size: Any, scale: Any, lane: Any) -> None:
    h = 1
    while h < size:
        for i in range(lane, size >> 1, 32):
            low = at + (i // h) * 2 * h + i % h
            a, b = buffer[low], buffer[low + h]
            x, y = plus(a, b), plus(a, -b)
            if 2 * h == size:
                x, y = times(x, scale), times(y, scale)
            buffer[low], buffer[low + h] = x, y
        cuda.syncwarp()
        h *= 2


@cuda.jit(device=True)
def _flip(buffer: Any, at: Any, signs: Any, turn: Any, step: Any, dim: Any, lane: Any) -> None:
    for d in range(lane, dim, 32):
        buffer[at + d] = times(buffer[at + d], signs[turn, step, d])
    cuda.syncwarp()


@cuda.jit(device=True)
def _index(data: Any, at: Any, bit: Any, bits: Any) -> Any:
    byte = at + (bit >> 3)
    word = np.int32(data[byte]) | np.int32(np.int32(data[byte + 1]) << 8)
    return (word >> np.int32(bit & 7)) & np.int32((1 << bits) - 1)


@cuda.jit
def dequantize_kernel(
    data: Any, parts: Any, tokens: Any, levels: Any, signs: Any, perms: Any, size: Any, scale: Any, vectors: Any
) -> None:  # fmt: skip
    """Vectors of coded tokens: levels of their indices, rotated back, times their norms.

    Parameters
    ----------
    data : uint8 ``[...]``
        Payloads, and one byte more.
    parts : int64 ``[n, PART_COLUMNS]``
        All of one dimension D.
    tokens : int32 ``[...]``
        Numbers of coded tokens, and of exact ones.
    levels : float32 ``[2 ** bits]``
    signs, perms, size, scale
        See `pltpack.codec.sphere.Rotation`: float32 ``[4, 1 or 2, D]``, int32 ``[4, D]``, int32, float32.
    vectors : float32 ``[...]``
        Filled where tokens are coded, ``[H, T, D]``.
    """
    shared = cuda.shared.array(0, types.float32)
    part = parts[cuda.blockIdx.y]
    lane, warp, warps = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5, cuda.blockDim.x >> 5
    coded, dim, bits = part[CODED], part[WIDTH], part[BITS]
    at = warp * 2 * dim
    spare = at + dim
    for number in range(cuda.blockIdx.x * warps + warp, part[HEADS] * coded, cuda.gridDim.x * warps):
        for d in range(lane, dim, 32):
            shared[at + d] = levels[_index(data, part[INDICES], (number * dim + d) * bits, bits)]
        cuda.syncwarp()
        for back in range(4):
            turn = 3 - back
            if size < dim:
                _hadamard(shared, at + dim - size, size, scale, lane)
                _flip(shared, at, signs, turn, 1, dim, lane)
            _hadamard(shared, at, size, scale, lane)
            if size < dim:
                for d in range(lane, dim, 32):
                    shared[spare + d] = shared[at + d]
                cuda.syncwarp()
                for d in range(lane, dim, 32):
                    shared[at + perms[turn, d]] = shared[spare + d]
                cuda.syncwarp()
            _flip(shared, at, signs, turn, 0, dim, lane)
        byte = part[NORMS] + 2 * number
        norm = float_of(np.uint32((np.int64(data[byte]) << 16) | (np.int64(data[byte + 1]) << 24)))
        token = np.int64(tokens[part[CODED_AT] + number % coded])
        to = part[VECTORS] + (number // coded * part[TOKENS] + token) * dim
        for d in range(lane, dim, 32):
            vectors[to + d] = times(shared[at + d], norm)
        cuda.syncwarp()


@cuda.jit
def exact_kernel(data: Any, parts: Any, targets: Any, tokens: Any, pages: Any, itemsize: Any, words: Any) -> None:
    """Words of exact tokens, as they stand in the payload."""
    part, target = parts[cuda.blockIdx.y], targets[cuda.blockIdx.y]
    lane, warps = cuda.threadIdx.x & 31, cuda.blockDim.x >> 5
    exact, dim = part[EXACT], part[WIDTH]
    for number in range(cuda.blockIdx.x * warps + (cuda.threadIdx.x >> 5), part[HEADS] * exact, cuda.gridDim.x * warps):
        to = place_of(target, pages, number // exact, np.int64(tokens[part[EXACT_AT] + number % exact]))
        for d in range(lane, dim, 32):
            at, word = part[WORDS] + (number * dim + d) * itemsize, np.int64(0)
            for i in range(itemsize):
                word |= np.int64(data[at + i]) << (8 * i)
            words[to + d] = word


@cuda.jit
def norms_kernel(vectors: Any, parts: Any, norms: Any) -> None:
    """Norms of all vectors as bfloat16 words ``[H, T]`` from each part's `NORMS` on (elements).

    Squares of binary32 numbers are exact in binary64, so a fused sum of them is the separate one.
    """
    part = parts[cuda.blockIdx.y]
    count, dim = part[HEADS] * part[TOKENS], part[WIDTH]
    start, step = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x, cuda.gridDim.x * cuda.blockDim.x
    for number in range(start, count, step):
        total = np.float64(0)
        for d in range(dim):
            element = np.float64(vectors[part[VECTORS] + number * dim + d])
            total += element * element
        norms[part[NORMS] + number] = to_bf16(np.float32(math.sqrt(total)))


@cuda.jit
def quantize_kernel(
    vectors: Any, parts: Any, tokens: Any, norms: Any, signs: Any, perms: Any, size: Any, scale: Any, borders: Any,
    indices: Any
) -> None:  # fmt: skip
    """Indices uint8 ``[H, N, D]`` of the coded tokens' vectors over their norms, rotated, between `borders` (15)."""
    shared = cuda.shared.array(0, types.float32)
    part = parts[cuda.blockIdx.y]
    lane, warp, warps = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5, cuda.blockDim.x >> 5
    coded, dim = part[CODED], part[WIDTH]
    at = warp * 2 * dim
    spare = at + dim
    for number in range(cuda.blockIdx.x * warps + warp, part[HEADS] * coded, cuda.gridDim.x * warps):
        vector = number // coded * part[TOKENS] + np.int64(tokens[part[CODED_AT] + number % coded])
        norm = float_of(np.uint32(np.int64(norms[part[NORMS] + vector]) << 16))
        # A norm that rounds to zero gives zeros back whatever the indices are.
        divisor = norm if norm > np.float32(0) else np.float32(1)
        for d in range(lane, dim, 32):
            shared[at + d] = over(vectors[part[VECTORS] + vector * dim + d], divisor)
        cuda.syncwarp()
        for turn in range(4):
            _flip(shared, at, signs, turn, 0, dim, lane)
            if size < dim:
                for d in range(lane, dim, 32):
                    shared[spare + d] = shared[at + d]
                cuda.syncwarp()
                for d in range(lane, dim, 32):
                    shared[at + d] = shared[spare + perms[turn, d]]
                cuda.syncwarp()
            _hadamard(shared, at, size, scale, lane)
            if size < dim:
                _flip(shared, at, signs, turn, 1, dim, lane)
                _hadamard(shared, at + dim - size, size, scale, lane)
        for d in range(lane, dim, 32):
            found = np.int32(0)
            for border in range(15):
                if shared[at + d] >= borders[border]:
                    found = np.int32(found + 1)
            indices[part[INDICES] + number * dim + d] = found
        cuda.syncwarp()


@cuda.jit
def pack_kernel(indices: Any, bits: Any, packed: Any) -> None:
    """Bytes of indices uint8 ``[8 G]`` to ``[bits G]``, the first in the lowest bits."""
    for group in range(cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x, indices.size >> 3,
                       cuda.gridDim.x * cuda.blockDim.x):  # fmt: skip
        word = np.int64(0)
        for k in range(8):
            word |= np.int64(indices[8 * group + k]) << (bits * k)
        for k in range(bits):
            packed[bits * group + k] = (word >> (8 * k)) & 255


_TABLE, _BYTES, _SHORTS, _INTS = types.int64[:, ::1], types.uint8[::1], types.uint16[::1], types.int32[::1]
_FLOATS, _SIGNS, _PERMS = types.float32[::1], types.float32[:, :, ::1], types.int32[:, ::1]
_TURN = (_SIGNS, _PERMS, types.int32, types.float32)
SIGNATURES = {
    dequantize_kernel: (_BYTES, _TABLE, _INTS, _FLOATS, *_TURN, _FLOATS),
    exact_kernel: (_BYTES, _TABLE, _TABLE, _INTS, _INTS, types.int32, _SHORTS),
    norms_kernel: (_FLOATS, _TABLE, _SHORTS),
    quantize_kernel: (_FLOATS, _TABLE, _INTS, _SHORTS, *_TURN, _FLOATS, _BYTES),
    pack_kernel: (_BYTES, types.int32, _BYTES),
}
