"""The lossless codec's units on a device: those in the usual, static mode; others are left to the CPU.

Bitstream: `pltpack.codec.lossless`. Planes that are stored as zstd frames are decompressed on the host and follow the
payloads to the device.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from pltpack.codec import rans as host_rans
from pltpack.codec import symbols as host_symbols
from pltpack.codec.base import EncodeJob
from pltpack.codec.classes import LAYOUTS, Layout
from pltpack.codec.lossless import STATIC, LosslessCodec
from pltpack.codec.payload import Reader, expand, squeeze
from pltpack.gpu import device, place, rans, words
from pltpack.gpu.jobs import Job, Staged, UnitDecoder, uploaded
from pltpack.gpu.rans import STREAM_COLUMNS
from pltpack.gpu.words import UNIT_COLUMNS

_STORED, _FRAME = 0, 1


class LosslessDecoder(UnitDecoder):
    """Decodes, and encodes, units of one started lossless codec on the device; see `jobs.UnitDecoder`."""

    def __init__(self, codec: LosslessCodec) -> None:
        self._tables = codec._tables
        if self._tables is None:
            return
        self._cumulative = device.put(rans.starts(self._tables.freqs))
        self._escape = device.put(self._tables.escape.astype(np.int32))
        self._weight = device.put(np.zeros(len(self._tables), np.int32))
        self._plain = device.put(self._tables.plain.astype(np.uint8))
        rows = codec._rows
        self._channel = np.cumsum([0, *(len(r.table) for r in rows)])
        self._start, self._mirror = (device.put(np.concatenate(parts)) for parts in (
            [r.start for r in rows], [r.mirror for r in rows]))  # fmt: skip
        self._table = device.put(np.concatenate([r.table for r in rows]).astype(np.uint8))

    def decode(self, jobs: Sequence[Job]) -> list[int]:
        """See `UnitDecoder.decode`."""
        if self._tables is None:
            return list(range(len(jobs)))
        kinds: dict[tuple[int, str], list[int]] = {}
        left = []
        for number, job in enumerate(jobs):
            if len(job.payload) and job.payload[0] == STATIC:
                kinds.setdefault((id(job.places[0].words), job.unit.geometry.dtype), []).append(number)
            else:
                left.append(number)
        for (_, dtype), numbers in kinds.items():
            some = [jobs[number] for number in numbers]
            left += [numbers[i] for i in self._decode(some, LAYOUTS[dtype], some[0].places[0].words)]
        return sorted(left)

    def _decode(self, jobs: Sequence[Job], layout: Layout, cache: Any) -> list[int]:
        bodies = [_Body.read(job, layout) for job in jobs]
        extra = [frame for body in bodies if body is not None for frame in body.frames]
        staged = Staged([*(job.payload for job in jobs), *(memoryview(frame) for frame in extra)],
                        [job.kept for job in jobs])  # fmt: skip
        units = np.zeros((len(jobs), UNIT_COLUMNS), np.int64)
        streams = np.zeros((len(jobs), STREAM_COLUMNS), np.int64)
        used: list[int] = []
        targets, next_frame, row = place.Targets(), len(jobs), 0
        for i, (job, body) in enumerate(zip(jobs, bodies, strict=True)):
            g, at, where = job.unit.geometry, int(staged.offsets[i]), job.places[0]
            count = 0 if body is None else job.unit.tokens
            units[i, words.WORD] = targets.add(g.heads, count, g.k_dim, where.keys, job.slot)
            targets.add(g.heads, count, g.v_dim, where.values, job.slot)
            if body is None:
                continue
            line = units[i]
            line[words.ROWS], line[words.LENGTH], line[words.ROW] = g.elements_per_token, count, row
            line[words.CHANNEL] = self._channel[job.unit.layer]
            line[words.ESCAPES], line[words.ESCAPE_COUNT] = at + 9, body.escapes
            for plane, place_in_payload in enumerate(body.planes):
                line[words.PLANE0 + plane] = at + place_in_payload
                if place_in_payload < 0:
                    line[words.PLANE0 + plane] = staged.offsets[next_frame]
                    next_frame += 1
            streams[len(used)] = (at + body.stream, (body.length - host_rans.HEADER_BYTES) // 2, line[words.ROWS], row,
                                  count, line[words.WORD], line[words.CHANNEL])  # fmt: skip
            used.append(i)
            row += int(line[words.ROWS])
        device.mark("plan")
        decoded = rans.decode(staged.data, streams[: len(used)], self._table, self._cumulative, self._escape,
                              self._weight)  # fmt: skip
        device.mark("entropy")
        xp = device.arrays()
        rows, damaged = xp.empty(max(1, targets.elements), layout.word), xp.zeros(len(jobs), np.uint8)
        lines = device.lines_of(len(jobs), int(units[:, words.ROWS].max()))
        words.merge_kernel[lines](staged.data, device.put(units), self._start, self._mirror, self._table, self._escape,
                                  *_layout_arrays(layout), decoded.symbols, decoded.escapes_before, rows,
                                  damaged)  # fmt: skip
        device.mark("merge")
        placed = targets.upload()
        words.spread_kernel[device.lines_of(len(targets), targets.most >> 5)](rows, placed[0], placed[3], cache)
        device.mark("place")
        good = device.get(damaged) == 0
        good[[i for i, body in enumerate(bodies) if body is None]] = False
        wrong, escapes = device.get(decoded.damaged), device.get(decoded.escapes_of)
        for number, i in enumerate(used):
            good[i] &= wrong[number] == 0 and escapes[number] == units[i, words.ESCAPE_COUNT]
        found: list[int] = np.flatnonzero(~good).tolist()
        return found

    def encode(self, jobs: Sequence[Job], layout: Layout) -> list[bytes]:
        """Static payloads of units whose words lie in their places; the bytes of the CPU's encoder in this mode.

        Parameters
        ----------
        jobs : sequence of Job
            Of one buffer; payloads are not looked at.
        layout : Layout
            Of the units' dtype.

        Raises
        ------
        ValueError
            If the state has no tables.
        """
        return [payload for payload, _ in self.static(jobs, layout)]

    def static(self, jobs: Sequence[Job], layout: Layout) -> list[tuple[bytes, bool]]:
        """What `encode` gives, and whether it is what the CPU's encoder would choose without trying others."""
        if self._tables is None:
            raise ValueError("lossless state has no tables for the static mode")
        xp, targets = device.arrays(), place.Targets()
        units = np.zeros((len(jobs), UNIT_COLUMNS), np.int64)
        streams = np.zeros((len(jobs), STREAM_COLUMNS), np.int64)
        row = low = 0
        for i, job in enumerate(jobs):
            g, count, where = job.unit.geometry, job.unit.tokens, job.places[0]
            line = units[i]
            line[words.WORD] = targets.add(g.heads, count, g.k_dim, where.keys, job.slot)
            targets.add(g.heads, count, g.v_dim, where.values, job.slot)
            line[words.ROWS], line[words.LENGTH], line[words.ROW] = g.elements_per_token, count, row
            line[words.CHANNEL] = self._channel[job.unit.layer]
            for plane, (_, width) in enumerate(layout.planes):
                line[words.PLANE0 + plane] = low
                low += g.elements_per_token * _columns(count, width)
            streams[i] = 0, 0, line[words.ROWS], row, count, line[words.WORD], line[words.CHANNEL]
            row += int(line[words.ROWS])
        rows = xp.empty(targets.elements, layout.word)
        placed = targets.upload()
        words.gather_kernel[device.lines_of(len(targets), targets.most >> 5)](
            jobs[0].places[0].words, placed[0], placed[3], rows
        )
        symbols, planes = xp.empty(targets.elements, np.uint8), xp.empty(max(1, low), np.uint8)
        escapes_in, on_device = xp.empty(row, np.int32), device.put(units)
        lines = device.lines_of(len(jobs), int(units[:, words.ROWS].max()))
        split, bits = _layout_arrays(layout)
        words.split_kernel[lines](rows, on_device, self._start, self._mirror, self._table, self._escape, self._plain,
                                  split, bits, symbols, planes, escapes_in)  # fmt: skip
        before = (xp.cumsum(escapes_in) - escapes_in).astype(np.int32)
        escapes = xp.empty(max(1, int(escapes_in.sum())), np.uint16)
        words.escapes_kernel[lines](rows, on_device, self._start, self._table, self._escape, bits, symbols, before,
                                    escapes)  # fmt: skip
        coded = rans.encode(symbols, streams, self._table, self._cumulative)
        return _payloads(units, layout, coded, device.get(escapes), device.get(escapes_in), device.get(planes))


