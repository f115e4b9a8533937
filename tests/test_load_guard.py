"""The guard at serving time: alerts, what takes a barred session's place, and that it does not flap."""

from __future__ import annotations

import logging
import math

import archives
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loader_common import same

import pltpack
from pltpack.errors import UnsupportedError
from pltpack.serve.guard import Alert, AlertLimits, LoadGuard
from pltpack.serve.misses import MissError

TOKENS = list(range(40)) + [7] * 8


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def raw() -> str:
    return "raw"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A session in q1, behind it a longer one that shares its beginning."""
    out = tmp_path_factory.mktemp("load-guard") / "a"
    pltpack.compress([archives.session("s", TOKENS), archives.session("t", [*TOKENS[:40], *range(60, 72)])], out,
                     quality="q1", block=4)  # fmt: skip
    return out


@pytest.fixture
def both(path, tmp_path):
    """The same, and the first session once more, bit by bit."""
    pltpack.compress([archives.session("s", TOKENS)], tmp_path / "b", quality="q1", block=4)
    pltpack.append(tmp_path / "b", [archives.session("s-exact", TOKENS)], quality="lossless", dedup=False)
    return tmp_path / "b"


def test_a_rise_above_the_limit_is_an_alert_and_a_better_copy_takes_over(both, caplog):
    told: list[Alert] = []
    with pltpack.open(both) as archive:
        loader = archive.loader(on_alert=told.append)
        hit = loader.lookup(TOKENS)
        assert hit.session == "s"
        assert loader.report(hit, 2.9) is None and loader.lookup(TOKENS) == hit
        with caplog.at_level(logging.WARNING, "pltpack.serve"):
            alert = loader.report(hit, 3.5)
        assert told == [alert] == [Alert("s", 3.5, "alert", "better copy")]
        assert "'s'" in caplog.text and "3.50 %" in caplog.text
        other = loader.lookup(TOKENS)
        assert (other.session, other.tokens) == ("s-exact", hit.tokens)
        assert same(loader.load(other), archives.session("x", TOKENS), other.tokens)
        assert loader.report(hit, 9.0) is None, "what was on its way when it was barred is nothing new"
        assert loader.counters.of("alerts") == {"alert": 1}
        assert loader.counters.of("fallbacks") == {"better copy": 1}


def test_without_a_better_copy_it_is_computed_anew(path):
    with pltpack.open(path) as archive:
        loader = archive.loader()
        hit = loader.lookup(TOKENS)
        assert hit.session == "s"
        assert loader.report(hit, 7.0) == Alert("s", 7.0, "critical", "recompute")
        # The other session has its first 40 tokens of the same library node: they are as bad.
        empty = loader.lookup(TOKENS)
        assert not empty
        with pytest.raises(UnsupportedError, match="nothing to load"):
            loader.stream(empty)
        assert loader.lookup([*TOKENS[:40], *range(60, 72)]).session == "t", "others go on"


def test_raw_caches_take_over_where_there_are_some(path, tmp_path):
    pltpack.compress([archives.session("s", TOKENS)], tmp_path / "raw", quality="lossless", block=4)
    with pltpack.open(path) as archive, pltpack.open(tmp_path / "raw") as kept:
        loader = archive.loader(fallback=kept)
        hit = loader.lookup(TOKENS)
        assert loader.report(hit, 4.0).fallback == "raw"
        instead = loader.lookup(TOKENS)
        assert (instead.source, instead.tokens) == ("raw", 48)
        assert same(loader.load(instead), archives.session("x", TOKENS), 48)
        assert loader.report(instead, 50.0) is None
        assert loader.counters.of("loads") == {"raw": 1}
        (tmp_path / "raw" / "shards" / "s.pltshard").write_bytes(b"")
        loader.close()
        again = archive.loader(fallback=kept)
        again.report(again.lookup(TOKENS), 4.0)
        instead = again.lookup(TOKENS)
        if instead:
            with pytest.raises(MissError):
                again.load(instead)


def test_a_quality_callback_is_asked_at_every_look_up(both):
    rises = iter([None, 1.0, 12.0, 0.0])
    with pltpack.open(both) as archive:
        loader = archive.loader(quality=lambda hit: next(rises))
        found = [loader.lookup(TOKENS).session for _ in range(4)]
    assert found == ["s", "s", "s-exact", "s-exact"]


def test_it_comes_back_on_trial_and_waits_longer_each_time():
    clock, limits = Clock(), AlertLimits(retry_seconds=10, most_seconds=30)
    guard = LoadGuard(limits, clock=clock)
    assert guard.report("s", 4.0, raw).level == "alert"
    for wait in (10, 20, 30, 30):
        assert guard.barred("s")
        clock.now += wait - 0.5
        assert guard.barred("s")
        clock.now += 0.5
        assert not guard.barred("s"), "on trial"
        assert guard.report("s", 2.5, raw) is None, "neither good nor bad"
        assert guard.report("s", 1.0, raw) is None
        assert guard.report("s", 5.1, raw).level == "critical"
    clock.now += 30
    assert not guard.barred("s")
    for _ in range(limits.clear_after):
        guard.report("s", 1.9, raw)
    assert guard.report("s", 2.9, raw) is None
    assert guard.report("s", 3.1, raw) is not None
    clock.now += 10
    assert not guard.barred("s"), "cleared: it waits as little as the first time"
    guard.clear("s")
    assert guard.worst() is None


def test_several_bad_reports_in_a_row_can_be_asked_for():
    guard = LoadGuard(AlertLimits(raise_after=3))
    assert [guard.report("s", x, raw) for x in (4.0, 4.0, 2.0, 4.0, 4.0)] == [None] * 5
    assert guard.report("s", math.nan, raw) == Alert("s", math.inf, "critical", "raw")


def test_a_callback_that_fails_does_no_harm(caplog):
    def fail(alert):
        raise RuntimeError("mail is down")

    assert LoadGuard(on_alert=fail).report("s", 4.0, raw) is not None
    assert "mail is down" in caplog.text


@settings(max_examples=50)
@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 5)), max_size=200))
def test_it_does_not_flap(reports):
    clock, limits = Clock(), AlertLimits(retry_seconds=10, most_seconds=80)
    guard, changes = LoadGuard(limits, clock=clock), []
    for rise, wait in reports:
        clock.now += wait
        if not guard.barred("s") and guard.report("s", rise, raw):
            changes.append(clock.now)
    # From one alert to the next at least the first waiting time has passed.
    assert all(np.diff(changes) >= 10)


@pytest.mark.parametrize(
    "bad",
    [{"clear_pct": 3.0}, {"alert_pct": 6.0}, {"clear_after": 0}, {"retry_seconds": 0.0}, {"most_seconds": 1.0},
     {"critical_pct": math.inf}, {"clear_pct": -1.0}],
)  # fmt: skip
def test_limits_out_of_order_are_refused(bad):
    with pytest.raises(UnsupportedError):
        LoadGuard(AlertLimits(**bad))
