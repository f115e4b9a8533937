"""Repeats of tokens anywhere in the texts of an archive: which run of which earlier text predicts which run of a later.

As rsync and LZ77 do: anchors of the texts so far are found by a rolling hash at every position of the next text,
verified, and extended token by token to both sides. A run with tokens put in or left out gives two matches with
different distances; a few replaced tokens inside equal surroundings are bridged, as what predicts need not be equal.
A covered token is never a source: predictions do not chain, and a passage is stored once, where it stands first.

`find_matches` compares tokens only; windows of other tokens with the same outlook are found by `pltpack.trie.ann`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from pltpack.trie import rolling
from pltpack.trie.radix import token_array

WINDOW = 64
WINDOWS = (32, 128)
#: Of equal anchors the first ones are kept. More would cost time where texts repeat short phrases.
_KEEP = 8
_ALL_BITS = np.uint64(0xFFFFFFFFFFFFFFFF)


class Match(NamedTuple):
    """A run of tokens that an earlier run predicts.

    Attributes
    ----------
    session : int
        Index of the text that is predicted.
    start, length : int
        The run in that text, in tokens.
    source : int
        Index of the text that predicts it: an earlier one, or the same.
    source_start : int
        Where the source run starts in its text; it has the same length.
    """

    session: int
    start: int
    length: int
    source: int
    source_start: int


def find_matches(texts: Sequence[Any], groups: Sequence[Hashable], targets: Sequence[int], own_from: Sequence[int],
                 *, window: int = WINDOW, bridge: int = 4, trigger_tokens: int = 64,
                 trigger_overlap: float = 0.7) -> list[list[Match]]:  # fmt: skip
    """Find the runs of some texts that earlier texts, or earlier parts of the same text, predict.

    No run of ``window // 2`` tokens stays uncovered that stands before, within one part that is a source (of the same
    text: a window behind), unless each of its anchors (``window // 4`` tokens) has stood there more than 8 times. Among
    matches through the same anchor the longest is taken, of equal ones the first. Time is linear in the tokens. Memory
    is 5 bytes per new token and 1.5 to 3 more at the default window (6 at 32), besides the result. Hashes are always
    verified, so the result is the same everywhere.

    Parameters
    ----------
    texts : sequence of array_like
        Token ids ``[T]``, the oldest text first.
    groups : sequence of hashable
        One per text: only texts of equal groups match.
    targets : sequence of int
        Ascending indices of the texts to be predicted; the others are sources only.
    own_from : sequence of int
        Per text, the tokens of its exact prefix that an earlier text holds: neither matched nor a source here.
    window : int
        Unit of matching in tokens, 32 to 128: see above for what it finds.
    bridge : int
        Up to so many tokens in a row may differ inside a match; 0 for equal tokens only.
    trigger_tokens, trigger_overlap : int, float
        A target is looked at if it has so many new tokens, or if its prefix is more than this part of it.

    Returns
    -------
    list of list of Match
        One list per target, in order, without overlaps; each match has at least ``window // 2`` tokens, begins and ends
        with equal tokens, and lies within one part of the source that no match covers.

    Raises
    ------
    ValueError
        If an argument is out of its range, or tokens are not int32 ids.
    """
    _check(texts, groups, targets, own_from, window, bridge)
    anchor = window // 4
    rules = rolling.Rules(anchor, window, window // 2, bridge, anchor // 2, _KEEP, _ALL_BITS)
    new = [len(text) - first for text, first in zip(texts, own_from, strict=True)]
    wanted = [i for i in targets if new[i] >= trigger_tokens or own_from[i] > trigger_overlap * len(texts[i])]
    found = _find(texts, groups, wanted, own_from, rules)
    return [found.get(i, []) for i in targets]


def _check(texts: Sequence[Any], groups: Sequence[Hashable], targets: Sequence[int], own_from: Sequence[int],
           window: int, bridge: int) -> None:  # fmt: skip
    if not len(texts) == len(groups) == len(own_from):
        raise ValueError(f"{len(texts)} texts, {len(groups)} groups, {len(own_from)} prefixes")
    if list(targets) != sorted(set(targets) & set(range(len(texts)))):
        raise ValueError("targets are not ascending indices of texts")
    for i, (text, first) in enumerate(zip(texts, own_from, strict=True)):
        if not 0 <= first <= len(text):
            raise ValueError(f"text {i} of {len(text)} tokens cannot have a prefix of {first}")
    if not WINDOWS[0] <= window <= WINDOWS[1]:
        raise ValueError(f"window of {window} tokens is not in {WINDOWS[0]} to {WINDOWS[1]}")
    if bridge < 0:
        raise ValueError(f"a match cannot bridge {bridge} tokens")


def _find(texts: Sequence[Any], groups: Sequence[Hashable], wanted: Sequence[int], own_from: Sequence[int],
          rules: rolling.Rules) -> dict[int, list[Match]]:  # fmt: skip
    ids: dict[Hashable, int] = {}
    group = np.array([ids.setdefault(g, len(ids)) for g in groups], dtype=np.int64)
    first = np.array(own_from, dtype=np.int64)
    sizes = np.array([len(text) for text in texts], dtype=np.int64) - first
    # One position in front and one behind each text are nobody's.
    starts = 1 + np.cumsum(sizes + 1) - (sizes + 1)
    ends = starts + sizes
    total = int(ends[-1]) + 1 if len(texts) else 1
    tokens, free = np.empty(total, dtype=np.int32), np.zeros(total, dtype=np.uint8)
    for i, text in enumerate(texts):
        tokens[starts[i] : ends[i]] = token_array(text)[own_from[i] :]
    slots = 1 << (2 * int((sizes // rules.anchor).sum())).bit_length()
    anchors = rolling.Anchors(np.zeros(slots, dtype=np.uint64), np.zeros(slots, dtype=np.uint32))
    out = np.empty((int(sizes.max(initial=0)) // rules.shortest, 3), dtype=np.int64)
    found: dict[int, list[Match]] = {}
    want = set(wanted)
    for i in range(len(texts)):
        count = rolling.scan(i, i in want, tokens, free, starts, ends, group, anchors, rules, out)
        if count:
            source = np.searchsorted(starts, out[:count, 2], side="right") - 1
            rows = np.stack([out[:count, 0] - starts[i] + first[i], out[:count, 1], source,
                             out[:count, 2] - starts[source] + first[source]], axis=1)  # fmt: skip
            found[i] = [Match(i, *row) for row in rows.tolist()]
    return found
