"""``sglang-hicache`` dumps: folders of SGLang's HiCacheFile storage, a file per page of tokens.

``<sha256>_<model>[_<rank>_<size>].bin`` holds a page's raw bytes. Model and rank come from the name; page size, dtype,
layers, heads and the order of the axes (``hicache_mem_layout``) are not recorded and have to be said. The order is told
by equal tokens where enough of them come again (`pltpack.dumps.packed_blocks`). Read from SGLang 0.5.23's source.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np

from pltpack.dumps import base, paged_files
from pltpack.dumps.atomic import make_folder
from pltpack.dumps.base import DumpFormat, Option
from pltpack.dumps.packed_blocks import told_order
from pltpack.dumps.paged_files import PageLayout, whole_option
from pltpack.dumps.token_chains import sglang_chain
from pltpack.dumps.tokens import SIDECAR, TokenLookup
from pltpack.errors import DumpError, UnsupportedError
from pltpack.snapshot import DTYPES, Identity, LayerGeometry, Snapshot

#: ``hicache_mem_layout`` and the axes of one page.
LAYOUTS = {
    "layer_first": "2LNHD",
    "page_first": "2NLHD",
    "page_first_direct": "2LNHD",
    "page_head": "2HNLD",
}
_NAME = re.compile(r"([0-9a-f]{64})(\.[a-z0-9_]+)?_(.*?)(?:_(\d{1,6})_(\d{1,6}))?\.bin", re.ASCII)


class SglangHiCacheFormat(DumpFormat):
    """One folder of pages."""

    format_id = "sglang-hicache"
    options: ClassVar[Mapping[str, Option]] = {
        "layout": Option("order of a page's axes (hicache_mem_layout)", tuple(LAYOUTS)),
        "page": Option("tokens of a page (--page-size)"),
        "dtype": Option("dtype of the caches", tuple(DTYPES), writes=False),
        "layers": Option("number of layers", writes=False),
        "heads": Option("KV heads of a layer", writes=False),
        "partly": Option("whether pages of unknown tokens are left out", ("no", "yes"), writes=False),
    }

    def sniff(self, path: Path, head: bytes) -> bool:
        """See `DumpFormat.sniff`: a dump is a folder."""
        return False

    def sniff_folder(self, path: Path) -> bool:
        """See `DumpFormat.sniff_folder`."""
        try:
            with os.scandir(path) as entries:
                return any(_NAME.fullmatch(entry.name) for entry in entries)
        except OSError:
            return False

    def read(self, path: Path, tokens: TokenLookup) -> Iterator[Snapshot]:
        """See `DumpFormat.read`."""
        files: dict[str, Path] = {}
        kinds = set()
        for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
            match = _NAME.fullmatch(entry.name)
            if match is None or entry.name.startswith("."):
                continue
            if match[2]:
                raise UnsupportedError(f"holds pages of the pool {match[2][1:]!r}, not keys and values alone", path)
            kinds.add(match.group(3, 4, 5))
            files[match[1]] = path / entry.name
            if len(files) > paged_files.MAX_FILES or len(kinds) > 1:
                raise UnsupportedError(f"holds pages of {len(kinds)} models or ranks, {len(files)} or more; "
                                       "give each a folder of its own", path)  # fmt: skip
        if not files:
            raise DumpError("holds no page", path)
        model, rank, size = next(iter(kinds))
        page = whole_option(self.chosen, "page")
        geometry, layers = self._geometry(next(iter(files.values())), page)
        first = LAYOUTS[self.chosen.get("layout", "layer_first")]
        shape = PageLayout(first, layers, geometry)
        pages = {name: paged_files.page_file(file, 0, shape, page) for name, file in files.items()}
        identity = Identity(model=model or None, tp_rank=None if rank is None else int(rank),
                            tp_size=None if size is None else int(size))  # fmt: skip
        partly = self.chosen.get("partly") == "yes"
        for found in paged_files.sessions_in(path, pages, tokens, lambda ids: sglang_chain(ids, page), page, partly):
            layout = shape if "layout" in self.chosen else self._told(found, shape, path)
            yield paged_files.snapshot_of(found, layout, path, identity)

    def _geometry(self, file: Path, page: int) -> tuple[LayerGeometry, int]:
        layers, heads = whole_option(self.chosen, "layers"), whole_option(self.chosen, "heads")
        if "dtype" not in self.chosen:
            raise UnsupportedError("what this store does not record has to be said: --from-option dtype=NAME", file)
        dtype = self.chosen["dtype"]
        dim, rest = divmod(file.stat().st_size, 2 * layers * page * heads * DTYPES[dtype].itemsize)
        if rest or not dim:
            raise DumpError(f"is {file.stat().st_size} bytes, no page of {page} tokens, {layers} layers and {heads} "
                            f"heads in {dtype}", file)  # fmt: skip
        base.check_dims(0, heads, dim, dim)
        return LayerGeometry(heads, dim, dim, dtype), layers

    def _told(self, found: paged_files.Found, shape: PageLayout, path: Path) -> PageLayout:
        orders = [PageLayout(axes, shape.layers, shape.geometry) for axes in dict.fromkeys(LAYOUTS.values())]
        count = min(len(found.tokens), 512)

        def values(order: PageLayout) -> np.ndarray:
            return paged_files.PagedSource(found.pages, order).layer(0, 0, count)[1]

        told = told_order([values(order) for order in orders], found.tokens[:count])
        if told is None:
            raise UnsupportedError(f"the order of its axes is not recorded and cannot be told from session "
                                   f"{found.name!r}: say --layout {', '.join(LAYOUTS)}", path)  # fmt: skip
        return orders[told]

    def write(self, snapshots: Iterable[Snapshot], path: Path) -> list[Path]:
        """See `DumpFormat.write`; `path` is a folder of pages, whole ones only, with all token ids beside it."""
        page, name = whole_option(self.chosen, "page", said_by="--to-option"), self.chosen.get("layout")
        if name is None:
            raise UnsupportedError("the order of a page's axes has to be said: --to-option layout=NAME "
                                   f"({', '.join(LAYOUTS)})")  # fmt: skip
        make_folder(path)
        lists: dict[str, list[int]] = {}
        written: dict[Path, None] = {}
        for snapshot in snapshots:
            identity = base.check_snapshot(snapshot).identity
            layout = PageLayout(LAYOUTS[name], len(identity.layers), paged_files.geometry_of(snapshot))
            chain = sglang_chain(snapshot.tokens, page)
            model = (identity.model or "").replace("/", "-")
            suffix = f"_{model}_{identity.tp_rank or 0}_{identity.tp_size or 1}.bin"
            files = [path / f"{digest}{suffix}" for digest in chain]
            starts = range(0, page * len(files) + 1, page)
            paged_files.write_pages(snapshot, layout, starts, files, lambda _: b"")
            written.update(dict.fromkeys(files))
            lists[snapshot.session] = snapshot.tokens[: page * len(files)].tolist()
        base.write_json(path.with_name(path.name + SIDECAR), lists)
        return list(written)
