"""Whole archives through ``--device cuda``, in the simulator: the bytes and the values of the CPU."""

from __future__ import annotations

import gpu_common  # noqa: F401 - before pltpack.gpu
import numpy as np
import profiles_common as toy
import pytest
from cli_common import run
from safetensors.numpy import load_file

import pltpack
from pltpack.codec import delta

QUALITIES = ["lossless", "q3", "turboquant-3", "balanced"]


def sessions(names="ab"):
    """Sessions of a small model, which share a block of 4 tokens."""
    ids = np.arange(3, 11)
    tokens = {"a": ids, "b": np.concatenate([ids[:5], [9]]), "c": np.concatenate([ids[:4], [7, 5, 6]])}
    return [toy.session(name, tokens[name]) for name in names]


def read(path, **settings):
    with pltpack.open(path, **settings) as archive:
        return {name: [archive.read(name).layer(i) for i in range(len(toy.LAYERS))] for name in archive.sessions}


def apart(ours, theirs):
    """How far values are from each other at most, in units in the last place."""
    assert ours.keys() == theirs.keys()
    pairs = [(x, y) for name in ours for mine, other in zip(ours[name], theirs[name], strict=True)
             for x, y in zip(mine, other, strict=True)]  # fmt: skip
    return max(int(np.abs(delta.ordered(toy.words(x)).astype(int) - delta.ordered(toy.words(y)).astype(int)).max())
               for x, y in pairs)  # fmt: skip


def files(path):
    return {file.name: file.read_bytes() for file in path.rglob("*.plt*")}


@pytest.mark.parametrize("quality", QUALITIES)
def test_archives_are_written_and_read_on_a_device(tmp_path, quality):
    more = {"profile": toy.save_profile(tmp_path / "profile.safetensors")} if quality == "balanced" else {}
    for name, device in (("cpu", "cpu"), ("cuda", "cuda:0")):
        pltpack.compress(sessions(), tmp_path / name, quality=quality, block=4, device=device, **more)
        pltpack.append(tmp_path / name, sessions("c"), device=device)
    most = 2 if quality == "balanced" else 0
    theirs = read(tmp_path / "cpu")
    assert apart(read(tmp_path / "cpu", device="cuda"), theirs) <= most
    if quality != "balanced":
        assert files(tmp_path / "cuda") == files(tmp_path / "cpu")
    # What the device wrote, either reads; the CPU reads it as what it would have written.
    assert apart(read(tmp_path / "cuda", device="cuda"), read(tmp_path / "cuda")) <= most


def test_the_command_line_takes_a_device(tmp_path):
    from pltpack.dumps import write_dump

    write_dump(sessions("a"), tmp_path / "dumps")
    write_dump(sessions("c"), tmp_path / "more")
    archive, out = str(tmp_path / "archive"), str(tmp_path / "out")
    for args in (["compress", str(tmp_path / "dumps"), "-o", archive, "--quality", "lossless", "--device", "cuda:0"],
                 ["append", archive, str(tmp_path / "more"), "--device", "cuda"],
                 ["decompress", archive, "-o", out, "--device", "cuda"]):  # fmt: skip
        result = run(*args)
        assert result.exit_code == 0, result.stderr
    for name, dump in (("a", "dumps"), ("c", "more")):
        mine, given = load_file(f"{out}/{name}.safetensors"), load_file(tmp_path / dump / f"{name}.safetensors")
        assert mine.keys() == given.keys() and all(np.array_equal(mine[key], given[key]) for key in mine)
