"""The lossless codec: every bit of every dtype, by channel windows, rANS and stored low bits.

Notation: a unit has H heads, N tokens and R = H * (D_k + D_v) channels, E = R * N elements of W bits. Channel rows are
``[R, N]``: row ``h * D_k + d`` for keys, row ``H * D_k + h * D_v + d`` for values. All integers are little-endian.

| dtype | W | low bits L | mantissa bits in the top S | planes of low bits (shift, width), in order |
|---|---|---|---|---|
| BF16 | 16 | 4 | 3 | (0, 4) |
| F16 | 16 | 8 | 2 | (0, 8) |
| F32 | 32 | 20 | 3 | (16, 4) (8, 8) (0, 8) |
| F8_E4M3 | 8 | 0 | 3 | |
| F8_E5M2 | 8 | 0 | 2 | |

**Symbols.** ``top = word >> L`` has B = W - L bits; its highest is the sign, the others the magnitude m. A channel has
a window octave `base` and a class byte: bits 0 to 6 name the table, bit 7 is `mirror`. With
``t = (m - base * 2^S) mod 2^(B-1)`` the symbol is ``t | (sign xor mirror) << 7`` if t < 128, the table gives it a
frequency above 0, and it is not the table's escape symbol. Otherwise the escape symbol is coded and `top` goes to
the list of escapes. Symbols and escapes run over the channel rows in order.

**Payload.** One mode byte, then:

| mode | name | body |
|---|---|---|
| 0 | raw | keys, then values, in C order |
| 1 | zstd | one frame of W / 8 byte planes of the channel rows, highest byte first, each ``[R, N]`` |
| 2 | static | symbol body, tables and channels from the state |
| 3 | inline | u32 length and zstd frame of a model, then symbol body |
| 4 | same | nothing: the unit equals its reference |
| 5 | sparse | see `pltpack.codec.delta` |
| 6 | dense | see `pltpack.codec.delta` |
| 7 | predicted | see `pltpack.codec.predicted`; format 1.2, BF16 and F16 only |

Symbol body:

| bytes | content |
|---|---|
| 4 | u32 number of escapes X, at most E |
| 4 | u32 length of the rANS stream Z |
| 2 X | escapes, u16, each below 2^B |
| Z | rANS stream of the symbols ``[R, N]``, the table of a row being its channel's |
| per plane 1 | 0: the plane's bytes follow; 1: u32 length and zstd frame of them follow |

A plane of width 8 is u8 ``[R, N]``: bits ``shift … shift + 7``. A plane of width 4 is u8 ``[R, ceil(N / 2)]``: byte j
has bits ``shift … shift + 3`` of column j in its low half, and those of column ``j + ceil(N / 2)`` above (0 if there is
none).

Model, decompressed: u8 number of tables C (1 to 128); u16 ``[C, 256]`` frequencies, each row with sum 4096; u8 ``[C]``
escape symbols; u8 ``[R]`` bases; u8 ``[R]`` class bytes.

**State.** ``freqs`` u16 ``[C, 256]`` and ``escape`` u8 ``[C]``, C from 0 (no static mode) to 128; ``base`` and
``class`` u8, the channels of all layers one after the other.
"""

from __future__ import annotations

import dataclasses
import os
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import numpy as np

from pltpack.codec import classes, delta, lossless_batch, predicted, rans, symbols
from pltpack.codec.base import Codec, EncodeJob, KeyValue, LayerSample, Samples, State, Unit
from pltpack.codec.classes import LAYOUTS, Layout, Rows, Tables, Windowed
from pltpack.codec.delta import Words
from pltpack.codec.payload import Reader, declared_size, expand, squeeze
from pltpack.snapshot import Identity, LayerGeometry

RAW, ZSTD, STATIC, INLINE, SAME, SPARSE, DENSE, PREDICTED = range(8)

#: Most tables of a state, and of a model inside a payload.
STATE_CLASSES = 64
INLINE_CLASSES = 8
#: Elements that pay for one table in a state, and in a payload.
_STATE_ELEMENTS = 1 << 16
_INLINE_ELEMENTS = 1 << 15
#: Tokens per layer that `learn` looks at, in pieces.
_SAMPLE_TOKENS = 1024
#: Where words can be predicted, differences that have more bits than this, on average, are not tried.
_FAR = 4.0
#: Words alone hardly ever take less than this part: what is smaller with a prediction is not compared.
_ALONE = 0.5
_PIECE = 64
#: Tokens that tell what words take alone, and how much more that must be for it to be believed.
_PROBED = 32
_CLEARLY = 1.05


