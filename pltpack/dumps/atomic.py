"""Write a file whole or not at all: temporary file in the same folder, fsync, rename, fsync of the folder."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from pltpack.errors import ConflictError, DumpError


def make_folder(path: Path) -> None:
    """Make a folder and its parents.

    Raises
    ------
    ConflictError
        If something else has the name.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ConflictError("exists and is not a folder", path) from None
    except OSError as error:
        raise DumpError(f"cannot be made ({error.strerror})", path) from None


@contextlib.contextmanager
def replacing(path: Path, begins: bytes | None = None) -> Iterator[Path]:
    """Give a temporary name to write to; on success the file there takes the place of `path`, else it is removed.

    Parameters
    ----------
    path : Path
    begins : bytes, optional
        What a file that is there must begin with to be replaced.

    Raises
    ------
    DumpError
        If the system refuses the write.
    ConflictError
        If `path` is a folder, lies in an archive's, or is a file of another kind.
    """
    if path.is_dir():
        raise ConflictError("is a folder", path)
    if any((folder / "MANIFEST.json").is_file() and (folder / "shards").is_dir()
           for folder in path.resolve().parents[:2]):  # fmt: skip
        raise ConflictError("lies in the folder of an archive: write it elsewhere", path)
    if begins is not None and path.exists() and _head(path, len(begins)) != begins:
        raise ConflictError(f"exists already and does not begin with {begins.decode()!r}: write to another file", path)
    temp = path.with_name(f".tmp-{secrets.token_hex(8)}")
    try:
        yield temp
        _sync(temp, os.O_RDWR)
        os.replace(temp, path)
        _sync(path.parent, os.O_RDONLY)
    except OSError as error:
        raise DumpError(f"cannot be written ({error.strerror or error})", path) from error
    finally:
        temp.unlink(missing_ok=True)


def _head(path: Path, count: int) -> bytes:
    if not path.is_file():
        raise ConflictError("is not a regular file", path)
    try:
        with path.open("rb") as file:
            return file.read(count)
    except OSError as error:
        raise DumpError(f"cannot be read ({error.strerror})", path) from error


def _sync(path: Path, flags: int) -> None:
    fd = os.open(path, flags)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Give a temporary folder to write files to; on success it takes the place of `path`, else it is removed.

    Raises
    ------
    DumpError
        If the system refuses the write.
    ConflictError
        If `path` is something else than a folder.
    """
    if path.exists() and not path.is_dir():
        raise ConflictError("exists and is not a folder", path)
    name = secrets.token_hex(8)
    temp, former = path.with_name(f".tmp-{name}"), path.with_name(f".tmp-{name}-former")
    try:
        temp.mkdir()
        yield temp
        for file in temp.rglob("*"):
            _sync(file, os.O_RDONLY if file.is_dir() else os.O_RDWR)
        if path.exists():
            os.replace(path, former)
        os.replace(temp, path)
        _sync(path.parent, os.O_RDONLY)
    except OSError as error:
        if former.exists() and not path.exists():
            os.replace(former, path)
        raise DumpError(f"cannot be written ({error.strerror or error})", path) from error
    finally:
        for left in (temp, former):
            shutil.rmtree(left, ignore_errors=True)
