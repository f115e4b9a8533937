"""What codecs learn their states from: an even sample of the token ranges about to be encoded."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import overload

from pltpack.codec.base import LayerSample, Unit
from pltpack.snapshot import Snapshot

#: Tokens per layer that a codec may look at.
SAMPLE_TOKENS = 8192
#: Tokens per sampled run: long enough for codecs that look at neighbours.
RUN_TOKENS = 64


@dataclasses.dataclass(frozen=True, slots=True)
class TokenRange:
    """Tokens ``[start, stop)`` of a snapshot that will be encoded, with the next cut place `boundary` tokens after."""

    snapshot: Snapshot
    start: int
    stop: int
    boundary: int = 0

    def __len__(self) -> int:
        return self.stop - self.start


class JobSamples:
    """`pltpack.codec.base.Samples` over token ranges: all of them if few, else runs at even distances.

    Parameters
    ----------
    ranges : sequence of TokenRange
    budget : int
        Most tokens per layer.
    """

    def __init__(self, ranges: Sequence[TokenRange], budget: int = SAMPLE_TOKENS) -> None:
        runs = [
            TokenRange(r.snapshot, start, min(start + RUN_TOKENS, r.stop), r.stop + r.boundary)
            for r in ranges
            for start in range(r.start, r.stop, RUN_TOKENS)
        ]
        total = sum(len(r) for r in ranges)
        if total > budget:
            keep = max(1, budget // RUN_TOKENS)
            runs = [runs[i * len(runs) // keep] for i in range(min(keep, len(runs)))]
        self._runs = runs

    def layer(self, index: int) -> Sequence[LayerSample]:
        """See `pltpack.codec.base.Samples.layer`; a sample is read when it is looked at."""
        return _Runs(self._runs, index)


class _Runs(Sequence[LayerSample]):
    """Samples of one layer."""

    def __init__(self, runs: Sequence[TokenRange], layer: int) -> None:
        self._runs, self._layer = runs, layer

    def __len__(self) -> int:
        return len(self._runs)

    @overload
    def __getitem__(self, index: int) -> LayerSample: ...

    @overload
    def __getitem__(self, index: slice) -> _Runs: ...

    def __getitem__(self, index: int | slice) -> LayerSample | _Runs:
        if isinstance(index, slice):
            return _Runs(self._runs[index], self._layer)
        run, layer = self._runs[index], self._layer
        keys, values = run.snapshot.layer(layer, run.start, run.stop)
        unit = Unit(layer, run.snapshot.identity.layers[layer], run.start, len(run), run.boundary - run.stop)
        return LayerSample(unit, keys, values)
