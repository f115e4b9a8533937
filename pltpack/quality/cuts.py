"""Caches cut before their ends and continued with their own text: KL divergence against the place of the cut."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pltpack.quality.plot import check_plot, settings
from pltpack.quality.probes import END, LEAST_TOKENS, Probe
from pltpack.quality.rebuilt import Rebuilt, in_memory, prefix
from pltpack.quality.scoring import log_probabilities
from pltpack.snapshot import Snapshot

#: Names of the places: a block's end, and a turn's.
BLOCKS, TURNS = "blocks", "turn ends"
#: Tokens of a block, and of the text that follows a cut.
BLOCK, TEXT = 32, 128
#: How much more than its promise a tier may have where it is cut.
ALLOWED = {END: 1.0, TURNS: 1.5, BLOCKS: 3.0}


@dataclasses.dataclass(frozen=True)
class Cut:
    """KL divergence of one cut.

    Attributes
    ----------
    session, place : str
    tokens : int
        Tokens of the cache that were kept.
    kl : float
        In nats per token of the text that followed.
    error : float
        Standard error of that mean: the spread over the text's tokens, over the root of their number.
    recompute : int
        Of the tokens before the cut, the last ones that the model computed again from the cache before them.
    """

    session: str
    place: str
    tokens: int
    kl: float
    error: float = 0.0
    recompute: int = 0


def at_cuts(
    snapshots: Iterable[Snapshot],
    texts: Mapping[str, np.ndarray],
    turn_ends: Sequence[int] = (),
    *,
    every: int = 4,
    block: int = BLOCK,
    length: int = TEXT,
) -> list[Probe]:
    """Probes at the ends of every n-th block and of all turns, and at the sessions' ends.

    Parameters
    ----------
    snapshots : iterable of Snapshot
    texts : mapping
        Session -> tokens that follow its end; a cut before it is followed by the session's own tokens first.
    turn_ends : sequence of int
        Token ids that end a turn; cuts that have less than a block before them are left out.
    every : int
        Blocks between cuts.
    block : int
        Tokens of a block.
    length : int
        Tokens of text after a cut, at most; at a session's end all that is given is read.
    """
    found = []
    for snapshot in snapshots:
        name, tokens = snapshot.session, np.asarray(snapshot.tokens, np.int32)
        after = np.asarray(texts[name], np.int32)
        whole = np.concatenate([tokens, after])
        turns = {int(end) + 1 for end in np.flatnonzero(np.isin(tokens, list(turn_ends))) if end + 1 >= block}
        places = {cut: BLOCKS for cut in range(every * block, len(tokens), every * block)}
        places |= {cut: TURNS for cut in turns if cut < len(tokens)}
        found += [Probe(name, place, cut, whole[cut : cut + length]) for cut, place in sorted(places.items())
                  if len(whole) - cut >= LEAST_TOKENS]  # fmt: skip
        found.append(Probe(name, END, len(tokens), after))
    return found


def measure_cuts(
    network: Any,
    snapshots: Iterable[Snapshot],
    probes: Sequence[Probe],
    candidate: Rebuilt,
    recompute: Sequence[int] = (0,),
    *,
    block: int = BLOCK,
) -> list[Cut]:
    """KL divergence at each cut, and again with some tokens before it computed from the rebuilt cache before them.

    Parameters
    ----------
    network : transformers.PreTrainedModel
        In float32.
    snapshots : iterable of Snapshot
        Originals.
    probes : sequence of Probe
    candidate : Rebuilt
    recompute : sequence of int
        Numbers of tokens. As in a loader's hits, none are computed again in a session's last block and at its end, nor
        where less than a block would be left.
    block : int
        Tokens of a block.

    Returns
    -------
    list of Cut
        By session, place in it, and tokens computed again.
    """
    found = []
    for original in map(in_memory, snapshots):
        again, tokens = candidate.rebuild(original), np.asarray(original.tokens, np.int32)
        for probe in (probe for probe in probes if probe.session == original.session):
            before = log_probabilities(network, prefix(original, probe.cut), probe.text)
            inside = len(tokens) - probe.cut >= block
            for count in sorted(set(recompute)) if inside else (0,):
                kept = probe.cut - count
                if count and kept < block:
                    continue
                text = np.concatenate([tokens[kept : probe.cut], probe.text])
                after = log_probabilities(network, prefix(again, kept), text)[count:]
                kl = (before.exp() * (before - after)).sum(-1)
                error = float(kl.std()) / len(kl) ** 0.5
                found.append(Cut(probe.session, probe.place, probe.cut, float(kl.mean()), error, count))
    return sorted(found, key=lambda cut: (cut.session, cut.tokens, cut.place, cut.recompute))


def with_recompute(cuts: Iterable[Cut], count: int) -> list[Cut]:
    """Each cut with the most tokens computed again that are not more than `count`."""
    found = {(cut.session, cut.place, cut.tokens): cut for cut in cuts if cut.recompute <= count}
    return list(found.values())


def kind_of(session: str) -> str:
    """What sessions are grouped by: their name without a number at its end."""
    return session.rstrip("0123456789").rstrip("-_") or session


def summary(cuts: Sequence[Cut]) -> dict[str, dict[str, dict[str, float]]]:
    """Kind of session -> place -> ``cuts``, mean ``kl`` and ``worst``; ``all`` stands for all kinds."""
    out: dict[str, dict[str, dict[str, float]]] = {}
    for kind in [*dict.fromkeys(kind_of(cut.session) for cut in cuts), "all"]:
        out[kind] = {}
        for place in ALLOWED:
            some = [cut.kl for cut in cuts if cut.place == place and kind in ("all", kind_of(cut.session))]
            if some:
                out[kind][place] = {"cuts": len(some), "kl": float(np.mean(some)), "worst": max(some)}
    return out


def plot_cuts(cuts: Sequence[Cut], promise: float | None, path: Path, title: str) -> None:
    """Write a plot of KL divergence against the place of the cut, without and with the most tokens computed again.

    Parameters
    ----------
    cuts : sequence of Cut
    promise : float or None
        KL divergence that the tier promises; what is allowed at each place is drawn.
    path : Path
        A .png or .svg file, replaced if it is there.
    title : str
    """
    check_plot(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    counts = sorted({cut.recompute for cut in cuts})
    shown = [counts[0]] if len(counts) == 1 else [counts[0], counts[-1]]
    figure = Figure(figsize=(9, 5) if len(shown) == 1 else (14, 5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(shown) + (len(shown) > 1), squeeze=False, sharey=True)[0]
    for axes, count in zip(panels, shown, strict=False):
        _draw(axes, with_recompute(cuts, count), promise, f"{count} tokens before the cut computed again")
    if len(shown) > 1:
        _draw_means(panels[-1], cuts, counts, promise)
    panels[0].set_ylabel("KL divergence, nats per token")
    panels[0].legend(fontsize=8, ncols=3)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
    with settings():
        figure.savefig(path, dpi=140, metadata=metadata)


def _draw(axes: Any, cuts: Sequence[Cut], promise: float | None, title: str) -> None:
    for number, kind in enumerate(dict.fromkeys(kind_of(cut.session) for cut in cuts)):
        colour = f"C{number % 10}"
        for session in dict.fromkeys(cut.session for cut in cuts if kind_of(cut.session) == kind):
            line = [(cut.tokens, cut.kl) for cut in cuts if cut.session == session and cut.place in (BLOCKS, END)]
            axes.plot(*zip(*line, strict=True), "-", color=colour, linewidth=0.9, alpha=0.6)
        for place, marker in ((BLOCKS, "."), (TURNS, "^"), (END, "o")):
            some = [(cut.tokens, cut.kl) for cut in cuts if cut.place == place and kind_of(cut.session) == kind]
            if some:
                label = kind if place == END else None
                axes.plot(*zip(*some, strict=True), marker, color=colour, markersize=5, label=label)
    _draw_allowed(axes, promise)
    axes.set_xlabel("tokens before the cut\n(dots: block ends, triangles: turn ends, circles: session ends)")
    axes.set_title(title, loc="left", fontsize=10)


def _draw_means(axes: Any, cuts: Sequence[Cut], counts: Sequence[int], promise: float | None) -> None:
    for number, kind in enumerate(dict.fromkeys(kind_of(cut.session) for cut in cuts)):
        for place, marker in ((BLOCKS, "."), (TURNS, "^")):
            rows = [summary(with_recompute(cuts, count))[kind].get(place) for count in counts]
            if rows[0]:
                means = [row["kl"] for row in rows if row]
                axes.plot(counts, means, marker + "-", color=f"C{number % 10}", linewidth=0.9, markersize=5)
    _draw_allowed(axes, promise)
    axes.set_xlabel("tokens before the cut computed again")
    axes.set_title("means", loc="left", fontsize=10)


def _draw_allowed(axes: Any, promise: float | None) -> None:
    for place, times in ALLOWED.items() if promise else ():
        axes.axhline(times * (promise or 0), color="black", linestyle=":", linewidth=0.9)
        axes.annotate(place, (0, times * (promise or 0)), xytext=(2, 2), textcoords="offset points", fontsize=8)
    axes.set_yscale("log")
    axes.grid(True, which="major", alpha=0.3)
