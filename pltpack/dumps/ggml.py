"""Numbers as ggml stores them: its cache types, block quantization, and the Hadamard rotation of quantized caches.

``q8_0``: 32 values share a binary16 scale d; value = d·q, q int8. ``q4_0``: 32 values, d, and 16 bytes of nibbles of
which the low ones come first; value = d·(q − 8). llama.cpp multiplies keys and values of quantized caches by an
orthonormal Walsh-Hadamard matrix, which is its own inverse, where the head dimension is a multiple of 64; files do not
say whether it did (``LLAMA_ATTN_ROT_DISABLE``). Source: ggml-quants.c, llama-kv-cache.cpp.
"""

from __future__ import annotations

import functools

import numpy as np

#: Cache dtypes of snapshots by ggml's type numbers.
PLAIN = {0: "F32", 1: "F16", 30: "BF16"}
#: Block-quantized types.
QUANTIZED = {8: "q8_0", 2: "q4_0"}
TYPES = {**{name: number for number, name in PLAIN.items()}, **{name: number for number, name in QUANTIZED.items()}}
#: Names of other cache types, for messages.
OTHERS = {3: "q4_1", 6: "q5_0", 7: "q5_1", 20: "iq4_nl", 39: "mxfp4"}

BLOCK = 32
#: Bytes of a block's integers.
INTEGERS = {"q8_0": 32, "q4_0": 16}


def split_rows(rows: np.ndarray, scheme: str) -> tuple[np.ndarray, np.ndarray]:
    """Scales ``[T, B]`` binary16 and integers ``[T, B, bytes]`` uint8 of rows ``[T, row bytes]`` uint8."""
    blocks = rows.reshape(len(rows), -1, 2 + INTEGERS[scheme])
    return np.ascontiguousarray(blocks[..., :2]).view("<f2")[..., 0], blocks[..., 2:]


def join_rows(scales: np.ndarray, integers: np.ndarray) -> np.ndarray:
    """Inverse of `split_rows`."""
    heads = np.ascontiguousarray(scales, "<f2")[..., None].view(np.uint8)
    return np.concatenate([heads, integers], axis=-1).reshape(len(scales), -1)


def dequantize(scales: np.ndarray, integers: np.ndarray, scheme: str) -> np.ndarray:
    """Values binary32 ``[..., B * 32]`` of scales ``[..., B]`` and integers uint8 ``[..., B, bytes]``."""
    if scheme == "q8_0":
        levels = integers.view(np.int8).astype(np.float32)
    else:
        levels = np.concatenate([integers & 15, integers >> 4], axis=-1).astype(np.float32) - 8
    with np.errstate(invalid="ignore", over="ignore"):
        values = levels * scales.astype(np.float32)[..., None]
    return values.reshape(*scales.shape[:-1], -1)


def quantize(values: np.ndarray, scheme: str) -> tuple[np.ndarray, np.ndarray]:
    """Scales and integers of values binary32 ``[..., n]``, n a multiple of 32, as ggml's reference rounds them."""
    blocks = values.astype(np.float32).reshape(*values.shape[:-1], -1, BLOCK)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        if scheme == "q8_0":
            step = np.abs(blocks).max(-1) / np.float32(127)
        else:
            largest = np.take_along_axis(blocks, np.abs(blocks).argmax(-1)[..., None], -1)[..., 0]
            step = largest / np.float32(-8)
        scaled = blocks * np.where(step != 0, 1 / step, np.float32(0))[..., None].astype(np.float32)
        if scheme == "q8_0":
            # Halves are rounded away from zero, as C's roundf does.
            levels = np.clip(np.trunc(scaled + np.copysign(np.float32(0.5), scaled)), -127, 127)
            integers = levels.astype(np.int8).view(np.uint8)
        else:
            levels = np.clip(np.trunc(scaled + np.float32(8.5)), 0, 15).astype(np.uint8)
            integers = levels[..., :16] | (levels[..., 16:] << 4)
        return step.astype("<f2"), integers


@functools.cache
def _hadamard(size: int) -> np.ndarray:
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.float32(np.sqrt(size))


def hadamard_sizes(k_dim: int, v_dim: int) -> tuple[int, int] | None:
    """Sizes of the matrices that llama.cpp multiplies keys and values with; None where it does not."""
    if k_dim % 64 or v_dim % 64:
        return None
    size = 64
    while k_dim % (2 * size) == 0:
        size *= 2
    return size, 64


def rotated(values: np.ndarray, size: int) -> np.ndarray:
    """Values binary32 ``[..., D]``, each run of `size` channels multiplied by the Hadamard matrix, or back."""
    runs = values.reshape(-1, size) @ _hadamard(size)
    return np.asarray(runs.reshape(values.shape), np.float32)


def looks_rotated(samples: list[np.ndarray], size: int) -> bool | None:
    """Whether keys binary32 ``[T, D]`` of single heads are Hadamard-rotated; None where they do not tell.

    Channels of keys differ much in energy, and a Hadamard matrix evens them out: so the form whose energies are more
    concentrated is the natural one.
    """
    with np.errstate(all="ignore"):
        as_is = sum(_concentration(sample) for sample in samples)
        turned = sum(_concentration(rotated(sample, size)) for sample in samples)
    if not (np.isfinite(as_is) and np.isfinite(turned)) or max(as_is, turned) < 1.5 * min(as_is, turned):
        return None
    return bool(turned > as_is)


def _concentration(values: np.ndarray) -> float:
    energy = np.square(values, dtype=np.float64).sum(0)
    total = float(energy.sum())
    return float(np.square(energy / total).sum()) if total > 0 else 1 / len(energy)
