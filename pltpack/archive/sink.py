"""Write containers behind the encoders: hashing, writing and syncing in threads of their own, in order."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import numpy as np

from pltpack.format.container import ContainerInfo, ContainerWriter
from pltpack.format.sealing import Seal

#: Payload bytes, and appends, that may wait to be written before the encoders have to.
WAITING_BYTES = 1 << 25
WAITING_APPENDS = 64


class Sink:
    """Containers being written; use as a context manager, from one thread.

    What is not committed when the context is left is removed. Errors of the system come up at a later call, at the
    latest in what `commit` gives.

    Parameters
    ----------
    seal : Seal, optional
        Of an archive that is encrypted.
    """

    def __init__(self, seal: Seal | None = None) -> None:
        self.seal = seal
        # One thread each keeps the order. To sync a file is mostly to wait.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="pltpack-write")
        self._hasher = ThreadPoolExecutor(1, thread_name_prefix="pltpack-hash")
        self._committer = ThreadPoolExecutor(1, thread_name_prefix="pltpack-sync")
        self._containers: list[ContainerWriter] = []
        self._waiting: collections.deque[tuple[int, tuple[Future[None], Future[None]]]] = collections.deque()
        self._bytes = 0
        self._syncs: list[Future[None]] = []

    def __enter__(self) -> Sink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.shutdown(wait=True, cancel_futures=True)
        self._hasher.shutdown(wait=True, cancel_futures=True)
        self._committer.shutdown(wait=True, cancel_futures=kind is not None)
        for container in self._containers:
            container.abort()

    def open(self, path: Path, reserve: int) -> ContainerWriter:
        """A new container; arguments as of `ContainerWriter`. Append to it through this sink only."""
        container = ContainerWriter(path, reserve, self.seal)
        self._containers.append(container)
        return container

    def append(self, container: ContainerWriter, payloads: Sequence[bytes]) -> None:
        """Append payloads to a container, soon."""
        size = sum(map(len, payloads))
        while self._waiting and (self._bytes + size > WAITING_BYTES or len(self._waiting) >= WAITING_APPENDS):
            self._settle()
        self._waiting.append((size, self._submit(container, payloads)))
        self._bytes += size

    def commit(
        self, container: ContainerWriter, tables: Mapping[str, np.ndarray], metadata: Mapping[str, str]
    ) -> Future[ContainerInfo]:
        """Commit a container, to which nothing is appended any more; arguments as of `ContainerWriter.commit`."""
        before = [future for _, futures in self._waiting for future in futures]

        def finish() -> ContainerInfo:
            for future in before:
                future.result()
            return container.commit(tables, metadata)

        return self._committer.submit(finish)

    def place(
        self, container: ContainerWriter, tables: Mapping[str, np.ndarray], metadata: Mapping[str, str]
    ) -> ContainerInfo:
        """As `commit`, but the file is there to be read on return, and durable when `finish` has returned."""
        while self._waiting:
            self._settle()
        info = container.commit(tables, metadata, sync=False)
        self._syncs.append(self._committer.submit(container.sync))
        return info

    def finish(self) -> None:
        """Wait until all that was placed is durable."""
        for future in self._syncs:
            future.result()

    def _settle(self) -> None:
        size, futures = self._waiting.popleft()
        self._bytes -= size
        for future in futures:
            future.result()

    def _submit(self, container: ContainerWriter, payloads: Sequence[bytes]) -> tuple[Future[None], Future[None]]:
        def write() -> None:
            for payload in payloads:
                container.write(payload)

        def digest() -> None:
            for payload in payloads:
                container.digest(payload)

        return self._writer.submit(write), self._hasher.submit(digest)
