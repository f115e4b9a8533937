"""`compact` and `gc`: fewer segments, and no files that no manifest names."""

from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path
from typing import Any

from pltpack.archive.budget import evictions
from pltpack.archive.create import PathLike, open_for_writing, quiet
from pltpack.archive.encoding import Progress
from pltpack.archive.files import next_library, shard_path
from pltpack.archive.merge import Merger
from pltpack.archive.reader import Archive
from pltpack.errors import UnsupportedError
from pltpack.format import durable
from pltpack.format.manifest import LIBRARY_NAME, SHARD_NAME, SHARDS, Manifest

_TEMP = re.compile(re.escape(durable.TEMP_PREFIX) + r"[0-9a-f]{16}")


def compact(
    archive: PathLike, progress: Progress | None = None, *, library_budget: int | None = None
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
    folder = Path(archive)
    tell = progress or quiet
    with open_for_writing(folder) as current:
        leaving = None if library_budget is None else evictions(current, library_budget)
        merger = Merger(current, current.sessions, evicted=leaving.nodes if leaving is not None else frozenset())
        total, done = merger.payload_bytes, 0

        def advance(size: int) -> None:
            nonlocal done
            done += size
            tell("compact", done, total)

        library = merger.write_library(next_library(folder, current.libraries), advance)
        sessions = [
            merger.write_shard(shard, shard_path(folder, shard.entry.session), library, advance)
            for shard in merger.shards
        ]
        manifest = dataclasses.replace(
            current.manifest, generation=current.manifest.generation + 1, libraries=(library,), sessions=tuple(sessions)
        )
        manifest.commit(folder)
        removed = _collect(folder, manifest)
    with Archive(folder) as updated:
        found = {**updated.stats(), "removed": removed}
    return found if leaving is None else {**found, "eviction": leaving.report}


def gc(archive: PathLike) -> list[str]:
    """Remove library segments, shards and temporary files that the manifest does not name.

    Returns
    -------
    list of str
        Names of the removed files, relative to the archive.
    """
    folder = Path(archive)
    with open_for_writing(folder) as current:
        return _collect(folder, current.manifest)


def _collect(folder: Path, manifest: Manifest) -> list[str]:
    named = {entry.file for entry in (*manifest.libraries, *manifest.sessions)}
    removed = []
    for path in sorted([*folder.iterdir(), *(folder / SHARDS).iterdir()]):
        name = path.relative_to(folder).as_posix()
        if _TEMP.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
            removed.append(name)
            continue
        ours = LIBRARY_NAME.fullmatch(name) or SHARD_NAME.fullmatch(name) or _TEMP.fullmatch(path.name)
        if ours and name not in named and path.is_file() and not path.is_symlink():
            path.unlink()
            removed.append(name)
    durable.sync_folder(folder / SHARDS)
    durable.sync_folder(folder)
    return removed
