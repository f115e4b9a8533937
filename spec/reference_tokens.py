"""Token texts and the range coder, for the reference decoder (spec/codecs.md, "recompute").

Imports numpy and the standard library only.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from reference_numbers import need

ORDER = 3
STREAM_TOKENS = 1 << 16


class RangeDecoder:
    """Section "Range coder"."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 8
        self.value, self.range = int.from_bytes(data[:8].ljust(8, b"\0"), "big"), (1 << 64) - 1

    def slot(self, total: int) -> int:
        """A number of the next symbol's range, below `total`."""
        return min(self.value // (self.range // total), total - 1)

    def take(self, start: int, frequency: int, total: int) -> None:
        """Take the symbol off."""
        step = self.range // total
        self.value, self.range = self.value - step * start, step * frequency
        while self.range < 1 << 48:
            byte = self.data[self.at] if self.at < len(self.data) else 0
            self.value, self.range, self.at = self.value << 8 | byte, self.range << 8, self.at + 1


def decode_texts(data: bytes, lengths: list[int]) -> list[list[int]]:
    """One stream of section "Token texts"."""
    coder = RangeDecoder(data)
    matches, classes = [[1, 1] for _ in range(16)], [1] * 32
    #: Per context, a tuple of up to three tokens: counts of what was seen after it, the latest new one first.
    seen: dict[tuple[int, ...], dict[int, int]] = {}
    last: dict[tuple[int, ...], int] = {}
    counts: dict[int, int] = {}
    history: list[int] = []
    out = []
    for length in lengths:
        text: list[int] = []
        match, right = -1, 0
        for _ in range(length):
            contexts = [tuple(text[len(text) - k :]) for k in range(1, ORDER + 1) if k <= len(text)]
            known = [context for context in contexts if context in seen]
            if match < 0 and len(known) == ORDER:
                match, right = last[known[-1]], 0
            token, source, excluded = -1, 0, set()
            if match >= 0:
                if take_bit(coder, matches[min(right, 15)]):
                    token, source, match, right = history[match], ORDER, match + 1, right + 1
                else:
                    excluded.add(history[match])
                    match = -1
            for order in range(len(known), 0, -1):
                if token >= 0:
                    break
                token = take_listed(coder, seen[known[order - 1]], excluded)
                source = order if token >= 0 else 0
                excluded |= set(seen[known[order - 1]])
            if token < 0:
                token = take_any(coder, counts)
            if token < 0:
                token = take_new(coder, classes)
                need(token < 1 << 31 and token not in counts, "coded tokens are damaged")
                counts[token] = 0
            if source == 0:
                counts[token] += 1
            for order, context in enumerate(contexts, 1):
                after = seen.setdefault(context, {})
                if order == ORDER:
                    last[context] = len(history)
                if order >= source:
                    after[token] = after.get(token, 0) + 1
            history.append(token)
            text.append(token)
        out.append(text)
    return out


def take_bit(coder: RangeDecoder, counts: list[int]) -> bool:
    """One decision."""
    total = sum(counts)
    yes = coder.slot(total) >= counts[0]
    coder.take(counts[0] if yes else 0, counts[yes], total)
    counts[yes] += 2
    if total >= 1 << 12:
        counts[:] = [(count + 1) >> 1 for count in counts]
    return yes


def take_listed(coder: RangeDecoder, after: dict[int, int], excluded: set[int]) -> int:
    """A token that was seen after a context, or -1 for none of them."""
    left = [(token, 2 * count - 1) for token, count in reversed(after.items()) if token not in excluded]
    if not left:
        return -1
    total = sum(weight for _, weight in left)
    wanted, start = coder.slot(total + len(left)), 0
    for token, weight in left:
        if wanted < start + weight:
            coder.take(start, weight, total + len(left))
            return token
        start += weight
    coder.take(total, len(left), total + len(left))
    return -1


def take_any(coder: RangeDecoder, counts: dict[int, int]) -> int:
    """A token that was seen anywhere, or -1 for a new one."""
    weights = [(token, max(2 * count - 1, 0)) for token, count in counts.items()]
    total = sum(weight for _, weight in weights)
    wanted, start, whole = coder.slot(total + len(counts) + 1), 0, total + len(counts) + 1
    for token, weight in weights:
        if wanted < start + weight:
            coder.take(start, weight, whole)
            return token
        start += weight
    coder.take(total, len(counts) + 1, whole)
    return -1


def take_new(coder: RangeDecoder, classes: list[int]) -> int:
    """A token that was not seen before."""
    total, kind, start = sum(classes), 0, 0
    wanted = coder.slot(total)
    while wanted >= start + classes[kind]:
        start += classes[kind]
        kind += 1
    coder.take(start, classes[kind], total)
    low = coder.slot(1 << kind)
    coder.take(low, 1, 1 << kind)
    classes[kind] += 16
    if total >= 1 << 12:
        classes[:] = [(count + 1) >> 1 for count in classes]
    return (1 << kind) + low - 1


class Recompute:
    """The codec ``recompute``: the tokens of sessions, and no units."""

    def __init__(self, config: dict[str, Any], state: dict[str, np.ndarray], identity: dict[str, Any]) -> None:
        need(not config, "the codec recompute takes no configuration")
        good = set(state) == {"streams", "bytes", "texts", "tokens"} and all(a.ndim == 1 for a in state.values())
        good = good and state["streams"].dtype == np.uint8
        good = good and all(state[name].dtype == np.dtype("<u4") for name in ("bytes", "texts", "tokens"))
        need(good, "recompute state is malformed")
        sizes, texts, self.tokens = ([int(x) for x in state[name]] for name in ("bytes", "texts", "tokens"))
        good = len(sizes) == len(texts) and sum(sizes) == len(state["streams"]) and sum(texts) == len(self.tokens)
        need(good, "recompute state is malformed")
        self.texts: list[list[int]] = []
        at = first = 0
        for size, count in zip(sizes, texts, strict=True):
            lengths = self.tokens[first : first + count]
            need(sum(lengths) <= STREAM_TOKENS, "a stream holds too many tokens")
            self.texts += decode_texts(state["streams"][at : at + size].tobytes(), lengths)
            at, first = at + size, first + count

    def session(self, text: int, tokens: int) -> np.ndarray:
        """The tokens of a session that begins with a text."""
        found: list[int] = []
        while len(found) < tokens:
            need(text < len(self.texts) and len(self.texts[text]) > 0, "a session's texts are not there")
            found += self.texts[text]
            text += 1
        need(len(found) == tokens, "a session's texts have another number of tokens")
        return np.array(found, np.int32)

    def decode(self, payload: bytes, unit: Any, reference: Any) -> Any:
        """There are no units."""
        need(False, "the codec recompute has no units")
