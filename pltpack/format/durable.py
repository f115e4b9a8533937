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
        with open(temp, "xb") as file:
            file.write(data)
            sync_file(file)
        publish(temp, path)
    finally:
        temp.unlink(missing_ok=True)


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
