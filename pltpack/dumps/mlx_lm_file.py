"""The structure of mlx-lm's prompt cache files: which arrays belong to which layer, and how many tokens they hold."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np

from pltpack.dumps import base
from pltpack.dumps.safetensors_header import Header, TensorEntry, read_into
from pltpack.errors import DumpError, UnsupportedError
from pltpack.snapshot import DTYPES

_NAME = re.compile(r"(0|[1-9][0-9]{0,4})((?:\.[0-9]{1,2}){1,2})", re.ASCII)
#: Numbers of each class besides keys and values, in the order of the padded layout.
_NUMBERS = {
    "KVCache": ("offset",),
    "QuantizedKVCache": ("offset", "group_size", "bits"),
    "RotatingKVCache": ("offset", "keep", "max_size", "_idx"),
}
#: The same in the metadata of the sliced layout.
_SLICED = {
    "KVCache": (),
    "QuantizedKVCache": ("offset", "group_size", "bits"),
    "RotatingKVCache": ("keep", "max_size", "offset", "_idx"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Cache:
    """One layer: its arrays, tokens, and ``(group, bits)`` if it is quantized."""

    keys: tuple[TensorEntry, ...]
    values: tuple[TensorEntry, ...]
    tokens: int
    scheme: tuple[int, int] | None
    window: int | None


def read_caches(path: Path, header: Header) -> tuple[str | None, list[Cache]]:
    """The model's name as the file gives it, and all layers.

    Raises
    ------
    DumpError
        If arrays are missing or do not fit together.
    UnsupportedError
        If a cache is of a class whose contents a snapshot cannot hold, or has dropped tokens.
    """
    metadata = header.metadata
    layers: dict[int, dict[str, TensorEntry]] = {}
    for name, entry in header.tensors.items():
        match = _NAME.fullmatch(name)
        if match is None:
            raise UnsupportedError(f"holds tensor {name!r}, which is no part of a prompt cache")
        layers.setdefault(int(match[1]), {})[match[2][1:]] = entry
    if not 0 < len(layers) <= base.MAX_LAYERS or max(layers) != len(layers) - 1:
        raise DumpError(f"holds {len(layers)} layers that are not numbered 0 to {len(layers) - 1}")
    padded = "1.0" in metadata and "2.0" in metadata and metadata["2.0"] == ""
    classes = [metadata.get(f"{1 if padded else 2}.{index}", "") for index in range(len(layers))]
    caches = []
    for index, kind in enumerate(classes):
        if kind not in _NUMBERS:
            raise UnsupportedError(f"layer {index} is a cache of class {kind!r} (known: {', '.join(_NUMBERS)})")
        arrays = dict(layers[index])
        numbers = _padded_numbers(path, arrays, index, kind) if padded else _sliced_numbers(header, index, kind)
        caches.append(_cache(index, kind, arrays, numbers))
    for index, cache in enumerate(caches):
        if cache.tokens != caches[0].tokens:
            raise DumpError(f"layer {index} holds {cache.tokens} tokens but layer 0 holds {caches[0].tokens}")
        if cache.scheme != caches[0].scheme or cache.keys[-1].dtype != caches[0].keys[-1].dtype:
            raise UnsupportedError(f"layer {index} is not quantized as layer 0 is")
    return metadata.get("0.model" if padded else "1.model"), caches


def _cache(index: int, kind: str, arrays: dict[str, TensorEntry], numbers: dict[str, int]) -> Cache:
    several = kind == "QuantizedKVCache"
    names = [[f"{part}.{i}" for i in range(3)] if several else [str(part)] for part in (0, 1)]
    missing = [name for name in (*names[0], *names[1]) if name not in arrays]
    if missing:
        raise DumpError(f"tensor '{index}.{missing[0]}' is missing")
    keys, values = (tuple(arrays.pop(name) for name in part) for part in names)
    if arrays:
        raise UnsupportedError(f"holds tensor '{index}.{min(arrays)}', which is no part of a {kind}")
    for entry in (*keys, *values):
        if len(entry.shape) != 4:
            raise DumpError(f"layer {index} has arrays of {len(entry.shape)} axes instead of 4")
        if entry.shape[0] != 1:
            raise UnsupportedError(f"layer {index} holds a batch of {entry.shape[0]}; save each session alone")
        if entry.shape[:3] != keys[0].shape[:3]:
            raise DumpError(f"layer {index} has arrays of different shapes")
    size = keys[0].shape[2]
    tokens = numbers.get("offset", size)
    if kind == "RotatingKVCache" and tokens > size:
        raise UnsupportedError(f"layer {index} keeps only {size} of {tokens} tokens; save it before its window is full")
    if not 0 < tokens <= size:
        raise DumpError(f"layer {index} claims {tokens} tokens in a buffer of {size}")
    scheme = _scheme(index, keys, values, numbers) if several else None
    for entry in (keys[-1], values[-1]):
        if entry.dtype not in DTYPES:
            raise UnsupportedError(f"layer {index} has dtype {entry.dtype} (known: {', '.join(DTYPES)})")
    if kind != "RotatingKVCache":
        return Cache(keys, values, tokens, scheme, None)
    if numbers["_idx"] != tokens:
        raise UnsupportedError(f"layer {index} has begun to rotate, and has dropped tokens")
    window = numbers["max_size"]
    if not 0 < window <= 1 << 20:
        raise DumpError(f"layer {index} has a window of {window} tokens")
    return Cache(keys, values, tokens, None, window)


def _scheme(
    index: int, keys: tuple[TensorEntry, ...], values: tuple[TensorEntry, ...], numbers: dict[str, int]
) -> tuple[int, int]:
    group, bits = numbers["group_size"], numbers["bits"]
    if bits not in (2, 3, 4, 5, 6, 8) or not 0 < group <= 1 << 16 or (group * bits) % 32:
        raise DumpError(f"layer {index} is quantized to {bits} bits in groups of {group}")
    for packed, scales, biases in (keys, values):
        if packed.dtype != "U32" or scales.dtype != biases.dtype or scales.shape != biases.shape:
            raise DumpError(f"layer {index} has integers of dtype {packed.dtype}, or scales unlike their biases")
        if packed.shape[3] * 32 != scales.shape[3] * group * bits:
            raise DumpError(f"layer {index} has {scales.shape[3]} scales for {packed.shape[3]} words of integers")
    return group, bits


def _padded_numbers(path: Path, arrays: dict[str, TensorEntry], index: int, kind: str) -> dict[str, int]:
    numbers = {}
    for at, name in enumerate(_NUMBERS[kind], start=2):
        entry = arrays.pop(str(at), None)
        if entry is None:
            raise DumpError(f"tensor '{index}.{at}' ({name}) is missing")
        if entry.dtype not in ("I32", "I64", "U32") or entry.length != (8 if entry.dtype == "I64" else 4):
            raise DumpError(f"tensor '{index}.{at}' ({name}) is not one integer")
        out = np.empty(1, {"I32": "<i4", "I64": "<i8", "U32": "<u4"}[entry.dtype])
        with open(path, "rb") as file:
            read_into(file.fileno(), entry.offset, out.view(np.uint8).data, path)
        numbers[name] = int(out[0])
    return numbers


def _sliced_numbers(header: Header, index: int, kind: str) -> dict[str, int]:
    numbers = {}
    for at, name in enumerate(_SLICED[kind]):
        text = header.metadata.get(f"0.{index}.{at}", "")
        if not re.fullmatch(r"-?[0-9]{1,12}", text, re.ASCII):
            raise DumpError(f"metadata '0.{index}.{at}' ({name}) is not an integer")
        numbers[name] = int(text)
    return numbers
