"""Paged destinations: the layouts of vLLM's and SGLang's caches, as host arrays or CPU tensors with a block table.

A layout is one letter per axis of the engine's array: ``2`` keys and values, ``L`` layers, ``B`` blocks, ``N`` tokens
of a block, ``S`` slots (blocks and their tokens as one axis), ``H`` heads, ``D`` a head's elements, ``C`` keys and then
values in one axis. Strides may be anything, so an array may be a view of another order in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pltpack.codec.base import KeyValue
from pltpack.errors import UnsupportedError
from pltpack.serve.arguments import sized, whole
from pltpack.serve.destinations import as_array, check_apart, check_dtype, convert
from pltpack.snapshot import LayerGeometry

#: Names of layouts. Without ``L``, `Paged` takes one array per layer; without ``2`` and ``C``, keys and values apart.
LAYOUTS = {
    # vLLM from 0.33 on: logically [blocks, heads, tokens, keys ‖ values], whatever the order in memory.
    "vllm": "BHNC",
    "vllm-lbnhc": "BNHC",
    # Before: FlashAttention, and FlashInfer or Triton.
    "vllm-flash": "2BNHD",
    "vllm-flashinfer": "B2NHD",
    # SGLang's pool: one buffer of slots for keys and one for values per layer.
    "sglang": "SHD",
    # SGLang's host pools (hicache_mem_layout).
    "sglang-layer-first": "2LSHD",
    "sglang-page-first": "2SLHD",
    "sglang-page-first-direct": "2BLNHD",
    "sglang-page-head": "2BHNLD",
}


class Paged:
    """Blocks of an engine's cache.

    Parameters
    ----------
    arrays : ndarray or Tensor, or sequence of them
        Per layer, or one with all layers where the layout has ``L``; pairs ``(keys, values)`` where it has neither
        ``2`` nor ``C``.
    blocks : sequence of int
        The block table: where the first, the second, … block of the session goes. Only these are written to.
    layout : str
        A name of `LAYOUTS`, or letters as the module says.
    block_size : int
        Tokens per block; may differ from the archive's.
    """

    def __init__(self, arrays: Any, blocks: Sequence[int], layout: str = "vllm", block_size: int = 32) -> None:
        axes = LAYOUTS.get(layout, layout) if isinstance(layout, str) else ""
        block_size = whole("block_size", block_size, 1)
        if sorted(axes) not in [sorted(known) for known in (*LAYOUTS.values(), "2LBNHD", "LBHNC")]:
            raise UnsupportedError(f"layout {layout!r} is not known (known: {', '.join(LAYOUTS)})")
        self._axes, self._size, self._arrays = axes, block_size, arrays
        try:
            table = np.asarray(blocks)
        except ValueError:
            raise UnsupportedError("the block table must be whole numbers, one after the other") from None
        if table.size and table.dtype.kind not in "iu":
            raise UnsupportedError("the block table must be whole numbers")
        self._blocks = table.astype(np.int64).reshape(-1)
        self._written: set[int] = set()

    def begin(self, layers: Sequence[LayerGeometry], tokens: int) -> None:
        """See `Destination.begin`."""
        if len(np.unique(self._blocks)) != len(self._blocks):
            raise UnsupportedError("block table names a block twice")
        if len(self._blocks) * self._size < tokens:
            raise UnsupportedError(f"block table has room for {len(self._blocks) * self._size} of {tokens} tokens")
        given = len(layers) if "L" in self._axes else sized("the paged destination", self._arrays)
        if given != len(layers):
            raise UnsupportedError(f"destination has {given} layers, the archive {len(layers)}")
        self._views = [self._views_of(index, layer) for index, layer in enumerate(layers)]
        check_apart(self._memory(len(layers)))
        self._written = set()

    def _views_of(self, index: int, layer: LayerGeometry) -> KeyValue:
        """One layer's keys and values as views ``[B, N, H, D]``."""
        given = self._arrays if "L" in self._axes else self._arrays[index]
        pair = given if "2" not in self._axes and "C" not in self._axes else (given, given)
        if sized(f"layer {index} of the paged destination", pair) != 2:
            raise UnsupportedError(f"layer {index} of the paged destination is no pair of keys and values")
        views = []
        for half, (array, dim) in enumerate(zip(map(self._as_array, pair), (layer.k_dim, layer.v_dim), strict=True)):
            if array.ndim != len(self._axes):
                raise UnsupportedError(f"destination has {array.ndim} axes, its layout {self._axes} {len(self._axes)}")
            self._check_dtype(array, layer.dtype, f"blocks of layer {index}")
            view, axes = array, self._axes
            for letter, at in (("2", half), ("L", index)):
                if letter in axes:
                    if at >= view.shape[axes.index(letter)]:
                        raise UnsupportedError(f"destination has too few entries on axis {letter} of {self._axes}")
                    view = _entry(view, axes.index(letter), at)
                    axes = axes.replace(letter, "")
            if "C" in axes:
                if view.shape[axes.index("C")] != layer.k_dim + layer.v_dim:
                    raise UnsupportedError(f"axis C of layer {index} is not {layer.k_dim} + {layer.v_dim} long")
                first = half * layer.k_dim
                view = np.moveaxis(view, axes.index("C"), -1)[..., first : first + dim]
                axes = axes.replace("C", "") + "D"
            if "S" in axes:
                view, axes = self._split(view, axes)
            view = view.transpose([axes.index(letter) for letter in "BNHD"])
            if view.shape[1:] != (self._size, layer.heads, dim):
                raise UnsupportedError(f"a block of layer {index} is {list(view.shape[1:])}, not "
                                       f"{[self._size, layer.heads, dim]} (tokens, heads, elements)")  # fmt: skip
            if len(self._blocks) and not 0 <= self._blocks.min() <= self._blocks.max() < len(view):
                raise UnsupportedError(f"block table names a block outside 0:{len(view)}")
            views.append(view)
        return views[0], views[1]

    def _memory(self, layers: int) -> list[tuple[str, Any]]:
        """All arrays that were given, and what they are."""
        whole_layers = "2" in self._axes or "C" in self._axes
        if "L" in self._axes:
            parts = [self._arrays] if whole_layers else list(self._arrays)
            return [("blocks of all layers", self._as_array(array)) for array in parts]
        return [(f"blocks of layer {index}", self._as_array(array)) for index in range(layers)
                for array in ([self._arrays[index]] if whole_layers else self._arrays[index])]  # fmt: skip

    def _as_array(self, tensor: Any) -> Any:
        return as_array(tensor)

    def _check_dtype(self, array: Any, stored: str, what: str) -> None:
        check_dtype(array.dtype, stored, what)

    def _split(self, view: np.ndarray, axes: str) -> tuple[np.ndarray, str]:
        """Slots as blocks and their tokens; slots behind the last whole block are left out."""
        at = axes.index("S")
        count = view.shape[at] // self._size
        view = view[(slice(None),) * at + (slice(count * self._size),)]
        shape, strides = list(view.shape), list(view.strides)
        shape[at : at + 1] = [count, self._size]
        strides[at : at + 1] = [strides[at] * self._size, strides[at]]
        return self._strided(view, shape, strides), axes.replace("S", "BN")

    def _strided(self, view: Any, shape: Sequence[int], strides: Sequence[int]) -> Any:
        return np.lib.stride_tricks.as_strided(view, shape, strides)

    def room(self, layers: range, start: int, stop: int) -> Sequence[KeyValue] | None:
        """See `Destination.room`: live blocks take checked values only."""
        return None

    def put(self, layer: int, start: int, stop: int, keys: np.ndarray, values: np.ndarray) -> None:
        """See `Destination.put`."""
        at = start
        while at < stop:
            index, inside = divmod(at, self._size)
            end = min(stop, (index + 1) * self._size)
            block = int(self._blocks[index])
            self._written.add(block)
            for view, array in zip(self._views[layer], (keys, values), strict=True):
                part = view[block, inside : inside + end - at].transpose(1, 0, 2)
                convert(array[:, at - start : end - start], part)
            at = end

    def layer(self, index: int) -> tuple[Any, Any]:
        """See `Destination.layer`."""
        return None, None

    def touched(self) -> tuple[int, ...]:
        """See `Destination.touched`."""
        return tuple(sorted(self._written))


def _entry(view: np.ndarray, axis: int, at: int) -> np.ndarray:
    found: np.ndarray = view[(slice(None),) * axis + (at,)]
    return found
