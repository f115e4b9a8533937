"""The trace benchmark on a small trace of the same form: its figures against counts of the ids."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks import trace
from benchmarks.trace import BLOCK


def write(path, requests, lengths=None):
    lines = [
        {
            "timestamp": 27 * i,
            "input_length": BLOCK * len(ids) - (7 if ids else 0),
            "output_length": 52,
            "hash_ids": ids,
        }
        for i, ids in enumerate(requests)
    ]
    for line, length in zip(lines, lengths or [], strict=False):
        line["input_length"] = length
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="ascii")
    return path


@pytest.fixture
def sample(tmp_path):
    """Conversations that continue one another, as in the public traces: an id stands behind one prefix only."""
    rng = np.random.default_rng(1)
    requests, fresh = [], 1
    for _ in range(40):
        before = requests[rng.integers(len(requests))] if requests and rng.random() < 0.7 else [0]
        kept = before[: rng.integers(1, len(before) + 1)]
        more = int(rng.integers(1, 12))
        requests.append([*kept, *range(fresh, fresh + more)])
        fresh += more
    return write(tmp_path / "sample.jsonl", requests), requests


def test_tokens_follow_from_ids_alone():
    ids = np.array([7, 0, 7], dtype=np.uint64)
    tokens = trace.tokens_of(ids).reshape(3, BLOCK)
    assert tokens.dtype == np.int32
    assert (tokens[0] == tokens[2]).all()
    assert (tokens[0] != tokens[1]).mean() > 0.99
    assert tokens.min() >= 0
    assert tokens.max() < trace.VOCABULARY
    assert tokens[0, :3].tolist() == trace.tokens_of(ids[:1])[:3].tolist()


def test_counts_and_phases(sample):
    path, requests = sample
    loaded = trace.load(path)
    ids = [i for request in requests for i in request]
    assert (loaded.blocks, loaded.unique) == (len(ids), len(set(ids)))
    results = {name: phase(loaded) for name, phase in trace.PHASES.items()}
    assert trace.failures(loaded, results) == []
    found = results["trie"]
    assert found["tokens"] == BLOCK * len(ids)
    assert found["unique_blocks"] == len(set(ids))
    assert found["dedup_ratio"] == pytest.approx(len(ids) / len(set(ids)))
    assert found["hit_rate"] == pytest.approx(1 - len(set(ids)) / len(ids))
    assert found["growth"][-1]["tokens"] == found["tokens"]
    assert found["peak_bytes"] > 10_000_000
    assert results["plan"]["stored_tokens"] == BLOCK * len(set(ids))
    assert results["match"]["covered_tokens"] == 0
    assert results["match shuffled"]["covered_tokens"] > 0


def test_a_wrong_figure_fails(sample):
    loaded = trace.load(sample[0])
    results = {name: phase(loaded) for name, phase in trace.PHASES.items()}
    for name, key, off in (
        ("trie", "unique_blocks", 1),
        ("trie", "hit_blocks", -1),
        ("trie", "stored_tokens", 2 * BLOCK),
        ("plan", "stored_tokens", 32),
        ("match", "covered_tokens", 2 * BLOCK),
        ("match shuffled", "covered_tokens", -2 * BLOCK),
    ):
        wrong = {**results, name: {**results[name], key: results[name][key] + off}}
        assert len(trace.failures(loaded, wrong)) == 1, (name, key)


def test_program(sample, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    path, requests = sample
    figures, picture = tmp_path / "figures.json", tmp_path / "picture.svg"
    monkeypatch.setattr(
        "sys.argv", ["trace", str(path), "--requests", "30", "--json", str(figures), "--plot", str(picture)]
    )
    assert trace.main() == 0
    result = json.loads(figures.read_text())["traces"][0]
    assert result["failures"] == []
    assert result["blocks"] == sum(map(len, requests[:30]))
    assert "30 requests" in capsys.readouterr().out
    assert picture.read_text().startswith("<?xml")


def test_blocks_must_fit_the_length(tmp_path):
    path = write(tmp_path / "bad.jsonl", [[0, 1], [0, 2]], [1024, 1025])
    with pytest.raises(SystemExit, match=r"bad\.jsonl, line 2: 2 blocks for 1025 tokens"):
        trace.load(path)
