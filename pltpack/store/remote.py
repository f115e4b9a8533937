"""Archives in object stores: files are immutable objects, and the manifest is replaced by conditional writes.

New files are made in a temporary folder of this machine and sent under names that no other writer chooses; then the
manifest is written on condition that it still is the one that this generation follows (spec/format.md, "Object
stores").
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from pltpack.errors import ConflictError, FormatError, StoreError, UnsupportedError
from pltpack.format.manifest import LIBRARY_NAME, NAME, SHARD_NAME, SHARDS, FileEntry, Manifest, outline
from pltpack.format.source import Source
from pltpack.names import session_to_file
from pltpack.store.base import Store, Stored, Writing, parse_manifest
from pltpack.store.local import LocalStore
from pltpack.store.location import Url
from pltpack.store.objects import FsspecObjects, MemoryObjects, Objects
from pltpack.store.patience import ChangedError, Patience
from pltpack.store.ranges import Ahead, RemoteSource

#: Marks of former commits that a manifest keeps.
KEPT_MARKS = 64
#: Seconds that a file which no manifest names is left alone: a writer at work may be about to name it.
GRACE_SECONDS = 86_400
_UPLOADS = 8
_CONFLICT = "another writer has committed a generation meanwhile; nothing was changed (try again)"

Entry = TypeVar("Entry", bound=FileEntry)
Result = TypeVar("Result")


class RemoteStore(Store):
    """An archive at a URL.

    Parameters
    ----------
    url : Url
    patience : Patience, optional
    **options
        For the file system of fsspec.

    Raises
    ------
    UnsupportedError
        If the packages for such URLs are not installed.
    """

    def __init__(self, url: Url, patience: Patience | None = None, **options: Any) -> None:
        self.location: Url = url
        self.patience = patience or Patience.default()
        self.objects = connect(url, self.patience, options)
        self._ahead = Ahead()

    def insist(self, what: str, attempt: Callable[[float], Result], size: int = 0) -> Result:
        """See `Patience.insist`."""
        return self.patience.insist(what, self.location, attempt, size)

    def load(self) -> Stored:
        """See `Store.load`."""
        data, version = self._manifest()
        return Stored(parse_manifest(data, self.location / NAME, self), len(data), version)

    def _manifest(self) -> tuple[bytes, str]:
        try:
            return self.insist("reading the manifest", lambda timeout: self.objects.get(NAME, timeout))
        except FileNotFoundError:
            raise FormatError(f"not an archive (no {NAME})", self.location) from None

    def outline(self) -> dict[str, Any] | None:
        """See `Store.outline`."""
        return outline(self._manifest()[0], self.location / NAME)

    def open(self, file: str) -> RemoteSource:
        """See `Store.open`."""
        return RemoteSource(self.objects, file, self.location / file, self.patience, self._ahead)

    def occupied(self) -> bool:
        """See `Store.occupied`."""
        try:
            self.insist("reading the manifest", lambda timeout: self.objects.get(NAME, timeout))
        except FileNotFoundError:
            return False
        return True

    def check_new(self) -> None:
        """See `Store.check_new`."""
        self.objects.check_writable()
        if self.occupied():
            raise ConflictError("an archive is there already (use append)", self.location)

    def creating(self) -> contextlib.AbstractContextManager[Writing]:
        """See `Store.creating`."""
        self.check_new()
        return self._working(None)

    def writing(self) -> contextlib.AbstractContextManager[Writing]:
        """See `Store.writing`. Several writers may be at work; the first that commits wins."""
        return self._working(self.load())

    @contextlib.contextmanager
    def _working(self, base: Stored | None) -> Iterator[Writing]:
        self.objects.check_writable()
        folder = Path(tempfile.mkdtemp(prefix="pltpack-"))
        try:
            (folder / SHARDS).mkdir()
            if base is not None:
                # New files are to get other names than those that are there.
                for name in named(base.manifest):
                    (folder / name).touch()
            yield _RemoteWriting(self, folder, base)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


class _Beside(LocalStore):
    """New files in a folder of this machine, beside those of a generation that is elsewhere."""

    def __init__(self, store: RemoteStore, folder: Path, base: Stored | None) -> None:
        super().__init__(folder, store.key)
        self._base, self._store = base, store
        self._there = named(base.manifest) if base else set()

    def load(self) -> Stored:
        """The generation that is followed, whatever others have committed since."""
        return super().load() if self._base is None else self._base

    def open(self, file: str) -> Source:
        """See `Store.open`."""
        return self._store.open(file) if file in self._there else super().open(file)


class _RemoteWriting(Writing):
    def __init__(self, store: RemoteStore, folder: Path, base: Stored | None) -> None:
        self._store, self.folder, self.base = store, folder, base
        self.store = _Beside(store, folder, base)

    def commit(self, manifest: Manifest) -> None:
        """See `Writing.commit`."""
        sent: list[str] = []
        hidden = manifest.seal is not None
        try:
            libraries = self._send(manifest.libraries, self._former.libraries if self._former else (), sent, hidden)
            sessions = self._send(manifest.sessions, self._former.sessions if self._former else (), sent, hidden)
            mark = secrets.token_hex(16)
            marks = (*(self._former.commits if self._former else ()), mark)[-KEPT_MARKS:]
            final = dataclasses.replace(manifest, libraries=libraries, sessions=sessions, commits=marks)
            data = final.checked_bytes(self._store.location)
        except BaseException:
            self._remove(sent)
            raise
        try:
            self._replace(data, mark)
        except ConflictError:
            self._remove(sent)
            raise

    @property
    def _former(self) -> Manifest | None:
        return None if self.base is None else self.base.manifest

    def _send(self, entries: Sequence[Entry], present: Sequence[FileEntry], sent: list[str],
              hidden: bool) -> tuple[Entry, ...]:  # fmt: skip
        """Send what is not there yet; gives the entries with the names that the files have got."""
        with ThreadPoolExecutor(_UPLOADS, thread_name_prefix="pltpack-send") as pool:
            waiting = [each if each in present else pool.submit(self._send_one, each, sent, hidden) for each in entries]
            return tuple(each if isinstance(each, FileEntry) else each.result() for each in waiting)

    def _send_one(self, entry: Entry, sent: list[str], hidden: bool) -> Entry:
        store, file = self._store, self.folder / entry.file
        name = fresh_name(entry, hidden)
        sent.append(name)
        # A repeat finds what an attempt has made whose answer was lost; nobody else takes such a name.
        with contextlib.suppress(ChangedError):
            store.insist(f"writing {name}", lambda timeout: store.objects.create(name, file, timeout), entry.bytes)
        size = store.insist(f"checking {name}", lambda timeout: store.objects.head(name, 1, timeout))[1]
        if size != entry.bytes:
            raise StoreError(f"{name} was sent, but has {size} instead of {entry.bytes} bytes", store.location)
        return dataclasses.replace(entry, file=name)

    def _replace(self, data: bytes, mark: str) -> None:
        """Write the manifest, and find out what became of it where an answer was lost."""
        store = self._store
        version = None if self.base is None else self.base.version
        try:
            store.insist("committing", lambda timeout: store.objects.replace(NAME, data, version, timeout), len(data))
        except ChangedError:
            if mark not in self._present_marks():
                raise ConflictError(_CONFLICT, store.location) from None
        except StoreError as error:
            # A request that failed may still arrive, so its files stay: `gc` takes them if it never does.
            with contextlib.suppress(StoreError):
                if mark in self._present_marks():
                    return
            raise StoreError(f"{error.fact}; whether this generation was committed is not known: look with inspect",
                             store.location) from error  # fmt: skip

    def _present_marks(self) -> tuple[str, ...]:
        try:
            return self._store.load().manifest.commits
        except FormatError:
            return ()

    def _remove(self, names: Sequence[str]) -> None:
        for name in names:
            with contextlib.suppress(StoreError):
                self._store.insist(f"removing {name}", functools.partial(self._store.objects.delete, name))

    def drop_replaced(self, manifest: Manifest) -> None:
        """See `Writing.drop_replaced`; readers of the former generation follow to the present one."""
        before = {entry.file for entry in self._former.sessions} if self._former else set()
        self._remove(sorted(before - named(self._store.load().manifest)))

    def collect(self, manifest: Manifest) -> list[str]:
        """See `Writing.collect`: what `base` names can go, other files only when they are old."""
        store = self._store
        present = store.load().manifest
        keep = named(present)
        before = named(self._former) if self._former else set()
        limit = time.time() - GRACE_SECONDS
        removed = []
        for name, modified in store.insist("listing files", store.objects.listed):
            ours = LIBRARY_NAME.fullmatch(name) or SHARD_NAME.fullmatch(name)
            if ours and name not in keep and (name in before or modified < limit):
                removed.append(name)
        self._remove(removed)
        return sorted(removed)


def named(manifest: Manifest) -> set[str]:
    """The files of a manifest."""
    return {entry.file for entry in (*manifest.libraries, *manifest.sessions)}


def fresh_name(entry: FileEntry, hidden: bool = False) -> str:
    """A name that no other writer chooses (spec/format.md, "Object stores")."""
    number = 10**11 + secrets.randbelow(8 * 10**11)
    if LIBRARY_NAME.fullmatch(entry.file):
        return f"library-{number}.pltlib"
    # Names of files that are encrypted say nothing of their sessions.
    session = "session" if hidden else getattr(entry, "session", "")
    return f"{SHARDS}/{session_to_file(session)}.{number}.pltshard"


def connect(url: Url, patience: Patience, options: dict[str, Any]) -> Objects:
    """The objects below a URL."""
    try:
        import fsspec

        if url.scheme in ("s3", "s3a"):
            return _connect_s3(fsspec, url, patience, options)
        fs, root = fsspec.core.url_to_fs(str(url), **options)
    except ImportError as error:
        raise UnsupportedError(f"needs a package that is not installed ({error}): pip install 'pltpack[remote]'",
                               url) from None  # fmt: skip
    except ValueError as error:
        raise UnsupportedError(str(error), url) from None
    return MemoryObjects(fs, root) if url.scheme == "memory" else FsspecObjects(fs, root)


def _connect_s3(fsspec: Any, url: Url, patience: Patience, options: dict[str, Any]) -> Objects:
    from pltpack.store.s3 import S3Objects

    # Repeats are ours: they have a deadline, and know what a repeated conditional write means.
    config = {"retries": {"total_max_attempts": 1}, "connect_timeout": patience.request_s,
              "read_timeout": patience.request_s, **options.pop("config_kwargs", {})}  # fmt: skip
    fs, root = fsspec.core.url_to_fs(str(url), config_kwargs=config, skip_instance_cache=True, **options)
    fs.retries = 1
    return S3Objects(fs, root)
