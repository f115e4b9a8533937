"""Snapshot: one session's captured KV cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

import numpy as np

from pltpack.errors import DumpError, UnsupportedError
from pltpack.identity import DTYPES, Identity, LayerGeometry, dtype_name

__all__ = [
    "DTYPES",
    "ArraySource",
    "Identity",
    "LayerGeometry",
    "LayerSource",
    "Snapshot",
    "dtype_name",
    "layer_geometry",
    "token_ids",
]


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
    try:
        array = np.asarray(tokens)
    except ValueError:
        raise UnsupportedError("tokens are lists of unequal lengths, not a list of integers", path) from None
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
