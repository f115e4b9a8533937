"""`decompress` and `verify`: an archive's sessions as dumps again, and the checks of an archive."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pltpack.archive.convert import check_target
from pltpack.archive.create import PathLike, quiet
from pltpack.archive.decoding import decode_layers, span_pieces
from pltpack.archive.encoding import Progress, in_order, relative_error, same_bits
from pltpack.archive.parts import check_layers, check_tokens
from pltpack.archive.reader import Archive
from pltpack.archive.recompute import Rebuild
from pltpack.archive.segments import Segment
from pltpack.archive.shard import Shard
from pltpack.dumps import open_dumps, write_dump
from pltpack.errors import FormatError, NotFoundError
from pltpack.format import durable
from pltpack.snapshot import Identity, Snapshot
from pltpack.store import Store
from pltpack.store.folders import named_after, workplace


def decompress(
    archive: PathLike | Store,
    out: PathLike,
    *,
    to: str = "safetensors",
    options: Mapping[str, str] | None = None,
    target: Identity | None = None,
    sessions: Sequence[str] | None = None,
    layers: range | None = None,
    tokens: slice | None = None,
    identity: Identity | None = None,
    accept_unknown: Iterable[str] = (),
    profile: PathLike | None = None,
    device: str = "cpu",
    rebuild: Rebuild | None = None,
    progress: Progress | None = None,
) -> list[Path]:
    """Write sessions as dumps; the output appears whole or not at all.

    Parameters
    ----------
    archive : path-like
    out : path-like
        Folder (or file, by format) to make; must not exist, or be an empty folder.
    to : str
        Dump format.
    options : mapping of str to str, optional
        Settings of the format: see `pltpack.dumps.DumpFormat.options`.
    target : Identity, optional
        The model that is to load the dumps: refused if its geometry or rotary embedding is another.
    sessions : sequence of str, optional
        All by default.
    layers : range, optional
        Layers to decode; they are numbered from 0 in the output.
    tokens : slice, optional
        Token range of every session.
    identity, accept_unknown
        The loader's identity; see `Archive`.
    profile : path-like, optional
        The profile of an archive that refers to one outside; see `Archive`.
    device : str
        Where units are decoded; see `Archive`.
    rebuild : Rebuild, optional
        Runs the model for sessions that are made again by one; see `Archive`.
    progress : callable, optional
        ``progress(stage, done, total)`` in raw bytes.

    Returns
    -------
    list of Path
        The files written.

    Raises
    ------
    FormatError, IdentityError, NotFoundError, UnsupportedError
    ConflictError
        If `out` exists.
    """
    place = durable.output_folder(out)
    with Archive(archive, identity, accept_unknown, profile, device=device, rebuild=rebuild) as opened:
        if target is not None:
            check_target(opened.identity, target, accept_unknown, str(opened.path))
        names = list(opened.sessions if sessions is None else dict.fromkeys(sessions))
        chosen = [_part(opened, name, layers, tokens) for name in names]
        with workplace(place) as folder, named_after(Path(out), folder / "dump"):
            temp = folder / "dump"
            written = write_dump(_counted(chosen, progress or quiet), temp, to, options)
            durable.publish_folder(temp, place)
    return [Path(out) / path.relative_to(temp) for path in written]


def _part(archive: Archive, name: str, layers: range | None, tokens: slice | None) -> Snapshot:
    whole = archive.snapshot(name)
    chosen = check_layers(layers, len(whole.identity.layers), str(archive.path))
    start, stop = check_tokens(tokens, len(whole), whole.origin)
    identity = Identity(**{**whole.identity.__dict__, "layers": tuple(whole.identity.layers[i] for i in chosen)})
    return Snapshot(name, whole.tokens[start:stop], identity, _Window(whole, chosen, start), whole.origin)


class _Window:
    """A `LayerSource` over a range of layers and tokens of another snapshot."""

    def __init__(self, whole: Snapshot, layers: range, start: int) -> None:
        self._whole, self._layers, self._start = whole, layers, start

    def layer(self, index: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """See `pltpack.snapshot.LayerSource.layer`."""
        return self._whole.layer(self._layers[index], self._start + start, self._start + stop)


class _Counted:
    """A `LayerSource` that reports the tokens of each layer the first time they are read."""

    def __init__(self, snapshot: Snapshot, advance: Callable[[int], None]) -> None:
        self._snapshot, self._advance = snapshot, advance
        self._seen = [0] * len(snapshot.identity.layers)

    def layer(self, index: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """See `pltpack.snapshot.LayerSource.layer`."""
        arrays = self._snapshot.layer(index, start, stop)
        # A writer may ask for keys and values apart, and so twice for the same tokens.
        fresh = max(0, stop - max(start, self._seen[index]))
        self._seen[index] = max(self._seen[index], stop)
        self._advance(fresh * self._snapshot.identity.layers[index].bytes_per_token)
        return arrays


def _counted(snapshots: Sequence[Snapshot], progress: Progress) -> Iterator[Snapshot]:
    total, done = sum(s.raw_bytes for s in snapshots), 0

    def advance(size: int) -> None:
        nonlocal done
        done += size
        progress("decode", done, total)

    for snapshot in snapshots:
        yield dataclasses.replace(snapshot, source=_Counted(snapshot, advance))


def verify(
    archive: PathLike | Store,
    *,
    against: Sequence[PathLike | Snapshot] | None = None,
    format: str | None = None,
    tokens: PathLike | None = None,
    options: Mapping[str, str] | None = None,
    identity: Identity | None = None,
    profile: PathLike | None = None,
    rebuild: Rebuild | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Check every digest of an archive, decode every unit, and compare with dumps if given.

    Parameters
    ----------
    archive : path-like
    against : sequence of path-like or Snapshot, optional
        Dumps to compare with, session by session.
    format, tokens, options, identity
        As for `pltpack.compress`.
    profile : path-like, optional
        The profile of an archive that refers to one outside; see `Archive`.
    rebuild : Rebuild, optional
        Runs the model for sessions that are made again by one; without it, only their bytes are checked.
    progress : callable, optional

    Returns
    -------
    dict
        ``sessions``, ``units``, ``generation`` (the newest, if others were committed meanwhile and took the files of
        the first away), ``not_rebuilt`` (sessions whose values only a model could check);
        with `against` also ``compared`` (per session ``bit_exact``, ``max_abs_difference``, ``relative_rms_error``: RMS
        of differences over RMS of the originals, over elements that differ, the larger of keys and values, of the
        worst layer) and
        ``differences``: what breaks the session's promise, one sentence each (a bit that differs in an exact tier;
        missing sessions; other tokens or identity).

    Raises
    ------
    FormatError
        If anything in the archive is damaged.
    ConflictError
        If others compact it faster than it can be read.
    """
    with Archive(archive, profile=profile, rebuild=rebuild) as opened:
        units = opened.in_one_generation(lambda: _verify_files(opened, progress or quiet))
        report: dict[str, Any] = {"generation": opened.manifest.generation, "sessions": len(opened.sessions)}
        report["units"] = units
        shards = map(opened.shard, opened.sessions)
        report["not_rebuilt"] = [s.entry.session for s in shards if s.recipe is not None and s.rebuild is None]
        if against is not None:
            paths = [dump for dump in against if not isinstance(dump, Snapshot)]
            dumps = [dump for dump in against if isinstance(dump, Snapshot)]
            preferred = {"quantized": "values" if opened.identity.quantized is None else "integers"}
            dumps += open_dumps(paths, format=format, tokens=tokens, options=options, preferred=preferred,
                                identity=identity) if paths else []  # fmt: skip
            compared: dict[str, Any] = {}
            report["differences"] = []
            for dump in dumps:
                row, difference = _compare(opened, dump)
                compared[dump.session] = row
                report["differences"] += difference
            report["compared"] = compared
        return report


