"""Identity: the model that a cache belongs to, and the shape of its layers."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from pltpack.errors import IdentityError, UnsupportedError

#: Cache dtypes by the names safetensors gives them.
DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: np.dtype[Any]) -> str:
    """The safetensors name of a cache dtype.

    Raises
    ------
    UnsupportedError
        If the dtype is not one of `DTYPES`.
    """
    try:
        return _NAMES[np.dtype(dtype)]
    except KeyError:
        raise UnsupportedError(f"dtype {dtype} is not a KV cache dtype (known: {', '.join(DTYPES)})") from None


@dataclasses.dataclass(frozen=True, slots=True)
class LayerGeometry:
    """Shape of one layer's cache, without the token axis.

    Attributes
    ----------
    heads : int
        Number of KV heads.
    k_dim, v_dim : int
        Head dimension of keys and of values.
    dtype : str
        Name of the stored dtype, a key of `DTYPES`.
    window : int or None
        Sliding-window length in tokens; None for full attention or not recorded.
    """

    heads: int
    k_dim: int
    v_dim: int
    dtype: str
    window: int | None = None

    @property
    def elements_per_token(self) -> int:
        """Key and value elements that one token adds to this layer."""
        return self.heads * (self.k_dim + self.v_dim)

    @property
    def bytes_per_token(self) -> int:
        """Raw bytes that one token adds to this layer."""
        return self.elements_per_token * DTYPES[self.dtype].itemsize


@dataclasses.dataclass(frozen=True)
class Identity:
    """What a cache belongs to. A field that a dump does not record is None (unknown).

    Attributes
    ----------
    model : str or None
        Model name as the dump gives it.
    weights, tokenizer : str or None
        Digests of the model's weights and of its tokenizer.
    rope : mapping or None
        RoPE parameters: ``type``, ``theta``, ``dim``, ``style`` (``half`` or ``interleaved``), and what the type needs.
    keys : str or None
        ``rotated`` when keys are stored with RoPE applied, ``unrotated`` when not.
    layers : tuple of LayerGeometry
        One entry per layer, always known.
    tp_rank, tp_size : int or None
        Tensor-parallel rank and size.
    salt : str or None
        Tenant: sessions of different salts never share anything.
    quantized : mapping or None
        How the engine quantized the cache, where the layers hold its integers and scales instead of values: see
        `pltpack.dumps.quantized`.
    """

    model: str | None = None
    weights: str | None = None
    tokenizer: str | None = None
    rope: Mapping[str, Any] | None = None
    keys: str | None = None
    layers: tuple[LayerGeometry, ...] = ()
    tp_rank: int | None = None
    tp_size: int | None = None
    salt: str | None = None
    quantized: Mapping[str, Any] | None = None

    #: Fields that every session of one archive agrees on; the salt may differ and then forbids sharing.
    ARCHIVE_FIELDS = ("model", "weights", "tokenizer", "quantized", "rope", "keys", "layers", "tp_rank", "tp_size")

    def __post_init__(self) -> None:
        # What a file gives back: lists for tuples, text for keys.
        for name in ("rope", "quantized"):
            value = getattr(self, name)
            if isinstance(value, Mapping):
                with contextlib.suppress(TypeError, ValueError, RecursionError):
                    object.__setattr__(self, name, json.loads(json.dumps(dict(value), allow_nan=False)))

    def check(self, path: str | None = None) -> None:
        """Check that files can hold this identity.

        Raises
        ------
        UnsupportedError
            If a field has the wrong type, or is not plain JSON.
        """
        try:
            self.from_json(json.loads(json.dumps(self.to_json(), allow_nan=False)))
        except UnsupportedError as error:
            raise error.at(path) if path else error from None
        except (TypeError, ValueError, RecursionError) as error:
            raise UnsupportedError(f"identity cannot be written as JSON: {error}", path) from None

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping; unknown fields are left out."""
        out: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            if field.name == "layers":
                names = [f.name for f in dataclasses.fields(LayerGeometry)]
                value = [{n: v for n in names if (v := getattr(layer, n)) is not None} for layer in value]
            elif field.name in ("rope", "quantized"):
                value = dict(value)
            out[field.name] = value
        return out

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Identity:
        """Inverse of `to_json`.

        Raises
        ------
        UnsupportedError
            If a field is unknown or has the wrong type.
        """
        kinds: dict[str, type | tuple[type, ...]] = {
            "model": str, "weights": str, "tokenizer": str, "rope": Mapping, "keys": str,
            "layers": list, "tp_rank": int, "tp_size": int, "salt": str, "quantized": Mapping,
        }  # fmt: skip
        if not isinstance(data, Mapping):
            raise UnsupportedError("identity is not a JSON object")
        values: dict[str, Any] = {}
        for name, value in data.items():
            if name not in kinds:
                raise UnsupportedError(f"identity has an unknown field {name!r}")
            if value is None:
                continue
            if not isinstance(value, kinds[name]) or isinstance(value, bool):
                raise UnsupportedError(f"identity field {name!r} has the wrong type")
            values[name] = value
        if values.get("keys", "rotated") not in ("rotated", "unrotated"):
            raise UnsupportedError("identity field 'keys' is neither 'rotated' nor 'unrotated'")
        values["layers"] = tuple(_layer_from_json(layer) for layer in values.get("layers", ()))
        return cls(**values)

    def completed(self, known: Identity, path: str | None = None) -> Identity:
        """The same, its unknown fields (and layers' windows) filled with what is known of the model otherwise.

        The dtype of `known`'s layers is that of other caches and does not matter.

        Raises
        ------
        IdentityError
            Naming a field that is known on both sides and differs.
        """
        values: dict[str, Any] = {}
        for name in (*self.ARCHIVE_FIELDS, "salt"):
            mine, theirs = getattr(self, name), getattr(known, name)
            if name == "layers" and mine and theirs:
                values[name] = mine = _with_windows(mine, theirs)
                mine, theirs = ([dataclasses.replace(layer, dtype="") for layer in layers]
                                for layers in (mine, _with_windows(theirs, mine)))  # fmt: skip
            elif name == "rope" and mine and theirs:
                # A dump may record a part of the parameters only; the style is the engine's, not the model's.
                values[name] = {**theirs, **mine}
                if not values[name].get("permuted", True) or ("style" in mine and "permuted" not in mine):
                    values[name].pop("permuted", None)
                mine = {**values[name], "style": mine.get("style", theirs.get("style"))}
                theirs = {**mine, **theirs, "style": mine["style"]}
                for rope in (mine, theirs):
                    rope.pop("permuted", None)
            else:
                values[name] = theirs if mine in (None, ()) else mine
            if mine not in (None, ()) and theirs not in (None, ()) and mine != theirs:
                raise IdentityError(_difference(name, mine, theirs), path)
        return Identity(**values)

    def digest(self) -> str:
        """SHA-256 (hex) of the canonical JSON of all fields but the salt."""
        data = self.to_json()
        data.pop("salt", None)
        return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def require_same(self, other: Identity, path: str | None = None) -> None:
        """Check that `other` may live in one archive with this identity (salts apart).

        Unknown agrees only with unknown.

        Raises
        ------
        IdentityError
            Naming the first field that differs, with both values.
        """
        for name in self.ARCHIVE_FIELDS:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                raise IdentityError(_difference(name, mine, theirs), path)

    def require_loadable(self, loader: Identity, accept_unknown: Iterable[str] = (), path: str | None = None) -> None:
        """Check that a loader with identity `loader` may take caches of this identity, salt included.

        A field unknown to the loader is not checked, except the salt; one known to the loader and unknown here is
        refused unless named in `accept_unknown`. An empty `loader.layers` counts as unknown.

        Raises
        ------
        IdentityError
            Naming the first field that differs.
        """
        accepted = set(accept_unknown)
        for name in (*self.ARCHIVE_FIELDS, "salt"):
            mine, theirs = getattr(self, name), getattr(loader, name)
            # What no loader takes by mistake: another tenant's caches, and integers for values.
            if name not in ("salt", "quantized") and (theirs is None or theirs == ()):
                continue
            if mine == theirs or (mine is None and name in accepted):
                continue
            hint = f" (take it with --accept-unknown {name})" if mine is None else ""
            raise IdentityError(_difference(name, mine, theirs) + hint, path)


