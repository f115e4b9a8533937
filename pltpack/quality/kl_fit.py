"""How predicted distortion becomes KL divergence: windows coded by the real codec, rebuilt, and felt by the model."""

from __future__ import annotations

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
    codecs = [_codec(arrays, identity, step) for step in STEPS]
    distortion, kl = np.zeros((len(STEPS), len(probes))), np.zeros((len(STEPS), len(probes)))
    for number, (snapshot, text) in enumerate(probes):
        before = log_probabilities(model.network, snapshot, text)
        for index, codec in enumerate(codecs):
            stage("kl", number * len(STEPS) + index, len(probes) * len(STEPS))
            classes = rate.token_classes(codec.profile, snapshot, ())
            # Without a fit, what the profile predicts is the distortion itself.
            distortion[index, number] = rate.Probe(codec, snapshot, classes).kl(rate.log_of(STEPS[index]))
            after = log_probabilities(model.network, rebuild(codec, snapshot), text)
            kl[index, number] = compare(before, after, text)["kl"]
    d, k = np.maximum(distortion.mean(axis=1), 1e-30), np.maximum(kl.mean(axis=1), 1e-12)
    measured = [dict(zip(("step", "distortion", "kl"), row, strict=True)) for row in zip(STEPS, d.tolist(), k.tolist(),
                                                                                         strict=True)]  # fmt: skip
    return fit_line(np.log2(d), np.log2(k)), measured


def fit_line(x: np.ndarray, y: np.ndarray) -> list[float]:
    """``[a, c]`` of the least squares line ``y = a + c x``; of slope 1 where the points do not say."""
    spread = float(((x - x.mean()) ** 2).sum())
    slope = float(((x - x.mean()) * (y - y.mean())).sum()) / spread if spread > 0.01 else 1.0
    slope = float(np.clip(slope, 0.5, 2.0))
    return [round(float(y.mean() - slope * x.mean()), 6), round(slope, 6)]


def rebuild(codec: TransformCodec, snapshot: Snapshot) -> Snapshot:
    """A snapshot through the codec and back, one unit a layer group."""
    prepared = codec.prepare(snapshot)
    layers, out = snapshot.identity.layers, []
    for group in prepared.layer_groups(len(layers)):
        arrays = [snapshot.layer(index, 0, len(snapshot)) for index in group]
        unit = Unit(group.start, layers[group.start], 0, len(snapshot), layers=tuple(layers[group.start : group.stop]))
        rebuilt = [(np.empty_like(keys, order="C"), np.empty_like(values, order="C")) for keys, values in arrays]
        prepared.decode_span(memoryview(prepared.encode_span(unit, arrays)), unit, rebuilt)
        out += rebuilt
    return Snapshot.from_arrays(snapshot.session, snapshot.tokens, out, snapshot.identity)


def _codec(arrays: State, identity: Identity, step: float) -> TransformCodec:
    codec = TransformCodec(step=step)
    codec.start(arrays, identity)
    return codec
