"""`export_session` and `import_session`: one session as one self-contained file, and back.

The file is a plain tar of an archive with one session and the part of the library that it uses
(spec/format.md, "Session files").
"""

from __future__ import annotations

import dataclasses
import io
import os
import shutil
import stat
import tarfile
from pathlib import Path

from pltpack.archive.create import PathLike, open_for_writing
from pltpack.archive.extract import verify
from pltpack.archive.files import next_library, shard_path, shown
from pltpack.archive.merge import Merger
from pltpack.archive.reader import Archive
from pltpack.archive.recompute import of_archive
from pltpack.errors import ConflictError, EncryptionError, FormatError, IdentityError, UnsupportedError
from pltpack.format import durable
from pltpack.format.manifest import LIBRARY_NAME, MAX_BYTES, NAME, SHARD_NAME, SHARDS, Manifest
from pltpack.store import LocalStore, Store, Writing, open_store
from pltpack.store.folders import named_after, workplace

#: A manifest, one library segment, one shard.
MAX_MEMBERS = 3


def export_session(archive: PathLike | Store, session: str, out: PathLike, profile: PathLike | None = None) -> Path:
    """Write one session as a self-contained file, whole or not at all; a profile goes into it.

    Parameters
    ----------
    archive : path-like
    session : str
    out : path-like
        File to make; must not exist.
    profile : path-like, optional
        The profile of an archive that refers to one outside; see `Archive`.

    Raises
    ------
    NotFoundError
        If the archive has no such session.
    ConflictError
        If `out` exists.
    """
    target = Path(out)
    if target.exists():
        raise ConflictError("it exists already", target)
    with workplace(target) as folder, named_after(target, folder, whole=True):
        (folder / SHARDS).mkdir()
        with Archive(archive, profile=profile) as opened:
            manifest = opened.in_one_generation(lambda: _extract(opened, session, folder))
        temp = folder / "file"
        with durable.naming(target), open(temp, "xb") as file:
            with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
                _add(tar, NAME, io.BytesIO(manifest.to_bytes()))
                for name in (manifest.libraries[0].file, manifest.sessions[0].file):
                    with open(folder / name, "rb") as part:
                        _add(tar, name, part)
            durable.sync_file(file)
        durable.publish(temp, target)
    return target


def _extract(archive: Archive, session: str, folder: Path) -> Manifest:
    merger = Merger(archive, [session], embed=True)
    library = merger.write_library(next_library(folder, ()), lambda size: None)
    path = shard_path(folder, shown(archive.manifest, session))
    entry = merger.write_shard(merger.shards[0], path, library, lambda size: None)
    return dataclasses.replace(archive.manifest, generation=1, libraries=(library,), sessions=(entry,))


def _add(tar: tarfile.TarFile, name: str, data: io.BufferedIOBase | io.BufferedReader) -> None:
    info = tarfile.TarInfo(name)
    info.size = data.seek(0, os.SEEK_END)
    data.seek(0)
    info.mode = 0o644
    tar.addfile(info, data)


def import_session(archive: PathLike | Store, file: PathLike) -> str:
    """Add an exported session to an archive (made if it does not exist), after checking all of it.

    Returns
    -------
    str
        The session's name.

    Raises
    ------
    FormatError
        If the file is damaged.
    IdentityError
        If it belongs to another model than the archive.
    ConflictError
        If the archive has a session of that name.
    """
    store, source = open_store(archive), Path(file)
    if not store.occupied():
        with store.creating() as writing:
            _unpack(source, writing.folder)
            session = _check(writing.folder, source)
            writing.commit(LocalStore(writing.folder).load().manifest)
        return session
    with open_for_writing(store) as (current, writing):
        # Inside the archive and under its lock: what a killed run leaves here is garbage that `gc` may take.
        folder = durable.temp_name(writing.folder / NAME)
        (folder / SHARDS).mkdir(parents=True)
        try:
            with named_after(writing.folder, folder):
                _unpack(source, folder)
                session = _check(folder, source)
                _adopt(current, folder, source, writing)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return session


def _check(folder: Path, source: Path) -> str:
    try:
        verify(folder)
        with Archive(folder) as incoming:
            if len(incoming.sessions) != 1:
                raise FormatError("it does not hold exactly one session")
            return incoming.sessions[0]
    except FormatError as error:
        raise FormatError(f"not a valid session file: {error.fact}", source) from None
    except EncryptionError as error:
        raise EncryptionError(error.fact, source) from None


def _adopt(current: Archive, folder: Path, source: Path, writing: Writing) -> None:
    target, manifest, incoming = writing.folder, current.manifest, LocalStore(folder).load().manifest
    manifest.identity.require_same(incoming.identity, str(source))
    if manifest.identity.digest() != incoming.identity.digest():
        # Equal numbers may be written in two ways (10000 and 10000.0); the file's parts carry the digest of theirs.
        raise IdentityError("identity is written in another way than the archive's, so its digest differs", source)
    if incoming.seal != manifest.seal:
        raise UnsupportedError("it is encrypted for another archive, or only one of both is encrypted; import it into "
                               "that archive or a new one", source)  # fmt: skip
    entry = incoming.sessions[0]
    with Archive(folder) as other:
        kinds = [of_archive([archive.shard(name) for name in archive.sessions]) for archive in (current, other)]
    if None not in kinds and kinds[0] != kinds[1]:
        raise UnsupportedError("sessions that a model makes again do not mix with others in one archive", source)
    if entry.session in current.sessions:
        raise ConflictError(f"session {entry.session!r} is in the archive already", source)
    known = {library.head_sha256 for library in manifest.libraries}
    libraries = list(manifest.libraries)
    for library in incoming.libraries:
        if library.head_sha256 not in known:
            path = next_library(target, current.libraries)
            _copy(folder / library.file, path)
            libraries.append(dataclasses.replace(library, file=path.name))
    path = shard_path(target, shown(manifest, entry.session))
    _copy(folder / entry.file, path)
    entry = dataclasses.replace(entry, file=f"{SHARDS}/{path.name}")
    following = dataclasses.replace(
        manifest,
        generation=manifest.generation + 1,
        libraries=tuple(libraries),
        sessions=(*manifest.sessions, entry),
    )
    writing.commit(following)


def _copy(source: Path, target: Path) -> None:
    temp = durable.temp_name(target)
    try:
        with durable.naming(target), open(source, "rb") as data, open(temp, "xb") as file:
            shutil.copyfileobj(data, file, 1 << 20)
            durable.sync_file(file)
        durable.publish(temp, target)
    finally:
        temp.unlink(missing_ok=True)


def _unpack(source: Path, folder: Path) -> None:
    status = source.stat()
    if not stat.S_ISREG(status.st_mode):
        raise FormatError("not a regular file", source)
    size = status.st_size
    try:
        with tarfile.open(source, "r:") as tar:
            for count, member in enumerate(tar):
                name = member.name
                allowed = name == NAME or LIBRARY_NAME.fullmatch(name) or SHARD_NAME.fullmatch(name)
                limit = MAX_BYTES if name == NAME else size
                plain = member.isreg() and not member.issparse() and 0 <= member.size <= limit
                data = tar.extractfile(member) if count < MAX_MEMBERS and allowed and plain else None
                if data is None:
                    raise FormatError(f"not a session file: it holds {name!r}", source)
                with durable.naming(folder / name), open(folder / name, "xb") as file:
                    shutil.copyfileobj(data, file, 1 << 20)
    except (tarfile.TarError, EOFError, FileExistsError, UnicodeError) as error:
        raise FormatError(f"not a session file: {error}", source) from None
