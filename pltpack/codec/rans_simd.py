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

from pltpack.codec.rans_ops import I8, I16, I64, Avx2, Avx512, for_each_step, load_states, store_states
from pltpack.codec.rans_scalar import LANES, PROB_BITS, PROB_SCALE, STATE_LOW

# Partly annotated, depending on the version of numba.
cgutils: Any = _cgutils

_NEEDS = {"avx512": ("avx512f", "avx512bw", "avx512dq", "avx512vl"), "avx2": ("avx2",)}
#: Bit of what an encoded row gives that tells of a marking symbol.
_MARK = 40


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


def one_table(ops: Avx512, table: Any) -> Any:
    """How `decode_step` looks up symbols of one table from `pltpack.codec.rans.decode_tables`."""
    builder = ops.builder

    def look_up(slot: Any, target: Any, inside: Any) -> tuple[Any, Any, Any]:
        entry = ops.gather(table, slot)
        freq = builder.add(builder.and_(builder.lshr(entry, ops.splat(8)), ops.splat(0xFFF)), ops.splat(1))
        return entry, freq, builder.lshr(entry, ops.splat(20))

    return look_up


def decode_step(ops: Avx512, words: Any, lanes: list[Any], position: Any, row: Any, column: Any, active: Any,
                look_up: Any) -> None:  # fmt: skip
    """Emit one step: 32 symbols of a row to `row`, from the states in `lanes` and the words from `position` on.

    `look_up` gives symbols, their frequencies and places among their slots from slots, columns and a mask of lanes.
    """
    builder = ops.builder
    for number, slot in enumerate(lanes):
        first = number * ops.width
        inside = None if active is None else ops.first_lanes(active, first)
        target = builder.add(column, ir.Constant(I64, first))
        old = builder.load(slot)
        symbol, freq, place = look_up(builder.and_(old, ops.splat(PROB_SCALE - 1)), target, inside)
        ops.store(symbol, row, target, I8, inside)
        new = builder.add(builder.mul(freq, builder.lshr(old, ops.splat(PROB_BITS))), place)
        low = builder.icmp_unsigned("<", new, ops.splat(STATE_LOW))
        if inside is not None:
            low = builder.and_(low, inside)
            new = builder.select(inside, new, old)
        here = builder.load(position)
        fresh = ops.expand(ops.load(words, here, I16), low)
        refilled = builder.or_(builder.shl(new, ops.splat(16)), fresh)
        builder.store(builder.select(low, refilled, new), slot)
        builder.store(builder.add(here, builder.shl(ops.count(low), ir.Constant(I64, 1))), position)


def _emit_decode(ops: Avx512, words: Any, table: Any, states: Any, row: Any, columns: Any) -> Any:
    """Emit the decoding of one row; gives the number of bytes read."""
    lanes = load_states(ops, states)
    position = cgutils.alloca_once_value(ops.builder, ir.Constant(I64, 0))

    def step(column: Any, active: Any) -> None:
        decode_step(ops, words, lanes, position, row, column, active, one_table(ops, table))

    for_each_step(ops.builder, columns, False, step)
    store_states(ops, states, lanes)
    return ops.builder.load(position)


def next_state(ops: Avx512, x: Any, freq: Any, start: Any) -> Any:
    """The state ``x // freq << 12 | start + x % freq`` for quotients below 2**20.

    The float32 quotient is meant to be too small: a factor of ``1 - 2**-22`` outweighs its three roundings, of at most
    ``2**-24`` each, and takes less than 1 from the quotient. So it is exact or 1 too small, whatever the rounding, and
    the rest tells which. The reciprocal does not wait for `x`, as a division would.
    """
    builder = ops.builder
    floats = ir.VectorType(ir.FloatType(), ops.width)
    below = ir.Constant(floats, [1.0 - 2.0**-22] * ops.width)
    ratio = builder.fmul(builder.uitofp(x, floats), builder.fdiv(below, builder.uitofp(freq, floats)))
    quotient = builder.fptosi(ratio, ops.lanes)
    rest = builder.sub(x, builder.mul(quotient, freq))
    short = builder.icmp_unsigned(">=", rest, freq)
    new = builder.add(builder.add(builder.shl(quotient, ops.splat(PROB_BITS)), start), rest)
    return builder.select(short, builder.add(new, builder.sub(ops.splat(PROB_SCALE), freq)), new)


