"""What an archive holds and what it saves, as JSON-ready mappings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pltpack.format.manifest import NAME
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
        ``profile_bytes`` (profiles in the library, as stored), ``ratio``,
        ``bits_per_element`` (everything counted), ``shared_tokens``, ``dedup_hit_rate`` (shared over all tokens).
    """
    manifest = archive.manifest
    tokens = sum(entry.tokens for entry in manifest.sessions)
    layers = archive.identity.layers
    raw = tokens * sum(layer.bytes_per_token for layer in layers)
    elements = tokens * sum(layer.elements_per_token for layer in layers)
    library = sum(entry.bytes for entry in manifest.libraries)
    shards = sum(entry.bytes for entry in manifest.sessions)
    size = library + shards + (archive.path / NAME).stat().st_size
    profiles = sum(
        library.container.array(f"codec.state.{index}", "U8").nbytes
        for library in archive.libraries
        for index in range(len(library.states))
        if library.profile_digest(index) is not None
    )
    shared = sum(archive.shard(name).mapped_tokens for name in archive.sessions)
    return {
        "quality": manifest.quality, "sessions": len(manifest.sessions), "tokens": tokens, "raw_bytes": raw,
        "elements": elements, "archive_bytes": size, "library_bytes": library, "shard_bytes": shards,
        "profile_bytes": profiles,
        "ratio": raw / size, "bits_per_element": 8 * size / elements if elements else 0.0,
        "shared_tokens": shared, "dedup_hit_rate": shared / tokens if tokens else 0.0,
    }  # fmt: skip


def describe(archive: Archive) -> dict[str, Any]:
    """Everything `inspect` shows: generation, identity, library segments with their nodes, sessions with mappings."""
    manifest = archive.manifest
    return {
        "path": str(archive.path), "generation": manifest.generation, "block": manifest.block,
        "dedup": manifest.dedup, "identity": manifest.identity.to_json(),
        "identity_sha256": manifest.identity.digest(), "stats": archive_stats(archive),
        "libraries": [_library(library) for library in archive.libraries],
        "sessions": [_session(archive.shard(name)) for name in archive.sessions],
    }  # fmt: skip


def _library(library: Library) -> dict[str, Any]:
    nodes = []
    for index, node in enumerate(library.nodes):
        nodes.append({
            "node": index, "parent": None if node["parent"] == NO_NODE else int(node["parent"]),
            "parent_library": int(node["parent_library"]), "position": int(node["position"]),
            "tokens": int(node["length"]), "visits": int(node["visits"]), "units": int(node["unit_count"]),
            "bytes": int(library.units_of(index)["length"].sum()),
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
    raw = len(shard.tokens) * sum(layer.bytes_per_token for layer in shard.identity.layers)
    return {
        "session": shard.entry.session, "tokens": len(shard.tokens), "shared_tokens": shard.mapped_tokens,
        "file": shard.entry.file, "bytes": shard.entry.bytes, "raw_bytes": raw, "codec": codec, "config": config,
        "units": len(shard.units), "correction_bytes": int(corrections["length"].sum()), "mapping": rows,
    }  # fmt: skip
