"""Decode many units with few reads and few calls of their codec."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash

from pltpack.archive.segments import Segment
from pltpack.codec.base import Codec, DecodeJob, KeyValue, Unit

#: Most payload bytes that are read at once, unless one unit is larger.
PIECE_BYTES = 1 << 20
#: Most payload bytes that `at_once` reads.
WINDOW_BYTES = 1 << 22


class _Item(NamedTuple):
    segment: Segment
    record: np.void
    offset: int
    length: int
    checksum: int
    tokens: int
    layer: int
    layers: int
    state: int
    out: KeyValue
    reference: KeyValue | None


class _Buffer(threading.local):
    """Memory that a thread reads payloads to, again and again: fresh pages cost more than reading them."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def view(self, size: int) -> memoryview:
        if size > PIECE_BYTES:
            return memoryview(bytearray(size))
        if len(self._bytes) < size:
            self._bytes = bytearray(PIECE_BYTES)
        return memoryview(self._bytes)[:size]


class _Window(threading.local):
    """What `at_once` has read for a thread, or is going to read when the first of it is asked for."""

    def __init__(self) -> None:
        self.container: Any = None
        self._bytes = bytearray()
        self._start = self._end = 0
        self._filled = False

    def open(self, container: Any, start: int, end: int) -> None:
        self.container, self._start, self._end, self._filled = container, start, end, False

    def view(self, container: Any, start: int, end: int) -> memoryview | None:
        if container is not self.container or start < self._start or end > self._end:
            return None
        size = self._end - self._start
        if not self._filled:
            if len(self._bytes) < size:
                self._bytes = bytearray(size)
            container.payload_into(memoryview(self._bytes)[:size], self._start)
            self._filled = True
        return memoryview(self._bytes)[start - self._start : end - self._start]


_buffer, _window = _Buffer(), _Window()


@contextlib.contextmanager
def at_once(segment: Segment, units: Sequence[np.ndarray]) -> Iterator[None]:
    """Have this thread read these units of a segment together, whole and all of them going to be decoded.

    What reads and decrypts is as far from the processor after each decoding as what decodes after each reading.
    Nothing is done where they do not follow each other in the file, are many bytes, or come from afar.
    """
    container = segment.container
    if _window.container is not None or not container.at_hand or not any(map(len, units)):
        yield
        return
    offsets = np.concatenate([each["offset"] for each in units]).astype(np.int64)
    lengths = np.concatenate([each["length"] for each in units]).astype(np.int64)
    start, end = int(offsets[0]), int(offsets[-1] + lengths[-1])
    if end - start > WINDOW_BYTES or (offsets[1:] != offsets[:-1] + lengths[:-1]).any():
        yield
        return
    _window.open(container, start, end)
    try:
        yield
    finally:
        _window.container = None


class Batch:
    """Whole units to decode straight into place; not for use by several threads at once."""

    def __init__(self) -> None:
        self._items: list[_Item] = []

    def add(self, segment: Segment, record: np.void, out: KeyValue, reference: KeyValue | None = None) -> None:
        """Note a unit; arguments as of `Segment.decode`. The arrays are filled by the next `run`."""
        # All fields at once: one of them takes nearly as long.
        offset, length, checksum, _, tokens, layer, layers, state, *_ = record.item()
        fields = offset, length, checksum, tokens, layer, layers, state
        self._items.append(_Item(segment, record, *fields, out, reference))

    def run(self) -> None:
        """Decode all that was added.

        Raises
        ------
        FormatError
            Naming a unit whose checksum or content is wrong.
        """
        items, self._items = self._items, []
        for piece in _pieces(items):
            _decode(piece)


def _pieces(items: list[_Item]) -> Iterator[list[_Item]]:
    """Runs of units of one file that have one codec."""
    piece: list[_Item] = []
    size = 0
    for item in items:
        if piece:
            first = piece[0]
            same = item.segment is first.segment and item.state == first.state
            if not same or size + item.length > PIECE_BYTES:
                yield piece
                piece, size = [], 0
        piece.append(item)
        size += item.length
    if piece:
        yield piece


def _payloads(piece: list[_Item]) -> list[memoryview]:
    """Payloads of units; those that lie one behind the other in the file are read at once."""
    container, out, at, first = piece[0].segment.container, list[memoryview](), 0, 0
    data = _buffer.view(sum(item.length for item in piece))
    for last, item in enumerate(piece):
        end = item.offset + item.length
        if last + 1 < len(piece) and piece[last + 1].offset == end:
            continue
        start = piece[first].offset
        held = _window.view(container, start, end)
        if held is None:
            held = data[at : at + end - start]
            container.payload_into(held, start)
            at += end - start
        out += [held[each.offset - start : each.offset - start + each.length] for each in piece[first : last + 1]]
        first = last + 1
    return out


def _decode(piece: list[_Item]) -> None:
    segment = piece[0].segment
    codec = segment.codec_of(piece[0].record)
    jobs, unchecked = [], not segment.container.authentic
    for item, payload in zip(piece, _payloads(piece), strict=True):
        if unchecked and xxhash.xxh3_64_intdigest(payload) != item.checksum:
            segment.check(item.record, payload)
        jobs.append(DecodeJob(payload, _unit(item, codec), *item.out, item.reference))
    try:
        codec.decode_many(jobs)
    except ValueError:
        # One by one, to name the unit.
        for item, job in zip(piece, jobs, strict=True):
            segment.decode_job(item.record, job)
        raise


def _unit(item: _Item, codec: Codec) -> Unit:
    """As `Segment.unit`, shorter for a unit of one layer."""
    if item.layers != 1 or codec.spans:
        return item.segment.unit(item.record)
    geometry = item.segment.identity.layers[item.layer]
    return Unit(item.layer, geometry, item.segment.position_of(item.record), item.tokens)
