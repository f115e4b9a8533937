"""Section "lossless" of spec/codecs.md, for the reference decoder: numpy, zstandard and the standard library only.

Keys and values are words, unsigned integers ``[H, T, D]``, of their dtype throughout.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any, ClassVar

import numpy as np
from reference_numbers import (
    BYTES,
    DamagedError,
    KeyValue,
    Reader,
    Unit,
    check_frequencies,
    need,
    only_arrays,
    rans_decode,
    state_array,
    to_float,
    to_words,
    unzstd,
)


class Lossless:
    """Section "lossless"."""

    #: dtype: low bits, mantissa bits in the top, planes of (shift, width).
    LAYOUTS: ClassVar = {
        "BF16": (4, 3, [(0, 4)]), "F16": (8, 2, [(0, 8)]), "F32": (20, 3, [(16, 4), (8, 8), (0, 8)]),
        "F8_E4M3": (0, 3, []), "F8_E5M2": (0, 2, []),
    }  # fmt: skip

    def __init__(self, config: dict[str, Any], state: dict[str, np.ndarray], identity: dict[str, Any]) -> None:
        need(config == {}, "codec 'lossless' takes no configuration")
        only_arrays(state, {"freqs", "escape", "base", "class"})
        counts = [layer["heads"] * (layer["k_dim"] + layer["v_dim"]) for layer in identity["layers"]]
        self.first = np.concatenate([[0], np.cumsum(counts)]).tolist()
        count = len(state["escape"])
        self.freqs = state_array(state, "freqs", "u2", count, 256)
        self.escape = state_array(state, "escape", "u1", count)
        self.base = state_array(state, "base", "u1", self.first[-1])
        self.kind = state_array(state, "class", "u1", self.first[-1])
        self.check(self.freqs, self.escape, self.kind)

    @staticmethod
    def check(freqs: np.ndarray, escape: np.ndarray, kind: np.ndarray) -> None:
        """Rules that hold for states and models."""
        need(len(freqs) <= 128, "too many tables")
        check_frequencies(freqs)
        need((freqs[np.arange(len(freqs)), escape] > 0).all(), "a table cannot code its escape symbol")
        need((kind & 127).max(initial=0) < max(len(freqs), 1), "a channel names a table that does not exist")

    def decode(self, payload: bytes, unit: Unit, reference: KeyValue | None) -> KeyValue:
        """Decode one unit."""
        reader = Reader(payload)
        mode = reader.u8()
        if mode in (4, 5, 6, 7):
            need(reference is not None, "payload is a difference, but there is no reference")
            assert reference is not None
            out = predicted(reader, unit, reference) if mode == 7 else self.difference(mode, reader, unit, reference)
        elif mode == 0:
            keys, values = unit.shapes
            out = reader.array(unit.word, *keys), reader.array(unit.word, *values)
        elif mode == 1:
            width = BYTES[unit.dtype]
            planes = np.frombuffer(unzstd(reader.rest(), width * unit.channels * unit.tokens), np.uint8)
            planes = planes.reshape(width, unit.channels, unit.tokens)[::-1]
            out = unit.from_rows(np.ascontiguousarray(np.moveaxis(planes, 0, 2)).view(unit.word)[:, :, 0])
        elif mode == 2:
            need(len(self.freqs), "payload uses the state's tables, but there are none")
            part = slice(self.first[unit.layer], self.first[unit.layer + 1])
            out = self.symbols(reader, unit, self.freqs, self.escape, self.base[part], self.kind[part])
        elif mode == 3:
            out = self.symbols(reader, unit, *self.model(reader.take(reader.u32()), unit))
        else:
            raise DamagedError(f"lossless payload has the unknown mode {mode}")
        reader.end()
        return out

    def model(self, frame: bytes, unit: Unit) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The tables and channels inside a payload."""
        reader = Reader(unzstd(frame, None, 1 + 128 * 513 + 2 * unit.channels))
        count = reader.u8()
        need(1 <= count <= 128, "model has a wrong number of tables")
        freqs, escape = reader.array("<u2", count, 256), reader.array("u1", count)
        base, kind = reader.array("u1", unit.channels), reader.array("u1", unit.channels)
        reader.end()
        self.check(freqs, escape, kind)
        return freqs, escape, base, kind

    def symbols(self, reader: Reader, unit: Unit, freqs: np.ndarray, escape: np.ndarray, base: np.ndarray,
                kind: np.ndarray) -> KeyValue:  # fmt: skip
        """A symbol body."""
        low, mantissa, planes = self.LAYOUTS[unit.dtype]
        top_bits = 8 * BYTES[unit.dtype] - low
        count, length = reader.u32(), reader.u32()
        need(count <= unit.channels * unit.tokens, "number of escapes is out of range")
        escapes = reader.array("<u2", count).astype(np.int64)
        need((escapes < 1 << top_bits).all(), "an escape is out of range")
        table = (kind & 127).astype(np.int64)
        found = rans_decode(reader.take(length), freqs, table, unit.tokens).astype(np.int64)
        sign = (found >> 7) ^ (kind >> 7).astype(np.int64)[:, None]
        magnitude = ((found & 127) + (base.astype(np.int64) << mantissa)[:, None]) % (1 << (top_bits - 1))
        tops = magnitude | sign << (top_bits - 1)
        escaped = found == escape[table].astype(np.int64)[:, None]
        need(escaped.sum() == count, "escapes are damaged")
        tops[escaped] = escapes
        rows = tops << low
        for shift, width in planes:
            columns = unit.tokens if width == 8 else (unit.tokens + 1) // 2
            plane = self.plane(reader, unit.channels, columns).astype(np.int64)
            if width == 4:
                plane = np.concatenate([plane & 15, plane >> 4], axis=1)[:, : unit.tokens]
            rows |= plane << shift
        return unit.from_rows(rows.astype(unit.word))

    @staticmethod
    def plane(reader: Reader, rows: int, columns: int) -> np.ndarray:
        """A plane of low bits."""
        kind = reader.u8()
        need(kind <= 1, "plane of low bits is of an unknown kind")
        if kind == 0:
            return reader.array("u1", rows, columns)
        return np.frombuffer(unzstd(reader.take(reader.u32()), rows * columns), np.uint8).reshape(rows, columns)

    def difference(self, mode: int, reader: Reader, unit: Unit, reference: KeyValue) -> KeyValue:
        """Modes 4 to 6."""
        if mode == 4:
            return reference
        bits = 8 * BYTES[unit.dtype]
        if mode == 5:
            flat = np.concatenate([part.reshape(-1) for part in reference]).astype(np.int64)
            folded = self.sparse(reader, len(flat), bits)
        else:
            flat = unit.to_rows(reference).astype(np.int64)
            folded = self.dense(reader, unit, flat.shape)
        sign = 1 << (bits - 1)
        ordered = np.where(flat & sign, ~flat & (2 * sign - 1), flat | sign)
        ordered = (ordered + np.where(folded & 1, -(folded + 1 >> 1), folded >> 1)) % (2 * sign)
        words = np.where(ordered & sign, ordered ^ sign, ~ordered & (2 * sign - 1)).astype(unit.word)
        if mode == 6:
            return unit.from_rows(words)
        keys, values = unit.shapes
        return words[: math.prod(keys)].reshape(keys), words[math.prod(keys) :].reshape(values)

    @staticmethod
    def sparse(reader: Reader, elements: int, bits: int) -> np.ndarray:
        """Folded differences of all elements, mostly 0."""

        def leb128() -> int:
            value = 0
            for shift in range(0, 42, 7):
                byte = reader.u8()
                value |= (byte & 127) << shift
                if byte < 128:
                    return value
            raise DamagedError("differences are damaged")

        out = np.zeros(elements, np.int64)
        count, at = reader.u32(), 0
        need(1 <= count <= elements // 64, "number of differences is out of range")
        for _ in range(count):
            code = leb128()
            at += code >> 2
            z = (code & 3) + 1
            z += leb128() if z == 4 else 0
            need(at < elements and z < 1 << bits, "differences are damaged")
            out[at] = z
            at += 1
        return out

    @staticmethod
    def dense(reader: Reader, unit: Unit, shape: tuple[int, ...]) -> np.ndarray:
        """Folded differences in channel rows."""
        out = np.zeros(shape, np.int64)
        value_row = (np.arange(shape[0]) >= unit.heads * unit.k_dim).astype(np.int64)
        for byte in range(BYTES[unit.dtype]):
            kind = reader.u8()
            need(kind <= 2, "difference plane is of an unknown kind")
            if kind == 1:
                out |= reader.array("u1", *shape).astype(np.int64) << 8 * byte
            elif kind == 2:
                tables = np.frombuffer(unzstd(reader.take(reader.u32()), 1024), "<u2").reshape(2, 256)
                plane = rans_decode(reader.take(reader.u32()), tables, value_row, shape[1])
                out |= plane.astype(np.int64) << 8 * byte
        return out


# --- mode 7 --------------------------------------------------------------------------------------------------------

#: Mantissa bits and exponent bias of the dtypes that have the mode.
MANTISSA = {"BF16": (7, 127), "F16": (10, 15)}


def predicted(reader: Reader, unit: Unit, reference: KeyValue) -> KeyValue:
    """Mode 7."""
    need(unit.dtype in MANTISSA, f"the mode predicted does not exist for {unit.dtype}")
    mantissa, bias = MANTISSA[unit.dtype]
    count, length, low_length, model_length = (reader.u32() for _ in range(4))
    need(count <= unit.channels * unit.tokens, "number of escapes is out of range")
    model = Reader(unzstd(reader.take(model_length), 2 + 2 * unit.channels + unit.tokens))
    base = int(model.array("<i2", 1)[0])
    need(-1024 <= base <= 1024, "scale of the differences is out of range")
    row_scale = base + model.array("u1", unit.channels, 1).astype(np.int64)
    offset = model.array("i1", unit.channels, 1).astype(np.int64)
    scale = row_scale + model.array("i1", unit.tokens).astype(np.int64)
    escapes = reader.array("<u2", count).astype(np.int64)
    stream, low = reader.take(length), reader.take(low_length)

    flat = unit.to_rows(reference)
    step = np.ldexp(offset.astype(np.float64), row_scale // 2 - 2 - bias).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        moved = to_words(to_float(flat, unit.dtype) + step, unit.dtype)
    top = 0x8000 - (1 << mantissa)
    prediction = np.where((offset == 0) | (flat & top == top), flat, moved).astype(np.int64)

    magnitude = prediction & 0x7FFF
    octaves = scale - 2 * np.maximum(magnitude >> mantissa, 1)
    near, least = octaves < -4, -2 * mantissa - 8
    clipped = np.maximum(octaves, least)
    ratio = np.clip(4 * (scale // 2) - (magnitude >> (mantissa - 2)), -11, 12)
    table = np.where(near, clipped - least, 2 * mantissa + 4 + 24 * (scale % 2) + ratio + 11)
    width = np.where(near, np.maximum(0, clipped // 2 + mantissa - 4), mantissa - 3)
    need(low_length == (int(width.sum()) + 7) // 8, "low bits do not fit the unit")
    bits = np.unpackbits(np.frombuffer(low, np.uint8), bitorder="little").astype(np.int64)
    place = (np.cumsum(width) - width.ravel()).reshape(width.shape)
    rest = np.zeros(width.shape, np.int64)
    for bit in range(mantissa):
        held = width > bit
        rest[held] |= bits[place[held] + bit] << bit

    symbol = rans_decode(stream, predicted_tables(mantissa), table, unit.tokens).astype(np.int64)
    ordered = np.where(prediction & 0x8000, ~prediction & 0xFFFF, prediction | 0x8000)
    distance = (symbol - 128 << np.where(near, width, 0)) + rest
    ordered = (ordered + np.where(prediction & 0x8000, -distance, distance)) & 0xFFFF
    found = np.where(ordered & 0x8000, ordered ^ 0x8000, ~ordered & 0xFFFF)
    window = ((symbol & 127) + 8 * (scale // 2 - 12)) % (1 << (18 - mantissa))
    far = window << (mantissa - 3) | rest | ((prediction ^ symbol << 8) & 0x8000)
    words = np.where(near, found, far)
    need((symbol == 0).sum() == count, "escapes are damaged")
    words[symbol == 0] = escapes
    return unit.from_rows(words.astype(unit.word))


@functools.cache
def predicted_tables(mantissa: int) -> np.ndarray:
    """The fixed tables, U16 ``[2 M + 52, 256]``."""

    def scale(half_octaves: int) -> float:
        return math.ldexp(1.4142135623730951 if half_octaves % 2 else 1.0, half_octaves // 2)

    def value(places: int, bits: int) -> float:
        return math.ldexp(1 + places % (1 << bits) / (1 << bits), places >> bits)

    weights = []
    for octaves in range(-2 * mantissa - 8, -4):
        wide, sums = max(0, octaves // 2 + mantissa - 4), [0.0] * 255
        for j in range(8):
            middle = (2 * j + 1) << (mantissa - 4)
            places = [middle + ((a - 128) << wide) for a in range(1, 257)]
            edges = [(value(x, mantissa) + value(x - 1, mantissa)) / 2 - value(middle, mantissa) for x in places]
            at = [student(edge / scale(octaves)) for edge in edges]
            sums = [total + (at[i + 1] - at[i]) for i, total in enumerate(sums)]
        weights.append(sums)
    for odd in range(2):
        for ratio in range(-11, 13):
            middle_value = math.ldexp(1 + (2 * (-ratio % 4) + 1) / 8, -ratio // 4)
            edges = [value(i - 96, 3) for i in range(129)]
            same = [student((edge - middle_value) / scale(odd)) for edge in edges]
            other = [student((edge + middle_value) / scale(odd)) for edge in edges]
            weights.append([at[i + 1] - at[i] for at in (same, other) for i in range(128)][1:])
    return np.array([frequencies(row) for row in weights], np.uint16)


def student(z: float) -> float:
    """Distribution function of Student's t with 8 degrees of freedom."""
    r = 8 + z * z
    c = 8 / r
    u = c * 0.5
    v = u * c * 0.75
    w = v * c * (5 / 6)
    return 0.5 + 0.5 * (z / math.sqrt(r)) * (1 + u + v + w)


def frequencies(weights: list[float]) -> list[int]:
    """Frequencies of symbols 0 to 255 from the weights of 1 to 255."""
    running = list(itertools.accumulate(weights))
    ends = [0, *(math.floor(total * (4093 / running[-1]) + 0.5) for total in running)]
    return [3, *(b - a for a, b in itertools.pairwise(ends))]
