"""Small sessions for the archive tests: real structure (shared prefixes seen through kernel noise), random values."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np

from pltpack.snapshot import DTYPES, Identity, Snapshot

ROPE = {"type": "default", "theta": 10000.0, "dim": 16, "style": "half"}
IDENTITY = Identity(model="toy", rope=ROPE, keys="rotated")
LAYERS, HEADS, K_DIM, V_DIM = 3, 2, 16, 8


def values_of(ids: np.ndarray, salt: int = 0, dtype: str = "BF16") -> list[tuple[np.ndarray, np.ndarray]]:
    """Keys and values that depend on the tokens before and at each position, as a real cache does."""
    layers = []
    for layer in range(LAYERS):
        keys = np.empty((HEADS, len(ids), K_DIM), np.float32)
        values = np.empty((HEADS, len(ids), V_DIM), np.float32)
        state = 7 + salt
        for t, token in enumerate(ids):
            state = (state * 1_000_003 + int(token) + 1) % (1 << 61)
            rng = np.random.default_rng([state, layer])
            keys[:, t] = rng.standard_normal((HEADS, K_DIM)) + 2 * np.sin(np.arange(K_DIM))
            values[:, t] = rng.standard_normal((HEADS, V_DIM))
        layers.append((keys.astype(DTYPES[dtype]), values.astype(DTYPES[dtype])))
    return layers


def session(
    name: str, ids: list[int] | np.ndarray, *, salt: str | None = None, noise: int | None = None, weights: int = 0
) -> Snapshot:
    """A session over `ids`; `noise` seeds last-bit differences, `weights` stands for another model's values."""
    tokens = np.asarray(ids, np.int32)
    layers = values_of(tokens, weights)
    if noise is not None:
        rng = np.random.default_rng(noise)
        layers = [(flip_last_bits(k, rng), flip_last_bits(v, rng)) for k, v in layers]
    return Snapshot.from_arrays(name, tokens, layers, dataclasses.replace(IDENTITY, salt=salt))


def flip_last_bits(array: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Change about 3 % of the elements by one unit in the last place."""
    words = array.view(np.uint16).copy()
    words[rng.random(words.shape) < 0.03] ^= 1
    return words.view(ml_dtypes.bfloat16)


def equal_bits(a: Snapshot, b: Snapshot) -> bool:
    """Whether two snapshots hold the same tokens and the same bits."""
    if not np.array_equal(a.tokens, b.tokens) or a.identity != b.identity:
        return False
    for layer in range(len(a.identity.layers)):
        for x, y in zip(a.layer(layer), b.layer(layer), strict=True):
            kind = f"u{x.dtype.itemsize}"
            if not np.array_equal(np.ascontiguousarray(x).view(kind), np.ascontiguousarray(y).view(kind)):
                return False
    return True


def relative_error(a: Snapshot, b: Snapshot) -> float:
    """Largest RMS error over RMS value of any layer's keys or values."""
    worst = 0.0
    for layer in range(len(a.identity.layers)):
        for x, y in zip(a.layer(layer), b.layer(layer), strict=True):
            if x.size:
                difference = x.astype(np.float64) - y.astype(np.float64)
                scale = np.sqrt(np.square(x.astype(np.float64)).mean())
                worst = max(worst, float(np.sqrt(np.square(difference).mean()) / scale))
    return worst
