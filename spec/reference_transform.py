"""The codec ``transform`` and its profiles, for the reference decoder (spec/codecs.md, spec/profile.md).

Imports numpy, zstandard and the standard library only. Products are made in binary64: values of ordinary tokens agree
with other decoders up to rounding, those of exact tokens bit by bit.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from reference_numbers import (
    BYTES,
    LARGEST,
    DamagedError,
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
    unzstd,
)

OCTAVE, CLASS_WIDTH, ESCAPE, EXACT, EQUAL, NO_TEMPLATE = 24, 8, 63, 16, 255, 255
KINDS = {"U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4", "F16": "<f2", "F32": "<f4"}
NAMES = {
    "about", "mean", "whiten", "basis.rank", "basis", "basis.scale", "basis.log", "local", "local.scale", "local.log",
    "tables", "importance.mean", "importance.scale", "importance.linear", "importance.hidden", "importance.bias",
    "importance.out", "importance.center", "sink.tokens", "sink.bits",
}  # fmt: skip

# --- profiles ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Group:
    """A layer group: its layers, its rows, and its components.

    Attributes
    ----------
    layers : range
    rows : slice
    logs : ndarray
        Scales, falling.
    order : ndarray
        Number of each of these components among the shared ones and then the own ones.
    shared : ndarray
        Un-whitened rows that each shared component adds, ``[rank, rows]``.
    own : list of ndarray
        The same of each layer's own components, ``[rows of the layer, rows of the layer]``.
    """

    layers: range
    rows: slice
    logs: np.ndarray
    order: np.ndarray
    shared: np.ndarray
    own: list[np.ndarray]

    def synthesize(self, coefficients: np.ndarray) -> np.ndarray:
        """Rows without their center, ``[T, rows]``, of coefficients ``[T, N]``."""
        plain = np.zeros_like(coefficients)
        plain[:, self.order] = coefficients
        at = len(self.shared)
        out: np.ndarray = plain[:, :at] @ self.shared
        for basis in self.own:
            first = at - len(self.shared)
            out[:, first : first + len(basis)] += plain[:, at : at + len(basis)] @ basis
            at += len(basis)
        return out


class Profile:
    """The arrays of a profile, checked, and what is made of them."""

    def __init__(self, arrays: dict[str, np.ndarray], layers: Sequence[dict[str, Any]]) -> None:
        only_arrays(arrays, NAMES)
        about = self.read_about(arrays["about"])
        self.floor, size = about["floor"], about["layer_group"]
        widths = [[s["k_dim"]] * s["heads"] + [s["v_dim"]] * s["heads"] for s in layers]
        rows = [sum(blocks) for blocks in widths]
        total, blocks = sum(rows), sum(len(blocks) for blocks in widths)
        groups = [range(first, min(first + size, len(layers))) for first in range(0, len(layers), size)]
        ranks = [int(rank) for rank in state_array(arrays, "basis.rank", "<u4", len(groups))]
        spans = [sum(rows[layer] for layer in group) for group in groups]
        need(all(rank <= span for rank, span in zip(ranks, spans, strict=True)), "more components than rows")
        self.mean = state_array(arrays, "mean", "<f4", total)
        whiten = state_array(arrays, "whiten", "<f2", sum(w * w for blocks in widths for w in blocks))
        entries = sum(rank * span for rank, span in zip(ranks, spans, strict=True))
        shared = state_array(arrays, "basis", "<i2", entries)
        local = state_array(arrays, "local", "i1", sum(r * r for r in rows))
        scales = [
            state_array(arrays, "basis.scale", "<f4", sum(ranks)),
            state_array(arrays, "local.scale", "<f4", total),
        ]
        logs = [state_array(arrays, "basis.log", "<i2", sum(ranks)), state_array(arrays, "local.log", "<i2", total)]
        need(all((np.abs(part.astype(int)) <= 64 * OCTAVE).all() for part in logs), "a scale is out of range")
        self.tables = self.read_tables(arrays["tables"])
        self.check_importance(arrays, blocks + 5)
        sinks = arrays["sink.tokens"]
        need(sinks.dtype == np.dtype("<i4") and sinks.ndim == 2, "sink.tokens is malformed")
        self.templates = state_array(arrays, "sink.bits", "<u2", *sinks.shape, total)
        for array in arrays.values():
            need(array.dtype.kind != "f" or np.isfinite(array).all(), "a profile array is not finite")
        inverse = self.inverse_roots(whiten, widths)
        self.groups: list[Group] = []
        row = component = at = own_at = 0
        for group, rank, span in zip(groups, ranks, spans, strict=True):
            roots = [root for layer in group for root in inverse[layer]]
            basis = shared[at : at + rank * span].reshape(rank, span)
            scale = scales[0][component : component + rank]
            found, own, first = unwhitened(basis, scale, roots), [], row
            for layer in group:
                basis = local[own_at : own_at + rows[layer] ** 2].reshape(rows[layer], rows[layer])
                own.append(unwhitened(basis, scales[1][first : first + rows[layer]], inverse[layer]))
                first, own_at = first + rows[layer], own_at + rows[layer] ** 2
            log = np.concatenate([logs[0][component : component + rank], logs[1][row : row + span]]).astype(int)
            order = np.argsort(-log, kind="stable")
            self.groups.append(Group(group, slice(row, row + span), log[order], order, found, own))
            row, component, at = row + span, component + rank, at + rank * span

    @staticmethod
    def read_about(array: np.ndarray) -> dict[str, Any]:
        """The profile's JSON object."""
        need(array.dtype == np.uint8 and array.ndim == 1, "about is malformed")
        try:
            about = json.loads(array.tobytes())
        except (ValueError, RecursionError):
            raise DamagedError("about is not JSON") from None
        need(isinstance(about, dict) and about.get("version") == 1, "a profile of another version")
        size, floor, kl, ends = (about.get(name) for name in ("layer_group", "floor", "kl", "turn_ends"))
        need(type(size) is int and 1 <= size <= 1 << 14, "layer_group is out of range")
        need(type(floor) is int and abs(floor) <= 64 * OCTAVE, "floor is out of range")
        good = isinstance(kl, list) and len(kl) == 2 and all(isinstance(n, int | float) and abs(n) < 1e6 for n in kl)
        good = good and isinstance(ends, list) and all(type(n) is int and 0 <= n < 1 << 31 for n in ends)
        need(good, "about is malformed")
        return dict(about)

    @staticmethod
    def read_tables(array: np.ndarray) -> np.ndarray:
        """The frequency tables, with the 256 symbols of other rANS streams."""
        need(array.dtype == np.dtype("<u2") and array.ndim == 2 and array.shape[1] == 64, "tables are malformed")
        need(1 <= len(array) <= 255, "number of tables is out of range")
        wide = np.zeros((len(array), 256), np.uint16)
        wide[:, :64] = array
        check_frequencies(wide)
        some = array > 0
        need((some[:, 0] & (some[:, :ESCAPE].all(axis=1) | some[:, ESCAPE])).all(), "a table lacks 0 or the escape")
        return wide

    @staticmethod
    def check_importance(arrays: dict[str, np.ndarray], features: int) -> None:
        """Shapes of what the encoder alone needs."""
        hidden = arrays["importance.hidden"]
        need(
            hidden.dtype == np.dtype("<f4") and hidden.ndim == 2 and hidden.shape[1] == features,
            "importance is malformed",
        )
        for name, count in (("mean", features), ("scale", features), ("linear", features), ("bias", len(hidden)),
                            ("out", len(hidden)), ("center", 1)):  # fmt: skip
            state_array(arrays, f"importance.{name}", "<f4", count)

    @staticmethod
    def inverse_roots(whiten: np.ndarray, widths: list[list[int]]) -> list[list[np.ndarray]]:
        """Per layer and block, the inverse of its root."""
        out: list[list[np.ndarray]] = []
        at = 0
        for blocks in widths:
            out.append([])
            for width in blocks:
                matrix = whiten[at : at + width * width].astype(np.float64).reshape(width, width)
                at += width * width
                try:
                    out[-1].append(np.linalg.inv((matrix + matrix.T) / 2))
                except np.linalg.LinAlgError:
                    raise DamagedError("a root cannot be inverted") from None
                need(np.isfinite(out[-1][-1]).all(), "a root cannot be inverted")
        return out