def _with_windows(layers: tuple[LayerGeometry, ...], known: tuple[LayerGeometry, ...]) -> tuple[LayerGeometry, ...]:
    if len(layers) != len(known):
        return layers
    return tuple(
        dataclasses.replace(mine, window=mine.window or theirs.window)
        for mine, theirs in zip(layers, known, strict=True)
    )


def _layer_from_json(data: Any) -> LayerGeometry:
    needed = {"heads", "k_dim", "v_dim", "dtype"}
    if not isinstance(data, Mapping) or not needed <= set(data) <= needed | {"window"}:
        raise UnsupportedError("identity field 'layers' has a malformed entry")
    for name in ("heads", "k_dim", "v_dim", "window"):
        value = data.get(name)
        if name == "window" and value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= 1 << 20:
            raise UnsupportedError(f"identity layer field {name!r} is not a positive integer")
    if not isinstance(data["dtype"], str) or data["dtype"] not in DTYPES:
        raise UnsupportedError(f"identity layer dtype {data['dtype']!r} is unknown")
    return LayerGeometry(data["heads"], data["k_dim"], data["v_dim"], data["dtype"], data.get("window"))


def _difference(name: str, mine: Any, theirs: Any) -> str:
    if name == "layers" and mine and theirs:
        if len(mine) != len(theirs):
            return f"identity field 'layers' differs: {len(mine)} layers against {len(theirs)}"
        index = next(i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b)
        a, b = (dataclasses.asdict(layers[index]) for layers in (mine, theirs))
        part = next(key for key in a if a[key] != b[key])
        return f"identity field 'layers[{index}].{part}' differs: {a[part]!r} against {b[part]!r}"
    shown = ["unknown" if v is None else repr(v) for v in (mine, theirs)]
    return f"identity field {name!r} differs: {shown[0]} against {shown[1]}"
