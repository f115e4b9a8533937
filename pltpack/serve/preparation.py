"""What a process makes before its first request, so that no request waits for it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from pltpack.archive.shard import Shard
from pltpack.archive.threads import together
from pltpack.serve.misses import MissError

if TYPE_CHECKING:
    from pltpack.archive.library import Library
    from pltpack.serve.loader import Loader
    from pltpack.serve.prefixes import PrefixIndex


#: Tokens that are loaded to make ready, at most.
MOST = 512

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
    # Compiled loops are loaded, and memory is got, at the first load: of a session of each kind.
    for tokens in {tuple(shard.states): shard.tokens for shard in reversed(shards)}.values():
        hit = index.lookup(tokens)
        with contextlib.suppress(MissError):
            if hit:
                loader.load(hit.first(MOST))
