"""Where what an archive holds came from: exact prefixes, predictions, the codec; per session and in bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pltpack.archive.shard import TokenCount
from pltpack.format.tables import FLAG_REFERENCE

if TYPE_CHECKING:
    from pltpack.archive.library import Library
    from pltpack.archive.reader import Archive
    from pltpack.archive.shard import Shard


def provenance(archive: Archive) -> dict[str, Any]:
    """What the bytes of an archive are, what sharing saved, which codecs did the work, and every session's spans.

    Returns
    -------
    dict
        ``bytes``: of units in the library (``library``), of sessions' own ones (``own``), of own ones coded relative to
        what the library predicts (``predicted``) and of corrections to exact prefixes (``corrections``), of embedded
        profiles (``profile``), and all others (``other``: token ids, tables, headers, the manifest); they add up to the
        archive. ``saved``: about what ``exact`` prefixes and ``near`` predictions would take besides, if it cost what
        the library's copy costs. ``codecs``: per codec and configuration its ``sessions``, ``units`` and ``bytes``.
        ``spans``: per session rows of ``start``, ``length``, ``kind`` (``exact`` or ``near``), ``library``, ``node``
        and ``shift``, in order; what no span covers is the session's own.
    """
    shards = [archive.shard(name) for name in archive.sessions]
    stats = archive.stats()
    found = {"library": sum(int(library.units["length"].sum()) for library in archive.libraries)}
    parts = np.sum([_own_bytes(shard) for shard in shards], axis=0) if shards else np.zeros(3)
    found |= dict(zip(("own", "predicted", "corrections"), np.asarray(parts).astype(int).tolist(), strict=True))
    found["profile"] = stats["profile_bytes"]
    found["other"] = stats["archive_bytes"] - sum(found.values())
    exact, near = (sum(saved) for saved in zip(*map(_saved, shards), strict=True)) if shards else (0.0, 0.0)
    return {
        "bytes": found, "saved": {"exact": max(0, round(exact) - found["library"]), "near": max(0, round(near))},
        "codecs": _codecs(archive.libraries, shards),
        "spans": {shard.entry.session: _spans(shard) for shard in shards},
    }  # fmt: skip


def _own_bytes(shard: Shard) -> tuple[float, float, float]:
    """Bytes of a session's units: its own, predicted, corrections to exact runs."""
    units = shard.units
    sizes = units["length"].astype(np.int64)
    starts = units["token_start"].astype(np.int64)
    flagged = (units["flags"] & FLAG_REFERENCE) != 0
    exact = TokenCount.of(shard.exact_runs).within(starts, starts + units["token_count"]) > 0
    corrections, predicted = flagged & exact, flagged & ~exact
    total = [int(sizes[chosen].sum()) for chosen in (~flagged, predicted, corrections)]
    return total[0], total[1], total[2]


def _saved(shard: Shard) -> tuple[float, float]:
    """Bytes that exact runs and predicted ones take in the library, less what the session stores over them."""
    starts = shard.units["token_start"].astype(np.int64)
    found = []
    for rows in (shard.exact_runs, shard.predicted_runs):
        held = 0.0
        for run in rows:
            library = shard.libraries[run["library"]]
            part = float(run["length"]) / float(library.nodes[run["node"]]["length"])
            held += part * float(library.units_of(int(run["node"]))["length"].sum())
        covered = TokenCount.of(rows).within(starts, starts + shard.units["token_count"])
        found.append(held - float((shard.units["length"] * (covered / shard.units["token_count"])).sum()))
    return found[0], found[1]


def _codecs(libraries: list[Library], shards: list[Shard]) -> list[dict[str, Any]]:
    found: dict[tuple[str, str], dict[str, Any]] = {}

    def add(library: Library, index: int, units: np.ndarray, session: str | None) -> None:
        codec, config = library.state_entry(index)
        row = found.setdefault((codec, repr(sorted(config.items()))), {
            "codec": codec, "config": config, "sessions": set(), "units": 0, "bytes": 0,
        })  # fmt: skip
        row["units"] += len(units)
        row["bytes"] += int(units["length"].sum())
        if session is not None:
            row["sessions"].add(session)

    for library in libraries:
        for index in range(len(library.states)):
            add(library, index, library.units[library.units["state"] == index], None)
    for shard in shards:
        for number, (place, index) in enumerate(shard.states):
            add(shard.libraries[place], index, shard.units[shard.units["state"] == number], shard.entry.session)
    return [{**row, "sessions": len(row["sessions"])} for row in found.values()]


def _spans(shard: Shard) -> list[dict[str, Any]]:
    return [
        {"start": int(run["session_start"]), "length": int(run["length"]), "kind": "near" if predicted else "exact",
         "library": shard.libraries[run["library"]].entry.file, "node": int(run["node"]),
         "shift": int(run["position_shift"])}
        for run, predicted in zip(shard.runs, shard.predicted_rows.tolist(), strict=True)
    ]  # fmt: skip
