"""Encoding of the group codec's units on a device: the bytes of the CPU's encoder.

What is chosen once a token, a head or a channel (token classes, step codes, means) the host chooses, in its own order
of binary64 sums; rounding, the cost of tables, symbols, low bits, escapes and entropy coding are the device's. Units
with a reference are left to the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numba
import numpy as np

from pltpack.codec import group_encode, levels, quantize, tokens
from pltpack.codec.base import EncodeJob, KeyValue, Unit
from pltpack.codec.group import STEPS, GroupCodec
from pltpack.codec.group_decode import HEADER, OWN_MEANS, Layer, pairs, unrotated
from pltpack.codec.levels import CLASSES, DEVIATION, POWERS, RAW_BITS, UNIT_CLASS
from pltpack.gpu import device, group, place, rans
from pltpack.gpu.jobs import uploaded
from pltpack.gpu.rans import STREAM_COLUMNS

_CANDIDATES = group.CANDIDATES


class _Draft(NamedTuple):
    """What the host chooses of a unit."""

    unit: Unit
    layer: Layer
    arrays: KeyValue
    classes: np.ndarray
    codes: np.ndarray
    flags: int
    means: np.ndarray
    prediction: KeyValue


class _Rows(NamedTuple):
    """Where a unit's symbol rows are: its first, those of all, tables of them, and exact rows with the words' rest."""

    first: int
    bases: np.ndarray
    kinds: np.ndarray
    exact: list[np.ndarray]
    rest: list[bytes]


@numba.njit(cache=True)
def _magnitude(sums: Any, classes: Any, dim: int) -> Any:
    """Mean magnitude in steps of class 0, from each token's sum: the last lines of `quantize.quantize`."""
    total, count = 0.0, 0
    for t in range(len(sums)):
        if classes[t] <= 10:
            total += np.float64(sums[t]) * 2.0 ** (-0.5 * classes[t])
            count += dim
    return total / count if count else 0.0


