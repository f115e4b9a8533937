"""Caches of transformers that a load fills: one whose layers wait for their values, and plain ones. Needs torch."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from pltpack.codec.base import KeyValue
from pltpack.errors import UnsupportedError
from pltpack.serve.arguments import whole
from pltpack.serve.destinations import as_array, check_dtype, convert
from pltpack.serve.prefixes import Hit
from pltpack.serve.stream import Stream
from pltpack.snapshot import LayerGeometry, dtype_name

if TYPE_CHECKING:
    from pltpack.serve.loader import Loader

#: Tokens that a layer has room for beyond what it is made for, before it must move.
SLACK = 256


class Tensors:
    """A destination of tensors ``[1, H, T + spare, D]`` per layer.

    Parameters
    ----------
    dtype : torch.dtype, optional
        The stored one by default.
    spare : int
        Room behind the loaded tokens.
    """

    #: Of the tensors.
    device: str = "cpu"

    def __init__(self, dtype: torch.dtype | None = None, spare: int = 0) -> None:
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise UnsupportedError(f"dtype must be a torch.dtype, not {dtype!r}")
        self._dtype, self._spare = dtype, whole("spare", spare, 0)

    def begin(self, layers: Sequence[LayerGeometry], tokens: int) -> None:
        """See `Destination.begin`."""
        from pltpack.quality.model import torch_dtype

        self._tokens = tokens
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._views: list[KeyValue] = []
        for index, layer in enumerate(layers):
            dtype = self._dtype or torch_dtype(layer.dtype)
            shape = 1, layer.heads, tokens + self._spare
            keys_, values_ = (torch.empty(*shape, dim, dtype=dtype, device=self.device)
                              for dim in (layer.k_dim, layer.v_dim))  # fmt: skip
            pair = keys_, values_
            keys, values = (self._as_array(tensor)[0, :, :tokens] for tensor in pair)
            self._check_dtype(keys, layer.dtype, f"the cache's values of layer {index}")
            self._pairs.append(pair)
            self._views.append((keys, values))
        self._names = [layer.dtype for layer in layers]

    def _as_array(self, tensor: torch.Tensor) -> Any:
        return as_array(tensor)

    def _check_dtype(self, array: Any, stored: str, what: str) -> None:
        check_dtype(array.dtype, stored, what)

    def room(self, layers: range, start: int, stop: int) -> Sequence[KeyValue] | None:
        """See `Destination.room`."""
        inside = range(layers.start, layers.stop)
        if any(dtype_name(self._views[layer][0].dtype) != self._names[layer] for layer in inside):
            return None
        return [(self._views[layer][0][:, start:stop], self._views[layer][1][:, start:stop]) for layer in inside]

    def put(self, layer: int, start: int, stop: int, keys: np.ndarray, values: np.ndarray) -> None:
        """See `Destination.put`."""
        convert(keys, self._views[layer][0][:, start:stop])
        convert(values, self._views[layer][1][:, start:stop])

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Destination.layer`: with the room behind."""
        return self._pairs[index]

    def touched(self) -> tuple[int, ...]:
        """See `Destination.touched`."""
        return ()


