"""The CUDA simulator for tests of kernels, and units with the places that they are decoded to.

To be imported before `pltpack.gpu`: numba decides when `numba.cuda` is imported whether it simulates.
"""

from __future__ import annotations

import os

import numpy as np
import pytest


def _simulate():
    """Import `numba.cuda` as a simulator; skip where a driver's CUDA was imported before."""
    import numba

    # Numba reads this when it is imported; other test files have done that.
    kept = os.environ.get("NUMBA_ENABLE_CUDASIM")
    os.environ["NUMBA_ENABLE_CUDASIM"] = "1"
    numba.config.reload_config()
    try:
        from pltpack.gpu import device

        if not device.is_simulated():
            pytest.skip("numba.cuda was imported for a device before", allow_module_level=True)
    finally:
        # Programs that other tests start must not simulate.
        if kept is None:
            del os.environ["NUMBA_ENABLE_CUDASIM"]


_simulate()

from pltpack.gpu.jobs import Job, places_of  # noqa: E402


def bits(array):
    """Words of an array."""
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


def flat(layers):
    """Words of pairs of arrays, one after the other."""
    return np.concatenate([bits(array).reshape(-1) for pair in layers for array in pair])


def decoded(backend, codec, units, dtype):
    """Words that a backend decodes from (payload, unit, reference) to contiguous places, unit after unit."""
    shapes = [unit.layers or (unit.geometry,) for _, unit, _ in units]
    sizes = [unit.tokens * sum(g.elements_per_token for g in layers)
             for (_, unit, _), layers in zip(units, shapes, strict=True)]  # fmt: skip
    words = backend.buffer(sum(sizes), dtype)
    starts = np.cumsum(sizes) - sizes
    jobs = [Job(memoryview(payload), unit, places_of(layers, unit.tokens, words, int(at)), 0, reference)
            for (payload, unit, reference), layers, at in zip(units, shapes, starts, strict=True)]  # fmt: skip
    backend.decode_units(codec, jobs)
    return backend.to_host(words)
