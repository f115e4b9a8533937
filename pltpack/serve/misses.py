"""Loads that came to nothing: one reason each, logged once and counted. A miss is never the engine's crash."""

from __future__ import annotations

import collections
import logging
import threading
from collections.abc import Sequence

from pltpack.errors import FormatError, IdentityError, NotFoundError, PltpackError
from pltpack.format.container import GoneError

log = logging.getLogger("pltpack.serve")

#: Reasons that would come again with the next load, so that a session is not offered any more.
LASTING = frozenset({"bad unit", "bad shard", "missing file", "missing profile"})


class MissError(PltpackError):
    """A load that came to nothing; the caller computes the cache itself.

    Attributes
    ----------
    session : str
        What was being loaded.
    reason : str
        ``bad unit``, ``bad shard``, ``missing file``, ``missing profile``, ``stale`` (the archive has changed since the
        look-up), ``identity``, ``read error``, ``out of memory``, ``timeout``, ``cancelled``,
        ``recompute`` (a model makes the session again, nothing is stored to load) or ``error``.
    blocks : tuple of int
        Blocks of the paged destination that hold a part of the load and are not valid; others were not touched.
    """

    def __init__(self, session: str, reason: str, fact: str, blocks: Sequence[int] = ()) -> None:
        super().__init__(f"session {session!r} is a miss ({reason}): {fact}")
        self.session, self.reason, self.blocks = session, reason, tuple(blocks)


class Cancelled(Exception):  # noqa: N818 - says that something ended, not that it went wrong
    """A load was cancelled."""


class TimedOut(Exception):  # noqa: N818
    """A load took longer than it was given."""


def reason_of(error: BaseException) -> str:
    """The reason, in words that are counted, of what ended a load."""
    kinds: list[tuple[type[BaseException], str]] = [
        (Cancelled, "cancelled"), (TimedOut, "timeout"), (GoneError, "missing file"), (FormatError, "bad unit"),
        (NotFoundError, "missing profile"), (IdentityError, "identity"), (MemoryError, "out of memory"),
        (OSError, "read error"),
    ]  # fmt: skip
    return next((reason for kind, reason in kinds if isinstance(error, kind)), "error")


class Misses:
    """Counts misses by reason, and logs each once."""

    def __init__(self) -> None:
        self._counts: collections.Counter[str] = collections.Counter()
        self._lock = threading.RLock()

    def add(self, session: str, reason: str, error: BaseException, blocks: Sequence[int] = ()) -> MissError:
        """Count and log one miss; gives the error that says so."""
        fact = str(error) or type(error).__name__
        miss = MissError(session, reason, fact, blocks)
        miss.__cause__ = error
        with self._lock:
            self._counts[reason] += 1
        # Nobody expects an error that is not one of ours, so it is shown where it came from.
        log.warning("%s", miss, exc_info=error if reason == "error" else None)
        return miss

    def counts(self) -> dict[str, int]:
        """Misses so far by reason."""
        with self._lock:
            return dict(self._counts)