class Filled(Tensors):
    """A plain ``DynamicCache`` as a destination: layer after layer is put into it as it is handed over.

    Parameters
    ----------
    cache : DynamicCache
        An empty one; its layers are replaced.
    """

    def __init__(self, cache: DynamicCache) -> None:
        super().__init__()
        self._cache = cache

    def begin(self, layers: Sequence[LayerGeometry], tokens: int) -> None:
        """See `Destination.begin`."""
        require_plain(self._cache, len(layers))
        if self._cache.get_seq_length():
            raise UnsupportedError("the cache to be loaded into is not empty")
        super().begin(layers, tokens)
        self._windows = _windows(self._cache, layers)
        self._cache.layers[:] = []

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Destination.layer`."""
        from pltpack.dumps.dynamic_cache import cache_layer

        keys, values = super().layer(index)
        if index == len(self._cache.layers):
            self._cache.layers.append(cache_layer(keys, values, self._windows[index]))
        return keys[0], values[0]


def require_plain(cache: Any, layers: int) -> None:
    """Refuse caches that keep values otherwise than a ``DynamicCache`` on one device does, with `UnsupportedError`."""
    kind = type(cache).__name__
    if not isinstance(cache, DynamicCache) or isinstance(cache, WarmCache):
        raise UnsupportedError(f"a load cannot go to a {kind}: give a DynamicCache")
    if getattr(cache, "offloading", False):
        raise UnsupportedError("a load cannot go to a DynamicCache that is offloaded")
    for index, layer in enumerate(cache.layers):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise UnsupportedError(f"a load cannot go to a {type(layer).__name__} (layer {index} of the {kind})")
    if cache.layers and len(cache.layers) != layers:
        raise UnsupportedError(f"the cache has {len(cache.layers)} layers, the archive {layers}")


def _windows(cache: DynamicCache, layers: Sequence[LayerGeometry]) -> list[int | None]:
    """Sliding windows by layer: the archive's, or where it knows none the cache's own."""
    own = [getattr(layer, "sliding_window", None) for layer in cache.layers] or [None] * len(layers)
    for index, (mine, layer) in enumerate(zip(own, layers, strict=True)):
        if mine is not None and layer.window is not None and mine != layer.window:
            raise UnsupportedError(f"layer {index} of the cache has window {mine}, the archive's {layer.window}")
    return [layer.window or mine for mine, layer in zip(own, layers, strict=True)]


class _Awaited:
    """What makes a cache layer wait for its values the first time that anybody looks at them."""

    def await_from(self, stream: Stream, index: int, tokens: int) -> None:
        """Wait for a stream's layer."""
        self._stream: Stream | None = stream
        self._index, self._tokens = index, tokens
        self.is_initialized = True

    @property
    def keys(self) -> torch.Tensor | None:
        """Keys ``[1, H, T, D]``."""
        self.arrive()
        return self._keys

    @keys.setter
    def keys(self, keys: torch.Tensor | None) -> None:
        self._keys = keys

    @property
    def values(self) -> torch.Tensor | None:
        """Values ``[1, H, T, D]``."""
        self.arrive()
        return self._values

    @values.setter
    def values(self, values: torch.Tensor | None) -> None:
        self._values = values

    def arrive(self) -> None:
        """Wait for the layer, once."""
        stream = getattr(self, "_stream", None)
        if stream is not None:
            _, keys, values = stream.wait(self._index)
            self._stream = None
            self.take(keys, values)

    def take(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Begin with loaded values."""
        raise NotImplementedError

    def reset(self) -> None:
        """Forget all, what has not come yet included."""
        self._stream = None
        super().reset()  # type: ignore[misc]


class AwaitedLayer(_Awaited, DynamicLayer):
    """A full-attention layer; new tokens go to the room behind the loaded ones instead of to a copy of everything."""

    _rooms: tuple[torch.Tensor, torch.Tensor] | None = None

    def take(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Begin with loaded values and the room behind them."""
        self.device = keys.device
        self._rooms = keys, values
        self._keys, self._values = keys[:, :, : self._tokens], values[:, :, : self._tokens]

    def get_seq_length(self) -> int:
        """Tokens, known before they are here."""
        if getattr(self, "_stream", None) is not None:
            return self._tokens
        found: int = super().get_seq_length()
        return found

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add tokens and give all, as `DynamicLayer.update`; waits for the loaded ones."""
        self.arrive()
        keys = self._keys
        if keys is None or not self._fits(keys, key_states):
            self._rooms = None
            found: tuple[torch.Tensor, torch.Tensor] = super().update(key_states, value_states, *args, **kwargs)
            return found
        first, last = keys.shape[2], keys.shape[2] + key_states.shape[2]
        rooms = self._rooms
        assert rooms is not None
        rooms[0][:, :, first:last], rooms[1][:, :, first:last] = key_states, value_states
        self._keys, self._values = rooms[0][:, :, :last], rooms[1][:, :, :last]
        return self._keys, self._values

    def _fits(self, keys: torch.Tensor, more: torch.Tensor) -> bool:
        """Whether the values are still the beginning of the room, which others may have replaced, and there is more."""
        rooms = self._rooms
        if rooms is None or keys.data_ptr() != rooms[0].data_ptr() or keys.stride() != rooms[0].stride():
            return False
        if keys.dtype != more.dtype or len(keys) != len(more) or (torch.is_grad_enabled() and more.requires_grad):
            return False
        free: bool = keys.shape[2] + more.shape[2] <= rooms[0].shape[2]
        return free


class AwaitedSlidingLayer(_Awaited, DynamicSlidingWindowLayer):
    """A layer with a sliding window: of the loaded tokens it keeps the last ones only, as if it had seen them all."""

    def await_from(self, stream: Stream, index: int, tokens: int) -> None:
        """Wait for a stream's layer; its tokens are counted at once."""
        super().await_from(stream, index, tokens)
        self.cumulative_length = tokens

    def take(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Keep the window."""
        self.device = keys.device
        # What `lazy_initialization` does besides.
        self._sliding_window_tensor: torch.Tensor = self._sliding_window_tensor.to(self.device)
        first = max(0, self._tokens - self.sliding_window + 1)
        self._keys, self._values = (array[:, :, first : self._tokens].clone() for array in (keys, values))


class WarmCache(DynamicCache):
    """A cache whose layer i waits for its values when the model first updates it.

    While the model attends in one layer, those behind it are read and decoded. Use it as any cache; `close` it, or let
    it go, to end a load that is not complete.

    Parameters
    ----------
    loader : Loader
    hit : Hit
    dtype : torch.dtype, optional
        What the model computes in; the stored dtype by default.
    spare : int
        Tokens that will be added, so that the cache need not move.
    timeout : float, optional
        Seconds for the load.

    Raises
    ------
    MissError
        If the load fails, when a layer of it is waited for; the cache is of no use then.
    """

    def __init__(
        self,
        loader: Loader,
        hit: Hit,
        dtype: torch.dtype | None = None,
        spare: int = SLACK,
        timeout: float | None = None,
    ) -> None:
        super().__init__()
        self._destination = Tensors(dtype, spare)
        self.stream = loader.stream(hit, self._destination, timeout)
        layers = []
        for index, geometry in enumerate(loader.archive.identity.layers):
            window = geometry.window
            layer = AwaitedLayer() if window is None else AwaitedSlidingLayer(sliding_window=window)
            layer.await_from(self.stream, index, hit.tokens)
            layers.append(layer)
        self.layers[:] = layers

    def __deepcopy__(self, memo: dict[int, Any]) -> WarmCache:
        """A cache of its own with all layers, which are waited for; what loaded them is not copied."""
        for layer in self.layers:
            layer.arrive()
        twin: WarmCache = type(self).__new__(type(self))
        memo[id(self)] = twin
        for name, value in vars(self).items():
            setattr(twin, name, value if name in ("stream", "_destination") else copy.deepcopy(value, memo))
        return twin

    def close(self) -> None:
        """End the load if it is not complete."""
        self.stream.close()
