"""``vllm-offload`` dumps: the file tier of vLLM's OffloadingConnector, a file per chunk of blocks.

``<model>_<digest>/config.json`` says what was stored, and ``<model>_<digest>_r<rank>/<hhh>/<hh>_g<group>/<hash>.bin``
are the chunks: tensor after tensor of ``blocks_per_file`` blocks, padded to 4096 bytes. KV heads are not recorded, and
the order within a block (``nhd`` or ``hnd``) only where the format is canonical. Names are the chained hashes of vLLM's
prefix cache. Read from vLLM 0.32.0's source: that connector does not run on CPUs.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from pltpack.dumps import base, paged_files
from pltpack.dumps.atomic import make_folder
from pltpack.dumps.base import DumpFormat, Option
from pltpack.dumps.paged_files import PageLayout, whole_option
from pltpack.dumps.token_chains import ALGORITHMS, SEED, vllm_chain
from pltpack.dumps.tokens import SIDECAR, TokenLookup
from pltpack.errors import DumpError, UnsupportedError
from pltpack.snapshot import DTYPES, Identity, LayerGeometry, Snapshot

#: Order within a layer's block, and the axes of a file.
LAYOUTS = {"nhd": "LBNH2D", "hnd": "LBHN2D"}
CONFIG = "config.json"
_PAD = 4096
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}
_RANK = re.compile(r"(.+)_r(\d{1,6})", re.ASCII)
_CHUNK = re.compile(r"([0-9a-f]{2,128})\.bin", re.ASCII)


class VllmOffloadFormat(DumpFormat):
    """The folder of a configuration, with the folder of its chunks beside it."""

    format_id = "vllm-offload"
    options: ClassVar[Mapping[str, Option]] = {
        "layout": Option("order within a block, where the configuration does not say it", tuple(LAYOUTS)),
        "heads": Option("KV heads of a layer", writes=False),
        "dim": Option("elements of a head, where padding hides them", writes=False),
        "hash": Option("hash of the prefix cache (prefix_caching_hash_algo)", ALGORITHMS),
        "seed": Option("PYTHONHASHSEED of the engine, where it was set"),
        "block": Option("tokens of a block, 16 by default", reads=False),
        "partly": Option("whether chunks of unknown tokens are left out", ("no", "yes"), writes=False),
    }

    def sniff(self, path: Path, head: bytes) -> bool:
        """See `DumpFormat.sniff`: a dump is a folder."""
        return False

    def sniff_folder(self, path: Path) -> bool:
        """See `DumpFormat.sniff_folder`: a configuration's folder, or that of its chunks."""
        match = _RANK.fullmatch(path.name)
        for folder in (path, path.with_name(match[1]) if match else path):
            try:
                with open(folder / CONFIG, "rb") as file:
                    text = file.read(1 << 16)
            except OSError:
                continue
            if b'"tokens_per_hash"' in text and b'"kv_cache_groups"' in text:
                return True
        return False

    def read(self, path: Path, tokens: TokenLookup) -> Iterator[Snapshot]:
        """See `DumpFormat.read`; the chunks come with their configuration, so their own folder gives nothing more."""
        match = _RANK.fullmatch(path.name)
        if match and not (path / CONFIG).is_file():
            return
        config = _Config.of(path)
        layout = self._layout(config, path)
        size = config.block * config.blocks
        files = _chunks(path.with_name(f"{path.name}_r0"))
        pages = {
            name: paged_files.page_file(file, 0, layout, size, padded=True) for name, file in files.items()
        }
        partly = self.chosen.get("partly") == "yes"
        chain = functools.partial(self._chain, size=size, step=config.hashed)
        identity = Identity(model=config.model, tp_rank=0, tp_size=1)
        for found in paged_files.sessions_in(path, pages, tokens, chain, size, partly):
            yield paged_files.snapshot_of(found, layout, path, identity)

    def _chain(self, ids: np.ndarray, size: int, step: int) -> list[str]:
        """Names of the chunks of `size` tokens: the hash of the last run of `step` tokens in each."""
        names = vllm_chain(ids, step, self.chosen.get("hash", ALGORITHMS[0]), self.chosen.get("seed", SEED))
        return names[size // step - 1 :: size // step]

    def _layout(self, config: _Config, path: Path) -> PageLayout:
        name = self.chosen.get("layout") or config.order
        if name is None:
            raise UnsupportedError("the order within a block is not recorded: say --layout nhd or hnd "
                                   "(VLLM_KV_CACHE_LAYOUT of the engine)", path)  # fmt: skip
        if config.order not in (None, name):
            raise UnsupportedError(f"its configuration says {config.order}, not {name}", path)
        heads = whole_option(self.chosen, "heads")
        files = _chunks(path.with_name(f"{path.name}_r0"))
        if not files:
            raise DumpError("holds no chunk", path.with_name(f"{path.name}_r0"))
        per = 2 * config.layers * config.block * config.blocks * heads * DTYPES[config.dtype].itemsize
        size = next(iter(files.values())).stat().st_size
        # Padding is less than a page, and head dimensions are multiples of 8.
        dims = [dim for dim in range(8, size // per + 1, 8) if dim * per <= size < dim * per + _PAD]
        if "dim" in self.chosen:
            dims = [dim for dim in dims if dim == whole_option(self.chosen, "dim")]
        if len(dims) > 1:
            whole_option({}, "dim")
        if not dims:
            raise DumpError(f"chunks of {size} bytes are not those of {config.layers} layers, {heads} heads and "
                            f"{config.block * config.blocks} tokens in {config.dtype}", path)  # fmt: skip
        base.check_dims(0, heads, dims[0], dims[0])
        geometry = LayerGeometry(heads, dims[0], dims[0], config.dtype)
        return PageLayout(LAYOUTS[name], config.layers, geometry, config.block)

    def write(self, snapshots: Iterable[Snapshot], path: Path) -> list[Path]:
        """See `DumpFormat.write`; `path` is the tier's root folder. Whole blocks are written, one per file."""
        name, block = self.chosen.get("layout"), whole_option(self.chosen, "block", 16)
        if name is None:
            raise UnsupportedError("the order within a block has to be said: --to-option layout=nhd or layout=hnd")
        written: dict[Path, None] = {}
        lists: dict[Path, dict[str, list[int]]] = {}
        for snapshot in snapshots:
            identity = base.check_snapshot(snapshot).identity
            geometry = paged_files.geometry_of(snapshot)
            layout = PageLayout(LAYOUTS[name], len(identity.layers), geometry, block)
            fields = _fields(identity, block, geometry.dtype, layout.layers)
            folder = path / f"{fields['model_name'].replace('/', '_')}_{_digest(fields)}"
            make_folder(folder)
            base.write_json(folder / CONFIG, fields)
            chain = self._chain(snapshot.tokens, block, block)
            data = folder.with_name(f"{folder.name}_r0")
            files = [data / digest[:3] / f"{digest[3:5]}_g0" / f"{digest}.bin" for digest in chain]
            paged_files.write_pages(snapshot, layout, range(0, block * len(files) + 1, block), files,
                                    lambda _: b"", _PAD)  # fmt: skip
            written.update(dict.fromkeys(files))
            whole = snapshot.tokens[: block * len(files)].tolist()
            lists.setdefault(folder.with_name(folder.name + SIDECAR), {})[snapshot.session] = whole
        for sidecar, ids in lists.items():
            base.write_json(sidecar, ids)
        return list(written)


@dataclasses.dataclass(frozen=True)
class _Config:
    """What a configuration says: tokens of a hash and of a block, blocks of a file, and the rest."""

    model: str
    hashed: int
    block: int
    blocks: int
    dtype: str
    layers: int
    order: str | None

    @classmethod
    def of(cls, folder: Path) -> _Config:
        file = folder / CONFIG
        if file.stat().st_size > 1 << 24:
            raise DumpError("is too large for a configuration", file)
        data = base.parse_json(file.read_bytes(), CONFIG)
        if not isinstance(data, Mapping) or not isinstance(data.get("kv_cache_groups"), list):
            raise DumpError("is no configuration of an offloading tier", file)
        groups = data["kv_cache_groups"]
        sizes = [data.get(name) for name in ("tokens_per_hash", "blocks_per_file")]
        group = groups[0] if len(groups) == 1 and isinstance(groups[0], Mapping) else {}
        names = group.get("layer_names")
        sizes.append(group.get("tokens_per_block"))
        if len(groups) != 1:
            raise UnsupportedError(f"stores {len(groups)} groups of layers; one is read", file)
        if not all(type(size) is int and 0 < size <= 1 << 20 for size in sizes) or not isinstance(names, list):
            raise DumpError("has no sizes of blocks, or no names of layers", file)
        hashed, blocks, block = (int(size) for size in sizes if size is not None)
        if block * blocks % hashed or not 0 < len(names) <= base.MAX_LAYERS:
            raise DumpError(f"has files of {blocks} blocks of {block} tokens, hashes of {hashed}, and {len(names)} "
                            "layers", file)  # fmt: skip
        for name in ("tp_size", "pp_size", "pcp_size", "dcp_size"):
            if data.get(name, 1) != 1:
                raise UnsupportedError(f"stores parts of {name} = {data[name]!r}; whole caches are read", file)
        dtype = _DTYPES.get(str(data.get("dtype")).removeprefix("torch."))
        if dtype is None:
            raise UnsupportedError(f"has dtype {data.get('dtype')!r} (known: {', '.join(_DTYPES)})", file)
        canonical = data.get("canonical_format")
        order = {None: None, "v1-nhd": "nhd", "v1-hnd": "hnd"}.get(canonical, "") if _text(canonical) else ""
        if order == "":
            raise UnsupportedError(f"has the format {canonical!r} (known: v1-nhd, v1-hnd)", file)
        return cls(str(data.get("model_name") or "") or folder.name, hashed, block, blocks, dtype, len(names), order)


def _text(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _chunks(folder: Path) -> dict[str, Path]:
    """Files of chunks by their hashes."""
    found: dict[str, Path] = {}
    if not folder.is_dir():
        raise DumpError("is missing: chunks lie beside their configuration", folder)
    for parent, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            match = _CHUNK.fullmatch(name)
            if match:
                found[match[1]] = Path(parent, name)
                if len(found) > paged_files.MAX_FILES:
                    raise UnsupportedError(f"holds more than {paged_files.MAX_FILES} chunks", folder)
    return found


def _fields(identity: Identity, block: int, dtype: str, layers: int) -> dict[str, Any]:
    """The configuration that vLLM would write."""
    names = [f"model.layers.{index}.self_attn.attn" for index in range(layers)]
    known = {code: name for name, code in _DTYPES.items()}
    return {
        "model_name": identity.model or "unknown",
        "tokens_per_hash": block,
        "blocks_per_file": 1,
        "tp_size": 1,
        "pp_size": 1,
        "pcp_size": 1,
        "dcp_size": 1,
        "dtype": f"torch.{known[dtype]}",
        "kv_cache_groups": [{"tokens_per_block": block, "layer_names": names}],
        "inference_engine": "vllm",
    }


def _digest(fields: dict[str, Any]) -> str:
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]
