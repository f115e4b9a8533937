"""Kernels of the token matcher: a rolling hash, a table of anchors and extension token by token.

All texts lie in one array with a gap after each; `free` is 1 where a token may be the source of a match, 0 in gaps, in
what a match covers and in texts that have not been scanned. An *anchor* is a short run of tokens at a fixed stride in
the free parts. Anchors are found by hash and always verified by comparing tokens, and so is the number of equal anchors
that are kept, so nothing depends on the hash but speed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_SCATTER = np.uint64(0xD6E8FEB86659FD93)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_ONE = np.uint64(1)


class Anchors(NamedTuple):
    """Open-addressing table of anchors: `place` uint64 holds position + 1, or 0 where empty; `tag` uint32 hash bits."""

    place: np.ndarray
    tag: np.ndarray


class Rules(NamedTuple):
    """What counts as a match, all in tokens but the last two.

    Attributes
    ----------
    anchor : int
        Length of an anchor and distance between anchors.
    delay : int
        How far behind the scan the text's own tokens become sources.
    shortest : int
        Length of the shortest match.
    bridge : int
        Unequal tokens in a row that a match may run over.
    resume : int
        Equal tokens needed behind them.
    keep : int
        Equal anchors kept, the first ones.
    hash_mask : numpy.uint64
        All ones but in tests.
    """

    anchor: int
    delay: int
    shortest: int
    bridge: int
    resume: int
    keep: int
    hash_mask: np.uint64


@numba.njit(nogil=True, cache=True)
def _mixed(token: Any) -> Any:
    value = ((np.uint64(token) & _LOW) + _ONE) * _SCATTER
    return value ^ (value >> _HALF)


@numba.njit(nogil=True, cache=True)
def _hash(tokens: Any, at: Any, size: Any) -> Any:
    value = np.uint64(0)
    for i in range(at, at + size):
        value = value * _MULTIPLIER + _mixed(tokens[i])
    return value


@numba.njit(nogil=True, cache=True)
def _key(value: Any, group: Any, hash_mask: Any) -> Any:
    key = (value ^ (np.uint64(group) * _SCATTER)) * _MULTIPLIER
    return (key ^ (key >> _HALF)) & hash_mask


@numba.njit(nogil=True, cache=True)
def _tag(key: Any) -> Any:
    return np.uint32((key >> _HALF) | _ONE)


@numba.njit(nogil=True, cache=True)
def _same(tokens: Any, a: Any, b: Any, size: Any) -> Any:
    i = 0
    while i < size and tokens[a + i] == tokens[b + i]:
        i += 1
    return i == size


@numba.njit(nogil=True, cache=True)
def text_at(starts: Any, position: Any) -> Any:
    """Index of the text that holds a position; `starts` int64 ascending."""
    low, high = 0, starts.size
    while high - low > 1:
        middle = (low + high) >> 1
        if starts[middle] <= position:
            low = middle
        else:
            high = middle
    return low


@numba.njit(nogil=True, cache=True)
def _add(tokens: Any, at: Any, group: Any, starts: Any, groups: Any, anchors: Any, rules: Any) -> None:
    """Keep the anchor at `at`, unless enough equal ones are kept."""
    key = _key(_hash(tokens, at, rules.anchor), group, rules.hash_mask)
    tag, mask = _tag(key), anchors.place.size - 1
    slot = np.int64(key & np.uint64(mask))
    equal = 0
    while anchors.tag[slot] != 0:
        if anchors.tag[slot] == tag:
            other = np.int64(anchors.place[slot]) - 1
            if _same(tokens, other, at, rules.anchor) and groups[text_at(starts, other)] == group:
                equal += 1
                if equal == rules.keep:
                    return
        slot = (slot + 1) & mask
    anchors.tag[slot] = tag
    anchors.place[slot] = np.uint64(at + 1)


@numba.njit(nogil=True, cache=True)
def _back(tokens: Any, free: Any, t: Any, s: Any, lowest: Any, rules: Any) -> Any:
    """Tokens by which a match that starts at `t` grows towards the front, to `lowest` at most."""
    size = 0
    while True:
        while t - size > lowest and free[s - size - 1] and tokens[t - size - 1] == tokens[s - size - 1]:
            size += 1
        grown = 0
        for skip in range(1, rules.bridge + 1):
            if t - size - skip < lowest or not free[s - size - skip]:
                break
            at = size + skip
            if t - at - rules.resume < lowest:
                break
            a, b = t - at - 1, s - at - 1
            run = 0
            while run < rules.resume and free[b - run] and tokens[a - run] == tokens[b - run]:
                run += 1
            if run == rules.resume:
                grown = skip + rules.resume
                break
        if grown == 0:
            return size
        size += grown


@numba.njit(nogil=True, cache=True)
def _forth(tokens: Any, free: Any, t: Any, s: Any, end: Any, source_end: Any, rules: Any) -> Any:
    """Tokens by which a match that ends before `t` grows; neither `end` nor `source_end` is passed."""
    most = min(end - t, source_end - s)
    size = 0
    while True:
        while size < most and free[s + size] and tokens[t + size] == tokens[s + size]:
            size += 1
        grown = 0
        for skip in range(1, rules.bridge + 1):
            if size + skip + rules.resume > most or not free[s + size + skip - 1]:
                break
            at = size + skip
            a, b = t + at, s + at
            run = 0
            while run < rules.resume and free[b + run] and tokens[a + run] == tokens[b + run]:
                run += 1
            if run == rules.resume:
                grown = skip + rules.resume
                break
        if grown == 0:
            return size
        size += grown


@numba.njit(nogil=True, cache=True)
def _best(tokens: Any, free: Any, t: Any, slot: Any, tag: Any, group: Any, lowest: Any, start: Any, end: Any,
          starts: Any, groups: Any, anchors: Any, rules: Any) -> Any:  # fmt: skip
    """(start, length, source start) of the longest match through the anchor at `t`, of equal ones the first."""
    mask = anchors.place.size - 1
    best, best_start, best_source = 0, 0, 0
    while anchors.tag[slot] != 0:
        if anchors.tag[slot] == tag:
            s = np.int64(anchors.place[slot]) - 1
            if _same(tokens, s, t, rules.anchor) and groups[text_at(starts, s)] == group:
                back = _back(tokens, free, t, s, lowest, rules)
                # In the same text, what the match covers is no source.
                source_end = t - back if s >= start else np.int64(free.size)
                ahead, behind = t + rules.anchor, s + rules.anchor
                size = back + rules.anchor + _forth(tokens, free, ahead, behind, end, source_end, rules)
                if size > best:
                    best, best_start, best_source = size, t - back, s - back
        slot = (slot + 1) & mask
    return best_start, best, best_source


@numba.njit(nogil=True, cache=True)
def scan(text: Any, wanted: Any, tokens: Any, free: Any, starts: Any, ends: Any, groups: Any, anchors: Any,
         rules: Any, out: Any) -> Any:  # fmt: skip
    """Match a text against what is free before it (if `wanted`), then make the rest of it free and add its anchors.

    Parameters
    ----------
    text : int
        Texts are scanned in ascending order.
    wanted : bool
    tokens, free : int32, uint8 ``[N]``
    starts, ends, groups : int64 ``[texts]``
    anchors : Anchors
    rules : Rules
    out : int64 ``[most, 3]``
        Receives (start, length, source start), positions in `tokens`, in order.

    Returns
    -------
    int
        Number of matches.
    """
    start, end, group, size = starts[text], ends[text], groups[text], rules.anchor
    free[start:end] = 1
    top = np.uint64(1)
    for _ in range(size):
        top *= _MULTIPLIER
    # Below `kept` anchors have been added, so the text may not be covered there any more.
    t, kept, found = start, start, 0
    fresh = True
    value = np.uint64(0)
    first, source = t, t
    tags, mask = anchors.tag, anchors.tag.size - 1
    while wanted and t + size <= end:
        while kept + size + rules.delay <= t:
            _add(tokens, kept, group, starts, groups, anchors, rules)
            kept += size
        if fresh:
            value = _hash(tokens, t, size)
            fresh = False
        key = _key(value, group, rules.hash_mask)
        tag, slot = _tag(key), np.int64(key & np.uint64(mask))
        while tags[slot] != 0 and tags[slot] != tag:
            slot = (slot + 1) & mask
        length = 0
        # At most positions there is nothing, and a call costs more than the search.
        if tags[slot] != 0:
            first, length, source = _best(tokens, free, t, slot, tag, group, kept, start, end, starts, groups, anchors,
                                          rules)  # fmt: skip
        if length >= rules.shortest:
            while kept + size <= first:
                _add(tokens, kept, group, starts, groups, anchors, rules)
                kept += size
            free[first : first + length] = 0
            out[found, 0], out[found, 1], out[found, 2] = first, length, source
            found += 1
            t = kept = first + length
            fresh = True
        else:
            if t + size < end:
                value = value * _MULTIPLIER + _mixed(tokens[t + size]) - _mixed(tokens[t]) * top
            t += 1
    while kept + size <= end:
        _add(tokens, kept, group, starts, groups, anchors, rules)
        kept += size
    return found
