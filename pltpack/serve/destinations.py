"""Where a load goes: fresh arrays, arrays of the caller's, or (in `pages` and `cache`) an engine's own memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.exceptions import TooHardError
from numpy.lib.array_utils import byte_bounds

from pltpack.archive.decoding import one_buffer
from pltpack.codec.base import KeyValue
from pltpack.errors import UnsupportedError
from pltpack.serve.arguments import arrays_of
from pltpack.snapshot import DTYPES, LayerGeometry

_BF16 = DTYPES["BF16"]
#: Steps to find whether two arrays share memory; numpy's types know two of its values only.
_WORK: Any = 10_000


class Destination(Protocol):
    """What a load writes to. Calls come from one thread at a time, but for `room`."""

    def begin(self, layers: Sequence[LayerGeometry], tokens: int) -> None:
        """Check that a load fits, before anything is read.

        Raises
        ------
        UnsupportedError
            Naming what does not fit.
        """
        ...

    def room(self, layers: range, start: int, stop: int) -> Sequence[KeyValue] | None:
        """Arrays ``[H, stop - start, D]`` per layer to decode to; None where only what is decoded already may go.

        They are of the stored dtype, and nobody looks at them before they are handed over.
        """
        ...

    def put(self, layer: int, start: int, stop: int, keys: np.ndarray, values: np.ndarray) -> None:
        """Take decoded tokens of one layer that were not decoded to their `room`."""
        ...

    def layer(self, index: int) -> tuple[Any, Any]:
        """What the consumer is handed for one layer: keys and values, or None for both."""
        ...

    def touched(self) -> tuple[int, ...]:
        """Blocks that were written to; none for destinations without blocks."""
        ...


class Fresh:
    """Arrays of the loader's own, ``[H, T, D]`` per layer in the stored dtype."""

    def begin(self, layers: Sequence[LayerGeometry], tokens: int) -> None:
        """See `Destination.begin`."""
        self._arrays = one_buffer(layers, tokens)

    def room(self, layers: range, start: int, stop: int) -> Sequence[KeyValue] | None:
        """See `Destination.room`."""
        chosen = self._arrays[layers.start : layers.stop]
        return [(keys[:, start:stop], values[:, start:stop]) for keys, values in chosen]

    def put(self, layer: int, start: int, stop: int, keys: np.ndarray, values: np.ndarray) -> None:
        """See `Destination.put`."""
        raise AssertionError("everything was decoded in place")

    def layer(self, index: int) -> tuple[Any, Any]:
        """See `Destination.layer`."""
        return self._arrays[index]

    def touched(self) -> tuple[int, ...]:
        """See `Destination.touched`."""
        return ()


class Contiguous:
    """Arrays or CPU tensors of the caller's: tokens 0 to T of each layer.

    Parameters
    ----------
    keys, values : ndarray or Tensor, or sequences of them
        ``[L, H, T, D]``, or per layer ``[H, T, D]``, of the stored dtype or a wider one; may have room for more tokens.
    """

    def __init__(self, keys: Any, values: Any) -> None:
        self._given = keys, values
        self._keys: list[Any] = []
        self._values: list[Any] = []

    def begin(self, layers: Sequence[LayerGeometry], tokens: int) -> None:
        """See `Destination.begin`."""
        self._tokens = tokens
        # Not before: it may be that a loader wants arrays on a device.
        keys, values = self._given
        self._keys, self._values = ([self._as_array(array) for array in arrays_of(name, part)]
                                    for name, part in (("keys", keys), ("values", values)))  # fmt: skip
        for name, arrays, dims in (("keys", self._keys, [layer.k_dim for layer in layers]),
                                   ("values", self._values, [layer.v_dim for layer in layers])):  # fmt: skip
            if len(arrays) != len(layers):
                raise UnsupportedError(f"destination has {len(arrays)} layers of {name}, the archive {len(layers)}")
            for index, (array, layer, dim) in enumerate(zip(arrays, layers, dims, strict=True)):
                shape = array.shape
                if len(shape) != 3 or (shape[0], shape[2]) != (layer.heads, dim) or shape[1] < tokens:
                    raise UnsupportedError(f"destination's {name} of layer {index} are {list(shape)}, not "
                                           f"[{layer.heads}, {tokens} or more, {dim}]")  # fmt: skip
                self._check_dtype(array, layer.dtype, f"destination's {name} of layer {index}")
        check_apart([(f"{name} of layer {index}", array[:, :tokens])
                     for name, arrays in (("keys", self._keys), ("values", self._values))
                     for index, array in enumerate(arrays)])  # fmt: skip

    def _as_array(self, tensor: Any) -> Any:
        return as_array(tensor)

    def _check_dtype(self, array: Any, stored: str, what: str) -> None:
        check_dtype(array.dtype, stored, what)

    def room(self, layers: range, start: int, stop: int) -> Sequence[KeyValue] | None:
        """See `Destination.room`."""
        return None

    def put(self, layer: int, start: int, stop: int, keys: np.ndarray, values: np.ndarray) -> None:
        """See `Destination.put`."""
        convert(keys, self._keys[layer][:, start:stop])
        convert(values, self._values[layer][:, start:stop])

    def layer(self, index: int) -> tuple[Any, Any]:
        """See `Destination.layer`."""
        keys, values = self._given
        return keys[index][:, : self._tokens], values[index][:, : self._tokens]

    def touched(self) -> tuple[int, ...]:
        """See `Destination.touched`."""
        return ()


