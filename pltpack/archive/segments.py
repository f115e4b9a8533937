"""Open library segments and shards: containers with their checked tables and started codecs."""

from __future__ import annotations

import abc
import hashlib
import json
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from pltpack.codec import registry
from pltpack.codec.base import Codec, DecodeJob, KeyValue, State, Unit
from pltpack.errors import FormatError, PltpackError
from pltpack.format import state as state_format
from pltpack.format import tables
from pltpack.format.container import FORMAT_VERSION, Container
from pltpack.format.manifest import FileEntry, SessionEntry
from pltpack.snapshot import DTYPES, Identity, LayerGeometry


def open_codec(codec_id: str, config: dict[str, Any], arrays: State, identity: Identity) -> Codec:
    """Make a codec and start it with a state."""
    codec = registry.codec(codec_id, config)
    codec.start(arrays, identity)
    return codec


def fresh(layer: LayerGeometry, tokens: int) -> KeyValue:
    """Arrays for one layer's tokens, not initialized: ``[H, tokens, D_k]`` and ``[H, tokens, D_v]``."""
    dtype = DTYPES[layer.dtype]
    return (np.empty((layer.heads, tokens, layer.k_dim), dtype), np.empty((layer.heads, tokens, layer.v_dim), dtype))


FindProfile = Callable[[str], State]


class Segment(abc.ABC):
    """What library segments and shards have in common.

    Attributes
    ----------
    container : Container
    units : ndarray
        Checked unit index.
    """

    container: Container
    entry: FileEntry
    units: np.ndarray
    identity: Identity

    def _check_kind(self, kind: str) -> None:
        metadata, path = self.container.metadata, self.container.path
        if not re.fullmatch(rf"{FORMAT_VERSION[0]}\.[0-9]{{1,5}}", metadata.get("format_version", "")):
            raise FormatError(f"format version {metadata.get('format_version')!r} is not supported", path)
        if metadata.get("kind") != kind:
            raise FormatError(f"not a {kind} file", path)
        if metadata.get("identity_sha256") != self.identity.digest():
            raise FormatError(f"{kind} belongs to another identity than the manifest", path)
        if hashlib.sha256(metadata.get("identity", "").encode()).hexdigest() != metadata["identity_sha256"]:
            raise FormatError("metadata 'identity' does not have the digest beside it", path)

    def _check_names(self, tensors: set[str], metadata: set[str], optional: frozenset[str] = frozenset()) -> None:
        """Refuse what this version does not know, unless its name says that it may be ignored."""
        common = {"format_version", "kind", "identity", "identity_sha256"}
        for what, found, known in (("tensor", set(self.container.tables), tensors),
                                   ("metadata", set(self.container.metadata), metadata | common)):  # fmt: skip
            unknown = {name for name in found - known - optional if not name.startswith("x-")}
            if unknown or not known <= found:
                name = min(unknown or known - found)
                raise FormatError(f"{what} {name!r} is {'unknown' if unknown else 'missing'}", self.container.path)

    def _token_ids(self, name: str) -> np.ndarray:
        tokens = self.container.array(name, "I32")
        if (tokens < 0).any():
            raise FormatError(f"tensor {name!r} holds a negative token id", self.container.path)
        return tokens

    def _token_bytes(self) -> list[int]:
        return [layer.bytes_per_token for layer in self.identity.layers]

    def unit(self, record: np.void) -> Unit:
        """The codec's view of a unit of the index; positions as `position_of` says."""
        layer, count = int(record["layer"]), int(record["layer_count"])
        layers = self.identity.layers[layer : layer + count] if self.codec_of(record).spans else ()
        if count != 1 and not layers:
            raise FormatError(self._where(record, "holds several layers, which its codec does not"),
                              self.container.path)  # fmt: skip
        return Unit(layer, self.identity.layers[layer], self.position_of(record), int(record["token_count"]), 0, layers)

    @abc.abstractmethod
    def position_of(self, record: np.void) -> int:
        """Session position of a unit's first token."""

    @abc.abstractmethod
    def codec_of(self, record: np.void) -> Codec:
        """The started codec of a unit."""

    def decode(self, record: np.void, reference: KeyValue | None = None, out: KeyValue | None = None) -> KeyValue:
        """Read, check and decode one unit: keys ``[H, T, D_k]`` and values ``[H, T, D_v]`` in the stored dtype.

        Parameters
        ----------
        record : numpy.void
            Row of `units`.
        reference : (ndarray, ndarray), optional
            Mapped values of the same tokens, for a unit with `tables.FLAG_REFERENCE`.
        out : (ndarray, ndarray), optional
            Where to decode to; fresh arrays by default.

        Raises
        ------
        FormatError
            If its checksum or its content is wrong.
        """
        unit = self.unit(record)
        payload = memoryview(self.checked_payload(record))
        job = DecodeJob(payload, unit, *(out or fresh(unit.geometry, unit.tokens)), reference)
        self.decode_job(record, job)
        return job.keys, job.values

    def decode_span(self, record: np.void, out: Sequence[KeyValue] | None = None) -> list[KeyValue]:
        """Read, check and decode one unit of any number of layers, without a reference; one pair of arrays a layer.

        Raises
        ------
        FormatError
            If its checksum or its content is wrong.
        """
        unit, codec = self.unit(record), self.codec_of(record)
        if not codec.spans:
            return [self.decode(record, out=out[0] if out else None)]
        arrays = list(out or (fresh(layer, unit.tokens) for layer in unit.layers))
        payload = memoryview(self.checked_payload(record))
        try:
            codec.decode_span(payload, unit, arrays)
        except ValueError as error:
            raise FormatError(self._where(record, f"cannot be decoded: {error}"), self.container.path) from None
        return arrays

    def decode_job(self, record: np.void, job: DecodeJob) -> None:
        """Decode one unit whose checksum has been compared; `FormatError` if its content is wrong."""
        try:
            self.codec_of(record).decode(*job)
        except ValueError as error:
            raise FormatError(self._where(record, f"cannot be decoded: {error}"), self.container.path) from None

    def checked_payload(self, record: np.void) -> bytes:
        """A unit's encoded bytes.

        Raises
        ------
        FormatError
            If they do not match their checksum.
        """
        payload = self.container.payload(int(record["offset"]), int(record["length"]))
        self.check(record, payload)
        return payload

    def check(self, record: np.void, payload: bytes | memoryview) -> None:
        """Refuse bytes that do not match a unit's checksum with `FormatError`."""
        if xxhash.xxh3_64_intdigest(payload) != int(record["checksum"]):
            raise FormatError(self._where(record, "does not match its checksum"), self.container.path)

    def _where(self, record: np.void, fact: str) -> str:
        start = self.position_of(record)
        last = int(record["layer"]) + int(record["layer_count"]) - 1
        layers = f"layer {record['layer']}" if last == record["layer"] else f"layers {record['layer']} to {last}"
        return f"unit of {layers}, tokens {start}:{start + record['token_count']} {fact}"

    def close(self) -> None:
        """Close the file."""
        self.container.close()


