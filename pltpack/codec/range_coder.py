"""A range coder over integer frequencies: 64-bit window, carries go back into what is written.

A number from 0 to 1 in binary, without end, is narrowed symbol by symbol. With ``r = floor(range / total)`` a symbol of
frequency f that begins at s of the total takes ``[low + r s, low + r (s + f))``. While the range is below 2^48, the top
byte of the window is written and the window moves by 8 bits. Totals are at most 2^32, so what is lost to rounding is
below 2^-16 of a symbol. The stream ends with the shortest bytes that name a number of the last interval; bytes behind
the end read as 0. Source: Martin, "Range encoding: an algorithm for removing redundancy from a digitised message",
1979.

Bitstream: spec/codecs.md, section "Range coder".
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

#: Most that the frequencies of one symbol may sum to.
MAX_TOTAL = 1 << 32
#: Bytes that one symbol can take at most.
SYMBOL_BYTES = 5
#: Bytes beyond those of the symbols.
END_BYTES = 9

_LEAST = np.uint64(1 << 48)
_TOP = np.uint64(56)
_BYTE = np.uint64(8)
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)


def begin_encoding() -> np.ndarray:
    """State of an encoder: uint64 of low end, range, and number of bytes written."""
    return np.array([0, _ALL, 0], np.uint64)


@numba.njit(nogil=True, cache=True)
def encode(state: Any, out: Any, start: Any, frequency: Any, total: Any) -> None:
    """Narrow to a symbol; `out` uint8 must have room for `SYMBOL_BYTES` more."""
    low, step = state[0], state[1] // np.uint64(total)
    moved = low + step * np.uint64(start)
    at = np.int64(state[2])
    if moved < low:
        _carry(out, at)
    span = step * np.uint64(frequency)
    while span < _LEAST:
        out[at] = np.uint8(moved >> _TOP)
        at += 1
        moved <<= _BYTE
        span <<= _BYTE
    state[0], state[1], state[2] = moved, span, np.uint64(at)


@numba.njit(nogil=True, cache=True)
def _carry(out: Any, at: Any) -> None:
    at -= 1
    while out[at] == 255:
        out[at] = 0
        at -= 1
    out[at] += 1


@numba.njit(nogil=True, cache=True)
def end_encoding(state: Any, out: Any) -> Any:
    """Write the end; returns the length of the stream."""
    low, span, at = state[0], state[1], np.int64(state[2])
    for count in range(1, 9):
        rest = _ALL >> np.uint64(8 * count) if count < 8 else np.uint64(0)
        added = (np.uint64(0) - low) & rest
        if added < span:
            moved = low + added
            if moved < low:
                _carry(out, at)
            for index in range(count):
                out[at] = np.uint8(moved >> np.uint64(56 - 8 * index))
                at += 1
            break
    while at > 0 and out[at - 1] == 0:
        at -= 1
    return at


@numba.njit(nogil=True, cache=True)
def _next_byte(data: Any, at: Any) -> Any:
    return np.uint64(data[at]) if at < data.size else np.uint64(0)


@numba.njit(nogil=True, cache=True)
def begin_decoding(state: Any, data: Any) -> None:
    """Set a decoder's state, uint64 ``[3]``: number above the low end, range, and number of bytes read."""
    value = np.uint64(0)
    for index in range(8):
        value = (value << _BYTE) | _next_byte(data, index)
    state[0], state[1], state[2] = value, _ALL, np.uint64(8)


@numba.njit(nogil=True, cache=True)
def slot(state: Any, total: Any) -> Any:
    """Where in the total the next symbol is."""
    found = state[0] // (state[1] // np.uint64(total))
    return np.int64(min(found, np.uint64(total) - np.uint64(1)))


@numba.njit(nogil=True, cache=True)
def consume(state: Any, data: Any, start: Any, frequency: Any, total: Any) -> None:
    """Take the symbol whose range holds `slot` off."""
    step = state[1] // np.uint64(total)
    value = state[0] - step * np.uint64(start)
    span = step * np.uint64(frequency)
    at = np.int64(state[2])
    while span < _LEAST:
        value = (value << _BYTE) | _next_byte(data, at)
        span <<= _BYTE
        at += 1
    state[0], state[1], state[2] = value, span, np.uint64(at)
