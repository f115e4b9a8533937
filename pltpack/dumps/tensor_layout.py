"""Sessions in safetensors files, one per file: what the ``safetensors`` and ``transformers`` formats share.

The two differ in tensor names, in a leading batch axis of 1, and in where the token ids are.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pltpack.dumps import base
from pltpack.dumps.safetensors_header import Header, TensorEntry, make_header, read_header, read_into
from pltpack.dumps.session_files import write_each
from pltpack.dumps.tokens import TokenLookup, token_ids
from pltpack.errors import DumpError, PltpackError, UnsupportedError
from pltpack.names import check_session
from pltpack.snapshot import DTYPES, Identity, LayerGeometry, Snapshot

_EXTRAS = {"logprobs": np.dtype("<f4"), "logprob_ids": np.dtype("<i4"), "importance": np.dtype("<f4")}
_DTYPE_NAMES = {np.dtype("<f4"): "F32", np.dtype("<i4"): "I32"}
_INTEGERS = {"I32": "<i4", "I64": "<i8", "U32": "<u4"}
SUFFIX = ".safetensors"


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """Names and axes of one format.

    Attributes
    ----------
    keys, values : str
        Last part of the tensor names ``layers.{i}.<part>``.
    batch : bool
        Whether tensors are ``[1, H_kv, T, D]`` instead of ``[H_kv, T, D]``.
    """

    keys: str
    values: str
    batch: bool

    def pattern(self) -> re.Pattern[str]:
        """Matches the names of cache tensors: layer index and part."""
        return re.compile(rf"layers\.(0|[1-9][0-9]{{0,5}})\.({self.keys}|{self.values})", re.ASCII)


@dataclasses.dataclass(frozen=True, slots=True)
class TensorFileSource:
    """A `LayerSource` over a safetensors file.

    Every call opens the file anew and copies just the bytes asked for, so any number of sources and threads may be in
    use, nothing stays mapped, and a file that is cut short gives an error instead of a bus error.
    """

    path: str
    stamp: base.FileStamp
    layers: tuple[tuple[TensorEntry, TensorEntry], ...]

    def layer(self, index: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """See `LayerSource.layer`."""
        keys, values = self.layers[index]
        with base.reading(self.path, self.stamp) as fd:
            return self._tensor(fd, keys, start, stop), self._tensor(fd, values, start, stop)

    def _tensor(self, fd: int, tensor: TensorEntry, start: int, stop: int) -> np.ndarray:
        heads, count, dim = tensor.shape[-3:]
        base.check_range(start, stop, count)
        out = np.empty((heads, stop - start, dim), DTYPES[tensor.dtype])
        row = dim * out.itemsize
        data = out.reshape(-1).view(np.uint8).data
        if stop - start == count:
            read_into(fd, tensor.offset, data, self.path)
            return out
        run = (stop - start) * row
        for head in range(heads):
            at = tensor.offset + (head * count + start) * row
            read_into(fd, at, data[head * run : (head + 1) * run], self.path)
        return out


def has_layers(path: Path, layout: Layout) -> bool | None:
    """Whether a safetensors file holds caches in this layout; None if its header is damaged."""
    try:
        names = read_header(path).tensors
    except UnsupportedError:
        return False
    except (PltpackError, OSError):
        return None
    pattern = layout.pattern()
    return any(pattern.fullmatch(name) for name in names)


def read_session(path: Path, header: Header, layout: Layout, tokens: TokenLookup) -> Snapshot:
    """The one session of a file, its caches unread.

    Raises
    ------
    DumpError
        If tensors are missing or do not fit together.
    UnsupportedError
        If a tensor is neither a cache of this layout nor a known extra: it would be lost.
    """
    pairs, others = _split(header, layout)
    session = header.metadata.get("session", path.stem)
    check_session(session)
    geometry = tuple(_geometry(index, *pair, layout) for index, pair in enumerate(pairs))
    count = base.check_count(pairs[0][0].shape[-2])
    for index, pair in enumerate(pairs):
        for name, tensor in zip((layout.keys, layout.values), pair, strict=True):
            if tensor.shape[-2] != count:
                raise DumpError(f"layers.{index}.{name} holds {tensor.shape[-2]} tokens but layer 0 holds {count}")
    stored = _stored_tokens(path, header, others)
    ids = tokens.require(path, session, count, stored)
    extras = {name: _array(path, others.pop(name), name, dtype) for name, dtype in _EXTRAS.items() if name in others}
    if others:
        raise UnsupportedError(f"holds tensor {min(others)!r}, which is not part of this layout")
    snapshot = Snapshot(
        session=session,
        tokens=ids,
        identity=base.parse_identity(header.metadata.get("identity"), geometry),
        source=TensorFileSource(os.fspath(path.absolute()), header.stamp, tuple(pairs)),
        origin=os.fspath(path),
        **extras,
    )
    base.check_extras(count, snapshot.logprobs, snapshot.logprob_ids, snapshot.importance)
    return snapshot


def write_sessions(
    snapshots: Iterable[Snapshot], folder: Path, layout: Layout, metadata: Callable[[Snapshot], dict[str, str]]
) -> list[Path]:
    """Write one file per session, named after it (`session_to_file`); see `DumpFormat.write`."""
    return write_each(snapshots, folder, SUFFIX, lambda one, temp: _write(one, temp, layout, metadata(one)))


def identity_json(identity: Identity) -> str:
    """An identity as canonical JSON text."""
    return json.dumps(identity.to_json(), sort_keys=True, separators=(",", ":"))


def _split(header: Header, layout: Layout) -> tuple[list[tuple[TensorEntry, TensorEntry]], dict[str, TensorEntry]]:
    pattern = layout.pattern()
    others: dict[str, TensorEntry] = {}
    found: dict[tuple[int, str], TensorEntry] = {}
    for name, tensor in header.tensors.items():
        match = pattern.fullmatch(name)
        if match:
            found[int(match[1]), match[2]] = tensor
        else:
            others[name] = tensor
    count = len({index for index, _ in found})
    if not 0 < count <= base.MAX_LAYERS:
        raise DumpError(f"holds {count} layers named layers.<i>.{layout.keys} (allowed: 1 to {base.MAX_LAYERS})")
    for index in range(count):
        for part in (layout.keys, layout.values):
            if (index, part) not in found:
                raise DumpError(f"tensor 'layers.{index}.{part}' is missing")
    return [(found[index, layout.keys], found[index, layout.values]) for index in range(count)], others


def _geometry(index: int, keys: TensorEntry, values: TensorEntry, layout: Layout) -> LayerGeometry:
    axes = 4 if layout.batch else 3
    for name, tensor in ((layout.keys, keys), (layout.values, values)):
        if len(tensor.shape) != axes:
            raise DumpError(f"layers.{index}.{name} has {len(tensor.shape)} axes instead of {axes}")
        if layout.batch and tensor.shape[0] != 1:
            raise UnsupportedError(f"layers.{index}.{name} holds a batch of {tensor.shape[0]}; dump each session alone")
        if tensor.dtype not in DTYPES:
            raise UnsupportedError(f"layers.{index}.{name} has dtype {tensor.dtype} (known: {', '.join(DTYPES)})")
    return base.geometry_of(index, (keys.dtype, values.dtype), keys.shape, values.shape)


def _stored_tokens(path: Path, header: Header, others: dict[str, TensorEntry]) -> np.ndarray | None:
    tensor = others.pop("tokens", None)
    if tensor is not None:
        if tensor.dtype not in _INTEGERS:
            raise DumpError(f"tensor 'tokens' has dtype {tensor.dtype} instead of I32")
        return token_ids(_array(path, tensor, "tokens", np.dtype(_INTEGERS[tensor.dtype])), "tensor 'tokens'")
    text = header.metadata.get("token_ids")
    return None if text is None else token_ids(base.parse_json(text, "token_ids"), "token_ids")


def _array(path: Path, tensor: TensorEntry, name: str, dtype: np.dtype[Any]) -> np.ndarray:
    if _DTYPE_NAMES.get(dtype, tensor.dtype) != tensor.dtype:
        raise DumpError(f"tensor {name!r} has dtype {tensor.dtype} instead of {_DTYPE_NAMES[dtype]}")
    out = np.empty(tensor.shape, dtype)
    with open(path, "rb") as file:
        read_into(file.fileno(), tensor.offset, out.reshape(-1).view(np.uint8).data, path)
    return out


def _small_arrays(snapshot: Snapshot) -> Iterator[tuple[str, np.ndarray]]:
    yield "tokens", np.ascontiguousarray(snapshot.tokens, "<i4")
    for name, dtype in _EXTRAS.items():
        array = getattr(snapshot, name)
        if array is not None:
            yield name, np.ascontiguousarray(array, dtype)


def _write(snapshot: Snapshot, path: Path, layout: Layout, metadata: dict[str, str]) -> None:
    small = dict(_small_arrays(snapshot))
    tensors: list[tuple[str, str, list[int]]] = [
        (name, _DTYPE_NAMES[array.dtype], list(array.shape)) for name, array in small.items()
    ]
    lead = [1] if layout.batch else []
    for index, layer in enumerate(snapshot.identity.layers):
        for part, dim in ((layout.keys, layer.k_dim), (layout.values, layer.v_dim)):
            tensors.append((f"layers.{index}.{part}", layer.dtype, [*lead, layer.heads, len(snapshot), dim]))
    header, entries = make_header(tensors, metadata)
    with open(path, "xb", buffering=0) as file:
        fd = file.fileno()
        os.ftruncate(fd, max((entry.offset + entry.length for entry in entries.values()), default=len(header)))
        write_at(fd, 0, memoryview(header))
        for name, array in small.items():
            write_at(fd, entries[name].offset, _bytes(array))
        for index in range(len(snapshot.identity.layers)):
            for start, stop, keys, values in base.layer_slices(snapshot, index):
                _write_run(fd, entries[f"layers.{index}.{layout.keys}"], start, stop, keys)
                _write_run(fd, entries[f"layers.{index}.{layout.values}"], start, stop, values)


def _write_run(fd: int, tensor: TensorEntry, start: int, stop: int, array: np.ndarray) -> None:
    heads, count, dim = tensor.shape[-3:]
    if stop - start == count:
        write_at(fd, tensor.offset, _bytes(array))
        return
    row = dim * array.itemsize
    for head in range(heads):
        write_at(fd, tensor.offset + (head * count + start) * row, _bytes(array[head]))


def _bytes(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def write_at(fd: int, offset: int, data: memoryview) -> None:
    """Write all of `data` at a file offset."""
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done : done + (1 << 30)], offset + done)
