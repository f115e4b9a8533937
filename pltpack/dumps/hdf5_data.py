"""Where an HDF5 dataset's bytes are, and how to read them without the HDF5 library.

The library finds the data (offsets, chunks, filters); the data itself is read and decoded here, because the library's
filters trust their input: a checksummed chunk of two bytes crashes it, and a deflated one may swell without bound.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import zlib
from typing import Any

import numpy as np

from pltpack.dumps.safetensors_header import read_into
from pltpack.errors import DumpError, UnsupportedError

_DEFLATE, _SHUFFLE, _FLETCHER32 = 1, 2, 3
_FILTERS = {_DEFLATE: "deflate", _SHUFFLE: "shuffle", _FLETCHER32: "fletcher32"}
_MAX_CHUNK = 256 << 20
# Deflate cannot expand data further than this.
_MAX_EXPANSION = 1032
_CHECKSUM_BYTES = 4
_SHUT = "has a chunk that its filters cannot decode"


@dataclasses.dataclass(frozen=True, slots=True)
class StoredArray:
    """A dataset's shape, and the place of its bytes in the file.

    Attributes
    ----------
    shape : tuple of int
    dtype : numpy.dtype
        As stored, byte order included.
    chunk : tuple of int
        Shape of a chunk; the whole shape if the data is contiguous.
    places : dict
        Chunk coordinates to (file offset, stored bytes, mask of skipped filters).
    filters : tuple of int
        HDF5 filter numbers, in the order in which they were applied.
    content : bytes or None
        The data itself if it is stored in the object header.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunk: tuple[int, ...]
    places: dict[tuple[int, ...], tuple[int, int, int]]
    filters: tuple[int, ...] = ()
    content: bytes | None = None

    def read(self, fd: int, path: str, start: int, stop: int, axis: int) -> np.ndarray:
        """Part ``start:stop`` along one axis, in native byte order.

        Raises
        ------
        DumpError
            If the file ends early or a chunk does not decode to its size.
        """
        spans = [(0, size) for size in self.shape]
        spans[axis] = (start, stop)
        out = np.empty([last - first for first, last in spans], self.dtype)
        cells = (range(a // c, -(-b // c)) if b > a else () for (a, b), c in zip(spans, self.chunk, strict=True))
        for cell in itertools.product(*cells):
            block = self._block(fd, path, cell)
            source, target = [], []
            for index, (first, last), size in zip(cell, spans, self.chunk, strict=True):
                low, high = max(first, index * size), min(last, (index + 1) * size)
                source.append(slice(low - index * size, high - index * size))
                target.append(slice(low - first, high - first))
            out[tuple(target)] = block[tuple(source)]
        return out.astype(self.dtype.newbyteorder("="), copy=False)

    def _block(self, fd: int, path: str, cell: tuple[int, ...]) -> np.ndarray:
        if self.content is not None:
            return np.frombuffer(self.content, self.dtype).reshape(self.chunk)
        offset, size, mask = self.places[cell]
        raw = np.empty(size, np.uint8)
        read_into(fd, offset, raw.data, path)
        expected = math.prod(self.chunk) * self.dtype.itemsize
        for number in reversed(range(len(self.filters))):
            if not mask >> number & 1:
                raw = _undo(self.filters[number], raw, expected, self.dtype.itemsize)
        if raw.size != expected:
            raise DumpError(_SHUT)
        return raw.view(self.dtype).reshape(self.chunk)


def locate(dataset: Any, axes: int | None) -> StoredArray:
    """Find a dataset's bytes, and check that they are all there.

    Parameters
    ----------
    dataset : h5py.Dataset
    axes : int or None
        Expected number of axes; None for 1 or 2.

    Raises
    ------
    DumpError
        If it reaches outside the file, or declares more than the file stores.
    UnsupportedError
        If it uses other filters than deflate, shuffle and fletcher32.
    """
    shape, dtype = dataset.shape, dataset.dtype
    if shape is None or len(shape) not in ((1, 2) if axes is None else (axes,)):
        raise DumpError(f"{dataset.name} has the shape {shape}")
    if dtype.kind not in "iuf" or dtype.itemsize > 8:
        raise DumpError(f"{dataset.name} is not numeric")
    plist = dataset.id.get_create_plist()
    if dataset.is_virtual or plist.get_external_count():
        raise DumpError(f"{dataset.name} keeps its data in other files, which are not followed")
    filters = tuple(plist.get_filter(index)[0] for index in range(plist.get_nfilters()))
    for code in filters:
        if code not in _FILTERS:
            raise UnsupportedError(f"{dataset.name} uses HDF5 filter {code} (known: {', '.join(_FILTERS.values())})")
    size = math.prod(shape) * dtype.itemsize
    stored = dataset.id.get_storage_size()
    limit = stored * (_MAX_EXPANSION if _DEFLATE in filters else 1)
    end = os.stat(dataset.file.filename).st_size
    if stored > end or size > limit:
        raise DumpError(f"{dataset.name} declares {size} bytes but stores {stored}")
    if dataset.chunks is not None:
        array = StoredArray(shape, dtype, dataset.chunks, _chunk_places(dataset, dtype), filters)
    else:
        array = _one_block(dataset, shape, dtype, size)
    if any(offset + length > end for offset, length, _ in array.places.values()):
        raise DumpError(f"{dataset.name} has data beyond the file's end")
    return array


def _one_block(dataset: Any, shape: tuple[int, ...], dtype: np.dtype[Any], size: int) -> StoredArray:
    whole = tuple(max(1, axis) for axis in shape)
    offset = dataset.id.get_offset()
    if size and offset is None:
        # Compact storage: at most 64 KiB, inside the object header that the library has read already.
        return StoredArray(shape, dtype, whole, {}, content=dataset[()].tobytes())
    return StoredArray(shape, dtype, whole, {(0,) * len(shape): (offset or 0, size, 0)})


def _chunk_places(dataset: Any, dtype: np.dtype[Any]) -> dict[tuple[int, ...], tuple[int, int, int]]:
    chunk = dataset.chunks
    if not all(chunk) or math.prod(chunk) * dtype.itemsize > _MAX_CHUNK:
        raise UnsupportedError(f"{dataset.name} has chunks of more than {_MAX_CHUNK} bytes")
    places: dict[tuple[int, ...], tuple[int, int, int]] = {}

    def note(info: Any) -> None:
        cell = tuple(at // size for at, size in zip(info.chunk_offset, chunk, strict=True))
        places[cell] = (info.byte_offset, info.size, info.filter_mask)

    if dataset.size:
        dataset.id.chunk_iter(note)
    grid = [range(-(-axis // size)) for axis, size in zip(dataset.shape, chunk, strict=True)]
    wanted = math.prod(len(axis) for axis in grid)
    if wanted > len(places) or not all(cell in places for cell in itertools.product(*grid)):
        raise DumpError(f"{dataset.name} lacks {max(1, wanted - len(places))} of {wanted} chunks")
    return places


def _undo(code: int, raw: np.ndarray, expected: int, item: int) -> np.ndarray:
    if code == _SHUFFLE:
        if raw.size % item:
            raise DumpError(_SHUT)
        return np.ascontiguousarray(raw.reshape(item, -1).T).reshape(-1)
    if code == _FLETCHER32:
        return _checked(raw)
    inflater = zlib.decompressobj()
    try:
        data = inflater.decompress(raw.data, expected + _CHECKSUM_BYTES)
    except zlib.error:
        raise DumpError(_SHUT) from None
    if not inflater.eof:
        raise DumpError(_SHUT)
    return np.frombuffer(data, np.uint8)


def _checked(raw: np.ndarray) -> np.ndarray:
    """Take the Fletcher-32 checksum off, after comparing it (HDF5's variant: big-endian words, modulo 65535)."""
    if raw.size < _CHECKSUM_BYTES:
        raise DumpError(_SHUT)
    data, tail = raw[:-_CHECKSUM_BYTES], raw[-_CHECKSUM_BYTES:]
    even = np.concatenate([data, np.zeros(1, np.uint8)]) if data.size % 2 else data
    words = np.ascontiguousarray(even).view(">u2").astype(np.uint64)
    weights = np.arange(words.size, 0, -1, dtype=np.uint64) % 65535
    low, high = int(words.sum()) % 65535, int((words * weights).sum()) % 65535
    said = int.from_bytes(tail.tobytes(), "little")
    if (said & 0xFFFF) % 65535 != low or (said >> 16) % 65535 != high:
        raise DumpError("has a chunk with a wrong checksum")
    return data