class _Body:
    """Where the parts of a static payload are; `planes` has -1 for one that was a frame, now in `frames`."""

    def __init__(self, escapes: int, stream: int, length: int, planes: list[int], frames: list[bytes]) -> None:
        self.escapes, self.stream, self.length, self.planes, self.frames = escapes, stream, length, planes, frames

    @classmethod
    def read(cls, job: Job, layout: Layout) -> _Body | None:
        """Of a payload; None if it is malformed."""
        size, channels, tokens = len(job.payload), job.unit.geometry.elements_per_token, job.unit.tokens
        if size < 9:
            return None
        escapes, length = struct.unpack_from("<II", job.payload, 1)
        stream = 9 + 2 * escapes
        at, planes, frames = stream + length, [], []
        if escapes > channels * tokens or at > size or length < host_rans.HEADER_BYTES or length % 2:
            return None
        try:
            for _, width in layout.planes:
                wanted = channels * _columns(tokens, width)
                reader = Reader(job.payload[at:])
                kind = reader.u8()
                if kind == _STORED:
                    reader.take(wanted)
                    planes.append(at + 1)
                    at += 1 + wanted
                elif kind == _FRAME:
                    frame = reader.take(reader.u32())
                    frames.append(expand(frame, wanted))
                    planes.append(-1)
                    at += 5 + len(frame)
                else:
                    return None
        except ValueError:
            return None
        return cls(escapes, stream, length, planes, frames) if at == size else None


