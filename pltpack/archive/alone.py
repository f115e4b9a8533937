"""A session through a codec and back, in memory and by itself, as if it were stored without sharing."""

from __future__ import annotations

import numpy as np

from pltpack.archive.encoding import split
from pltpack.archive.sampling import TokenRange
from pltpack.archive.segments import fresh
from pltpack.archive.shard import Shard
from pltpack.codec.base import Codec, KeyValue, Unit
from pltpack.errors import PromiseError
from pltpack.snapshot import Snapshot


def codec_of(shard: Shard) -> Codec:
    """The started codec that a session's own units are in."""
    library, state = shard.states[0]
    return shard.libraries[library].codec(state)


def through(codec: Codec, snapshot: Snapshot, block: int) -> Snapshot:
    """What a started codec makes of a session.

    Parameters
    ----------
    codec : Codec
    snapshot : Snapshot
        Its end is where it may be cut and continued.
    block : int
        Tokens per block.

    Returns
    -------
    Snapshot
        In memory.

    Raises
    ------
    PromiseError
        If the codec cannot keep its promise.
    """
    layers = snapshot.identity.layers
    try:
        codec = codec.prepare(snapshot, (len(snapshot),))
    except ValueError as error:
        raise PromiseError(f"session {snapshot.session!r}: {error}", snapshot.origin) from None
    out = [fresh(layer, len(snapshot)) for layer in layers]
    for group in codec.layer_groups(len(layers)):
        for job in split(TokenRange(snapshot, 0, len(snapshot), 0), group, block):
            spanned = tuple(layers[group.start : group.stop]) if codec.spans else ()
            unit = Unit(group.start, layers[group.start], job.start, job.stop - job.start, job.boundary, spanned)
            arrays = [snapshot.layer(index, job.start, job.stop) for index in group]
            _round_trip(codec, unit, arrays, [_part(out[index], job.start, job.stop) for index in group])
    return Snapshot.from_arrays(snapshot.session, snapshot.tokens, out, snapshot.identity, origin=snapshot.origin)


def _round_trip(codec: Codec, unit: Unit, arrays: list[KeyValue], out: list[KeyValue]) -> None:
    if codec.spans:
        codec.decode_span(memoryview(codec.encode_span(unit, arrays)), unit, out)
        return
    keys, values = arrays[0]
    codec.decode(memoryview(codec.encode(unit, keys, values)), unit, *out[0])


def _part(pair: KeyValue, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    return pair[0][:, start:stop], pair[1][:, start:stop]
