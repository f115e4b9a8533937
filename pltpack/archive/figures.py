"""The four figures of an archive, defined once: the command line, Prometheus and the report take them from here.

1. **Compression ratio**: bytes of keys and values as dumped, over all bytes of the archive.
2. **Quality**: KL divergence in nats a token, and change of perplexity in percent, as the guard measured them on the
   sessions as they are stored (`pltpack.archive.guard_record`). Each session counts once; the perplexities compared are
   those of the mean log-likelihood, as `pltpack score` does it. A session in a bit-exact codec has 0, measured or not.
3. **Dedup hit rate**: tokens whose values come from the library, over all tokens.
4. **Tail bits per element**: what the sessions' own units take, over the elements of the tokens that are not shared:
   the price of what no other session has.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from pltpack.archive.guard_record import record_of
from pltpack.codec import registry
from pltpack.codec.base import Codec

if TYPE_CHECKING:
    from pltpack.archive.shard import Shard


@dataclasses.dataclass(frozen=True)
class Figures:
    """The four figures.

    Attributes
    ----------
    ratio : float
        Times smaller than the raw keys and values.
    kl : float or None
        Mean over the sessions whose quality is known, nats a token; None if none is.
    ppl_change_pct : float or None
        Over the same sessions, in percent.
    dedup_hit_rate : float
        From 0 to 1.
    tail_bits_per_element : float
        0 if every token is shared.
    scored_sessions : int
        Sessions whose quality is known.
    worst_kl : float or None
        Largest KL divergence among them.
    """

    ratio: float
    kl: float | None
    ppl_change_pct: float | None
    dedup_hit_rate: float
    tail_bits_per_element: float
    scored_sessions: int
    worst_kl: float | None

    @classmethod
    def of(cls, stats: Mapping[str, Any]) -> Figures:
        """Those among an archive's statistics (`pltpack.archive.stats.archive_stats`)."""
        return cls(**{field.name: stats[field.name] for field in dataclasses.fields(cls)})

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping."""
        return dataclasses.asdict(self)

    def shown(self) -> dict[str, str]:
        """All of them as people are shown them, everywhere to the same digits; unknown ones as ``not measured``."""
        return {
            "ratio": f"{self.ratio:,.2f}x",
            "kl": "not measured" if self.kl is None else f"{self.kl:.5f} nats",
            "ppl_change_pct": "not measured" if self.ppl_change_pct is None else f"{self.ppl_change_pct:+.2f} %",
            "dedup_hit_rate": f"{100 * self.dedup_hit_rate:.1f} %",
            "tail_bits_per_element": f"{self.tail_bits_per_element:.3f}",
        }  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Quality:
    """What is known of how well a session is stored: KL in nats, change of log-likelihood in nats."""

    kl: float
    nll_change: float

    @property
    def ppl_change_pct(self) -> float:
        """Change of perplexity in percent."""
        return 100 * math.expm1(min(self.nll_change, 50.0))


def quality_of(shard: Shard) -> Quality | None:
    """A session's quality as it is stored; None if nobody measured it."""
    if is_exact(shard):
        return Quality(0.0, 0.0)
    record = record_of(shard)
    if record is None or not record.last.measured:
        return None
    last = record.last
    assert last.kl is not None and last.nll is not None and last.nll_rebuilt is not None
    return Quality(last.kl, last.nll_rebuilt - last.nll)


def is_exact(shard: Shard) -> bool:
    """Whether every value of a session is stored bit by bit, its own units and the library's that it maps to."""
    return all(codec.exact for codec in _codecs(shard))


def recompute_at_cut(shard: Shard) -> int:
    """Tokens to compute again before a cut inside a session: see `pltpack.codec.base.Codec.recompute_at_cut`."""
    return max((codec.recompute_at_cut for codec in _codecs(shard)), default=0)


def _codecs(shard: Shard) -> Iterator[Codec]:
    """Those of its own units, and of the library's that it maps to; not started."""
    yield from (_codec(shard, *pair) for pair in dict.fromkeys(shard.states) if len(shard.units))
    nodes = {(int(run["library"]), int(run["node"])) for run in shard.exact_runs}
    used = {(library, int(state)) for library, node in nodes
            for state in np.unique(shard.libraries[library].units_of(node)["state"])}  # fmt: skip
    yield from (_codec(shard, *pair) for pair in used)


def _codec(shard: Shard, library: int, state: int) -> Codec:
    return registry.codec(*shard.libraries[library].state_entry(state))


def tail_bytes(shard: Shard) -> int:
    """Bytes of a session's own units."""
    return int(shard.units["length"].sum(dtype=np.int64))


def figures(
    raw_bytes: int,
    archive_bytes: int,
    tokens: int,
    shared_tokens: int,
    elements_per_token: int,
    shards: Iterable[Shard],
) -> Figures:
    """The four figures of an archive, from what `pltpack.archive.stats.archive_stats` counts.

    Parameters
    ----------
    raw_bytes, archive_bytes : int
        Keys and values as dumped; manifest, library and shards.
    tokens, shared_tokens : int
        Of all sessions; those whose values come from the library.
    elements_per_token : int
        Of all layers, keys and values.
    shards : iterable of Shard
        All of them.
    """
    known, tail = [], 0
    for shard in shards:
        tail += tail_bytes(shard)
        quality = quality_of(shard)
        if quality is not None:
            known.append(quality)
    count = len(known)
    change = sum(quality.nll_change for quality in known) / count if count else 0.0
    return Figures(
        ratio=raw_bytes / archive_bytes,
        kl=sum(quality.kl for quality in known) / count if count else None,
        ppl_change_pct=100 * math.expm1(min(change, 50.0)) if count else None,
        dedup_hit_rate=shared_tokens / tokens if tokens else 0.0,
        tail_bits_per_element=tail_bits(tail, tokens - shared_tokens, elements_per_token),
        scored_sessions=count,
        worst_kl=max(quality.kl for quality in known) if count else None,
    )


def tail_bits(size: int, tokens: int, elements_per_token: int) -> float:
    """Bits per element of units of `size` bytes that hold `tokens` tokens; 0 if there are none."""
    elements = tokens * elements_per_token
    return 8 * size / elements if elements else 0.0