def _columns(tokens: int, width: int) -> int:
    return tokens if width == 8 else (tokens + 1) // 2


def _layout_arrays(layout: Layout) -> tuple[Any, Any]:
    planes = np.zeros((3, 2), np.int32)
    for plane, shape in enumerate(layout.planes):
        planes[plane] = shape
    return device.put(planes), device.put(np.array([layout.word_bits, layout.low], np.int32))


def _payloads(units: np.ndarray, layout: Layout, streams: Sequence[bytes], escapes: np.ndarray,
              escapes_in: np.ndarray, planes: np.ndarray) -> list[tuple[bytes, bool]]:  # fmt: skip
    """Payloads from their parts; planes are compressed where that pays, as on the CPU. And whether they are usual."""
    out, at = [], 0
    for line, stream in zip(units, streams, strict=True):
        count = int(escapes_in[line[words.ROW] : line[words.ROW] + line[words.ROWS]].sum())
        mine = escapes[at : at + count].astype("<u2").tobytes()
        parts = [struct.pack("<BII", STATIC, count, len(stream)), mine, stream]
        at += count
        size = int(line[words.ROWS] * line[words.LENGTH])
        usual = 64 * count <= size and 16 * len(stream) <= 15 * size + 16 * host_rans.HEADER_BYTES
        stored = squeezed = 0
        for number, (_, width) in enumerate(layout.planes):
            start = line[words.PLANE0 + number]
            plane = planes[start : start + line[words.ROWS] * _columns(int(line[words.LENGTH]), width)]
            frame = squeeze(plane.data) if host_symbols._structured(plane) else b""
            if frame and len(frame) + 4 < plane.size:
                parts += [struct.pack("<BI", _FRAME, len(frame)), frame]
            else:
                parts += [bytes([_STORED]), plane.tobytes()]
            stored, squeezed = stored + plane.size, squeezed + min(plane.size, len(frame) or plane.size)
        payload = b"".join(parts)
        out.append((payload, usual and 8 * squeezed >= stored and len(payload) <= size * layout.word.itemsize))
    return out


class LosslessEncoder:
    """Encodes units in the static mode, where the CPU's encoder would; see `jobs.UnitEncoder`."""

    def __init__(self, codec: LosslessCodec, decoder: LosslessDecoder) -> None:
        self._codec, self._decoder = codec, decoder

    def encode(self, jobs: Sequence[EncodeJob]) -> list[bytes | None]:
        """See `UnitEncoder.encode`."""
        out: list[bytes | None] = [None] * len(jobs)
        kinds: dict[str, list[int]] = {}
        for number, job in enumerate(jobs):
            if job.reference is None and self._codec._tables is not None:
                self._codec._static(job.unit)
                kinds.setdefault(job.unit.geometry.dtype, []).append(number)
        for dtype, numbers in kinds.items():
            units = [jobs[number].unit for number in numbers]
            _, places = uploaded([[(jobs[number].keys, jobs[number].values)] for number in numbers], units)
            some = [Job(memoryview(b""), unit, where) for unit, where in zip(units, places, strict=True)]
            for number, (payload, usual) in zip(numbers, self._decoder.static(some, LAYOUTS[dtype]), strict=True):
                out[number] = payload if usual else None
        return out
