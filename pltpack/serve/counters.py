"""What a loader has done so far, as plain numbers: cheap to add to, read by whoever exposes them."""

from __future__ import annotations

import threading


class Counters:
    """Named sums, each by the values of one label; any thread may add to them."""

    def __init__(self) -> None:
        # Garbage collection may end a load, which counts, in the middle of an addition.
        self._lock = threading.RLock()
        self._sums: dict[tuple[str, str], float] = {}

    def add(self, name: str, label: str = "", amount: float = 1) -> None:
        """Add to a sum."""
        with self._lock:
            self._sums[name, label] = self._sums.get((name, label), 0) + amount

    def of(self, name: str) -> dict[str, float]:
        """A name's sums by label."""
        with self._lock:
            return {label: value for (own, label), value in self._sums.items() if own == name}

    def span(self, stage: str, seconds: float) -> None:
        """Add to the seconds that a stage of loads was at work."""
        self.add("stage_seconds", stage, seconds)
