"""Units on their way to a device, whatever their codec: payloads in one buffer, places, and what came of them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from pltpack.codec.base import EncodeJob, KeyValue, Unit
from pltpack.gpu import device
from pltpack.gpu.lanes import current
from pltpack.gpu.place import Pages
from pltpack.snapshot import LayerGeometry


class LayerPlace(NamedTuple):
    """Where one layer of a unit goes: a device buffer of words (unsigned, one-dimensional), keys' and values' pages."""

    words: Any
    keys: Pages
    values: Pages


@dataclasses.dataclass(frozen=True)
class Job:
    """One unit to decode.

    Attributes
    ----------
    payload : bytes-like
        Has passed its checksum; still untrusted.
    unit : Unit
    places : tuple of LayerPlace
        One per layer of the unit.
    slot : int
        Slot of the unit's first token in the pages.
    reference : sequence of (ndarray, ndarray), optional
        For a unit with the reference flag: mapped values on the host, one pair of ``[H, T, D]`` a layer.
    kept : array, optional
        The payload's copy on the device, uint8, where there is one already.
    """

    payload: memoryview
    unit: Unit
    places: tuple[LayerPlace, ...]
    slot: int = 0
    reference: Sequence[KeyValue] | None = None
    kept: Any = None


class Staged:
    """Payloads of several units, one after the other, on the host and on the device.

    Parameters
    ----------
    payloads : sequence of memoryview
    kept : sequence of array or None, optional
        Copies of the first of them that are on the device already, uint8.

    Attributes
    ----------
    host : ndarray
        uint8; `data` is its copy on the device.
    offsets : ndarray
        int64 ``[n + 1]``.
    """

    def __init__(self, payloads: Sequence[memoryview], kept: Sequence[Any] = ()) -> None:
        sizes = [len(payload) for payload in payloads]
        self.offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        # Kernels look at whole words: eight bytes more than there are.
        lanes = current()
        size = int(self.offsets[-1]) + 8
        self.host = device.staging(size) if lanes is None else lanes.buffer(size)
        for payload, at in zip(payloads, self.offsets.tolist(), strict=False):
            self.host[at : at + len(payload)] = np.frombuffer(payload, np.uint8)
        self.host[self.offsets[-1] :] = 0
        device.mark("read payloads")
        upload = device.put if lanes is None else lanes.upload
        self.data = upload(self.host) if all(copy is None for copy in kept) else self._gathered(kept, upload)
        device.mark("copy to device")

    def _gathered(self, kept: Sequence[Any], upload: Callable[[np.ndarray], Any]) -> Any:
        """The payloads on the device, of which only those cross over that are not there."""
        data = device.arrays().empty(self.host.shape, self.host.dtype)
        places = [slice(first, last) for first, last in itertools.pairwise(self.offsets.tolist())]
        parts = [upload(self.host[place]) if copy is None else copy
                 for place, copy in itertools.zip_longest(places, kept)]  # fmt: skip
        for place, part in zip(places, parts, strict=True):
            data[place] = part
        # The copy stream may write to their memory once they are let go.
        self._parts = parts
        data[int(self.offsets[-1]) :] = 0
        return data


def places_of(layers: Sequence[LayerGeometry], tokens: int, words: Any, base: int = 0) -> tuple[LayerPlace, ...]:
    """Contiguous places ``[H, T, D]``, keys and then values, layer after layer in one buffer from `base` on."""
    out = []
    for g in layers:
        keys = Pages.contiguous(g.heads, tokens, g.k_dim, base)
        base += g.heads * tokens * g.k_dim
        out.append(LayerPlace(words, keys, Pages.contiguous(g.heads, tokens, g.v_dim, base)))
        base += g.heads * tokens * g.v_dim
    return tuple(out)


def uploaded(arrays: Sequence[Sequence[KeyValue]], units: Sequence[Unit]) -> tuple[Any, list[tuple[LayerPlace, ...]]]:
    """Units' arrays, all of one dtype, in a device buffer one after the other: the buffer, and places by unit."""
    flat = [array for pairs in arrays for pair in pairs for array in pair]
    word = np.dtype(f"u{flat[0].dtype.itemsize}")
    host = device.staging(word.itemsize * sum(array.size for array in flat)).view(word)
    at = 0
    for array in flat:
        host[at : at + array.size].reshape(array.shape)[...] = array.view(word)
        at += array.size
    words, at, places = device.put(host), 0, []
    for unit in units:
        layers = unit.layers or (unit.geometry,)
        places.append(places_of(layers, unit.tokens, words, at))
        at += unit.tokens * sum(g.elements_per_token for g in layers)
    return words, places


class UnitEncoder(Protocol):
    """Encodes units of one started codec on the device."""

    def encode(self, jobs: Sequence[EncodeJob]) -> list[bytes | None]:
        """Payloads as the codec on the CPU writes them; None for units that are left to it."""
        ...


class UnitDecoder(Protocol):
    """Decodes the units of one started codec on the device."""

    #: Whether it takes units with a reference; else they go to the CPU.
    references: ClassVar[bool] = False

    def decode(self, jobs: Sequence[Job]) -> list[int]:
        """Decode what this decoder can; give the numbers of the jobs that it left, untouched or to be redone.

        A job is left if its unit is of a kind without kernels, or if it is damaged: the codec on the CPU then says
        what is wrong with it.
        """
        ...
