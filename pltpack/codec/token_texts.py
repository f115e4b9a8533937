"""Token ids of texts, entropy-coded one after the other with what the texts themselves have shown so far.

The estimate is the trie's (`pltpack.trie.kneser_ney`) in whole numbers, so that every machine makes the same: contexts
of up to 3 tokens, of which a shorter one counts what came after it where the longer one did not know it, and escapes to
the shorter one with a weight for each token seen ("method D" of prediction by partial matching, Howard & Vitter 1993).
In front of it stands a match: where the last 3 tokens have been seen, the token that followed them is asked for first,
by how long the match has been right. Texts that repeat others take next to nothing; new ones cost less than general
compressors, which do not know that a token is a token.

Bitstream: spec/codecs.md, section "Token texts".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np

from pltpack.codec import range_coder
from pltpack.codec.range_coder import END_BYTES, SYMBOL_BYTES

#: Tokens of the longest context.
ORDER = 3
#: Most tokens that are coded with one model: what a reader goes through to get at the last of them.
STREAM_TOKENS = 1 << 16
#: Lengths of matches that are told apart.
_LENGTHS = 16
#: Sum from which on counts of matches and classes are halved.
_HALVE = 1 << 12
#: Classes of ids: the number of bits of id + 1.
_CLASSES = 32
#: Symbols that one token can take: match, three escapes and one of four places, class, low bits.
_SYMBOLS = ORDER + 5


def encode(texts: Sequence[np.ndarray]) -> bytes:
    """Code texts, int32 ``[T]`` each, of at most `STREAM_TOKENS` tokens together."""
    lengths = np.array([len(text) for text in texts], np.int64)
    tokens = np.concatenate([np.empty(0, np.int32), *texts]).astype(np.int64)
    out = np.zeros(SYMBOL_BYTES * _SYMBOLS * len(tokens) + END_BYTES, np.uint8)
    size = _run(False, tokens, lengths, out, *_tables(len(tokens)))
    return out[:size].tobytes()


def decode(data: bytes | np.ndarray, lengths: Sequence[int]) -> list[np.ndarray]:
    """The texts again.

    Parameters
    ----------
    data : bytes or ndarray
        What `encode` gave; anything else gives some tokens, too, or an error.
    lengths : sequence of int
        Tokens of each text.

    Raises
    ------
    ValueError
        If it names no token ids.
    """
    sizes = np.array(lengths, np.int64)
    tokens = np.zeros(int(sizes.sum()), np.int64)
    if _run(True, tokens, sizes, np.frombuffer(data, np.uint8).copy(), *_tables(len(tokens))) < 0:
        raise ValueError("coded tokens are damaged")
    return np.split(tokens.astype(np.int32), np.cumsum(sizes)[:-1]) if len(sizes) else []


def _tables(tokens: int) -> tuple[np.ndarray, ...]:
    """Room for so many tokens.

    A hash table and its numbers; per context the head of its list and its last place; per entry token, count and next;
    per token in the order of first appearance a tree of weights, id, and the turn in which it is excluded.
    """
    contexts, entries = ORDER * tokens + 1, (ORDER + 1) * tokens + 1
    slots = 1 << max(4, int(2 * (contexts + tokens)).bit_length())
    return (
        np.full(slots, -1, np.int64), np.zeros(slots, np.int32),
        np.full(contexts, -1, np.int32), np.full(contexts, -1, np.int64),
        np.zeros(entries, np.int64), np.zeros(entries, np.int64), np.full(entries, -1, np.int32),
        np.zeros(tokens + 2, np.int64), np.zeros(tokens + 2, np.int64), np.zeros(tokens + 2, np.int64),
    )  # fmt: skip


@numba.njit(nogil=True, cache=True)
def _place(keys: Any, key: Any) -> Any:
    """Where a key is, or would be."""
    mask = np.uint64(keys.size - 1)
    at = (np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(20)
    at &= mask
    while keys[at] != -1 and keys[at] != key:
        at = (at + np.uint64(1)) & mask
    return at


@numba.njit(nogil=True, cache=True)
def _add(tree: Any, index: Any, value: Any) -> None:
    at = index + 1
    while at < tree.size:
        tree[at] += value
        at += at & -at


@numba.njit(nogil=True, cache=True)
def _before(tree: Any, index: Any) -> Any:
    total, at = np.int64(0), index
    while at > 0:
        total += tree[at]
        at -= at & -at
    return total


@numba.njit(nogil=True, cache=True)
def _find(tree: Any, wanted: Any) -> Any:
    """The index whose part of the sums holds `wanted`."""
    step = np.int64(1)
    while 2 * step < tree.size:
        step *= 2
    at, rest = np.int64(0), wanted
    while step:
        if at + step < tree.size and tree[at + step] <= rest:
            at += step
            rest -= tree[at]
        step >>= 1
    return at


@numba.njit(nogil=True, cache=True)
def _bit(decoding: Any, state: Any, data: Any, yes: Any, counts: Any) -> Any:
    """Code one decision with its counts of no and yes, and count it."""
    total = counts[0] + counts[1]
    if decoding:
        yes = range_coder.slot(state, total) >= counts[0]
        range_coder.consume(state, data, counts[0] if yes else 0, counts[1] if yes else counts[0], total)
    else:
        range_coder.encode(state, data, counts[0] if yes else 0, counts[1] if yes else counts[0], total)
    counts[1 if yes else 0] += 2
    if total >= _HALVE:
        counts[0], counts[1] = (counts[0] + 1) >> 1, (counts[1] + 1) >> 1
    return yes


@numba.njit(nogil=True, cache=True)
def _new_token(decoding: Any, state: Any, data: Any, token: Any, classes: Any) -> Any:
    """Code a token that no context knows: its class with the counts so far, then the bits below the highest."""
    total, kind = classes.sum(), np.int64(0)
    if decoding:
        wanted, start = range_coder.slot(state, total), np.int64(0)
        while start + classes[kind] <= wanted:
            start += classes[kind]
            kind += 1
        range_coder.consume(state, data, start, classes[kind], total)
        low = range_coder.slot(state, np.int64(1) << kind)
        range_coder.consume(state, data, low, 1, np.int64(1) << kind)
        token = (np.int64(1) << kind) + low - 1
    else:
        while (token + 1) >> (kind + 1):
            kind += 1
        range_coder.encode(state, data, classes[:kind].sum(), classes[kind], total)
        range_coder.encode(state, data, token + 1 - (np.int64(1) << kind), 1, np.int64(1) << kind)
    classes[kind] += 16
    if total >= _HALVE:
        for index in range(classes.size):
            classes[index] = (classes[index] + 1) >> 1
    return token


@numba.njit(nogil=True, cache=True)
def _listed(decoding: Any, state: Any, data: Any, token: Any, place: Any, excluded: Any, turn: Any, heads: Any,
            names: Any, counts: Any, nexts: Any) -> Any:  # fmt: skip
    """Code a token by one context's list, or the escape: the entry, -1 for the escape, -2 if all is excluded."""
    total, types, start, found = np.int64(0), np.int64(0), np.int64(0), np.int32(-1)
    entry = heads[place]
    while entry >= 0:
        if excluded[names[entry]] != turn:
            if not decoding and names[entry] == token:
                found, start = entry, total
            total += 2 * counts[entry] - 1
            types += 1
        entry = nexts[entry]
    if types == 0:
        return np.int32(-2)
    whole = total + types
    if decoding:
        wanted, at = range_coder.slot(state, whole), np.int64(0)
        entry = heads[place]
        while entry >= 0 and wanted < total:
            if excluded[names[entry]] != turn:
                at += 2 * counts[entry] - 1
                if wanted < at:
                    found, start = entry, at - (2 * counts[entry] - 1)
                    break
            entry = nexts[entry]
        if found >= 0:
            range_coder.consume(state, data, start, 2 * counts[found] - 1, whole)
        else:
            range_coder.consume(state, data, total, types, whole)
    elif found >= 0:
        range_coder.encode(state, data, start, 2 * counts[found] - 1, whole)
    else:
        range_coder.encode(state, data, total, types, whole)
    return found