def _verify_files(archive: Archive, progress: Progress) -> int:
    shards = [archive.shard(name) for name in archive.sessions]
    segments: list[Segment] = [*archive.libraries, *shards]
    total, done, units = sum(segment.entry.bytes for segment in segments), 0, 0
    for segment in segments:
        if segment.container.payload_sha256() != segment.entry.payload_sha256:
            raise FormatError("payload does not have the digest that the manifest gives", segment.container.path)
        for _ in in_order(_decoder(segment), _parts(segment), archive.pool):
            pass
        units += len(segment.units)
        done += segment.entry.bytes
        progress("verify", done, total)
    return units


def _parts(segment: Segment) -> Sequence[tuple[range, int, int]]:
    """What to decode of a segment in one go: layers and tokens of a shard, else units."""
    if not isinstance(segment, Shard):
        return [(range(index, index + 1), 0, 0) for index in range(len(segment.units))]
    layers, tokens = range(len(segment.identity.layers)), segment.entry.tokens
    return span_pieces(segment, layers, 0, tokens) or [(layers[i : i + 1], 0, tokens) for i in layers]


def _decoder(segment: Segment) -> Callable[[tuple[range, int, int]], None]:
    def decode(part: tuple[range, int, int]) -> None:
        group, first, last = part
        if isinstance(segment, Shard) and segment.recipe is not None and segment.rebuild is None:
            _check_alone(segment, group)
            return
        # A shard is decoded as a reader would, so that its mapping and its corrections are checked too.
        if isinstance(segment, Shard):
            decode_layers(segment, group, first, last)
        else:
            segment.decode_span(segment.units[group.start])

    return decode


