"""Vector loops of `pltpack.codec.rans_mixed`: like `pltpack.codec.rans_simd`'s, but each symbol has its own table."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils as _cgutils
from numba.core import types
from numba.extending import intrinsic

from pltpack.codec.rans_ops import I8, I16, I64, Avx2, Avx512, for_each_step, load_states, store_states
from pltpack.codec.rans_scalar import PROB_BITS
from pltpack.codec.rans_simd import decode_step, next_state

# Partly annotated, depending on the version of numba.
cgutils: Any = _cgutils


def _emit_decode(ops: Avx512, words: Any, slots: Any, states: Any, row: Any, kinds: Any, columns: Any,
                 coding: Any) -> Any:  # fmt: skip
    """Emit the decoding of one row; gives the number of bytes read."""
    builder = ops.builder
    lanes = load_states(ops, states)
    position = cgutils.alloca_once_value(builder, ir.Constant(I64, 0))

    def look_up(slot: Any, target: Any, inside: Any) -> tuple[Any, Any, Any]:
        kind = ops.load(kinds, target, I8, inside)
        index = builder.or_(builder.shl(kind, ops.splat(PROB_BITS)), slot)
        symbol = builder.and_(ops.gather(slots, index, 1), ops.splat(0xFF))
        entry = ops.gather(coding, builder.or_(builder.shl(kind, ops.splat(8)), symbol))
        place = builder.sub(slot, builder.lshr(entry, ops.splat(16)))
        return symbol, builder.and_(entry, ops.splat(0xFFFF)), place

    def step(column: Any, active: Any) -> None:
        decode_step(ops, words, lanes, position, row, column, active, look_up)

    for_each_step(builder, columns, False, step)
    store_states(ops, states, lanes)
    return builder.load(position)


def _emit_encode(ops: Avx512, words: Any, tables: Any, states: Any, row: Any, kinds: Any, columns: Any,
                 _: Any) -> Any:  # fmt: skip
    """Emit the coding of one row downwards from `words`; gives the number of bytes written."""
    builder = ops.builder
    lanes = load_states(ops, states)
    position = cgutils.alloca_once_value(builder, ir.Constant(I64, 0))

    def step(column: Any, active: Any) -> None:
        for number, slot in reversed(list(enumerate(lanes))):
            first = number * ops.width
            inside = None if active is None else ops.first_lanes(active, first)
            source = builder.add(column, ir.Constant(I64, first))
            old = builder.load(slot)
            kind = builder.shl(ops.load(kinds, source, I8, inside), ops.splat(8))
            entry = ops.gather(tables, builder.or_(kind, ops.load(row, source, I8, inside)))
            freq = builder.and_(entry, ops.splat(0xFFFF))
            if inside is not None:
                freq = builder.select(inside, freq, ops.splat(1))
            full = builder.icmp_unsigned(">=", builder.lshr(old, ops.splat(20)), freq)
            if inside is not None:
                full = builder.and_(full, inside)
            written = ops.count(full)
            here = builder.sub(builder.load(position), builder.shl(written, ir.Constant(I64, 1)))
            ops.store(ops.compress(old, full), words, here, I16, ops.first_lanes(written, 0))
            builder.store(here, position)
            x = builder.select(full, builder.lshr(old, ops.splat(16)), old)
            new = next_state(ops, x, freq, builder.lshr(entry, ops.splat(16)))
            builder.store(new if inside is None else builder.select(inside, new, old), slot)

    for_each_step(builder, columns, True, step)
    store_states(ops, states, lanes)
    return builder.neg(builder.load(position))


def _row_intrinsic(make_ops: Any, emit: Any) -> Any:
    """Make the numba function ``row(words, byte, tables, states, symbols, kinds, item, columns, more) -> bytes``.

    `byte` is where the words begin, or end, and `item` where the row does; `more` is another table. Arrays are
    C-contiguous; nothing is checked.
    """

    @intrinsic
    def row(
        typing: Any, words: Any, start: Any, tables: Any, states: Any, symbols: Any, kinds: Any, item: Any,
        columns: Any, more: Any,
    ) -> Any:  # fmt: skip
        signature = types.int64(words, types.int64, tables, states, symbols, kinds, types.int64, types.int64, more)

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            def data(array: int, offset: Any) -> Any:
                pointer = context.make_array(signature.args[array])(context, builder, values[array]).data
                return builder.gep(builder.bitcast(pointer, I8.as_pointer()), [offset])

            zero = ir.Constant(I64, 0)
            arguments = data(0, values[1]), data(2, zero), data(3, zero), data(4, values[6]), data(5, values[6])
            return emit(make_ops(builder), *arguments, values[7], data(8, zero))

        return signature, generate

    return row


_decode_row_avx512 = _row_intrinsic(Avx512, _emit_decode)
_decode_row_avx2 = _row_intrinsic(Avx2, _emit_decode)
_encode_row_avx512 = _row_intrinsic(Avx512, _emit_encode)


@numba.njit(nogil=True, cache=True)
def encode_rows_avx512(symbols: Any, kinds: Any, tables: Any, words: Any, states: Any) -> Any:
    """See `pltpack.codec.rans_mixed.encode_rows`."""
    rows, columns = symbols.shape
    end = np.int64(2 * words.size)
    for r in range(rows - 1, -1, -1):
        end -= _encode_row_avx512(words, end, tables, states, symbols, kinds, r * columns, columns, tables)
    return end // 2


@numba.njit(nogil=True, cache=True)
def decode_rows_avx512(words: Any, count: int, states: Any, slots: Any, coding: Any, kinds: Any, out: Any) -> Any:
    """See `pltpack.codec.rans_mixed.decode_rows`."""
    rows, columns = out.shape
    at = np.int64(0)
    for r in range(rows):
        if at > count:
            return -1
        at += _decode_row_avx512(words, 2 * at, slots, states, out, kinds, r * columns, columns, coding) // 2
    return at


@numba.njit(nogil=True, cache=True)
def decode_rows_avx2(words: Any, count: int, states: Any, slots: Any, coding: Any, kinds: Any, out: Any) -> Any:
    """See `pltpack.codec.rans_mixed.decode_rows`."""
    rows, columns = out.shape
    at = np.int64(0)
    for r in range(rows):
        if at > count:
            return -1
        at += _decode_row_avx2(words, 2 * at, slots, states, out, kinds, r * columns, columns, coding) // 2
    return at
