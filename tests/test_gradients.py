"""Geometry and rotary parameters read off many kinds of models, and gradients with respect to their caches."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tiny_models import make_network

import pltpack
from pltpack.codec.rope import Rotation
from pltpack.errors import UnsupportedError
from pltpack.quality.capture import CaptureOptions, capture
from pltpack.quality.geometry import layer_geometry, model_rope
from pltpack.quality.gradients import (
    RIDGE,
    SINKS,
    cache_gradients,
    own_sensitivity,
    sample_continuation,
    token_importance,
)
from pltpack.quality.model import Model, load_model, prefill, prefill_with_logprobs

ROOT = Path(__file__).parents[1]
TOKENS = np.random.default_rng(0).integers(3, 64, 40)
DEFAULT = {"type": "default", "theta": 10000.0, "dim": 8, "style": "half"}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def scaled(kind: str, **parameters) -> dict:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}


#: Kind of model, its settings, its rotary embedding.
MODELS = {
    "llama": ("Llama", {}, DEFAULT),
    "linear": ("Llama", scaled("linear", factor=4.0), DEFAULT | {"type": "linear", "factor": 4.0}),
    "llama3": (
        "Llama",
        scaled("llama3", original_max_position_embeddings=32, **LLAMA3),
        DEFAULT | {"type": "llama3", "original_max_position": 32, **LLAMA3},
    ),
    "dynamic": (
        "Llama",
        scaled("dynamic", factor=4.0),
        DEFAULT | {"type": "dynamic", "factor": 4.0, "original_max_position": 96},
    ),
    "yarn": (
        "Llama",
        scaled("yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=16.0),
        DEFAULT | {"type": "yarn", "factor": 4.0, "original_max_position": 32, "beta_fast": 16.0},
    ),
    "longrope": (
        "Llama",
        scaled("longrope", factor=4.0, short_factor=[1.0, 1.1, 1.2, 1.3], long_factor=[2.0] * 4,
               original_max_position_embeddings=64),
        DEFAULT | {"type": "longrope", "factor": 4.0, "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0] * 4,
                   "original_max_position": 64},
    ),
    "partial": ("StableLm", {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
                DEFAULT | {"dim": 4}),
    "interleaved": ("Glm", {}, DEFAULT | {"dim": 4, "style": "interleaved"}),
    "sliding": ("Mistral", {"sliding_window": 16}, DEFAULT),
    "mixed windows": ("Gemma2", {"sliding_window": 16}, DEFAULT),
    "key norm": ("Qwen3", {}, DEFAULT),
    "none": ("GPT2", {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 96}, None),
}  # fmt: skip

REFUSED = {
    "proportional": (
        "Llama",
        scaled("proportional", factor=4.0),
        r"type 'proportional' \(known: default, linear, dynamic, llama3, longrope, yarn\)",
    ),
    "by type of layer": ("Gemma3Text", {"sliding_window": 16}, "types of layers differ"),
    "in some layers": ("SmolLM3", {"no_rope_layers": [1, 1, 0]}, "layer 2 does not rotate its keys"),
    "state": ("Mamba", {}, "does not run with a cache of keys and values alone"),
}  # fmt: skip


def wrapped(network) -> Model:
    return Model(network, Path("model"), "model")


def arrays(cache) -> tuple[list, list]:
    return [layer.keys[0] for layer in cache.layers], [layer.values[0] for layer in cache.layers]


@pytest.mark.parametrize("name", MODELS)
def test_rope_and_geometry(name: str) -> None:
    kind, settings, rope = MODELS[name]
    network = make_network(kind, **settings)
    assert model_rope(network) == rope
    windows = {"sliding": [16] * 3, "mixed windows": [16, None, 16]}.get(name, [None] * 3)
    assert [layer.window for layer in layer_geometry(network, "BF16")] == windows
    cache = prefill(wrapped(network), TOKENS)
    for layer, geometry in zip(cache.layers, layer_geometry(network, "BF16"), strict=True):
        assert layer.keys.shape == (1, geometry.heads, 40, geometry.k_dim)
        assert layer.values.shape == (1, geometry.heads, 40, geometry.v_dim)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("yarn", "longrope", "none", "interleaved")])
def test_the_rotation_taken_off_leaves_what_the_projection_gave(name: str) -> None:
    kind, settings, _ = MODELS[name]
    network = make_network(kind, **settings)
    rotation = Rotation.of(model_rope(network), "rotated", 8)
    attention = network.model.layers[-1].self_attn
    seen = []
    (attention.k_norm if hasattr(attention, "k_norm") else attention.k_proj).register_forward_hook(
        lambda module, inputs, output: seen.append(output.reshape(1, 40, 2, 8)[0].transpose(0, 1).numpy())
    )
    keys, _ = arrays(prefill(wrapped(network), TOKENS))
    np.testing.assert_allclose(rotation.unrotate(keys[-1].numpy(), 0), seen[0], atol=2e-4)


@pytest.mark.parametrize("name", REFUSED)
def test_what_an_identity_cannot_describe_is_refused(name: str) -> None:
    kind, settings, fact = REFUSED[name]
    with pytest.raises(UnsupportedError, match=fact):
        model_rope(make_network(kind, **settings))
        layer_geometry(make_network(kind, **settings), "BF16")


def test_a_wrong_frequency_is_noticed() -> None:
    network = make_network()
    network.model.rotary_emb.inv_freq[0] *= 1.01
    with pytest.raises(UnsupportedError, match="keys do not turn as a rotary embedding of type 'default'"):
        model_rope(network)


@pytest.mark.parametrize("name", ["llama", "sliding", "mixed windows", "none"])
def test_what_follows_a_cache_is_what_follows_the_text(name: str) -> None:
    import torch

    kind, settings, _ = MODELS[name]
    model = wrapped(make_network(kind, **settings))
    with torch.no_grad():
        logits = model.network(torch.as_tensor(TOKENS)[None], use_cache=False).logits[0]
    _, ids, logprobs = prefill_with_logprobs(model, TOKENS, 3)
    np.testing.assert_allclose(logprobs, logits.log_softmax(-1).topk(3).values, atol=1e-4)
    np.testing.assert_array_equal(ids, logits.topk(3).indices)

    # Sampled with the whole text read anew for each token.
    keys, values = arrays(prefill(model, TOKENS))
    sampled = sample_continuation(model, keys, values, TOKENS, 8, torch.Generator().manual_seed(5))
    text, generator = torch.as_tensor(TOKENS), torch.Generator().manual_seed(5)
    for token in sampled:
        with torch.no_grad():
            last = model.network(text[None], use_cache=False).logits[0, -1]
        assert int(torch.multinomial(last.softmax(-1), 1, generator=generator)) == token
        text = torch.cat([text, torch.tensor([int(token)])])


@pytest.mark.parametrize("name", ["llama", "partial", "interleaved", "mixed windows", "yarn"])
def test_gradients_are_finite_differences(name: str) -> None:
    """In any direction of un-rotated keys or values, the loss changes as the gradient says."""
    import torch
    from transformers import DynamicCache

    kind, settings, rope = MODELS[name]
    network = make_network(kind, **settings)
    model = wrapped(network.double())
    keys, values = arrays(prefill(model, TOKENS[:12]))
    following = TOKENS[12:20]
    gradients = cache_gradients(model, keys, values, following, torch.Generator().manual_seed(1), rope)
    rotation = Rotation.of(rope, "rotated", 8)
    assert rotation is not None

    def loss(index: int, part: int, change: np.ndarray) -> float:
        cache = DynamicCache()
        for at, pair in enumerate(zip(keys, values, strict=True)):
            moved = [x + torch.as_tensor(change) if (at, i) == (index, part) else x for i, x in enumerate(pair)]
            cache.update(moved[0][None], moved[1][None], at)
        with torch.no_grad():
            logits = network(torch.as_tensor(following)[None], cache=cache).logits[0]
        if not labels:
            generator = torch.Generator().manual_seed(1)
            labels.append(torch.multinomial(logits.softmax(-1).float(), 1, generator=generator))
        return float(-logits.log_softmax(-1).gather(1, labels[0]).sum())

    labels: list = []
    loss(0, 0, np.zeros((2, 12, 8)))
    rng, felt = np.random.default_rng(2), []
    for index, part in [(0, 0), (0, 1), (2, 0), (2, 1)]:
        direction = np.zeros((2, 12, 8))
        direction[rng.integers(2), rng.integers(1, 12, 4)] = rng.standard_normal((4, 8))
        moved = direction
        if part == 0 and rotation is not None:
            moved = rotation.rotate(direction.astype(np.float32), 0).astype(np.float64)
        # Norms compute in binary32 even here, which a small step would drown in.
        slope = (loss(index, part, 1e-2 * moved) - loss(index, part, -1e-2 * moved)) / 2e-2
        expected = float((gradients[part][index] * direction).sum())
        assert gradients[part][index].dtype == np.float32
        assert slope == pytest.approx(expected, rel=1e-2, abs=5e-4)
        felt.append(abs(expected))
    assert np.mean(felt) > 2e-2, "directions that do not matter tell nothing"


def test_gradients_need_something_to_follow() -> None:
    model = wrapped(make_network())
    keys, values = arrays(prefill(model, TOKENS))
    with pytest.raises(UnsupportedError, match="at least one token"):
        cache_gradients(model, keys, values, [])


def test_gradients_beyond_a_window_are_zero() -> None:
    model = wrapped(make_network("Mistral", sliding_window=4))
    keys, values = arrays(prefill(model, TOKENS))
    for gradients in cache_gradients(model, keys, values, TOKENS[:6], rope=DEFAULT):
        last = gradients[-1]
        assert not last[:, :-3].any()
        assert last[:, -3:].any(axis=(0, 2)).all()


def test_gradients_of_a_model_in_bf16_are_close() -> None:
    import torch

    keys, values = arrays(prefill(wrapped(make_network()), TOKENS))
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        model = wrapped(make_network().to(dtype))
        found.append(cache_gradients(model, keys, values, TOKENS[:30], torch.Generator().manual_seed(0), DEFAULT)[1][0])
    assert np.corrcoef(found[0].ravel(), found[1].ravel())[0, 1] > 0.8


def test_importance_is_whitened_energy() -> None:
    rng = np.random.default_rng(0)
    shapes = [(2, 50, 6), (1, 50, 4)]
    keys, values = ([rng.standard_normal(shape).astype(np.float32) for shape in shapes] for _ in range(2))
    keys[0][:, 0] *= 1000
    wanted = np.zeros(50)
    for g in keys + values:
        for head in g.astype(np.float64):
            fisher = np.mean([np.outer(row, row) for row in head[SINKS:]], axis=0)
            inverse = np.linalg.inv(fisher + RIDGE * np.linalg.eigvalsh(fisher).mean() * np.eye(len(fisher)))
            wanted += [row @ inverse @ row for row in head]
    found = token_importance(keys, values)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    assert found[0] > 1e4 * np.median(found)
    given = tuple([own_sensitivity(g.astype(np.float64)) for g in part] for part in (keys, values))
    np.testing.assert_allclose(token_importance(keys, values, given), found, rtol=1e-6)
    doubled = tuple([4 * fisher for fisher in part] for part in given)
    np.testing.assert_allclose(token_importance(keys, values, doubled), found / 4, rtol=1e-6)
    with pytest.raises(ValueError, match="sensitivity of layer 0"):
        token_importance(keys, values, (given[0][::-1], given[1]))


def test_importance_where_nothing_is_felt_is_zero() -> None:
    nothing = [np.zeros((2, 3, 4), np.float32)]
    np.testing.assert_array_equal(token_importance(nothing, nothing), np.zeros(3))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sinks_matter_most_to_the_real_model(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr("pltpack.quality.capture.IMPORTANCE_TOKENS", 12)
    text = json.loads((ROOT / "fixtures" / "sessions.json").read_text())["frost"]["prompt"]
    capture(model_dir, {"frost": text}, tmp_path / "dumps", options=CaptureOptions(importance=True, logprobs=8))
    (snapshot,) = pltpack.open_dumps(tmp_path / "dumps")
    importance = snapshot.importance
    assert np.isfinite(importance).all()
    assert importance.argmax() == 0
    assert importance[0] > 1000 * np.median(importance)
    assert np.median(importance[-8:]) > 2 * np.median(importance), "what was said last matters more"
    hits = snapshot.logprob_ids[:-1, 0] == snapshot.tokens[1:]
    assert hits.mean() > 0.25

    # Bit by bit what the model itself computes in one pass.
    model = load_model(model_dir)
    with torch.no_grad():
        cache = model.network.model(torch.as_tensor(snapshot.tokens, dtype=torch.int64)[None], use_cache=True).cache
    for index, layer in enumerate(cache.layers):
        for found, computed in zip(snapshot.layer(index), (layer.keys, layer.values), strict=True):
            assert torch.equal(torch.as_tensor(found.view(np.int16)), computed[0].bfloat16().view(torch.int16))
