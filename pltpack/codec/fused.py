"""The group codec's usual row in registers: low bits, dequantization, rotation and rounding of 16 pairs at once.

A pair of a symbol, channels j and P + j, is also a pair of half-style RoPE, so nothing between the entropy decoder's
bytes and the bfloat16 words needs memory. Arithmetic is that of `pltpack.codec.quantize`, operation by operation; rows
with escapes or odd shapes take the path there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types
from numba.extending import intrinsic

from pltpack.codec.vectors import _F32, _I1, _I8, _I16, _I32, BLOCK, _any_zero, _Emitter, _nibbles

# Arguments of a block, by number.
_SYMBOLS, _AT, _LOW, _PLANE, _WIDTH, _UPPER, _STEP, _SHRINK = range(8)
_CENTRES, _CENTRE, _HALF, _COS, _SIN, _TURN, _WORDS, _TO = range(8, 16)


def _digit(e: _Emitter, raw: int, upper: bool) -> Any:
    """The low bits of 16 channels, int32: plane p gives bit p."""
    total = None
    for p in range(raw):
        place = e._index(e.offset(_PLANE))
        if p:
            width = e._index(e.offset(_WIDTH))
            for _ in range(p):
                place = e.b.add(place, width)
        if upper:
            place = e.b.add(place, e._index(e.offset(_UPPER)))
        pointer = e.b.bitcast(e.pointer(_LOW, (types.int64, place), _I8), _I16.as_pointer())
        bits = e.b.bitcast(e.b.load(pointer, align=1), ir.VectorType(_I1, BLOCK))
        digit = e.b.select(bits, e.constant(1 << p, _I32), e.constant(0, _I32))
        total = digit if total is None else e.b.or_(total, digit)
    return total


def _level(e: _Emitter, nibble: Any, raw: int, upper: bool) -> Any:
    wide = ir.VectorType(_F32, BLOCK)
    centred = e.b.sub(nibble, e.constant(8, _I32))
    if raw:
        coarse = e.b.shl(centred, e.constant(raw, _I32))
        q = e.b.sub(e.b.add(coarse, _digit(e, raw, upper)), e.constant(1 << raw >> 1, _I32))
        return e.b.sitofp(q, wide)
    f = e.b.sitofp(centred, wide)
    low, up = e.constant(-1.0, _F32), e.constant(1.0, _F32)
    sign = e.b.select(e.b.fcmp_ordered("<", f, low), low, f)
    sign = e.b.select(e.b.fcmp_ordered(">", sign, up), up, sign)
    return e.b.fsub(f, e.b.fmul(e.scalar(_SHRINK, types.float32), sign))


def _word(e: _Emitter, value: Any) -> Any:
    bits = e.b.bitcast(value, ir.VectorType(_I32, BLOCK))
    odd = e.b.and_(e.b.lshr(bits, e.constant(16, _I32)), e.constant(1, _I32))
    rounded = e.b.add(e.b.add(bits, e.constant(0x7FFF, _I32)), odd)
    return e.b.trunc(e.b.lshr(rounded, e.constant(16, _I32)), ir.VectorType(_I16, BLOCK))


def _block(raw: int, turned: bool) -> Callable[..., Any]:
    @intrinsic
    def block(typing: Any, symbols: Any, at: Any, low: Any, plane: Any, width: Any, upper: Any, step: Any,
              shrink: Any, centres: Any, centre: Any, half: Any, cos: Any, sin: Any, turn: Any, words: Any,
              to: Any) -> Any:  # fmt: skip
        """Decode 16 pairs of a row; tell whether one escapes (the words are then wrong, to be written again)."""

        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            e = _Emitter(context, builder, signature, arguments)
            symbol, step_ = e.load(_SYMBOLS, e.offset(_AT), _I8), e.scalar(_STEP, types.float32)
            values = []
            for upper_, (nibble, _) in enumerate(_nibbles(e, symbol, None, None)):
                more = _HALF if upper_ else None
                centre_ = e.load(_CENTRES, e.offset(_CENTRE), _F32, more)
                level = _level(e, nibble, raw, bool(upper_))
                values.append(builder.fadd(builder.fmul(level, step_), centre_))
            if turned:
                x, y = values
                c, s = e.load(_COS, e.offset(_TURN), _F32), e.load(_SIN, e.offset(_TURN), _F32)
                values = [builder.fsub(builder.fmul(x, c), builder.fmul(y, s)),
                          builder.fadd(builder.fmul(y, c), builder.fmul(x, s))]  # fmt: skip
            for more, value in zip((None, _HALF), values, strict=True):
                builder.store(_word(e, value), e.pointer(_WORDS, e.offset(_TO), _I16, more), align=1)
            return _any_zero(e, symbol)

        arguments = (symbols, at, low, plane, width, upper, step, shrink, centres, centre, half, cos, sin, turn, words,
                     to)  # fmt: skip
        return types.boolean(*arguments), emit

    return block  # type: ignore[no-any-return]


plain0, plain1, plain2, plain3 = (_block(raw, turned=False) for raw in range(4))
turned0, turned1, turned2, turned3 = (_block(raw, turned=True) for raw in range(4))


@numba.njit(nogil=True, cache=True, inline="always")
def row(symbols: Any, place: int, low: Any, at: int, r: int, half: int, step: Any, shrink: Any, centres: Any,
           centre: int, turned: bool, cos: Any, sin: Any, turn: int, words: Any, to: int) -> bool:  # fmt: skip
    """Decode a row of whole blocks straight to bfloat16 words; tell whether it holds an escape."""
    width, upper = half // 4, half // 8
    escaped = False
    for j in range(0, half, BLOCK):
        a, b, c, d, e = place + j, at + j // 8, centre + j, turn + j, to + j
        if turned:
            if r == 0:
                escaped |= turned0(symbols, a, low, b, width, upper, step, shrink,
                                       centres, c, half, cos, sin, d, words, e)  # fmt: skip
            elif r == 1:
                escaped |= turned1(symbols, a, low, b, width, upper, step, shrink,
                                       centres, c, half, cos, sin, d, words, e)  # fmt: skip
            elif r == 2:
                escaped |= turned2(symbols, a, low, b, width, upper, step, shrink,
                                       centres, c, half, cos, sin, d, words, e)  # fmt: skip
            else:
                escaped |= turned3(symbols, a, low, b, width, upper, step, shrink,
                                       centres, c, half, cos, sin, d, words, e)  # fmt: skip
        else:
            if r == 0:
                escaped |= plain0(symbols, a, low, b, width, upper, step, shrink,
                                       centres, c, half, cos, sin, d, words, e)  # fmt: skip
            elif r == 1:
                escaped |= plain1(symbols, a, low, b, width, upper, step, shrink,
                                       centres, c, half, cos, sin, d, words, e)  # fmt: skip
            elif r == 2:
                escaped |= plain2(symbols, a, low, b, width, upper, step, shrink,
                                       centres, c, half, cos, sin, d, words, e)  # fmt: skip
            else:
                escaped |= plain3(symbols, a, low, b, width, upper, step, shrink,
                                       centres, c, half, cos, sin, d, words, e)  # fmt: skip
    return escaped
