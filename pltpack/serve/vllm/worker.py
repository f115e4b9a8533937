"""The worker's side of the connector: loads go to blocks layer by layer while the model runs; full prompts are kept."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pltpack.dumps.torch_arrays import to_numpy, torch_view
from pltpack.errors import PltpackError
from pltpack.serve.follow import FollowedArchive
from pltpack.serve.misses import MissError
from pltpack.serve.prefixes import Hit
from pltpack.serve.stream import Stream
from pltpack.serve.vllm.blocks import LayerBlocks, Packing, cpu_packing
from pltpack.serve.vllm.capture import Keeper
from pltpack.serve.vllm.model import CacheShape
from pltpack.serve.vllm.steps import Load, Save
from pltpack.snapshot import LayerGeometry

log = logging.getLogger("pltpack.serve")


class Loading:
    """One load under way.

    Parameters
    ----------
    load : Load
    stream : Stream
    """

    def __init__(self, load: Load, stream: Stream) -> None:
        self.load, self._stream, self._next = load, stream, 0

    def fill(self, layer: int, blocks: LayerBlocks) -> None:
        """Wait for a layer and put it into its blocks; once."""
        if layer < self._next:
            return
        self._next = layer + 1
        _, keys, values = self._stream.wait(layer)
        span = slice(self.load.start, self.load.stop)
        blocks.write(self.load.blocks, torch_view(keys[:, span]), torch_view(values[:, span]))

    def close(self) -> None:
        """End it, complete or not."""
        self._stream.close()


class Worker:
    """Fills and reads the engine's blocks.

    Parameters
    ----------
    archive : FollowedArchive
    shape : CacheShape
    cache_dtype : str
        vLLM's name of the cache dtype.
    keeper : Keeper, optional
        Takes prompts that are to be kept.
    """

    def __init__(self, archive: FollowedArchive, shape: CacheShape, cache_dtype: str, keeper: Keeper | None) -> None:
        self._archive, self._shape, self._dtype, self._keeper = archive, shape, cache_dtype, keeper
        self._at = {name: index for index, name in enumerate(shape.names)}
        self._blocks: list[LayerBlocks] = []
        self._running: list[Loading] = []
        self._failed: set[int] = set()

    def register(self, caches: Mapping[str, torch.Tensor]) -> None:
        """Take the engine's tensors, by layer name."""
        packings: dict[tuple[LayerGeometry, int], Packing | None] = {}
        self._blocks = []
        for name, layer in zip(self._shape.names, self._shape.layers, strict=True):
            tensor = caches[name]
            key = layer, tensor.shape[2]
            if key not in packings:
                on_cpu = tensor.device.type == "cpu"
                packings[key] = cpu_packing(layer, tensor.dtype, tensor.shape[2], self._dtype) if on_cpu else None
            self._blocks.append(LayerBlocks(tensor, layer, self._shape.block_size, packings[key]))

    def start(self, loads: Sequence[Load]) -> None:
        """Begin the loads of a step."""
        for load in loads:
            try:
                self._running.append(Loading(load, self._stream(load)))
            # Whatever goes wrong is a miss: the engine computes these blocks.
            except Exception as error:
                self._miss(load, error)

    def _stream(self, load: Load) -> Stream:
        loader = self._archive.loader()
        hit = Hit("", 0, 1, 0) if loader is None else loader.lookup(load.tokens)
        if loader is None or hit.tokens < load.stop:
            raise MissError(hit.session, "stale", "the prefix is not stored any more")
        return loader.stream(hit.first(load.stop))

    def fill(self, name: str) -> None:
        """Wait until a layer of all loads of the step is in its blocks."""
        layer = self._at.get(name)
        if layer is None:
            return
        for loading in list(self._running):
            try:
                loading.fill(layer, self._blocks[layer])
            except Exception as error:
                self._running.remove(loading)
                loading.close()
                self._miss(loading.load, error)

    def _miss(self, load: Load, error: Exception) -> None:
        self._failed.update(load.blocks)
        if not isinstance(error, PltpackError):
            log.warning("a load of %d tokens came to nothing", load.stop - load.start, exc_info=error)
        log.warning("%d blocks of request %s are left to be computed: %s", len(load.blocks), load.request, error)

    def finish(self, saves: Sequence[Save]) -> None:
        """End the loads of a step, and keep the prompts that are complete."""
        for loading in self._running:
            loading.close()
        self._running = []
        for save in saves:
            if self._keeper is not None and self._failed.isdisjoint(save.blocks):
                # Nobody's request may fail because it could not be kept.
                with contextlib.suppress(MemoryError):
                    self._keep(self._keeper, save)

    def _keep(self, keeper: Keeper, save: Save) -> None:
        if not keeper.wants(save.tokens):
            return
        layers = []
        for blocks in self._blocks:
            keys, values = blocks.read(save.blocks, len(save.tokens))
            layers.append((to_numpy(keys), to_numpy(values)))
        keeper.put(save.tokens, layers)

    def failed(self) -> set[int]:
        """Blocks that could not be loaded since the last call."""
        failed, self._failed = self._failed, set()
        return failed

    def close(self) -> Any:
        """End what is under way, and write what is to be kept."""
        self.finish(())
        if self._keeper is not None:
            self._keeper.close()
