"""Who judges and encodes the sessions of a generation: the threads of this process, or an engine's workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from pltpack.archive.draft import Draft
from pltpack.archive.encoding import Done, Task, in_order
from pltpack.archive.near import Attempt, Tries
from pltpack.archive.promotion import Candidate
from pltpack.snapshot import Snapshot
from pltpack.trie.matching import Match


class Crew(Tries, Protocol):
    """Does what takes time, in parallel and in order; the bytes are the same whoever does it."""

    def encode(self, tasks: Iterator[Task]) -> Iterator[Done]:
        """Encode groups of jobs; an `pltpack.archive.encoding.Encode`."""
        ...

    def near(self, drafts: Sequence[Draft]) -> Iterator[list[bool]]:
        """Which mapping rows of each draft stay; see `Draft.near`."""
        ...

    def prepare(self, snapshots: Sequence[Snapshot]) -> None:
        """Prepare the codec for whole sessions, where that is not done as they come."""
        ...


class Threads:
    """A `Crew` of threads.

    Parameters
    ----------
    pool : ThreadPoolExecutor
    """

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool

    def encode(self, tasks: Iterator[Task]) -> Iterator[Done]:
        """See `Crew.encode`."""

        def work(task: Task) -> Done:
            writer, group = task
            return writer, None if group is None else writer.encoder.encode(group)

        return in_order(work, tasks, self._pool)

    def near(self, drafts: Sequence[Draft]) -> Iterator[list[bool]]:
        """See `Crew.near`."""
        return (draft.near(self._pool) for draft in drafts)

    def prepare(self, snapshots: Sequence[Snapshot]) -> None:
        """See `Crew.prepare`: a trial or the first job of a session does it."""

    def attempts(self, attempt: Attempt, matches: Sequence[Match], weigh: bool = False) -> Iterator[Candidate]:
        """See `pltpack.archive.near.Tries.attempts`."""
        return in_order(attempt.weigh if weigh else attempt, matches, self._pool)
