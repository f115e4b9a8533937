"""Rate-distortion plot: bits per element against KL, one curve per codec family. Needs the extra ``plot``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pltpack.errors import UnsupportedError
from pltpack.quality.scoring import Score

SUFFIXES = (".png", ".svg")
#: What curves are called where their points do not say it, in the order of their colours; other families come after.
LABELS = {
    "transform": "transform",
    "group": "q tiers",
    "turboquant": "",
    "PCA": "PCA",
    "KIVI": "KIVI",
    "fp8 e4m3": "",
    "lossless": "",
    "zstd": "",
    "raw": "",
}
#: Width of a label's character as a part of the strip's, and the rows of labels that fit into it.
_CHARACTER, _ROWS = 0.0085, 3


def check_plot(path: Path) -> None:
    """Check, before hours of work, that a plot can be written to `path`.

    Raises
    ------
    UnsupportedError
        If matplotlib is not installed, or the file's name ends neither in .png nor in .svg.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise UnsupportedError(f"a plot ends in {' or '.join(SUFFIXES)}", path)
    if not path.parent.is_dir():
        raise UnsupportedError("its folder does not exist", path)
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise UnsupportedError("matplotlib is not installed; it comes with pltpack[plot]") from None


def plot(scores: Sequence[Score], path: Path, title: str) -> None:
    """Write a plot of scores that have a rate; bits are without the profile, exact ones stand in a strip of their own.

    Parameters
    ----------
    scores : sequence of Score
    path : Path
        A .png or .svg file, replaced if it is there.
    title : str
    """
    check_plot(path)
    # Not pyplot: it would keep state and look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    FigureCanvasAgg(figure)
    _draw(figure, [score for score in scores if score.rate is not None], title)
    # Dates and random ids would make equal figures differ.
    metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
    with settings():
        figure.savefig(path, dpi=160, metadata=metadata)


def settings() -> Any:
    """Settings of matplotlib under which equal figures are equal files, with text as text."""
    import matplotlib

    return matplotlib.rc_context({"svg.hashsalt": "pltpack", "svg.fonttype": "none"})


def _draw(figure: Any, scores: Sequence[Score], title: str) -> None:
    lossy = [score for score in scores if _distortion(score) > 0]
    exact = [score for score in scores if _distortion(score) <= 0]
    heights = [6, 1.2] if lossy and exact else [1]
    panels = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    colours = _colours(scores)
    if lossy:
        _curves(panels[0], lossy, colours)
    span = min(map(_bits, scores)) / 1.4, max(map(_bits, scores)) * 1.25
    if exact:
        _strip(panels[-1], exact, colours, span)
    panels[0].set_title(title, loc="left", fontsize=11)
    _bits_axis(panels[-1], span)


def _colours(scores: Sequence[Score]) -> dict[str, str]:
    wanted = [*LABELS, *(score.family for score in scores if score.family not in LABELS)]
    return {family: f"C{number % 10}" for number, family in enumerate(dict.fromkeys(wanted))}


def _curves(axes: Any, scores: Sequence[Score], colours: dict[str, str]) -> None:
    for family in dict.fromkeys(score.family for score in scores):
        points = sorted((s for s in scores if s.family == family), key=_bits)
        places = [(_bits(point), _distortion(point)) for point in points]
        axes.plot(*zip(*places, strict=True), "o-", color=colours[family], linewidth=1.6, markersize=5)
        # Left and below a falling curve there is room up to the next better one.
        for point, place in zip(points, places, strict=True):
            _label(axes, point.name.removeprefix(f"{family} "), place, (-6, -3), colours[family], ha="right", va="top")
        if len(points) > 1 and LABELS.get(family, family):
            _label(axes, LABELS.get(family, family), places[0], (6, 6), colours[family], weight="bold", size=9)
    axes.set_yscale("log")
    axes.margins(y=0.12)
    axes.set_ylabel("KL divergence, nats per token")
    axes.grid(True, which="major", alpha=0.3)
    axes.grid(True, which="minor", alpha=0.1)


def _strip(axes: Any, scores: Sequence[Score], colours: dict[str, str], span: tuple[float, float]) -> None:
    axes.set_yticks([0], ["exact"])
    axes.set_ylim(-0.6, _ROWS + 0.4)
    taken = [0.0] * _ROWS
    for score in sorted(scores, key=_bits):
        middle = math.log(_bits(score) / span[0]) / math.log(span[1] / span[0])
        half = _CHARACTER * len(score.name) / 2
        # The lowest row that is free there, or else the one that has been free for longest.
        row = next((i for i, end in enumerate(taken) if end < middle - half), taken.index(min(taken)))
        taken[row] = middle + half
        place, colour = (_bits(score), 0), colours[score.family]
        axes.plot(*place, "o", color=colour, markersize=6)
        axes.plot([place[0]] * 2, [0, row + 0.6], color=colour, linewidth=0.7)
        _label(axes, score.name, (place[0], row + 0.6), (0, 1), colour, ha="center")


def _label(axes: Any, text: str, place: tuple[float, float], shift: tuple[int, int], colour: str, **style: Any) -> None:
    # A light ground keeps a label readable where another curve passes behind it.
    ground = {"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.6}
    style = {"size": 8, "bbox": ground, **style}
    axes.annotate(text, place, xytext=shift, textcoords="offset points", color=colour, **style)


def _bits_axis(axes: Any, span: tuple[float, float]) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axes.set_xscale("log")
    axes.set_xlim(*span)
    ticks = [mantissa * 10.0**power for power in range(-3, 3) for mantissa in (1, 2, 3, 5)]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("bits per element (a profile or basis, stored once for a model, is not counted)")


def _bits(score: Score) -> float:
    assert score.rate is not None
    return score.rate.session_bits


def _distortion(score: Score) -> float:
    return float(score.total()["kl"])
