"""Rate control: token classes of a session, and the step by which it meets a target of KL divergence or of bits.

Predicted KL is the profile's: ``log2 KL = a + c log2 D`` with D the mean over tokens of importance times squared error
in whitened rows; a and c were measured at calibration.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from pltpack.codec import importance
from pltpack.codec.base import SINK_TOKENS
from pltpack.codec.coefficients import ESCAPE, LARGEST, Order, cost_tables
from pltpack.codec.profile import OCTAVE, Profile
from pltpack.codec.rows import to_rows
from pltpack.snapshot import Snapshot

if TYPE_CHECKING:
    from pltpack.codec.transform import TransformCodec

#: Bound of a unit's step, 2^±40 whitened units.
MAX_LOG_STEP = 40 * OCTAVE
#: Tokens from which a session's step is chosen.
SAMPLE_TOKENS = 384
_PIECE = 2048
#: Steps that are tried, in 1/24 octave, around 1.
_REACH = 6 * OCTAVE


def log_of(value: float) -> int:
    """A positive number as the nearest integer logarithm in 1/24 octave."""
    return int(np.clip(round(OCTAVE * float(np.log2(value))), -MAX_LOG_STEP, MAX_LOG_STEP))


def value_of(logs: np.ndarray) -> np.ndarray:
    """Inverse of `log_of`: float64."""
    found: np.ndarray = np.exp2(np.asarray(logs, np.float64) / OCTAVE)
    return found


def steps(log_step: int) -> np.ndarray:
    """Step of each token class: int32 logarithms; a class is half an octave finer than the one before."""
    return (log_step - OCTAVE // 2 * (np.arange(importance.CLASSES) - importance.ORDINARY)).astype(np.int32)


def token_classes(profile: Profile, snapshot: Snapshot, cuts: Sequence[int]) -> np.ndarray:
    """Classes of all tokens of a session: captured importance if it has some, else predicted; uint8 ``[T]``.

    Parameters
    ----------
    profile : Profile
    snapshot : Snapshot
    cuts : sequence of int
        Positions before which the cache may be cut and continued; turn ends are found by the profile's token ids.
    """
    tokens = len(snapshot)
    found = np.empty((tokens, sum(2 * layer.heads for layer in profile.layers)), np.float32)
    for start in range(0, tokens, _PIECE):
        stop, at = min(start + _PIECE, tokens), 0
        for index, layer in enumerate(profile.layers):
            found[start:stop, at : at + 2 * layer.heads] = importance.norms(snapshot.layer(index, start, stop))
            at += 2 * layer.heads
    ends = np.flatnonzero(np.isin(snapshot.tokens, profile.about["turn_ends"])) + 1
    distance = importance.distances(tokens, [*cuts, *ends.tolist()])
    predicted = importance.predict(profile.importance, importance.features(found, distance, np.arange(tokens)))
    if snapshot.importance is not None and tokens:
        captured = np.log2(np.maximum(np.nan_to_num(snapshot.importance.astype(np.float64)), 1e-30))
        # Captured importance has a scale of its own; the prediction's mean is what the step was calibrated for.
        predicted = (captured - np.median(captured) + np.median(predicted)).astype(np.float32)
    return importance.classes(predicted)


def choose(
    codec: TransformCodec,
    snapshot: Snapshot,
    classes: np.ndarray,
    *,
    target_kl: float | None = None,
    target_bits: float | None = None,
) -> int:
    """The largest step of a session that meets a target, as a logarithm in 1/24 octave."""
    probe = Probe(codec, snapshot, classes)
    low, high = -_REACH, _REACH
    while low < high:
        middle = (low + high + 1) // 2
        meets = probe.kl(middle) <= target_kl if target_kl is not None else probe.bits(middle) >= (target_bits or 0)
        low, high = (middle, high) if meets else (low, middle - 1)
    return low


class Probe:
    """Coefficients of a sample of a session's tokens, for predictions at any step."""

    def __init__(self, codec: TransformCodec, snapshot: Snapshot, classes: np.ndarray) -> None:
        self._profile, self._tables = codec.profile, codec.profile.coder
        tokens = len(snapshot)
        first = min(SINK_TOKENS, max(tokens - 1, 0))
        count = min(tokens - first, SAMPLE_TOKENS)
        chosen = first + np.arange(count) * (tokens - first) // max(count, 1)
        self._classes = classes[chosen].astype(np.int64)
        self._groups = []
        layers, identity = codec.profile.layers, snapshot.identity
        for bases in codec.all_bases():
            group = bases.group
            rows = np.empty((count, group.last - group.first), np.float32)
            for start in range(0, count, 32):
                # A sampled token is read alone: a session may be far larger than the memory.
                for place in range(start, min(start + 32, count)):
                    at = int(chosen[place])
                    arrays = [snapshot.layer(index, at, at + 1) for index in range(group.start, group.stop)]
                    rows[place] = to_rows(arrays, layers[group.start : group.stop], identity, at)[0][0]
            self._groups.append((bases, bases.analyse(rows - bases.mean)))
        self._elements = sum(layer.elements_per_token for layer in layers)

    def kl(self, log_step: int) -> float:
        """Predicted KL divergence in nats."""
        every = steps(log_step)
        width = value_of(every)[self._classes]
        error = np.zeros(len(self._classes))
        for bases, found in self._groups:
            order = Order.of(bases.logs, every, self._classes, self._tables)
            scaled = found / width[:, None].astype(np.float32)
            rest = scaled - np.rint(scaled)
            dead = np.arange(found.shape[1])[None] >= order.live[self._classes][:, None]
            np.copyto(rest, scaled, where=dead)
            error += np.einsum("tn,tn->t", rest, rest, dtype=np.float64) * width**2
        weight = np.exp2(self._classes.astype(np.float64) - importance.ORDINARY)
        mean = float((weight * error).mean()) if len(error) else 0.0
        a, c = self._profile.about["kl"]
        return float(np.exp2(min(a + c * np.log2(max(mean, 1e-30)), 100.0)))

    def bits(self, log_step: int) -> float:
        """Predicted bits per element, exact tokens and headers left out."""
        every, total = steps(log_step), 0.0
        width = value_of(every)[self._classes].astype(np.float32)
        costs = cost_tables(self._tables)
        for bases, found in self._groups:
            order = Order.of(bases.logs, every, self._classes, self._tables)
            q = np.rint(found / width[:, None]).astype(np.int64)
            kind = self._tables.classes(bases.logs[None] - every[self._classes][:, None])
            high = q >> self._tables.raw[np.maximum(kind, 0)]
            symbol = np.where(np.abs(high) <= LARGEST, np.where(high > 0, 2 * high - 1, -2 * high), ESCAPE)
            total += float(np.where(kind >= 0, costs[np.maximum(kind, 0), symbol], 0).sum())
            del order
        return (total / max(len(self._classes), 1) + 4) / self._elements
