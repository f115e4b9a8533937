"""Matrix products by one thread each: several threads split a product in ways that change its last bits.

The archive encodes and decodes many units at once, so that single-threaded products keep all cores busy all the same.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from threadpoolctl import ThreadpoolController

Given = ParamSpec("Given")
Result = TypeVar("Result")


class _SingleThread(contextlib.ContextDecorator):
    """A re-entrant context: while any thread is in it, numpy's BLAS uses one thread for a product.

    BLAS libraries know one number for the whole process, so the last thread to leave puts the former one back.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depth = 0
        self._controller: ThreadpoolController | None = None
        self._limit: Any = None

    def __enter__(self) -> _SingleThread:
        with self._lock:
            if self._depth == 0:
                if self._controller is None:
                    # Looks through the libraries of the process, which takes milliseconds; numpy's is among them.
                    self._controller = ThreadpoolController()
                self._limit = self._controller.limit(limits=1, user_api="blas")
            self._depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._depth -= 1
            if self._depth == 0:
                self._limit.restore_original_limits()
                self._limit = None


_context = _SingleThread()


def single_threaded(work: Callable[Given, Result]) -> Callable[Given, Result]:
    """A function whose matrix products are made by one thread each, whatever OPENBLAS_NUM_THREADS says."""
    return _context(work)
