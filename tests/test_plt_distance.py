"""The PLT distance between windows, and the information that prefixes share."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pltpack.trie.distance import divergences, plt_distance, plt_distances
from pltpack.trie.distributions import Distributions
from pltpack.trie.probabilities import Probabilities
from pltpack.trie.score import admission_scores, admitted, shared_information


def windows(seed: int, count: int, length: int, k: int, vocabulary: int) -> list[Distributions]:
    """Some alike, some far apart, with empty places and empty tails among them."""
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(count):
        ids = np.array([rng.permutation(vocabulary)[:k] for _ in range(length)])
        p = rng.dirichlet(np.full(k + 1, rng.choice([0.05, 1.0])), length)[:, :k]
        if rng.random() < 0.3:
            p /= np.maximum(p.sum(axis=1, keepdims=True), 1e-9)
        if out and rng.random() < 0.5:
            near = out[-1]
            ids, p = near.ids, near.probabilities * rng.uniform(0.8, 1.0, near.probabilities.shape)
        out.append(Distributions.of(np.where(rng.random(ids.shape) < 0.1, -1, ids), p))
    return out


def by_definition(first: Distributions, second: Distributions, vocabulary: int) -> float:
    total = 0.0
    for t in range(len(first)):
        sides = []
        for side in (first, second):
            dense = np.zeros(vocabulary + 1)
            named = side.ids[t] >= 0
            dense[side.ids[t][named]] = side.probabilities[t][named]
            dense[-1] = side.tail[t]
            sides.append(dense)
        middle = (sides[0] + sides[1]) / 2
        for side in sides:
            at = side > 0
            total += 0.5 * (side[at] * np.log2(side[at] / middle[at])).sum()
    return total / len(first)


SHAPES = {"seed": st.integers(0, 9999), "length": st.integers(1, 6), "k": st.integers(1, 6)}


@settings(deadline=None, max_examples=80)
@given(**SHAPES)
def test_range_symmetry_identity_and_definition(seed, length, k) -> None:
    one, other = windows(seed, 2, length, k, 9)
    distance = plt_distance(one, other)
    assert 0 <= distance <= 1
    assert plt_distance(other, one) == distance
    assert plt_distance(one, one) == 0
    assert distance == pytest.approx(by_definition(one, other, 9), abs=1e-12)
    np.testing.assert_allclose(divergences(one, other).mean(), distance, atol=1e-12)


@settings(deadline=None, max_examples=120)
@given(**SHAPES)
def test_the_square_root_keeps_the_triangle_inequality(seed, length, k) -> None:
    first, second, third = windows(seed, 3, length, k, 8)
    a, b, c = (plt_distance(*pair) ** 0.5 for pair in ((first, second), (second, third), (first, third)))
    assert c <= a + b + 1e-9
    per_position = np.sqrt([divergences(*pair) for pair in ((first, second), (second, third), (first, third))])
    assert (per_position[2] <= per_position[0] + per_position[1] + 1e-9).all()


def test_extremes() -> None:
    one = Distributions.of([[1]], [[1.0]])
    assert plt_distance(one, Distributions.of([[2]], [[1.0]])) == 1
    assert plt_distance(one, Distributions.of([[-1]], [[0.0]])) == 1
    assert plt_distance(one, Distributions.of([[1, -1]], [[1.0, 0.0]])) == 0
    # Nothing is known of either: one bucket each.
    nothing = Distributions.of([[-1, -1]], [[0.0, 0.0]])
    assert plt_distance(nothing, nothing) == 0
    assert plt_distance(Distributions.of([[3]], [[5e-324]]), nothing) == 0


def test_many_pairs_are_each_as_one() -> None:
    one, other = windows(5, 2, 200, 8, 400)
    rng = np.random.default_rng(0)
    pairs = rng.integers(0, 136, (300, 2))
    found = plt_distances(one, other, pairs, 64)
    for i in range(0, 300, 37):
        a, b = pairs[i]
        assert found[i] == plt_distance(one[a : a + 64], other[b : b + 64])
    # In machine code: fifty thousand positions of a window pair take a fraction of a second.
    start = time.process_time()
    plt_distances(one, other, np.repeat(pairs[:1], 2000, axis=0), 64)
    assert time.process_time() - start < 3


def test_windows_must_fit() -> None:
    one, other = windows(1, 2, 5, 2, 9)
    for pairs, window in (([(0, 1)], 5), ([(-1, 0)], 2), ([(0, 0)], 0), ([(0, 4)], 2)):
        with pytest.raises(ValueError, match="do not lie within"):
            plt_distances(one, other, pairs, window)
    with pytest.raises(ValueError, match="5 and 4 positions"):
        plt_distance(one, other[:4])
    with pytest.raises(ValueError, match="0 and 0 positions"):
        plt_distance(one[:0], other[:0])


def test_the_same_passage_is_nearer_than_another() -> None:
    rng = np.random.default_rng(7)
    passage = rng.integers(0, 300, 64)
    texts = [np.concatenate([rng.integers(0, 300, 40), passage]), np.concatenate([rng.integers(0, 300, 90), passage]),
             rng.integers(0, 300, 200)]  # fmt: skip
    model = Probabilities(texts, vocabulary=300)
    first, second, third = (model.distributions(text, 16) for text in range(3))
    same = plt_distance(first[40:104], second[90:154])
    assert same < 0.05
    assert plt_distance(first[40:104], third[40:104]) > 4 * same


def test_shared_information_is_that_of_the_common_prefix() -> None:
    texts = [[1, 2, 3, 4], [1, 2, 5], [6], []]
    model = Probabilities(texts, vocabulary=8)
    bits = model.information(0)
    assert shared_information(texts[0], texts[1], bits) == pytest.approx(bits[:2].sum())
    assert shared_information(texts[0], texts[2], bits) == 0
    assert shared_information(texts[0], texts[3], bits) == 0
    # Not a distance: a text and itself share the most.
    assert shared_information(texts[0], texts[0], bits) == pytest.approx(bits.sum())
    assert shared_information(texts[1], texts[0], model.information(1)) == pytest.approx(bits[:2].sum())
    with pytest.raises(ValueError, match="information of 3"):
        shared_information(texts[0], texts[1], bits[:3])


def test_scores_rank_nodes_for_a_budget() -> None:
    scores = admission_scores([100, 100, 10, 0], [2, 4, 2, 9], [50, 50, 50, 10])
    np.testing.assert_array_equal(scores, [4, 8, 0.4, 0])
    sizes = [50, 50, 50, 10]
    np.testing.assert_array_equal(admitted(scores, sizes, 100), [1, 1, 0, 0])
    np.testing.assert_array_equal(admitted(scores, sizes, 110), [1, 1, 0, 1])
    np.testing.assert_array_equal(admitted(scores, sizes, 49), [0, 0, 0, 1])
    # The best one needs the third.
    np.testing.assert_array_equal(admitted(scores, sizes, 100, [-1, 2, -1, -1]), [1, 0, 1, 0])
    np.testing.assert_array_equal(admitted(scores, sizes, 150, [-1, 2, -1, -1]), [1, 1, 1, 0])
    for arguments, fact in ((([1], [2, 3], [1]), "2 of visits"), (([-1], [1], [1]), "negative"),
                            (([float("inf")], [1], [1]), "not finite")):  # fmt: skip
        with pytest.raises(ValueError, match=fact):
            admission_scores(*arguments)
    with pytest.raises(ValueError, match="no node"):
        admitted([1.0], [1], 5, [4])


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.floats(0, 50), st.integers(0, 40), st.integers(0, 5)), max_size=12), st.integers(0, 120))
def test_admitted_nodes_fit_and_have_their_parents(nodes, budget) -> None:
    scores, sizes = [n[0] for n in nodes], [n[1] for n in nodes]
    parents = [min(n[2], i) - 1 for i, n in enumerate(nodes)]
    kept = admitted(scores, sizes, budget, parents)
    assert sum(size for size, keep in zip(sizes, kept, strict=True) if keep) <= budget
    assert all(not keep or parents[i] < 0 or kept[parents[i]] for i, keep in enumerate(kept))
    # Nothing more would have fitted that had its parent.
    left = budget - sum(size for size, keep in zip(sizes, kept, strict=True) if keep)
    missing = [i for i in range(len(nodes)) if not kept[i] and (parents[i] < 0 or kept[parents[i]])]
    assert all(sizes[i] > left for i in missing)
