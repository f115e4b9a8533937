"""Checks of the parts of a session that callers ask for."""

from __future__ import annotations

import numbers

from pltpack.errors import UnsupportedError


def check_layers(layers: range | None, count: int, origin: str | None = None) -> range:
    """A checked layer range (`None` is all)."""
    if layers is None:
        return range(count)
    if not isinstance(layers, range):
        raise UnsupportedError(f"layers must be a range, not {layers!r}", origin)
    if layers.step != 1 or not 0 <= layers.start < layers.stop <= count:
        raise UnsupportedError(f"layers {layers.start}:{layers.stop} are not a range within 0:{count}", origin)
    return layers


def check_tokens(tokens: slice | None, count: int, origin: str | None = None) -> tuple[int, int]:
    """A checked token range (`None` is all)."""
    if tokens is None:
        return 0, count
    ends = [tokens.start, tokens.stop, tokens.step] if isinstance(tokens, slice | range) else [tokens]
    if not all(end is None or isinstance(end, numbers.Integral) for end in ends) or len(ends) == 1:
        raise UnsupportedError(f"tokens must be a slice of whole numbers, not {tokens!r}", origin)
    start = 0 if tokens.start is None else tokens.start
    stop = count if tokens.stop is None else tokens.stop
    if tokens.step not in (None, 1) or not 0 <= start <= stop <= count or (start == stop and count):
        raise UnsupportedError(f"tokens {start}:{stop} are not a range within 0:{count}", origin)
    return start, stop
