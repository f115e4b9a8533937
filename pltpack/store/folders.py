"""Temporary folders that become archives or outputs whole or not at all."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from pltpack.errors import ConflictError, PltpackError
from pltpack.format import durable
from pltpack.format.manifest import NAME

# A folder gets its lock within milliseconds of being made.
_MAKING_SECONDS = 3600


def new_target(out: str | os.PathLike[str]) -> Path:
    """Where a new archive goes.

    Raises
    ------
    ConflictError
        If an archive or something else but an empty folder is there.
    """
    if (Path(out) / NAME).exists():
        raise ConflictError("an archive is there already (use append)", out)
    return durable.output_folder(out)


@contextlib.contextmanager
def workplace(target: Path) -> Iterator[Path]:
    """A locked temporary folder beside `target`, removed at the end if it is still there.

    What killed runs towards the same target left behind is removed first.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    # File systems end names at 255 bytes, and a character takes up to four.
    prefix = f".{target.name[:50]}"
    _remove_stale(target.parent, prefix)
    folder = target.with_name(prefix + durable.temp_name(target).name)
    # Until it is locked, another run towards the same target would take it for stale.
    fresh = folder.with_name(f"{folder.name}.new")
    fresh.mkdir()
    try:
        with durable.writer_lock(fresh):
            os.rename(fresh, folder)
            yield folder
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def named_after(target: Path, temp: Path, *, whole: bool = False) -> Iterator[None]:
    """Let errors about a temporary path, or one below it, name `target` (if `whole`) or the place in it instead."""

    def meant(path: Path) -> Path:
        return target if whole else target / path.relative_to(temp)

    try:
        yield
    except PltpackError as error:
        path = None if error.path is None else Path(error.path)
        if path is None or not path.is_relative_to(temp):
            raise
        raise type(error)(error.fact, meant(path)) from error
    except OSError as error:
        if isinstance(error.filename, str | os.PathLike) and Path(error.filename).is_relative_to(temp):
            error.filename = os.fspath(meant(Path(error.filename)))
        raise


def _remove_stale(parent: Path, prefix: str) -> None:
    """Remove what killed runs towards the same target left behind; a live run holds its lock."""
    temporary = re.compile(re.escape(prefix + durable.TEMP_PREFIX) + r"[0-9a-f]{16}(\.new)?")
    for stale in [path for path in parent.iterdir() if temporary.fullmatch(path.name)]:
        with contextlib.suppress(ConflictError, OSError):
            being_made = stale.suffix == ".new" and time.time() - stale.stat().st_mtime < _MAKING_SECONDS
            if stale.is_dir() and not stale.is_symlink() and not being_made:
                with durable.writer_lock(stale):
                    shutil.rmtree(stale, ignore_errors=True)
