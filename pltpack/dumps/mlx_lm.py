"""``mlx`` dumps: prompt caches that mlx-lm saves (``save_prompt_cache``, ``mlx_lm.cache_prompt``).

A safetensors file with a tuple of arrays per layer, flattened to names ``{L}.{i}``. Two layouts, told by the metadata:

- ``padded`` (mlx-lm 0.32): ``L.0`` keys and ``L.1`` values ``[1, H_kv, S, D]`` with S ≥ T, ``L.2`` T; metadata
  ``0.model``, ``0.tokenizer_config``, ``1.L`` class, ``2.k.0`` and ``2.k.1`` name and kind of scalars.
- ``sliced`` (up to 0.31): S = T; metadata ``0.L`` or ``0.L.i`` (numbers of the cache), ``1.model``, ``2.L`` class.

Classes: ``KVCache``; ``QuantizedKVCache``, whose keys and values are each three arrays (packed integers, scales,
biases); ``RotatingKVCache`` as long as it has dropped nothing. Neither layout holds tokens; the model's folder, if
it is where the file says, gives the RoPE base that mlx-lm ran with.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from pltpack.dumps import base, quantized
from pltpack.dumps.base import ROPE_STYLE, DumpFormat, Option
from pltpack.dumps.mlx_lm_file import Cache, read_caches
from pltpack.dumps.mlx_lm_write import Target, write_caches
from pltpack.dumps.model_config import mlx_rope
from pltpack.dumps.rope_style import in_half_style
from pltpack.dumps.safetensors_header import TensorEntry, looks_like_safetensors, read_header, read_into
from pltpack.dumps.tensor_layout import TensorFileSource
from pltpack.dumps.tokens import TokenLookup
from pltpack.errors import PltpackError, UnsupportedError
from pltpack.names import check_session
from pltpack.snapshot import DTYPES, Identity, LayerGeometry, Snapshot


class MlxFormat(DumpFormat):
    """Prompt caches of mlx-lm."""

    format_id = "mlx"
    options: ClassVar[dict[str, Option]] = {
        "layout": Option("padded (mlx-lm 0.32) or sliced (before)", ("padded", "sliced"), reads=False),
        "quantized": Option("what a quantized cache enters as", ("values", "integers"), writes=False),
        "model": Option("folder or name of the model, which mlx-lm compares with its own", reads=False),
        "cache": Option("class of the caches of layers with a sliding window", ("rotating", "plain"), reads=False),
        "keep": Option("first tokens that a rotating cache never drops", reads=False),
        "rope_style": ROPE_STYLE,
    }

    def sniff(self, path: Path, head: bytes) -> bool:
        """See `DumpFormat.sniff`."""
        if not looks_like_safetensors(path, head):
            return False
        try:
            header = read_header(path)
        except (PltpackError, OSError):
            return False
        named = "0.0" in header.tensors or "0.0.0" in header.tensors
        return named and ("1.0" in header.metadata or "2.0" in header.metadata)

    def read(self, path: Path, tokens: TokenLookup) -> Iterator[Snapshot]:
        """See `DumpFormat.read`; the session is named by the file."""
        header = read_header(path)
        model, caches = read_caches(path, header)
        session = check_session(path.stem)
        scheme = caches[0].scheme
        layers = tuple(_geometry(index, cache) for index, cache in enumerate(caches))
        count = base.check_count(caches[0].tokens)
        rope = mlx_rope(model, layers[0].k_dim)
        identity = Identity(model=None if model is None else Path(model).name or None, rope=rope, keys="rotated",
                            layers=layers)  # fmt: skip
        ids = tokens.require(path, session, count)
        file = os.fspath(path.absolute())
        if scheme is None:
            entries = tuple((cache.keys[0], cache.values[0]) for cache in caches)
            source = TensorFileSource(file, header.stamp, entries)
            yield Snapshot(session, ids, identity, source, os.fspath(path))
            return
        described = {"scheme": "mlx", "bits": scheme[1], "group": scheme[0]}
        scales = caches[0].keys[1].dtype
        whole = quantized.integer_identity(identity, described, scales)
        integers = QuantizedSource(file, header.stamp, tuple(caches), count)
        snapshot = Snapshot(session, ids, whole, integers, os.fspath(path))
        yield snapshot if self.chosen.get("quantized") == "integers" else quantized.as_values(snapshot)

    def write(self, snapshots: Iterable[Snapshot], path: Path) -> list[Path]:
        """See `DumpFormat.write`; `path` is a folder that gets ``<session>.safetensors`` files."""
        keep = self.chosen.get("keep", "0")
        if not keep.isascii() or not keep.isdigit():
            raise UnsupportedError(f"keep {keep!r} is no number of tokens")
        return write_caches(snapshots, path, Target(
            self.chosen.get("layout", "padded") == "padded", self.chosen.get("model"),
            self.chosen.get("cache") != "plain", int(keep),
        ))  # fmt: skip

    def prepare(self, snapshot: Snapshot) -> Snapshot:
        """See `DumpFormat.prepare`: integers of mlx stay as they are."""
        scheme = dict(snapshot.identity.quantized or {})
        if scheme.get("scheme") == "mlx":
            return snapshot
        return in_half_style(quantized.as_values(snapshot), self.chosen.get("rope_style"))


@dataclasses.dataclass(frozen=True)
class QuantizedSource:
    """A `LayerSource` over quantized caches: integers, and from the middle on scales with biases."""

    path: str
    stamp: base.FileStamp
    caches: tuple[Cache, ...]
    count: int

    def layer(self, index: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """See `LayerSource.layer`."""
        base.check_range(start, stop, self.count)
        part, index = divmod(index, len(self.caches))
        cache = self.caches[index]
        with base.reading(self.path, self.stamp) as fd:
            found = [self._part(fd, arrays, part, start, stop) for arrays in (cache.keys, cache.values)]
        return found[0], found[1]

    def _part(self, fd: int, arrays: tuple[TensorEntry, ...], part: int, start: int, stop: int) -> np.ndarray:
        if not part:
            packed = _read(fd, arrays[0], start, stop, np.dtype("<u4"), self.path)
            return packed.view(np.uint8).view(DTYPES[quantized.CARRIER])
        dtype = DTYPES[arrays[1].dtype]
        return np.concatenate([_read(fd, entry, start, stop, dtype, self.path) for entry in arrays[1:]], axis=-1)


def _read(fd: int, entry: TensorEntry, start: int, stop: int, dtype: np.dtype[Any], path: str) -> np.ndarray:
    """Tokens of an array ``[1, H, S, D]``."""
    heads, size, dim = entry.shape[-3:]
    out = np.empty((heads, stop - start, dim), dtype)
    if not out.size:
        return out
    row = dim * dtype.itemsize
    for head in range(heads):
        read_into(fd, entry.offset + (head * size + start) * row, out[head].reshape(-1).view(np.uint8).data, path)
    return out


def _geometry(index: int, cache: Cache) -> LayerGeometry:
    keys, values = cache.keys[0], cache.values[0]
    dims = [keys.shape[-1], values.shape[-1]]
    if cache.scheme is not None:
        dims = [dim * 32 // cache.scheme[1] for dim in dims]
    dtypes = (cache.keys[-1].dtype, cache.values[-1].dtype)
    found = base.geometry_of(index, dtypes, (*keys.shape[:-1], dims[0]), (*values.shape[:-1], dims[1]))
    return dataclasses.replace(found, window=cache.window)
