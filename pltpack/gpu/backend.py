"""Where units are encoded and decoded: the CPU or a CUDA device, behind one interface.

A backend owns buffers of cache words, decodes units straight to their places in them, and encodes units of host arrays.
The CUDA backend has kernels for units as the tiers usually write them; what it has none for (references but for the
transform codec's predictions, models inside a payload, zstd modes, more entropy tables than fit, damaged units) it
gives to the codec on the CPU and copies the words over, so that it decodes whatever the CPU does, and says the same of
what is wrong.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from pltpack.codec.base import Codec, DecodeJob, EncodeJob, KeyValue, Unit
from pltpack.codec.group import GroupCodec
from pltpack.codec.lossless import LosslessCodec
from pltpack.codec.transform import TransformCodec
from pltpack.codec.turboquant import TurboQuantCodec
from pltpack.errors import UnsupportedError
from pltpack.gpu import device
from pltpack.gpu.jobs import Job, UnitDecoder
from pltpack.gpu.lanes import Lanes
from pltpack.gpu.place import Pages
from pltpack.snapshot import DTYPES, LayerGeometry

#: Units of one launch: a grid has at most 65,535 rows, and a unit takes two.
_MOST_UNITS = 1 << 14


class Backend(Protocol):
    """Decodes units to buffers of words that it made, and encodes units."""

    name: str

    def buffer(self, elements: int, dtype: str) -> Any:
        """Words of a cache dtype, one-dimensional and unsigned, all 0."""
        ...

    def decode_units(self, codec: Codec, jobs: Sequence[Job]) -> None:
        """Decode units of one started codec to their places.

        Raises
        ------
        ValueError
            If a payload is malformed. The others' places may then be filled or not.
        UnsupportedError
            If places do not lie in their buffers.
        """
        ...

    def encode_units(self, codec: Codec, jobs: Sequence[EncodeJob]) -> list[bytes]:
        """Payloads of units of one started codec, which holds one layer a unit."""
        ...

    def encode_span(
        self, codec: Codec, prepared: Codec, unit: Unit, arrays: Sequence[KeyValue],
        reference: Sequence[KeyValue] | None,
    ) -> bytes:  # fmt: skip
        """Payload of one unit of a layer group, by what `codec` was prepared to for its session."""
        ...

    def to_host(self, words: Any) -> np.ndarray:
        """A buffer's words on the host, when everything before has been done."""
        ...


class CpuBackend:
    """Decodes with the codecs' compiled loops; buffers are NumPy arrays."""

    name = "cpu"

    def buffer(self, elements: int, dtype: str) -> Any:
        """See `Backend.buffer`."""
        return np.zeros(elements, _word(dtype))

    def decode_units(self, codec: Codec, jobs: Sequence[Job]) -> None:
        """See `Backend.decode_units`."""
        _check_places(jobs)
        for job, arrays in zip(jobs, decode_on_host(codec, jobs), strict=True):
            for where, pair in zip(job.places, arrays, strict=True):
                for pages, array in zip((where.keys, where.values), pair, strict=True):
                    where.words[_addresses(pages, array, job.slot)] = array.view(_word_of(array))

    def encode_units(self, codec: Codec, jobs: Sequence[EncodeJob]) -> list[bytes]:
        """See `Backend.encode_units`."""
        return codec.encode_many(jobs)

    def encode_span(
        self, codec: Codec, prepared: Codec, unit: Unit, arrays: Sequence[KeyValue],
        reference: Sequence[KeyValue] | None,
    ) -> bytes:  # fmt: skip
        """See `Backend.encode_span`."""
        return prepared.encode_span(unit, arrays, reference)

    def to_host(self, words: Any) -> np.ndarray:
        """See `Backend.to_host`."""
        found: np.ndarray = words
        return found


