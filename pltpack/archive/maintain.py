"""`compact` and `gc`: fewer segments, and no files that no manifest names."""

from __future__ import annotations

import dataclasses
from typing import Any

from pltpack.archive.budget import evictions
from pltpack.archive.create import PathLike, open_for_writing, quiet
from pltpack.archive.encoding import Progress
from pltpack.archive.files import next_library, shard_path, shown
from pltpack.archive.merge import Merger
from pltpack.archive.reader import Archive
from pltpack.errors import UnsupportedError
from pltpack.store import Store, open_store


def compact(
    archive: PathLike | Store, progress: Progress | None = None, *, library_budget: int | None = None
) -> dict[str, Any]:
    """Merge all library segments into one, drop what no session uses, then collect garbage.

    Units are copied as they are. Readers that have the archive open keep their generation's open files.

    Parameters
    ----------
    archive : path-like
    progress : callable, optional
    library_budget : int, optional
        Bytes up to which units stay in the library: those of the nodes that share least go to the shards that use
        them, but for what sessions are predicted from.

    Returns
    -------
    dict
        The new statistics, and ``removed``: the files that were deleted; with a budget ``eviction``, see
        `pltpack.archive.budget.Evictions`.
    """
    if library_budget is not None and library_budget < 0:
        raise UnsupportedError(f"a library of {library_budget} bytes")
    store = open_store(archive)
    tell = progress or quiet
    with open_for_writing(store) as (current, writing):
        leaving = None if library_budget is None else evictions(current, library_budget)
        merger = Merger(current, current.sessions, spare=True,
                        evicted=leaving.nodes if leaving is not None else frozenset())  # fmt: skip
        total, done = merger.payload_bytes, 0

        def advance(size: int) -> None:
            nonlocal done
            done += size
            tell("compact", done, total)

        library = merger.write_library(next_library(writing.folder, current.libraries), advance)
        sessions = [
            merger.write_shard(shard, shard_path(writing.folder, shown(current.manifest, name)), library, advance)
            for name, shard in zip(current.sessions, merger.shards, strict=True)
        ]
        manifest = dataclasses.replace(
            current.manifest, generation=current.manifest.generation + 1, libraries=(library,), sessions=tuple(sessions)
        )
        writing.commit(manifest)
        removed = writing.collect(manifest)
    with Archive(store) as updated:
        found = {**updated.stats(), "removed": removed}
    return found if leaving is None else {**found, "eviction": leaving.report}


def gc(archive: PathLike | Store) -> list[str]:
    """Remove library segments, shards and temporary files that the manifest does not name.

    Returns
    -------
    list of str
        Names of the removed files, relative to the archive.
    """
    with open_for_writing(archive) as (current, writing):
        return writing.collect(current.manifest)
