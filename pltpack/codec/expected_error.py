"""What a profile expects of the reconstruction error of each head, from the steps that tokens were quantized with."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pltpack.codec import rate
from pltpack.codec.coefficients import OCTAVE
from pltpack.codec.profile import blocks_of
from pltpack.codec.transform import TransformCodec
from pltpack.codec.unit_head import unit_head


def unit_steps(payload: bytes | memoryview, tokens: int) -> np.ndarray:
    """Steps of a unit's tokens, those left out that are stored exactly: int32 logarithms in 1/24 octave."""
    _, log_step, marks, classes = unit_head(memoryview(payload), tokens)
    found: np.ndarray = rate.steps(log_step)[np.delete(classes, marks)]
    return found


def expected_errors(codec: TransformCodec, tokens: Mapping[int, int]) -> dict[str, list[list[float | None]]] | None:
    """Expected RMS error over RMS value of each head.

    A component of standard deviation s, rounded to steps of w, has an error of ``min(s², w²/12)`` (reverse
    water-filling); components are independent. Predictions from other sessions are not known to the profile.

    Parameters
    ----------
    codec : TransformCodec
        Started.
    tokens : mapping of int to int
        Logarithm of a step, in 1/24 octave -> tokens that have it.

    Returns
    -------
    dict or None
        ``keys`` and ``values``: per layer, per head; None if there are no tokens.
    """
    profile = codec.profile
    count = sum(tokens.values())
    if not count:
        return None
    noise = rate.value_of(np.array(list(tokens))) ** 2 / 12
    weights = np.array(list(tokens.values())) / count
    error, value = np.zeros(profile.rows[-1]), np.square(profile.mean, dtype=np.float64)
    for group in profile.groups:
        rows = slice(group.first, group.last)
        shared = profile.unwhitened(profile.shared(group), range(group.start, group.stop))
        _add(shared, profile.shared_log[group.component], noise, weights, error[rows], value[rows])
        for layer in range(group.start, group.stop):
            own = slice(profile.rows[layer], profile.rows[layer + 1])
            local = profile.unwhitened(profile.local(layer), range(layer, layer + 1))
            _add(local, profile.local_log[own], noise, weights, error[own], value[own])
    return _by_head(codec, error, value)


def _add(
    basis: np.ndarray, logs: np.ndarray, noise: np.ndarray, weights: np.ndarray, error: np.ndarray, value: np.ndarray
) -> None:
    """Add a basis' part: `basis` is ``[components, rows]``, `logs` the components' scales, the sums are by row."""
    variance = np.exp2(2 * logs.astype(np.float64) / OCTAVE)
    left = (np.minimum(variance[:, None], noise[None]) * weights).sum(axis=1)
    squares = np.square(basis)
    error += (left.astype(np.float32) @ squares).astype(np.float64)
    value += (variance.astype(np.float32) @ squares).astype(np.float64)


def _by_head(codec: TransformCodec, error: np.ndarray, value: np.ndarray) -> dict[str, list[list[float | None]]]:
    profile, at = codec.profile, 0
    found: dict[str, list[list[float | None]]] = {"keys": [], "values": []}
    for layer in profile.layers:
        heads: list[float | None] = []
        for width in blocks_of(layer):
            part = slice(at, at + width)
            heads.append(float(np.sqrt(error[part].sum() / max(value[part].sum(), 1e-60))))
            at += width
        found["keys"].append(heads[: layer.heads])
        found["values"].append(heads[layer.heads :])
    return found
