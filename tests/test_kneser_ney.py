"""Next-token probabilities: Kneser-Ney against a plain computation, captured ones, and their mixture."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pltpack.trie.distributions import NO_TOKEN, Distributions
from pltpack.trie.kneser_ney import KneserNey
from pltpack.trie.probabilities import Probabilities

TEXTS = st.lists(st.lists(st.integers(0, 6), max_size=30), min_size=1, max_size=5)


def plain(texts: list[list[int]], order: int, vocabulary: int, context: list[int], token: int) -> float:
    """The definition, word by word: dictionaries and recursion."""
    marked = [[-1] * (order - 1) + text for text in texts]
    counts = []
    for k in range(order):
        grams: dict[tuple, set | list] = defaultdict(set if k + 1 < order else list)
        for text in marked:
            for end in range(order - 1, len(text)):
                gram = tuple(text[end - k : end + 1])
                if k + 1 < order:
                    grams[gram].add(text[end - k - 1])
                else:
                    grams[gram].append(end)
        counts.append({gram: len(found) for gram, found in grams.items()})

    def p(k: int) -> float:
        if k < 0:
            return 1 / vocabulary
        once, twice = (sum(c == n for c in counts[k].values()) for n in (1, 2))
        d = min(max(once / (once + 2 * twice) if once else 0.0, 0.05), 0.95)
        history = tuple(([-1] * (order - 1) + context)[len(context) + order - 1 - k :])
        row = {gram[-1]: c for gram, c in counts[k].items() if gram[:-1] == history}
        if not row:
            return p(k - 1)
        total = sum(row.values())
        return max(row.get(token, 0) - d, 0) / total + d * len(row) / total * p(k - 1)

    return p(order - 1)


@settings(deadline=None, max_examples=60)
@given(TEXTS, st.integers(1, 5), st.lists(st.integers(0, 8), max_size=8), st.integers(0, 8))
def test_probabilities_are_those_of_the_definition(texts, order, context, token) -> None:
    model = KneserNey(texts, order, 9)
    wanted = plain(texts, order, 9, context, token)
    assert model.probabilities([*context, token])[-1] == pytest.approx(wanted, rel=1e-12)
    assert model.distribution(context)[token] == pytest.approx(wanted, rel=1e-12)


@settings(deadline=None, max_examples=60)
@given(TEXTS, st.integers(1, 5), st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(1, 12))
def test_everything_sums_to_one_and_tops_are_the_largest(texts, order, query, k) -> None:
    model = KneserNey(texts, order, 10)
    top = model.top(query, k)
    seen = np.unique(np.concatenate([np.array(text, int) for text in texts]))
    for t in range(len(query)):
        whole = model.distribution(query[: t + 1])
        assert whole.sum() == pytest.approx(1, abs=1e-12)
        assert (whole > 0).all()
        named = top.ids[t] != NO_TOKEN
        assert named.sum() == min(k, len(seen))
        np.testing.assert_allclose(top.probabilities[t][named], whole[top.ids[t][named]], rtol=1e-12)
        assert top.tail[t] == pytest.approx(1 - whole[top.ids[t][named]].sum(), abs=1e-12)
        others = np.setdiff1d(seen, top.ids[t][named])
        if len(others):
            assert whole[others].max() <= whole[top.ids[t][named]].min() * (1 + 1e-12)


def test_equal_input_gives_equal_bits() -> None:
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 50, 400) for _ in range(3)]
    one, other = KneserNey(texts), KneserNey([text.tolist() for text in texts])
    np.testing.assert_array_equal(one.probabilities(texts[1]), other.probabilities(texts[1]))
    for field in ("ids", "probabilities", "tail"):
        np.testing.assert_array_equal(getattr(one.top(texts[0], 8), field), getattr(other.top(texts[0], 8), field))
    np.testing.assert_array_equal(one.top(texts[0], 8, 100).ids, one.top(texts[0], 8).ids[100:])


def test_what_repeats_is_expected() -> None:
    rng = np.random.default_rng(1)
    passage = rng.integers(0, 1000, 200)
    texts = [np.concatenate([rng.integers(0, 1000, 50), passage]) for _ in range(4)]
    p = KneserNey(texts).probabilities(texts[0])
    # Even what comes once is known to the estimate, as the text itself has taught it.
    assert np.exp(np.log(p[54:]).mean()) > 4 * np.exp(np.log(p[:50]).mean())


@pytest.mark.parametrize(
    ("texts", "order", "vocabulary", "fact"),
    [
        ([[1, 2]], 0, None, "order 0"), ([[1, 2]], 9, None, "order 9"), ([[-1]], 3, None, "not from 0 to"),
        ([[1, 5]], 3, 5, "not from 0 to 4"), ([[[1]]], 3, None, "dimensions"), ([[0.5]], 3, None, "integer"),
    ],
)  # fmt: skip
def test_bad_input_is_refused(texts, order, vocabulary, fact) -> None:
    with pytest.raises(ValueError, match=fact):
        KneserNey(texts, order, vocabulary)


@pytest.mark.parametrize("texts", [[], [[]], [[], []], [[3]]])
def test_little_or_no_text(texts) -> None:
    model = KneserNey(texts, 4, 8)
    assert model.distribution([1, 2]).sum() == pytest.approx(1)
    assert len(model.top([1, 2], 3)) == 2
    assert len(model.probabilities([])) == 0


def capture(rng: np.random.Generator, tokens: int, k: int, vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    logits = 3 * rng.standard_normal((tokens, vocabulary))
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    ids = np.argsort(-logprobs, axis=1)[:, :k]
    return ids.astype(np.int32), np.take_along_axis(logprobs, ids, axis=1).astype(np.float32)


def test_captured_probabilities_come_first() -> None:
    rng = np.random.default_rng(2)
    texts = [rng.integers(0, 20, 40), rng.integers(0, 20, 30)]
    ids, logprobs = capture(rng, 40, 6, 20)
    model = Probabilities(texts, [(ids, logprobs), None], vocabulary=20)
    assert model.captured(0).all()
    assert not model.captured(1).any()
    p = model.of_text(0)
    named = tails = 0
    for t in range(1, 40):
        at = np.flatnonzero(ids[t - 1] == texts[0][t])
        if len(at):
            assert p[t] == pytest.approx(math.exp(logprobs[t - 1][at[0]]), rel=1e-6)
            named += 1
        else:
            assert p[t] < 1 - np.exp(logprobs[t - 1].astype(float)).sum() + 1e-6
            tails += 1
        whole = model.distribution(0, t - 1)
        assert whole.sum() == pytest.approx(1, abs=1e-12)
        assert whole[texts[0][t]] == pytest.approx(p[t], rel=1e-9)
    assert named
    assert tails
    assert p[0] == model.estimate.probabilities(texts[0])[0]
    np.testing.assert_array_equal(model.of_text(1), model.estimate.probabilities(texts[1]))
    top = model.distributions(0, 3, 5, 9)
    np.testing.assert_array_equal(top.ids, np.sort(ids[5:9, :3], axis=1))
    np.testing.assert_allclose(model.information(0), -np.log2(p))


def test_visits_are_averaged_where_prefixes_are_equal() -> None:
    rng = np.random.default_rng(3)
    start = rng.integers(0, 20, 10)
    texts = [np.concatenate([start, tail]) for tail in ([1, 2], [3, 4, 5], [6])]
    given = [capture(rng, len(text), 4, 20) for text in texts[:2]]
    model = Probabilities(texts, [*given, None], vocabulary=20)
    # The third text has nothing of its own, but its beginning is a place where others were captured.
    np.testing.assert_array_equal(model.captured(2), np.arange(11) < 10)
    for t in range(10):
        whole = [np.zeros(20), np.zeros(20)]
        for out, (ids, logprobs) in zip(whole, given, strict=True):
            out[ids[t]] = np.exp(logprobs[t].astype(float))
        mean = (whole[0] + whole[1]) / 2
        wanted = np.sort(np.argsort(-mean, kind="stable")[:4])
        for text in range(3):
            top = model.distributions(text, 4, t, t + 1)
            np.testing.assert_array_equal(top.ids[0], wanted)
            np.testing.assert_allclose(top.probabilities[0], mean[wanted], rtol=1e-6)
    own = model.distributions(0, 4, 10, 12)
    np.testing.assert_array_equal(own.ids, np.sort(given[0][0][10:], axis=1))
    # A range over captured and estimated positions.
    both = model.distributions(2, 4, 8, 11)
    np.testing.assert_array_equal(both.ids[2], model.estimate.top(texts[2], 4).ids[10])


@settings(deadline=None, max_examples=30)
@given(TEXTS, st.integers(0, 99), st.integers(1, 7))
def test_mixed_distributions_sum_to_one(texts, seed, k) -> None:
    rng = np.random.default_rng(seed)
    given = [capture(rng, len(text), k, 7) if rng.random() < 0.5 else None for text in texts]
    model = Probabilities(texts, given, vocabulary=7)
    for text, tokens in enumerate(texts):
        p = model.of_text(text)
        assert len(p) == len(tokens)
        assert ((p > 0) & (p <= 1)).all()
        top = model.distributions(text, 3)
        for t in range(len(tokens)):
            whole = model.distribution(text, t)
            assert whole.sum() == pytest.approx(1, abs=1e-9)
            assert top.probabilities[t].sum() + top.tail[t] == pytest.approx(1, abs=1e-9)
            named = top.ids[t] != NO_TOKEN
            np.testing.assert_allclose(top.probabilities[t][named], whole[top.ids[t][named]], atol=1e-6)


@pytest.mark.parametrize(
    ("captured", "fact"),
    [
        ([None, None], "2 captured"), ([(np.zeros((2, 3), int), np.zeros((2, 3)))], "for 3 tokens"),
        ([(np.zeros((3, 0), int), np.zeros((3, 0)))], "for 3 tokens"),
        ([(np.zeros((3, 1), int), np.full((3, 1), 0.5))], "not 0 or less"),
        ([(np.zeros((3, 1), int), np.full((3, 1), np.nan))], "not 0 or less"),
        ([(np.zeros((3, 2), int), np.full((3, 2), -1.0))], "names a token twice"),
    ],
)  # fmt: skip
def test_captures_that_do_not_fit_are_refused(captured, fact) -> None:
    with pytest.raises(ValueError, match=fact):
        Probabilities([[1, 2, 3]], captured)


def test_distributions_are_sorted_and_scaled() -> None:
    found = Distributions.of([[5, -1, 2], [1, 9, 4]], [[0.25, 0.7, 0.5], [0.5, 0.5, 0.0005]])
    np.testing.assert_array_equal(found.ids, [[-1, 2, 5], [1, 4, 9]])
    np.testing.assert_allclose(found.probabilities[0], [0, 0.5, 0.25])
    assert found.probabilities[1].sum() == pytest.approx(1)
    np.testing.assert_allclose(found.tail, [0.25, 0])
    np.testing.assert_array_equal(found.of_tokens(np.array([5, 3]))[:1], [0.25])
    assert np.isnan(found.of_tokens(np.array([5, 3]))[1])
    cut = found.cut(1)
    np.testing.assert_array_equal(cut.ids, [[2], [1]])
    np.testing.assert_allclose(cut.tail, [0.5, 0.5], atol=1e-3)
    for ids, p, fact in (([[1, 1]], [[0.1, 0.1]], "twice"), ([[1]], [[1.5]], "from 0 to 1"), ([1], [1], "token ids")):
        with pytest.raises(ValueError, match=fact):
            Distributions.of(ids, p)
