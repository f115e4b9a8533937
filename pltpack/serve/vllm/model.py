"""What vLLM knows of the model that it runs, as an identity."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pltpack.dumps.torch_arrays import cache_dtype
from pltpack.errors import PltpackError, UnsupportedError
from pltpack.quality.digests import tokenizer_digest, weight_files, weights_digest
from pltpack.quality.geometry import config_rope
from pltpack.snapshot import Identity, LayerGeometry

log = logging.getLogger("pltpack.serve")


@dataclasses.dataclass(frozen=True)
class CacheShape:
    """The caches of an engine: layer names in the order of the model, their geometry, and tokens per block."""

    names: tuple[str, ...]
    layers: tuple[LayerGeometry, ...]
    block_size: int


def cache_shape(vllm_config: Any, kv_cache_config: Any) -> CacheShape:
    """The shape of the caches that vLLM allocates.

    Raises
    ------
    UnsupportedError
        If the model keeps anything but keys and values of whole layers in one pool of blocks, or runs in parallel.
    """
    from vllm.model_executor.models.utils import extract_layer_index

    parallel = vllm_config.parallel_config
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "decode_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise UnsupportedError(f"{name} of {getattr(parallel, name)}: the connector serves one rank only")
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise UnsupportedError(f"the model keeps {len(groups)} kinds of caches; the connector serves models with one "
                               "(try --disable-hybrid-kv-cache-manager)")  # fmt: skip
    spec = groups[0].kv_cache_spec
    names = tuple(sorted(groups[0].layer_names, key=extract_layer_index))
    specs = getattr(spec, "kv_cache_specs", None) or dict.fromkeys(names, spec)
    cache = vllm_config.cache_config.cache_dtype
    return CacheShape(names, tuple(_geometry(name, specs[name], cache) for name in names), int(spec.block_size))


def _geometry(name: str, spec: Any, cache: str) -> LayerGeometry:
    if type(spec).__name__ not in ("FullAttentionSpec", "SlidingWindowSpec"):
        raise UnsupportedError(f"layer {name!r} keeps a {type(spec).__name__}, not keys and values")
    dtype = "F8_E5M2" if cache == "fp8_e5m2" else "F8_E4M3" if cache.startswith("fp8") else cache_dtype(spec.dtype)
    value_dim = getattr(spec, "head_size_v", None) or spec.head_size
    return LayerGeometry(spec.num_kv_heads, spec.head_size, value_dim, dtype, getattr(spec, "sliding_window", None))


def engine_identity(vllm_config: Any, shape: CacheShape, salt: str | None, name: str | None) -> Identity:
    """The identity of the caches that vLLM computes; what it cannot tell is unknown.

    Parameters
    ----------
    vllm_config : vllm.config.VllmConfig
    shape : CacheShape
    salt : str or None
    name : str or None
        Model name; vLLM's own by default.

    Raises
    ------
    UnsupportedError
        If the rotary embedding is of a kind that identities cannot describe.
    """
    model = vllm_config.model_config
    rope = config_rope(model.hf_text_config, shape.layers[0].k_dim)
    style = rotary_style()
    if rope is not None and style is not None:
        rope["style"] = style
    folder = _folder(model)
    weights = tokenizer = None
    if folder is not None:
        weights, tokenizer = kept_weights_digest(folder), tokenizer_digest(folder)
    name = name or os.path.basename(os.path.normpath(model.model))
    return Identity(name, weights, tokenizer, rope, "rotated", shape.layers, 0, 1, salt)


def expected_of(own: Identity, archive: Identity, accept_unknown: Sequence[str]) -> Identity:
    """The engine's identity as an archive must have it.

    Names are not compared: one model is served under many, and its weights say which it is. Where vLLM does not say how
    keys are paired by the rotary embedding, the archive's word is taken.

    Raises
    ------
    UnsupportedError
        If the engine does not know its weights or its rotary embedding, and was not told to go on without.
    """
    for field in ("weights", "rope"):
        if getattr(own, field) is None and getattr(archive, field) is not None and field not in accept_unknown:
            way = f'"accept_unknown": ["{field}"]'
            raise UnsupportedError(f"identity field {field!r} of the engine is not known, so an archive that records "
                                   f"it cannot be checked (go on without: {way})")  # fmt: skip
    rope = own.rope
    if rope is not None and "style" not in rope and archive.rope is not None:
        rope = {**rope, "style": archive.rope.get("style", "half")}
    return dataclasses.replace(own, model=None, rope=rope)


def rotary_style() -> str | None:
    """How vLLM's rotary embeddings in this process pair components; None where none was made, or they differ."""
    from vllm.model_executor.layers import rotary_embedding

    made = getattr(rotary_embedding, "_ROPE_DICT", {}).values()
    styles = {bool(embedding.is_neox_style) for embedding in made if hasattr(embedding, "is_neox_style")}
    if len(styles) != 1:
        return None
    return "half" if styles.pop() else "interleaved"


def _folder(model: Any) -> Path | None:
    """The model's folder on this machine."""
    if os.path.isdir(model.model):
        return Path(model.model)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model.model, revision=model.revision, local_files_only=True))
    # Whatever a hub client raises, the folder is not here.
    except Exception:
        return None


def kept_weights_digest(folder: Path) -> str | None:
    """`weights_digest` of a folder, kept in the user's cache for files that have not changed; None without weights."""
    try:
        files = weight_files(folder)
    except PltpackError:
        return None
    stamps = [(os.path.realpath(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    key = hashlib.sha256(json.dumps(stamps).encode()).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pltpack" / "weights" / key
    try:
        kept = cache.read_text()
        if kept.startswith("sha256:") and len(kept) == 71:
            return kept
    except (OSError, ValueError):
        pass
    log.info("reading the weights in %s once, for their digest", folder)
    digest = weights_digest(folder)
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        temporary = cache.with_name(f".{cache.name}.{os.getpid()}")
        temporary.write_text(digest)
        os.replace(temporary, cache)
    except OSError as error:
        log.info("the digest is not kept: %s", error)
    return digest
