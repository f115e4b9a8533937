"""Units, numbers, rANS streams and rotary embeddings for the reference decoder (spec/codecs.md).

Imports numpy, zstandard and the standard library only. Plain rather than fast.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from decimal import Context, Decimal, localcontext
from typing import Any, TypeGuard

import numpy as np
import zstandard

#: Bytes, mantissa bits and exponent bias of each dtype.
BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1}
LARGEST = {"F32": (2 - 2**-23) * 2.0**127, "BF16": (2 - 2**-7) * 2.0**127, "F16": 65504.0, "F8_E4M3": 448.0,
           "F8_E5M2": 57344.0}  # fmt: skip
SINKS = 4


class DamagedError(Exception):
    """The archive breaks the specification; the text says how."""


def need(condition: Any, fact: str) -> None:
    """Refuse the archive, stating `fact`, unless the condition holds."""
    if not condition:
        raise DamagedError(fact)


class Reader:
    """Takes fields from a payload, never past its end."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> bytes:
        """The next `count` bytes."""
        need(0 <= count <= len(self.data) - self.at, "payload is truncated")
        self.at += count
        return self.data[self.at - count : self.at]

    def u8(self) -> int:
        """The next byte."""
        return self.take(1)[0]

    def u32(self) -> int:
        """The next 4 bytes."""
        return int(struct.unpack("<I", self.take(4))[0])

    def array(self, dtype: str, *shape: int) -> np.ndarray:
        """The next array."""
        kind = np.dtype(dtype)
        return np.frombuffer(self.take(kind.itemsize * math.prod(shape)), kind).reshape(shape)

    def rest(self) -> bytes:
        """All that is left."""
        return self.take(len(self.data) - self.at)

    def end(self) -> None:
        """Nothing may be left."""
        need(self.at == len(self.data), "payload has trailing bytes")


def unzstd(frame: bytes, size: int | None, limit: int = 1 << 30) -> bytes:
    """The content of one zstd frame that declares `size` bytes, or any number up to `limit` for None."""
    try:
        declared = zstandard.frame_content_size(frame)
        need(0 <= declared <= limit and size in (None, declared), "zstd frame has an unexpected size")
        data = zstandard.ZstdDecompressor().decompress(frame, max_output_size=declared, allow_extra_data=False)
    except zstandard.ZstdError:
        raise DamagedError("zstd frame is damaged") from None
    need(len(data) == declared, "zstd frame is truncated")
    return data


# --- floating point ---------------------------------------------------------------------------------------------


def _small_floats(exponent_bits: int, mantissa_bits: int) -> np.ndarray:
    """Magnitudes of all non-negative codes of a small format, as if its top exponent were an ordinary one."""
    codes = np.arange(1 << (exponent_bits + mantissa_bits))
    exponent, mantissa = codes >> mantissa_bits, codes & ((1 << mantissa_bits) - 1)
    bias = (1 << (exponent_bits - 1)) - 1
    fraction = mantissa / (1 << mantissa_bits) + (exponent > 0)
    return fraction * 2.0 ** (np.maximum(exponent, 1) - bias)


def _float8_table(dtype: str) -> np.ndarray:
    magnitudes = _small_floats(4, 3) if dtype == "F8_E4M3" else _small_floats(5, 2)
    if dtype == "F8_E4M3":
        magnitudes[127] = np.nan
    else:
        magnitudes[124], magnitudes[125:] = np.inf, np.nan
    return np.concatenate([magnitudes, -magnitudes]).astype(np.float32)