@numba.njit(nogil=True, cache=True)
def _run(decoding: Any, tokens: Any, lengths: Any, data: Any, keys: Any, numbers: Any, heads: Any, lasts: Any,
         names: Any, counts: Any, nexts: Any, tree: Any, ids: Any, excluded: Any) -> Any:  # fmt: skip
    """Code all texts; the length of the stream, or -1. Tokens are known by the number of their first appearance."""
    state = np.zeros(3, np.uint64)
    if decoding:
        range_coder.begin_decoding(state, data)
    else:
        state[1] = np.uint64(0xFFFFFFFFFFFFFFFF)
    bits = np.ones((_LENGTHS + 1, 2), np.int64)
    classes = np.ones(_CLASSES, np.int64)
    history = np.empty(tokens.size, np.int64)
    known, contexts, entries = np.int64(0), np.int32(1), np.int32(0)
    weight = np.zeros(tokens.size + 1, np.int64)
    mass = np.int64(0)
    chain = np.empty(ORDER + 1, np.int32)
    t: Any = np.int64(0)
    for length in lengths:
        first, match, right = t, np.int64(-1), 0
        for t in range(first, first + length):
            turn = t + 1
            depth = 0
            chain[0] = 0
            while depth < ORDER and t - depth - 1 >= first:
                at = _place(keys, (np.int64(chain[depth]) << 31) + history[t - depth - 1])
                if keys[at] < 0:
                    break
                depth += 1
                chain[depth] = numbers[at]
            if match < 0 and depth == ORDER:
                match, right = lasts[chain[ORDER]], 0
            name: Any = np.int64(-1)
            token, source = np.int64(0), np.int64(0)
            if not decoding:
                token = tokens[t]
                at = _place(keys, -2 - token)
                name = np.int64(numbers[at]) if keys[at] != -1 else np.int64(-1)
            done = False
            if match >= 0:
                guess = history[match]
                done = _bit(decoding, state, data, name == guess, bits[right if right < _LENGTHS else _LENGTHS - 1])
                if done:
                    name, source = guess, np.int64(ORDER)
                    match += 1
                    right += 1
                else:
                    excluded[guess] = turn
                    match = np.int64(-1)
            order: Any = depth
            while not done and order > 0:
                found = _listed(decoding, state, data, name, chain[order], excluded, turn, heads, names, counts, nexts)
                if found >= 0:
                    name, source, done = names[found], np.int64(order), True
                    break
                entry = heads[chain[order]]
                while entry >= 0:
                    excluded[names[entry]] = turn
                    entry = nexts[entry]
                order -= 1
            if not done:
                whole = mass + known + 1
                if decoding:
                    wanted = range_coder.slot(state, whole)
                    if wanted < mass:
                        name = _find(tree, wanted)
                        range_coder.consume(state, data, _before(tree, name), weight[name], whole)
                    else:
                        range_coder.consume(state, data, mass, known + 1, whole)
                elif name >= 0:
                    range_coder.encode(state, data, _before(tree, name), weight[name], whole)
                else:
                    range_coder.encode(state, data, mass, known + 1, whole)
                if name < 0:
                    token = _new_token(decoding, state, data, token, classes)
                    if token < 0 or token > 0x7FFFFFFF:
                        return -1
                    at = _place(keys, -2 - token)
                    if keys[at] != -1:
                        return -1
                    name = known
                    keys[at], numbers[at], ids[name] = -2 - token, np.int32(name), token
                    known += 1
            if decoding:
                tokens[t] = ids[name]
            history[t] = name
            # Contexts that did not know the token, and the one that did, count it; shorter ones do not.
            if source == 0:
                added = 1 if weight[name] == 0 else 2
                weight[name] += added
                mass += added
                _add(tree, name, added)
            place = np.int32(0)
            for order in range(1, ORDER + 1):
                if order > t - first:
                    break
                key = (np.int64(place) << 31) + history[t - order]
                at = _place(keys, key)
                if keys[at] < 0:
                    keys[at], numbers[at] = key, contexts
                    contexts += 1
                place = numbers[at]
                if order == ORDER:
                    lasts[place] = t
                if order < source:
                    continue
                entry = heads[place]
                while entry >= 0 and names[entry] != name:
                    entry = nexts[entry]
                if entry >= 0:
                    counts[entry] += 1
                else:
                    names[entries], counts[entries], nexts[entries] = name, 1, heads[place]
                    heads[place] = entries
                    entries += 1
        t = first + length
    return 0 if decoding else range_coder.end_encoding(state, data)
