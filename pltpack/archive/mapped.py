"""The values that mapping rows give for a session's tokens, with keys moved to the session's own positions.

Encoder and decoder take references from here, so that both see the same bits (spec/format.md, "Mapping table").
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from pltpack.archive.batch import Batch
from pltpack.archive.decoded import DecodedUnits
from pltpack.archive.library import Library
from pltpack.archive.segments import fresh
from pltpack.codec.base import KeyValue
from pltpack.codec.rope import Rotation
from pltpack.errors import FormatError
from pltpack.snapshot import Identity, Snapshot


def movable(identity: Identity) -> bool:
    """Whether keys can be moved to other positions: they carry no rotation, or one that is known in every layer."""
    if identity.keys == "unrotated":
        return True
    return all(Rotation.of(identity.rope, identity.keys, layer.k_dim) is not None for layer in identity.layers)


def overlapping(runs: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Which mapping rows give some of the session's tokens ``[start, stop)``."""
    starts = runs["session_start"].astype(np.int64)
    return (starts < stop) & (starts + runs["length"] > start)


def mapped_units(
    runs: np.ndarray, libraries: Sequence[Library], layers: range, start: int, stop: int
) -> Iterator[tuple[Library, np.void, int, int]]:
    """Library units that a token range of layers maps to, with the session tokens ``[first, last)`` each gives.

    Parameters
    ----------
    runs : ndarray
        `pltpack.format.tables.RUN` records; their library field indexes `libraries`.
    """
    for run in runs[overlapping(runs, start, stop)]:
        for library, record, _, first, last in units_of_run(run, libraries, layers, start, stop):
            yield library, record, first, last


def units_of_run(
    run: np.void, libraries: Sequence[Library], layers: range, start: int, stop: int
) -> Iterator[tuple[Library, np.void, int, int, int]]:
    """Library units behind a row, with the session token each begins at and those, ``[first, last)``, that it gives."""
    run_start, shift = int(run["session_start"]), int(run["position_shift"])
    low, high = max(run_start, start), min(run_start + int(run["length"]), stop)
    library = libraries[run["library"]]
    units = library.units_of(int(run["node"]))
    starts = units["token_start"].astype(np.int64) + (int(library.nodes[run["node"]]["position"]) + shift)
    held = (units["layer"] < layers.stop) & (units["layer"].astype(np.int64) + units["layer_count"] > layers.start)
    for record in units[held & (starts < high) & (starts + units["token_count"] > low)]:
        at = library.position_of(record) + shift
        yield library, record, at, max(at, low), min(at + int(record["token_count"]), high)


def reference_values(
    runs: np.ndarray,
    libraries: Sequence[Library],
    layers: range,
    start: int,
    stop: int,
    owner: Callable[[Library, int], Snapshot | None] | None = None,
) -> list[KeyValue]:
    """The values that the mapping gives for a token range of several layers, as a codec's reference.

    Keys of rows with a position shift are turned to the session's positions, in binary32, and rounded to the dtype.

    Parameters
    ----------
    runs : ndarray
        `pltpack.format.tables.RUN` records in order; their library field indexes `libraries`.
    libraries : sequence of Library
    layers : range
    start, stop : int
        Session tokens, at least one.
    owner : callable, optional
        Gives the session whose values a node holds bit by bit, where it is at hand: they need no decoding then.

    Returns
    -------
    list of (ndarray, ndarray)
        Per layer keys ``[H, stop - start, D_k]`` and values ``[H, stop - start, D_v]``.

    Raises
    ------
    FormatError
        If a unit is damaged, or the rows do not cover the range.
    """
    making = Making(libraries, owner)
    out = making.add(runs, layers, start, stop)
    making.run()
    return out


