"""Words that the host has decoded, put in their places on a device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pltpack.codec.base import KeyValue
from pltpack.gpu import device, place, sphere
from pltpack.gpu.jobs import Job


def put_words(job: Job, arrays: Sequence[KeyValue]) -> None:
    """Copy a unit's decoded arrays, one pair of ``[H, T, D]`` a layer, to its places."""
    for where, pair in zip(job.places, arrays, strict=True):
        put_layer(where.words, (where.keys, where.values), pair, np.arange(job.unit.tokens), job.unit.tokens, job.slot)


def put_layer(
    words: object, pages: tuple[place.Pages, place.Pages], pair: KeyValue, numbers: np.ndarray, tokens: int, slot: int
) -> None:
    """Copy some tokens of one layer.

    Parameters
    ----------
    words : array
        The device's buffer.
    pages : (Pages, Pages)
        Of keys and of values.
    pair : (ndarray, ndarray)
        ``[H, n, D]`` each.
    numbers : ndarray
        Numbers of these n tokens in their unit.
    tokens, slot : int
        Tokens of the unit, and the slot of its first one.
    """
    parts, targets, at = np.zeros((2, sphere.PART_COLUMNS), np.int64), place.Targets(), 0
    raw = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in pair]
    for part, (array, where) in enumerate(zip(pair, pages, strict=True)):
        heads, count, dim = array.shape
        targets.add(heads, tokens, dim, where, slot)
        parts[part, [sphere.HEADS, sphere.EXACT, sphere.WIDTH, sphere.WORDS]] = heads, count, dim, at
        at += len(raw[part])
    placed, item = targets.upload(), np.int32(pair[0].dtype.itemsize)
    shape = device.lines_of(2, int(parts[:, sphere.HEADS].max()) * len(numbers))
    sphere.exact_kernel[shape](device.put(np.concatenate(raw)), device.put(parts), placed[0],
                               device.put(numbers.astype(np.int32)), placed[3], item, words)  # fmt: skip
