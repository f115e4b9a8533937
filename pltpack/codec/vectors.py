"""Blocks of 16 values for the group codec's loops, emitted as LLVM IR vectors.

Rows of a head are too short for a compiler's own vector loops, which are guarded by overlap checks and unrolled beyond
a row's length. LLVM splits these vectors for whatever processor it compiles for, and without fast-math flags it
contracts and reorders nothing, so every machine gives the same bits. Offsets are not checked: callers do that.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types
from numba.extending import intrinsic

BLOCK = 16

_I1, _I8, _I16, _I32 = (ir.IntType(bits) for bits in (1, 8, 16, 32))
_F32 = ir.FloatType()


class _Emitter:
    """Loads, stores and splats of 16 lanes for one call of an intrinsic."""

    def __init__(self, context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        self.b = builder
        self._context = context
        self._types = signature.args
        self._arguments = arguments

    def pointer(self, number: int, offset: Any, element: Any, more: int | None = None) -> Any:
        array = self._context.make_array(self._types[number])(self._context, self.b, self._arguments[number])
        place = self._index(offset)
        if more is not None:
            place = self.b.add(place, self._index(self.offset(more)))
        return self.b.bitcast(self.b.gep(array.data, [place]), ir.VectorType(element, BLOCK).as_pointer())

    def _index(self, offset: Any) -> Any:
        return self._context.cast(self.b, offset[1], offset[0], types.int64)

    def index(self, number: int) -> Any:
        """An index argument as a 64-bit integer."""
        return self._index(self.offset(number))

    def item(self, number: int, offset: Any) -> Any:
        """Pointer to the item of an array argument at a 64-bit offset."""
        array = self._context.make_array(self._types[number])(self._context, self.b, self._arguments[number])
        return self.b.gep(array.data, [offset])

    def place(self, number: int, offset: Any, element: Any) -> Any:
        """Pointer to the vector in an array argument at a 64-bit offset."""
        return self.b.bitcast(self.item(number, offset), ir.VectorType(element, BLOCK).as_pointer())

    def offset(self, number: int) -> Any:
        """An index argument, with its type."""
        return self._types[number], self._arguments[number]

    def load(self, array: int, offset: Any, element: Any, more: int | None = None) -> Any:
        """Load from an array argument at an offset, plus the index argument number `more`."""
        return self.b.load(self.pointer(array, offset, element, more), align=1)

    def store(self, value: Any, array: int, offset: Any, element: Any) -> None:
        self.b.store(value, self.pointer(array, offset, element), align=1)

    def splat(self, value: Any) -> Any:
        kind = ir.VectorType(value.type, BLOCK)
        narrow = self.b.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(_I32, 0))
        zeros = ir.Constant(ir.VectorType(_I32, BLOCK), None)
        return self.b.shuffle_vector(narrow, ir.Constant(kind, ir.Undefined), zeros)

    def scalar(self, number: int, to: Any) -> Any:
        """An integer or float argument, converted and spread over all lanes."""
        return self.splat(self._context.cast(self.b, self._arguments[number], self._types[number], to))

    def constant(self, value: float, element: Any) -> Any:
        return ir.Constant(ir.VectorType(element, BLOCK), [value] * BLOCK)


@intrinsic
def spread(typing: Any, low: Any, at: Any, shift: Any, digits: Any, to: Any) -> Any:
    """Add one plane's 16 bits, from byte `at` of `low`, to ``digits[to : to + 16]`` (uint16) at bit `shift`."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        e = _Emitter(context, builder, signature, arguments)
        place = builder.bitcast(e.pointer(0, e.offset(1), _I8), _I16.as_pointer())
        bits = builder.bitcast(builder.load(place, align=1), ir.VectorType(_I1, BLOCK))
        digit = builder.shl(builder.zext(bits, ir.VectorType(_I16, BLOCK)), e.scalar(2, types.uint16))
        e.store(builder.or_(e.load(3, e.offset(4), _I16), digit), 3, e.offset(4), _I16)
        return context.get_dummy_value()

    return types.none(low, at, shift, digits, to), emit


