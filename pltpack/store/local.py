"""Archives in folders of this machine (spec/format.md, "Commit protocol")."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from pltpack.errors import FormatError
from pltpack.format import durable
from pltpack.format.manifest import LIBRARY_NAME, NAME, SHARD_NAME, SHARDS, Manifest, outline
from pltpack.format.source import FileSource, Source
from pltpack.store.base import Store, Stored, Writing, parse_manifest
from pltpack.store.folders import named_after, new_target, workplace

_TEMP = re.compile(re.escape(durable.TEMP_PREFIX) + r"[0-9a-f]{16}")


class LocalStore(Store):
    """An archive folder.

    Parameters
    ----------
    folder : Path
    key : bytes, optional
        Of an encrypted archive.
    """

    def __init__(self, folder: Path, key: bytes | None = None) -> None:
        self._folder, self.key = folder, key
        self.location: Path = folder

    @property
    def folder(self) -> Path:
        """See `Store.folder`."""
        return self._folder

    def load(self) -> Stored:
        """See `Store.load`."""
        data = Manifest.read(self._folder)
        return Stored(parse_manifest(data, self._folder / NAME, self), len(data))

    def outline(self) -> dict[str, Any] | None:
        """See `Store.outline`."""
        return outline(Manifest.read(self._folder), self._folder / NAME)

    def open(self, file: str) -> Source:
        """See `Store.open`."""
        return FileSource(self._folder / file)

    def occupied(self) -> bool:
        """See `Store.occupied`."""
        return self._folder.exists()

    def check_new(self) -> None:
        """See `Store.check_new`."""
        new_target(self._folder)

    @contextlib.contextmanager
    def creating(self) -> Iterator[Writing]:
        """See `Store.creating`: a temporary folder beside the archive's becomes it."""
        target = new_target(self._folder)
        with workplace(target) as folder, named_after(target, folder):
            (folder / SHARDS).mkdir()
            yield _LocalWriting(LocalStore(folder, self.key))
            durable.sync_folder(folder / SHARDS)
            durable.sync_folder(folder)
            durable.publish_folder(folder, target)

    @contextlib.contextmanager
    def writing(self) -> Iterator[Writing]:
        """See `Store.writing`: under the writer's lock, beside what is there."""
        with durable.writer_lock(self._folder):
            before = self.data_files()
            try:
                yield _LocalWriting(self, self.load(), before)
            except BaseException:
                # The error may have come after the commit: only what the manifest on disk does not name may go.
                with contextlib.suppress(OSError, FormatError):
                    manifest = self.load().manifest
                    named = {entry.file for entry in (*manifest.libraries, *manifest.sessions)}
                    for name in self.data_files() - before - named:
                        (self._folder / name).unlink()
                raise

    def data_files(self) -> set[str]:
        """Names of library segments and shards in the folder."""
        folder = self._folder
        names = {path.relative_to(folder).as_posix() for path in (*folder.iterdir(), *(folder / SHARDS).iterdir())}
        return {name for name in names if LIBRARY_NAME.fullmatch(name) or SHARD_NAME.fullmatch(name)}


class _LocalWriting(Writing):
    """New files appear in their place at once."""

    def __init__(self, store: LocalStore, base: Stored | None = None, before: Collection[str] = ()) -> None:
        self.store, self.folder, self.base, self._before = store, store.folder, base, before

    def commit(self, manifest: Manifest) -> None:
        """See `Writing.commit`."""
        manifest.commit(self.folder)

    def drop_replaced(self, manifest: Manifest) -> None:
        """See `Writing.drop_replaced`; what a killed run left is for `collect`."""
        if self.base is None:
            return
        replaced = {entry.file for entry in self.base.manifest.sessions}
        replaced |= LocalStore(self.folder).data_files() - set(self._before)
        for name in replaced - {entry.file for entry in (*manifest.libraries, *manifest.sessions)}:
            with contextlib.suppress(OSError):
                (self.folder / name).unlink()

    def collect(self, manifest: Manifest) -> list[str]:
        """See `Writing.collect`; temporary files go, too."""
        named = {entry.file for entry in (*manifest.libraries, *manifest.sessions)}
        removed = []
        for path in sorted([*self.folder.iterdir(), *(self.folder / SHARDS).iterdir()]):
            name = path.relative_to(self.folder).as_posix()
            if _TEMP.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
                removed.append(name)
                continue
            ours = LIBRARY_NAME.fullmatch(name) or SHARD_NAME.fullmatch(name) or _TEMP.fullmatch(path.name)
            if ours and name not in named and path.is_file() and not path.is_symlink():
                path.unlink()
                removed.append(name)
        durable.sync_folder(self.folder / SHARDS)
        durable.sync_folder(self.folder)
        return removed