def to_float(words: np.ndarray, dtype: str) -> np.ndarray:
    """Words of a dtype as binary32; exact."""
    if dtype == "F32":
        return words.view(np.float32)
    if dtype == "F16":
        return words.view(np.float16).astype(np.float32)
    if dtype == "BF16":
        return (words.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return _float8_table(dtype)[words]


def to_words(values: np.ndarray, dtype: str) -> np.ndarray:
    """Finite binary32 values as words of a dtype, rounded to nearest even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    if dtype == "F32":
        return bits.copy()
    if dtype == "F16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.uint16)
    if dtype == "BF16":
        return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype("<u2")
    # The codes of a small format are in the order of their magnitudes, so rounding is a search between two codes.
    grid = _small_floats(4, 3) if dtype == "F8_E4M3" else _small_floats(5, 2)
    top = 127 if dtype == "F8_E4M3" else 124
    magnitude = np.abs(values).astype(np.float64)
    above = np.searchsorted(grid[: top + 1], magnitude).clip(1, top)
    below = above - 1
    middle = (grid[below] + grid[above]) / 2
    up = (magnitude > middle) | ((magnitude == middle) & (above % 2 == 0))
    return (np.where(up, above, below) | (bits >> np.uint32(31) << np.uint32(7))).astype(np.uint8)


# --- rANS streams -----------------------------------------------------------------------------------------------


def check_frequencies(freqs: np.ndarray) -> None:
    """Each table's frequencies sum to 4096."""
    need((freqs.astype(np.int64).sum(axis=1) == 4096).all(), "rANS frequencies do not sum to 4096")


def rans_decode(stream: bytes, tables: np.ndarray, table_of_row: np.ndarray, columns: int) -> np.ndarray:
    """Symbols U8 ``[R, columns]`` of a stream.

    Parameters
    ----------
    stream : bytes
    tables : ndarray
        Frequencies, ``[C, 256]``.
    table_of_row : ndarray
        ``[R]``, or ``[R, columns]`` where each symbol has a table of its own.
    columns : int
    """
    need(len(stream) >= 128 and len(stream) % 2 == 0, "rANS stream is truncated")
    check_frequencies(tables)
    states = np.frombuffer(stream[:128], "<u4").astype(np.uint64)
    words = np.frombuffer(stream[128:], "<u2").astype(np.uint64)
    freqs = tables.astype(np.uint64)
    starts = np.cumsum(freqs, axis=1) - freqs
    symbol_of_slot = np.array([np.repeat(np.arange(256), row.astype(np.int64)) for row in tables])
    symbol_of_slot = symbol_of_slot.reshape(len(tables), 4096)
    out = np.empty((len(table_of_row), columns), np.uint8)
    at = 0
    width = table_of_row.size // max(len(out), 1)
    for row, own in zip(out, table_of_row.reshape(len(out), width), strict=True):
        for first in range(0, columns, 32):
            lanes = states[: columns - first]
            table = own[first : first + 32] if len(own) == columns else own
            slot = lanes & np.uint64(4095)
            symbols = symbol_of_slot[table, slot]
            row[first : first + 32] = symbols
            lanes = freqs[table, symbols] * (lanes >> np.uint64(12)) + slot - starts[table, symbols]
            lanes &= np.uint64(0xFFFFFFFF)
            low = np.flatnonzero(lanes < 1 << 16)
            need(at + len(low) <= len(words), "rANS stream is truncated")
            lanes[low] = lanes[low] << np.uint64(16) | words[at : at + len(low)]
            at += len(low)
            states[: len(lanes)] = lanes
    need(at == len(words) and (states == 1 << 16).all(), "rANS stream is damaged")
    return out


# --- rotary embedding -------------------------------------------------------------------------------------------

_EXACT = Context(prec=60)
_PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899862803483")


def _number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300


def rope_frequencies(rope: Any, head_dim: int) -> np.ndarray | None:
    """Frequency of each pair, or None if the embedding is not known."""
    if not isinstance(rope, dict) or rope.get("style", "half") not in ("half", "interleaved"):
        return None
    kind, theta, dim = rope.get("type", "default"), rope.get("theta"), rope.get("dim", head_dim)
    if not _number(theta) or theta < 1 or type(dim) is not int or not 2 <= dim <= head_dim or dim % 2:
        return None
    theta = float(theta)
    if kind == "dynamic":
        theta = _dynamic_theta(rope, theta, dim)
        if theta is None:
            return None
    base = np.array([
        float(_EXACT.power(Decimal(theta), _EXACT.divide(Decimal(-i), Decimal(dim)))) for i in range(0, dim, 2)
    ])  # fmt: skip
    if kind in ("default", "dynamic"):
        return base
    if kind == "longrope":
        return _longrope(rope, base)
    factor = rope.get("factor")
    if kind not in ("linear", "llama3", "yarn") or not _number(factor) or factor < 1:
        return None
    if kind == "linear":
        return base / float(factor)
    if kind == "yarn":
        return _yarn(rope, base, theta, float(factor))
    names = ("low_freq_factor", "high_freq_factor", "original_max_position")
    numbers = [float(number) for name in names if _number(number := rope.get(name))]
    if len(numbers) < len(names):
        return None
    low, high, context = numbers
    if low == high or context <= 0:
        return None
    wavelength = 6.283185307179586 / base
    smooth = np.clip((context / wavelength - low) / (high - low), 0.0, 1.0)
    return ((1 - smooth) * base) / float(factor) + smooth * base


def _lengths(rope: dict[str, Any]) -> tuple[float, float] | None:
    """The sequence's length, and the original one of the model."""
    original = rope.get("original_max_position")
    length = rope.get("length", original)
    if not _number(original) or not _number(length) or original <= 0 or length <= 0:
        return None
    return float(length), float(original)


def _dynamic_theta(rope: dict[str, Any], theta: float, dim: int) -> float | None:
    factor, lengths = rope.get("factor"), _lengths(rope)
    if not _number(factor) or factor < 1 or lengths is None or dim < 4:
        return None
    if lengths[0] <= lengths[1]:
        return theta
    with localcontext(_EXACT):
        scale = Decimal(float(factor))
        growth = scale * Decimal(lengths[0]) / Decimal(lengths[1]) - (scale - 1)
        grown = Decimal(theta) * growth ** (Decimal(dim) / Decimal(dim - 2))
        return float(grown) if grown < 1e300 else None


def _longrope(rope: dict[str, Any], base: np.ndarray) -> np.ndarray | None:
    lengths = _lengths(rope)
    for factors in (rope.get("short_factor"), rope.get("long_factor")):
        if not isinstance(factors, list) or len(factors) != len(base):
            return None
        if not all(_number(factor) and factor >= 0.5 for factor in factors):
            return None
    if lengths is None:
        return None
    return base / np.array(rope["long_factor" if lengths[0] > lengths[1] else "short_factor"], np.float64)


def _yarn(rope: dict[str, Any], base: np.ndarray, theta: float, factor: float) -> np.ndarray | None:
    given = (rope.get("beta_fast", 32), rope.get("beta_slow", 1), rope.get("original_max_position"))
    numbers = [float(number) for number in given if _number(number) and number > 0]
    truncate = rope.get("truncate", True)
    if len(numbers) < 3 or theta == 1 or not isinstance(truncate, bool):
        return None
    bounds = []
    for turns in numbers[:2]:
        with localcontext(_EXACT):
            ratio = Decimal(numbers[2]) / (Decimal(turns) * 2 * _PI)
            bounds.append(float(2 * len(base) * ratio.ln() / (2 * Decimal(theta).ln())))
    low, high = bounds
    if truncate:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, 2.0 * len(base) - 1)
    with np.errstate(over="ignore"):
        ramp = np.clip((np.arange(len(base)) - low) / (0.001 if low == high else high - low), 0.0, 1.0)
    return base / factor * ramp + base * (1 - ramp)