class Making:
    """Makes several references at once: the units behind them are decoded together.

    Parameters
    ----------
    libraries, owner
        As of `reference_values`.
    """

    def __init__(
        self, libraries: Sequence[Library], owner: Callable[[Library, int], Snapshot | None] | None = None
    ) -> None:
        self._libraries, self._owner = libraries, owner
        self._wanted: dict[int, tuple[Library, list[np.void], list[_Filling]]] = {}

    def add(self, runs: np.ndarray, layers: range, start: int, stop: int) -> list[KeyValue]:
        """Note a reference, see `reference_values`; its arrays hold it after the next `run`."""
        rows = runs[overlapping(runs, start, stop)]
        at = start
        for row in rows:
            if row["session_start"] > at:
                break
            at = int(row["session_start"]) + int(row["length"])
        if at < stop:
            raise FormatError(f"the mapping table gives no reference for token {at}")
        identity = self._libraries[rows[0]["library"]].identity
        sources = [self._source(row) for row in rows]
        if len(rows) == 1 and sources[0] is not None:
            return _taken(sources[0], int(rows[0]["position_shift"]), layers, start, stop)
        out = [fresh(identity.layers[layer], stop - start) for layer in layers]
        for row, source in zip(rows, sources, strict=True):
            if source is None:
                self._fill(row, layers, start, stop, out)
                continue
            _copy(source, row, layers, start, stop, out)
            first = max(int(row["session_start"]), start)
            last = min(int(row["session_start"]) + int(row["length"]), stop)
            for keys, _ in out if row["position_shift"] else ():
                part = keys[:, first - start : last - start]
                move_keys(part, identity, first - int(row["position_shift"]), first)
        return out

    def _source(self, row: np.void) -> Snapshot | None:
        return None if self._owner is None else self._owner(self._libraries[row["library"]], int(row["node"]))

    def _fill(self, row: np.void, layers: range, start: int, stop: int, out: Sequence[KeyValue]) -> None:
        shift = int(row["position_shift"])
        for library, record, begin, first, last in units_of_run(row, self._libraries, layers, start, stop):
            rooms = [(k[:, first - start : last - start], v[:, first - start : last - start]) for k, v in out]
            _, records, fillings = self._wanted.setdefault(id(library), (library, [], []))
            records.append(record)
            fillings.append(_Filling(layers, slice(first - begin, last - begin), rooms, first, shift))

    def run(self) -> None:
        """Fill all arrays that `add` gave since the last one.

        Raises
        ------
        FormatError
            If a unit is damaged.
        """
        wanted, self._wanted = self._wanted, {}
        for library, records, fillings in wanted.values():
            identity = library.identity
            # Layers are nearly always of one width: what is known of its embedding is looked up once.
            turns = functools.cache(functools.partial(Rotation.of, identity.rope, identity.keys))
            if isinstance(library.decoded, DecodedUnits):
                for found, record, filling in zip(library.decoded.get_many(library, records), records, fillings,
                                                  strict=True):  # fmt: skip
                    filling.put(found, int(record["layer"]), turns)
                continue
            batch, straight = Batch(), []
            for record, filling in zip(records, fillings, strict=True):
                if _fill(batch, library, record, filling, turns):
                    straight.append((filling, record))
            batch.run()
            for filling, record in straight:
                filling.turn(int(record["layer"]), int(record["layer_count"]), turns)


#: Gives the embedding of keys of a width.
Turns = Callable[[int], Rotation | None]


class _Filling(NamedTuple):
    """Where tokens `part` of a unit go, in the rooms of layers; keys are moved `shift` on, to `target`."""

    layers: range
    part: slice
    rooms: Sequence[KeyValue]
    target: int
    shift: int

    def put(self, found: Sequence[KeyValue], layer: int, turns: Turns) -> None:
        """Copy them from a decoded unit, `layer` being its first."""
        for index, (keys, values) in enumerate(found, layer - self.layers.start):
            if 0 <= index < len(self.rooms):
                room = self.rooms[index]
                room[1][:] = values[:, self.part]
                if self.shift:
                    _move(keys[:, self.part], turns(keys.shape[2]), self.target - self.shift, self.target, room[0])
                else:
                    room[0][:] = keys[:, self.part]

    def turn(self, layer: int, count: int, turns: Turns) -> None:
        """Move the keys of a unit of `count` layers that are in their places."""
        for index in range(max(layer, self.layers.start), min(layer + count, self.layers.stop)) if self.shift else ():
            keys = self.rooms[index - self.layers.start][0]
            _move(keys, turns(keys.shape[2]), self.target - self.shift, self.target)


