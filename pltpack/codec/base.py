"""The contract between a codec and the archive: one class per codec, one instance per configuration.

A codec sees arrays, never files. The archive calls `learn` once per new library segment, stores what it returns, calls
`start` with it, and then `encode` and `decode`, or their forms for many units, from several threads at once. Given the
same state and unit, `encode` returns the same bytes run after run and on any number of threads. `decode` is exact: the
same payload gives the same values everywhere, bit by bit, so float arithmetic is limited to single IEEE operations in a
stated order.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from pltpack.snapshot import Identity, LayerGeometry, Snapshot

#: Tokens at the start of a session that lossy codecs keep bit-exact as attention sinks: all, or those that need it.
SINK_TOKENS = 4

State = Mapping[str, np.ndarray]
KeyValue = tuple[np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True, slots=True)
class Unit:
    """What is known of a unit besides its values.

    Attributes
    ----------
    layer : int
        Layer index.
    geometry : LayerGeometry
        Shape and dtype of that layer.
    position : int
        Position of the unit's first token in its session.
    tokens : int
        Number of tokens, at least 1.
    boundary : int
        Tokens between the unit's end and the next place where a session may be cut and continued (a session's end or
        a branch of the trie); 0 if the unit ends there. Known to the encoder only: `decode` must not read it.
    layers : tuple of LayerGeometry
        For codecs that span layers: those of the unit's layer group, of which `layer` is the first.
    near : bool
        Whether the reference is that of a row of the mapping table that predicts, so that a payload may be of a kind
        that only format 1.2 has. Known to the encoder only: `decode` must not read it.
    """

    layer: int
    geometry: LayerGeometry
    position: int
    tokens: int
    boundary: int = 0
    layers: tuple[LayerGeometry, ...] = ()
    near: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class LayerSample:
    """Consecutive tokens of one layer: `unit` says where; the arrays are ``[H, T, D_k]`` and ``[H, T, D_v]``."""

    unit: Unit
    keys: np.ndarray
    values: np.ndarray


class Samples(Protocol):
    """A sample of the sessions to be encoded, read layer by layer."""

    def layer(self, index: int) -> Sequence[LayerSample]:
        """Runs of one layer; may be empty."""
        ...


class EncodeJob(NamedTuple):
    """The arguments of one `Codec.encode`."""

    unit: Unit
    keys: np.ndarray
    values: np.ndarray
    reference: KeyValue | None = None


class DecodeJob(NamedTuple):
    """The arguments of one `Codec.decode`."""

    payload: memoryview
    unit: Unit
    keys: np.ndarray
    values: np.ndarray
    reference: KeyValue | None = None


class Begun(Protocol):
    """A unit of a layer group that is decoded so far that its layers can be had one after the other, in any order."""

    @property
    def small(self) -> bool:
        """Whether all values are known to be so small that, taken as a reference, none of them is set aside."""
        ...

    def finish(
        self,
        layers: range,
        out: Sequence[KeyValue],
        reference: Sequence[KeyValue] | None = None,
        finite: np.ndarray | None = None,
    ) -> None:
        """Decode some of the unit's layers, one pair of arrays each.

        Parameters
        ----------
        layers : range
        out : sequence of (ndarray, ndarray)
        reference : sequence of (ndarray, ndarray), optional
            Mapped values of these layers, for a unit that was begun as one with a reference.
        finite : ndarray, optional
            What `finite` gives for the reference of all layers; not needed where that is known to be `small`.
        """
        ...

    def finite(self, reference: Sequence[KeyValue]) -> np.ndarray:
        """Which tokens of a reference of all of the unit's layers can be predicted from: bool ``[T]``."""
        ...


