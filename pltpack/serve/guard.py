"""The guard at serving time: sessions whose quality falls are taken out of use, and tried again after a while.

Who serves reports by how much a session's perplexity rose. A rise above the limit is an alert, and the session's stored
copy is barred: a better copy, raw caches, or computing anew takes its place. What is then reported says nothing about
the barred copy, so it comes back on trial only: after a while it is given out again, and several good reports in a row
clear it, where good is less than what raised the alert; a bad one bars it for twice as long. So it does not flap.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
import time
from collections.abc import Callable

from pltpack.errors import UnsupportedError

log = logging.getLogger("pltpack.serve")


@dataclasses.dataclass(frozen=True)
class AlertLimits:
    """When sessions are barred, and when they are cleared.

    Attributes
    ----------
    alert_pct, critical_pct : float
        Rise of perplexity in percent above which there is an alert, and a critical one.
    clear_pct : float
        Rise up to which a report of a session on trial is good; less than `alert_pct`.
    raise_after, clear_after : int
        Bad reports in a row that bar a session, good ones that clear it.
    retry_seconds, most_seconds : float
        How long it is barred before its first trial, and at most.
    """

    alert_pct: float = 3.0
    critical_pct: float = 5.0
    clear_pct: float = 2.0
    raise_after: int = 1
    clear_after: int = 3
    retry_seconds: float = 600.0
    most_seconds: float = 86_400.0

    def check(self) -> None:
        """Refuse limits that are out of order.

        Raises
        ------
        UnsupportedError
        """
        if not 0 <= self.clear_pct < self.alert_pct <= self.critical_pct < math.inf:
            raise UnsupportedError("limits of perplexity go up from clear over alert to critical")
        if min(self.raise_after, self.clear_after) < 1 or not 0 < self.retry_seconds <= self.most_seconds:
            raise UnsupportedError("a loader's guard counts at least one report and waits a while")


@dataclasses.dataclass(frozen=True)
class Alert:
    """A session that was barred.

    Attributes
    ----------
    session : str
    ppl_change_pct : float
        What was reported.
    level : str
        ``alert`` or ``critical``.
    fallback : str
        What takes its place: ``better copy``, ``raw`` or ``recompute``.
    """

    session: str
    ppl_change_pct: float
    level: str
    fallback: str


@dataclasses.dataclass
class _State:
    """A session that something was reported of."""

    last: float = 0.0
    bad: int = 0
    good: int = 0
    # Until when it is barred, and for how long the last time; None while it is in use without reserve.
    until: float | None = None
    seconds: float = 0.0
    trial: bool = False


class LoadGuard:
    """Which sessions are barred; for use by several threads.

    Parameters
    ----------
    limits : AlertLimits, optional
    on_alert : callable, optional
        Told every `Alert`, outside of any lock; what it raises is logged.
    clock : callable
        Seconds, never falling.
    """

    def __init__(
        self,
        limits: AlertLimits | None = None,
        on_alert: Callable[[Alert], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits or AlertLimits()
        self.limits.check()
        self._on_alert, self._clock = on_alert, clock
        self._lock = threading.RLock()
        self._states: dict[str, _State] = {}

    def report(self, session: str, ppl_change_pct: float, fallback: Callable[[], str]) -> Alert | None:
        """Note by how much a session's perplexity rose, in percent; what is no number counts as worst.

        Parameters
        ----------
        session : str
            Whose stored copy was in use.
        ppl_change_pct : float
        fallback : callable
            Says what will take its place.

        Returns
        -------
        Alert or None
            If this report bars it.
        """
        rise = math.inf if math.isnan(ppl_change_pct) else float(ppl_change_pct)
        with self._lock:
            state = self._states.setdefault(session, _State())
            state.last = rise
            if not self._bars(state, rise):
                return None
        level = "critical" if rise > self.limits.critical_pct else "alert"
        alert = Alert(session, rise, level, fallback())
        log.warning("session %r: perplexity rose by %.2f %% (%s); its stored copy is not used for now, but: %s",
                    session, rise, level, alert.fallback)  # fmt: skip
        self._tell(alert)
        return alert

    def _bars(self, state: _State, rise: float) -> bool:
        """Count a report; whether the session is barred by it."""
        limits = self.limits
        if state.until is not None and not state.trial:
            # A load that began before it was barred: nothing new.
            return False
        if state.trial and rise <= limits.clear_pct:
            state.good += 1
            if state.good >= limits.clear_after:
                state.until, state.trial, state.bad, state.good, state.seconds = None, False, 0, 0, 0.0
            return False
        state.good = 0
        if rise <= limits.alert_pct:
            state.bad = 0
            return False
        state.bad += 1
        if state.bad < limits.raise_after and not state.trial:
            return False
        state.seconds = min(2 * state.seconds, limits.most_seconds) if state.seconds else limits.retry_seconds
        state.until, state.trial, state.bad = self._clock() + state.seconds, False, 0
        return True

    def barred(self, session: str) -> bool:
        """Whether a session's stored copy is not to be used now; begins its trial when its time has come."""
        with self._lock:
            state = self._states.get(session)
            if state is None or state.until is None:
                return False
            if not state.trial and self._clock() >= state.until:
                state.trial, state.good = True, 0
            return not state.trial

    def all_barred(self) -> frozenset[str]:
        """Sessions that are barred now."""
        with self._lock:
            return frozenset(session for session in self._states if self.barred(session))

    def clear(self, session: str) -> None:
        """Forget what was reported of a session, as after it was stored anew."""
        with self._lock:
            self._states.pop(session, None)

    def worst(self) -> float | None:
        """Largest of the sessions' last reports, in percent; None if there are none."""
        with self._lock:
            return max((state.last for state in self._states.values()), default=None)

    def _tell(self, alert: Alert) -> None:
        if self._on_alert is None:
            return
        try:
            self._on_alert(alert)
        except Exception:
            log.exception("the callback for alerts failed")
