"""Every kernel compiles to machine code for the devices it is meant for: registers, spills, shared memory."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from pltpack.gpu import compiled

needs_compilers = pytest.mark.skipif(compiled.missing() is not None, reason=compiled.missing() or "")
#: Threads of a block of most kernels.
THREADS = 256


@pytest.fixture(scope="module")
def programs():
    """One compiling process for each target, side by side."""
    return {target: subprocess.Popen([sys.executable, "-m", "pltpack.gpu.compiled", f"{target[0]}{target[1]}"],
                                     stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for target in compiled.TARGETS}  # fmt: skip


@needs_compilers
@pytest.mark.parametrize("target", compiled.TARGETS)
def test_kernels_fit_and_do_not_spill(programs, target):
    out, err = programs[target].communicate(timeout=280)
    assert programs[target].returncode == 0, err
    found = json.loads(out)
    assert len(found) >= 26 and {name.split(".")[0] for name in found} == set(compiled.MODULES)
    for name, usage in found.items():
        assert usage["spill_stores"] == usage["spill_loads"] == usage["stack"] == 0, (name, usage)
        # Two blocks of 256 threads at least share a multiprocessor's 65,536 registers, and 48 kB are a block's own.
        assert 0 < usage["registers"] <= 65536 // (2 * THREADS), (name, usage)
        assert usage["shared"] <= 48 * 1024, (name, usage)


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(compiled.importlib.util, "find_spec", lambda name: None)
    assert "numba-cuda" in compiled.missing()
