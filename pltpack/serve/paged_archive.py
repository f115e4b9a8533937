"""An archive as a store of pages: engines that keep caches by digests of tokens ask it by their own names.

An archive knows its tokens, so the names that an engine would give their pages can be computed: any page of any session
is found, whoever wrote it, and decoded by itself. Pages that are written come without their tokens and cannot go into
an archive; a spool keeps them in the engine's own file format, to be compressed when their tokens are at hand.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pltpack.codec.base import KeyValue
from pltpack.dumps.atomic import make_folder, replacing
from pltpack.errors import FormatError, PltpackError
from pltpack.serve.follow import FollowedArchive

log = logging.getLogger("pltpack.serve")

#: Names of the pages of some tokens int32 ``[T]``: ``(name, start, stop)``.
Chain = Callable[[np.ndarray], list[tuple[str, int, int]]]


class _Place(NamedTuple):
    session: str
    start: int
    stop: int


class PagedArchive:
    """Pages of an archive's sessions by their names; safe to use from several threads.

    Parameters
    ----------
    archive : FollowedArchive
    chain : callable
        The engine's names.
    salt : str or None
        The tenant.
    """

    def __init__(self, archive: FollowedArchive, chain: Chain, salt: str | None = None) -> None:
        self._archive, self._chain, self._salt = archive, chain, salt
        self._lock = threading.Lock()
        self._generation: int | None = None
        self._places: dict[str, _Place] = {}
        self._bad: set[str] = set()

    def _index(self) -> dict[str, _Place]:
        loader = self._archive.loader()
        if loader is None:
            return {}
        archive = loader.archive
        with self._lock:
            if self._generation != archive.manifest.generation:
                self._places, self._generation = {}, archive.manifest.generation
                for entry in archive.manifest.sessions:
                    if entry.salt == self._salt and entry.session not in self._bad:
                        self._add(entry.session)
            return self._places

    def _add(self, session: str) -> None:
        loader = self._archive.loader()
        assert loader is not None
        try:
            tokens = loader.archive.shard(session).tokens
        except PltpackError as error:
            self._leave_out(session, error)
            return
        for name, start, stop in self._chain(tokens):
            self._places.setdefault(name, _Place(session, start, stop))

    def _leave_out(self, session: str, error: PltpackError) -> None:
        log.warning("session %r is left out: %s", session, error)
        self._bad.add(session)
        self._places = {name: place for name, place in self._places.items() if place.session != session}

    def __contains__(self, name: str) -> bool:
        return name in self._index()

    def page(self, name: str) -> list[KeyValue] | None:
        """A page's keys and values ``[H, T, D]`` per layer; None where it is not stored or cannot be read."""
        place = self._index().get(name)
        loader = self._archive.loader()
        if place is None or loader is None:
            return None
        try:
            snapshot = loader.archive.read(place.session, tokens=slice(place.start, place.stop))
        except PltpackError as error:
            if isinstance(error, FormatError):
                with self._lock:
                    self._leave_out(place.session, error)
            else:
                log.warning("page %s is a miss: %s", name, error)
            return None
        return [snapshot.layer(index) for index in range(len(snapshot.identity.layers))]


class Spool:
    """A folder of pages that were written, each whole or not at all.

    Parameters
    ----------
    folder : Path
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        make_folder(folder)

    def path(self, file: str) -> Path:
        """Where a file is or will be."""
        if Path(file).name != file:
            raise FormatError(f"{file!r} is no name of a file", self._folder)
        return self._folder / file

    def write(self, file: str, *parts: bytes | memoryview) -> bool:
        """Write a file unless it is there; False where the system refuses."""
        try:
            path = self.path(file)
            if path.exists():
                return True
            with replacing(path) as temporary, open(temporary, "xb") as out:
                for part in parts:
                    out.write(part)
        except (OSError, PltpackError) as error:
            log.warning("a page is not kept: %s", error)
            return False
        return True

    def read(self, file: str, size: int) -> bytes | None:
        """A file of exactly so many bytes, or None."""
        try:
            with open(self.path(file), "rb") as opened:
                data = opened.read(size + 1)
        except (OSError, PltpackError):
            return None
        return data if len(data) == size else None

    def names(self, suffix: str) -> list[str]:
        """Files that end so."""
        return sorted(file.name for file in self._folder.glob(f"*{suffix}"))

    def has(self, file: str) -> bool:
        """Whether a file is there."""
        try:
            return self.path(file).is_file()
        except PltpackError:
            return False
