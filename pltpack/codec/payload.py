"""Reading untrusted payloads: a cursor that cannot leave its buffer, and zstd frames of a known size."""

from __future__ import annotations

import struct
import threading

import numpy as np
import zstandard

#: Part of the bitstream's determinism: one level for all frames inside payloads.
ZSTD_LEVEL = 3


class _Zstd(threading.local):
    """Contexts of a thread, which take longer to make than a small frame does."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL)
        self.decompressor = zstandard.ZstdDecompressor()


_zstd = _Zstd()


class Reader:
    """A cursor over a payload; every read past the end is a `ValueError`."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = memoryview(data).cast("B")
        self._at = 0

    def take(self, count: int) -> memoryview:
        """The next `count` bytes."""
        if not 0 <= count <= len(self._data) - self._at:
            raise ValueError("payload is truncated")
        self._at += count
        return self._data[self._at - count : self._at]

    def rest(self) -> memoryview:
        """All bytes that are left."""
        return self.take(len(self._data) - self._at)

    def u8(self) -> int:
        """The next byte."""
        return self.take(1)[0]

    def u32(self) -> int:
        """The next 4 bytes, little-endian."""
        return int(struct.unpack("<I", self.take(4))[0])

    def array(self, count: int, dtype: str) -> np.ndarray:
        """The next `count` items, read-only; `dtype` gives the byte order. May be unaligned."""
        kind = np.dtype(dtype)
        out = np.frombuffer(self.take(count * kind.itemsize), dtype=kind)
        out.flags.writeable = False
        return out

    def end(self) -> None:
        """Check that nothing is left."""
        if self._at != len(self._data):
            raise ValueError("payload has trailing bytes")


def squeeze(data: bytes | memoryview) -> bytes:
    """One zstd frame that records its content size."""
    return _zstd.compressor.compress(data)


def declared_size(frame: memoryview) -> int:
    """The content size that a zstd frame records (-1 if it does not); `ValueError` if there is no frame."""
    try:
        return int(zstandard.frame_content_size(frame))
    except zstandard.ZstdError:
        raise ValueError("zstd frame is damaged") from None


def expand(frame: memoryview, size: int) -> bytes:
    """Decompress one zstd frame that must hold exactly `size` bytes.

    Raises
    ------
    ValueError
        If the frame is damaged, holds another number of bytes, or is followed by others.
    """
    # The declared size decides the allocation, so it is compared before anything is decompressed.
    if declared_size(frame) != size:
        raise ValueError("zstd frame has an unexpected size")
    try:
        data = _zstd.decompressor.decompress(frame, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError:
        raise ValueError("zstd frame is damaged") from None
    if len(data) != size:
        raise ValueError("zstd frame is truncated")
    return data
