"""The group codec's usual rows in registers: low bits, dequantization, rotation and rounding of 16 pairs at once.

A pair of a symbol, channels j and P + j, is also a pair of half-style RoPE, so nothing between the entropy decoder's
bytes and the bfloat16 words needs memory. Arithmetic is that of `pltpack.codec.dequantize`, operation by operation,
which also has the path of odd shapes and puts escaped pairs in place. A loop runs over rows of one step and table, so
that its constants stay in registers; choosing and setting up for each row costs as much as its arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils as _cgutils
from numba.core import types
from numba.extending import intrinsic

from pltpack.codec.vectors import _F32, _I1, _I8, _I16, _I32, BLOCK, _any_zero, _Emitter

# Partly annotated, depending on the version of numba.
cgutils: Any = _cgutils

#: Most low bits per value of rows that are decoded here.
WIDEST = 4

_I64 = ir.IntType(64)
# Arguments of a loop, by number.
_SYMBOLS, _PLACE, _LOW, _AT, _HALF, _STEP, _SHRINK, _CENTRES, _CENTRE, _MOVING = range(10)
_COS, _SIN, _TURN, _WORDS, _TO, _COUNT, _ESCAPED = range(10, 17)


def _wide(element: Any) -> Any:
    return ir.VectorType(element, BLOCK)


def _quantized(e: _Emitter, symbol: Any, raw: int, upper: bool, planes: list[Any]) -> Any:
    """Quantized values of 16 channels, binary32: from nibbles and, for plane p, bit p. Bytes hold them up to raw 4."""
    nibble = e.b.lshr(symbol, e.constant(4, _I8)) if upper else e.b.and_(symbol, e.constant(15, _I8))
    total = e.b.shl(nibble, e.constant(raw, _I8)) if raw else nibble
    for p, bits in enumerate(planes):
        total = e.b.select(bits, e.b.or_(total, e.constant(1 << p, _I8)), total)
    offset = (8 << raw) + (1 << raw >> 1)
    if raw < WIDEST:
        q = e.b.sext(e.b.sub(total, e.constant(offset, _I8)), _wide(_I32))
    else:
        q = e.b.sub(e.b.zext(total, _wide(_I32)), e.constant(offset, _I32))
    return e.b.sitofp(q, _wide(_F32))


def _shrunk(e: _Emitter, f: Any, shrink: Any) -> Any:
    low, up = e.constant(-1.0, _F32), e.constant(1.0, _F32)
    sign = e.b.select(e.b.fcmp_ordered("<", f, low), low, f)
    sign = e.b.select(e.b.fcmp_ordered(">", sign, up), up, sign)
    return e.b.fsub(f, e.b.fmul(shrink, sign))


def _rounded(e: _Emitter, value: Any) -> Any:
    """Binary32 bits whose upper halves, as 16-bit lanes the odd ones, are the nearest bfloat16."""
    bits = e.b.bitcast(value, _wide(_I32))
    odd = e.b.icmp_unsigned("!=", e.b.and_(bits, e.constant(0x10000, _I32)), e.constant(0, _I32))
    more = e.b.select(odd, e.constant(0x8000, _I32), e.constant(0x7FFF, _I32))
    return e.b.bitcast(e.b.add(bits, more), ir.VectorType(_I16, 2 * BLOCK))


def _words(e: _Emitter, values: list[Any]) -> list[Any]:
    """Two vectors of binary32 values as bfloat16 words."""
    first, second = (_rounded(e, value) for value in values)
    odd = ir.Constant(ir.VectorType(_I32, 2 * BLOCK), list(range(1, 4 * BLOCK, 2)))
    both = e.b.shuffle_vector(first, second, odd)
    return [e.b.shuffle_vector(both, both, ir.Constant(_wide(_I32), list(range(at, at + BLOCK)))) for at in (0, BLOCK)]


def _rows(raw: int, turned: bool) -> Callable[..., Any]:
    @intrinsic
    def rows(typing: Any, symbols: Any, place: Any, low: Any, at: Any, half: Any, step: Any, shrink: Any, centres: Any,
             centre: Any, moving: Any, cos: Any, sin: Any, turn: Any, words: Any, to: Any, count: Any,
             escaped: Any) -> Any:  # fmt: skip
        """Decode rows of one step and table; tell which escape somewhere (those words are to be written again)."""

        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            e = _Emitter(context, builder, signature, arguments)
            numbers = (_PLACE, _AT, _HALF, _CENTRE, _MOVING, _TURN, _TO, _COUNT)
            place, at, half, centre, moving, turn, to, count = (e.index(number) for number in numbers)
            step, shrink = e.scalar(_STEP, types.float32), e.scalar(_SHRINK, types.float32)

            def number(value: int) -> Any:
                return ir.Constant(_I64, value)

            def load(array: int, offset: Any, element: Any) -> Any:
                return builder.load(e.place(array, offset, element), align=1)

            def planes(offset: Any) -> list[Any]:
                width, out = builder.lshr(half, number(2)), []
                for _ in range(raw):
                    place = builder.bitcast(e.place(_LOW, offset, _I8), _I16.as_pointer())
                    out.append(builder.bitcast(builder.load(place, align=1), _wide(_I1)))
                    offset = builder.add(offset, width)
                return out

            def block(row: Any, j: Any) -> Any:
                """Decode 16 pairs from pair j on; tell whether one escapes."""
                pairs = builder.add(builder.mul(row, half), j)
                symbol = load(_SYMBOLS, builder.add(place, pairs), _I8)
                plane = builder.add(at, builder.lshr(builder.mul(builder.mul(row, half), number(raw)), number(2)))
                plane = builder.add(plane, builder.lshr(j, number(3)))
                middle = builder.add(builder.add(centre, builder.mul(row, moving)), j)
                values = []
                for upper in (False, True):
                    if upper:
                        plane, middle = builder.add(plane, builder.lshr(half, number(3))), builder.add(middle, half)
                    f = _quantized(e, symbol, raw, upper, planes(plane))
                    level = f if raw else _shrunk(e, f, shrink)
                    values.append(builder.fadd(builder.fmul(level, step), load(_CENTRES, middle, _F32)))
                if turned:
                    x, y = values
                    angle = builder.add(turn, pairs)
                    c, s = load(_COS, angle, _F32), load(_SIN, angle, _F32)
                    values = [builder.fsub(builder.fmul(x, c), builder.fmul(y, s)),
                              builder.fadd(builder.fmul(y, c), builder.fmul(x, s))]  # fmt: skip
                target = builder.add(to, builder.add(builder.add(pairs, builder.mul(row, half)), number(0)))
                for word in _words(e, values):
                    builder.store(word, e.place(_WORDS, target, _I16), align=1)
                    target = builder.add(target, half)
                return _any_zero(e, symbol)

            with cgutils.for_range(builder, count) as outer:
                found = cgutils.alloca_once_value(builder, ir.Constant(_I1, 0))
                builder.store(ir.Constant(_I1, 0), found)
                with cgutils.for_range(builder, builder.lshr(half, number(BLOCK.bit_length() - 1))) as inner:
                    zero = block(outer.index, builder.mul(inner.index, number(BLOCK)))
                    builder.store(builder.or_(builder.load(found), zero), found)
                mark = builder.zext(builder.load(found), _I8)
                builder.store(mark, e.item(_ESCAPED, outer.index))
            return context.get_dummy_value()

        arguments = (symbols, place, low, at, half, step, shrink, centres, centre, moving, cos, sin, turn, words, to,
                     count, escaped)  # fmt: skip
        return types.none(*arguments), emit

    return rows  # type: ignore[no-any-return]


_plain0, _plain1, _plain2, _plain3, _plain4 = (_rows(raw, turned=False) for raw in range(WIDEST + 1))
_turned0, _turned1, _turned2, _turned3, _turned4 = (_rows(raw, turned=True) for raw in range(WIDEST + 1))


@numba.njit(nogil=True, cache=True)
def rows(symbols: Any, place: int, low: Any, at: int, r: int, half: int, step: Any, shrink: Any, centres: Any,
         centre: int, moving: int, turned: bool, cos: Any, sin: Any, turn: int, words: Any, to: int, count: int,
         escaped: Any) -> None:  # fmt: skip
    """Decode `count` rows of one step and table straight to bfloat16 words of consecutive tokens.

    Parameters
    ----------
    symbols, low, centres, cos, sin, words, escaped : ndarray
        One-dimensional, but `words`; `escaped` (uint8) is set to whether rows hold an escape, and so wrong words.
    place, at, centre, turn, to : int
        Where the first row begins in them; `moving` is the step from row to row in `centres`.
    r, half : int
        Low bits per value, at most `WIDEST`; pairs of a row, a multiple of `BLOCK`.
    """
    if r == 0 and turned:
        _turned0(symbols, place, low, at, half, step, shrink, centres, centre, moving, cos, sin, turn, words, to, count,
                 escaped)  # fmt: skip
    elif r == 0:
        _plain0(symbols, place, low, at, half, step, shrink, centres, centre, moving, cos, sin, turn, words, to, count,
                escaped)  # fmt: skip
    elif r == 1 and turned:
        _turned1(symbols, place, low, at, half, step, shrink, centres, centre, moving, cos, sin, turn, words, to, count,
                 escaped)  # fmt: skip
    elif r == 1:
        _plain1(symbols, place, low, at, half, step, shrink, centres, centre, moving, cos, sin, turn, words, to, count,
                escaped)  # fmt: skip
    elif r == 2 and turned:
        _turned2(symbols, place, low, at, half, step, shrink, centres, centre, moving, cos, sin, turn, words, to, count,
                 escaped)  # fmt: skip
    elif r == 2:
        _plain2(symbols, place, low, at, half, step, shrink, centres, centre, moving, cos, sin, turn, words, to, count,
                escaped)  # fmt: skip
    elif r == 3 and turned:
        _turned3(symbols, place, low, at, half, step, shrink, centres, centre, moving, cos, sin, turn, words, to, count,
                 escaped)  # fmt: skip
    elif r == 3:
        _plain3(symbols, place, low, at, half, step, shrink, centres, centre, moving, cos, sin, turn, words, to, count,
                escaped)  # fmt: skip
    elif turned:
        _turned4(symbols, place, low, at, half, step, shrink, centres, centre, moving, cos, sin, turn, words, to, count,
                 escaped)  # fmt: skip
    else:
        _plain4(symbols, place, low, at, half, step, shrink, centres, centre, moving, cos, sin, turn, words, to, count,
                escaped)  # fmt: skip
