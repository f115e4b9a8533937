"""Caches cut before their ends: where the cuts are, and what is made of their figures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pltpack.quality.cuts import BLOCKS, TURNS, Cut, at_cuts, kind_of, measure_cuts, plot_cuts, summary, with_recompute
from pltpack.quality.probes import END, Probe
from pltpack.quality.rebuilt import FromSnapshots
from pltpack.snapshot import Identity, LayerGeometry, Snapshot

TURN_END = 7


def session(name: str, tokens: np.ndarray) -> Snapshot:
    identity = Identity(layers=(LayerGeometry(1, 2, 2, "F32"),))
    arrays = [(np.zeros((1, len(tokens), 2), np.float32),) * 2]
    return Snapshot.from_arrays(name, tokens, arrays, identity)


def test_cuts_are_at_blocks_and_turn_ends() -> None:
    tokens = np.arange(100, 300)
    tokens[[9, 69, 127, 199]] = TURN_END
    after = np.arange(500, 640)
    probes = at_cuts([session("a-0", tokens)], {"a-0": after}, [TURN_END], every=2, length=128)
    # The first turn is shorter than a block; the last ends where the session does; one ends where a block does.
    assert [(p.cut, p.place) for p in probes] == [(64, BLOCKS), (70, TURNS), (128, TURNS), (192, BLOCKS), (200, END)]
    whole = np.concatenate([tokens, after])
    for probe in probes[:-1]:
        assert np.array_equal(probe.text, whole[probe.cut : probe.cut + 128])
    assert np.array_equal(probes[-1].text, after)


def test_figures_by_kind_and_place() -> None:
    cuts = [Cut("a-0", BLOCKS, 32, 0.1), Cut("a-1", BLOCKS, 32, 0.3), Cut("b-0", END, 50, 0.5)]
    found = summary(cuts)
    assert found["a"] == {BLOCKS: {"cuts": 2, "kl": pytest.approx(0.2), "worst": 0.3}}
    assert found["b"] == {END: {"cuts": 1, "kl": 0.5, "worst": 0.5}}
    assert set(found["all"]) == {END, BLOCKS}
    assert [kind_of(name) for name in ("code-12", "wiki_3", "chat", "17")] == ["code", "wiki", "chat", "17"]


def test_tokens_computed_again_undo_what_was_lost_before_a_cut() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from transformers import DynamicCache

    from tests.tiny_models import SIZES, make_network

    network, rng = make_network(), np.random.default_rng(0)
    tokens, after = rng.integers(3, 60, 64), rng.integers(3, 60, 16)
    cache = DynamicCache()
    with torch.no_grad():
        network(torch.from_numpy(tokens)[None], cache=cache, use_cache=True)
    exact = [(layer.keys[0].numpy(), layer.values[0].numpy()) for layer in cache.layers]
    coarse = [tuple(array.copy() for array in pair) for pair in exact]
    for array in (array for pair in coarse for array in pair):
        array[:, 24:] += rng.normal(size=array[:, 24:].shape) * 0.3
    geometry = LayerGeometry(SIZES["num_key_value_heads"], SIZES["head_dim"], SIZES["head_dim"], "F32")
    identity = Identity(layers=(geometry,) * len(exact), keys="rotated")
    original, rebuilt = (Snapshot.from_arrays("a-0", tokens, arrays, identity) for arrays in (exact, coarse))
    probes = [Probe("a-0", BLOCKS, 32, np.append(tokens[32:], after)), Probe("a-0", END, 64, after)]
    found = measure_cuts(network, [original], probes, FromSnapshots("c", "c", {"a-0": rebuilt}), [0, 8, 16], block=8)
    assert [(cut.place, cut.tokens, cut.recompute) for cut in found] == [
        (BLOCKS, 32, 0), (BLOCKS, 32, 8), (BLOCKS, 32, 16), (END, 64, 0)]  # fmt: skip
    assert found[0].kl > 1e-3 and found[0].error > 0
    assert abs(found[1].kl) < 1e-5 and abs(found[2].kl) < 1e-5
    assert with_recompute(found, 10) == [found[1], found[3]]


def test_a_plot_is_the_same_again(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    cuts = [Cut("a-0", BLOCKS, 32, 0.1), Cut("a-0", TURNS, 40, 0.2), Cut("a-0", END, 50, 0.05)]
    cuts += [Cut("a-0", BLOCKS, 32, 0.05, 0.01, 16)]
    for name in ("one.svg", "two.svg"):
        plot_cuts(cuts, 0.01, tmp_path / name, "title")
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    assert "title" in (tmp_path / "one.svg").read_text()
