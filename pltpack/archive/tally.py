"""What a write has come to so far, told to those who watch it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import numpy as np

from pltpack.archive.sharing import Role

if TYPE_CHECKING:
    from pltpack.archive.encoding import Progress
    from pltpack.archive.sharing import Sharing
    from pltpack.format.container import ContainerInfo
    from pltpack.snapshot import Snapshot


class Written(NamedTuple):
    """What is on disk, not yet committed.

    Attributes
    ----------
    sessions, of : int
        Sessions whose shard is written, and all that will be.
    raw_bytes, stored_bytes : int
        Of those sessions; the new library segment is counted as stored, as soon as the first session is.
    tokens, shared_tokens : int
        Of all sessions; those whose values come from the library, for others to use, too. Known before the
        first shard is written.
    """

    sessions: int
    of: int
    raw_bytes: int
    stored_bytes: int
    tokens: int
    shared_tokens: int


@runtime_checkable
class Watcher(Protocol):
    """A progress callable that also wants to know what was written."""

    def written(self, found: Written) -> None:
        """Told whenever a session is on disk."""
        ...


class Tally:
    """Counts shards as they are written.

    Parameters
    ----------
    progress : callable
        Told if it is a `Watcher`.
    snapshots : sequence of Snapshot
        In the order of their shards.
    sharing : Sharing
    library_bytes : int
        Of the new library segment.
    """

    def __init__(
        self, progress: Progress, snapshots: Sequence[Snapshot], sharing: Sharing, library_bytes: int
    ) -> None:  # fmt: skip
        self._watcher = progress if isinstance(progress, Watcher) else None
        self._snapshots = snapshots
        self._sessions = self._raw = 0
        self._stored = library_bytes
        self._tokens = sum(map(len, snapshots))
        self._shared = _shared(sharing)

    def tell(self, infos: Sequence[Future[ContainerInfo]]) -> None:
        """Tell of the shards that are written by now, if they are more than before or none was yet."""
        if self._watcher is None:
            return
        before = self._sessions
        while self._sessions < len(infos) and infos[self._sessions].done():
            self._stored += infos[self._sessions].result().size
            self._raw += self._snapshots[self._sessions].raw_bytes
            self._sessions += 1
        if self._sessions > before or not before:
            self._watcher.written(Written(self._sessions, len(self._snapshots), self._raw, self._stored, self._tokens,
                                          self._shared))  # fmt: skip


def _shared(sharing: Sharing) -> int:
    """Tokens that rows take from the library, those of new nodes left out that one row only uses."""
    uses: dict[int, np.ndarray] = {}
    total = 0
    for run in (run for runs in sharing.runs for run in runs):
        total += run.length if run.role is not Role.NEAR else 0
        if run.library is None:
            node = sharing.nodes[run.node]
            used = uses.setdefault(run.node, np.zeros(node.stop - node.position, np.uint32))
            used[run.node_start : run.node_start + run.length] += 1
    return total - sum(int((used == 1).sum()) for used in uses.values())
