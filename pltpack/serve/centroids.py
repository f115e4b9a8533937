"""Library centroids under a budget, decoded or encoded: the one used longest ago goes first, pinned ones never.

A centroid whose decoded values must go stays encoded for another round, where its payload is much smaller: it then
needs no reading, and on a device no copying to it, before it is decoded again.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from pltpack.archive.segments import Segment
from pltpack.codec.base import KeyValue

#: A centroid: digest of its library segment, and its node there.
Key = tuple[str, int]
#: Payloads are kept beside decoded values up to this share of their bytes.
BESIDE = 1 / 3


class Place(Protocol):
    """Where centroids are decoded, and kept."""

    def keep(self, payload: bytes | memoryview) -> Any:
        """An encoded unit as it is kept; `decode` takes it in a payload's place."""
        ...

    def decode(self, segment: Segment, record: np.void, payload: Any) -> list[KeyValue]:
        """A unit's values, one pair of arrays a layer; its payload has been checked."""
        ...


class HostPlace:
    """Memory of the host."""

    def keep(self, payload: bytes | memoryview) -> bytes:
        """See `Place.keep`: a copy, as what was read holds more."""
        return bytes(payload)

    def decode(self, segment: Segment, record: np.void, payload: Any) -> list[KeyValue]:
        """See `Place.decode`."""
        return segment.decode_span(record, payload=payload)


@dataclasses.dataclass
class _Unit:
    """What is kept of a unit: its values, its payload as the place keeps it, or both; and their bytes."""

    values: list[KeyValue] | None = None
    values_size: int = 0
    encoded: Any = None
    encoded_size: int = 0


