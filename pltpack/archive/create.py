"""`compress` and `append`: dumps in, one new generation out."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pltpack.archive import profiles
from pltpack.archive.backends import backend_of
from pltpack.archive.distributed import scanned
from pltpack.archive.encoding import Progress
from pltpack.archive.engine import Engine, open_engine
from pltpack.archive.guard import Guard
from pltpack.archive.guarded import GuardedWriter
from pltpack.archive.reader import Archive
from pltpack.archive.rotation_check import check_rotation
from pltpack.archive.settings import Settings, Target
from pltpack.archive.writer import GenerationWriter
from pltpack.codec import registry
from pltpack.codec.base import State
from pltpack.codec.profile import Profile
from pltpack.codec.rate import predicts_kl
from pltpack.dumps import open_dumps
from pltpack.dumps.quantized import as_values
from pltpack.errors import DumpError, EncryptionError, UnsupportedError
from pltpack.format.sealing import FILE_VARIABLE, KEY_VARIABLE, Seal
from pltpack.snapshot import Identity, Snapshot
from pltpack.store import Store, Writing, open_store

#: Tier without a profile, with one, and with one that predicts no KL divergence.
DEFAULT_QUALITY = "q4"
DEFAULT_CALIBRATED = "balanced"
DEFAULT_UNMEASURED = "fixed-step"

#: Fields in which a profile and the sessions must agree where both know them.
PROFILE_FIELDS = ("weights", "tokenizer", "rope", "keys", "tp_rank", "tp_size")

PathLike = str | os.PathLike[str]


def quiet(stage: str, done: int, total: int) -> None:
    """The progress callback that tells nobody."""


def compress(
    dumps: Sequence[PathLike | Snapshot],
    out: PathLike | Store,
    *,
    quality: str | None = None,
    dedup: bool = True,
    block: int = 32,
    format: str | None = None,
    tokens: PathLike | None = None,
    options: Mapping[str, str] | None = None,
    identity: Identity | None = None,
    profile: PathLike | None = None,
    external_profile: PathLike | None = None,
    target: Target | None = None,
    near: bool = True,
    window: int = 64,
    tau: float = 0.2,
    library_budget: int | None = None,
    guard: Guard | None = None,
    device: str = "cpu",
    encrypt: bool = False,
    engine: str | Engine = "local",
    address: str | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Compress dumps into a new archive, which appears whole or not at all.

    Parameters
    ----------
    dumps : sequence of path-like or Snapshot
        Files, folders of files, or snapshots in memory.
    out : path-like or Store
        Archive to make, a folder or a URL (`pltpack.store.open_store`); must not exist, or be an empty folder.
    quality : str, optional
        Tier, ``balanced`` by default with a profile (``fixed-step`` if it was made without a model) and ``q4`` without;
        see `pltpack.codec.registry.TIERS`.
    dedup : bool
        Let sessions share: shared prefixes are stored once.
    block : int
        Tokens per block.
    format : str, optional
        Dump format, instead of sniffing it.
    tokens : path-like, optional
        JSON file of token ids for dumps that hold none.
    options : mapping of str to str, optional
        Settings of the dumps' format: see `pltpack.dumps.DumpFormat.options`.
    identity : Identity, optional
        What is known of the model and the dumps do not record; where they do, it must agree.
    profile : path-like, optional
        A profile of the model, from calibration: it goes into the archive.
    external_profile : path-like, optional
        The same, but the archive refers to it by its digest, and needs it to be read.
    target : Target, optional
        Instead of a tier's own promise, with a profile: a KL divergence, bits per element, or bytes.
    near : bool
        Where sessions share, predict them from equal tokens at other places, too.
    window : int
        Unit of matching in tokens, 32 to 128: repeats of half of it are found.
    tau : float
        Distance, 0.1 to 0.3, up to which windows of other tokens are tried as predictions.
    library_budget : int, optional
        Bytes of units that may be shared: those that share most of the sessions' information per byte are, the others
        stay in their sessions.
    guard : Guard, optional
        Judges each session as it is encoded, and has those that do not hold their promise take a better tier:
        `pltpack.quality.guard.ModelGuard`, or `pltpack.archive.guard.ProfileGuard` without a model.
    device : str
        Where units are encoded: ``cpu``, ``cuda``, ``cuda:N``, or ``auto`` for CUDA where there is a device. Bytes of
        all but the calibrated tiers are the same everywhere.
    encrypt : bool
        Encrypt all that is stored, with the key of the store, of `pltpack.format.sealing.using_key`, or of the
        environment (docs/encryption.md).
    engine : str or Engine
        Who encodes: ``local``, threads of this process, or ``ray``, workers of a cluster, which must see the dumps at
        the same paths (docs/ray.md). The archive's bytes are the same.
    address : str, optional
        The cluster's; see `pltpack.archive.engine.open_engine`.
    progress : callable, optional
        ``progress(stage, done, total)`` in raw bytes; one that is a `pltpack.archive.tally.Watcher` also learns what
        was written.

    Returns
    -------
    dict
        See `pltpack.archive.stats.archive_stats` and `pltpack.archive.writer.GenerationWriter.report`.

    Raises
    ------
    DumpError, UnsupportedError, IdentityError, NotFoundError
        If a dump cannot be taken.
    ConflictError
        If `out` exists.
    PromiseError
        If a promise or a target cannot be kept.
    """
    arrays, of = _profile(profile, external_profile)
    chosen = quality or _default_quality(arrays, of)
    settings = Settings(chosen, dedup, block, arrays, external_profile is not None, target or Target(), near, window,
                        tau, library_budget=library_budget, backend=backend_of(device))  # fmt: skip
    settings.check()
    store = open_store(out)
    store.check_new()
    integers = registry.tier(chosen).exact
    with open_engine(engine, address) as workers:
        settings = dataclasses.replace(settings, engine=workers)
        settings.check()
        snapshots = snapshots_of(dumps, format, tokens, options, identity, integers, workers)
        _check_profile(of, snapshots[0])
        with store.creating() as writing:
            writing.seal = new_seal(store) if encrypt else None
            report = _add(writing, None, settings, snapshots, guard, external_profile, progress or quiet)
    with Archive(store, profile=external_profile) as archive:
        return {**archive.stats(), **report}


