"""Units on their way to a device, whatever their codec: payloads in one buffer, places, and what came of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from pltpack.codec.base import KeyValue, Unit
from pltpack.gpu import device
from pltpack.gpu.place import Pages


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
    """

    payload: memoryview
    unit: Unit
    places: tuple[LayerPlace, ...]
    slot: int = 0
    reference: Sequence[KeyValue] | None = None


class Staged:
    """Payloads of several units, one after the other, on the host and on the device.

    Attributes
    ----------
    host : ndarray
        uint8; `data` is its copy on the device.
    offsets : ndarray
        int64 ``[n + 1]``.
    """

    def __init__(self, payloads: Sequence[memoryview]) -> None:
        sizes = [len(payload) for payload in payloads]
        self.offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        # Kernels look at whole words: eight bytes more than there are.
        self.host = device.staging(int(self.offsets[-1]) + 8)
        for payload, at in zip(payloads, self.offsets.tolist(), strict=False):
            self.host[at : at + len(payload)] = np.frombuffer(payload, np.uint8)
        self.host[self.offsets[-1] :] = 0
        device.mark("read payloads")
        self.data = device.put(self.host)
        device.mark("copy to device")


class UnitDecoder(Protocol):
    """Decodes the units of one started codec on the device."""

    def decode(self, jobs: Sequence[Job]) -> list[int]:
        """Decode what this decoder can; give the numbers of the jobs that it left, untouched or to be redone.

        A job is left if its unit is of a kind without kernels, or if it is damaged: the codec on the CPU then says
        what is wrong with it.
        """
        ...
