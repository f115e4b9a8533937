"""A unit of a layer group between its two halves of decoding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pltpack.codec.base import KeyValue, Unit
from pltpack.codec.bases import GroupBases, Spread
from pltpack.codec.blas import single_threaded
from pltpack.codec.rows import from_rows
from pltpack.snapshot import Identity, LayerGeometry


class BegunUnit:
    """A unit of a layer group whose entropy coding is undone; its layers come by products, in any order."""

    def __init__(
        self, identity: Identity, unit: Unit, bases: GroupBases, spread: Spread, center: np.ndarray,
        marks: np.ndarray, bits: np.ndarray,
    ) -> None:  # fmt: skip
        self._identity, self._unit, self._bases, self._spread = identity, unit, bases, spread
        self._center, self._marks, self._bits = center, marks, bits

    @single_threaded
    @np.errstate(over="ignore", invalid="ignore")  # As for the first half.
    def finish(self, layers: range, out: Sequence[KeyValue]) -> None:
        """Decode some of the unit's layers, one pair of arrays each."""
        unit = self._unit
        at = sum(layer.elements_per_token for layer in geometries(unit)[: layers.start - unit.layer])
        for layer, pair in zip(layers, out, strict=True):
            geometry = [geometries(unit)[layer - unit.layer]]
            part = slice(at, at + geometry[0].elements_per_token)
            rows = self._bases.layer_rows(self._spread, layer)
            rows += self._center[..., part]
            from_rows(rows, [pair], geometry, self._identity, unit.position)
            if len(self._marks):
                self._put_exact(self._bits[:, part], geometry, [pair])
            at = part.stop

    def _put_exact(self, bits: np.ndarray, layers: Sequence[LayerGeometry], out: Sequence[KeyValue]) -> None:
        at = 0
        for (keys, values), layer in zip(out, layers, strict=True):
            for array, width in ((keys, layer.heads * layer.k_dim), (values, layer.heads * layer.v_dim)):
                part = bits[:, at : at + width].reshape(len(bits), layer.heads, -1).transpose(1, 0, 2)
                words = part.astype(f"u{array.dtype.itemsize}", order="C")
                array[:, self._marks] = words.view(array.dtype)
                at += width


def geometries(unit: Unit) -> Sequence[LayerGeometry]:
    """The layers that a unit holds."""
    return unit.layers or (unit.geometry,)
