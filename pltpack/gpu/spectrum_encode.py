"""Encoding of the transform codec's units on a device: decoding elsewhere gives what the CPU's units give.

Un-rotation, the products with the bases, rounding, symbols and entropy coding are the device's; the host chooses exact
tokens and orders coefficients. Products differ from the CPU's in their last bits, so that an integer may be another one
here and there: given the same integers the bytes are the same. Units with a reference are left to the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pltpack.codec import coefficients, exact_tokens, rate, unit_head
from pltpack.codec.base import SINK_TOKENS, KeyValue, Unit
from pltpack.codec.begun import geometries
from pltpack.codec.coefficients import Order
from pltpack.codec.rope import Rotation
from pltpack.codec.transform import EXACT, TransformCodec
from pltpack.gpu import device, place, spectrum
from pltpack.gpu.jobs import uploaded
from pltpack.gpu.spectrum_units import encode_values

#: What is larger is stored exactly, as squares must not overflow: see `pltpack.codec.rows.to_rows`.
_LARGEST = 1e15


class _Analysis:
    """One layer group's way from centered rows to coefficients, on the device."""

    def __init__(self, codec: TransformCodec, bases: Any) -> None:
        shared, dual, local = bases._analysis
        profile, group = codec.profile, bases.group
        self.mean, self.order = device.put(bases.mean), device.put(bases._order)
        self.rank = bases.rank
        self.dual, self.shared = device.put(np.ascontiguousarray(dual.T)), device.put(np.ascontiguousarray(-shared))
        # Whitening is linear: what it makes of the unit rows is its matrix.
        self.layers = []
        for layer, basis in zip(range(group.start, group.stop), local, strict=True):
            rows = profile.rows[layer + 1] - profile.rows[layer]
            white = profile.whiten(np.eye(rows, dtype=np.float32), layer)
            self.layers.append((device.put(white), device.put(np.ascontiguousarray(basis.T))))

    def coefficients(self, rows: Any) -> Any:
        """float32 ``[T, N]``, in the order of their scales."""
        xp = device.arrays()
        white, found = xp.zeros_like(rows), xp.zeros((len(rows), self.rank + rows.shape[1]), np.float32)
        at = 0
        for matrix, _ in self.layers:
            spectrum.add_product(rows, matrix, white, at, len(matrix), at)
            at += len(matrix)
        if self.rank:
            spectrum.add_product(white, self.dual, found, 0, rows.shape[1], 0)
            spectrum.add_product(found, self.shared, white, 0, self.rank, 0)
        at = 0
        for matrix, basis in self.layers:
            spectrum.add_product(white, basis, found, at, len(matrix), self.rank + at)
            at += len(matrix)
        return xp.ascontiguousarray(found[:, self.order])


class SpectrumEncoder:
    """Encodes units of one started transform codec, and of what `prepare` makes of it."""

    def __init__(self, codec: TransformCodec) -> None:
        self._groups: dict[int, _Analysis] = {}
        self._tables = codec._tables

    def encode_span(self, codec: TransformCodec, unit: Unit, arrays: Sequence[KeyValue]) -> bytes | None:
        """A unit's payload; None if its layers have several dtypes.

        Parameters
        ----------
        codec : TransformCodec
            As prepared for the unit's session.
        unit, arrays
            As of `Codec.encode_span`.
        """
        layers = geometries(unit)
        if len({layer.dtype for layer in layers}) > 1:
            return None
        bases = codec._bases_of(unit)
        if unit.layer not in self._groups:
            self._groups[unit.layer] = _Analysis(codec, bases)
        group, xp = self._groups[unit.layer], device.arrays()
        rows = self._rows(codec, unit, arrays)
        finite = device.get(xp.abs(rows).max(axis=1) < np.float32(_LARGEST))
        # No more of them can be sinks.
        first = unit_head.exact_rows([(k[:, :SINK_TOKENS], v[:, :SINK_TOKENS]) for k, v in arrays])
        exact = ~finite | codec._sinks(unit, bases, layers, first)
        rows = xp.where(device.put(exact)[:, None], np.float32(0), rows - group.mean)
        found = group.coefficients(rows)
        classes, steps = codec._unit_classes(unit), rate.steps(codec._log_step)
        limits = (coefficients.MAX_VALUE * 0.5 * rate.value_of(steps)[classes]).astype(np.float32)
        exact |= ~device.get((xp.abs(found) < device.put(limits)[:, None]).all(axis=1))
        joint = np.where(exact, EXACT, classes)
        logs, scaled, shifts = codec.unit_logs(unit)
        order = Order.of(logs, steps, joint, self._tables)
        inverse = np.append(1 / rate.value_of(steps), 0.0).astype(np.float32)[joint]
        quantized = xp.empty(found.shape, np.int32)
        spectrum.quantize_kernel[device.loop_of(found.size)](found, device.put(inverse), quantized)
        values = encode_values(quantized, [order], self._tables)[0]
        marks = np.flatnonzero(exact)
        parts = [unit_head.HEADER.pack(scaled, codec._log_step, len(marks)), marks.astype("<u2").tobytes(),
                 unit_head.pack_nibbles(np.where(exact, 0, classes)), shifts, values]  # fmt: skip
        if len(marks):
            bits = unit_head.exact_rows([(k[:, marks], v[:, marks]) for k, v in arrays])
            layout = codec._exact_layout(bases, layers)
            parts.append(exact_tokens.encode(bits, unit.position + marks.astype(np.int64), *layout, self._tables))
        return b"".join(parts)

    def _rows(self, codec: TransformCodec, unit: Unit, arrays: Sequence[KeyValue]) -> Any:
        """Un-rotated rows, float32 ``[T, R]``."""
        layers, identity = geometries(unit), codec._identity
        words, (places,) = uploaded([arrays], [unit])
        span = sum(layer.elements_per_token for layer in layers)
        targets, at = place.Targets(), 0
        for g, where in zip(layers, places, strict=True):
            rotation = Rotation.of(identity.rope, identity.keys, g.k_dim)
            targets.add(g.heads, unit.tokens, g.k_dim, where.keys, 0, rotation, unit.position, (at, g.k_dim, span))
            at += g.heads * g.k_dim
            targets.add(g.heads, unit.tokens, g.v_dim, where.values, source=(at, g.v_dim, span))
            at += g.heads * g.v_dim
        targets.elements = unit.tokens * span
        return place.load(words, targets, targets.upload(), layers[0].dtype).reshape(unit.tokens, span)
