"""What a remote archive needs of an object store, and how fsspec's file systems give it.

Every method makes one attempt, which may take `timeout` seconds, and raises what went wrong; `Patience.insist` repeats.
"""

from __future__ import annotations

import abc
import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pltpack.errors import UnsupportedError
from pltpack.store.patience import ChangedError, ShortError


class Listed(NamedTuple):
    """An object below the archive's root: its name there, and when it was written (seconds since 1970)."""

    name: str
    modified: float


class Objects(abc.ABC):
    """Objects below a root, named by what follows it."""

    def check_writable(self) -> None:  # noqa: B027 - most are
        """Refuse with `UnsupportedError` what can only be read."""

    @abc.abstractmethod
    def get(self, name: str, timeout: float) -> tuple[bytes, str]:
        """A whole object and what the store calls this state of it; `FileNotFoundError` if there is none."""

    @abc.abstractmethod
    def head(self, name: str, length: int, timeout: float) -> tuple[bytes, int]:
        """The first bytes of an object, at most `length`, and its size."""

    @abc.abstractmethod
    def read(self, name: str, begin: int, end: int, timeout: float) -> bytes:
        """Bytes ``[begin, end)``, all of them; `ShortError` if fewer came."""

    @abc.abstractmethod
    def create(self, name: str, file: Path, timeout: float) -> None:
        """Make an object of a file's bytes; `ChangedError` if one of that name exists."""

    @abc.abstractmethod
    def replace(self, name: str, data: bytes, version: str | None, timeout: float) -> None:
        """Put an object in place of one in the state `version`, or of none; `ChangedError` if there is another."""

    @abc.abstractmethod
    def delete(self, name: str, timeout: float) -> None:
        """Remove an object, if it is there."""

    @abc.abstractmethod
    def listed(self, timeout: float) -> list[Listed]:
        """All objects below the root."""


class FsspecObjects(Objects):
    """Any file system of fsspec, to be read from only.

    Parameters
    ----------
    fs : fsspec.AbstractFileSystem
    root : str
        Path of the archive there.
    """

    def __init__(self, fs: Any, root: str) -> None:
        self._fs, self._root = fs, root.rstrip("/")

    def path(self, name: str) -> str:
        """An object's path for fsspec."""
        return f"{self._root}/{name}"

    def _call(self, method: str, *args: Any, timeout: float, **kwargs: Any) -> Any:
        if getattr(self._fs, "async_impl", False):
            from fsspec.asyn import sync

            return sync(self._fs.loop, getattr(self._fs, f"_{method}"), *args, timeout=timeout, **kwargs)
        return getattr(self._fs, method)(*args, **kwargs)

    def get(self, name: str, timeout: float) -> tuple[bytes, str]:
        """See `Objects.get`; the state is the bytes' digest."""
        data = bytes(self._call("cat_file", self.path(name), timeout=timeout))
        return data, hashlib.sha256(data).hexdigest()

    def head(self, name: str, length: int, timeout: float) -> tuple[bytes, int]:
        """See `Objects.head`."""
        size = int(self._call("info", self.path(name), timeout=timeout)["size"])
        return self.read(name, 0, min(length, size), timeout) if size else b"", size

    def read(self, name: str, begin: int, end: int, timeout: float) -> bytes:
        """See `Objects.read`."""
        data = bytes(self._call("cat_file", self.path(name), start=begin, end=end, timeout=timeout))
        if len(data) != end - begin:
            raise ShortError(f"{len(data)} of {end - begin} bytes came")
        return data

    def create(self, name: str, file: Path, timeout: float) -> None:
        """Not possible here."""
        self.check_writable()

    def replace(self, name: str, data: bytes, version: str | None, timeout: float) -> None:
        """Not possible here."""
        self.check_writable()

    def check_writable(self) -> None:
        """See `Objects.check_writable`: none of these is."""
        protocol = self._fs.protocol if isinstance(self._fs.protocol, str) else self._fs.protocol[0]
        raise UnsupportedError(f"archives at {protocol}:// can be read, but not written: no conditional write is "
                                "known there by which only one of two writers wins", self._root)  # fmt: skip

    def delete(self, name: str, timeout: float) -> None:
        """See `Objects.delete`."""
        try:
            self._call("rm_file", self.path(name), timeout=timeout)
        except FileNotFoundError:
            pass
        finally:
            self._fs.invalidate_cache()

    def listed(self, timeout: float) -> list[Listed]:
        """See `Objects.listed`."""
        self._fs.invalidate_cache()
        found = self._call("find", self._root, detail=True, timeout=timeout)
        return list(self._names(found))

    def _names(self, found: dict[str, dict[str, Any]]) -> Iterator[Listed]:
        prefix = self._root.lstrip("/") + "/"
        for path, info in found.items():
            name = path.lstrip("/")
            if name.startswith(prefix):
                when = next((info[key] for key in ("LastModified", "mtime", "created", "updated") if key in info), 0.0)
                yield Listed(name[len(prefix) :], when.timestamp() if hasattr(when, "timestamp") else float(when))


class MemoryObjects(FsspecObjects):
    """``memory://``, the file system in a process's memory: for tests and trials."""

    _lock = threading.Lock()

    def check_writable(self) -> None:
        """See `Objects.check_writable`."""

    def create(self, name: str, file: Path, timeout: float) -> None:
        """See `Objects.create`."""
        self.replace(name, file.read_bytes(), None, timeout)

    def replace(self, name: str, data: bytes, version: str | None, timeout: float) -> None:
        """See `Objects.replace`."""
        with self._lock:
            try:
                present = self.get(name, timeout)[1]
            except FileNotFoundError:
                present = None
            if present != version:
                raise ChangedError(name)
            self._fs.pipe_file(self.path(name), data)
