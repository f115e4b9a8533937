"""The transform of a layer group: whitened rows to coefficients and back, with the products kept small.

A group's components are sorted by scale, so that the ones that a token's step leaves alive come first; most products
then use a part of the basis only, and the layers' own bases serve the few tokens that reach beyond the shared one.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numba
import numpy as np

from pltpack.codec import products, rate
from pltpack.codec.coefficients import Order
from pltpack.codec.dual import dual
from pltpack.codec.profile import Group, Profile, rows_of
from pltpack.codec.rows import SMALL
from pltpack.codec.scratch import Scratch

#: Tokens whose product is made at once: tokens are sorted by class, and each run uses what its finest class needs.
_RUN = 64
_jit = numba.njit(cache=True, nogil=True, error_model="numpy")
_scratch = Scratch()


class GroupBases:
    """The bases of one layer group.

    Attributes
    ----------
    group : Group
    logs : ndarray
        Scales of all components, descending, int32 ``[N]``: the shared ones and the layers' own together.
    mean : ndarray
        float32 ``[rows]``.
    """

    def __init__(self, profile: Profile, group: Group) -> None:
        self.group, self._profile = group, profile
        self.mean = profile.mean[group.first : group.last]
        self.rank = group.component.stop - group.component.start
        logs = np.concatenate([profile.shared_log[group.component], profile.local_log[group.first : group.last]])
        self._order = np.argsort(-logs, kind="stable")
        self.logs = logs[self._order].astype(np.int32)
        # In a sorted list, how many shared components precede each end: what a product of a prefix needs.
        self._reach = np.maximum.accumulate(np.where(self._order < self.rank, self._order + 1, 0))
        # What decoding needs of each layer, made when it is first needed: early layers are asked for first.
        count = group.stop - group.start
        self._shared: list[np.ndarray | None] = [None] * count
        self._local: list[np.ndarray | None] = [None] * count
        self._locks = [threading.Lock() for _ in range(count)]

    @functools.cached_property
    def _analysis(self) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        """The shared basis, its dual and the duals of the layers' own bases: quantized bases are not orthonormal."""
        shared = self._profile.shared(self.group)
        layers = range(self.group.start, self.group.stop)
        return shared, dual(shared), [dual(self._profile.local(layer)) for layer in layers]

    @functools.cached_property
    def _synthesis(self) -> tuple[np.ndarray, list[np.ndarray]]:
        shared, local = self._profile.shared(self.group), []
        for layer in range(self.group.start, self.group.stop):
            local.append(self._profile.unwhitened(self._profile.local(layer), range(layer, layer + 1)))
        return self._profile.unwhitened(shared, range(self.group.start, self.group.stop)), local

    def analyse(self, rows: np.ndarray) -> np.ndarray:
        """Coefficients of centered rows: float32 ``[T, N]``, components in the order of `logs`.

        Parameters
        ----------
        rows : ndarray
            float32 ``[T, rows]``.
        """
        shared, shared_dual, local = self._analysis
        first = self.group.first
        white = np.empty_like(rows)
        for layer in range(self.group.start, self.group.stop):
            part = slice(self._profile.rows[layer] - first, self._profile.rows[layer + 1] - first)
            white[:, part] = self._profile.whiten(rows[:, part], layer)
        found = np.empty((len(rows), len(self.logs)), np.float32)
        found[:, : self.rank] = white @ shared_dual.T
        white -= found[:, : self.rank] @ shared
        at = 0
        for basis in local:
            found[:, self.rank + at : self.rank + at + len(basis)] = white[:, at : at + len(basis)] @ basis.T
            at += len(basis)
        return found[:, self._order]

    def quantize(self, found: np.ndarray, classes: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """Coefficients over the step of their token, rounded: int32 ``[T, N]``; 0 for exact tokens."""
        inverse = np.append(1 / rate.value_of(steps), 0.0).astype(np.float32)
        out = np.empty(found.shape, np.int32)
        _round(found, inverse[classes], out)
        return out

    def spread(self, quantized: np.ndarray, order: Order, classes: np.ndarray, steps: np.ndarray) -> Spread:
        """Quantized coefficients over their steps, ready for products with the bases."""
        widths = np.append(rate.value_of(steps), 0.0).astype(np.float32)
        tokens, rows = len(classes), self.group.last - self.group.first
        shared = np.zeros((tokens, self.rank), np.float32)
        own = np.zeros((tokens, rows), np.float32)
        layers = range(self.group.start, self.group.stop)
        used = np.zeros((tokens, len(layers)), np.bool_)
        layer_of = np.repeat(np.arange(len(layers)), [rows_of(self._profile.layers[layer]) for layer in layers])
        live = np.append(order.live, 0)
        place = np.empty(tokens, np.int64)
        place[order.tokens] = np.arange(tokens)
        _spread(quantized, widths[classes], live[classes], self._order, self.rank, layer_of, place, shared, own, used)
        most = [int(live[classes[order.tokens[at : at + _RUN]]].max()) for at in range(0, tokens, _RUN)]
        needs = [int(self._reach[count - 1]) if count else 0 for count in most]
        # As many tokens as whole packets have; those that are none go where nobody looks.
        places = np.full(-(-tokens // products.TOKENS) * products.TOKENS, tokens, np.int64)
        places[:tokens] = order.tokens
        lists = Lists(*products.packets(shared, needs, _RUN), places)
        alone = shared[-1:, : needs[-1]] if tokens % _RUN == 1 else None
        return Spread(lists, alone, own, used)

    def is_small(self, spread: Spread) -> bool:
        """Whether all rows that a unit gives are sure to be below `pltpack.codec.rows.SMALL`, mean included."""
        shared, local, mean = self._profile.most(self.group)
        coded, own = (float(np.abs(part).sum(dtype=np.float64)) for part in (spread.lists.values, spread.own))
        return bool(coded * shared + own * local + mean < SMALL)

    def layer_rows(self, spread: Spread, layer: int) -> np.ndarray:
        """Centered, un-rotated rows of one of the group's layers, float32 ``[T, rows]``.

        They are in the thread's memory: the next call writes to it.
        """
        index, first = layer - self.group.start, self._profile.rows[self.group.start]
        shared, width, lists = self._layer(index), rows_of(self._profile.layers[layer]), spread.lists
        tokens = len(spread.own)
        out = _scratch.array("rows", (tokens + 1, shared.shape[1]), np.float32)
        out[:] = 0
        products.add(*lists[:3], shared.reshape(-1), shared.shape[1], lists.rows, out.reshape(-1))
        if spread.alone is not None:
            # A vector's product, which libraries sum in another order.
            need = spread.alone.shape[1]
            out[lists.rows[tokens - 1], :width] = spread.alone @ shared[:need, :width] if need else 0
        out = out[:tokens, :width]
        some = np.flatnonzero(spread.used[:, index])
        if len(some):
            part = slice(*(self._profile.rows[at] - first for at in (layer, layer + 1)))
            out[some] += _sums(spread.own[some, part], self._own(index), width)
        return out

    def preparations(self) -> list[Callable[[], object]]:
        """What `layer_rows` makes when it first needs it, a call for each layer."""

        def prepare(index: int) -> None:
            self._layer(index)
            self._own(index)

        return [functools.partial(prepare, index) for index in range(len(self._locks))]

    def _layer(self, index: int) -> np.ndarray:
        """Columns of one layer of the shared basis for un-rotated rows, filled up with zeros: ``[components, C]``."""
        with self._locks[index]:
            found = self._shared[index]
            if found is None:
                layer = self.group.start + index
                part = slice(*(self._profile.rows[at] - self.group.first for at in (layer, layer + 1)))
                found = self._shared[index] = self._filled_up(self._profile.shared(self.group, part), layer)
            return found

    def _own(self, index: int) -> np.ndarray:
        """One layer's own basis for un-rotated rows, filled up in the same way."""
        with self._locks[index]:
            found = self._local[index]
            if found is None:
                layer = self.group.start + index
                found = self._local[index] = self._filled_up(self._profile.local(layer), layer)
            return found

    def _filled_up(self, basis: np.ndarray, layer: int) -> np.ndarray:
        """A layer's basis for un-rotated rows, with columns of 0 behind its own up to whole vectors of `products`."""
        width = basis.shape[1]
        found = np.empty((len(basis), -(-width // products.LANES) * products.LANES), np.float32)
        self._profile.unwhitened(basis, range(layer, layer + 1), found[:, :width])
        found[:, width:] = 0
        return found


class Lists(NamedTuple):
    """Coefficients of the shared basis as `products.packets` gives them, and the token of each place."""

    parts: np.ndarray
    components: np.ndarray
    values: np.ndarray
    rows: np.ndarray


class Spread(NamedTuple):
    """Coefficients of a unit, made ready by `GroupBases.spread`.

    Attributes
    ----------
    lists : Lists
        Those of the shared basis; tokens are sorted by class.
    alone : ndarray or None
        float32 ``[1, n]``: those of the last token in that order where no other shares its run.
    own : ndarray
        float32 ``[T, rows]`` by token: components of the layers' own bases.
    used : ndarray
        bool ``[T, L]``: which of those are not all 0.
    """

    lists: Lists
    alone: np.ndarray | None
    own: np.ndarray
    used: np.ndarray


class Bases:
    """The bases of all groups of a profile."""

    def __init__(self, profile: Profile) -> None:
        self._groups = [GroupBases(profile, group) for group in profile.groups]
        # Checked at the start, not at the first unit.
        profile.check_inverse()

    def of(self, layers: range) -> GroupBases:
        """The bases of exactly these layers.

        Raises
        ------
        ValueError
            If they are not a group of the profile.
        """
        for bases in self._groups:
            if range(bases.group.start, bases.group.stop) == layers:
                return bases
        raise ValueError(f"layers {layers.start}:{layers.stop} are not a layer group of the profile")

    def __iter__(self) -> Iterator[GroupBases]:
        return iter(self._groups)


def _sums(values: np.ndarray, basis: np.ndarray, width: int) -> np.ndarray:
    """Products of coefficients, most of them 0, with a basis: float32, a line a token."""
    if len(values) == 1:
        # As in `GroupBases.layer_rows`.
        found: np.ndarray = values @ basis[:, :width]
        return found
    count, runs = len(values), -(-len(values) // _RUN)
    out = np.zeros((count + 1, basis.shape[1]), np.float32)
    rows = np.full(-(-count // products.TOKENS) * products.TOKENS, count, np.int64)
    rows[:count] = np.arange(count)
    lists = products.packets(values, [len(basis)] * runs, _RUN)
    products.add(*lists, basis.reshape(-1), basis.shape[1], rows, out.reshape(-1))
    return out[:count, :width]


@_jit
def _round(found: Any, inverse: Any, out: Any) -> None:
    for t in range(found.shape[0]):
        scale = inverse[t]
        for i in range(found.shape[1]):
            out[t, i] = np.int32(np.rint(found[t, i] * scale))


@_jit
def _spread(
    quantized: Any, widths: Any, live: Any, order: Any, rank: Any, layer_of: Any, place: Any, shared: Any, own: Any,
    used: Any,
) -> None:  # fmt: skip
    for t in range(quantized.shape[0]):
        for i in range(live[t]):
            q = quantized[t, i]
            if q != 0:
                component = order[i]
                if component < rank:
                    shared[place[t], component] = q * widths[t]
                else:
                    own[t, component - rank] = q * widths[t]
                    used[t, layer_of[component - rank]] = True
