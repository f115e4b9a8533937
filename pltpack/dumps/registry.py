"""Find dump formats by name or by a file's content: built-in ones and those of the entry-point group ``pltpack.dumps``.

A folder stands for the files in it and below it, in sorted order. Hidden files and folders are left out, and so are
files that plainly hold no caches: texts (``.json`` sidecars among them) and safetensors files in which no tensor has
three axes, such as lists of continuations. Any other file of no known format is an error, for a dump that is skipped
in silence is lost.
"""

from __future__ import annotations

import functools
import importlib
import os
import stat
from collections.abc import Iterable, Iterator
from importlib.metadata import entry_points
from pathlib import Path

from pltpack.dumps.base import DumpFormat
from pltpack.dumps.safetensors_header import holds_no_caches
from pltpack.dumps.tokens import TokenLookup
from pltpack.errors import DumpError, NotFoundError, PltpackError
from pltpack.snapshot import Snapshot

ENTRY_POINTS = "pltpack.dumps"

_BUILT_IN = {
    "safetensors": "pltpack.dumps.safetensors_dump:SafetensorsFormat",
    "hdf5": "pltpack.dumps.hdf5:Hdf5Format",
    "transformers": "pltpack.dumps.transformers_cache:TransformersFormat",
}
_TEXTS = {".json", ".jsonl", ".txt", ".md", ".csv", ".tsv", ".yaml", ".yml", ".toml", ".log", ".py", ".html"}
_HEAD_BYTES = 4096

PathLike = str | os.PathLike[str]


@functools.cache
def _classes() -> dict[str, str]:
    found = {point.name: point.value for point in entry_points(group=ENTRY_POINTS)}
    return _BUILT_IN | {name: value for name, value in found.items() if name not in _BUILT_IN}


def format_names() -> list[str]:
    """Names of all installed dump formats."""
    return list(_classes())


def dump_format(name: str) -> DumpFormat:
    """Make a dump format by name.

    Raises
    ------
    NotFoundError
        If no installed format has this name.
    """
    if name not in _classes():
        raise NotFoundError(f"no dump format {name!r} (known: {', '.join(format_names())})")
    module, _, attribute = _classes()[name].partition(":")
    cls: type[DumpFormat] = getattr(importlib.import_module(module), attribute)
    return cls()


def sniff_format(path: Path) -> DumpFormat | None:
    """The first format that takes a file for its own, or None.

    Raises
    ------
    DumpError
        If the file is not a regular file or cannot be read.
    """
    head = _head(path)
    candidates = (dump_format(name) for name in format_names())
    return next((candidate for candidate in candidates if candidate.sniff(path, head)), None)


def open_dumps(
    paths: PathLike | Iterable[PathLike], format: str | None = None, tokens: PathLike | None = None
) -> Iterator[Snapshot]:
    """Give the snapshots in dump files and folders of them, one by one; arrays are read on demand.

    Parameters
    ----------
    paths : path or iterable of paths
        Files, or folders that stand for the files below them.
    format : str, optional
        Name of the format; told by each file's content if not given.
    tokens : path, optional
        JSON file of token ids for dumps that hold none: a list, or an object ``{session: list}``.

    Raises
    ------
    NotFoundError
        If a path or the named format does not exist.
    DumpError
        If a file is damaged or of no known format, a folder holds no dump, or two dumps have one session name.
    """
    forced = None if format is None else dump_format(format)
    chosen = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    return _snapshots([Path(path) for path in chosen], forced, TokenLookup(tokens))


def write_dump(snapshots: Snapshot | Iterable[Snapshot], path: PathLike, format: str = "safetensors") -> list[Path]:
    """Write snapshots to a dump; each file appears whole or not at all, replacing one of the same name.

    Parameters
    ----------
    snapshots : Snapshot or iterable of Snapshot
        Read layer by layer while writing.
    path : path
        ``safetensors`` and ``transformers``: a folder, one file per session. ``hdf5``: a file.
    format : str

    Returns
    -------
    list of Path
        The files written.

    Raises
    ------
    NotFoundError
        If there is no such format.
    DumpError
        If two snapshots have one session name, or cannot be written.
    """
    several = [snapshots] if isinstance(snapshots, Snapshot) else snapshots
    return dump_format(format).write(several, Path(path))


def _snapshots(paths: list[Path], forced: DumpFormat | None, tokens: TokenLookup) -> Iterator[Snapshot]:
    seen: dict[str, Path] = {}
    for path in paths:
        if os.path.isdir(path):
            dumps = _in_folder(path, forced)
        elif os.path.exists(path):
            dumps = iter([(path, _format_of(path, forced))])
        else:
            raise NotFoundError("no such file or folder", path)
        for file, reader in dumps:
            for snapshot in _read(file, reader, tokens):
                if snapshot.session in seen:
                    raise DumpError(f"session {snapshot.session!r} is in {seen[snapshot.session]} already", file)
                seen[snapshot.session] = file
                yield snapshot


def _read(file: Path, reader: DumpFormat, tokens: TokenLookup) -> Iterator[Snapshot]:
    try:
        yield from reader.read(file, tokens)
    except PltpackError as error:
        raise error.at(file) from None
    except OSError as error:
        raise DumpError(f"cannot be read ({error.strerror or error})", file) from error


def _in_folder(folder: Path, forced: DumpFormat | None) -> Iterator[tuple[Path, DumpFormat]]:
    found = False
    for file in _files(folder):
        if file.suffix.lower() in _TEXTS or holds_no_caches(file, _head(file)):
            continue
        found = True
        yield file, _format_of(file, forced)
    if not found:
        raise DumpError(f"the folder holds no dump (known formats: {', '.join(format_names())})", folder)


def _files(folder: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise DumpError(f"cannot be read ({error.strerror})", error.filename)

    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            file = Path(parent, name)
            if not name.startswith(".") and file.is_file():
                yield file


def _format_of(file: Path, forced: DumpFormat | None) -> DumpFormat:
    if forced is not None:
        _head(file)
        return forced
    found = sniff_format(file)
    if found is None:
        raise DumpError(f"is of no known dump format ({', '.join(format_names())})", file)
    return found


def _head(path: Path) -> bytes:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise DumpError("is not a regular file", path)
        with open(path, "rb") as file:
            return file.read(_HEAD_BYTES)
    except OSError as error:
        raise DumpError(f"cannot be read ({error.strerror})", path) from None
