"""A share of `make fuzz`: mutated files are read or refused, without a crash, a hang or a large allocation."""

from __future__ import annotations

import pytest

from benchmarks import fuzz


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """Seed files and targets."""
    folder = tmp_path_factory.mktemp("fuzz")
    return folder, fuzz.targets(folder)


NAMES = [
    "manifest", "manifest-deep", "container", "container-deep", "session-file", "safetensors", "hdf5", "llama.cpp",
    "llama.cpp-transposed", "mlx", "mlx-sliced", "transform", "profile", "profile-file",
]  # fmt: skip


@pytest.mark.parametrize("target", NAMES)
def test_mutated_files_are_read_or_refused(cases, target):
    folder, targets = cases
    assert list(targets) == NAMES
    outcome = fuzz.fuzz(target, targets[target], seed=1, seconds=4, folder=folder)
    assert outcome.failures == []
    assert outcome.counts["refused"] > 0
