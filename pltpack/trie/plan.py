"""Which whole blocks the sessions of one archive share: a radix trie over blocks from position 0.

A block is shared by sessions of one group whose tokens agree from position 0 to the block's end. Blocks are found by a
hash of (preceding block, tokens) and always verified by comparing the tokens, so the plan does not depend on the hash.
Neighbouring blocks that the same sessions share form one node.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numba
import numpy as np

from pltpack.trie.radix import token_array

_MIX = np.uint64(0x9E3779B97F4A7C15)
_ALL_BITS = np.uint64(0xFFFFFFFFFFFFFFFF)


class PlanNode(NamedTuple):
    """A run of tokens stored once.

    Attributes
    ----------
    parent : int
        Index of the node that ends where this one starts, or -1 if this one starts at position 0.
    start, stop : int
        Token positions, multiples of the block, ``start < stop``.
    owner : int
        The first session, in order, that holds the run.
    visits : int
        Number of sessions that hold it, at least 2; less than the parent's.
    """

    parent: int
    start: int
    stop: int
    owner: int
    visits: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is shared by whom.

    Attributes
    ----------
    block : int
        Tokens per block.
    nodes : list of PlanNode
        Parents before their children.
    paths : list of list of int
        Per session, the indices of the nodes it shares, from position 0 on; together they cover ``[0, shared(s))``.
    """

    block: int
    nodes: list[PlanNode]
    paths: list[list[int]]

    def shared(self, session: int) -> int:
        """Tokens that a session shares with others, counted from position 0."""
        path = self.paths[session]
        return self.nodes[path[-1]].stop if path else 0


@numba.njit(nogil=True, cache=True)
def _blocks(tokens: Any, starts: Any, counts: Any, groups: Any, roots: Any, block: Any, hash_mask: Any,
            slots: Any, parent: Any, first: Any, owner: Any, visits: Any, paths: Any) -> Any:  # fmt: skip
    """Number every distinct block of every session, in order of first appearance after the groups' roots."""
    nodes = roots
    mask = slots.size - 1
    out = 0
    for session in range(starts.size):
        node = groups[session]
        for b in range(counts[session]):
            at = starts[session] + b * block
            key = np.uint64(node)
            for i in range(block):
                key = (key ^ (np.uint64(tokens[at + i]) & np.uint64(0xFFFFFFFF))) * _MIX
                key ^= key >> np.uint64(32)
            slot = np.int64(key & hash_mask & np.uint64(mask))
            child = np.int64(slots[slot])
            while child >= 0:
                same = parent[child] == node
                i = 0
                while same and i < block:
                    same = tokens[first[child] + i] == tokens[at + i]
                    i += 1
                if same:
                    break
                slot = (slot + 1) & mask
                child = np.int64(slots[slot])
            if child < 0:
                child = nodes
                nodes += 1
                slots[slot] = child
                parent[child], first[child], owner[child] = node, at, session
            visits[child] += 1
            paths[out] = child
            out += 1
            node = child
    return nodes


@dataclasses.dataclass(frozen=True)
class _BlockTrie:
    """Arrays per block node (the first `roots` stand for the groups) and the concatenated paths of all sessions."""

    roots: int
    parent: np.ndarray
    owner: np.ndarray
    visits: np.ndarray
    paths: np.ndarray
    counts: np.ndarray


def _block_trie(arrays: list[np.ndarray], groups: Sequence[Hashable], block: int, hash_mask: np.uint64) -> _BlockTrie:
    ids: dict[Hashable, int] = {}
    group = np.array([ids.setdefault(g, len(ids)) for g in groups], dtype=np.int64)
    lengths = np.array([len(a) for a in arrays], dtype=np.int64)
    counts = lengths // block
    total = int(counts.sum())
    most = len(ids) + total
    parent, first = np.full(most, -1, dtype=np.int64), np.empty(most, dtype=np.int64)
    owner, visits = np.full(most, -1, dtype=np.int64), np.zeros(most, dtype=np.int64)
    paths = np.empty(total, dtype=np.int64)
    slots = np.full(1 << (2 * most).bit_length(), -1, dtype=np.int64)
    tokens = np.concatenate([*arrays, np.empty(0, dtype=np.int32)])
    used = _blocks(tokens, np.cumsum(lengths) - lengths, counts, group, len(ids), block, hash_mask, slots, parent,
                   first, owner, visits, paths)  # fmt: skip
    return _BlockTrie(len(ids), parent[:used], owner[:used], visits[:used], paths, counts)


def plan(sessions: Sequence[Any], groups: Sequence[Hashable], block: int) -> Plan:
    """Plan the sharing of whole blocks among sessions.

    Parameters
    ----------
    sessions : sequence of array_like
        Token ids ``[T]`` of each session; empty ones are allowed.
    groups : sequence of hashable
        One per session: only sessions of equal groups share.
    block : int
        Tokens per block, at least 1.

    Raises
    ------
    ValueError
        If tokens are not int32 ids, the lengths differ, or the block is not positive.
    """
    if block < 1:
        raise ValueError(f"block of {block} tokens")
    if len(sessions) != len(groups):
        raise ValueError(f"{len(sessions)} sessions but {len(groups)} groups")
    return _plan([token_array(tokens) for tokens in sessions], groups, block, _ALL_BITS)


def _plan(arrays: list[np.ndarray], groups: Sequence[Hashable], block: int, hash_mask: np.uint64) -> Plan:
    trie = _block_trie(arrays, groups, block, hash_mask)
    shared = trie.visits >= 2
    # A root has no visits, so the first block below it always opens a node. A block that as many sessions pass as its
    # parent is passed by the same ones.
    head = shared & (trie.visits != trie.visits[trie.parent])
    # The owner of a run met its blocks one after another, so they are numbered without a gap.
    node_of = np.where(shared, np.cumsum(head) - 1, -1)
    heads = np.flatnonzero(head)
    sizes = np.bincount(node_of[shared], minlength=len(heads)) * block
    nodes: list[PlanNode] = []
    for at, size in zip(heads.tolist(), sizes.tolist(), strict=True):
        above = int(node_of[trie.parent[at]])
        start = nodes[above].stop if above >= 0 else 0
        nodes.append(PlanNode(above, start, start + size, int(trie.owner[at]), int(trie.visits[at])))
    opened = head[trie.paths]
    ends = np.concatenate([[0], np.cumsum(opened, dtype=np.int64)])[np.cumsum(trie.counts)].tolist()
    flat = node_of[trie.paths[opened]].tolist()
    return Plan(block, nodes, [flat[a:b] for a, b in zip([0, *ends], ends, strict=False)])
