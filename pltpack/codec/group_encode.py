"""Encoding of the group codec's payloads; the bitstream is described in `pltpack.codec.group`."""

from __future__ import annotations

import dataclasses

import numpy as np

from pltpack.codec import group_near, quantize, rans, scales, tokens
from pltpack.codec.base import KeyValue, Unit
from pltpack.codec.group_decode import (
    HEADER,
    MEAN_UNIT,
    OWN_MEANS,
    REFERENCED,
    SHIFTED,
    Layer,
    own_means,
    padded,
    pairs,
    unrotated,
)
from pltpack.codec.levels import CLASSES, DEVIATION, RAW_BITS, UNIT_CLASS, step_code, step_of

#: Values of this size make their token exact, so that no decoded value overflows.
_TOO_LARGE = 1e38
#: So does a squared norm this much above the usual one.
_OUTLIER = 2.0**20
#: A step is at least this share of the residuals' deviation: no unit costs much more than its neighbours for being
#: unlike the sample.
_FINEST_STEP = 1 / 32
#: Fewer tokens than this say little about deviations.
_FEW = 16


@dataclasses.dataclass(frozen=True)
class Coding:
    """What the encoder takes from its codec: step, frequencies, int32 costs in 1/256 bit, rANS tables, shrink."""

    step: float
    freqs: np.ndarray
    costs: np.ndarray
    tables: np.ndarray
    shrink: np.ndarray