def _check_alone(shard: Shard, layers: range) -> None:
    """What can be checked of a session without the model that makes it again: units' checksums, and tokens."""
    for record in shard.units[(shard.units["layer"] >= layers.start) & (shard.units["layer"] < layers.stop)]:
        shard.checked_payload(record)
    if shard.recipe is not None and shard.recipe.text is not None:
        assert len(shard.tokens) == shard.entry.tokens


def _compare(archive: Archive, dump: Snapshot) -> tuple[dict[str, Any], list[str]]:
    name = dump.session
    try:
        rebuilt = archive.snapshot(name)
    except NotFoundError:
        return {}, [f"session {name!r} is not in the archive"]
    if not np.array_equal(rebuilt.tokens, dump.tokens):
        return {}, [f"session {name!r} has other tokens"]
    if rebuilt.identity != dump.identity:
        return {}, [f"session {name!r} has another identity"]
    shard = archive.shard(name)
    exact = (
        (shard.recipe is None or shard.recipe.exact)
        and all(shard.codec_of(unit).exact for unit in shard.units)
        and all(
            library.codec(int(unit["state"])).exact
            for run in shard.runs
            for library in (shard.libraries[run["library"]],)
            for unit in library.units_of(int(run["node"]))
        )
    )
    equal, largest, worst = True, 0.0, 0.0
    for layer in range(len(dump.identity.layers)):
        a, b = dump.layer(layer), rebuilt.layer(layer)
        if all(same_bits(x, y) for x, y in zip(a, b, strict=True)):
            continue
        equal = False
        worst = max(worst, relative_error(a, b))
        for x, y in zip(a, b, strict=True):
            with np.errstate(invalid="ignore", over="ignore"):
                gap = np.abs(x.astype(np.float64) - y.astype(np.float64))
            largest = max(largest, float(np.nanmax(gap, initial=0.0)))
    row = {"bit_exact": equal, "exact_tier": exact, "max_abs_difference": largest, "relative_rms_error": worst}
    if exact and not equal:
        return row, [f"session {name!r} is in an exact tier but differs (by up to {largest:g})"]
    return row, []
