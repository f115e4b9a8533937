"""What calibration learns for a model, once: the arrays of a profile, checked, and the matrices made of them.

The layout of the arrays is spec/profile.md. A layer's *rows* are its keys, head by head and un-rotated, then its
values, head by head: ``heads * (k_dim + v_dim)`` numbers a token. *Whitened* rows are ``(x - mean) F^½`` per head:
``½ δᵀFδ`` is what the model feels of a small error δ, so in them one step size everywhere is the water-filling
solution.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pltpack.codec.base import State
from pltpack.codec.coefficients import OCTAVE, SYMBOLS, Tables
from pltpack.snapshot import LayerGeometry

VERSION = 1
#: Magnitude bound of the scales' logarithms: 2^±64.
MAX_LOG = 64 * OCTAVE
#: Statistics of a token that its importance is predicted from, besides two norms a head.
RECENCY = 5
#: Largest exponent of a prediction by length.
MAX_LENGTH_POWER = 8
#: Exponent and least tokens of a prediction by length where a profile was made with a model and holds none.
_USUAL_POWER, _USUAL_LEAST = 0.7, 64
#: Share of a calibration window that is cached, by which such profiles measured.
_USUAL_CACHED = 0.75


def blocks_of(layer: LayerGeometry) -> list[int]:
    """Widths of a layer's row blocks: one a key head, then one a value head."""
    return [layer.k_dim] * layer.heads + [layer.v_dim] * layer.heads


def rows_of(layer: LayerGeometry) -> int:
    """Rows of a layer."""
    return layer.elements_per_token


class Length(NamedTuple):
    """How much more KL divergence sessions have that are shorter than those it was measured with.

    Attributes
    ----------
    power : float
        Octaves more for every octave of length less.
    least, most : float
        Tokens beyond which length does not matter.
    """

    power: float
    least: float
    most: float

    def octaves(self, tokens: int) -> float:
        """What is added to the logarithm of a prediction."""
        return self.power * math.log2(self.most / min(max(tokens, self.least), self.most))


@dataclasses.dataclass(frozen=True)
class Group:
    """Layers ``start … stop - 1``, coded together, with their rows and components.

    Attributes
    ----------
    start, stop : int
        Layers.
    first, last : int
        Rows, in the model's order.
    component : slice
        The group's shared components among those of all groups.
    """

    start: int
    stop: int
    first: int
    last: int
    component: slice


