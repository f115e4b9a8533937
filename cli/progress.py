"""Progress bars with rate and remaining time, on standard error if it is a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from pltpack_cli.output import short_size
from pltpack_cli.terminal import console, is_watched, say_if_compiling

if TYPE_CHECKING:
    from rich.progress import Progress

ProgressCall = Callable[[str, int, int], None]


@contextlib.contextmanager
def progress_bars() -> Iterator[ProgressCall | None]:
    """Give the ``progress(stage, done, total)`` callable for one job, in bytes; None where nobody watches."""
    if not is_watched():
        yield None
        return
    say_if_compiling()
    bars = _display()
    task = bars.add_task("", total=None)
    stage_shown: str | None = None

    def advance(stage: str, done: int, total: int) -> None:
        nonlocal stage_shown
        if stage != stage_shown:
            stage_shown = stage
            bars.reset(task, description=stage)
            bars.start()
        # A stage that cannot say how far it is shows that it is alive.
        bars.update(task, completed=done, total=total if done else None)

    try:
        yield advance
    finally:
        bars.stop()


def _display() -> Progress:
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        ProgressColumn,
        Task,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )  # fmt: skip
    from rich.text import Text

    class RateColumn(ProgressColumn):
        """Like rich's own, in the binary units of everything else here."""

        def render(self, task: Task) -> Text:
            speed = task.finished_speed or task.speed
            return Text("" if speed is None else f"{short_size(speed)}/s", style="progress.data.speed")

    return Progress(
        TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(binary_units=True), RateColumn(),
        TimeElapsedColumn(), TextColumn("eta"), TimeRemainingColumn(), console=console(),
    )  # fmt: skip
