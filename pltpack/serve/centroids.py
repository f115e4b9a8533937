"""Library centroids decoded once and kept under a budget: the one used longest ago goes first, pinned ones never."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from pltpack.archive.segments import Segment
from pltpack.codec.base import KeyValue

#: A centroid: digest of its library segment, and its node there.
Key = tuple[str, int]


class Centroids:
    """Decoded units of library nodes.

    Parameters
    ----------
    budget : int
        Most bytes to keep besides pinned centroids.
    decode : callable, optional
        Decodes a unit, to where the centroids are kept; to arrays on the host by default.
    """

    def __init__(self, budget: int, decode: Callable[[Segment, np.void], list[KeyValue]] | None = None) -> None:
        self.budget, self._decode = budget, decode or _on_host
        self._lock = threading.Lock()
        self._units: OrderedDict[Key, dict[int, list[KeyValue]]] = OrderedDict()
        self._sizes: dict[Key, int] = {}
        self._pins: dict[Key, int] = {}
        # Bytes of centroids that are not pinned.
        self._loose = 0
        self._hits = self._decoded = self._evicted = 0

    def holds(self, segment: Segment, record: np.void) -> bool:
        """Whether a unit is here."""
        with self._lock:
            return int(record["offset"]) in self._units.get(_key(segment, record), {})

    def get(self, segment: Segment, record: np.void) -> list[KeyValue]:
        """A library unit's values, one pair of arrays a layer, which must not be changed; decoded if they are not here.

        Raises
        ------
        FormatError
            If the unit is damaged.
        """
        key, offset = _key(segment, record), int(record["offset"])
        with self._lock:
            kept = self._units.get(key, {}).get(offset)
            if kept is not None:
                self._hits += 1
                self._units.move_to_end(key)
                return kept
        found = self._decode(segment, record)
        size = sum(keys.nbytes + values.nbytes for keys, values in found)
        with self._lock:
            self._decoded += 1
            # Another thread may have decoded it meanwhile.
            if offset not in self._units.get(key, {}) and self._room(key, size):
                self._units.setdefault(key, {})[offset] = found
                self._units.move_to_end(key)
        return found

    def _room(self, key: Key, size: int) -> bool:
        """Whether `size` bytes more of a centroid can be kept, after freeing others; books them."""
        if key not in self._pins:
            if self._sizes.get(key, 0) + size > self.budget:
                return False
            self._shrink(self.budget - size, spared=key)
            if self._loose + size > self.budget:
                return False
            self._loose += size
        self._sizes[key] = self._sizes.get(key, 0) + size
        return True

    def _shrink(self, limit: int, spared: Key | None = None) -> None:
        """Free centroids, the one used longest ago first, until those that are not pinned take `limit` bytes."""
        if self._loose <= limit:
            return
        for key in list(self._units):
            if self._loose <= limit:
                return
            if key != spared and key not in self._pins:
                del self._units[key]
                self._loose -= self._sizes.pop(key)
                self._evicted += 1

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
        """Bytes and centroids kept, how many pinned and freed, and how many units were found here or decoded."""
        with self._lock:
            return {
                "bytes": sum(self._sizes.values()), "budget": self.budget, "centroids": len(self._units),
                "pinned": len(self._pins), "hits": self._hits, "decoded": self._decoded,
                "evicted": self._evicted,
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


def _on_host(segment: Segment, record: np.void) -> list[KeyValue]:
    return segment.decode_span(record)


def _key(segment: Segment, record: np.void) -> Key:
    return segment.entry.head_sha256, int(record["node"])
