"""A transformers model on disk: loaded for capture, calibration and scores, and run so that its whole cache is kept.

The cache is held in full, sliding layers too: what a layer drops while it generates, a snapshot has to keep. Needs the
extra ``eval``; torch and transformers are imported on first use.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pltpack.dumps.model_config import label
from pltpack.dumps.torch_arrays import to_torch
from pltpack.errors import DumpError, NotFoundError, UnsupportedError
from pltpack.quality.digests import tokenizer_digest, weights_digest
from pltpack.quality.geometry import layer_geometry, model_rope
from pltpack.snapshot import DTYPES, Identity

if TYPE_CHECKING:
    from transformers import DynamicCache

# Rows of logits that are turned into log-probabilities at once, and most bytes of logits that one pass may leave.
_ROWS = 256
_LOGIT_BYTES = 1 << 30


def need_eval() -> None:
    """Check that the extra ``eval`` is installed.

    Raises
    ------
    UnsupportedError
        Naming the package that is missing and what to install.
    """
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        missing = error.name or "torch or transformers"
        raise UnsupportedError(f"{missing} is not installed, which runs models: pip install 'pltpack[eval]'") from None


@dataclasses.dataclass(frozen=True)
class Model:
    """A loaded model.

    Attributes
    ----------
    network : transformers.PreTrainedModel
        In evaluation mode, its parameters without gradients.
    folder : Path
        Where it was loaded from.
    name : str
        Its name in identities.
    """

    network: Any
    folder: Path
    name: str

    @property
    def config(self) -> Any:
        """The configuration of the part that decodes text."""
        return self.network.config.get_text_config(decoder=True)

    @property
    def max_tokens(self) -> int | None:
        """Longest context in tokens, or None where the model states none."""
        limit = getattr(self.config, "max_position_embeddings", None)
        return limit if isinstance(limit, int) and limit > 0 else None

    @functools.cached_property
    def _known(self) -> Identity:
        weights, tokenizer = weights_digest(self.folder), tokenizer_digest(self.folder)
        rope = model_rope(self.network)
        layers = layer_geometry(self.network, "F32")
        return Identity(self.name, weights, tokenizer, rope, keys="rotated", layers=layers, tp_rank=0, tp_size=1)

    def identity(self, dtype: str) -> Identity:
        """The full identity of caches that are kept in `dtype`, a key of `pltpack.snapshot.DTYPES`.

        Raises
        ------
        UnsupportedError
            If the rotary embedding is of a kind that identities cannot describe, or weights are not safetensors.
        """
        layers = tuple(dataclasses.replace(layer, dtype=dtype) for layer in self._known.layers)
        return dataclasses.replace(self._known, layers=layers)


def load_model(folder: str | Path, name: str | None = None, dtype: str = "F32", device: str = "cpu") -> Model:
    """Load a causal language model from a folder; nothing is fetched from anywhere and no code in it is run.

    Parameters
    ----------
    folder : path
        As ``save_pretrained`` writes it, weights in safetensors files.
    name : str, optional
        Name for identities; the folder's own if not given.
    dtype : str
        What it computes in: F32, BF16 or F16.
    device : str
        A torch device.

    Raises
    ------
    NotFoundError
        If there is no such folder, or no model in it.
    UnsupportedError
        If transformers cannot load it, the device cannot be used, or torch and transformers are missing.
    DumpError
        If weights are missing.
    """
    need_eval()
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    folder = model_folder(folder)
    disable_progress_bar()
    settings = {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True}
    try:
        network, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch_dtype(dtype), output_loading_info=True, **settings
        )
    # transformers and what it calls raise nearly anything for a folder they cannot load.
    except Exception as error:
        raise UnsupportedError(f"is not a model that transformers can load ({_first_line(error)})", folder) from error
    try:
        network = network.to(device)
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        raise UnsupportedError(f"device {device!r} cannot be used ({_first_line(error)})") from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise DumpError(f"has no weights for {missing[0]!r} ({len(missing)} missing)", folder)
    return Model(network.eval().requires_grad_(False), folder, name or label(folder))


def load_tokenizer(folder: str | Path) -> Any:
    """The tokenizer in a model's folder, or None if it holds none.

    Raises
    ------
    NotFoundError
        If there is no such folder, or no model in it.
    UnsupportedError
        If transformers cannot load it.
    """
    need_eval()
    from transformers import AutoTokenizer

    folder = model_folder(folder)
    if tokenizer_digest(folder) is None:
        return None
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise UnsupportedError(f"its tokenizer cannot be loaded ({_first_line(error)})", folder) from error


def model_folder(folder: str | Path) -> Path:
    """The folder itself, if it holds a model's configuration; NotFoundError if not."""
    folder = Path(folder)
    if not folder.is_dir():
        raise NotFoundError("no such model folder", folder)
    if not (folder / "config.json").is_file():
        raise NotFoundError("holds no transformers model (config.json is missing)", folder)
    return folder


