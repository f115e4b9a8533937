"""An archive that a long-running engine reads while others append to it: every new generation is opened as it comes."""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pltpack.errors import PltpackError
from pltpack.format.manifest import NAME
from pltpack.snapshot import Identity

if TYPE_CHECKING:
    from pltpack.archive.reader import Archive
    from pltpack.serve.loader import Loader

log = logging.getLogger("pltpack.serve")

#: Seconds between two looks at the manifest.
INTERVAL = 1.0

Stamp = tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class _Opened:
    stamp: Stamp
    archive: Archive
    loader: Loader


class FollowedArchive:
    """The newest generation of an archive that may not exist yet; safe to use from several threads.

    Parameters
    ----------
    path : path-like
        Archive folder. One that is not there is looked for again, and nothing is found meanwhile.
    expected : callable
        ``expected(identity)``: the engine's own identity, given the archive's; the archive must agree with it.
    accept_unknown : iterable of str
        Fields that the archive need not know.
    profile : path-like, optional
        The profile of an archive that refers to one outside.
    **settings
        For `pltpack.serve.loader.Loader`.

    Raises
    ------
    IdentityError
        Naming the field in which the archive differs.
    FormatError
        If it is damaged.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        expected: Callable[[Identity], Identity],
        accept_unknown: Iterable[str] = (),
        profile: str | os.PathLike[str] | None = None,
        **settings: Any,
    ) -> None:
        self.path = Path(path)
        self._expected, self._accept, self._profile = expected, tuple(accept_unknown), profile
        self._settings = settings
        self._lock = threading.RLock()
        self._opened: _Opened | None = None
        self._former: _Opened | None = None
        # What another process found damaged, whatever the generation.
        self._left_out: set[str] = set()
        self._warming: threading.Thread | None = None
        self._looked = time.monotonic()
        stamp = self._stamp()
        if stamp is not None:
            self._opened = self._open(stamp)

    def _stamp(self) -> Stamp | None:
        try:
            stat = (self.path / NAME).stat()
        except OSError:
            return None
        return stat.st_ino, stat.st_size, stat.st_mtime_ns

    def _open(self, stamp: Stamp) -> _Opened:
        import pltpack

        archive = pltpack.open(self.path, profile=self._profile)
        try:
            loader = archive.loader(
                identity=self._expected(archive.identity), accept_unknown=self._accept, **self._settings
            )
            for session in self._left_out:
                loader.leave_out(session)
        except BaseException:
            archive.close()
            raise
        return _Opened(stamp, archive, loader)

    def loader(self) -> Loader | None:
        """A loader of the newest generation; None if there is no archive yet."""
        with self._lock:
            now = time.monotonic()
            if now - self._looked >= INTERVAL:
                self._looked = now
                stamp = self._stamp()
                if stamp is not None and (self._opened is None or stamp != self._opened.stamp):
                    self._follow(stamp)
            return None if self._opened is None else self._opened.loader

    def _follow(self, stamp: Stamp) -> None:
        try:
            opened = self._open(stamp)
        except (PltpackError, OSError) as error:
            # The engine keeps what it has: a generation that cannot be read is no reason to stop serving.
            log.warning("the new generation is not taken: %s", error)
            return
        # Loads of the former generation may be under way; those of the one before it ended a generation ago.
        if self._former is not None:
            self._former.archive.close()
        self._former, self._opened = self._opened, opened
        if self._warming is not None:
            self._warming = None
            self.warm_up()

    def refresh(self) -> None:
        """Look for a new generation at the next `loader`, without waiting."""
        with self._lock:
            self._looked = time.monotonic() - INTERVAL

    def leave_out(self, session: str) -> None:
        """Do not offer a session any more, as a reader elsewhere found it damaged."""
        with self._lock:
            self._left_out.add(session)
            if self._opened is not None:
                self._opened.loader.leave_out(session)

    def warm_up(self) -> threading.Thread:
        """Begin to make ready for requests: this generation now, on the thread that is returned, and each that follows.

        What is not ready when the first request comes is waited for by it.
        """
        with self._lock:
            if self._warming is None:
                self._warming = threading.Thread(target=self._prepare, name="pltpack-prepare", daemon=True)
                self._warming.start()
            return self._warming

    def _prepare(self) -> None:
        opened = self._opened
        if opened is None:
            return
        try:
            opened.loader.prepare()
        # Loads that meet the same are misses, one by one.
        except Exception as error:
            if self._opened is opened:
                shown = None if isinstance(error, PltpackError) else error
                log.warning("the archive is not made ready: %s", error, exc_info=shown)

    def close(self) -> None:
        """Close all; harmless when repeated."""
        with self._lock:
            both = self._opened, self._former
            self._opened = self._former = None
            for opened in both:
                if opened is not None:
                    opened.archive.close()
