"""Write llama.cpp state files layer by layer: see `pltpack.dumps.llama_cpp_file` for the structure."""

from __future__ import annotations

import dataclasses
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from pltpack.dumps import base, ggml
from pltpack.dumps.quantized import value_identity
from pltpack.dumps.session_files import write_each
from pltpack.dumps.tensor_layout import write_at
from pltpack.errors import UnsupportedError
from pltpack.snapshot import DTYPES, LayerGeometry, Snapshot

SUFFIX = ".bin"


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """What to write.

    Attributes
    ----------
    magic, version : int
    arch : str or None
        The architecture's name, in session files.
    kind : str or None
        Type of the cache by ggml's name; None for the stored one.
    transposed, packed : bool
        Values channel by channel; tokens as llama-server packs them.
    sequence : int
    hadamard : bool
        Whether a context that quantizes its cache rotates it, as is the default.
    """

    magic: int
    version: int
    arch: str | None
    kind: str | None
    transposed: bool
    packed: bool
    sequence: int
    hadamard: bool


def write_state(snapshots: Iterable[Snapshot], folder: Path, target: Target) -> list[Path]:
    """Write one file per session; see `DumpFormat.write`."""

    def one(snapshot: Snapshot, temp: Path) -> None:
        if not len(snapshot):
            raise UnsupportedError(f"session {snapshot.session!r} is empty, which llama.cpp does not restore")
        _write(snapshot, temp, target, _Layout.of(snapshot, target))

    return write_each(snapshots, folder, SUFFIX, one)


@dataclasses.dataclass(frozen=True, slots=True)
class _Layout:
    """Type and shapes of the rows of one file."""

    kind: str
    stored: bool
    layers: tuple[LayerGeometry, ...]

    @classmethod
    def of(cls, snapshot: Snapshot, target: Target) -> _Layout:
        identity = snapshot.identity
        stored = identity.quantized is not None
        layers = value_identity(identity).layers if stored else identity.layers
        types = {layer.dtype for layer in layers}
        kind = target.kind or (dict(identity.quantized or {}).get("scheme") if stored else None)
        if kind is None:
            if len(types) > 1:
                raise UnsupportedError(f"layers are of different dtypes ({', '.join(sorted(types))}): say type=NAME")
            kind = types.pop()
        if kind not in ggml.TYPES:
            raise UnsupportedError(f"llama.cpp has no cache of dtype {kind}: say type=NAME "
                                   f"({', '.join(ggml.TYPES).lower()})")  # fmt: skip
        if kind in ggml.INTEGERS:
            if target.transposed:
                raise UnsupportedError(f"values of type {kind} cannot be transposed")
            if any(layer.k_dim % ggml.BLOCK or layer.v_dim % ggml.BLOCK for layer in layers):
                raise UnsupportedError(f"heads are no whole blocks of {ggml.BLOCK} channels, as {kind} needs")
        return cls(kind, stored, layers)

    def width(self, dim: int, heads: int) -> int:
        """Bytes of a row."""
        columns = dim * heads
        if self.kind in ggml.INTEGERS:
            return columns // ggml.BLOCK * (2 + ggml.INTEGERS[self.kind])
        return columns * DTYPES[self.kind].itemsize


def _head(snapshot: Snapshot, target: Target) -> bytes:
    ids = np.ascontiguousarray(snapshot.tokens, "<i4")
    words = np.concatenate([[-1, 1, len(ids)], ids, [0]]).astype("<i4") if target.packed else ids
    parts = [struct.pack("<III", target.magic, target.version, len(words)), words.tobytes()]
    if target.arch is not None:
        name = target.arch.encode()
        parts += [struct.pack("<I", len(name)), name]
    cells = np.empty((len(ids), 3), "<i4")
    cells[:, 0], cells[:, 1], cells[:, 2] = np.arange(len(ids)), 1, target.sequence
    return b"".join([*parts, struct.pack("<II", 1, len(ids)), cells.tobytes()])


def _write(snapshot: Snapshot, path: Path, target: Target, layout: _Layout) -> None:
    count, number = len(snapshot), ggml.TYPES[layout.kind]
    head = _head(snapshot, target) + struct.pack("<II", target.transposed, len(layout.layers))
    at = len(head)
    places: list[tuple[int, int]] = []
    with open(path, "xb", buffering=0) as file:
        fd = file.fileno()
        write_at(fd, 0, memoryview(head))
        for part in ("k_dim", "v_dim"):
            for layer in layout.layers:
                dim = getattr(layer, part)
                width = layout.width(dim, layer.heads)
                if part == "v_dim" and target.transposed:
                    label = struct.pack("<iII", number, DTYPES[layout.kind].itemsize, dim * layer.heads)
                else:
                    label = struct.pack("<iQ", number, width)
                write_at(fd, at, memoryview(label))
                places.append((at + len(label), width))
                at += len(label) + count * width
        os.ftruncate(fd, at)
        for index in range(len(layout.layers)):
            for start, stop, keys, values in _runs(snapshot, index, target, layout):
                offset, width = places[index]
                write_at(fd, offset + start * width, keys.reshape(-1).data)
                offset, width = places[len(layout.layers) + index]
                if not target.transposed:
                    write_at(fd, offset + start * width, values.reshape(-1).data)
                    continue
                _write_columns(fd, offset, start, stop, count, values, DTYPES[layout.kind].itemsize)


def _write_columns(fd: int, offset: int, start: int, stop: int, count: int, rows: np.ndarray, size: int) -> None:
    columns = np.ascontiguousarray(rows.reshape(stop - start, -1, size).swapaxes(0, 1))
    if stop - start == count:
        write_at(fd, offset, columns.reshape(-1).data)
        return
    for column, data in enumerate(columns):
        write_at(fd, offset + (column * count + start) * size, data.reshape(-1).data)


def _runs(
    snapshot: Snapshot, index: int, target: Target, layout: _Layout
) -> Iterator[tuple[int, int, np.ndarray, np.ndarray]]:
    """One layer's rows, uint8 ``[t, bytes]``, in runs of tokens."""
    layer = layout.layers[index]
    sizes = ggml.hadamard_sizes(layer.k_dim, layer.v_dim) if target.hadamard else None
    for start, stop, *arrays in base.layer_slices(snapshot, index):
        out = []
        scales = snapshot.layer(len(layout.layers) + index, start, stop) if layout.stored else None
        for part, array in enumerate(arrays):
            flat = array.swapaxes(0, 1)
            if scales is not None:
                tables = np.ascontiguousarray(scales[part].swapaxes(0, 1)).reshape(stop - start, -1)
                blocks = np.ascontiguousarray(flat).view(np.uint8).reshape(*tables.shape, -1)
                rows = ggml.join_rows(tables, blocks)
            elif layout.kind in ggml.INTEGERS:
                values = flat.astype(np.float32)
                values = values if sizes is None else ggml.rotated(values, sizes[part])
                rows = ggml.join_rows(*ggml.quantize(values.reshape(stop - start, -1), layout.kind))
            else:
                with np.errstate(over="ignore", invalid="ignore"):
                    typed = np.ascontiguousarray(flat).astype(DTYPES[layout.kind], copy=False)
                rows = typed.reshape(stop - start, -1).view(np.uint8)
            out.append(np.ascontiguousarray(rows))
        yield start, stop, out[0], out[1]
