"""Interleaved rANS where each symbol has a table of its own choice: the loops of `pltpack.codec.rans` but for that.

Lanes, steps and words are those of spec/codecs.md, section "rANS streams".
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from pltpack.codec import rans_mixed_simd
from pltpack.codec.rans import HEADER_BYTES, KERNEL, LANES, PROB_SCALE
from pltpack.codec.rans_scalar import PROB_BITS, STATE_LOW
from pltpack.codec.scratch import Scratch

_scratch = Scratch()


@numba.njit(nogil=True, cache=True)
def encode_rows(symbols: Any, kinds: Any, tables: Any, words: Any, states: Any) -> Any:
    """Code all rows from the last symbol to the first, filling `words` from its end; the first word used.

    Parameters
    ----------
    symbols, kinds : ndarray
        uint8 ``[R, N]``: symbols, all with a frequency above 0, and their tables.
    tables : ndarray
        uint32 ``[K, 256]`` of ``freq | start << 16``.
    words : ndarray
        uint16, at least ``R * N`` entries; overwritten.
    states : ndarray
        uint32 ``[32]``; read as the initial and left as the final states.
    """
    rows, columns = symbols.shape
    position = np.int64(words.size)
    for r in range(rows - 1, -1, -1):
        row, kind = symbols[r], kinds[r]
        for i in range(columns - 1, -1, -1):
            lane = i & (LANES - 1)
            entry = tables[kind[i], row[i]]
            freq = entry & np.uint32(0xFFFF)
            x = states[lane]
            full = np.uint32((x >> np.uint32(20)) >= freq)
            words[position - 1] = np.uint16(x & np.uint32(0xFFFF))
            position -= np.int64(full)
            x >>= full << np.uint32(4)
            quotient = x // freq
            rest = x - quotient * freq
            states[lane] = np.uint32((quotient << np.uint32(PROB_BITS)) + rest + (entry >> np.uint32(16)))
    return position


@numba.njit(nogil=True, cache=True)
def _decode_step(words: Any, at: Any, states: Any, slots: Any, coding: Any, kind: Any, row: Any, base: int,
                 lanes: int) -> Any:  # fmt: skip
    for lane in range(lanes):
        s, table = states[lane], np.uint32(kind[base + lane])
        slot = s & np.uint32(PROB_SCALE - 1)
        row[base + lane] = symbol = slots[table << np.uint32(PROB_BITS) | slot]
        entry = coding[table, symbol]
        states[lane] = (entry & np.uint32(0xFFFF)) * (s >> np.uint32(PROB_BITS)) + slot - (entry >> np.uint32(16))
    for lane in range(lanes):
        s = states[lane]
        low = np.uint32(s < np.uint32(STATE_LOW))
        states[lane] = s << (low << np.uint32(4)) | np.uint32(words[at]) * low
        at += np.int64(low)
    return at


@numba.njit(nogil=True, cache=True)
def decode_rows(words: Any, count: int, states: Any, slots: Any, coding: Any, kinds: Any, out: Any) -> Any:
    """Decode all rows.

    Parameters
    ----------
    words : ndarray
        uint16, the `count` words of the stream and ``N + 32`` words of padding: a row reads at most one a symbol.
    count : int
    states : ndarray
        uint32 ``[32]``; read as the initial and left as the final states.
    slots, coding : ndarray
        From `symbols_of_slots` and `pltpack.codec.rans.encode_tables`.
    kinds, out : ndarray
        uint8 ``[R, N]``: tables, and symbols to be filled.

    Returns
    -------
    int
        Number of words read; -1, or more than `count`, if the stream ended early.
    """
    rows, columns = out.shape
    at = np.int64(0)
    whole = columns // LANES * LANES
    for r in range(rows):
        if at > count:
            return -1
        row, kind = out[r], kinds[r]
        for base in range(0, whole, LANES):
            at = _decode_step(words, at, states, slots, coding, kind, row, base, LANES)
        at = _decode_step(words, at, states, slots, coding, kind, row, whole, columns - whole)
    return at


#: Name -> (encoding loop, decoding loop), as in `pltpack.codec.rans`. All write the same bytes.
LOOPS = {
    "avx512": (rans_mixed_simd.encode_rows_avx512, rans_mixed_simd.decode_rows_avx512),
    "avx2": (encode_rows, rans_mixed_simd.decode_rows_avx2),
    "portable": (encode_rows, decode_rows),
}
_ENCODE_ROWS, _DECODE_ROWS = LOOPS[KERNEL]


def encode(symbols: np.ndarray, kinds: np.ndarray, tables: np.ndarray) -> bytes:
    """Encode symbols.

    Parameters
    ----------
    symbols, kinds : ndarray
        uint8 ``[R, N]``, C-contiguous: symbols, all with a frequency above 0, and their tables.
    tables : ndarray
        uint32 ``[K, 256]`` from `pltpack.codec.rans.encode_tables`.
    """
    words = _scratch.array("words", (symbols.size,), np.uint16)
    states = np.full(LANES, STATE_LOW, dtype=np.uint32)
    first = _ENCODE_ROWS(symbols, kinds, tables, words, states)
    return states.astype("<u4", copy=False).tobytes() + words[first:].astype("<u2", copy=False).tobytes()


def symbols_of_slots(freqs: np.ndarray) -> np.ndarray:
    """What `decode` looks up: the symbol of each slot of each table, and room for loads of 4 bytes.

    One table of all that a symbol needs (`pltpack.codec.rans.decode_tables`) would be four times as large, and in
    nobody's cache.

    Parameters
    ----------
    freqs : ndarray
        uint16 ``[K, 256]``; each row sums to 4096.

    Returns
    -------
    ndarray
        uint8 ``[4096 K + 3]``.
    """
    symbols = np.tile(np.arange(256, dtype=np.uint8), len(freqs))
    return np.concatenate([np.repeat(symbols, freqs.reshape(-1)), np.zeros(3, np.uint8)])


def decode(
    stream: bytes | memoryview, kinds: np.ndarray, slots: np.ndarray, coding: np.ndarray, out: np.ndarray
) -> None:
    """Decode a stream written by `encode`.

    Parameters
    ----------
    stream : bytes-like
    kinds : ndarray
        uint8 ``[R, N]``, C-contiguous, all below K.
    slots, coding : ndarray
        From `symbols_of_slots` and `pltpack.codec.rans.encode_tables`.
    out : ndarray
        uint8 ``[R, N]``, C-contiguous, to be filled with the symbols.

    Raises
    ------
    ValueError
        If the stream is damaged.
    """
    data = np.frombuffer(stream, dtype=np.uint8)
    if len(data) < HEADER_BYTES or len(data) % 2:
        raise ValueError("rANS stream is truncated")
    count = (len(data) - HEADER_BYTES) // 2
    words = _scratch.array("words", (count + kinds.shape[1] + LANES,), np.uint16)
    words[count:] = 0
    words[:count] = data[HEADER_BYTES:].view("<u2")
    states = data[:HEADER_BYTES].view("<u4").astype(np.uint32)
    if _DECODE_ROWS(words, count, states, slots, coding, kinds, out) != count or (states != STATE_LOW).any():
        raise ValueError("rANS stream is damaged")