class LosslessCodec(Codec):
    """Bit-exact coding of cache words, NaN payloads included; the module's text is its bitstream.

    Takes no configuration. Without a reference a unit is coded with static tables per channel class, or with tables of
    its own, zstd or not at all where that is smaller; with a reference, as a difference where that is smaller, or as
    noise about a prediction where differences are no longer small.
    """

    codec_id: ClassVar[str] = "lossless"
    exact: ClassVar[bool] = True

    def __init__(self) -> None:
        self._tables: Tables | None = None
        self._rows: list[Rows] = []
        self._batch: lossless_batch.Batch | None = None

    def learn(self, samples: Samples, identity: Identity) -> dict[str, np.ndarray]:
        """See `Codec.learn`: windows and classes of all channels, and up to 64 tables."""
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            found = list(pool.map(lambda item: _windows(samples, *item), enumerate(identity.layers)))
        parts, elements = [part for part, _ in found], sum(size for _, size in found)
        freqs, escape, base, kinds = classes.learn(parts, min(STATE_CLASSES, max(1, elements // _STATE_ELEMENTS)))
        return {"freqs": freqs, "escape": escape, "base": base, "class": kinds}

    def start(self, state: State, identity: Identity) -> None:
        """See `Codec.start`."""
        if set(state) != {"freqs", "escape", "base", "class"}:
            raise ValueError("lossless state does not hold the arrays freqs, escape, base and class")
        tables = Tables(state["freqs"], state["escape"])
        base, kinds = state["base"], state["class"]
        channels = [layer.elements_per_token for layer in identity.layers]
        if any(array.dtype != np.uint8 or array.shape != (sum(channels),) for array in (base, kinds)):
            raise ValueError("lossless state does not fit the number of channels")
        _check_classes(kinds, len(tables) or 1)
        ends = np.cumsum(channels)[:-1]
        self._rows = [Rows.of(b, k, LAYOUTS[layer.dtype]) for b, k, layer in zip(
            np.split(base, ends), np.split(kinds, ends), identity.layers, strict=True)] if channels else []  # fmt: skip
        self._tables = tables if len(tables) else None
        self._batch = None
        if self._tables is not None:
            self._batch = lossless_batch.Batch(identity.layers, self._rows, self._tables, symbols.PROBE)

    def encode(self, unit: Unit, keys: np.ndarray, values: np.ndarray, reference: KeyValue | None = None) -> bytes:
        """See `Codec.encode`."""
        return self.encode_many([EncodeJob(unit, keys, values, reference)])[0]

    def encode_many(self, jobs: Sequence[EncodeJob]) -> list[bytes]:
        """See `Codec.encode_many`."""
        found = [None] * len(jobs) if self._batch is None else self._batch.encode(jobs)
        return [self._encode(*job) if payload is None else payload for job, payload in zip(jobs, found, strict=True)]

    def _encode(self, unit: Unit, keys: np.ndarray, values: np.ndarray, reference: KeyValue | None) -> bytes:
        layout = LAYOUTS[unit.geometry.dtype]
        words = _words((keys, values), layout)
        _check_shapes(unit, words)
        payload = None
        if reference is not None:
            base, raw = _words(reference, layout), words[0].nbytes + words[1].nbytes
            near = unit.near and predicted.supports(unit.geometry.dtype)
            found = [] if near and delta.size_of(words, base) > _FAR else [
                _encode_difference(words, base)]  # fmt: skip
            # A useful difference is a small one; then nothing else can be much smaller.
            if found and 4 * len(found[0]) <= raw:
                return found[0]
            if near:
                found.append(bytes([PREDICTED]) + predicted.encode(words, base, unit.geometry.dtype))
            payload = min(found, key=len)
            if near and (len(payload) <= _ALONE * raw or self._smaller(payload, unit, keys, values)):
                return payload
        plain = self._encode_plain(unit, words, layout)
        return plain if payload is None or len(plain) < len(payload) else payload

    def _smaller(self, payload: bytes, unit: Unit, keys: np.ndarray, values: np.ndarray) -> bool:
        """Whether a payload is clearly smaller than the words alone, as told by a few tokens in the middle."""
        if self._batch is None or unit.tokens < 2 * _PROBED:
            return False
        at = (unit.tokens - _PROBED) // 2
        few = dataclasses.replace(unit, position=unit.position + at, tokens=_PROBED)
        part = slice(at, at + _PROBED)
        (alone,) = self._batch.encode([EncodeJob(few, keys[:, part], values[:, part])])
        return alone is not None and _CLEARLY * len(payload) * _PROBED < (len(alone) - rans.HEADER_BYTES) * unit.tokens

    def _encode_plain(self, unit: Unit, words: Words, layout: Layout) -> bytes:
        rows = delta.channel_rows(words)
        found: list[bytes] = []
        usual = False
        if self._tables is not None:
            body, usual = symbols.encode(rows, self._static(unit), self._tables, layout)
            found.append(b"".join([bytes([STATIC]), *body]))
        if not usual:
            found += [*_encode_inline(rows, layout), bytes([ZSTD]) + squeeze(_byte_planes(rows))]
        best = min(found, key=len)
        if len(best) <= rows.nbytes:
            return best
        return bytes([RAW]) + words[0].tobytes() + words[1].tobytes()

    def _static(self, unit: Unit) -> Rows:
        if not 0 <= unit.layer < len(self._rows):
            raise ValueError(f"lossless state has no layer {unit.layer}")
        rows = self._rows[unit.layer]
        if len(rows.table) != unit.geometry.elements_per_token:
            raise ValueError(f"layer {unit.layer} has another number of channels than the lossless state")
        return rows

    def decode(
        self,
        payload: memoryview,
        unit: Unit,
        keys: np.ndarray,
        values: np.ndarray,
        reference: KeyValue | None = None,
    ) -> None:
        """See `Codec.decode`."""
        layout = LAYOUTS[unit.geometry.dtype]
        words = _words((keys, values), layout)
        _check_shapes(unit, words)
        reader = Reader(payload)
        mode = reader.u8()
        if mode in (SAME, SPARSE, DENSE, PREDICTED):
            if reference is None:
                raise ValueError("payload is a difference, but there is no reference")
            _decode_difference(mode, reader, words, _words(reference, layout), unit.geometry.dtype)
        elif mode == RAW:
            for out in words:
                out[...] = reader.array(out.size, layout.word.str).reshape(out.shape)
        elif mode == ZSTD:
            _decode_zstd(reader, words, layout)
        elif mode == STATIC:
            if self._tables is None:
                raise ValueError("payload uses static tables, but the state has none")
            delta.spread_rows(symbols.decode(reader, keys.shape[1], self._static(unit), self._tables, layout), words)
        elif mode == INLINE:
            rows, tables = _read_model(reader, unit.geometry, layout)
            delta.spread_rows(symbols.decode(reader, keys.shape[1], rows, tables, layout), words)
        else:
            raise ValueError(f"lossless payload has the unknown mode {mode}")
        reader.end()


def _windows(samples: Samples, index: int, geometry: LayerGeometry) -> tuple[Windowed, int]:
    """Statistics of one layer's sample, and its number of elements."""
    layout = LAYOUTS[geometry.dtype]
    found = []
    for sample in _thin(samples.layer(index)):
        words = _words((sample.keys, sample.values), layout)
        _check_shapes(dataclasses.replace(sample.unit, tokens=words[0].shape[1]), words)
        found.append(words)
    rows = np.empty((geometry.elements_per_token, sum(words[0].shape[1] for words in found)), dtype=layout.word)
    at = 0
    for words in found:
        end = at + words[0].shape[1]
        delta.fill_rows(words, rows[:, at:end])
        at = end
    return classes.window([rows], len(rows), layout), rows.size


def _words(arrays: KeyValue, layout: Layout) -> Words:
    return arrays[0].view(layout.word), arrays[1].view(layout.word)


def _thin(found: Sequence[LayerSample]) -> Sequence[LayerSample]:
    """An even choice of pieces of runs with about `_SAMPLE_TOKENS` tokens in all."""
    if len(found):
        # Samples are made when they are looked at, which takes longer than to count their words.
        found = found[:: max(1, len(found) * min(_PIECE, found[0].keys.shape[1]) // _SAMPLE_TOKENS)]
    step = -(-sum(sample.keys.shape[1] for sample in found) // _SAMPLE_TOKENS)
    if step <= 1:
        return found
    pieces = [(sample, at) for sample in found for at in range(0, sample.keys.shape[1], _PIECE)]
    return [
        dataclasses.replace(sample, keys=sample.keys[:, at : at + _PIECE], values=sample.values[:, at : at + _PIECE])
        for sample, at in pieces[::step]
    ]


def _check_shapes(unit: Unit, words: Words) -> None:
    shape = (unit.geometry.heads, unit.tokens)
    if words[0].shape != (*shape, unit.geometry.k_dim) or words[1].shape != (*shape, unit.geometry.v_dim):
        raise ValueError("arrays do not have the unit's shape")


def _check_classes(kinds: np.ndarray, tables: int) -> None:
    if len(kinds) and int((kinds & (classes.MIRROR - 1)).max()) >= tables:
        raise ValueError("a channel names a lossless table that does not exist")


def _encode_difference(words: Words, reference: Words) -> bytes:
    sparse = delta.encode_sparse(words, reference)
    if sparse is None:
        return bytes([DENSE]) + delta.encode_dense(words, reference)
    return bytes([SPARSE]) + sparse if sparse else bytes([SAME])


def _decode_difference(mode: int, reader: Reader, words: Words, reference: Words, dtype: str) -> None:
    if mode == PREDICTED:
        if not predicted.supports(dtype):
            raise ValueError(f"the mode predicted does not exist for {dtype}")
        predicted.decode(reader, words, reference, dtype)
    elif mode == SPARSE:
        delta.decode_sparse(reader, words, reference)
    elif mode == DENSE:
        delta.decode_dense(reader, words, reference)
    else:
        for out, base in zip(words, reference, strict=True):
            np.copyto(out, base)


def _byte_planes(rows: np.ndarray) -> bytes:
    return np.moveaxis(rows.view(np.uint8).reshape(*rows.shape, rows.itemsize), 2, 0)[::-1].tobytes()


def _decode_zstd(reader: Reader, words: Words, layout: Layout) -> None:
    channels = words[0].shape[0] * (words[0].shape[2] + words[1].shape[2])
    size, width = channels * words[0].shape[1], layout.word.itemsize
    data = np.frombuffer(expand(reader.rest(), size * width), dtype=np.uint8).reshape(width, channels, -1)
    rows = np.ascontiguousarray(np.moveaxis(data[::-1], 0, 2)).view(layout.word)[:, :, 0]
    delta.spread_rows(rows, words)


def _encode_inline(rows: np.ndarray, layout: Layout) -> list[bytes]:
    """The inline mode's payload, or nothing if no window holds a word."""
    most = min(INLINE_CLASSES, max(1, rows.size // _INLINE_ELEMENTS))
    freqs, escape, base, kinds = classes.learn([classes.window([rows], len(rows), layout)], most)
    if not len(freqs):
        return []
    model = squeeze(b"".join([bytes([len(freqs)]), freqs.astype("<u2").tobytes(), escape.tobytes(), base.tobytes(),
                              kinds.tobytes()]))  # fmt: skip
    body, _ = symbols.encode(rows, Rows.of(base, kinds, layout), Tables(freqs, escape), layout)
    return [b"".join([bytes([INLINE]), struct.pack("<I", len(model)), model, *body])]


def _read_model(reader: Reader, geometry: LayerGeometry, layout: Layout) -> tuple[Rows, Tables]:
    channels = geometry.elements_per_token
    frame = reader.take(reader.u32())
    # The number of tables stands inside the frame, so the frame's declared size tells it before decompression.
    size = declared_size(frame)
    count, odd = divmod(size - 1 - 2 * channels, 513)
    if odd or not 1 <= count <= classes.MAX_CLASSES:
        raise ValueError("inline model has an unexpected size")
    model = Reader(memoryview(expand(frame, size)))
    if model.u8() != count:
        raise ValueError("inline model has a wrong number of tables")
    freqs = model.array(256 * count, "<u2").reshape(count, 256)
    tables = Tables(freqs, model.array(count, "u1"))
    base, kinds = model.array(channels, "u1"), model.array(channels, "u1")
    _check_classes(kinds, count)
    return Rows.of(base, kinds, layout), tables
