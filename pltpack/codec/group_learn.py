"""What the group codec learns from a sample: means, steps and tables; described in `pltpack.codec.group`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import ml_dtypes
import numpy as np

from pltpack.codec import levels, scales
from pltpack.codec.base import SINK_TOKENS, KeyValue, LayerSample, Samples
from pltpack.codec.group_decode import pairs
from pltpack.codec.levels import CLASSES, DEVIATION, TABLES
from pltpack.codec.rope import Rotation
from pltpack.snapshot import Identity, LayerGeometry

#: Fewer tokens than this say too little of a layer.
_ENOUGH_TOKENS = 32
#: Pairs per layer that the tables are learnt from.
_LAYER_PAIRS = 1 << 14
#: Weight of the first tokens of a session in the tables of exact tokens.
_SINK_WEIGHT = 50


@dataclasses.dataclass
class _Found:
    """One layer's statistics; `pairs` are residual pairs of unit deviation, keys and values."""

    means: list[np.ndarray]
    spreads: tuple[scales.Spread, scales.Spread] | None
    norm: float
    pairs: list[np.ndarray]


def learn(samples: Samples, identity: Identity, step: float) -> dict[str, np.ndarray]:
    """Learn a state for the tier whose step is `step` geometric deviations of a usual head."""
    top = [np.zeros(256), np.zeros(256)]
    found = []
    for index, geometry in enumerate(identity.layers):
        rotation = Rotation.of(identity.rope, identity.keys, geometry.k_dim)
        runs = list(samples.layer(index)) if samples is not None else []
        _count_top_bytes(runs, top)
        found.append(_layer([_usable(run, rotation) for run in runs], geometry))
    learnt = [f.spreads for f in found if f.spreads is not None]
    usual = scales.Usual.of(learnt) if learnt else None
    codes = []
    for f, geometry in zip(found, identity.layers, strict=True):
        if f.spreads is None or usual is None:
            codes += [0] * (2 * geometry.heads)
        else:
            codes += [levels.step_code(s) for s in scales.steps(step, *f.spreads, usual)]
    freqs = np.empty((TABLES, 256), dtype=np.uint16)
    shrink = np.empty(2 * CLASSES, dtype=np.float32)
    for part in (0, 1):
        area = slice(part * CLASSES, (part + 1) * CLASSES)
        joined = np.concatenate([f.pairs[part] for f in found]) if found else np.zeros((0, 2))
        freqs[area], shrink[area] = levels.learn(joined)
        freqs[2 * CLASSES + part] = levels.learn_exact(top[part])
    means = np.concatenate([m.ravel() for f in found for m in f.means]) if found else np.zeros(0)
    return {
        "means": means.astype(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16),
        "steps": np.array(codes, dtype=np.int16),
        "norms": np.array([f.norm for f in found], dtype=np.float32),
        "shrink": shrink,
        "freqs": freqs,
    }


def _count_top_bytes(runs: Sequence[LayerSample], top: list[np.ndarray]) -> None:
    for run in runs:
        sinks = max(0, SINK_TOKENS - run.unit.position)
        for part, array in enumerate((run.keys, run.values)):
            words = np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")
            high = (words >> (8 * (array.dtype.itemsize - 1))).astype(np.uint8)
            top[part] += np.bincount(high.ravel(), minlength=256)
            top[part] += _SINK_WEIGHT * np.bincount(high[:, :sinks].ravel(), minlength=256)


def _usable(run: LayerSample, rotation: Rotation | None) -> KeyValue:
    """Finite tokens after the first ones, binary64 ``[H, T, D]``, keys un-rotated."""
    with np.errstate(all="ignore"):
        keys, values = (np.ascontiguousarray(a, dtype=np.float32) for a in (run.keys, run.values))
        if rotation is not None:
            keys = rotation.unrotate(keys, run.unit.position)
        good = np.asarray((np.abs(keys) < 1e30).all(axis=(0, 2)) & (np.abs(values) < 1e30).all(axis=(0, 2)))
    good[: max(0, SINK_TOKENS - run.unit.position)] = False
    return keys[:, good].astype(np.float64), values[:, good].astype(np.float64)


def _layer(runs: list[KeyValue], geometry: LayerGeometry) -> _Found:
    dims = (geometry.k_dim, geometry.v_dim)
    if sum(run[0].shape[1] for run in runs) < _ENOUGH_TOKENS:
        return _Found([np.zeros((geometry.heads, d)) for d in dims], None, 0.0, [np.zeros((0, 2))] * 2)
    means, spreads, found = [], [], []
    norm = 0.0
    for part, dim in enumerate(dims):
        x = np.concatenate([run[part] for run in runs], axis=1)
        mean = x.mean(axis=1)
        residual = x - mean[:, None]
        means.append(mean)
        spreads.append(scales.Spread.of(mean, np.sqrt(np.mean(np.square(residual), axis=1))))
        magnitude = np.abs(residual).mean(axis=(1, 2)) * DEVIATION
        scaled = residual / np.where(magnitude > 0, magnitude, 1)[:, None, None]
        half = pairs(dim)
        joined = np.zeros((*scaled.shape[:2], half, 2))
        joined[..., 0] = scaled[..., :half]
        joined[..., : dim - half, 1] = scaled[..., half:]
        found.append(levels.thin(joined.reshape(-1, 2), _LAYER_PAIRS))
        if part == 1:
            norm = float(np.median(np.sum(np.square(x), axis=(0, 2))))
    return _Found(means, (spreads[0], spreads[1]), norm if np.isfinite(np.float32(norm)) else 0.0, found)
