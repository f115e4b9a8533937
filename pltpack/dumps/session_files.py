"""Write dumps that are one file per session, named after it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from pltpack.dumps import base
from pltpack.dumps.atomic import make_folder, replacing
from pltpack.errors import DumpError
from pltpack.names import session_to_file
from pltpack.snapshot import Snapshot


def write_each(
    snapshots: Iterable[Snapshot], folder: Path, suffix: str, write: Callable[[Snapshot, Path], None]
) -> list[Path]:
    """Write one file per session, each whole or not at all.

    Parameters
    ----------
    snapshots : iterable of Snapshot
    folder : Path
        Made if it does not exist.
    suffix : str
        Of the files' names.
    write : callable
        Writes a session to a temporary path.

    Raises
    ------
    DumpError
        If two sessions have one name.
    """
    make_folder(folder)
    written: list[Path] = []
    for snapshot in snapshots:
        base.check_snapshot(snapshot)
        path = folder / (session_to_file(snapshot.session) + suffix)
        if path in written:
            raise DumpError(f"two snapshots are named {snapshot.session!r}", folder)
        with replacing(path) as temp:
            write(snapshot, temp)
        written.append(path)
    return written
