"""Live panels: what `compress`, `append` and `bench` are at, on standard error if it is a terminal."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pltpack_cli.output import count, number, plain, short_size
from pltpack_cli.terminal import console, is_watched, say_if_compiling

if TYPE_CHECKING:
    from rich.console import ConsoleRenderable
    from rich.table import Table

    from pltpack.archive.tally import Written

#: Seconds over which the rate is taken, between two of its marks, and marks that are shown.
_SPAN, _MARK, _MARKS = 3.0, 0.5, 24
_REFRESH = 8
#: Steps that stay in view when they are over.
_PAST = 6
_BLOCKS = "▁▂▃▄▅▆▇█"


@contextlib.contextmanager
def live_writing(title: str, quiet: bool) -> Iterator[WritingPanel | None]:
    """Give the progress callable of one write, shown as a panel that goes when it ends; None where nobody watches."""
    if quiet or not is_watched():
        yield None
        return
    say_if_compiling()
    panel = WritingPanel(title)
    with _shown(panel, auto=True):
        yield panel


@contextlib.contextmanager
def live_steps(title: str, quiet: bool) -> Iterator[StepsPanel]:
    """Give a panel of the steps of a measurement, drawn between them only, so that it does not disturb what is timed.

    Where nobody watches it shows nothing.
    """
    panel = StepsPanel(title)
    if quiet or not is_watched():
        yield panel
        return
    say_if_compiling()
    with _shown(panel, auto=False) as live:
        panel.drawn = live.refresh
        yield panel


@contextlib.contextmanager
def _shown(panel: Any, auto: bool) -> Iterator[Any]:
    from rich.live import Live

    # What goes to standard output may be on its way into a file.
    with Live(console=console(), get_renderable=panel.render, auto_refresh=auto, refresh_per_second=_REFRESH,
              transient=True, redirect_stdout=False) as live:  # fmt: skip
        yield live


class WritingPanel:
    """How far a write is: stages, bytes, rate, sessions, ratio so far, dedup hit rate.

    Called as ``progress(stage, done, total)`` in raw bytes, and told `written`, from several threads.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._stages: list[tuple[str, float]] = []
        self._done = self._total = 0
        self._rate = _Rate()
        self._written: Written | None = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        """See `pltpack.archive.encoding.Progress`."""
        if not self._stages or self._stages[-1][0] != stage:
            self._stages.append((stage, time.monotonic()))
            self._rate = _Rate()
        self._done, self._total = done, total
        self._rate.add(done)

    def written(self, found: Written) -> None:
        """See `pltpack.archive.tally.Watcher`."""
        self._written = found

    def render(self) -> ConsoleRenderable:
        """The panel as it is now."""
        from rich.progress_bar import ProgressBar

        grid = _grid()
        grid.add_row("stages", _stages(self._stages))
        if self._done and self._total:
            part = min(self._done / self._total, 1.0)
            figures = f"{100 * part:3.0f} %  {short_size(self._done)} of {short_size(self._total)}"
            grid.add_row("", _beside(ProgressBar(self._total, min(self._done, self._total)), figures))
            rate, marks = self._rate.now(), self._rate.marks()
            left = f"   eta {_clock((self._total - self._done) / rate)}" if rate else ""
            grid.add_row("rate", f"{short_size(rate)}/s  {marks}{left}")
        found = self._written
        if found is not None:
            grid.add_row("sessions", f"{found.sessions:,} of {found.of:,} written")
            hit = found.shared_tokens / found.tokens if found.tokens else 0.0
            grid.add_row("dedup hit rate", f"{number(100 * hit, 1, ' %')} of {count(found.tokens, 'token')}")
            if found.sessions:
                ratio = found.raw_bytes / max(found.stored_bytes, 1)
                sizes = f"{short_size(found.raw_bytes)} → {short_size(found.stored_bytes)}"
                grid.add_row("ratio so far", f"{number(ratio, 2, 'x')}  {sizes}")
        return _panel(self._title, grid)


