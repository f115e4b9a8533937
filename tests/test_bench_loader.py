"""``pltpack bench loader``: the figures it gives and the plot it draws."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cli_common import done, done_json, run

import pltpack
from pltpack.snapshot import Identity

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import tiny_models  # noqa: E402


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A small model's folder and two archives of a session of it."""
    from transformers import DynamicCache

    folder = tmp_path_factory.mktemp("bench")
    network = tiny_models.make_network()
    network.save_pretrained(folder / "model")
    tokens = np.random.default_rng(0).integers(3, 60, 90)
    cache = DynamicCache()
    with torch.no_grad():
        network.base_model(torch.tensor(tokens[None]), cache=cache, use_cache=True)
    snapshot = pltpack.from_dynamic_cache(cache, tokens, "s", Identity(model="tiny", keys="rotated"))
    for tier in ("lossless", "q4"):
        pltpack.compress([snapshot], folder / tier, quality=tier)
    return folder


def test_figures_and_plot(made, tmp_path):
    pytest.importorskip("matplotlib")
    plot = tmp_path / "stages.png"
    found = done_json("bench", "loader", made / "lossless", made / "q4", "--model", made / "model", "--depth", "1:3",
                      "--repeats", "2", "--plot", plot)  # fmt: skip
    assert (found["session"], found["tokens"]) == ("s", 90)
    assert found["cold_seconds"] > 0 and found["raw_seconds"] > 0 and found["raw_bytes"] > 90 * 3 * 2 * 2 * 8 * 4
    assert [archive["quality"] for archive in found["archives"]] == ["lossless", "q4"]
    for archive in found["archives"]:
        assert [row["depth"] for row in archive["depths"]] == [1, 2]
        for row in archive["depths"]:
            assert row["sooner"] == pytest.approx(found["cold_seconds"] / row["seconds"])
            assert row["throttled_load_seconds"] >= archive["shard_bytes"] / found["bytes_per_second"]
    assert found["archives"][0]["first_token_is_the_cold_one"]
    assert found["latency"]["change"] > -1
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_text_and_bad_use(made, tmp_path):
    text = done("bench", "loader", made / "lossless", "--model", made / "model", "--depth", "2:3", "--repeats", "1")
    assert "sooner than cold" in text and "the same first token" in text and "over a loaded one" in text
    for arguments, fact in (
        (["--depth", "0:2"], "depths begin at 1"),
        (["--session", "none"], "no session 'none'"),
        (["--plot", tmp_path / "x.pdf"], ".png or .svg"),
    ):
        result = run("bench", "loader", made / "lossless", "--model", made / "model", *arguments)
        assert result.exit_code == 2 and fact in result.stderr
    assert run("bench", "loader", made / "lossless", "--model", tmp_path).exit_code == 2


@pytest.mark.parametrize("speed", ["nan", "0", "1e-300"])
def test_speeds_that_no_disk_has_are_refused(speed: str, tmp_path: Path) -> None:
    result = run("bench", "loader", tmp_path, "--model", tmp_path, "--read-speed", speed)
    assert result.exit_code == 2
    assert "--read-speed" in result.stderr
