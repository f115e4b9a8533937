"""Decoded library units, kept for a while: mapping rows often ask for one again, for other tokens or sessions."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from pltpack.archive.batch import Batch
from pltpack.archive.segments import Segment, fresh
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
        return self.get_many(segment, [record])[0]

    def get_many(self, segment: Segment, records: Sequence[np.void]) -> list[list[KeyValue]]:
        """As `get` of several units of one segment: those that are not here are decoded together.

        Raises
        ------
        FormatError
            If a unit is damaged.
        """
        keys = [_key(segment, record) for record in records]
        with self._lock:
            found = {key: self._units[key] for key in keys if key in self._units}
            for key in found:
                self._units.move_to_end(key)
        missing = {key: record for key, record in zip(keys, records, strict=True) if key not in found}
        made = dict(zip(missing, _decoded(segment, list(missing.values())), strict=True))
        with self._lock:
            for key, arrays in made.items():
                if key not in self._units:
                    self._units[key] = arrays
                    self._size += _size(arrays)
            while self._size > self._limit:
                self._size -= _size(self._units.popitem(last=False)[1])
        found |= made
        return [found[key] for key in keys]

    def held(self, segment: Segment, record: np.void) -> list[KeyValue] | None:
        """As `get`, None if the unit is not here."""
        with self._lock:
            return self._units.get(_key(segment, record))

    def clear(self) -> None:
        """Forget all units."""
        with self._lock:
            self._units.clear()
            self._size = 0


def _key(segment: Segment, record: np.void) -> tuple[int, int, int]:
    return id(segment), int(record["offset"]), int(record["layer"])


def _decoded(segment: Segment, records: Sequence[np.void]) -> list[list[KeyValue]]:
    if len(records) == 1 or any(segment.codec_of(record).spans for record in records):
        return [segment.decode_span(record) for record in records]
    batch, out = Batch(), []
    for record in records:
        arrays = fresh(segment.identity.layers[record["layer"]], int(record["token_count"]))
        batch.add(segment, record, arrays)
        out.append([arrays])
    batch.run()
    return out


def _size(arrays: Sequence[KeyValue]) -> int:
    return sum(keys.nbytes + values.nbytes for keys, values in arrays)
