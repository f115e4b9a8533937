"""Durable writes: temporary file, fsync, rename, fsync of the folder; and the writer's lock."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from pltpack.errors import ConflictError

TEMP_PREFIX = ".tmp-"
LOCK = ".lock"


def temp_name(path: Path) -> Path:
    """A fresh temporary name in the folder of `path`."""
    return path.with_name(f"{TEMP_PREFIX}{secrets.token_hex(8)}")


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give errors of the system that name no file, as those of writes do not, the file in question."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = os.fspath(path)
        raise


def sync_file(file: IO[Any]) -> None:
    """Flush a file's bytes to the device."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to the device."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def publish(temp: Path, path: Path) -> None:
    """Give a synced temporary file its name, replacing what had it, durably."""
    os.replace(temp, path)
    sync_folder(path.parent)


def write_file(path: Path, data: bytes) -> None:
    """Write a small file whole or not at all."""
    temp = temp_name(path)
    try:
        with naming(path):
            with open(temp, "xb") as file:
                file.write(data)
                sync_file(file)
            publish(temp, path)
    finally:
        temp.unlink(missing_ok=True)


def output_folder(out: str | os.PathLike[str]) -> Path:
    """The path of a folder that is to be made and renamed into place: symbolic links and ``..`` followed.

    Raises
    ------
    ConflictError
        If something is there that a rename may not replace: anything but an empty folder that nobody works in.
    """
    target = Path(out)
    if target.is_symlink() or target.name in ("", ".."):
        target = Path(os.path.realpath(target))
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ConflictError("it exists already", out)
    if target.is_dir() and os.path.samefile(target, os.curdir):
        raise ConflictError("it is the current folder, which cannot be replaced; give the name of a new one", out)
    return target


def publish_folder(temp: Path, target: Path) -> None:
    """Give a folder or file its final name, which nothing but an empty folder has, durably.

    Raises
    ------
    ConflictError
        If something has taken the name in the meantime, or the system refuses.
    """
    try:
        os.replace(temp, target)
    except IsADirectoryError:
        raise ConflictError("it is a folder, but a file is to be written", target) from None
    except OSError as error:
        raise ConflictError(f"it cannot take its place ({error.strerror})", target) from None
    sync_folder(target.parent)


@contextlib.contextmanager
def writer_lock(folder: Path) -> Iterator[None]:
    """Hold the one writer's place of an archive folder; the kernel frees it when the process dies.

    Raises
    ------
    ConflictError
        If another writer holds it.
    """
    fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConflictError("another writer is at work on this archive", folder) from None
        yield
    finally:
        os.close(fd)
