"""Write sessions that a model makes again: their tokens, digests of what it makes, and at most what differs from it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import xxhash

from pltpack.archive import recompute
from pltpack.archive.draft import KERNEL_NOISE, token_error
from pltpack.archive.encoding import UNIT_TOKENS, Progress, in_order, same_bits
from pltpack.archive.files import HIDDEN, container_metadata, header_reserve, next_library, session_entry, shard_path
from pltpack.archive.reader import Archive
from pltpack.archive.recompute import Recipe
from pltpack.archive.sampling import JobSamples
from pltpack.archive.segments import dumps_json
from pltpack.codec.base import KeyValue, Unit
from pltpack.codec.lossless import LosslessCodec
from pltpack.codec.recompute import RecomputeCodec, pack
from pltpack.errors import PromiseError, UnsupportedError
from pltpack.format import state as state_format
from pltpack.format import tables
from pltpack.format.container import MINOR_RECOMPUTE, ContainerWriter
from pltpack.format.manifest import FileEntry, Manifest, SessionEntry
from pltpack.format.sealing import Seal
from pltpack.snapshot import Identity, Snapshot
from pltpack.store import Writing


@dataclasses.dataclass(frozen=True)
class Plan:
    """How sessions are written.

    Attributes
    ----------
    quality : str
        Tier, for the manifest.
    weights, predictor : str
        See `Recipe`.
    residual : bool
        Whether what differs from the model's values is stored; if not, values that differ by more than kernel noise
        are refused.
    block : int
        Tokens per block.
    """

    quality: str
    weights: str
    predictor: str
    residual: bool
    block: int = 32

    @property
    def run(self) -> int:
        """Tokens of a unit, and of a digest."""
        return max(self.block, UNIT_TOKENS // self.block * self.block)


@dataclasses.dataclass(frozen=True)
class Made:
    """A session to be written.

    Attributes
    ----------
    snapshot : Snapshot
        As captured.
    make : callable
        Gives what the model makes of its tokens, one pair ``[H, T, D]`` a layer in the stored dtype.
    coded : bytes or None
        Its tokens coded with the model's probabilities; None: the library codes them.
    """

    snapshot: Snapshot
    make: Callable[[], Sequence[KeyValue]]
    coded: bytes | None = None


def write_generation(
    writing: Writing, archive: Archive | None, identity: Identity, sessions: Sequence[Made], plan: Plan,
    progress: Progress,
) -> Manifest:  # fmt: skip
    """Add sessions as one generation; arguments besides those of `Plan` as of `pltpack.archive.writer`.

    Raises
    ------
    UnsupportedError
        If the archive holds sessions that no model makes.
    PromiseError
        If the model makes other values than the captured ones, and what differs is not to be stored.
    """
    old, folder = archive.manifest if archive else None, writing.folder
    if archive is not None and recompute.of_archive([archive.shard(name) for name in archive.sessions]) is False:
        raise UnsupportedError(f"holds sessions of other tiers, with which {plan.quality!r} does not mix", archive.path)
    texts, state = _texts(sessions)
    seal = old.seal if old else writing.seal
    libraries = () if archive is None else archive.libraries
    lossless = LosslessCodec()
    # Differences from the model's values need no statistics of the values themselves.
    tables_of = lossless.learn(JobSamples([]), identity)
    lossless.start(tables_of, identity)
    states = [state, tables_of] if plan.residual else [state]
    entry = _write_library(next_library(folder, libraries), identity, states, seal)
    total = sum(made.snapshot.raw_bytes for made in sessions)
    entries, done = [], 0
    taken: set[Path] = set()
    with ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="pltpack-encode") as pool:
        for made, text in zip(sessions, texts, strict=True):
            path = shard_path(folder, HIDDEN if seal else made.snapshot.session, taken)
            taken.add(path)
            writer = _ShardWriter(path, identity, entry, plan, made, text, lossless, pool, seal)
            entries.append(writer.write())
            done += made.snapshot.raw_bytes
            progress("encode", done, total)
    manifest = Manifest(
        generation=old.generation + 1 if old else 1, identity=identity, block=plan.block,
        quality=old.quality if old else plan.quality, dedup=old.dedup if old else True,
        libraries=(*(old.libraries if old else ()), entry), sessions=(*(old.sessions if old else ()), *entries),
        seal=seal,
    )  # fmt: skip
    writing.commit(manifest)
    return manifest


def _texts(sessions: Sequence[Made]) -> tuple[list[int | None], dict[str, np.ndarray]]:
    """The first text of each session whose tokens the library codes, and the state that does; tenants stay apart."""
    salts = list(dict.fromkeys(made.snapshot.identity.salt for made in sessions))
    groups = [[i for i, made in enumerate(sessions) if made.coded is None and made.snapshot.identity.salt == salt]
              for salt in salts]  # fmt: skip
    state, places = pack([[sessions[index].snapshot.tokens for index in group] for group in groups])
    texts: list[int | None] = [None] * len(sessions)
    for group, found in zip(groups, places, strict=True):
        for index, place in zip(group, found, strict=True):
            texts[index] = place
    return texts, state


def _write_library(
    path: Path, identity: Identity, states: Sequence[dict[str, np.ndarray]], seal: Seal | None
) -> FileEntry:
    codecs = [{"codec": codec, "config": {}} for codec in (RecomputeCodec.codec_id, LosslessCodec.codec_id)]
    metadata = {
        **container_metadata("library", identity, MINOR_RECOMPUTE),
        "states": dumps_json(codecs[: len(states)]), "libraries": "[]", "salts": "[]",
    }  # fmt: skip
    container = ContainerWriter(path, header_reserve(metadata, len(states)), seal)
    try:
        info = container.commit(
            {
                "unit.index": tables.as_bytes(np.empty(0, tables.UNIT)),
                "trie.nodes": tables.as_bytes(np.empty(0, tables.NODE)),
                "trie.tokens": np.empty(0, np.int32),
                **{f"codec.state.{index}": state_format.pack(state) for index, state in enumerate(states)},
            },
            metadata,
        )
    finally:
        container.abort()
    return FileEntry(path.name, info.size, info.head_sha256, info.payload_sha256)


class _ShardWriter:
    """Writes one session."""

    def __init__(
        self, path: Path, identity: Identity, library: FileEntry, plan: Plan, made: Made, text: int | None,
        codec: LosslessCodec, pool: ThreadPoolExecutor, seal: Seal | None,
    ) -> None:  # fmt: skip
        self._path, self._identity, self._library, self._plan = path, identity, library, plan
        self._made, self._text, self._codec, self._pool, self._seal = made, text, codec, pool, seal

    def write(self) -> SessionEntry:
        plan, snapshot = self._plan, self._made.snapshot
        rebuilt = self._made.make()
        equal = all(self._equal(layer, values) for layer, values in enumerate(rebuilt))
        if not equal and not plan.residual:
            self._refuse_others(rebuilt)
        recipe = Recipe(plan.weights, plan.predictor, equal or plan.residual, plan.run, self._text)
        common = container_metadata("shard", self._identity, MINOR_RECOMPUTE)
        # The identity takes more room than everything else, and its digest is there.
        common.pop("identity")
        metadata = {
            **common,
            "session": snapshot.session,
            "libraries": dumps_json([self._library.head_sha256]),
            "states": dumps_json([[0, 0], [0, 1]] if plan.residual else [[0, 0]]),
            recompute.METADATA: recipe.to_text(),
        }
        if snapshot.identity.salt is not None:
            metadata["salt"] = snapshot.identity.salt
        container = ContainerWriter(self._path, header_reserve(metadata, recompute=True), self._seal)
        try:
            records = [] if equal or not plan.residual else self._units(container, rebuilt)
            found = {
                "map": tables.as_bytes(np.empty(0, tables.RUN)),
                "unit.index": tables.as_bytes(np.array(records, tables.UNIT)),
                recompute.DIGESTS: recompute.digests(rebuilt, plan.run),
            }
            if self._made.coded is not None:
                found[recompute.CODED] = np.frombuffer(self._made.coded, np.uint8)
            info = container.commit(found, metadata)
        finally:
            container.abort()
        return session_entry(self._path, info, snapshot.session, len(snapshot), snapshot.identity.salt)

    def _equal(self, layer: int, values: KeyValue) -> bool:
        return all(same_bits(a, b) for a, b in zip(self._made.snapshot.layer(layer), values, strict=True))

    def _refuse_others(self, rebuilt: Sequence[KeyValue]) -> None:
        """Kernels differ in last bits; anything more is another model's cache, or another precision's."""
        snapshot = self._made.snapshot
        for layer, values in enumerate(rebuilt):
            error = token_error(snapshot.layer(layer), values)
            if not error <= KERNEL_NOISE:
                raise PromiseError(f"the model makes another cache of session {snapshot.session!r} than was captured "
                                   f"(layer {layer} differs by {100 * error:.2g} %): other weights, or another "
                                   "precision, for which there is lossless+model", snapshot.origin)  # fmt: skip

    def _units(self, container: ContainerWriter, rebuilt: Sequence[KeyValue]) -> list[tuple[int | float, ...]]:
        starts = range(0, len(self._made.snapshot), self._plan.run)
        jobs = [(layer, start) for layer in range(len(rebuilt)) for start in starts]
        records: list[tuple[int | float, ...]] = []

        def encode(job: tuple[int, int]) -> tuple[bytes, int]:
            layer, start = job
            stop = min(start + self._plan.run, len(self._made.snapshot))
            arrays = self._made.snapshot.layer(layer, start, stop)
            keys, values = (array[:, start:stop] for array in rebuilt[layer])
            if same_bits(arrays[0], keys) and same_bits(arrays[1], values):
                return b"", 0
            unit = Unit(layer, self._identity.layers[layer], start, stop - start, near=True)
            return self._codec.encode(unit, *arrays, (keys, values)), stop - start

        for (layer, start), (payload, tokens) in zip(jobs, in_order(encode, jobs, self._pool), strict=True):
            if tokens:
                place = container.append(payload), len(payload), xxhash.xxh3_64_intdigest(payload)
                records.append((*place, start, tokens, layer, 1, 1, tables.FLAG_REBUILT, tables.NO_NODE, 0.0))
        return records
