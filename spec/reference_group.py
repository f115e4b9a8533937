"""Section "group" of spec/codecs.md, for the reference decoder: numpy, zstandard and the standard library only.

Keys and values are words, unsigned integers ``[H, T, D]``, of their dtype throughout.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from reference_numbers import (
    BYTES,
    LARGEST,
    KeyValue,
    Reader,
    Unit,
    check_frequencies,
    need,
    only_arrays,
    rans_decode,
    rope_frequencies,
    rope_rotate,
    state_array,
    to_float,
    to_words,
)


class Group:
    """Section "group"."""

    POWERS = np.array([2.0 ** (i / 8) for i in range(8)]).astype(np.float32)

    def __init__(self, config: dict[str, Any], state: dict[str, np.ndarray], identity: dict[str, Any]) -> None:
        need(set(config) == {"bits"} and type(config["bits"]) is int and 1 <= config["bits"] <= 4,
             "codec 'group' does not take this configuration")  # fmt: skip
        only_arrays(state, {"means", "shrink", "freqs", "steps", "norms"})
        layers = identity["layers"]
        counts = [layer["heads"] * (layer["k_dim"] + layer["v_dim"]) for layer in layers]
        self.first = np.concatenate([[0], np.cumsum(counts)]).tolist()
        self.means = to_float(state_array(state, "means", "u2", self.first[-1]), "BF16")
        self.shrink = state_array(state, "shrink", "f4", 54)
        self.freqs = state_array(state, "freqs", "u2", 56, 256)
        codes = state_array(state, "steps", "i2", 2 * sum(layer["heads"] for layer in layers))
        state_array(state, "norms", "f4", len(layers))
        check_frequencies(self.freqs)
        need((self.freqs[:54, 0] > 0).all(), "a table cannot code an escape")
        need(np.isfinite(self.shrink).all(), "a shrink is not finite")
        need(((codes >= -928) & (codes <= 960)).all(), "a step code is out of range")
        self.rope = identity.get("rope", {}) if identity.get("keys") == "rotated" else {}

    def decode(self, payload: bytes, unit: Unit, reference: KeyValue | None) -> KeyValue:
        """Decode one unit."""
        reader, heads, dims = Reader(payload), unit.heads, (unit.k_dim, unit.v_dim)
        flags, reserved = reader.u8(), reader.take(3)
        need(flags in (0, 1, 2, 5) and reserved == bytes(3), "group payload has unknown flags")
        run_bytes, escape_count, length = reader.u32(), reader.u32(), reader.u32()
        codes = reader.array("<i2", 2 * heads).astype(np.int64)
        kinds = reader.array("u1", 2 * heads).astype(np.int64)
        need(((codes >= -928) & (codes <= 960)).all() and (kinds <= 26).all(), "a step or table is out of range")
        runs = reader.array("u1", run_bytes)
        need((runs & 15).astype(np.int64).sum() + run_bytes == unit.tokens, "token classes do not cover the unit")
        token_class = np.repeat(runs >> 4, (runs & 15).astype(np.int64) + 1).astype(np.int64)
        need(((token_class <= 10) | (token_class >= 14)).all(), "a token class does not exist")
        need(flags & 1 or not (token_class == 14).any(), "a token is a copy, but the payload has no reference")
        need(not flags & 1 or reference is not None, "payload has a reference, but the unit has none")
        shifts = np.zeros(unit.tokens, np.int64)
        if flags & 4:
            packed = reader.array("u1", (unit.tokens + 1) // 2).astype(np.int64)
            shifts = np.stack([packed & 15, packed >> 4], axis=1).reshape(-1)[: unit.tokens] - 8
        coded, exact = np.flatnonzero(token_class <= 10), np.flatnonzero(token_class == 15)
        frequencies = rope_frequencies(self.rope, unit.k_dim)
        centres = self.predictions(reader, unit, codes, flags, reference, frequencies)
        need(escape_count % 2 == 0, "number of escapes is odd")
        escapes = reader.array("<i2", escape_count).astype(np.int64)
        table = np.clip(kinds[:, None] + (token_class + shifts)[coded], 0, 26)
        low_bits = np.maximum(0, (table - 8) >> 1)
        planes = [
            [reader.array("u1", int(r), (2 * ((dims[i >= heads] + 1) // 2) + 7) // 8) for r in low_bits[i]]
            for i in range(2 * heads)
        ]
        rest = [reader.array("u1", heads, len(exact), dim, BYTES[unit.dtype] - 1) for dim in dims]
        rows, tops = self.streams(reader, length, unit, table, len(exact))
        used, out = 0, []
        for part in (0, 1):
            values = np.zeros((heads, unit.tokens, dims[part]), np.float32)
            for head in range(heads):
                i = part * heads + head
                for n, token in enumerate(coded):
                    code = int(codes[i] - 4 * token_class[token])
                    step = self.step(code)
                    centre = centres[part][head, token]
                    line, used = self.line(
                        rows[i][n], planes[i][n], int(table[i, n]), part, step, centre, escapes, used
                    )
                    values[head, token] = line
            if part == 0 and frequencies is not None:
                values = rope_rotate(values, frequencies, self.rope.get("style", "half"), unit.position, back=False)
            if unit.dtype not in ("F32", "BF16"):
                values = np.clip(values, np.float32(-LARGEST[unit.dtype]), np.float32(LARGEST[unit.dtype]))
            words = to_words(values, unit.dtype).astype(unit.word)
            if reference is not None:
                copied = token_class == 14
                words[:, copied] = reference[part][:, copied]
            pieces = np.concatenate([rest[part], tops[part][..., None]], axis=3)
            words[:, exact] = np.ascontiguousarray(pieces).view(unit.word)[..., 0]
            out.append(words)
        need(used == escape_count, "escapes are damaged")
        return out[0], out[1]

    def step(self, code: int) -> np.float32:
        """The step of a code."""
        return np.float32(self.POWERS[code % 8] * np.float32(2.0 ** (code // 8)))

    def predictions(self, reader: Reader, unit: Unit, codes: np.ndarray, flags: int, reference: KeyValue | None,
                    frequencies: np.ndarray | None) -> list[np.ndarray]:  # fmt: skip
        """Predicted values of keys and values, ``[H, T, D]``."""
        out, at = [], self.first[unit.layer]
        for part, dim in enumerate((unit.k_dim, unit.v_dim)):
            means = self.means[at : at + unit.heads * dim].reshape(unit.heads, 1, dim)
            at += unit.heads * dim
            if flags & 2:
                steps = [np.float32(0.25) * self.step(int(code)) for code in codes[part * unit.heads :][: unit.heads]]
                own = reader.array("<i2", unit.heads, 1, dim).astype(np.float32)
                means = own * np.array(steps, np.float32)[:, None, None]
            centre = np.broadcast_to(means, (unit.heads, unit.tokens, dim))
            if flags & 1 and reference is not None:
                centre = to_float(np.ascontiguousarray(reference[part]), unit.dtype)
                if part == 0 and frequencies is not None:
                    style = self.rope.get("style", "half")
                    centre = rope_rotate(centre, frequencies, style, unit.position, back=True)
            out.append(centre)
        return out

    def streams(self, reader: Reader, length: int, unit: Unit, table: np.ndarray, exact: int
                ) -> tuple[list[np.ndarray], list[np.ndarray]]:  # fmt: skip
        """Symbols of coded rows, per head ``[coded, Q]``, and highest bytes of exact words, ``[H, exact, D]``."""
        heads, pairs = unit.heads, [(dim + 1) // 2 for dim in (unit.k_dim, unit.v_dim)]
        coded = table.shape[1]
        groups = [[0, 1]] if pairs[0] == pairs[1] else [[0], [1]]
        rows: list[np.ndarray] = []
        tops: list[np.ndarray] = []
        for number, parts in enumerate(groups):
            stream = reader.take(length) if number == 0 else reader.rest()
            own = [table[p * heads : (p + 1) * heads].reshape(-1) + 27 * p for p in parts]
            own += [np.full(2 * heads * exact, 54 + p) for p in parts]
            columns = pairs[parts[0]]
            found = rans_decode(stream, self.freqs, np.concatenate(own), columns)
            cut = len(parts) * heads * coded
            rows += list(found[:cut].reshape(len(parts) * heads, coded, columns))
            joined = found[cut:].reshape(len(parts), heads, exact, 2 * columns)
            for place, part in enumerate(parts):
                dim = (unit.k_dim, unit.v_dim)[part]
                tops.append(joined[place][..., :dim])
        reader.end()
        return rows, tops

    def line(self, symbols: np.ndarray, planes: np.ndarray, table: int, part: int, step: np.float32,
             centre: np.ndarray, escapes: np.ndarray, used: int) -> tuple[np.ndarray, int]:  # fmt: skip
        """One head of one token, and the number of escapes used so far."""
        digits = np.concatenate([symbols & 15, symbols >> 4]).astype(np.int64)
        if len(planes):
            low = np.zeros(len(digits), np.int64)
            for p, plane in enumerate(planes):
                low |= np.unpackbits(plane, bitorder="little")[: len(digits)].astype(np.int64) << p
            level = (((digits - 8) << len(planes)) + low - (1 << len(planes) >> 1)).astype(np.float32)
        else:
            f = (digits - 8).astype(np.float32)
            level = f - self.shrink[27 * part + table] * np.clip(f, np.float32(-1), np.float32(1))
        pairs = np.flatnonzero(symbols == 0)
        need(used + 2 * len(pairs) <= len(escapes), "escapes are damaged")
        own = escapes[used : used + 2 * len(pairs)].reshape(-1, 2).astype(np.float32)
        level[pairs], level[len(symbols) + pairs] = own[:, 0], own[:, 1]
        return level[: len(centre)] * step + centre, used + 2 * len(pairs)
