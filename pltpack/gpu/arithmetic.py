"""Arithmetic of kernels: single binary32 operations that no compiler fuses, and rounding to the cache dtypes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda

from pltpack.gpu import simulator
from pltpack.gpu.device import is_simulated

if is_simulated():
    simulator.install()

    @cuda.jit(device=True)
    def times(a: Any, b: Any) -> Any:
        """``a * b``, rounded."""
        return np.float32(a * b)

    @cuda.jit(device=True)
    def plus(a: Any, b: Any) -> Any:
        """``a + b``, rounded."""
        return np.float32(a + b)

    @cuda.jit(device=True)
    def over(a: Any, b: Any) -> Any:
        """``a / b``, rounded."""
        return np.float32(a / b)

    @cuda.jit(device=True)
    def nearest(a: Any) -> Any:
        """To an integral value, ties to even."""
        return np.float32(np.rint(a))
else:
    from numba.cuda import libdevice

    # The PTX of a plain product and sum may become one fused operation; these may not.
    times, plus, over, nearest = libdevice.fmul_rn, libdevice.fadd_rn, libdevice.fdiv_rn, libdevice.rintf


@cuda.jit(device=True)
def bits_of(x: Any) -> Any:
    """Bits of a binary32 number, uint32."""
    return np.float32(x).view(np.uint32)


@cuda.jit(device=True)
def float_of(bits: Any) -> Any:
    """Inverse of `bits_of`."""
    return np.uint32(bits).view(np.float32)


@cuda.jit(device=True)
def clamp(x: Any, limit: Any) -> Any:
    """Within ±limit."""
    return min(max(x, np.float32(-limit)), limit)


@cuda.jit(device=True)
def to_bf16(x: Any) -> Any:
    """Word of the nearest bfloat16, ties to even; what is not a number may become infinite."""
    bits = np.int64(bits_of(x))
    return np.uint16(((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF)


@cuda.jit(device=True)
def to_narrow(x: Any, mantissa: Any, bias: Any) -> Any:
    """Word of the nearest number of a format with an exponent below 8 bits, ties to even.

    Parameters
    ----------
    x : float32
        No larger than the format's largest finite number.
    mantissa, bias : int
        Mantissa bits, and exponent bias: 10 and 15 for F16, 3 and 7 for F8_E4M3, 2 and 15 for F8_E5M2.
    """
    bits = np.int64(bits_of(x))
    sign = bits >> 31
    exponent: Any = (bits >> 23) & 0xFF
    fraction: Any = bits & 0x7FFFFF
    if exponent > 0:
        fraction |= 1 << 23
    else:
        exponent = 1
    # Subnormal numbers of the format have its lowest exponent and drop more bits.
    field = exponent - 127 + bias
    drop = 23 - mantissa
    if field < 1:
        drop = min(drop + 1 - field, 25)
        field = 1
    kept = fraction >> drop
    rest, half = fraction & ((1 << drop) - 1), 1 << (drop - 1)
    if rest > half or (rest == half and kept & 1 == 1):
        kept += 1
    # A carry out of the fraction moves the exponent, as its bits follow on.
    magnitude = ((field - 1) << mantissa) + kept
    return magnitude | sign << (7 if mantissa < 10 else 15)


@cuda.jit(device=True)
def from_narrow(word: Any, mantissa: Any, bias: Any) -> Any:
    """Inverse of `to_narrow`; F16 and F8_E5M2 have infinities, all three have what is not a number."""
    top = 15 if mantissa == 10 else 7
    sign, field = (word >> top) & 1, (word & ((1 << top) - 1)) >> mantissa
    fraction = word & ((1 << mantissa) - 1)
    # A subnormal number is its fraction times a power of two, which binary32 holds.
    value = float_of(np.uint32((127 + 1 - bias - mantissa) << 23)) * np.float32(fraction)
    if field > 0:
        exponent = field - bias + 127
        if field == 31 or (mantissa == 3 and field == 15 and fraction == 7):
            exponent = 255
        value = float_of(np.uint32((exponent << 23) | (fraction << (23 - mantissa))))
    return np.float32(-value) if sign == 1 else np.float32(value)
