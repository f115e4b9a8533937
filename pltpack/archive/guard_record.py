"""What a guard found out about a session, kept in its shard (spec/format.md, "Guard records": ignorable metadata).

A guard encodes a session, asks whether the tier's promise holds, and takes a better tier until it does. The record says
what was asked for, what was kept, and what was measured on the way.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pltpack.archive.segments import dumps_json
from pltpack.errors import FormatError
from pltpack.format import json_text

if TYPE_CHECKING:
    from pltpack.archive.shard import Shard

#: Key of a shard's metadata.
KEY = "x-guard"
#: The reason of a trial that held what was promised.
HOLDS = "holds"
_MAX_BYTES = 1 << 16
_MAX_TEXT = 1000


@dataclasses.dataclass(frozen=True)
class Trial:
    """One tier that a session was encoded with.

    Attributes
    ----------
    tier : str
    reason : str
        `HOLDS`, or why it does not: ``kl``, ``perplexity``, ``range``, ``other model``, ``not a number``.
    kl, kl_error : float or None
        Measured KL divergence in nats a token, and the standard error of that mean; None if nothing was measured.
    nll, nll_rebuilt : float or None
        Mean negative log-likelihood of the continuation over the original and the rebuilt cache, in nats.
    ppl_error_pct : float or None
        Standard error of `ppl_change_pct`, in percent.
    tokens : int
        Tokens of the continuation that were scored.
    predicted_kl : float or None
        KL divergence that the profile predicts, over all tokens of the session.
    """

    tier: str
    reason: str
    kl: float | None = None
    kl_error: float | None = None
    nll: float | None = None
    nll_rebuilt: float | None = None
    ppl_error_pct: float | None = None
    tokens: int = 0
    predicted_kl: float | None = None

    @property
    def measured(self) -> bool:
        """Whether a model was asked and gave numbers."""
        return self.kl is not None and self.nll is not None and self.nll_rebuilt is not None

    @property
    def ppl_change_pct(self) -> float | None:
        """Change of perplexity in percent."""
        if self.nll is None or self.nll_rebuilt is None:
            return None
        return 100 * math.expm1(min(self.nll_rebuilt - self.nll, 50.0))

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping, the change of perplexity included; numbers that are not finite are null."""
        out = {**dataclasses.asdict(self), "ppl_change_pct": self.ppl_change_pct}
        return {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in out.items()}


@dataclasses.dataclass(frozen=True)
class GuardRecord:
    """A session's way to the tier that it is kept in.

    Attributes
    ----------
    asked, kept : str
        Tiers.
    continuation : str or None
        What was scored: ``captured`` (the true text that followed), ``held back`` (the session's own last tokens), or
        None without a model.
    limits : mapping of str to float
        ``kl`` in nats, ``ppl_pct`` and ``lossless_pct`` in percent: what was promised.
    range : mapping of str to float
        What was found outside of what calibration saw, see `pltpack.archive.ranges`; empty where nothing was looked at.
    tried : tuple of Trial
        In order; the last is the one that was kept.
    """

    asked: str
    kept: str
    continuation: str | None
    limits: Mapping[str, float]
    range: Mapping[str, float]
    tried: tuple[Trial, ...]

    @property
    def last(self) -> Trial:
        """What was kept."""
        return self.tried[-1]

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping."""
        finite = {key: value if math.isfinite(value) else None for key, value in self.range.items()}
        return {
            "asked": self.asked, "kept": self.kept, "continuation": self.continuation, "limits": dict(self.limits),
            "range": finite, "tried": [trial.to_json() for trial in self.tried],
        }  # fmt: skip

    def text(self) -> str:
        """As the shard's metadata hold it."""
        return dumps_json(self.to_json())


def kept_metadata(shard: Shard) -> dict[str, str]:
    """Metadata of a shard that is written anew with the same values."""
    return {KEY: shard.container.metadata[KEY]} if KEY in shard.container.metadata else {}


def record_of(shard: Shard) -> GuardRecord | None:
    """The record in a shard's metadata; None if it has none.

    Raises
    ------
    FormatError
        If it is none of this version.
    """
    text = shard.container.metadata.get(KEY)
    if text is None:
        return None
    try:
        return _parsed(text)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise FormatError(f"metadata {KEY!r} is malformed", shard.container.path) from None


def _parsed(text: str) -> GuardRecord:
    if len(text) > _MAX_BYTES:
        raise ValueError
    found = json_text.parse(text)
    tried = tuple(_trial(entry) for entry in found["tried"])
    if not tried:
        raise ValueError
    continuation = None if found["continuation"] is None else _text(found["continuation"])
    limits, ranges = ({_text(k): _finite(v) for k, v in found[name].items()} for name in ("limits", "range"))
    kept = {key: math.nan if value is None else value for key, value in ranges.items()}
    return GuardRecord(_text(found["asked"]), _text(found["kept"]), continuation,
                       {k: v for k, v in limits.items() if v is not None}, kept, tried)  # fmt: skip


def _trial(entry: Mapping[str, Any]) -> Trial:
    names = ("kl", "kl_error", "nll", "nll_rebuilt", "ppl_error_pct", "predicted_kl")
    tokens = entry["tokens"]
    if type(tokens) is not int or not 0 <= tokens < 1 << 31:
        raise ValueError
    numbers = {name: _finite(entry[name]) for name in names}
    return Trial(_text(entry["tier"]), _text(entry["reason"]), tokens=tokens, **numbers)


def _finite(value: Any) -> float | None:
    if value is None:
        return None
    if type(value) not in (int, float) or not math.isfinite(value) or abs(value) > 1e300:
        raise ValueError
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > _MAX_TEXT:
        raise ValueError
    return value