def unwhitened(entries: np.ndarray, scale: np.ndarray, inverse: list[np.ndarray]) -> np.ndarray:
    """Components with their factors, each block times the inverse of its root."""
    out = entries * scale.astype(np.float64)[:, None]
    first = 0
    for matrix in inverse:
        part = slice(first, first + len(matrix))
        out[:, part] = out[:, part] @ matrix
        first += len(matrix)
    return out


def digest_of(arrays: dict[str, np.ndarray]) -> str:
    """A profile's digest."""
    names = {np.dtype(kind): name for name, kind in KINDS.items()}
    found = hashlib.sha256()
    for name in sorted(arrays):
        line = json.dumps([name, names[arrays[name].dtype], list(arrays[name].shape)], separators=(",", ":"))
        found.update(line.encode() + b"\n" + arrays[name].tobytes())
    return found.hexdigest()


def read_profile(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a profile file."""
    data = path.read_bytes()
    need(len(data) >= 8, "profile is too short")
    (length,) = struct.unpack_from("<Q", data)
    need(2 <= length <= min(100_000_000, len(data) - 8), "header length of a profile is out of range")
    try:
        header = json.loads(data[8 : 8 + length])
    except (ValueError, RecursionError):
        raise DamagedError("a profile's header is not JSON") from None
    need(isinstance(header, dict) and isinstance(header.get("__metadata__"), dict), "no profile")
    need(header.pop("__metadata__").get("pltpack.profile") == "1", "no profile of version 1")
    body, arrays = data[8 + length :], {}
    for name, item in header.items():
        need(isinstance(item, dict) and item.get("dtype") in KINDS, f"profile array {name!r} is malformed")
        shape, offsets = item.get("shape"), item.get("data_offsets")
        for numbers in (shape, offsets):
            good = isinstance(numbers, list) and all(type(n) is int and 0 <= n < 1 << 62 for n in numbers)
            need(good, f"profile array {name!r} is malformed")
        size = math.prod(shape) * np.dtype(KINDS[item["dtype"]]).itemsize
        need(len(offsets) == 2 and offsets[0] + size == offsets[1] <= len(body), f"profile array {name!r} is malformed")
        arrays[name] = np.frombuffer(body[offsets[0] : offsets[1]], KINDS[item["dtype"]]).reshape(shape)
    return arrays


def find_profile(digest: str, given: Path | None, archive: Path) -> dict[str, np.ndarray]:
    """The profile of a digest: the file given, else a file of the folders that are searched."""
    if given is not None:
        arrays = read_profile(given)
        need(digest_of(arrays) == digest, "the profile given is another one than the archive needs")
        return arrays
    folders = [Path(name) for name in os.environ.get("PLTPACK_PROFILE_PATH", "").split(os.pathsep) if name]
    for folder in [*folders, archive]:
        for path in sorted(folder.glob("*.safetensors")):
            try:
                arrays = read_profile(path)
            except (DamagedError, OSError):
                continue
            if digest_of(arrays) == digest:
                return arrays
    raise DamagedError(f"profile {digest} is not found")


# --- units ------------------------------------------------------------------------------------------------------


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
        need(flags in (0, 1, 3) and (flags > 0) == (reference is not None), "flags of a unit are wrong")
        need(abs(log_step) <= 40 * OCTAVE, "step is out of range")
        exact = reader.array("<u2", count).astype(int)
        need((np.diff(exact) > 0).all() and (exact < tokens).all(), "exact tokens are out of order")
        classes = self.halves(reader, tokens)
        trust = self.halves(reader, tokens) if flags == 3 else np.zeros(tokens, int)
        classes[exact] = EXACT
        quantized = np.zeros((tokens, len(group.logs)))
        places, kinds = self.order(group, log_step, classes, trust)
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
        self, group: Group, log_step: int, classes: np.ndarray, trust: np.ndarray
    ) -> tuple[list[tuple[int, int]], np.ndarray]:
        """Token and component of each coded coefficient, in the order of the stream, and their classes."""
        places: list[tuple[int, int]] = []
        kinds: list[int] = []
        tables = len(self.profile.tables)
        pairs = sorted({(int(p), int(j)) for p, j in zip(trust, classes, strict=True) if j != EXACT})
        found = {}
        for prediction, token_class in pairs:
            apart = group.logs - 8 * prediction - (log_step - 12 * (token_class - 6)) - self.profile.floor
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
