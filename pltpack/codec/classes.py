"""Channel classes of the lossless codec: which words a channel's symbols cover, and which frequency table it uses.

A cache word is split into its top part (sign, exponent, first mantissa bits) and low bits. A channel's window is the
run of 128 magnitudes its symbols can name, placed by the channel's mean exponent, so channels of one shape and
different scale look alike; channels that are mostly negative are mirrored. The channels are then clustered by the
number of bits one table costs another's symbols (k-means under the Kullback-Leibler divergence).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from pltpack.codec import planes, rans

#: Most tables of one model: the class byte keeps its high bit for the mirror flag.
MAX_CLASSES = 128
MIRROR = 128
#: Octaves of the window below the mean exponent.
_BELOW = 11
_ROUNDS = 6
#: Rows that k-means looks at; all others are only assigned.
_SAMPLE_ROWS = 512
_CHUNK_ROWS = 4096
#: A symbol rarer than this costs more as a table slot of 1/4096 than as an escape.
_RARE = 2.0**-15


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """How the words of one dtype are split.

    Attributes
    ----------
    word_bits, low : int
        Width of a word, and how many of its low bits are stored as they are.
    step_bits : int
        Mantissa bits in the top part: an octave spans ``2 ** step_bits`` magnitudes.
    planes : tuple of (shift, bits)
        The low bits as planes of nibbles (4) and bytes (8), in stored order.
    """

    word_bits: int
    low: int
    step_bits: int
    planes: tuple[tuple[int, int], ...]

    @property
    def top_bits(self) -> int:
        """Width of the top part."""
        return self.word_bits - self.low

    @property
    def word(self) -> np.dtype[np.unsignedinteger]:
        """Unsigned integer type of a word."""
        return np.dtype(f"u{self.word_bits // 8}")

    @property
    def octaves(self) -> int:
        """Number of exponents."""
        return 1 << (self.top_bits - 1 - self.step_bits)


LAYOUTS = {
    "BF16": Layout(16, 4, 3, ((0, 4),)),
    "F16": Layout(16, 8, 2, ((0, 8),)),
    "F32": Layout(32, 20, 3, ((16, 4), (8, 8), (0, 8))),
    "F8_E4M3": Layout(8, 0, 3, ()),
    "F8_E5M2": Layout(8, 0, 2, ()),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """Windows and tables of a unit's channels, ready for the kernels: uint16, uint16 and int64 ``[R]``."""

    start: np.ndarray
    mirror: np.ndarray
    table: np.ndarray

    @classmethod
    def of(cls, base: np.ndarray, classes: np.ndarray, layout: Layout) -> Rows:
        """From the stored window octaves and class bytes, uint8 ``[R]`` each."""
        start = base.astype(np.uint16) << np.uint16(layout.step_bits)
        return cls(start, (classes & MIRROR).astype(np.uint16), (classes & (MIRROR - 1)).astype(np.int64))


class Tables:
    """Frequency tables ``freqs`` uint16 ``[C, 256]`` with escape symbols ``escape`` uint8 ``[C]``, checked.

    Raises
    ------
    ValueError
        If they are not well-formed.
    """

    def __init__(self, freqs: np.ndarray, escape: np.ndarray) -> None:
        if freqs.dtype != np.uint16 or freqs.ndim != 2 or freqs.shape[1] != 256 or len(freqs) > MAX_CLASSES:
            raise ValueError("lossless tables have a wrong shape")
        if escape.dtype != np.uint8 or escape.shape != (len(freqs),):
            raise ValueError("lossless escape symbols have a wrong shape")
        self.freqs = np.ascontiguousarray(freqs)
        self.escape = np.ascontiguousarray(escape)
        self.slots = rans.decode_tables(self.freqs)
        self.plain = self.freqs > 0
        own = (np.arange(len(freqs)), self.escape)
        if not self.plain[own].all():
            raise ValueError("a lossless table cannot code its escape symbol")
        self.plain[own] = False
        self.coding = rans.encode_tables(self.freqs, self.plain, self.escape)

    def __len__(self) -> int:
        return len(self.freqs)


@dataclasses.dataclass(frozen=True, slots=True)
class Windowed:
    """Statistics of channels under their windows.

    Attributes
    ----------
    base : ndarray
        First octave of the window, uint8 ``[R]``.
    mirror : ndarray
        bool ``[R]``.
    counts : ndarray
        Words per symbol, uint16 ``[R, 256]``.
    outside : ndarray
        Words outside the window, float32 ``[R]``.
    """

    base: np.ndarray
    mirror: np.ndarray
    counts: np.ndarray
    outside: np.ndarray