class Profile:
    """A checked profile.

    Parameters
    ----------
    arrays : mapping of str to ndarray
        As spec/profile.md lays them out.
    layers : sequence of LayerGeometry
        The model's.

    Attributes
    ----------
    arrays : dict of str to ndarray
    groups : list of Group
    about : dict
        The JSON object of the profile: ``layer_group``, ``kl``, ``kl_length``, ``turn_ends``, ``source``.
    mean : ndarray
        float32 ``[rows]``.
    shared_log, local_log : ndarray
        Scale of each component, int32, in `OCTAVE` of whitened units; local ones per row of the model.
    tables : ndarray
        uint16 ``[K, 64]``: frequencies of the coefficient coder, by class.

    Raises
    ------
    ValueError
        If an array is missing, of another shape or type, or holds values out of range.
    """

    def __init__(self, arrays: State, layers: Sequence[LayerGeometry]) -> None:
        self.layers = tuple(layers)
        self.about = _about(arrays)
        self.rows = np.concatenate([[0], np.cumsum([rows_of(layer) for layer in layers])]).astype(int).tolist()
        total, heads = self.rows[-1], sum(2 * layer.heads for layer in layers)
        size = self.about["layer_group"]
        count = -(-len(self.layers) // size)
        ranks = _take(arrays, "basis.rank", "u4", (count,)).astype(int).tolist()
        squares = sum(width * width for layer in layers for width in blocks_of(layer))
        self.groups: list[Group] = []
        components = entries = 0
        for index, rank in enumerate(ranks):
            start, stop = index * size, min((index + 1) * size, len(self.layers))
            first, last = self.rows[start], self.rows[stop]
            if rank > last - first:
                raise ValueError("a profile's basis has more components than rows")
            self.groups.append(Group(start, stop, first, last, slice(components, components + rank)))
            components += rank
            entries += rank * (last - first)
        local = sum(rows_of(layer) ** 2 for layer in layers)
        self.mean = _take(arrays, "mean", "f4", (total,))
        self._whiten = _take(arrays, "whiten", "f2", (squares,))
        self._basis = _take(arrays, "basis", "i2", (entries,))
        self._basis_scale = _take(arrays, "basis.scale", "f4", (components,))
        self._local = _take(arrays, "local", "i1", (local,))
        self._local_scale = _take(arrays, "local.scale", "f4", (total,))
        self.shared_log = _logs(arrays, "basis.log", components)
        self.local_log = _logs(arrays, "local.log", total)
        tables = _take(arrays, "tables", "u2", (None, SYMBOLS))
        if not 1 <= len(tables) <= 255 or (tables.sum(axis=1, dtype=np.int64) != 4096).any():
            raise ValueError("a profile's entropy tables do not sum to 4096")
        floor = self.about.get("floor")
        if type(floor) is not int or abs(floor) > MAX_LOG:
            raise ValueError("a profile's lowest class is out of range")
        self.tables = tables
        features = heads + RECENCY
        hidden = _take(arrays, "importance.hidden", "f4", (None, features))
        self.importance = {
            "mean": _take(arrays, "importance.mean", "f4", (features,)),
            "scale": _take(arrays, "importance.scale", "f4", (features,)),
            "linear": _take(arrays, "importance.linear", "f4", (features,)),
            "hidden": hidden,
            "bias": _take(arrays, "importance.bias", "f4", (len(hidden),)),
            "out": _take(arrays, "importance.out", "f4", (len(hidden),)),
            "center": _take(arrays, "importance.center", "f4", (1,)),
        }
        sinks = _take(arrays, "sink.tokens", "i4", (None, None))
        self.sink_tokens = sinks
        self.sink_bits = _take(arrays, "sink.bits", "u2", (*sinks.shape, total))
        self.arrays = {name: arrays[name] for name in NAMES}

    @functools.cached_property
    def coder(self) -> Tables:
        """The coefficient coder's tables."""
        return Tables.of(self.tables, int(self.about["floor"]))

    @property
    def length(self) -> Length:
        """How predictions depend on a session's length; profiles of former versions have the usual dependence."""
        found, source = self.about.get("kl_length"), self.about.get("source")
        if found is not None:
            return Length(*found)
        window = source.get("window") if isinstance(source, dict) else None
        if type(window) is not int or not 1 <= window < 1 << 31:
            return Length(0.0, 1.0, 1.0)
        most = max(_USUAL_CACHED * window, 1.0)
        return Length(_USUAL_POWER, min(_USUAL_LEAST, most), most)

    def check_inverse(self) -> None:
        """Raise `ValueError` if the sensitivity of a head cannot be inverted."""
        assert self._inverse_roots

    @functools.cached_property
    def _roots(self) -> list[np.ndarray]:
        out, at = [], 0
        for layer in self.layers:
            for width in blocks_of(layer):
                root = self._whiten[at : at + width * width].astype(np.float64).reshape(width, width)
                # A symmetric matrix cannot be far from its own transpose: both are stored for speed of reading only.
                out.append((root + root.T) / 2)
                at += width * width
        return out

    @functools.cached_property
    def _inverse_roots(self) -> list[np.ndarray]:
        found: list[np.ndarray] = []
        try:
            # Those of one width together: a call takes as long as the inversion of a small matrix.
            for _, roots in itertools.groupby(self._roots, key=len):
                found += list(np.linalg.inv(np.stack(list(roots))))
        except np.linalg.LinAlgError:
            found = []
        if not found or not all(np.isfinite(matrix).all() for matrix in found):
            raise ValueError("a profile's sensitivity cannot be inverted")
        return found

    def most(self, group: Group) -> tuple[float, float, float]:
        """What a coefficient of 1 of the shared basis, and one of a layer's own, gives at most in a row, and the mean.

        Bounds, by the largest integers that the bases could hold.
        """
        first, last = self._first_block(group.start), self._first_block(group.stop)
        spread = max(float(np.abs(inverse).sum(axis=0).max()) for inverse in self._inverse_roots[first:last])
        shared = float(np.abs(self._basis_scale[group.component]).max(initial=0)) * (1 << 15)
        local = float(np.abs(self._local_scale[group.first : group.last]).max(initial=0)) * (1 << 7)
        return shared * spread, local * spread, float(np.abs(self.mean[group.first : group.last]).max(initial=0))

    def whiten(self, x: np.ndarray, layer: int) -> np.ndarray:
        """Whitened rows of a layer: float32 ``[T, rows]`` of un-rotated rows with the mean taken off."""
        out = np.empty_like(x, order="C")
        at = 0
        for index, width in enumerate(blocks_of(self.layers[layer]), self._first_block(layer)):
            root = self._roots[index].astype(np.float32)
            out[:, at : at + width] = x[:, at : at + width] @ root
            at += width
        return out

    def _first_block(self, layer: int) -> int:
        return sum(2 * geometry.heads for geometry in self.layers[:layer])

    def shared(self, group: Group, rows: slice | None = None) -> np.ndarray:
        """A group's basis in whitened rows, or some of its rows: float32 ``[components, rows]``."""
        index = self.groups.index(group)
        at = sum((g.component.stop - g.component.start) * (g.last - g.first) for g in self.groups[:index])
        rank, width = group.component.stop - group.component.start, group.last - group.first
        scale = self._basis_scale[group.component, None]
        found: np.ndarray = self._basis[at : at + rank * width].reshape(rank, width)[:, rows or slice(None)] * scale
        return found

    def local(self, layer: int) -> np.ndarray:
        """A layer's own basis in whitened rows: float32 ``[components, rows]``, as many as rows."""
        rows = rows_of(self.layers[layer])
        at = sum(rows_of(geometry) ** 2 for geometry in self.layers[:layer])
        scale = self._local_scale[self.rows[layer] : self.rows[layer + 1], None]
        found: np.ndarray = self._local[at : at + rows * rows].reshape(rows, rows) * scale
        return found

    def unwhitened(self, basis: np.ndarray, layers: range, out: np.ndarray | None = None) -> np.ndarray:
        """``basis F^-½``: what rebuilds un-rotated rows from coefficients; float32 ``[components, rows]``."""
        out = np.empty(basis.shape, np.float32) if out is None else out
        at = 0
        for layer in layers:
            for index, width in enumerate(blocks_of(self.layers[layer]), self._first_block(layer)):
                inverse = self._inverse_roots[index].astype(np.float32)
                np.matmul(basis[:, at : at + width], inverse, out=out[:, at : at + width])
                at += width
        return out


#: Arrays of a profile.
NAMES = (
    "about", "mean", "whiten", "basis.rank", "basis", "basis.scale", "basis.log", "local", "local.scale", "local.log",
    "tables", "importance.mean", "importance.scale", "importance.linear", "importance.hidden", "importance.bias",
    "importance.out", "importance.center", "sink.tokens", "sink.bits",
)  # fmt: skip


def pack_about(about: Mapping[str, Any]) -> np.ndarray:
    """The JSON object of a profile as its array."""
    return np.frombuffer(json.dumps(about, sort_keys=True, separators=(",", ":")).encode(), np.uint8)


def _about(arrays: State) -> dict[str, Any]:
    raw = _take(arrays, "about", "u1", (None,))
    try:
        about = json.loads(raw.tobytes())
    except (ValueError, RecursionError):
        raise ValueError("a profile's description is not JSON") from None
    if not isinstance(about, dict) or about.get("version") != VERSION:
        raise ValueError(f"a profile of version {about.get('version') if isinstance(about, dict) else None!r}")
    size, kl, ends, length = (about.get(name) for name in ("layer_group", "kl", "turn_ends", "kl_length"))
    if type(size) is not int or not 1 <= size <= 1 << 14:
        raise ValueError("a profile's layer group is out of range")
    if not (isinstance(kl, list) and len(kl) == 2 and all(isinstance(n, int | float) and abs(n) < 1e6 for n in kl)):
        raise ValueError("a profile's KL prediction is malformed")
    if length is not None and not _is_length(length):
        raise ValueError("a profile's KL prediction by length is malformed")
    if not (isinstance(ends, list) and all(type(n) is int and 0 <= n < 1 << 31 for n in ends)):
        raise ValueError("a profile's turn ends are malformed")
    return about


def _is_length(found: Any) -> bool:
    good = isinstance(found, list) and len(found) == 3 and all(type(n) in (int, float) for n in found)
    return bool(good and 0 <= found[0] <= MAX_LENGTH_POWER and 1 <= found[1] <= found[2] < 1 << 31)


def _take(arrays: State, name: str, kind: str, shape: tuple[int | None, ...]) -> np.ndarray:
    array = arrays.get(name)
    fits = array is not None and array.dtype == np.dtype(f"<{kind}") and array.ndim == len(shape)
    if not fits or array is None or any(n is not None and n != m for n, m in zip(shape, array.shape, strict=True)):
        raise ValueError(f"profile array {name!r} is missing or does not fit the model")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ValueError(f"profile array {name!r} is not finite")
    return array


def _logs(arrays: State, name: str, count: int) -> np.ndarray:
    found = _take(arrays, name, "i2", (count,)).astype(np.int32)
    if len(found) and np.abs(found).max() > MAX_LOG:
        raise ValueError(f"profile array {name!r} is out of range")
    return found
