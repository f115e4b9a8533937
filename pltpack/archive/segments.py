"""What open library segments and shards have in common: a container with a checked unit index and started codecs."""

from __future__ import annotations

import abc
import hashlib
import json
import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import xxhash

from pltpack.codec.base import Begun, Codec, DecodeJob, KeyValue, Unit
from pltpack.errors import FormatError
from pltpack.format.container import FORMAT_VERSION, Container
from pltpack.format.manifest import FileEntry
from pltpack.format.tables import FLAG_REFERENCE
from pltpack.snapshot import DTYPES, Identity, LayerGeometry

if TYPE_CHECKING:
    from pltpack.archive.decoded import DecodedUnits


def fresh(layer: LayerGeometry, tokens: int) -> KeyValue:
    """Arrays for one layer's tokens, not initialized: ``[H, tokens, D_k]`` and ``[H, tokens, D_v]``."""
    dtype = DTYPES[layer.dtype]
    return (np.empty((layer.heads, tokens, layer.k_dim), dtype), np.empty((layer.heads, tokens, layer.v_dim), dtype))


class Resident(Protocol):
    """Decoded library units in memory."""

    def holds(self, segment: Segment, record: np.void) -> bool:
        """Whether a unit is there now."""
        ...

    def get(self, segment: Segment, record: np.void) -> list[KeyValue]:
        """One pair of arrays a layer, which must not be changed; decoded if they are not here."""
        ...

    def find(self, segment: Segment, record: np.void) -> list[KeyValue] | None:
        """The same, but None if they are not here."""
        ...

    def payload(self, segment: Segment, record: np.void) -> Any:
        """A library unit's payload, in memory, or else read and checked."""
        ...

    def wants(self, segment: Segment, record: np.void) -> bool:
        """Whether `offer` would keep a unit's values."""
        ...

    def offer(self, segment: Segment, record: np.void, values: list[KeyValue], payload: Any) -> None:
        """Keep a unit that was decoded elsewhere; nobody changes it from then on."""
        ...


class Segment(abc.ABC):
    """What library segments and shards have in common.

    Attributes
    ----------
    container : Container
    units : ndarray
        Checked unit index.
    minor : int
        The container's minor version.
    decoded : DecodedUnits or None
        Where decoded units that references are made of are kept.
    resident : Resident or None
        Where whole decoded units of a library are kept, to be copied from instead of decoding them again.
    """

    container: Container
    entry: FileEntry
    units: np.ndarray
    identity: Identity
    minor: int
    decoded: DecodedUnits | Resident | None = None
    resident: Resident | None = None

    @property
    def _brief(self) -> bool:
        """Whether the identity may be left out, its digest being there."""
        return False

    def _check_kind(self, kind: str) -> None:
        metadata, path = self.container.metadata, self.container.path
        version = re.fullmatch(rf"{FORMAT_VERSION[0]}\.([0-9]{{1,5}})", metadata.get("format_version", ""))
        if version is None:
            raise FormatError(f"format version {metadata.get('format_version')!r} is not supported", path)
        self.minor = int(version[1])
        if metadata.get("kind") != kind:
            raise FormatError(f"not a {kind} file", path)
        if metadata.get("identity_sha256") != self.identity.digest():
            raise FormatError(f"{kind} belongs to another identity than the manifest", path)
        if "identity" not in metadata and self._brief:
            return
        if hashlib.sha256(metadata.get("identity", "").encode()).hexdigest() != metadata["identity_sha256"]:
            raise FormatError("metadata 'identity' does not have the digest beside it", path)

    def _check_names(self, tensors: set[str], metadata: set[str], optional: frozenset[str] = frozenset()) -> None:
        """Refuse what this version does not know, unless its name says that it may be ignored."""
        common = {"format_version", "kind", "identity_sha256", *([] if self._brief else ["identity"])}
        optional |= {"identity"} if self._brief else set()
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

    def bytes_with(self, record: np.void) -> int:
        """Raw bytes of what is kept or freed together with a unit."""
        layer, count = int(record["layer"]), int(record["layer_count"])
        layers = self.identity.layers[layer : layer + count]
        return int(record["token_count"]) * sum(geometry.bytes_per_token for geometry in layers)

    @abc.abstractmethod
    def codec_of(self, record: np.void) -> Codec:
        """The started codec of a unit."""

    def decode(
        self, record: np.void, reference: KeyValue | None = None, out: KeyValue | None = None,
        payload: bytes | memoryview | None = None,
    ) -> KeyValue:  # fmt: skip
        """Read, check and decode one unit: keys ``[H, T, D_k]`` and values ``[H, T, D_v]`` in the stored dtype.

        Parameters
        ----------
        record : numpy.void
            Row of `units`.
        reference : (ndarray, ndarray), optional
            Mapped values of the same tokens, for a unit with `tables.FLAG_REFERENCE`.
        out : (ndarray, ndarray), optional
            Where to decode to; fresh arrays by default.
        payload : bytes-like, optional
            The unit's, checked.

        Raises
        ------
        FormatError
            If its checksum or its content is wrong.
        """
        unit = self.unit(record)
        payload = self.checked_payload(record) if payload is None else payload
        job = DecodeJob(memoryview(payload), unit, *(out or fresh(unit.geometry, unit.tokens)), reference)
        self.decode_job(record, job)
        return job.keys, job.values

    def decode_span(
        self,
        record: np.void,
        out: Sequence[KeyValue] | None = None,
        reference: Sequence[KeyValue] | None = None,
        payload: bytes | memoryview | None = None,
    ) -> list[KeyValue]:
        """Read, check and decode one unit of any number of layers; arguments as of `decode`, one pair a layer.

        A payload that is given has been checked.

        Raises
        ------
        FormatError
            If its checksum or its content is wrong.
        """
        unit, codec = self.unit(record), self.codec_of(record)
        if not codec.spans:
            pair = out[0] if out else None
            return [self.decode(record, reference[0] if reference else None, pair, payload)]
        arrays = list(out or (fresh(layer, unit.tokens) for layer in unit.layers))
        payload = self.checked_payload(record) if payload is None else payload
        try:
            codec.decode_span(memoryview(payload), unit, arrays, reference)
        except ValueError as error:
            raise FormatError(self._where(record, f"cannot be decoded: {error}"), self.container.path) from None
        return arrays

    def begin_span(self, record: np.void, payload: bytes | memoryview | None = None) -> Begun:
        """Read, check and begin a unit whose codec is `layered`; a payload that is given has been checked.

        Raises
        ------
        FormatError
            If its checksum or its content is wrong.
        """
        referenced = bool(record["flags"] & FLAG_REFERENCE)
        try:
            payload = self.checked_payload(record) if payload is None else payload
            return self.codec_of(record).begin_span(memoryview(payload), self.unit(record), referenced)
        except ValueError as error:
            raise FormatError(self._where(record, f"cannot be decoded: {error}"), self.container.path) from None

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


def strings(values: list[object], path: os.PathLike[str]) -> list[str]:
    """A list of a container's metadata that must hold strings only; `FormatError` if not."""
    if not all(isinstance(value, str) for value in values):
        raise FormatError("metadata holds something else than strings", path)
    return [str(value) for value in values]


def dumps_json(value: object) -> str:
    """Compact JSON for container metadata."""
    return json.dumps(value, separators=(",", ":"), sort_keys=True)
