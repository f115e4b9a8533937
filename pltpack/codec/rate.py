"""Rate control: token classes of a session, and the step by which it meets a target of KL divergence or of bits.

Predicted KL is the profile's: ``log2 KL = a + c log2 D`` with D the mean squared error of whitened rows over tokens,
weighted by importance; a and c were measured at calibration. Attention is a budget: what all tokens of a session are
felt adds up to about the same in short and long ones, so it is their shares in it that predict, not the sum. Sessions
that are shorter than what was measured have more, by a power of their length (`Profile.length`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numba
import numpy as np

from pltpack.codec import importance, scaling
from pltpack.codec.base import SINK_TOKENS, Unit
from pltpack.codec.coefficients import OCTAVE, Order, cost_tables
from pltpack.codec.profile import Profile
from pltpack.codec.rans import HEADER_BYTES, LANES
from pltpack.codec.rows import to_rows
from pltpack.snapshot import Snapshot

if TYPE_CHECKING:
    from pltpack.codec.transform import TransformCodec

#: Bound of a unit's step, 2^±40 whitened units.
MAX_LOG_STEP = 40 * OCTAVE
#: Tokens from which a session's step is chosen.
SAMPLE_TOKENS = 384
#: Tokens that are enough to tell how large coefficients are.
FEW_TOKENS = 128
#: Elements, at most, that are looked at where bits are to be met, if those are more tokens.
_SAMPLE_ELEMENTS = 1 << 24
#: Tokens of a unit, as the archive cuts them unless they are few.
_UNIT_TOKENS = 256
#: A unit's own header and that of its coefficients.
_UNIT_HEADER_BYTES = 5 + 12
#: Share of its raw size that a token takes which is stored exactly and by itself.
_PLANES = 0.75
_RUN_TOKENS = 32
#: What a profile that was made without a model says of its source's KL divergence.
NOT_MEASURED = "not measured"
_PIECE = 2048
#: How many times as long sessions count that end with a turn that is answered next: the importance of what is asked
#: there is raised, which makes up for a part of what shortness costs (docs/transform.md).
_ANSWERED = 2
#: Steps that are tried, in 1/24 octave, around 1.
_REACH = 6 * OCTAVE


def log_of(value: float) -> int:
    """A positive number as the nearest integer logarithm in 1/24 octave."""
    return int(np.clip(round(OCTAVE * float(np.log2(value))), -MAX_LOG_STEP, MAX_LOG_STEP))


def value_of(logs: np.ndarray) -> np.ndarray:
    """Inverse of `log_of`: float64."""
    found: np.ndarray = np.exp2(np.asarray(logs, np.float64) / OCTAVE)
    return found


def base_step(log_step: int) -> int:
    """The step that a session's classes start from, of the step of its ordinary tokens."""
    return max(log_step - OCTAVE // 2 * importance.SHIFT, -MAX_LOG_STEP)


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
    expected = importance.expected(profile.importance, found, cuts, _turns(profile, snapshot).tolist(),
                                   snapshot.importance)  # fmt: skip
    return importance.classes(expected - importance.SHIFT)


def _turns(profile: Profile, snapshot: Snapshot) -> np.ndarray:
    found: np.ndarray = np.flatnonzero(np.isin(snapshot.tokens, profile.about["turn_ends"])) + 1
    return found


def answered_next(profile: Profile, snapshot: Snapshot) -> bool:
    """Whether a session ends with a turn that is answered next, not in mid-text."""
    return importance.answered(len(snapshot), _turns(profile, snapshot)) is not None


def _shortness(profile: Profile, snapshot: Snapshot) -> float:
    """Octaves of KL that a session has more for being short."""
    return profile.length.octaves(len(snapshot) * (_ANSWERED if answered_next(profile, snapshot) else 1))


def predicts_kl(profile: Profile) -> bool:
    """Whether a profile knows the model's KL divergence: one that was made of dumps alone says that it does not."""
    source = profile.about.get("source")
    return not (isinstance(source, dict) and source.get("kl") == NOT_MEASURED)


def choose(
    codec: TransformCodec,
    snapshot: Snapshot,
    classes: np.ndarray,
    *,
    target_kl: float | None = None,
    target_bits: float | None = None,
) -> tuple[int, Probe]:
    """The step of a session that meets a target, as a logarithm in 1/24 octave, and the sample that tells.

    Parameters
    ----------
    codec : TransformCodec
        With the session's classes set.
    snapshot : Snapshot
    classes : ndarray
        `token_classes`.
    target_kl : float, optional
        The largest step at which no more KL divergence is predicted is chosen.
    target_bits : float, optional
        The smallest step that takes no more bits per element, or the largest of all.

    Raises
    ------
    ValueError
        If the finest step is not fine enough.
    """
    low, high = base_step(-_REACH), base_step(_REACH)
    if target_kl is not None:
        if not predicts_kl(codec.profile):
            raise ValueError("the profile was made without a model and predicts no KL divergence: choose the tier "
                             "fixed-step or a target of bits or bytes, or calibrate with the model")  # fmt: skip
        probe = Probe(codec, snapshot, classes)
        if (least := probe.kl(low)) > target_kl:
            raise ValueError(f"at the finest step a KL divergence of {least:.3g} is predicted, not {target_kl:g}")
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if probe.kl(middle) <= target_kl else (low, middle - 1)
        probe.adapt(low)
        return low, probe
    per_token = sum(layer.elements_per_token for layer in codec.profile.layers)
    probe = Probe(codec, snapshot, classes, max(SAMPLE_TOKENS, _SAMPLE_ELEMENTS // per_token))
    size = Size(codec, snapshot, probe)
    probe.adapt(_met(size, target_bits or 0, low, high))
    return _met(size, target_bits or 0, low, high), probe


def _met(size: Size, target_bits: float, low: int, high: int) -> int:
    """The smallest step from `low` to `high` that takes no more bits per element, or the largest of all."""
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if size.bits(middle) <= target_bits else (middle + 1, high)
    return low


def predicted_kl(codec: TransformCodec, snapshot: Snapshot, target_kl: float, most: int) -> float:
    """KL divergence in nats that is predicted over `most` of a session's tokens at the step that meets a target.

    Parameters
    ----------
    codec : TransformCodec
        A started one.
    snapshot : Snapshot
    target_kl : float
        What the step is chosen for, by a sample of `SAMPLE_TOKENS`; see `choose`.
    most : int
        Tokens to look at.

    Raises
    ------
    ValueError
        If the finest step is not fine enough.
    """
    classes = token_classes(codec.profile, snapshot, [len(snapshot)])
    step, _ = choose(codec, snapshot, classes, target_kl=target_kl)
    return Probe(codec, snapshot, classes, most).kl(step)


class Probe:
    """Coefficients of a sample of a session's tokens, for predictions at any step.

    Parameters
    ----------
    codec : TransformCodec
    snapshot : Snapshot
    classes : ndarray
        `token_classes`.
    most : int
        Tokens to look at.

    Attributes
    ----------
    tokens : int
        Tokens looked at.
    lost : float
        Raw bytes a token, on average, of those that are not finite in a layer group.
    shifts : dict
        By first layer of a group, how its scales are moved after `adapt`.
    """

    def __init__(
        self, codec: TransformCodec, snapshot: Snapshot, classes: np.ndarray, most: int = SAMPLE_TOKENS
    ) -> None:
        self._profile, self._tables = codec.profile, codec.profile.coder
        runs = _sample(len(snapshot), most)
        layers, identity = codec.profile.layers, snapshot.identity
        self._classes = np.concatenate([classes[start:stop] for start, stop in runs]).astype(np.int64)
        self.tokens, self._shortness = len(self._classes), _shortness(codec.profile, snapshot)
        self.lost = 0.0
        self.shifts: dict[int, np.ndarray] = {}
        self._logs: dict[int, np.ndarray] = {}
        self._groups = []
        for bases in codec.all_bases():
            group, parts, finite = bases.group, [], []
            for start, stop in runs:
                arrays = [snapshot.layer(index, start, stop) for index in range(group.start, group.stop)]
                rows, good = to_rows(arrays, layers[group.start : group.stop], identity, start)
                rows -= bases.mean
                rows[~good] = 0
                parts.append(rows)
                finite.append(good)
            size = sum(layer.bytes_per_token for layer in layers[group.start : group.stop])
            self.lost += size * (1 - float(np.concatenate(finite).mean())) if self.tokens else 0.0
            self._groups.append((bases, bases.analyse(np.concatenate(parts))))
        self._costs = cost_tables(self._tables)
        every = classes[min(SINK_TOKENS, len(classes) - 1) :] if len(classes) else np.zeros(1, np.uint8)
        self._budget = float(_weights(every).mean())

    def _measure(self, log_step: int) -> tuple[np.ndarray, float, float]:
        """Squared error of each token in whitened rows, bits of all of them, and bits that fill a unit's rows."""
        every = steps(log_step)
        errors, bits, filling = np.zeros(len(self._classes)), 0.0, 0.0
        for bases, found in self._groups:
            logs = self._logs.get(bases.group.start, bases.logs)
            order = Order.of(logs, every, self._classes, self._tables)
            bits += _measure(found, self._classes, value_of(every), order.bounds, self._tables.raw, self._costs, errors)
            # Half a row of zeros, on average, for every class that occurs.
            filling += LANES / 2 * float((self._costs[:, 0] - self._tables.raw)[order.counts > 0].sum())
        return errors, bits, filling

    def adapt(self, log_step: int) -> None:
        """Let scales be the session's own from here on: see `pltpack.codec.scaling.choose`."""
        every = steps(log_step)
        for bases, found in self._groups:
            shifts = scaling.choose(found, self._classes, every, value_of(every), bases.logs, self._tables)
            if shifts is not None:
                self.shifts[bases.group.start] = shifts
                self._logs[bases.group.start] = scaling.shifted(bases.logs, shifts)

    def distortion(self, log_step: int) -> float:
        """Mean squared error of whitened rows over tokens, weighted by importance."""
        errors, _, _ = self._measure(log_step)
        return float((_weights(self._classes) * errors).mean()) / self._budget if len(errors) else 0.0

    def kl(self, log_step: int) -> float:
        """Predicted KL divergence in nats."""
        a, c = self._profile.about["kl"]
        found = a + c * np.log2(max(self.distortion(log_step), 1e-30)) + self._shortness
        return float(np.exp2(min(found, 100.0)))

    def bits(self, log_step: int) -> tuple[float, float]:
        """Predicted bits of a token's coefficients in all layer groups, and what a unit of each takes besides."""
        _, bits, filling = self._measure(log_step)
        heads = 8 * len(self._groups) * (HEADER_BYTES + _UNIT_HEADER_BYTES)
        return bits / max(self.tokens, 1) + 4 * len(self._groups), filling + heads


def _weights(classes: np.ndarray) -> np.ndarray:
    """Importance of token classes, in a unit of its own."""
    return np.exp2(classes.astype(np.float64))


class Size:
    """How much a session takes: its units' payloads, nothing besides.

    Parameters
    ----------
    codec : TransformCodec
        With the session's classes set.
    snapshot : Snapshot
    probe : Probe
    """

    def __init__(self, codec: TransformCodec, snapshot: Snapshot, probe: Probe) -> None:
        self._probe, self._tokens = probe, len(snapshot)
        self._elements = max(snapshot.elements, 1)
        self._first = min(SINK_TOKENS, self._tokens)
        self._exact = 8.0 * _exact_bytes(codec, snapshot, 0, self._first)
        # Planes of bytes, compressed; rare enough for a rule of thumb.
        self._exact += _PLANES * 8 * probe.lost * (self._tokens - self._first)

    def bits(self, log_step: int) -> float:
        """Predicted bits per element."""
        token, unit = self._probe.bits(log_step)
        more = max(self._tokens - self._first, 0)
        return (self._exact + more * token + unit * ((self._tokens - 1) // _UNIT_TOKENS)) / self._elements


def _exact_bytes(codec: TransformCodec, snapshot: Snapshot, start: int, stop: int) -> int:
    """Bytes of units of a few tokens, encoded: most of it is what is kept exactly."""
    total = 0
    for bases in codec.all_bases():
        layers = range(bases.group.start, bases.group.stop)
        geometries = codec.profile.layers[layers.start : layers.stop]
        unit = Unit(layers.start, geometries[0], start, stop - start, layers=tuple(geometries))
        total += len(codec.encode_span(unit, [snapshot.layer(index, start, stop) for index in layers]))
    return total


def _sample(tokens: int, most: int) -> list[tuple[int, int]]:
    """Runs of tokens at even distances, the sinks left out where there are others."""
    first = SINK_TOKENS if tokens > SINK_TOKENS else 0
    if tokens - first <= most:
        return [(first, tokens)]
    count = max(most // _RUN_TOKENS, 2)
    starts = [first + i * (tokens - first - _RUN_TOKENS) // (count - 1) for i in range(count)]
    return [(start, start + _RUN_TOKENS) for start in starts]


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _measure(found: Any, classes: Any, widths: Any, bounds: Any, raw: Any, costs: Any, errors: Any) -> Any:
    bits = 0.0
    for t in range(found.shape[0]):
        j = classes[t]
        scale = np.float32(1 / widths[j])
        squared = 0.0
        for i in range(bounds[j, 0], found.shape[1]):
            x = found[t, i] * scale
            squared += x * x
        for kind in range(len(raw)):
            for i in range(bounds[j, kind + 1], bounds[j, kind]):
                x = found[t, i] * scale
                q = np.rint(x)
                squared += (x - q) * (x - q)
                high = np.int64(q) >> raw[kind]
                symbol = (2 * high - 1 if high > 0 else -2 * high) if -31 <= high <= 31 else 63
                bits += costs[kind, symbol]
        errors[t] += squared * widths[j] * widths[j]
    return bits
