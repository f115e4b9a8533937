"""Turn a sharing plan into library nodes and mapping rows, using what the archive's library already holds."""

from __future__ import annotations

import bisect
import dataclasses
import enum
from collections.abc import Callable, Sequence

import numpy as np

from pltpack.archive.encoding import Promise
from pltpack.archive.library import Library
from pltpack.archive.reader import Archive
from pltpack.archive.shard import Shard
from pltpack.format import tables
from pltpack.snapshot import Snapshot
from pltpack.trie.plan import Plan, plan


class Role(enum.Enum):
    """What a mapping row is for."""

    #: The node has the tokens' values: an exact prefix.
    PREFIX = enum.auto()
    #: The same, and the values are the session's own: others are predicted from them.
    SOURCE = enum.auto()
    #: The session has units of its own, coded relative to the node's values.
    NEAR = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """A mapping row before libraries are numbered; `library` None is the segment being written.

    `shift` is what a token's position in the session is more than in the node, and `promise` what a trial found of the
    prediction.
    """

    session_start: int
    length: int
    library: Library | None
    node: int
    node_start: int
    shift: int = 0
    role: Role = Role.PREFIX
    promise: Promise | None = None

    @property
    def stop(self) -> int:
        """The session token after the last."""
        return self.session_start + self.length


@dataclasses.dataclass(slots=True)
class NewNode:
    """A library node to be written.

    Attributes
    ----------
    owner : Snapshot
        Where its values come from.
    position, stop : int
        Its tokens in every session that shares it.
    visits : int
        Sessions that share it now.
    parent : Run or None
        What holds the tokens before it.
    boundary : int
        Tokens from its end to the next place where a session may be cut and continued.
    """

    owner: Snapshot
    position: int
    stop: int
    visits: int
    parent: Run | None
    boundary: int = 0


@dataclasses.dataclass(slots=True)
class Sharing:
    """New library nodes, parents first, and the mapping rows of each new session in the order of its tokens."""

    nodes: list[NewNode]
    runs: list[list[Run]]


def share(
    archive: Archive | None, snapshots: Sequence[Snapshot], block: int, usable: Callable[[Library, int], bool]
) -> Sharing:
    """Plan what the new sessions share with each other and with the archive's.

    Parameters
    ----------
    archive : Archive or None
        The archive to append to.
    snapshots : sequence of Snapshot
        The new sessions.
    block : int
        Tokens per block.
    usable : callable
        Whether the new sessions may map to a node ``(library, node)``: the codec must keep their promise.
    """
    existing = [archive.shard(name) for name in archive.sessions] if archive is not None else []
    tokens = [shard.tokens for shard in existing] + [snapshot.tokens for snapshot in snapshots]
    groups = [shard.entry.salt for shard in existing] + [snapshot.identity.salt for snapshot in snapshots]
    whole = plan(tokens, groups, block)
    first_new = len(existing)
    held: dict[int, list[Run]] = {}
    for session in range(first_new):
        mapped = exact_rows(existing[session])
        for node in whole.paths[session]:
            start, stop = whole.nodes[node].start, whole.nodes[node].stop
            if sum(r.length for r in held.get(node, [])) == stop - start:
                continue
            rows = _contiguous(clip(mapped, start, stop), start)
            rows = _while(rows, usable)
            if sum(r.length for r in rows) > sum(r.length for r in held.get(node, [])):
                held[node] = rows
    wanted: dict[int, int] = {}
    for session in range(first_new, len(tokens)):
        for node in whole.paths[session]:
            wanted.setdefault(node, session - first_new)
    return _resolve(whole, held, wanted, snapshots, first_new)


def exact_rows(shard: Shard) -> list[Run]:
    """Mapping rows that give a session's own values: those of other sessions, where it predicts from them, will not do.

    A row that predicts from the same tokens at the same position looks like any other, but the shard holds its tokens.
    """
    first, last = shard.layer_bounds[0]
    stored = [(int(unit["token_start"]), int(unit["token_start"]) + int(unit["token_count"]))
              for unit in shard.units[first:last] if not shard.codec_of(unit).exact]  # fmt: skip
    starts = [start for start, _ in stored]
    out = []
    for row in shard.exact_runs:
        at, length = int(row["session_start"]), int(row["length"])
        before = bisect.bisect_right(starts, at)
        if not before or stored[before - 1][1] <= at:
            library = shard.libraries[row["library"]]
            out.append(Run(at, length, library, int(row["node"]), int(row["node_start"])))
    return out


def prefix_end(runs: Sequence[Run]) -> int:
    """Tokens of a session's exact prefix."""
    return max((run.stop for run in runs if run.role is Role.PREFIX), default=0)


def _resolve(
    whole: Plan, held: dict[int, list[Run]], wanted: dict[int, int], snapshots: Sequence[Snapshot], first_new: int
) -> Sharing:
    nodes: list[NewNode] = []
    rows: dict[int, list[Run]] = {}
    for index in sorted(wanted):
        node = whole.nodes[index]
        mine = list(held.get(index, []))
        start = mine[-1].session_start + mine[-1].length if mine else node.start
        if start < node.stop:
            before = mine or rows.get(node.parent, [])
            parent = before[-1] if before else None
            nodes.append(NewNode(snapshots[wanted[index]], start, node.stop, node.visits, parent))
            mine.append(Run(start, node.stop - start, None, len(nodes) - 1, 0))
        rows[index] = mine
    runs = [
        [row for index in whole.paths[first_new + session] for row in rows[index]] for session in range(len(snapshots))
    ]
    return Sharing(nodes, runs)


def clip(rows: Sequence[Run], start: int, stop: int) -> list[Run]:
    """The parts of rows that hold tokens ``[start, stop)``."""
    out = []
    for row in rows:
        low, high = max(row.session_start, start), min(row.session_start + row.length, stop)
        if low < high:
            out.append(Run(low, high - low, row.library, row.node, row.node_start + low - row.session_start))
    return out


def _contiguous(rows: list[Run], start: int) -> list[Run]:
    out: list[Run] = []
    for row in rows:
        if row.session_start != start:
            break
        out.append(row)
        start += row.length
    return out


def _while(rows: list[Run], usable: Callable[[Library, int], bool]) -> list[Run]:
    out = []
    for row in rows:
        if row.library is None or not usable(row.library, row.node):
            break
        out.append(row)
    return out


def run_records(runs: Sequence[Run], libraries: Sequence[Library]) -> np.ndarray:
    """Mapping rows as records; `libraries` numbers the segments."""
    number = {id(library): index for index, library in enumerate(libraries)}
    return np.array(
        [(r.session_start, r.length, number[id(r.library)], r.node, r.node_start, r.shift) for r in runs], tables.RUN
    )
