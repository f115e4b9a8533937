"""The model of the lossless codec's mode *predicted*: how far a unit's words are from its reference's.

See `pltpack.codec.predicted` for what the model means. How an encoder finds one is in `pltpack.codec.predicted_fit`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numba
import numpy as np

from pltpack.codec.predicted_tables import MANTISSA

#: Bias of the exponents.
BIAS = {"BF16": 127, "F16": 15}
_BFLOAT_BIAS = 127
#: Range of a model's base.
BASES = (-1024, 1024)


class Model(NamedTuple):
    """uint8 `channel` and int8 `offset` ``[R]``, int8 `token` ``[N]``."""

    base: int
    channel: np.ndarray
    offset: np.ndarray
    token: np.ndarray

    @property
    def scales(self) -> np.ndarray:
        """Base and channel together: int32 ``[R]``."""
        found: np.ndarray = self.base + self.channel.astype(np.int32)
        return found


def predict(rows: np.ndarray, model: Model, dtype: str, out: np.ndarray) -> None:
    """Fill `out` with the words of the predictions, from those of the reference: uint16 ``[R, N]``."""
    if dtype == "BF16":
        _move_bfloat(rows, model.offset, model.channel, model.base, out)
        return
    exponents = (model.scales >> 1) - 2 - BIAS[dtype]
    with np.errstate(over="ignore", under="ignore"):
        offsets = np.ldexp(model.offset.astype(np.float64), exponents).astype(np.float32)
    out[...] = rows
    moved = np.flatnonzero(model.offset)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        sums = (rows[moved].view(np.float16).astype(np.float32) + offsets[moved, None]).astype(np.float16)
    top = np.uint16(0x8000 - (1 << MANTISSA[dtype]))
    out[moved] = np.where(rows[moved] & top == top, rows[moved], sums.view(np.uint16))


@numba.njit(nogil=True, cache=True)
def _move_bfloat(rows: Any, offset: Any, channel: Any, base: int, out: Any) -> None:
    values = np.empty(rows.shape[1], np.float32)
    bits = values.view(np.uint32)
    for r in range(rows.shape[0]):
        row, line = rows[r], out[r]
        if offset[r] == 0:
            for n in range(row.size):
                line[n] = row[n]
            continue
        exponent = ((base + int(channel[r])) >> 1) - 2 - _BFLOAT_BIAS
        add = np.float32(math.ldexp(float(offset[r]), exponent))
        for n in range(row.size):
            bits[n] = np.uint32(row[n]) << np.uint32(16)
        for n in range(row.size):
            values[n] = values[n] + add
        for n in range(row.size):
            kept = row[n] & np.uint16(0x7F80) == np.uint16(0x7F80)
            rounded = bits[n] + np.uint32(0x7FFF) + ((bits[n] >> np.uint32(16)) & np.uint32(1))
            line[n] = row[n] if kept else np.uint16(rounded >> np.uint32(16))
