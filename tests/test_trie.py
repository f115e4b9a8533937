"""The tries against their brute-force definitions."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pltpack.trie import plan as plan_module
from pltpack.trie.plan import Plan, plan
from pltpack.trie.radix import RadixTrie, Run

SETTINGS = settings(deadline=None, max_examples=150)
sequences = st.lists(st.lists(st.integers(0, 2), max_size=14), max_size=8)


def common(a, b):
    """Length of the longest common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def holders(sessions, groups, block, s):
    """Per whole block of session `s`: the sessions of its group that hold it and everything before it."""
    return [
        [t for t, other in enumerate(sessions) if groups[t] == groups[s] and common(other, sessions[s]) >= stop]
        for stop in range(block, len(sessions[s]) + 1, block)
    ]


def check_plan(sessions, groups, block, result: Plan):
    assert len(result.paths) == len(sessions)
    passed = [0] * len(result.nodes)
    for s, path in enumerate(result.paths):
        position, above = 0, -1
        held = holders(sessions, groups, block, s)
        for n in path:
            node = result.nodes[n]
            assert node.parent == above < n
            assert node.start == position < node.stop
            assert node.start % block == node.stop % block == 0
            for b in range(node.start // block, node.stop // block):
                assert node.owner == held[b][0]
                assert node.visits == len(held[b]) >= 2
            if above >= 0:
                assert node.visits < result.nodes[above].visits
            position, above = node.stop, n
            passed[n] += 1
        assert result.shared(s) == position == block * sum(len(h) >= 2 for h in held)
    assert passed == [node.visits for node in result.nodes]
    # Two sessions hold a run in common exactly where they name the same node.
    for s, path in enumerate(result.paths):
        for t in range(s):
            shared = [n for n in path if n in result.paths[t]]
            same = common(sessions[s], sessions[t]) // block * block if groups[s] == groups[t] else 0
            assert (result.nodes[shared[-1]].stop if shared else 0) == same


@SETTINGS
@given(sequences, st.data(), st.integers(1, 4))
def test_plan_is_the_definition(sessions, data, block):
    groups = data.draw(st.lists(st.sampled_from(["a", "b"]), min_size=len(sessions), max_size=len(sessions)))
    check_plan(sessions, groups, block, plan([np.array(s, np.int32) for s in sessions], groups, block))


@SETTINGS
@given(sequences, st.integers(1, 4))
def test_plan_does_not_trust_the_hash(sessions, block):
    arrays = [np.array(s, np.int32) for s in sessions]
    groups = [0] * len(sessions)
    for bits in (0, 1):
        assert plan_module._plan(arrays, groups, block, np.uint64(bits)) == plan(arrays, groups, block)


@SETTINGS
@given(sequences, st.lists(st.integers(0, 2), max_size=16), st.integers(1, 4))
def test_radix_is_the_definition(sessions, query, block):
    trie = RadixTrie.build([np.array(s, np.int32) for s in sessions])
    check_structure(trie, sessions)
    for tokens in [query, *sessions]:
        matched, node = trie.lookup(np.array(tokens, np.int32))
        assert matched == max((common(tokens, s) for s in sessions), default=0)
        spelt = [t for n in trie.path(node) for t in trie.tokens[trie.offset[n] :][: trie.length[n]].tolist()]
        assert spelt[:matched] == tokens[:matched]
        assert (node == 0) == (matched == 0)
        if node:
            assert trie.depth[node] < matched <= trie.depth[node] + trie.length[node]


def check_structure(trie, sessions):
    ends = {0}
    for s in sessions:
        for t in sessions:
            ends.add(tuple(s[: common(s, t)]))
    assert len(trie) == len(ends - {(), 0}) + 1
    assert trie.visits[0] == len(sessions)
    for n in range(1, len(trie)):
        assert trie.length[n] > 0
        above = trie.parent[n]
        assert trie.depth[n] == trie.depth[above] + trie.length[above]
        spelt = [t for m in trie.path(n) for t in trie.tokens[trie.offset[m] :][: trie.length[m]].tolist()]
        through = [i for i, s in enumerate(sessions) if s[: len(spelt)] == spelt]
        assert trie.visits[n] == len(through)
        assert trie.owner[n] == through[0]


@SETTINGS
@given(sequences, st.integers(1, 4))
def test_shared_runs_agree_with_the_plan(sessions, block):
    arrays = [np.array(s, np.int32) for s in sessions]
    trie = RadixTrie.build(arrays)
    planned = plan(arrays, [0] * len(sessions), block)
    for s, tokens in enumerate(arrays):
        runs = trie.shared_runs(tokens, block)
        assert all(isinstance(run, Run) and trie.visits[run.node] >= 2 for run in runs)
        spans = [(planned.nodes[n].start, planned.nodes[n].stop) for n in planned.paths[s]]
        assert [(run.start, run.stop) for run in runs] == spans


@SETTINGS
@given(st.lists(st.integers(0, 1), max_size=12), sequences, st.data())
def test_growing_session_counts_once(tokens, others, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=3)))
    trie, number = RadixTrie(), len(others)
    for i, other in enumerate(others):
        if i < len(cuts):
            trie.insert(np.array(tokens[: cuts[i]], np.int32), number)
        trie.insert(np.array(other, np.int32), i)
    trie.insert(np.array(tokens, np.int32), number)
    sessions = [*others, tokens]
    for n in range(1, len(trie)):
        spelt = [t for m in trie.path(n) for t in trie.tokens[trie.offset[m] :][: trie.length[m]].tolist()]
        assert trie.visits[n] == sum(s[: len(spelt)] == spelt for s in sessions)
    for query in sessions:
        assert trie.lookup(np.array(query, np.int32))[0] == len(query)


