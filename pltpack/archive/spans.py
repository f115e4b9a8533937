"""Layer by layer out of units that hold many layers: what was decoded of the others waits, in memory or in a file."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, BinaryIO, Protocol

import numpy as np

from pltpack.archive.decoding import one_buffer, span_pieces
from pltpack.archive.segments import fresh
from pltpack.archive.shard import Shard
from pltpack.archive.threads import together
from pltpack.codec.base import KeyValue
from pltpack.snapshot import LayerGeometry

if TYPE_CHECKING:
    from pltpack.archive.reader import Archive

#: Decoded bytes of layer groups that are kept in memory; more go to a temporary file.
MEMORY_BYTES = 1 << 28


class Decode(Protocol):
    """`pltpack.archive.reader.ShardSource.decode_layers`."""

    def __call__(
        self, layers: Sequence[int], start: int, stop: int, out: Sequence[KeyValue] | None = None
    ) -> list[KeyValue]:
        """Decode in this thread."""
        ...


class SpanSource:
    """Gives one layer after the other of a session whose units hold several.

    Parameters
    ----------
    archive : Archive
        For its threads.
    shard : Shard
    decode : Decode
    """

    def __init__(self, archive: Archive, shard: Shard, decode: Decode) -> None:
        self._archive, self._decode, self._lock = archive, decode, threading.Lock()
        self._shard, self._layers = shard, shard.identity.layers
        # By token range: who writes long layers asks for all ranges of one before those of the next.
        self._held: dict[tuple[int, int], _Held] = {}
        self._plain = False

    def layer(self, index: int, start: int, stop: int) -> KeyValue | None:
        """One layer's tokens ``[start, stop)``; None if the units that hold it hold no other layer."""
        with self._lock:
            if self._plain or start == stop:
                return None
            held = self._held.get((start, stop))
            if held is None or index not in held.group:
                pieces = span_pieces(self._shard, range(index, len(self._layers)), start, stop)
                if not pieces:
                    self._plain = True
                    return None
                held = self._fill([piece for piece in pieces if piece[0] == pieces[0][0]], start, stop)
            return held.layer(index)

    def _fill(self, pieces: list[tuple[range, int, int]], start: int, stop: int) -> _Held:
        # Ranges of one pass do not overlap.
        self._held = {at: held for at, held in self._held.items() if at[1] <= start or stop <= at[0]}
        group, spare = pieces[0][0], MEMORY_BYTES - sum(held.memory for held in self._held.values())
        held = _Held([self._layers[i] for i in group], group, start, stop, spare)

        def work(piece: tuple[range, int, int]) -> None:
            _, first, last = piece
            held.put(first, last, self._decode(group, first, last, held.room(first, last)))

        together(work, pieces, self._archive.pool, (os.cpu_count() or 1) - 1)
        self._held[start, stop] = held
        return held


class _Held:
    """A layer group's decoded tokens, in memory if they are at most so many bytes."""

    def __init__(self, layers: Sequence[LayerGeometry], group: range, start: int, stop: int, spare: int) -> None:
        self._layers, self.group, self._start, self._stop, self.memory = layers, group, start, stop, 0
        sizes = [(stop - start) * layer.bytes_per_token for layer in layers]
        self._offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(int).tolist()
        self._file: BinaryIO | None = None
        self._arrays: list[KeyValue] = []
        if sum(sizes) > spare:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the object
        else:
            self.memory = sum(sizes)
            self._arrays = one_buffer(layers, stop - start)

    def room(self, first: int, last: int) -> list[KeyValue] | None:
        """Where tokens ``[first, last)`` can be decoded to in place."""
        if self._file is not None:
            return None
        part = slice(first - self._start, last - self._start)
        return [(keys[:, part], values[:, part]) for keys, values in self._arrays]

    def put(self, first: int, last: int, arrays: Sequence[KeyValue]) -> None:
        """Keep decoded tokens ``[first, last)``, which are in their room already if there was one."""
        if self._file is None:
            return
        total = self._stop - self._start
        for index, pair in enumerate(arrays):
            at = self._offsets[index]
            for array in pair:
                width = array.shape[2] * array.itemsize
                for head in array:
                    data = np.ascontiguousarray(head).reshape(-1).view(np.uint8)
                    _write(self._file.fileno(), data, at + (first - self._start) * width)
                    at += total * width

    def layer(self, layer: int) -> KeyValue:
        """One layer's keys and values."""
        index = layer - self.group.start
        if self._file is None:
            return self._arrays[index]
        keys, values = fresh(self._layers[index], self._stop - self._start)
        at = self._offsets[index]
        for array in (keys, values):
            flat = array.reshape(-1).view(np.uint8)
            _read(self._file.fileno(), flat, at)
            at += len(flat)
        return keys, values


def _write(file: int, data: np.ndarray, at: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(file, data[done:].data, at + done)


def _read(file: int, data: np.ndarray, at: int) -> None:
    done = 0
    while done < len(data):
        count = os.preadv(file, [data[done:].data], at + done)
        if not count:
            raise OSError(errno.EIO, "a temporary file of decoded layers has become shorter")
        done += count
