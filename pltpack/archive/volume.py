"""How much sessions will take besides their units: what a target of bytes must leave room for."""

from __future__ import annotations

from collections.abc import Sequence

from pltpack.archive.encoding import UNIT_TOKENS
from pltpack.archive.files import container_metadata, header_reserve
from pltpack.archive.settings import Volume
from pltpack.archive.sharing import Sharing, prefix_end
from pltpack.format import tables
from pltpack.format.container import MINOR_GROUPS
from pltpack.snapshot import Identity, Snapshot

#: Bytes that a file takes in its own metadata and in the manifest, identity left out.
_NAMES_BYTES = 512


def expected(identity: Identity, snapshots: Sequence[Snapshot], sharing: Sharing, groups: int, fresh: bool) -> Volume:
    """What is to be written of sessions, but for the payload, to within a few hundred bytes a file.

    Parameters
    ----------
    identity : Identity
        The archive's.
    snapshots : sequence of Snapshot
    sharing : Sharing
        Of these sessions.
    groups : int
        Layer groups.
    fresh : bool
        Whether the archive is new.
    """
    runs = [node.stop - node.position for node in sharing.nodes]
    besides = len(sharing.nodes) * tables.NODE.itemsize
    for snapshot, mapped in zip(snapshots, sharing.runs, strict=True):
        runs.append(len(snapshot) - prefix_end(mapped))
        besides += len(mapped) * tables.RUN.itemsize + 4 * len(snapshot)
    besides += groups * sum(-(-run // UNIT_TOKENS) for run in runs) * tables.UNIT.itemsize
    # A file's head holds the identity and some names, and the manifest has a line for it.
    about = container_metadata("library", identity, MINOR_GROUPS)
    besides += (len(snapshots) + 1) * (header_reserve(about) + _NAMES_BYTES)
    besides += len(about["identity"]) + _NAMES_BYTES if fresh else 0
    return Volume(sum(runs) * sum(layer.elements_per_token for layer in identity.layers), besides=besides)
