"""Payload bytes that a load has read ahead, given to the archive's decoders as if they came from the file.

A load reads and checks bytes in its first stages and decodes in a later one. Segments are opened once by the archive
and shared here by shallow copies whose container looks first among the bytes that the decoding thread holds.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from pltpack.archive.library import Library
from pltpack.archive.segments import Segment
from pltpack.archive.shard import Shard
from pltpack.format.container import Container

AnySegment = TypeVar("AnySegment", bound=Segment)


class Part(NamedTuple):
    """Payload bytes of one container from `offset` on."""

    container: StagedContainer
    offset: int
    data: bytes | memoryview


class _Held(threading.local):
    parts: Sequence[Part] = ()


_held = _Held()


@contextlib.contextmanager
def holding(parts: Sequence[Part]) -> Iterator[None]:
    """Let this thread's decoders find these bytes."""
    _held.parts = parts
    try:
        yield
    finally:
        _held.parts = ()


class Reads:
    """How payload bytes come from files.

    Parameters
    ----------
    bytes_per_second : float, optional
        Limit, for measurements of what a slower disk would do.
    mapped : bool
        Map files into memory instead of copying from them. Faster by one copy; but a file that somebody shortens in
        place while it is mapped ends the process, where a copying read makes a miss of it.
    """

    def __init__(self, bytes_per_second: float | None = None, mapped: bool = False) -> None:
        self._speed, self._mapped = bytes_per_second, mapped
        self._free_at, self._lock = 0.0, threading.Lock()
        #: Payload bytes read so far.
        self.bytes = 0

    def read(self, container: Container, offset: int, length: int,
             sleep: Callable[[float], object] = time.sleep) -> bytes | memoryview:  # fmt: skip
        """Payload bytes of an open container; `sleep` waits where the speed is limited."""
        # What is encrypted is never in place, and one copy less than `payload` makes of it.
        in_place = self._mapped or container.seal is not None
        data = container.mapped(offset, length) if in_place else container.payload(offset, length)
        with self._lock:
            self.bytes += length
        if self._speed:
            with self._lock:
                now = time.perf_counter()
                self._free_at = max(now, self._free_at) + length / self._speed
                pause = self._free_at - now
            sleep(pause)
        return data


class StagedContainer:
    """An open container as `pltpack.archive` uses it; payload comes from `holding`, or else by `reads`."""

    #: What was read is already together.
    at_hand = False

    def __init__(self, container: Container, reads: Reads) -> None:
        self._container, self._reads = container, reads

    def __getattr__(self, name: str) -> Any:
        return getattr(self._container, name)

    def payload(self, offset: int, length: int) -> bytes | memoryview:
        """See `Container.payload`."""
        found = self._find(offset, length)
        return self._reads.read(self._container, offset, length) if found is None else found

    def payload_into(self, buffer: memoryview, offset: int) -> None:
        """See `Container.payload_into`."""
        buffer[:] = self.payload(offset, len(buffer))

    def read(self, offset: int, length: int, sleep: Callable[[float], object]) -> Part:
        """Read bytes for `holding`."""
        return Part(self, offset, memoryview(self._reads.read(self._container, offset, length, sleep)))

    def _find(self, offset: int, length: int) -> memoryview | None:
        for container, start, data in _held.parts:
            if container is self and start <= offset and offset + length <= start + len(data):
                return memoryview(data)[offset - start : offset - start + length]
        return None


def staged(segment: AnySegment, reads: Reads) -> AnySegment:
    """A copy of an open segment that reads in stages; it shares codecs and tables, and stays open as long."""
    found = copy.copy(segment)
    found.container = StagedContainer(segment.container, reads)  # type: ignore[assignment]
    return found


def staged_shard(shard: Shard, libraries: dict[str, Library], reads: Reads) -> Shard:
    """A shard's copy over copies of its libraries, which are given by their digests."""
    found = staged(shard, reads)
    found.libraries = [libraries[library.entry.head_sha256] for library in shard.libraries]
    return found


def ranges(units: Sequence[tuple[Segment, np.void]]) -> Iterator[tuple[StagedContainer, int, int]]:
    """What to read for some units: containers with ``[offset, end)``, neighbours together."""
    places: dict[int, set[tuple[int, int]]] = {}
    containers: dict[int, Any] = {}
    for segment, record in units:
        containers[id(segment.container)] = segment.container
        offset = int(record["offset"])
        places.setdefault(id(segment.container), set()).add((offset, offset + int(record["length"])))
    for key, found in places.items():
        begin, end = -1, -1
        for first, last in sorted(found):
            if first != end:
                if end > begin:
                    yield containers[key], begin, end
                begin = first
            end = last
        if end > begin:
            yield containers[key], begin, end


def advise(parts: Sequence[tuple[StagedContainer, int, int]]) -> None:
    """Tell the system that these bytes are about to be read."""
    for container, begin, end in parts:
        container.will_need([(begin, end)])
