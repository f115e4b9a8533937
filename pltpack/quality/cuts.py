"""Caches cut before their ends and continued with their own text: KL divergence against the place of the cut."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pltpack.quality.plot import check_plot, settings
from pltpack.quality.probes import END, LEAST_TOKENS, Probe
from pltpack.quality.scoring import Score
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
    """

    session: str
    place: str
    tokens: int
    kl: float


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


def cuts_of(score: Score) -> list[Cut]:
    """All cuts of a score, by session and place."""
    found = [
        Cut(row.partition("@")[0], place, int(figures["tokens"]), float(figures["kl"]))
        for place, rows in score.rows.items()
        for row, figures in rows.items()
    ]
    return sorted(found, key=lambda cut: (cut.session, cut.tokens, cut.place))


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
    """Write a plot of KL divergence against the place of the cut.

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

    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(figure)
    _draw(figure.subplots(), cuts, promise, title)
    metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
    with settings():
        figure.savefig(path, dpi=140, metadata=metadata)


def _draw(axes: Any, cuts: Sequence[Cut], promise: float | None, title: str) -> None:
    kinds = list(dict.fromkeys(kind_of(cut.session) for cut in cuts))
    for number, kind in enumerate(kinds):
        colour = f"C{number % 10}"
        for session in dict.fromkeys(cut.session for cut in cuts if kind_of(cut.session) == kind):
            line = [(cut.tokens, cut.kl) for cut in cuts if cut.session == session and cut.place in (BLOCKS, END)]
            axes.plot(*zip(*line, strict=True), "-", color=colour, linewidth=0.9, alpha=0.6)
        for place, marker in ((BLOCKS, "."), (TURNS, "^"), (END, "o")):
            some = [(cut.tokens, cut.kl) for cut in cuts if cut.place == place and kind_of(cut.session) == kind]
            if some:
                label = kind if place == END else None
                axes.plot(*zip(*some, strict=True), marker, color=colour, markersize=5, label=label)
    for place, times in ALLOWED.items() if promise else ():
        axes.axhline(times * (promise or 0), color="black", linestyle=":", linewidth=0.9)
        axes.annotate(place, (0, times * (promise or 0)), xytext=(2, 2), textcoords="offset points", fontsize=8)
    axes.set_yscale("log")
    axes.set_xlabel("tokens before the cut (dots: block ends, triangles: turn ends, circles: session ends)")
    axes.set_ylabel("KL divergence, nats per token")
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(fontsize=8, ncols=len(kinds))
