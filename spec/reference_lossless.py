"""Section "lossless" of spec/codecs.md, for the reference decoder: numpy, zstandard and the standard library only.

Keys and values are words, unsigned integers ``[H, T, D]``, of their dtype throughout.
"""

from __future__ import annotations

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
        if mode in (4, 5, 6):
            need(reference is not None, "payload is a difference, but there is no reference")
            assert reference is not None
            out = self.difference(mode, reader, unit, reference)
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
