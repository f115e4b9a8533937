"""Units of the calibrated transform codec whose entropy coding is undone: layers come by products, in any order.

Bitstream: spec/codecs.md, section "transform", *Decoding*.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pltpack.codec.base import KeyValue, Unit
from pltpack.codec.bases import GroupBases, Spread
from pltpack.codec.blas import single_threaded
from pltpack.codec.rows import from_rows, small, to_rows
from pltpack.snapshot import DTYPES, Identity, LayerGeometry


class BegunUnit:
    """A unit of a layer group that is begun.

    Parameters
    ----------
    identity : Identity
    unit : Unit
    bases : GroupBases
    spread : Spread
        Its coefficients.
    referenced : bool
        Whether a reference's values take the mean's place, or a part of it.
    shares : ndarray or None
        What of a reference's distance from the mean is added to it: float32 ``[T]``; None for all.
    marks : ndarray
        Tokens that are stored exactly, int64 ``[n]``.
    bits : ndarray
        Their bits, ``[n, rows]``.
    """

    def __init__(
        self, identity: Identity, unit: Unit, bases: GroupBases, spread: Spread, referenced: bool,
        shares: np.ndarray | None, marks: np.ndarray, bits: np.ndarray,
    ) -> None:  # fmt: skip
        self._identity, self._unit, self._bases, self._spread = identity, unit, bases, spread
        self._referenced, self._shares = referenced, shares
        self._marks, self._bits = marks, bits

    @property
    def small(self) -> bool:
        """See `Begun.small`: by a bound that needs none of the products."""
        if self._referenced or not self._bases.is_small(self._spread):
            return False
        return all(small(part.view(DTYPES[layer.dtype])) for layer, part in self._exact_parts())

    def finite(self, reference: Sequence[KeyValue]) -> np.ndarray:
        """See `Begun.finite`."""
        if all(small(array) for pair in reference for array in pair):
            return np.ones(self._unit.tokens, np.bool_)
        return to_rows(reference, geometries(self._unit), self._identity, self._unit.position)[1]

    @single_threaded
    @np.errstate(over="ignore", invalid="ignore")  # Hostile numbers give hostile values, and nothing on standard error.
    def finish(
        self,
        layers: range,
        out: Sequence[KeyValue],
        reference: Sequence[KeyValue] | None = None,
        finite: np.ndarray | None = None,
    ) -> None:
        """See `Begun.finish`."""
        unit, every = self._unit, geometries(self._unit)
        at = sum(layer.elements_per_token for layer in every[: layers.start - unit.layer])
        for number, (layer, pair) in enumerate(zip(layers, out, strict=True)):
            geometry = every[layer - unit.layer]
            part = slice(at, at + geometry.elements_per_token)
            rows = self._bases.layer_rows(self._spread, layer)
            if self._referenced:
                assert reference is not None
                rows += self._center(geometry, part, reference[number], finite)
            else:
                rows += self._bases.mean[part]
            from_rows(rows, [pair], [geometry], self._identity, unit.position)
            if len(self._marks):
                self._put_exact(self._bits[:, part], geometry, pair)
            at = part.stop

    def _center(
        self, geometry: LayerGeometry, part: slice, reference: KeyValue, finite: np.ndarray | None
    ) -> np.ndarray:
        """What one layer's rows are counted from: float32 ``[T, rows]``."""
        rows, _ = to_rows([reference], [geometry], self._identity, self._unit.position)
        if self._shares is None:
            if finite is not None:
                rows[~finite] = 0
            return rows
        mean = self._bases.mean[part]
        rows -= mean
        if finite is not None:
            rows[~finite] = 0
        rows *= self._shares[:, None]
        rows += mean
        return rows

    def _put_exact(self, bits: np.ndarray, layer: LayerGeometry, out: KeyValue) -> None:
        at = 0
        for array, width in zip(out, (layer.heads * layer.k_dim, layer.heads * layer.v_dim), strict=True):
            part = bits[:, at : at + width].reshape(len(bits), layer.heads, -1).transpose(1, 0, 2)
            words = part.astype(f"u{array.dtype.itemsize}", order="C")
            array[:, self._marks] = words.view(array.dtype)
            at += width

    def _exact_parts(self) -> list[tuple[LayerGeometry, np.ndarray]]:
        """Words of the exact tokens by layer, as wide as its dtype."""
        out, at = [], 0
        for layer in geometries(self._unit) if len(self._marks) else ():
            stop = at + layer.elements_per_token
            out.append((layer, self._bits[:, at:stop].astype(f"u{DTYPES[layer.dtype].itemsize}", order="C")))
            at = stop
        return out


def geometries(unit: Unit) -> Sequence[LayerGeometry]:
    """The layers that a unit holds."""
    return unit.layers or (unit.geometry,)
