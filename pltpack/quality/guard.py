"""A guard that asks the model: every session is continued from its cache as it is stored, and scored (docs/guard.md).

KL divergence is what sessions are held to; perplexity, noisy over a few hundred tokens, must exceed its limit by more
than its own sampling error. Sessions of another kind than calibration text have the doubt against them, not for them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pltpack.archive.alone import codec_of, through
from pltpack.archive.guard import Limits, ProfileGuard, Screened
from pltpack.archive.guard_record import HOLDS, Trial
from pltpack.archive.reader import Archive
from pltpack.errors import PltpackError, UnsupportedError
from pltpack.quality.agreement import require_model
from pltpack.quality.model import Model, load_model, prefill
from pltpack.quality.probes import Probe, at_ends, held_back, read_continuations
from pltpack.quality.rebuilt import check_rebuilt, in_memory, prefix
from pltpack.quality.scoring import check_texts, log_probabilities
from pltpack.snapshot import Snapshot

#: Words for what a session is continued with.
CAPTURED, HELD_BACK = "captured", "held back"
#: Tokens held back of sessions without a continuation, or a quarter of a session if that is less; at least the second.
TAIL_TOKENS, LEAST_TAIL = 128, 8
#: Tokens from a session's beginning that the model computes anew, to see whether the cache is its own.
OWN_TOKENS = 256
#: Median relative difference of a token's keys or values, in the worst layer, up to which a cache is the model's own:
#: a model that computes in bfloat16 differs by a few percent from one that computes in float32.
OWN_ERROR = 0.1


class ModelGuard(ProfileGuard):
    """A guard that scores sessions with their model.

    Parameters
    ----------
    model : Model or path-like
        The model, or the folder that it is loaded from.
    continuations : mapping of str to ndarray, or path-like, optional
        Session -> token ids int ``[C]`` that follow it, or a file: see `pltpack.quality.probes.read_continuations`.
        A session without one is scored by its own last tokens, from the cache before them.
    limits : Limits, optional
    tail : int
        Tokens to hold back of sessions without a continuation.

    Raises
    ------
    NotFoundError, DumpError, UnsupportedError
        If model or continuations cannot be loaded.
    """

    def __init__(
        self,
        model: Model | str | Path,
        continuations: Mapping[str, np.ndarray] | str | Path | None = None,
        limits: Limits | None = None,
        tail: int = TAIL_TOKENS,
    ) -> None:
        super().__init__(limits)
        if tail < LEAST_TAIL:
            raise UnsupportedError(f"a tail of {tail} tokens cannot be scored (at least {LEAST_TAIL})")
        if isinstance(continuations, str | Path):
            continuations = read_continuations(Path(continuations))
        self._texts = dict(continuations or {})
        self._model = model if isinstance(model, Model) else load_model(model)
        self._tail = tail

    @property
    def needs_profile(self) -> bool:
        """See `Guard`."""
        return False

    def continuation(self, snapshot: Snapshot) -> str | None:
        """See `Guard`."""
        return CAPTURED if snapshot.session in self._texts else HELD_BACK

    def screen(self, snapshot: Snapshot) -> Screened:
        """See `Guard`: what no score of this model can speak for is for the lossless tier.

        Raises
        ------
        IdentityError
            If the session says that it is of another model.
        UnsupportedError
            If its keys are stored un-rotated.
        """
        require_model(self._model, [snapshot])
        found = super().screen(snapshot)
        if found.refused:
            return found
        probe = self._probe(snapshot)
        if probe is None:
            return dataclasses.replace(found, refused="too short")
        check_texts(self._model.network, [probe], [snapshot])
        own = own_error(self._model, snapshot)
        if not own <= OWN_ERROR:
            return dataclasses.replace(found, refused="other model")
        return found

    def judge(
        self, snapshot: Snapshot, screened: Screened, archive: Archive, tier: str, kl: float, first: bool
    ) -> Trial:
        """See `Guard`."""
        probe = self._probe(snapshot)
        assert probe is not None
        original = in_memory(snapshot, probe.cut)
        if probe.cut == len(snapshot):
            rebuilt = archive.read(snapshot.session)
        else:
            # A session is coded finer towards its end, so what is stored must not be cut before it: it is the shortened
            # session, coded in the same way, that says what continuing at an end costs.
            rebuilt = through(codec_of(archive.shard(snapshot.session)), original, archive.manifest.block)
        network = self._model.network
        before = log_probabilities(network, original, probe.text)
        # Equal caches give equal predictions; the model need not be asked.
        after = before if check_rebuilt(original, rebuilt) else log_probabilities(network, rebuilt, probe.text)
        trial = Trial(tier, HOLDS, tokens=len(probe.text), predicted_kl=self._predicted(snapshot, tier),
                      **measured(before, after, probe.text))  # fmt: skip
        return dataclasses.replace(trial, reason=self._verdict(trial, screened, kl))

    def _verdict(self, trial: Trial, screened: Screened, most: float) -> str:
        limits, change = self.limits, trial.ppl_change_pct
        numbers = (trial.kl, trial.kl_error, change, trial.ppl_error_pct)
        if not all(value is not None and math.isfinite(value) for value in numbers):
            return "not a number"
        assert trial.kl is not None and change is not None
        doubt = limits.errors * (trial.kl_error or 0.0) if self.is_strange(screened) else 0.0
        if trial.kl + doubt > most:
            return "kl"
        if change - limits.errors * (trial.ppl_error_pct or 0.0) > limits.ppl_pct:
            return "perplexity"
        return HOLDS

    def _probe(self, snapshot: Snapshot) -> Probe | None:
        """Where a session is continued, and with what; None if it is too short."""
        try:
            if snapshot.session in self._texts:
                return at_ends([snapshot], self._texts)[0]
            count = min(self._tail, len(snapshot) // 4)
            return held_back([snapshot], count)[0] if count >= LEAST_TAIL else None
        except PltpackError:
            return None


def measured(before: Any, after: Any, text: np.ndarray) -> dict[str, float]:
    """KL divergence and log-likelihoods with the standard errors of their means.

    Parameters
    ----------
    before, after : Tensor
        Log-probabilities ``[C, vocabulary]`` over the original and the rebuilt cache.
    text : ndarray
        What was read, ``[C]``.

    Returns
    -------
    dict
        ``kl``, ``kl_error``, ``nll``, ``nll_rebuilt`` in nats a token, ``ppl_error_pct`` in percent: as
        `pltpack.archive.guard_record.Trial` names them.
    """
    import torch

    each = (before.exp() * (before - after)).sum(-1).double()
    following = torch.from_numpy(np.asarray(text[1:], np.int64))[:, None]
    nll, again = (-lp[:-1].gather(1, following)[:, 0].double() for lp in (before, after))
    change = again - nll
    error = _standard_error(change.numpy())
    return {
        "kl": each.mean().item(), "kl_error": _standard_error(each.numpy()), "nll": nll.mean().item(),
        "nll_rebuilt": again.mean().item(), "ppl_error_pct": 100 * math.exp(min(change.mean().item(), 50.0)) * error,
    }  # fmt: skip


def _standard_error(values: np.ndarray) -> float:
    """Of a mean; 0 of a single value, which says nothing of its own."""
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else 0.0


def own_error(model: Model, snapshot: Snapshot) -> float:
    """How far a cache is from what the model computes for the same tokens.

    Returns
    -------
    float
        Relative difference of a token's keys or values, all heads together: the median over the first `OWN_TOKENS`
        tokens, in the layer where it is largest.
    """
    count = min(len(snapshot), OWN_TOKENS)
    if not count:
        return 0.0
    cache = prefill(model, snapshot.tokens[:count])
    part = prefix(snapshot, count)
    worst = 0.0
    for index, layer in enumerate(cache.layers):
        for mine, theirs in zip(part.layer(index), (layer.keys, layer.values), strict=True):
            worst = max(worst, _relative(mine, theirs[0].float().cpu().numpy()))
    return worst


def _relative(mine: np.ndarray, theirs: np.ndarray) -> float:
    a, b = mine.astype(np.float64), theirs.astype(np.float64)
    axes = (0, 2)
    size = np.sqrt(np.square(b).sum(axis=axes))
    return float(np.median(np.sqrt(np.square(a - b).sum(axis=axes)) / np.maximum(size, 1e-30)))


