"""The fit of `benchmarks.equal_kl`: parallel lines through bytes over KL divergence."""

from __future__ import annotations

import pytest

from benchmarks.equal_kl import fit


def _rows(scatter: float) -> list[dict[str, float]]:
    rows = []
    for index, kl in enumerate((0.004, 0.005, 0.006, 0.008)):
        for near in (False, True):
            size = 1e6 * kl**-0.8 / (1.6 if near else 1.0) * (1 + scatter * (-1) ** (index + index // 2 + near))
            # With predictions KL divergence is a little lower at the same target.
            shift = 0.93 if near else 1.0
            rows.append({"near": near, "kl": kl * shift, "bytes": size * shift**-0.8})
    return rows


def test_the_ratio_is_that_of_equal_kl_not_of_equal_targets() -> None:
    assert fit(_rows(0.0)) == {"fewer": pytest.approx(1.6), "error": pytest.approx(0, abs=1e-3), "slope": -0.8}


def test_scatter_is_told_as_an_error() -> None:
    found = fit(_rows(0.03))
    assert 0.01 < found["error"] < 0.1
    assert found["fewer"] == pytest.approx(1.6, abs=3 * found["error"])
