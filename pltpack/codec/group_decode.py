"""Decoding of the group codec's payloads; the bitstream is described in `pltpack.codec.group`."""

from __future__ import annotations

import dataclasses
import struct
from typing import Any

import ml_dtypes
import numpy as np

from pltpack.codec import dequantize, quantize, rans, tokens
from pltpack.codec.base import KeyValue, Unit
from pltpack.codec.levels import step_of
from pltpack.codec.payload import Reader
from pltpack.codec.rope import Rotation
from pltpack.snapshot import DTYPES, LayerGeometry

REFERENCED, OWN_MEANS, SHIFTED = 1, 2, 4
#: Flags (one byte and three that are 0), run bytes, escaped values, length of the first stream.
HEADER = struct.Struct("<4I")
#: `own means` count in this share of the head's step.
MEAN_UNIT = np.float32(0.25)

_LARGEST = {DTYPES[name]: np.float32(x) for name, x in (("F16", 65504), ("F8_E4M3", 448), ("F8_E5M2", 57344))}

_NO_TURN = np.zeros((0, 0), dtype=np.float32)
_NO_TURN.flags.writeable = False
_NO_WORDS = np.empty((0, 0, 0), dtype=np.uint16)
_NO_FLOATS = np.empty((0, 0, 0), dtype=np.float32)


