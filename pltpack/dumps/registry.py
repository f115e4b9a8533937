"""Find dump formats by name or by a file's content: built-in ones and those of the entry-point group ``pltpack.dumps``.

A folder stands for the files in it and below it, in sorted order. Hidden files and folders are left out, and so are
files that plainly hold no caches: texts (``.json`` sidecars among them) and safetensors files in which no tensor has
three axes, such as lists of continuations. Any other file of no known format is an error, for a dump that is skipped
in silence is lost. A folder that one format takes as a whole (`DumpFormat.sniff_folder`) is one dump.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import entry_points
from pathlib import Path

from pltpack.dumps.base import DumpFormat
from pltpack.dumps.quantized import completed
from pltpack.dumps.safetensors_header import holds_no_caches
from pltpack.dumps.tokens import TokenLookup
from pltpack.errors import DumpError, NotFoundError, PltpackError, UnsupportedError
from pltpack.snapshot import Identity, Snapshot

ENTRY_POINTS = "pltpack.dumps"

_BUILT_IN = {
    "safetensors": "pltpack.dumps.safetensors_dump:SafetensorsFormat",
    "hdf5": "pltpack.dumps.hdf5:Hdf5Format",
    "transformers": "pltpack.dumps.transformers_cache:TransformersFormat",
    "llama.cpp": "pltpack.dumps.llama_cpp:LlamaCppFormat",
    "mlx": "pltpack.dumps.mlx_lm:MlxFormat",
    "vllm-example": "pltpack.dumps.vllm_example:VllmExampleFormat",
    "vllm-offload": "pltpack.dumps.vllm_offload:VllmOffloadFormat",
    "lmcache": "pltpack.dumps.lmcache_chunks:LmcacheFormat",
    "sglang-hicache": "pltpack.dumps.sglang_hicache:SglangHiCacheFormat",
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


def dump_format(name: str, options: Mapping[str, str] | None = None) -> DumpFormat:
    """Make a dump format by name.

    Parameters
    ----------
    name : str
    options : mapping of str to str, optional
        Settings of the format; see `DumpFormat.options`.

    Raises
    ------
    NotFoundError
        If no installed format has this name.
    UnsupportedError
        If it has no such option.
    """
    cls = _class(name)
    return cls(options) if options else cls()


def _class(name: str) -> type[DumpFormat]:
    if name not in _classes():
        raise NotFoundError(f"no dump format {name!r} (known: {', '.join(format_names())})")
    module, _, attribute = _classes()[name].partition(":")
    found: type[DumpFormat] = getattr(importlib.import_module(module), attribute)
    return found


class Formats:
    """Which format reads a file: a forced one, or the one that takes it for its own; with the options given.

    Parameters
    ----------
    forced : str, optional
        Name of the format of all files.
    options : mapping of str to str, optional
        Where the format is told by the content, each goes to the formats that have it.
    preferred : mapping of str to str, optional
        The same, for options that need not be known to any format, and give way to `options`.
    identity : Identity, optional
        What the formats may know of the model.

    Raises
    ------
    NotFoundError
        If there is no such format.
    UnsupportedError
        If no format has an option, or does not allow its value.
    """

    def __init__(
        self,
        forced: str | None = None,
        options: Mapping[str, str] | None = None,
        preferred: Mapping[str, str] | None = None,
        identity: Identity | None = None,
    ) -> None:
        self._options, self._preferred, self._identity = dict(options or {}), dict(preferred or {}), identity
        names = format_names() if forced is None else [forced]
        for option in self._options:
            if not any(option in _class(name).options for name in names):
                raise UnsupportedError(f"no option {option!r} of dump format {', '.join(names)}")
        self.forced = None if forced is None else self._made(forced)

    def of(self, path: Path) -> DumpFormat:
        """The format of a file, or of a folder that is one dump.

        Raises
        ------
        DumpError
            If it is of no known format, not a regular file, or cannot be read.
        """
        if self.forced is not None:
            if not path.is_dir():
                _head(path)
            return self.forced
        found = sniff_format(path)
        if found is None:
            raise DumpError(f"is of no known dump format ({', '.join(format_names())})", path)
        return self._made(found.format_id)

    def takes(self, folder: Path) -> bool:
        """Whether a folder is one dump."""
        if self.forced is not None:
            return self.forced.sniff_folder(folder)
        return sniff_format(folder) is not None

    def _made(self, name: str) -> DumpFormat:
        known = _class(name).options
        chosen = {option: value for option, value in {**self._preferred, **self._options}.items() if option in known}
        made = dump_format(name, chosen)
        made.known = self._identity
        return made


def sniff_format(path: Path) -> DumpFormat | None:
    """The first format that takes a file, or a folder as one dump, for its own; or None.

    Raises
    ------
    DumpError
        If the file is not a regular file or cannot be read.
    """
    candidates = (dump_format(name) for name in format_names())
    if path.is_dir():
        return next((candidate for candidate in candidates if candidate.sniff_folder(path)), None)
    head = _head(path)
    return next((candidate for candidate in candidates if candidate.sniff(path, head)), None)


def open_dumps(
    paths: PathLike | Iterable[PathLike],
    format: str | None = None,
    tokens: PathLike | None = None,
    *,
    options: Mapping[str, str] | None = None,
    preferred: Mapping[str, str] | None = None,
    identity: Identity | None = None,
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
    options, preferred : mapping of str to str, optional
        Settings of the formats; see `Formats`.
    identity : Identity, optional
        What is known of the model that the dumps come from: it fills what they do not record.

    Raises
    ------
    NotFoundError
        If a path or the named format does not exist.
    DumpError
        If a file is damaged or of no known format, a folder holds no dump, or two dumps have one session name.
    IdentityError
        If a dump records something else than `identity` says.
    UnsupportedError
        If no format has one of the options.
    """
    formats, lookup = Formats(format, options, preferred, identity), TokenLookup(tokens)
    chosen = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    found = ((file, read_dump(file, reader, lookup, identity)) for file, reader in dump_files(chosen, formats))
    return distinct(found)