@intrinsic
def expand(typing: Any, symbols: Any, at: Any, line: Any, to: Any, high: Any, step: Any, shrink: Any,
           centres: Any, centre: Any) -> Any:  # fmt: skip
    """Dequantize 16 symbols without low bits to `line` (float32) at `to` and at `high`; tell whether one escapes."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        e = _Emitter(context, builder, signature, arguments)
        symbol, step_, shrink_ = e.load(0, e.offset(1), _I8), e.scalar(5, types.float32), e.scalar(6, types.float32)
        low, up = e.constant(-1.0, _F32), e.constant(1.0, _F32)
        for nibble, place in _nibbles(e, symbol, e.offset(3), e.offset(4)):
            f = builder.sitofp(builder.sub(nibble, e.constant(8, _I32)), ir.VectorType(_F32, BLOCK))
            sign = builder.select(builder.fcmp_ordered("<", f, low), low, f)
            sign = builder.select(builder.fcmp_ordered(">", sign, up), up, sign)
            level = builder.fsub(f, builder.fmul(shrink_, sign))
            e.store(builder.fadd(builder.fmul(level, step_), e.load(7, place, _F32, 8)), 2, place, _F32)
        return _any_zero(e, symbol)

    return types.boolean(symbols, at, line, to, high, step, shrink, centres, centre), emit


@intrinsic
def expand_digits(typing: Any, symbols: Any, at: Any, line: Any, to: Any, high: Any, step: Any, raw: Any,
                  digits: Any, centres: Any, centre: Any) -> Any:  # fmt: skip
    """The same with `raw` low bits per value, taken from `digits` (uint16) at `to` and at `high`."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        e = _Emitter(context, builder, signature, arguments)
        symbol, step_, raw_ = e.load(0, e.offset(1), _I8), e.scalar(5, types.float32), e.scalar(6, types.int32)
        centre = builder.lshr(builder.shl(e.constant(1, _I32), raw_), e.constant(1, _I32))
        for nibble, place in _nibbles(e, symbol, e.offset(3), e.offset(4)):
            digit = builder.zext(e.load(7, place, _I16), ir.VectorType(_I32, BLOCK))
            coarse = builder.shl(builder.sub(nibble, e.constant(8, _I32)), raw_)
            q = builder.sub(builder.add(coarse, digit), centre)
            level = builder.sitofp(q, ir.VectorType(_F32, BLOCK))
            e.store(builder.fadd(builder.fmul(level, step_), e.load(8, place, _F32, 9)), 2, place, _F32)
        return _any_zero(e, symbol)

    return types.boolean(symbols, at, line, to, high, step, raw, digits, centres, centre), emit


def _nibbles(e: _Emitter, symbol: Any, to: Any, high: Any) -> list[tuple[Any, Any]]:
    wide = e.b.zext(symbol, ir.VectorType(_I32, BLOCK))
    return [(e.b.and_(wide, e.constant(15, _I32)), to), (e.b.lshr(wide, e.constant(4, _I32)), high)]


def _any_zero(e: _Emitter, symbol: Any) -> Any:
    zero = e.b.icmp_unsigned("==", symbol, e.constant(0, _I8))
    return e.b.icmp_unsigned("!=", e.b.bitcast(zero, _I16), ir.Constant(_I16, 0))


@intrinsic
def rotate(typing: Any, line: Any, to: Any, high: Any, cos: Any, sin: Any, at: Any) -> Any:
    """Rotate 16 pairs ``(line[to + i], line[high + i])`` by ``cos[at + i]`` and ``sin[at + i]``."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        e = _Emitter(context, builder, signature, arguments)
        x, y = e.load(0, e.offset(1), _F32), e.load(0, e.offset(2), _F32)
        c, s = e.load(3, e.offset(5), _F32), e.load(4, e.offset(5), _F32)
        e.store(builder.fsub(builder.fmul(x, c), builder.fmul(y, s)), 0, e.offset(1), _F32)
        e.store(builder.fadd(builder.fmul(y, c), builder.fmul(x, s)), 0, e.offset(2), _F32)
        return context.get_dummy_value()

    return types.none(line, to, high, cos, sin, at), emit


@intrinsic
def to_bfloat(typing: Any, line: Any, at: Any, words: Any, to: Any) -> Any:
    """Round 16 binary32 values to the nearest bfloat16, ties to even, as uint16."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        e = _Emitter(context, builder, signature, arguments)
        bits = e.load(0, e.offset(1), _I32)
        odd = builder.and_(builder.lshr(bits, e.constant(16, _I32)), e.constant(1, _I32))
        rounded = builder.add(builder.add(bits, e.constant(0x7FFF, _I32)), odd)
        word = builder.trunc(builder.lshr(rounded, e.constant(16, _I32)), ir.VectorType(_I16, BLOCK))
        e.store(word, 2, e.offset(3), _I16)
        return context.get_dummy_value()

    return types.none(line, at, words, to), emit


def _finite(e: _Emitter, value: Any) -> Any:
    """16 binary32 values as the nearest finite bfloat16 words, ties to even."""
    bits = e.b.bitcast(value, ir.VectorType(_I32, BLOCK))
    high = e.b.lshr(bits, e.constant(16, _I32))
    more = e.b.add(e.constant(0x7FFF, _I32), e.b.and_(high, e.constant(1, _I32)))
    rounded = e.b.lshr(e.b.add(bits, more), e.constant(16, _I32))
    top = e.constant(0x7F80, _I32)
    largest = e.b.or_(e.b.and_(high, e.constant(0x8000, _I32)), e.constant(0x7F7F, _I32))
    word = e.b.select(e.b.icmp_unsigned("==", e.b.and_(rounded, top), top), largest, rounded)
    return e.b.trunc(word, ir.VectorType(_I16, BLOCK))


