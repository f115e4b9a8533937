"""The one interface to where an archive lives."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import os
from pathlib import Path
from typing import Any

from pltpack.format.manifest import Manifest, outline
from pltpack.format.sealing import Seal, current_key
from pltpack.format.source import Source


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """A manifest as a store has it.

    Attributes
    ----------
    manifest : Manifest
    bytes : int
        Size of its file.
    version : str or None
        What the store calls this state of the file, for a conditional write; None where a lock guards it.
    """

    manifest: Manifest
    bytes: int
    version: str | None = None


class Writing(abc.ABC):
    """A new generation being written; `base` is the one that it follows, if there is one.

    Attributes
    ----------
    folder : Path
        Where new files are to be made, under names that `pltpack.archive.files` gives; ``shards`` is there.
    store : Store
        Gives these files, and those of `base`, which is its present generation.
    seal : Seal or None
        With what a new archive is to be encrypted.
    """

    folder: Path
    store: Store
    base: Stored | None = None
    seal: Seal | None = None

    @abc.abstractmethod
    def commit(self, manifest: Manifest) -> None:
        """Make a generation the archive's, durably and at once.

        Raises
        ------
        ConflictError
            If another writer has committed since `base`.
        UnsupportedError
            If readers would refuse it, for its size or the values in it.
        """

    @abc.abstractmethod
    def drop_replaced(self, manifest: Manifest) -> None:
        """Remove what the committed manifest replaced: shards of `base`, and new files that it does not name."""

    @abc.abstractmethod
    def collect(self, manifest: Manifest) -> list[str]:
        """Remove files that neither the manifest, which is committed, nor a writer at work needs; gives their names."""


class Store(abc.ABC):
    """Where an archive is, or is to be.

    Attributes
    ----------
    location : path-like
        What errors name; joins with names by ``/``.
    """

    location: os.PathLike[str]
    key: bytes | None = None

    def secret(self) -> bytes | None:
        """The key of an encrypted archive: the store's own, or what the process was given."""
        return self.key or current_key()

    @abc.abstractmethod
    def load(self) -> Stored:
        """The present generation.

        Raises
        ------
        FormatError
            If there is none, or it is damaged.
        """

    @abc.abstractmethod
    def outline(self) -> dict[str, Any] | None:
        """What an encrypted archive tells without its key; see `pltpack.format.manifest.outline`."""

    @abc.abstractmethod
    def open(self, file: str) -> Source:
        """A file that the manifest names; `GoneError` if it is missing."""

    @abc.abstractmethod
    def occupied(self) -> bool:
        """Whether something is there already."""

    @abc.abstractmethod
    def check_new(self) -> None:
        """Refuse with `ConflictError` if a new archive cannot be made here."""

    @abc.abstractmethod
    def creating(self) -> contextlib.AbstractContextManager[Writing]:
        """Make a new archive, which appears whole when the context is left after a commit, or not at all.

        Raises
        ------
        ConflictError
            If something is there, or has come there meanwhile.
        """

    @abc.abstractmethod
    def writing(self) -> contextlib.AbstractContextManager[Writing]:
        """Write a new generation of the archive; a failure leaves no new files behind.

        Raises
        ------
        ConflictError
            If another writer is at work.
        """

    @property
    def folder(self) -> Path | None:
        """The archive's folder, if it is one of this machine; of one being written, where new files go."""
        return None


def parse_manifest(data: bytes, path: os.PathLike[str], store: Store) -> Manifest:
    """A manifest, with the store's key looked for only if it is encrypted; errors as of `Manifest.parse`."""
    key = store.secret() if outline(data, path) is not None else None
    return Manifest.parse(data, path, key)