def window(runs: Sequence[np.ndarray], channels: int, layout: Layout) -> Windowed:
    """Place each channel's window and count its symbols.

    Parameters
    ----------
    runs : sequence of ndarray
        Words as channel rows ``[R, N]``; N may differ. Fewer than 2^22 tokens each.
    channels : int
        R.
    """
    exponents, normal, negative = np.zeros((3, channels), dtype=np.int64)
    for rows in runs:
        planes.measure(layout.word_bits, layout.low, layout.step_bits)(rows, exponents, normal, negative)
    # Zeros and subnormals say nothing of a channel's scale.
    mean = np.rint(exponents / np.maximum(normal, 1)).astype(np.int64)
    base = ((mean - _BELOW) % layout.octaves).astype(np.uint8)
    mirror = 2 * negative > sum(rows.shape[1] for rows in runs)
    placed = Rows.of(base, np.where(mirror, MIRROR, 0), layout)
    counts = np.zeros((channels, 257), dtype=np.uint32)
    for rows in runs:
        planes.count(layout.word_bits, layout.low)(rows, placed.start, placed.mirror, counts)
    # Sample budgets keep every count below 65536; longer runs only lose the resolution of their largest.
    counts = np.minimum(counts, 65535)
    return Windowed(base, mirror, counts[:, :256].astype(np.uint16), counts[:, 256].astype(np.float32))


def learn(parts: Sequence[Windowed], most: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Cluster channels and make their tables.

    Parameters
    ----------
    parts : sequence of Windowed
        Channels in order.
    most : int
        Most classes, 1 to `MAX_CLASSES`.

    Returns
    -------
    freqs, escape, base, classes : ndarray
        uint16 ``[C, 256]``, uint8 ``[C]``, uint8 ``[R]``, uint8 ``[R]``: the stored form of a model.
    """
    base = np.concatenate([part.base for part in parts])
    mirror = np.concatenate([part.mirror for part in parts])
    counts = np.concatenate([part.counts for part in parts])
    outside = np.concatenate([part.outside for part in parts])
    seen = np.flatnonzero(counts.any(axis=1))
    if not len(seen):
        return np.zeros((0, 256), np.uint16), np.zeros(0, np.uint8), base, np.zeros(len(base), np.uint8)
    centers = _centers(counts[seen[:: -(-len(seen) // _SAMPLE_ROWS)]].astype(np.float32), most)
    classes = np.concatenate([_assign(_shares(counts[at : at + _CHUNK_ROWS].astype(np.float32)), centers)[0]
                              for at in range(0, len(counts), _CHUNK_ROWS)])  # fmt: skip
    used, classes = np.unique(classes, return_inverse=True)
    sums = np.zeros((len(used), 256))
    for index in range(len(used)):
        sums[index] = counts[classes == index].sum(axis=0, dtype=np.float64)
    lost = np.bincount(classes, weights=outside, minlength=len(used))
    freqs, escape = tables(sums, lost)
    return freqs, escape, base, (classes | np.where(mirror, MIRROR, 0)).astype(np.uint8)


def tables(sums: np.ndarray, outside: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Frequencies uint16 ``[C, 256]`` and escape symbols uint8 ``[C]`` from summed counts and words outside."""
    total = sums.sum(axis=1, keepdims=True) + outside[:, None]
    kept = np.where(sums >= _RARE * total, sums, 0)
    escape = kept.argmin(axis=1)
    rows = np.arange(len(sums))
    kept[rows, escape] = np.maximum(total[:, 0] - kept.sum(axis=1) + kept[rows, escape], _RARE * total[:, 0])
    return rans.normalize(kept), escape.astype(np.uint8)


def _shares(counts: np.ndarray) -> np.ndarray:
    out: np.ndarray = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    return out


def _assign(shares: np.ndarray, centers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cheapest centre of each row, and the bits per symbol it costs there."""
    floor = np.float32(0.25 / rans.PROB_SCALE)
    bits = -np.log2(centers + floor)
    cost = shares @ bits.T
    best = cost.argmin(axis=1)
    return best, cost[np.arange(len(cost)), best]


def _centers(counts: np.ndarray, most: int) -> np.ndarray:
    """k-means; starts from equal runs of the rows in order of their entropy."""
    shares = _shares(counts)
    entropy = -(shares * np.log2(np.maximum(shares, 1e-9))).sum(axis=1)
    classes = np.empty(len(counts), dtype=np.int64)
    k = min(most, len(counts))
    classes[np.argsort(entropy, kind="stable")] = np.arange(len(counts)) * k // len(counts)
    centers = np.zeros((k, 256), dtype=np.float32)
    for _ in range(_ROUNDS):
        member = (classes[:, None] == np.arange(k)).astype(np.float32)
        sums = member.T @ counts
        filled = sums.any(axis=1)
        centers[filled] = _shares(sums[filled])
        classes, cost = _assign(shares, centers)
        # A centre that lost all its rows starts again at a row that fits its own centre worst.
        empty = np.flatnonzero(np.bincount(classes, minlength=k) == 0)
        worst = np.argsort(entropy - cost, kind="stable")[: len(empty)]
        classes[worst] = empty
    return centers
