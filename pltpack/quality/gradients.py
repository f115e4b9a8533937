"""What the model feels: gradients of the log-likelihood of its own continuation with respect to the cache.

With labels sampled from the model's own predictions, E[g gᵀ] is the Fisher information F of what it predicts, and
KL ≈ ½ δᵀFδ for a small change δ of the cache. Keys are taken before the rotary embedding, where codecs work on them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pltpack.codec.rope import Rotation
from pltpack.errors import UnsupportedError
from pltpack.quality.model import Model, filled_cache

if TYPE_CHECKING:
    import torch

#: Attention sinks: left out of means, since the first token alone would outweigh thousands of others.
SINKS = 4
#: Regularization of F, as a share of its mean eigenvalue.
RIDGE = 0.1


def cache_gradients(
    model: Model,
    keys: Sequence[Any],
    values: Sequence[Any],
    following_ids: Any,
    generator: torch.Generator | None = None,
    rope: Mapping[str, Any] | None = None,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Gradients of the summed cross-entropy of sampled labels with respect to a cache, layer by layer.

    The tokens that follow are fed after the cache; at each of them one label is drawn from the model's prediction.

    Parameters
    ----------
    model : Model
    keys, values : sequence of ndarray or Tensor
        Per layer ``[H, T, D]`` of positions 0 to T - 1, floating point, keys rotated as the model holds them. Layers
        may differ in heads and dimensions.
    following_ids : array_like
        Token ids int ``[N]``, N ≥ 1: the true text, or `sample_continuation`.
    generator : torch.Generator, optional
        For the labels, on the CPU; the global one if not given.
    rope : mapping or None
        Rotary parameters of an identity. Of a kind that `pltpack.codec.rope` does not take off (or None), keys stay as
        they are held, and so do their gradients.

    Returns
    -------
    (list of ndarray, list of ndarray)
        Gradients for keys (un-rotated) and for values, float32 ``[H, T, D]`` per layer, in nats per unit of the cache.

    Raises
    ------
    UnsupportedError
        If there are no tokens to follow, or a gradient is not finite.
    """
    import torch

    leaves = [[_leaf(array, model) for array in arrays] for arrays in (keys, values)]
    following = torch.as_tensor(np.asarray(following_ids, np.int64), device=model.network.device)
    if following.ndim != 1 or not len(following):
        raise UnsupportedError("gradients need at least one token after the cache")
    with torch.enable_grad():
        cache = filled_cache(model, *leaves)
        logits = model.network(following[None], cache=cache, use_cache=True).logits[0]
        logits = logits.float() if logits.dtype.itemsize < 4 else logits
        loss = torch.nn.functional.cross_entropy(logits, sample_labels(logits, generator), reduction="sum")
        # A layer whose window has left the whole cache behind does not reach the loss.
        found = torch.autograd.grad(loss, leaves[0] + leaves[1], allow_unused=True, materialize_grads=True)
    arrays = [gradient.float().cpu().numpy() for gradient in found]
    if not all(np.isfinite(array).all() for array in arrays):
        raise UnsupportedError("the model's gradients are not finite; compute in F32")
    for index in range(len(keys)):
        # Rotation is orthogonal: its transpose, which gradients need, is its inverse.
        rotation = Rotation.of(rope, "rotated", arrays[index].shape[-1])
        if rotation is not None:
            arrays[index] = rotation.unrotate(arrays[index], 0)
    return arrays[: len(keys)], arrays[len(keys) :]


