"""Write a library segment: the nodes that new sessions share or predict from, and a codec state."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pltpack.archive.crew import Crew
from pltpack.archive.decoded import DecodedUnits
from pltpack.archive.embeddings import least_minor
from pltpack.archive.encoding import UnitEncoder, UnitJob, UnitWriter, split, write_all
from pltpack.archive.files import container_metadata, header_reserve, next_library, raised
from pltpack.archive.library import Library
from pltpack.archive.places import CodecPlace, codec_state
from pltpack.archive.prepared import Prepared
from pltpack.archive.sampling import TokenRange
from pltpack.archive.segments import dumps_json
from pltpack.archive.sharing import NewNode, Run
from pltpack.archive.sink import Sink
from pltpack.codec.base import Unit
from pltpack.format import tables
from pltpack.format.container import MINOR_GROUPS, ContainerInfo
from pltpack.format.manifest import FileEntry
from pltpack.snapshot import Identity
from pltpack.store.local import LocalStore

if TYPE_CHECKING:
    from pltpack.gpu.backend import Backend


@dataclasses.dataclass
class Output:
    """Where a generation goes, and with what it is encoded.

    Attributes
    ----------
    folder : Path
    identity : Identity
    block : int
        Tokens per block.
    libraries : list of Library
        All segments, the one of this generation included once it is written.
    place : CodecPlace
    prepared : Prepared
    sink : Sink
    crew : Crew
    advance : callable
        Told the raw bytes done.
    backend : Backend or None
        Where the new segment's units are decoded meanwhile.
    """

    folder: Path
    identity: Identity
    block: int
    libraries: list[Library]
    place: CodecPlace
    prepared: Prepared
    sink: Sink
    crew: Crew
    advance: Callable[[int], None]
    backend: Backend | None = None


def write_library(output: Output, nodes: Sequence[NewNode]) -> tuple[Library, ContainerInfo]:
    """Write a segment, which carries its own copy of the state so that it can be decoded, exported and compacted alone.

    Parameters
    ----------
    output : Output
        Its `libraries` get the new segment.
    nodes : sequence of NewNode
        Parents first.

    Returns
    -------
    Library
        Opened; not durable before the sink has finished.
    ContainerInfo
    """
    place, identity = output.place, output.identity
    codec = place.codec
    path = next_library(output.folder, output.libraries)
    salts = sorted({n.owner.identity.salt for n in nodes}, key=lambda s: (s is not None, s))
    others = [lib for lib in output.libraries if any(n.parent and n.parent.library is lib for n in nodes)]
    minor = least_minor(identity, codec, None if place.library is None else place.library.minor)
    metadata = {
        **container_metadata("library", identity, max(minor, MINOR_GROUPS if codec.spans or codec.calibrated else 0)),
        "states": dumps_json([place.entry]),
        "libraries": dumps_json([lib.entry.head_sha256 for lib in others]),
        "salts": dumps_json(salts),
    }
    container = output.sink.open(path, header_reserve(metadata))
    writer = UnitWriter(container, output.sink, UnitEncoder(output.prepared, 0, measure=True))
    counts: list[int] = []

    def jobs() -> Iterator[UnitJob]:
        for index, node in enumerate(nodes):
            tokens = TokenRange(node.owner, node.position, node.stop, node.boundary)
            counts.append(0)
            for layers in codec.layer_groups(len(identity.layers)):
                for job in split(tokens, layers, output.block, node.position, index):
                    counts[index] += 1
                    yield job

    write_all([(writer, jobs())], output.crew.encode, output.advance)
    records = []
    offset = first = 0
    for node, count in zip(nodes, counts, strict=True):
        parent = _parent(node.parent, others)
        records.append((offset, *parent, node.position, node.stop - node.position, node.visits, first, count,
                        salts.index(node.owner.identity.salt)))  # fmt: skip
        offset += node.stop - node.position
        first += count
    parts = [np.empty(0, np.int32), *(n.owner.tokens[n.position : n.stop] for n in nodes)]
    info = output.sink.place(
        container,
        {
            "unit.index": writer.table(),
            "trie.nodes": tables.as_bytes(np.array(records, tables.NODE)),
            "trie.tokens": np.concatenate(parts),
            "codec.state.0": place.packed,
        },
        raised(metadata, writer.minor),
    )
    written = FileEntry(path.name, info.size, info.head_sha256, info.payload_sha256)
    library = Library(LocalStore(output.folder), written, identity, lambda _: codec_state(codec), output.backend,
                      output.sink.seal)  # fmt: skip
    # Every session that a node predicts asks for its units.
    library.decoded = DecodedUnits()
    output.libraries.append(library)
    return library, info


def node_bytes(node: NewNode, prepared: Prepared, block: int) -> int:
    """Bytes of the units that a node will have."""
    tokens, total = TokenRange(node.owner, node.position, node.stop, node.boundary), 0
    for layers in prepared.codec.layer_groups(len(node.owner.identity.layers)):
        for job in split(tokens, layers, block):
            arrays = [node.owner.layer(layer, job.start, job.stop) for layer in layers]
            unit = Unit(job.layer, job.geometries[0], job.start, job.stop - job.start, job.boundary)
            codec = prepared.of(node.owner, job.stop + job.boundary)
            if codec.spans:
                total += len(codec.encode_span(dataclasses.replace(unit, layers=job.geometries), arrays))
            else:
                total += len(codec.encode(unit, *arrays[0]))
    return total


def _parent(parent: Run | None, others: list[Library]) -> tuple[int, int]:
    if parent is None:
        return 0, tables.NO_NODE
    return (0 if parent.library is None else 1 + others.index(parent.library)), parent.node
