"""Where a load on a device goes: fresh arrays, the caller's, an engine's pages, or a cache, all in its memory.

Arrays are words: unsigned integers as wide as the cache dtype, as CuPy has no bfloat16. Tensors are looked at as such
without a copy. Nothing is converted: a destination has the stored dtype.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from pltpack.errors import UnsupportedError
from pltpack.gpu import device
from pltpack.gpu.backend import CudaBackend
from pltpack.serve.destinations import Contiguous, Destination, Fresh
from pltpack.serve.pages import Paged
from pltpack.snapshot import DTYPES, LayerGeometry


class DeviceFresh:
    """Arrays of words of the loader's own, ``[H, T, D]`` per layer."""

    def __init__(self, backend: CudaBackend) -> None:
        self._backend = backend

    def begin(self, layers: Sequence[LayerGeometry], tokens: int) -> None:
        """See `Destination.begin`."""
        self._arrays = []
        for g in layers:
            keys, values = (self._backend.buffer(g.heads * tokens * dim, g.dtype).reshape(g.heads, tokens, dim)
                            for dim in (g.k_dim, g.v_dim))  # fmt: skip
            self._arrays.append((keys, values))

    def room(self, layers: range, start: int, stop: int) -> None:
        """See `Destination.room`."""

    def put(self, layer: int, start: int, stop: int, keys: Any, values: Any) -> None:
        """See `Destination.put`."""
        self._arrays[layer][0][:, start:stop] = keys
        self._arrays[layer][1][:, start:stop] = values

    def layer(self, index: int) -> tuple[Any, Any]:
        """See `Destination.layer`."""
        return self._arrays[index]

    def touched(self) -> tuple[int, ...]:
        """See `Destination.touched`."""
        return ()


class DeviceContiguous(Contiguous):
    """`Contiguous` of arrays or tensors on the device."""

    def __init__(self, given: Contiguous) -> None:
        super().__init__(*given._given)

    def _as_array(self, tensor: Any) -> Any:
        return as_words(tensor)

    def _check_dtype(self, array: Any, stored: str, what: str) -> None:
        check_words(array, stored, what)

    def put(self, layer: int, start: int, stop: int, keys: Any, values: Any) -> None:
        """See `Destination.put`."""
        self._keys[layer][:, start:stop] = keys
        self._values[layer][:, start:stop] = values


class DevicePaged(Paged):
    """`Paged` of pages on the device: one scatter for a layer's keys and one for its values."""

    def __init__(self, given: Paged) -> None:
        self.__dict__.update(given.__dict__)

    def _as_array(self, tensor: Any) -> Any:
        return as_words(tensor)

    def _check_dtype(self, array: Any, stored: str, what: str) -> None:
        check_words(array, stored, what)

    def _strided(self, view: Any, shape: Sequence[int], strides: Sequence[int]) -> Any:
        return device.arrays().lib.stride_tricks.as_strided(view, shape, strides)

    def put(self, layer: int, start: int, stop: int, keys: Any, values: Any) -> None:
        """See `Destination.put`."""
        slots = np.arange(start, stop)
        blocks = self._blocks[slots // self._size]
        self._written.update(np.unique(blocks).tolist())
        where = device.put(blocks), device.put(slots % self._size)
        for view, array in zip(self._views[layer], (keys, values), strict=True):
            view[where] = array.transpose(1, 0, 2)


def on_device(given: Destination, backend: CudaBackend) -> Destination:
    """The same destination for values that lie on the device; others are taken as they are, and get words.

    A cache is filled with tensors on the device, of the stored dtype.
    """
    if isinstance(given, Fresh):
        return DeviceFresh(backend)
    if type(given) is Contiguous:
        return DeviceContiguous(given)
    if type(given) is Paged:
        return DevicePaged(given)
    # Whoever has a destination of tensors has imported it; others need no torch.
    cache = sys.modules.get("pltpack.serve.cache")
    return _with_words(given, backend) if cache is not None and isinstance(given, cache.Tensors) else given


def _with_words(given: Any, backend: CudaBackend) -> Destination:
    """A destination of tensors, made to take words."""

    def put(layer: int, start: int, stop: int, keys: Any, values: Any) -> None:
        given._views[layer][0][:, start:stop] = keys
        given._views[layer][1][:, start:stop] = values

    given.device = "cpu" if device.is_simulated() else backend.name
    given._as_array, given._check_dtype, given.put = as_words, check_words, put
    found: Destination = given
    return found


def as_words(array: Any) -> Any:
    """A view, as words, of an array or tensor on the device; in the simulator its memory is the host's.

    Raises
    ------
    UnsupportedError
        If it is elsewhere.
    """
    if device.is_simulated():
        from pltpack.serve.destinations import as_array

        host = as_array(array)
        return host.view(f"u{host.dtype.itemsize}")
    xp = device.arrays()
    if not isinstance(array, xp.ndarray):
        if getattr(getattr(array, "device", None), "type", "cpu") != "cuda":
            raise UnsupportedError("destination is not on the device that the loader decodes on")
        import torch

        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[array.element_size()]
        array = xp.from_dlpack(array.detach().view(bits))
    return array.view(np.dtype(f"u{array.dtype.itemsize}"))


def check_words(array: Any, stored: str, what: str) -> None:
    """Refuse words of another width than the stored dtype's, with `UnsupportedError`."""
    if array.dtype.itemsize != DTYPES[stored].itemsize:
        raise UnsupportedError(f"{what} have {array.dtype.itemsize} bytes an element, the archive's {stored}")