def encode(coding: Coding, layer: Layer, unit: Unit, arrays: KeyValue, reference: KeyValue | None) -> bytes:
    """Encode one unit whose shapes have been checked."""
    x = unrotated(arrays, layer, unit)
    classes = _token_classes(x, layer, unit)
    codes = _step_codes(coding.step, x, classes, layer)
    flags, means, prediction, plain = _predict(x, classes, codes, layer, unit, reference)
    near = unit.near and flags == REFERENCED
    if near:
        codes = group_near.raised(x, prediction, plain, classes, codes, coding.shrink)
    if flags == REFERENCED and reference is not None:
        classes[_same_tokens(arrays, reference)] = tokens.COPY
    heads = layer.geometry.heads
    q = [np.zeros((heads, unit.tokens, 2 * pairs(dim)), dtype=np.int32) for dim in layer.dims]
    magnitudes = _quantize(x, prediction, classes, codes, q)
    bases, ranks, shifts = np.zeros(2 * heads, dtype=np.uint8), classes.astype(np.int16), b""
    if near:
        group_near.copy_zeros(q, classes)
        bases, moved = group_near.tables(q, layer.dims, classes, coding.costs)
        if moved.any():
            flags, shifts = REFERENCED | SHIFTED, tokens.pack_shifts(moved).tobytes()
        ranks = classes.astype(np.int16) + moved
    rows, low, escapes = [], [], []
    for part, dim in enumerate(layer.dims):
        area = slice(part * CLASSES, (part + 1) * CLASSES)
        found = []
        for h in range(heads):
            head = part * heads + h
            values = q[part][h][:, :dim]
            if not near:
                bases[head] = _table_class(values, classes, ranks, float(magnitudes[head]), pairs(dim),
                                           coding.costs[area])  # fmt: skip
            found.append(_emit(values, classes, ranks, int(bases[head]), pairs(dim), coding.freqs[area]))
        rows.append(np.concatenate([f[0] for f in found]))
        low += [f[1].tobytes() for f in found]
        escapes += [f[2].astype("<i2").tobytes() for f in found]
    exact, rest = _exact(arrays, np.flatnonzero(classes == tokens.EXACT))
    kinds = np.empty(4 * heads * unit.tokens, dtype=np.int64)
    quantize.plan(classes, ranks, codes, bases, pairs(layer.dims[0]), pairs(layer.dims[1]), kinds)
    streams = _streams(coding.tables, [*rows, *exact], kinds)
    runs, escaped = tokens.pack_runs(classes), b"".join(escapes)
    return b"".join([
        HEADER.pack(flags, len(runs), len(escaped) // 2, len(streams[0])),
        codes.astype("<i2").tobytes(), bases.tobytes(), runs.tobytes(), shifts,
        means.astype("<i2").tobytes() if flags == OWN_MEANS else b"",
        escaped, *low, *rest, *streams,
    ])  # fmt: skip


def _token_classes(x: KeyValue, layer: Layer, unit: Unit) -> np.ndarray:
    norms = np.empty((2, unit.tokens))
    fits = np.ones(unit.tokens, dtype=bool)
    for part in (0, 1):
        tokens.squared_norms(x[part], norms[part])
        with np.errstate(invalid="ignore"):
            fits &= (np.abs(x[part]) < _TOO_LARGE).all(axis=(0, 2))
    for part in (0, 1):
        usual = float(np.median(norms[part][fits])) if fits.any() else 0.0
        if usual > 0:
            fits &= norms[part] <= _OUTLIER * usual
    usual = layer.norm if layer.norm > 0 else float(np.median(norms[1][fits])) if fits.any() else 0.0
    return tokens.classes(unit, norms[1], fits, usual)


def _step_codes(step: float, x: KeyValue, classes: np.ndarray, layer: Layer) -> np.ndarray:
    """Step codes of the state, or of this unit where the state knows nothing of the layer."""
    coded = classes <= tokens.FINEST
    if layer.norm > 0 or not coded.any():
        return _coarser(layer.codes, x, classes)
    spreads = []
    for part in x:
        values = part[:, coded].astype(np.float64)
        mean = values.mean(axis=1)
        deviation = values.std(axis=1)
        if values.shape[1] < _FEW:
            deviation = np.maximum(deviation, np.sqrt(np.mean(np.square(values), axis=1)) / 4)
        spreads.append(scales.Spread.of(mean, deviation))
    steps = scales.steps(step, spreads[0], spreads[1], scales.Usual.of([(spreads[0], spreads[1])]))
    return _coarser(np.array([step_code(s) for s in steps], dtype=np.int16), x, classes)


def _coarser(codes: np.ndarray, x: KeyValue, classes: np.ndarray) -> np.ndarray:
    """Step codes raised to `_FINEST_STEP` of the deviation around this unit's own means."""
    coded = classes <= tokens.FINEST
    if not coded.any():
        return codes
    least = []
    for part in x:
        values = part[:, coded].astype(np.float64)
        residual = values - values.mean(axis=1, keepdims=True)
        # A median over tokens, as one odd token must not coarsen all others.
        square = np.median(np.mean(np.square(residual), axis=2), axis=1)
        least += [step_code(_FINEST_STEP * float(np.sqrt(s))) for s in square]
    raised: np.ndarray = np.maximum(codes, np.array(least, dtype=np.int16))
    return raised


def _predict(x: KeyValue, classes: np.ndarray, codes: np.ndarray, layer: Layer, unit: Unit,
             reference: KeyValue | None) -> tuple[int, np.ndarray, KeyValue, KeyValue]:  # fmt: skip
    """The prediction that promises the fewest bits: flags, means as stored, and float32 predictions.

    Then the best prediction without the reference.
    """
    none = np.zeros(0, dtype=np.int16)
    means = _means(x, classes, codes)
    found: list[tuple[int, np.ndarray, KeyValue]] = [
        (0, none, layer.means),
        (OWN_MEANS, means, own_means(means, codes, layer)),
    ]
    if reference is not None:
        keys, values = unrotated(reference, layer, unit)
        found.append((REFERENCED, none, (padded(keys), padded(values))))
    bits = [_promised_bits(x, prediction, classes, codes) + 16.0 * means.size for _, means, prediction in found]
    promised = np.nan_to_num(bits, nan=np.inf)
    return *found[int(np.argmin(promised))], found[int(np.argmin(promised[:2]))][2]


def _means(x: KeyValue, classes: np.ndarray, codes: np.ndarray) -> np.ndarray:
    coded = classes <= tokens.FINEST
    heads = len(codes) // 2
    out = []
    for i, part in enumerate(x):
        scale = np.array([float(MEAN_UNIT * step_of(int(c))) for c in codes[i * heads : (i + 1) * heads]])
        values = part[:, coded].astype(np.float64)
        mean = values.mean(axis=1) if values.shape[1] else np.zeros((heads, part.shape[2]))
        out.append(np.clip(np.rint(mean / scale[:, None]), -32767, 32767).astype(np.int16).ravel())
    return np.concatenate(out)


def _promised_bits(x: KeyValue, prediction: KeyValue, classes: np.ndarray, codes: np.ndarray) -> float:
    count = int(np.count_nonzero(classes <= tokens.FINEST))
    if not count:
        return 0.0
    total = 0.0
    for i, (part, centre) in enumerate(zip(x, prediction, strict=True)):
        squares = np.empty(part.shape[2])
        for h in range(part.shape[0]):
            quantize.energy(part[h], centre[h], int(centre.shape[1] > 1), classes, squares)
            step = float(step_of(int(codes[i * part.shape[0] + h])))
            with np.errstate(all="ignore"):
                total += 0.5 * count * float(np.sum(np.log2(1 + 12 * squares / (count * step * step))))
    return total


def _quantize(x: KeyValue, prediction: KeyValue, classes: np.ndarray, codes: np.ndarray,
              q: list[np.ndarray]) -> np.ndarray:  # fmt: skip
    """Fill `q`; tokens that do not fit become exact. Gives each head's mean magnitude in steps of class 0."""
    heads = x[0].shape[0]
    out = np.zeros(2 * heads)
    wide = np.zeros(len(classes), dtype=bool)
    for part in (0, 1):
        moving = int(prediction[part].shape[1] > 1)
        for h in range(heads):
            head = part * heads + h
            out[head] = quantize.quantize(x[part][h], prediction[part][h], moving, classes, int(codes[head]),
                                          q[part][h], wide)  # fmt: skip
    classes[wide] = tokens.EXACT
    return out


def _table_class(q: np.ndarray, classes: np.ndarray, ranks: np.ndarray, magnitude: float, half: int,
                 costs: np.ndarray) -> int:  # fmt: skip
    """The cheapest table class near the one that the mean magnitude suggests."""
    guess = UNIT_CLASS + 2 * np.log2(max(magnitude, 1e-3) * DEVIATION)
    middle = int(np.clip(np.rint(guess), 0, CLASSES - 1))
    near = range(max(0, middle - 2), min(CLASSES, middle + 3))
    return min(near, key=lambda k: quantize.cost(q, classes, ranks, k, half, costs))


def _emit(q: np.ndarray, classes: np.ndarray, ranks: np.ndarray, base: int, half: int,
          freqs: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """Symbol rows, low-bit planes and escaped values of one head."""
    coded = ranks[classes <= tokens.FINEST].astype(np.int64)
    size = int(RAW_BITS[np.clip(base + coded, 0, CLASSES - 1)].sum()) * ((2 * half + 7) // 8)
    symbols = np.empty((len(coded), half), dtype=np.uint8)
    low = np.zeros(size, dtype=np.uint8)
    escapes = np.empty(2 * symbols.size, dtype=np.int16)
    used = quantize.emit(q, classes, ranks, base, half, freqs, symbols, low, escapes)
    return symbols, low, escapes[:used]


def _exact(arrays: KeyValue, where: np.ndarray) -> tuple[list[np.ndarray], list[bytes]]:
    """Symbol rows of the exact tokens' highest bytes, and the other bytes."""
    rows, rest = [], []
    for array in arrays:
        itemsize = array.dtype.itemsize
        part = np.ascontiguousarray(array[:, where])
        words = part.view(f"=u{itemsize}").astype(f"<u{itemsize}").view(np.uint8).reshape(*part.shape, itemsize)
        top = words[..., itemsize - 1]
        if top.shape[2] % 2:
            top = np.pad(top, ((0, 0), (0, 0), (0, 1)))
        rows.append(np.ascontiguousarray(top).reshape(-1, pairs(part.shape[2])))
        rest.append(words[..., : itemsize - 1].tobytes())
    return rows, rest


def _streams(tables: np.ndarray, rows: list[np.ndarray], kinds: np.ndarray) -> list[bytes]:
    """One stream of all rows (keys, values, exact keys, exact values), or one of keys and one of values."""
    ends = np.cumsum([len(r) for r in rows])
    if rows[0].shape[1] == rows[1].shape[1]:
        return [b"".join(rans.encode_with(np.concatenate(rows), kinds[: ends[-1]], tables)[0])]
    split = np.split(kinds[: ends[-1]], ends[:-1])
    return [b"".join(rans.encode_with(np.concatenate(rows[i::2]), np.concatenate(split[i::2]), tables)[0])
            for i in (0, 1)]  # fmt: skip


def _same_tokens(arrays: KeyValue, reference: KeyValue) -> np.ndarray:
    """Tokens whose words all equal the reference's, bool ``[T]``."""
    same = np.ones(arrays[0].shape[1], dtype=bool)
    for a, b in zip(arrays, reference, strict=True):
        kind = f"u{a.dtype.itemsize}"
        same &= (np.ascontiguousarray(a).view(kind) == np.ascontiguousarray(b).view(kind)).all(axis=(0, 2))
    return same
