"""``pltpack capture``: run a model over prompts and keep its caches, one safetensors dump per session.

Dumps are those of `pltpack.dumps.safetensors_dump`, with the full identity: keys rotated as the model holds them, in
position 0 to T - 1. The tokens that really came next, where the prompts have them, go into one safetensors file, an I32
tensor ``[C]`` per session.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pltpack.dumps.atomic import make_folder, replacing
from pltpack.dumps.base import reading
from pltpack.dumps.dynamic_cache import from_dynamic_cache
from pltpack.dumps.registry import write_dump
from pltpack.dumps.safetensors_header import read_header, read_into
from pltpack.errors import ConflictError, DumpError, NotFoundError, UnsupportedError
from pltpack.names import session_to_file
from pltpack.quality.gradients import cache_gradients, sample_continuation, token_importance
from pltpack.quality.model import Model, load_model, load_tokenizer, prefill, prefill_with_logprobs, torch_dtype
from pltpack.quality.prompts import Prompt, prompts_of, read_prompts
from pltpack.snapshot import DTYPES, Snapshot

if TYPE_CHECKING:
    from transformers import DynamicCache

#: Default name of the file of continuations, beside the folder of dumps.
CONTINUATIONS = "continuations.safetensors"
#: Tokens of the model's own continuation by which importance is measured.
IMPORTANCE_TOKENS = 128

PathLike = str | os.PathLike[str]
Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True)
class CaptureOptions:
    """What to keep of a run.

    Attributes
    ----------
    dtype : str
        Dtype of the dumps, a key of `pltpack.snapshot.DTYPES`.
    logprobs : int
        Most probable next tokens to keep per token; 0 for none.
    importance : bool
        Whether to measure per-token importance.
    sensitivity : pair of sequences of ndarray, optional
        F for keys and values by which importance is whitened; see `token_importance`.
    seed : int
        Seed of what is sampled; each session draws from its own stream, whatever else is captured.
    """

    dtype: str = "BF16"
    logprobs: int = 0
    importance: bool = False
    sensitivity: tuple[Sequence[np.ndarray], Sequence[np.ndarray]] | None = None
    seed: int = 0


def capture(
    model: PathLike,
    prompts: PathLike | Iterable[PathLike] | Mapping[str, Any],
    output: PathLike,
    *,
    name: str | None = None,
    options: CaptureOptions | None = None,
    compute: str = "F32",
    device: str = "cpu",
    window: int | None = None,
    continuations: PathLike | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Run a model over prompts and write one dump per session; each file appears whole or not at all.

    Parameters
    ----------
    model : path
        Folder of a transformers model.
    prompts : path, paths or mapping
        Prompt files, or the object that a ``.json`` one holds; see `pltpack.quality.prompts`.
    output : path
        Folder for ``<session>.safetensors`` files; made if it does not exist.
    name : str, optional
        Model name for the identity; the folder's own if not given.
    options : CaptureOptions, optional
    compute, device : str
        Dtype and torch device that the model runs in and on.
    window : int, optional
        Tokens per session of plain-text prompts.
    continuations : path, optional
        File of continuations; `CONTINUATIONS` beside `output` if not given. Sessions in it that are not captured now
        stay.
    force : bool
        Replace what exists.
    progress : callable, optional
        ``progress(stage, done, total)`` in bytes of raw cache.

    Returns
    -------
    dict
        ``output``, ``identity_digest``, ``sessions`` (name, tokens, file, bytes each), ``tokens``, ``bytes``,
        ``continuations`` (the file, or None).

    Raises
    ------
    ConflictError
        If a session's dump or continuation exists already and `force` is not set; nothing has been run then.
    PltpackError
        If model, prompts or options cannot be used; see `load_model`, `read_prompts`.
    """
    options = options or CaptureOptions()
    if options.dtype not in DTYPES:
        raise UnsupportedError(f"dtype {options.dtype!r} is not a KV cache dtype (known: {', '.join(DTYPES)})")
    folder, tokenizer = Path(output), load_tokenizer(Path(model))
    chosen = _prompts(prompts, tokenizer, window)
    known = Path(continuations) if continuations is not None else folder.absolute().parent / CONTINUATIONS
    following = _merged(known, chosen, force)
    _check_new(folder, chosen, force)
    loaded = load_model(Path(model), name, compute, device)
    _check_fit(loaded, chosen, options)

    identity = loaded.identity(options.dtype)
    per_token = sum(layer.bytes_per_token for layer in identity.layers)
    total, done = per_token * sum(len(prompt.tokens) for prompt in chosen), 0
    make_folder(folder)
    sessions = []
    for prompt in chosen:
        if progress:
            progress("capture", done, total)
        (file,) = write_dump(capture_session(loaded, prompt, options), folder)
        done += per_token * len(prompt.tokens)
        sessions.append({"session": prompt.session, "tokens": len(prompt.tokens), "file": file,
                         "bytes": file.stat().st_size})  # fmt: skip
    if progress:
        progress("capture", done, total)
    if following is not None:
        _write_continuations(known, following)
    return {
        "output": folder,
        "identity_digest": identity.digest(),
        "sessions": sessions,
        "tokens": sum(session["tokens"] for session in sessions),
        "bytes": sum(session["bytes"] for session in sessions),
        "continuations": None if following is None else known,
    }


