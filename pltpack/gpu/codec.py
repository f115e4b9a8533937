"""A codec whose units are decoded and encoded by a backend, with arrays on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pltpack.codec.base import Codec, DecodeJob, EncodeJob, KeyValue, Samples, State, Unit
from pltpack.gpu.backend import Backend
from pltpack.gpu.jobs import Job, places_of
from pltpack.snapshot import Identity, LayerGeometry, Snapshot

#: Raw bytes of the units that are decoded at once, unless one is larger.
_PIECE = 1 << 28


class DeviceCodec(Codec):
    """Stands for a started codec wherever units are decoded or encoded.

    Parameters
    ----------
    codec : Codec
        Started.
    backend : Backend
    started : Codec, optional
        What `codec` was prepared from: it has the state that is on the device.
    """

    def __init__(self, codec: Codec, backend: Backend, started: Codec | None = None) -> None:
        self._codec, self._backend, self._started = codec, backend, started or codec
        # They are of the codec's class; of this one, only an instance knows.
        self.codec_id, self.exact = codec.codec_id, codec.exact  # type: ignore[misc]
        self.spans, self.calibrated = codec.spans, codec.calibrated  # type: ignore[misc]
        self.predicts = codec.predicts  # type: ignore[misc]

    @property
    def on_host(self) -> Codec:
        """See `Codec.on_host`."""
        return self._codec

    def like(self, codec: Codec) -> Codec:
        """See `Codec.like`."""
        return DeviceCodec(codec.on_host, self._backend, self._started)

    def prepare(self, snapshot: Snapshot, cuts: Sequence[int] = ()) -> Codec:
        """See `Codec.prepare`."""
        return self.like(self._codec.prepare(snapshot, cuts))

    def get_config(self) -> dict[str, Any]:
        """See `Codec.get_config`."""
        return self._codec.get_config()

    def learn(self, samples: Samples, identity: Identity) -> dict[str, np.ndarray]:
        """See `Codec.learn`."""
        return self._codec.learn(samples, identity)

    def start(self, state: State, identity: Identity) -> None:
        """The codec has been started."""
        raise ValueError("a codec on a device has been started before")

    def layer_groups(self, layers: int) -> list[range]:
        """See `Codec.layer_groups`."""
        return self._codec.layer_groups(layers)

    def encode(self, unit: Unit, keys: np.ndarray, values: np.ndarray, reference: KeyValue | None = None) -> bytes:
        """See `Codec.encode`."""
        if self.spans:
            return self.encode_span(unit, [(keys, values)], None if reference is None else [reference])
        return self.encode_many([EncodeJob(unit, keys, values, reference)])[0]

    def encode_many(self, jobs: Sequence[EncodeJob]) -> list[bytes]:
        """See `Codec.encode_many`."""
        if self.spans:
            return super().encode_many(jobs)
        return self._backend.encode_units(self._started, jobs)

    def encode_span(self, unit: Unit, arrays: Sequence[KeyValue], reference: Sequence[KeyValue] | None = None) -> bytes:
        """See `Codec.encode_span`."""
        return self._backend.encode_span(self._started, self._codec, unit, arrays, reference)

    def encode_both(
        self, unit: Unit, arrays: Sequence[KeyValue], reference: Sequence[KeyValue]
    ) -> tuple[bytes, bytes]:
        """See `Codec.encode_both`: on the CPU, as units with a reference are."""
        return self._codec.encode_both(unit, arrays, reference)

    def decode(
        self, payload: memoryview, unit: Unit, keys: np.ndarray, values: np.ndarray, reference: KeyValue | None = None
    ) -> None:
        """See `Codec.decode`."""
        self.decode_many([DecodeJob(payload, unit, keys, values, reference)])

    def decode_many(self, jobs: Sequence[DecodeJob]) -> None:
        """See `Codec.decode_many`."""
        wanted = [(job.payload, job.unit, [(job.keys, job.values)],
                   None if job.reference is None else [job.reference]) for job in jobs]  # fmt: skip
        self._decode(wanted)

    def decode_span(
        self, payload: memoryview, unit: Unit, out: Sequence[KeyValue], reference: Sequence[KeyValue] | None = None
    ) -> None:
        """See `Codec.decode_span`."""
        self._decode([(payload, unit, out, reference)])

    def _decode(self, wanted: Sequence[tuple[memoryview, Unit, Sequence[KeyValue], Sequence[KeyValue] | None]]) -> None:
        """Units dtype by dtype, and no more than `_PIECE` at once."""
        kinds: dict[tuple[str, ...], list[int]] = {}
        for number, (_, unit, _, _) in enumerate(wanted):
            kinds.setdefault(tuple(sorted({g.dtype for g in _layers(unit)})), []).append(number)
        for dtypes, numbers in kinds.items():
            if len(dtypes) > 1:
                for number in numbers:
                    self._started.decode_span(*wanted[number])
                continue
            piece: list[int] = []
            for number in numbers:
                piece.append(number)
                if sum(_raw(wanted[i][1]) for i in piece) > _PIECE or number == numbers[-1]:
                    self._piece([wanted[i] for i in piece], dtypes[0])
                    piece = []

    def _piece(self, wanted: Sequence[Any], dtype: str) -> None:
        sizes = [unit.tokens * sum(g.elements_per_token for g in _layers(unit)) for _, unit, _, _ in wanted]
        words = self._backend.buffer(sum(sizes), dtype)
        starts = np.cumsum(sizes) - sizes
        self._backend.decode_units(self._started, [
            Job(payload, unit, places_of(_layers(unit), unit.tokens, words, int(at)), 0, reference)
            for (payload, unit, _, reference), at in zip(wanted, starts, strict=True)
        ])  # fmt: skip
        found, at = self._backend.to_host(words), 0
        for _, _, pairs, _ in wanted:
            for array in (array for pair in pairs for array in pair):
                array[:] = found[at : at + array.size].view(array.dtype).reshape(array.shape)
                at += array.size


def _layers(unit: Unit) -> Sequence[LayerGeometry]:
    return unit.layers or (unit.geometry,)


def _raw(unit: Unit) -> int:
    return unit.tokens * sum(g.bytes_per_token for g in _layers(unit))
