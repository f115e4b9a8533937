"""What takes the place of a barred session: a better stored copy, raw caches from another archive, or nothing."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pltpack.archive.figures import is_exact, quality_of
from pltpack.archive.shard import Shard
from pltpack.errors import PltpackError
from pltpack.serve.guard import LoadGuard
from pltpack.serve.prefixes import Hit, PrefixIndex

if TYPE_CHECKING:
    from pltpack.serve.loader import Loader

BETTER, RAW, RECOMPUTE = "better copy", "raw", "recompute"


class Fallbacks:
    """Finds them.

    Parameters
    ----------
    guard : LoadGuard
    raw : Loader or None
        Of an archive that holds raw or lossless caches of the same sessions.
    """

    def __init__(self, guard: LoadGuard, raw: Loader | None) -> None:
        self.guard, self.raw = guard, raw
        self._lock = threading.Lock()
        self._rest: tuple[PrefixIndex, frozenset[str], PrefixIndex] | None = None

    def instead(self, index: PrefixIndex, hit: Hit, tokens: Any) -> tuple[Hit, str]:
        """The hit to use instead of one of a barred session, and what it is; an empty one to compute anew."""
        other = self._without_barred(index).lookup(tokens)
        if other and is_better(index.sources[other.session], index.sources[hit.session], other.tokens):
            return other, BETTER
        if self.raw is not None:
            found = self.raw.lookup(tokens)
            if found:
                return dataclasses.replace(found, source=RAW), RAW
        return Hit("", 0, hit.block, hit.generation), RECOMPUTE

    def kind(self, index: Callable[[], PrefixIndex], session: str) -> str:
        """What takes the place of a session for a prompt that is all of it."""
        found = index()
        if session not in found.sources:
            return RECOMPUTE
        tokens = found.sources[session].tokens
        return self.instead(found, Hit(session, len(tokens), found.block, found.generation), tokens)[1]

    def _without_barred(self, index: PrefixIndex) -> PrefixIndex:
        barred = self.guard.all_barred() & index.sources.keys()
        with self._lock:
            if self._rest is None or self._rest[0] is not index or self._rest[1] != barred:
                self._rest = index, barred, index.without(*barred)
            return self._rest[2]


def is_better(other: Shard, barred: Shard, tokens: int) -> bool:
    """Whether another session's first `tokens` tokens are known to be kept better than those of a barred one.

    They are if they are kept bit by bit, or if their quality was measured as better and none of the library's nodes
    serves both: what is shared is equally bad.
    """
    try:
        if is_exact(other):
            return True
        mine, theirs = quality_of(barred), quality_of(other)
    except PltpackError:
        return False
    if mine is None or theirs is None or theirs.kl >= mine.kl:
        return False
    return not nodes(other, tokens) & nodes(barred, tokens)


def nodes(shard: Shard, tokens: int) -> set[tuple[str, int]]:
    """Library nodes that hold some of a session's first tokens."""
    rows = shard.exact_runs[shard.exact_runs["session_start"] < tokens]
    return {(shard.libraries[row["library"]].entry.head_sha256, int(row["node"])) for row in rows}
