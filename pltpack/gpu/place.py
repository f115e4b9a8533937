"""Between binary32 vectors and cache words where they live: rotation, rounding, and addresses in pages.

A *target* says where the keys or the values of one unit go (or come from): its vectors ``[H, T, D]`` in a binary32
buffer, its rotation, and an affine address in the cache for each token's slot. One grid row (``blockIdx.y``) serves one
target, one warp one vector at a time. On the CPU these are `pltpack.codec.rope`, `rows` and the copies of a loader.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numba import cuda, types

from pltpack.errors import UnsupportedError
from pltpack.gpu import device
from pltpack.gpu.arithmetic import bits_of, clamp, float_of, from_narrow, plus, times, to_bf16, to_narrow
from pltpack.snapshot import DTYPES

# Columns of a table of targets, int64. Strides and places count elements. `TURN` is 0 without rotation, 1 for pairs of
# style half and 2 for neighbours, `HALF` the rotated pairs; the angles of the first token begin at `ANGLE`.
(SOURCE, SOURCE_HEAD, SOURCE_TOKEN, HEADS, TOKENS, DIM, TURN, HALF, ANGLE, BASE, PAGE_STRIDE, TOKEN_STRIDE, HEAD_STRIDE,
 BLOCK, PAGE, SLOT, TARGET_COLUMNS) = range(17)  # fmt: skip

#: dtype -> mantissa bits and exponent bias of its words.
FORMATS = {"F32": (23, 127), "BF16": (7, 127), "F16": (10, 15), "F8_E4M3": (3, 7), "F8_E5M2": (2, 15)}
#: Largest finite numbers.
LARGEST = {name: np.float32(ml_dtypes.finfo(dtype).max) for name, dtype in DTYPES.items()}


@dataclasses.dataclass(frozen=True)
class Pages:
    """Where the tokens of one layer's keys or values are in a buffer of words.

    Slot s is token ``s mod block`` of page ``pages[s div block]``; its head h begins at ``base + page · page_stride +
    token · token_stride + h · head_stride``, all counted in elements.

    Attributes
    ----------
    base, page_stride, token_stride, head_stride : int
    block : int
        Tokens of a page.
    pages : tuple of int
        Page of each block of the session, by the engine's block table.
    """

    base: int
    page_stride: int
    token_stride: int
    head_stride: int
    block: int
    pages: tuple[int, ...]

    @classmethod
    def contiguous(cls, heads: int, tokens: int, dim: int, base: int = 0) -> Pages:
        """An array ``[H, T, D]`` that begins at `base`."""
        return cls(base, 0, dim, tokens * dim, max(tokens, 1), (0,))

    @classmethod
    def vllm(
        cls, layout: str, heads: int, dim: int, block: int, count: int, pages: Sequence[int]
    ) -> tuple[Pages, Pages]:
        """Keys and values of one layer in a vLLM cache of `count` pages.

        Parameters
        ----------
        layout : str
            ``"flash"``: ``[2, pages, block, H, D]``; ``"flashinfer"``: ``[pages, 2, block, H, D]``; and with keys
            before values in the last dimension ``"NHD"``: ``[pages, block, H, 2 D]``, ``"HND"``: ``[pages, H, block,
            2 D]``.
        """
        row, page, table = heads * dim, heads * dim * block, tuple(pages)
        strides = {
            "flash": (count * page, page, row, dim),
            "flashinfer": (page, 2 * page, row, dim),
            "NHD": (dim, 2 * page, 2 * row, 2 * dim),
            "HND": (dim, 2 * page, 2 * dim, 2 * dim * block),
        }
        if layout not in strides:
            raise UnsupportedError(f"vLLM cache layout {layout!r} is not known")
        values, page, token, head = strides[layout]
        return cls(0, page, token, head, block, table), cls(values, page, token, head, block, table)

    @classmethod
    def sglang(
        cls, layout: str, layer: int, layers: int, heads: int, dim: int, block: int, count: int, pages: Sequence[int]
    ) -> tuple[Pages, Pages]:
        """Keys and values of one layer in an SGLang host pool (HiCache) of `count` pages.

        Parameters
        ----------
        layout : str
            ``"layer_first"``: ``[2, L, pages · block, H, D]``; ``"page_first"``: ``[2, pages · block, L, H, D]``;
            ``"page_first_direct"``: ``[2, pages, L, block, H, D]``; ``"page_head"``: ``[2, pages, H, block, L, D]``.
        """
        row, table = heads * dim, tuple(pages)
        half = count * block * layers * row
        strides = {
            "layer_first": (layer * count * block * row, block * row, row, dim),
            "page_first": (layer * row, block * layers * row, layers * row, dim),
            "page_first_direct": (layer * block * row, layers * block * row, row, dim),
            "page_head": (layer * dim, heads * block * layers * dim, layers * dim, block * layers * dim),
        }
        if layout not in strides:
            raise UnsupportedError(f"SGLang pool layout {layout!r} is not known")
        base, page, token, head = strides[layout]
        return cls(base, page, token, head, block, table), cls(half + base, page, token, head, block, table)

    def place(self, head: int, slot: int) -> int:
        """Where a vector begins."""
        page = self.pages[slot // self.block]
        inside = slot % self.block * self.token_stride
        return self.base + page * self.page_stride + inside + head * self.head_stride

    def extent(self, heads: int, tokens: int, dim: int) -> int:
        """Elements that a buffer must have for `tokens` slots from the first on."""
        used = self.pages[: -(-tokens // self.block)]
        if len(used) * self.block < tokens or min(used, default=0) < 0:
            raise UnsupportedError(f"{tokens} tokens do not fit in {len(self.pages)} pages of {self.block}")
        last = self.base + max(used, default=0) * self.page_stride + (min(tokens, self.block) - 1) * self.token_stride
        return last + (heads - 1) * self.head_stride + dim


@cuda.jit(device=True)
def place_of(target: Any, pages: Any, head: Any, token: Any) -> Any:
    """Where a vector begins in the cache."""
    slot = target[SLOT] + token
    block = target[BLOCK]
    page = pages[target[PAGE] + slot // block]
    inside = slot % block
    return target[BASE] + page * target[PAGE_STRIDE] + inside * target[TOKEN_STRIDE] + head * target[HEAD_STRIDE]


@cuda.jit(device=True)
def _word(x: Any, mantissa: Any, bias: Any, limit: Any) -> Any:
    y = clamp(x, limit)
    if mantissa == 7:
        return np.int64(to_bf16(y))
    if mantissa == 23:
        return np.int64(bits_of(y))
    return np.int64(to_narrow(y, mantissa, bias))


@cuda.jit(device=True)
def _number(word: Any, mantissa: Any, bias: Any) -> Any:
    if mantissa == 7:
        return float_of(np.uint32(np.int64(word) << 16))
    if mantissa == 23:
        return float_of(np.uint32(word))
    return from_narrow(np.int64(word), mantissa, bias)


@cuda.jit(device=True)
def _vectors(target: Any) -> tuple[Any, Any, Any]:
    """First vector of this warp, the warps that share the work, and all vectors."""
    warps = cuda.blockDim.x >> 5
    return cuda.blockIdx.x * warps + (cuda.threadIdx.x >> 5), cuda.gridDim.x * warps, target[HEADS] * target[TOKENS]


@cuda.jit
def store_kernel(
    floats: Any, targets: Any, cos: Any, sin: Any, pages: Any, mantissa: Any, bias: Any, limit: Any, words: Any
) -> None:
    """Rotate vectors to their positions, round them, and put them in their places.

    Parameters
    ----------
    floats : float32 ``[...]``
    targets : int64 ``[n, TARGET_COLUMNS]``
    cos, sin : float32 ``[...]``
        Angles of all tokens, pair by pair.
    pages : int32 ``[...]``
    mantissa, bias : int32
        Of `FORMATS`.
    limit : float32
        Largest magnitude that is stored.
    words : uint8, uint16 or uint32 ``[...]``
        The cache; written to.
    """
    target = targets[cuda.blockIdx.y]
    lane = cuda.threadIdx.x & 31
    half, turn, dim = target[HALF], target[TURN], target[DIM]
    first, step, count = _vectors(target)
    for vector in range(first, count, step):
        head, token = vector // target[TOKENS], vector % target[TOKENS]
        source = target[SOURCE] + head * target[SOURCE_HEAD] + token * target[SOURCE_TOKEN]
        to = place_of(target, pages, head, token)
        angle = target[ANGLE] + token * half
        for i in range(lane, half, 32):
            a, b = i, i + half
            if turn == 2:
                a, b = 2 * i, 2 * i + 1
            x, y, c, s = floats[source + a], floats[source + b], cos[angle + i], sin[angle + i]
            words[to + a] = _word(plus(times(x, c), -times(y, s)), mantissa, bias, limit)
            words[to + b] = _word(plus(times(y, c), times(x, s)), mantissa, bias, limit)
        for d in range(2 * half + lane, dim, 32):
            words[to + d] = _word(floats[source + d], mantissa, bias, limit)


@cuda.jit
def load_kernel(
    words: Any, targets: Any, cos: Any, sin: Any, pages: Any, mantissa: Any, bias: Any, floats: Any
) -> None:
    """The way back, for encoders and references: words to binary32, keys rotated back; arguments as above."""
    target = targets[cuda.blockIdx.y]
    lane = cuda.threadIdx.x & 31
    half, turn, dim = target[HALF], target[TURN], target[DIM]
    first, step, count = _vectors(target)
    for vector in range(first, count, step):
        head, token = vector // target[TOKENS], vector % target[TOKENS]
        source = target[SOURCE] + head * target[SOURCE_HEAD] + token * target[SOURCE_TOKEN]
        at = place_of(target, pages, head, token)
        angle = target[ANGLE] + token * half
        for i in range(lane, half, 32):
            a, b = i, i + half
            if turn == 2:
                a, b = 2 * i, 2 * i + 1
            x, y = _number(words[at + a], mantissa, bias), _number(words[at + b], mantissa, bias)
            c, s = cos[angle + i], sin[angle + i]
            floats[source + a] = plus(times(x, c), times(y, s))
            floats[source + b] = plus(times(y, c), -times(x, s))
        for d in range(2 * half + lane, dim, 32):
            floats[source + d] = _number(words[at + d], mantissa, bias)


_FLOATS, _TABLE, _PAGES = types.float32[::1], types.int64[:, ::1], types.int32[::1]
SIGNATURES = {
    store_kernel: (_FLOATS, _TABLE, _FLOATS, _FLOATS, _PAGES, types.int32, types.int32, types.float32,
                   types.uint16[::1]),
    load_kernel: (types.uint16[::1], _TABLE, _FLOATS, _FLOATS, _PAGES, types.int32, types.int32, _FLOATS),
}  # fmt: skip


class Targets:
    """A growing table of targets with the pages and angles that they refer to; `upload` puts it on the device."""

    def __init__(self) -> None:
        self._lines: list[list[int]] = []
        self._pages: list[np.ndarray] = []
        self._page_of: dict[tuple[int, ...], int] = {}
        self._angles: list[tuple[np.ndarray, np.ndarray]] = []
        self._angle_of: dict[tuple[int, int, int], int] = {}
        self._next_page = self._next_angle = 0
        self.elements = 0

    def __len__(self) -> int:
        return len(self._lines)

    def add(self, heads: int, tokens: int, dim: int, pages: Pages, slot: int = 0,
            rotation: Any = None, position: int = 0, source: tuple[int, int, int] | None = None) -> int:  # fmt: skip
        """Add vectors ``[H, T, D]``; gives where they begin in the binary32 buffer.

        Parameters
        ----------
        heads, tokens, dim : int
        pages : Pages
        slot : int
            Slot of the first token.
        rotation : pltpack.codec.rope.Rotation, optional
        position : int
            Position of the first token in its session.
        source : (int, int, int), optional
            Where they begin, and how far it is from head to head and from token to token; by default they are
            contiguous, and follow those added before.
        """
        if pages.pages not in self._page_of:
            self._page_of[pages.pages] = self._next_page
            self._pages.append(np.array(pages.pages, np.int32))
            self._next_page += len(pages.pages)
        turn, half, angle = 0, 0, 0
        if rotation is not None:
            turn, half = 2 if rotation.interleaved else 1, rotation.dim // 2
            key = (id(rotation), position, tokens)
            if key not in self._angle_of:
                self._angle_of[key] = self._next_angle
                self._angles.append(rotation.tables(position, tokens))
                self._next_angle += tokens * half
            angle = self._angle_of[key]
        if source is None:
            source, self.elements = (self.elements, tokens * dim, dim), self.elements + heads * tokens * dim
        self._lines.append([*source, heads, tokens, dim, turn, half, angle, pages.base,
                            pages.page_stride, pages.token_stride, pages.head_stride, pages.block,
                            self._page_of[pages.pages], slot])  # fmt: skip
        return source[0]

    @property
    def most(self) -> int:
        """Vectors of the largest target."""
        return max((line[HEADS] * line[TOKENS] for line in self._lines), default=0)

    def upload(self) -> tuple[Any, Any, Any, Any]:
        """Targets, cosines, sines and pages on the device."""
        none = np.zeros(1, np.float32)
        cos, sin = (np.concatenate([*(pair[i].reshape(-1) for pair in self._angles), none]) for i in (0, 1))
        table = np.array(self._lines, np.int64).reshape(-1, TARGET_COLUMNS)
        pages = np.concatenate(self._pages) if self._pages else np.zeros(1, np.int32)
        return device.put(table), device.put(cos), device.put(sin), device.put(pages)


def store(floats: Any, targets: Targets, placed: tuple[Any, Any, Any, Any], dtype: str, words: Any,
          clamped: bool = True) -> None:  # fmt: skip
    """Run `store_kernel` for all targets, of one dtype; `placed` is from ``targets.upload()``."""
    if len(targets):
        limit = LARGEST[dtype] if clamped else np.float32(np.inf)
        mantissa, bias = FORMATS[dtype]
        shape = device.lines_of(len(targets), targets.most)
        store_kernel[shape](floats, *placed, np.int32(mantissa), np.int32(bias), limit, words)


def load(words: Any, targets: Targets, placed: tuple[Any, Any, Any, Any], dtype: str) -> Any:
    """Run `load_kernel` for all targets; gives the binary32 buffer."""
    floats = device.arrays().empty(max(targets.elements, 1), np.float32)
    if len(targets):
        mantissa, bias = FORMATS[dtype]
        shape = device.lines_of(len(targets), targets.most)
        load_kernel[shape](words, *placed, np.int32(mantissa), np.int32(bias), floats)
    return floats
