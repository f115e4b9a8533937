"""Small profiles of the golden archives, drawn from a seed; and how near decoders of a calibrated codec must be."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pltpack.archive import profiles
from pltpack.archive.library import Library
from pltpack.archive.reader import Archive
from pltpack.archive.segments import Segment
from pltpack.archive.shard import Shard
from pltpack.codec import rans
from pltpack.codec.coefficients import CLASS_WIDTH, ESCAPE, OCTAVE, SYMBOLS, raw_bits
from pltpack.codec.profile import RECENCY, blocks_of, pack_about, rows_of
from pltpack.codec.unit_head import exact_rows, unpack_nibbles
from pltpack.snapshot import Snapshot

#: Classes of a drawn profile's tables, and where the first begins.
CLASSES, FLOOR = 24, -2 * OCTAVE
Arrays = dict[str, np.ndarray]
#: Bits of a dtype's significand, the hidden one counted.
SIGNIFICAND = {"F32": 24, "F16": 11, "BF16": 8, "F8_E4M3": 4, "F8_E5M2": 3}


def drawn_profile(
    session: Snapshot, *, layer_group: int = 2, rank: int = 6, templates: int = 2, seed: int = 0
) -> Arrays:
    """A profile of a session's geometry: orthonormal bases, roots, means and predictors drawn from a seed.

    Parameters
    ----------
    session : Snapshot
        Its first tokens, changed a little, become the templates if its layers are BF16.
    layer_group, rank : int
        Layers and shared components of a group.
    templates, seed : int
    """
    rng = np.random.default_rng([seed, 11])
    layers = session.identity.layers
    rows = [rows_of(layer) for layer in layers]
    groups = [range(a, min(a + layer_group, len(layers))) for a in range(0, len(layers), layer_group)]
    spans = [sum(rows[layer] for layer in group) for group in groups]
    bases = [_orthonormal(rng, span)[: min(rank, span)] for span in spans]
    own = [_orthonormal(rng, count) for count in rows]
    total, features = sum(rows), sum(2 * layer.heads for layer in layers) + RECENCY
    roots = [_root(rng, width) for layer in layers for width in blocks_of(layer)]
    sinks = np.full((templates, 5), -1, np.int32)
    return {
        "about": pack_about(
            {
                "version": 1,
                "layer_group": layer_group,
                "floor": FLOOR,
                "kl": [0, 1],
                "turn_ends": [7],
                "source": "drawn from a seed",
            }
        ),
        "mean": rng.normal(0, 0.5, total).astype(np.float32),
        "whiten": np.concatenate([root.reshape(-1) for root in roots]).astype(np.float16),
        "basis.rank": np.array([len(basis) for basis in bases], np.uint32),
        "basis": np.concatenate([_entries(basis) for basis in bases]).astype(np.int16),
        "basis.scale": np.full(sum(map(len, bases)), 1 / 127, np.float32),
        "basis.log": np.concatenate([np.sort(rng.integers(0, 40, len(basis)))[::-1] for basis in bases]).astype(
            np.int16
        ),
        "local": np.concatenate([_entries(basis) for basis in own]),
        "local.scale": np.full(total, 1 / 127, np.float32),
        "local.log": rng.integers(-90, 30, total).astype(np.int16),
        "tables": tables(),
        "importance.mean": rng.normal(0, 1, features).astype(np.float32),
        "importance.scale": rng.uniform(0.5, 2, features).astype(np.float32),
        "importance.linear": rng.normal(0, 0.3, features).astype(np.float32),
        "importance.hidden": rng.normal(0, 0.3, (2, features)).astype(np.float32),
        "importance.bias": rng.normal(0, 0.3, 2).astype(np.float32),
        "importance.out": rng.normal(0, 0.5, 2).astype(np.float32),
        "importance.center": np.zeros(1, np.float32),
        "sink.tokens": sinks,
        "sink.bits": _templates(rng, session, templates, total),
    }


def _orthonormal(rng: np.random.Generator, size: int) -> np.ndarray:
    return np.linalg.qr(rng.standard_normal((size, size)))[0].T


def _root(rng: np.random.Generator, width: int) -> np.ndarray:
    noise = rng.standard_normal((width, width)) * 0.1 / np.sqrt(width)
    return np.eye(width) * rng.uniform(0.5, 2) + noise + noise.T


def _entries(basis: np.ndarray) -> np.ndarray:
    return np.rint(basis * 127).astype(np.int8).reshape(-1)


def tables() -> np.ndarray:
    """Frequencies of Laplacian values by class; in some classes large symbols are left to the escape."""
    found = np.zeros((CLASSES, 256))
    for kind in range(CLASSES):
        expected = 2.0 ** ((FLOOR + CLASS_WIDTH * (kind + 0.5)) / OCTAVE - int(raw_bits(np.array([kind]), FLOOR)[0]))
        ratio = expected / (1 + expected)
        highs = np.array([(s + 1) // 2 for s in range(ESCAPE)])
        found[kind, :ESCAPE] = ratio**highs
        found[kind, :SYMBOLS] += 0.002
        found[kind, ESCAPE - 10 * (kind % 4) : ESCAPE] = 0
    return rans.normalize(found)[:, :SYMBOLS]


def _templates(rng: np.random.Generator, session: Snapshot, count: int, rows: int) -> np.ndarray:
    layers = range(len(session.identity.layers))
    if {layer.dtype for layer in session.identity.layers} != {"BF16"}:
        return rng.integers(0, 1 << 16, (count, 5, rows)).astype(np.uint16)
    bits = exact_rows([session.layer(layer, 0, 5) for layer in layers])
    noise = [rng.integers(-4 << 3 * index, 5 << 3 * index, bits.shape) for index in range(count)]
    # The first run of the first template is as the session has it.
    for part in noise[:1]:
        part[:, : session.identity.layers[0].heads * session.identity.layers[0].k_dim] = 0
    return np.stack([bits.astype(np.int32) + part for part in noise]).astype(np.uint16)


def save_profile(path: Path, arrays: Arrays, session: Snapshot) -> str:
    """Write a profile of a session's model; returns its digest."""
    return profiles.save(path, arrays, session.identity)


