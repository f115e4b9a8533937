"""How an archive is written: the tier, the profile, and what to aim at instead of the tier's promise."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

from pltpack.codec import registry
from pltpack.codec.base import Codec, State
from pltpack.errors import PromiseError, UnsupportedError

if TYPE_CHECKING:
    from pltpack.archive.engine import Engine
    from pltpack.gpu.backend import Backend

#: What was written may be larger than its target by this share.
TOLERANCE = 0.03
#: What sessions with predictions take may be less than the target by this share before finer steps are tried.
UNUSED = 0.05
#: Range of the window in tokens, and of tau.
WINDOWS = (32, 128)
TAUS = (0.1, 0.3)
#: Tokens predicted from a node between two looks at whether it is to be written anew.
RECOMPUTE_TOKENS, RECOMPUTE_DEFAULT = (1000, 5000), 2000


@dataclasses.dataclass(frozen=True)
class Volume:
    """How much there is to be written, or was.

    Attributes
    ----------
    elements : int
        Elements of keys and values, those that sessions share counted once.
    payload : int
        Bytes of their units.
    besides : int
        Bytes of the files besides units: token ids, tables, headers, manifest; the profile left out.
    """

    elements: int
    payload: int = 0
    besides: int = 0


@dataclasses.dataclass(frozen=True)
class Target:
    """What sessions are encoded to, instead of a tier's own promise; at most one is given.

    Attributes
    ----------
    kl : float or None
        KL divergence in nats, as the profile predicts it, session by session.
    bits : float or None
        Bits per element of each session's units.
    size : int or None
        Bytes by which the archive grows, the profile left out.
    """

    kl: float | None = None
    bits: float | None = None
    size: int | None = None

    def config(self, volume: Volume | None = None, scale: float = 1.0) -> dict[str, Any]:
        """As the codec's configuration; empty where the tier's own promise stands.

        Parameters
        ----------
        volume : Volume, optional
            What is to be written, its payload not yet known; a size cannot be steered by before.
        scale : float
            Of the bits that the codec is told, after it missed a target.

        Raises
        ------
        UnsupportedError
            If several targets are given, or one that is out of range.
        PromiseError
            If there is no room for any units.
        """
        given = [value for value in (self.kl, self.bits, self.size) if value is not None]
        if len(given) > 1:
            raise UnsupportedError("of a target KL, bits and bytes only one can be met")
        if not all(0 < value < float("inf") for value in given):
            raise UnsupportedError(f"a target of {given[0]:g} is not a positive number")
        if self.kl is not None:
            return {"target_kl": self.kl}
        if self.bits is not None:
            return {"target_bits": self.bits * scale}
        if self.size is None or volume is None or not volume.elements:
            return {}
        if self.size <= volume.besides:
            raise PromiseError(f"token ids, tables and headers alone take {volume.besides} bytes of {self.size}")
        return {"target_bits": min(scale * 8 * (self.size - volume.besides) / volume.elements, _MOST_BITS)}

    def check(self, written: Volume, unused: float = 1.0) -> None:
        """Compare what was written with the target.

        Raises
        ------
        MissedError
            If it is larger by more than `TOLERANCE`, or smaller by more than `unused`.
        """
        if self.bits is not None and written.elements:
            found = 8 * written.payload / written.elements
            _compare(found, self.bits, "{:.4g} bits per element", self.bits / max(found, 1e-9), unused)
        if self.size is not None:
            room = max(self.size - written.besides, 0) / max(written.payload, 1)
            _compare(written.payload + written.besides, self.size, "{} bytes", room, unused)


class MissedError(PromiseError):
    """What was written is too large, or leaves room: `room` is how many times its payload may be."""

    def __init__(self, fact: str, path: str | os.PathLike[str] | None = None, room: float = 0.0) -> None:
        super().__init__(fact, path)
        self.room = room


#: More bits per element than any codec can use.
_MOST_BITS = 64.0


def _compare(found: float, wanted: float, shown: str, room: float, unused: float) -> None:
    if found > (1 + TOLERANCE) * wanted:
        more = f"{100 * (found / wanted - 1):.1f} % more than the target of {shown.format(wanted)}"
        raise MissedError(f"the smallest found takes {shown.format(found)}, {more}", room=room)
    if found < (1 - unused) * wanted:
        raise MissedError(f"{shown.format(found)} are less than the target of {shown.format(wanted)}", room=room)


@dataclasses.dataclass(frozen=True)
class Settings:
    """How an archive is written.

    Attributes
    ----------
    quality : str
        Tier.
    dedup : bool
        Whether sessions share prefixes.
    block : int
        Tokens per block.
    profile : mapping of str to ndarray or None
        Arrays of the profile, for tiers that need one.
    external : bool
        Whether the library names the profile by its digest only.
    target : Target
        What to aim at instead of the tier's promise.
    near : bool
        Whether sessions that share are also predicted from equal and similar tokens at other places.
    window : int
        Unit of matching in tokens, 32 to 128: repeats of half of it are found.
    tau : float
        PLT distance, 0.1 to 0.3, up to which windows of other tokens are tried as predictions.
    recompute_tokens : int or None
        Tokens predicted from a node of the library, 1000 to 5000, after which it is looked at whether the mean of all
        that it served would pay. None: 2000, and never in tiers with a profile, where it does not.
    library_budget : int or None
        Bytes up to which units go to the library; None for any number.
    backend : Backend or None
        Where units are encoded, and decoded meanwhile; None for the CPU.
    engine : Engine or None
        Whose workers encode; None for threads of this process.
    """

    quality: str
    dedup: bool = True
    block: int = 32
    profile: State | None = None
    external: bool = False
    target: Target = Target()
    near: bool = True
    window: int = 64
    tau: float = 0.2
    recompute_tokens: int | None = None
    library_budget: int | None = None
    backend: Backend | None = None
    engine: Engine | None = None

    def check(self) -> None:
        """Refuse settings out of range."""
        if not 1 <= self.block <= 4096:
            raise UnsupportedError(f"block of {self.block} tokens (allowed: 1 to 4096)")
        if not WINDOWS[0] <= self.window <= WINDOWS[1]:
            raise UnsupportedError(f"window of {self.window} tokens (allowed: {WINDOWS[0]} to {WINDOWS[1]})")
        if not TAUS[0] <= self.tau <= TAUS[1]:
            raise UnsupportedError(f"distance tau of {self.tau:g} (allowed: {TAUS[0]} to {TAUS[1]})")
        low, high = RECOMPUTE_TOKENS
        if self.recompute_tokens is not None and not low <= self.recompute_tokens <= high:
            raise UnsupportedError(f"recompute after {self.recompute_tokens} tokens (allowed: {low} to {high})")
        if self.library_budget is not None and self.library_budget < 0:
            raise UnsupportedError(f"a library of {self.library_budget} bytes")
        if self.engine is not None and self.backend is not None:
            raise UnsupportedError("workers of an engine encode on the CPU: leave the device out")
        self.codec()

    @property
    def recompute(self) -> int | None:
        """Tokens between two looks at a node; None for never."""
        if self.recompute_tokens is None and registry.tier(self.quality).calibrated:
            return None
        return self.recompute_tokens or RECOMPUTE_DEFAULT

    def codec(self, volume: Volume | None = None, scale: float = 1.0) -> Codec:
        """The tier's codec, not started; arguments as of `Target.config`.

        Raises
        ------
        UnsupportedError
            If a target is given that the tier cannot steer by.
        PromiseError
            If a target is out of reach.
        """
        tier, config = registry.tier(self.quality), self.target.config(volume, scale)
        if self.target != Target() and not tier.calibrated:
            raise UnsupportedError(f"tier {self.quality!r} has no rate control: targets need a profile")
        return registry.codec(tier.codec_id, config) if config else tier