def as_array(tensor: Any) -> np.ndarray:
    """A view of an array, or of a tensor on the CPU, of a cache dtype.

    Raises
    ------
    UnsupportedError
        If it is on a device, or not of a cache dtype.
    """
    if isinstance(tensor, np.ndarray):
        return tensor
    if not hasattr(tensor, "dtype") or not hasattr(getattr(tensor, "device", None), "type"):
        raise UnsupportedError(f"destination must be arrays or tensors, not {type(tensor).__name__}")
    if tensor.device.type != "cpu":
        raise UnsupportedError(f"destination is on {tensor.device}; this loader fills memory of the CPU")
    import torch

    from pltpack.dumps.torch_arrays import cache_dtype

    dtype = DTYPES[cache_dtype(tensor.dtype)]
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
    view: np.ndarray = tensor.detach().view(bits).numpy().view(dtype)
    return view


def check_dtype(dtype: np.dtype[Any], stored: str, what: str) -> None:
    """Refuse a destination that cannot hold every stored value, with `UnsupportedError`."""
    wide = dtype == np.float32 or dtype == DTYPES[stored]
    if not wide:
        raise UnsupportedError(f"{what} are {dtype}, which does not hold {stored} exactly (nor F32)")


def check_apart(parts: Sequence[tuple[str, Any]]) -> None:
    """Refuse arrays of the host that cannot be written, or share memory with one another or with themselves.

    Parameters
    ----------
    parts : sequence of (str, array)
        What each is, and its array.

    Raises
    ------
    UnsupportedError
        Naming the first such array.
    """
    spans: list[tuple[int, int, str, np.ndarray]] = []
    for what, array in parts:
        if not isinstance(array, np.ndarray) or not array.size:
            continue
        if not array.flags.writeable:
            raise UnsupportedError(f"destination's {what} are read-only")
        if any(step == 0 and length > 1 for step, length in zip(array.strides, array.shape, strict=True)):
            raise UnsupportedError(f"destination's {what} are the same memory again and again")
        spans.append((*byte_bounds(array), what, array))
    spans.sort(key=lambda span: span[0])
    for index, (_, stop, what, array) in enumerate(spans):
        for first, _, other, others in itertools.islice(spans, index + 1, None):
            if first >= stop:
                break
            if _share(array, others):
                raise UnsupportedError(f"destination's {what} and its {other} share memory")


def _share(one: np.ndarray, other: np.ndarray) -> bool:
    try:
        return np.shares_memory(one, other, max_work=_WORK)
    except TooHardError:
        # Only views made by hand are so hard to tell apart.
        return True


def convert(source: np.ndarray, target: np.ndarray) -> None:
    """Copy values, to float32 where the target is; the interpreter lock is free meanwhile."""
    if source.dtype == _BF16 and target.dtype == np.float32:
        bits = target.view(np.uint32)
        np.left_shift(source.view(np.uint16), 16, out=bits, dtype=np.uint32, casting="unsafe")
    elif source.dtype == target.dtype:
        kind = f"u{source.dtype.itemsize}"
        np.copyto(target.view(kind), source.view(kind))
    else:
        target[...] = source.astype(np.float32)
