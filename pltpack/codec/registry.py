"""Find codecs by name: built-in ones and those of the entry-point group ``pltpack.codecs``.

A tier is a named codec with its configuration; `tier` makes the codec of one.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

from pltpack.codec.base import Codec
from pltpack.errors import NotFoundError, UnsupportedError

ENTRY_POINTS = "pltpack.codecs"

_BUILT_IN = {
    "lossless": "pltpack.codec.lossless:LosslessCodec",
    "group": "pltpack.codec.group:GroupCodec",
    "recompute": "pltpack.codec.recompute:RecomputeCodec",
    "transform": "pltpack.codec.transform:TransformCodec",
    "turboquant": "pltpack.codec.turboquant:TurboQuantCodec",
}

#: Tier name -> (codec_id, configuration).
TIERS: dict[str, tuple[str, dict[str, Any]]] = {
    "lossless": ("lossless", {}),
    "near": ("transform", {"target_kl": 0.003}),
    "balanced": ("transform", {"target_kl": 0.01}),
    "small": ("transform", {"target_kl": 0.025}),
    "fixed-step": ("transform", {"step": 0.5}),
    **{f"q{bits}": ("group", {"bits": bits}) for bits in (1, 2, 3, 4)},
    **{f"turboquant-{bits}": ("turboquant", {"bits": bits}) for bits in (2, 3, 4)},
}

#: Tiers that need the model that made the caches, to write them and to read them (`pltpack.quality.recompute`).
MODEL_TIERS = ("recompute", "lossless+model")


@functools.cache
def _classes() -> dict[str, str]:
    found = {point.name: point.value for point in entry_points(group=ENTRY_POINTS)}
    return found | _BUILT_IN


def codec_ids() -> list[str]:
    """Names of all codecs that can be made here."""
    return sorted(_classes())


def codec(codec_id: str, config: Mapping[str, Any]) -> Codec:
    """Make a codec by name.

    Raises
    ------
    UnsupportedError
        If no installed codec has this name, or it refuses the configuration.
    """
    try:
        module, _, name = _classes()[codec_id].partition(":")
    except KeyError:
        raise UnsupportedError(f"no codec {codec_id!r} is installed (known: {', '.join(codec_ids())})") from None
    cls: type[Codec] = getattr(importlib.import_module(module), name)
    try:
        return cls.from_config(config)
    except ValueError as error:
        raise UnsupportedError(str(error)) from None


def tier(name: str) -> Codec:
    """Make the codec of a quality tier; a codec name stands for that codec with its default configuration.

    Raises
    ------
    NotFoundError
        If there is no such tier.
    UnsupportedError
        If it is written by a model only.
    """
    if name in MODEL_TIERS:
        raise UnsupportedError(f"tier {name!r} needs the model that made the caches: give its folder with --model")
    if name in TIERS:
        return codec(*TIERS[name])
    if name in _classes():
        return codec(name, {})
    raise NotFoundError(f"no quality tier {name!r} (known: {', '.join(TIERS)})")
