"""Reconstruction error of each layer's heads: measured against dumps, or predicted by the profile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pltpack.archive import profiles
from pltpack.codec.expected_error import expected_errors, unit_steps
from pltpack.codec.transform import TransformCodec
from pltpack.errors import FormatError, IdentityError, NotFoundError

if TYPE_CHECKING:
    from pltpack.archive.encoding import Progress
    from pltpack.archive.reader import Archive
    from pltpack.archive.segments import Segment
    from pltpack.snapshot import Snapshot


def measured(archive: Archive, dumps: Sequence[Snapshot], progress: Progress) -> dict[str, Any]:
    """Error of every head over all tokens of the dumps, each compared with the archive's session of its name.

    Parameters
    ----------
    archive : Archive
    dumps : sequence of Snapshot
        Read layer by layer.
    progress : callable
        Told ``("compare", raw bytes done, raw bytes in all)``.

    Returns
    -------
    dict
        ``how`` (``measured``), ``sessions`` (compared), ``keys`` and ``values``: per layer, per head, the RMS error
        over the RMS value of the tokens that are not kept bit for bit in this head, or 0 where all are; None where a
        value that is not finite was not kept.

    Raises
    ------
    NotFoundError
        If a dump's session is not in the archive.
    IdentityError
        If it has other tokens there, or another identity.
    """
    layers = archive.identity.layers
    energy = [np.zeros((2, 2, layer.heads)) for layer in layers]
    done, total = 0, sum(dump.raw_bytes for dump in dumps)
    for dump in dumps:
        rebuilt = _rebuilt(archive, dump)
        for index, layer in enumerate(layers):
            for kind, (a, b) in enumerate(zip(dump.layer(index), rebuilt.layer(index), strict=True)):
                energy[index][kind] += _energies(a, b)
            done += len(dump) * layer.bytes_per_token
            progress("compare", done, total)
    keys, values = ([_ratios(found[kind]) for found in energy] for kind in (0, 1))
    return {"how": "measured", "sessions": len(dumps), "keys": keys, "values": values}


def _rebuilt(archive: Archive, dump: Snapshot) -> Snapshot:
    if dump.session not in archive.sessions:
        raise NotFoundError(f"session {dump.session!r} is not in {archive.path}", dump.origin)
    rebuilt = archive.snapshot(dump.session)
    if not np.array_equal(rebuilt.tokens, dump.tokens):
        raise IdentityError(f"session {dump.session!r} has other tokens in {archive.path}", dump.origin)
    rebuilt.identity.require_same(dump.identity, dump.origin)
    return rebuilt


def _energies(original: np.ndarray, decoded: np.ndarray) -> np.ndarray:
    """Energy of the error and of the value, ``[2, H]``, over the tokens that differ."""
    a, b = original.astype(np.float32), decoded.astype(np.float32)
    finite = np.isfinite(a)
    lost = ~finite & ~((a == b) | (np.isnan(a) & np.isnan(b)))
    a, b = np.where(finite, a, 0), np.where(finite, b, 0)
    with np.errstate(invalid="ignore", over="ignore"):
        difference = (a - b).astype(np.float64)
    differs = (difference != 0).any(axis=-1)
    error = np.where(lost.any(axis=(1, 2)), np.inf, np.square(difference).sum(axis=(1, 2)))
    value = (np.square(a, dtype=np.float64).sum(axis=-1) * differs).sum(axis=1)
    found: np.ndarray = np.stack([error, value])
    return found


def _ratios(energy: np.ndarray) -> list[float | None]:
    return [
        0.0 if error == 0 else float(np.sqrt(error / max(value, 1e-60))) if np.isfinite(error) else None
        for error, value in energy.T.tolist()
    ]


def predicted(archive: Archive) -> dict[str, Any] | None:
    """What the profile expects, from the steps that the archive's units have; None where not all units have one.

    Returns
    -------
    dict or None
        As `measured` gives it, with ``how`` ``predicted``.
    """
    shards = [archive.shard(name) for name in archive.sessions]
    codec, counts, digests = None, Counter[int](), dict[int, str]()
    segments: list[Segment] = [*archive.libraries, *shards]
    for segment in segments:
        for record in segment.units:
            found = segment.codec_of(record)
            if not isinstance(found, TransformCodec):
                return None
            if codec is None or found.profile is not codec.profile:
                # Each tier of a profile starts it anew.
                if id(found.profile) not in digests:
                    digests[id(found.profile)] = profiles.digest(found.profile.arrays)
                codec = codec or found
                if digests[id(found.profile)] != digests[id(codec.profile)]:
                    return None
            # All layer groups of a token have the same step.
            if record["layer"] == 0:
                counts.update(_steps(segment, record))
    errors = None if codec is None else expected_errors(codec, counts)
    return None if errors is None else {"how": "predicted", "sessions": len(shards), **errors}


def _steps(segment: Segment, record: np.void) -> list[int]:
    try:
        found: list[int] = unit_steps(segment.checked_payload(record), int(record["token_count"])).tolist()
    except ValueError as error:
        raise FormatError(str(error), segment.container.path) from None
    return found