def _taken(source: Snapshot, shift: int, layers: range, start: int, stop: int) -> list[KeyValue]:
    """As `_copy` for one row that gives all tokens, turned to their positions; values may be the session's own."""
    out = []
    for layer in layers:
        keys, values = source.layer(layer, start - shift, stop - shift)
        if shift:
            turned = np.empty(keys.shape, keys.dtype)
            move_keys(keys, source.identity, start - shift, start, turned)
            keys = turned
        out.append((keys, values))
    return out


def _copy(source: Snapshot, row: np.void, layers: range, start: int, stop: int, out: Sequence[KeyValue]) -> None:
    """Take what a row gives of tokens ``[start, stop)`` from the session that its node's values came from."""
    begin, shift = int(row["session_start"]), int(row["position_shift"])
    first, last = max(begin, start), min(begin + int(row["length"]), stop)
    for layer, pair in zip(layers, out, strict=True):
        for room, array in zip(pair, source.layer(layer, first - shift, last - shift), strict=True):
            room[:, first - start : last - start] = array


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class References:
    """Gives what a session's mapping says of layers' tokens; the arguments are those of `reference_values`."""

    runs: np.ndarray
    libraries: Sequence[Library]
    owner: Callable[[Library, int], Snapshot | None] | None = None

    def __call__(self, layers: range, start: int, stop: int) -> list[KeyValue]:
        """See `reference_values`."""
        return reference_values(self.runs, self.libraries, layers, start, stop, self.owner)


def _fill(batch: Batch, library: Library, record: np.void, filling: _Filling, turns: Turns) -> bool:
    """Have tokens of a unit decoded, of the layers that are asked for; whether to their places, keys not moved."""
    rooms, unit = filling.rooms, library.unit(record)
    whole = filling.part == slice(0, unit.tokens)
    first = unit.layer - filling.layers.start
    if library.decoded is not None:
        found = library.decoded.get(library, record)
    elif not unit.layers:
        if whole:
            batch.add(library, record, rooms[first])
            return True
        found = [library.decode(record)]
    else:
        inside = [rooms[i] if whole and 0 <= i < len(rooms) else None for i in range(first, first + len(unit.layers))]
        targets = [room or fresh(layer, unit.tokens) for room, layer in zip(inside, unit.layers, strict=True)]
        found = library.decode_span(record, targets)
        if whole:
            return True
    filling.put(found, unit.layer, turns)
    return False


def move_keys(keys: np.ndarray, identity: Identity, position: int, target: int, out: np.ndarray | None = None) -> None:
    """Move keys ``[H, T, D]`` of the stored dtype from their positions to others, in place unless there is an `out`.

    Parameters
    ----------
    keys : ndarray
        Keys at positions ``position, position + 1, …``; may be strided along the token axis.
    identity : Identity
        One that is `movable`.
    position, target : int
        Positions of the first token before and after.
    out : ndarray, optional
        Where the moved keys go, of the same shape and dtype.
    """
    _move(keys, Rotation.of(identity.rope, identity.keys, keys.shape[2]), position, target, out)


def _move(
    keys: np.ndarray, rotation: Rotation | None, position: int, target: int, out: np.ndarray | None = None
) -> None:
    if rotation is not None:
        from pltpack.codec.moving import move

        move(keys, rotation, position, target, out)
    elif out is not None:
        out[:] = keys
