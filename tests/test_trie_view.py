"""The trie as a tree to look at: what an archive's nodes are worth, as JSON, text and SVG, and where P comes from."""

from __future__ import annotations

import dataclasses
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from archives import equal_bits, session
from cli_common import done, done_json, run
from hypothesis import given
from hypothesis import strategies as st

import pltpack
from pltpack.archive import captured
from pltpack.archive.likelihood import ORDER
from pltpack.archive.trie_view import trie_view
from pltpack.errors import FormatError
from pltpack.format.container import Container
from pltpack.snapshot import Snapshot
from pltpack.trie.drawing import Row, largest, svg
from pltpack.trie.kneser_ney import KneserNey

RNG = np.random.default_rng(0)
START, FIRST, SECOND = (RNG.integers(0, 500, count) for count in (96, 64, 32))
TEXTS = {
    "a": np.concatenate([START, FIRST, [1, 2, 3]]),
    "b": np.concatenate([START, FIRST, [4, 5]]),
    "c": np.concatenate([START, SECOND]),
    "alone": RNG.integers(0, 500, 40),
}


def with_logprobs(snapshot: Snapshot, seed: int, k: int = 4, named: float = 0.7) -> Snapshot:
    """Captured log-probabilities that name the next token at most places."""
    rng = np.random.default_rng(seed)
    count = len(snapshot)
    ids = np.array([rng.permutation(500)[:k] for _ in range(count)], np.int32)
    following = np.append(snapshot.tokens[1:], 0)
    # No row names a token twice.
    ids = np.where(ids == following[:, None], (following + 1)[:, None], ids)
    put = rng.random(count) < named
    ids[put, 1] = following[put]
    p = rng.dirichlet(np.ones(k + 1), count)[:, :k]
    return dataclasses.replace(snapshot, logprobs=np.log(p).astype(np.float32), logprob_ids=ids)


