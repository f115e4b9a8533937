"""What a process makes before its first request, so that no request waits for it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from pltpack.archive.shard import Shard
from pltpack.archive.threads import together
from pltpack.serve.misses import MissError

if TYPE_CHECKING:
    from pltpack.archive.library import Library
    from pltpack.serve.loader import Loader
    from pltpack.serve.prefixes import PrefixIndex


#: Tokens that are loaded to make ready: of a session's beginning, and at most, to come to a unit of a rare kind.
MOST, FARTHEST = 512, 4096

#: Makes some calls, in any order and on any threads.
Run = Callable[[list[Callable[[], object]]], object]


def prepare_codecs(libraries: Iterable[Library], shards: Iterable[Shard], run: Run) -> None:
    """Start the codecs of all units, and have made what each makes when it first decodes.

    Parameters
    ----------
    libraries : iterable of Library
    shards : iterable of Shard
    run : callable

    Raises
    ------
    FormatError
        If a codec's state is damaged.
    NotFoundError
        If a profile is not found.
    """
    codecs = [library.codec(int(state)) for library in libraries for state in set(library.units["state"])]
    for shard in shards:
        for state in set(shard.units["state"]):
            library, own = shard.states[state]
            codecs.append(shard.libraries[library].codec(own))
    run([call for codec in {id(codec): codec for codec in codecs}.values() for call in codec.preparations()])


def prepare_loader(loader: Loader, index: PrefixIndex, on_host: bool) -> None:
    """Make ready for a loader's first hit; errors as of `prepare_codecs`."""
    shards, archive = list(index.sources.values()), loader.archive

    def run(calls: list[Callable[[], object]]) -> None:
        if on_host:
            together(lambda call: call(), calls, archive.pool, (os.cpu_count() or 1) - 1)

    prepare_codecs(archive.libraries, shards, run)
    # Compiled loops are loaded, and memory is got, at the first load: of units of each kind.
    for name, stop in _samples(index.sources).items():
        hit = index.lookup(index.sources[name].tokens)
        with contextlib.suppress(MissError):
            if hit:
                loader.load(hit.first(stop))


def _samples(sources: Mapping[str, Shard]) -> dict[str, int]:
    """Sessions, and how many of their first tokens, that hold units of every kind: the shortest for each."""
    least: dict[tuple[object, ...], tuple[int, str]] = {}
    for name, shard in sources.items():
        for kind, stop in _kinds(shard):
            least[kind] = min(least.get(kind, (FARTHEST + 1, "")), (stop, name))
    stops: dict[str, int] = {}
    for stop, session in least.values():
        if stop <= FARTHEST:
            stops[session] = max(stops.get(session, 0), stop)
    return stops


def _kinds(shard: Shard) -> Iterator[tuple[tuple[object, ...], int]]:
    """What decodes a session's tokens by other code than other tokens, and the tokens to load to come by each."""
    length = shard.entry.tokens
    yield ("states", *shard.states), min(MOST, length)
    ends = shard.units["token_start"].astype(int) + shard.units["token_count"]
    for state, flags in {(int(row["state"]), int(row["flags"])) for row in shard.units[["state", "flags"]]}:
        chosen = (shard.units["state"] == state) & (shard.units["flags"] == flags)
        yield ("unit", shard.states[state], flags), int(ends[chosen].min())
    for row in shard.predicted_runs[:1]:
        yield ("predicted",), int(row["session_start"]) + int(row["length"])
