"""What general tools make of the same dumps: zstd, byte-shuffled zstd, and a cast to fp8.

Each baseline is given whole dump files, tokens and headers included, and gives the number of bytes it would store.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import zstandard

#: Numpy dtypes of the tensors in the dumps by their safetensors names.
DTYPES = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32, "I32": np.int32}


def tensors(path: Path) -> dict[str, np.ndarray]:
    """All tensors of a safetensors file; a reader of its own, so that pltpack's is not checked against itself."""
    raw = path.read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + length])
    found = {}
    for name, entry in header.items():
        if name != "__metadata__":
            start, stop = entry["data_offsets"]
            data = raw[8 + length + start : 8 + length + stop]
            found[name] = np.frombuffer(data, DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return found


def cache_tensors(path: Path) -> dict[str, np.ndarray]:
    """The keys and values among `tensors`."""
    return {name: array for name, array in tensors(path).items() if name.startswith("layers.")}


def cache_size(paths: Sequence[Path]) -> tuple[int, int]:
    """Bytes and elements of all keys and values in the dumps."""
    arrays = [array for path in paths for array in cache_tensors(path).values()]
    return sum(array.nbytes for array in arrays), sum(array.size for array in arrays)


def zstd(level: int) -> Callable[[Sequence[Path]], int]:
    """zstd of each dump on its own."""
    return lambda paths: sum(
        len(zstandard.ZstdCompressor(level=level, threads=-1).compress(p.read_bytes())) for p in paths
    )


def zstd_long(paths: Sequence[Path]) -> int:
    """zstd -19 of all dumps in one stream with a window over all of them, which finds equal prefixes."""
    settings = zstandard.ZstdCompressionParameters.from_level(19, window_log=27, enable_ldm=True, threads=-1)
    stream = b"".join(path.read_bytes() for path in paths)
    return len(zstandard.ZstdCompressor(compression_params=settings).compress(stream))


def zstd_shuffled(paths: Sequence[Path]) -> int:
    """zstd -3 of each dump with the bytes of every tensor sorted by significance: all low bytes, then all high ones."""
    return sum(len(zstandard.ZstdCompressor(level=3, threads=-1).compress(shuffled(path))) for path in paths)


def shuffled(path: Path) -> bytes:
    """A dump's header and its tensors, byte plane after byte plane."""
    header = path.read_bytes()[: 8 + struct.unpack("<Q", path.read_bytes()[:8])[0]]
    planes = [np.ascontiguousarray(_bytes(array).T).tobytes() for array in tensors(path).values()]
    return header + b"".join(planes)


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.frombuffer(array.tobytes(), np.uint8).reshape(-1, array.itemsize)


def fp8(paths: Sequence[Path]) -> int:
    """The same files with keys and values in fp8 e4m3: one byte per element, tokens and headers as they are."""
    raw, elements = cache_size(paths)
    return sum(path.stat().st_size for path in paths) - raw + elements


BASELINES: Mapping[str, Callable[[Sequence[Path]], int]] = {
    "zstd -3": zstd(3),
    "zstd -19": zstd(19),
    "zstd -19 --long, joined": zstd_long,
    "byte-shuffled, zstd -3": zstd_shuffled,
    "fp8 e4m3 cast": fp8,
}
