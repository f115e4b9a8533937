"""When each stage of a load worked on what: the figures behind the plot that shows them overlap."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple


class Span(NamedTuple):
    """One stage at work: `start` and `end` in seconds since the load began; `label` says on what."""

    stage: str
    label: str
    start: float
    end: float


class Timeline:
    """Spans of one load; any thread may add to it.

    Parameters
    ----------
    observe : callable, optional
        Told the stage and the seconds of every span.
    """

    def __init__(self, observe: Callable[[str, float], object] | None = None) -> None:
        self._begin = time.perf_counter()
        self._spans: list[Span] = []
        self._observe = observe

    def add(self, stage: str, label: str, start: float, end: float) -> None:
        """Note a span; times as of `time.perf_counter`."""
        self._spans.append(Span(stage, label, start - self._begin, end - self._begin))
        if self._observe is not None:
            self._observe(stage, end - start)

    @property
    def spans(self) -> list[Span]:
        """All so far, in the order in which they began."""
        return sorted(self._spans, key=lambda span: span.start)

    def busy(self) -> dict[str, float]:
        """Seconds of work by stage, summed over its threads."""
        out: dict[str, float] = {}
        for span in self._spans:
            out[span.stage] = out.get(span.stage, 0.0) + span.end - span.start
        return out
