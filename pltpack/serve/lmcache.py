"""LMCache: a remote connector that reads an archive (docs/engines/lmcache.md).

``remote_storage_plugins: [pltpack]`` with ``remote_storage_plugin.pltpack.module_path`` ``pltpack.serve.lmcache`` and
``remote_storage_plugin.pltpack.class_name`` ``PltpackRemoteConnector``; besides, ``extra_config`` names
``pltpack.archive`` and, to keep new chunks, ``pltpack.spool``. Chunks come from the archive if it has their tokens,
else from the spool; new ones go to the spool as the files of LMCache's FSConnector, which ``pltpack append --from
lmcache`` takes.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import numpy as np
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.protocol import RemoteMetadata
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector
from lmcache.v1.token_database import ChunkedTokenDatabase

from pltpack.dumps.lmcache_chunks import AXES
from pltpack.dumps.paged_files import PageLayout
from pltpack.dumps.torch_arrays import cache_dtype
from pltpack.errors import UnsupportedError
from pltpack.serve.follow import FollowedArchive
from pltpack.serve.paged_archive import PagedArchive, Spool
from pltpack.snapshot import Identity, LayerGeometry

log = logging.getLogger("pltpack.serve")


class PltpackRemoteConnector(RemoteConnector):
    """Chunks of keys and values out of an archive.

    Parameters
    ----------
    loop : asyncio.AbstractEventLoop
    local_cpu_backend : LocalCPUBackend
        Its ``metadata`` says what the chunks are.
    config : LMCacheEngineConfig
        Its ``extra_config`` holds ``pltpack.archive``, and optionally ``pltpack.spool`` and ``pltpack.salt``.

    Raises
    ------
    IdentityError
        If the archive is of another model, naming the field: number and shape of layers, dtype, rank.
    UnsupportedError
        If no archive is named, or chunks are not keys and values of whole models.
    """

    def __init__(self, loop: Any, local_cpu_backend: Any, config: Any) -> None:
        super().__init__(local_cpu_backend.config, local_cpu_backend.metadata)
        extra = (config.extra_config if config is not None else None) or {}
        metadata = local_cpu_backend.metadata
        if not isinstance(extra.get("pltpack.archive"), str):
            raise UnsupportedError("extra_config names no 'pltpack.archive'")
        if metadata.use_mla or config.use_layerwise or len(self.meta_shapes) != 1:
            raise UnsupportedError("chunks of latent states (MLA), single layers or several groups are not served")
        self._loop, self._backend = loop, local_cpu_backend
        layers, _, _, heads, dim = metadata.kv_shape
        geometry = LayerGeometry(heads, dim, dim, cache_dtype(metadata.kv_dtype))
        self._layout = PageLayout(AXES, layers, geometry)
        own = Identity(layers=(geometry,) * layers, keys="rotated", tp_rank=metadata.worker_id,
                       tp_size=metadata.world_size, salt=extra.get("pltpack.salt"))  # fmt: skip
        archive = FollowedArchive(extra["pltpack.archive"], lambda _: own, extra.get("pltpack.accept_unknown", ()))
        archive.warm_up()
        database = ChunkedTokenDatabase(config, metadata)

        def chain(tokens: np.ndarray) -> list[tuple[str, int, int]]:
            # LMCache's own names, whatever its hash function is.
            chunks = database.process_tokens(tokens=tokens.tolist(), make_key=False)
            return [(_hex(name), start, stop) for start, stop, name in chunks]

        self._pages = PagedArchive(archive, chain, own.salt)
        self._spool = Spool(Path(extra["pltpack.spool"])) if extra.get("pltpack.spool") else None

    def _file(self, key: Any) -> str:
        return str(key.to_string()).replace("/", "-SEP-") + ".data"

    def _stored(self, key: Any) -> bool:
        # Tags set chunks apart that have the same tokens.
        return not key.tags and key.chunk_hash_hex in self._pages

    def exists_sync(self, key: Any) -> bool:
        """See the base class."""
        return self._stored(key) or (self._spool is not None and self._spool.has(self._file(key)))

    async def exists(self, key: Any) -> bool:
        """See the base class."""
        return self.exists_sync(key)

    async def get(self, key: Any) -> Any | None:
        """See the base class: None where it is not stored or cannot be read."""
        return await asyncio.to_thread(self._get, key)

    def _get(self, key: Any) -> Any | None:
        import torch

        pairs = self._pages.page(key.chunk_hash_hex) if self._stored(key) else None
        if pairs is None:
            return self._spooled(key)
        geometry = self._layout.geometry
        shape = torch.Size([2, self._layout.layers, pairs[0][0].shape[1], geometry.heads * geometry.k_dim])
        return self._filled([shape], self.meta_dtypes, self.meta_fmt, self._layout.page(pairs).data)

    def _spooled(self, key: Any) -> Any | None:
        if self._spool is None or not self._spool.has(self._file(key)):
            return None
        size = self._spool.path(self._file(key)).stat().st_size
        data = self._spool.read(self._file(key), size)
        if data is None or len(data) < self.remote_metadata_bytes:
            return None
        try:
            head = RemoteMetadata.deserialize(data[: self.remote_metadata_bytes])
        except (KeyError, ValueError):
            return None
        if head.fmt != MemoryFormat.KV_2LTD or head.length != len(data) - self.remote_metadata_bytes:
            return None
        return self._filled(head.shapes, head.dtypes, head.fmt, memoryview(data)[self.remote_metadata_bytes :])

    def _filled(self, shapes: Any, dtypes: Any, form: Any, data: memoryview) -> Any | None:
        """A memory object of LMCache's with these bytes."""
        memory = self._backend.allocate(shapes, dtypes, form)
        if memory is None:
            return None
        room = memory.byte_array
        room = room if isinstance(room, memoryview) else memoryview(room)
        if room.nbytes != data.nbytes:
            memory.ref_count_down()
            return None
        room.cast("B")[:] = data.cast("B")
        return memory

    async def put(self, key: Any, memory_obj: Any) -> None:
        """See the base class: what is stored already is not stored again."""
        if self._spool is None or self.exists_sync(key):
            return
        data = memory_obj.byte_array
        head = RemoteMetadata(len(data), memory_obj.get_shapes(), memory_obj.get_dtypes(),
                              memory_obj.get_memory_format())  # fmt: skip
        await asyncio.to_thread(self._spool.write, self._file(key), head.serialize(), bytes(data))

    async def list(self) -> list[str]:
        """See the base class: keys in the spool; those of an archive are known by their tokens only."""
        return [] if self._spool is None else [name.removesuffix(".data") for name in self._spool.names(".data")]

    async def close(self) -> None:
        """See the base class."""


def _hex(name: Any) -> str:
    return name.hex() if isinstance(name, bytes) else f"{name:x}"
