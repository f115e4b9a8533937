"""Random rotations and codebooks for vectors on the sphere: the numeric half of TurboQuant (arXiv 2504.19874).

The rotation alternates random signs with Hadamard transforms, so decoding needs no dense product whose summation order
would depend on the machine. All arithmetic is binary32, one operation at a time; the steps are in `turboquant`'s
docstring. Every kernel is in this file: numba's cache would not notice a change in another one.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numba
import numpy as np

#: Three rounds equal a dense random rotation on real keys and values; the fourth makes it so for one-hot vectors.
ROUNDS = 4
#: Vectors rotated side by side.
LANES = 16
MOST_BORDERS = 15


@numba.njit(nogil=True, cache=True)
def _hadamard(buffer: Any, first: int, size: int, scale: Any) -> None:
    h = 1
    while h < size:
        run = h * LANES
        for base in range(first * LANES, (first + size) * LANES, 2 * run):
            upper, lower = buffer[base : base + run], buffer[base + run : base + 2 * run]
            if 2 * h == size:
                for i in range(run):
                    a, b = upper[i], lower[i]
                    upper[i], lower[i] = (a + b) * scale, (a - b) * scale
            else:
                for i in range(run):
                    a, b = upper[i], lower[i]
                    upper[i], lower[i] = a + b, a - b
        h *= 2


@numba.njit(nogil=True, cache=True)
def _flip(buffer: Any, signs: Any) -> None:
    for d in range(signs.size):
        sign, row = signs[d], buffer[d * LANES : d * LANES + LANES]
        for lane in range(LANES):
            row[lane] *= sign


@numba.njit(nogil=True, cache=True)
def _copy(source: Any, target: Any) -> None:
    for i in range(source.size):
        target[i] = source[i]


@numba.njit(nogil=True, cache=True)
def _copy_row(source: Any, i: int, target: Any, j: int) -> None:
    # Unsigned indices spare the check for negative ones.
    a, b = np.uint64(i) * np.uint64(LANES), np.uint64(j) * np.uint64(LANES)
    for lane in range(LANES):
        target[b + np.uint64(lane)] = source[a + np.uint64(lane)]


@numba.njit(nogil=True, cache=True)
def _rotate(buffer: Any, spare: Any, signs: Any, perms: Any, size: int, scale: Any) -> None:
    rounds, _, dim = signs.shape
    for r in range(rounds):
        _flip(buffer, signs[r, 0])
        if size < dim:
            _copy(buffer, spare)
            for d in range(dim):
                _copy_row(spare, perms[r, d], buffer, d)
        _hadamard(buffer, 0, size, scale)
        if size < dim:
            _flip(buffer, signs[r, 1])
            _hadamard(buffer, dim - size, size, scale)


@numba.njit(nogil=True, cache=True)
def _rotate_back(buffer: Any, spare: Any, signs: Any, perms: Any, size: int, scale: Any) -> None:
    rounds, _, dim = signs.shape
    for r in range(rounds - 1, -1, -1):
        if size < dim:
            _hadamard(buffer, dim - size, size, scale)
            _flip(buffer, signs[r, 1])
        _hadamard(buffer, 0, size, scale)
        if size < dim:
            _copy(buffer, spare)
            for d in range(dim):
                _copy_row(spare, d, buffer, perms[r, d])
        _flip(buffer, signs[r, 0])


@numba.njit(nogil=True, cache=True)
def norms(vectors: Any, out: Any) -> None:
    """Norms of float32 ``[N, D]`` into float64 ``[N]``; NaN and infinities come through."""
    count, dim = vectors.shape
    totals = np.empty(LANES)
    for n in range(0, count, LANES):
        here = min(LANES, count - n)
        totals[:] = 0
        # Side by side, the sums of several vectors do not wait for one another.
        for d in range(dim):
            for lane in range(here):
                element = np.float64(vectors[n + lane, d])
                totals[lane] += element * element
        for lane in range(here):
            out[n + lane] = math.sqrt(totals[lane])


@numba.njit(nogil=True, cache=True)
def quantize(vectors: Any, norms: Any, signs: Any, perms: Any, size: int, scale: Any, borders: Any, out: Any) -> None:
    """Indices uint8 ``[N, D]`` of float32 vectors ``[N, D]`` divided by `norms` ``[N]`` and rotated.

    `borders`, float32 ``[MOST_BORDERS]``, lie between the levels; an element on a border goes to the upper level.
    """
    count, dim = vectors.shape
    buffer, spare = np.zeros(dim * LANES, np.float32), np.empty(dim * LANES, np.float32)
    index, divisors = np.empty(dim * LANES, np.int32), np.ones(LANES, np.float32)
    for n in range(0, count, LANES):
        here = min(LANES, count - n)
        for lane in range(here):
            # A norm that rounds to zero gives zeros back whatever the indices are.
            divisors[lane] = norms[n + lane] if norms[n + lane] > 0 else np.float32(1)
            for d in range(dim):
                buffer[d * LANES + lane] = vectors[n + lane, d]
        for d in range(dim):
            row = buffer[d * LANES : d * LANES + LANES]
            for lane in range(LANES):
                row[lane] /= divisors[lane]
        _rotate(buffer, spare, signs, perms, size, scale)
        for i in range(dim * LANES):
            found = np.int32(0)
            # A fixed count, padded with infinities, lets the compiler unroll this loop and vectorize the outer one.
            for j in range(MOST_BORDERS):
                found += np.int32(buffer[i] >= borders[j])
            index[i] = found
        for lane in range(here):
            for d in range(dim):
                out[n + lane, d] = index[d * LANES + lane]


@numba.njit(nogil=True, cache=True)
def dequantize(indices: Any, levels: Any, norms: Any, signs: Any, perms: Any, size: int, scale: Any, limit: Any,
               out: Any) -> None:  # fmt: skip
    """Vectors float32 ``[N, D]``: levels of the `indices`, rotated back, times `norms`, clamped to +-`limit`."""
    count, dim = indices.shape
    buffer, spare = np.zeros(dim * LANES, np.float32), np.empty(dim * LANES, np.float32)
    for n in range(0, count, LANES):
        here = min(LANES, count - n)
        for lane in range(here):
            for d in range(dim):
                buffer[d * LANES + lane] = levels[indices[n + lane, d]]
        _rotate_back(buffer, spare, signs, perms, size, scale)
        for lane in range(here):
            norm = norms[n + lane]
            for d in range(dim):
                out[n + lane, d] = min(max(buffer[d * LANES + lane] * norm, -limit), limit)


@numba.njit(nogil=True, cache=True)
def pack(indices: Any, bits: int, out: Any) -> None:
    """Bytes of `indices`, uint8 ``[8 G]`` to ``[bits G]``, the first in the lowest bits."""
    # Eight elements fill `bits` bytes; the caller pads both arrays to whole groups.
    for group in range(indices.size // 8):
        word = np.uint32(0)
        for k in range(8):
            word |= np.uint32(indices[8 * group + k]) << np.uint32(bits * k)
        for k in range(bits):
            out[bits * group + k] = np.uint8((word >> np.uint32(8 * k)) & np.uint32(0xFF))


@numba.njit(nogil=True, cache=True)
def unpack(packed: Any, bits: int, out: Any) -> None:
    """Inverse of `pack`."""
    mask = np.uint32((1 << bits) - 1)
    for group in range(out.size // 8):
        word = np.uint32(0)
        for k in range(bits):
            word |= np.uint32(packed[bits * group + k]) << np.uint32(8 * k)
        for k in range(8):
            out[8 * group + k] = np.uint8((word >> np.uint32(bits * k)) & mask)


def lloyd_max(dim: int, bits: int) -> np.ndarray:
    """Codebook of one coordinate of a uniformly random unit vector, least mean squared error (section 3.1).

    Parameters
    ----------
    dim : int
        Vector length.
    bits : int
        Logarithm of the number of levels.

    Returns
    -------
    ndarray
        float32 ``[2**bits]``, ascending, antisymmetric.
    """
    if dim == 1:
        return np.linspace(-1, 1, 1 << bits, dtype=np.float32)
    # With x = sin(angle) the density (1 - x^2)^((dim - 3)/2) has no pole, for dim 2 either.
    reach = min(math.pi / 2, 12 / math.sqrt(dim))
    edges = np.linspace(-reach, reach, 200_001)
    angles = (edges[1:] + edges[:-1]) / 2
    x, weights = np.sin(angles), np.exp((dim - 2) * np.log(np.cos(angles)))
    mass = np.concatenate([[0.0], np.cumsum(weights)])
    moment = np.concatenate([[0.0], np.cumsum(weights * x)])
    levels = np.interp((np.arange(1 << bits) + 0.5) / (1 << bits) * mass[-1], mass[1:], x)
    for _ in range(5000):
        # Borders between grid points matter: rounded to the grid, the iteration stands still far from its limit.
        cuts = np.concatenate([[-reach], np.arcsin((levels[1:] + levels[:-1]) / 2), [reach]])
        former, levels = levels, np.diff(np.interp(cuts, edges, moment)) / np.diff(np.interp(cuts, edges, mass))
        levels = (levels - levels[::-1]) / 2
        if np.abs(levels - former).max() < 1e-9 * levels[-1]:
            break
    out: np.ndarray = levels.astype(np.float32)
    return out


@dataclasses.dataclass(frozen=True, slots=True)
class Rotation:
    """A pseudo-random rotation of vectors of length D.

    Attributes
    ----------
    signs : ndarray
        float32 ``[ROUNDS, 1, D]``; ``[ROUNDS, 2, D]`` where D is no power of two.
    perms : ndarray
        int64 ``[ROUNDS, D]``; used only where D is no power of two.
    size : int
        Length of a Hadamard step, the largest power of two up to D.
    scale : float32
        What makes a Hadamard step orthogonal.
    """

    signs: np.ndarray
    perms: np.ndarray
    size: int
    scale: np.float32

    @classmethod
    def of(cls, dim: int, seed: int) -> Rotation:
        """The rotation that `seed` gives for length `dim`."""
        size = 1 << (dim.bit_length() - 1)
        steps, swaps = (1, 0) if size == dim else (2, dim - 1)
        draws = _splitmix64((seed << 32) + dim, ROUNDS * (steps * dim + swaps)).reshape(ROUNDS, -1)
        signs = np.where(draws[:, : steps * dim] >> np.uint64(63), np.float32(-1), np.float32(1))
        perms = np.tile(np.arange(dim), (ROUNDS, 1))
        for perm, row in zip(perms, draws[:, steps * dim :] >> np.uint64(32), strict=True):
            targets = (row * np.arange(dim, dim - swaps, -1, dtype=np.uint64)) >> np.uint64(32)
            for i, j in zip(range(dim - 1, dim - 1 - swaps, -1), targets.tolist(), strict=True):
                perm[i], perm[j] = perm[j], perm[i]
        return cls(signs.reshape(ROUNDS, steps, dim), perms, size, np.float32(1 / math.sqrt(size)))


def _splitmix64(start: int, count: int) -> np.ndarray:
    z = np.uint64(start) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
