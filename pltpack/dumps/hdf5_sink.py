"""What the HDF5 library writes to: a file that takes everything, so that a full disk is an error and not a crash.

The library keeps data and metadata in caches that it writes when something is closed. If that fails it cannot close,
prints complaints while the program ends, or crashes. So it is never told: the first error is kept for the caller to
raise, and what could not be written is kept in memory until the library is done.
"""

from __future__ import annotations

import os
from typing import IO


class Sink:
    """A file object for ``h5py.File`` over an open file without a buffer.

    The caller asks `check` after every piece of data, which bounds what is kept in memory after an error.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._fd = file.fileno()
        self._at = 0
        self._error: BaseException | None = None
        self._unwritten: list[tuple[int, bytes]] = []

    def check(self) -> None:
        """Raise the first error that writing met, if any."""
        if self._error is not None:
            raise self._error

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to an offset from the start or, for 2, from the end."""
        self._at = offset if whence == os.SEEK_SET else os.fstat(self._fd).st_size + offset
        return self._at

    def tell(self) -> int:
        """The present offset."""
        return self._at

    def write(self, data: memoryview) -> int:
        """Write all of `data`, or keep it."""
        given = memoryview(data).cast("B")
        if self._error is None:
            try:
                done = 0
                while done < len(given):
                    done += os.pwrite(self._fd, given[done:], self._at + done)
            except BaseException as error:  # an interrupt must not pass through the library either
                self._error = error
        if self._error is not None:
            self._unwritten.append((self._at, bytes(given)))
        self._at += len(given)
        return len(given)

    def read(self, size: int) -> bytes:
        """Up to `size` bytes as they were written."""
        buffer = bytearray(size)
        return bytes(buffer[: self.readinto(memoryview(buffer))])

    def readinto(self, buffer: memoryview) -> int:
        """Fill `buffer`; zeros stand where nothing was written."""
        view = memoryview(buffer).cast("B")
        data = b""
        try:
            data = os.pread(self._fd, len(view), self._at)
        except BaseException as error:
            self._error = self._error or error
        view[:] = data + bytes(len(view) - len(data))
        for offset, piece in self._unwritten:
            first, last = max(offset, self._at), min(offset + len(piece), self._at + len(view))
            if first < last:
                view[first - self._at : last - self._at] = piece[first - offset : last - offset]
        self._at += len(view)
        return len(view)

    def truncate(self, size: int) -> int:
        """Set the file's size."""
        if self._error is None:
            try:
                os.ftruncate(self._fd, size)
            except BaseException as error:
                self._error = error
        return size

    def flush(self) -> None:
        """Nothing is buffered here."""
