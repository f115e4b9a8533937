"""One load under way: stages on threads with bounded queues between them, and layers handed over in order.

Stages: read, check, decode (the one with several threads), scatter. `depth` units are on their way at once, from the
start of their reading until they are handed over: while unit t is consumed, t + 1 to t + depth are in flight.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from pltpack.archive.decoding import decode_layers, one_buffer
from pltpack.archive.segments import Segment
from pltpack.codec.base import KeyValue
from pltpack.serve.arguments import whole
from pltpack.serve.channel import Channel
from pltpack.serve.destinations import Destination
from pltpack.serve.job import Job, LoadedLayer
from pltpack.serve.layered import LayeredStep, cut, is_layered
from pltpack.serve.misses import Cancelled, MissError, TimedOut
from pltpack.serve.plan import Piece, pieces_of, units_of
from pltpack.serve.staged import Part, StagedContainer, advise, arrived, begin_reads, holding, ranges
from pltpack.serve.timeline import Timeline
from pltpack.snapshot import LayerGeometry

Report = Callable[[BaseException, Sequence[int]], MissError]


class _Flight:
    """A piece on its way."""

    def __init__(self, piece: Piece, units: Sequence[tuple[Segment, np.void]]) -> None:
        self.piece, self.units = piece, units
        self.parts: Sequence[Part] = ()
        self.staged: Sequence[KeyValue] | None = None
        # Of a step whose units are all begun: what gives its layers.
        self.begun: LayeredStep | None = None


class Work:
    """The threads behind a `Stream`, which know nothing of it: one that is dropped half-way ends them.

    Parameters
    ----------
    job : Job
    depth, workers : int
        Units in flight, and threads that decode.
    timeout : float or None
        Seconds for the whole load.
    report : callable
        Makes the `MissError` of what went wrong; called at most once.
    """

    def __init__(self, job: Job, depth: int, workers: int, timeout: float | None, report: Report) -> None:
        self._job, self._report = job, report
        self.timeline = Timeline(job.observe)
        # Longer than the system can wait is for ever.
        limited = timeout is not None and timeout < threading.TIMEOUT_MAX / 2
        self._deadline = time.monotonic() + timeout if limited and timeout is not None else None
        self._pieces = pieces_of(job.shard, job.tokens, together=job.device is None)
        layers = len(job.shard.identity.layers)
        self._step_of = {layer: piece.step for piece in self._pieces for layer in piece.layers}
        steps = [list(group) for _, group in itertools.groupby(self._pieces, key=lambda piece: piece.step)]
        self._left = [len(step) for step in steps]
        self._layered = [job.device is None and is_layered(job.shard, step) for step in steps]
        self._begun: list[LayeredStep | None] = [LayeredStep(job.shard) if each else None for each in self._layered]
        self._missing = set(range(layers))
        self._ready = [threading.Event() for _ in range(layers)]
        self._permits, self._stop = threading.Semaphore(depth), threading.Event()
        # Garbage collection may close another stream in the middle of anything, so locks must be re-entrant.
        self._lock = threading.RLock()
        # The last step that somebody waits for, and done ones behind it, which keep their permits.
        self._wanted, self._kept = -1, set[int]()
        self._error: BaseException | None = None
        self._miss: MissError | None = None
        self._buffers: dict[tuple[tuple[LayerGeometry, ...], int], list[list[KeyValue]]] = {}
        read, checked, decoded = Channel[_Flight](depth), Channel[_Flight](depth), Channel[_Flight](depth, workers)
        self._channels = (read, checked, decoded)
        loops: list[tuple[str, Callable[..., None], tuple[Any, ...]]] = [
            ("read", self._read_all, (read,)),
            ("check", self._stage, ("check", self._check, read, checked)),
            *[("decode", self._decode_all, (checked, decoded))] * workers,
            ("scatter", self._stage, ("scatter", self._scatter, decoded, None)),
        ]
        self._threads = [
            threading.Thread(target=loop, args=arguments, name=f"pltpack-{name}", daemon=True)
            for name, loop, arguments in loops
        ]

    def start(self) -> None:
        """Start reading; the load fails if the system gives no threads."""
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError as error:
            self.fail(error)

    def _read_all(self, outlet: Channel[_Flight]) -> None:
        try:
            following = self._flight(self._pieces[0])
            for index, piece in enumerate(self._pieces):
                self._permits.acquire()
                self._check_time()
                begin = time.perf_counter()
                flight, places = following
                if index + 1 < len(self._pieces):
                    following = self._flight(self._pieces[index + 1])
                    advise(following[1])
                flight.parts = begin_reads(places, flight.units, self._pause)
                self.timeline.add("read", piece.label, begin, time.perf_counter())
                if not outlet.put(flight):
                    return
        except BaseException as error:
            self.fail(error)
        finally:
            outlet.leave()

    def _flight(self, piece: Piece) -> tuple[_Flight, list[tuple[StagedContainer, int, int]]]:
        units = units_of(self._job.shard, piece)
        return _Flight(piece, units), list(ranges(units))

    def _pause(self, seconds: float) -> None:
        if seconds > 0 and self._stop.wait(seconds):
            raise Cancelled("the load was cancelled")

    def _stage(self, name: str, work: Callable[[_Flight], None], inlet: Channel[_Flight],
               outlet: Channel[_Flight] | None) -> None:  # fmt: skip
        try:
            while (flight := inlet.get()) is not None:
                self._check_time()
                begin = time.perf_counter()
                work(flight)
                self.timeline.add(name, flight.piece.label, begin, time.perf_counter())
                if outlet is None:
                    self._done(flight)
                elif not outlet.put(flight):
                    return
        except BaseException as error:
            self.fail(error)
        finally:
            if outlet is not None:
                outlet.leave()

    def _check(self, flight: _Flight) -> None:
        flight.parts = arrived(flight.parts)
        with holding(flight.parts):
            for segment, record in flight.units:
                segment.checked_payload(record)

    def _decode_all(self, inlet: Channel[_Flight], outlet: Channel[_Flight]) -> None:
        try:
            # Held, or others would leave before the layers of what is begun here are put to be decoded.
            while (flight := inlet.get(hold=True)) is not None:
                self._check_time()
                begin, piece = time.perf_counter(), flight.piece
                layered = self._layered[piece.step] and flight.begun is None
                if layered:
                    inlet.put_first(self._begin(flight))
                inlet.leave()
                if not layered:
                    self._decode(flight)
                self.timeline.add("decode", piece.label, begin, time.perf_counter())
                if not layered and not outlet.put(flight):
                    return
        except BaseException as error:
            self.fail(error)
        finally:
            outlet.leave()

    def _begin(self, flight: _Flight) -> list[_Flight]:
        """Begin a piece; once all of its step are, gives what is then to be decoded: layers of the whole step."""
        piece = flight.piece
        begun = self._begun[piece.step]
        assert begun is not None
        with holding(flight.parts):
            begun.begin(piece)
        if not self._count(piece.step):
            return []
        # Only the flights hold it from here on.
        self._begun[piece.step] = None
        flights = [_Flight(Piece(piece.step, layers, 0, self._job.tokens, True), ()) for layers in cut(piece.layers)]
        for each in flights:
            each.begun = begun
        return flights

    def _decode(self, flight: _Flight) -> None:
        piece = flight.piece
        if self._job.device is not None:
            with holding(flight.parts):
                flight.staged = self._job.device.decode(self._job.shard, piece)
            flight.parts = ()
            return
        out = self._job.destination.room(piece.layers, piece.start, piece.stop)
        if out is None:
            out = flight.staged = self._buffer(piece)
        if flight.begun is not None:
            flight.begun.finish(piece.layers, out)
        else:
            with holding(flight.parts):
                decode_layers(self._job.shard, piece.layers, piece.start, piece.stop, out)
        flight.parts, flight.begun = (), None

    def _scatter(self, flight: _Flight) -> None:
        if flight.staged is None:
            return
        piece = flight.piece
        with contextlib.nullcontext() if self._job.device is None else self._job.device.scattering():
            for layer, (keys, values) in zip(piece.layers, flight.staged, strict=True):
                if self._stop.is_set():
                    raise Cancelled("the load was cancelled")
                self._job.destination.put(layer, piece.start, piece.stop, keys, values)
        if self._job.device is not None:
            flight.staged = None
            return
        with self._lock:
            layers = self._job.shard.identity.layers[piece.layers.start : piece.layers.stop]
            self._buffers.setdefault((layers, piece.stop - piece.start), []).append(list(flight.staged))

    def _buffer(self, piece: Piece) -> list[KeyValue]:
        """Arrays for a piece, used before if another of its shape is through: fresh pages cost more than a copy."""
        layers = self._job.shard.identity.layers[piece.layers.start : piece.layers.stop]
        with self._lock:
            free = self._buffers.get((layers, piece.stop - piece.start))
            if free:
                return free.pop()
        return one_buffer(layers, piece.stop - piece.start)

    def _done(self, flight: _Flight) -> None:
        step = flight.piece.step
        ready = flight.piece.layers if self._layered[step] or self._count(step) else range(0)
        with self._lock:
            self._missing.difference_update(ready)
        for layer in ready:
            self._ready[layer].set()

    def _count(self, step: int) -> bool:
        """Whether a step's last piece is through; it keeps its permit until somebody waits for the step."""
        with self._lock:
            self._left[step] -= 1
            complete = self._left[step] == 0
            keep = complete and step > self._wanted
            if keep:
                self._kept.add(step)
        if not keep:
            self._permits.release()
        return complete

    def _check_time(self) -> None:
        if self._stop.is_set():
            raise Cancelled("the load was cancelled")
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise TimedOut("the load took longer than it was given")

    def take(self, layer: int) -> None:
        """Wait until a layer is ready, and let what it held go on.

        Raises
        ------
        MissError
            If the load has failed.
        """
        with self._lock:
            self._wanted = max(self._wanted, self._step_of[layer])
            freed = {step for step in self._kept if step <= self._wanted}
            self._kept -= freed
        for _ in freed:
            self._permits.release()
        left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        if not self._ready[layer].wait(left):
            self.fail(TimedOut("the load took longer than it was given"))
        if self._error is not None:
            raise self.settle()

    @property
    def complete(self) -> bool:
        """Whether everything is where it belongs."""
        with self._lock:
            return not self._missing

    @property
    def queued(self) -> int | None:
        """Units that wait between stages; None once the load is complete or has ended."""
        return None if self.complete or self._stop.is_set() else sum(map(len, self._channels))

    def fail(self, error: BaseException) -> None:
        """End the load; the first error is the one that counts."""
        with self._lock:
            if self._error is None and self._missing:
                self._error = error
        self._stop.set()
        for channel in self._channels:
            channel.cancel()
        self._permits.release(len(self._pieces))
        for event in self._ready:
            event.set()

    def settle(self) -> MissError:
        """The miss that a failed load is, counted and logged once."""
        assert self._error is not None
        # Nothing writes to the destination when this returns; a read that hangs may go on alone.
        self._join(self._threads[-1], None)
        with self._lock:
            if self._miss is None:
                self._miss = self._report(self._error, self._job.destination.touched())
            return self._miss

    def close(self, wait: float | None = 1.0) -> None:
        """End the load if it is not complete, and wait for its threads."""
        if not self.complete:
            self.fail(Cancelled("the load was cancelled"))
        if self._error is not None:
            self.settle()
        for thread in self._threads:
            self._join(thread, wait)
        self._buffers.clear()

    def _join(self, thread: threading.Thread, wait: float | None) -> None:
        # A stream may be dropped by one of these threads, or before all of them could be started.
        if thread.ident is not None and thread is not threading.current_thread():
            thread.join(wait)