def sample_labels(logits: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """One token id per row of logits ``[N, vocabulary]``, drawn from its softmax; int64 ``[N]`` on their device."""
    import torch

    probabilities = logits.detach().softmax(-1).cpu().float()
    return torch.multinomial(probabilities, 1, generator=generator)[:, 0].to(logits.device)


def sample_continuation(
    model: Model,
    keys: Sequence[Any],
    values: Sequence[Any],
    tokens: Any,
    count: int,
    generator: torch.Generator | None = None,
) -> np.ndarray:
    """Sample what the model says next, at temperature 1, one token at a time; an end-of-text token does not end it.

    Parameters
    ----------
    model : Model
    keys, values : sequence of ndarray or Tensor
        The cache of `tokens`, as in `cache_gradients`.
    tokens : array_like
        Int ``[T]``, T ≥ 1.
    count : int
        Number of tokens to sample, N.
    generator : torch.Generator, optional
        On the CPU; the global one if not given.

    Returns
    -------
    ndarray
        Token ids, int32 ``[N]``.
    """
    import torch

    # The prediction after the cache needs its last token fed again.
    held = [[torch.as_tensor(array)[:, :-1] for array in arrays] for arrays in (keys, values)]
    token = torch.tensor([int(np.asarray(tokens)[-1])], device=model.network.device)
    sampled = []
    with torch.no_grad():
        cache = filled_cache(model, *held)
        for _ in range(count):
            logits = model.network(token[None], cache=cache, use_cache=True).logits[0, -1:]
            token = sample_labels(logits, generator)
            sampled.append(int(token))
    return np.array(sampled, np.int32)


def token_importance(
    key_gradients: Sequence[np.ndarray],
    value_gradients: Sequence[np.ndarray],
    sensitivity: tuple[Sequence[np.ndarray], Sequence[np.ndarray]] | None = None,
) -> np.ndarray:
    """Whitened gradient energy per token: the sum of gᵀ (F + εI)⁻¹ g over layers, heads, keys and values.

    ε is `RIDGE` times the mean eigenvalue of F. Only ratios between tokens mean something: F grows with the number of
    labels.

    Parameters
    ----------
    key_gradients, value_gradients : sequence of ndarray
        What `cache_gradients` gives: ``[H, T, D]`` per layer.
    sensitivity : pair of sequences of ndarray, optional
        F for keys and for values, ``[H, D, D]`` per layer; the mean of g gᵀ over this session's tokens after the first
        `SINKS` if not given.

    Returns
    -------
    ndarray
        Float32 ``[T]``.
    """
    total = np.zeros(key_gradients[0].shape[1])
    for kind, gradients in enumerate((key_gradients, value_gradients)):
        for index, g in enumerate(gradients):
            wide = np.asarray(g, np.float64)
            fisher = own_sensitivity(wide) if sensitivity is None else np.asarray(sensitivity[kind][index], np.float64)
            if fisher.shape != (wide.shape[0], wide.shape[2], wide.shape[2]):
                raise ValueError(f"sensitivity of layer {index} is {fisher.shape} for gradients {wide.shape}")
            total += sum(_energy(*pair) for pair in zip(wide, fisher, strict=True))
    return total.astype(np.float32)


def own_sensitivity(gradients: np.ndarray) -> np.ndarray:
    """Mean of g gᵀ over the tokens of ``[H, T, D]`` after the first `SINKS` (over all if there are no more)."""
    ordinary = gradients[:, SINKS:] if gradients.shape[1] > SINKS else gradients
    return np.asarray(ordinary.transpose(0, 2, 1) @ ordinary / ordinary.shape[1])


def _energy(gradients: np.ndarray, fisher: np.ndarray) -> np.ndarray:
    """``gᵀ (F + εI)⁻¹ g`` per row of ``[T, D]``."""
    ridge = RIDGE * np.trace(fisher) / len(fisher)
    if not ridge > 0 or not math.isfinite(ridge):
        return np.zeros(len(gradients))
    whitened = np.linalg.solve(np.linalg.cholesky(fisher + ridge * np.eye(len(fisher))), gradients.T)
    return np.asarray(np.square(whitened).sum(axis=0))


def _leaf(array: Any, model: Model) -> torch.Tensor:
    import torch

    tensor = torch.as_tensor(array, device=model.network.device).detach()
    if tensor.dtype != torch.float64:
        tensor = tensor.float()
    return tensor.clone().requires_grad_(True)