class Codec(abc.ABC):
    """Abstract base of all codecs.

    Subclasses set `codec_id` and take their configuration, JSON values only, as keyword arguments of ``__init__``.
    """

    #: Name in the registry and in archives.
    codec_id: ClassVar[str]
    #: Whether decoding gives back every bit.
    exact: ClassVar[bool] = False
    #: Whether a unit holds a group of layers: the archive then calls `encode_span` and `decode_span`.
    spans: ClassVar[bool] = False
    #: Whether `begin_span` gives a unit's layers one after the other.
    layered: ClassVar[bool] = False
    #: Whether a reference that predicts makes units smaller.
    predicts: ClassVar[bool] = True
    #: Tokens before a cut elsewhere than at the end of what was stored that the model had better compute again, since
    #: they are kept less well there than at that end.
    recompute_at_cut: ClassVar[int] = 0
    #: Whether the state is a profile, made by calibration; `learn` is then never called.
    calibrated: ClassVar[bool] = False

    def get_config(self) -> dict[str, Any]:
        """The configuration as JSON values: the keyword arguments that make an equal codec."""
        return {}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Codec:
        """Make the codec that `get_config` described.

        Raises
        ------
        ValueError
            If the configuration has unknown keys or values out of range.
        """
        try:
            return cls(**config)
        except TypeError as error:
            raise ValueError(f"codec {cls.codec_id!r} does not take this configuration: {error}") from None

    @property
    def on_host(self) -> Codec:
        """The codec itself; of one that stands for a codec whose units go to a device, that codec."""
        return self

    def like(self, codec: Codec) -> Codec:
        """A codec of this kind that works where this one does."""
        return codec

    @abc.abstractmethod
    def learn(self, samples: Samples, identity: Identity) -> dict[str, np.ndarray]:
        """Learn the state (static tables, means, scales) that goes into the library; no more than a few MB.

        Must work with an empty sample: every later unit must still be encodable.
        """

    @abc.abstractmethod
    def start(self, state: State, identity: Identity) -> None:
        """Check the state as untrusted input and prepare for `encode` and `decode`.

        Raises
        ------
        ValueError
            If the state does not fit the codec or the identity's geometry.
        """

    def share(self, other: Codec) -> bool:
        """Be started as another codec is that was started with the same state and identity; False if it cannot be."""
        return False

    def preparations(self) -> Sequence[Callable[[], object]]:
        """What a started codec makes when decoding first asks for it, as calls, for whoever cannot wait then."""
        return ()

    @abc.abstractmethod
    def encode(self, unit: Unit, keys: np.ndarray, values: np.ndarray, reference: KeyValue | None = None) -> bytes:
        """Encode one unit.

        Parameters
        ----------
        unit : Unit
        keys, values : ndarray
            ``[H, T, D_k]`` and ``[H, T, D_v]`` in the stored dtype; any bit pattern, NaN and infinities included.
            Not necessarily contiguous.
        reference : (ndarray, ndarray), optional
            Decoded centroid values of the same shape and dtype; the decoder will be given the same.
        """

    @abc.abstractmethod
    def decode(
        self,
        payload: memoryview,
        unit: Unit,
        keys: np.ndarray,
        values: np.ndarray,
        reference: KeyValue | None = None,
    ) -> None:
        """Decode one unit into `keys` and `values` (stored dtype, possibly strided along the token axis).

        The payload has passed its checksum but is still untrusted: it must not cause reads or writes out of bounds,
        a hang, or an allocation beyond a small multiple of the unit's size.

        Raises
        ------
        ValueError
            If the payload is malformed.
        """

    def encode_many(self, jobs: Sequence[EncodeJob]) -> list[bytes]:
        """Encode several units: the same bytes as `encode` gives one by one.

        The archive hands over a few units at a time. A codec may override this to do them in fewer compiled calls:
        every return to Python may wait for another thread's hold of the interpreter lock.
        """
        return [self.encode(*job) for job in jobs]

    def decode_many(self, jobs: Sequence[DecodeJob]) -> None:
        """Decode several units, in any order; the counterpart of `encode_many`.

        Raises
        ------
        ValueError
            If a payload is malformed. The others' arrays may then be filled or not.
        """
        for job in jobs:
            self.decode(*job)

    def layer_groups(self, layers: int) -> list[range]:
        """How a started codec cuts a model's layers into units: one by one unless it `spans` layers."""
        return [range(index, index + 1) for index in range(layers)]

    def minor_of(self, payload: bytes) -> int:
        """The least minor version of the format that knows what is in a payload, beyond what its container says."""
        return 0

    def prepare(self, snapshot: Snapshot, cuts: Sequence[int] = ()) -> Codec:
        """The started codec for one session, after a look at the whole of it; itself unless a codec needs one.

        Parameters
        ----------
        snapshot : Snapshot
        cuts : sequence of int
            Positions before which the session may be cut and continued, its end included.

        Raises
        ------
        ValueError
            If the codec cannot keep what it is to promise.
        """
        return self

    @property
    def found(self) -> dict[str, Any]:
        """What `prepare` found of a session, small; nothing of a codec that needs no look at it."""
        return {}

    def resumed(self, found: Mapping[str, Any]) -> Codec:
        """The codec as `prepare` gave it, by what it `found` in another process."""
        return self

    def encode_span(self, unit: Unit, arrays: Sequence[KeyValue], reference: Sequence[KeyValue] | None = None) -> bytes:
        """Encode one unit of a layer group; `arrays` and `reference` as of `encode`, one pair a layer."""
        raise NotImplementedError

    def encode_both(
        self, unit: Unit, arrays: Sequence[KeyValue], reference: Sequence[KeyValue]
    ) -> tuple[bytes, bytes]:
        """Encode one unit of a layer group with a reference and without, to compare what they take.

        The second payload may differ in places from that of `encode_span`: codecs may save work.
        """
        plain = dataclasses.replace(unit, near=False)
        return self.encode_span(unit, arrays, reference), self.encode_span(plain, arrays)

    def decode_span(
        self, payload: memoryview, unit: Unit, out: Sequence[KeyValue], reference: Sequence[KeyValue] | None = None
    ) -> None:
        """Decode one unit of a layer group; arguments as of `decode`, one pair of arrays a layer.

        Raises
        ------
        ValueError
            If the payload is malformed.
        """
        raise NotImplementedError

    def begin_span(self, payload: memoryview, unit: Unit, referenced: bool = False) -> Begun:
        """The first part of `decode_span`, by a codec that is `layered`: what is begun is sound.

        The reference itself is only needed layer by layer, when they are finished.

        Raises
        ------
        ValueError
            If the payload is malformed.
        """
        raise NotImplementedError
