"""The codec ``transform``, for the reference decoder (spec/codecs.md).

Imports numpy and the standard library only. Products are made in binary64: values of ordinary tokens agree with other
decoders up to rounding, those of exact tokens bit by bit.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from reference_numbers import (
    BYTES,
    LARGEST,
    KeyValue,
    Reader,
    Unit,
    need,
    rans_decode,
    rope_frequencies,
    rope_rotate,
    to_float,
    to_words,
    unzstd,
)
from reference_profile import ESCAPE, OCTAVE, Group, Profile

CLASS_WIDTH, EXACT, EQUAL, NO_TEMPLATE = 8, 16, 255, 255


class Transform:
    """The codec ``transform``. Its units hold the layers of a group."""

    def __init__(self, config: dict[str, Any], state: dict[str, np.ndarray], identity: dict[str, Any]) -> None:
        given = {name: value for name, value in config.items() if value is not None}
        good = set(config) <= {"step", "target_kl", "target_bits"} and len(given) <= 1
        need(good, "configuration is not of this codec")
        need(all(type(v) in (int, float) and 1e-6 <= v <= 1e6 for v in given.values()), "configuration is out of range")
        self.rope: dict[str, Any] = identity.get("rope") or {}
        self.rotated = identity.get("keys") == "rotated"
        self.profile = Profile(state, identity["layers"])
        classes = np.arange(len(self.profile.tables))
        self.raw = np.clip((self.profile.floor + CLASS_WIDTH * classes) // OCTAVE - 2, 0, 20)

    def decode(self, payload: bytes, units: list[Unit], reference: list[KeyValue] | None) -> list[KeyValue]:
        """Keys and values of each layer, as words."""
        layers = range(units[0].layer, units[0].layer + len(units))
        groups = [group for group in self.profile.groups if group.layers == layers]
        need(groups, "a unit's layers are not a group of the profile")
        group, tokens, reader = groups[0], units[0].tokens, Reader(payload)
        flags, log_step, count = struct.unpack("<BhH", reader.take(5))
        scaled, flags = flags & 4, flags & ~4
        need(flags in (0, 1, 3) and (flags > 0) == (reference is not None), "flags of a unit are wrong")
        need(abs(log_step) <= 40 * OCTAVE, "step is out of range")
        exact = reader.array("<u2", count).astype(int)
        need((np.diff(exact) > 0).all() and (exact < tokens).all(), "exact tokens are out of order")
        classes = self.halves(reader, tokens)
        trust = self.halves(reader, tokens) if flags == 3 else np.zeros(tokens, int)
        classes[exact] = EXACT
        quantized = np.zeros((tokens, len(group.logs)))
        logs = group.logs
        if scaled:
            shifts = self.halves(reader, -(-len(logs) // 256))
            logs = np.minimum.accumulate(logs + 8 * (np.repeat(shifts, 256)[: len(logs)] - 8))
        places, kinds = self.order(logs, log_step, classes, trust)
        values = self.values(reader, kinds)
        if places:
            quantized[tuple(np.array(places).T)] = values
        steps = np.append(2.0 ** ((log_step - 12 * (np.arange(16) - 6)) / OCTAVE), 0.0)
        rows = group.synthesize(quantized * steps[classes][:, None])
        mean = self.profile.mean[group.rows]
        if reference is None:
            rows += mean
        elif flags == 1:
            rows += self.rows_of(units, reference)[0]
        else:
            found, good = self.rows_of(units, reference)
            share = np.where(good, 1 - 2.0 ** (-2 * trust / 3), 0.0)
            rows += mean + share[:, None] * (found.astype(np.float64) - mean)
        words = self.words(units, rows)
        if count:
            self.exact(reader, units, group, exact, words)
        reader.end()
        return words

    @staticmethod
    def halves(reader: Reader, tokens: int) -> np.ndarray:
        """Numbers of 4 bits each."""
        both = reader.array("u1", (tokens + 1) // 2)
        return np.stack([both % 16, both // 16], axis=1).reshape(-1)[:tokens].astype(int)

    def order(
        self, logs: np.ndarray, log_step: int, classes: np.ndarray, trust: np.ndarray
    ) -> tuple[list[tuple[int, int]], np.ndarray]:
        """Token and component of each coded coefficient, in the order of the stream, and their classes."""
        places: list[tuple[int, int]] = []
        kinds: list[int] = []
        tables = len(self.profile.tables)
        pairs = sorted({(int(p), int(j)) for p, j in zip(trust, classes, strict=True) if j != EXACT})
        found = {}
        for prediction, token_class in pairs:
            apart = logs - 8 * prediction - (log_step - 12 * (token_class - 6)) - self.profile.floor
            found[prediction, token_class] = np.where(apart < 0, -1, np.minimum(apart // CLASS_WIDTH, tables - 1))
        for kind in range(tables):
            for pair in pairs:
                mine = np.flatnonzero(found[pair] == kind).tolist()
                for token in np.flatnonzero((trust == pair[0]) & (classes == pair[1])).tolist():
                    places += [(token, component) for component in mine]
                    kinds += [kind] * len(mine)
        return places, np.array(kinds, int)

    def values(self, reader: Reader, kinds: np.ndarray) -> np.ndarray:
        """A value stream, whose values have these classes, class after class."""
        length, escapes, low = reader.u32(), reader.u32(), reader.u32()
        need(low == (int(self.raw[kinds].sum()) + 7) // 8, "length of the low bits is wrong")
        need(escapes <= len(kinds), "too many escapes")
        stream, rest = reader.take(length), reader.array("<i4", escapes).tolist()
        bits = np.unpackbits(reader.array("u1", low), bitorder="little")
        counts = np.bincount(kinds, minlength=len(self.raw))
        rows = -(-counts // 32)
        symbols = rans_decode(stream, self.profile.tables, np.repeat(np.arange(len(rows)), rows), 32)
        starts = 32 * (np.cumsum(rows) - rows)
        symbols = np.concatenate(
            [np.zeros(0, np.uint8), *(symbols.reshape(-1)[s : s + n] for s, n in zip(starts, counts, strict=True))]
        )
        out, at, used = np.zeros(len(kinds), np.int64), 0, 0
        for index, (symbol, kind) in enumerate(zip(symbols.tolist(), kinds.tolist(), strict=True)):
            shift = int(self.raw[kind])
            if symbol == ESCAPE:
                need(used < len(rest), "escapes are missing")
                out[index], used = rest[used], used + 1
            else:
                high = (symbol + 1) // 2 if symbol % 2 else -(symbol // 2)
                out[index] = high * 2**shift + sum(int(bits[at + b]) << b for b in range(shift))
            at += shift
        need(used == len(rest), "escapes are left")
        return out

    def frequencies(self, unit: Unit) -> np.ndarray | None:
        """The rotary embedding of a layer's keys, if they have one that is known."""
        return rope_frequencies(self.rope, unit.k_dim) if self.rotated else None

    def rows_of(self, units: list[Unit], arrays: list[KeyValue]) -> tuple[np.ndarray, np.ndarray]:
        """Un-rotated rows ``[T, rows]`` of a reference, and which tokens have only values that are not too large.

        The rows of other tokens are 0.
        """
        parts = []
        for unit, words in zip(units, arrays, strict=True):
            keys, values = (to_float(part, unit.dtype) for part in words)
            found = self.frequencies(unit)
            if found is not None:
                with np.errstate(invalid="ignore"):
                    keys = rope_rotate(keys, found, self.rope.get("style", "half"), unit.position, True)
            parts += [part.transpose(1, 0, 2).reshape(unit.tokens, -1) for part in (keys, values)]
        rows = np.concatenate(parts, axis=1)
        good = (np.abs(rows) < np.float32(1e15)).all(axis=1)
        rows[~good] = 0
        return rows, good

    def words(self, units: list[Unit], rows: np.ndarray) -> list[KeyValue]:
        """Rotate, clamp and convert rows to each layer's keys and values."""
        out, at = [], 0
        with np.errstate(over="ignore", invalid="ignore"):
            rows = np.nan_to_num(rows).astype(np.float32)
            for unit in units:
                pair: list[np.ndarray] = []
                for shape in unit.shapes:
                    width = shape[0] * shape[2]
                    part = rows[:, at : at + width].reshape(unit.tokens, shape[0], shape[2]).transpose(1, 0, 2)
                    found = self.frequencies(unit) if not pair else None
                    if found is not None:
                        part = rope_rotate(part, found, self.rope.get("style", "half"), unit.position, False)
                    limit = np.float32(LARGEST[unit.dtype])
                    pair.append(to_words(np.clip(np.nan_to_num(part), -limit, limit), unit.dtype))
                    at += width
                out.append((pair[0], pair[1]))
        return out

    def exact(self, reader: Reader, units: list[Unit], group: Group, exact: np.ndarray, words: list[KeyValue]) -> None:
        """Put exact tokens in the place of what is in `words`."""
        runs = [shape[0] * shape[2] for unit in units for shape in unit.shapes]
        width = max(BYTES[unit.dtype] for unit in units)
        bits = np.zeros((len(exact), sum(runs)), f"<u{width}")
        chosen = reader.array("u1", len(exact))
        derived, plain = np.flatnonzero(chosen != NO_TEMPLATE), np.flatnonzero(chosen == NO_TEMPLATE)
        if len(derived):
            need(all(unit.dtype == "BF16" for unit in units), "templates are of BF16 alone")
            templates, positions = self.profile.templates, units[0].position + exact[derived]
            good = (chosen[derived] < templates.shape[0]).all() and (positions < templates.shape[1]).all()
            need(good, "a template is not there")
            kinds = reader.array("u1", len(derived), len(runs)).astype(int)
            need(((kinds == EQUAL) | (kinds < len(self.raw))).all(), "a class is not there")
            of_row = np.repeat(kinds, runs, axis=1).reshape(-1)
            places = np.argsort(of_row, kind="stable")[: int((of_row != EQUAL).sum())]
            deltas = np.zeros(of_row.size, np.int64)
            deltas[places] = self.values(reader, of_row[places])
            base = templates[chosen[derived], positions, group.rows].astype(np.int64)
            ordinals = np.where(base >= 0x8000, 0xFFFF - base, base + 0x8000) + deltas.reshape(base.shape)
            ordinals %= 1 << 16
            bits[derived] = np.where(ordinals >= 0x8000, ordinals - 0x8000, 0xFFFF - ordinals)
        if len(plain):
            data = unzstd(reader.take(reader.u32()), len(plain) * sum(runs) * width)
            planes = np.frombuffer(data, np.uint8).reshape(width, len(plain), sum(runs))
            bits[plain] = sum(planes[i].astype(np.uint32) << np.uint32(8 * i) for i in range(width))
        at = 0
        for unit, pair in zip(units, words, strict=True):
            for array, shape in zip(pair, unit.shapes, strict=True):
                part = bits[:, at : at + shape[0] * shape[2]].reshape(len(exact), shape[0], shape[2])
                array[:, exact] = part.transpose(1, 0, 2).astype(array.dtype)
                at += shape[0] * shape[2]
