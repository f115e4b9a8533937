"""``vllm-example`` dumps: folders of vLLM's ExampleConnector (formerly SharedStorageConnector), one per stored prompt.

``<name>/<layer>.safetensors`` holds one tensor ``kv_cache``: ``[T, H, 2 D]`` now, ``[2, T, H D]`` before. The name is
the MD5 (SHA-256 where that is forbidden) of the int64 token ids, and of the digests of images if the prompt had any; T
is a multiple of the engine's block size. Nothing else is recorded: tokens come from outside and are checked against the
name, and on CPUs rows are packed (`pltpack.dumps.packed_blocks`). Written: whole blocks, so the tokens behind the last
one are left out, as the engine itself does.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from pltpack.dumps import base
from pltpack.dumps.atomic import make_folder, replacing_folder
from pltpack.dumps.base import DumpFormat, Option
from pltpack.dumps.packed_blocks import AMX, PLAIN, VEC, Packing, told_packing
from pltpack.dumps.safetensors_header import TensorEntry, make_header, read_header, read_into
from pltpack.dumps.tokens import SIDECAR, TokenLookup
from pltpack.errors import DumpError, PltpackError, UnsupportedError
from pltpack.snapshot import DTYPES, Identity, LayerGeometry, Snapshot

OLD = "old"
SUFFIX = ".safetensors"
_TENSOR = "kv_cache"
_NAME = re.compile(r"[0-9a-f]{32}|[0-9a-f]{64}")
_LAYER = "model.layers.{}.self_attn.attn"


class VllmExampleFormat(DumpFormat):
    """One folder per stored prompt."""

    format_id = "vllm-example"
    options: ClassVar[Mapping[str, Option]] = {
        "layout": Option("how rows are laid out, where that cannot be told", (PLAIN, VEC, AMX, OLD)),
        "block": Option("tokens of a block, where that cannot be told"),
        "heads": Option("KV heads, which the old layout does not record", writes=False),
        "layer": Option("name of a layer's file, {} for its number", reads=False),
    }

    def sniff(self, path: Path, head: bytes) -> bool:
        """See `DumpFormat.sniff`: a dump is a folder."""
        return False

    def sniff_folder(self, path: Path) -> bool:
        """See `DumpFormat.sniff_folder`: the first tensor file holds a ``kv_cache``."""
        try:
            with os.scandir(path) as entries:
                files = [entry.name for entry in entries if entry.name.endswith(SUFFIX) and entry.is_file()]
        except OSError:
            return False
        # Names of layers, so that folders of other dumps are told apart without opening a file.
        if not files or any(_number(name) is None for name in files):
            return False
        try:
            return list(read_header(path / min(files)).tensors) == [_TENSOR]
        except (PltpackError, OSError):
            return bool(_NAME.fullmatch(path.name))

    def read(self, path: Path, tokens: TokenLookup) -> Iterator[Snapshot]:
        """See `DumpFormat.read`."""
        files, entries = _layers(path)
        count = _tokens(files[0], entries[0])
        ids = _ids(path, tokens, base.check_count(count))
        packing, layers = self._told(files, entries, ids)
        source = FolderSource(tuple(files), tuple(entries), packing, layers)
        identity = Identity(keys="rotated", layers=layers)
        yield Snapshot(path.name, ids, identity, source, os.fspath(path))

    def _told(
        self, files: list[_File], entries: list[TensorEntry], ids: np.ndarray
    ) -> tuple[Packing | None, tuple[LayerGeometry, ...]]:
        """The packing (None is the old layout) and the geometry of all layers."""
        count = len(ids)
        old = entries[0].shape[0] == 2
        if (self.chosen.get("layout") == OLD) != old and ("layout" in self.chosen or old):
            if not old:
                raise UnsupportedError("is not of the old layout [2, tokens, heads * dim]", files[0].path)
            if "layout" in self.chosen:
                raise UnsupportedError("is of the old layout [2, tokens, heads * dim]", files[0].path)
        heads = self._whole("heads") if old else 0
        layers = tuple(
            _geometry(index, file, entry, count, heads)
            for index, (file, entry) in enumerate(zip(files, entries, strict=True))
        )
        if old:
            return None, layers
        packing = self._packing(files[0], entries[0], layers[0], ids)
        for layer in layers:
            packing.check(count, layer.k_dim, DTYPES[layer.dtype].itemsize)
        return packing, layers

    def _packing(self, file: _File, entry: TensorEntry, layer: LayerGeometry, ids: np.ndarray) -> Packing:
        name = self.chosen.get("layout")
        if name == PLAIN:
            return Packing(PLAIN)
        if name is not None and "block" in self.chosen:
            return Packing(name, self._whole("block"))
        item = DTYPES[layer.dtype].itemsize
        told = told_packing(lambda count: _rows(file, entry, 0, count), ids, layer.k_dim, item)
        if told is None or name not in (None, told.name):
            raise UnsupportedError(
                "its layout is not recorded and cannot be told from so few repeated tokens: say --layout plain "
                f"(written on a GPU), {VEC} or {AMX} (on a CPU without or with AMX) and --from-option block=TOKENS",
                file.path,
            )
        return told

    def _whole(self, name: str, default: int | None = None) -> int:
        text = self.chosen.get(name)
        if text is None and default is not None:
            return default
        if text is None:
            raise UnsupportedError(f"the layout does not record {name}: say --from-option {name}=N")
        if not text.isascii() or not text.isdigit() or not 0 < int(text[:9]) <= base.MAX_DIM:
            raise UnsupportedError(f"option {name!r} is {text!r}, not a positive integer")
        return int(text[:9])

    def write(self, snapshots: Iterable[Snapshot], path: Path) -> list[Path]:
        """See `DumpFormat.write`; `path` is a folder that gets a folder per prompt, and its token ids beside it."""
        layout = self.chosen.get("layout", PLAIN)
        packing = Packing(PLAIN if layout == OLD else layout, self._whole("block", 16))
        make_folder(path)
        written: dict[Path, str] = {}
        for snapshot in snapshots:
            count = len(base.check_snapshot(snapshot)) // packing.block * packing.block
            if not count:
                raise DumpError(f"session {snapshot.session!r} has less than a block of {packing.block} tokens")
            folder = path / prompt_name(snapshot.tokens[:count])
            if folder in written:
                raise DumpError(f"sessions {written[folder]!r} and {snapshot.session!r} have the same blocks", folder)
            written[folder] = snapshot.session
            _write(snapshot, folder, count, packing, layout == OLD, self.chosen.get("layer", _LAYER))
        return list(written)


@dataclasses.dataclass(frozen=True, slots=True)
class _File:
    path: str
    stamp: base.FileStamp


@dataclasses.dataclass(frozen=True, slots=True)
class FolderSource:
    """A `LayerSource` over the files of one folder; opens them for each read."""

    files: tuple[_File, ...]
    entries: tuple[TensorEntry, ...]
    packing: Packing | None
    layers: tuple[LayerGeometry, ...]

    def layer(self, index: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """See `LayerSource.layer`."""
        file, entry, layer = self.files[index], self.entries[index], self.layers[index]
        count = entry.shape[1] if self.packing is None else entry.shape[0]
        base.check_range(start, stop, count)
        if self.packing is None:
            keys, values = (_rows(file, entry, half * count + start, half * count + stop) for half in (0, 1))
            shape = stop - start, layer.heads, layer.k_dim
            return keys.reshape(shape).transpose(1, 0, 2), values.reshape(shape).transpose(1, 0, 2)
        n = self.packing.block
        first, last = start // n * n, -(-stop // n) * n
        keys, values = self.packing.unpack(_rows(file, entry, first, last))
        return keys[:, start - first : stop - first], values[:, start - first : stop - first]


def prompt_name(tokens: np.ndarray, algorithm: str = "md5") -> str:
    """The folder that the connector keeps these tokens in."""
    return hashlib.new(algorithm, np.ascontiguousarray(tokens, "<i8").tobytes(), usedforsecurity=False).hexdigest()


def _number(name: str) -> int | None:
    """The layer that a file is of: the one number between the dots of its name, as vLLM has it."""
    numbers = [part for part in name.split(".") if part.isascii() and part.isdigit()]
    return int(numbers[0][:9]) if len(numbers) == 1 else None


def _layers(folder: Path) -> tuple[list[_File], list[TensorEntry]]:
    """Files and tensors of all layers, in their order."""
    names: dict[int, str] = {}
    for name in sorted(entry.name for entry in os.scandir(folder) if entry.name.endswith(SUFFIX)):
        number = _number(name)
        if number is None or number in names:
            raise DumpError(f"its file {name!r} is not named by one layer of its own", folder)
        names[number] = name
    if not 0 < len(names) <= base.MAX_LAYERS:
        raise DumpError(f"holds {len(names)} layers (allowed: 1 to {base.MAX_LAYERS})", folder)
    if max(names) != len(names) - 1:
        missing = next(index for index in range(len(names)) if index not in names)
        raise DumpError(f"layer {missing} of {max(names) + 1} is missing", folder)
    files, entries = [], []
    for number in range(len(names)):
        path = folder / names[number]
        header = read_header(path)
        if list(header.tensors) != [_TENSOR]:
            raise DumpError(f"holds {len(header.tensors)} tensors, not the one named {_TENSOR!r}", path)
        files.append(_File(os.fspath(path), header.stamp))
        entries.append(header.tensors[_TENSOR])
    return files, entries


def _tokens(file: _File, entry: TensorEntry) -> int:
    if len(entry.shape) == 2:
        raise UnsupportedError("holds latent states (MLA), not keys and values", file.path)
    if len(entry.shape) != 3 or 0 in entry.shape:
        raise DumpError(f"tensor {_TENSOR!r} is {list(entry.shape)}, not [tokens, heads, 2 * dim]", file.path)
    # Whole blocks: two tokens are none.
    return entry.shape[1] if entry.shape[0] == 2 else entry.shape[0]


def _geometry(index: int, file: _File, entry: TensorEntry, count: int, old_heads: int) -> LayerGeometry:
    if entry.dtype not in DTYPES:
        raise UnsupportedError(f"tensor {_TENSOR!r} has dtype {entry.dtype} (known: {', '.join(DTYPES)})", file.path)
    if _tokens(file, entry) != count:
        raise DumpError(f"holds {_tokens(file, entry)} tokens but the first layer {count}", file.path)
    heads, width = (old_heads, 2 * entry.shape[2]) if old_heads else entry.shape[1:]
    dim, rest = divmod(width, 2 * heads if old_heads else 2)
    if rest:
        raise DumpError(f"rows of {entry.shape[2]} elements are not keys and values of {heads} heads", file.path)
    base.check_dims(index, heads, dim, dim)
    return LayerGeometry(heads, dim, dim, entry.dtype)


def _ids(folder: Path, tokens: TokenLookup, count: int) -> np.ndarray:
    """The folder's token ids: those of the lists from outside that its name is the digest of."""
    algorithm = {32: "md5", 64: "sha256"}.get(len(folder.name))
    if algorithm is None or not _NAME.fullmatch(folder.name):
        return tokens.require(folder, folder.name, count)
    seen = 0
    for _, ids in tokens.lists(folder):
        seen += 1
        if len(ids) >= count and prompt_name(ids[:count], algorithm) == folder.name:
            return ids[:count]
    if not seen:
        return tokens.require(folder, folder.name, count)
    raise DumpError(f"none of {seen} token lists is that of this prompt: the folder's name is the digest of its first "
                    f"{count} token ids (and of its images, with which prompts are not read)", folder)  # fmt: skip