class StepsPanel:
    """Steps of a measurement with the seconds that each took, and facts about what is measured."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._facts: list[tuple[str, str]] = []
        self._steps: list[tuple[str, float]] = []
        self.drawn: Any = None

    def fact(self, label: str, text: str) -> None:
        """Show a fact."""
        self._facts.append((label, text))
        self._draw()

    def archive(self, name: str, stats: dict[str, Any]) -> None:
        """Show what an archive holds and saves."""
        ratio, hit = number(stats["ratio"], 2, "x"), number(100 * stats["dedup_hit_rate"], 1, " %")
        sessions = count(stats["sessions"], "session")
        self.fact(name, f"{stats['quality']}, {sessions}, ratio {ratio}, dedup hit rate {hit}")

    def step(self, name: str) -> None:
        """Begin a step, which ends the one before."""
        self._steps.append((name, time.monotonic()))
        self._draw()

    def _draw(self) -> None:
        if self.drawn is not None:
            self.drawn()

    def render(self) -> ConsoleRenderable:
        """The panel as it is now."""
        from rich.text import Text

        grid = _grid()
        for label, text in self._facts:
            grid.add_row(Text(plain(label)), Text(plain(text)))
        for (name, start), (_, stop) in list(itertools.pairwise(self._steps))[-_PAST:]:
            grid.add_row(Text(f"{number(stop - start, 2)} s", style="dim"), Text(plain(name)))
        if self._steps:
            grid.add_row(Text("now", style="cyan"), Text(plain(self._steps[-1][0]), style="bold"))
        return _panel(self._title, grid)


class _Rate:
    """Bytes a second over the last moments, and how that went."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()
        self._marks: deque[float] = deque(maxlen=_MARKS)
        self._next = time.monotonic() + _MARK

    def add(self, done: int) -> None:
        now = time.monotonic()
        self._seen.append((now, done))
        while len(self._seen) > 2 and self._seen[0][0] < now - _SPAN:
            self._seen.popleft()
        if now >= self._next:
            self._marks.append(self.now())
            self._next = now + _MARK

    def now(self) -> float:
        seen = list(self._seen)
        if len(seen) < 2:
            return 0.0
        seconds = max(time.monotonic(), seen[-1][0]) - seen[0][0]
        return max(seen[-1][1] - seen[0][1], 0) / seconds if seconds > 0 else 0.0

    def marks(self) -> str:
        marks = list(self._marks)
        most = max(marks, default=0.0)
        return "".join(_BLOCKS[min(int(8 * mark / most), 7)] for mark in marks) if most else ""


def _grid() -> Table:
    from rich.table import Table

    grid = Table.grid(padding=(0, 2), expand=True)
    grid.add_column(style="dim", no_wrap=True, max_width=30, overflow="ellipsis")
    grid.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    return grid


def _beside(bar: ConsoleRenderable, text: str) -> Table:
    from rich.table import Table
    from rich.text import Text

    row = Table.grid(padding=(0, 2), expand=True)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True)
    row.add_row(bar, Text(text))
    return row


def _panel(title: str, grid: Table) -> ConsoleRenderable:
    from rich.panel import Panel
    from rich.text import Text

    return Panel(grid, title=Text(plain(title), style="bold"), title_align="left", border_style="blue", width=None,
                 padding=(0, 1), expand=True)  # fmt: skip


def _stages(stages: list[tuple[str, float]]) -> Any:
    from rich.text import Text

    parts = []
    ends = [start for _, start in stages[1:]]
    for (name, start), stop in zip(stages, ends, strict=False):
        parts.append(Text(f"✓ {name} {number(stop - start, 1)} s", style="green"))
    if stages:
        name, start = stages[-1]
        parts.append(Text(f"▸ {name} {number(time.monotonic() - start, 1)} s", style="bold"))
    return Text("   ").join(parts) if parts else Text("▸ read", style="bold")


def _clock(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "–"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
