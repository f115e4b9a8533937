"""The token matcher against its definition: what a match is, what must be found, and that hashes decide nothing."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pltpack.trie import matching
from pltpack.trie.matching import Match, find_matches

SETTINGS = settings(deadline=None, max_examples=60)


def check(texts, groups, targets, own_from, found, window=64, bridge=4):
    """Every rule of a match; returns per text which tokens are sources."""
    free = [np.arange(len(text)) >= first for text, first in zip(texts, own_from, strict=True)]
    assert len(found) == len(targets)
    for target, matches in zip(targets, found, strict=True):
        last = own_from[target]
        for m in matches:
            assert m.session == target
            assert last <= m.start
            assert window // 2 <= m.length
            last = m.start + m.length
            assert last <= len(texts[target])
            free[target][m.start : last] = False
    for m in (m for matches in found for m in matches):
        assert groups[m.source] == groups[m.session]
        assert m.source < m.session or (m.source == m.session and m.source_start + m.length <= m.start)
        assert m.source_start >= 0
        assert free[m.source][m.source_start : m.source_start + m.length].sum() == m.length
        same = texts[m.session][m.start :][: m.length] == texts[m.source][m.source_start :][: m.length]
        assert same[0]
        assert same[-1]
        edges = np.flatnonzero(np.diff(same.astype(int)))
        runs = np.diff(np.concatenate([[-1], edges, [m.length - 1]]))
        assert max(runs[1::2], default=0) <= bridge
        assert sum(runs[::2]) >= window // 4
    return free


def unfound(texts, groups, targets, free, window):
    """Runs of ``window // 2`` uncovered tokens of a target that stand in one source part before (all positions)."""
    size = window // 2
    seen, missed = {}, []
    for i, text in enumerate(texts):
        places = [p for p in range(len(text) - size + 1) if free[i][p : p + size].all()]
        # Sources in the same text lag behind the scan by a window, and what they cover must end before the run.
        waiting = []
        for p in places:
            while waiting and waiting[0][1] + size + 2 * window <= p:
                run, place = waiting.pop(0)
                seen.setdefault(run, place)
            run = (groups[i], text[p : p + size].tobytes())
            if i in targets and run in seen:
                missed.append((i, p, seen[run]))
            waiting.append((run, p))
        for run, place in waiting:
            seen.setdefault(run, place)
    return missed


