"""What the tests of the loader and of warm starts share."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np

from pltpack.archive.shard import Shard


def bits(array) -> np.ndarray:
    """An array's words, contiguous, so that NaNs compare."""
    array = np.ascontiguousarray(array)
    return array.view(f"u{array.dtype.itemsize}")


def same(loaded, snapshot, tokens: int) -> bool:
    """Whether loaded layers are the first tokens of a snapshot, bit by bit."""
    layers = range(len(snapshot.identity.layers))
    return [layer.layer for layer in loaded] == list(layers) and all(
        np.array_equal(bits(mine), bits(theirs))
        for layer in loaded
        for mine, theirs in zip(layer[1:], snapshot.layer(layer.layer, 0, tokens), strict=True)
    )


def damage(shard: Shard, unit: int) -> Path:
    """Change a byte in the middle of a unit's payload, on disk."""
    record = shard.units[unit]
    at = shard.container._payload_at + int(record["offset"]) + int(record["length"]) // 2
    with open(shard.container.path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))
    return shard.container.path


def open_files() -> int:
    """Descriptors that this process holds."""
    return len(os.listdir("/proc/self/fd"))


def loader_threads() -> list[str]:
    """Names of the threads that loads have left running."""
    return [t.name for t in threading.enumerate() if t.name.startswith("pltpack-")]
