"""Snapshots of random bits, and their comparison, for the tests of dump formats."""

from __future__ import annotations

import numpy as np

from pltpack.snapshot import DTYPES, Identity, Snapshot

FORMATS = ("safetensors", "hdf5", "transformers")
ROPE = {"type": "default", "theta": 10000.0, "dim": 8, "style": "half"}


def bits(rng, shape, dtype):
    """Arrays of any bit pattern: NaN payloads, infinities and subnormals among them."""
    dtype = DTYPES[dtype]
    return rng.integers(0, 256, (*shape, dtype.itemsize), dtype=np.uint8).view(dtype)[..., 0]


def make(session="s", count=5, layers=((2, 8, 8, "BF16"),), seed=0, extras=False, **identity):
    """A snapshot with `layers` given as (heads, k_dim, v_dim, dtype)."""
    rng = np.random.default_rng(seed)
    arrays = [(bits(rng, (h, count, k), d), bits(rng, (h, count, v), d)) for h, k, v, d in layers]
    more = {}
    if extras:
        more = {
            "logprobs": rng.standard_normal((count, 3)).astype(np.float32),
            "logprob_ids": rng.integers(0, 99, (count, 3)).astype(np.int32),
            "importance": rng.random(count).astype(np.float32),
        }
    return Snapshot.from_arrays(session, rng.integers(0, 1 << 31, count), arrays, Identity(**identity), **more)


def assert_same(a, b):
    """Equal in name, tokens, identity, extras and every bit of the caches."""
    assert (a.session, a.identity) == (b.session, b.identity)
    assert a.tokens.dtype == b.tokens.dtype == np.int32
    np.testing.assert_array_equal(a.tokens, b.tokens)
    for name in ("logprobs", "logprob_ids", "importance"):
        x, y = getattr(a, name), getattr(b, name)
        assert (x is None) == (y is None)
        if x is not None:
            assert x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
    for index in range(len(a.identity.layers)):
        for x, y in zip(a.layer(index), b.layer(index), strict=True):
            assert x.dtype == y.dtype and x.shape == y.shape
            assert np.ascontiguousarray(x).tobytes() == np.ascontiguousarray(y).tobytes()


def target(folder, format):
    """Where a dump of this format goes in a folder."""
    return folder / ("dump.h5" if format == "hdf5" else "dump")