class Centroids:
    """Units of library nodes.

    Parameters
    ----------
    budget : int
        Most bytes to keep besides pinned centroids.
    place : Place, optional
        The host by default.
    """

    def __init__(self, budget: int, place: Place | None = None) -> None:
        self.budget, self._place = budget, place or HostPlace()
        self._lock = threading.Lock()
        self._units: OrderedDict[Key, dict[int, _Unit]] = OrderedDict()
        self._sizes: dict[Key, int] = {}
        self._pins: dict[Key, int] = {}
        # Bytes of centroids that are not pinned.
        self._loose = 0
        self._hits = self._decoded = self._again = self._evicted = 0

    def holds(self, segment: Segment, record: np.void) -> bool:
        """Whether a unit is here, decoded or encoded, so that it need not be read."""
        with self._lock:
            return int(record["offset"]) in self._units.get(_key(segment, record), {})

    def find(self, segment: Segment, record: np.void) -> list[KeyValue] | None:
        """See `get`, but None if it is not here decoded."""
        key = _key(segment, record)
        with self._lock:
            unit = self._units.get(key, {}).get(int(record["offset"]))
            if unit is None or unit.values is None:
                return None
            self._hits += 1
            self._units.move_to_end(key)
            return unit.values

    def get(self, segment: Segment, record: np.void) -> list[KeyValue]:
        """A library unit's values, one pair of arrays a layer, which must not be changed; decoded if they are not here.

        Raises
        ------
        FormatError
            If the unit is damaged.
        """
        values = self.find(segment, record)
        if values is None:
            payload = self.payload(segment, record)
            values = self._place.decode(segment, record, payload)
            self.offer(segment, record, values, payload)
        return values

    def payload(self, segment: Segment, record: np.void) -> Any:
        """A unit's payload, as it is kept, or else read and checked.

        Raises
        ------
        FormatError
            If it does not match its checksum.
        """
        key = _key(segment, record)
        with self._lock:
            unit = self._units.get(key, {}).get(int(record["offset"]))
            if unit is not None and unit.encoded is not None:
                self._again += 1
                self._units.move_to_end(key)
                return unit.encoded
        return segment.checked_payload(record)

    def wants(self, segment: Segment, record: np.void) -> bool:
        """Whether `offer` would keep a unit's values: not where all of its centroid's would be too many."""
        with self._lock:
            return _key(segment, record) in self._pins or segment.bytes_with(record) <= self.budget

    def offer(self, segment: Segment, record: np.void, values: list[KeyValue], payload: Any) -> None:
        """Keep what was decoded, as far as the budget allows, or only the payload that it came from."""
        key, offset = _key(segment, record), int(record["offset"])
        size, length = sum(keys.nbytes + values.nbytes for keys, values in values), int(record["length"])
        wanted = self.wants(segment, record)
        with self._lock:
            self._decoded += 1
            unit = self._units.get(key, {}).get(offset, _Unit())
            # Another thread may have decoded it meanwhile.
            if wanted and unit.values is None and self._room(key, size):
                unit.values, unit.values_size = values, size
                self._put(key, offset, unit)
            beside = unit.values is None or length <= BESIDE * size
            if unit.encoded is None and beside and self._fits(key, length):
                kept = self._place.keep(payload)
                if self._room(key, length):
                    unit.encoded, unit.encoded_size = kept, length
                    self._put(key, offset, unit)

    def _put(self, key: Key, offset: int, unit: _Unit) -> None:
        self._units.setdefault(key, {})[offset] = unit
        self._units.move_to_end(key)

    def _room(self, key: Key, size: int) -> bool:
        """Whether `size` bytes more of a centroid can be kept, after freeing others; books them."""
        if not self._fits(key, size):
            return False
        if key not in self._pins:
            self._shrink(self.budget - size, spared=key)
            if self._loose + size > self.budget:
                return False
            self._loose += size
        self._sizes[key] = self._sizes.get(key, 0) + size
        return True

    def _fits(self, key: Key, size: int) -> bool:
        """Whether a centroid with so many bytes more could be kept by itself."""
        return key in self._pins or self._sizes.get(key, 0) + size <= self.budget

    def _shrink(self, limit: int, spared: Key | None = None) -> None:
        """Free centroids, the one used longest ago first, until those that are not pinned take `limit` bytes.

        One whose payloads are kept loses its values, and goes to the end of the row.
        """
        waiting = list(self._units)
        while self._loose > limit and waiting:
            key = waiting.pop(0)
            if key == spared or key in self._pins:
                continue
            freed = self._without_values(key)
            if freed:
                self._units.move_to_end(key)
                waiting.append(key)
            else:
                del self._units[key]
                freed = self._sizes.pop(key)
                self._evicted += 1
            self._loose -= freed

    def _without_values(self, key: Key) -> int:
        """Free the values of a centroid's units, of which all must be kept encoded; gives their bytes."""
        units = self._units[key].values()
        freed = sum(unit.values_size for unit in units)
        if not freed or any(unit.encoded is None for unit in units):
            return 0
        for unit in units:
            unit.values, unit.values_size = None, 0
        self._sizes[key] -= freed
        return freed

    def pin(self, keys: Iterable[Key]) -> None:
        """Never free these centroids until they are unpinned as often."""
        with self._lock:
            for key in keys:
                if key not in self._pins:
                    self._loose -= self._sizes.get(key, 0)
                self._pins[key] = self._pins.get(key, 0) + 1

    def unpin(self, keys: Iterable[Key]) -> None:
        """Undo one `pin`."""
        with self._lock:
            for key in keys:
                count = self._pins.pop(key, 0)
                if count > 1:
                    self._pins[key] = count - 1
                elif count == 1:
                    self._loose += self._sizes.get(key, 0)
            self._shrink(self.budget)

    def stats(self) -> dict[str, int]:
        """Bytes and centroids kept, how many pinned and freed, and how many units were found here or decoded.

        `encoded_bytes` are those of the bytes that are payloads, `encoded_hits` the units that were decoded from one.
        """
        with self._lock:
            encoded = sum(unit.encoded_size for units in self._units.values() for unit in units.values())
            return {
                "bytes": sum(self._sizes.values()), "encoded_bytes": encoded, "budget": self.budget,
                "centroids": len(self._units), "pinned": len(self._pins), "hits": self._hits,
                "encoded_hits": self._again, "decoded": self._decoded, "evicted": self._evicted,
            }  # fmt: skip

    def clear(self) -> None:
        """Forget all, pins included."""
        with self._lock:
            self._units.clear()
            self._sizes.clear()
            self._pins.clear()
            self._loose = 0


def keys_of(segments: Sequence[Segment], runs: np.ndarray) -> list[Key]:
    """The centroids that mapping rows name; their library field indexes `segments`."""
    pairs = {(int(run["library"]), int(run["node"])) for run in runs}
    return [(segments[library].entry.head_sha256, node) for library, node in sorted(pairs)]


def _key(segment: Segment, record: np.void) -> Key:
    return segment.entry.head_sha256, int(record["node"])
