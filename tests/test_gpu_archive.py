"""Whole archives, their units decoded by kernels in the simulator: the values that the CPU reads."""

from __future__ import annotations

import gpu_common  # noqa: F401 - before pltpack.gpu
import numpy as np
import profiles_common as toy
import pytest

import pltpack
from pltpack.archive.library import Library
from pltpack.codec import delta
from pltpack.gpu.backend import CudaBackend
from pltpack.gpu.codec import DeviceCodec


def sessions():
    """Two sessions of a small model that share a block of 4 tokens."""
    ids = np.arange(3, 11)
    return [toy.session("a", ids), toy.session("b", np.concatenate([ids[:5], [9]]))]


@pytest.mark.parametrize("quality", ["lossless", "q3", "turboquant-3", "balanced"])
def test_archives_decode_on_a_device(tmp_path, monkeypatch, quality):
    more = {"profile": toy.save_profile(tmp_path / "profile.safetensors")} if quality == "balanced" else {}
    pltpack.compress(sessions(), tmp_path / "archive", quality=quality, block=4, **more)

    def read():
        with pltpack.open(tmp_path / "archive") as archive:
            return {name: [archive.read(name).layer(i) for i in range(len(toy.LAYERS))] for name in archive.sessions}

    theirs, backend, real, units = read(), CudaBackend(), Library.codec, []

    def codec(library, index):
        units.append(index)
        return DeviceCodec(real(library, index), backend)

    monkeypatch.setattr(Library, "codec", codec)
    ours = read()
    assert units and ours.keys() == theirs.keys()
    for name in ours:
        for mine, other in zip(ours[name], theirs[name], strict=True):
            for x, y in zip(mine, other, strict=True):
                apart = delta.ordered(toy.words(x)).astype(int) - delta.ordered(toy.words(y)).astype(int)
                assert np.abs(apart).max() <= (2 if quality == "balanced" else 0)
