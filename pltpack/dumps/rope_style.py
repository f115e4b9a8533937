"""How a cache pairs the channels that RoPE rotates, and the exact way from one style to the other.

``half`` pairs channel i with i + D/2, as transformers and what follows it do; ``interleaved`` pairs 2i with 2i + 1.
llama.cpp rotates some architectures interleaved and has their weights reordered for it, so that its keys are those of
the half style with the channels of each head in another order; an identity says so with ``"permuted": true`` in its
``rope``. ``"style": "unrecorded"`` stands for a dump that does not say.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from pltpack.errors import UnsupportedError
from pltpack.snapshot import LayerSource, Snapshot

STYLES = ("half", "interleaved")
UNRECORDED = "unrecorded"

#: llama.cpp architectures by how it rotates: interleaved over weights that its converter reorders,
PERMUTED = frozenset({"llama", "deci", "baichuan", "internlm2", "minicpm", "xverse", "olmo", "granite", "granitemoe",
                      "smollm3", "arcee"})  # fmt: skip
#: interleaved because the model is,
INTERLEAVED = frozenset({"command-r", "cohere2", "chatglm", "deepseek2"})
#: and half style.
HALF = frozenset({
    "falcon", "gptneox", "stablelm", "qwen", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "olmo2", "olmoe", "phi2", "phi3",
    "phimoe", "gemma", "gemma2", "gemma3", "gemma3n", "starcoder2", "openelm", "codeshell", "orion", "nemotron",
    "exaone", "exaone4", "gpt-oss", "hunyuan-moe", "hunyuan-dense", "seed_oss", "apertus", "smallthinker",
})  # fmt: skip


def arch_rope(arch: str) -> dict[str, Any]:
    """What a llama.cpp architecture says of the RoPE style, as members of an identity's ``rope``."""
    if arch in PERMUTED:
        return {"style": "interleaved", "permuted": True}
    if arch in INTERLEAVED:
        return {"style": "interleaved"}
    return {"style": "half" if arch in HALF else UNRECORDED}


def style_of(rope: Mapping[str, Any] | None) -> str:
    """The style of an identity's ``rope``; half where nothing is said."""
    return "half" if rope is None else str(rope.get("style", "half"))


def restyled(snapshot: Snapshot, style: str) -> Snapshot:
    """The same cache with the channels of its rotated keys in the order of another style; exact.

    Only right where the two engines run one model with its weights reordered, as llama.cpp does: see `PERMUTED`.

    Raises
    ------
    UnsupportedError
        If only a part of each head's channels is rotated, or their number is odd.
    """
    rope = dict(snapshot.identity.rope or {})
    if style_of(rope) == style:
        return snapshot
    for index, layer in enumerate(snapshot.identity.layers):
        if layer.k_dim % 2 or rope.get("dim", layer.k_dim) != layer.k_dim:
            raise UnsupportedError(f"identity field 'rope.style' cannot become {style!r}: layer {index} rotates "
                                   f"{rope.get('dim')} of {layer.k_dim} channels")  # fmt: skip
    rope.pop("permuted", None)
    rope |= {"style": style, **({"permuted": True} if style == "interleaved" else {})}
    identity = dataclasses.replace(snapshot.identity, rope=rope)
    return dataclasses.replace(snapshot, identity=identity, source=_Reordered(snapshot.source, style))


def in_half_style(snapshot: Snapshot, told: str | None = None) -> Snapshot:
    """The same cache as engines that follow transformers hold it.

    Parameters
    ----------
    snapshot : Snapshot
    told : str, optional
        ``half`` to reorder channels of an interleaved cache, ``interleaved`` to take it as it is, for models that
        rotate so by themselves; needed where the identity does not tell.

    Raises
    ------
    UnsupportedError
        Naming the field that is not known.
    """
    rope = snapshot.identity.rope or {}
    style = style_of(rope)
    if style == "half" or (style == "interleaved" and told == "interleaved"):
        return snapshot
    if style == "interleaved" and (rope.get("permuted") or told == "half"):
        return restyled(snapshot, "half")
    known = "is not recorded" if style == UNRECORDED else f"is {style!r}"
    way = ("compress again with --from-option arch=NAME or --model" if style == UNRECORDED else
           "say rope_style=half if the engine pairs channels across halves, rope_style=interleaved if it does not")
    raise UnsupportedError(f"session {snapshot.session!r}: identity field 'rope.style' {known}, and this format's "
                           f"engine needs it known: {way}")  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class _Reordered:
    """A `LayerSource` whose keys have their channels in another order."""

    source: LayerSource
    style: str

    def layer(self, index: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """See `LayerSource.layer`."""
        keys, values = self.source.layer(index, start, stop)
        heads, tokens, dim = keys.shape
        shape = (heads, tokens, 2, dim // 2) if self.style == "interleaved" else (heads, tokens, dim // 2, 2)
        return np.ascontiguousarray(keys.reshape(shape).swapaxes(2, 3)).reshape(keys.shape), values
