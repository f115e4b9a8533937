"""Names and headers of the files that an archive is written to."""

from __future__ import annotations

from collections.abc import Container, Iterable
from pathlib import Path

from pltpack.archive.library import Library
from pltpack.archive.segments import Segment, dumps_json
from pltpack.format.container import FORMAT_VERSION, MINOR_SCALED, ContainerInfo
from pltpack.format.manifest import SHARDS, Manifest, SessionEntry
from pltpack.names import session_to_file
from pltpack.snapshot import Identity


def next_library(folder: Path, libraries: Iterable[Library]) -> Path:
    """A free file name for a library segment, numbered after all present ones."""
    number = 1 + max((int(library.entry.file[8:-7]) for library in libraries), default=0)
    while (path := folder / f"library-{number:06d}.pltlib").exists():
        number += 1
    return path


#: In place of a session's name in those of files, where names are to be hidden.
HIDDEN = "session"


def shown(manifest: Manifest, session: str) -> str:
    """What file names may say of a session's name."""
    return session if manifest.seal is None else HIDDEN


def shard_path(folder: Path, session: str, taken: Container[Path] = ()) -> Path:
    """A free file name for a session's shard; `taken` are those that will be written soon."""
    stem = session_to_file(session)
    path = folder / SHARDS / f"{stem}.pltshard"
    number = 1
    while path.exists() or path in taken:
        number += 1
        path = folder / SHARDS / f"{stem}.{number}.pltshard"
    return path


def session_entry(path: Path, info: ContainerInfo, session: str, tokens: int, salt: str | None) -> SessionEntry:
    """The manifest's entry of a written shard."""
    return SessionEntry(
        f"{SHARDS}/{path.name}", info.size, info.head_sha256, info.payload_sha256, session, tokens, salt
    )


def container_metadata(kind: str, identity: Identity, minor: int = 0) -> dict[str, str]:
    """Metadata that libraries and shards have in common; `minor`: the least minor version that knows what is in it."""
    return {
        "format_version": f"{FORMAT_VERSION[0]}.{minor:d}",
        "kind": kind,
        "identity": dumps_json(identity.to_json()),
        "identity_sha256": identity.digest(),
    }


def raised(metadata: dict[str, str], minor: int) -> dict[str, str]:
    """A container's metadata with a minor version that is at least `minor`."""
    major, former = metadata["format_version"].split(".")
    return {**metadata, "format_version": f"{major}.{max(int(former), minor)}"}


def carried_minor(segments: Iterable[Segment]) -> int:
    """The least minor version for units copied from other containers, by what these say beyond their tables."""
    return MINOR_SCALED if any(segment.minor == MINOR_SCALED for segment in segments) else 0


def header_reserve(metadata: dict[str, str], states: int = 1, recompute: bool = False) -> int:
    """Upper bound of a container's header in bytes, for `ContainerWriter`; closer for sessions that a model makes."""
    if recompute:
        # Six tensors, none of them with more than 2^30 items.
        return len(dumps_json(metadata).encode()) + 100 * 6 + 32
    # A tensor's entry takes at most 160 bytes; there are five besides the states.
    return len(dumps_json(metadata).encode()) + 160 * (5 + states) + 64
