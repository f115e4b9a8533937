"""Matrix products by one thread each: several threads split a product in ways that change its last bits.

The archive encodes and decodes many units at once, so that single-threaded products keep all cores busy all the same.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from threadpoolctl import LibController, ThreadpoolController

Given = ParamSpec("Given")
Result = TypeVar("Result")


class _SingleThread(contextlib.ContextDecorator):
    """A re-entrant context in which numpy's BLAS uses one thread for a product.

    Most BLAS libraries know one number for the whole process: it is 1 while any thread is in the context, and the last
    one to leave puts the former number back. Those that run on OpenMP know one for each thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mine = threading.local()
        self._depth = 0
        self._shared: list[LibController] = []
        self._own: list[LibController] = []
        self._before: list[int] = []
        self._found = False

    def __enter__(self) -> _SingleThread:
        with self._lock:
            if not self._found:
                # Looks through the libraries of the process, which takes milliseconds; numpy's is among them.
                blas = [lib for lib in ThreadpoolController().lib_controllers if lib.user_api == "blas"]
                self._own = [lib for lib in blas if getattr(lib, "threading_layer", None) == "openmp"]
                self._shared = [lib for lib in blas if lib not in self._own]
                self._found = True
            if self._depth == 0:
                self._before = _set(self._shared, [1] * len(self._shared))
            self._depth += 1
        depth = getattr(self._mine, "depth", 0)
        if depth == 0:
            self._mine.before = _set(self._own, [1] * len(self._own))
        self._mine.depth = depth + 1
        return self

    def __exit__(self, *_: object) -> None:
        self._mine.depth -= 1
        if self._mine.depth == 0:
            _set(self._own, self._mine.before)
        with self._lock:
            self._depth -= 1
            if self._depth == 0:
                _set(self._shared, self._before)


def _set(libraries: list[LibController], numbers: list[int]) -> list[int]:
    """Set each library's number of threads; gives the former ones."""
    before = [library.get_num_threads() for library in libraries]
    for library, number in zip(libraries, numbers, strict=True):
        # threadpoolctl lets one thread alone decide, the first that asked, and passes over the others in silence.
        clear = getattr(library, "clear_controlling_thread", None)
        if clear is not None:
            clear(force=True)
        library.set_num_threads(number)
        if clear is not None:
            clear(force=True)
    return before


_context = _SingleThread()


def single_threaded(work: Callable[Given, Result]) -> Callable[Given, Result]:
    """A function whose matrix products are made by one thread each, whatever OPENBLAS_NUM_THREADS says."""
    return _context(work)