#: Quantized and exact symbol rows, of keys and of values.
Rows = list[tuple[np.ndarray, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer's part of the state: means float32 ``[H, 1, 2 P]`` of keys and values, step codes, usual norm."""

    geometry: LayerGeometry
    means: tuple[np.ndarray, np.ndarray]
    codes: np.ndarray
    norm: float
    rotation: Rotation | None

    @property
    def dims(self) -> tuple[int, int]:
        """Key and value dimension."""
        return self.geometry.k_dim, self.geometry.v_dim


@dataclasses.dataclass(slots=True)
class Header:
    """The fixed part of a payload, checked."""

    flags: int
    codes: np.ndarray
    bases: np.ndarray
    classes: np.ndarray
    ranks: np.ndarray
    means: np.ndarray
    escapes: np.ndarray
    stream: int


def pairs(dim: int) -> int:
    """Symbols per row of a head."""
    return (dim + 1) // 2


def padded(x: np.ndarray) -> np.ndarray:
    """Float32, contiguous, with an even last axis."""
    x = np.asarray(x, dtype=np.float32)
    if x.shape[-1] % 2:
        x = np.pad(x, ((0, 0), (0, 0), (0, 1)))
    return np.ascontiguousarray(x)


def unrotated(arrays: KeyValue, layer: Layer, unit: Unit) -> KeyValue:
    """Keys and values in binary32, keys without their rotation; what is not finite stays so, without a warning."""
    with np.errstate(all="ignore"):
        keys, values = (np.ascontiguousarray(a, dtype=np.float32) for a in arrays)
        return keys if layer.rotation is None else layer.rotation.unrotate(keys, unit.position), values


def own_means(numbers: np.ndarray, codes: np.ndarray, layer: Layer) -> KeyValue:
    """Float32 ``[H, 1, 2 P]`` from a payload's int16 means of all channels."""
    heads = layer.geometry.heads
    out, at = [], 0
    for part, dim in enumerate(layer.dims):
        scale = np.array([MEAN_UNIT * step_of(int(c)) for c in codes[part * heads : (part + 1) * heads]], np.float32)
        found = numbers[at : at + heads * dim].reshape(heads, 1, dim).astype(np.float32)
        out.append(padded(found * scale[:, None, None]))
        at += heads * dim
    return out[0], out[1]


def decode(
    payload: memoryview,
    layer: Layer,
    unit: Unit,
    out: KeyValue,
    reference: KeyValue | None,
    tables: np.ndarray,
    shrink: np.ndarray,
) -> None:
    """Decode one unit into `out`; `ValueError` if the payload is malformed."""
    reader = Reader(payload)
    header = _header(reader, layer, unit)
    heads, halves = layer.geometry.heads, (pairs(layer.geometry.k_dim), pairs(layer.geometry.v_dim))
    kinds = np.empty(4 * heads * unit.tokens, dtype=np.int64)
    coded, exact, *sizes = quantize.plan(header.classes, header.ranks, header.codes, header.bases, *halves, kinds)
    if coded < 0:
        raise ValueError("a step or a table class is out of range")
    predictions = _predictions(header, layer, unit, reference)
    low = reader.array(sizes[0] + sizes[1], "u1")
    itemsize = DTYPES[layer.geometry.dtype].itemsize
    rest = [reader.array(heads * exact * dim * (itemsize - 1), "u1") if exact else low[:0] for dim in layer.dims]
    symbols = _symbols(reader, header, kinds, halves, (heads * coded, 2 * heads * exact), tables)
    _dequantize(layer, unit, header, predictions, symbols, (low[: sizes[0]], low[sizes[0] :]), shrink, out)
    if exact:
        where = np.flatnonzero(header.classes == tokens.EXACT)
        for part in (0, 1):
            _place_exact(symbols[part][1], rest[part], where, out[part])
    if header.flags & REFERENCED and reference is not None:
        where = np.flatnonzero(header.classes == tokens.COPY)
        for x, y in zip(out, reference, strict=True):
            x[:, where] = y[:, where]


def _predictions(header: Header, layer: Layer, unit: Unit, reference: KeyValue | None) -> KeyValue:
    if header.flags & REFERENCED:
        if reference is None:
            raise ValueError("payload needs a reference")
        keys, values = unrotated(reference, layer, unit)
        return padded(keys), padded(values)
    if header.flags & OWN_MEANS:
        return own_means(header.means, header.codes, layer)
    return layer.means


def _header(reader: Reader, layer: Layer, unit: Unit) -> Header:
    heads, channels = layer.geometry.heads, layer.geometry.elements_per_token
    fixed = reader.take(HEADER.size + 6 * heads)
    flags, runs, escapes, stream = HEADER.unpack_from(fixed)
    if flags not in (0, REFERENCED, OWN_MEANS, REFERENCED | SHIFTED) or escapes % 2:
        raise ValueError("payload header is damaged")
    # Copies are aligned and writable, always one type to the compiled loops.
    codes = np.frombuffer(fixed, "<i2", 2 * heads, HEADER.size).astype(np.int16)
    bases = np.frombuffer(fixed, np.uint8, 2 * heads, HEADER.size + 4 * heads).copy()
    shifts = (unit.tokens + 1) // 2 if flags & SHIFTED else 0
    body = reader.array(runs + shifts + 2 * (channels if flags == OWN_MEANS else 0) + 2 * escapes, "u1")
    classes = tokens.unpack_runs(body[:runs], unit.tokens, bool(flags & REFERENCED))
    ranks = classes.astype(np.int16)
    if shifts:
        ranks += tokens.unpack_shifts(body[runs : runs + shifts], unit.tokens)
    numbers = body[runs + shifts :].copy().view("<i2").astype(np.int16, copy=False)
    split = len(numbers) - escapes
    return Header(flags, codes, bases, classes, ranks, numbers[:split], numbers[split:], stream)


def _symbols(reader: Reader, header: Header, kinds: np.ndarray, halves: tuple[int, int], counts: tuple[int, int],
             tables: np.ndarray) -> Rows:  # fmt: skip
    """Quantized and exact symbol rows of keys and of values; `counts` of each per part."""
    coded, exact = counts
    first = reader.take(header.stream)
    if halves[0] == halves[1]:
        reader.end()
        out = np.empty((2 * (coded + exact), halves[0]), dtype=np.uint8)
        rans.decode(first, kinds[: len(out)], tables, out)
        middle = 2 * coded + exact
        return [(out[:coded], out[2 * coded : middle]), (out[coded : 2 * coded], out[middle:])]
    found = []
    for part, stream in enumerate((first, reader.rest())):
        at, end = part * coded, 2 * coded + part * exact
        rows = np.concatenate([kinds[at : at + coded], kinds[end : end + exact]])
        out = np.empty((coded + exact, halves[part]), dtype=np.uint8)
        rans.decode(stream, rows, tables, out)
        found.append((out[:coded], out[coded:]))
    return found


def _dequantize(layer: Layer, unit: Unit, header: Header, predictions: KeyValue, symbols: Rows,
                low: KeyValue, shrink: np.ndarray, out: KeyValue) -> None:  # fmt: skip
    """Dequantize all heads into `out`, straight into its words where they are bfloat16 in rows."""
    turn, cos, sin = 0, _NO_TURN, _NO_TURN
    if layer.rotation is not None:
        turn = 2 if layer.rotation.interleaved else 1
        cos, sin = layer.rotation.tables(unit.position, unit.tokens)
    direct = [x.dtype == ml_dtypes.bfloat16 and x[0].flags.c_contiguous for x in out]
    words, floats = [_NO_WORDS, _NO_WORDS], [_NO_FLOATS, _NO_FLOATS]
    for part, x in enumerate(out):
        if x.dtype == ml_dtypes.bfloat16:
            words[part] = x.view(np.uint16) if direct[part] else np.zeros(x.shape, dtype=np.uint16)
        else:
            floats[part] = np.zeros(x.shape, dtype=np.float32)
    used = dequantize.dequantize(
        symbols[0][0], symbols[1][0], header.classes, header.ranks, header.bases, header.codes, shrink,
        predictions[0], predictions[1], predictions[0].shape[1] > 1, low[0], low[1], header.escapes, turn, cos, sin,
        words[0], words[1], floats[0], floats[1],
    )  # fmt: skip
    if used != header.escapes.size:
        raise ValueError("payload has a wrong number of escapes")
    if all(direct):
        return
    coded = header.classes <= tokens.FINEST
    for part, x in enumerate(out):
        if not direct[part]:
            x[:, coded] = _rounded(words[part] if words[part].size else floats[part], x.dtype)[:, coded]


def _rounded(target: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    if target.dtype == np.uint16:
        return target.view(dtype)
    if dtype == np.float32:
        return target
    # Narrow types have no room above their largest value: what would round to infinity or NaN is that value.
    largest = _LARGEST[dtype]
    clipped: np.ndarray = np.clip(target, -largest, largest).astype(dtype)
    return clipped


def _place_exact(symbols: np.ndarray, rest: np.ndarray, where: np.ndarray, out: np.ndarray) -> None:
    heads, _, dim = out.shape
    itemsize = out.dtype.itemsize
    kind = np.dtype(f"u{itemsize}")
    # Words grow from the lowest byte; the highest comes from the symbols.
    words = symbols.reshape(heads, len(where), -1)[..., :dim].astype(kind) << kind.type(8 * (itemsize - 1))
    bytes_ = rest.reshape(heads, len(where), dim, itemsize - 1)
    for i in range(itemsize - 1):
        words |= bytes_[..., i].astype(kind) << kind.type(8 * i)
    out[:, where] = words.view(out.dtype)
