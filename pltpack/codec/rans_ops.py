"""Vector operations of the rANS coder's loops, LLVM IR for AVX-512 and AVX2, and the loop over a row's steps."""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils as _cgutils

from pltpack.codec.rans_scalar import LANES

# Partly annotated, depending on the version of numba.
cgutils: Any = _cgutils

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))


class Avx512:
    """Emits vector operations over 16 lanes of 32 bits; masks are ``<16 x i1>``."""

    width = 16

    def __init__(self, builder: Any) -> None:
        self.builder = builder
        self.lanes = ir.VectorType(I32, self.width)

    def splat(self, value: int) -> Any:
        """The same integer in all lanes."""
        return ir.Constant(self.lanes, [value] * self.width)

    def call(self, name: str, result: Any, *arguments: Any) -> Any:
        """Call an LLVM intrinsic."""
        signature = ir.FunctionType(result, [argument.type for argument in arguments])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, signature, name), arguments)

    def at(self, pointer: Any, offset: Any, element: Any) -> Any:
        """Pointer to a vector of `element` at a byte offset."""
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
            value = self.call(name, vector, source, ir.Constant(I32, 1), mask, ir.Constant(vector, None))
        return value if element == I32 else self.builder.zext(value, self.lanes)

    def store(self, value: Any, pointer: Any, offset: Any, element: Any, mask: Any = None) -> None:
        """Narrow 32-bit lanes to `element` and store those in `mask`."""
        target = self.at(pointer, offset, element)
        if element != I32:
            value = self.builder.trunc(value, ir.VectorType(element, self.width))
        if mask is None:
            self.builder.store(value, target, align=1)
        else:
            name = f"llvm.masked.store.v{self.width}i{element.width}.p0"
            self.call(name, ir.VoidType(), value, target, ir.Constant(I32, 1), mask)

    def gather(self, table: Any, index: Any, step: int = 4) -> Any:
        """Items of a table of 32-bit integers, one every `step` bytes."""
        every = ir.Constant(ir.VectorType(I1, self.width), [1] * self.width)
        name = "llvm.x86.avx512.mask.gather.dpi.512"
        return self.call(name, self.lanes, self.splat(0), table, index, every, ir.Constant(I32, step))

    def expand(self, words: Any, mask: Any) -> Any:
        """Give the first words to the lanes in `mask`, in lane order; other lanes are undefined."""
        return self.call("llvm.x86.avx512.mask.expand.v16i32", self.lanes, words, self.splat(0), mask)

    def compress(self, values: Any, mask: Any) -> Any:
        """Move the lanes in `mask` to the front, in lane order."""
        return self.call("llvm.x86.avx512.mask.compress.v16i32", self.lanes, values, self.splat(0), mask)

    def bits(self, mask: Any) -> Any:
        """A mask as an integer."""
        return self.builder.bitcast(mask, ir.IntType(self.width))

    def count(self, mask: Any) -> Any:
        """Number of lanes in a mask, 64 bits."""
        return self.builder.zext(self.builder.ctpop(self.bits(mask)), I64)

    def first_lanes(self, count: Any, lane_base: int) -> Any:
        """Mask of the lanes whose number, from `lane_base` up, is below the 64-bit `count`."""
        builder = self.builder
        narrow = builder.insert_element(self.splat(0), builder.trunc(count, I32), ir.Constant(I32, 0))
        zeros = ir.Constant(ir.VectorType(I32, self.width), None)
        bound = builder.shuffle_vector(narrow, self.splat(0), zeros)
        numbers = ir.Constant(self.lanes, [lane_base + lane for lane in range(self.width)])
        return builder.icmp_unsigned("<", numbers, bound)


class Avx2(Avx512):
    """The same over 8 lanes; decoding only."""

    width = 8

    def gather(self, table: Any, index: Any, step: int = 4) -> Any:
        """See `Avx512.gather`."""
        name = "llvm.x86.avx2.gather.d.d.256"
        return self.call(name, self.lanes, self.splat(0), table, index, self.splat(-1), ir.Constant(I8, step))

    def expand(self, words: Any, mask: Any) -> Any:
        """See `Avx512.expand`."""
        # Entry m, lane j: how many lanes before j are in the mask m.
        ranks = bytes((m & ((1 << lane) - 1)).bit_count() for m in range(256) for lane in range(8))
        constant = cgutils.global_constant(self.builder.module, "rans_ranks", cgutils.make_bytearray(ranks))
        table = self.builder.bitcast(constant, I8.as_pointer())
        offset = self.builder.shl(self.builder.zext(self.bits(mask), I64), ir.Constant(I64, 3))
        return self.call("llvm.x86.avx2.permd", self.lanes, words, self.load(table, offset, I8))


def for_each_step(builder: Any, columns: Any, backwards: bool, emit: Any) -> None:
    """Emit a row's loop: ``emit(first column, None)`` for full steps, ``emit(first column, lanes)`` for a partial one.

    The partial step is the last of a row, the first when going backwards.
    """
    step = ir.Constant(I64, LANES)
    steps = builder.udiv(columns, step)
    whole = builder.mul(steps, step)
    rest = builder.sub(columns, whole)

    def partial() -> None:
        with builder.if_then(builder.icmp_unsigned(">", rest, ir.Constant(I64, 0))):
            emit(whole, rest)

    if backwards:
        partial()
    with cgutils.for_range(builder, steps) as loop:
        number = loop.index
        if backwards:
            number = builder.sub(builder.sub(steps, number), ir.Constant(I64, 1))
        emit(builder.mul(number, step), None)
    if not backwards:
        partial()


def load_states(ops: Avx512, states: Any) -> list[Any]:
    """Slots that hold the states of all lanes, vector by vector."""
    lanes = []
    for first in range(0, LANES, ops.width):
        slot = cgutils.alloca_once(ops.builder, ops.lanes)
        ops.builder.store(ops.load(states, ir.Constant(I64, 4 * first), I32), slot)
        lanes.append(slot)
    return lanes


def store_states(ops: Avx512, states: Any, lanes: list[Any]) -> None:
    """The opposite of `load_states`."""
    for number, slot in enumerate(lanes):
        ops.store(ops.builder.load(slot), states, ir.Constant(I64, 4 * number * ops.width), I32)
