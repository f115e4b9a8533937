"""Captured probabilities of a session's own tokens, kept in its shard (spec/format.md, "Versions": ignorable names).

A dump may hold the model's top-k log-probabilities. All k would take as much room as the coded cache, so a shard keeps
what the edges of the trie need: the probability of each token that did come, in 2 bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pltpack.errors import FormatError

if TYPE_CHECKING:
    from pltpack.archive.shard import Shard
    from pltpack.snapshot import Snapshot

#: Tensor of a shard: U8 ``[T, 2]``, a little-endian 16-bit number per token.
TENSOR = "x-logprob"
#: Steps per bit of ``-log2 P``; the lower 15 bits of a number.
STEPS = 512
#: The token was not among the k: the number is that of all others together.
_IN_TAIL = 0x8000
_UNKNOWN = 0xFFFF
_LARGEST = 0x7FFE


def shard_tensors(snapshot: Snapshot) -> dict[str, np.ndarray]:
    """Tensors that a shard keeps of a snapshot's captured log-probabilities; none if it has none."""
    if snapshot.logprobs is None or snapshot.logprob_ids is None or len(snapshot) < 2 or not snapshot.logprobs.size:
        return {}
    logprobs = np.asarray(snapshot.logprobs[:-1], dtype=np.float64)
    p = np.where(logprobs <= 0, np.exp(np.minimum(logprobs, 0.0)), np.where(np.isnan(logprobs), 0.0, 1.0))
    named = np.asarray(snapshot.logprob_ids[:-1]) == snapshot.tokens[1:, None]
    known = named.any(axis=1)
    mass = np.where(known, (p * named).sum(axis=1), 1 - p.sum(axis=1))
    bits = -np.log2(np.clip(mass, 2.0**-63, 1.0))
    numbers = np.full(len(snapshot), _UNKNOWN, dtype="<u2")
    numbers[1:] = np.minimum(np.rint(bits * STEPS), _LARGEST).astype(np.uint16) | np.where(known, 0, _IN_TAIL)
    return {TENSOR: numbers.view(np.uint8).reshape(-1, 2)}


def kept_tensors(shard: Shard) -> dict[str, np.ndarray]:
    """The same tensors of a shard that is written anew."""
    return {TENSOR: shard.container.tables[TENSOR]} if TENSOR in shard.container.tables else {}


def token_probabilities(shard: Shard) -> tuple[np.ndarray, np.ndarray]:
    """What was captured of a session's tokens.

    Returns
    -------
    probabilities : ndarray
        Float64 ``[T]``: of each token given those before it or, in the tail, of all tokens but the k; NaN where nothing
        was captured.
    in_tail : ndarray
        bool ``[T]``.

    Raises
    ------
    FormatError
        If the tensor does not have a number per token.
    """
    count = len(shard.tokens)
    found = shard.container.tables.get(TENSOR)
    if found is not None and (found.dtype != np.uint8 or found.shape != (count, 2)):
        raise FormatError(f"tensor {TENSOR!r} does not fit {count} tokens", shard.container.path)
    return _probabilities(found, count)


def captured_probabilities(snapshot: Snapshot) -> tuple[np.ndarray, np.ndarray]:
    """The same of a session that is about to be written, as its shard will give it."""
    return _probabilities(shard_tensors(snapshot).get(TENSOR), len(snapshot))


def _probabilities(found: np.ndarray | None, count: int) -> tuple[np.ndarray, np.ndarray]:
    if found is None:
        return np.full(count, np.nan), np.zeros(count, bool)
    numbers = np.frombuffer(found.tobytes(), "<u2").astype(np.int64)
    p = np.exp2(-(numbers & ~_IN_TAIL) / STEPS)
    p[numbers == _UNKNOWN] = np.nan
    return p, (numbers & _IN_TAIL != 0) & (numbers != _UNKNOWN)
