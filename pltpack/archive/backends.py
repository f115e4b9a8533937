"""Where an archive's units are decoded and encoded: by the codecs themselves, or by a device in their place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pltpack.codec.base import Codec

if TYPE_CHECKING:
    from pltpack.gpu.backend import Backend


def backend_of(device: str) -> Backend | None:
    """The backend called ``cpu``, ``cuda``, ``cuda:N`` or ``auto``; None for the CPU's own codecs.

    Raises
    ------
    UnsupportedError
        If the name is another one, or CUDA cannot run; the message says what to install.
    """
    if device == "cpu":
        return None
    from pltpack.gpu.backend import select

    found = select(device)
    return None if found.name == "cpu" else found


def placed(codec: Codec, backend: Backend | None) -> Codec:
    """A started codec, or what stands for it where its units go to a device."""
    if backend is None:
        return codec
    from pltpack.gpu.codec import DeviceCodec

    return DeviceCodec(codec, backend)
