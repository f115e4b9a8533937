"""Encode token ranges into the units of one container: in parallel, in a fixed order, with bounded memory."""

from __future__ import annotations

import collections
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import xxhash

from pltpack.archive.sampling import TokenRange
from pltpack.codec.base import Codec, KeyValue, Unit
from pltpack.format import tables
from pltpack.format.container import ContainerWriter
from pltpack.snapshot import Snapshot

#: Most tokens in one unit (a whole number of blocks of any default size).
UNIT_TOKENS = 256

Progress = Callable[[str, int, int], None]
In = TypeVar("In")
Out = TypeVar("Out")


def in_order(work: Callable[[In], Out], items: Iterable[In], pool: ThreadPoolExecutor) -> Iterator[Out]:
    """Map `work` over items on a pool, results in order, only a few items ahead of the consumer."""
    window = 2 * (os.cpu_count() or 1) + 2
    waiting: collections.deque[Future[Out]] = collections.deque()
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) >= window:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()


@dataclasses.dataclass(frozen=True, slots=True)
class UnitJob:
    """One unit to encode.

    Attributes
    ----------
    snapshot : Snapshot
        Where the values are.
    layer, start, stop : int
        Layer and session tokens.
    base : int
        What to subtract from `start` for the index (a library node's position; 0 in a shard).
    boundary : int
        See `pltpack.codec.base.Unit`.
    node : int
        Library node, or `tables.NO_NODE`.
    reference : callable or None
        Gives the mapped values of the same tokens; the unit is left out if they are equal bit by bit.
    """

    snapshot: Snapshot
    layer: int
    start: int
    stop: int
    base: int = 0
    boundary: int = 0
    node: int = tables.NO_NODE
    reference: Callable[[int, int, int], KeyValue] | None = None

    @property
    def raw_bytes(self) -> int:
        """Raw bytes of the unit's values."""
        return (self.stop - self.start) * self.snapshot.identity.layers[self.layer].bytes_per_token


def split(tokens: TokenRange, layer: int, block: int, base: int = 0, node: int = tables.NO_NODE) -> Iterator[UnitJob]:
    """Cut a token range of one layer into unit jobs of whole blocks."""
    size = max(block, UNIT_TOKENS // block * block)
    end = tokens.stop + tokens.boundary
    for start in range(tokens.start, tokens.stop, size):
        stop = min(start + size, tokens.stop)
        yield UnitJob(tokens.snapshot, layer, start, stop, base, end - stop, node)


@dataclasses.dataclass(slots=True)
class Encoded:
    """An encoded unit and its index record without the offset."""

    payload: bytes
    record: tuple[int, ...]
    error: float
    raw_bytes: int


class UnitWriter:
    """Encode jobs with one codec and append them to a container.

    Parameters
    ----------
    container : ContainerWriter
    codec : Codec
    state : int
        Index of the codec's state in the container's list.
    pool : ThreadPoolExecutor
    measure : bool
        Record each unit's relative RMS error (library units of lossy codecs).
    """

    def __init__(
        self, container: ContainerWriter, codec: Codec, state: int, pool: ThreadPoolExecutor, measure: bool = False
    ) -> None:
        self._container, self._codec, self._state, self._pool = container, codec, state, pool
        self._measure = measure and not codec.exact
        self._records: list[tuple[int | float, ...]] = []

    def __len__(self) -> int:
        return len(self._records)

    def write(self, jobs: Iterable[UnitJob], progress: Callable[[int], None]) -> None:
        """Encode and append all jobs; `progress` is told the raw bytes done."""
        for encoded in in_order(self._encode, jobs, self._pool):
            if encoded.payload or encoded.record:
                offset = self._container.append(encoded.payload)
                self._records.append((offset, len(encoded.payload), *encoded.record, encoded.error))
            progress(encoded.raw_bytes)

    def table(self) -> np.ndarray:
        """The unit index so far."""
        return tables.as_bytes(np.array(self._records, tables.UNIT))

    def _encode(self, job: UnitJob) -> Encoded:
        keys, values = job.snapshot.layer(job.layer, job.start, job.stop)
        unit = Unit(job.layer, job.snapshot.identity.layers[job.layer], job.start, job.stop - job.start, job.boundary)
        reference, flags = None, 0
        if job.reference is not None:
            reference, flags = job.reference(job.layer, job.start, job.stop), tables.FLAG_REFERENCE
            if same_bits(keys, reference[0]) and same_bits(values, reference[1]):
                return Encoded(b"", (), 0.0, job.raw_bytes)
        payload = self._codec.encode(unit, keys, values, reference)
        error = 0.0
        if self._measure:
            decoded = np.empty_like(keys, order="C"), np.empty_like(values, order="C")
            self._codec.decode(memoryview(payload), unit, *decoded, reference)
            error = relative_error((keys, values), decoded)
        record = (xxhash.xxh3_64_intdigest(payload), job.start - job.base, unit.tokens,
                  job.layer, 1, self._state, flags, job.node)  # fmt: skip
        return Encoded(payload, record, min(error, 3e38), job.raw_bytes)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays of one dtype are equal bit by bit (NaN payloads and signs of zero count)."""
    kind = np.dtype(f"u{a.dtype.itemsize}")
    return bool(np.array_equal(np.ascontiguousarray(a).view(kind), np.ascontiguousarray(b).view(kind)))


def relative_error(original: KeyValue, decoded: KeyValue) -> float:
    """Larger of the keys' and the values' RMS error over RMS value; infinite if a non-finite value is not kept."""
    worst = 0.0
    for x, y in zip(original, decoded, strict=True):
        a, b = x.astype(np.float32), y.astype(np.float32)
        finite = np.isfinite(a)
        if not finite.all():
            if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
                return float("inf")
            a, b = np.where(finite, a, 0), np.where(finite, b, 0)
        if not np.isfinite(b).all():
            return float("inf")
        difference = (a - b).astype(np.float64)
        # Exactly kept values may be huge (sinks): they would hide the error of the others.
        changed = difference != 0
        if changed.any():
            energy = float(np.square(a[changed], dtype=np.float64).mean())
            worst = max(worst, float(np.sqrt(np.square(difference[changed]).mean() / max(energy, 1e-60))))
    return worst
