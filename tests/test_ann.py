"""Windows with other tokens and the same outlook: signatures against exact figures, choices against brute force."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pltpack.trie import ann
from pltpack.trie.ann import find_similar, open_windows, signatures
from pltpack.trie.distributions import Distributions
from pltpack.trie.matching import Match

WIDTH, MOST = 32, 6


def distributions(rng, count, vocabulary=500, sharpness=3.0):
    """Top-k predictions of `count` windows, likeliest first, 90 % of the mass or so."""
    ids = rng.permuted(np.tile(np.arange(vocabulary), (count * WIDTH, 1)), axis=1)[:, :MOST]
    weights = np.exp(sharpness * rng.standard_normal((count * WIDTH, MOST + 1)))
    shares = -np.sort(-weights, axis=1) / weights.sum(axis=1, keepdims=True)
    return (
        ids.reshape(count, WIDTH, MOST).astype(np.int32),
        shares[:, :MOST].reshape(count, WIDTH, MOST).astype(np.float32),
    )


def blurred(rng, probabilities, noise):
    """The same outlook, somewhat otherwise; order is not restored, as nothing rests on it."""
    changed = probabilities * np.exp(noise * rng.standard_normal(probabilities.shape))
    return (changed / np.maximum(1, changed.sum(axis=-1, keepdims=True))).astype(np.float32)


def spread(ids, probabilities, vocabulary=501):
    """Dense distributions ``[n, W, vocabulary]``, the tail in the last place."""
    out = np.zeros((*ids.shape[:2], vocabulary))
    np.put_along_axis(out, ids.astype(np.int64), probabilities.astype(np.float64), axis=-1)
    out[..., -1] = np.maximum(0, 1 - probabilities.astype(np.float64).sum(axis=-1))
    return out


def divergence(a, b):
    """Jensen–Shannon in bits along the last axis."""
    middle = (a + b) / 2

    def part(p):
        return np.where(p > 0, p * np.log2(np.where(p > 0, p, 1) / np.where(middle > 0, middle, 1)), 0).sum(-1)

    return (part(a) + part(b)) / 2


def rows(ids, probabilities):
    """Distributions of windows, end to end."""
    return Distributions.of(ids.reshape(-1, ids.shape[2]), probabilities.reshape(-1, ids.shape[2]))


def signed(ids, probabilities, *dimensions):
    return signatures(rows(ids, probabilities), np.arange(len(ids)) * WIDTH, WIDTH, *dimensions)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=2, max_size=8))
def test_hellinger_bounds_jensen_shannon(pairs):
    a, b = np.array(pairs).T
    if a.sum() < 1e-3 or b.sum() < 1e-3:
        return
    a, b = a / a.sum(), b / b.sum()
    hellinger = 1 - np.sqrt(a * b).sum()
    assert hellinger - 1e-9 <= divergence(a, b) <= hellinger / np.log(2) + 1e-9


def test_signatures_estimate_overlap():
    rng = np.random.default_rng(1)
    ids, p = distributions(rng, 40)
    other = blurred(rng, p, 0.7)
    other[20:], ids_b = p[20:][::-1], ids.copy()
    ids_b[20:] = ids[20:][::-1]
    exact = np.sqrt(spread(ids, p) * spread(ids_b, other)).sum(-1).mean(-1)
    assert exact[:20].min() > 0.7
    assert exact[20:].max() < 0.5
    for size in (64, 256, 4096):
        a, b = signed(ids, p, size), signed(ids_b, other, size)
        assert np.sqrt(np.square((a * b).sum(1) / ann.SCALE**2 - exact).mean()) < 1.5 * size**-0.5


def test_signatures_are_whole_and_short_enough_for_exact_products():
    ids, p = distributions(np.random.default_rng(2), 30)
    found = signed(ids, p)
    assert found.dtype == np.float32
    assert (found == np.rint(found)).all()
    norms = (found.astype(np.float64) ** 2).sum(axis=1)
    assert np.abs(norms / ann.SCALE**2 - 1).max() < 0.02
    assert norms.max() < 2**24
    exact = found.astype(np.int64) @ found.astype(np.int64).T
    assert (found @ found.T == exact).all()
    assert (found[:, ::-1] @ found[:, ::-1].T == exact).all()


def test_empty_places_change_nothing():
    ids, p = distributions(np.random.default_rng(3), 5)
    more = np.full((5, WIDTH, 3), -1, np.int32)
    padded = signed(np.concatenate([ids, more], 2), np.concatenate([p, np.zeros(more.shape, np.float32)], 2))
    assert (padded == signed(ids, p)).all()


def planted(seed=4, texts=6, each=5):
    """Windows of several texts, many of them blurred copies: (ids, probabilities) and the arguments made of them."""
    rng = np.random.default_rng(seed)
    ids, p = distributions(rng, texts * each)
    for i in range(1, len(ids)):
        if rng.random() < 0.6:
            j = rng.integers(0, i)
            ids[i], p[i] = ids[j], blurred(rng, p[j], rng.choice([0.0, 0.3, 0.8, 1.6]))
    cut = [slice(i, i + each) for i in range(0, len(ids), each)]
    return (ids, p), ([rows(ids[c], p[c]) for c in cut], [np.arange(each) * WIDTH] * texts)


def by_definition(dense, each, groups, targets, tau):
    """Nearest earlier window that is not predicted itself; all pairs."""
    source = {}
    for i in range(len(dense)):
        if i // each not in targets:
            continue
        free = [j for j in range(i) if j not in source and groups[j // each] == groups[i // each]]
        far = np.round(divergence(dense[[i] * len(free)], dense[free]).mean(axis=-1), 6)
        near = [(d, j) for d, j in zip(far, free, strict=True) if d <= tau]
        if near:
            source[i] = min(near)[1]
    return source


def per_window(found):
    return {
        (m.session, m.start + k): (m.source, m.source_start + k)
        for matches in found for m in matches for k in range(0, m.length, WIDTH)
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("tau", [0.1, 0.2, 0.3])
def test_choices_are_those_of_brute_force(seed, tau):
    windows, arguments = planted(seed)
    groups, targets = [0, 0, 1, 0, 1, 0], [0, 1, 3, 4, 5]
    found = find_similar(*arguments, groups, targets, window=WIDTH, tau=tau, neighbours=30)
    expected = by_definition(spread(*windows), 5, groups, targets, tau)
    assert len(expected) > 2
    place = [(i // 5, i % 5 * WIDTH) for i in range(30)]
    assert per_window(found) == {place[i]: place[j] for i, j in expected.items()}


def test_neighbours_make_one_match():
    rng = np.random.default_rng(5)
    ids, p = distributions(rng, 4)
    other = rows(ids, blurred(rng, p, 0.2))
    gap = rows(*distributions(rng, 1))
    pieces = [gap[:10], other[:64], gap[:6], other[64:]]
    moved = Distributions(*(np.concatenate([getattr(x, n) for x in pieces]) for n in ("ids", "probabilities", "tail")))
    arguments = [rows(ids, p), moved], [[0, 32, 64, 96], [10, 42, 80, 112]]
    assert find_similar(*arguments, [0, 0], [1], window=32) == [[Match(1, 10, 64, 0, 0), Match(1, 80, 64, 0, 64)]]
    assert find_similar(*arguments, [0, 1], [1], window=32) == [[]]
    assert find_similar(*arguments, [0, 0], [0], window=32) == [[]]


def test_few_neighbours_find_what_is_close():
    _, arguments = planted(7, texts=20, each=10)
    near, wide = (
        per_window(find_similar(*arguments, [0] * 20, range(20), window=WIDTH, neighbours=n)) for n in (4, 200)
    )
    assert len(near) >= 0.95 * len(wide) > 40


def test_graph_search_finds_the_same_in_small_sets_every_time():
    pytest.importorskip("faiss")
    _, arguments = planted(8, texts=30, each=10)
    groups = [i % 2 for i in range(30)]
    exact, *graphs = (
        find_similar(*arguments, groups, range(30), window=WIDTH, search=kind)
        for kind in ("exact", "hnsw", "hnsw", "auto")
    )
    assert sum(map(len, exact)) > 60
    assert all(found == exact for found in graphs)


def test_many_windows_without_faiss_are_searched_exhaustively(monkeypatch):
    _, arguments = planted(9)
    expected = find_similar(*arguments, [0] * 6, range(6), window=WIDTH, search="exact")
    monkeypatch.setitem(sys.modules, "faiss", None)
    monkeypatch.setattr(ann, "FEW", 8)
    monkeypatch.setattr(ann, "_SQUARE", 7)
    assert find_similar(*arguments, [0] * 6, range(6), window=WIDTH) == expected
    with pytest.raises(ModuleNotFoundError):
        find_similar(*arguments, [0] * 6, range(6), window=WIDTH, search="hnsw")


def test_faiss_is_loaded_only_for_many_windows():
    program = "import sys, pltpack.trie.ann, pltpack.trie.matching; assert 'faiss' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_open_windows():
    assert open_windows(200, 0, []).tolist() == [0, 64, 128]
    assert open_windows(200, 9, [Match(0, 73, 40, 0, 0)]).tolist() == [9, 113]
    assert open_windows(192, 0, [Match(0, 63, 65, 0, 0)]).tolist() == [128]
    assert open_windows(100, 100, [], 32).tolist() == []


def test_no_windows():
    assert find_similar([], [], [], []) == []
    some = rows(*distributions(np.random.default_rng(1), 2))
    assert find_similar([some, some], [[], []], [0, 0], [1]) == [[]]
    assert find_similar([some, some], [[0], []], [0, 0], [0, 1]) == [[], []]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"starts": [[0, 20], [0]]}, "overlap"),
        ({"starts": [[32, 0], [0]]}, "order"),
        ({"starts": [[0, 33], [0]]}, "do not lie within 64"),
        ({"starts": [[-1], [0]]}, "do not lie within 64"),
        ({"starts": [[0]]}, "1 lists"),
        ({"window": 31}, "window of 31"),
        ({"tau": 0.09}, "tau"),
        ({"tau": 0.31}, "tau"),
        ({"neighbours": 0}, "neighbours"),
    ],
)
def test_bad_arguments(change, says):
    some = rows(*distributions(np.random.default_rng(1), 2))
    arguments = {"predictions": [some] * 2, "starts": [[0, 32], [0]], "groups": [0, 0], "targets": [1], "window": 32}
    with pytest.raises(ValueError, match=says):
        find_similar(**arguments | change)
