"""Small profiles that break no rule, made by chance, and sessions for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pltpack.archive import profiles
from pltpack.codec.base import KeyValue, Unit
from pltpack.codec.coefficients import OCTAVE, SYMBOLS, raw_bits
from pltpack.codec.profile import RECENCY, blocks_of, pack_about, rows_of
from pltpack.codec.transform import TransformCodec
from pltpack.snapshot import DTYPES, Identity, LayerGeometry, Snapshot

ROPE = {"type": "default", "theta": 10000.0, "dim": 8, "style": "half"}
#: Keys and values of different sizes, other in each layer; the middle one is rotated in part.
LAYERS = (LayerGeometry(2, 8, 4, "BF16"), LayerGeometry(1, 12, 8, "BF16"), LayerGeometry(3, 8, 8, "BF16"))
IDENTITY = Identity(model="toy", rope=ROPE, keys="rotated", layers=LAYERS)
TURN_END = 7


def orthonormal(size: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """An orthonormal matrix whose entries are 0 and ±1 times a factor a row: int8 ``[N, N]`` and float32 ``[N]``."""
    out, scale, at = np.zeros((size, size), np.int8), np.empty(size, np.float32), 0
    while at < size:
        width = 1 << ((size - at).bit_length() - 1)
        block = np.ones((1, 1), np.int8)
        while len(block) < width:
            block = np.block([[block, block], [block, -block]]).astype(np.int8)
        out[at : at + width, at : at + width], scale[at : at + width] = block, width**-0.5
        at += width
    order = rng.permutation(size)
    signs = rng.choice(np.array([-1, 1], np.int8), size)
    return (out[order] * signs)[:, rng.permutation(size)], scale[order]


def tables_of(classes: int, floor: int) -> np.ndarray:
    """Frequencies uint16 ``[classes, 64]`` of Laplace distributions; every symbol has one."""
    out = np.empty((classes, SYMBOLS), np.int64)
    values = np.array([0, *(k for n in range(1, 32) for k in (n, -n))], np.float64)
    raw = raw_bits(np.arange(classes), floor)
    for kind in range(classes):
        mean = 2.0 ** ((floor + 8 * kind + 4) / OCTAVE - raw[kind])
        weight = np.append(np.exp(-np.abs(values) / max(mean, 0.05)), 1e-3)
        out[kind] = 1 + np.floor(weight / weight.sum() * (4096 - SYMBOLS)).astype(np.int64)
        out[kind, 0] += 4096 - out[kind].sum()
    return out.astype(np.uint16)


def random_profile(
    layers: Sequence[LayerGeometry] = LAYERS,
    seed: int = 0,
    group: int = 2,
    rank: int = 9,
    templates: int = 1,
    logs: int = 0,
    kl: tuple[float, float] = (-3.0, 1.0),
) -> dict[str, np.ndarray]:
    """Arrays of a profile; `logs` moves all scales, in 1/24 octave."""
    rng = np.random.default_rng(seed)
    total, features = sum(map(rows_of, layers)), sum(2 * layer.heads for layer in layers) + RECENCY
    ranks, basis, scales, local, local_scale = [], [], [], [], []
    for start in range(0, len(layers), group):
        rows = sum(map(rows_of, layers[start : start + group]))
        ranks.append(min(rank, rows))
        matrix, scale = orthonormal(rows, rng)
        basis.append(matrix[: ranks[-1]].reshape(-1))
        scales.append(scale[: ranks[-1]])
    for layer in layers:
        matrix, scale = orthonormal(rows_of(layer), rng)
        local.append(matrix.reshape(-1))
        local_scale.append(scale)
    roots = []
    for layer in layers:
        for width in blocks_of(layer):
            vector = rng.normal(size=width) / np.sqrt(width)
            roots.append((np.diag(rng.uniform(0.5, 2, width)) + np.outer(vector, vector)).astype("<f2").reshape(-1))
    floor, hidden = -16 * OCTAVE, 3
    return {
        "about": pack_about({"version": 1, "layer_group": group, "floor": floor, "kl": list(kl),
                             "turn_ends": [TURN_END], "source": {"kind": "chance"}}),
        "mean": rng.normal(size=total).astype(np.float32),
        "whiten": np.concatenate(roots),
        "basis.rank": np.array(ranks, np.uint32),
        "basis": np.concatenate(basis).astype(np.int16),
        "basis.scale": np.concatenate(scales).astype(np.float32),
        "basis.log": (logs + rng.integers(-24, 48, sum(ranks))).astype(np.int16),
        "local": np.concatenate(local),
        "local.scale": np.concatenate(local_scale).astype(np.float32),
        "local.log": (logs + rng.integers(-48, 24, total)).astype(np.int16),
        "tables": tables_of(80, floor),
        "importance.mean": np.zeros(features, np.float32),
        "importance.scale": np.ones(features, np.float32),
        "importance.linear": np.append(rng.normal(size=features - 5) / 4, [-0.4, 0.5, 0, 0, 0]).astype(np.float32),
        "importance.hidden": rng.normal(size=(hidden, features)).astype(np.float32),
        "importance.bias": rng.normal(size=hidden).astype(np.float32),
        "importance.out": (rng.normal(size=hidden) / 4).astype(np.float32),
        "importance.center": np.zeros(1, np.float32),
        "sink.tokens": np.full((templates, 4), -1, np.int32),
        "sink.bits": _bits(rng, (templates, 4, total)),
    }  # fmt: skip


def _bits(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.normal(size=shape).astype(DTYPES["BF16"]).view(np.uint16)


def values_of(ids: np.ndarray, layers: Sequence[LayerGeometry] = LAYERS, seed: int = 0) -> list[KeyValue]:
    """Keys and values that depend on the tokens before and at each position, as a real cache does."""
    states, state = [], seed
    for token in ids:
        state = (state * 1_000_003 + int(token) + 1) % (1 << 61)
        states.append(state)
    out = []
    for index, layer in enumerate(layers):
        drawn = [np.random.default_rng([at, index]).normal(size=(layer.heads, layer.k_dim + layer.v_dim))
                 for at in states]  # fmt: skip
        both = np.stack(drawn, axis=1) if drawn else np.empty((layer.heads, 0, layer.k_dim + layer.v_dim))
        dtype = DTYPES[layer.dtype]
        out.append((both[:, :, : layer.k_dim].astype(dtype), both[:, :, layer.k_dim :].astype(dtype)))
    return out


def session(name: str, ids: Sequence[int] | np.ndarray, identity: Identity = IDENTITY, **more: Any) -> Snapshot:
    """A session over token ids."""
    tokens = np.asarray(ids, np.int32)
    return Snapshot.from_arrays(name, tokens, values_of(tokens, identity.layers), identity, **more)


def save_profile(path: Path, identity: Identity = IDENTITY, **changes: Any) -> Path:
    """A profile file; arguments as of `random_profile`."""
    profiles.save(path, random_profile(identity.layers, **changes), dataclasses.replace(identity, model=None))
    return path


def started(arrays: dict[str, np.ndarray], identity: Identity = IDENTITY, **config: Any) -> TransformCodec:
    """The codec with a profile."""
    codec = TransformCodec(**config)
    codec.start(arrays, identity)
    return codec


def unit_of(group: range, tokens: int, position: int = 0, layers: Sequence[LayerGeometry] = LAYERS) -> Unit:
    """A unit of a layer group."""
    mine = tuple(layers[group.start : group.stop])
    return Unit(group.start, mine[0], position, tokens, layers=mine)


def empty_like(arrays: Sequence[KeyValue]) -> list[KeyValue]:
    """Arrays to decode to, filled with something that is seen if it stays."""
    return [(np.full_like(k, 77, order="C"), np.full_like(v, 77, order="C")) for k, v in arrays]


def words(array: np.ndarray) -> np.ndarray:
    """Bits of an array."""
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


def same_tokens(a: Sequence[KeyValue], b: Sequence[KeyValue]) -> np.ndarray:
    """Which tokens are equal in every bit: bool ``[T]``."""
    equal = [(words(x) == words(y)).all(axis=(0, 2)) for p, q in zip(a, b, strict=True)
             for x, y in zip(p, q, strict=True)]  # fmt: skip
    found: np.ndarray = np.all(equal, axis=0)
    return found
