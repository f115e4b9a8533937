"""A bounded queue between two stages, which ends when its writers have left and empties at once when cancelled."""

from __future__ import annotations

import collections
import threading
from collections.abc import Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Channel(Generic[Item]):
    """A bounded queue.

    Parameters
    ----------
    size : int
        Most items that wait in it.
    writers : int
        Threads that put items; it ends when all of them have left.
    """

    def __init__(self, size: int, writers: int = 1) -> None:
        self._items: collections.deque[Item] = collections.deque()
        self._size, self._writers, self._cancelled = size, writers, False
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: Item) -> bool:
        """Wait for room and add an item; False if the channel was cancelled."""
        with self._changed:
            while len(self._items) >= self._size and not self._cancelled:
                self._changed.wait()
            if not self._cancelled:
                self._items.append(item)
                self._changed.notify_all()
            return not self._cancelled

    def put_first(self, items: Sequence[Item]) -> None:
        """Add items before all others, whatever room there is: for a reader that made several of one."""
        with self._changed:
            if not self._cancelled:
                self._items.extendleft(reversed(items))
                self._changed.notify_all()

    def get(self, hold: bool = False) -> Item | None:
        """The next item, waited for; None when there will be no more.

        A reader that may `put_first` says that it will `hold` the channel: to all others it is a writer, too, until it
        calls `leave`.
        """
        with self._changed:
            while not (self._items or self._cancelled or self._writers <= 0):
                self._changed.wait()
            if self._cancelled or not self._items:
                return None
            item = self._items.popleft()
            self._writers += hold
            self._changed.notify_all()
            return item

    def leave(self) -> None:
        """Say that a writer puts nothing more."""
        with self._changed:
            self._writers -= 1
            self._changed.notify_all()

    def cancel(self) -> None:
        """Drop what waits, and let nobody wait any more."""
        with self._changed:
            self._cancelled = True
            self._items.clear()
            self._changed.notify_all()
