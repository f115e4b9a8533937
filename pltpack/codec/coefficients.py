"""Entropy coding of quantized coefficients: tables by class, low bits raw, escapes (spec/codecs.md, "transform").

A coefficient's class is the third-octave of its expected magnitude over its token's step. Symbols are ordered by class,
so that each class is one run of one table: 32 symbols, one a lane, make a row of the rANS stream.
"""

from __future__ import annotations

import dataclasses
import struct
from typing import Any

import numba
import numpy as np

from pltpack.codec import rans
from pltpack.codec.payload import Reader

#: Logarithms of scales and steps are integers in this fraction of an octave.
OCTAVE = 24
#: Symbols: 0, ±1 … ±31 in zigzag order, escape.
SYMBOLS = 64
#: Classes in an octave.
CLASSES = 3
#: Width of a class in units of the logarithms.
CLASS_WIDTH = OCTAVE // CLASSES
#: The symbol that says: the value is in the list of escapes.
ESCAPE = SYMBOLS - 1
#: Largest shifted magnitude that has a symbol of its own.
LARGEST = (ESCAPE - 1) // 2
#: Values are smaller than this: what is larger goes into the exact part.
MAX_VALUE = 1 << 24
_jit = numba.njit(cache=True, nogil=True, error_model="numpy")


