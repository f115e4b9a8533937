"""Interleaved rANS with static tables: 32 lanes, 12-bit probabilities, 16-bit renormalization.

The symbols of a stream form rows ``[R, N]``; each row names its table. Symbol ``(r, i)`` belongs to lane ``i % 32``.
A step is the symbols of one row with equal ``i // 32``: at most one per lane, and at most one 16-bit word read per
lane, in lane order from one shared word stream. So one GPU warp decodes a stream with a ballot and a popcount.
Bitstream: spec/codecs.md, section "rANS streams". The coder is Duda's range variant, arXiv 1311.2540.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

LANES = 32
PROB_BITS = 12
PROB_SCALE = 1 << PROB_BITS
STATE_LOW = 1 << 16
HEADER_BYTES = 4 * LANES


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
    """
    counts = np.atleast_2d(np.asarray(counts, dtype=np.float64))
    out = np.zeros(counts.shape, dtype=np.int64)
    for row, target in zip(counts, out, strict=True):
        total = row.sum()
        if total <= 0:
            target[0] = PROB_SCALE
            continue
        share = row * (PROB_SCALE / total)
        target[:] = np.where(row > 0, np.maximum(1, np.floor(share)), 0)
        excess = int(target.sum()) - PROB_SCALE
        while excess > 0:
            # Taking one slot from the symbol that loses the least code length keeps the table near the optimum.
            loss = np.where(target > 1, row * np.log2(np.maximum(target, 1) / np.maximum(target - 1, 0.5)), np.inf)
            target[int(np.argmin(loss))] -= 1
            excess -= 1
        while excess < 0:
            gain = np.where(target > 0, row * np.log2((target + 1) / np.maximum(target, 1)), -np.inf)
            target[int(np.argmax(gain))] += 1
            excess += 1
    return out.astype(np.uint16)


def decode_tables(freqs: np.ndarray) -> np.ndarray:
    """Slot look-up tables: uint32 ``[S, 4096]`` of ``symbol | (freq - 1) << 8 | (slot - start) << 20``.

    Parameters
    ----------
    freqs : ndarray
        uint16 ``[S, 256]``; each row sums to 4096 (`ValueError` if not).
    """
    freqs = np.asarray(freqs, dtype=np.int64)
    if freqs.ndim != 2 or freqs.shape[1] != 256 or (freqs.sum(axis=1) != PROB_SCALE).any():
        raise ValueError("rANS frequencies do not sum to 4096")
    starts = np.cumsum(freqs, axis=1) - freqs
    out = np.empty((len(freqs), PROB_SCALE), dtype=np.uint32)
    symbols = np.arange(256)
    slots = np.arange(PROB_SCALE)
    for row, (freq, start) in enumerate(zip(freqs, starts, strict=True)):
        symbol = np.repeat(symbols, freq)
        out[row] = symbol | (freq[symbol] - 1) << 8 | (slots - start[symbol]) << 20
    return out


