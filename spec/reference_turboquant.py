"""Section "turboquant" of spec/codecs.md, for the reference decoder: numpy, zstandard and the standard library only.

Keys and values are words, unsigned integers ``[H, T, D]``, of their dtype throughout.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from reference_numbers import (
    LARGEST,
    SINKS,
    KeyValue,
    Reader,
    Unit,
    need,
    only_arrays,
    state_array,
    to_float,
    to_words,
)


class TurboQuant:
    """Section "turboquant"."""

    def __init__(self, config: dict[str, Any], state: dict[str, np.ndarray], identity: dict[str, Any]) -> None:
        need(set(config) == {"bits", "seed"} and type(config["bits"]) is int and type(config["seed"]) is int
             and 2 <= config["bits"] <= 4 and 0 <= config["seed"] < 1 << 32,
             "codec 'turboquant' does not take this configuration")  # fmt: skip
        self.bits, self.seed = config["bits"], config["seed"]
        dims = {layer[name] for layer in identity["layers"] for name in ("k_dim", "v_dim")}
        only_arrays(state, {f"levels.{dim}" for dim in dims})
        self.levels = {dim: state_array(state, f"levels.{dim}", "f4", 1 << self.bits) for dim in dims}
        for levels in self.levels.values():
            need((np.abs(levels) <= 2).all() and (np.diff(levels) > 0).all(), "levels are not strictly ascending")

    def decode(self, payload: bytes, unit: Unit, reference: KeyValue | None) -> KeyValue:
        """Decode one unit; the reference is ignored."""
        reader, heads, dims = Reader(payload), unit.heads, (unit.k_dim, unit.v_dim)
        sinks = min(max(SINKS - unit.position, 0), unit.tokens)
        count = reader.u32()
        need(count <= unit.tokens - sinks, "number of escapes is out of range")
        escapes = reader.array("<u4", count).astype(np.int64)
        need((np.diff(escapes, prepend=sinks - 1, append=unit.tokens) > 0).all(), "escapes are not ascending")
        exact = np.concatenate([np.arange(sinks), escapes])
        coded = np.setdiff1d(np.arange(unit.tokens), exact)
        raw = [reader.array(unit.word, heads, len(exact), dim) for dim in dims]
        norms = [reader.array("<u2", heads, len(coded)) for _ in dims]
        out = []
        for part, dim in enumerate(dims):
            total = heads * len(coded) * dim
            packed = reader.array("u1", -(-total * self.bits // 8))
            bits = np.unpackbits(packed, bitorder="little")
            need(not bits[total * self.bits :].any(), "padding bits are set")
            need((norms[part] < 0x7F80).all(), "a norm is negative or not finite")
            digits = bits[: total * self.bits].reshape(-1, self.bits).astype(np.int64) << np.arange(self.bits)
            vectors = self.levels[dim][digits.sum(axis=1)].reshape(-1, dim)
            with np.errstate(over="ignore"):
                vectors = self.rotate_back(vectors) * to_float(norms[part], "BF16").reshape(-1, 1)
            limit = np.float32(LARGEST[unit.dtype])
            words = np.empty((heads, unit.tokens, dim), unit.word)
            words[:, exact] = raw[part]
            words[:, coded] = to_words(np.clip(vectors, -limit, limit), unit.dtype).reshape(heads, -1, dim)
            out.append(words)
        reader.end()
        return out[0], out[1]

    def rotate_back(self, vectors: np.ndarray) -> np.ndarray:
        """Undo the rotation of binary32 vectors ``[n, D]``."""
        dim = vectors.shape[1]
        size = 1 << (dim.bit_length() - 1)
        for first, second, perm in self.rounds(dim, size < dim)[::-1]:
            if size < dim:
                vectors[:, dim - size :] = self.hadamard(vectors[:, dim - size :])
                vectors = vectors * second
            vectors[:, :size] = self.hadamard(vectors[:, :size])
            if size < dim:
                moved = np.empty_like(vectors)
                moved[:, perm] = vectors
                vectors = moved
            vectors = vectors * first
        return vectors

    @staticmethod
    def hadamard(x: np.ndarray) -> np.ndarray:
        """A Hadamard step on vectors ``[n, Q]``."""
        count, size = x.shape
        h = 1
        while h < size:
            pairs = x.reshape(count, size // (2 * h), 2, h)
            x = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], axis=2)
            x = x.reshape(count, size)
            h *= 2
        return x * np.float32(1 / math.sqrt(size)) if size > 1 else x

    def rounds(self, dim: int, whole: bool) -> list[tuple[np.ndarray, np.ndarray, list[int]]]:
        """First signs, second signs and permutation of the four rounds; only first signs unless `whole`."""
        mask, number = (1 << 64) - 1, 0

        def draw() -> int:
            nonlocal number
            number += 1
            z = ((self.seed << 32) + dim + number * 0x9E3779B97F4A7C15) & mask
            z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & mask
            z = ((z ^ z >> 27) * 0x94D049BB133111EB) & mask
            return z ^ z >> 31

        def signs() -> np.ndarray:
            return np.array([-1.0 if draw() >> 63 else 1.0 for _ in range(dim)], np.float32)

        out = []
        for _ in range(4):
            first, perm = signs(), list(range(dim))
            second = signs() if whole else first
            for i in range(dim - 1, 0, -1) if whole else ():
                j = (draw() >> 32) * (i + 1) >> 32
                perm[i], perm[j] = perm[j], perm[i]
            out.append((first, second, perm))
        return out
