"""The symbol body of the lossless codec: rANS symbols, escapes and planes of low bits (`pltpack.codec.lossless`)."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from pltpack.codec import planes, rans
from pltpack.codec.classes import Layout, Rows, Tables
from pltpack.codec.payload import Reader, expand, squeeze

Part = bytes | memoryview

_STORED, _FRAME = 0, 1
#: Bytes looked at to tell whether a plane is worth a try with zstd.
PROBE = 2048


def encode(rows: np.ndarray, channels: Rows, tables: Tables, layout: Layout) -> tuple[list[Part], bool]:
    """The parts of the symbol body of words ``[R, N]``, and whether they look as the tables' own data do."""
    symbols = np.empty(rows.shape, dtype=np.uint8)
    far = np.empty(len(rows), dtype=np.uint8)
    to_symbols, collect = planes.split(layout.word_bits, layout.low)
    to_symbols(rows, channels.start, channels.mirror, channels.table, tables.escape, symbols, far)
    stream, marks = rans.encode_with(symbols, channels.table, tables.coding)
    marks |= far
    escapes = np.empty(int(np.count_nonzero(marks)) * rows.shape[1], dtype=np.uint16)
    count = collect(rows, channels.start, channels.table, tables.plain, symbols, marks, escapes)
    length = sum(part.nbytes for part in stream)
    parts: list[Part] = [struct.pack("<II", count, length), escapes[:count].astype("<u2", copy=False).data, *stream]
    usual = 64 * count <= rows.size and 16 * length <= 15 * rows.size + 16 * rans.HEADER_BYTES
    stored = squeezed = 0
    for shift, width in layout.planes:
        plane = np.empty(_shape(rows.shape, width), dtype=np.uint8)
        _kernels(shift, width)[0](rows, plane)
        frame = squeeze(plane.data) if _structured(plane.reshape(-1)) else b""
        if frame and len(frame) + 4 < plane.size:
            parts += [bytes([_FRAME]), struct.pack("<I", len(frame)), frame]
            stored, squeezed = stored + plane.size, squeezed + len(frame)
        else:
            parts += [bytes([_STORED]), plane.data]
            stored, squeezed = stored + plane.size, squeezed + plane.size
    # Low bits that nearly vanish speak of constant or repeated data, whose symbols repeat as well.
    return parts, usual and 8 * squeezed >= stored


def decode(reader: Reader, tokens: int, channels: Rows, tables: Tables, layout: Layout) -> np.ndarray:
    """Words ``[R, tokens]`` from a symbol body.

    Raises
    ------
    ValueError
        If the body is malformed.
    """
    shape = (len(channels.table), tokens)
    count, length = reader.u32(), reader.u32()
    if count > shape[0] * shape[1]:
        raise ValueError("number of escapes is out of range")
    escapes = reader.array(count, "<u2").astype(np.uint16)
    symbols = np.empty(shape, dtype=np.uint8)
    rans.decode(reader.take(length), channels.table, tables.slots, symbols)
    rows = np.zeros(shape, dtype=layout.word)
    for shift, width in layout.planes:
        _kernels(shift, width)[1](_read_plane(reader, _shape(shape, width)), rows)
    used = planes.merge(layout.word_bits, layout.low)(
        symbols, channels.start, channels.mirror, channels.table, tables.escape, escapes, rows)  # fmt: skip
    if used != count:
        raise ValueError("escapes are damaged")
    return rows


def _read_plane(reader: Reader, shape: tuple[int, int]) -> np.ndarray:
    kind, size = reader.u8(), shape[0] * shape[1]
    if kind == _STORED:
        return reader.array(size, "u1").reshape(shape)
    if kind == _FRAME:
        return np.frombuffer(expand(reader.take(reader.u32()), size), dtype=np.uint8).reshape(shape)
    raise ValueError("plane of low bits is of an unknown kind")


def _structured(plane: np.ndarray) -> bool:
    """Whether bytes sampled from a plane repeat clearly more often than random ones."""
    size, pairs = planes.equal_pairs(plane, max(1, plane.size // PROBE))
    return bool(256 * pairs > (5 * size * (size - 1)) // 4)


def _shape(shape: tuple[int, ...], width: int) -> tuple[int, int]:
    return shape[0], shape[1] if width == 8 else -(-shape[1] // 2)


def _kernels(shift: int, width: int) -> tuple[Any, Any]:
    return planes.bytes_plane(shift) if width == 8 else planes.nibbles_plane(shift)