@intrinsic
def finite_bfloat(typing: Any, line: Any, at: Any, words: Any, to: Any) -> Any:
    """As `to_bfloat`, but what is not finite, or would be rounded to that, becomes the largest finite number."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        e = _Emitter(context, builder, signature, arguments)
        e.store(_finite(e, e.load(0, e.offset(1), _F32)), 2, e.offset(3), _I16)
        return context.get_dummy_value()

    return types.none(line, at, words, to), emit


@intrinsic
def turned_bfloat(typing: Any, line: Any, at: Any, high: Any, cos: Any, sin: Any, angle: Any, words: Any, to: Any,
                  to_high: Any) -> Any:  # fmt: skip
    """Rotate 16 pairs as `rotate` does, from `line` to `words`, and round them as `finite_bfloat` does."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        e = _Emitter(context, builder, signature, arguments)
        x, y = e.load(0, e.offset(1), _F32), e.load(0, e.offset(2), _F32)
        c, s = e.load(3, e.offset(5), _F32), e.load(4, e.offset(5), _F32)
        first = builder.fsub(builder.fmul(x, c), builder.fmul(y, s))
        second = builder.fadd(builder.fmul(y, c), builder.fmul(x, s))
        e.store(_finite(e, first), 6, e.offset(7), _I16)
        e.store(_finite(e, second), 6, e.offset(8), _I16)
        return context.get_dummy_value()

    return types.none(line, at, high, cos, sin, angle, words, to, to_high), emit


@intrinsic
def widen(typing: Any, words: Any, at: Any, out: Any, to: Any) -> Any:
    """Convert 16 bfloat16 words (uint16) at `at` to binary32 values at `to`."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        e = _Emitter(context, builder, signature, arguments)
        e.store(_widened(e, 0, e.offset(1)), 2, e.offset(3), _F32)
        return context.get_dummy_value()

    return types.none(words, at, out, to), emit


@intrinsic
def unturn(typing: Any, words: Any, at: Any, high: Any, cos: Any, sin: Any, angle: Any, out: Any, to: Any,
           to_high: Any) -> Any:  # fmt: skip
    """Rotate back 16 pairs of bfloat16 words at `at` and at `high`, to binary32 values at `to` and at `to_high`."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        e = _Emitter(context, builder, signature, arguments)
        x, y = _back(e, _widened(e, 0, e.offset(1)), _widened(e, 0, e.offset(2)), 3, 4, e.offset(5))
        e.store(x, 6, e.offset(7), _F32)
        e.store(y, 6, e.offset(8), _F32)
        return context.get_dummy_value()

    return types.none(words, at, high, cos, sin, angle, out, to, to_high), emit


@intrinsic
def move(typing: Any, words: Any, at: Any, high: Any, cos: Any, sin: Any, to_cos: Any, to_sin: Any, angle: Any,
         out: Any, to: Any, to_high: Any) -> Any:  # fmt: skip
    """Rotate back 16 pairs of bfloat16 words, then to other positions, as `pltpack.codec.moving.move` rounds them."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        e = _Emitter(context, builder, signature, arguments)
        x, y = _back(e, _widened(e, 0, e.offset(1)), _widened(e, 0, e.offset(2)), 3, 4, e.offset(7))
        c, s = e.load(5, e.offset(7), _F32), e.load(6, e.offset(7), _F32)
        first = builder.fsub(builder.fmul(x, c), builder.fmul(y, s))
        second = builder.fadd(builder.fmul(y, c), builder.fmul(x, s))
        for value, place in ((first, e.offset(9)), (second, e.offset(10))):
            e.store(_finite_or_zero(e, value), 8, place, _I16)
        return context.get_dummy_value()

    return types.none(words, at, high, cos, sin, to_cos, to_sin, angle, out, to, to_high), emit


def _widened(e: _Emitter, array: int, offset: Any) -> Any:
    wide = e.b.zext(e.load(array, offset, _I16), ir.VectorType(_I32, BLOCK))
    return e.b.bitcast(e.b.shl(wide, e.constant(16, _I32)), ir.VectorType(_F32, BLOCK))


def _back(e: _Emitter, x: Any, y: Any, cos: int, sin: int, angle: Any) -> tuple[Any, Any]:
    c, s = e.load(cos, angle, _F32), e.load(sin, angle, _F32)
    return e.b.fadd(e.b.fmul(x, c), e.b.fmul(y, s)), e.b.fsub(e.b.fmul(y, c), e.b.fmul(x, s))


def _finite_or_zero(e: _Emitter, value: Any) -> Any:
    """As `_finite`, but 0 for what is not finite."""
    exponent = e.constant(0x7F800000, _I32)
    bits = e.b.and_(e.b.bitcast(value, ir.VectorType(_I32, BLOCK)), exponent)
    return e.b.select(e.b.icmp_unsigned("==", bits, exponent), e.constant(0, _I16), _finite(e, value))
