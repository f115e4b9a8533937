"""What the stages of loads did when, as bars over time. Needs the extra ``plot``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pltpack.quality.plot import check_plot, settings
from pltpack.serve.timeline import Span

#: Rows from top to bottom.
STAGES = ("read", "check", "decode", "scatter", "consume")
_NAMES = {"consume": "model"}


def gantt(timelines: Mapping[str, Sequence[Span]], path: Path) -> None:
    """Write a plot with one panel for each load, all over one time axis.

    Parameters
    ----------
    timelines : mapping
        Title -> spans; ``consume`` is what the model does between two layers that it waits for.
    path : Path
        A .png or .svg file, replaced if it is there.

    Raises
    ------
    UnsupportedError
        If matplotlib is not installed, or the file's name ends otherwise.
    """
    check_plot(path)
    # Not pyplot: it would keep state and look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 0.6 + 1.7 * len(timelines)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(timelines), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (title, spans) in zip(panels, timelines.items(), strict=True):
        _panel(axes, title, spans)
    panels[-1].set_xlabel("milliseconds since the look-up")
    metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
    with settings():
        figure.savefig(path, dpi=150, metadata=metadata)


def _panel(axes: Any, title: str, spans: Sequence[Span]) -> None:
    for row, stage in enumerate(STAGES):
        mine = [span for span in spans if span.stage == stage]
        places = [(1e3 * span.start, 1e3 * (span.end - span.start)) for span in mine]
        # Neighbours in two shades: the eye sees where one layer ends.
        shades = [f"C{row}" if index % 2 else (f"C{row}", 0.55) for index in range(len(mine))]
        axes.broken_barh(places, (row - 0.4, 0.8), facecolors=shades)
    axes.set_yticks(range(len(STAGES)), [_NAMES.get(stage, stage) for stage in STAGES])
    axes.invert_yaxis()
    axes.grid(True, axis="x", alpha=0.3)
    end = max((span.end for span in spans), default=0.0)
    axes.set_title(f"{title}: {1e3 * end:.0f} ms", loc="left", fontsize=10)