def _emit_encode(ops: Avx512, symbols: Any, table: Any, states: Any, words: Any, columns: Any) -> Any:
    """Emit the coding of one row downwards from `words`.

    Gives the number of bytes written, negative if impossible; plus ``1 << _MARK`` if an entry's highest bit is set.
    """
    builder = ops.builder
    lanes = load_states(ops, states)
    position = cgutils.alloca_once_value(builder, ir.Constant(I64, 0))
    least = cgutils.alloca_once_value(builder, ops.splat(1))
    every = cgutils.alloca_once_value(builder, ops.splat(0))

    def step(column: Any, active: Any) -> None:
        for number, slot in reversed(list(enumerate(lanes))):
            first = number * ops.width
            inside = None if active is None else ops.first_lanes(active, first)
            old = builder.load(slot)
            source = builder.add(column, ir.Constant(I64, first))
            entry = ops.gather(table, ops.load(symbols, source, I8, inside))
            here = entry if inside is None else builder.select(inside, entry, ops.splat(0))
            builder.store(builder.or_(builder.load(every), here), every)
            freq = builder.and_(entry, ops.splat(0xFFFF))
            if inside is not None:
                freq = builder.select(inside, freq, ops.splat(1))
            seen = builder.load(least)
            builder.store(builder.select(builder.icmp_unsigned("<", freq, seen), freq, seen), least)
            freq = builder.select(builder.icmp_unsigned(">", freq, ops.splat(1)), freq, ops.splat(1))
            full = builder.icmp_unsigned(">=", builder.lshr(old, ops.splat(20)), freq)
            if inside is not None:
                full = builder.and_(full, inside)
            written = ops.count(full)
            here = builder.sub(builder.load(position), builder.shl(written, ir.Constant(I64, 1)))
            ops.store(ops.compress(old, full), words, here, I16, ops.first_lanes(written, 0))
            builder.store(here, position)
            x = builder.select(full, builder.lshr(old, ops.splat(16)), old)
            start = builder.and_(builder.lshr(entry, ops.splat(16)), ops.splat(PROB_SCALE - 1))
            new = next_state(ops, x, freq, start)
            builder.store(new if inside is None else builder.select(inside, new, old), slot)

    for_each_step(builder, columns, True, step)
    store_states(ops, states, lanes)
    bad = builder.icmp_unsigned("==", builder.load(least), ops.splat(0))
    possible = builder.icmp_unsigned("==", ops.bits(bad), ir.Constant(ir.IntType(ops.width), 0))
    marking = builder.icmp_signed("<", builder.load(every), ops.splat(0))
    marked = builder.icmp_unsigned("!=", ops.bits(marking), ir.Constant(ir.IntType(ops.width), 0))
    written = builder.or_(
        builder.neg(builder.load(position)), builder.shl(builder.zext(marked, I64), ir.Constant(I64, _MARK))
    )
    return builder.select(possible, written, ir.Constant(I64, -1))


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
                return builder.gep(builder.bitcast(pointer, I8.as_pointer()), [offset])

            arguments = data(0, values[1]), data(2, values[3]), data(4, ir.Constant(I64, 0)), data(5, values[6])
            return emit(make_ops(builder), *arguments, values[7])

        return signature, generate

    return row


