"""A share of `make crash`: writers killed at random moments never hurt an archive."""

from __future__ import annotations

from benchmarks import crash


def test_killed_writers_leave_the_old_or_the_new_generation(tmp_path):
    found = crash.run(kills=25, seed=7, count=6, tokens=128, folder=tmp_path)
    assert sum(sum(counts.values()) for counts in found.values()) == 25
