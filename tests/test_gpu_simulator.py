"""Warps in numba's simulator: votes, shuffles, lanes that leave, and kernels that cannot go on."""

from __future__ import annotations

import gpu_common  # noqa: F401 - before pltpack.gpu
import numpy as np
import pytest
from numba import cuda

from pltpack.gpu import arithmetic
from pltpack.snapshot import DTYPES


@cuda.jit
def vote(values, masks, neighbours):
    i = cuda.threadIdx.x
    masks[i] = cuda.ballot_sync(0xFFFFFFFF, values[i] > 2)
    neighbours[i] = cuda.shfl_sync(0xFFFFFFFF, values[i], (i + 1) % 32)


@cuda.jit
def leave(counts):
    i = cuda.threadIdx.x
    # Warps take different numbers of steps, and half of the lanes of one leave early.
    for _ in range(2 + i // 32):
        cuda.syncwarp()
    if i < 48:
        cuda.syncthreads()
        counts[i] = 1


@cuda.jit
def stuck():
    if cuda.threadIdx.x < 16:
        cuda.syncwarp()
    else:
        cuda.syncthreads()


@cuda.jit
def fails(values):
    i = cuda.threadIdx.x
    cuda.syncwarp()
    values[i + 1] = 1
    cuda.syncwarp()


@cuda.jit
def to_words(floats, bf16, f16, e4m3, e5m2):
    i = cuda.threadIdx.x
    bf16[i] = arithmetic.to_bf16(floats[i])
    f16[i] = arithmetic.to_narrow(floats[i], 10, 15)
    e4m3[i] = arithmetic.to_narrow(arithmetic.clamp(floats[i], np.float32(448)), 3, 7)
    e5m2[i] = arithmetic.to_narrow(floats[i], 2, 15)


def test_votes_and_shuffles_stay_in_their_warp():
    values = np.random.default_rng(0).integers(0, 6, 64)
    masks, neighbours = np.zeros(64, np.int64), np.zeros(64, np.int64)
    vote[1, 64](values, masks, neighbours)
    for warp in (slice(0, 32), slice(32, 64)):
        expected = sum(1 << lane for lane in range(32) if values[warp][lane] > 2)
        assert (masks[warp] == expected).all()
        assert np.array_equal(neighbours[warp], np.roll(values[warp], -1))


def test_nobody_waits_for_lanes_that_left():
    counts = np.zeros(64, np.int64)
    leave[1, 64](counts)
    assert counts.sum() == 48


def test_lanes_that_wait_at_different_places_are_an_error():
    with pytest.raises(RuntimeError, match="different places"):
        stuck[1, 32]()


def test_errors_of_a_lane_stop_its_block():
    with pytest.raises(IndexError):
        fails[1, 32](np.zeros(32))


def test_rounding_to_every_format():
    rng = np.random.default_rng(1)
    floats = (rng.normal(size=256) * np.exp2(rng.integers(-30, 16, 256))).astype(np.float32)
    # Ties, the smallest numbers of each format and their halves, and zeros.
    floats[:12] = [0, -0.0, 2**-24, 2**-25, 3 * 2**-26, 2**-16, 2**-17, 2**-10, 1 + 2**-8, 1 + 3 * 2**-8, 2**-9, 448]
    floats = np.clip(floats, -57344, 57344)
    words = [np.zeros(256, f"u{DTYPES[name].itemsize}") for name in ("BF16", "F16", "F8_E4M3", "F8_E5M2")]
    to_words[1, 256](floats, *words)
    for name, found in zip(("BF16", "F16", "F8_E4M3", "F8_E5M2"), words, strict=True):
        wanted = (np.clip(floats, -448, 448) if name == "F8_E4M3" else floats).astype(DTYPES[name])
        assert np.array_equal(found, wanted.view(found.dtype)), name