def _rows_intrinsic(make_ops: Any, streams: int) -> Any:
    """Make the numba function that decodes rows of several streams side by side.

    ``rows(tables, columns, most, positions, words, limit, states, kinds, out, ...) -> rows``, with the last five once
    for each stream. It stops after `most` rows, or before a row where a stream's position (in words, kept in
    `positions`) is beyond its limit. A step waits for the step before it: another stream's fills the time.
    """

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        def data(number: int) -> Any:
            return context.make_array(signature.args[number])(context, builder, values[number]).data

        ops = make_ops(builder)
        one = ir.Constant(I64, 1)
        tables, positions = builder.bitcast(data(0), I8.as_pointer()), data(3)
        columns, most = values[1], values[2]
        size = ir.Constant(I64, 4 * PROB_SCALE)
        row = cgutils.alloca_once_value(builder, ir.Constant(I64, 0))
        places, lanes, at = [], [], []
        for number in range(streams):
            first = 4 + 5 * number
            places.append((builder.bitcast(data(first), I8.as_pointer()), values[first + 1], data(first + 3),
                           data(first + 4)))  # fmt: skip
            lanes.append(load_states(ops, builder.bitcast(data(first + 2), I8.as_pointer())))
            begin = builder.load(builder.gep(positions, [ir.Constant(I64, number)]))
            at.append(cgutils.alloca_once_value(builder, builder.shl(begin, one)))
        test, body, end = (builder.append_basic_block(name) for name in ("rows.test", "rows.body", "rows.end"))
        builder.branch(test)
        builder.position_at_end(test)
        more = builder.icmp_signed("<", builder.load(row), most)
        for (_, limit, _, _), position in zip(places, at, strict=True):
            inside = builder.icmp_signed("<=", builder.load(position), builder.shl(limit, one))
            more = builder.and_(more, inside)
        builder.cbranch(more, body, end)
        builder.position_at_end(body)
        here = builder.load(row)
        found = []
        for words, _, kinds, out in places:
            table = builder.gep(tables, [builder.mul(builder.load(builder.gep(kinds, [here])), size)])
            found.append((words, table, builder.gep(out, [builder.mul(here, columns)])))

        def step(column: Any, active: Any) -> None:
            for (words, table, line), slots, position in zip(found, lanes, at, strict=True):
                decode_step(ops, words, slots, position, line, column, active, one_table(ops, table))

        for_each_step(builder, columns, False, step)
        builder.store(builder.add(here, one), row)
        builder.branch(test)
        builder.position_at_end(end)
        for number in range(streams):
            store_states(ops, builder.bitcast(data(4 + 5 * number + 2), I8.as_pointer()), lanes[number])
            read = builder.lshr(builder.load(at[number]), one)
            builder.store(read, builder.gep(positions, [ir.Constant(I64, number)]))
        return builder.load(row)

    @intrinsic
    def rows_of_one(typing: Any, tables: Any, columns: Any, most: Any, positions: Any, words: Any, limit: Any,
                    states: Any, kinds: Any, out: Any) -> Any:  # fmt: skip
        each = words, types.int64, states, kinds, out
        return types.int64(tables, types.int64, types.int64, positions, *each), generate

    @intrinsic
    def rows_of_two(typing: Any, tables: Any, columns: Any, most: Any, positions: Any, words: Any, limit: Any,
                    states: Any, kinds: Any, out: Any, words2: Any, limit2: Any, states2: Any, kinds2: Any,
                    out2: Any) -> Any:  # fmt: skip
        each = words, types.int64, states, kinds, out, words2, types.int64, states2, kinds2, out2
        return types.int64(tables, types.int64, types.int64, positions, *each), generate

    return rows_of_one if streams == 1 else rows_of_two


_decode_row_avx512 = _row_intrinsic(Avx512, _emit_decode)
_decode_row_avx2 = _row_intrinsic(Avx2, _emit_decode)
_decode_one_avx512 = _rows_intrinsic(Avx512, 1)
_decode_two_avx512 = _rows_intrinsic(Avx512, 2)
_encode_row_avx512 = _row_intrinsic(Avx512, _emit_encode)


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


@numba.njit(nogil=True, cache=True)
def _decode_from(
    row: int, position: int, words: Any, tail: Any, tail_start: Any, states: Any, tables: Any, kinds: Any, out: Any
) -> Any:
    """Decode the rows from `row` on, which begin at the word `position`."""
    rows, columns = out.shape
    count = words.size // 2
    if row < rows:
        positions = np.array([position])
        limit = count - columns - LANES
        row += _decode_one_avx512(tables, columns, rows - row, positions, words, limit, states, kinds[row:], out[row:])
        position = positions[0]
    # The last rows read from the tail, which goes on beyond the stream's end.
    for r in range(row, rows):
        if position > count:
            return -1
        table = kinds[r] * tables.shape[1] * 4
        start = 2 * (position - tail_start)
        position += _decode_row_avx512(tail, start, tables, table, states, out, r * columns, columns) // 2
    return position


@numba.njit(nogil=True, cache=True)
def decode_rows_avx512(
    words: Any, tail: Any, tail_start: Any, states: Any, tables: Any, table_of_row: Any, out: Any
) -> Any:
    """As `pltpack.codec.rans_scalar.decode_rows`; all arrays C-contiguous."""
    return _decode_from(0, 0, words, tail, tail_start, states, tables, table_of_row, out)


@numba.njit(nogil=True, cache=True)
def decode_two_avx512(
    tables: Any, words: Any, tail: Any, tail_start: int, states: Any, kinds: Any, out: Any, words2: Any, tail2: Any,
    tail_start2: int, states2: Any, kinds2: Any, out2: Any
) -> Any:  # fmt: skip
    """As two times `decode_rows_avx512`, for streams with equally many columns."""
    columns = out.shape[1]
    positions = np.zeros(2, np.int64)
    limit, limit2 = words.size // 2 - columns - LANES, words2.size // 2 - columns - LANES
    row = _decode_two_avx512(tables, columns, min(len(out), len(out2)), positions, words, limit, states, kinds, out,
                             words2, limit2, states2, kinds2, out2)  # fmt: skip
    return (_decode_from(row, positions[0], words, tail, tail_start, states, tables, kinds, out),
            _decode_from(row, positions[1], words2, tail2, tail_start2, states2, tables, kinds2, out2))  # fmt: skip


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
