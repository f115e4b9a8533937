"""Equal prefixes beyond the last whole block: too few tokens for the trie's plan, but the dearest of a session.

The first tokens of a session are attention sinks, which every codec stores at many times the size of others; sessions
that part within their first block share them here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pltpack.archive.reader import Archive
from pltpack.archive.sharing import Run, Sharing, clip, exact_rows, prefix_end
from pltpack.archive.trial import Text
from pltpack.snapshot import Snapshot
from pltpack.trie.matching import Match
from pltpack.trie.radix import RadixTrie


def find_tails(
    archive: Archive | None, sharing: Sharing, snapshots: Sequence[Snapshot], texts: Sequence[Text]
) -> list[Match]:
    """What sessions share with earlier ones right behind their exact prefixes, at the same positions.

    Parameters
    ----------
    archive : Archive or None
        The present generation.
    sharing : Sharing
        Exact prefixes of the new sessions.
    snapshots : sequence of Snapshot
        The new sessions.
    texts : sequence of Text
        The last ones are the new sessions.
    """
    first = len(texts) - len(snapshots)
    nodes = {(id(text.library) if text.library is not None else None, text.node): index
             for index, text in enumerate(texts[:first])}  # fmt: skip
    shards = [archive.shard(name) for name in archive.sessions] if archive is not None else []
    rows = [exact_rows(shard) for shard in shards] + sharing.runs
    tries: dict[str | None, RadixTrie] = {}
    for index, shard in enumerate(shards):
        tries.setdefault(shard.entry.salt, RadixTrie()).insert(shard.tokens, index)
    found = []
    for index, snapshot in enumerate(snapshots):
        trie = tries.setdefault(snapshot.identity.salt, RadixTrie())
        start, session = prefix_end(sharing.runs[index]), first + index
        for owner, low, high in _shared(trie, snapshot, start):
            for at, stop, run in _pieces(rows[owner], low, high):
                if run is not None:
                    source = nodes[id(run.library) if run.library is not None else None, run.node]
                    found.append(Match(session, at, stop - at, source, run.node_start))
                elif owner >= len(shards):
                    found.append(Match(session, at, stop - at, first + owner - len(shards), at))
        trie.insert(snapshot.tokens, len(shards) + index)
    return found


def fitting(tails: Sequence[Match], matches: Sequence[Match]) -> list[Match]:
    """Tails without what matches cover, be it of the session or of its source: that is not stored exactly.

    What a session holds for matches moves to the library from there, and cannot come from another session, too.
    """
    taken: dict[int, list[tuple[int, int]]] = {}
    serving: dict[int, list[tuple[int, int]]] = {}
    for match in matches:
        taken.setdefault(match.session, []).append((match.start, match.start + match.length))
        serving.setdefault(match.source, []).append((match.source_start, match.source_start + match.length))
    out = []
    for tail in tails:
        own = [*taken.get(tail.session, ()), *serving.get(tail.session, ())]
        length = tail.length
        for start, ranges in ((tail.start, own), (tail.source_start, taken.get(tail.source, ()))):
            for low, high in ranges:
                if low < start + length and start < high:
                    length = max(low - start, 0)
        if length:
            out.append(tail._replace(length=length))
    return out


def _shared(trie: RadixTrie, snapshot: Snapshot, start: int) -> list[tuple[int, int, int]]:
    """(session, start, stop) of what earlier sessions brought of a session's tokens from `start` on."""
    matched, node = trie.lookup(snapshot.tokens)
    out = []
    for step in trie.path(node):
        low = int(trie.depth[step])
        high = min(low + int(trie.length[step]), matched)
        if high > start:
            out.append((int(trie.owner[step]), max(low, start), high))
    return out


def _pieces(rows: Sequence[Run], low: int, high: int) -> Iterator[tuple[int, int, Run | None]]:
    """Tokens ``[low, high)`` of a session, cut where its rows begin and end, with the rows that hold them."""
    for run in clip(rows, low, high):
        if low < run.session_start:
            yield low, run.session_start, None
        yield run.session_start, run.stop, run
        low = run.stop
    if low < high:
        yield low, high, None