def write_dump(
    snapshots: Snapshot | Iterable[Snapshot],
    path: PathLike,
    format: str = "safetensors",
    options: Mapping[str, str] | None = None,
) -> list[Path]:
    """Write snapshots to a dump; each file appears whole or not at all, replacing one of the same name.

    Parameters
    ----------
    snapshots : Snapshot or iterable of Snapshot
        Read layer by layer while writing.
    path : path
        ``safetensors`` and ``transformers``: a folder, one file per session. ``hdf5``: a file.
    format : str
    options : mapping of str to str, optional
        Settings of the format; see `DumpFormat.options`.

    Returns
    -------
    list of Path
        The files written.

    Raises
    ------
    NotFoundError
        If there is no such format.
    UnsupportedError
        If it has no such option, or cannot hold the snapshots.
    DumpError
        If two snapshots have one session name, or cannot be written.
    """
    several = [snapshots] if isinstance(snapshots, Snapshot) else snapshots
    writer = dump_format(format, options)
    return writer.write((writer.prepare(snapshot) for snapshot in several), Path(path))


def dump_files(paths: Iterable[PathLike], formats: Formats) -> Iterator[tuple[Path, DumpFormat]]:
    """The dumps that paths stand for, and what reads each; raises as `open_dumps`."""
    for path in map(Path, paths):
        if os.path.isdir(path):
            yield from _in_folder(path, formats)
        elif os.path.exists(path):
            yield path, formats.of(path)
        else:
            raise NotFoundError("no such file or folder", path)


def distinct(dumps: Iterable[tuple[Path, Iterable[Snapshot]]]) -> Iterator[Snapshot]:
    """The snapshots of dumps; `DumpError` if two have one session name."""
    seen: dict[str, Path] = {}
    for file, snapshots in dumps:
        for snapshot in snapshots:
            if snapshot.session in seen:
                raise DumpError(f"session {snapshot.session!r} is in {seen[snapshot.session]} already", file)
            seen[snapshot.session] = file
            yield snapshot


def read_dump(
    file: Path, reader: DumpFormat, tokens: TokenLookup, identity: Identity | None = None
) -> Iterator[Snapshot]:
    """The snapshots of one dump; arguments and errors as of `open_dumps`."""
    try:
        for snapshot in reader.read(file, tokens):
            if identity is not None:
                known = completed(snapshot.identity, identity, os.fspath(file))
                snapshot = dataclasses.replace(snapshot, identity=known)
            yield snapshot
    except PltpackError as error:
        raise error.at(file) from None
    except OSError as error:
        raise DumpError(f"cannot be read ({error.strerror or error})", file) from error


def _in_folder(folder: Path, formats: Formats) -> Iterator[tuple[Path, DumpFormat]]:
    found = False
    for file in _files(folder, formats):
        if not file.is_dir() and (file.suffix.lower() in _TEXTS or holds_no_caches(file, _head(file))):
            continue
        found = True
        yield file, formats.of(file)
    if not found:
        raise DumpError(f"the folder holds no dump (known formats: {', '.join(format_names())})", folder)


def _files(folder: Path, formats: Formats) -> Iterator[Path]:
    """The files in and below a folder, and in place of the files of folders that are one dump, those folders."""

    def refuse(error: OSError) -> None:
        raise DumpError(f"cannot be read ({error.strerror})", error.filename)

    for parent, folders, names in os.walk(folder, onerror=refuse):
        if formats.takes(Path(parent)):
            folders.clear()
            yield Path(parent)
            continue
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            file = Path(parent, name)
            if not name.startswith(".") and file.is_file():
                yield file


def _head(path: Path) -> bytes:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise DumpError("is not a regular file", path)
        with open(path, "rb") as file:
            return file.read(_HEAD_BYTES)
    except OSError as error:
        raise DumpError(f"cannot be read ({error.strerror})", path) from None
