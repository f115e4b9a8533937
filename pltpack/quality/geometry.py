"""What a model's caches look like: layer shapes and rotary embedding, read off a run of one token and not off names.

A token that is alone attends to itself only, so all that depends on its position, in every layer, is the rotation of
its keys. One run at position 0 and one at another show which components turn together, and the claimed parameters are
checked against it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pltpack.codec.rope import Rotation
from pltpack.dumps.dynamic_cache import from_dynamic_cache
from pltpack.errors import UnsupportedError
from pltpack.snapshot import LayerGeometry

# Rotations of some tens of degrees in the fastest pairs: no symmetry of a full turn hides a wrong frequency.
_POSITION = 7
# Any token does.
_TOKEN = 1
#: What each type of the rotary embedding needs beside theta: names here and in transformers' ``rope_parameters``.
_PARAMETERS: dict[str, dict[str, str]] = {
    "default": {},
    "linear": {"factor": "factor"},
    "dynamic": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_position": "original_max_position_embeddings",
    },
    "longrope": {
        "factor": "factor",
        "original_max_position": "original_max_position_embeddings",
        "short_factor": "short_factor",
        "long_factor": "long_factor",
        "attention_factor": "attention_factor",
    },
    "yarn": {
        "factor": "factor",
        "original_max_position": "original_max_position_embeddings",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "attention_factor": "attention_factor",
        "mscale": "mscale",
        "mscale_all_dim": "mscale_all_dim",
        "truncate": "truncate",
    },
}


def layer_geometry(network: Any, dtype: str) -> tuple[LayerGeometry, ...]:
    """Heads, dimensions and sliding window of each layer that holds a cache.

    Parameters
    ----------
    network : transformers.PreTrainedModel
    dtype : str
        The dtype that the geometry shall name.

    Raises
    ------
    UnsupportedError
        If a layer holds something else than keys and values, or values have fewer or more heads than keys.
    """
    from transformers import DynamicCache

    layers = _lone_token(network, 0)
    windows = [_window(layer) for layer in DynamicCache(config=network.config).layers]
    if len(windows) != len(layers):
        raise UnsupportedError(f"{len(windows)} layers announce a cache but {len(layers)} hold one")
    return tuple(
        LayerGeometry(keys.shape[0], keys.shape[-1], values.shape[-1], dtype, window)
        for (keys, values), window in zip(layers, windows, strict=True)
    )


def model_rope(network: Any) -> dict[str, Any] | None:
    """The rotary embedding of a model as identities have it (spec/codecs.md, section "RoPE"); None if it states none.

    Parameters
    ----------
    network : transformers.PreTrainedModel

    Raises
    ------
    UnsupportedError
        If the type is unknown here, layers differ in it, or keys do not turn as it says.
    """
    config = network.config.get_text_config(decoder=True)
    found = _one_for_all(getattr(config, "rope_parameters", None))
    if found is None:
        return None
    before, after = ([keys[:, 0] for keys, _ in _lone_token(network, at)] for at in (0, _POSITION))
    rope = _described(found, before[0].shape[-1], config)
    tolerance = 1e-3 if before[0].dtype == np.float32 else 3e-2
    before, after = ([keys.astype(np.float64) for keys in layers] for layers in (before, after))
    for style in ("half", "interleaved"):
        rope["style"] = style
        wrong = [index for index, pair in enumerate(zip(before, after, strict=True)) if _error(rope, *pair) > tolerance]
        if not wrong:
            return rope
        if len(wrong) < len(before):
            raise UnsupportedError(f"layer {wrong[0]} does not rotate its keys as other layers do")
    raise UnsupportedError(f"keys do not turn as a rotary embedding of type {rope['type']!r} with theta "
                           f"{rope['theta']:g} over {rope['dim']} of {before[0].shape[-1]} dimensions")  # fmt: skip


def config_rope(config: Any, head_dim: int) -> dict[str, Any] | None:
    """The rotary embedding that a configuration states, without its style, which no configuration does.

    Parameters
    ----------
    config : transformers.PretrainedConfig
        Of the part that decodes text.
    head_dim : int
        Key dimension.

    Raises
    ------
    UnsupportedError
        If the type is unknown here, or layers differ in it.
    """
    found = _one_for_all(getattr(config, "rope_parameters", None))
    return None if found is None else _described(found, head_dim, config)


def _one_for_all(parameters: Any) -> Mapping[str, Any] | None:
    """The rotary parameters of all layers; some models keep one set per type of layer."""
    if not isinstance(parameters, Mapping) or not parameters:
        return None
    several = [value for value in parameters.values() if isinstance(value, Mapping)]
    if not several:
        return parameters if parameters.get("rope_theta") is not None else None
    if any(other != several[0] for other in several):
        raise UnsupportedError("types of layers differ in their rotary embedding")
    return several[0]


def _described(found: Mapping[str, Any], head_dim: int, config: Any) -> dict[str, Any]:
    kind = found.get("rope_type", found.get("type", "default"))
    if kind not in _PARAMETERS:
        raise UnsupportedError(f"rotary embedding of type {kind!r} (known: {', '.join(_PARAMETERS)})")
    dim = int(head_dim * (found.get("partial_rotary_factor") or 1.0))
    rope = {"type": kind, "theta": float(found["rope_theta"]), "dim": dim}
    for name, theirs in _PARAMETERS[kind].items():
        if found.get(theirs) is not None:
            rope[name] = found[theirs]
    if kind == "dynamic":
        rope["original_max_position"] = config.max_position_embeddings
    return rope


def _error(rope: Mapping[str, Any], before: np.ndarray, after: np.ndarray) -> float:
    """How far keys ``[H, D]`` at `_POSITION` are from those at 0, rotated as claimed, as a share of their norm."""
    rotation = Rotation.of(rope, "rotated", before.shape[-1])
    if rotation is None:
        return float("inf")
    difference = rotation.rotate(before[:, None].astype(np.float32), _POSITION)[:, 0] - after
    return float(np.linalg.norm(difference)) / max(float(np.linalg.norm(before)), 1e-30)


def _lone_token(network: Any, position: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Keys and values ``[H, 1, D]`` of each layer after one token at a position."""
    import torch
    from transformers import DynamicCache

    cache = DynamicCache()
    # Models without positions take no such argument.
    extra = {"position_ids": torch.tensor([[position]], device=network.device)} if position else {}
    try:
        with torch.no_grad():
            network.base_model(torch.tensor([[_TOKEN]], device=network.device), cache=cache, use_cache=True, **extra)
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        kind = type(network).__name__
        raise UnsupportedError(f"{kind} does not run with a cache of keys and values alone ({error})") from error
    snapshot = from_dynamic_cache(cache, [_TOKEN])
    return [snapshot.layer(index) for index in range(len(snapshot.identity.layers))]


def _window(layer: Any) -> int | None:
    window = getattr(layer, "sliding_window", None) if getattr(layer, "is_sliding", False) else None
    return None if window is None else int(window)
