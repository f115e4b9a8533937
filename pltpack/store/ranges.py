"""Ranges of a remote file's bytes: what will be needed is read ahead in few requests, and kept until it is."""

from __future__ import annotations

import bisect
import collections
import concurrent.futures
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from pltpack.errors import FormatError, StoreError
from pltpack.format.source import GoneError, Source
from pltpack.store.objects import Objects
from pltpack.store.patience import Patience

#: Ranges that are nearer to each other than this are read at once: a request takes as long as these bytes.
GAP_BYTES = 1 << 16
#: Most bytes of one request, unless one unit is larger.
PIECE_BYTES = 1 << 22
#: Bytes of a file that are read when it is opened: headers are smaller, and small files whole.
HEAD_BYTES = 1 << 16
#: Bytes read ahead that a store keeps, and requests that it has under way at once.
KEPT_BYTES, THREADS = 1 << 28, 16


class Ahead:
    """What a store has read ahead, of all its open files, the oldest dropped first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pieces: collections.OrderedDict[_Piece, RemoteSource] = collections.OrderedDict()
        self._bytes = 0
        self._pool: ThreadPoolExecutor | None = None

    def start(self, source: RemoteSource, begin: int, end: int, fetch: Callable[[], bytes]) -> _Piece | None:
        """Begin to read a range, if there is room for it beside what is still under way."""
        with self._lock:
            for piece in [each for each in self._pieces if each.future.done()]:
                if self._bytes + end - begin <= KEPT_BYTES:
                    break
                self._drop(piece)
            if self._bytes + end - begin > KEPT_BYTES:
                return None
            if self._pool is None:
                self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="pltpack-fetch")
            piece = _Piece(begin, end, self._pool.submit(fetch))
            self._pieces[piece] = source
            self._bytes += end - begin
            return piece

    def used(self, piece: _Piece) -> None:
        """A piece was of use: it is to stay longer than others."""
        with self._lock:
            if piece in self._pieces:
                self._pieces.move_to_end(piece)

    def forget(self, pieces: Sequence[_Piece]) -> None:
        """Drop these."""
        with self._lock:
            for piece in pieces:
                if piece in self._pieces:
                    self._drop(piece)

    def _drop(self, piece: _Piece) -> None:
        source = self._pieces.pop(piece)
        self._bytes -= piece.end - piece.begin
        piece.future.cancel()
        source.dropped(piece)


class _Piece:
    __slots__ = ("begin", "end", "future")

    def __init__(self, begin: int, end: int, future: Future[bytes]) -> None:
        self.begin, self.end, self.future = begin, end, future


class RemoteSource(Source):
    """A file of a remote archive.

    Parameters
    ----------
    objects : Objects
    name : str
        Its name there.
    path : path-like
    patience : Patience
    ahead : Ahead
        The store's.

    Raises
    ------
    GoneError
        If the file is missing.
    StoreError
        If the store does not give it before the deadline.
    """

    distant = True

    def __init__(
        self, objects: Objects, name: str, path: os.PathLike[str], patience: Patience, ahead: Ahead
    ) -> None:
        self._objects, self._name, self.path = objects, name, path
        self._patience, self._ahead = patience, ahead
        self._lock = threading.Lock()
        self._pieces: list[_Piece] = []
        self._end, self._window = -1, GAP_BYTES
        self._head, self.size = self._insist(lambda timeout: objects.head(name, HEAD_BYTES, timeout), HEAD_BYTES)

    def _insist(self, attempt: Callable[[float], tuple[bytes, int]], size: int) -> tuple[bytes, int]:
        try:
            return self._patience.insist("reading", self.path, attempt, size)
        except FileNotFoundError:
            raise GoneError("the file that the manifest names is missing", self.path) from None

    def _fetch(self, begin: int, end: int) -> bytes:
        def attempt(timeout: float) -> tuple[bytes, int]:
            return self._objects.read(self._name, begin, end, timeout), end

        return self._insist(attempt, end - begin)[0]

    def read(self, offset: int, length: int) -> bytes:
        """See `Source.read`; `StoreError` if the bytes do not come before the deadline."""
        end = offset + length
        if end > self.size:
            raise FormatError("file ends early", self.path)
        if end <= len(self._head):
            return self._head[offset:end]
        deadline = self._patience.deadline(length)
        parts, at = [], offset
        while at < end:
            piece, until = self._covering(at, end)
            if piece is None:
                parts.append(self._next(at, until))
            else:
                data = self._result(piece, deadline)
                parts.append(data[at - piece.begin : until - piece.begin])
            at = until
        self._end = end
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _covering(self, at: int, end: int) -> tuple[_Piece | None, int]:
        """The piece that holds a byte, and where it or else the gap before the next one ends, at most `end`."""
        with self._lock:
            index = bisect.bisect_right(self._pieces, at, key=lambda piece: piece.begin)
            if index and self._pieces[index - 1].end > at:
                piece = self._pieces[index - 1]
                return piece, min(piece.end, end)
            following = self._pieces[index].begin if index < len(self._pieces) else end
            return None, min(following, end)

    def _result(self, piece: _Piece, deadline: float) -> bytes:
        try:
            data = piece.future.result(max(0.0, deadline - time.monotonic()))
        except (concurrent.futures.TimeoutError, concurrent.futures.CancelledError):
            self._ahead.forget([piece])
            if time.monotonic() < deadline:
                return self._fetch(piece.begin, piece.end)
            raise StoreError("reading failed before its deadline", self.path) from None
        except BaseException:
            self._ahead.forget([piece])
            raise
        self._ahead.used(piece)
        return data

    def _next(self, begin: int, end: int) -> bytes:
        """Bytes that were not read ahead; who reads on gets the more of what follows the longer he does."""
        if begin != self._end:
            self._window = GAP_BYTES
            return self._fetch(begin, end)
        data = self._fetch(begin, end)
        self._window = min(2 * self._window, PIECE_BYTES)
        self._start(end, min(end + self._window, self.size))
        return data

    def will_need(self, ranges: Sequence[tuple[int, int]]) -> None:
        """See `Source.will_need`: near ranges are joined, and all requests start at once."""
        begin = end = -1
        for first, last in sorted(span for span in ranges if span[1] > max(span[0], len(self._head))):
            if begin >= 0 and first - end <= GAP_BYTES and max(last, end) - begin <= PIECE_BYTES:
                end = max(last, end)
                continue
            self._start(begin, end)
            begin, end = max(first, end if begin >= 0 else 0), last
        self._start(begin, end)

    def _start(self, begin: int, end: int) -> None:
        """Have ``[begin, end)`` read, but for what is or will be here."""
        while begin < end and begin >= 0:
            piece, until = self._covering(begin, end)
            if piece is None:
                self._add(begin, until)
            begin = until

    def _add(self, begin: int, end: int) -> None:
        piece = self._ahead.start(self, begin, end, lambda: self._fetch(begin, end))
        if piece is not None:
            with self._lock:
                bisect.insort(self._pieces, piece, key=lambda each: each.begin)

    def dropped(self, piece: _Piece) -> None:
        """Know that a piece is not kept any more."""
        with self._lock:
            if piece in self._pieces:
                self._pieces.remove(piece)

    def close(self) -> None:
        """See `Source.close`."""
        self._ahead.forget(list(self._pieces))
