"""Encode token ranges into the units of one container: in parallel, in a fixed order, with bounded memory."""

from __future__ import annotations

import collections
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import xxhash

from pltpack.archive.prepared import Prepared
from pltpack.archive.sampling import TokenRange
from pltpack.archive.sink import Sink
from pltpack.codec.base import EncodeJob, KeyValue, Unit
from pltpack.format import tables
from pltpack.format.container import ContainerWriter
from pltpack.snapshot import LayerGeometry, Snapshot

#: Most tokens in one unit (a whole number of blocks of any default size).
UNIT_TOKENS = 256
#: Raw bytes that a thread encodes before it hands over what it has, unless one unit is larger.
GROUP_BYTES = 1 << 22

#: A prediction that takes more than this part of what the unit would take without it is compared with just that.
DOUBT = 0.85
#: One that takes more than this part in a trial is not tried again.
HOPELESS = 1.05

Progress = Callable[[str, int, int], None]
#: Gives what the mapping table says of layers' tokens ``[start, stop)``.
Mapped = Callable[[range, int, int], list[KeyValue]]
In = TypeVar("In")
Out = TypeVar("Out")


def in_order(
    work: Callable[[In], Out], items: Iterable[In], pool: ThreadPoolExecutor, window: int | None = None
) -> Iterator[Out]:
    """Map `work` over items on a pool, results in order, only a few items, or `window`, ahead of the consumer."""
    window = 2 * (os.cpu_count() or 1) + 2 if window is None else window
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
class Promise:
    """What a trial found of a match.

    Attributes
    ----------
    layers : tuple of int
        First layers of the layer groups that were tried, ascending.
    predicted, plain : tuple of float
        Bytes a token, with the prediction and without.
    """

    layers: tuple[int, ...]
    predicted: tuple[float, ...]
    plain: tuple[float, ...]

    def of(self, layer: int) -> tuple[float, float]:
        """Bytes a token with the prediction and without, in the nearest layer group that was tried."""
        nearest = min(range(len(self.layers)), key=lambda i: abs(self.layers[i] - layer))
        return self.predicted[nearest], self.plain[nearest]


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
    layers : int
        Number of layers from `layer` on: a layer group of a codec that spans layers.
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
    reference: Mapped | None = None
    layers: int = 1
    promise: Promise | None = None

    @property
    def geometries(self) -> tuple[LayerGeometry, ...]:
        """Shapes of the unit's layers."""
        return self.snapshot.identity.layers[self.layer : self.layer + self.layers]

    @property
    def raw_bytes(self) -> int:
        """Raw bytes of the unit's values."""
        return (self.stop - self.start) * sum(layer.bytes_per_token for layer in self.geometries)

    @property
    def hopeless(self) -> bool:
        """Whether the trial says that the mapped values do not help."""
        if self.promise is None:
            return False
        predicted, plain = self.promise.of(self.layer)
        return predicted > HOPELESS * plain

    def mapped(self) -> list[KeyValue] | None:
        """The mapped values of its layers, if they may help."""
        if self.reference is None or self.hopeless:
            return None
        return self.reference(range(self.layer, self.layer + self.layers), self.start, self.stop)

    def doubtful(self, payload: bytes) -> bool:
        """Whether what was coded with mapped values may take less without them."""
        if self.promise is None or self.hopeless:
            return False
        return len(payload) > DOUBT * self.promise.of(self.layer)[1] * (self.stop - self.start)


