"""SGLang: a storage backend of its hierarchical cache that reads an archive (docs/engines/sglang.md).

``--hicache-storage-backend dynamic`` with ``module_path`` ``pltpack.serve.sglang`` and ``class_name``
``PltpackStorage``; besides, the extra configuration names an ``archive`` and, to keep new pages, a ``spool``. Pages
come from the archive if it has their tokens, else from the spool; new ones go to the spool as SGLang's own files, which
``pltpack append --from sglang-hicache`` takes.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolName, PoolTransferResult

from pltpack.dumps.paged_files import PageLayout
from pltpack.dumps.sglang_hicache import LAYOUTS
from pltpack.dumps.token_chains import sglang_chain
from pltpack.dumps.torch_arrays import cache_dtype
from pltpack.errors import UnsupportedError
from pltpack.serve.follow import FollowedArchive
from pltpack.serve.paged_archive import PagedArchive, Spool
from pltpack.snapshot import Identity, LayerGeometry

log = logging.getLogger("pltpack.serve")


class PltpackStorage(HiCacheStorage):
    """Pages of keys and values out of an archive.

    Parameters
    ----------
    storage_config : HiCacheStorageConfig
        Its ``extra_config`` holds ``archive``, and optionally ``spool`` and ``salt``.
    kwargs : dict, optional
        What SGLang passes on; not used.

    Raises
    ------
    UnsupportedError
        If the configuration names no archive, or the model is one of latent states (MLA).
    """

    def __init__(self, storage_config: Any, kwargs: dict[str, Any] | None = None) -> None:
        extra = storage_config.extra_config or {}
        if not isinstance(extra.get("archive"), str):
            raise UnsupportedError("the extra configuration names no 'archive'")
        if storage_config.is_mla_model:
            raise UnsupportedError("the model keeps latent states (MLA), not keys and values")
        if storage_config.pp_size > 1 or storage_config.attn_cp_size > 1:
            raise UnsupportedError("pipelines and context parallelism are not served")
        self._config, self._extra = storage_config, extra
        self._spool = Spool(Path(extra["spool"])) if extra.get("spool") else None
        self._layout: PageLayout | None = None
        self._pages: PagedArchive | None = None

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take the pool whose pages these are, and open the archive for it.

        Raises
        ------
        IdentityError
            If the archive is of another model, naming the field: number and shape of layers, dtype, rank.
        """
        super().register_mem_pool_host(mem_pool_host)
        pool, config = mem_pool_host, self._config
        if pool.layout not in LAYOUTS:
            raise UnsupportedError(f"host pool of layout {pool.layout!r} (known: {', '.join(LAYOUTS)})")
        geometry = LayerGeometry(pool.head_num, pool.head_dim, pool.head_dim, cache_dtype(pool.dtype))
        self._layout = PageLayout(LAYOUTS[pool.layout], pool.layer_num, geometry)

        def expected(archive: Identity) -> Identity:
            # Windows are no part of what a pool knows.
            layers = tuple(dataclasses.replace(geometry, window=layer.window) for layer in archive.layers)
            layers = layers if len(layers) == pool.layer_num else (geometry,) * pool.layer_num
            return Identity(layers=layers, keys="rotated", tp_rank=config.tp_rank, tp_size=config.tp_size,
                            salt=self._extra.get("salt"))  # fmt: skip

        archive = FollowedArchive(self._extra["archive"], expected, self._extra.get("accept_unknown", ()))
        archive.warm_up()
        page = int(pool.page_size)

        def chain(tokens: np.ndarray) -> list[tuple[str, int, int]]:
            names = sglang_chain(tokens, page)
            return [(name, at * page, (at + 1) * page) for at, name in enumerate(names)]

        self._pages = PagedArchive(archive, chain, self._extra.get("salt"))

    def _file(self, key: str) -> str:
        model = (self._config.model_name or "").replace("/", "-")
        return f"{key}_{model}_{self._config.tp_rank}_{self._config.tp_size}.bin"

    def _opened(self) -> tuple[PagedArchive, PageLayout, int]:
        if self._pages is None or self._layout is None:
            raise UnsupportedError("no pool is registered yet")
        return self._pages, self._layout, self._layout.token_bytes * int(self.mem_pool_host.page_size)

    def _page(self, key: str) -> np.ndarray | None:
        """A page's bytes in the order of the pool."""
        pages, layout, size = self._opened()
        found = pages.page(key)
        if found is not None:
            return layout.page(found)
        data = None if self._spool is None else self._spool.read(self._file(key), size)
        return None if data is None else np.frombuffer(bytearray(data), np.uint8)

    def exists(self, key: str) -> bool:
        """See the base class."""
        return key in self._opened()[0] or (self._spool is not None and self._spool.has(self._file(key)))

    def get(self, key: str, target_location: Any | None = None, target_sizes: Any | None = None) -> Any | None:
        """See the base class: fills `target_location`, a flat page, or makes one."""
        page = self._page(key)
        if page is None:
            return None
        found = torch.from_numpy(page).view(self.mem_pool_host.dtype)
        if target_location is None:
            return found
        if target_location.numel() * target_location.element_size() != page.nbytes:
            return None
        target_location.reshape(-1).copy_(found)
        return target_location

    def batch_get(
        self, keys: Sequence[str], target_locations: Any | None = None, target_sizes: Any | None = None
    ) -> list[Any | None]:
        """See the base class."""
        places = target_locations or [None] * len(keys)
        return [self.get(key, place) for key, place in zip(keys, places, strict=True)]

    def set(
        self, key: str, value: Any | None = None, target_location: Any | None = None, target_sizes: Any | None = None
    ) -> bool:
        """See the base class: what is stored already is not stored again."""
        if self.exists(key):
            return True
        if self._spool is None or value is None:
            return False
        data = value.detach().contiguous().view(torch.uint8).reshape(-1).cpu().numpy()
        return self._spool.write(self._file(key), data.data)

    def batch_set(
        self, keys: Sequence[str], values: Any | None = None, target_locations: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:  # fmt: skip
        """See the base class."""
        return all([self.set(key, value) for key, value in zip(keys, values or [], strict=True)])

    def batch_get_v1(self, keys: Sequence[str], host_indices: Any, extra_info: Any | None = None) -> list[bool]:
        """See the base class: pages go to the host pool at their first index."""
        return self._load(self.mem_pool_host, keys, host_indices)

    def batch_set_v1(self, keys: Sequence[str], host_indices: Any, extra_info: Any | None = None) -> list[bool]:
        """See the base class."""
        return self._store(self.mem_pool_host, keys, host_indices)

    def _load(self, pool: Any, keys: Sequence[str], indices: Any) -> list[bool]:
        done = []
        for at, key in enumerate(keys):
            page = self.get(key)
            if page is not None:
                pool.set_from_flat_data_page(int(indices[at * pool.page_size]), page)
            done.append(page is not None)
        return done

    def _store(self, pool: Any, keys: Sequence[str], indices: Any) -> list[bool]:
        return [
            self.set(key, pool.get_data_page(int(indices[at * pool.page_size]), flat=True))
            for at, key in enumerate(keys)
        ]

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: list[Any] | None = None, extra_info: Any | None = None
    ) -> PoolTransferResult:
        """See the base class; pages of other pools are never there."""
        count = 0 if pool_transfers else self.batch_exists(keys, extra_info)
        return PoolTransferResult(count, {PoolName.KV: count} if count else {}, list(range(1, count + 1)))

    def batch_get_v2(self, transfers: list[Any], extra_info: Any | None = None) -> dict[str, list[bool]]:
        """See the base class."""
        return self._transfers(transfers, self._load)

    def batch_set_v2(self, transfers: list[Any], extra_info: Any | None = None) -> dict[str, list[bool]]:
        """See the base class."""
        return self._transfers(transfers, self._store)

    def _transfers(self, transfers: list[Any], work: Any) -> dict[str, list[bool]]:
        out: dict[str, list[bool]] = {}
        for transfer in transfers:
            keys = transfer.keys or []
            if transfer.name == PoolName.KV and transfer.host_indices is not None:
                out[transfer.name] = work(self.mem_pool_host, keys, transfer.host_indices)
            else:
                out[transfer.name] = [False] * len(keys)
        return out
