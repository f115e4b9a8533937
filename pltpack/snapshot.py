"""Snapshot and Identity: what one session's captured KV cache is, and which model it belongs to."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import ml_dtypes
import numpy as np

from pltpack.errors import DumpError, IdentityError, UnsupportedError

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


@runtime_checkable
class LayerSource(Protocol):
    """Where a snapshot's arrays come from: a file read on demand, or arrays in memory."""

    def layer(self, index: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys ``[H_kv, stop - start, D_k]`` and values ``[H_kv, stop - start, D_v]`` of one layer's token range."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class ArraySource:
    """A `LayerSource` over arrays in memory: per layer ``(keys [H, T, D_k], values [H, T, D_v])``."""

    arrays: tuple[tuple[np.ndarray, np.ndarray], ...]

    def layer(self, index: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """See `LayerSource.layer`."""
        keys, values = self.arrays[index]
        return keys[:, start:stop], values[:, start:stop]


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """One session's captured cache.

    Attributes
    ----------
    session : str
        Session name, unique in an archive.
    tokens : ndarray
        Token ids, int32 ``[T]``.
    identity : Identity
        What the cache belongs to; ``identity.layers`` gives the geometry of `source`.
    source : LayerSource
        Gives the arrays, layer by layer and token range by token range.
    origin : str or None
        The file the snapshot came from, for error messages.
    logprobs : ndarray or None
        The model's top-k next-token log-probabilities, float32 ``[T, k]``, with `logprob_ids` int32 ``[T, k]``.
    importance : ndarray or None
        Captured per-token importance, float32 ``[T]``.
    """

    session: str
    tokens: np.ndarray
    identity: Identity
    source: LayerSource
    origin: str | None = None
    logprobs: np.ndarray | None = None
    logprob_ids: np.ndarray | None = None
    importance: np.ndarray | None = None

    @classmethod
    def from_arrays(
        cls,
        session: str,
        tokens: Any,
        layers: Iterable[tuple[np.ndarray, np.ndarray]],
        identity: Identity | None = None,
        **extra: Any,
    ) -> Snapshot:
        """Make a snapshot of arrays in memory; the geometry in `identity` is taken from the arrays.

        Parameters
        ----------
        session : str
        tokens : array_like
            Token ids ``[T]``.
        layers : iterable of (keys, values)
            ``[H_kv, T, D_k]`` and ``[H_kv, T, D_v]``, both of one cache dtype.
        identity : Identity, optional
            Its `layers` are replaced.

        Raises
        ------
        UnsupportedError
            If shapes or dtypes do not fit together, or `tokens` are not token ids.
        """
        ids = token_ids(tokens)
        arrays = tuple((np.asarray(k), np.asarray(v)) for k, v in layers)
        geometry = tuple(layer_geometry(i, k, v, len(ids)) for i, (k, v) in enumerate(arrays))
        base = identity if identity is not None else Identity()
        if base.layers and len(base.layers) == len(geometry):
            geometry = tuple(
                dataclasses.replace(g, window=b.window) for g, b in zip(geometry, base.layers, strict=True)
            )
        return cls(session, ids, dataclasses.replace(base, layers=geometry), ArraySource(arrays), **extra)

    def __len__(self) -> int:
        return len(self.tokens)

    def layer(self, index: int, start: int = 0, stop: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values of one layer, ``[H_kv, stop - start, D]`` each, in their stored dtype.

        Raises
        ------
        DumpError
            If the source gives other shapes or dtypes than the identity says: sources are anybody's, and codecs trust.
        """
        stop = len(self) if stop is None else stop
        arrays = self.source.layer(index, start, stop)
        shape = self.identity.layers[index]
        for name, array, dim in zip(("keys", "values"), arrays, (shape.k_dim, shape.v_dim), strict=True):
            wanted = (shape.heads, stop - start, dim)
            if array.shape != wanted or array.dtype != DTYPES[shape.dtype]:
                found, expected = f"{array.dtype} {list(array.shape)}", f"{shape.dtype} {list(wanted)}"
                where = f"session {self.session!r}, layer {index}: {name}"
                raise DumpError(f"{where} are {found}, not as the identity says ({expected})", self.origin)
        return arrays

    @property
    def raw_bytes(self) -> int:
        """Bytes of all keys and values as stored in the dump (tokens not counted)."""
        return len(self) * sum(layer.bytes_per_token for layer in self.identity.layers)

    @property
    def elements(self) -> int:
        """Number of key and value elements."""
        return len(self) * sum(layer.elements_per_token for layer in self.identity.layers)


def token_ids(tokens: Any, path: str | None = None) -> np.ndarray:
    """Token ids as int32 ``[T]``.

    Raises
    ------
    UnsupportedError
        If `tokens` are not one-dimensional integers from 0 to 2**31 - 1.
    """
    array = np.asarray(tokens)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise UnsupportedError(f"tokens are {array.dtype} of shape {list(array.shape)}, not a list of integers", path)
    if array.size and (int(array.min()) < 0 or int(array.max()) >= 1 << 31):
        raise UnsupportedError("token ids are outside 0 to 2**31 - 1", path)
    return array.astype(np.int32)


def layer_geometry(index: int, keys: np.ndarray, values: np.ndarray, tokens: int) -> LayerGeometry:
    """Check one layer's arrays against `tokens` and give their geometry.

    Raises
    ------
    UnsupportedError
        Naming the layer and what does not fit.
    """
    if keys.ndim != 3 or values.ndim != 3:
        raise UnsupportedError(f"layer {index}: keys and values must be [heads, tokens, dim]")
    if keys.dtype != values.dtype:
        raise UnsupportedError(f"layer {index}: keys are {keys.dtype} but values are {values.dtype}")
    if keys.shape[0] != values.shape[0]:
        raise UnsupportedError(f"layer {index}: {keys.shape[0]} key heads but {values.shape[0]} value heads")
    for name, array in (("keys", keys), ("values", values)):
        if array.shape[1] != tokens:
            raise UnsupportedError(f"layer {index}: {name} hold {array.shape[1]} tokens but the session has {tokens}")
        if array.shape[0] == 0 or array.shape[2] == 0:
            raise UnsupportedError(f"layer {index}: {name} have an empty shape {list(array.shape)}")
    return LayerGeometry(keys.shape[0], keys.shape[2], values.shape[2], dtype_name(keys.dtype))
