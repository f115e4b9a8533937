"""A session about to be written: which mapping rows it may keep, and the units it needs besides."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from pltpack.archive.decoding import mapped_units
from pltpack.archive.encoding import UnitJob, split
from pltpack.archive.library import Library
from pltpack.archive.sampling import TokenRange
from pltpack.archive.segments import Segment
from pltpack.archive.sharing import Run, run_records
from pltpack.codec.base import KeyValue
from pltpack.snapshot import Snapshot

#: Per token, layer and kind, two captures of equal tokens may differ by this much (norm of difference over norm) and
#: still count as one cache seen through kernel noise.
KERNEL_NOISE = 0.05
#: Where only the decoded centroid is left to compare with, a token may be this many times the unit's own error away.
ERROR_SPREAD = 4.0


class Draft:
    """The mapping and the unit jobs of one new session.

    Attributes
    ----------
    runs : list of Run
        Mapping rows, from position 0 on without gaps.

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
        self._libraries, self._opened, self._owners = libraries, opened, owners

    @property
    def mapped(self) -> int:
        """Tokens from position 0 that the mapping covers."""
        return self.runs[-1].session_start + self.runs[-1].length if self.runs else 0

    def jobs(self, block: int, corrections: bool, groups: Sequence[range]) -> Iterator[UnitJob]:
        """Unit jobs in index order: per layer group, corrections of mapped tokens if asked for, then the own ones."""
        own = TokenRange(self.snapshot, self.mapped, len(self.snapshot))
        for layer in groups:
            for run in self.runs if corrections else ():
                stop = run.session_start + run.length
                for job in split(TokenRange(self.snapshot, run.session_start, stop), layer, block):
                    yield dataclasses.replace(job, reference=self._mapped_values)
            yield from split(own, layer, block)

    def keep_near(self, pool: ThreadPoolExecutor, progress: Callable[[int], None]) -> None:
        """Drop the mapping from the first row on whose values are not this session's own but for kernel noise."""
        layers = self.snapshot.identity.layers
        for index, run in enumerate(self.runs):
            if not all(pool.map(lambda near: near(), self._comparisons(run))):
                self.runs = self.runs[:index]
                return
            progress(run.length * sum(layer.bytes_per_token for layer in layers))

    def _comparisons(self, run: Run) -> list[Callable[[], bool]]:
        """What a row's values must pass: one comparison a layer, or one a unit, which is decoded once."""
        start, stop = run.session_start, run.session_start + run.length
        layers = range(len(self.snapshot.identity.layers))
        if run.library is self._opened:
            owner = self._owners[run.node]
            return [functools.partial(self._near_owner, owner, layer, start, stop) for layer in layers]
        records = run_records(self.runs, self._libraries)
        units = {
            int(record["offset"]): functools.partial(self._near_unit, segment, record, first, last)
            for layer in layers
            for segment, record, first, last in mapped_units(records, self._libraries, layer, start, stop)
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
            mine = self.snapshot.layer(layer, first, last)
            if not token_error(mine, (keys[:, part], values[:, part])) <= KERNEL_NOISE + ERROR_SPREAD * error:
                return False
        return True

    def _mapped_values(self, layer: int, start: int, stop: int) -> KeyValue:
        records, parts = run_records(self.runs, self._libraries), []
        for segment, record, first, last in mapped_units(records, self._libraries, layer, start, stop):
            at = segment.position_of(record)
            keys, values = segment.decode_span(record)[layer - int(record["layer"])]
            parts.append((keys[:, first - at : last - at], values[:, first - at : last - at]))
        return np.concatenate([p[0] for p in parts], axis=1), np.concatenate([p[1] for p in parts], axis=1)

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