def raw_bits(classes: np.ndarray, floor: int) -> np.ndarray:
    """Low bits that are stored as they are, per class: int64.

    Parameters
    ----------
    classes : ndarray
        Class numbers; class 0 begins at ``2 ** (floor / 24)`` expected steps.
    floor : int
    """
    found: np.ndarray = np.clip((floor + CLASS_WIDTH * np.asarray(classes, np.int64)) // OCTAVE - 2, 0, 20)
    return found


@dataclasses.dataclass(frozen=True)
class Tables:
    """The coder's tables: frequencies uint16 ``[K, 64]`` by class, made ready for rANS once.

    `limit` is the largest shifted magnitude of a class up to which all have symbols; others are escapes.
    """

    freqs: np.ndarray
    encode: np.ndarray
    decode: np.ndarray
    raw: np.ndarray
    limit: np.ndarray
    floor: int

    @classmethod
    def of(cls, freqs: np.ndarray, floor: int) -> Tables:
        """Prepare tables; `floor` as in `raw_bits`."""
        wide = np.zeros((len(freqs), 256), np.uint16)
        wide[:, :SYMBOLS] = freqs
        pairs = np.minimum(wide[:, 1:ESCAPE:2], wide[:, 2:ESCAPE:2]) > 0
        limit = np.where(pairs.all(axis=1), LARGEST, pairs.argmin(axis=1)).astype(np.int64)
        if (wide[:, 0] == 0).any() or ((limit < LARGEST) & (wide[:, ESCAPE] == 0)).any():
            raise ValueError("an entropy table has no symbol for zero, or none for what is rare")
        return cls(wide, rans.encode_tables(wide), rans.decode_tables(wide), raw_bits(np.arange(len(freqs)), floor),
                   limit, floor)  # fmt: skip

    def classes(self, logs: np.ndarray) -> np.ndarray:
        """Class of expected magnitudes ``2 ** (logs / 24)`` steps: int64, -1 for those that are not coded."""
        found: np.ndarray = np.clip((np.asarray(logs, np.int64) - self.floor) // CLASS_WIDTH, -1, len(self.freqs) - 1)
        return found


@dataclasses.dataclass(frozen=True)
class Order:
    """Where the coefficients of a unit are in its streams.

    Attributes
    ----------
    tokens : ndarray
        Token of each place, sorted by class of token, int64.
    counts : ndarray
        Values of each class of coefficient, int64 ``[K]``.
    bounds : ndarray
        ``[J, K + 1]``: components ``bounds[j, κ + 1] … bounds[j, κ] - 1`` of a token of class j are of class κ.
    firsts : ndarray
        ``[J + 1]``: the tokens of class j are ``tokens[firsts[j]:firsts[j + 1]]``.
    """

    tokens: np.ndarray
    counts: np.ndarray
    bounds: np.ndarray
    firsts: np.ndarray

    @classmethod
    def of(cls, logs: np.ndarray, steps: np.ndarray, token_class: np.ndarray, tables: Tables) -> Order:
        """Order coefficients.

        Parameters
        ----------
        logs : ndarray
            Scales of the components, descending, int32 ``[N]`` in 1/24 octave.
        steps : ndarray
            Step of each token class, int32 ``[J]`` in 1/24 octave.
        token_class : ndarray
            ``[T]``.
        tables : Tables
        """
        bounds = bounds_of(logs, steps, tables)
        tokens = np.argsort(token_class, kind="stable")
        firsts = np.searchsorted(token_class[tokens], np.arange(len(steps) + 1))
        counts = (np.diff(firsts)[:, None] * (bounds[:, :-1] - bounds[:, 1:])).sum(axis=0)
        return cls(tokens, counts, bounds, firsts.astype(np.int64))

    @property
    def live(self) -> np.ndarray:
        """Components that are coded, per token class: int64 ``[J]``."""
        found: np.ndarray = self.bounds[:, 0]
        return found


def bounds_of(logs: np.ndarray, steps: np.ndarray, tables: Tables) -> np.ndarray:
    """Bounds of an `Order`, int64 ``[J, K + 1]``; parameters as of `Order.of`."""
    kinds = len(tables.freqs)
    edges = tables.floor + CLASS_WIDTH * np.arange(kinds + 1, dtype=np.int64)
    edges[-1] = np.iinfo(np.int64).max // 2
    # Components are sorted downwards: those of class κ and above come first.
    found = np.searchsorted(-logs.astype(np.int64), -(edges[None] + steps[:, None].astype(np.int64)), side="right")
    return found.astype(np.int64)


def encode(values: np.ndarray, order: Order, tables: Tables) -> bytes:
    """Encode quantized values.

    Parameters
    ----------
    values : ndarray
        int32 ``[T, N]``, components in the order's order; only live ones are looked at, all below `MAX_VALUE`.
    order : Order
    tables : Tables

    Returns
    -------
    bytes
        u32 words of the rANS stream, u32 escapes, u32 bytes of low bits, then the three parts.
    """
    return _encode(_gather(values, order.tokens, order.bounds, order.firsts, order.counts), order.counts, tables)


def encode_runs(values: np.ndarray, counts: np.ndarray, tables: Tables) -> bytes:
    """As `encode`, of values int32 already in order: `counts[κ]` of class κ, class after class."""
    return _encode(values, counts, tables)


def _encode(values: np.ndarray, counts: np.ndarray, tables: Tables) -> bytes:
    rows = -(-counts // rans.LANES)
    symbols = np.zeros((int(rows.sum()), rans.LANES), np.uint8)
    escapes = np.empty(len(values), np.int32)
    bits = np.zeros(int((counts * tables.raw).sum() + 7) // 8 + 8, np.uint8)
    used, length = _to_symbols(values, counts, tables.raw, tables.limit, symbols.reshape(-1), escapes, bits)
    of_row = np.repeat(np.arange(len(counts)), rows)
    stream, _ = rans.encode_with(symbols, of_row, tables.encode)
    packed = b"".join(stream)
    parts = (packed, escapes[:used].astype("<i4").tobytes(), bits[: (length + 7) // 8].tobytes())
    return struct.pack("<3I", len(packed), used, len(parts[2])) + b"".join(parts)


def decode(reader: Reader, order: Order, tables: Tables, shape: tuple[int, int]) -> np.ndarray:
    """Inverse of `encode`: int32 ``[T, N]``, zero where nothing is coded.

    Raises
    ------
    ValueError
        If the streams are damaged.
    """
    out = np.zeros(shape, np.int32)
    _scatter(decode_runs(reader, order.counts, tables), order.tokens, order.bounds, order.firsts, order.counts, out)
    return out


def decode_runs(reader: Reader, counts: np.ndarray, tables: Tables) -> np.ndarray:
    """Inverse of `encode_runs`."""
    length, used, low = (reader.u32() for _ in range(3))
    total, wanted = int(counts.sum()), (int((counts * tables.raw).sum()) + 7) // 8
    if used > total or low != wanted:
        raise ValueError("coefficient streams have lengths that do not fit the unit")
    stream = reader.take(length)
    escapes = reader.array(used, "<i4").astype(np.int32)
    bits = np.zeros(wanted + 8, np.uint8)
    bits[:wanted] = reader.array(wanted, "u1")
    rows = -(-counts // rans.LANES)
    symbols = np.empty((int(rows.sum()), rans.LANES), np.uint8)
    rans.decode(stream, np.repeat(np.arange(len(counts)), rows), tables.decode, symbols)
    values = np.empty(total, np.int32)
    if _from_symbols(symbols.reshape(-1), counts, tables.raw, escapes, bits, values) != used:
        raise ValueError("coefficient escapes do not fit the symbols")
    return values


def cost_tables(tables: Tables) -> np.ndarray:
    """Bits of each symbol by class, low bits counted, or of the escape it takes: float32 ``[K, 64]``."""
    freqs = tables.freqs[:, :SYMBOLS].astype(np.float64)
    bits = 12 - np.log2(np.maximum(freqs, 1)) + tables.raw[:, None]
    bits[:, ESCAPE] += 32
    magnitudes = (np.arange(SYMBOLS) + 1) // 2
    bits = np.where(magnitudes[None] > tables.limit[:, None], bits[:, ESCAPE, None], bits)
    found: np.ndarray = bits.astype(np.float32)
    return found


@_jit
def _gather(values: Any, tokens: Any, bounds: Any, firsts: Any, counts: Any) -> Any:
    out = np.empty(counts.sum(), np.int32)
    at = 0
    for kind in range(len(counts)):
        for j in range(len(firsts) - 1):
            low, high = bounds[j, kind + 1], bounds[j, kind]
            for place in range(firsts[j], firsts[j + 1]):
                t = tokens[place]
                for i in range(low, high):
                    out[at] = values[t, i]
                    at += 1
    return out


@_jit
def _scatter(values: Any, tokens: Any, bounds: Any, firsts: Any, counts: Any, out: Any) -> None:
    at = 0
    for kind in range(len(counts)):
        for j in range(len(firsts) - 1):
            low, high = bounds[j, kind + 1], bounds[j, kind]
            for place in range(firsts[j], firsts[j + 1]):
                t = tokens[place]
                for i in range(low, high):
                    out[t, i] = values[at]
                    at += 1


@_jit
def _to_symbols(values: Any, counts: Any, raw: Any, limit: Any, symbols: Any, escapes: Any, bits: Any) -> Any:
    used, length, at, to = 0, 0, 0, 0
    for kind in range(len(counts)):
        shift = raw[kind]
        for _ in range(counts[kind]):
            value = values[at]
            high = value >> shift
            if -limit[kind] <= high <= limit[kind]:
                symbols[to] = 2 * high - 1 if high > 0 else -2 * high
            else:
                symbols[to] = 63
                escapes[used] = value
                used += 1
            low = value & ((1 << shift) - 1)
            for b in range(shift):
                bits[length >> 3] |= np.uint8(((low >> b) & 1) << (length & 7))
                length += 1
            at += 1
            to += 1
        to = (to + 31) // 32 * 32
    return used, length


@_jit
def _from_symbols(symbols: Any, counts: Any, raw: Any, escapes: Any, bits: Any, values: Any) -> Any:
    used, length, at, to = 0, 0, 0, 0
    for kind in range(len(counts)):
        shift = raw[kind]
        for _ in range(counts[kind]):
            symbol = np.int32(symbols[to])
            if symbol == 63:
                # More escapes than stored ones: the caller compares the counts.
                value = escapes[used] if used < len(escapes) else np.int32(0)
                used += 1
                length += shift
            else:
                value = (symbol + 1) >> 1 if symbol & 1 else -(symbol >> 1)
                low = 0
                for b in range(shift):
                    low |= ((bits[length >> 3] >> (length & 7)) & 1) << b
                    length += 1
                value = (value << shift) | low
            values[at] = value
            at += 1
            to += 1
        to = (to + 31) // 32 * 32
    return used