def split(
    tokens: TokenRange, layers: range, block: int, base: int = 0, node: int = tables.NO_NODE
) -> Iterator[UnitJob]:
    """Cut a token range of one layer group into unit jobs of whole blocks."""
    size = max(block, UNIT_TOKENS // block * block)
    end = tokens.stop + tokens.boundary
    for start in range(tokens.start, tokens.stop, size):
        stop = min(start + size, tokens.stop)
        yield UnitJob(tokens.snapshot, layers.start, start, stop, base, end - stop, node, layers=len(layers))


@dataclasses.dataclass(slots=True)
class Encoded:
    """An encoded unit and its index record without the offset."""

    payload: bytes
    record: tuple[int, ...]
    error: float
    raw_bytes: int


class UnitEncoder:
    """Encodes jobs with one codec, in any thread.

    Parameters
    ----------
    prepared : Prepared
        Of the codec.
    state : int
        Index of the codec's state in the container's list.
    measure : bool
        Record each unit's relative RMS error (library units of lossy codecs).
    """

    def __init__(self, prepared: Prepared, state: int, measure: bool = False) -> None:
        self.prepared, self.state, self.measure = prepared, state, measure and not prepared.codec.exact
        self._codec = prepared.codec

    def encode(self, group: Sequence[UnitJob]) -> list[Encoded]:
        """Encode jobs that a thread does at once."""
        if self._codec.spans:
            return [self._encode_span(job) for job in group]
        work = [_load(job) for job in group]
        found = iter(self._codec.encode_many([given for given in work if given is not None]))
        payloads = [None if given is None else next(found) for given in work]
        # An exact codec takes a difference only where it is smaller.
        again = [index for index, payload in enumerate(payloads)
                 if payload is not None and not self._codec.exact and group[index].doubtful(payload)]  # fmt: skip
        plain = {index: given._replace(reference=None) for index in again if (given := work[index]) is not None}
        for (index, given), payload in zip(plain.items(), self._codec.encode_many([*plain.values()]), strict=True):
            if len(payload) <= len(payloads[index] or b""):
                work[index], payloads[index] = given, payload
        return [self._encoded(*found) for found in zip(group, work, payloads, strict=True)]

    def _encode_span(self, job: UnitJob) -> Encoded:
        layers = range(job.layer, job.layer + job.layers)
        arrays = [job.snapshot.layer(layer, job.start, job.stop) for layer in layers]
        unit = Unit(job.layer, job.geometries[0], job.start, job.stop - job.start, job.boundary, job.geometries,
                    job.promise is not None)  # fmt: skip
        codec = self.prepared.of(job.snapshot, job.stop + job.boundary)
        reference = job.mapped()
        payload = codec.encode_span(unit, arrays, reference)
        if reference is not None and job.doubtful(payload):
            plain = codec.encode_span(unit, arrays)
            if len(plain) <= len(payload):
                payload, reference = plain, None
        error = 0.0
        if self.measure:
            decoded = [(np.empty_like(keys, order="C"), np.empty_like(values, order="C")) for keys, values in arrays]
            self._codec.decode_span(memoryview(payload), unit, decoded)
            error = max(relative_error(mine, again) for mine, again in zip(arrays, decoded, strict=True))
        record = (xxhash.xxh3_64_intdigest(payload), job.start - job.base, unit.tokens,
                  job.layer, job.layers, self.state, _flags(reference), job.node)  # fmt: skip
        return Encoded(payload, record, min(error, 3e38), job.raw_bytes)

    def _encoded(self, job: UnitJob, given: EncodeJob | None, payload: bytes | None) -> Encoded:
        if given is None or payload is None:
            return Encoded(b"", (), 0.0, job.raw_bytes)
        error = 0.0
        if self.measure:
            decoded = np.empty_like(given.keys, order="C"), np.empty_like(given.values, order="C")
            self._codec.decode(memoryview(payload), given.unit, *decoded, given.reference)
            error = relative_error((given.keys, given.values), decoded)
        record = (xxhash.xxh3_64_intdigest(payload), job.start - job.base, given.unit.tokens,
                  job.layer, 1, self.state, _flags(given.reference), job.node)  # fmt: skip
        return Encoded(payload, record, min(error, 3e38), job.raw_bytes)


class UnitWriter:
    """Encode jobs with one codec and append them to a container.

    Parameters
    ----------
    container : ContainerWriter
        Opened by `sink`.
    sink : Sink
    encoder : UnitEncoder

    Attributes
    ----------
    minor : int
        The least minor version that knows what is in the payloads appended so far.
    """

    def __init__(self, container: ContainerWriter, sink: Sink, encoder: UnitEncoder) -> None:
        self._container, self._sink, self.encoder = container, sink, encoder
        self._records: list[tuple[int | float, ...]] = []
        self._offset = self.minor = 0

    def __len__(self) -> int:
        return len(self._records)

    def append(self, group: Sequence[Encoded]) -> None:
        """Append what `encode` gave."""
        kept = [encoded for encoded in group if encoded.payload or encoded.record]
        self._sink.append(self._container, [encoded.payload for encoded in kept])
        for encoded in kept:
            self.minor = max(self.minor, self.encoder.prepared.codec.minor_of(encoded.payload))
            self._records.append((self._offset, len(encoded.payload), *encoded.record, encoded.error))
            self._offset += len(encoded.payload)

    def table(self) -> np.ndarray:
        """The unit index so far."""
        return tables.as_bytes(np.array(self._records, tables.UNIT))


#: A writer with jobs for it, or None after its last ones; and the same with what became of the jobs.
Task = tuple[UnitWriter, list[UnitJob] | None]
Done = tuple[UnitWriter, list[Encoded] | None]
#: Does tasks, which it takes a little ahead, in their order.
Encode = Callable[[Iterator[Task]], Iterator[Done]]


def write_all(
    streams: Iterable[tuple[UnitWriter, Iterable[UnitJob]]],
    encode: Encode,
    progress: Callable[[int], None],
    done: Callable[[UnitWriter], None] | None = None,
) -> None:
    """Encode and append the jobs of several containers, one after the other without a pause between them.

    Parameters
    ----------
    streams : iterable of (UnitWriter, iterable of UnitJob)
        Taken a little ahead of the encoding.
    encode : callable
    progress : callable
        Told the raw bytes done.
    done : callable, optional
        Told of each writer whose jobs are all appended.
    """

    def tasks() -> Iterator[Task]:
        for writer, jobs in streams:
            for group in _groups(jobs):
                yield writer, group
            yield writer, None

    for writer, group in encode(tasks()):
        if group is not None:
            writer.append(group)
            progress(sum(encoded.raw_bytes for encoded in group))
        elif done is not None:
            done(writer)


def _groups(jobs: Iterable[UnitJob]) -> Iterator[list[UnitJob]]:
    """Cut jobs into runs of about `GROUP_BYTES` that a thread encodes at once."""
    group: list[UnitJob] = []
    size = 0
    for job in jobs:
        if group and size + job.raw_bytes > GROUP_BYTES:
            yield group
            group, size = [], 0
        group.append(job)
        size += job.raw_bytes
    if group:
        yield group


def _load(job: UnitJob) -> EncodeJob | None:
    """A job's arrays, or None if it is a correction and nothing is to be corrected."""
    keys, values = job.snapshot.layer(job.layer, job.start, job.stop)
    unit = Unit(job.layer, job.geometries[0], job.start, job.stop - job.start, job.boundary,
                near=job.promise is not None)  # fmt: skip
    mapped = job.mapped()
    if mapped is None:
        return EncodeJob(unit, keys, values)
    (reference,) = mapped
    if job.promise is None and same_bits(keys, reference[0]) and same_bits(values, reference[1]):
        return None
    return EncodeJob(unit, keys, values, reference)


def _flags(reference: object) -> int:
    return 0 if reference is None else tables.FLAG_REFERENCE


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