def _rows(file: _File, entry: TensorEntry, start: int, stop: int) -> np.ndarray:
    """Rows of a tensor whose axes but the last one or two count them."""
    tail = entry.shape[1:] if entry.shape[0] != 2 else entry.shape[2:]
    out = np.empty((stop - start, *tail), DTYPES[entry.dtype])
    row = out[:1].nbytes if len(out) else 0
    with base.reading(file.path, file.stamp) as fd:
        read_into(fd, entry.offset + start * row, out.reshape(-1).view(np.uint8).data, file.path)
    return out


def _write(snapshot: Snapshot, folder: Path, count: int, packing: Packing, old: bool, names: str) -> None:
    with replacing_folder(folder) as temporary:
        for index, layer in enumerate(snapshot.identity.layers):
            if layer.k_dim != layer.v_dim:
                raise UnsupportedError(f"session {snapshot.session!r}: this format needs keys as long as values, but "
                                       f"layer {index} has {layer.k_dim} and {layer.v_dim} elements")  # fmt: skip
            packing.check(count, layer.k_dim, DTYPES[layer.dtype].itemsize)
            shape = [2, count, layer.heads * layer.k_dim] if old else [count, layer.heads, 2 * layer.k_dim]
            header, _ = make_header([(_TENSOR, layer.dtype, shape)], {})
            with open(temporary / f"{names.format(index)}{SUFFIX}", "xb") as file:
                file.write(header)
                _write_layer(file, snapshot, index, count, packing, old)
    sidecar = folder.with_name(folder.name + SIDECAR)
    base.write_json(sidecar, snapshot.tokens[:count].tolist())


def _write_layer(file: Any, snapshot: Snapshot, index: int, count: int, packing: Packing, old: bool) -> None:
    if old:
        for half in (0, 1):
            for start, stop, *pair in base.layer_slices(snapshot, index):
                part = pair[half][:, : max(0, min(stop, count) - start)]
                file.write(np.ascontiguousarray(part.transpose(1, 0, 2)).view(np.uint8).data)
        return
    step = max(1, 256 // packing.block) * packing.block
    for start in range(0, count, step):
        keys, values = snapshot.layer(index, start, min(start + step, count))
        file.write(packing.pack(keys, values).view(np.uint8).data)
