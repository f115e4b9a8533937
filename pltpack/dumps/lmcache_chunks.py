"""``lmcache`` dumps: folders of LMCache's local disk (``.pt``) and of its FSConnector (``.data``), a file per chunk.

Names are keys, ``model@world@worker@hash@dtype[@tag%value…]``. A ``.pt`` file is raw bytes, no pickle; a ``.data`` file
begins with native 32-bit integers: length, format, dtype, four sizes. Arrays are ``[2, L, T, H D]`` (KV_2LTD). Hashes
depend on the engine's hash function and on its root; heads, and in ``.pt`` files layers, are not recorded and have to
be said. Read from LMCache 0.5.6's source.
"""

from __future__ import annotations

import functools
import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np

from pltpack.dumps import base, paged_files
from pltpack.dumps.atomic import make_folder
from pltpack.dumps.base import DumpFormat, Option
from pltpack.dumps.paged_files import PageFile, PageLayout, whole_option
from pltpack.dumps.token_chains import ALGORITHMS, BUILTIN, SEED, lmcache_chain
from pltpack.dumps.tokens import SIDECAR, TokenLookup
from pltpack.errors import DumpError, UnsupportedError
from pltpack.snapshot import DTYPES, Identity, LayerGeometry, Snapshot

AXES = "2LNHD"
_DTYPES = {"half": "F16", "bfloat16": "BF16", "float": "F32", "fp8_e4m3fn": "F8_E4M3", "fp8_e5m2": "F8_E5M2"}
_NAMES = {code: name for name, code in _DTYPES.items()}
_CODES = {1: "F16", 2: "F16", 3: "BF16", 4: "F32", 7: "F8_E4M3", 8: "F8_E5M2"}
_WRITTEN = {"F16": 2, "BF16": 3, "F32": 4, "F8_E4M3": 7, "F8_E5M2": 8}
_KEY = re.compile(r"([^@]*)@(\d{1,6})@(\d{1,6})@(-?[0-9a-f]{1,64})@([a-z0-9_]+)((?:@[^@]+)*)\.(pt|data)", re.ASCII)
_HEAD = struct.Struct("<7i")
_KV_2LTD = 1


class _Kind(NamedTuple):
    model: str
    world: int
    worker: int
    dtype: str
    tags: str
    suffix: str


