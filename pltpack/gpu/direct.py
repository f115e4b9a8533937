"""Bytes of files straight to device memory by kvikio (NVIDIA GPUDirect Storage), past the host's page cache.

Checksums are the host's, which gets a copy of what has come to the device: what is checked is what is decoded.
"""

from __future__ import annotations

import importlib
import logging
import threading
import weakref
from typing import Any

from pltpack.errors import UnsupportedError
from pltpack.format.source import FileSource
from pltpack.gpu.lanes import Lanes

#: Reads that do not begin and end at a page are done in parts, not all of which go past the host.
_PAGE = 4096
_log = logging.getLogger("pltpack.gpu")
#: Reads that nobody waits for (yet), and that may still write to their device memory: it must not be given to others.
_loose: set[DirectRead] = set()
# Garbage collection may close a loader in the middle of anything.
_lock = threading.RLock()


class _File:
    """A file that kvikio has open; closed when no read holds it any more."""

    def __init__(self, source: FileSource) -> None:
        # The path may name another file by now, or none.
        self.open = importlib.import_module("kvikio").CuFile(f"/proc/self/fd/{source.fd}", "r")
        weakref.finalize(self, self.open.close).atexit = False


class DirectRead:
    """Bytes ``[offset, offset + length)`` of a file on their way to the device; made by `DirectReads.begin`."""

    def __init__(self, file: _File, size: int, lanes: Lanes, offset: int, length: int) -> None:
        first = offset - offset % _PAGE
        self._size = min(-(-(offset + length) // _PAGE) * _PAGE, size) - first
        self._file: _File | None = file
        self.length = length
        self._wanted = slice(offset - first, offset - first + length)
        self._room = lanes.room(self._size)
        # One task: of several, some would go on writing when another has failed.
        self.future = file.open.pread(self._room, self._size, first, self._size)
        _loose.add(self)

    def wait(self) -> Any:
        """The bytes on the device, uint8 ``[length]``; raises what kvikio does, and `OSError` if too few came."""
        # A future must not be asked whether it is done once its result is taken.
        with _lock:
            _loose.discard(self)
        try:
            count = self.future.get()
        finally:
            self._file = None
        if count != self._size:
            raise OSError(f"kvikio read {count} of {self._size} bytes")
        return self._room[self._wanted]


class DirectReads:
    """Reads of a loader's files to its device. Once one has failed where the host can read, there are no more.

    Parameters
    ----------
    lanes : Lanes
        Of the device.

    Raises
    ------
    UnsupportedError
        If kvikio is missing.
    """

    def __init__(self, lanes: Lanes) -> None:
        try:
            importlib.import_module("kvikio")
        except Exception as error:
            raise UnsupportedError(f"direct reads need kvikio ({error}): pip install 'pltpack[gds12]' or "
                                   "'pltpack[gds13]'") from error  # fmt: skip
        self._lanes = lanes
        self._files: weakref.WeakKeyDictionary[FileSource, _File] = weakref.WeakKeyDictionary()
        #: Whether reads are still to be tried.
        self.usable = True

    def begin(self, source: FileSource, offset: int, length: int) -> DirectRead:
        """Start reading from an open file; raises whatever kvikio or the device does."""
        _forget_done()
        with self._lanes as lanes, _lock:
            file = self._files.get(source) or self._files.setdefault(source, _File(source))
            return DirectRead(file, source.size, lanes, offset, length)

    def finish(self, read: DirectRead) -> tuple[Any, memoryview]:
        """What was read, uint8, on the device and on the host; errors as of `DirectRead.wait`."""
        with self._lanes as lanes:
            there = read.wait()
            return there, lanes.download(there).data

    def give_up(self, error: Exception) -> None:
        """Begin no more reads, since one failed of a file that the host could read; logged once."""
        with _lock:
            before, self.usable = self.usable, False
        if before:
            _log.warning("direct reads failed, files are read through the host from now on: %s", error)

    def close(self) -> None:
        """Close the files, once no read holds them."""
        with _lock:
            self._files.clear()
        _forget_done()


def _forget_done() -> None:
    """Let go of reads that nobody waited for, as their load was cancelled, once nothing of them is written."""
    with _lock:
        _loose.difference_update([read for read in _loose.copy() if read.future.done()])
