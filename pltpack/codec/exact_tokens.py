"""Tokens that a lossy codec keeps bit for bit, cheaply: as small differences from what the model always has there.

The first tokens of a session are attention sinks: their keys and values hardly depend on the text. A profile holds
templates of them; a difference of bfloat16 numbers is the difference of their places in the order of all of them.
"""

from __future__ import annotations

import struct

import numpy as np

from pltpack.codec import coefficients
from pltpack.codec.coefficients import ESCAPE, LARGEST, Tables
from pltpack.codec.payload import Reader, expand, squeeze

NO_TEMPLATE = 255
#: Mean bits of a difference up to which a token counts as near its template, and from which it is stored plain.
_NEAR, _FAR = 0.5, 8.5
#: Class of a run that equals its template.
EQUAL = 255


def ordinals(bits: np.ndarray) -> np.ndarray:
    """Place of each 16-bit floating-point number in the order of all of them: int32; undone by `from_ordinals`."""
    wide = bits.astype(np.int32)
    return np.where(wide & 0x8000, 0xFFFF - wide, wide | 0x8000).astype(np.int32)


def from_ordinals(places: np.ndarray) -> np.ndarray:
    """Inverse of `ordinals`: uint16."""
    wide = places.astype(np.int32) & 0xFFFF
    return np.where(wide & 0x8000, wide & 0x7FFF, 0xFFFF - wide).astype(np.uint16)


def encode(
    rows: np.ndarray, positions: np.ndarray, runs: list[int], templates: np.ndarray | None, tables: Tables
) -> bytes:
    """Encode tokens exactly.

    Parameters
    ----------
    rows : ndarray
        ``[n, R]``: the tokens' bits, unsigned integers.
    positions : ndarray
        ``[n]``: positions in the session.
    runs : list of int
        Lengths of the runs of rows that have a scale of their own; they sum to R.
    templates : ndarray or None
        uint16 ``[m, p, R]``: bits at positions 0 … p - 1; None unless rows are bfloat16.
    tables : Tables
    """
    chosen, deltas, plain = [], [], []
    for row, position in zip(rows, positions, strict=True):
        best, delta = NO_TEMPLATE, None
        for index in range(0 if templates is None or position >= templates.shape[1] else min(len(templates), 254)):
            assert templates is not None
            found = ordinals(row) - ordinals(templates[index, position])
            if _length(found) < (_FAR * len(row) if delta is None else _length(delta)):
                best, delta = index, found
        chosen.append(best)
        plain.append(row) if delta is None else deltas.append(delta)
    out = [np.array(chosen, np.uint8).tobytes()]
    if deltas:
        stacked, costs = np.stack(deltas), coefficients.cost_tables(tables)
        parts = [np.split(row, np.cumsum(runs)[:-1]) for row in stacked]
        kinds = np.array([[_class(part, tables, costs) for part in row] for row in parts])
        out.append(kinds.astype(np.uint8).tobytes())
        out.append(coefficients.encode_runs(*_ordered(stacked, kinds, runs, tables), tables))
    if plain:
        found = np.stack(plain)
        packed = squeeze(np.ascontiguousarray(found.view(np.uint8).reshape(-1, found.itemsize).T).tobytes())
        out += [struct.pack("<I", len(packed)), packed]
    return b"".join(out)


def decode(
    reader: Reader,
    rows: np.ndarray,
    positions: np.ndarray,
    runs: list[int],
    templates: np.ndarray | None,
    tables: Tables,
) -> None:
    """Inverse of `encode`, into `rows`.

    Raises
    ------
    ValueError
        If the payload is damaged.
    """
    chosen = reader.array(len(rows), "u1")
    derived = np.flatnonzero(chosen != NO_TEMPLATE)
    known = 0 if templates is None else len(templates)
    reach = 0 if templates is None else templates.shape[1]
    if (chosen[derived] >= known).any() or (positions[derived] >= reach).any():
        raise ValueError("a token names a template that does not exist")
    if len(derived):
        assert templates is not None
        kinds = reader.array(len(derived) * len(runs), "u1").reshape(len(derived), len(runs)).astype(np.int64)
        if ((kinds != EQUAL) & (kinds >= len(tables.freqs))).any():
            raise ValueError("an exact token names a class that does not exist")
        places = _places(kinds, runs, tables)
        values = coefficients.decode_runs(reader, _counts(kinds, runs, tables), tables)
        deltas = np.zeros(len(derived) * sum(runs), np.int32)
        deltas[places] = values
        base = ordinals(templates[chosen[derived], positions[derived]])
        rows[derived] = from_ordinals(base + deltas.reshape(base.shape))
    plain = np.flatnonzero(chosen == NO_TEMPLATE)
    if len(plain):
        size = len(plain) * rows.shape[1] * rows.itemsize
        data = np.frombuffer(expand(reader.take(reader.u32()), size), np.uint8).reshape(rows.itemsize, -1)
        rows[plain] = np.ascontiguousarray(data.T).view(rows.dtype).reshape(len(plain), -1)


def is_near(row: np.ndarray, position: int, templates: np.ndarray | None) -> bool:
    """Whether a token is almost one of the templates, so that to keep it exactly costs next to nothing."""
    if templates is None or position >= templates.shape[1]:
        return False
    deltas = [ordinals(row) - ordinals(template[position]) for template in templates]
    return any(_length(delta) < _NEAR * len(row) for delta in deltas)


def _length(delta: np.ndarray) -> float:
    return float(np.log2(1 + np.abs(delta)).sum())


def _class(part: np.ndarray, tables: Tables, costs: np.ndarray) -> int:
    """The class in which a run of differences costs least."""
    if not part.any():
        return EQUAL
    high = part.astype(np.int64)[None] >> tables.raw[:, None]
    symbols = np.where(np.abs(high) <= LARGEST, np.where(high > 0, 2 * high - 1, -2 * high), ESCAPE)
    return int(np.take_along_axis(costs, symbols, axis=1).sum(axis=1).argmin())


def _places(kinds: np.ndarray, runs: list[int], tables: Tables) -> np.ndarray:
    """Where the values of a class-by-class stream go, in the flat ``[n, R]``."""
    of_row = np.repeat(kinds, runs, axis=1).reshape(-1)
    order = np.argsort(of_row, kind="stable")
    found: np.ndarray = order[: int((of_row != EQUAL).sum())]
    return found


def _counts(kinds: np.ndarray, runs: list[int], tables: Tables) -> np.ndarray:
    lengths = np.broadcast_to(np.array(runs), kinds.shape)
    found = np.bincount(kinds.reshape(-1), lengths.reshape(-1), minlength=EQUAL + 1)[: len(tables.freqs)]
    return found.astype(np.int64)


def _ordered(stacked: np.ndarray, kinds: np.ndarray, runs: list[int], tables: Tables) -> tuple[np.ndarray, np.ndarray]:
    return stacked.reshape(-1)[_places(kinds, runs, tables)], _counts(kinds, runs, tables)