def append(
    archive: PathLike | Store,
    dumps: Sequence[PathLike | Snapshot],
    *,
    quality: str | None = None,
    dedup: bool | None = None,
    format: str | None = None,
    tokens: PathLike | None = None,
    options: Mapping[str, str] | None = None,
    identity: Identity | None = None,
    profile: PathLike | None = None,
    target: Target | None = None,
    near: bool = True,
    window: int = 64,
    tau: float = 0.2,
    recompute_tokens: int | None = None,
    library_budget: int | None = None,
    guard: Guard | None = None,
    device: str = "cpu",
    engine: str | Engine = "local",
    address: str | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Add sessions to an archive as a new generation; the old one stays readable until the new one is committed.

    Parameters are those of `compress`, but that `quality` and `dedup` default to the archive's own, and:

    Parameters
    ----------
    recompute_tokens : int, optional
        Tokens predicted from a node of the library, 1000 to 5000, after which it is looked at whether the mean of all
        that it served would pay. By default 2000, and never in tiers with a profile, where it does not.

    Raises
    ------
    ConflictError
        If a session of the same name is in the archive, or another writer is at work.
    """
    store = open_store(archive)
    arrays, of = _profile(profile, None)
    named = _own(store, profile, arrays)
    with open_engine(engine, address) as workers, open_for_writing(store, named, device) as (current, writing):
        manifest = current.manifest
        settings = Settings(quality or manifest.quality, manifest.dedup if dedup is None else dedup, manifest.block,
                            arrays, target=target or Target(), near=near, window=window, tau=tau,
                            recompute_tokens=recompute_tokens, library_budget=library_budget,
                            backend=current.backend, engine=workers)  # fmt: skip
        integers = manifest.identity.quantized is not None and registry.tier(settings.quality).exact
        snapshots = snapshots_of(dumps, format, tokens, options, identity, integers, workers)
        _check_profile(of, snapshots[0])
        report = _add(writing, current, settings, snapshots, guard, named, progress or quiet)
    with Archive(store) as updated:
        return {**updated.stats(), **report}


def _add(
    writing: Writing, archive: Archive | None, settings: Settings, snapshots: Sequence[Snapshot], guard: Guard | None,
    profile: PathLike | None, progress: Progress,
) -> dict[str, Any]:  # fmt: skip
    """Write and commit a generation; returns the writer's report."""
    writer: GenerationWriter | GuardedWriter
    if guard is None:
        writer = GenerationWriter(writing, archive, settings, progress)
    else:
        writer = GuardedWriter(writing, archive, settings, guard, progress, profile)
    manifest = writer.add(snapshots)
    writing.drop_replaced(manifest)
    return writer.report


def new_seal(store: Store) -> Seal:
    """With what a new archive is encrypted; `EncryptionError` if no key is given."""
    key = store.secret()
    if key is None:
        raise EncryptionError(f"no key to encrypt with is given (--key-file, {FILE_VARIABLE} or {KEY_VARIABLE})")
    return Seal.new(key)


def _profile(
    embedded: PathLike | None, external: PathLike | None
) -> tuple[dict[str, np.ndarray] | None, Identity | None]:
    if embedded is not None and external is not None:
        raise UnsupportedError("a profile is either embedded or external")
    path = embedded if embedded is not None else external
    return (None, None) if path is None else profiles.load(path)


def _default_quality(arrays: State | None, of: Identity | None) -> str:
    if arrays is None or of is None:
        return DEFAULT_QUALITY
    return DEFAULT_CALIBRATED if predicts_kl(Profile(arrays, of.layers)) else DEFAULT_UNMEASURED


def _own(store: Store, path: PathLike | None, arrays: State | None) -> PathLike | None:
    """The file given, if it is a profile that the archive names by its digest."""
    if arrays is None:
        return None
    wanted = profiles.digest(arrays)
    with Archive(store) as archive:
        states = [(library, index) for library in archive.libraries for index in range(len(library.states))]
        return path if any(library.profile_digest(index) == wanted for library, index in states) else None


def _check_profile(of: Identity | None, snapshot: Snapshot) -> None:
    """Refuse sessions of another model than a profile's; a dump may know less of its model than calibration did."""
    if of is None:
        return
    layers = of.layers
    if len(layers) == len(snapshot.identity.layers):
        # Attention windows do not matter to what is stored, nor the dtype to what was learnt of the values.
        pairs = zip(layers, snapshot.identity.layers, strict=True)
        layers = tuple(dataclasses.replace(mine, window=theirs.window, dtype=theirs.dtype) for mine, theirs in pairs)
    asked = dataclasses.replace(of, model=None, salt=snapshot.identity.salt, layers=layers)
    snapshot.identity.require_loadable(asked, PROFILE_FIELDS, snapshot.origin)


def snapshots_of(
    dumps: Sequence[PathLike | Snapshot], format: str | None, tokens: PathLike | None,
    options: Mapping[str, str] | None, identity: Identity | None, integers: bool, engine: Engine | None = None,
) -> list[Snapshot]:  # fmt: skip
    """All snapshots, read by an engine if there is one; quantized caches as integers if `integers`, else as values."""
    paths = [dump for dump in dumps if not isinstance(dump, Snapshot)]
    found = [dump for dump in dumps if isinstance(dump, Snapshot)]
    if paths:
        preferred = {"quantized": "integers" if integers else "values"}
        if engine is None:
            read = list(open_dumps(paths, format=format, tokens=tokens, options=options, preferred=preferred,
                                   identity=identity))  # fmt: skip
        else:
            read = list(scanned(engine, paths, format, tokens, options, preferred, identity))
        if identity is not None:
            for snapshot in read:
                check_rotation(snapshot)
        found += read
    if not found:
        raise DumpError("no dumps were given")
    return found if integers else [as_values(snapshot) for snapshot in found]


@contextlib.contextmanager
def open_for_writing(
    archive: PathLike | Store, profile: PathLike | None = None, device: str = "cpu"
) -> Iterator[tuple[Archive, Writing]]:
    """The present generation of an archive, and where the next one goes; a failure leaves no new files behind."""
    store = open_store(archive)
    with Archive(store):
        pass
    with store.writing() as writing, Archive(writing.store, profile=profile, device=device) as current:
        yield current, writing