@numba.njit(nogil=True, cache=True)
def _encode(symbols: Any, table_of_row: Any, freqs: Any, starts: Any, words: Any, states: Any) -> int:  # noqa: ANN401
    rows, columns = symbols.shape
    position = words.size
    for lane in range(LANES):
        states[lane] = STATE_LOW
    for r in range(rows - 1, -1, -1):
        freq_row = freqs[table_of_row[r]]
        start_row = starts[table_of_row[r]]
        for i in range(columns - 1, -1, -1):
            lane = i & (LANES - 1)
            symbol = symbols[r, i]
            freq = np.uint64(freq_row[symbol])
            if freq == 0:
                return -1
            x = np.uint64(states[lane])
            if x >= (freq << np.uint64(20)):
                position -= 1
                words[position] = np.uint16(x & np.uint64(0xFFFF))
                x >>= np.uint64(16)
            quotient = np.uint32(x) // np.uint32(freq)
            rest = np.uint32(x) - quotient * np.uint32(freq)
            states[lane] = np.uint32((quotient << np.uint32(PROB_BITS)) + rest + np.uint32(start_row[symbol]))
    return position


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
        If a symbol has frequency 0 in its table.
    """
    symbols = np.ascontiguousarray(symbols, dtype=np.uint8)
    starts = (np.cumsum(freqs, axis=1, dtype=np.int64) - freqs).astype(np.uint16)
    words = np.empty(symbols.size + LANES, dtype=np.uint16)
    states = np.empty(LANES, dtype=np.uint32)
    first = _encode(symbols, np.ascontiguousarray(table_of_row, dtype=np.int64),
                    np.ascontiguousarray(freqs, dtype=np.uint16), starts, words, states)  # fmt: skip
    if first < 0:
        raise ValueError("a symbol has frequency 0 in its rANS table")
    return states.astype("<u4").tobytes() + words[first:].astype("<u2").tobytes()


@numba.njit(nogil=True, cache=True, boundscheck=False)
def _decode(words: Any, states: Any, tables: Any, table_of_row: Any, out: Any) -> int:  # noqa: ANN401
    rows, columns = out.shape
    full = columns // LANES
    position = 0
    # The word array carries LANES spare words at its end, so a step never reads outside it.
    limit = words.size - LANES
    x = states
    for r in range(rows):
        table = tables[table_of_row[r]]
        row = out[r]
        for step in range(full):
            base = step * LANES
            if position > limit:
                return -1
            for lane in range(LANES):
                s = x[lane]
                entry = table[s & np.uint32(PROB_SCALE - 1)]
                row[base + lane] = np.uint8(entry & np.uint32(0xFF))
                freq = ((entry >> np.uint32(8)) & np.uint32(0xFFF)) + np.uint32(1)
                x[lane] = freq * (s >> np.uint32(PROB_BITS)) + (entry >> np.uint32(20))
            for lane in range(LANES):
                s = x[lane]
                low = s < np.uint32(STATE_LOW)
                word = np.uint32(words[position])
                x[lane] = ((s << np.uint32(16)) | word) if low else s
                position += 1 if low else 0
        if position > limit:
            return -1
        for i in range(full * LANES, columns):
            lane = i - full * LANES
            s = x[lane]
            entry = table[s & np.uint32(PROB_SCALE - 1)]
            row[i] = np.uint8(entry & np.uint32(0xFF))
            freq = ((entry >> np.uint32(8)) & np.uint32(0xFFF)) + np.uint32(1)
            s = freq * (s >> np.uint32(PROB_BITS)) + (entry >> np.uint32(20))
            if s < np.uint32(STATE_LOW):
                s = (s << np.uint32(16)) | np.uint32(words[position])
                position += 1
            x[lane] = s
    for lane in range(LANES):
        if x[lane] != np.uint32(STATE_LOW):
            return -1
    return position


def decode(stream: bytes | memoryview, table_of_row: np.ndarray, tables: np.ndarray, out: np.ndarray) -> None:
    """Decode a stream written by `encode`; the whole of `stream` must be used up.

    Parameters
    ----------
    stream : bytes-like
    table_of_row : ndarray
        Table index of each row ``[R]``; the caller has checked that all are below ``len(tables)``.
    tables : ndarray
        uint32 ``[S, 4096]`` from `decode_tables`.
    out : ndarray
        uint8 ``[R, N]``, C-contiguous, filled.

    Raises
    ------
    ValueError
        If the stream is damaged: wrong length, or its lanes do not end in their initial state.
    """
    if len(stream) < HEADER_BYTES or len(stream) % 2:
        raise ValueError("rANS stream is truncated")
    states = np.frombuffer(stream, dtype="<u4", count=LANES).astype(np.uint32)
    count = (len(stream) - HEADER_BYTES) // 2
    words = np.zeros(count + LANES, dtype=np.uint16)
    words[:count] = np.frombuffer(stream, dtype="<u2", offset=HEADER_BYTES)
    used = _decode(words, states, tables, np.ascontiguousarray(table_of_row, dtype=np.int64), out)
    if used != count:
        raise ValueError("rANS stream is damaged")
