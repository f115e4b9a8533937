"""Rotary embeddings against transformers' own functions, against the reference, and moved between positions."""

from __future__ import annotations

import math
import sys
from decimal import Context, Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pltpack.codec.rope import Rotation, frequencies

sys.path.append(str(Path(__file__).parents[1] / "spec"))
import reference_numbers

DIM, CONTEXT = 32, 256
DEFAULT = {"type": "default", "theta": 10000.0, "style": "half"}
SHORT, LONG = [1.0 + 0.01 * i for i in range(DIM // 2)], [1.0 + i for i in range(DIM // 2)]
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position": CONTEXT}
#: Parameters as identities have them, without theta and style.
KINDS: dict[str, dict[str, Any]] = {
    "default": {"type": "default"},
    "linear": {"type": "linear", "factor": 4.0},
    "llama3": {"type": "llama3", **LLAMA3},
    "dynamic": {"type": "dynamic", "factor": 4.0, "original_max_position": CONTEXT},
    "dynamic, long": {"type": "dynamic", "factor": 4.0, "original_max_position": CONTEXT, "length": 1000},
    "yarn": {"type": "yarn", "factor": 16.0, "original_max_position": CONTEXT},
    "yarn, betas": {
        "type": "yarn", "factor": 4.0, "original_max_position": CONTEXT, "beta_fast": 20.0, "beta_slow": 2.0,
        "truncate": False, "attention_factor": 1.25,
    },
    "yarn, mscale": {
        "type": "yarn", "factor": 40.0, "original_max_position": 4096, "mscale": 1.0, "mscale_all_dim": 0.7,
    },
    "longrope": {
        "type": "longrope", "original_max_position": CONTEXT, "short_factor": SHORT, "long_factor": LONG,
        "factor": 4.0,
    },
    "longrope, long": {
        "type": "longrope", "original_max_position": CONTEXT, "short_factor": SHORT, "long_factor": LONG,
        "factor": 4.0, "length": 257,
    },
}  # fmt: skip
THEIRS = {"type": "rope_type", "theta": "rope_theta", "original_max_position": "original_max_position_embeddings"}


def random_keys(heads: int, tokens: int, dim: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((heads, tokens, dim)).astype(np.float32)


def theirs(rope: dict[str, Any], head_dim: int) -> tuple[np.ndarray, float]:
    """Frequencies and attention factor by transformers."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = {
        THEIRS.get(name, name): value for name, value in rope.items() if name not in ("style", "dim", "length")
    }
    if rope.get("dim", head_dim) != head_dim:
        parameters["partial_rotary_factor"] = rope["dim"] / head_dim
    # Some types say the original length by the model's own limit.
    original = int(rope.get("original_max_position", CONTEXT))
    config = LlamaConfig(hidden_size=4 * head_dim, num_attention_heads=4, head_dim=head_dim, rope_parameters=parameters,
                         max_position_embeddings=original)  # fmt: skip
    if rope["type"] == "default":
        found, scale = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
        return found.double().numpy()[: rope.get("dim", head_dim) // 2], scale
    found, scale = ROPE_INIT_FUNCTIONS[rope["type"]](config, "cpu", seq_len=rope.get("length"))
    return found.double().numpy(), scale


@pytest.mark.parametrize("theta", [10000.0, 1e6])
@pytest.mark.parametrize("name", KINDS)
def test_frequencies_are_those_of_transformers(name: str, theta: float) -> None:
    rope = {"theta": theta, **KINDS[name]}
    ours = frequencies(rope, DIM)
    assert ours is not None
    assert ours.dtype == np.float64
    np.testing.assert_allclose(ours, theirs(rope, DIM)[0], rtol=2e-6)


@pytest.mark.parametrize("name", [name for name in KINDS if not name.startswith(("longrope", "default"))])
def test_partial_frequencies_are_those_of_transformers(name: str) -> None:
    rope = {"theta": 10000.0, "dim": DIM // 2, **KINDS[name]}
    ours = frequencies(rope, DIM)
    assert ours is not None
    assert len(ours) == DIM // 4
    np.testing.assert_allclose(ours, theirs(rope, DIM)[0], rtol=2e-6)


@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize("name", KINDS)
def test_rotation_is_that_of_transformers(name: str, style: str) -> None:
    """Keys of a model are what ours rotates to, times the attention factor, which every move keeps."""
    import torch

    rope = {"theta": 10000.0, "style": style, **KINDS[name]}
    rotation = Rotation.of(rope, "rotated", DIM)
    assert rotation is not None
    plain, positions = random_keys(2, 50, DIM), np.arange(400, 450)
    found, scale = theirs(rope, DIM)
    assert (scale != 1) == rope["type"].startswith(("yarn", "longrope"))

    def model(positions: np.ndarray) -> np.ndarray:
        angles = torch.as_tensor(positions[:, None] * found[None])
        if style == "half":
            from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
        else:
            from transformers.models.glm.modeling_glm import apply_rotary_pos_emb
        angles = torch.cat([angles, angles], dim=-1)
        cos, sin = ((turn(angles) * scale).float()[None] for turn in (torch.cos, torch.sin))
        keys = torch.as_tensor(plain)[None]
        return apply_rotary_pos_emb(keys, keys, cos, sin)[1][0].numpy()

    stored = model(positions)
    # Binary32 frequencies times positions: up to 400 * 1e-7 of a radian.
    tolerance = 2e-4 * scale
    np.testing.assert_allclose(rotation.rotate(plain, 400) * np.float32(scale), stored, atol=tolerance)
    np.testing.assert_allclose(rotation.unrotate(stored, 400), plain * np.float32(scale), atol=tolerance)
    moved = rotation.shift(stored, 400, 7)
    np.testing.assert_allclose(moved, model(positions - 393), atol=tolerance)
    assert np.abs(moved - stored).max() > 0.1


def test_a_dynamic_embedding_is_a_default_one_up_to_the_original_length() -> None:
    default = frequencies(DEFAULT, DIM)
    for length in ({}, {"length": 5}, {"length": CONTEXT}):
        np.testing.assert_array_equal(frequencies({**DEFAULT, **KINDS["dynamic"], **length}, DIM), default)
    assert (frequencies({**DEFAULT, **KINDS["dynamic"], "length": CONTEXT + 1}, DIM)[1:] < default[1:]).all()


@pytest.mark.parametrize(
    ("base", "changes"),
    [
        ("dynamic", {"factor": 0.5}), ("dynamic", {"factor": None}), ("dynamic", {"length": 0}),
        ("dynamic", {"length": "9"}), ("dynamic", {"dim": 2}), ("dynamic", {"original_max_position": None}),
        ("dynamic, long", {"theta": 1e299, "factor": 1e299}), ("dynamic, long", {"length": 10**400}),
        ("yarn", {"factor": True}), ("yarn", {"beta_fast": 0}), ("yarn", {"beta_slow": "1"}), ("yarn", {"theta": 1}),
        ("yarn", {"truncate": 1}), ("yarn", {"original_max_position": -4}), ("yarn", {"beta_fast": float("nan")}),
        ("longrope", {"short_factor": SHORT[1:]}), ("longrope", {"long_factor": [0.1] * (DIM // 2)}),
        ("longrope", {"long_factor": ["1"] * (DIM // 2)}), ("longrope", {"short_factor": 4}),
        ("longrope", {"original_max_position": 0}), ("longrope", {"dim": 16}),
        ("default", {"type": "axial"}), ("default", {"type": ["yarn"]}), ("default", {"type": None}),
        ("default", {"style": "other"}), ("default", {"dim": 34}), ("default", {"dim": 3}), ("default", {"theta": 0.5}),
    ],
)  # fmt: skip
def test_what_is_missing_or_wrong_makes_an_embedding_unknown(base: str, changes: dict[str, Any]) -> None:
    rope = {**DEFAULT, **KINDS[base]}
    assert frequencies(rope, DIM) is not None
    assert frequencies({**rope, **changes}, DIM) is None
    assert reference_numbers.rope_frequencies({**rope, **changes}, DIM) is None
    assert Rotation.of({**rope, **changes}, "rotated", DIM) is None


NUMBERS = st.one_of(st.floats(1, 1e6), st.integers(1, 1 << 20), st.sampled_from([1e-3, 0.5, 1e290, 2**-1060, -1, None]))
PARAMETERS = st.fixed_dictionaries(
    {"type": st.sampled_from(["default", "linear", "llama3", "dynamic", "yarn", "longrope", "axial"]),
     "theta": st.one_of(st.floats(1, 1e8), st.sampled_from([1, 1.0000000000000002, 1e299])),
     "factor": st.floats(1, 64)},
    optional={"dim": st.sampled_from([2, 4, 16, 32]), "original_max_position": NUMBERS, "length": NUMBERS,
              "beta_fast": NUMBERS, "beta_slow": NUMBERS, "low_freq_factor": NUMBERS, "high_freq_factor": NUMBERS,
              "truncate": st.booleans(), "short_factor": st.just(SHORT), "long_factor": st.just(LONG)},
)  # fmt: skip


@settings(deadline=None, max_examples=150)
@given(PARAMETERS)
def test_the_reference_finds_the_same_bits(rope: dict[str, Any]) -> None:
    with np.errstate(all="ignore"):
        ours, reference = frequencies(rope, DIM), reference_numbers.rope_frequencies(rope, DIM)
    assert (ours is None) == (reference is None)
    if ours is not None:
        np.testing.assert_array_equal(ours, reference)


@settings(deadline=None, max_examples=30)
@given(
    st.sampled_from(sorted(KINDS)), st.sampled_from(["half", "interleaved"]), st.integers(0, 1 << 27),
    st.integers(0, 1 << 27), st.integers(1, 9), st.integers(0, 99),
)  # fmt: skip
def test_the_reference_moves_keys_to_the_same_bits(
    name: str, style: str, before: int, after: int, tokens: int, seed: int
) -> None:
    rope = {"theta": 10000.0, "style": style, **KINDS[name]}
    rotation = Rotation.of(rope, "rotated", DIM)
    keys = random_keys(2, tokens, DIM, seed)
    found = reference_numbers.rope_frequencies(rope, DIM)
    plain = reference_numbers.rope_rotate(keys, found, style, before, back=True)
    np.testing.assert_array_equal(
        rotation.shift(keys, before, after), reference_numbers.rope_rotate(plain, found, style, after, back=False)
    )


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


def test_yarn_bounds_are_rounded_once() -> None:
    """With `truncate` off, the ramp shows the bounds; they are taken from exact logarithms."""
    theta, context = 1234.5, 777
    context_of = Context(prec=80)
    bounds, pi = [], Decimal("3.14159265358979323846264338327950288419716939937510582")
    for turns in (32, 1):
        ratio = Decimal(context) / Decimal(turns) / 2 / pi
        bounds.append(float(DIM * ratio.ln(context_of) / (2 * Decimal(theta).ln(context_of))))
    low, high = max(bounds[0], 0.0), min(bounds[1], DIM - 1.0)
    ramp = np.clip((np.arange(DIM // 2) - low) / (high - low), 0, 1)
    base = frequencies({"theta": theta}, DIM)
    rope = {"type": "yarn", "theta": theta, "factor": 3.0, "original_max_position": context, "truncate": False}
    np.testing.assert_array_equal(frequencies(rope, DIM), base / 3.0 * ramp + base * (1 - ramp))
    assert not math.isclose(low, round(low))