def prefill(model: Model, tokens: np.ndarray) -> DynamicCache:
    """The cache after one pass over `tokens` int ``[T]``, in the dtype that the model computes in."""
    cache = _empty_cache()
    with _no_gradients():
        model.network.base_model(_batch(model, tokens), cache=cache, use_cache=True)
    return cache


def prefill_with_logprobs(model: Model, tokens: np.ndarray, top: int) -> tuple[DynamicCache, np.ndarray, np.ndarray]:
    """The cache after one pass over `tokens`, and the most probable next tokens after each of them.

    Parameters
    ----------
    tokens : ndarray
        Int ``[T]``.
    top : int
        How many next tokens to keep, k.

    Returns
    -------
    cache : DynamicCache
        Bit by bit that of `prefill`.
    ids : ndarray
        Int32 ``[T, k]``: row t holds the tokens most probable after ``tokens[:t + 1]``, most probable first.
    logprobs : ndarray
        Their log-probabilities in nats, float32 ``[T, k]``.
    """
    batch = _batch(model, tokens)
    if 4 * len(tokens) * int(model.config.vocab_size) <= _LOGIT_BYTES:
        cache = _empty_cache()
        with _no_gradients():
            rows = [model.network(batch, cache=cache, use_cache=True).logits[0]]
    else:
        # A second pass in runs of tokens holds few logits; the first one keeps the cache's bits.
        cache = prefill(model, tokens)
        rows = _logits_in_runs(model, batch)  # type: ignore[assignment]
    found = [_most_probable(part, top) for run in rows for part in run.split(_ROWS)]
    ids, logprobs = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return cache, ids.astype(np.int32), logprobs


def filled_cache(model: Model, keys: Sequence[Any], values: Sequence[Any]) -> DynamicCache:
    """A cache of tensors ``[H, T, D]`` per layer, keys rotated; gradients flow through it."""
    cache = _empty_cache()
    for index, (k, v) in enumerate(zip(keys, values, strict=True)):
        settings = {"device": model.network.device, "dtype": model.network.dtype}
        cache.update(k.to(**settings)[None], v.to(**settings)[None], index)
    return cache


def torch_dtype(name: str) -> Any:
    """The torch dtype of a cache dtype's name."""
    return to_torch(np.zeros(0, DTYPES[name])).dtype


def _logits_in_runs(model: Model, batch: Any) -> Iterator[Any]:
    cache = _empty_cache()
    with _no_gradients():
        for run in batch.split(_ROWS, dim=1):
            yield model.network(run, cache=cache, use_cache=True).logits[0]


def _most_probable(logits: Any, top: int) -> tuple[np.ndarray, np.ndarray]:
    values, ids = logits.float().log_softmax(-1).topk(top)
    return ids.cpu().numpy(), values.cpu().numpy()


def _batch(model: Model, tokens: np.ndarray) -> Any:
    import torch

    return torch.as_tensor(np.asarray(tokens, np.int64), device=model.network.device)[None]


def _empty_cache() -> DynamicCache:
    from transformers import DynamicCache

    # Without a configuration no layer drops what leaves its window.
    return DynamicCache()


def _no_gradients() -> Any:
    import torch

    return torch.no_grad()


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
