"""Captured prompts on their way to dumps or to the archive, on a thread of its own."""

from __future__ import annotations

import atexit
import hashlib
import logging
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pltpack.codec.base import KeyValue
from pltpack.errors import PltpackError
from pltpack.serve.vllm.settings import ARCHIVE, ConnectorSettings
from pltpack.snapshot import Identity, Snapshot

log = logging.getLogger("pltpack.serve")

#: Sessions that are appended in one generation at most: those that wait together share prefixes.
TOGETHER = 64


def session_name(tokens: np.ndarray, salt: str | None) -> str:
    """The name of a captured prompt: the same prompt of the same tenant has the same name."""
    digest = hashlib.sha256(np.ascontiguousarray(tokens, "<i4").tobytes() + b"|" + (salt or "").encode())
    return f"vllm-{digest.hexdigest()[:24]}"


class Keeper:
    """Writes prompts behind the engine's back.

    Parameters
    ----------
    settings : ConnectorSettings
    identity : Identity
        Of the engine.
    written : callable
        Called when the archive has changed.
    """

    def __init__(self, settings: ConnectorSettings, identity: Identity, written: Callable[[], None]) -> None:
        self._settings, self._identity, self._written = settings, identity, written
        self._queue: queue.SimpleQueue[Snapshot | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting = 0
        self._seen: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="pltpack-capture", daemon=True)
        self._thread.start()
        # An engine that is not shut down still ends with its process.
        atexit.register(_close, weakref.ref(self))

    def wants(self, tokens: np.ndarray) -> bool:
        """Whether a prompt is neither kept nor on its way, and there is room for it."""
        name = session_name(tokens, self._identity.salt)
        if name in self._seen or (self._settings.dumps / f"{name}.safetensors").exists():
            return False
        size = len(tokens) * sum(layer.bytes_per_token for layer in self._identity.layers)
        with self._lock:
            if self._waiting + size > self._settings.queue_bytes:
                log.warning("a prompt of %d tokens is not kept: %d bytes wait", len(tokens), self._waiting)
                return False
        return True

    def put(self, tokens: np.ndarray, layers: Sequence[KeyValue]) -> None:
        """Keep a prompt: keys and values ``[H, T, D]`` per layer, which are not copied."""
        name = session_name(tokens, self._identity.salt)
        snapshot = Snapshot.from_arrays(name, tokens, layers, self._identity)
        self._seen.add(name)
        with self._lock:
            self._waiting += snapshot.raw_bytes
        self._queue.put(snapshot)

    def _run(self) -> None:
        ended = False
        while not ended:
            batch = [self._queue.get()]
            while len(batch) < TOGETHER and not self._queue.empty():
                batch.append(self._queue.get())
            ended = None in batch
            snapshots = [snapshot for snapshot in batch if snapshot is not None]
            try:
                if snapshots:
                    self._write(snapshots)
            # A thread that dies in silence would keep nothing any more.
            except Exception as error:
                shown = None if isinstance(error, PltpackError) else error
                log.warning("%d prompts are not kept: %s", len(snapshots), error, exc_info=shown)
            with self._lock:
                self._waiting -= sum(snapshot.raw_bytes for snapshot in snapshots)

    def _write(self, snapshots: list[Snapshot]) -> None:
        import pltpack

        settings = self._settings
        if settings.capture_to != ARCHIVE:
            pltpack.write_dump(snapshots, settings.dumps)
            return
        if _is_archive(settings.archive):
            more: dict[str, Any] = {} if settings.quality is None else {"quality": settings.quality}
            pltpack.append(settings.archive, snapshots, **more)
        else:
            pltpack.compress(snapshots, settings.archive, quality=settings.quality or "lossless")
        self._written()

    def close(self) -> None:
        """Write what waits, and end the thread; harmless when repeated."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()


def _is_archive(path: Path) -> bool:
    from pltpack.format.manifest import NAME

    return (path / NAME).is_file()


def _close(reference: weakref.ref[Keeper]) -> None:
    keeper = reference()
    if keeper is not None:
        keeper.close()
