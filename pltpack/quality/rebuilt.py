"""What stands for the original caches while they are scored: an archive's sessions, caches in memory, a tier."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from pltpack.archive import profiles
from pltpack.archive.reader import Archive
from pltpack.errors import DumpError, FormatError, NotFoundError
from pltpack.quality.agreement import require_agreement
from pltpack.snapshot import Snapshot

#: Codecs that take no profile.
_WITHOUT_PROFILE = frozenset({"lossless", "group", "turboquant"})


@dataclasses.dataclass(frozen=True)
class Rate:
    """What storing caches takes.

    Attributes
    ----------
    stored_bytes : float
        Everything that is stored, the profile included.
    raw_bytes, elements : int
        Bytes and number of the keys and values that it stands for.
    profile_bytes : float
        The part of `stored_bytes` that is stored once for a model, however many sessions follow.
    """

    stored_bytes: float
    raw_bytes: int
    elements: int
    profile_bytes: float = 0

    @property
    def bits(self) -> float:
        """Bits per element, everything counted."""
        return 8 * self.stored_bytes / self.elements

    @property
    def session_bits(self) -> float:
        """Bits per element without the profile."""
        return 8 * (self.stored_bytes - self.profile_bytes) / self.elements

    @property
    def ratio(self) -> float:
        """Raw bytes over stored bytes."""
        return self.raw_bytes / self.stored_bytes

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping."""
        out = {"archive_bytes": round(self.stored_bytes), "ratio": self.ratio, "bits_per_element": self.bits}
        if self.profile_bytes:
            out |= {"profile_bytes": round(self.profile_bytes), "bits_without_profile": self.session_bits}
        return out


class Rebuilt(Protocol):
    """One way to store caches: gives back what it makes of each original, then what that took."""

    #: Shown in tables; points of one family form a curve.
    name: str
    family: str

    def rebuild(self, original: Snapshot) -> Snapshot:
        """The cache that stands for an original in memory: same tokens, shapes and dtypes."""
        ...

    def rate(self) -> Rate | None:
        """Rate over what was rebuilt so far, or over the whole archive; None if nobody knows it."""
        ...


class FromArchive:
    """The sessions of an open archive.

    Parameters
    ----------
    archive : Archive
    name : str, optional
        By default the archive's quality.
    """

    def __init__(self, archive: Archive, name: str | None = None) -> None:
        self.archive = archive
        self.name = name or archive.manifest.quality
        self.family = family_of(archive.manifest.quality)

    def rebuild(self, original: Snapshot) -> Snapshot:
        """Decode the first tokens of a session, as many as `original` has.

        Raises
        ------
        NotFoundError
            If the archive has no such session.
        DumpError
            If it is not of the original's tokens.
        IdentityError
            If it is of another model or shape.
        """
        whole = self.archive.snapshot(original.session)
        require_agreement(original.identity, whole.identity, str(self.archive.path))
        return _prefix_checked(whole, original, self.archive)

    def rate(self) -> Rate:
        """Everything in the archive, over the keys and values of all its sessions."""
        stats = self.archive.stats()
        return Rate(stats["archive_bytes"], stats["raw_bytes"], stats["elements"], stats.get("profile_bytes", 0))


class FromSnapshots:
    """Caches in memory.

    Parameters
    ----------
    name, family : str
    snapshots : mapping
        Session -> its rebuilt cache.
    rate : Rate, optional
    """

    def __init__(self, name: str, family: str, snapshots: Mapping[str, Snapshot], rate: Rate | None = None) -> None:
        self.name, self.family = name, family
        self._snapshots, self._rate = snapshots, rate

    def rebuild(self, original: Snapshot) -> Snapshot:
        """The cache of that name; raises as `FromArchive.rebuild`."""
        if original.session not in self._snapshots:
            raise NotFoundError(f"{self.name}: no session {original.session!r}")
        whole = self._snapshots[original.session]
        require_agreement(original.identity, whole.identity, whole.origin)
        return _prefix_checked(whole, original)

    def rate(self) -> Rate | None:
        """What was given."""
        return self._rate


