"""Rotary embeddings: shifts between positions."""

from __future__ import annotations

import numpy as np
import pytest

from pltpack.codec.rope import Rotation

DEFAULT = {"type": "default", "theta": 10000.0, "style": "half"}


def random_keys(heads: int, tokens: int, dim: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((heads, tokens, dim)).astype(np.float32)


@pytest.mark.parametrize("rope", [DEFAULT, DEFAULT | {"style": "interleaved"}, DEFAULT | {"dim": 8}])
def test_shift_moves_keys(rope: dict[str, object]) -> None:
    rotation = Rotation.of(rope, "rotated", 16)
    assert rotation is not None
    keys = random_keys(2, 40, 16)
    moved = rotation.shift(rotation.rotate(keys, 1000), 1000, 37)
    assert moved.dtype == np.float32
    np.testing.assert_allclose(moved, rotation.rotate(keys, 37), atol=2e-6)
    assert not np.allclose(moved, rotation.rotate(keys, 1000), atol=1e-2)
    # Both roundings are part of what a shift is, whatever the positions are.
    np.testing.assert_array_equal(rotation.shift(keys, 5, 5), rotation.rotate(rotation.unrotate(keys, 5), 5))