class CudaBackend:
    """Decodes with kernels; buffers are CuPy arrays, of one decode stream and one copy stream for all threads.

    Parameters
    ----------
    number : int
        Of the device.

    Raises
    ------
    UnsupportedError
        If there is no such device, or a package is missing; the message says which.
    """

    def __init__(self, number: int = 0) -> None:
        device.require()
        count = 1 if device.is_simulated() else device.arrays().cuda.runtime.getDeviceCount()
        if not 0 <= number < count:
            raise UnsupportedError(f"there is no CUDA device {number}, only {count}")
        self.name = f"cuda:{number}"
        self._number = number
        self._decoders: dict[int, tuple[Codec, UnitDecoder | None]] = {}
        self._encoders: dict[int, Any] = {}
        self._lock, self._started = threading.RLock(), threading.RLock()
        # What the simulator's device has room for; a real one knows by itself.
        self.limit: int | None = None
        self.live_bytes = 0
        self.lanes = Lanes(number)

    def buffer(self, elements: int, dtype: str) -> Any:
        """See `Backend.buffer`.

        Raises
        ------
        MemoryError
            If the device has no room.
        """
        size = elements * _word(dtype).itemsize
        if self.limit is not None and self.live_bytes + size > self.limit:
            raise MemoryError(f"the device has no room for {size} bytes more")
        with self.lanes:
            found = device.arrays().zeros(elements, _word(dtype))
        self._book(size)
        weakref.finalize(found, self._book, -size).atexit = False
        return found

    def put(self, array: np.ndarray) -> Any:
        """A copy of a host array on the device."""
        with self.lanes:
            return device.put(array)

    def _book(self, size: int) -> None:
        with self._started:
            self.live_bytes += size

    def decode_units(self, codec: Codec, jobs: Sequence[Job]) -> None:
        """See `Backend.decode_units`."""
        _check_places(jobs)
        # The simulator runs one kernel at a time; on a device, threads share a stream.
        with self._lock if device.is_simulated() else contextlib.nullcontext(), self.lanes:
            decoder = self._decoder(codec)
            plain: list[int] = []
            if decoder is not None:
                plain = [i for i, job in enumerate(jobs) if decoder.references or job.reference is None]
            left = set(range(len(jobs))) - set(plain)
            if decoder is not None:
                for at in range(0, len(plain), _MOST_UNITS):
                    some = plain[at : at + _MOST_UNITS]
                    left |= {some[i] for i in decoder.decode([jobs[i] for i in some])}
            self._decode_left(codec, [jobs[i] for i in sorted(left)])

    def encode_units(self, codec: Codec, jobs: Sequence[EncodeJob]) -> list[bytes]:
        """See `Backend.encode_units`."""
        found: list[bytes | None] = [None] * len(jobs)
        with self._lock, self.lanes:
            encoder = self._encoder(codec)
            if encoder is not None and jobs:
                found = encoder.encode(jobs)
        left = [i for i, payload in enumerate(found) if payload is None]
        for i, payload in zip(left, codec.encode_many([jobs[i] for i in left]), strict=True):
            found[i] = payload
        return [payload for payload in found if payload is not None]

    def encode_span(
        self, codec: Codec, prepared: Codec, unit: Unit, arrays: Sequence[KeyValue],
        reference: Sequence[KeyValue] | None,
    ) -> bytes:  # fmt: skip
        """See `Backend.encode_span`."""
        if reference is None and isinstance(prepared, TransformCodec):
            with self._lock, self.lanes:
                encoder = self._encoder(codec)
                found = None if encoder is None else encoder.encode_span(prepared, unit, arrays)
            if found is not None:
                return bytes(found)
        return prepared.encode_span(unit, arrays, reference)

    def to_host(self, words: Any) -> np.ndarray:
        """See `Backend.to_host`."""
        with self.lanes:
            return device.get(words)

    def _decoder(self, codec: Codec) -> UnitDecoder | None:
        # The codec is kept beside its decoder, so that no other one gets its identity.
        with self._started:
            if id(codec) not in self._decoders:
                self._decoders[id(codec)] = codec, decoder_of(codec)
            return self._decoders[id(codec)][1]

    def _encoder(self, codec: Codec) -> Any:
        if id(codec) not in self._encoders:
            self._encoders[id(codec)] = encoder_of(codec, self._decoder(codec))
        return self._encoders[id(codec)]

    def _decode_left(self, codec: Codec, jobs: Sequence[Job]) -> None:
        from pltpack.gpu.copies import put_words

        for job, arrays in zip(jobs, decode_on_host(codec, jobs), strict=True):
            put_words(job, arrays)


def select(name: str) -> Backend:
    """The backend called ``"cpu"``, ``"cuda"`` or ``"cuda:N"``; ``"auto"`` is CUDA where it can run, else the CPU.

    Raises
    ------
    UnsupportedError
        If the name is another one, or CUDA cannot run; the message says what to install.
    """
    kind, _, number = name.partition(":")
    if name == "cpu" or (name == "auto" and (device.missing() is not None or device.is_simulated())):
        return CpuBackend()
    if name == "auto" or (kind == "cuda" and (number.isdecimal() or name == "cuda")):
        return CudaBackend(int(number or 0))
    raise UnsupportedError(f"device {name!r} is none of cpu, cuda, cuda:N and auto")