def test_refused_input():
    trie = RadixTrie()
    trie.insert(np.array([1, 2, 3]), 7)
    before = len(trie), trie.visits.tolist()
    for bad in ([1, 2], [1, 2, 4], [9], []):
        with pytest.raises(ValueError, match="session 7"):
            trie.insert(np.array(bad, np.int64), 7)
    assert (len(trie), trie.visits.tolist()) == before
    with pytest.raises(ValueError, match="int32"):
        trie.lookup(np.array([1 << 40]))
    with pytest.raises(ValueError, match="integer"):
        trie.insert(np.array([1.0]), 8)
    with pytest.raises(ValueError, match="dimensions"):
        trie.lookup(np.zeros((2, 2), np.int32))
    with pytest.raises(ValueError, match="negative"):
        trie.insert(np.array([1]), -1)
    for call in (lambda: trie.shared_runs([1], 0), lambda: plan([[1]], [0], 0)):
        with pytest.raises(ValueError, match="block of 0"):
            call()
    with pytest.raises(ValueError, match="1 sessions but 2 groups"):
        plan([[1]], [0, 0], 4)
    with pytest.raises(ValueError, match="read-only"):
        trie.visits[0] = 3


def test_plan_of_nothing():
    assert plan([], [], 32) == Plan(32, [], [])
    assert plan([[], [5], []], [0, 0, 0], 1) == Plan(1, [], [[], [], []])


def test_branch_inside_a_block_and_extension():
    base = np.arange(100, dtype=np.int32)
    other = base.copy()
    other[70] = -1
    result = plan([base, other, base[:64], base, base], ["x", "x", "x", "x", "y"], 32)
    assert [tuple(n) for n in result.nodes] == [(-1, 0, 64, 0, 4), (0, 64, 96, 0, 2)]
    assert result.paths == [[0, 1], [0], [0], [0, 1], []]


def test_many_sessions():
    rng = np.random.default_rng(0)
    stems = [rng.integers(0, 50_000, 3000, dtype=np.int32) for _ in range(20)]
    sessions = []
    for i in range(5000):
        stem = stems[i % 20][: rng.integers(0, 3000)]
        sessions.append(np.concatenate([stem, rng.integers(0, 50_000, rng.integers(0, 300), dtype=np.int32)]))
    started = time.perf_counter()
    result = plan(sessions, [i % 2 for i in range(5000)], 32)
    trie = RadixTrie.build(sessions)
    elapsed = time.perf_counter() - started
    total = sum(map(len, sessions))
    assert elapsed < 30, f"{total} tokens took {elapsed:.1f} s"
    for i in range(0, 5000, 97):
        assert trie.lookup(sessions[i])[0] == len(sessions[i])
        longest = max(common(sessions[i], sessions[j]) for j in range(i % 20, 400, 20) if j != i)
        assert result.shared(i) >= longest // 32 * 32
        # Stems belong to one parity of session numbers, so the groups hide nothing from each other.
        runs = trie.shared_runs(sessions[i], 32)
        assert (runs[-1].stop if runs else 0) == result.shared(i)
