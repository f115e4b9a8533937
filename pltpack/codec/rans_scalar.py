"""Scalar loops of the rANS coder: they run on every processor and define the bytes that the vector loops must match."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

LANES = 32
PROB_BITS = 12
PROB_SCALE = 1 << PROB_BITS
STATE_LOW = 1 << 16


@numba.njit(nogil=True, cache=True)
def settle(counts: Any, freqs: Any, cost: Any) -> None:
    """Move single slots until each row of `freqs` sums to 4096, each time where the code length suffers least.

    Parameters
    ----------
    counts : ndarray
        float64 ``[S, 256]``, some count above 0 in each row.
    freqs : ndarray
        int64 ``[S, 256]``, above 0 exactly where the count is; changed.
    cost : ndarray
        float64 ``[4097]``; entry f, from 2 up, is ``log2(f / (f - 1))``.
    """
    for s in range(len(freqs)):
        excess = freqs[s].sum() - PROB_SCALE
        while excess > 0:
            chosen, least = -1, np.inf
            for i in range(256):
                if freqs[s, i] > 1 and (chosen < 0 or counts[s, i] * cost[freqs[s, i]] < least):
                    chosen, least = i, counts[s, i] * cost[freqs[s, i]]
            freqs[s, chosen] -= 1
            excess -= 1
        while excess < 0:
            chosen, most = -1, -np.inf
            for i in range(256):
                if freqs[s, i] > 0 and (chosen < 0 or counts[s, i] * cost[freqs[s, i] + 1] > most):
                    chosen, most = i, counts[s, i] * cost[freqs[s, i] + 1]
            freqs[s, chosen] += 1
            excess += 1


@numba.njit(nogil=True, cache=True)
def fill_decode_tables(freqs: Any, tables: Any) -> None:
    """Fill uint32 ``[S, 4096]`` `tables` from int64 ``[S, 256]`` `freqs` whose rows sum to 4096."""
    for s in range(len(freqs)):
        slot = 0
        for symbol in range(256):
            freq = freqs[s, symbol]
            for offset in range(freq):
                tables[s, slot + offset] = np.uint32(symbol | (freq - 1) << 8 | offset << 20)
            slot += freq


@numba.njit(nogil=True, cache=True)
def encode_rows(symbols: Any, table_of_row: Any, tables: Any, words: Any, states: Any, marks: Any) -> Any:
    """Code all rows from the last symbol to the first, filling `words` from its end.

    Parameters
    ----------
    symbols : ndarray
        uint8 ``[R, N]``.
    table_of_row : ndarray
        int64 ``[R]``.
    tables : ndarray
        uint32 ``[S, 256]`` of ``freq | start << 16``, plus ``1 << 31`` for symbols that mark their row.
    words : ndarray
        uint16, at least ``R * N`` entries; overwritten.
    states : ndarray
        uint32 ``[32]``; read as the initial and left as the final states.
    marks : ndarray
        uint8 ``[R]``; 1 for rows with a marking symbol, else 0.

    Returns
    -------
    int
        Index of the first word used, or -1 if a symbol has frequency 0.
    """
    rows, columns = symbols.shape
    position = np.int64(words.size)
    bad = False
    for r in range(rows - 1, -1, -1):
        table = tables[table_of_row[r]]
        every = np.uint32(0)
        for i in range(columns - 1, -1, -1):
            lane = i & (LANES - 1)
            entry = table[symbols[r, i]]
            freq = entry & np.uint32(0xFFFF)
            every |= entry
            bad |= freq == 0
            freq = max(freq, np.uint32(1))
            x = states[lane]
            # Always store and shift, by 0 if not needed: a branch would be mispredicted about every second time.
            full = np.uint32((x >> np.uint32(20)) >= freq)
            words[position - 1] = np.uint16(x & np.uint32(0xFFFF))
            position -= np.int64(full)
            x >>= full << np.uint32(4)
            quotient = x // freq
            rest = x - quotient * freq
            states[lane] = np.uint32(
                (quotient << np.uint32(PROB_BITS)) + rest + (entry >> np.uint32(16) & np.uint32(PROB_SCALE - 1))
            )
        marks[r] = every >> np.uint32(31)
    return -1 if bad else position


@numba.njit(nogil=True, cache=True)
def _decode_step(source: Any, byte: Any, states: Any, table: Any, row: Any, base: Any, lanes: Any) -> Any:
    for lane in range(lanes):
        s = states[lane]
        entry = table[s & np.uint32(PROB_SCALE - 1)]
        row[base + lane] = np.uint8(entry & np.uint32(0xFF))
        freq = ((entry >> np.uint32(8)) & np.uint32(0xFFF)) + np.uint32(1)
        states[lane] = freq * (s >> np.uint32(PROB_BITS)) + (entry >> np.uint32(20))
    for lane in range(lanes):
        s = states[lane]
        # Arithmetic on the condition: a branch here would be mispredicted about every second time.
        low = np.uint32(s < np.uint32(STATE_LOW))
        word = np.uint32(source[byte]) | np.uint32(source[byte + np.uint64(1)]) << np.uint32(8)
        states[lane] = s << (low << np.uint32(4)) | word * low
        byte += np.uint64(low) << np.uint64(1)
    return byte


@numba.njit(nogil=True, cache=True)
def _decode_row(source: Any, position: Any, states: Any, table: Any, row: Any) -> Any:
    byte = np.uint64(2 * position)
    whole = row.size // LANES * LANES
    for base in range(0, whole, LANES):
        byte = _decode_step(source, byte, states, table, row, base, LANES)
    byte = _decode_step(source, byte, states, table, row, whole, row.size - whole)
    return np.int64(byte // np.uint64(2))


@numba.njit(nogil=True, cache=True)
def decode_rows(words: Any, tail: Any, tail_start: Any, states: Any, tables: Any, table_of_row: Any, out: Any) -> Any:
    """Decode all rows; one row reads at most one word per symbol, and looks at up to 32 words more.

    Parameters
    ----------
    words : ndarray
        uint8 ``[2 W]``, the word stream.
    tail : ndarray
        uint8; the words from `tail_start` on, then at least ``N + 32`` words of padding.
    tail_start : int
        ``max(0, W - N - 32)``: rows that begin behind this word read from `tail`, so none reads outside its array.
    states : ndarray
        uint32 ``[32]``; read as the initial and left as the final states.
    tables : ndarray
        uint32 ``[S, 4096]`` from `pltpack.codec.rans.decode_tables`.
    table_of_row : ndarray
        int64 ``[R]``.
    out : ndarray
        uint8 ``[R, N]``, filled.

    Returns
    -------
    int
        Number of words read; -1, or more than ``W``, if the stream ended early.
    """
    count = words.size // 2
    position: Any = np.int64(0)
    for r in range(out.shape[0]):
        if position <= count - out.shape[1] - LANES:
            position = _decode_row(words, position, states, tables[table_of_row[r]], out[r])
        elif position <= count:
            position = _decode_row(tail, position - tail_start, states, tables[table_of_row[r]], out[r]) + tail_start
        else:
            return -1
    return position