def decoder_of(codec: Codec) -> UnitDecoder | None:
    """The kernels' side of a started codec; None if it has none, or its state does not fit a device."""
    from pltpack.gpu.group_units import GroupDecoder
    from pltpack.gpu.lossless_units import LosslessDecoder
    from pltpack.gpu.spectrum_units import SpectrumDecoder
    from pltpack.gpu.sphere_units import SphereDecoder

    kinds: dict[type[Codec], Any] = {GroupCodec: GroupDecoder, LosslessCodec: LosslessDecoder,
                                     TransformCodec: SpectrumDecoder, TurboQuantCodec: SphereDecoder}  # fmt: skip
    kind = kinds.get(type(codec))
    try:
        return None if kind is None else kind(codec)
    except UnsupportedError:
        return None


def encoder_of(codec: Codec, decoder: UnitDecoder | None) -> Any:
    """The kernels' side of a started codec, for encoding: a `UnitEncoder`, or a `SpectrumEncoder`; None for none."""
    from pltpack.gpu.group_encode import GroupEncoder
    from pltpack.gpu.lossless_units import LosslessDecoder, LosslessEncoder
    from pltpack.gpu.spectrum_encode import SpectrumEncoder
    from pltpack.gpu.sphere_units import SphereDecoder, SphereEncoder

    # What does not fit a device for decoding does not for encoding either.
    if isinstance(decoder, LosslessDecoder) and isinstance(codec, LosslessCodec):
        return LosslessEncoder(codec, decoder)
    if isinstance(decoder, SphereDecoder):
        return SphereEncoder(decoder)
    if decoder is not None and isinstance(codec, GroupCodec):
        return GroupEncoder(codec)
    if decoder is not None and isinstance(codec, TransformCodec):
        return SpectrumEncoder(codec)
    return None


def decode_on_host(codec: Codec, jobs: Sequence[Job]) -> list[list[KeyValue]]:
    """What the codec gives on the CPU, per job and layer ``[H, T, D]``; `ValueError` as of `Codec.decode`."""
    out: list[list[KeyValue]] = []
    for job in jobs:
        layers = job.unit.layers or (job.unit.geometry,)
        out.append([_fresh(layer, job.unit.tokens) for layer in layers])
    if codec.spans:
        for job, arrays in zip(jobs, out, strict=True):
            codec.decode_span(job.payload, job.unit, arrays, job.reference)
    else:
        codec.decode_many([
            DecodeJob(job.payload, job.unit, *arrays[0], None if job.reference is None else job.reference[0])
            for job, arrays in zip(jobs, out, strict=True)
        ])  # fmt: skip
    return out


def _check_places(jobs: Sequence[Job]) -> None:
    for job in jobs:
        layers = job.unit.layers or (job.unit.geometry,)
        if len(layers) != len(job.places):
            raise UnsupportedError(f"a unit of {len(layers)} layers has {len(job.places)} places")
        for g, where in zip(layers, job.places, strict=True):
            if where.words.dtype != _word(g.dtype):
                raise UnsupportedError(f"words of {g.dtype} do not fit in a buffer of {where.words.dtype}")
            for pages, dim in ((where.keys, g.k_dim), (where.values, g.v_dim)):
                if pages.extent(g.heads, job.slot + job.unit.tokens, dim) > where.words.size:
                    raise UnsupportedError("a unit's place reaches beyond its buffer")


def _fresh(layer: LayerGeometry, tokens: int) -> KeyValue:
    dtype = DTYPES[layer.dtype]
    return np.empty((layer.heads, tokens, layer.k_dim), dtype), np.empty((layer.heads, tokens, layer.v_dim), dtype)


def _word(dtype: str) -> np.dtype[Any]:
    return np.dtype(f"u{DTYPES[dtype].itemsize}")


def _word_of(array: np.ndarray) -> np.dtype[Any]:
    return np.dtype(f"u{array.dtype.itemsize}")


def _addresses(pages: Pages, array: np.ndarray, slot: int) -> np.ndarray:
    heads, tokens, dim = array.shape
    slots = slot + np.arange(tokens)
    table = np.asarray(pages.pages, np.int64)
    at = table[slots // pages.block] * pages.page_stride + slots % pages.block * pages.token_stride
    first = pages.base + np.arange(heads)[:, None] * pages.head_stride + at
    return first[:, :, None] + np.arange(dim)
