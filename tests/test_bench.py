"""``pltpack bench trie`` and the figures behind it."""

from __future__ import annotations

import numpy as np
import pytest
from cli_common import LENGTHS, PREFIX, done, done_json, run, write_dumps

import pltpack
from pltpack.trie.measure import measure


def test_figures_by_hand():
    rng = np.random.default_rng(1)
    prefix, tail, other = (rng.integers(0, 40000, size) for size in (100, 80, 50))
    texts = [np.concatenate([prefix, tail]), np.concatenate([prefix, other, tail]), np.concatenate([prefix, tail])]
    found = measure(texts, ["a", "a", "b"])
    assert (found["sessions"], found["tokens"], found["stored_tokens"]) == (3, 590, 490)
    assert found["dedup_ratio"] == pytest.approx(590 / 490)
    assert found["hit_rate"] == pytest.approx(100 / 590)
    assert found["matched_tokens"] == 80
    assert found["nodes"] == 4 + 2
    assert 0 < found["lookup_seconds"]["median"] <= found["lookup_seconds"]["worst"]
    assert found["build_seconds"] > 0


def test_no_sessions():
    found = measure([], [])
    assert (found["tokens"], found["dedup_ratio"], found["lookup_seconds"]) == (0, 1.0, None)


def test_program(tmp_path):
    pltpack.compress([write_dumps(tmp_path / "dumps")], tmp_path / "archive", quality="lossless")
    found = done_json("bench", "trie", tmp_path / "archive")
    assert found["tokens"] == sum(LENGTHS.values())
    assert found["stored_tokens"] == sum(LENGTHS.values()) - PREFIX
    text = done("bench", "trie", tmp_path / "archive")
    assert f"{found['stored_tokens']} tokens stored" in text
    assert "median" in text


def test_bad_use(tmp_path):
    result = run("bench", "trie", tmp_path / "none")
    assert result.exit_code == 2
    assert "not an archive" in result.stderr
    assert "trie" in done("bench", "--help")
