"""Means of what several sessions have for the same tokens, at one position, and sessions with them in place."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import ml_dtypes
import numpy as np

from pltpack.codec import importance
from pltpack.codec.base import Codec, KeyValue
from pltpack.codec.rope import Rotation
from pltpack.codec.transform import TransformCodec
from pltpack.snapshot import DTYPES, Identity, LayerSource, Snapshot

#: Tokens whose keys are turned at once.
_PIECE = 256
#: Octaves by which one session may count more or less than the first.
_SPREAD = 2.0


class Mean:
    """Sums keys, turned to one position, and values of sessions in binary32.

    A profile says how much each session feels an error of each of its tokens, and weighs the sum; else all count
    equally. The matrices of sensitivity are the same for all sessions, so they make no difference to a mean.

    Parameters
    ----------
    identity : Identity
    position : int
        Of the first token.
    tokens : int
    codec : Codec
    """

    def __init__(self, identity: Identity, position: int, tokens: int, codec: Codec) -> None:
        self._identity, self._position = identity, position
        self._weights = codec.profile.importance if isinstance(codec, TransformCodec) else None
        self._sums = [
            (np.zeros((layer.heads, tokens, layer.k_dim), np.float32),
             np.zeros((layer.heads, tokens, layer.v_dim), np.float32))
            for layer in identity.layers
        ]  # fmt: skip
        self._weight = np.zeros(tokens, np.float32)
        self._first = np.full(tokens, np.nan)

    def add(self, arrays: Sequence[KeyValue], start: int, at: int, tokens: int) -> None:
        """Add a session's part; one with values that are not finite is left out.

        Parameters
        ----------
        arrays : sequence of (ndarray, ndarray)
            Per layer keys ``[H, n, D_k]`` and values ``[H, n, D_v]`` in the stored dtype.
        start : int
            Where it begins in its session.
        at : int
            Where it begins in the mean.
        tokens : int
            Length of its session.
        """
        wide = [(keys.astype(np.float32), values.astype(np.float32)) for keys, values in arrays]
        if not all(np.isfinite(array).all() for pair in wide for array in pair):
            return
        weight = self._counts(wide, start, at, tokens)
        part = slice(at, at + len(weight))
        self._weight[part] += weight
        for (keys, values), (key_sum, value_sum) in zip(wide, self._sums, strict=True):
            key_sum[:, part] += weight[:, None] * self._turned(keys, start, at)
            value_sum[:, part] += weight[:, None] * values

    def _counts(self, arrays: Sequence[KeyValue], start: int, at: int, tokens: int) -> np.ndarray:
        count = arrays[0][0].shape[1]
        if self._weights is None:
            return np.ones(count, np.float32)
        place = np.arange(start, start + count)
        norms = np.concatenate([importance.norms(pair) for pair in arrays], axis=1)
        found = importance.predict(self._weights, importance.features(norms, (tokens - place).astype(float), place))
        first = self._first[at : at + count]
        first[:] = np.where(np.isnan(first), found, first)
        counts: np.ndarray = np.exp2(np.clip(found - first, -_SPREAD, _SPREAD)).astype(np.float32)
        return counts

    def _turned(self, keys: np.ndarray, start: int, at: int) -> np.ndarray:
        rotation = Rotation.of(self._identity.rope, self._identity.keys, keys.shape[2])
        target = self._position + at
        if rotation is None or start == target:
            return keys
        pieces = [rotation.shift(keys[:, i : i + _PIECE], start + i, target + i)
                  for i in range(0, keys.shape[1], _PIECE)]  # fmt: skip
        return np.concatenate(pieces, axis=1)

    def layers(self, base: Snapshot) -> list[KeyValue]:
        """The mean in the stored dtype, per layer; what no session gave is as in `base`."""
        known = self._weight > 0
        stop = self._position + len(known)
        out = []
        for index, (layer, sums) in enumerate(zip(self._identity.layers, self._sums, strict=True)):
            dtype = DTYPES[layer.dtype]
            limit = float(ml_dtypes.finfo(dtype).max)
            both = []
            for total, own in zip(sums, base.layer(index, self._position, stop), strict=True):
                mean = np.array(own)
                found = total[:, known] / self._weight[known][:, None]
                mean[:, known] = np.clip(found, -limit, limit).astype(dtype)
                both.append(mean)
            out.append((both[0], both[1]))
        return out


@dataclasses.dataclass(frozen=True)
class _Replaced:
    """A `LayerSource` with other values from one token on."""

    base: LayerSource
    position: int
    layers: Sequence[KeyValue]

    def layer(self, index: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """See `LayerSource.layer`."""
        keys, values = self.base.layer(index, start, stop)
        low = max(start, self.position)
        high = min(stop, self.position + self.layers[index][0].shape[1])
        if low >= high:
            return keys, values
        out = []
        for array, replaced in zip((keys, values), self.layers[index], strict=True):
            changed = np.array(array)
            changed[:, low - start : high - start] = replaced[:, low - self.position : high - self.position]
            out.append(changed)
        return out[0], out[1]


def with_part(base: Snapshot, tokens: np.ndarray, layers: Sequence[KeyValue], position: int) -> Snapshot:
    """A session with other tokens and values at `position`: codecs prepare for it as for any session.

    Parameters
    ----------
    base : Snapshot
    tokens : ndarray
        int32 ``[T]``.
    layers : sequence of (ndarray, ndarray)
        Per layer keys ``[H, T, D_k]`` and values ``[H, T, D_v]`` in the stored dtype.
    position : int
    """
    ids = np.array(base.tokens)
    ids[position : position + len(tokens)] = tokens
    source = _Replaced(base.source, position, layers)
    return dataclasses.replace(base, tokens=ids, source=source, logprobs=None, logprob_ids=None)
