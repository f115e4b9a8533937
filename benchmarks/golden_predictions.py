"""Golden cases of format 1.2: passages that come again elsewhere, rotary embeddings with a length, probabilities."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.golden_sessions import ROPE, RealDumps, Shape, drawn, ids
from benchmarks.golden_steps import Case, Step, append, compress
from benchmarks.golden_transform import profile_of
from pltpack.codec.rope import Rotation
from pltpack.snapshot import DTYPES, Identity, Snapshot

SHAPES: tuple[Shape, ...] = ((1, 32, 32), (1, 8, 4), (1, 4, 8))
#: Embeddings that 1.2 adds, with an original maximum that the sessions exceed.
YARN = {"type": "yarn", "theta": 10000.0, "factor": 8.0, "original_max_position": 64, "style": "half"}
DYNAMIC = {"type": "dynamic", "theta": 10000.0, "factor": 4.0, "original_max_position": 64, "length": 120}
LONGROPE = {"type": "longrope", "theta": 10000.0, "original_max_position": 64, "length": 120,
            "short_factor": [1.0] * 8, "long_factor": [1.0 + i for i in range(8)]}  # fmt: skip


def repeating(
    name: str,
    tokens: list[int],
    *,
    dtype: str = "BF16",
    context: float = 0.03,
    rope: Any = ROPE,
    layers: tuple[Shape, ...] = SHAPES,
) -> Snapshot:
    """A session whose values depend on each token and, to the share `context`, on those before, as a model's do."""
    states, state = [], 1
    for token in tokens:
        state = (state * 1_000_003 + token + 1) % (1 << 61)
        states.append(state)
    arrays = []
    for layer, (heads, k_dim, v_dim) in enumerate(layers):
        shape = (heads, k_dim + v_dim)
        own = [np.random.default_rng([token, layer]).normal(size=shape) for token in tokens]
        before = [np.random.default_rng([at, layer]).normal(size=shape) for at in states]
        both = (np.stack(own, axis=1) + context * np.stack(before, axis=1)).astype(np.float32)
        rotation = Rotation.of(rope, "rotated", k_dim)
        assert rotation is not None
        keys = rotation.rotate(both[..., :k_dim], 0)
        arrays.append((keys.astype(DTYPES[dtype]), both[..., k_dim:].astype(DTYPES[dtype])))
    return Snapshot.from_arrays(name, tokens, arrays, Identity(model="golden", rope=rope, keys="rotated"))


def family(**options: Any) -> tuple[Snapshot, ...]:
    """Passages sooner and later than where they stood first, with other tokens in them, and twice in a session."""
    a, b, c = ids(64, 51), ids(48, 52), ids(48, 55)
    return (
        repeating("plain", [*a, *b], **options),
        repeating("turned", [*ids(9, 53), *b, *a[8:]], **options),
        repeating("edited", [3, *a[1:30], 5, 6, *a[32:], *ids(5, 54)], **options),
        repeating("twice", [*c, *ids(7, 56), *c, *b[:37]], **options),
    )


#: Where `family` repeats itself: nodes, and rows of each session.
NODES = [["plain", 0, 64], ["plain", 64, 112], ["twice", 0, 48]]
ROWS = {
    "plain": [[0, 64, 0, 0], [64, 48, 1, 0]],
    "turned": [[9, 48, 1, 0], [57, 56, 0, 8]],
    "edited": [[1, 63, 0, 1]],
    "twice": [[0, 48, 2, 0], [55, 48, 2, 0], [103, 37, 1, 0]],
}


def place(sessions: tuple[Snapshot, ...], codec: str, **config: Any) -> Step:
    """A step that writes the rows above, as far as the sessions have them."""
    names = {snapshot.session for snapshot in sessions}
    kept = [node for node in NODES if node[0] in names]
    rows = {name: [list(row) for row in ROWS[name]] for name in sorted(names)}
    return Step("place", sessions, {"codec": codec, "config": config, "nodes": kept, "rows": rows, "seed": 57,
                                    "unit": 24, "exact_units": True})  # fmt: skip


def _placed(title: str, codec: str, inputs: str | None = None, options: Any = None,
            **config: Any) -> Callable[[RealDumps], Case]:  # fmt: skip
    def make(real: RealDumps) -> Case:
        step = place(family(**(options or {})), codec, **config)
        return Case(f"{codec}: {title}", [step], inputs=inputs, free=True)

    return make


def _written(real: RealDumps) -> Case:
    title = "lossless: passages that a writer found elsewhere"
    return Case(title, [compress(*family(), quality="lossless")], inputs="048-near-lossless", free=True)


def _transform(real: RealDumps) -> Case:
    sessions = family()
    made = profile_of(sessions[0], layer_group=2, rank=8, seed=6)
    steps = [place(sessions, "transform", step=0.05)]
    return Case("transform: units of several layers, predicted", steps, profile=made, free=True)


def _balanced(real: RealDumps) -> Case:
    steps = [compress(*family(), quality="balanced", profile="embedded")]
    title = "transform: passages that a writer found elsewhere"
    return dataclasses.replace(_transform(real), title=title, inputs="052-near-transform", steps=steps)


def _append(real: RealDumps) -> Case:
    one, other = family()[:2]
    starts = [repeating(f"start of {x.session}", x.tokens[:count].tolist()) for x, count in ((one, 80), (other, 32))]
    steps = [compress(one, starts[0], quality="lossless"), append(other, starts[1])]
    return Case("lossless: a session with nodes of its own segment, predicted from an older one", steps, free=True)


def _rope(rope: dict[str, Any]) -> Callable[[RealDumps], Case]:
    def make(real: RealDumps) -> Case:
        sessions = family(rope=rope, layers=((1, 16, 8),))[:2]
        return Case(f"group: keys that {rope['type']} rotary moves", [place(sessions, "group", bits=3)], free=True)

    return make


def _probabilities(real: RealDumps) -> Case:
    tokens = ids(20, 58)
    session = drawn("probable", tokens, layers=((1, 4, 4),))
    rng = np.random.default_rng(59)
    guesses = np.stack([np.roll(np.asarray(tokens, np.int32), -1), rng.integers(0, 49152, 20).astype(np.int32)], axis=1)
    guesses[::3, 0] += 1
    logs = np.log(np.sort(rng.uniform(0.01, 0.49, (20, 2)), axis=1)[:, ::-1]).astype(np.float32)
    session = dataclasses.replace(session, logprobs=logs, logprob_ids=guesses)
    return Case("how probable the model held each token", [compress(session, quality="q4")])


#: Part of `benchmarks.golden_cases.CASES`.
PREDICTIONS: dict[str, Callable[[RealDumps], Case]] = {
    "048-near-lossless": _placed("rows that predict, BF16", "lossless"),
    "049-near-lossless-f16": _placed("rows that predict, F16", "lossless", options={"dtype": "F16", "context": 0.005}),
    "050-near-q4": _placed("rows that predict, shifts of tables", "group", "048-near-lossless", bits=4),
    "051-near-q2": _placed("rows that predict, shifts of tables, coarse", "group", "048-near-lossless", bits=2),
    "052-near-transform": _transform,
    "053-near-balanced": _balanced,
    "054-near-written": _written,
    "055-near-append": _append,
    "056-near-dynamic": _rope(DYNAMIC),
    "057-near-yarn": _rope(YARN),
    "058-near-longrope": _rope(LONGROPE),
    "059-probabilities": _probabilities,
}
