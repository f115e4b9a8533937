"""Whether a session's values are of the kind that a profile was calibrated on.

A profile holds a mean and a covariance in disguise: every component of its transform has the mean magnitude that its
coefficients had over calibration text (`Profile.shared_log`, `local_log`). Coefficients of a session over these scales
are 1 on average where it is of the same kind. Prose after a calibration on prose reads 0.99 to 1.11, chats and code
read 1.45 to 1.9; values that no such model makes read far more.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from pltpack.codec import rate
from pltpack.codec.base import SINK_TOKENS, State
from pltpack.codec.blas import single_threaded
from pltpack.codec.rows import to_rows
from pltpack.codec.transform import TransformCodec
from pltpack.errors import PromiseError, UnsupportedError
from pltpack.snapshot import Identity, Snapshot

#: Energy beyond which a session is of another kind than calibration text, and beyond which the profile does not hold.
#: Prose reads up to 1.17. From 1.38 on most texts that were cut in mid-text broke what their tier promises, and energy
#: does not tell which (docs/guard.md), so the limit lies below all of them.
STRANGE, OUTSIDE = 1.3, 3.0
#: How many times the first of them may be read where a session ends with a turn that is answered next: what is asked is
#: coded finer there, and chats that read up to 1.54 hold.
ANSWERED = 1.25
#: Most times its scale that a single coefficient may be: ordinary sessions reach 17.
PEAK = 60.0
#: Tokens that a prediction over a whole session looks at.
MOST = 4096
_PIECE = 256


@dataclasses.dataclass(frozen=True)
class Range:
    """How a session compares with calibration.

    Attributes
    ----------
    energy : float
        Mean magnitude of coefficients over what calibration says, 1 for text of the same kind; 0 if there were none.
    peak : float
        Largest one of them.
    not_finite : float
        Share of tokens with a NaN or an infinity.
    """

    energy: float
    peak: float
    not_finite: float

    def outside(self, most: float = OUTSIDE) -> bool:
        """Whether the profile says nothing about such values."""
        return not (self.energy <= most and self.peak <= PEAK and self.not_finite == 0)

    def strange(self, most: float = STRANGE) -> bool:
        """Whether they are of another kind than calibration text, as those of another domain are."""
        return not 1 / most <= self.energy <= most

    def to_json(self) -> dict[str, float]:
        """A JSON-ready mapping."""
        return dataclasses.asdict(self)


class Ranges:
    """Compares sessions with a profile.

    Parameters
    ----------
    profile : mapping of str to ndarray
        Arrays of the profile.
    identity : Identity
        Of the sessions.

    Raises
    ------
    UnsupportedError
        If the profile does not serve them.
    """

    def __init__(self, profile: State, identity: Identity) -> None:
        self._codec = TransformCodec(step=1.0)
        try:
            self._codec.start(profile, identity)
        except ValueError as error:
            raise UnsupportedError(f"the profile does not serve these sessions: {error}") from None

    @property
    def predicts_kl(self) -> bool:
        """Whether the profile predicts a KL divergence."""
        return rate.predicts_kl(self._codec.profile)

    def answered_next(self, snapshot: Snapshot) -> bool:
        """Whether a session ends with a turn that is answered next."""
        return rate.answered_next(self._codec.profile, snapshot)

    @single_threaded
    @np.errstate(over="ignore", invalid="ignore")  # Values out of all bounds are what is looked for.
    def of(self, snapshot: Snapshot) -> Range:
        """Look at all tokens of a session but its first, which are attention sinks."""
        total, count, peak, lost = 0.0, 0, 0.0, 0
        for start in range(SINK_TOKENS, len(snapshot), _PIECE):
            stop = min(start + _PIECE, len(snapshot))
            finite = np.ones(stop - start, bool)
            for found, scale, good in self._coefficients(snapshot, start, stop):
                finite &= good
                over = np.abs(found[good]).astype(np.float64) / scale
                total, count = total + float(over.sum()), count + over.size
                peak = max(peak, float(over.max(initial=0.0)))
            lost += int((~finite).sum())
        energy = total / count if count else 1.0
        seen = max(len(snapshot) - SINK_TOKENS, 1)
        return Range(energy if math.isfinite(energy) else math.inf, peak, lost / seen)

    def _coefficients(
        self, snapshot: Snapshot, start: int, stop: int
    ) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        out = []
        layers = self._codec.profile.layers
        for bases in self._codec.all_bases():
            group = bases.group
            arrays = [snapshot.layer(index, start, stop) for index in range(group.start, group.stop)]
            rows, finite = to_rows(arrays, layers[group.start : group.stop], snapshot.identity, start)
            rows -= bases.mean
            rows[~finite] = 0
            out.append((bases.analyse(rows), rate.value_of(bases.logs), finite))
        return out

    @single_threaded
    def predicted_kl(self, snapshot: Snapshot, target_kl: float) -> float:
        """KL divergence that the profile predicts over all of a session, coded as rate control would for a target.

        Rate control looks at a sample of the tokens; this looks at up to `MOST`.

        Raises
        ------
        PromiseError
            If no step is fine enough.
        """
        if not len(snapshot):
            return 0.0
        try:
            return rate.predicted_kl(self._codec, snapshot, target_kl, MOST)
        except ValueError as error:
            raise PromiseError(f"session {snapshot.session!r}: {error}", snapshot.origin) from None
