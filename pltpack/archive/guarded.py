"""Write one generation under a guard: every session takes better tiers until it holds what was promised.

Nothing of it is visible before all sessions hold: rounds of `GenerationWriter` build on manifests that are not
committed. Sessions that hold keep their bytes while others are encoded anew, so that what was measured of them stays
true. A round's library segments are kept as long as something refers to them.
"""

from __future__ import annotations

import collections
import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pltpack.archive import profiles
from pltpack.archive.encoding import Progress
from pltpack.archive.files import header_reserve, session_entry
from pltpack.archive.guard import LAST, USUAL_KL, Guard, Screened, ladder, promise
from pltpack.archive.guard_record import HOLDS, KEY, GuardRecord, Trial
from pltpack.archive.places import Places
from pltpack.archive.reader import Archive
from pltpack.archive.settings import Settings, Target
from pltpack.archive.writer import GenerationWriter
from pltpack.codec.base import State
from pltpack.errors import PromiseError, UnsupportedError
from pltpack.format import tables
from pltpack.format.container import Container, ContainerWriter
from pltpack.format.manifest import Manifest, SessionEntry
from pltpack.format.sealing import Seal
from pltpack.snapshot import Snapshot
from pltpack.store import Writing

#: Of a score that is no number: no lossy tier is tried any more.
FINAL = "not a number"


