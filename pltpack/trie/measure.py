"""What the trie and the matcher find in a set of texts, and how fast they are on it."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from pltpack.trie.matching import find_matches
from pltpack.trie.radix import RadixTrie, token_array

_ROUNDS = 5


def measure(texts: Sequence[Any], groups: Sequence[Hashable]) -> dict[str, Any]:
    """Build a trie per group, look every text up, and match what lies behind exact prefixes.

    Parameters
    ----------
    texts : sequence of array_like
        Token ids ``[T]``, in the order in which they are stored.
    groups : sequence of hashable
        One per text: only texts of equal groups share.

    Returns
    -------
    dict
        ``sessions``, ``tokens``; ``stored_tokens`` of the tries and ``dedup_ratio``, which is tokens over them;
        ``hit_rate``, the part of all tokens that were there before their text came; ``nodes``; ``build_seconds``;
        ``lookup_seconds``, median and worst over the texts; ``matched_tokens`` behind exact prefixes,
        ``match_seconds``.
    """
    arrays = [token_array(text) for text in texts]
    for tokens in arrays[:1]:
        _compile(tokens)
    tries = {group: RadixTrie() for group in groups}
    prefixes, build = [], 0.0
    for number, (tokens, group) in enumerate(zip(arrays, groups, strict=True)):
        prefixes.append(tries[group].lookup(tokens)[0])
        start = time.perf_counter()
        tries[group].insert(tokens, number)
        build += time.perf_counter() - start
    lookups = [_lookup_seconds(tries[group], tokens) for tokens, group in zip(arrays, groups, strict=True)]
    start = time.perf_counter()
    found = find_matches(arrays, groups, range(len(arrays)), prefixes)
    match = time.perf_counter() - start
    total, stored = sum(map(len, arrays)), sum(len(trie.tokens) for trie in tries.values())
    return {
        "sessions": len(arrays),
        "tokens": total,
        "stored_tokens": stored,
        "dedup_ratio": total / stored if stored else 1.0,
        "hit_rate": sum(prefixes) / total if total else 0.0,
        "nodes": sum(len(trie) for trie in tries.values()),
        "build_seconds": build,
        "lookup_seconds": {"median": float(np.median(lookups)), "worst": max(lookups)} if lookups else None,
        "matched_tokens": sum(match.length for matches in found for match in matches),
        "match_seconds": match,
    }


def _compile(tokens: np.ndarray) -> None:
    RadixTrie.build([tokens]).lookup(tokens)
    text = [1] * 64
    find_matches([text, text], [0, 0], [1], [0, 0])


def _lookup_seconds(trie: RadixTrie, tokens: np.ndarray) -> float:
    """The best of some rounds: what else the machine does is not the trie's time."""
    best = np.inf
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        trie.lookup(tokens)
        best = min(best, time.perf_counter() - start)
    return float(best)
