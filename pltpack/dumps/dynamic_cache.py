"""Between snapshots and the `DynamicCache` objects of transformers (5.24) in memory."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from pltpack.dumps.base import with_layers
from pltpack.dumps.tokens import token_ids
from pltpack.dumps.torch_arrays import to_numpy, to_torch
from pltpack.errors import DumpError, UnsupportedError
from pltpack.snapshot import Identity, Snapshot, layer_geometry

if TYPE_CHECKING:
    from transformers import DynamicCache

_FOREIGN_STATE = {
    "conv_states": "linear-attention state",
    "recurrent_states": "linear-attention state",
    "indexer_keys": "sparse-attention indexer keys",
    "_quantized_keys": "quantized keys",
}


def from_dynamic_cache(
    cache: DynamicCache, tokens: Any, session: str = "session", identity: Identity | None = None
) -> Snapshot:
    """Make a snapshot of a cache; its arrays are copied, so the cache may go on being used.

    Parameters
    ----------
    cache : transformers.DynamicCache
        Or any cache whose ``layers`` have ``keys`` and ``values`` ``[1, H_kv, T, D]``; a static cache gives its first
        T tokens.
    tokens : array_like or Tensor
        Ids of the cached tokens, ``[T]`` or ``[1, T]``.
    session : str
    identity : Identity, optional
        The geometry is taken from the cache.

    Raises
    ------
    UnsupportedError
        If it holds a batch, a sliding layer has dropped tokens, or a layer holds more than keys and values.
    DumpError
        If the number of tokens is not that of the cache.
    """
    if not hasattr(cache, "layers"):
        raise UnsupportedError(f"{type(cache).__name__} has no layers; caches of transformers 5 are needed")
    ids = _ids(tokens)
    if not cache.layers:
        raise DumpError("the cache holds no layers")
    arrays = [_layer(index, layer, len(ids)) for index, layer in enumerate(cache.layers)]
    windows = [_window(layer) for layer in cache.layers]
    layers = tuple(layer_geometry(index, keys, values, len(ids)) for index, (keys, values) in enumerate(arrays))
    known = dataclasses.replace(identity or Identity(), layers=())
    if identity is not None and identity.layers:
        with_layers(identity, layers)
        windows = [mine or said.window for mine, said in zip(windows, identity.layers, strict=True)]
    layers = tuple(dataclasses.replace(layer, window=window) for layer, window in zip(layers, windows, strict=True))
    return Snapshot.from_arrays(session, ids, arrays, dataclasses.replace(known, layers=layers))


def to_dynamic_cache(snapshot: Snapshot, device: Any = None, dtype: Any = None) -> DynamicCache:
    """Make a cache of a snapshot, layer by layer.

    Parameters
    ----------
    snapshot : Snapshot
    device : torch.device or str, optional
        The CPU if not given.
    dtype : torch.dtype, optional
        The stored dtype of each layer if not given.

    Raises
    ------
    UnsupportedError
        If the keys are stored un-rotated.
    """
    if snapshot.identity.keys == "unrotated":
        raise UnsupportedError(f"session {snapshot.session!r} stores un-rotated keys, which models cannot take")
    from transformers import DynamicCache

    cache = DynamicCache()
    layers = []
    for index, geometry in enumerate(snapshot.identity.layers):
        keys, values = (to_torch(array)[None].to(device=device, dtype=dtype) for array in snapshot.layer(index))
        layers.append(cache_layer(keys, values, geometry.window))
    cache.layers[:] = layers
    return cache


def cache_layer(keys: Any, values: Any, window: int | None) -> Any:
    """A cache's layer that holds tensors ``[1, H, T, D]`` of all tokens, as if it had been updated with them."""
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    layer = DynamicLayer() if window is None else DynamicSlidingWindowLayer(sliding_window=window)
    layer.lazy_initialization(keys, values)
    # `update` would concatenate to an empty tensor, which torch does not do for fp8.
    count = keys.shape[-2]
    if window is not None:
        layer.cumulative_length = count
        first = max(0, count - window + 1)
        keys, values = keys[:, :, first:].clone(), values[:, :, first:].clone()
    layer.keys, layer.values = keys, values
    return layer


def _ids(tokens: Any) -> np.ndarray:
    if hasattr(tokens, "detach"):
        tokens = tokens.detach().cpu().numpy()
    array = np.asarray(tokens)
    if array.size == 0:
        return np.zeros(0, np.int32)
    return token_ids(array[0] if array.ndim == 2 and len(array) == 1 else array, "tokens")


def _layer(index: int, layer: Any, count: int) -> tuple[np.ndarray, np.ndarray]:
    for name, what in _FOREIGN_STATE.items():
        if _is_filled(getattr(layer, name, None)):
            raise UnsupportedError(f"layer {index} holds {what}, which a snapshot cannot hold")
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if keys is None or values is None:
        raise UnsupportedError(f"layer {index} ({type(layer).__name__}) holds no keys and values")
    if keys.ndim != 4 or values.ndim != 4 or keys.shape[0] != 1 or values.shape[0] != 1:
        raise UnsupportedError(f"layer {index} holds {list(keys.shape)}, not one session [1, heads, tokens, dim]")
    length = int(layer.get_seq_length()) if hasattr(layer, "get_seq_length") else keys.shape[-2]
    if length != count:
        raise DumpError(f"layer {index} holds {length} tokens but {count} token ids were given")
    if keys.shape[-2] < count or values.shape[-2] < count:
        raise UnsupportedError(f"layer {index} keeps only {keys.shape[-2]} of {count} tokens; capture it before its "
                               "sliding window drops any, or without one")  # fmt: skip
    if getattr(layer, "is_sliding", False) and keys.shape[-2] > count and not hasattr(layer, "max_cache_len"):
        raise UnsupportedError(f"layer {index} holds {keys.shape[-2]} tokens but counts {count}")
    return to_numpy(keys[0, :, :count]), to_numpy(values[0, :, :count])


def _is_filled(state: Any) -> bool:
    if isinstance(state, dict | list | tuple):
        return any(_is_filled(part) for part in (state.values() if isinstance(state, dict) else state))
    return state is not None and state is not False


def _window(layer: Any) -> int | None:
    window = getattr(layer, "sliding_window", None) if getattr(layer, "is_sliding", False) else None
    return None if window is None else int(window)
