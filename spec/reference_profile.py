"""Profiles of the codec ``transform``, for the reference decoder (spec/profile.md).

Imports numpy and the standard library only.
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
from reference_numbers import DamagedError, check_frequencies, need, only_arrays, state_array

OCTAVE, ESCAPE = 24, 63
KINDS = {"U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4", "F16": "<f2", "F32": "<f4"}
NAMES = {
    "about", "mean", "whiten", "basis.rank", "basis", "basis.scale", "basis.log", "local", "local.scale", "local.log",
    "tables", "importance.mean", "importance.scale", "importance.linear", "importance.hidden", "importance.bias",
    "importance.out", "importance.center", "sink.tokens", "sink.bits",
}  # fmt: skip


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
        length = about.get("kl_length")
        if length is not None:
            good = good and isinstance(length, list) and len(length) == 3
            good = good and all(type(n) in (int, float) for n in length)
            good = good and 0 <= length[0] <= 8 and 1 <= length[1] <= length[2] < 1 << 31
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
