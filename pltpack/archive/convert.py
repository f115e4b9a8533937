"""`convert`: from one dump format to another, and whether caches fit the model that is to load them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pltpack.archive.recompute import Rebuild
from pltpack.archive.rotation_check import check_rotation
from pltpack.dumps import open_dumps, write_dump
from pltpack.dumps.quantized import value_identity
from pltpack.errors import DumpError, NotFoundError
from pltpack.format import durable
from pltpack.format.manifest import NAME
from pltpack.snapshot import Identity, Snapshot
from pltpack.store import Store
from pltpack.store.location import located

PathLike = str | os.PathLike[str]

# How channels are paired is settled by the writer, which reorders them or refuses.
_STYLE = ("style", "permuted")


def check_target(
    identity: Identity, target: Identity, accept_unknown: Iterable[str] = (), path: str | None = None
) -> None:
    """Refuse caches that another engine's model could not have made: other layers, heads, sizes or RoPE parameters.

    Parameters
    ----------
    identity : Identity
        Of the caches.
    target : Identity
        What is known of the model; its dtype does not matter, and its name only beside a digest of its weights.
    accept_unknown : iterable of str
        Fields that the caches need not know.

    Raises
    ------
    IdentityError
        Naming the field.
    """
    mine = value_identity(identity) if identity.quantized is not None else identity
    asked = target
    if target.layers and len(target.layers) == len(mine.layers):
        pairs = zip(target.layers, mine.layers, strict=True)
        layers = tuple(dataclasses.replace(theirs, dtype=own.dtype, window=own.window) for theirs, own in pairs)
        asked = dataclasses.replace(asked, layers=layers)
    asked = dataclasses.replace(asked, model=None, salt=mine.salt, rope=_parameters(target))
    dataclasses.replace(mine, rope=_parameters(mine)).require_loadable(asked, accept_unknown, path)


def _parameters(identity: Identity) -> Mapping[str, Any] | None:
    """RoPE parameters that two engines' caches of one model have in common."""
    if identity.rope is None or "theta" not in identity.rope:
        return None
    dim = identity.layers[0].k_dim if identity.layers else None
    known = {"type": "default", "dim": dim, **identity.rope}
    return {name: value for name, value in known.items() if name not in _STYLE}


def is_archive(source: PathLike | Store) -> bool:
    """Whether `convert` takes this for an archive, rather than a dump or a folder of dumps."""
    place = source if isinstance(source, Store) else located(source)
    return not isinstance(place, Path) or (place / NAME).is_file()


def convert(
    source: PathLike | Store,
    out: PathLike,
    *,
    to: str,
    sessions: Sequence[str] | None = None,
    format: str | None = None,
    tokens: PathLike | None = None,
    options: Mapping[str, str] | None = None,
    identity: Identity | None = None,
    to_options: Mapping[str, str] | None = None,
    target: Identity | None = None,
    accept_unknown: Iterable[str] = (),
    profile: PathLike | None = None,
    rebuild: Rebuild | None = None,
    progress: Any = None,
) -> list[Path]:
    """Write a dump, a folder of dumps, or an archive's sessions, in another format.

    Parameters
    ----------
    source : path-like or Store
        A URL is an archive.
    out : path-like
        Must not exist, or be an empty folder.
    to, to_options
        Format to write, and its settings.
    sessions : sequence of str, optional
        Only these.
    format, tokens, options, identity
        How dumps are read: see `pltpack.compress`.
    target, accept_unknown
        The model that is to load the result: see `check_target`.
    profile, rebuild, progress
        For archives: see `pltpack.decompress`.

    Returns
    -------
    list of Path
        The files written.

    Raises
    ------
    IdentityError
        Naming the field in which the caches do not fit `target`.
    DumpError, FormatError, UnsupportedError, NotFoundError, ConflictError
    """
    from pltpack.archive.extract import decompress
    from pltpack.store.folders import named_after, workplace

    if isinstance(source, Store) or is_archive(source):
        return decompress(source, out, to=to, options=to_options, target=target, sessions=sessions,
                          accept_unknown=accept_unknown, profile=profile, rebuild=rebuild,
                          progress=progress)  # fmt: skip
    target_folder = durable.output_folder(out)
    preferred = {"quantized": "integers"}
    found = list(open_dumps(located(source), format=format, tokens=tokens, options=options, preferred=preferred,
                            identity=identity))  # fmt: skip
    chosen = _chosen(found, sessions)
    for snapshot in chosen:
        if identity is not None:
            check_rotation(snapshot)
        if target is not None:
            check_target(snapshot.identity, target, accept_unknown, snapshot.origin)
    with workplace(target_folder) as folder, named_after(Path(out), folder / "dump"):
        temp = folder / "dump"
        written = write_dump(chosen, temp, to, to_options)
        durable.publish_folder(temp, target_folder)
    return [Path(out) / path.relative_to(temp) for path in written]


def _chosen(snapshots: Sequence[Snapshot], sessions: Sequence[str] | None) -> list[Snapshot]:
    if sessions is None:
        return list(snapshots)
    by_name = {snapshot.session: snapshot for snapshot in snapshots}
    missing = [name for name in sessions if name not in by_name]
    if missing:
        raise NotFoundError(f"no session {missing[0]!r} (there are: {', '.join(by_name)[:200]})")
    chosen = [by_name[name] for name in dict.fromkeys(sessions)]
    if not chosen:
        raise DumpError("no session was chosen")
    return chosen
