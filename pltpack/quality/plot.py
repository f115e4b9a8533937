"""Rate-distortion plot: bits per element against KL, one curve per codec family. Needs the extra ``plot``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pltpack.errors import UnsupportedError
from pltpack.quality.scoring import Score

SUFFIXES = (".png", ".svg")
#: Families in the order of their colours; what is not named here gets the next free one.
LABELS = {
    "transform": "transform",
    "group": "q tiers",
    "turboquant": "TurboQuant",
    "PCA": "PCA, variance-normalized",
    "KIVI": "KIVI",
    "fp8 e4m3": "fp8 e4m3",
    "lossless": "lossless",
    "zstd": "zstd",
    "raw": "raw",
}


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
    with _settings():
        figure.savefig(path, dpi=160, metadata=metadata)


def _settings() -> Any:
    import matplotlib

    return matplotlib.rc_context({"svg.hashsalt": "pltpack", "svg.fonttype": "none"})


def _draw(figure: Any, scores: Sequence[Score], title: str) -> None:
    lossy = [score for score in scores if _distortion(score) > 0]
    exact = [score for score in scores if _distortion(score) <= 0]
    heights = [6, 1] if lossy and exact else [1]
    panels = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    colours = _colours(scores)
    if lossy:
        _curves(panels[0], lossy, colours)
    if exact:
        _strip(panels[-1], exact, colours)
    panels[0].set_title(title, loc="left", fontsize=11)
    _bits_axis(panels[-1], [_bits(score) for score in scores])


def _colours(scores: Sequence[Score]) -> dict[str, str]:
    wanted = [*LABELS, *(score.family for score in scores if score.family not in LABELS)]
    return {family: f"C{number % 10}" for number, family in enumerate(dict.fromkeys(wanted))}


def _curves(axes: Any, scores: Sequence[Score], colours: dict[str, str]) -> None:
    for family in dict.fromkeys(score.family for score in scores):
        points = sorted((s for s in scores if s.family == family), key=_bits)
        x, y = [_bits(point) for point in points], [_distortion(point) for point in points]
        axes.plot(x, y, "o-", color=colours[family], linewidth=1.6, markersize=5)
        for point in points:
            axes.annotate(point.name, (_bits(point), _distortion(point)), xytext=(6, 4), textcoords="offset points",
                          color=colours[family], fontsize=8)  # fmt: skip
    axes.set_yscale("log")
    axes.set_ylabel("KL divergence, nats per token")
    axes.grid(True, which="major", alpha=0.3)
    axes.grid(True, which="minor", alpha=0.1)


def _strip(axes: Any, scores: Sequence[Score], colours: dict[str, str]) -> None:
    for score in scores:
        axes.plot([_bits(score)], [0], "o", color=colours[score.family], markersize=6)
        axes.annotate(score.name, (_bits(score), 0), xytext=(0, 7), textcoords="offset points", ha="center",
                      color=colours[score.family], fontsize=8)  # fmt: skip
    axes.set_yticks([0], ["exact"])
    axes.set_ylim(-1, 2)


def _bits_axis(axes: Any, bits: Sequence[float]) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axes.set_xscale("log")
    axes.set_xlim(min(bits) / 1.25, max(bits) * 1.4)
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
