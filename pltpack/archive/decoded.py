"""Decoded library units, kept for a while: mapping rows often ask for one again, for other tokens or sessions."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from pltpack.archive.segments import Segment
from pltpack.codec.base import KeyValue

#: Raw bytes of decoded units that an open archive keeps.
KEPT_BYTES = 1 << 26


class DecodedUnits:
    """The units that were used last, of segments that stay open as long as this is in use.

    Parameters
    ----------
    limit : int
        Most raw bytes to keep.
    """

    def __init__(self, limit: int = KEPT_BYTES) -> None:
        self._limit, self._size, self._lock = limit, 0, threading.Lock()
        self._units: OrderedDict[tuple[int, int, int], list[KeyValue]] = OrderedDict()

    def get(self, segment: Segment, record: np.void) -> list[KeyValue]:
        """One pair of arrays a layer, which must not be changed.

        Raises
        ------
        FormatError
            If the unit is damaged.
        """
        key = (id(segment), int(record["offset"]), int(record["layer"]))
        with self._lock:
            if key in self._units:
                self._units.move_to_end(key)
                return self._units[key]
        found = segment.decode_span(record)
        with self._lock:
            if key not in self._units:
                self._units[key] = found
                self._size += _size(found)
            while self._size > self._limit:
                self._size -= _size(self._units.popitem(last=False)[1])
        return found

    def clear(self) -> None:
        """Forget all units."""
        with self._lock:
            self._units.clear()
            self._size = 0


def _size(arrays: Sequence[KeyValue]) -> int:
    return sum(keys.nbytes + values.nbytes for keys, values in arrays)
