"""Sessions whose caches behave as a model's where tokens repeat: mostly the tokens' own, a little of what is before."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from pltpack.codec.rope import Rotation
from pltpack.snapshot import DTYPES, Identity, LayerGeometry, Snapshot

ROPE = {"type": "default", "theta": 10000.0, "dim": 32, "style": "half"}
LAYERS = tuple(LayerGeometry(4, 32, 16, "BF16") for _ in range(2))
IDENTITY = Identity(model="toy", rope=ROPE, keys="rotated", layers=LAYERS)


def passage(seed: int, length: int) -> list[int]:
    """Token ids that occur in no other passage."""
    return np.random.default_rng([9, seed]).integers(1000 * seed, 1000 * seed + 900, length).tolist()


def values_of(ids: Sequence[int], context: float, seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    """Keys, rotated to their positions, and values; `context` is the part that depends on all tokens before."""
    tokens, state, states = np.asarray(ids, np.int64), seed, []
    for token in tokens:
        state = (state * 1_000_003 + int(token) + 1) % (1 << 61)
        states.append(state)
    out = []
    for index, layer in enumerate(LAYERS):
        shape = (layer.heads, layer.k_dim + layer.v_dim)
        own = [np.random.default_rng([int(token), index, seed]).normal(size=shape) for token in tokens]
        before = [np.random.default_rng([at, index]).normal(size=shape) for at in states]
        both = np.stack(own, axis=1) + context * np.stack(before, axis=1)
        rotation = Rotation.of(ROPE, "rotated", layer.k_dim)
        assert rotation is not None
        keys = rotation.rotate(both[:, :, : layer.k_dim].astype(np.float32), 0)
        dtype = DTYPES[layer.dtype]
        out.append((keys.astype(dtype), both[:, :, layer.k_dim :].astype(dtype)))
    return out


def session(
    name: str, ids: Sequence[int], *, context: float = 0.05, salt: str | None = None, seed: int = 0
) -> Snapshot:
    """A session over token ids; `seed` stands for another model's values."""
    identity = dataclasses.replace(IDENTITY, salt=salt)
    return Snapshot.from_arrays(name, np.asarray(ids, np.int32), values_of(ids, context, seed), identity)


def family() -> list[Snapshot]:
    """The same passages in other orders, with edits, at other positions, and twice in one session."""
    a, b, c = passage(1, 150), passage(2, 130), passage(3, 140)
    edited = [*b[:70], *passage(7, 3), *b[70:]]
    replaced = [*c[:60], *passage(8, 2), *c[62:]]
    return [
        session("plain", [*a, *b, *c]),
        session("turned", [*c, *passage(4, 20), *a]),
        session("edited", [*passage(5, 9), *edited, *replaced]),
        session("twice", [*(new := passage(6, 110)), *passage(9, 40), *new, *b[:90]]),
    ]
