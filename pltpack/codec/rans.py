"""Interleaved rANS with static tables: 32 lanes, 12-bit probabilities, 16-bit renormalization.

The symbols of a stream form rows ``[R, N]``; each row names its table. Symbol ``(r, i)`` belongs to lane ``i % 32``.
A step is the symbols of one row with equal ``i // 32``: at most one per lane, and at most one 16-bit word read per
lane, in lane order from one shared word stream. So one GPU warp decodes a stream with a ballot and a popcount.
Bitstream: spec/codecs.md, section "rANS streams". The coder is Duda's range variant, arXiv 1311.2540.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from pltpack.codec import rans_scalar, rans_simd
from pltpack.codec.rans_scalar import LANES, PROB_SCALE, STATE_LOW
from pltpack.errors import UnsupportedError

__all__ = [
    "HEADER_BYTES", "KERNEL", "KERNEL_VARIABLE", "LANES", "PROB_SCALE", "decode", "decode_tables", "encode",
    "encode_tables", "encode_with", "normalize",
]  # fmt: skip

HEADER_BYTES = 4 * LANES
#: Environment variable, read at import: "portable", "avx2" or "avx512" instead of the fastest loops that can run.
KERNEL_VARIABLE = "PLTPACK_RANS_KERNEL"

#: Name -> (encoding loop, decoding loop). All write the same bytes.
_LOOPS: dict[str, tuple[Any, Any]] = {
    "avx512": (rans_simd.encode_rows_avx512, rans_simd.decode_rows_avx512),
    "avx2": (rans_scalar.encode_rows, rans_simd.decode_rows_avx2),
    "portable": (rans_scalar.encode_rows, rans_scalar.decode_rows),
}


def normalize(counts: np.ndarray) -> np.ndarray:
    """Scale counts to frequencies that sum to 4096, at least 1 for every symbol that occurs.

    Parameters
    ----------
    counts : ndarray
        Non-negative ``[S, 256]``. A row without any count gets symbol 0 with certainty.

    Returns
    -------
    ndarray
        uint16 ``[S, 256]``; each row sums to 4096.

    Raises
    ------
    ValueError
        If the counts are not of that shape, or negative, or not finite.
    """
    counts = np.array(counts, dtype=np.float64, ndmin=2, order="C")
    if counts.shape[1:] != (256,) or not np.isfinite(counts).all() or (counts < 0).any():
        raise ValueError("symbol counts are not finite, non-negative rows of 256")
    counts[counts.sum(axis=1) <= 0, 0] = 1
    share = counts * (PROB_SCALE / counts.sum(axis=1, keepdims=True))
    out = np.where(counts > 0, np.maximum(1, np.floor(share)), 0).astype(np.int64)
    freqs = np.arange(2, PROB_SCALE + 1)
    rans_scalar.settle(counts, out, np.concatenate([np.zeros(2), np.log2(freqs / (freqs - 1))]))
    return out.astype(np.uint16)


def decode_tables(freqs: np.ndarray) -> np.ndarray:
    """Slot look-up tables: uint32 ``[S, 4096]`` of ``symbol | (freq - 1) << 8 | (slot - start) << 20``.

    Parameters
    ----------
    freqs : ndarray
        uint16 ``[S, 256]``; each row sums to 4096 (`ValueError` if not).
    """
    freqs = np.ascontiguousarray(freqs, dtype=np.int64)
    if freqs.ndim != 2 or freqs.shape[1] != 256 or (freqs < 0).any() or (freqs.sum(axis=1) != PROB_SCALE).any():
        raise ValueError("rANS frequencies do not sum to 4096")
    out = np.empty((len(freqs), PROB_SCALE), dtype=np.uint32)
    rans_scalar.fill_decode_tables(freqs, out)
    return out


def _checked_rows(table_of_row: np.ndarray, rows: int, tables: int) -> np.ndarray:
    table_of_row = np.ascontiguousarray(table_of_row, dtype=np.int64)
    if table_of_row.shape != (rows,):
        raise ValueError(f"{rows} rows of symbols, but {table_of_row.shape} table numbers")
    if rows and not 0 <= table_of_row.min() <= table_of_row.max() < tables:
        raise ValueError(f"a row names a rANS table that does not exist (there are {tables})")
    return table_of_row


def _chosen(wanted: str) -> str:
    """The name of the loops to use: `wanted`, by default the fastest ones that can run here."""
    names = [*rans_simd.kernels(), "portable"]
    name = wanted or names[0]
    if name not in names:
        raise UnsupportedError(f"{KERNEL_VARIABLE}={name}: this processor can run {', '.join(names)}")
    return name


def _choose(wanted: str) -> tuple[Any, Any]:
    """The encoding and the decoding loop called `wanted`, by default the fastest ones that can run here."""
    return _LOOPS[_chosen(wanted)]


#: Name of the loops in use.
KERNEL = _chosen(os.environ.get(KERNEL_VARIABLE, ""))
_ENCODE_ROWS, _DECODE_ROWS = _LOOPS[KERNEL]


def encode_tables(freqs: np.ndarray, plain: np.ndarray | None = None, escape: np.ndarray | None = None) -> np.ndarray:
    """What `encode` looks up: uint32 ``[S, 256]`` of ``freq | start << 16``.

    Parameters
    ----------
    freqs : ndarray
        uint16 ``[S, 256]`` from `normalize`.
    plain, escape : ndarray, optional
        bool ``[S, 256]`` and uint8 ``[S]``: symbols that are not plain are coded as their table's escape symbol, and
        mark their row (bit 31).
    """
    freqs = np.ascontiguousarray(freqs, dtype=np.uint32)
    if freqs.ndim != 2 or freqs.shape[1] != 256:
        raise ValueError("rANS needs frequencies of 256 symbols in each table")
    out: np.ndarray = freqs | (np.cumsum(freqs, axis=1, dtype=np.uint32) - freqs) << 16
    if plain is None or escape is None:
        return out
    return np.where(plain, out, out[np.arange(len(out)), escape][:, None] | np.uint32(1 << 31))


def encode(symbols: np.ndarray, table_of_row: np.ndarray, freqs: np.ndarray) -> bytes:
    """Encode rows of byte symbols.

    Parameters
    ----------
    symbols : ndarray
        uint8 ``[R, N]``.
    table_of_row : ndarray
        Table index of each row, ``[R]``.
    freqs : ndarray
        uint16 ``[S, 256]`` from `normalize`.

    Returns
    -------
    bytes
        32 final states (uint32, little-endian, lane order), then the 16-bit words in reading order.

    Raises
    ------
    ValueError
        If a symbol has frequency 0 in its table, or a row names no table.
    """
    return b"".join(encode_with(symbols, table_of_row, encode_tables(freqs))[0])


def encode_with(
    symbols: np.ndarray, table_of_row: np.ndarray, tables: np.ndarray
) -> tuple[tuple[memoryview, memoryview], np.ndarray]:
    """As `encode`, with look-up tables from `encode_tables`.

    Returns
    -------
    stream : (memoryview, memoryview)
        The two parts of the stream, to be joined by the caller with what else there is.
    marks : ndarray
        The marked rows, uint8 ``[R]``.
    """
    symbols = np.ascontiguousarray(symbols, dtype=np.uint8)
    if symbols.ndim != 2:
        raise ValueError("rANS needs a matrix of symbols")
    words = np.empty(symbols.size, dtype=np.uint16)
    states = np.full(LANES, STATE_LOW, dtype=np.uint32)
    marks = np.empty(len(symbols), dtype=np.uint8)
    rows = _checked_rows(table_of_row, len(symbols), len(tables))
    first = _ENCODE_ROWS(symbols, rows, tables, words, states, marks)
    if first < 0:
        raise ValueError("a symbol has frequency 0 in its rANS table")
    return (states.astype("<u4", copy=False).data, words[first:].astype("<u2", copy=False).data), marks


def decode(stream: bytes | memoryview, table_of_row: np.ndarray, tables: np.ndarray, out: np.ndarray) -> None:
    """Decode a stream written by `encode`; the whole of `stream` must be used up.

    Parameters
    ----------
    stream : bytes-like
    table_of_row : ndarray
        Table index of each row ``[R]``.
    tables : ndarray
        uint32 ``[S, 4096]`` from `decode_tables`.
    out : ndarray
        uint8 ``[R, N]``, C-contiguous, filled.

    Raises
    ------
    ValueError
        If the stream is damaged (wrong length, or its lanes do not end in their initial state), or an array does not
        fit.
    """
    data = np.frombuffer(stream, dtype=np.uint8)
    if len(data) < HEADER_BYTES or len(data) % 2:
        raise ValueError("rANS stream is truncated")
    tables = np.ascontiguousarray(tables, dtype=np.uint32)
    if tables.ndim != 2 or tables.shape[1] != PROB_SCALE:
        raise ValueError("rANS look-up tables have 4096 entries each")
    if out.ndim != 2 or out.dtype != np.uint8 or not out.flags.c_contiguous or not out.flags.writeable:
        raise ValueError("rANS symbols go into a writable, C-contiguous uint8 matrix")
    rows = _checked_rows(table_of_row, len(out), len(tables))
    # One flag for every caller: numba compiles for read-only and for writable arrays separately.
    data.flags.writeable = False
    states = data[:HEADER_BYTES].view("<u4").astype(np.uint32)
    words = data[HEADER_BYTES:]
    count = len(words) // 2
    margin = out.shape[1] + LANES
    tail_start = max(0, count - margin)
    tail = np.zeros(2 * (count - tail_start + margin), dtype=np.uint8)
    tail[: 2 * (count - tail_start)] = words[2 * tail_start :]
    tail.flags.writeable = False
    used = _DECODE_ROWS(words, tail, tail_start, states, tables, rows, out)
    if used != count or (states != STATE_LOW).any():
        raise ValueError("rANS stream is damaged")
