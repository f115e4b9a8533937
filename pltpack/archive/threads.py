"""Work shared between the calling thread and a pool."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

In = TypeVar("In")


def together(work: Callable[[In], object], items: Iterable[In], pool: ThreadPoolExecutor, helpers: int) -> None:
    """Do `work` on all items, in the calling thread and in up to `helpers` threads of a pool, in no certain order.

    A thread takes its next item by itself: to wake another one costs as much as a piece of work here. Where the pool
    is busy the calling thread does without it. The first error ends the work and is raised when no thread is at it any
    more.
    """
    waiting = collections.deque(items)

    def drain() -> None:
        while True:
            try:
                item = waiting.popleft()
            except IndexError:
                return
            try:
                work(item)
            except BaseException:
                waiting.clear()
                raise

    futures = [pool.submit(drain) for _ in range(min(helpers, len(waiting) - 1))]
    try:
        drain()
    finally:
        waiting.clear()
        started = [future for future in futures if not future.cancel()]
        wait(started)
    for future in started:
        future.result()
