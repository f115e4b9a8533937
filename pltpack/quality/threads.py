"""A calibration's windows, pieces and layers on all cores: each by one thread, its results taken in order.

Libraries that share one product between threads lose much of their time where products are small, and all of it that
lies between them. Sums in order, of products by one thread each, are the same on any number of cores.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from pltpack.archive.encoding import in_order
from pltpack.codec.blas import single_threaded

#: Most threads: what each of them holds is up to a hundred megabytes.
MOST = 8

In = TypeVar("In")
Out = TypeVar("Out")


def mapped(work: Callable[[In], Out], items: Iterable[In]) -> Iterator[Out]:
    """Results of `work`, numpy's products by one thread each, in the order of the items; about a thread's ahead."""
    threads = min(os.cpu_count() or 1, MOST)
    with ThreadPoolExecutor(threads, thread_name_prefix="pltpack-calibrate") as pool:
        yield from in_order(single_threaded(work), items, pool, threads + 1)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Torch computes by one thread, here and in threads that begin meanwhile."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