class Stream:
    """Layers of a hit as they become ready, in order; also a context manager.

    Iterating gives a `LoadedLayer` for each layer. `wait` serves a consumer that asks by layer. A stream that is closed
    or dropped before its end is cancelled.

    Raises
    ------
    MissError
        While iterating, if the load fails; then nothing of it may be used.
    """

    def __init__(self, work: Work, destination: Destination, layers: int) -> None:
        self._work, self._destination, self._layers, self._next = work, destination, layers, 0
        # The layer that is being consumed, and since when.
        self._taken: tuple[int, float] | None = None
        self._finalizer = weakref.finalize(self, _drop, work)
        work.start()

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> LoadedLayer:
        if self._next >= self._layers:
            self.close()
            raise StopIteration
        self._next += 1
        return self.wait(self._next - 1)

    def wait(self, index: int) -> LoadedLayer:
        """One layer, waited for; notes the time between two calls as the consumer's own."""
        begin, index = time.perf_counter(), whole("layer", index, 0, self._layers - 1)
        if self._taken is not None:
            self.timeline.add("consume", str(self._taken[0]), self._taken[1], begin)
            self._taken = None
        self._work.take(index)
        self._taken = index, time.perf_counter()
        return LoadedLayer(index, *self._destination.layer(index))

    def cancel(self) -> None:
        """End the load now, from any thread; who waits for a layer gets the miss."""
        self._work.fail(Cancelled("the load was cancelled"))

    def close(self) -> None:
        """End the load, complete or not, and its threads; harmless when repeated."""
        self._finalizer.detach()
        self._work.close()

    @property
    def complete(self) -> bool:
        """Whether all layers are there, taken or not."""
        return self._work.complete

    @property
    def timeline(self) -> Timeline:
        """When each stage worked on what."""
        return self._work.timeline

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _drop(work: Work) -> None:
    # Not from the thread that happens to collect garbage: it may be one of these threads.
    work.close(wait=0.0)
