"""Snapshots that another process can read: they name their dump, which every process opens for itself.

A snapshot of an open file cannot go to another process. One of a `DumpFile` can: it holds what is small (token ids,
identity, captured probabilities), and its keys and values are read where they are asked for, through the file's path.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import threading
from pathlib import Path

import numpy as np

from pltpack.dumps.base import DumpFormat
from pltpack.dumps.registry import Formats, read_dump
from pltpack.dumps.tokens import TokenLookup
from pltpack.errors import DumpError
from pltpack.snapshot import Identity, Snapshot

#: Dumps that a process keeps open.
MOST_OPEN = 64

PathLike = str | os.PathLike[str]


@dataclasses.dataclass(frozen=True)
class DumpFile:
    """A dump, and how to read it, the same in every process that sees the path.

    Attributes
    ----------
    path : str
        Absolute.
    format : str
    options : tuple of (str, str)
        Settings of the format.
    tokens : str or None
        JSON file of token ids, absolute.
    identity : Identity or None
        What is known of the model.
    size : int
        Bytes of a file; 0 of a folder.
    """

    path: str
    format: str
    options: tuple[tuple[str, str], ...] = ()
    tokens: str | None = None
    identity: Identity | None = None
    size: int = 0

    @classmethod
    def of(
        cls, path: Path, reader: DumpFormat, tokens: PathLike | None = None, identity: Identity | None = None
    ) -> DumpFile:
        """Describe a dump that is there; arguments as of `pltpack.dumps.registry.read_dump`."""
        options, lookup = tuple(sorted(reader.chosen.items())), None if tokens is None else os.path.abspath(tokens)
        return cls(os.path.abspath(path), reader.format_id, options, lookup, identity, _size(path))

    def scan(self) -> list[Snapshot]:
        """Its snapshots, which can go to other processes.

        Raises
        ------
        DumpError, IdentityError, UnsupportedError
            As of `pltpack.dumps.open_dumps`; also if the file has another size here than where it was described.
        """
        return [self.reopened(snapshot) for snapshot in _opened(self).values()]

    def reopened(self, snapshot: Snapshot) -> Snapshot:
        """A snapshot of this dump as one that can go to other processes."""
        return dataclasses.replace(snapshot, source=Reopened(self, snapshot.session))


@dataclasses.dataclass(frozen=True)
class Reopened:
    """A `pltpack.snapshot.LayerSource` over a session of a dump, which is opened when it is first read."""

    file: DumpFile
    session: str

    def layer(self, index: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """See `pltpack.snapshot.LayerSource.layer`."""
        found = _opened(self.file).get(self.session)
        if found is None:
            raise DumpError(f"session {self.session!r} is not there any more", self.file.path)
        return found.source.layer(index, start, stop)


_held: collections.OrderedDict[tuple[object, ...], dict[str, Snapshot]] = collections.OrderedDict()
_lock = threading.Lock()


def _opened(file: DumpFile) -> dict[str, Snapshot]:
    """The snapshots of a dump by name, opened once in a process as long as the file is the same."""
    path = Path(file.path)
    try:
        status = path.stat()
    except OSError as error:
        raise DumpError(f"cannot be read ({error.strerror})", path) from None
    if _size(path) != file.size:
        raise DumpError(f"has {_size(path)} bytes here, not {file.size}", path)
    key = (file.path, file.format, file.options, file.tokens, status.st_ino, status.st_mtime_ns)
    with _lock:
        if key not in _held:
            reader = Formats(file.format, dict(file.options), identity=file.identity).forced
            assert reader is not None
            _held[key] = {s.session: s for s in read_dump(path, reader, TokenLookup(file.tokens), file.identity)}
            while len(_held) > MOST_OPEN:
                _held.popitem(last=False)
        _held.move_to_end(key)
        return _held[key]


def _size(path: Path) -> int:
    return 0 if path.is_dir() else path.stat().st_size
