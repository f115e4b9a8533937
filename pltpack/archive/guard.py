"""Guards: whether a session, as it was encoded, holds what its tier promises, and which tier comes next if not.

A promise is a KL divergence (the tier's own) and a change of perplexity. `ProfileGuard` has no model: it goes by what
the profile predicts, and protects what the profile says nothing about. `pltpack.quality.guard.ModelGuard` measures.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

from pltpack.archive.guard_record import HOLDS, Trial
from pltpack.archive.ranges import ANSWERED, OUTSIDE, STRANGE, Range, Ranges
from pltpack.codec import registry
from pltpack.codec.base import State
from pltpack.errors import UnsupportedError
from pltpack.snapshot import Identity, Snapshot

if TYPE_CHECKING:
    from pltpack.archive.reader import Archive

#: The tier that keeps every promise.
LAST = "lossless"
#: The tier after the calibrated ones: it relies on no profile.
UNCALIBRATED = "q4"
#: KL divergence that goes with 2 % of perplexity: what tiers without a promise of their own are held to.
USUAL_KL = 0.025
#: A step is chosen by a sample of the tokens: over all of them as much more may be predicted. Well within the margin
#: that profiles add to what they measured.
SAMPLED = 1.25


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a guard holds sessions to.

    Attributes
    ----------
    ppl_pct : float
        Change of perplexity in percent beyond which a better tier is taken.
    lossless_pct : float
        Change beyond which it is the lossless one at once.
    kl : float or None
        KL divergence in nats; None: what the tier promises, or `USUAL_KL`.
    errors : float
        Standard errors by which perplexity must exceed its limits: it is noisy over a few hundred tokens.
    strange, outside : float
        See `pltpack.archive.ranges.Range`.
    refuse : bool
        Raise `PromiseError` instead of taking a better tier.
    """

    ppl_pct: float = 2.0
    lossless_pct: float = 5.0
    kl: float | None = None
    errors: float = 2.0
    strange: float = STRANGE
    outside: float = OUTSIDE
    refuse: bool = False

    def check(self) -> None:
        """Refuse limits that are none.

        Raises
        ------
        UnsupportedError
        """
        positive = (self.ppl_pct, self.lossless_pct, self.errors + 1, *(() if self.kl is None else (self.kl,)))
        if not (all(0 < value < float("inf") for value in positive) and self.errors >= 0):
            raise UnsupportedError("a guard's limits are positive numbers")
        if self.lossless_pct < self.ppl_pct or not 1 < self.strange <= self.outside < float("inf"):
            raise UnsupportedError("a guard's limits are out of order")

    def to_json(self, kl: float) -> dict[str, float]:
        """What a record says of them; `kl` is what a session was held to."""
        return {"kl": kl, "ppl_pct": self.ppl_pct, "lossless_pct": self.lossless_pct}


@dataclasses.dataclass(frozen=True)
class Screened:
    """What is known of a session before it is encoded.

    Attributes
    ----------
    range : Range or None
        None without a profile.
    refused : str or None
        Why no lossy tier may have it; see `pltpack.archive.guard_record.Trial.reason`.
    answered : bool
        Whether it ends with a turn that is answered next.
    """

    range: Range | None = None
    refused: str | None = None
    answered: bool = False


class Guard(Protocol):
    """Judges sessions; what may be judged at once, and in which order, is its caller's."""

    @property
    def limits(self) -> Limits:
        """What sessions are held to."""
        ...

    @property
    def needs_profile(self) -> bool:
        """Whether it cannot judge without one."""
        ...

    def continuation(self, snapshot: Snapshot) -> str | None:
        """What a session is continued with, as records say it."""
        ...

    def begin(self, profile: State | None, identity: Identity) -> None:
        """Prepare for sessions of an identity; `profile` is the tier's, None for tiers that have none."""
        ...

    def screen(self, snapshot: Snapshot) -> Screened:
        """Look at a session before it is encoded."""
        ...

    def judge(
        self, snapshot: Snapshot, screened: Screened, archive: Archive, tier: str, kl: float, first: bool
    ) -> Trial:
        """Judge a session as it is encoded in an archive.

        Parameters
        ----------
        snapshot : Snapshot
            The original.
        screened : Screened
        archive : Archive
            Holds the session in `tier`.
        tier : str
        kl : float
            What it is held to, in nats.
        first : bool
            Whether the tier is the one that was asked for.
        """
        ...


class ProfileGuard:
    """A guard without a model: what the profile predicts decides, and what it saw in calibration.

    Parameters
    ----------
    limits : Limits, optional
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.limits.check()
        self._ranges: Ranges | None = None

    @property
    def needs_profile(self) -> bool:
        """See `Guard`."""
        return True

    def continuation(self, snapshot: Snapshot) -> str | None:
        """See `Guard`: nothing is continued."""
        return None

    def begin(self, profile: State | None, identity: Identity) -> None:
        """See `Guard`."""
        self._ranges = None if profile is None else Ranges(profile, identity)

    def screen(self, snapshot: Snapshot) -> Screened:
        """See `Guard`: values that the profile says nothing about are for the lossless tier."""
        if self._ranges is None:
            return Screened()
        found = self._ranges.of(snapshot)
        refused = "range" if found.outside(self.limits.outside) else None
        return Screened(found, refused, self._ranges.answered_next(snapshot))

    def judge(
        self, snapshot: Snapshot, screened: Screened, archive: Archive, tier: str, kl: float, first: bool
    ) -> Trial:
        """See `Guard`: another domain than calibration's takes one tier better than what was asked for."""
        predicted = self._predicted(snapshot, tier)
        reason = HOLDS
        if first and self.is_strange(screened):
            reason = "range"
        elif predicted is not None and predicted > SAMPLED * kl:
            reason = "kl"
        return Trial(tier, reason, predicted_kl=predicted)

    def is_strange(self, screened: Screened) -> bool:
        """Whether a session is of another kind than calibration text, more than chats may be."""
        most = min(self.limits.strange * (ANSWERED if screened.answered else 1), self.limits.outside)
        return screened.range is not None and screened.range.strange(most)

    def _predicted(self, snapshot: Snapshot, tier: str) -> float | None:
        target = promise(tier)
        if self._ranges is None or target is None or not self._ranges.predicts_kl:
            return None
        return self._ranges.predicted_kl(snapshot, target)


def promise(tier: str) -> float | None:
    """KL divergence in nats that a tier promises by its profile; None for the others."""
    found = registry.TIERS.get(tier, ("", {}))[1].get("target_kl")
    return None if found is None else float(found)


def ladder(tier: str, aimed: float | None) -> list[str]:
    """Tiers to take one after the other where `tier` does not hold what it should; the last is lossless.

    Parameters
    ----------
    tier : str
    aimed : float or None
        KL divergence in nats that it was steered by; None if by none.

    Returns
    -------
    list of str
        Calibrated tiers by what they promise, then the best one without a profile; tiers of one codec without promises
        by their bits.
    """
    codec, config = registry.TIERS.get(tier, (tier, {}))
    if codec == LAST:
        return []
    peers = {name: settings for name, (other, settings) in registry.TIERS.items() if other == codec}
    if "bits" in config:
        better = sorted((n for n in peers if peers[n]["bits"] > config["bits"]), key=lambda n: peers[n]["bits"])
        return [*better, *([] if codec == "group" else [UNCALIBRATED]), LAST]
    targets = {name: value for name in peers if (value := promise(name)) is not None}
    finer = [] if aimed is None else sorted((n for n in targets if targets[n] < aimed), key=lambda n: -targets[n])
    return [*finer, UNCALIBRATED, LAST]
