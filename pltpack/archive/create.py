"""`compress` and `append`: dumps in, one new generation out."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pltpack.archive.encoding import Progress
from pltpack.archive.reader import Archive
from pltpack.archive.writer import GenerationWriter, Settings
from pltpack.dumps import open_dumps
from pltpack.errors import ConflictError, DumpError
from pltpack.format import durable
from pltpack.format.manifest import NAME, SHARDS
from pltpack.snapshot import Snapshot

#: Tier without a profile.
DEFAULT_QUALITY = "q4"

PathLike = str | os.PathLike[str]


def quiet(stage: str, done: int, total: int) -> None:
    """The progress callback that tells nobody."""


def compress(
    dumps: Sequence[PathLike | Snapshot],
    out: PathLike,
    *,
    quality: str | None = None,
    dedup: bool = True,
    block: int = 32,
    format: str | None = None,
    tokens: PathLike | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Compress dumps into a new archive, which appears whole or not at all.

    Parameters
    ----------
    dumps : sequence of path-like or Snapshot
        Files, folders of files, or snapshots in memory.
    out : path-like
        Archive folder to make; must not exist, or be an empty folder.
    quality : str, optional
        Tier, ``q4`` by default; see `pltpack.codec.registry.TIERS`.
    dedup : bool
        Store shared prefixes once.
    block : int
        Tokens per block.
    format : str, optional
        Dump format, instead of sniffing it.
    tokens : path-like, optional
        JSON file of token ids for dumps that hold none.
    progress : callable, optional
        ``progress(stage, done, total)`` in raw bytes.

    Returns
    -------
    dict
        See `pltpack.archive.stats.archive_stats`.

    Raises
    ------
    DumpError, UnsupportedError, IdentityError, NotFoundError
        If a dump cannot be taken.
    ConflictError
        If `out` exists.
    """
    settings = Settings(quality or DEFAULT_QUALITY, dedup, block)
    settings.check()
    target = Path(out)
    snapshots = _snapshots(dumps, format, tokens)
    with new_archive(target) as folder:
        GenerationWriter(folder, None, settings, progress or quiet).add(snapshots)
    with Archive(target) as archive:
        return archive.stats()


def append(
    archive: PathLike,
    dumps: Sequence[PathLike | Snapshot],
    *,
    quality: str | None = None,
    dedup: bool | None = None,
    format: str | None = None,
    tokens: PathLike | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Add sessions to an archive as a new generation; the old one stays readable until the new one is committed.

    Parameters are those of `compress`; `quality` and `dedup` default to the archive's own.

    Raises
    ------
    ConflictError
        If a session of the same name is in the archive, or another writer is at work.
    """
    folder = Path(archive)
    with open_for_writing(folder) as current:
        manifest = current.manifest
        settings = Settings(quality or manifest.quality, manifest.dedup if dedup is None else dedup, manifest.block)
        GenerationWriter(folder, current, settings, progress or quiet).add(_snapshots(dumps, format, tokens))
    with Archive(folder) as updated:
        return updated.stats()


def _snapshots(dumps: Sequence[PathLike | Snapshot], format: str | None, tokens: PathLike | None) -> list[Snapshot]:
    paths = [dump for dump in dumps if not isinstance(dump, Snapshot)]
    given = [dump for dump in dumps if isinstance(dump, Snapshot)]
    found = [*given, *(open_dumps(paths, format=format, tokens=tokens) if paths else ())]
    if not found:
        raise DumpError("no dumps were given")
    return found


@contextlib.contextmanager
def open_for_writing(folder: Path) -> Iterator[Archive]:
    """The present generation of an archive, with the writer's lock held."""
    with Archive(folder):
        pass
    with durable.writer_lock(folder), Archive(folder) as archive:
        yield archive


@contextlib.contextmanager
def new_archive(target: Path) -> Iterator[Path]:
    """A temporary folder beside `target` that becomes it on success and is removed on failure.

    Raises
    ------
    ConflictError
        If `target` exists and is not an empty folder.
    """
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        what = "an archive is there already (use append)" if (target / NAME).exists() else "it exists already"
        raise ConflictError(what, target)
    target.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{target.name}{durable.TEMP_PREFIX}"
    _remove_stale(target.parent, prefix)
    folder = durable.temp_name(target).with_name(prefix + durable.temp_name(target).name[len(durable.TEMP_PREFIX) :])
    folder.mkdir()
    try:
        with durable.writer_lock(folder):
            yield folder
            durable.sync_folder(folder / SHARDS)
            durable.sync_folder(folder)
            os.replace(folder, target)
            durable.sync_folder(target.parent)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _remove_stale(parent: Path, prefix: str) -> None:
    """Remove what killed runs towards the same target left behind; a live run holds its lock."""
    for stale in parent.glob(f"{glob_escape(prefix)}*"):
        if stale.is_dir():
            with contextlib.suppress(ConflictError, OSError), durable.writer_lock(stale):
                shutil.rmtree(stale, ignore_errors=True)


def glob_escape(text: str) -> str:
    """Escape what `pathlib.Path.glob` would take for a pattern."""
    import glob

    return glob.escape(text)
