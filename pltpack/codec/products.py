"""Products of sparse coefficients with a dense basis: what is 0 is passed over, and no bit depends on it.

A sum goes through the components in their order, one fused multiply-add each, from 0 anew for every block of `BLOCK`
components; the blocks' sums are then added in their order. That is how OpenBLAS makes a product, so a dense one gives
the same bits on machines for which it is compiled with these blocks (all with AVX-512). Tokens are taken several at a
time: what is loaded of the basis then serves all of them.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils as _cgutils
from numba.core import types
from numba.extending import intrinsic

from pltpack.codec import rans_simd

# Partly annotated, depending on the version of numba.
cgutils: Any = _cgutils

#: Components of a block of a sum, and what a shortened block is a multiple of.
BLOCK, _UNIT = 448, 16
#: Columns of a vector.
LANES = 16
# As many sums as the registers hold; no bit depends on it.
_TOKENS, _VECTORS = (4, 6) if "avx512" in rans_simd.kernels() else (2, 3)
#: Tokens of a packet.
TOKENS = _TOKENS
_jit = numba.njit(cache=True, nogil=True, error_model="numpy")
_I32, _I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
_VECTOR = ir.VectorType(_F32, LANES)


def blocks(components: int) -> list[int]:
    """Ends of the blocks of a sum of so many terms: whole ones, but the last two share what is left for both."""
    ends, at = [], 0
    while at < components:
        left = components - at
        half = -(-(left // 2) // _UNIT) * _UNIT
        at += BLOCK if left >= 2 * BLOCK else half if left > BLOCK else left
        ends.append(at)
    return ends


def packets(shared: np.ndarray, needs: list[int], run: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Coefficients as lists of what is not 0.

    Parameters
    ----------
    shared : ndarray
        float32 ``[T, N]``.
    needs : list of int
        Terms of the sums of each `run` tokens; what comes after is 0.
    run : int
        A multiple of `TOKENS`.

    Returns
    -------
    parts : ndarray
        int64 ``[P, B + 1]``: packet p, tokens ``TOKENS * p`` and following, has the entries
        ``parts[p, b] … parts[p, b + 1] - 1`` in block b.
    index, value : ndarray
        Component of each entry, int32 ``[E]``, and the tokens' coefficients, float32 ``[E * TOKENS]``.
    """
    ends = [blocks(need) for need in needs]
    table = np.zeros((len(ends), max(map(len, ends), default=0)), np.int64)
    for line, row in zip(table, ends, strict=True):
        line[: len(row)] = row
        line[len(row) :] = row[-1] if row else 0
    parts = np.zeros((-(-len(shared) // TOKENS), table.shape[1] + 1), np.int64)
    index = np.empty(_count(shared, table, run, parts), np.int32)
    value = np.empty(len(index) * TOKENS, np.float32)
    _fill(shared, parts, table, run, index, value)
    return parts, index, value


@_jit
def _live(shared: Any, first: Any, live: Any) -> None:
    """Which components of a packet's tokens, as many as `live` has, are not all 0."""
    live[:] = False
    for t in range(first, min(first + _TOKENS, len(shared))):
        line = shared[t]
        for k in range(len(live)):
            live[k] |= line[k] != 0


@_jit
def _count(shared: Any, ends: Any, run: Any, parts: Any) -> Any:
    total = 0
    every = np.empty(shared.shape[1], np.bool_)
    for p in range(len(parts)):
        table = ends[p * _TOKENS // run]
        parts[p, 0] = total
        at = 0
        live = every[: table[-1] if len(table) else 0]
        _live(shared, p * _TOKENS, live)
        for b in range(len(table)):
            for k in range(at, table[b]):
                total += live[k]
            at = table[b]
            parts[p, b + 1] = total
    return total


@_jit
def _fill(shared: Any, parts: Any, ends: Any, run: Any, index: Any, value: Any) -> None:
    at = 0
    every = np.empty(shared.shape[1], np.bool_)
    for p in range(len(parts)):
        first = p * _TOKENS
        last = min(first + _TOKENS, len(shared))
        table = ends[first // run]
        live = every[: table[-1] if len(table) else 0]
        _live(shared, first, live)
        for k in range(len(live)):
            if live[k]:
                index[at] = k
                for i in range(_TOKENS):
                    value[at * _TOKENS + i] = shared[first + i, k] if first + i < last else 0
                at += 1


@_jit
def add(parts: Any, index: Any, value: Any, basis: Any, width: Any, rows: Any, out: Any) -> None:
    """Add the products to the rows of `out`.

    Parameters
    ----------
    parts, index, value : ndarray
        Of `packets`.
    basis, out : ndarray
        float32, one-dimensional: lines of `width` columns.
    width : int
        A multiple of `LANES`.
    rows : ndarray
        int64 ``[P * TOKENS]``: line of `out` of each token of the packets.
    """
    column = 0
    while column + LANES * _VECTORS <= width:
        for p in range(len(parts)):
            for b in range(parts.shape[1] - 1):
                if parts[p, b] < parts[p, b + 1]:
                    _sums(index, value, parts[p, b], parts[p, b + 1], basis, width, column, rows, p * _TOKENS, out)
        column += LANES * _VECTORS
    while column < width:
        for p in range(len(parts)):
            for b in range(parts.shape[1] - 1):
                if parts[p, b] < parts[p, b + 1]:
                    _sum(index, value, parts[p, b], parts[p, b + 1], basis, width, column, rows, p * _TOKENS, out)
        column += LANES


def _make_sums(vectors: int) -> Any:
    """The sum of one block for the tokens of a packet over some vectors of columns, added to the output."""

    @intrinsic
    def sums(typing: Any, index: Any, value: Any, first: Any, stop: Any, basis: Any, width: Any, column: Any,
             rows: Any, token: Any, out: Any) -> Any:  # fmt: skip
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            def data(number: int) -> Any:
                return context.make_array(signature.args[number])(context, builder, arguments[number]).data

            def integer(number: int) -> Any:
                return context.cast(builder, arguments[number], signature.args[number], types.int64)

            loop = _Loop(builder, vectors)
            loop.run(data(0), data(1), integer(2), integer(3), builder.gep(data(4), [integer(6)]), integer(5))
            loop.store(data(9), data(7), integer(8), integer(5), integer(6))
            return context.get_dummy_value()

        return types.none(index, value, first, stop, basis, width, column, rows, token, out), emit

    return sums


class _Loop:
    """Emits the loop over a block's entries, with its sums in registers."""

    def __init__(self, builder: Any, vectors: int) -> None:
        self._b, self._vectors = builder, vectors
        kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
        self._fma = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fmuladd.v{LANES}f32")

    def run(self, index: Any, value: Any, first: Any, stop: Any, basis: Any, width: Any) -> None:
        b, entry = self._b, self._b.block
        head, body, end = (b.append_basic_block(name) for name in ("head", "body", "end"))
        b.branch(head)
        b.position_at_end(head)
        at = b.phi(_I64)
        at.add_incoming(first, entry)
        self._sums = [[b.phi(_VECTOR) for _ in range(self._vectors)] for _ in range(_TOKENS)]
        for total in (total for line in self._sums for total in line):
            total.add_incoming(ir.Constant(_VECTOR, [0.0] * LANES), entry)
        b.cbranch(b.icmp_signed("<", at, stop), body, end)
        b.position_at_end(body)
        component = b.sext(b.load(b.gep(index, [at])), _I64)
        start = b.mul(at, ir.Constant(_I64, _TOKENS))
        factors = [self._splat(b.load(self._beyond(value, start, token))) for token in range(_TOKENS)]
        line = b.gep(basis, [b.mul(component, width)])
        for vector in range(self._vectors):
            part = b.load(self._vector(line, ir.Constant(_I64, LANES * vector)), align=4)
            for factor, sums in zip(factors, self._sums, strict=True):
                sums[vector].add_incoming(b.call(self._fma, [factor, part, sums[vector]]), body)
        at.add_incoming(b.add(at, ir.Constant(_I64, 1)), body)
        b.branch(head)
        b.position_at_end(end)

    def store(self, out: Any, rows: Any, token: Any, width: Any, column: Any) -> None:
        b = self._b
        for number, sums in enumerate(self._sums):
            row = b.load(self._beyond(rows, token, number))
            line = b.gep(out, [b.add(b.mul(row, width), column)])
            for vector, total in enumerate(sums):
                place = self._vector(line, ir.Constant(_I64, LANES * vector))
                b.store(b.fadd(b.load(place, align=4), total), place, align=4)

    def _beyond(self, items: Any, offset: Any, more: int) -> Any:
        return self._b.gep(items, [self._b.add(offset, ir.Constant(_I64, more))])

    def _vector(self, items: Any, offset: Any) -> Any:
        return self._b.bitcast(self._b.gep(items, [offset]), _VECTOR.as_pointer())

    def _splat(self, value: Any) -> Any:
        some = ir.Constant(_VECTOR, ir.Undefined)
        narrow = self._b.insert_element(some, value, ir.Constant(_I32, 0))
        return self._b.shuffle_vector(narrow, some, ir.Constant(ir.VectorType(_I32, LANES), None))


_sums, _sum = _make_sums(_VECTORS), _make_sums(1)