def _exact_sine(angle: float, quarter_turns: int) -> np.float32:
    """Sine of an angle plus quarter turns, rounded once to binary32."""
    with localcontext(_EXACT):
        x = Decimal(angle) + quarter_turns * _PI / 2
        x -= 2 * _PI * (x / (2 * _PI)).to_integral_value()
        term = total = x
        for n in range(3, 99, 2):
            term *= -x * x / (n * (n - 1))
            total += term
        rough = np.float32(float(total))
        near = (rough, np.nextafter(rough, np.float32(-2)), np.nextafter(rough, np.float32(2)))
        return min(near, key=lambda candidate: abs(Decimal(float(candidate)) - total))


def _rounded(values: np.ndarray, angles: np.ndarray, quarter_turns: int) -> np.ndarray:
    """Binary64 sines as correctly rounded binary32: exact arithmetic decides beside a middle between neighbours."""
    out = values.astype(np.float32)
    beside = (values.view(np.uint64) & np.uint64((1 << 29) - 1)).astype(np.int64) - (1 << 28)
    for row, column in np.argwhere(np.abs(beside) <= 16):
        out[row, column] = _exact_sine(float(angles[row, column]), quarter_turns)
    return out


def rope_rotate(keys: np.ndarray, frequencies: np.ndarray, style: str, position: int, back: bool) -> np.ndarray:
    """Rotate binary32 keys ``[H, T, D]`` to positions from `position` on, or back from there."""
    angles = np.arange(position, position + keys.shape[1], dtype=np.float64)[:, None] * frequencies
    cos, sin = _rounded(np.cos(angles), angles, 1), _rounded(np.sin(angles), angles, 0)
    if back:
        sin = -sin
    pairs = len(frequencies)
    first = slice(0, 2 * pairs, 2) if style == "interleaved" else slice(0, pairs)
    second = slice(1, 2 * pairs, 2) if style == "interleaved" else slice(pairs, 2 * pairs)
    x, y = keys[..., first], keys[..., second]
    out = keys.copy()
    out[..., first] = x * cos - y * sin
    out[..., second] = y * cos + x * sin
    return out