class LmcacheFormat(DumpFormat):
    """One folder of chunks."""

    format_id = "lmcache"
    options: ClassVar[Mapping[str, Option]] = {
        "heads": Option("KV heads of a layer", writes=False),
        "layers": Option("number of layers, of .pt files", writes=False),
        "chunk": Option("tokens of a chunk (chunk_size), 256 by default"),
        "hash": Option("hash function (pre_caching_hash_algorithm)", (*ALGORITHMS, BUILTIN)),
        "root": Option("what the chain of hashes begins with: an integer (NONE_HASH), or PYTHONHASHSEED=TEXT"),
        "worker": Option("rank whose chunks are read, 0 by default", writes=False),
        "file": Option("kind of file to write: data (FSConnector, by default) or pt (local disk)", ("data", "pt"),
                       reads=False),
        "partly": Option("whether chunks of unknown tokens are left out", ("no", "yes"), writes=False),
    }  # fmt: skip

    def sniff(self, path: Path, head: bytes) -> bool:
        """See `DumpFormat.sniff`: a dump is a folder."""
        return False

    def sniff_folder(self, path: Path) -> bool:
        """See `DumpFormat.sniff_folder`."""
        try:
            with os.scandir(path) as entries:
                return any(_KEY.fullmatch(entry.name) for entry in entries)
        except OSError:
            return False

    def read(self, path: Path, tokens: TokenLookup) -> Iterator[Snapshot]:
        """See `DumpFormat.read`."""
        kind, files = self._files(path)
        chunk = whole_option(self.chosen, "chunk", 256)
        layout = self._layout(kind, files)
        pages = {name: _page(file, layout, kind) for name, file in files.items()}
        partly = self.chosen.get("partly") == "yes"
        model = kind.model.replace("-SEP-", "/") if kind.suffix == "data" else kind.model
        identity = Identity(model=model or None, tp_rank=kind.worker, tp_size=kind.world)
        for found in paged_files.sessions_in(path, pages, tokens, self._chain(chunk), chunk, partly):
            yield paged_files.snapshot_of(found, layout, path, identity)

    def _chain(self, chunk: int) -> Callable[[np.ndarray], list[str]]:
        root, seed, algorithm = self.chosen.get("root"), SEED, self.chosen.get("hash", ALGORITHMS[0])
        number: int | None = None
        if root is not None and root.startswith("PYTHONHASHSEED="):
            seed = root.partition("=")[2]
        elif root is not None:
            try:
                number = int(root[:24], 0)
            except ValueError:
                raise UnsupportedError(f"option 'root' is {root!r}, no integer and no PYTHONHASHSEED=TEXT") from None
        return functools.partial(_chain, size=chunk, algorithm=algorithm, seed=seed, root=number)

    def _files(self, path: Path) -> tuple[_Kind, dict[str, Path]]:
        """The chunks of the wanted worker by their hashes, and what they have in common."""
        worker = self.chosen.get("worker", "0")
        files: dict[str, Path] = {}
        kinds = set[_Kind]()
        for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
            match = _KEY.fullmatch(entry.name)
            if match is None or match[3] != worker:
                continue
            if match[5] not in _DTYPES:
                raise UnsupportedError(f"dtype {match[5]!r} (known: {', '.join(_DTYPES)})", path / entry.name)
            if re.match(r"@\d+(@|$)", match[6]):
                raise UnsupportedError("holds single layers (use_layerwise), which are not read", path / entry.name)
            kinds.add(_Kind(match[1], int(match[2]), int(match[3]), _DTYPES[match[5]], match[6], match[7]))
            files[match[4]] = path / entry.name
            if len(kinds) > 1 or len(files) > paged_files.MAX_FILES:
                raise UnsupportedError("holds chunks of several models, dtypes, tags or kinds; give each a folder of "
                                       "its own", path)  # fmt: skip
        if not files:
            raise DumpError(f"holds no chunk of worker {worker}", path)
        return kinds.pop(), files

    def _layout(self, kind: _Kind, files: dict[str, Path]) -> PageLayout:
        heads = whole_option(self.chosen, "heads")
        file = next(iter(files.values()))
        if kind.suffix == "data":
            layers, _, width = _header(file, kind)
        else:
            layers, chunk = whole_option(self.chosen, "layers"), whole_option(self.chosen, "chunk", 256)
            # Chunks but the last of a session are whole, so the largest is.
            size = max(file.stat().st_size for file in files.values())
            width, rest = divmod(size, 2 * layers * chunk * DTYPES[kind.dtype].itemsize)
            if rest or not width:
                raise DumpError(f"is {size} bytes, no chunk of {chunk} tokens in {layers} layers of {kind.dtype}", file)
        if width % heads or not width:
            raise DumpError(f"rows of {width} elements are not those of {heads} heads", file)
        base.check_dims(0, heads, width // heads, width // heads)
        return PageLayout(AXES, layers, LayerGeometry(heads, width // heads, width // heads, kind.dtype))

    def write(self, snapshots: Iterable[Snapshot], path: Path) -> list[Path]:
        """See `DumpFormat.write`; `path` is a folder of chunks, with all token ids beside it."""
        chunk, suffix = whole_option(self.chosen, "chunk", 256), self.chosen.get("file", "data")
        chain = self._chain(chunk)
        make_folder(path)
        lists: dict[str, list[int]] = {}
        written: dict[Path, None] = {}
        for snapshot in snapshots:
            identity = base.check_snapshot(snapshot).identity
            geometry = paged_files.geometry_of(snapshot)
            layout = PageLayout(AXES, len(identity.layers), geometry)
            model = (identity.model or "").replace("/", "-SEP-" if suffix == "data" else "-")
            if "@" in model:
                raise UnsupportedError(f"model name {model!r} cannot be part of a key")
            key = f"{model}@{identity.tp_size or 1}@{identity.tp_rank or 0}@{{}}@{_NAMES[geometry.dtype]}.{suffix}"
            files = [path / key.format(digest) for digest in chain(snapshot.tokens)]
            starts = [*range(0, len(snapshot), chunk), len(snapshot)]
            begin = functools.partial(_begin, layout) if suffix == "data" else lambda _: b""
            paged_files.write_pages(snapshot, layout, starts, files, begin)
            written.update(dict.fromkeys(files))
            lists[snapshot.session] = snapshot.tokens.tolist()
        base.write_json(path.with_name(path.name + SIDECAR), lists)
        return list(written)


def _chain(tokens: np.ndarray, size: int, algorithm: str, seed: str, root: int | None) -> list[str]:
    return lmcache_chain(tokens, size, algorithm, seed, root)


def _begin(layout: PageLayout, tokens: int) -> bytes:
    geometry = layout.geometry
    shape = 2, layout.layers, tokens, geometry.heads * geometry.k_dim
    return _HEAD.pack(tokens * layout.token_bytes, _KV_2LTD, _WRITTEN[geometry.dtype], *shape)


def _header(file: Path, kind: _Kind) -> tuple[int, int, int]:
    """Layers, tokens and elements per token that a ``.data`` file says it has."""
    with open(file, "rb") as opened:
        head = opened.read(_HEAD.size)
    if len(head) < _HEAD.size:
        raise DumpError("is too short for a chunk", file)
    length, form, code, two, layers, tokens, width = _HEAD.unpack(head)
    if form != _KV_2LTD or two != 2:
        raise UnsupportedError(f"holds a chunk of memory format {form}, not KV_2LTD", file)
    if _CODES.get(code) != kind.dtype:
        raise DumpError(f"has dtype {_CODES.get(code, code)} but its key says {kind.dtype}", file)
    if min(layers, tokens, width) < 1 or layers > base.MAX_LAYERS or length != file.stat().st_size - _HEAD.size:
        raise DumpError(f"has a chunk of [2, {layers}, {tokens}, {width}] and {length} bytes in a file of "
                        f"{file.stat().st_size}", file)  # fmt: skip
    return layers, tokens, width


def _page(file: Path, layout: PageLayout, kind: _Kind) -> PageFile:
    if kind.suffix == "pt":
        return paged_files.page_file(file, 0, layout)
    layers, tokens, width = _header(file, kind)
    if (layers, width) != (layout.layers, layout.geometry.heads * layout.geometry.k_dim):
        raise DumpError(f"has {layers} layers of {width} elements per token, other chunks have not", file)
    return paged_files.page_file(file, _HEAD.size, layout, tokens)
