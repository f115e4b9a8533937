"""How predicted distortion becomes KL divergence: windows coded by the real codec, rebuilt, and felt by the model."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from pltpack.codec import rate
from pltpack.codec.base import State, Unit
from pltpack.codec.transform import TransformCodec
from pltpack.quality.model import Model
from pltpack.quality.scoring import compare, log_probabilities
from pltpack.quality.threads import mapped, one_thread
from pltpack.snapshot import Identity, Snapshot

#: ``[a, c]`` where nothing was measured.
UNKNOWN = [0.0, 1.0]
#: Octaves added to what is measured, so that a tier's promise holds for nearly every session, not on average: these
#: windows took part in calibration, and what a text asks of its past is not in the norms (docs/transform.md).
MARGIN = 0.55
#: Base steps that are coded, in whitened units: about those of the tiers; and that of short sessions.
STEPS, SHORT_STEP = (0.5, 1.5), 0.9
#: Windows that are coded whole, and windows of which a beginning is.
WINDOWS, SHORT_WINDOWS = 4, 6
#: Octaves of KL an octave of length, at most.
MOST_POWER = 2.0


@dataclasses.dataclass(frozen=True)
class Fit:
    """What was measured.

    Attributes
    ----------
    kl : list of float
        ``[a, c]``, `MARGIN` included.
    length : list of float or None
        Power, least and most tokens: see `pltpack.codec.profile.Length`; None if there were no short probes.
    measured : list of dict
        ``tokens``, ``step``, ``distortion`` and ``kl`` (nats per token), means of probes of one length at one step.
    """

    kl: list[float]
    length: list[float] | None
    measured: list[dict[str, float]]


def measure(
    model: Model,
    arrays: State,
    identity: Identity,
    probes: Sequence[tuple[Snapshot, np.ndarray]],
    short: Sequence[tuple[Snapshot, np.ndarray]],
    stage: Callable[[str, int, int], None],
) -> Fit:
    """Measure a and c of ``log2 KL = a + c log2 D``, and how much more it is in shorter sessions.

    Parameters
    ----------
    model : Model
    arrays : mapping of str to ndarray
        A profile whose prediction is `UNKNOWN`.
    identity : Identity
        Of BF16 caches.
    probes, short : sequence of (Snapshot, ndarray)
        BF16 caches, and the tokens that are read after them; `short` ones have about a quarter of the tokens. All of
        either are of one length.
    stage : callable
        ``stage(name, done, total)``.
    """
    codec = TransformCodec()
    codec.start(arrays, identity)
    jobs = [(probe, STEPS) for probe in probes] + [(probe, (SHORT_STEP,)) for probe in short]
    found: dict[tuple[int, float], list[tuple[float, float]]] = {}
    with one_thread():
        points = mapped(lambda job: _points(model, codec, *job[0], job[1]), jobs)
        for number, ((snapshot, _), steps) in enumerate(jobs):
            stage("kl", number, len(jobs))
            for step, point in zip(steps, next(points), strict=True):
                found.setdefault((len(snapshot), step), []).append(point)
    means = {key: np.mean(points, axis=0).tolist() for key, points in found.items()}
    names = ("tokens", "step", "distortion", "kl")
    measured = [dict(zip(names, (*key, *values), strict=True)) for key, values in means.items()]
    logs = np.log2(np.maximum([[row["distortion"], row["kl"]] for row in measured], 1e-30))
    count = len(STEPS)
    a, c = fit_line(*logs[:count].T)
    length = None
    if short:
        least, most = len(short[0][0]), len(probes[0][0])
        length = [fit_power(float(logs[-1, 1] - a - c * logs[-1, 0]), least, most), least, most]
    return Fit([round(a + MARGIN, 6), c], length, measured)


def _points(
    model: Model, codec: TransformCodec, snapshot: Snapshot, text: np.ndarray, steps: Sequence[float]
) -> list[tuple[float, float]]:
    """Distortion and KL divergence of a cache at each step."""
    before = log_probabilities(model.network, snapshot, text)
    prepared, out = codec.prepare(snapshot), []
    probe = rate.Probe(codec, snapshot, rate.token_classes(codec.profile, snapshot, ()))
    for step in steps:
        after = log_probabilities(model.network, rebuild(_at_step(prepared, step), snapshot), text)
        out.append((probe.distortion(rate.base_step(rate.log_of(step))), compare(before, after, text)["kl"]))
    return out


def fit_power(octaves: float, least: int, most: int) -> float:
    """Octaves of KL an octave of length, where sessions of `least` tokens have so many more than those of `most`."""
    return round(float(np.clip(octaves / np.log2(most / least), 0, MOST_POWER)), 6)


def fit_line(x: np.ndarray, y: np.ndarray) -> list[float]:
    """``[a, c]`` of the least squares line ``y = a + c x``; of slope 1 where the points do not say."""
    spread = float(((x - x.mean()) ** 2).sum())
    slope = float(((x - x.mean()) * (y - y.mean())).sum()) / spread if spread > 0.01 else 1.0
    slope = float(np.clip(slope, 0.5, 2.0))
    return [round(float(y.mean() - slope * x.mean()), 6), round(slope, 6)]


def rebuild(codec: TransformCodec, snapshot: Snapshot) -> Snapshot:
    """A snapshot through a codec prepared for it, and back, one unit a layer group."""
    layers, out = snapshot.identity.layers, []
    for group in codec.layer_groups(len(layers)):
        arrays = [snapshot.layer(index, 0, len(snapshot)) for index in group]
        unit = Unit(group.start, layers[group.start], 0, len(snapshot), layers=tuple(layers[group.start : group.stop]))
        rebuilt = [(np.empty_like(keys, order="C"), np.empty_like(values, order="C")) for keys, values in arrays]
        codec.decode_span(memoryview(codec.encode_span(unit, arrays)), unit, rebuilt)
        out += rebuilt
    return Snapshot.from_arrays(snapshot.session, snapshot.tokens, out, snapshot.identity)


def _at_step(codec: TransformCodec, step: float) -> TransformCodec:
    """The same codec at another step: one profile's matrices, which take long to prepare, serve all of them."""
    out = copy.copy(codec)
    out._log_step = rate.base_step(rate.log_of(step))
    return out
