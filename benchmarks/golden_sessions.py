"""Sessions of the golden archives: drawn from a seed, or cut from real dumps."""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import numpy as np

from pltpack.dumps import open_dumps
from pltpack.snapshot import DTYPES, Identity, Snapshot

ROPE = {"type": "default", "theta": 10000.0, "style": "half"}

Shape = tuple[int, int, int]


def drawn(
    name: str,
    ids: list[int],
    *,
    layers: tuple[Shape, ...] = ((1, 8, 6), (1, 8, 6)),
    dtype: str = "BF16",
    noise: int = 0,
    odd: bool = False,
    seed: int = 0,
    **identity: Any,
) -> Snapshot:
    """A session whose values depend on the tokens up to each position, drawn from a seed.

    Parameters
    ----------
    name : str
    ids : list of int
        Tokens.
    layers : tuple of (heads, k_dim, v_dim)
    dtype : str
    noise : int
        Not 0: change about 2 % of the words by one unit in the last place.
    odd : bool
        Put infinities, NaNs with payloads, zeros of both signs and subnormal numbers in.
    seed : int
    **identity
        Fields of `Identity`.
    """
    arrays = []
    bits = 8 * DTYPES[dtype].itemsize
    unsigned = np.dtype(f"u{bits // 8}")
    for layer, (heads, k_dim, v_dim) in enumerate(layers):
        pair = []
        for kind, dim in enumerate((k_dim, v_dim)):
            x = np.zeros((heads, len(ids), dim), np.float32)
            state = seed + 1
            for t, token in enumerate(ids):
                state = (state * 1_000_003 + token + 1) % (1 << 61)
                x[:, t] = np.random.default_rng([state, layer, kind]).standard_normal((heads, dim), dtype=np.float32)
            x += (np.arange(dim, dtype=np.float32) % 5) * (1 - kind)
            words = x.astype(DTYPES[dtype]).view(unsigned)
            rng = np.random.default_rng([layer, kind, noise, len(ids)])
            if noise:
                words ^= (rng.random(words.shape) < 0.02).astype(unsigned)
            if odd and len(ids) > 8:
                places = rng.integers(0, words[:, 6:].size, 12)
                late = words[:, 6:].reshape(-1)
                late[places] = rng.integers(0, 1 << bits, 12, dtype=np.uint64).astype(unsigned)
                late[places[:4]] = [1 << (bits - 1), 1, (1 << bits) - 1, np.array(np.inf, np.float32).astype(
                    DTYPES[dtype]).view(unsigned)]  # fmt: skip
                words = np.concatenate([words[:, :6], late.reshape(heads, -1, dim)], axis=1)
            pair.append(words.view(DTYPES[dtype]))
        arrays.append((pair[0], pair[1]))
    base = Identity(**{"model": "golden", "rope": ROPE, "keys": "rotated", **identity})
    return Snapshot.from_arrays(name, ids, arrays, base)


def ids(count: int, seed: int = 0) -> list[int]:
    """Tokens drawn from a seed."""
    return np.random.default_rng(seed).integers(0, 49152, count).tolist()


class RealDumps:
    """Sessions cut from real dumps: some layers, one head, half of the rotated pairs, the first tokens.

    The pairs of half rotary that stay, every other one, have the frequencies of a theta of the square root.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @functools.cached_property
    def _whole(self) -> dict[str, Snapshot]:
        return {snapshot.session: snapshot for snapshot in open_dumps([self._folder])}

    def cut(self, session: str, tokens: int, layers: tuple[int, ...] = (1, 17), head: int = 0) -> Snapshot:
        """A part of a session of the dumps."""
        whole = self._whole[session]
        shape = whole.identity.layers[0]
        pairs = np.arange(0, shape.k_dim // 2, 2)
        channels = np.concatenate([pairs, pairs + shape.k_dim // 2])
        rope = dict(whole.identity.rope or {})
        rope.update(dim=len(channels), theta=math.sqrt(rope["theta"]))
        arrays = [
            (keys[head : head + 1, :, channels], values[head : head + 1, :, ::2])
            for keys, values in (whole.layer(layer, 0, tokens) for layer in layers)
        ]
        identity = dataclasses.replace(whole.identity, rope=rope, layers=())
        return Snapshot.from_arrays(session, whole.tokens[:tokens], arrays, identity)