class Library(Segment):
    """One segment of the centroid library.

    Parameters
    ----------
    folder : Path
        Archive folder.
    entry : FileEntry
        What the manifest says of it.
    identity : Identity
        The archive's.
    find_profile : callable, optional
        Gives the arrays of a profile that the segment names by digest only.

    Raises
    ------
    FormatError
        If the file breaks the specification.
    """

    def __init__(
        self, folder: Path, entry: FileEntry, identity: Identity, find_profile: FindProfile | None = None
    ) -> None:
        self.entry, self.identity = entry, identity
        self._find_profile = find_profile
        self.container = Container(folder / entry.file, entry.bytes, entry.head_sha256)
        try:
            self._load()
        except BaseException:
            self.close()
            raise

    def _load(self) -> None:
        path, metadata = self.container.path, self.container.metadata
        self._check_kind("library")
        self.others = _strings(tables.metadata_list(metadata, "libraries", path), path)
        self.salts = tables.metadata_list(metadata, "salts", path)
        _strings([salt for salt in self.salts if salt is not None], path)
        self.states = tables.metadata_list(metadata, "states", path)
        states = {f"codec.state.{index}" for index in range(len(self.states))}
        self._check_names({"unit.index", "trie.nodes", "trie.tokens", *states}, {"libraries", "salts", "states"})
        self.units = tables.read_units(self.container, self._token_bytes(), len(self.states))
        layers = len(self.identity.layers)
        self.nodes = tables.read_nodes(self.container, self.units, layers, len(self.others), len(self.salts))
        self.tokens = self._token_ids("trie.tokens")
        self._codecs: dict[int, Codec] = {}
        self._lock = threading.Lock()

    def position_of(self, record: np.void) -> int:
        """See `Segment.position_of`."""
        return int(self.nodes[record["node"]]["position"]) + int(record["token_start"])

    def codec_of(self, record: np.void) -> Codec:
        """See `Segment.codec_of`."""
        return self.codec(int(record["state"]))

    def state_entry(self, index: int) -> tuple[str, dict[str, Any]]:
        """Codec name and configuration of one state.

        Raises
        ------
        FormatError
            If there is no such state, or its entry is malformed.
        """
        entry = self.states[index] if index < len(self.states) else None
        if not (isinstance(entry, dict) and isinstance(entry.get("codec"), str)
                and isinstance(entry.get("config"), dict)):  # fmt: skip
            raise FormatError(f"codec state {index} is missing or malformed", self.container.path)
        return entry["codec"], entry["config"]

    def profile_digest(self, index: int) -> str | None:
        """Digest of the profile that one state is, if it is one."""
        self.state_entry(index)
        digest = self.states[index].get("profile")  # type: ignore[attr-defined]
        if digest is not None and not (isinstance(digest, str) and re.fullmatch("[0-9a-f]{64}", digest)):
            raise FormatError(f"codec state {index} is malformed", self.container.path)
        return digest

    def embeds(self, index: int) -> bool:
        """Whether one state's arrays are in this segment."""
        return len(self.container.array(f"codec.state.{index}", "U8")) > 0

    def state(self, index: int) -> State:
        """The arrays of one state: the segment's own, or a profile that it names.

        Raises
        ------
        FormatError
            If they are damaged.
        NotFoundError
            If the profile is not found.
        """
        digest = self.profile_digest(index)
        if digest is not None and not self.embeds(index):
            if self._find_profile is None:
                raise FormatError(f"codec state {index} names a profile elsewhere", self.container.path)
            return self._find_profile(digest)
        try:
            return state_format.unpack(self.container.array(f"codec.state.{index}", "U8"))
        except ValueError as error:
            raise FormatError(f"codec state {index}: {error}", self.container.path) from None

    def codec(self, index: int) -> Codec:
        """The started codec of one state; made once."""
        with self._lock:
            if index not in self._codecs:
                codec_id, config = self.state_entry(index)
                try:
                    self._codecs[index] = open_codec(codec_id, config, self.state(index), self.identity)
                except ValueError as error:
                    raise FormatError(f"codec state {index}: {error}", self.container.path) from None
                except PltpackError as error:
                    raise error.at(self.container.path) from None
            return self._codecs[index]

    def units_of(self, node: int) -> np.ndarray:
        """Unit records of one node."""
        record = self.nodes[node]
        return self.units[record["first_unit"] : record["first_unit"] + record["unit_count"]]


