"""What the model feels: continue from rebuilt caches and compare the next-token distributions.

For each session the true text is fed to the model twice, once over the original cache and once over the rebuilt one.
KL(original || rebuilt) in nats per token is the figure to steer by; perplexity and top-1 agreement stand beside it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pltpack.errors import DumpError, PltpackError
from pltpack.quality.probes import END, Probe
from pltpack.quality.rebuilt import Rate, Rebuilt, check_rebuilt, in_memory, prefix
from pltpack.snapshot import Snapshot

if TYPE_CHECKING:
    import torch

Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True)
class Score:
    """What the model feels of one way to store the caches.

    Attributes
    ----------
    name, family : str
        As `Rebuilt` gives them.
    rate : Rate or None
    rows : mapping
        Place -> session -> figures: those of `compare`, and ``tokens`` (of the cache) and ``bit_exact``. A session that
        is cut more than once at a place has one row for each cut, named ``session@tokens``.
    raw_bytes : int
        Of the scored caches.
    """

    name: str
    family: str
    rate: Rate | None
    rows: Mapping[str, Mapping[str, Mapping[str, Any]]]
    raw_bytes: int

    def total(self, place: str = END) -> dict[str, Any]:
        """Figures over all rows of a place, see `total`; at `END` with ``raw_bytes`` and the rate."""
        found = total(self.rows[place])
        if place != END:
            return found
        return {**found, "raw_bytes": self.raw_bytes, **(self.rate.to_json() if self.rate else {})}

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping: total and sessions at the end, and under ``cuts`` those of every other place."""
        cuts = {p: {"total": self.total(p), "sessions": rows} for p, rows in self.rows.items() if p != END and rows}
        return {
            "name": self.name, "family": self.family, "total": self.total(), "sessions": self.rows[END],
            **({"cuts": cuts} if cuts else {}),
        }  # fmt: skip


def log_probabilities(network: Any, cache: Snapshot, text: np.ndarray) -> torch.Tensor:
    """Next-token log-probabilities, float32 ``[C, vocabulary]``, while `text` ``[C]`` is read after the cache.

    Raises
    ------
    UnsupportedError
        If the keys are stored un-rotated.
    """
    import torch

    from pltpack.dumps import to_dynamic_cache

    tokens = torch.from_numpy(np.asarray(text, np.int64))
    with torch.no_grad():
        out = network(tokens[None], cache=to_dynamic_cache(cache, dtype=torch.float32), use_cache=True)
    found: torch.Tensor = out.logits[0].log_softmax(-1)
    return found


def compare(before: torch.Tensor, after: torch.Tensor, text: np.ndarray) -> dict[str, float]:
    """How far the predictions over the rebuilt cache are from those over the original.

    Parameters
    ----------
    before, after : Tensor
        Log-probabilities ``[C, vocabulary]`` over the original and the rebuilt cache.
    text : ndarray
        What was read, ``[C]``.

    Returns
    -------
    dict
        ``kl`` (nats per token), ``nll`` and ``nll_rebuilt`` (mean negative log-likelihood of the text, nats per token),
        ``ppl`` and ``ppl_rebuilt``, ``ppl_change_pct``, ``top1_pct`` (how often both prefer the same token).
    """
    import torch

    following = torch.from_numpy(np.asarray(text[1:], np.int64))[:, None]
    nll, again = (-lp[:-1].gather(1, following).mean().item() for lp in (before, after))
    return {
        "kl": (before.exp() * (before - after)).sum(-1).mean().item(),
        "nll": nll,
        "nll_rebuilt": again,
        "ppl": math.exp(nll),
        "ppl_rebuilt": math.exp(again),
        "ppl_change_pct": 100 * math.expm1(again - nll),
        "top1_pct": 100 * (before.argmax(-1) == after.argmax(-1)).float().mean().item(),
    }