def capture_session(model: Model, prompt: Prompt, options: CaptureOptions) -> Snapshot:
    """The snapshot of one prompt.

    Raises
    ------
    UnsupportedError
        If values do not fit into the dtype.
    """
    logprobs = ids = importance = None
    if options.logprobs:
        cache, ids, logprobs = prefill_with_logprobs(model, prompt.tokens, options.logprobs)
    else:
        cache = prefill(model, prompt.tokens)
    if options.importance:
        importance = _importance(model, cache, prompt, options)
    dtype = torch_dtype(options.dtype)
    for index, layer in enumerate(cache.layers):
        layer.keys, layer.values = layer.keys.to(dtype), layer.values.to(dtype)
        for tensor in (layer.keys, layer.values):
            if not tensor.float().isfinite().all():
                raise UnsupportedError(f"session {prompt.session!r}, layer {index}: values do not fit {options.dtype}")
    snapshot = from_dynamic_cache(cache, prompt.tokens, prompt.session, model.identity(options.dtype))
    return dataclasses.replace(snapshot, logprobs=logprobs, logprob_ids=ids, importance=importance)


def _importance(model: Model, cache: DynamicCache, prompt: Prompt, options: CaptureOptions) -> np.ndarray:
    keys, values = ([getattr(layer, name)[0] for layer in cache.layers] for name in ("keys", "values"))
    generator = _generator(options.seed, prompt.session)
    count = min(IMPORTANCE_TOKENS, (model.max_tokens or 1 << 62) - len(prompt.tokens))
    following = sample_continuation(model, keys, values, prompt.tokens, count, generator)
    rope = model.identity(options.dtype).rope
    gradients = cache_gradients(model, keys, values, following, generator, rope)
    return token_importance(*gradients, options.sensitivity)


def _generator(seed: int, session: str) -> Any:
    import torch

    digest = hashlib.sha256(f"{seed}:{session}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))


def _prompts(prompts: Any, tokenizer: Any, window: int | None) -> list[Prompt]:
    if isinstance(prompts, Mapping):
        chosen = prompts_of(prompts, tokenizer)
    else:
        files = [prompts] if isinstance(prompts, str | os.PathLike) else list(prompts)
        chosen = read_prompts(files, tokenizer, window)
    if not chosen:
        raise NotFoundError("there are no prompts to capture")
    return chosen


def _check_new(folder: Path, prompts: Iterable[Prompt], force: bool) -> None:
    for prompt in prompts:
        file = folder / f"{session_to_file(prompt.session)}.safetensors"
        if file.exists() and not force:
            raise ConflictError("exists already (replace it with --force)", file)


def _check_fit(model: Model, prompts: Iterable[Prompt], options: CaptureOptions) -> None:
    vocabulary, limit = int(model.config.vocab_size), model.max_tokens
    if not 0 <= options.logprobs <= vocabulary:
        raise UnsupportedError(f"{options.logprobs} log-probabilities of a vocabulary of {vocabulary}")
    for prompt in prompts:
        if int(prompt.tokens.max()) >= vocabulary:
            raise UnsupportedError(f"session {prompt.session!r} has token {int(prompt.tokens.max())}, but the model "
                                   f"knows {vocabulary}")  # fmt: skip
        needed = len(prompt.tokens) + bool(options.importance)
        if limit is not None and needed > limit:
            raise UnsupportedError(f"session {prompt.session!r} needs {needed} positions, but the model has {limit}")


def _merged(file: Path, prompts: Iterable[Prompt], force: bool) -> dict[str, np.ndarray] | None:
    """What the file of continuations will hold, or None if these prompts add nothing to it."""
    new = {prompt.session: prompt.continuation for prompt in prompts if prompt.continuation is not None}
    if not new:
        return None
    old = _read_continuations(file) if file.exists() else {}
    twice = sorted(new.keys() & old.keys())
    if twice and not force:
        raise ConflictError(f"holds a continuation of session {twice[0]!r} already (replace it with --force)", file)
    return old | new


def _read_continuations(file: Path) -> dict[str, np.ndarray]:
    found = {}
    header = read_header(file)
    with reading(os.fspath(file), header.stamp) as fd:
        for name, tensor in header.tensors.items():
            if tensor.dtype != "I32" or len(tensor.shape) != 1:
                raise DumpError(f"is no file of continuations: tensor {name!r} is not a list of I32 tokens", file)
            found[name] = np.empty(tensor.shape, "<i4")
            read_into(fd, tensor.offset, found[name].view(np.uint8).data, file)
    return found


def _write_continuations(file: Path, following: Mapping[str, np.ndarray]) -> None:
    from safetensors.numpy import save_file

    make_folder(file.parent)
    with replacing(file) as temp:
        save_file({name: np.ascontiguousarray(ids, np.int32) for name, ids in following.items()}, temp)
