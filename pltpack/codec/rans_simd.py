"""Vector loops of the rANS coder for x86-64 with AVX-512 (F, BW, DQ, VL) or AVX2; same bytes as the scalar loops.

A step of 32 lanes is two vectors of 16 or four of 8. The table look-up is a gather; the words that a step reads are
spread over the lanes that need one, in lane order. The row loops are emitted as LLVM IR: numba has no vector type.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils as _cgutils
from numba.core import types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from pltpack.codec.rans_scalar import LANES, PROB_BITS, PROB_SCALE, STATE_LOW

# Partly annotated, depending on the version of numba.
cgutils: Any = _cgutils

_NEEDS = {"avx512": ("avx512f", "avx512bw", "avx512dq", "avx512vl"), "avx2": ("avx2",)}
#: Bit of what an encoded row gives that tells of a marking symbol.
_MARK = 40
_I1, _I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))


def kernels() -> list[str]:
    """Names of the vector loops that this process can run, fastest first.

    What counts is the processor that numba compiles for (``NUMBA_CPU_NAME``, ``NUMBA_CPU_FEATURES``); numba's cache
    of compiled code is keyed by the same description.
    """
    triple, _, features = cpu_target.target_context.codegen().magic_tuple()
    enabled = set(features.split(","))
    if not triple.startswith("x86_64"):
        return []
    return [name for name, needs in _NEEDS.items() if all(f"+{need}" in enabled for need in needs)]


class _Avx512:
    """Emits vector operations over 16 lanes of 32 bits; masks are ``<16 x i1>``."""

    width = 16

    def __init__(self, builder: Any) -> None:
        self.builder = builder
        self.lanes = ir.VectorType(_I32, self.width)

    def splat(self, value: int) -> Any:
        return ir.Constant(self.lanes, [value] * self.width)

    def call(self, name: str, result: Any, *arguments: Any) -> Any:
        signature = ir.FunctionType(result, [argument.type for argument in arguments])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, signature, name), arguments)

    def at(self, pointer: Any, offset: Any, element: Any) -> Any:
        vector = ir.VectorType(element, self.width)
        return self.builder.bitcast(self.builder.gep(pointer, [offset]), vector.as_pointer())

    def load(self, pointer: Any, offset: Any, element: Any, mask: Any = None) -> Any:
        """Load one vector of `element` and widen it to 32-bit lanes; lanes outside `mask` are 0 and not touched."""
        source = self.at(pointer, offset, element)
        if mask is None:
            value = self.builder.load(source, align=1)
        else:
            vector = source.type.pointee
            name = f"llvm.masked.load.v{self.width}i{element.width}.p0"
            value = self.call(name, vector, source, ir.Constant(_I32, 1), mask, ir.Constant(vector, None))
        return value if element == _I32 else self.builder.zext(value, self.lanes)

    def store(self, value: Any, pointer: Any, offset: Any, element: Any, mask: Any = None) -> None:
        """Narrow 32-bit lanes to `element` and store those in `mask`."""
        target = self.at(pointer, offset, element)
        if element != _I32:
            value = self.builder.trunc(value, ir.VectorType(element, self.width))
        if mask is None:
            self.builder.store(value, target, align=1)
        else:
            name = f"llvm.masked.store.v{self.width}i{element.width}.p0"
            self.call(name, ir.VoidType(), value, target, ir.Constant(_I32, 1), mask)

    def gather(self, table: Any, index: Any) -> Any:
        every = ir.Constant(ir.VectorType(_I1, self.width), [1] * self.width)
        name = "llvm.x86.avx512.mask.gather.dpi.512"
        return self.call(name, self.lanes, self.splat(0), table, index, every, ir.Constant(_I32, 4))

    def expand(self, words: Any, mask: Any) -> Any:
        """Give the first words to the lanes in `mask`, in lane order; other lanes are undefined."""
        return self.call("llvm.x86.avx512.mask.expand.v16i32", self.lanes, words, self.splat(0), mask)

    def compress(self, values: Any, mask: Any) -> Any:
        """Move the lanes in `mask` to the front, in lane order."""
        return self.call("llvm.x86.avx512.mask.compress.v16i32", self.lanes, values, self.splat(0), mask)

    def bits(self, mask: Any) -> Any:
        return self.builder.bitcast(mask, ir.IntType(self.width))

    def count(self, mask: Any) -> Any:
        return self.builder.zext(self.builder.ctpop(self.bits(mask)), _I64)

    def first_lanes(self, count: Any, lane_base: int) -> Any:
        """Mask of the lanes whose number, from `lane_base` up, is below the 64-bit `count`."""
        builder = self.builder
        narrow = builder.insert_element(self.splat(0), builder.trunc(count, _I32), ir.Constant(_I32, 0))
        zeros = ir.Constant(ir.VectorType(_I32, self.width), None)
        bound = builder.shuffle_vector(narrow, self.splat(0), zeros)
        numbers = ir.Constant(self.lanes, [lane_base + lane for lane in range(self.width)])
        return builder.icmp_unsigned("<", numbers, bound)


class _Avx2(_Avx512):
    """The same over 8 lanes; decoding only."""

    width = 8

    def gather(self, table: Any, index: Any) -> Any:
        name = "llvm.x86.avx2.gather.d.d.256"
        return self.call(name, self.lanes, self.splat(0), table, index, self.splat(-1), ir.Constant(_I8, 4))

    def expand(self, words: Any, mask: Any) -> Any:
        # Entry m, lane j: how many lanes before j are in the mask m.
        ranks = bytes((m & ((1 << lane) - 1)).bit_count() for m in range(256) for lane in range(8))
        constant = cgutils.global_constant(self.builder.module, "rans_ranks", cgutils.make_bytearray(ranks))
        table = self.builder.bitcast(constant, _I8.as_pointer())
        offset = self.builder.shl(self.builder.zext(self.bits(mask), _I64), ir.Constant(_I64, 3))
        return self.call("llvm.x86.avx2.permd", self.lanes, words, self.load(table, offset, _I8))


def _for_each_step(builder: Any, columns: Any, backwards: bool, emit: Any) -> None:
    """Emit a row's loop: ``emit(first column, None)`` for full steps, ``emit(first column, lanes)`` for a partial one.

    The partial step is the last of a row, the first when going backwards.
    """
    step = ir.Constant(_I64, LANES)
    steps = builder.udiv(columns, step)
    whole = builder.mul(steps, step)
    rest = builder.sub(columns, whole)

    def partial() -> None:
        with builder.if_then(builder.icmp_unsigned(">", rest, ir.Constant(_I64, 0))):
            emit(whole, rest)

    if backwards:
        partial()
    with cgutils.for_range(builder, steps) as loop:
        number = loop.index
        if backwards:
            number = builder.sub(builder.sub(steps, number), ir.Constant(_I64, 1))
        emit(builder.mul(number, step), None)
    if not backwards:
        partial()


def _load_states(ops: _Avx512, states: Any) -> list[Any]:
    lanes = []
    for first in range(0, LANES, ops.width):
        slot = cgutils.alloca_once(ops.builder, ops.lanes)
        ops.builder.store(ops.load(states, ir.Constant(_I64, 4 * first), _I32), slot)
        lanes.append(slot)
    return lanes


def _store_states(ops: _Avx512, states: Any, lanes: list[Any]) -> None:
    for number, slot in enumerate(lanes):
        ops.store(ops.builder.load(slot), states, ir.Constant(_I64, 4 * number * ops.width), _I32)


def _emit_decode(ops: _Avx512, words: Any, table: Any, states: Any, row: Any, columns: Any) -> Any:
    """Emit the decoding of one row; gives the number of bytes read."""
    builder = ops.builder
    lanes = _load_states(ops, states)
    position = cgutils.alloca_once_value(builder, ir.Constant(_I64, 0))

    def step(column: Any, active: Any) -> None:
        for number, slot in enumerate(lanes):
            first = number * ops.width
            inside = None if active is None else ops.first_lanes(active, first)
            old = builder.load(slot)
            entry = ops.gather(table, builder.and_(old, ops.splat(PROB_SCALE - 1)))
            target = builder.add(column, ir.Constant(_I64, first))
            ops.store(entry, row, target, _I8, inside)
            freq = builder.add(builder.and_(builder.lshr(entry, ops.splat(8)), ops.splat(0xFFF)), ops.splat(1))
            new = builder.add(
                builder.mul(freq, builder.lshr(old, ops.splat(PROB_BITS))), builder.lshr(entry, ops.splat(20))
            )
            low = builder.icmp_unsigned("<", new, ops.splat(STATE_LOW))
            if inside is not None:
                low = builder.and_(low, inside)
                new = builder.select(inside, new, old)
            here = builder.load(position)
            fresh = ops.expand(ops.load(words, here, _I16), low)
            refilled = builder.or_(builder.shl(new, ops.splat(16)), fresh)
            builder.store(builder.select(low, refilled, new), slot)
            builder.store(builder.add(here, builder.shl(ops.count(low), ir.Constant(_I64, 1))), position)

    _for_each_step(builder, columns, False, step)
    _store_states(ops, states, lanes)
    return builder.load(position)


def _divide(ops: _Avx512, x: Any, freq: Any) -> tuple[Any, Any]:
    """Quotient and rest of ``x / freq`` for quotients below 2**20.

    The float32 quotient, of three roundings, is off by less than 1, so one correction in each direction makes it exact;
    the result does not depend on rounding. The reciprocal does not wait for `x`, as a division would.
    """
    builder = ops.builder
    floats = ir.VectorType(ir.FloatType(), ops.width)
    one = ir.Constant(floats, [1.0] * ops.width)
    ratio = builder.fmul(builder.uitofp(x, floats), builder.fdiv(one, builder.uitofp(freq, floats)))
    quotient = builder.fptosi(ratio, ops.lanes)
    rest = builder.sub(x, builder.mul(quotient, freq))
    for relation, bound, change in (("<", ops.splat(0), -1), (">=", freq, 1)):
        off = builder.icmp_signed(relation, rest, bound)
        quotient = builder.select(off, builder.add(quotient, ops.splat(change)), quotient)
        rest = builder.select(off, builder.sub(rest, freq) if change > 0 else builder.add(rest, freq), rest)
    return quotient, rest


def _emit_encode(ops: _Avx512, symbols: Any, table: Any, states: Any, words: Any, columns: Any) -> Any:
    """Emit the coding of one row downwards from `words`.

    Gives the number of bytes written, negative if impossible; plus ``1 << _MARK`` if an entry's highest bit is set.
    """
    builder = ops.builder
    lanes = _load_states(ops, states)
    position = cgutils.alloca_once_value(builder, ir.Constant(_I64, 0))
    least = cgutils.alloca_once_value(builder, ops.splat(1))
    every = cgutils.alloca_once_value(builder, ops.splat(0))

    def step(column: Any, active: Any) -> None:
        for number, slot in reversed(list(enumerate(lanes))):
            first = number * ops.width
            inside = None if active is None else ops.first_lanes(active, first)
            old = builder.load(slot)
            source = builder.add(column, ir.Constant(_I64, first))
            entry = ops.gather(table, ops.load(symbols, source, _I8, inside))
            here = entry if inside is None else builder.select(inside, entry, ops.splat(0))
            builder.store(builder.or_(builder.load(every), here), every)
            freq = builder.and_(entry, ops.splat(0xFFFF))
            if inside is not None:
                freq = builder.select(inside, freq, ops.splat(1))
            seen = builder.load(least)
            builder.store(builder.select(builder.icmp_unsigned("<", freq, seen), freq, seen), least)
            freq = builder.or_(freq, builder.zext(builder.icmp_unsigned("==", freq, ops.splat(0)), ops.lanes))
            full = builder.icmp_unsigned(">=", builder.lshr(old, ops.splat(20)), freq)
            if inside is not None:
                full = builder.and_(full, inside)
            written = ops.count(full)
            here = builder.sub(builder.load(position), builder.shl(written, ir.Constant(_I64, 1)))
            ops.store(ops.compress(old, full), words, here, _I16, ops.first_lanes(written, 0))
            builder.store(here, position)
            x = builder.select(full, builder.lshr(old, ops.splat(16)), old)
            quotient, rest = _divide(ops, x, freq)
            start = builder.and_(builder.lshr(entry, ops.splat(16)), ops.splat(PROB_SCALE - 1))
            new = builder.add(builder.add(builder.shl(quotient, ops.splat(PROB_BITS)), rest), start)
            builder.store(new if inside is None else builder.select(inside, new, old), slot)

    _for_each_step(builder, columns, True, step)
    _store_states(ops, states, lanes)
    bad = builder.icmp_unsigned("==", builder.load(least), ops.splat(0))
    possible = builder.icmp_unsigned("==", ops.bits(bad), ir.Constant(ir.IntType(ops.width), 0))
    marking = builder.icmp_signed("<", builder.load(every), ops.splat(0))
    marked = builder.icmp_unsigned("!=", ops.bits(marking), ir.Constant(ir.IntType(ops.width), 0))
    written = builder.or_(
        builder.neg(builder.load(position)), builder.shl(builder.zext(marked, _I64), ir.Constant(_I64, _MARK))
    )
    return builder.select(possible, written, ir.Constant(_I64, -1))


def _row_intrinsic(make_ops: Any, emit: Any) -> Any:
    """Make the numba function ``row(source, byte, tables, table byte, states, target, byte, columns) -> bytes``.

    Each array goes with the byte offset to begin at. The arrays must be C-contiguous; nothing is checked.
    """

    @intrinsic
    def row(
        typing: Any, source: Any, start: Any, tables: Any, table: Any, states: Any, target: Any, end: Any, columns: Any
    ) -> Any:
        signature = types.int64(source, types.int64, tables, types.int64, states, target, types.int64, types.int64)

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            def data(array: int, offset: Any) -> Any:
                pointer = context.make_array(signature.args[array])(context, builder, values[array]).data
                return builder.gep(builder.bitcast(pointer, _I8.as_pointer()), [offset])

            arguments = data(0, values[1]), data(2, values[3]), data(4, ir.Constant(_I64, 0)), data(5, values[6])
            return emit(make_ops(builder), *arguments, values[7])

        return signature, generate

    return row


_decode_row_avx512 = _row_intrinsic(_Avx512, _emit_decode)
_decode_row_avx2 = _row_intrinsic(_Avx2, _emit_decode)
_encode_row_avx512 = _row_intrinsic(_Avx512, _emit_encode)


@numba.njit(nogil=True, cache=True)
def encode_rows_avx512(symbols: Any, table_of_row: Any, tables: Any, words: Any, states: Any, marks: Any) -> Any:
    """As `pltpack.codec.rans_scalar.encode_rows`; all arrays C-contiguous."""
    rows, columns = symbols.shape
    end = np.int64(2 * words.size)
    for r in range(rows - 1, -1, -1):
        table = table_of_row[r] * tables.shape[1] * 4
        written = _encode_row_avx512(symbols, r * columns, tables, table, states, words, end, columns)
        if written < 0:
            return -1
        marks[r] = written >> _MARK
        end -= written & ((1 << _MARK) - 1)
    return end // 2


# The two loops differ in the row function only: numba's cache cannot tell functions apart that a factory made.
@numba.njit(nogil=True, cache=True)
def decode_rows_avx512(
    words: Any, tail: Any, tail_start: Any, states: Any, tables: Any, table_of_row: Any, out: Any
) -> Any:
    """As `pltpack.codec.rans_scalar.decode_rows`; all arrays C-contiguous."""
    rows, columns = out.shape
    count = words.size // 2
    position = np.int64(0)
    for r in range(rows):
        table = table_of_row[r] * tables.shape[1] * 4
        if position <= count - columns - LANES:
            read = _decode_row_avx512(words, 2 * position, tables, table, states, out, r * columns, columns)
        elif position <= count:
            start = 2 * (position - tail_start)
            read = _decode_row_avx512(tail, start, tables, table, states, out, r * columns, columns)
        else:
            return -1
        position += read // 2
    return position


@numba.njit(nogil=True, cache=True)
def decode_rows_avx2(
    words: Any, tail: Any, tail_start: Any, states: Any, tables: Any, table_of_row: Any, out: Any
) -> Any:
    """As `pltpack.codec.rans_scalar.decode_rows`; all arrays C-contiguous."""
    rows, columns = out.shape
    count = words.size // 2
    position = np.int64(0)
    for r in range(rows):
        table = table_of_row[r] * tables.shape[1] * 4
        if position <= count - columns - LANES:
            read = _decode_row_avx2(words, 2 * position, tables, table, states, out, r * columns, columns)
        elif position <= count:
            start = 2 * (position - tail_start)
            read = _decode_row_avx2(tail, start, tables, table, states, out, r * columns, columns)
        else:
            return -1
        position += read // 2
    return position
