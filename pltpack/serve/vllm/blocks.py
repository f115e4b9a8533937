"""Keys and values to vLLM's blocks and back, on any device.

A layer is a tensor ``[blocks, heads, tokens, keys ‖ values]``. On GPUs a row is a token's. Attention on CPUs packs each
block for its own instructions in a way that depends on processor, dtype and block size; how is asked of the engine's
own kernel, by letting it store numbers and looking where they went.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from pltpack.errors import UnsupportedError
from pltpack.snapshot import LayerGeometry

#: ``store(keys [N, 1, D], values [N, 1, D], block [1, 1, N, 2 D])``: the engine's kernel.
Store = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
# Digits that every cache dtype but fp8 holds exactly.
_BASE = 256


class Packing:
    """Where a block's elements are: ``packed.flat[i] = plain.flat[order[i]]``, plain being keys and then values.

    Parameters
    ----------
    order : Tensor
        Int64 ``[2 N D]``.
    """

    def __init__(self, order: torch.Tensor) -> None:
        count = order.numel()
        inverse = torch.full((count,), -1, dtype=torch.int64)
        inside = bool((order >= 0).all()) and bool((order < count).all())
        if inside:
            inverse[order] = torch.arange(count)
        if not inside or bool((inverse < 0).any()):
            raise UnsupportedError("vLLM's kernel does not store each element of a block once as it is")
        self.order, self.inverse = order, inverse

    @classmethod
    def probe(cls, store: Store, size: int, dim: int, dtype: torch.dtype) -> Packing:
        """Learn a packing from the kernel that does it.

        Parameters
        ----------
        store : callable
        size : int
            Tokens of a block.
        dim : int
            Dimension of keys and of values.
        dtype : torch.dtype

        Raises
        ------
        UnsupportedError
            If elements do not come out as they went in.
        """
        count = 2 * size * dim
        order = torch.zeros(count, dtype=torch.int64)
        unit = 1
        while unit < count:
            digits = (torch.arange(count) // unit % _BASE).to(dtype)
            keys, values = digits.view(2, size, 1, dim)
            block = torch.zeros(1, 1, size, 2 * dim, dtype=dtype)
            store(keys.contiguous(), values.contiguous(), block)
            order += block.reshape(-1).to(torch.float64).round().to(torch.int64) * unit
            unit *= _BASE
        return cls(order)


def cpu_packing(layer: LayerGeometry, dtype: torch.dtype, size: int, cache: str) -> Packing:
    """The packing of vLLM's attention on this machine's CPU.

    Parameters
    ----------
    layer : LayerGeometry
    dtype : torch.dtype
        Of the cache.
    size : int
        Tokens of a block.
    cache : str
        vLLM's name of the cache dtype.

    Raises
    ------
    UnsupportedError
        If it is not a packing: of fp8 caches, and of values narrower than keys.
    """
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    if dtype.itemsize < 2 or layer.k_dim != layer.v_dim:
        raise UnsupportedError(f"blocks of {layer.dtype} with dimensions {layer.k_dim} and {layer.v_dim} on a CPU")
    isa = _get_attn_isa(dtype, size, layer.k_dim, cache)

    def store(keys: torch.Tensor, values: torch.Tensor, block: torch.Tensor) -> None:
        halves = block.view(1, 1, 2 * size, layer.k_dim).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(keys, values, *halves, torch.arange(size), isa)

    return Packing.probe(store, size, layer.k_dim, dtype)


class LayerBlocks:
    """One layer's blocks.

    Parameters
    ----------
    tensor : Tensor
        ``[B, H, N, D_k + D_v]``, of any strides.
    layer : LayerGeometry
    block_size : int
        Tokens of a block as the scheduler counts them: a multiple of N.
    packing : Packing, optional
        How a block is stored; rows of keys and values by default.
    """

    def __init__(
        self, tensor: torch.Tensor, layer: LayerGeometry, block_size: int, packing: Packing | None = None
    ) -> None:
        width = layer.k_dim + layer.v_dim
        if tensor.ndim != 4 or tensor.shape[1] != layer.heads or tensor.shape[3] != width:
            raise UnsupportedError(f"a cache of {list(tensor.shape)} is not [blocks, {layer.heads}, tokens, {width}]")
        self._size = tensor.shape[2]
        if block_size % self._size:
            raise UnsupportedError(f"blocks of {block_size} tokens in a cache of {self._size} tokens a block")
        self._parts = block_size // self._size
        self._tensor, self._layer, self._packing = tensor, layer, packing

    def _ids(self, blocks: Sequence[int]) -> torch.Tensor:
        ids = torch.tensor(blocks, dtype=torch.int64)
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < len(self._tensor) // self._parts:
            raise UnsupportedError(f"block table names a block outside 0:{len(self._tensor) // self._parts}")
        ids = (ids[:, None] * self._parts + torch.arange(self._parts)).reshape(-1)
        return ids.to(self._tensor.device)

    def write(self, blocks: Sequence[int], keys: torch.Tensor, values: torch.Tensor) -> None:
        """Fill whole blocks.

        Parameters
        ----------
        blocks : sequence of int
        keys, values : Tensor
            ``[H, T, D]``, T the tokens of these blocks.
        """
        ids = self._ids(blocks)
        halves = [self._split(part.to(self._tensor.device, non_blocking=True)) for part in (keys, values)]
        if self._packing is None:
            self._tensor[ids] = torch.cat(halves, dim=-1)
            return
        plain = torch.cat([half.flatten(2) for half in halves], dim=-1)
        self._tensor[ids] = plain[..., self._packing.order].view(len(ids), *self._tensor.shape[1:])

    def _split(self, part: torch.Tensor) -> torch.Tensor:
        """``[H, T, D]`` as ``[blocks, H, N, D]``."""
        heads, _, dim = part.shape
        return part.reshape(heads, -1, self._size, dim).transpose(0, 1)

    def read(self, blocks: Sequence[int], tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the first tokens of some blocks: keys and values ``[H, T, D]`` on the CPU."""
        chosen = self._tensor[self._ids(blocks)]
        k_dim, v_dim = self._layer.k_dim, self._layer.v_dim
        if self._packing is not None:
            plain = chosen.flatten(2)[..., self._packing.inverse]
            halves = plain.view(*plain.shape[:2], 2, self._size, k_dim)
            parts = (halves[:, :, 0], halves[:, :, 1])
        else:
            parts = (chosen[..., :k_dim], chosen[..., k_dim:])
        dims = (k_dim, v_dim)
        keys, values = (
            part.transpose(0, 1).reshape(part.shape[1], -1, dim)[:, :tokens].cpu().contiguous()
            for part, dim in zip(parts, dims, strict=True)
        )
        return keys, values
