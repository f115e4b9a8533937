"""Write mlx-lm prompt caches layer by layer: see `pltpack.dumps.mlx_lm` for the two layouts."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from pltpack.dumps import base
from pltpack.dumps.quantized import value_identity
from pltpack.dumps.safetensors_header import TensorEntry, make_header
from pltpack.dumps.session_files import write_each
from pltpack.dumps.tensor_layout import write_at
from pltpack.errors import UnsupportedError
from pltpack.snapshot import DTYPES, Snapshot

SUFFIX = ".safetensors"
_STEP = 256
# What mlx's affine quantization gives as the scale of a group of zeros.
_ZERO_SCALE = -1e-7


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """What to write: the padded layout or the sliced one, the model's name, and how layers with a window are kept."""

    padded: bool
    model: str | None
    rotating: bool
    keep: int


def write_caches(snapshots: Iterable[Snapshot], folder: Path, target: Target) -> list[Path]:
    """Write one file per session; see `DumpFormat.write`."""
    return write_each(snapshots, folder, SUFFIX, lambda snapshot, temp: _write(snapshot, temp, target))


class _File:
    """Tensors and metadata of one file."""

    def __init__(self, snapshot: Snapshot, target: Target) -> None:
        identity = snapshot.identity
        self.quantized = dict(identity.quantized or {})
        self.layers = value_identity(identity).layers if self.quantized else identity.layers
        self.count = len(snapshot)
        if not self.count:
            raise UnsupportedError(f"session {snapshot.session!r} is empty, which mlx-lm cannot save")
        self.tensors: list[tuple[str, str, list[int]]] = []
        self.numbers: dict[str, int] = {}
        self.metadata: dict[str, str] = {}
        model = target.model if target.model is not None else identity.model or ""
        lead = 0 if target.padded else 1
        self.metadata |= {f"{lead}.model": model, f"{lead}.tokenizer_config": "{}"}
        for index in range(len(self.layers)):
            self._layer(index, target)
        if target.padded:
            self.metadata["2.0"] = ""
            for at, name in enumerate(self.numbers, start=1):
                self.metadata |= {f"2.{at}.0": name, f"2.{at}.1": "scalar"}
            self.tensors += [(name, "I32", []) for name in self.numbers]

    def _layer(self, index: int, target: Target) -> None:
        layer = self.layers[index]
        window = layer.window if target.rotating else None
        # A rotating cache that has taken the whole prompt at once holds exactly that.
        padded = target.padded and window is None
        size = -(-self.count // _STEP) * _STEP if padded else self.count
        if window is not None and self.count > window:
            raise UnsupportedError(f"layer {index} has a window of {window} tokens and the session {self.count}: "
                                   "say cache=plain")  # fmt: skip
        for part, dim in enumerate((layer.k_dim, layer.v_dim)):
            shape = [1, layer.heads, size]
            if not self.quantized:
                self.tensors.append((f"{index}.{part}", layer.dtype, [*shape, dim]))
                continue
            bits, group = self.quantized["bits"], self.quantized["group"]
            self.tensors.append((f"{index}.{part}.0", "U32", [*shape, dim * bits // 32]))
            self.tensors += [(f"{index}.{part}.{table}", layer.dtype, [*shape, dim // group]) for table in (1, 2)]
        offset = self.count
        if self.quantized:
            kind, numbers = "QuantizedKVCache", [offset, self.quantized["group"], self.quantized["bits"]]
            sliced = numbers
        elif window is not None:
            kind, numbers = "RotatingKVCache", [offset, target.keep, window, offset]
            sliced = [target.keep, window, offset, offset]
        else:
            kind, numbers, sliced = "KVCache", [offset], []
        self.metadata[f"{1 if target.padded else 2}.{index}"] = kind
        if target.padded:
            self.numbers |= {f"{index}.{at}": value for at, value in enumerate(numbers, start=2)}
            return
        if not sliced:
            self.metadata[f"0.{index}"] = ""
        self.metadata |= {f"0.{index}.{at}": str(value) for at, value in enumerate(sliced)}


def _write(snapshot: Snapshot, path: Path, target: Target) -> None:
    plan = _File(snapshot, target)
    header, entries = make_header(plan.tensors, plan.metadata)
    with open(path, "xb", buffering=0) as file:
        fd = file.fileno()
        # What nothing is written to stays zero, as mlx-lm fills its buffers.
        os.ftruncate(fd, max(entry.offset + entry.length for entry in entries.values()))
        write_at(fd, 0, memoryview(header))
        for name, number in plan.numbers.items():
            write_at(fd, entries[name].offset, memoryview(np.array([number], "<i4").tobytes()))
        _fill(fd, plan, entries)
        for index in range(len(plan.layers)):
            for start, stop, *arrays in base.layer_slices(snapshot, index):
                tables = snapshot.layer(len(plan.layers) + index, start, stop) if plan.quantized else None
                for part, array in enumerate(arrays):
                    if tables is None:
                        _write_run(fd, entries[f"{index}.{part}"], start, array)
                        continue
                    _write_run(fd, entries[f"{index}.{part}.0"], start, array)
                    for table, values in enumerate(np.split(tables[part], 2, axis=-1), start=1):
                        _write_run(fd, entries[f"{index}.{part}.{table}"], start, values)


def _fill(fd: int, plan: _File, entries: Mapping[str, TensorEntry]) -> None:
    """Scales beyond the last token, as mlx-lm leaves them: it quantizes a whole buffer, zeros and all."""
    if not plan.quantized:
        return
    for index, layer in enumerate(plan.layers):
        for part in (0, 1):
            entry = entries[f"{index}.{part}.1"]
            shape = (layer.heads, entry.shape[2] - plan.count, entry.shape[3])
            _write_run(fd, entry, plan.count, np.full(shape, _ZERO_SCALE, DTYPES[layer.dtype]))


def _write_run(fd: int, entry: TensorEntry, start: int, array: np.ndarray) -> None:
    row = array.shape[-1] * array.itemsize
    for head, rows in enumerate(array):
        at = entry.offset + (head * entry.shape[2] + start) * row
        write_at(fd, at, np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data)
