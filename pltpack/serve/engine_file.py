"""Warm starts of engines that load a file: a session, or what is stored of a prompt, in the engine's own format."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pltpack.archive.convert import check_target
from pltpack.archive.reader import Archive
from pltpack.archive.recompute import Rebuild
from pltpack.dumps import write_dump
from pltpack.dumps.atomic import make_folder
from pltpack.dumps.base import MAX_JSON, parse_json
from pltpack.dumps.tokens import token_ids
from pltpack.errors import ConflictError, DumpError, NotFoundError, UnsupportedError
from pltpack.names import session_to_file
from pltpack.snapshot import Identity, Snapshot
from pltpack.store.folders import named_after

PathLike = str | os.PathLike[str]


def warm_file(
    archive: PathLike | Archive,
    engine: str,
    output: PathLike,
    *,
    session: str | None = None,
    prompt: PathLike | np.ndarray | None = None,
    options: Mapping[str, str] | None = None,
    target: Identity | None = None,
    accept_unknown: Iterable[str] = (),
    salt: str | None = None,
    profile: PathLike | None = None,
    rebuild: Rebuild | None = None,
    suffixed: bool = False,
    recompute_at_cut: int | None = None,
) -> dict[str, Any]:
    """Write the file with which an engine starts warm.

    Parameters
    ----------
    archive : path-like or Archive
        One that is open keeps what it has prepared from file to file.
    engine : str
        Name of its dump format.
    output : path-like
        File to write; one that is there is replaced, at once and whole.
    session : str, optional
        The whole of this session.
    prompt : path-like or ndarray, optional
        Instead: token ids, or a JSON file of them. The longest stored prefix, in whole blocks, and without the last
        token, which the engine must compute.
    options : mapping of str to str, optional
        Settings of the format.
    target, accept_unknown
        The engine's model: see `pltpack.archive.convert.check_target`.
    salt : str, optional
        Tenant, for a prompt.
    profile : path-like, optional
        The profile of an archive that refers to one outside.
    rebuild : Rebuild, optional
        Runs the model for sessions that are made again by one, which a prompt finds only with it; that of an open
        archive is its own.
    suffixed : bool
        Add the format's own suffix to the name of the file.
    recompute_at_cut : int, optional
        Tokens left to the engine where a prompt leaves its session: see `pltpack.serve.prefixes.PrefixIndex`.

    Returns
    -------
    dict
        ``file``, ``bytes``, ``tokens`` in it, ``session`` that they come from, ``prompt_tokens``.

    Raises
    ------
    NotFoundError
        If there is no such session, or nothing of the prompt is stored.
    IdentityError
        Naming the field in which the archive does not fit the engine's model.
    FormatError, MissError, UnsupportedError
    """
    ids = None if prompt is None else _prompt(prompt)
    with contextlib.ExitStack() as stack:
        opened: Archive
        if isinstance(archive, Archive):
            opened = archive
        else:
            opened = stack.enter_context(Archive(archive, profile=profile, rebuild=rebuild))
        if target is not None:
            check_target(opened.identity, target, accept_unknown, str(opened.path))
        if session is not None:
            snapshot = opened.snapshot(session)
        elif ids is not None:
            found = functools.partial(_prefix, recompute_at_cut=recompute_at_cut) if rebuild is None else _made_prefix
            snapshot = found(opened, ids, salt)
        else:
            raise UnsupportedError("neither a session nor a prompt was named")
        written = _write(snapshot, engine, Path(output), options, suffixed)
    return {"file": written, "bytes": written.stat().st_size, "tokens": len(snapshot), "session": snapshot.session,
            "prompt_tokens": None if ids is None else len(ids)}  # fmt: skip


def warm_files(
    archive: PathLike,
    engine: str,
    output: PathLike,
    *,
    sessions: Sequence[str] = (),
    prompts: Sequence[PathLike] = (),
    profile: PathLike | None = None,
    rebuild: Rebuild | None = None,
    **settings: Any,
) -> list[dict[str, Any]]:
    """Write a file for each of several sessions or prompts; the archive is opened and prepared once.

    Parameters
    ----------
    archive : path-like
    engine : str
    output : path-like
        Folder, made if it is not there. Files are named after the sessions, or the files of the prompts.
    sessions : sequence of str
    prompts : sequence of path-like
    profile : path-like, optional
    rebuild : Rebuild, optional
    **settings
        For `warm_file`.

    Returns
    -------
    list of dict
        As of `warm_file`; those of the sessions first.

    Raises
    ------
    ConflictError
        If two files would have one name, or `output` is a file.
    PltpackError
        As of `warm_file`. Files that were written before are left.
    """
    names = [session_to_file(name) for name in sessions] + [Path(prompt).stem for prompt in prompts]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConflictError(f"two files would be named {twice!r}", output)
    folder = Path(output)
    make_folder(folder)
    with Archive(archive, profile=profile, rebuild=rebuild) as opened:
        jobs: list[dict[str, Any]] = [{"session": name} for name in sessions]
        jobs += [{"prompt": prompt} for prompt in prompts]
        return [
            warm_file(opened, engine, folder / name, **job, **settings, rebuild=rebuild, suffixed=True)
            for name, job in zip(names, jobs, strict=True)
        ]


def _prompt(prompt: PathLike | np.ndarray) -> np.ndarray:
    if isinstance(prompt, np.ndarray):
        return token_ids(prompt, "prompt")
    path = Path(prompt)
    if not path.is_file():
        raise NotFoundError("no such token file", path)
    if path.stat().st_size > MAX_JSON:
        raise DumpError(f"token file is larger than {MAX_JSON} bytes", path)
    try:
        return token_ids(parse_json(path.read_bytes(), "token file"), "token file")
    except DumpError as error:
        raise error.at(path) from None


def _prefix(archive: Archive, ids: np.ndarray, salt: str | None, recompute_at_cut: int | None) -> Snapshot:
    """What is stored of a prompt, decoded, under a name that says where it came from."""
    identity = None if salt is None else Identity(salt=salt)
    with archive.loader(identity=identity, recompute_at_cut=recompute_at_cut) as loader:
        hit = loader.lookup(ids).first(len(ids) - 1)
        if not hit:
            raise _nothing(archive, ids)
        layers = [(layer.keys, layer.values) for layer in loader.load(hit)]
    own = dataclasses.replace(archive.identity, salt=salt)
    return Snapshot.from_arrays(hit.session, ids[: hit.tokens], layers, own, origin=str(archive.path))


def _made_prefix(archive: Archive, ids: np.ndarray, salt: str | None) -> Snapshot:
    """The same of sessions that a model makes again: the one that begins most like the prompt."""
    block, names = archive.manifest.block, [e.session for e in archive.manifest.sessions if e.salt == salt]
    common = [_common(archive.shard(name).tokens, ids[:-1]) // block * block for name in names]
    if not any(common):
        raise _nothing(archive, ids)
    return archive.read(names[int(np.argmax(common))], tokens=slice(0, max(common)))


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the common prefix."""
    length = min(len(a), len(b))
    differs = np.flatnonzero(a[:length] != b[:length])
    return int(differs[0]) if len(differs) else length


def _nothing(archive: Archive, ids: np.ndarray) -> NotFoundError:
    return NotFoundError(f"nothing of this prompt of {len(ids)} tokens is stored", archive.path)


def _write(
    snapshot: Snapshot, engine: str, output: Path, options: Mapping[str, str] | None, suffixed: bool
) -> Path:
    if output.is_dir() and not suffixed:
        raise ConflictError("is a folder, but a file is to be written", output)
    if not output.parent.is_dir():
        raise NotFoundError("no such folder", output.parent)
    temp = Path(tempfile.mkdtemp(prefix=".tmp-", dir=output.parent))
    try:
        with named_after(output, temp, whole=True):
            files = write_dump(dataclasses.replace(snapshot, session="warm"), temp / "dump", engine, options)
        if len(files) != 1 or not files[0].is_file():
            raise UnsupportedError(f"dump format {engine!r} is not one file per session: use pltpack convert")
        output = output.with_name(output.name + files[0].suffix) if suffixed else output
        if output.is_dir():
            raise ConflictError("is a folder, but a file is to be written", output)
        os.replace(files[0], output)
    finally:
        shutil.rmtree(temp, ignore_errors=True)
    return output