class GuardedWriter:
    """Adds snapshots to an archive folder as one generation, guarded.

    Parameters
    ----------
    writing : Writing
        Where the generation goes.
    archive : Archive or None
        The present generation, opened; None for a new archive.
    settings : Settings
        What is asked for.
    guard : Guard
    progress : callable
        Told ``(stage, done, total)``: as by `GenerationWriter`, and ``screen`` and ``guard`` in sessions.
    profile : path-like, optional
        File of a profile that the archive only names.

    Attributes
    ----------
    report : dict
        As of `GenerationWriter`; ``guard``: ``sessions``, ``stepped_up`` (their number), ``kept`` (sessions by tier),
        ``decisions`` (of those that were stepped up: ``session``, ``asked``, ``kept``, ``reason``).

    Raises
    ------
    UnsupportedError
        If the guard cannot judge what is asked for.
    """

    def __init__(
        self,
        writing: Writing,
        archive: Archive | None,
        settings: Settings,
        guard: Guard,
        progress: Progress,
        profile: str | os.PathLike[str] | None = None,
    ) -> None:
        settings.check()
        if settings.target.bits is not None or settings.target.size is not None:
            raise UnsupportedError("a guard takes more room where a promise needs it: targets of bits and bytes "
                                   "cannot be kept beside it")  # fmt: skip
        self._writing, self._archive, self._settings, self._guard = writing, archive, settings, guard
        self._progress, self._profile = progress, profile
        self._asked = settings.quality
        self._aimed = settings.target.kl or promise(self._asked)
        self._kl = guard.limits.kl or self._aimed or USUAL_KL
        self._tiers = [self._asked, *ladder(self._asked, self._aimed)]
        self._tried: dict[str, list[Trial]] = {}
        self.report: dict[str, Any] = {}

    def add(self, snapshots: Sequence[Snapshot]) -> Manifest:
        """Write the sessions and the next manifest; returns the manifest, already committed.

        Raises
        ------
        PromiseError
            If a promise cannot be kept, or the guard's limits say that no better tier is to be taken.
        DumpError, IdentityError, ConflictError, UnsupportedError
            As of `GenerationWriter.write`.
        """
        identity = self._writer(self._archive, self._asked).check(snapshots)
        libraries = self._archive.libraries if self._archive else []
        self._guard.begin(self._profile_of(libraries), identity)
        screened = self._screen(snapshots)
        pending = {s.session: LAST if screened[s.session].refused else self._asked for s in snapshots}
        self._tried = {s.session: [] for s in snapshots}
        for name, tier in pending.items():
            if tier != self._asked:
                self._note(name, Trial(self._asked, str(screened[name].refused)))
        manifest = self._rounds(snapshots, pending, screened)
        manifest = self._finished(manifest, snapshots, screened)
        self._writing.commit(manifest)
        return manifest

    def _profile_of(self, libraries: Sequence[Any]) -> State | None:
        tier = self._settings.codec()
        profile = self._settings.profile
        if profile is None and tier.calibrated:
            profile = Places(list(libraries), self._settings).profile(tier)[0]
        if profile is None and self._guard.needs_profile and not tier.exact:
            raise UnsupportedError(f"without a model a guard needs a profile, and tier {self._asked!r} has none")
        return profile

    def _screen(self, snapshots: Sequence[Snapshot]) -> dict[str, Screened]:
        out = {}
        for done, snapshot in enumerate(snapshots):
            self._progress("screen", done, len(snapshots))
            out[snapshot.session] = Screened() if self._asked == LAST else self._guard.screen(snapshot)
        return out

    def _rounds(
        self, snapshots: Sequence[Snapshot], pending: dict[str, str], screened: Mapping[str, Screened]
    ) -> Manifest:
        """Write and judge tier by tier until all sessions hold; the manifest is not committed."""
        manifest, done = None, 0
        # Tiers only get better, so each is written once.
        for tier in self._tiers:
            group = [s for s in snapshots if pending.get(s.session) == tier]
            if not group:
                continue
            manifest = self._write(group, tier, manifest)
            with self._opened(manifest) as archive:
                for snapshot in group:
                    self._progress("guard", done, len(snapshots))
                    trial = self._judged(snapshot, screened[snapshot.session], archive, tier)
                    self._note(snapshot.session, trial)
                    if trial.reason == HOLDS:
                        del pending[snapshot.session]
                        done += 1
                    else:
                        pending[snapshot.session] = self._next(trial)
            manifest = self._without(manifest, set(pending))
        assert manifest is not None and not pending
        return manifest

    def _judged(self, snapshot: Snapshot, screened: Screened, archive: Archive, tier: str) -> Trial:
        if tier == LAST:
            return Trial(tier, HOLDS, kl=0.0)
        return self._guard.judge(snapshot, screened, archive, tier, self._kl, tier == self._asked)

    def _note(self, session: str, trial: Trial) -> None:
        self._tried[session].append(trial)
        if trial.reason != HOLDS and self._guard.limits.refuse:
            raise PromiseError(f"session {session!r} does not hold what tier {trial.tier!r} promises: {_why(trial)}")

    def _next(self, trial: Trial) -> str:
        limits, change = self._guard.limits, trial.ppl_change_pct
        if trial.reason == FINAL:
            return LAST
        if change is not None and change - limits.errors * (trial.ppl_error_pct or 0.0) > limits.lossless_pct:
            return LAST
        return self._tiers[self._tiers.index(trial.tier) + 1]

    def _writer(self, archive: Archive | None, tier: str) -> GenerationWriter:
        target = self._settings.target if tier == self._asked else Target()
        settings = dataclasses.replace(self._settings, quality=tier, target=target)
        return GenerationWriter(self._writing, archive, settings, self._progress)

    def _write(self, group: Sequence[Snapshot], tier: str, manifest: Manifest | None) -> Manifest:
        if manifest is None:
            writer = self._writer(self._archive, tier)
            found = writer.write(group)
        else:
            with self._opened(manifest) as archive:
                writer = self._writer(archive, tier)
                found = writer.write(group)
        self.report |= {key: value for key, value in writer.report.items() if key not in self.report}
        return found

    def _opened(self, manifest: Manifest) -> Archive:
        return Archive(self._writing.store, profile=self._profile, manifest=manifest)

    def _without(self, manifest: Manifest, names: set[str]) -> Manifest:
        """The manifest without sessions of this generation, whose files are removed."""
        gone = [entry for entry in manifest.sessions if entry.session in names and entry.session in self._tried]
        for entry in gone:
            (self._writing.folder / entry.file).unlink()
        kept = tuple(entry for entry in manifest.sessions if entry not in gone)
        return dataclasses.replace(manifest, sessions=kept)

    def _finished(
        self, manifest: Manifest, snapshots: Sequence[Snapshot], screened: Mapping[str, Screened]
    ) -> Manifest:
        """One generation, its shards with records, its sessions in the order in which they were given."""
        old = self._archive.manifest if self._archive else None
        records = {s.session: self._record(s, screened[s.session]) for s in snapshots}
        entries = {entry.session: entry for entry in manifest.sessions}
        for name, record in records.items():
            entries[name] = with_metadata(self._writing.folder, entries[name], {KEY: record.text()}, manifest.seal)
        before = [entry.session for entry in old.sessions] if old else []
        order = [*before, *records]
        manifest = dataclasses.replace(
            manifest, generation=old.generation + 1 if old else 1, quality=old.quality if old else self._asked,
            sessions=tuple(entries[name] for name in order),
        )  # fmt: skip
        up = {name: record for name, record in records.items() if record.kept != record.asked}
        self.report["guard"] = {
            "sessions": len(records), "stepped_up": len(up),
            "kept": dict(collections.Counter(record.kept for record in records.values())),
            "decisions": [{"session": name, "asked": record.asked, "kept": record.kept,
                           "reason": record.tried[0].reason} for name, record in up.items()],
        }  # fmt: skip
        committed = {entry.head_sha256 for entry in old.libraries} if old else set()
        return self._with_profile(self._pruned(manifest, committed))

    def _with_profile(self, manifest: Manifest) -> Manifest:
        """The manifest with the profile that was asked with, even if every session took a tier that needs none."""
        if not self._settings.codec().calibrated:
            return manifest
        with self._opened(manifest) as archive:
            known = {lib.profile_digest(index) for lib in archive.libraries for index in range(len(lib.states))}
            given = self._settings.profile
            if known - {None} if given is None else profiles.digest(given) in known:
                return manifest
            held = self._writer(archive, self._asked).write_state(archive.identity)
        return dataclasses.replace(held, generation=manifest.generation)

    def _record(self, snapshot: Snapshot, screened: Screened) -> GuardRecord:
        tried = tuple(self._tried[snapshot.session])
        found = screened.range.to_json() if screened.range else {}
        limits = self._guard.limits.to_json(self._kl)
        return GuardRecord(self._asked, tried[-1].tier, self._guard.continuation(snapshot), limits, found, tried)

    def _pruned(self, manifest: Manifest, committed: set[str]) -> Manifest:
        """The manifest without new library segments that nothing refers to any more."""
        with self._opened(manifest) as archive:
            shards = [archive.shard(name) for name in archive.sessions]
            keep = committed | {library.entry.head_sha256 for shard in shards for library in shard.libraries}
            while True:
                held = [library for library in archive.libraries if library.entry.head_sha256 in keep]
                profiles = {library.profile_digest(index) for library in held for index in range(len(library.states))}
                others = {digest for library in held for digest in library.others}
                others |= {
                    library.entry.head_sha256
                    for library in archive.libraries
                    for index in range(len(library.states))
                    if library.embeds(index) and library.profile_digest(index) in profiles - {None}
                }
                if others <= keep:
                    break
                keep |= others
        for entry in manifest.libraries:
            if entry.head_sha256 not in keep:
                (self._writing.folder / entry.file).unlink()
        libraries = tuple(entry for entry in manifest.libraries if entry.head_sha256 in keep)
        return dataclasses.replace(manifest, libraries=libraries)


def with_metadata(
    folder: Path, entry: SessionEntry, more: Mapping[str, str], seal: Seal | None = None
) -> SessionEntry:
    """Write a shard anew with more metadata, in the place of one that no manifest names yet; returns its entry."""
    path = folder / entry.file
    container = Container(path, entry.bytes, entry.head_sha256, seal)
    try:
        metadata = {**container.metadata, **more}
        writer = ContainerWriter(path, header_reserve(metadata), seal)
        try:
            # Unit by unit: that is what an encrypted file consists of.
            for record in container.table("unit.index", tables.UNIT):
                writer.append(container.payload(int(record["offset"]), int(record["length"])))
            info = writer.commit(container.tables, metadata)
        finally:
            writer.abort()
    finally:
        container.close()
    return session_entry(path, info, entry.session, entry.tokens, entry.salt)


def _why(trial: Trial) -> str:
    change = trial.ppl_change_pct
    found = [trial.reason, *([] if trial.kl is None else [f"KL {trial.kl:.4g}"]),
             *([] if change is None else [f"perplexity {change:+.2f} %"])]  # fmt: skip
    return ", ".join(found)
