"""How predicted distortion becomes KL divergence: windows coded by the real codec, rebuilt, and felt by the model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import numpy as np

from pltpack.codec import rate
from pltpack.codec.base import State, Unit
from pltpack.codec.transform import TransformCodec
from pltpack.quality.model import Model
from pltpack.quality.scoring import compare, log_probabilities
from pltpack.snapshot import Identity, Snapshot

#: ``[a, c]`` where nothing was measured.
UNKNOWN = [0.0, 1.0]
#: Octaves added to what is measured, so that a tier's promise holds for nearly every session, not on average: these
#: windows took part in calibration, and what a text asks of its past is not in the norms (docs/transform.md).
MARGIN = 0.55
#: Base steps that are coded, in whitened units: about those of the tiers.
STEPS = (0.5, 0.9, 1.5)
#: Windows that are coded.
WINDOWS = 4


def measure(
    model: Model,
    arrays: State,
    identity: Identity,
    probes: Sequence[tuple[Snapshot, np.ndarray]],
    stage: Callable[[str, int, int], None],
) -> tuple[list[float], list[dict[str, float]]]:
    """Measure a and c of ``log2 KL = a + c log2 D``.

    Parameters
    ----------
    model : Model
    arrays : mapping of str to ndarray
        A profile whose prediction is `UNKNOWN`.
    identity : Identity
        Of BF16 caches.
    probes : sequence of (Snapshot, ndarray)
        BF16 caches, and the tokens that are read after them.
    stage : callable
        ``stage(name, done, total)``.

    Returns
    -------
    (list of float, list of dict)
        ``[a, c]``, and ``step``, ``distortion`` and ``kl`` (nats per token) of what was measured.
    """
    codec = TransformCodec()
    codec.start(arrays, identity)
    distortion, kl = np.zeros((len(STEPS), len(probes))), np.zeros((len(STEPS), len(probes)))
    for number, (snapshot, text) in enumerate(probes):
        before = log_probabilities(model.network, snapshot, text)
        prepared = codec.prepare(snapshot)
        probe = rate.Probe(codec, snapshot, rate.token_classes(codec.profile, snapshot, ()))
        for index, step in enumerate(STEPS):
            stage("kl", number * len(STEPS) + index, len(probes) * len(STEPS))
            # Without a fit, what the profile predicts is the distortion itself.
            distortion[index, number] = probe.kl(rate.base_step(rate.log_of(step)))
            after = log_probabilities(model.network, rebuild(_at_step(prepared, step), snapshot), text)
            kl[index, number] = compare(before, after, text)["kl"]
    d, k = np.maximum(distortion.mean(axis=1), 1e-30), np.maximum(kl.mean(axis=1), 1e-12)
    measured = [dict(zip(("step", "distortion", "kl"), row, strict=True)) for row in zip(STEPS, d.tolist(), k.tolist(),
                                                                                         strict=True)]  # fmt: skip
    a, c = fit_line(np.log2(d), np.log2(k))
    return [round(a + MARGIN, 6), c], measured


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
