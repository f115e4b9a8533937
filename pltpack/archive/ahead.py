"""Tell distant files at once all that a request is going to read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pltpack.archive.mapped import overlapping, units_of_run
from pltpack.archive.segments import Segment
from pltpack.archive.shard import Shard


def announce(shard: Shard, layers: Sequence[int], start: int, stop: int) -> None:
    """Have the units read ahead that hold layers of a session's tokens ``[start, stop)``, if reading takes long.

    Parameters
    ----------
    shard : Shard
    layers : sequence of int
        Ascending.
    start, stop : int
    """
    if not layers or not shard.container.source.distant:
        return
    held = range(layers[0], layers[-1] + 1)
    own = shard.units
    starts = own["token_start"].astype(np.int64)
    ends = starts + own["token_count"]
    wanted = (own["layer"] < held.stop) & (own["layer"].astype(np.int64) + own["layer_count"] > held.start)
    wanted &= (starts < stop) & (ends > start)
    _tell(shard, own[wanted])
    if wanted.any():
        # References are made for whole units.
        start, stop = min(start, int(starts[wanted].min())), max(stop, int(ends[wanted].max()))
    for run in shard.runs[overlapping(shard.runs, start, stop)]:
        found = [record for _, record, *_ in units_of_run(run, shard.libraries, held, start, stop)]
        _tell(shard.libraries[run["library"]], found)


def _tell(segment: Segment, records: Sequence[np.void] | np.ndarray) -> None:
    places = [(int(record["offset"]), int(record["offset"]) + int(record["length"])) for record in records]
    if places:
        segment.container.will_need(places)
