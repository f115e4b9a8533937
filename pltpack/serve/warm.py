"""Warm starts for transformers: the stored prefix of a prompt out of an archive, the rest of it by the model."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from pltpack.codec.rope import Rotation
from pltpack.errors import IdentityError, UnsupportedError
from pltpack.serve.arguments import positive, whole
from pltpack.serve.misses import MissError
from pltpack.serve.prefixes import Hit
from pltpack.snapshot import Identity, token_ids

if TYPE_CHECKING:
    from pltpack.archive.reader import Archive
    from pltpack.serve.cache import WarmCache
    from pltpack.serve.loader import Loader

#: Tokens of a prompt's rest up to which the model's pass is shorter than the load that it goes along with.
_FEW = 16


@dataclasses.dataclass(frozen=True)
class WarmStart:
    """What `warm_generate` gives.

    Attributes
    ----------
    tokens : list of int
        New tokens, without the prompt.
    cached_tokens : int
        Tokens of the prompt whose cache came from the archive; 0 after a miss, and uncompressed.
    seconds_to_first : float
        From the call to the first new token.
    seconds : list of float
        From each new token to the next.
    miss : str or None
        Why a load came to nothing.
    cache : object
        The cache after the last new token but one, as transformers has it.
    """

    tokens: list[int]
    cached_tokens: int
    seconds_to_first: float
    seconds: list[float]
    miss: str | None
    cache: Any


def warm_generate(
    model: Any,
    archive: Archive | Loader,
    prompt_ids: Any,
    max_new_tokens: int = 32,
    *,
    compressed: bool = True,
    eos_token_id: int | Iterable[int] | None = None,
    identity: Identity | None = None,
    accept_unknown: Iterable[str] = (),
    timeout: float | None = None,
    **settings: Any,
) -> WarmStart:
    """Generate greedily, beginning with the longest prefix of the prompt that the archive holds.

    Decoding the next layers overlaps with the attention of those that are there. A load that fails is a miss: the
    model computes the whole prompt.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model on the CPU.
    archive : Archive or Loader
        A loader is made for an archive, and closed; one of your own keeps its index and centroids from call to call.
    prompt_ids : array_like or Tensor
        Token ids ``[T]`` or ``[1, T]``, at least one.
    max_new_tokens : int
    compressed : bool
        If false, the archive is not asked and the model computes the prompt into a plain ``DynamicCache``: the other
        side of an A/B run.
    eos_token_id : int or iterable of int, optional
        Ends the generation; what the model's generation configuration says by default.
    identity : Identity, optional
        The model's own, for a loader made here; without one, shapes and rotary embedding are compared with the model.
    accept_unknown : iterable of str
    timeout : float, optional
        Seconds for the load, after which the model computes.
    **settings
        For a loader made here.

    Raises
    ------
    IdentityError
        If the archive is not of a model with this shape or rotary embedding.
    UnsupportedError
        If the prompt is empty, the archive's keys are un-rotated, or a loader is given with what is for one made here.
    """
    from pltpack.quality.model import need_eval

    need_eval()
    begin = time.perf_counter()
    ids = _ids(prompt_ids, model)
    max_new_tokens = whole("max_new_tokens", max_new_tokens, 0)
    positive("timeout", timeout, zero=True)
    if not compressed:
        return _generate(model, ids, None, max_new_tokens, eos_token_id, begin, None)
    with contextlib.ExitStack() as stack:
        loader: Any = archive
        if hasattr(archive, "lookup"):
            if identity is not None or accept_unknown or settings:
                named = ["identity"] * (identity is not None) + ["accept_unknown"] * bool(accept_unknown)
                raise UnsupportedError(
                    f"{', '.join([*named, *settings])}: of a loader that is made here, not of one given"
                )
        else:
            if identity is not None:
                settings |= {"identity": identity, "accept_unknown": accept_unknown}
            loader = stack.enter_context(archive.loader(**settings))
        check_model(model, loader.archive.identity)
        # The last token's logits are the first thing wanted, and they are not in the archive.
        hit = loader.lookup(ids).first(len(ids) - 1)
        if not hit:
            return _generate(model, ids, None, max_new_tokens, eos_token_id, begin, None)
        try:
            cache = warm_cache(model, loader, hit, len(ids) + max_new_tokens, timeout)
            stack.callback(cache.close)
            return _generate(model, ids, cache, max_new_tokens, eos_token_id, begin, None)
        except MissError as miss:
            return _generate(model, ids, None, max_new_tokens, eos_token_id, begin, miss.reason)


def warm_cache(model: Any, loader: Loader, hit: Hit, tokens: int, timeout: float | None = None) -> WarmCache:
    """A `WarmCache` of a hit in the dtype that a model computes in, with room for `tokens` tokens."""
    from pltpack.serve.cache import WarmCache

    return WarmCache(loader, hit, model.dtype, max(0, tokens - hit.tokens), timeout)


def check_model(model: Any, identity: Identity) -> None:
    """Refuse caches that a model cannot have made: by number of layers, shapes and rotary embedding.

    Raises
    ------
    IdentityError
        Naming the field that differs.
    UnsupportedError
        If keys are stored un-rotated.
    """
    if identity.keys == "unrotated":
        raise UnsupportedError("the archive stores un-rotated keys, which models cannot take")
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if len(identity.layers) != config.num_hidden_layers:
        raise IdentityError(f"identity field 'layers' differs: {len(identity.layers)} layers against "
                            f"{config.num_hidden_layers} of the model")  # fmt: skip
    if isinstance(heads, int) and isinstance(dim, int):
        for index, layer in enumerate(identity.layers):
            for name, mine, theirs in (("heads", layer.heads, heads), ("k_dim", layer.k_dim, dim)):
                if mine != theirs:
                    raise IdentityError(f"identity field 'layers[{index}].{name}' differs: {mine} against {theirs} of "
                                        "the model")  # fmt: skip
    theta = (getattr(config, "rope_parameters", None) or {}).get("rope_theta")
    rotation = Rotation.of(identity.rope, identity.keys, dim) if isinstance(dim, int) else None
    if rotation is not None and isinstance(theta, int | float) and identity.rope:
        claimed = identity.rope.get("theta")
        if claimed != float(theta):
            raise IdentityError(f"identity field 'rope' differs: theta {claimed} against {theta} of the model")


@contextlib.contextmanager
def _beside_decoding() -> Iterator[None]:
    """Leave half of the cores to what decodes: a matrix product that waits for a core holds all its threads up."""
    import torch

    threads, half = torch.get_num_threads(), max(1, (os.cpu_count() or 1) // 2)
    if threads <= half:
        # Nothing is set that another thread, which is in here too, would then find and keep.
        yield
        return
    torch.set_num_threads(half)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _generate(model: Any, ids: np.ndarray, cache: Any, most: int, ends: int | Iterable[int] | None, begin: float,
              miss: str | None) -> WarmStart:  # fmt: skip
    import torch
    from transformers import DynamicCache

    stops = _stops(model, ends)
    known = 0 if cache is None else int(cache.get_seq_length())
    cache = DynamicCache(config=model.config) if cache is None else cache
    batch = torch.as_tensor(ids[known:].astype(np.int64), device=model.device)[None]
    tokens: list[int] = []
    times = [begin]
    loading = known > 0 and model.device.type == "cpu" and batch.shape[1] <= _FEW
    with torch.no_grad():
        while len(tokens) < most and not (tokens and tokens[-1] in stops):
            with _beside_decoding() if loading and not tokens else contextlib.nullcontext():
                logits = model(batch, cache=cache, use_cache=True, logits_to_keep=1).logits
            tokens.append(int(logits[0, -1].argmax()))
            times.append(time.perf_counter())
            batch = batch.new_tensor([[tokens[-1]]])
    seconds = np.diff(times).tolist()
    return WarmStart(tokens, known, seconds[0] if seconds else 0.0, seconds[1:], miss, cache)


def _stops(model: Any, ends: int | Iterable[int] | None) -> set[int]:
    found: Any = getattr(getattr(model, "generation_config", None), "eos_token_id", None) if ends is None else ends
    if found is None:
        return set()
    try:
        return {whole("eos_token_id", one, 0) for one in ([found] if isinstance(found, int) else found)}
    except TypeError:
        raise UnsupportedError(f"eos_token_id must be whole numbers, not {found!r}") from None


def _ids(prompt: Any, model: Any) -> np.ndarray:
    if hasattr(prompt, "detach"):
        prompt = prompt.detach().cpu().numpy()
    try:
        array = np.asarray(prompt)
    except ValueError:
        raise UnsupportedError("the prompt is lists of unequal lengths, not a list of token ids") from None
    ids = token_ids(array[0] if array.ndim == 2 and len(array) == 1 else array)
    if not len(ids):
        raise UnsupportedError("the prompt is empty")
    known = model.get_input_embeddings().num_embeddings
    if int(ids.max()) >= known:
        raise UnsupportedError(f"the prompt has token id {int(ids.max())}, the model's vocabulary {known} of them")
    return ids
