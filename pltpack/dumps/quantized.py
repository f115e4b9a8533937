"""Quantized caches as snapshots: the integers and scales they are, or the values that these stand for.

As integers, a cache of L layers is a snapshot of 2·L: the first L hold the integers' bytes, under the dtype
``F8_E4M3`` that any eight bits fit, the others their scales (and biases, after the scales). The identity's member
``quantized`` says which scheme it is, and keeps ``rope`` and ``keys`` away from codecs, for which integers do not
rotate:

- ``scheme``: ``q8_0`` or ``q4_0`` of ggml, or ``mlx`` with ``bits`` and ``group``;
- ``values``: dtype of the values;
- ``hadamard``: sizes of the matrices that keys and values were multiplied with, or false; absent if not known;
- ``rope``, ``keys``: what the identity says of the values.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from pltpack.dumps import ggml
from pltpack.errors import DumpError, UnsupportedError
from pltpack.snapshot import DTYPES, Identity, LayerGeometry, LayerSource, Snapshot

CARRIER = "F8_E4M3"


def integer_identity(identity: Identity, scheme: dict[str, Any], scales: str) -> Identity:
    """The identity of a quantized cache as integers.

    Parameters
    ----------
    identity : Identity
        Of its values.
    scheme : dict
        The member ``quantized`` but for ``values``, ``rope`` and ``keys``.
    scales : str
        Dtype of the scales.
    """
    name = scheme["scheme"]
    bits, group, extra = (scheme["bits"], scheme["group"], 2) if name == "mlx" else (8 if name == "q8_0" else 4, 32, 1)
    integers, tables = [], []
    for index, layer in enumerate(identity.layers):
        for dim in (layer.k_dim, layer.v_dim):
            if dim % group or dim * bits % 8:
                raise UnsupportedError(f"layer {index}: {dim} channels per head are no whole groups of {group}")
        integers.append(dataclasses.replace(layer, k_dim=layer.k_dim * bits // 8, v_dim=layer.v_dim * bits // 8,
                                            dtype=CARRIER))  # fmt: skip
        tables.append(dataclasses.replace(layer, k_dim=extra * layer.k_dim // group,
                                          v_dim=extra * layer.v_dim // group, dtype=scales))  # fmt: skip
    known = {name: value for name, value in (("rope", identity.rope), ("keys", identity.keys)) if value is not None}
    return dataclasses.replace(identity, rope=None, keys=None, layers=(*integers, *tables),
                               quantized={**scheme, "values": identity.layers[0].dtype, **known})  # fmt: skip


def value_identity(identity: Identity) -> Identity:
    """Inverse of `integer_identity`.

    Raises
    ------
    DumpError
        If the member ``quantized`` does not fit the layers.
    """
    found = _scheme(identity)
    count = len(identity.layers) // 2
    layers = []
    for index in range(count):
        bytes_of, tables = identity.layers[index], identity.layers[count + index]
        dims = [dim * 8 // found.bits for dim in (bytes_of.k_dim, bytes_of.v_dim)]
        expected = [found.tables * dim // found.group for dim in dims]
        if bytes_of.dtype != CARRIER or expected != [tables.k_dim, tables.v_dim] or tables.heads != bytes_of.heads:
            raise DumpError(f"layers {index} and {count + index} are no integers with their scales")
        layers.append(LayerGeometry(bytes_of.heads, dims[0], dims[1], found.values, bytes_of.window))
    quantized = identity.quantized or {}
    return dataclasses.replace(identity, quantized=None, rope=quantized.get("rope"), keys=quantized.get("keys"),
                               layers=tuple(layers))  # fmt: skip


def as_values(snapshot: Snapshot, dtype: str | None = None) -> Snapshot:
    """The values of a quantized cache; any other snapshot as it is.

    Parameters
    ----------
    snapshot : Snapshot
    dtype : str, optional
        Dtype of the values, if not the one recorded.

    Raises
    ------
    UnsupportedError
        If it is not known whether they are Hadamard-rotated.
    """
    if snapshot.identity.quantized is None:
        return snapshot
    identity, scheme = value_identity(snapshot.identity), _scheme(snapshot.identity)
    if not scheme.told:
        raise UnsupportedError(
            f"session {snapshot.session!r}: llama.cpp may have Hadamard-rotated this quantized cache, and nothing "
            "tells whether it did; say --from-option hadamard=yes (its default) or hadamard=no (LLAMA_ATTN_ROT_DISABLE)"
        )
    if dtype is not None:
        layers = tuple(dataclasses.replace(layer, dtype=dtype) for layer in identity.layers)
        identity = dataclasses.replace(identity, layers=layers)
    return dataclasses.replace(snapshot, identity=identity, source=_Values(snapshot.source, scheme, identity.layers))


@dataclasses.dataclass(frozen=True, slots=True)
class _Scheme:
    name: str
    bits: int
    group: int
    tables: int
    values: str
    hadamard: tuple[int, int] | None
    told: bool


def _scheme(identity: Identity) -> _Scheme:
    found = dict(identity.quantized or {})
    name, values, turned = found.get("scheme"), found.get("values"), found.get("hadamard")
    bits, group, tables = {"q8_0": (8, 32, 1), "q4_0": (4, 32, 1)}.get(str(name), (0, 0, 0))
    if name == "mlx":
        bits, group, tables, turned = found.get("bits", 0), found.get("group", 0), 2, False
    sizes: tuple[int, int] | None = None
    if isinstance(turned, list) and len(turned) == 2 and all(size in (64, 128, 256, 512) for size in turned):
        sizes = (turned[0], turned[1])
    sound = isinstance(bits, int) and 0 < bits <= 8 and isinstance(group, int) and 0 < group <= 1 << 20
    if not sound or values not in DTYPES or (sizes is None and turned is not None and turned is not False):
        raise DumpError("identity field 'quantized' is malformed")
    if len(identity.layers) % 2:
        raise DumpError(f"a quantized cache has integers and scales, not {len(identity.layers)} layers")
    return _Scheme(str(name), bits, group, tables, str(values), sizes, turned is not None)


@dataclasses.dataclass(frozen=True, slots=True)
class _Values:
    """A `LayerSource` of values over one of integers and scales."""

    source: LayerSource
    scheme: _Scheme
    layers: tuple[LayerGeometry, ...]

    def layer(self, index: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """See `LayerSource.layer`."""
        integers = self.source.layer(index, start, stop)
        scales = self.source.layer(len(self.layers) + index, start, stop)
        dtype = DTYPES[self.layers[index].dtype]
        keys, values = (self._values(part, integers[part], scales[part]).astype(dtype) for part in (0, 1))
        return keys, values

    def _values(self, part: int, integers: np.ndarray, scales: np.ndarray) -> np.ndarray:
        raw = np.ascontiguousarray(integers).view(np.uint8)
        if self.scheme.name == "mlx":
            return _affine(raw, scales.astype(np.float32), self.scheme.bits)
        blocks = raw.reshape(*scales.shape, -1)
        values = ggml.dequantize(scales, blocks, self.scheme.name)
        sizes = self.scheme.hadamard
        return values if sizes is None else ggml.rotated(values, sizes[part])


def _affine(raw: np.ndarray, tables: np.ndarray, bits: int) -> np.ndarray:
    """Values of mlx's affine quantization: scale·q + bias per group, q packed from the lowest bits up."""
    if bits not in (2, 4, 8):
        raise UnsupportedError(f"values of mlx integers of {bits} bits (known: 2, 4, 8)")
    scales, biases = np.split(tables, 2, axis=-1)
    parts = [(raw >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    levels = np.stack(parts, axis=-1).reshape(*scales.shape, -1).astype(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        values = levels * scales[..., None] + biases[..., None]
    return np.asarray(values.reshape(*scales.shape[:-1], -1), np.float32)


def completed(identity: Identity, known: Identity, path: str | None = None) -> Identity:
    """`Identity.completed` for values and integers alike: what is known of a model speaks of its values.

    Raises
    ------
    IdentityError
        Naming a field that is known on both sides and differs.
    """
    if identity.quantized is None or known.quantized is not None:
        return identity.completed(known, path)
    values = value_identity(identity).completed(known, path)
    turned = {name: value for name, value in (("rope", values.rope), ("keys", values.keys)) if value is not None}
    return dataclasses.replace(values, rope=None, keys=None, layers=identity.layers,
                               quantized={**identity.quantized, **turned})  # fmt: skip