@pytest.fixture(scope="module")
def trie_archive(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("trie") / "archive"
    pltpack.compress([session(name, ids) for name, ids in TEXTS.items()], path, quality="lossless")
    return path


def view_of(path: Path, **options) -> dict:
    with pltpack.open(path) as archive:
        return trie_view(archive, **options)


def test_nodes_say_what_is_shared_by_whom(trie_archive: Path) -> None:
    view = view_of(trie_archive)
    nodes = view["nodes"]
    assert view["captured_tokens"] == 0
    assert view["tokens"] == sum(map(len, TEXTS.values()))
    shared = [node for node in nodes if node["kind"] == "library"]
    assert [(n["position"], n["tokens"], n["visits"], n["depth"]) for n in shared] == [(0, 96, 3, 0), (96, 64, 2, 1)]
    tails = {node["session"]: node for node in nodes if node["kind"] == "session"}
    assert {name: (node["position"], node["tokens"]) for name, node in tails.items()} == {
        "a": (160, 3), "b": (160, 2), "c": (96, 32), "alone": (0, 40),
    }  # fmt: skip
    first, second = nodes.index(shared[0]), nodes.index(shared[1])
    assert [tails[name]["parent"] for name in TEXTS] == [second, second, first, None]
    assert tails["alone"]["first_tokens"] == TEXTS["alone"][:16].tolist()
    with pltpack.open(trie_archive) as archive:
        described = {node["node"]: node["bytes"] for node in archive.describe()["libraries"][0]["nodes"]}
    for node in shared:
        assert node["bytes"] == described[node["node"]]
        assert node["saved_bytes"] == node["bytes"] * (node["visits"] - 1)
    for index, node in enumerate(nodes):
        assert node["parent"] is None or node["parent"] < index
        assert node["depth"] == (0 if node["parent"] is None else nodes[node["parent"]]["depth"] + 1)


def test_probabilities_are_estimated_from_the_archives_own_tokens(trie_archive: Path) -> None:
    estimate = KneserNey(TEXTS.values(), ORDER, 1 + max(int(ids.max()) for ids in TEXTS.values()))
    p = {name: estimate.probabilities(ids) for name, ids in TEXTS.items()}
    for node in view_of(trie_archive)["nodes"]:
        own = p[node["session"] or "a"][node["position"] : node["position"] + node["tokens"]]
        assert node["probability"] == pytest.approx(own[0], rel=1e-12)
        assert node["information"] == pytest.approx(-np.log2(own).sum(), rel=1e-12)


def test_captured_probabilities_come_from_the_dumps(tmp_path: Path) -> None:
    """Through dumps, compression, compaction and a session file; averaged where two sessions captured one place."""
    given = [session("a", TEXTS["a"]), session("b", TEXTS["b"]), session("alone", TEXTS["alone"])]
    given = [with_logprobs(given[0], 1), with_logprobs(given[1], 2), given[2]]
    pltpack.write_dump(given, tmp_path / "dumps")
    pltpack.compress([tmp_path / "dumps"], tmp_path / "archive", quality="lossless")
    view = view_of(tmp_path / "archive")
    assert view["captured_tokens"] == len(given[0]) + len(given[1]) - 2

    texts = [TEXTS[name] for name in ("a", "b", "alone")]
    estimate = KneserNey(texts, ORDER, 1 + max(int(ids.max()) for ids in texts))
    wanted = []
    for snapshot in given[:2]:
        p = estimate.probabilities(snapshot.tokens)
        for t in range(1, len(p)):
            row = np.exp(snapshot.logprobs[t - 1].astype(float))
            hit = snapshot.logprob_ids[t - 1] == snapshot.tokens[t]
            p[t] = row[hit][0] if hit.any() else (1 - row.sum()) * p[t]
        wanted.append(p)
    mean = (wanted[0][:160] + wanted[1][:160]) / 2
    mean[0] = wanted[0][0]
    (node,) = [node for node in view["nodes"] if node["kind"] == "library"]
    assert node["tokens"] == 160
    assert node["information"] == pytest.approx(-np.log2(mean).sum(), rel=1e-3)
    tails = {node["session"]: node for node in view["nodes"] if node["kind"] == "session"}
    for name, p in zip("ab", wanted, strict=True):
        assert tails[name]["probability"] == pytest.approx(p[160], rel=2e-3)
        assert tails[name]["information"] == pytest.approx(-np.log2(p[160:]).sum(), rel=1e-2)

    pltpack.append(tmp_path / "archive", [session("c", TEXTS["c"])])
    pltpack.compact(tmp_path / "archive")
    pltpack.export_session(tmp_path / "archive", "a", tmp_path / "a.pltsession")
    pltpack.compress([session("other", TEXTS["c"])], tmp_path / "second", quality="lossless")
    pltpack.import_session(tmp_path / "second", tmp_path / "a.pltsession")
    assert view_of(tmp_path / "archive")["captured_tokens"] > view["captured_tokens"], "c begins as a and b do"
    assert view_of(tmp_path / "second")["captured_tokens"] == len(given[0]) - 1 + 95
    with pltpack.open(tmp_path / "second") as archive:
        assert equal_bits(archive.read("a"), session("a", TEXTS["a"]))


@given(st.lists(st.sampled_from([0.0, -1e-9, -0.1, -5.0, -100.0, float("-inf"), float("nan"), 0.5]), min_size=3,
                max_size=3), st.booleans())  # fmt: skip
def test_any_log_probability_is_kept_within_half_a_step(logprobs, hit) -> None:
    ids = np.array([[7, 8, 9]] * 2, np.int32)
    tokens = np.array([1, 8 if hit else 3], np.int32)
    values = np.array([logprobs] * 2, np.float32)
    kept = captured.shard_tensors(Snapshot("s", tokens, pltpack.Identity(), None, logprobs=values, logprob_ids=ids))
    shard = type("Held", (), {"tokens": tokens, "container": type("File", (), {"tables": kept, "path": None})})
    p, in_tail = captured.token_probabilities(shard)
    assert np.isnan(p[0])
    assert not in_tail[0]
    assert bool(in_tail[1]) == (not hit)
    clean = np.exp(np.clip(np.nan_to_num(np.array(logprobs), nan=-np.inf), None, 0))
    wanted = min(max(clean[1] if hit else 1 - clean.sum(), 2.0**-63), 1)
    assert abs(np.log2(p[1]) - np.log2(wanted)) <= 0.5 / captured.STEPS + 1e-6


def test_a_tensor_that_does_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = with_logprobs(session("a", TEXTS["a"]), 1)
    pltpack.compress([snapshot], tmp_path / "archive", quality="lossless")
    with pltpack.open(tmp_path / "archive") as archive:
        shard = archive.shard("a")
        monkeypatch.setitem(shard.container.tables, captured.TENSOR, np.zeros((5, 2), np.uint8))
        with pytest.raises(FormatError, match=r"a\.pltshard.*does not fit 163 tokens"):
            trie_view(archive)
        assert equal_bits(archive.read("a"), session("a", TEXTS["a"]))
    assert isinstance(shard.container, Container)


def test_tenants_do_not_teach_each_other(tmp_path: Path) -> None:
    pltpack.compress([session("a", TEXTS["a"], salt="x"), session("b", TEXTS["a"], salt="y")], tmp_path / "archive",
                     quality="lossless")  # fmt: skip
    alone = KneserNey([TEXTS["a"]], ORDER).probabilities(TEXTS["a"])
    for node in view_of(tmp_path / "archive")["nodes"]:
        assert node["kind"] == "session"
        assert node["information"] == pytest.approx(-np.log2(alone).sum())


def test_the_command_draws_text(trie_archive: Path) -> None:
    lines = done("inspect", trie_archive, "--trie").splitlines()
    nodes = view_of(trie_archive)["nodes"]
    assert len(lines) == 1 + len(nodes)
    assert "2 library nodes, 4 sessions" in lines[0]
    assert "probabilities estimated" in lines[0]
    for line, node in zip(lines[1:], nodes, strict=True):
        assert (node["session"] or f"node 1.{node['node']}") in line
        assert f"{node['bytes']:,} bytes" in line
        assert f"P {node['probability']:.3f}" in line
        assert " ".join(map(str, node["first_tokens"][:6])) in line or node["tokens"] < 6
        if node["kind"] == "library":
            assert f"{node['visits']} visits" in line
            assert f"saves {node['saved_bytes']:,} bytes" in line
    few = done("inspect", trie_archive, "--trie", "--limit", "2").splitlines()
    assert len(few) == 4
    assert "node 1.0" in few[1]
    assert "node 1.1" in few[2]
    assert "4 more nodes" in few[3]
    one = done("inspect", trie_archive, "--trie", "--session", "c").splitlines()
    assert len(one) == 3
    assert "node 1.0" in one[1]
    assert "c  32 own tokens" in one[2]


def test_the_command_gives_json_and_svg(trie_archive: Path, tmp_path: Path) -> None:
    data = done_json("inspect", trie_archive, "--trie", "--svg", tmp_path / "t.svg")
    assert data["trie"] == json.loads(json.dumps(view_of(trie_archive)))
    assert {"stats", "libraries", "sessions"} <= set(data)
    assert "trie" not in done_json("inspect", trie_archive)
    root = ElementTree.parse(tmp_path / "t.svg").getroot()
    assert root.tag.endswith("svg")
    words = ["".join(text.itertext()) for text in root.iter() if text.tag.endswith("text")]
    for node in data["trie"]["nodes"]:
        name = node["session"] or f"node 1.{node['node']}"
        assert any(word.startswith(name) for word in words)
        assert not node["saved_bytes"] or f"{node['saved_bytes']:,}" in words
    result = run("inspect", trie_archive, "--svg", tmp_path / "t.svg")
    assert result.exit_code == 2
    assert "--trie" in result.stderr


def test_tokens_are_shown_as_text(trie_archive: Path, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    from tiny_models import save_tokenizer

    save_tokenizer(tmp_path / "tokenizer")
    pltpack.compress([session("s", [3, 4, 5, 62])], tmp_path / "archive", quality="lossless")
    assert "'w0 w1 w2 w59'" in done("inspect", tmp_path / "archive", "--trie", "--tokenizer", tmp_path / "tokenizer")
    data = done_json("inspect", tmp_path / "archive", "--trie", "--tokenizer", tmp_path / "tokenizer/tokenizer.json")
    assert data["trie"]["nodes"][0]["text"] == "w0 w1 w2 w59"
    (tmp_path / "bad.json").write_text("{}")
    for path, fact in ((tmp_path / "bad.json", "not a tokenizer"), (tmp_path, "there is no tokenizer.json")):
        result = run("inspect", trie_archive, "--trie", "--tokenizer", path)
        assert result.exit_code == 2
        assert fact in result.stderr
        assert len(result.stderr.splitlines()) == 1


def test_names_cannot_break_the_drawing() -> None:
    rows = [Row(-1, "a<b&\x1b[31m\x00", "]]> \ud800 ü", 5, None), Row(0, "x" * 300, "", 0, 40.0)]
    root = ElementTree.fromstring(svg("t <&\n", rows))
    text = "".join(root.itertext())
    assert "a<b&\\x1b[31m\\x00" in text
    assert "\\ud800 ü" in text
    assert float(root.get("width")) > 300 * 6
    ElementTree.fromstring(svg("nothing", []))


@given(st.lists(st.tuples(st.integers(-1, 30), st.integers(0, 9)), max_size=30), st.integers(1, 12))
def test_the_largest_nodes_keep_those_above_them(nodes, limit) -> None:
    parents = [min(parent, index - 1) for index, (parent, _) in enumerate(nodes)]
    kept = largest(parents, [weight for _, weight in nodes], limit)
    assert kept == sorted(set(kept))
    assert len(kept) <= limit
    assert all(parents[node] < 0 or parents[node] in kept for node in kept)
    if nodes:
        heaviest = max(range(len(nodes)), key=lambda node: (nodes[node][1], -node))
        above, step = 0, heaviest
        while step >= 0:
            above, step = above + 1, parents[step]
        assert (heaviest in kept) == (above <= limit)
