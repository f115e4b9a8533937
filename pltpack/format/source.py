"""Where a container's bytes come from: an open file of this machine, or whatever else gives ranges of bytes."""

from __future__ import annotations

import abc
import mmap
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from pltpack.errors import FormatError


class GoneError(FormatError):
    """A file that the manifest names is not there any more: damage, or a newer generation has taken its place."""


class Source(abc.ABC):
    """An open file of an archive, read by position from any thread.

    Attributes
    ----------
    path : path-like
        What errors name.
    size : int
        Bytes, when it was opened.
    distant : bool
        Whether a read takes so long that it pays to say beforehand what will be read.
    """

    path: os.PathLike[str]
    size: int
    distant = False

    @abc.abstractmethod
    def read(self, offset: int, length: int) -> bytes:
        """Bytes ``[offset, offset + length)``.

        Raises
        ------
        FormatError
            If the file ends early.
        GoneError
            If it is not there any more.
        """

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` with the bytes from `offset` on; errors as of `read`."""
        buffer[:] = self.read(offset, len(buffer))

    def mapped(self, offset: int, length: int) -> memoryview:
        """The bytes in place where that can be had, valid until `close`; errors as of `read`."""
        return memoryview(self.read(offset, length))

    def will_need(self, ranges: Sequence[tuple[int, int]]) -> None:  # noqa: B027 - a hint may be left alone
        """These ``[begin, end)`` are going to be read soon."""

    def release(self) -> None:  # noqa: B027 - not every source holds something
        """Hold nothing between reads from now on, for archives of very many files."""

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of the file; harmless when repeated."""


class FileSource(Source):
    """A file of this machine.

    Parameters
    ----------
    path : Path

    Raises
    ------
    GoneError
        If the file is missing.
    FormatError
        If it is not a regular file.
    """

    def __init__(self, path: Path) -> None:
        self.path: Path = path
        self._reopen_as: tuple[int, int, int] | None = None
        self._map: mmap.mmap | None = None
        self._fd = _open(path)
        status = os.fstat(self._fd)
        self.size = status.st_size
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise FormatError("not a regular file", path)

    @property
    def fd(self) -> int:
        """Descriptor of the open file; -1 where none is kept open."""
        return self._fd

    def read(self, offset: int, length: int) -> bytes:
        """See `Source.read`."""
        if self._reopen_as is None:
            return self._read_from(self._fd, offset, length)
        fd = _open(self.path)
        try:
            if _inode(fd) != self._reopen_as:
                raise GoneError("the file was replaced while the archive was open", self.path)
            return self._read_from(fd, offset, length)
        finally:
            os.close(fd)

    def _read_from(self, fd: int, offset: int, length: int) -> bytes:
        parts = []
        while length:
            data = os.pread(fd, min(length, 1 << 30), offset)
            if not data:
                raise FormatError("file ends early", self.path)
            parts.append(data)
            offset += len(data)
            length -= len(data)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """See `Source.read_into`."""
        kept_open = self._reopen_as is None
        if not kept_open or os.preadv(self._fd, [buffer], offset) != len(buffer):
            buffer[:] = self.read(offset, len(buffer))

    def mapped(self, offset: int, length: int) -> memoryview:
        """See `Source.mapped`. Whoever shortens the file after this takes the process down that touches the bytes."""
        if self._fd < 0:
            return memoryview(self.read(offset, length))
        if os.fstat(self._fd).st_size < offset + length:
            raise FormatError("file ends early", self.path)
        if self._map is None:
            self._map = mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ)
        return memoryview(self._map)[offset : offset + length]

    def will_need(self, ranges: Sequence[tuple[int, int]]) -> None:
        """See `Source.will_need`: the system is told, where it can be."""
        if self._fd >= 0 and hasattr(os, "posix_fadvise"):
            for begin, end in ranges:
                os.posix_fadvise(self._fd, begin, end - begin, os.POSIX_FADV_WILLNEED)

    def release(self) -> None:
        """See `Source.release`. Call it before others read the file."""
        if self._fd >= 0:
            self._reopen_as = _inode(self._fd)
            os.close(self._fd)
            self._fd = -1

    def close(self) -> None:
        """See `Source.close`."""
        self._reopen_as = None
        # Unmapped when nobody looks at its bytes any more.
        self._map = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _open(path: Path) -> int:
    try:
        # Without O_NONBLOCK, opening a pipe that has such a name would wait for its other end.
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise GoneError("the file that the manifest names is missing", path) from None


def _inode(fd: int) -> tuple[int, int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino, status.st_size