class Shard(Segment):
    """One session's shard.

    Parameters
    ----------
    folder : Path
        Archive folder.
    entry : SessionEntry
        What the manifest says of it.
    identity : Identity
        The archive's.
    libraries : sequence of Library
        All segments of the archive.

    Raises
    ------
    FormatError
        If the file breaks the specification or refers to a segment that the archive does not have.
    """

    def __init__(self, folder: Path, entry: SessionEntry, identity: Identity, libraries: Sequence[Library]) -> None:
        self.entry: SessionEntry = entry
        self.identity = identity
        self.container = Container(folder / entry.file, entry.bytes, entry.head_sha256)
        try:
            self._load({library.entry.head_sha256: library for library in libraries})
        except BaseException:
            self.close()
            raise

    def _load(self, known: dict[str, Library]) -> None:
        path, metadata = self.container.path, self.container.metadata
        self._check_kind("shard")
        if metadata.get("session") != self.entry.session or metadata.get("salt") != self.entry.salt:
            raise FormatError("shard belongs to another session than the manifest says", path)
        self._check_names({"tokens", "map", "unit.index"}, {"session", "libraries", "states"}, frozenset({"salt"}))
        digests = _strings(tables.metadata_list(metadata, "libraries", path), path)
        missing = [digest for digest in digests if digest not in known]
        if missing:
            raise FormatError(f"shard refers to library segment {missing[0][:12]}…, which the archive lacks", path)
        self.libraries = [known[digest] for digest in digests]
        self.states = self._read_states(tables.metadata_list(metadata, "states", path))
        self.tokens = self._token_ids("tokens")
        if len(self.tokens) != self.entry.tokens:
            raise FormatError(f"shard has {len(self.tokens)} tokens, the manifest says {self.entry.tokens}", path)
        self.units = tables.read_units(self.container, self._token_bytes(), len(self.states))
        if (self.units["node"] != tables.NO_NODE).any():
            raise FormatError("a unit of a shard names a library node", path)
        ends = self.units["token_start"].astype(np.int64) + self.units["token_count"]
        if len(ends) and ends.max() > len(self.tokens):
            raise FormatError("a unit reaches beyond the session's end", path)
        if len(ends) > 1:
            layer, count = (self.units[name].astype(np.int64) for name in ("layer", "layer_count"))
            same = layer[1:] == layer[:-1]
            starts = self.units["token_start"][1:].astype(np.int64)
            behind = (layer[1:] >= layer[:-1] + count[:-1]) | (same & (starts >= ends[:-1]) & (count[1:] == count[:-1]))
            if not behind.all():
                raise FormatError("units overlap or are out of order", path)
        self.layer_bounds = _layer_bounds(self.units, len(self.identity.layers))
        self.runs = tables.read_runs(self.container, len(self.tokens), len(self.libraries))
        for run in self.runs:
            self._check_run(run)

    def _check_run(self, run: np.void) -> None:
        library, path = self.libraries[run["library"]], self.container.path
        if run["node"] >= len(library.nodes):
            raise FormatError(f"mapping table names node {run['node']}, which the library lacks", path)
        node = library.nodes[run["node"]]
        start, length = int(run["node_start"]), int(run["length"])
        if start + length > node["length"] or int(node["position"]) + start != run["session_start"]:
            raise FormatError("mapping table row does not fit its library node", path)
        if library.salts[node["tenant"]] != self.entry.salt:
            raise FormatError("mapping table points to another tenant's node", path)
        first = int(node["token_offset"]) + start
        mine = self.tokens[run["session_start"] : run["session_start"] + length]
        if not np.array_equal(library.tokens[first : first + length], mine):
            raise FormatError("mapping table points to a node of other tokens", path)

    def _read_states(self, pairs: list[object]) -> list[tuple[int, int]]:
        out = []
        for pair in pairs:
            if not (isinstance(pair, list) and len(pair) == 2 and all(type(n) is int and n >= 0 for n in pair)
                    and pair[0] < len(self.libraries) and pair[1] < len(self.libraries[pair[0]].states)):  # fmt: skip
                raise FormatError("shard names a codec state that no library has", self.container.path)
            out.append((pair[0], pair[1]))
        return out

    def position_of(self, record: np.void) -> int:
        """See `Segment.position_of`."""
        return int(record["token_start"])

    def codec_of(self, record: np.void) -> Codec:
        """See `Segment.codec_of`."""
        library, state = self.states[record["state"]]
        return self.libraries[library].codec(state)

    @property
    def mapped_tokens(self) -> int:
        """Tokens that the mapping table covers."""
        return int(self.runs["length"].sum(dtype=np.int64))


def _layer_bounds(units: np.ndarray, layers: int) -> list[tuple[int, int]]:
    """Per layer, the range of records in a shard's sorted index whose units hold it."""
    out = [(0, 0)] * layers
    firsts, starts = np.unique(units["layer"], return_index=True)
    ends = [*starts[1:].tolist(), len(units)]
    for first, start, end in zip(firsts.tolist(), starts.tolist(), ends, strict=True):
        for layer in range(first, first + int(units["layer_count"][start])):
            out[layer] = (start, end)
    return out


def _strings(values: list[object], path: Path) -> list[str]:
    if not all(isinstance(value, str) for value in values):
        raise FormatError("metadata holds something else than strings", path)
    return [str(value) for value in values]


def dumps_json(value: object) -> str:
    """Compact JSON for container metadata."""
    return json.dumps(value, separators=(",", ":"), sort_keys=True)
