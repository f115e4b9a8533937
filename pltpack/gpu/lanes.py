"""One copy stream and one decode stream of a device, and the pinned buffers that payloads pass through.

Several threads may be between `__enter__` and `__exit__` at once: their kernels line up on the one decode stream, and
while one thread waits for its results, another fills a pinned buffer and has it copied on the other stream.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import Any

import numpy as np

from pltpack.gpu import device

#: Smallest pinned buffer.
_LEAST = 1 << 16
_entered = threading.local()


class Lanes:
    """Streams and staging buffers of one device.

    Parameters
    ----------
    number : int
        Of the device.
    """

    def __init__(self, number: int = 0) -> None:
        self._number, self._lock = number, threading.Lock()
        self._free: list[np.ndarray] = []
        self._used = 0
        self._copy = self._decode = None
        if not device.is_simulated():
            with device.use(number):
                streams = device.arrays().cuda
                self._copy, self._decode = (streams.Stream(non_blocking=True) for _ in range(2))

    def __enter__(self) -> Lanes:
        stack = contextlib.ExitStack()
        stack.enter_context(device.use(self._number))
        if self._decode is not None:
            stack.enter_context(self._decode)
        if not hasattr(_entered, "stacks"):
            _entered.stacks = []
        _entered.stacks.append((self, stack))
        return self

    def __exit__(self, *error: object) -> None:
        _entered.stacks.pop()[1].close()

    def buffer(self, size: int) -> np.ndarray:
        """A pinned buffer uint8 ``[size]``; used again once nobody holds it."""
        with self._lock:
            fitting = [at for at, free in enumerate(self._free) if len(free) >= size]
            whole = self._free.pop(min(fitting, key=lambda at: len(self._free[at]))) if fitting else None
        if whole is None:
            whole = device.staging(max(_LEAST, 1 << (size - 1).bit_length()))
        with self._lock:
            self._used += 1
        found = np.frombuffer(whole.data, np.uint8, size)
        weakref.finalize(found, self._give_back, whole).atexit = False
        return found

    def _give_back(self, whole: np.ndarray) -> None:
        with self._lock:
            self._used -= 1
            self._free.append(whole)

    def upload(self, host: np.ndarray) -> Any:
        """A pinned buffer's copy on the device, by the copy stream; the decode stream waits for it."""
        if self._copy is None or self._decode is None:
            return device.put(host)
        # Freed memory of the copy stream is not written to before its readers are through: decoders fetch what came of
        # their units, which waits for the decode stream, before they let it go.
        with self._copy:
            found = device.arrays().empty(host.shape, host.dtype)
            found.set(host, self._copy)
            self._decode.wait_event(self._copy.record())
        return found

    def room(self, size: int) -> Any:
        """Device memory uint8 ``[size]``, not initialized, which nothing on any stream reads or writes any more."""
        # The copy stream's: see `upload`.
        with contextlib.nullcontext() if self._copy is None else self._copy:
            return device.arrays().empty(size, np.uint8)

    def download(self, there: Any) -> np.ndarray:
        """Contiguous bytes of the device in a pinned buffer, by the copy stream; waited for."""
        host = self.buffer(there.size)
        if self._copy is None:
            host[:] = there
        else:
            there.get(self._copy, out=host, blocking=False)
            self._copy.record().synchronize()
        return host

    def wait(self) -> None:
        """Wait for what is on the decode stream now, and not for what others put on it meanwhile."""
        if self._decode is not None:
            self._decode.record().synchronize()

    @property
    def pinned(self) -> dict[str, int]:
        """Pinned buffers in use, those that wait for use, and the bytes of these."""
        with self._lock:
            return {"used": self._used, "free": len(self._free), "free_bytes": sum(len(b) for b in self._free)}

    def close(self) -> None:
        """Let the buffers go that are not in use."""
        with self._lock:
            self._free.clear()


def current() -> Lanes | None:
    """The lanes that this thread has entered last."""
    stacks = getattr(_entered, "stacks", None)
    return stacks[-1][0] if stacks else None
