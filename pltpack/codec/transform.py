"""The calibrated transform codec: un-rotate, whiten by sensitivity, KLT over layers, a step per token, static rANS.

Bitstream: spec/codecs.md, section "transform"; the profile: spec/profile.md. The transform is the KVTC recipe's
(arXiv 2511.01815) with error weighed by the Fisher information of what the model predicts instead of by variance, with
keys and values of all layers of a group in one basis, and with a second basis a layer for what the first one leaves.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from pltpack.codec import coefficients, exact_tokens, importance, prediction, rate, scaling, unit_head
from pltpack.codec.base import SINK_TOKENS, Codec, KeyValue, Samples, State, Unit
from pltpack.codec.bases import Bases, GroupBases
from pltpack.codec.begun import BegunUnit, geometries
from pltpack.codec.blas import single_threaded
from pltpack.codec.coefficients import OCTAVE, Order
from pltpack.codec.payload import Reader
from pltpack.codec.profile import NAMES, Profile
from pltpack.codec.rows import to_rows
from pltpack.snapshot import DTYPES, Identity, LayerGeometry, Snapshot

_FLAG_REFERENCE, _FLAG_PREDICTED, FLAG_SCALED = 1, 2, 4
#: Format 1.1 knows only a reference that takes the mean's place, and only scales as they were calibrated.
_FLAGS = (0, _FLAG_REFERENCE, _FLAG_REFERENCE | _FLAG_PREDICTED)
#: Token class of a token that is stored exactly.
EXACT = importance.CLASSES
#: Base step without a target, in whitened units.
DEFAULT_STEP = 1.0


class Analysed(NamedTuple):
    """A unit to be encoded.

    Attributes
    ----------
    bits : ndarray
        Of its tokens, as `exact_rows` gives them.
    exact : ndarray
        bool ``[T]``: tokens that are stored exactly.
    found, guess : ndarray
        Coefficients, float32 ``[T, N]``, and those of the reference; None where it does not predict.
    flags : int
        Of the payload.
    """

    bits: np.ndarray
    exact: np.ndarray
    found: np.ndarray
    flags: int
    guess: np.ndarray | None


class TransformCodec(Codec):
    """The calibrated transform codec.

    Parameters
    ----------
    step : float, optional
        Step of an ordinary token in whitened units (the profile's mean standard deviation of keys is 1).
    target_kl : float, optional
        Instead: the KL divergence in nats that the profile should predict, session by session.
    target_bits : float, optional
        Instead: bits per element, session by session.
    """

    codec_id: ClassVar[str] = "transform"
    spans: ClassVar[bool] = True
    layered: ClassVar[bool] = True
    # Importance is that of the session's end; docs/transform.md has the curve.
    recompute_at_cut: ClassVar[int] = 64
    calibrated: ClassVar[bool] = True

    def __init__(
        self, step: float | None = None, target_kl: float | None = None, target_bits: float | None = None
    ) -> None:
        given = [value for value in (step, target_kl, target_bits) if value is not None]
        if len(given) > 1 or not all(type(value) in (int, float) for value in given):
            raise ValueError("transform takes one of step, target_kl and target_bits, a positive number")
        self._config = {"step": step, "target_kl": target_kl, "target_bits": target_bits}
        for name, value in self.get_config().items():
            if not 1e-6 <= value <= 1e6:
                raise ValueError(f"transform: {name.replace('_', ' ')} of {value:g} is out of range (1e-06 to 1e+06)")
        self._log_step = rate.log_of(DEFAULT_STEP if step is None else step)
        self._classes: np.ndarray | None = None
        self._shifts: dict[int, np.ndarray] = {}

    def get_config(self) -> dict[str, Any]:
        """See `Codec.get_config`."""
        return {key: value for key, value in self._config.items() if value is not None}

    def learn(self, samples: Samples, identity: Identity) -> dict[str, np.ndarray]:
        """A profile is learnt by calibration, not from the sessions."""
        raise ValueError("the transform codec needs a profile (pltpack calibrate makes one)")

    @single_threaded
    def start(self, state: State, identity: Identity) -> None:
        """Check a profile and prepare its matrices."""
        if len(state) > len(NAMES):
            raise ValueError("a profile holds arrays that are not known")
        self._profile = Profile(state, identity.layers)
        self._identity = identity
        self._tables = self._profile.coder
        self._bases = Bases(self._profile)

    def share(self, other: Codec) -> bool:
        """See `Codec.share`: the matrices are the profile's, whatever the step."""
        if not isinstance(other, TransformCodec):
            return False
        self._profile, self._identity = other._profile, other._identity
        self._tables, self._bases = other._tables, other._bases
        return True

    def preparations(self) -> list[Callable[[], object]]:
        """See `Codec.preparations`: one call a layer."""
        return [single_threaded(call) for bases in self._bases for call in bases.preparations()]

    @property
    def profile(self) -> Profile:
        """The started profile."""
        return self._profile

    def all_bases(self) -> Iterator[GroupBases]:
        """The bases of all layer groups, in order."""
        yield from self._bases

    def layer_groups(self, layers: int) -> list[range]:
        """See `Codec.layer_groups`."""
        return [range(group.start, group.stop) for group in self._profile.groups]

    @single_threaded
    def prepare(self, snapshot: Snapshot, cuts: Sequence[int] = ()) -> TransformCodec:
        """See `Codec.prepare`: the classes of all tokens of a session, and the step that meets the target."""
        out = copy.copy(self)
        out._classes = rate.token_classes(self._profile, snapshot, cuts)
        goal = {key: value for key, value in self.get_config().items() if key != "step"}
        if goal and len(snapshot):
            out._log_step, probe = rate.choose(out, snapshot, out._classes, **goal)
        else:
            out._log_step = rate.base_step(self._log_step)
            probe = rate.Probe(out, snapshot, out._classes, rate.FEW_TOKENS)
            probe.adapt(out._log_step)
        # Former versions' archives may hold keys of embeddings that they did not know: they know no shifts either.
        out._shifts = probe.shifts if self._identity.rope == snapshot.identity.rope else {}
        return out

    @property
    def found(self) -> dict[str, Any]:
        """See `Codec.found`."""
        return {"log_step": self._log_step, "classes": self._classes, "shifts": self._shifts}

    def resumed(self, found: Mapping[str, Any]) -> TransformCodec:
        """See `Codec.resumed`."""
        out = copy.copy(self)
        out._log_step, out._classes, out._shifts = found["log_step"], found["classes"], found["shifts"]
        return out

    @property
    def token_steps(self) -> np.ndarray:
        """Steps of all tokens of the session that `prepare` looked at: int32 ``[T]`` logarithms in 1/24 octave."""
        classes = np.empty(0, np.uint8) if self._classes is None else self._classes
        found: np.ndarray = rate.steps(self._log_step)[classes]
        return found

    def finer(self, most: np.ndarray) -> TransformCodec:
        """The prepared codec with steps that are no larger, up to rounding to classes.

        What others are predicted from pays for a finer step than its own session needs: a token near that session's
        beginning may be one of the last of another. A reference as fine as they need saves them three times their bits,
        where one with coarser steps saves them little.

        Parameters
        ----------
        most : ndarray
            int32 ``[T]``: see `token_steps`; the largest integers where any step will do.
        """
        out, every = copy.copy(self), rate.steps(self._log_step).astype(np.int64)
        # Half a class of tolerance: to the nearest.
        fine = every[None] <= np.asarray(most, np.int64)[:, None] + OCTAVE // 4
        fine[:, -1] = True
        wanted = fine.argmax(axis=1)
        own = np.full(len(wanted), importance.ORDINARY, np.uint8) if self._classes is None else self._classes
        out._classes = np.maximum(own, wanted).astype(np.uint8)
        return out

    def encode(self, unit: Unit, keys: np.ndarray, values: np.ndarray, reference: KeyValue | None = None) -> bytes:
        """See `Codec.encode`; only where a layer is a group of its own."""
        return self.encode_span(unit, [(keys, values)], None if reference is None else [reference])

    def decode(
        self, payload: memoryview, unit: Unit, keys: np.ndarray, values: np.ndarray, reference: KeyValue | None = None
    ) -> None:
        """See `Codec.decode`; only where a layer is a group of its own."""
        self.decode_span(payload, unit, [(keys, values)], None if reference is None else [reference])

    @single_threaded
    def encode_span(self, unit: Unit, arrays: Sequence[KeyValue], reference: Sequence[KeyValue] | None = None) -> bytes:
        """See `Codec.encode_span`."""
        return self._payload(unit, self._analysed(unit, arrays, reference))

    @single_threaded
    def encode_both(
        self, unit: Unit, arrays: Sequence[KeyValue], reference: Sequence[KeyValue]
    ) -> tuple[bytes, bytes]:
        """See `Codec.encode_both`: what takes the time is done once."""
        if not unit.near:
            return super().encode_both(unit, arrays, reference)
        found = self._analysed(unit, arrays, reference)
        return self._payload(unit, found), self._payload(unit, found._replace(flags=0, guess=None))

    def _analysed(self, unit: Unit, arrays: Sequence[KeyValue], reference: Sequence[KeyValue] | None) -> Analysed:
        bases, layers = self._bases_of(unit), geometries(unit)
        bits = unit_head.exact_rows(arrays)
        rows, finite = to_rows(arrays, layers, self._identity, unit.position)
        predict = reference is not None and unit.near
        plain = predict or reference is None
        rows -= bases.mean if plain else to_rows(reference or (), layers, self._identity, unit.position)[0]
        exact = ~finite | self._sinks(unit, bases, layers, bits)
        rows[exact] = 0
        flags, guess = _FLAG_REFERENCE * (reference is not None), None
        if predict and reference is not None:
            flags |= _FLAG_PREDICTED
            # One product of both is faster than two.
            both = bases.analyse(np.concatenate([rows, self._beyond_mean(bases, layers, unit, reference)]))
            found, guess = both[: unit.tokens], both[unit.tokens :]
        else:
            found = bases.analyse(rows)
        widths = rate.value_of(rate.steps(self._log_step))[self._unit_classes(unit)]
        exact |= ~(np.abs(found) < coefficients.MAX_VALUE * 0.5 * widths[:, None]).all(axis=1)
        return Analysed(bits, exact, found, flags, guess)

    def _payload(self, unit: Unit, analysed: Analysed) -> bytes:
        bases, layers = self._bases_of(unit), geometries(unit)
        bits, exact, found, flags, guess = analysed
        classes, steps, trust = self._unit_classes(unit), rate.steps(self._log_step), b""
        logs, scaled, shifts = self.unit_logs(unit)
        marks = np.flatnonzero(exact).astype("<u2")
        if guess is None:
            joint = np.where(exact, EXACT, classes)
            quantized = bases.quantize(found, joint, steps)
        else:
            predicted, quantized = prediction.choose(found, guess, classes, exact, steps, logs, self._tables)
            joint, steps = prediction.joint(classes, predicted, exact), prediction.lowered(steps)
            trust = unit_head.pack_nibbles(predicted)
        order = Order.of(logs, steps, joint, self._tables)
        header = unit_head.HEADER.pack(flags | scaled, self._log_step, len(marks))
        parts = [header, marks.tobytes(), unit_head.pack_nibbles(np.where(exact, 0, classes)), trust, shifts,
                 coefficients.encode(quantized, order, self._tables)]  # fmt: skip
        if len(marks):
            at = unit.position + marks.astype(np.int64)
            parts.append(exact_tokens.encode(bits[exact], at, *self._exact_layout(bases, layers), self._tables))
        return b"".join(parts)

    def decode_span(
        self, payload: memoryview, unit: Unit, out: Sequence[KeyValue], reference: Sequence[KeyValue] | None = None
    ) -> None:
        """See `Codec.decode_span`."""
        begun = self.begin_span(payload, unit, reference is not None)
        finite = None if reference is None else begun.finite(reference)
        begun.finish(range(unit.layer, unit.layer + len(geometries(unit))), out, reference, finite)

    @single_threaded
    @np.errstate(over="ignore", invalid="ignore")  # Hostile numbers give hostile values, and nothing on standard error.
    def begin_span(self, payload: memoryview, unit: Unit, referenced: bool = False) -> BegunUnit:
        """See `Codec.begin_span`: undoes the entropy coding."""
        bases, layers = self._bases_of(unit), geometries(unit)
        reader = Reader(payload)
        flags, log_step, marks, classes = unit_head.read_head(reader, unit.tokens)
        if flags & ~FLAG_SCALED not in _FLAGS or bool(flags & _FLAG_REFERENCE) != referenced:
            raise ValueError("unit has unknown flags, or a reference where there should be none")
        exact = np.zeros(unit.tokens, np.bool_)
        exact[marks] = True
        steps = widths = rate.steps(log_step)
        if flags & _FLAG_PREDICTED:
            predicted = unit_head.unpack_nibbles(reader.take((unit.tokens + 1) // 2), unit.tokens)
            classes = prediction.joint(classes, predicted, exact)
            steps, widths = prediction.lowered(steps), np.tile(steps, prediction.CLASSES)
        else:
            predicted = None
            classes[exact] = EXACT
        logs = unit_head.read_logs(reader, bases.logs) if flags & FLAG_SCALED else bases.logs
        order = Order.of(logs, steps, classes, self._tables)
        quantized = coefficients.decode(reader, order, self._tables, (unit.tokens, len(bases.logs)))
        spread = bases.spread(quantized, order, classes, widths)
        count = len(marks)
        bits = np.empty((count, sum(layer.elements_per_token for layer in layers)), _widest(layers))
        if count:
            exact_tokens.decode(reader, bits, unit.position + marks, *self._exact_layout(bases, layers), self._tables)
        reader.end()
        shares = None if predicted is None else prediction.shares()[predicted]
        return BegunUnit(self._identity, unit, bases, spread, referenced, shares, marks, bits)

    def _exact_layout(self, bases: GroupBases, layers: Sequence[LayerGeometry]) -> tuple[list[int], np.ndarray | None]:
        runs = [layer.heads * width for layer in layers for width in (layer.k_dim, layer.v_dim)]
        usable = {layer.dtype for layer in layers} == {"BF16"}
        group = bases.group
        return runs, self._profile.sink_bits[:, :, group.first : group.last] if usable else None

    def _sinks(self, unit: Unit, bases: GroupBases, layers: Sequence[LayerGeometry], bits: np.ndarray) -> np.ndarray:
        """Tokens that are kept exactly: the first of a session, and its neighbours where a template holds them."""
        found = np.zeros(unit.tokens, bool)
        _, templates = self._exact_layout(bases, layers)
        for index, position in enumerate(range(unit.position, min(unit.position + unit.tokens, SINK_TOKENS))):
            found[index] = position == 0 or exact_tokens.is_near(bits[index], position, templates)
        return found

    def _bases_of(self, unit: Unit) -> GroupBases:
        return self._bases.of(range(unit.layer, unit.layer + len(geometries(unit))))

    def _beyond_mean(
        self, bases: GroupBases, layers: Sequence[LayerGeometry], unit: Unit, reference: Sequence[KeyValue]
    ) -> np.ndarray:
        """Rows of a reference around the mean; 0 in tokens that are not finite."""
        rows, finite = to_rows(reference, layers, self._identity, unit.position)
        rows -= bases.mean
        rows[~finite] = 0
        return rows

    def unit_logs(self, unit: Unit) -> tuple[np.ndarray, int, bytes]:
        """Scales that a unit is coded by; the flag and the bytes that say so, if they are not the profile's."""
        logs, shifts = self._bases_of(unit).logs, self._shifts.get(unit.layer)
        if shifts is None:
            return logs, 0, b""
        return scaling.shifted(logs, shifts), FLAG_SCALED, unit_head.pack_nibbles(shifts)

    def minor_of(self, payload: bytes) -> int:
        """See `Codec.minor_of`."""
        return scaling.MINOR if payload[0] & FLAG_SCALED else 0

    def _unit_classes(self, unit: Unit) -> np.ndarray:
        if self._classes is None:
            return np.full(unit.tokens, importance.ORDINARY, np.int64)
        return self._classes[unit.position : unit.position + unit.tokens].astype(np.int64)


def _widest(layers: Sequence[LayerGeometry]) -> np.dtype[Any]:
    return np.result_type(*(np.dtype(f"u{DTYPES[layer.dtype].itemsize}") for layer in layers))
