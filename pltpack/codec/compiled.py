"""Arrays by their address, for compiled loops over many units whose arrays are apart."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba.core import cgutils as _cgutils
from numba.core import types as _types
from numba.extending import intrinsic

# Partly annotated, depending on the version of numba.
cgutils: Any = _cgutils
types: Any = _types


@intrinsic
def _pointer(typing: Any, address: Any, like: Any) -> Any:
    """An address as a pointer to items of the type of `like`."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(like)(types.int64, like), emit


@numba.njit(nogil=True, cache=True, inline="always")
def items_at(address: int, like: Any, count: int) -> Any:
    """The array of `count` items of the type of `like` at an address; the caller keeps the memory alive."""
    return numba.carray(_pointer(address, like), (count,))


@intrinsic
def copy_bytes(typing: Any, source: Any, first: Any, target: Any, to: Any, count: Any) -> Any:
    """Copy `count` bytes from item `first` of one array to item `to` of another, which do not overlap: no checks.

    An assignment between slices, which may overlap, goes byte by byte.
    """

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def pointer(array: int, item: int) -> Any:
            data = context.make_array(signature.args[array])(context, builder, arguments[array]).data
            place = context.cast(builder, arguments[item], signature.args[item], types.int64)
            return builder.gep(data, [place])

        size = context.cast(builder, arguments[4], signature.args[4], types.int64)
        cgutils.raw_memcpy(builder, pointer(2, 3), pointer(0, 1), size, 1)
        return context.get_dummy_value()

    return types.none(source, first, target, to, count), emit


def address_of(array: np.ndarray) -> int:
    """Address of an array's first item."""
    return array.ctypes.data


def head_stride(array: np.ndarray, shape: tuple[int, int, int], dtype: np.dtype[Any]) -> int:
    """Items from head to head of an array ``[H, T, D]`` with contiguous tokens; 0 for any other array."""
    heads, count, dim = shape
    size = count * dim
    if array.shape != shape or array.dtype != dtype or not size:
        return 0
    first, *rest = array.strides
    stride = first // dtype.itemsize if heads > 1 else size
    usual = rest == [dtype.itemsize * dim, dtype.itemsize] and stride % dim == 0 and stride >= size
    return stride if usual else 0