# --- decoded values ---------------------------------------------------------------------------------------------


def header_of(payload: bytes, tokens: int) -> tuple[int, np.ndarray, np.ndarray]:
    """Step, exact tokens and classes that a unit of the codec ``transform`` states."""
    _, log_step, count = struct.unpack_from("<BhH", payload)
    exact = np.frombuffer(payload, "<u2", count, 5).astype(int)
    return log_step, exact, unpack_nibbles(memoryview(payload)[5 + 2 * count :][: (tokens + 1) // 2], tokens)


def units_of(archive: Archive, session: str) -> Iterator[tuple[Segment, np.void, range]]:
    """All units whose values stand for a session's, mapped ones first, each with its tokens in the session."""
    shard: Shard = archive.shard(session)
    for run in shard.exact_runs:
        library: Library = shard.libraries[run["library"]]
        first, last = int(run["session_start"]), int(run["session_start"]) + int(run["length"])
        for record in library.units_of(int(run["node"])):
            at = library.position_of(record)
            mapped = range(max(at, first), min(at + int(record["token_count"]), last))
            if mapped:
                yield library, record, mapped
    for record in shard.units:
        at = int(record["token_start"])
        yield shard, record, range(at, at + int(record["token_count"]))


def exact_mask(archive: Archive, session: str) -> np.ndarray:
    """Which tokens of which layers are exact: bool ``[L, T]``."""
    shard = archive.shard(session)
    out = np.zeros((len(shard.identity.layers), len(shard.tokens)), bool)
    for segment, record, tokens in units_of(archive, session):
        layers = slice(int(record["layer"]), int(record["layer"]) + int(record["layer_count"]))
        codec = segment.codec_of(record)
        out[layers, tokens.start : tokens.stop] = codec.exact
        if codec.codec_id == "transform":
            at = segment.position_of(record)
            exact = at + header_of(segment.checked_payload(record), int(record["token_count"]))[1]
            out[layers, exact[(exact >= tokens.start) & (exact < tokens.stop)]] = True
    return out


def predicts(archive: Archive, session: str) -> bool:
    """Whether values of a session build on values that leave decoders a tolerance."""
    shard = archive.shard(session)
    return any(bool(record["flags"]) and not shard.codec_of(record).exact for record in shard.units)


def far_apart(mine: Snapshot, theirs: Snapshot, exact: np.ndarray, chained: bool = False) -> str | None:
    """What two decoders' values differ by beyond spec/codecs.md, "Tolerance"; None if nothing.

    `chained` values may differ by one more unit in the last place of their token's largest value, as those that they
    are predicted from may.
    """
    if not np.array_equal(mine.tokens, theirs.tokens) or mine.identity.layers != theirs.identity.layers:
        return "tokens or geometry differ"
    beyond, count = 0, 0
    largest = np.zeros(len(mine.tokens))
    for index in range(len(mine.identity.layers)):
        for array in mine.layer(index):
            finite = np.nan_to_num(array.astype(np.float64), nan=0, posinf=0, neginf=0)
            largest = np.maximum(largest, np.abs(finite).max(axis=(0, 2)))
    for index, layer in enumerate(mine.identity.layers):
        for a, b in zip(mine.layer(index), theirs.layer(index), strict=True):
            words = f"u{a.dtype.itemsize}"
            same = np.ascontiguousarray(a).view(words) == np.ascontiguousarray(b).view(words)
            if not same[:, exact[index]].all():
                return f"layer {index}: an exact token differs"
            x, y = a[:, ~exact[index]].astype(np.float64), b[:, ~exact[index]].astype(np.float64)
            passed_on = 2.0 ** (1 - SIGNIFICAND[layer.dtype]) if chained else 0.0
            far = distances(x, y, largest[~exact[index], None], layer.dtype, passed_on)
            if not (far <= 2).all():
                return f"layer {index}: values differ by {far.max()} units in the last place"
            beyond, count = beyond + int((far > 1).sum()), count + far.size
    return f"{beyond} of {count} values differ by more than one unit" if beyond > count / 1000 else None


def distances(x: np.ndarray, y: np.ndarray, largest: np.ndarray, dtype: str, passed_on: float = 0.0) -> Any:
    """Differences of values ``[H, T, D]`` in units in the last place, float64, less what rounding of sums may add.

    Less also the share `passed_on` of the largest values.
    """
    magnitude = np.maximum(np.abs(x), np.abs(y))
    unit = 2.0 ** (np.floor(np.log2(np.maximum(magnitude, 2.0**-100))) + 1 - SIGNIFICAND[dtype])
    return np.maximum(np.abs(x - y) - largest * (2.0**-18 + passed_on), 0) / unit