# --- units -----------------------------------------------------------------------------------------------------

KeyValue = tuple[np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Unit:
    """A unit's place and shape: layer number, heads, dimensions, dtype, tokens, and position of the first token."""

    layer: int
    heads: int
    k_dim: int
    v_dim: int
    dtype: str
    tokens: int
    position: int

    @property
    def word(self) -> str:
        """Word type."""
        return f"<u{BYTES[self.dtype]}"

    @property
    def channels(self) -> int:
        """Number of channel rows."""
        return self.heads * (self.k_dim + self.v_dim)

    @property
    def shapes(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """Shapes of keys and values."""
        return (self.heads, self.tokens, self.k_dim), (self.heads, self.tokens, self.v_dim)

    def from_rows(self, rows: np.ndarray) -> KeyValue:
        """Keys and values from channel rows ``[R, T]``."""
        split = self.heads * self.k_dim
        keys = rows[:split].reshape(self.heads, self.k_dim, self.tokens).transpose(0, 2, 1)
        values = rows[split:].reshape(self.heads, self.v_dim, self.tokens).transpose(0, 2, 1)
        return keys, values

    def to_rows(self, arrays: KeyValue) -> np.ndarray:
        """Inverse of `from_rows`."""
        return np.concatenate([part.transpose(0, 2, 1).reshape(-1, self.tokens) for part in arrays])


def state_array(state: dict[str, np.ndarray], name: str, dtype: str, *shape: int) -> np.ndarray:
    """An array of a codec state, which must be of this dtype and shape."""
    need(name in state, f"codec state lacks the array {name!r}")
    array = state[name]
    need(array.dtype == np.dtype(dtype) and array.shape == shape, f"codec state array {name!r} has a wrong shape")
    return array


def only_arrays(state: dict[str, np.ndarray], names: set[str]) -> None:
    """The state holds these arrays and no others."""
    need(set(state) == names, "codec state does not hold the arrays that its codec needs")