def _prefix_checked(whole: Snapshot, original: Snapshot, archive: Archive | None = None) -> Snapshot:
    count = len(original)
    if not np.array_equal(whole.tokens[:count], original.tokens):
        raise DumpError(f"session {original.session!r} has other tokens than the original", whole.origin)
    return archive.read(original.session, tokens=slice(0, count)) if archive else in_memory(whole, count)


def prefix(snapshot: Snapshot, count: int) -> Snapshot:
    """The first `count` tokens of a snapshot; arrays are read when asked for."""

    def cut(array: np.ndarray | None) -> np.ndarray | None:
        return None if array is None else array[:count]

    return dataclasses.replace(
        snapshot, tokens=snapshot.tokens[:count], logprobs=cut(snapshot.logprobs),
        logprob_ids=cut(snapshot.logprob_ids), importance=cut(snapshot.importance),
    )  # fmt: skip


def in_memory(snapshot: Snapshot, count: int | None = None) -> Snapshot:
    """The first `count` tokens of a snapshot (all by default) with their arrays read."""
    part = prefix(snapshot, len(snapshot) if count is None else count)
    layers = [part.layer(index) for index in range(len(part.identity.layers))]
    return Snapshot.from_arrays(part.session, part.tokens, layers, part.identity, origin=part.origin)


def family_of(quality: str) -> str:
    """The codec of a tier, by which points form a curve; a tier not known here is its own family."""
    from pltpack.codec.registry import TIERS

    return TIERS[quality][0] if quality in TIERS else quality


@contextlib.contextmanager
def of_archives(paths: Sequence[Path], profile: Path | None = None) -> Iterator[list[FromArchive]]:
    """Open archives side by side; those of equal quality are told apart by their folders' names.

    Parameters
    ----------
    paths : sequence of Path
    profile : Path, optional
        The profile of those that refer to one outside of them.
    """
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(_opened(path, profile)) for path in paths]
        qualities = [archive.manifest.quality for archive in opened]
        yield [
            FromArchive(archive, archive.path.name if qualities.count(archive.manifest.quality) > 1 else None)
            for archive in opened
        ]


def _opened(path: Path, profile: Path | None) -> Archive:
    """An archive, with the profile only if it names this one: others may be scored beside it."""
    archive = Archive(path, profile=profile)
    if profile is None:
        return archive
    states = [(library, index) for library in archive.libraries for index in range(len(library.states))]
    wanted = {library.profile_digest(index) for library, index in states if not library.embeds(index)}
    if wanted - {None} and profiles.digest(profiles.load(profile)[0]) not in wanted:
        archive.close()
        return Archive(path)
    return archive


@contextlib.contextmanager
def of_tiers(
    snapshots: Sequence[Snapshot], tiers: Sequence[str], profile: Path | None = None, **settings: Any
) -> Iterator[list[FromArchive]]:
    """Compress snapshots with several tiers into archives that last as long as the context.

    Parameters
    ----------
    snapshots : sequence of Snapshot
    tiers : sequence of str
    profile : Path, optional
        For the tiers that take one.
    **settings
        For `pltpack.compress`.
    """
    from pltpack.archive.create import compress

    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pltpack-score-")))
        out = []
        for number, tier in enumerate(dict.fromkeys(tiers)):
            target = folder / str(number)
            # In the archive of a tier that has no use for it, a profile would only cost its bytes.
            wanted = profile is not None and family_of(tier) not in _WITHOUT_PROFILE
            extra: dict[str, Any] = {"profile": profile} if wanted else {}
            compress(list(snapshots), target, quality=tier, **settings, **extra)
            out.append(FromArchive(stack.enter_context(Archive(target)), tier))
        yield out


def check_rebuilt(original: Snapshot, again: Snapshot) -> bool:
    """Whether every bit is equal.

    Raises
    ------
    FormatError
        If shapes or dtypes differ.
    """
    equal = True
    for index in range(len(original.identity.layers)):
        for mine, theirs in zip(original.layer(index), again.layer(index), strict=True):
            if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
                raise FormatError(f"layer {index} of session {original.session!r} has another shape", again.origin)
            equal = equal and mine.tobytes() == theirs.tobytes()
    return equal