class GroupEncoder:
    """Encodes units of one started group codec; see `jobs.UnitEncoder`."""

    def __init__(self, codec: GroupCodec) -> None:
        self._codec = codec
        self._costs: Any = None

    def encode(self, jobs: Sequence[EncodeJob]) -> list[bytes | None]:
        """See `UnitEncoder.encode`."""
        if self._costs is None:
            freqs = self._codec._freqs
            self._cumulative, self._powers = device.put(rans.starts(freqs)), device.put(POWERS)
            self._coded = device.put((freqs[: 2 * CLASSES] > 0).astype(np.uint8))
            self._costs = device.put(np.ascontiguousarray(levels.bit_costs(freqs)[: 2 * CLASSES], np.int32))
        kinds: dict[str, list[int]] = {}
        out: list[bytes | None] = [None] * len(jobs)
        for number, job in enumerate(jobs):
            if job.reference is None:
                kinds.setdefault(job.unit.geometry.dtype, []).append(number)
        for dtype, numbers in kinds.items():
            for number, payload in zip(numbers, self._encode([jobs[n] for n in numbers], dtype), strict=True):
                out[number] = payload
        return out

    def _encode(self, jobs: Sequence[EncodeJob], dtype: str) -> list[bytes]:
        drafts = [self._draft(job) for job in jobs]
        words, places = uploaded([[(job.keys, job.values)] for job in jobs], [job.unit for job in jobs])
        targets, parts = place.Targets(), np.zeros((2 * len(jobs), group.PART_COLUMNS), np.int64)
        means: list[np.ndarray] = []
        token = head = mean = 0
        for i, draft in enumerate(drafts):
            unit, heads = draft.unit, draft.unit.geometry.heads
            for part, dim in enumerate(draft.layer.dims):
                line, where = parts[2 * i + part], places[i][0]
                line[group.HEADS], line[group.WIDTH], line[group.TOKENS] = heads, dim, unit.tokens
                line[group.KIND] = part
                line[group.CLASSES_AT], line[group.HEADS_AT] = token, head + part * heads
                line[group.MEANS], line[group.MEANS_HEAD] = mean, 2 * pairs(dim)
                turn = None if part else draft.layer.rotation
                line[group.VECTORS] = targets.add(
                    heads, unit.tokens, dim, where.values if part else where.keys, 0, turn, unit.position
                )
                means.append(np.ascontiguousarray(draft.prediction[part]).reshape(-1))
                mean += means[-1].size
            token, head = token + unit.tokens, head + 2 * heads
        vectors = place.load(words, targets, targets.upload(), dtype)
        xp = device.arrays()
        classes, codes = (np.concatenate([getattr(d, name) for d in drafts]) for name in ("classes", "codes"))
        quantized, wide = xp.zeros(max(1, targets.elements), np.int32), xp.zeros(token, np.uint8)
        every = device.lines_of(len(parts), targets.most)
        group.quantize_kernel[every](vectors, device.put(parts), device.put(classes), device.put(codes), self._powers,
                                     device.put(np.concatenate(means)), quantized, wide)  # fmt: skip
        firsts = self._firsts(drafts, parts, quantized)
        classes[device.get(wide) != 0] = tokens.EXACT
        return self._finish(drafts, parts, classes, codes, firsts, quantized)

    def _draft(self, job: EncodeJob) -> _Draft:
        unit, arrays = job.unit, (job.keys, job.values)
        layer = self._codec._layer(unit)
        g = unit.geometry
        if (arrays[0].shape, arrays[1].shape) != ((g.heads, unit.tokens, g.k_dim), (g.heads, unit.tokens, g.v_dim)):
            raise ValueError("unit arrays do not have the unit's shape")
        x = unrotated(arrays, layer, unit)
        classes = group_encode._token_classes(x, layer, unit)
        codes = group_encode._step_codes(STEPS[self._codec.bits], x, classes, layer)
        flags, means, prediction, _ = group_encode._predict(x, classes, codes, layer, unit, None)
        return _Draft(unit, layer, arrays, classes, codes.astype(np.int16), flags, means, prediction)

    def _firsts(self, drafts: Sequence[_Draft], parts: np.ndarray, quantized: Any) -> np.ndarray:
        """First table class that is to be tried for each head, and the number of those: int32 ``[heads, 2]``."""
        xp, sums = device.arrays(), []
        for line in parts:
            heads, count, dim = int(line[group.HEADS]), int(line[group.TOKENS]), int(line[group.WIDTH])
            at = int(line[group.VECTORS])
            mine = quantized[at : at + heads * count * dim].reshape(heads * count, dim)
            sums.append(xp.abs(mine).sum(axis=1))
        every, at, out = device.get(xp.concatenate(sums)), 0, []
        for i, draft in enumerate(drafts):
            for part, dim in enumerate(draft.layer.dims):
                heads, count = int(parts[2 * i + part, group.HEADS]), draft.unit.tokens
                for head in range(heads):
                    mine = every[at + head * count : at + (head + 1) * count]
                    magnitude = float(_magnitude(mine, draft.classes, dim))
                    guess = UNIT_CLASS + 2 * np.log2(max(magnitude, 1e-3) * DEVIATION)
                    middle = int(np.clip(np.rint(guess), 0, CLASSES - 1))
                    out.append((max(0, middle - 2), min(CLASSES, middle + 3)))
                at += heads * count
        found = np.array(out, np.int32)
        found[:, 1] -= found[:, 0]
        return found

    def _finish(self, drafts: Sequence[_Draft], parts: np.ndarray, classes: np.ndarray, codes: np.ndarray,
                firsts: np.ndarray, quantized: Any) -> list[bytes]:  # fmt: skip
        xp, numbers = device.arrays(), np.zeros(len(classes), np.int32)
        for line in parts:
            at = int(line[group.CLASSES_AT])
            mine = classes[at : at + int(line[group.TOKENS])]
            coded, exact = np.flatnonzero(mine <= tokens.FINEST), np.flatnonzero(mine == tokens.EXACT)
            line[group.CODED], line[group.EXACT], line[group.CODED_AT] = len(coded), len(exact), at
            numbers[at : at + len(mine)] = np.concatenate([coded, exact])
        numbers_, ranks = device.put(numbers), device.put(classes.astype(np.int16))
        most = int((parts[:, group.HEADS] * parts[:, group.CODED]).max(initial=1))
        lines = device.lines_of(len(parts), most)
        costs = xp.zeros((len(codes), _CANDIDATES), np.int64)
        group.costs_kernel[lines](quantized, device.put(parts), numbers_, ranks, device.put(firsts), self._costs, costs)
        bases = self._cheapest(device.get(costs), firsts)
        rows, streams, before, low_bytes = self._plan(drafts, parts, classes, codes, bases)
        kinds = np.concatenate([*(unit.kinds for unit in rows), np.zeros(1, np.int64)]).astype(np.uint8)
        count, symbols_count = len(kinds) - 1, int((streams[:, rans.ROWS] * streams[:, rans.COLUMNS]).sum())
        symbols, low = xp.zeros(max(1, symbols_count), np.uint8), xp.zeros(max(1, low_bytes), np.uint8)
        escapes_in, kinds_, table = xp.zeros(max(1, count), np.int32), device.put(kinds), device.put(parts)
        group.emit_kernel[lines](quantized, table, numbers_, kinds_, device.put(before), self._coded, symbols, low,
                                 escapes_in)  # fmt: skip
        escapes_before = (xp.cumsum(escapes_in) - escapes_in).astype(np.int32)
        escapes = xp.zeros(2 * max(1, int(escapes_in.sum())), np.int16)
        group.escapes_kernel[lines](quantized, table, numbers_, symbols, escapes_before, escapes)
        for i, unit in enumerate(rows):
            for part, exact in enumerate(unit.exact):
                if exact.size:
                    at = int(parts[2 * i + part, group.EXACT_SYMBOL])
                    symbols[at : at + exact.size] = device.put(exact.reshape(-1))
        coded_streams = rans.encode(symbols, streams, kinds_, self._cumulative)
        return self._payloads(drafts, rows, parts, classes, codes, coded_streams, device.get(escapes_in),
                              device.get(escapes), device.get(low)[:low_bytes])  # fmt: skip

    def _cheapest(self, costs: np.ndarray, firsts: np.ndarray) -> np.ndarray:
        tried = np.arange(_CANDIDATES)[None] < firsts[:, 1:]
        best = np.where(tried, costs, np.iinfo(np.int64).max).argmin(axis=1)
        return (firsts[:, 0] + best).astype(np.uint8)

    def _plan(self, drafts: Sequence[_Draft], parts: np.ndarray, classes: np.ndarray, codes: np.ndarray,
              bases: np.ndarray) -> tuple[list[_Rows], np.ndarray, np.ndarray, int]:  # fmt: skip
        """Rows of all units, streams, low-bit planes before each row of its part, and bytes of all planes."""
        rows, streams, before = [], [], []
        row = symbol = low = head = 0
        for i, draft in enumerate(drafts):
            keys, values = parts[2 * i], parts[2 * i + 1]
            heads, at = draft.unit.geometry.heads, int(keys[group.CLASSES_AT])
            mine = classes[at : at + draft.unit.tokens]
            halves = [pairs(dim) for dim in draft.layer.dims]
            own, tables = slice(head, head + 2 * heads), np.empty(4 * heads * draft.unit.tokens, np.int64)
            quantize.plan(mine, mine.astype(np.int16), codes[own], bases[own], *halves, tables)
            quantized, exact = heads * int(keys[group.CODED]), 2 * heads * int(keys[group.EXACT])
            split = np.split(tables[: 2 * (quantized + exact)], np.cumsum([quantized, quantized, exact]))
            joint = halves[0] == halves[1]
            # Keys, values, exact keys, exact values; or keys with their exact ones before values with theirs.
            order = [0, 1, 2, 3] if joint else [0, 2, 1, 3]
            starts, symbol_starts, first, begin = [0] * 4, [0] * 4, row, symbol
            for index in order:
                starts[index], symbol_starts[index] = row, symbol
                row, symbol = row + len(split[index]), symbol + len(split[index]) * halves[index % 2]
                if not joint and index >= 2:
                    streams.append((0, 0, row - first, first, halves[index % 2], begin, first))
                    first, begin = row, symbol
            if joint:
                streams.append((0, 0, row - first, first, halves[0], begin, first))
            for part, line in enumerate((keys, values)):
                line[group.ROW], line[group.SYMBOL] = starts[part], symbol_starts[part]
                line[group.EXACT_ROW], line[group.EXACT_SYMBOL] = starts[2 + part], symbol_starts[2 + part]
                planes = RAW_BITS[split[part] - part * CLASSES]
                line[group.LOW] = low
                low += int(planes.sum()) * ((2 * halves[part] + 7) // 8)
                split[part] = np.stack([split[part], np.cumsum(planes) - planes])
            exact_rows, rest = group_encode._exact(draft.arrays, np.flatnonzero(mine == tokens.EXACT))
            ordered = [split[index] for index in order]
            kinds = np.concatenate([x[0] if x.ndim == 2 else x for x in ordered])
            before.append(np.concatenate([x[1] if x.ndim == 2 else np.zeros(len(x), np.int64) for x in ordered]))
            rows.append(_Rows(starts[0], bases[own], kinds, exact_rows, rest))
            head += 2 * heads
        found = np.concatenate([*before, np.zeros(1, np.int64)]).astype(np.int32)
        return rows, np.array(streams, np.int64).reshape(-1, STREAM_COLUMNS), found, low

    def _payloads(self, drafts: Sequence[_Draft], rows: Sequence[_Rows], parts: np.ndarray, classes: np.ndarray,
                  codes: np.ndarray, streams: Sequence[bytes], escapes_in: np.ndarray, escapes: np.ndarray,
                  low: np.ndarray) -> list[bytes]:  # fmt: skip
        out, escaped, head, stream, low_end = [], 0, 0, 0, [*parts[1:, group.LOW].tolist(), None]
        for i, (draft, unit) in enumerate(zip(drafts, rows, strict=True)):
            heads, at = draft.unit.geometry.heads, int(parts[2 * i, group.CLASSES_AT])
            mine = classes[at : at + draft.unit.tokens]
            used = 2 * int(escapes_in[unit.first : unit.first + len(unit.kinds)].sum())
            halves = [pairs(dim) for dim in draft.layer.dims]
            own = streams[stream : stream + (1 if halves[0] == halves[1] else 2)]
            stream += len(own)
            runs = tokens.pack_runs(mine)
            planes = [low[parts[2 * i + part, group.LOW] : low_end[2 * i + part]].tobytes() for part in (0, 1)]
            out.append(b"".join([
                HEADER.pack(draft.flags, len(runs), used, len(own[0])),
                codes[head : head + 2 * heads].astype("<i2").tobytes(), unit.bases.tobytes(), runs.tobytes(),
                draft.means.astype("<i2").tobytes() if draft.flags == OWN_MEANS else b"",
                escapes[escaped : escaped + used].astype("<i2").tobytes(), *planes, *unit.rest, *own,
            ]))  # fmt: skip
            escaped, head = escaped + used, head + 2 * heads
        return out
