"""A session about to be written: which mapping rows it may keep, and the units it needs besides."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from pltpack.archive.encoding import UnitJob, relative_error, same_bits, split
from pltpack.archive.library import Library
from pltpack.archive.mapped import References, mapped_units
from pltpack.archive.sampling import TokenRange
from pltpack.archive.segments import Segment
from pltpack.archive.sharing import Role, Run, run_records
from pltpack.codec.base import Codec, KeyValue
from pltpack.format.container import MINOR_GROUPS, MINOR_PREDICTIONS
from pltpack.snapshot import Snapshot

#: Per token, layer and kind, two captures of equal tokens may differ by this much (norm of difference over norm) and
#: still count as one cache seen through kernel noise.
KERNEL_NOISE = 0.05
#: Where only the decoded centroid is left to compare with, a token may be this many times the unit's own error away,
#: and all tokens together not much more than once: coarse tiers would take a token of any other cache as near enough.
ERROR_SPREAD, RMS_SPREAD = 4.0, 1.25


class Draft:
    """The mapping and the unit jobs of one new session.

    Attributes
    ----------
    runs : list of Run
        Mapping rows, in the order of the session's tokens.
    opened, owners
        As given.

    Parameters
    ----------
    snapshot : Snapshot
    runs : list of Run
    libraries : list of Library
        All segments, the one just written included.
    opened : Library or None
        The segment just written.
    owners : sequence of Snapshot
        Per node of `opened`, the snapshot its values came from.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        runs: list[Run],
        libraries: list[Library],
        opened: Library | None,
        owners: Sequence[Snapshot],
    ) -> None:
        self.snapshot, self.runs = snapshot, runs
        self._libraries, self.opened, self.owners = libraries, opened, owners

    @property
    def mapped(self) -> int:
        """Tokens that need no units but corrections."""
        return sum(run.length for run in self.runs if run.role is not Role.NEAR)

    def minor(self, codec: Codec) -> int:
        """The least minor version of the format that knows what the shard will hold."""
        if any(run.role is Role.NEAR for run in self.runs):
            return MINOR_PREDICTIONS
        return MINOR_GROUPS if codec.spans or codec.calibrated else 0

    def jobs(self, block: int, corrections: bool, groups: Sequence[range]) -> Iterator[UnitJob]:
        """Unit jobs in index order: per layer group, what is not mapped or predicted, and corrections if asked for."""
        pieces = self._pieces()
        values = References(run_records(self.runs, self._libraries), self._libraries, self._owner)
        for layers in groups:
            for tokens, run in pieces:
                if run is not None and run.role is not Role.NEAR and not (corrections and run.role is Role.PREFIX):
                    continue
                if run is not None and run.role is Role.PREFIX:
                    tokens = dataclasses.replace(tokens, boundary=0)
                jobs = split(tokens, layers, block)
                if run is not None:
                    jobs = (dataclasses.replace(job, reference=values, promise=run.promise) for job in jobs)
                yield from jobs

    def _pieces(self) -> list[tuple[TokenRange, Run | None]]:
        """All tokens in order, cut where a mapping row begins or ends."""
        out: list[tuple[TokenRange, Run | None]] = []
        at, end = 0, len(self.snapshot)
        for run in self.runs:
            if at < run.session_start:
                out.append((TokenRange(self.snapshot, at, run.session_start, end - run.session_start), None))
            out.append((TokenRange(self.snapshot, run.session_start, run.stop, end - run.stop), run))
            at = run.stop
        if at < end:
            out.append((TokenRange(self.snapshot, at, end), None))
        return out

    def near(self, pool: ThreadPoolExecutor) -> list[bool]:
        """Which rows stay: all but exact prefixes from the first on whose values are not the session's own."""
        out, near = [], True
        for run in self.runs:
            if run.role is Role.PREFIX:
                near = near and all(pool.map(lambda near: near(), self._comparisons(run)))
            out.append(near or run.role is not Role.PREFIX)
        return out

    def keep(self, stays: Sequence[bool], progress: Callable[[int], None]) -> None:
        """Drop the other rows; `progress` is told the raw bytes that need no units then."""
        per_token = sum(layer.bytes_per_token for layer in self.snapshot.identity.layers)
        self.runs = [run for run, stay in zip(self.runs, stays, strict=True) if stay]
        for run in self.runs:
            if run.role is not Role.NEAR:
                progress(run.length * per_token)

    def _comparisons(self, run: Run) -> list[Callable[[], bool]]:
        """What a row's values must pass: one comparison a layer, or one a unit, which is decoded once."""
        start, stop = run.session_start, run.session_start + run.length
        layers = range(len(self.snapshot.identity.layers))
        if run.library is self.opened:
            owner = self.owners[run.node]
            return [functools.partial(self._near_owner, owner, layer, start, stop) for layer in layers]
        records = run_records(self.runs, self._libraries)
        units = {
            int(record["offset"]): functools.partial(self._near_unit, segment, record, first, last)
            for segment, record, first, last in mapped_units(records, self._libraries, layers, start, stop)
        }
        return list(units.values())

    def _near_owner(self, owner: Snapshot, layer: int, start: int, stop: int) -> bool:
        if owner is self.snapshot:
            return True
        own = self.snapshot.layer(layer, start, stop)
        return token_error(own, owner.layer(layer, start, stop)) <= KERNEL_NOISE

    def _near_unit(self, segment: Segment, record: np.void, first: int, last: int) -> bool:
        at, error = segment.position_of(record), float(record["error"])
        part = slice(first - at, last - at)
        for layer, (keys, values) in enumerate(segment.decode_span(record), int(record["layer"])):
            mine, held = self.snapshot.layer(layer, first, last), (keys[:, part], values[:, part])
            if not token_error(mine, held) <= KERNEL_NOISE + ERROR_SPREAD * error:
                return False
            if not relative_error(mine, held) <= KERNEL_NOISE + RMS_SPREAD * error:
                return False
        return True

    def _owner(self, library: Library, node: int) -> Snapshot | None:
        """The session that an exact codec's node has just been written from: its values need no decoding."""
        return self.owners[node] if library is self.opened and library.codec(0).exact else None


@np.errstate(invalid="ignore", over="ignore")  # NaN and infinities are told apart below, without a warning.
def token_error(own: KeyValue, other: KeyValue) -> float:
    """Largest relative difference of a token's vector, over keys and values, heads taken together.

    Norms below a tenth of the median count as that much: attention sinks have values near zero. Non-finite values must
    agree.

    Parameters
    ----------
    own, other : (ndarray, ndarray)
        Keys ``[H, T, D_k]`` and values ``[H, T, D_v]``.
    """
    worst = 0.0
    for x, y in zip(own, other, strict=True):
        if same_bits(x, y):
            continue
        a, b = x.astype(np.float64), y.astype(np.float64)
        finite = np.isfinite(a)
        if not np.array_equal(finite, np.isfinite(b)) or not np.array_equal(a[~finite], b[~finite], equal_nan=True):
            return float("inf")
        a, b = np.where(finite, a, 0.0), np.where(finite, b, 0.0)
        norm = np.sqrt(np.square(a).sum(axis=(0, 2)))
        difference = np.sqrt(np.square(a - b).sum(axis=(0, 2)))
        floor = max(float(np.median(norm)) / 10, 1e-30)
        worst = max(worst, float((difference / np.maximum(norm, floor)).max()))
    return worst