def total(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Figures over several rows: means of ``kl``, of the log-likelihoods behind ``ppl``, and of ``top1_pct``.

    Returns
    -------
    dict
        ``sessions`` (rows), ``kl``, ``worst_kl``, ``ppl``, ``ppl_rebuilt``, ``ppl_change_pct``,
        ``worst_ppl_change_pct``, ``top1_pct``, ``bit_exact``.
    """

    def mean(key: str) -> float:
        return sum(row[key] for row in rows.values()) / len(rows)

    return {
        "sessions": len(rows),
        "kl": mean("kl"),
        "worst_kl": max(row["kl"] for row in rows.values()),
        "ppl": math.exp(mean("nll")),
        "ppl_rebuilt": math.exp(mean("nll_rebuilt")),
        "ppl_change_pct": 100 * math.expm1(mean("nll_rebuilt") - mean("nll")),
        "worst_ppl_change_pct": max(row["ppl_change_pct"] for row in rows.values()),
        "top1_pct": mean("top1_pct"),
        "bit_exact": all(row["bit_exact"] for row in rows.values()),
    }


def check_texts(network: Any, probes: Sequence[Probe], snapshots: Sequence[Snapshot]) -> None:
    """Check that a model knows the tokens of all texts.

    Raises
    ------
    DumpError
        Naming the session, and the file of its cache.
    """
    known = network.get_input_embeddings().weight.shape[0]
    for probe in probes:
        if not 0 <= int(probe.text.min()) <= int(probe.text.max()) < known:
            origin = next((s.origin for s in snapshots if s.session == probe.session), None)
            raise DumpError(f"the text after session {probe.session!r} has token ids outside 0:{known}", origin)


def score(
    network: Any,
    originals: Sequence[Snapshot],
    probes: Sequence[Probe],
    candidates: Sequence[Rebuilt],
    progress: Progress | None = None,
) -> list[Score]:
    """Score several ways to store the same caches; the original's predictions are computed once for all of them.

    Parameters
    ----------
    network : transformers.PreTrainedModel
        In float32, see `pltpack.quality.model.load_model`; that caches are its own, `require_model` can tell.
    originals : sequence of Snapshot
        Read one by one.
    probes : sequence of Probe
        One at the `END` of every original, which may have more of them before it.
    candidates : sequence of Rebuilt
    progress : callable, optional
        ``progress(stage, done, total)`` in raw bytes.

    Returns
    -------
    list of Score
        One for each candidate.

    Raises
    ------
    DumpError
        See `check_texts`; and what the candidates raise.
    """
    check_texts(network, probes, originals)
    ends = {probe.session: probe.cut for probe in probes if probe.place == END}
    if any(probe.cut > ends[probe.session] for probe in probes):
        raise ValueError("a probe cuts a session behind its end")
    wholes = [prefix(snapshot, ends[snapshot.session]) for snapshot in originals]
    names = _row_names(probes)
    rows: list[dict[str, dict[str, dict[str, Any]]]] = [{p.place: {} for p in probes} for _ in candidates]
    done, size = 0, sum(whole.raw_bytes for whole in wholes)
    for whole in map(in_memory, wholes):
        own = [probe for probe in probes if probe.session == whole.session]
        before = [log_probabilities(network, prefix(whole, probe.cut), probe.text) for probe in own]
        for number, candidate in enumerate(candidates):
            try:
                again = candidate.rebuild(whole)
                equal = check_rebuilt(whole, again)
            except PltpackError as error:
                raise type(error)(f"{candidate.name}: {error.fact}", error.path) from None
            for probe, lp in zip(own, before, strict=True):
                # Equal caches give equal predictions; the model need not be asked.
                after = lp if equal else log_probabilities(network, prefix(again, probe.cut), probe.text)
                exact = equal or check_rebuilt(prefix(whole, probe.cut), prefix(again, probe.cut))
                figures = {"tokens": probe.cut, **compare(lp, after, probe.text), "bit_exact": exact}
                rows[number][probe.place][names[probe]] = figures
            done += whole.raw_bytes
            if progress is not None:
                progress("score", done, size * len(candidates))
    raw = sum(whole.raw_bytes for whole in wholes)
    return [Score(c.name, c.family, c.rate(), found, raw) for c, found in zip(candidates, rows, strict=True)]


def _row_names(probes: Sequence[Probe]) -> dict[Probe, str]:
    seen: dict[tuple[str, str], int] = {}
    for probe in probes:
        seen[probe.place, probe.session] = seen.get((probe.place, probe.session), 0) + 1
    return {
        probe: probe.session if seen[probe.place, probe.session] == 1 else f"{probe.session}@{probe.cut}"
        for probe in probes
    }
