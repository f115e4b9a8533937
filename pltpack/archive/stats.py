"""What an archive holds and what it saves, as JSON-ready mappings."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pltpack.archive.figures import figures, quality_of, tail_bits, tail_bytes
from pltpack.archive.guard_record import record_of
from pltpack.archive.shard import TokenCount
from pltpack.codec import registry
from pltpack.format.tables import FLAG_REFERENCE, NO_NODE

if TYPE_CHECKING:
    from pltpack.archive.library import Library
    from pltpack.archive.reader import Archive
    from pltpack.archive.shard import Shard


def archive_stats(archive: Archive) -> dict[str, Any]:
    """Sizes, ratio, bits per element and dedup hit rate of the present generation.

    Returns
    -------
    dict
        ``quality``, ``sessions``, ``tokens``, ``raw_bytes`` (keys and values as dumped), ``elements``,
        ``archive_bytes`` (manifest, library and shards), ``library_bytes``, ``shard_bytes``,
        ``profile_bytes`` (profiles in the library, as stored), the four figures (`pltpack.archive.figures.Figures`),
        ``bits_per_element`` (everything counted), ``shared_tokens`` (mapped, to what others use, too),
        ``predicted_tokens`` (mapped, but held again by units of the session's own, which the mapping makes small),
        ``saved_bytes`` (about what mapped tokens would take besides, if they cost what the library's copy costs).
    """
    manifest = archive.manifest
    tokens = sum(entry.tokens for entry in manifest.sessions)
    layers = archive.identity.layers
    raw = tokens * sum(layer.bytes_per_token for layer in layers)
    per_token = sum(layer.elements_per_token for layer in layers)
    elements = tokens * per_token
    library = sum(entry.bytes for entry in manifest.libraries)
    sessions = sum(entry.bytes for entry in manifest.sessions)
    size = library + sessions + archive.manifest_bytes
    profiles = sum(
        library.container.array(f"codec.state.{index}", "U8").nbytes
        for library in archive.libraries
        for index in range(len(library.states))
        if library.profile_digest(index) is not None
    )
    shards = [archive.shard(name) for name in archive.sessions]
    predicted = sum(predicted_tokens(shard) for shard in shards)
    shared = sum(shard.mapped_tokens for shard in shards) - predicted - _alone(shards)
    held = sum(int(library.units["length"].sum()) for library in archive.libraries)
    return {
        "quality": manifest.quality, "sessions": len(manifest.sessions), "tokens": tokens, "raw_bytes": raw,
        "elements": elements, "archive_bytes": size, "library_bytes": library, "shard_bytes": sessions,
        "profile_bytes": profiles,
        **figures(raw, size, tokens, shared, per_token, shards).to_json(),
        "bits_per_element": 8 * size / elements if elements else 0.0, "shared_tokens": shared,
        "predicted_tokens": predicted, "saved_bytes": sum(map(_saved_bytes, shards)) - held,
    }  # fmt: skip


def _alone(shards: Sequence[Shard]) -> int:
    """Tokens of library nodes that one row only uses: units are whole, what was moved with shared tokens is not."""
    used: dict[tuple[int, int], np.ndarray] = {}
    for shard in shards:
        for row in shard.runs:
            library, node = shard.libraries[row["library"]], int(row["node"])
            key = id(library), node
            if key not in used:
                used[key] = np.zeros(int(library.nodes[node]["length"]), np.uint32)
            used[key][int(row["node_start"]) : int(row["node_start"]) + int(row["length"])] += 1
    return sum(int((counts == 1).sum()) for counts in used.values())


def predicted_tokens(shard: Shard) -> int:
    """Mapped tokens that own units hold again in every layer, in a lossy codec or since the mapping only predicts."""
    rows, own = shard.runs, shard.units
    starts = rows["session_start"].astype(np.int64)
    stops = starts + rows["length"]
    found = shard.predicted_rows
    if not found.all() and len(own) and not all(_exact(shard, index) for index in np.unique(own["state"])):
        again = np.ones(len(rows), bool)
        for first, last in set(shard.layer_bounds):
            units = TokenCount(own["token_start"][first:last], own["token_count"][first:last])
            again &= units.within(starts, stops) == rows["length"]
        found = found | again
    return int(rows["length"][found].sum(dtype=np.int64))


def _exact(shard: Shard, state: int) -> bool:
    library, index = shard.states[state]
    return registry.codec(*shard.libraries[library].state_entry(index)).exact


def _saved_bytes(shard: Shard) -> int:
    """Bytes that a session does not store again, as the library stores them, less what it stores over them."""
    saved = 0.0
    for run in shard.runs:
        library = shard.libraries[run["library"]]
        part = float(run["length"]) / float(library.nodes[run["node"]]["length"])
        saved += part * float(library.units_of(int(run["node"]))["length"].sum())
    starts = shard.units["token_start"].astype(np.int64)
    mapped = TokenCount.of(shard.runs).within(starts, starts + shard.units["token_count"])
    return round(saved - float((shard.units["length"] * (mapped / shard.units["token_count"])).sum()))


def describe(archive: Archive) -> dict[str, Any]:
    """Everything `inspect` shows: generation, identity, library segments with their nodes, sessions with mappings."""
    manifest = archive.manifest
    users: defaultdict[str, Counter[int]] = defaultdict(Counter)
    for shard in map(archive.shard, archive.sessions):
        for library, node in {(int(run["library"]), int(run["node"])) for run in shard.runs}:
            users[shard.libraries[library].entry.file][node] += 1
    return {
        "path": str(archive.path), "generation": manifest.generation, "block": manifest.block,
        "dedup": manifest.dedup, "identity": manifest.identity.to_json(),
        "identity_sha256": manifest.identity.digest(), "stats": archive_stats(archive),
        "libraries": [_library(library, users[library.entry.file]) for library in archive.libraries],
        "sessions": [_session(archive.shard(name)) for name in archive.sessions],
    }  # fmt: skip


def _library(library: Library, users: Mapping[int, int]) -> dict[str, Any]:
    nodes = []
    for index, node in enumerate(library.nodes):
        nodes.append({
            "node": index, "parent": None if node["parent"] == NO_NODE else int(node["parent"]),
            "parent_library": int(node["parent_library"]), "position": int(node["position"]),
            "tokens": int(node["length"]), "visits": int(node["visits"]), "sessions": users[index],
            "units": int(node["unit_count"]), "bytes": int(library.units_of(index)["length"].sum()),
        })  # fmt: skip
    return {
        "file": library.entry.file, "bytes": library.entry.bytes, "sha256": library.entry.head_sha256,
        "codecs": [_state(library, index) for index in range(len(library.states))], "nodes": nodes,
    }  # fmt: skip


def _state(library: Library, index: int) -> dict[str, Any]:
    codec, config = library.state_entry(index)
    digest = library.profile_digest(index)
    found = {"codec": codec, "config": config}
    return found if digest is None else {**found, "profile": digest, "embedded": library.embeds(index)}


def _session(shard: Shard) -> dict[str, Any]:
    rows = [
        {"session_start": int(r["session_start"]), "length": int(r["length"]),
         "library": shard.libraries[r["library"]].entry.file, "node": int(r["node"]),
         "node_start": int(r["node_start"]), "position_shift": int(r["position_shift"])}
        for r in shard.runs
    ]  # fmt: skip
    states = [shard.libraries[library].state_entry(state) for library, state in shard.states]
    codec, config = states[0] if states else (None, None)
    corrections = shard.units[(shard.units["flags"] & FLAG_REFERENCE) != 0]
    predicted = predicted_tokens(shard)
    raw = shard.entry.tokens * sum(layer.bytes_per_token for layer in shard.identity.layers)
    shared, quality, record = shard.mapped_tokens - predicted, quality_of(shard), record_of(shard)
    per_token = sum(layer.elements_per_token for layer in shard.identity.layers)
    return {
        "session": shard.entry.session, "salt": shard.entry.salt, "tokens": shard.entry.tokens, "shared_tokens": shared,
        "predicted_tokens": predicted, "saved_bytes": _saved_bytes(shard),
        "file": shard.entry.file, "bytes": shard.entry.bytes, "raw_bytes": raw, "codec": codec, "config": config,
        "units": len(shard.units), "correction_bytes": int(corrections["length"].sum()),
        "tail_bits_per_element": tail_bits(tail_bytes(shard), shard.entry.tokens - shared, per_token),
        "kl": None if quality is None else quality.kl,
        "ppl_change_pct": None if quality is None else quality.ppl_change_pct,
        "guard": None if record is None else record.to_json(), "mapping": rows,
    }  # fmt: skip
