"""Interleaved rANS on a device: one warp codes one stream, a lane of it each of the 32 lanes of the format.

Bitstream: spec/codecs.md, section "rANS streams"; on the CPU `pltpack.codec.rans`, whose bytes these kernels write and
read. A step votes which lanes need a word; the lanes below tell each which of the next words is its own, so that a
warp's reads are one run of memory. Tables lie in shared memory as cumulative frequencies, 2 bytes a symbol, and are
searched by halves: slot tables of 16 kB each would not fit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda, types

from pltpack.codec.rans import HEADER_BYTES, LANES, PROB_SCALE
from pltpack.errors import UnsupportedError
from pltpack.gpu import arithmetic, device  # noqa: F401 - arithmetic teaches the simulator warps

#: Columns of a table of streams, int64: where the stream is in the payloads (bytes), its words (u16), its rows, where
#: they begin in arrays of rows, its symbols per row, where they begin in arrays of symbols, and where the numbers of
#: the rows' tables begin (many streams may have the same).
AT, WORDS, ROWS, FIRST_ROW, COLUMNS, SYMBOLS, TABLES, STREAM_COLUMNS = range(8)
#: States between steps are at least this.
_LOW = 1 << 16
_ALL = 0xFFFFFFFF


def starts(freqs: np.ndarray, symbols: int = 256) -> np.ndarray:
    """Tables as kernels take them: uint16 ``[S, symbols]``, sums of the frequencies below each symbol.

    Parameters
    ----------
    freqs : ndarray
        uint16 ``[S, >= symbols]``, each row with sum 4096; `symbols` is a power of two.
    symbols : int
        Symbols from here on must not occur.

    Raises
    ------
    UnsupportedError
        If the tables do not fit in a block's shared memory.
    """
    wide = np.asarray(freqs[:, :symbols], dtype=np.int64)
    if 2 * wide.size > device.SHARED_BYTES:
        raise UnsupportedError(f"{len(wide)} entropy tables do not fit in a block's shared memory")
    found: np.ndarray = (np.cumsum(wide, axis=1) - wide).astype(np.uint16)
    return found


@cuda.jit(device=True)
def _load(tables: Any, cumulative: Any) -> None:
    symbols = cumulative.shape[1]
    for i in range(cuda.threadIdx.x, cumulative.shape[0] * symbols, cuda.blockDim.x):
        tables[i] = cumulative[i // symbols, i % symbols]
    cuda.syncthreads()


@cuda.jit(device=True)
def _find(tables: Any, base: Any, symbols: Any, slot: Any) -> Any:
    """The symbol whose slots hold `slot`: the last one that starts at or below it."""
    # Unsigned 32-bit places: a signed one would be looked at for being negative, in twice the instructions.
    first = np.uint32(base)
    found = first
    half = np.uint32(symbols >> 1)
    while half > np.uint32(0):
        if tables[np.uint32(found + half)] <= slot:
            found = np.uint32(found + half)
        half = np.uint32(half >> np.uint32(1))
    return np.int32(found - first)


@cuda.jit(device=True)
def _end(tables: Any, base: Any, symbols: Any, symbol: Any) -> Any:
    """Where the slots of a symbol end."""
    return np.uint32(tables[np.uint32(base + symbol + 1)]) if symbol + 1 < symbols else np.uint32(PROB_SCALE)


@cuda.jit(device=True)
def _word(data: Any, at: Any) -> Any:
    # Streams may begin at odd bytes.
    return np.uint32(data[at]) | np.uint32(np.uint32(data[at + 1]) << np.uint32(8))


@cuda.jit
def decode_kernel(
    data: Any, streams: Any, table_of_row: Any, cumulative: Any, escape: Any, weight: Any, symbols: Any,
    escapes_before: Any, weight_before: Any, escapes_of: Any, damaged: Any
) -> None:  # fmt: skip
    """Decode streams, one warp each; needs the tables' bytes of dynamic shared memory.

    Parameters
    ----------
    data : uint8 ``[bytes]``
        Payloads. Of each stream its states and words lie inside: callers check that.
    streams : int64 ``[n, STREAM_COLUMNS]``
    table_of_row : uint8 ``[rows]``
    cumulative : uint16 ``[S, symbols]``
        From `starts`.
    escape : int32 ``[S]``
        Each table's escape symbol, -1 for none.
    weight : int32 ``[S]``
        What a row of a table adds to `weight_before`.
    symbols : uint8 ``[...]``
        Filled.
    escapes_before, weight_before : int32 ``[rows]``
        Filled: sums over the rows of the stream before each row, of escapes and of weights.
    escapes_of : int32 ``[n]``
        Filled: escapes of each stream.
    damaged : uint8 ``[n]``
        Filled: 1 where a stream's words or its last states are not what they must be.
    """
    tables = cuda.shared.array(0, types.uint16)
    _load(tables, cumulative)
    lane = np.int32(cuda.threadIdx.x & 31)
    below = np.uint32((np.int64(1) << np.int64(lane)) - 1)
    number = cuda.blockIdx.x * (cuda.blockDim.x >> 5) + (cuda.threadIdx.x >> 5)
    if number < streams.shape[0]:
        line = streams[number]
        words_at, count = line[AT] + HEADER_BYTES, np.int32(line[WORDS])
        columns, to, width = np.int32(line[COLUMNS]), line[SYMBOLS], cumulative.shape[1]
        at = line[AT] + 4 * lane
        state = np.uint32(_word(data, at) | np.uint32(_word(data, at + 2) << np.uint32(16)))
        position, escapes, weights = np.int32(0), np.int32(0), np.int32(0)
        for row in range(line[FIRST_ROW], line[FIRST_ROW] + line[ROWS]):
            table = np.int32(table_of_row[line[TABLES] + row - line[FIRST_ROW]])
            base, code = table * width, escape[table]
            if lane == 0:
                escapes_before[row] = escapes
                weight_before[row] = weights
            for first in range(0, columns, LANES):
                active = first + lane < columns
                symbol = np.int32(-2)
                if active:
                    slot = np.uint32(state & np.uint32(PROB_SCALE - 1))
                    symbol = _find(tables, base, width, slot)
                    start = np.uint32(tables[np.uint32(base + symbol)])
                    freq = np.uint32(_end(tables, base, width, symbol) - start)
                    state = np.uint32(freq * np.uint32(state >> np.uint32(12)) + slot - start)
                    symbols[to + first + lane] = np.uint8(symbol)
                low = active and state < np.uint32(_LOW)
                votes = np.uint32(cuda.ballot_sync(_ALL, low))
                if low:
                    mine = position + np.int32(cuda.popc(votes & below))
                    word = np.uint32(0)
                    if mine < count:
                        word = _word(data, words_at + 2 * mine)
                    state = np.uint32(np.uint32(state << np.uint32(16)) | word)
                position = np.int32(position + np.int32(cuda.popc(votes)))
                if code >= 0:
                    marked = np.uint32(cuda.ballot_sync(_ALL, symbol == code))
                    escapes = np.int32(escapes + np.int32(cuda.popc(marked)))
            to += columns
            weights = np.int32(weights + weight[table])
        wrong = np.uint32(cuda.ballot_sync(_ALL, position != count or state != np.uint32(_LOW)))
        if lane == 0:
            escapes_of[number] = escapes
            damaged[number] = np.uint8(wrong != np.uint32(0))


@cuda.jit
def encode_kernel(
    symbols: Any, streams: Any, table_of_row: Any, cumulative: Any, words: Any, states: Any, first_word: Any
) -> None:
    """Code streams, one warp each, from the last symbol to the first; shared memory as of `decode_kernel`.

    Parameters
    ----------
    symbols : uint8 ``[...]``
    streams : int64 ``[n, STREAM_COLUMNS]``
        `AT` is where the stream's words may begin in `words` (words), `WORDS` how many may come: one for each symbol.
    table_of_row, cumulative
        As of `decode_kernel`.
    words : uint16 ``[...]``
        Filled; each stream's are at the end of its place.
    states : uint32 ``[n, 32]``
        Filled.
    first_word : int32 ``[n]``
        Filled: number of the first word used, -1 if a symbol has no frequency.
    """
    tables = cuda.shared.array(0, types.uint16)
    _load(tables, cumulative)
    lane = np.int32(cuda.threadIdx.x & 31)
    number = cuda.blockIdx.x * (cuda.blockDim.x >> 5) + (cuda.threadIdx.x >> 5)
    if number < streams.shape[0]:
        line = streams[number]
        columns, width = np.int32(line[COLUMNS]), cumulative.shape[1]
        steps = (columns + 31) >> 5
        state, position = np.uint32(_LOW), np.int32(line[WORDS])
        rows = line[ROWS]
        impossible = False
        for back in range(rows):
            row = rows - 1 - back
            base = np.int32(table_of_row[line[TABLES] + row]) * width
            for step in range(steps):
                column = ((steps - 1 - step) << 5) + lane
                active = column < columns
                start, freq = np.uint32(0), np.uint32(1)
                if active:
                    symbol = np.int32(symbols[line[SYMBOLS] + row * columns + column])
                    start = np.uint32(tables[np.uint32(base + symbol)])
                    freq = np.uint32(_end(tables, base, width, symbol) - start)
                    impossible = impossible or freq == np.uint32(0)
                    freq = max(freq, np.uint32(1))
                full = active and np.uint32(state >> np.uint32(20)) >= freq
                votes = np.uint32(cuda.ballot_sync(_ALL, full))
                if full:
                    # The highest lane's word comes last.
                    mine = position - np.int32(cuda.popc(votes >> np.uint32(lane)))
                    words[line[AT] + mine] = np.uint16(state & np.uint32(0xFFFF))
                    state = np.uint32(state >> np.uint32(16))
                position = np.int32(position - np.int32(cuda.popc(votes)))
                if active:
                    quotient = np.uint32(state // freq)
                    rest = np.uint32(state - np.uint32(quotient * freq))
                    state = np.uint32(np.uint32(quotient << np.uint32(12)) + rest + start)
        states[number, lane] = state
        wrong = np.uint32(cuda.ballot_sync(_ALL, impossible))
        if lane == 0:
            first_word[number] = np.int32(-1) if wrong != np.uint32(0) else position


_BYTES, _SHORT, _INTS, _LONGS = types.uint8[::1], types.uint16[::1], types.int32[::1], types.int64[:, ::1]
#: Kernel -> argument types, for compiling without a device.
SIGNATURES = {
    decode_kernel: (_BYTES, _LONGS, _BYTES, types.uint16[:, ::1], _INTS, _INTS, _BYTES, _INTS, _INTS, _INTS,
                    _BYTES),
    encode_kernel: (_BYTES, _LONGS, _BYTES, types.uint16[:, ::1], _SHORT, types.uint32[:, ::1], _INTS),
}  # fmt: skip


class Decoded:
    """Symbols of decoded streams, on the device.

    Attributes
    ----------
    symbols : array
        uint8, as the streams' table places them.
    escapes_before, weight_before : array
        int32, per row: see `decode_kernel`.
    escapes_of, damaged : array
        int32 and uint8, per stream.
    """

    def __init__(self, rows: int, symbols: int, streams: int) -> None:
        xp = device.arrays()
        self.symbols = xp.empty(max(symbols, 1), np.uint8)
        self.escapes_before, self.weight_before = (xp.empty(max(rows, 1), np.int32) for _ in range(2))
        self.escapes_of = xp.zeros(max(streams, 1), np.int32)
        self.damaged = xp.zeros(max(streams, 1), np.uint8)


def decode(data: Any, streams: np.ndarray, table_of_row: Any, cumulative: Any, escape: Any, weight: Any) -> Decoded:
    """Decode streams on the device; arguments as of `decode_kernel`, `streams` on the host."""
    ends = streams[:, FIRST_ROW] + streams[:, ROWS]
    symbols = streams[:, SYMBOLS] + streams[:, ROWS] * streams[:, COLUMNS]
    out = Decoded(int(ends.max(initial=0)), int(symbols.max(initial=0)), len(streams))
    if len(streams):
        shape = device.warps_of(len(streams), 2 * cumulative.size)
        decode_kernel[shape](data, device.put(streams), table_of_row, cumulative, escape, weight, out.symbols,
                             out.escapes_before, out.weight_before, out.escapes_of, out.damaged)  # fmt: skip
    return out


def encode(symbols: Any, streams: np.ndarray, table_of_row: Any, cumulative: Any) -> list[bytes]:
    """Code streams of symbols that lie on the device; the bytes of `pltpack.codec.rans.encode` for each.

    Parameters
    ----------
    symbols, table_of_row, cumulative : array
        As of `encode_kernel`.
    streams : ndarray
        int64 ``[n, STREAM_COLUMNS]`` on the host; `AT` and `WORDS` are set here.

    Raises
    ------
    ValueError
        If a symbol has frequency 0 in its table.
    """
    if not len(streams):
        return []
    xp, lines = device.arrays(), streams.copy()
    lines[:, WORDS] = lines[:, ROWS] * lines[:, COLUMNS]
    lines[:, AT] = np.cumsum(lines[:, WORDS]) - lines[:, WORDS]
    words = xp.empty(max(1, int(lines[:, WORDS].sum())), np.uint16)
    states, first = xp.empty((len(lines), LANES), np.uint32), xp.empty(len(lines), np.int32)
    shape = device.warps_of(len(lines), 2 * cumulative.size)
    encode_kernel[shape](symbols, device.put(lines), table_of_row, cumulative, words, states, first)
    begins = device.get(first)
    if (begins < 0).any():
        raise ValueError("a symbol has frequency 0 in its rANS table")
    heads, tails = device.get(states).astype("<u4"), device.get(words).astype("<u2")
    return [
        heads[i].tobytes() + tails[line[AT] + begins[i] : line[AT] + line[WORDS]].tobytes()
        for i, line in enumerate(lines)
    ]
