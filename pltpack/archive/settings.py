"""How an archive is written: the tier, the profile, and what to aim at instead of the tier's promise."""

from __future__ import annotations

import dataclasses
from typing import Any

from pltpack.codec import registry
from pltpack.codec.base import Codec, State
from pltpack.errors import UnsupportedError


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
        Bytes of all units of the sessions, shared ones included.
    """

    kl: float | None = None
    bits: float | None = None
    size: int | None = None

    def config(self, elements: int) -> dict[str, Any]:
        """As the codec's configuration, for sessions of so many elements."""
        given = [value for value in (self.kl, self.bits, self.size) if value is not None]
        if len(given) > 1:
            raise UnsupportedError("of a target KL, bits and bytes only one can be met")
        if self.kl is not None:
            return {"target_kl": self.kl}
        if self.size is not None:
            return {"target_bits": 8 * self.size / max(elements, 1)}
        return {} if self.bits is None else {"target_bits": self.bits}


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
    """

    quality: str
    dedup: bool = True
    block: int = 32
    profile: State | None = None
    external: bool = False
    target: Target = Target()

    def check(self) -> None:
        """Refuse settings out of range."""
        if not 1 <= self.block <= 4096:
            raise UnsupportedError(f"block of {self.block} tokens (allowed: 1 to 4096)")
        self.codec()

    def codec(self, elements: int = 0) -> Codec:
        """The tier's codec, not started, for sessions of so many elements.

        Raises
        ------
        UnsupportedError
            If a target is given that the tier cannot steer by.
        """
        tier, config = registry.tier(self.quality), self.target.config(elements)
        if not config:
            return tier
        if not tier.calibrated:
            raise UnsupportedError(f"tier {self.quality!r} has no rate control: targets need a profile")
        return registry.codec(tier.codec_id, config)