@st.composite
def edited_texts(draw):
    """Texts that repeat pieces of one another, edited, over an alphabet that makes chance repeats rare or common."""
    alphabet = draw(st.sampled_from([2, 50, 30000]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    texts = [rng.integers(0, alphabet, draw(st.integers(0, 200)), dtype=np.int32)]
    for _ in range(draw(st.integers(1, 5))):
        parts = []
        for _ in range(draw(st.integers(0, 4))):
            source = np.concatenate([*texts, *parts])
            kind = draw(st.sampled_from(["new", "copy", "copy", "edit"]))
            size = draw(st.integers(1, 120))
            first = int(rng.integers(0, max(1, len(source) - size)))
            part = source[first : first + size].copy()
            if kind == "new":
                part = rng.integers(0, alphabet, size, dtype=np.int32)
            elif kind == "edit" and len(part):
                at = rng.integers(0, len(part), draw(st.integers(1, 4)))
                part[at] = rng.integers(0, alphabet, len(at))
            parts.append(part)
        texts.append(np.concatenate([np.empty(0, np.int32), *parts]))
    groups = [int(g) for g in rng.integers(0, draw(st.integers(1, 2)), len(texts))]
    targets = [i for i in range(len(texts)) if rng.random() < 0.8]
    own = [int(rng.integers(0, len(t) + 1)) if rng.random() < 0.3 else 0 for t in texts]
    return texts, groups, targets, own, alphabet


@SETTINGS
@given(edited_texts(), st.sampled_from([32, 40, 64, 128]), st.sampled_from([0, 1, 4]))
def test_matches_keep_the_rules_and_miss_nothing(case, window, bridge):
    texts, groups, targets, own, alphabet = case
    found = find_matches(texts, groups, targets, own, window=window, bridge=bridge, trigger_tokens=0)
    free = check(texts, groups, targets, own, found, window, bridge)
    if alphabet > 2:  # Else one anchor stands in more than eight places.
        assert not unfound(texts, groups, targets, free, window)


@SETTINGS
@given(edited_texts(), st.sampled_from([0, 1, 0x100000000]))
def test_hash_collisions_change_nothing(case, hash_mask):
    texts, groups, targets, own, _ = case
    rules = matching.rolling.Rules(16, 64, 32, 4, 8, 8, matching._ALL_BITS)
    weak = rules._replace(hash_mask=np.uint64(hash_mask))
    assert matching._find(texts, groups, targets, own, weak) == matching._find(texts, groups, targets, own, rules)


def words(rng, size):
    return rng.integers(0, 49152, size, dtype=np.int32)


def test_edits():
    rng = np.random.default_rng(1)
    source, other = words(rng, 1000), words(rng, 50)
    put_in = np.concatenate([other, source[100:300], words(rng, 5), source[300:400], source[403:500], other[:20]])
    assert find_matches([source, put_in], ["m", "m"], [1], [0, 0]) == [
        [Match(1, 50, 200, 0, 100), Match(1, 255, 100, 0, 300), Match(1, 355, 97, 0, 403)]
    ]
    replaced = source[200:600].copy()
    replaced[[100, 101, 102, 103, 250]] = -1
    assert find_matches([source, replaced], ["m", "m"], [1], [0, 0]) == [[Match(1, 0, 400, 0, 200)]]
    assert find_matches([source, replaced], ["m", "m"], [1], [0, 0], bridge=3) == [
        [Match(1, 0, 100, 0, 200), Match(1, 104, 296, 0, 304)]
    ]
    replaced[104] = -1
    assert [m.length for m in find_matches([source, replaced], ["m", "m"], [1], [0, 0])[0]] == [100, 295]


def test_first_occurrence_wins_and_predictions_do_not_chain():
    rng = np.random.default_rng(2)
    passage = words(rng, 150)
    texts = [np.concatenate([words(rng, 40 + i), passage, words(rng, 30)]) for i in range(4)]
    twice = np.concatenate([passage, words(rng, 10), passage])
    found = find_matches([*texts, twice], [0] * 5, range(5), [0] * 5)
    assert found == [
        [],
        [Match(1, 41, 150, 0, 40)],
        [Match(2, 42, 150, 0, 40)],
        [Match(3, 43, 150, 0, 40)],
        [Match(4, 0, 150, 0, 40), Match(4, 160, 150, 0, 40)],
    ]


def test_a_text_repeats_itself():
    rng = np.random.default_rng(3)
    passage, gap = words(rng, 100), words(rng, 30)
    assert find_matches([np.concatenate([passage, gap, passage])], [0], [0], [0]) == [[Match(0, 130, 100, 0, 0)]]


def test_longest_source_is_preferred():
    rng = np.random.default_rng(4)
    passage = words(rng, 300)
    texts = [passage[50:100], np.concatenate([words(rng, 9), passage]), passage[100:]]
    found = find_matches([*texts, passage], [0] * 4, [3], [0] * 4)
    assert found == [[Match(3, 0, 300, 1, 9)]]


def test_exact_prefixes_are_neither_matched_nor_sources():
    rng = np.random.default_rng(5)
    prefix, tail = words(rng, 200), words(rng, 100)
    texts = [prefix, np.concatenate([prefix, tail]), np.concatenate([prefix, words(rng, 70), prefix[100:], tail])]
    found = find_matches(texts, [0] * 3, [1, 2], [0, 200, 200])
    assert found == [[], [Match(2, 270, 100, 0, 100), Match(2, 370, 100, 1, 200)]]


@pytest.mark.parametrize(
    ("own", "size", "looked_at"), [(0, 63, False), (0, 64, True), (149, 63, True), (140, 63, False)]
)
def test_trigger(own, size, looked_at):
    rng = np.random.default_rng(6)
    source = words(rng, 200)
    text = np.concatenate([words(rng, own), source[:size]])
    found = find_matches([source, text], [0, 0], [1], [0, own])
    assert found == [[Match(1, own, size, 0, 0)] if looked_at else []]


def test_no_texts():
    assert find_matches([], [], [], []) == []
    assert find_matches([[]], [0], [0], [0]) == [[]]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"window": 31}, "window of 31"),
        ({"window": 129}, "window of 129"),
        ({"bridge": -1}, "bridge -1"),
        ({"targets": [1, 0]}, "ascending"),
        ({"targets": [2]}, "ascending"),
        ({"own_from": [0, 4]}, "prefix of 4"),
        ({"own_from": [0]}, "1 prefixes"),
        ({"groups": [0]}, "1 groups"),
        ({"texts": [[1, 2, 3], [0.5]]}, "float64"),
    ],
)
def test_bad_arguments(change, says):
    arguments = {"texts": [[1, 2, 3], [1, 2, 3]], "groups": [0, 0], "targets": [1], "own_from": [0, 0], **change}
    with pytest.raises(ValueError, match=says):
        find_matches(**arguments)


@pytest.mark.parametrize("period", [1, 7, 17, 100, 3000])
def test_periodic_texts_take_linear_time(period):
    """Repeats make every anchor popular; the work per token must stay bounded."""
    text = np.resize(words(np.random.default_rng(7), period), 400_000)
    find_matches([text[:1000]], [0], [0], [0])
    start = time.process_time()
    found = find_matches([text, text], [0, 0], [0, 1], [0, 0])
    assert time.process_time() - start < 5
    check([text, text], [0, 0], [0, 1], [0, 0], found)
    covered = sum(m.length for matches in found for m in matches)
    assert covered >= 2 * len(text) - 2 * period - 300
