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
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from pltpack.archive.library import Library
from pltpack.archive.segments import Segment
from pltpack.archive.shard import Shard
from pltpack.errors import UnsupportedError
from pltpack.format.container import Container
from pltpack.format.tables import FLAG_REFERENCE

if TYPE_CHECKING:
    from pltpack.format.source import FileSource
    from pltpack.gpu.backend import Backend
    from pltpack.gpu.direct import DirectRead, DirectReads

AnySegment = TypeVar("AnySegment", bound=Segment)


class Part(NamedTuple):
    """Payload bytes of one container from `offset` on."""

    container: StagedContainer
    offset: int
    data: bytes | memoryview
    #: What brings the bytes to a device, until `arrived`; then where they are there.
    coming: DirectRead | None = None
    there: Any = None


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
    direct : DirectReads, optional
        What reads to the device, where that can be.
    """

    def __init__(
        self, bytes_per_second: float | None = None, mapped: bool = False, direct: DirectReads | None = None
    ) -> None:
        self._speed, self._mapped, self.direct = bytes_per_second, mapped, direct
        self._free_at, self._lock = 0.0, threading.Lock()
        #: Payload bytes read so far.
        self.bytes = 0

    def read(self, container: Container, offset: int, length: int,
             sleep: Callable[[float], object] = time.sleep) -> bytes | memoryview:  # fmt: skip
        """Payload bytes of an open container; `sleep` waits where the speed is limited."""
        # What is encrypted is never in place, and one copy less than `payload` makes of it.
        in_place = self._mapped or container.seal is not None
        data = container.mapped(offset, length) if in_place else container.payload(offset, length)
        self.add(length, sleep)
        return data

    def add(self, length: int, sleep: Callable[[float], object]) -> None:
        """Count bytes that were read, and wait where the speed is limited."""
        with self._lock:
            self.bytes += length
        if self._speed:
            with self._lock:
                now = time.perf_counter()
                self._free_at = max(now, self._free_at) + length / self._speed
                pause = self._free_at - now
            sleep(pause)

    def close(self) -> None:
        """Close what direct reads have open."""
        if self.direct is not None:
            self.direct.close()


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

    def will_need(self, ranges: Sequence[tuple[int, int]]) -> None:
        """See `Container.will_need`; what goes past the host's page cache is not to be read into it."""
        if self._direct(0) is None:
            self._container.will_need(ranges)

    def read(self, offset: int, length: int, sleep: Callable[[float], object], direct: bool = False) -> Part:
        """Read bytes for `holding`, or have them brought to the device, if that can be and `direct` says so."""
        found = self._direct(offset) if direct else None
        if found is None:
            return self._part(offset, length, sleep)
        reads, source, at = found
        try:
            coming = reads.begin(source, at, length)
        except Exception as error:
            return self._after(error, offset, length, sleep)
        self._reads.add(length, sleep)
        return Part(self, offset, bytes(0), coming)

    def arrived(self, part: Part) -> Part:
        """A part when its bytes are here."""
        if part.coming is None or self._reads.direct is None:
            return part
        try:
            there, data = self._reads.direct.finish(part.coming)
        except Exception as error:
            return self._after(error, part.offset, part.coming.length)
        return Part(self, part.offset, data, there=there)

    def on_device(self, offset: int, length: int) -> Any:
        """Payload bytes that this thread holds, on the device, uint8; None if they are not there."""
        part = self._held(offset, length)
        there = None if part is None else part.there
        return None if part is None or there is None else there[offset - part.offset : offset - part.offset + length]

    def _direct(self, offset: int) -> tuple[DirectReads, FileSource, int] | None:
        reads = self._reads.direct
        place = self._container.in_file(offset) if reads is not None and reads.usable else None
        return None if reads is None or place is None else (reads, *place)

    def _part(self, offset: int, length: int, sleep: Callable[[float], object] = time.sleep) -> Part:
        return Part(self, offset, memoryview(self._reads.read(self._container, offset, length, sleep)))

    def _after(self, error: Exception, offset: int, length: int,
               sleep: Callable[[float], object] = time.sleep) -> Part:  # fmt: skip
        # Raises what is wrong with the file, if it is the file.
        part = self._part(offset, length, sleep)
        if self._reads.direct is not None:
            self._reads.direct.give_up(error)
        return part

    def _find(self, offset: int, length: int) -> memoryview | None:
        part = self._held(offset, length)
        return None if part is None else memoryview(part.data)[offset - part.offset : offset - part.offset + length]

    def _held(self, offset: int, length: int) -> Part | None:
        for part in _held.parts:
            if part.container is self and part.offset <= offset and offset + length <= part.offset + len(part.data):
                return part
        return None


def direct_to(backend: Backend | None, device: str) -> DirectReads:
    """Reads to a loader's device; `UnsupportedError` if it is none, or kvikio is missing."""
    from pltpack.gpu.backend import CudaBackend
    from pltpack.gpu.direct import DirectReads

    if not isinstance(backend, CudaBackend):
        raise UnsupportedError(f"direct reads go to a CUDA device, which {device!r} is not here")
    return DirectReads(backend.lanes)


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


def begin_reads(places: Sequence[tuple[StagedContainer, int, int]], units: Sequence[tuple[Segment, np.void]],
                sleep: Callable[[float], object]) -> list[Part]:  # fmt: skip
    """Read some units from their `ranges`, or begin to; `arrived` gives what `holding` takes."""
    # References are undone on the host.
    direct = not any(record["flags"] & FLAG_REFERENCE for _, record in units)
    return [container.read(begin, end - begin, sleep, direct) for container, begin, end in places]


def arrived(parts: Sequence[Part]) -> list[Part]:
    """Parts when their bytes are here."""
    return [part.container.arrived(part) for part in parts]


def advise(parts: Sequence[tuple[StagedContainer, int, int]]) -> None:
    """Tell the system that these bytes are about to be read."""
    for container, begin, end in parts:
        container.will_need([(begin, end)])
