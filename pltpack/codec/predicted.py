"""The lossless codec's mode *predicted*: words near those of a reference, as of the same passage at another position.

The unit is in channel rows ``[R, N]``. A model tells how far words are from the reference: word n of row r by about
``2^(s / 2)`` with ``s = base + channel[r] + token[n]``, in units in which the exponent field e of a word stands for
``2^e``; and by ``offset[r]`` on average. M is the number of mantissa bits (BF16 7, F16 10; other dtypes lack the mode).

Body: u32 number of escapes X, u32 length of the stream Z, u32 number of low bytes B, u32 length F of the frame, then

| bytes | content |
|---|---|
| F | zstd frame of i16 `base` (-1024 to 1024), u8 `channel` ``[R]``, i8 `offset` ``[R]``, i8 `token` ``[N]`` |
| 2 X | u16 escapes |
| Z | rANS stream of symbols ``[R, N]``, the table of each being that of its word |
| B | low bits of all words, rows in order, the lowest first, bit i in bit ``i mod 8`` of byte ``i div 8`` |

**Prediction** p: the reference's word, or, if `offset` is not 0 and the word is finite, that of its value plus
``offset * 2^(floor((base + channel) / 2) - 2 - bias)``, each rounded to binary32 and the sum then to the dtype.

**Tables.** With m the magnitude of p, ``e = max(m >> M, 1)`` and ``k = s - 2 e``: if ``k < -4``, the word is *near*;
with ``k' = max(k, -2 M - 8)`` it has table ``k' + 2 M + 8`` and ``max(0, floor(k' / 2) + M - 4)`` low bits. Else it is
*far* and has M - 3 low bits; with ``h = floor(s / 2)`` and ``q = min(max(4 h - (m >> (M - 2)), -11), 12)``, its table
is ``2 M + 4 + 24 (s mod 2) + q + 11``. The tables are static (`pltpack.codec.predicted_tables`).

**Words.** Symbol 0 is an escape: the word is the next escape, whatever its low bits. A near word is ``d`` places above
p in the order of the numbers (`pltpack.codec.delta`), below if p has a sign bit, modulo 2^16, with
``d = ((symbol - 128) << low bits) + low``. A far word has the magnitude ``t << (M - 3) | low`` with
``t = (symbol mod 128 + 8 (h - 12)) mod 2^(18 - M)``, and p's sign, or the opposite if the symbol is 128 or above.
"""

from __future__ import annotations

import struct

import numpy as np

from pltpack.codec import delta, predicted_words, rans_mixed
from pltpack.codec.delta import Words
from pltpack.codec.payload import Reader, expand, squeeze
from pltpack.codec.predicted_fit import fit
from pltpack.codec.predicted_model import BASES, Model, predict
from pltpack.codec.predicted_tables import MANTISSA, static
from pltpack.codec.scratch import Scratch

_scratch = Scratch()


def supports(dtype: str) -> bool:
    """Whether the mode exists for a dtype."""
    return dtype in MANTISSA


def encode(words: Words, reference: Words, dtype: str) -> bytes:
    """The body for words ``[H, N, D]`` of a dtype that has the mode."""
    mantissa = MANTISSA[dtype]
    rows, base = _rows("rows", words), _rows("base", reference)
    shape, array = rows.shape, _scratch.array
    model = fit(rows, base, dtype, array("differences", shape, np.float32))
    scales, tables, predictions = model.scales, static(mantissa), array("predictions", shape, np.uint16)
    predict(base, model, dtype, predictions)
    kinds, symbols, rest = (array(name, shape, np.uint8) for name in ("kinds", "symbols", "rest"))
    escapes, low = array("escapes", (rows.size,), np.uint16), array("low", (rows.size // 4 + 2,), np.uint32)
    predicted_words.to_kinds(mantissa)(predictions, scales, model.token, kinds)
    count = predicted_words.to_symbols(mantissa)(rows, predictions, scales, model.token, kinds, tables.coded, symbols,
                                                 rest, escapes)  # fmt: skip
    size = (predicted_words.pack(rest, kinds, mantissa, low) + 7) // 8
    stream = rans_mixed.encode(symbols, kinds, tables.coding)
    frame = squeeze(struct.pack("<h", model.base) + b"".join(part.tobytes() for part in model[1:]))
    return b"".join([struct.pack("<4I", count, len(stream), size, len(frame)), frame,
                     escapes[:count].astype("<u2", copy=False).data, stream,
                     low[: -(-size // 4)].astype("<u4", copy=False).view(np.uint8)[:size].data])  # fmt: skip


def decode(reader: Reader, words: Words, reference: Words, dtype: str) -> None:
    """Fill `words` from the reference and a body.

    Raises
    ------
    ValueError
        If the body is malformed.
    """
    base, mantissa = _rows("base", reference), MANTISSA[dtype]
    count, length, size, packed = (reader.u32() for _ in range(4))
    if count > base.size:
        raise ValueError("number of escapes is out of range")
    model = _read_model(reader.take(packed), base.shape)
    escapes = reader.array(count, "<u2").astype(np.uint16)
    stream, low = reader.take(length), reader.array(size, "u1")
    reader.end()
    shape, array, scales, tables = base.shape, _scratch.array, model.scales, static(mantissa)
    rows, kinds, rest = array("rows", shape, np.uint16), array("kinds", shape, np.uint8), array("rest", shape, np.uint8)
    predict(base, model, dtype, rows)
    predicted_words.to_kinds(mantissa)(rows, scales, model.token, kinds)
    if (predicted_words.unpack(_whole(low), kinds, mantissa, rest) + 7) // 8 != size:
        raise ValueError("low bits do not fit the unit")
    symbols = array("symbols", shape, np.uint8)
    rans_mixed.decode(stream, kinds, tables.slots, tables.coding, symbols)
    if predicted_words.to_words(mantissa)(symbols, rest, kinds, scales, model.token, escapes, rows) != count:
        raise ValueError("escapes are damaged")
    delta.spread_rows(rows, words)


def _rows(name: str, words: Words) -> np.ndarray:
    """Channel rows in the thread's memory."""
    channels = words[0].shape[0] * (words[0].shape[2] + words[1].shape[2])
    rows = _scratch.array(name, (channels, words[0].shape[1]), np.uint16)
    delta.fill_rows(words, rows)
    return rows


def _whole(low: np.ndarray) -> np.ndarray:
    """Bytes as uint32, and as much behind them as `pltpack.codec.predicted_words.unpack` may look at."""
    out = _scratch.array("low", (len(low) // 4 + 3,), "<u4")
    out[-3:] = 0
    out.view(np.uint8)[: len(low)] = low
    return out.astype(np.uint32, copy=False)


def _read_model(frame: memoryview, shape: tuple[int, int]) -> Model:
    channels, tokens = shape
    reader = Reader(memoryview(expand(frame, 2 + 2 * channels + tokens)))
    base = int(reader.array(1, "<i2")[0])
    if not BASES[0] <= base <= BASES[1]:
        raise ValueError("scale of the differences is out of range")
    # Copies, so that the compiled loops see one kind of array.
    return Model(base, *(reader.array(size, kind).copy() for size, kind in (
        (channels, "u1"), (channels, "i1"), (tokens, "i1"))))  # fmt: skip
