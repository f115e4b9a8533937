"""TurboQuant's units on a device; payloads are described in `pltpack.codec.turboquant`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pltpack.codec import turboquant
from pltpack.codec.base import EncodeJob
from pltpack.codec.turboquant import TurboQuantCodec
from pltpack.gpu import device, place, sphere
from pltpack.gpu.jobs import Job, Staged, UnitDecoder, uploaded
from pltpack.gpu.sphere import PART_COLUMNS
from pltpack.snapshot import DTYPES, LayerGeometry

_INFINITY = 0x7F80


class _Book:
    """Levels, borders and rotation of one vector length, on the device."""

    def __init__(self, table: tuple[np.ndarray, np.ndarray, Any]) -> None:
        levels, borders, rotation = table
        self.levels, self.borders = device.put(levels), device.put(borders)
        self.turn = (device.put(rotation.signs), device.put(rotation.perms.astype(np.int32)), np.int32(rotation.size),
                     rotation.scale)  # fmt: skip


class SphereDecoder(UnitDecoder):
    """Decodes, and encodes, units of one started TurboQuant codec on the device; see `jobs.UnitDecoder`."""

    def __init__(self, codec: TurboQuantCodec) -> None:
        self._bits = codec.bits
        # Longer vectors do not fit in shared memory.
        self._books = {dim: _Book(table) for dim, table in codec._tables.items()
                       if sphere.shared_bytes(dim) <= device.SHARED_BYTES}  # fmt: skip

    def decode(self, jobs: Sequence[Job]) -> list[int]:
        """See `UnitDecoder.decode`."""
        kinds: dict[tuple[int, str], list[int]] = {}
        left = []
        for number, job in enumerate(jobs):
            g = job.unit.geometry
            if {g.k_dim, g.v_dim} <= set(self._books):
                kinds.setdefault((id(job.places[0].words), g.dtype), []).append(number)
            else:
                left.append(number)
        for (_, dtype), numbers in kinds.items():
            some = [jobs[number] for number in numbers]
            left += [numbers[i] for i in self._decode(some, dtype, some[0].places[0].words)]
        return sorted(left)

    def _decode(self, jobs: Sequence[Job], dtype: str, words: Any) -> list[int]:
        staged = Staged([job.payload for job in jobs], [job.kept for job in jobs])
        targets, left, numbers = place.Targets(), [], [np.zeros(1, np.int32)]
        parts = np.zeros((2 * len(jobs), PART_COLUMNS), np.int64)
        at = 1
        for i, job in enumerate(jobs):
            data = staged.host[staged.offsets[i] : staged.offsets[i + 1]]
            found = self._read(data, job, int(staged.offsets[i]), at, parts[2 * i : 2 * i + 2])
            g, where = job.unit.geometry, job.places[0]
            if found is None:
                left.append(i)
            else:
                numbers.append(found)
                at += len(found)
            count = 0 if found is None else job.unit.tokens
            for part, (pages, dim) in enumerate(((where.keys, g.k_dim), (where.values, g.v_dim))):
                parts[2 * i + part, sphere.VECTORS] = targets.add(g.heads, count, dim, pages, job.slot)
        vectors = device.arrays().empty(max(1, targets.elements), np.float32)
        tokens = device.put(np.concatenate(numbers))
        device.mark("plan")
        for dim, book in self._books.items():
            mine = parts[parts[:, sphere.WIDTH] == dim]
            if len(mine):
                most = int((mine[:, sphere.HEADS] * mine[:, sphere.CODED]).max())
                sphere.dequantize_kernel[device.lines_of(len(mine), most, sphere.shared_bytes(dim))](
                    staged.data, device.put(mine), tokens, book.levels, *book.turn, vectors
                )
        device.mark("look up and rotate")
        placed = targets.upload()
        place.store(vectors, targets, placed, dtype, words)
        most = int((parts[:, sphere.HEADS] * parts[:, sphere.EXACT]).max(initial=1))
        sphere.exact_kernel[device.lines_of(len(parts), most)](
            staged.data, device.put(parts), placed[0], tokens, placed[3], np.int32(DTYPES[dtype].itemsize), words
        )
        device.mark("place")
        return left

    def _read(self, data: np.ndarray, job: Job, offset: int, at: int, parts: np.ndarray) -> np.ndarray | None:
        """Fill a unit's parts; numbers of its coded and exact tokens, None if the payload is malformed."""
        unit, g = job.unit, job.unit.geometry
        sinks, dims, item = turboquant._sinks(unit), (g.k_dim, g.v_dim), DTYPES[g.dtype].itemsize
        try:
            escapes = turboquant._escapes(data, sinks, unit.tokens)
        except ValueError:
            return None
        exact = np.concatenate([np.arange(sinks), escapes])
        coded = np.ones(unit.tokens, np.bool_)
        coded[exact] = False
        count, place_ = unit.tokens - len(exact), 4 + 4 * len(escapes)
        sizes = [g.heads * len(exact) * dim * item for dim in dims] + [2 * g.heads * count] * 2
        sizes += [-(-g.heads * count * dim * self._bits // 8) for dim in dims]
        starts = place_ + np.concatenate([[0], np.cumsum(sizes)])
        if starts[-1] != len(data):
            return None
        norms = np.frombuffer(data[starts[2] : starts[4]].tobytes(), "<u2")
        if (norms >= _INFINITY).any():
            return None
        for part, dim in enumerate(dims):
            used = g.heads * count * dim * self._bits % 8
            if used and data[starts[5 + part] - 1] >> used:
                return None
            parts[part] = (g.heads, count, len(exact), at, at + count, unit.tokens, dim, offset + starts[2 + part],
                           offset + starts[4 + part], offset + starts[part], 0, self._bits)  # fmt: skip
        return np.concatenate([np.flatnonzero(coded), exact]).astype(np.int32)

    def encode(self, jobs: Sequence[Job]) -> list[bytes]:
        """Payloads of units whose words lie in their places; the bytes of the CPU's encoder.

        Parameters
        ----------
        jobs : sequence of Job
            Of one buffer, dtype and geometry; payloads are not looked at.
        """
        g = jobs[0].unit.geometry
        xp, targets, dtype, words = device.arrays(), place.Targets(), g.dtype, jobs[0].places[0].words
        parts = np.zeros((2 * len(jobs), PART_COLUMNS), np.int64)
        norm = 0
        for i, job in enumerate(jobs):
            for part, (pages, dim) in enumerate(((job.places[0].keys, g.k_dim), (job.places[0].values, g.v_dim))):
                line = parts[2 * i + part]
                line[sphere.HEADS], line[sphere.TOKENS], line[sphere.WIDTH] = g.heads, job.unit.tokens, dim
                line[sphere.VECTORS] = targets.add(g.heads, job.unit.tokens, dim, pages, job.slot)
                line[sphere.NORMS], line[sphere.BITS] = norm, self._bits
                norm += g.heads * job.unit.tokens
        vectors, norms = place.load(words, targets, targets.upload(), dtype), xp.empty(norm, np.uint16)
        sphere.norms_kernel[device.lines_of(len(parts), targets.most)](vectors, device.put(parts), norms)
        stored, tokens, exact, index, at = device.get(norms), [], [], 0, 0
        for i, job in enumerate(jobs):
            pair, sinks = parts[2 * i : 2 * i + 2], turboquant._sinks(job.unit)
            shape = (g.heads, job.unit.tokens)
            finite = [(_norms(stored, line, shape) < _INFINITY).all(axis=0) for line in pair]
            kept: Any = finite[0] & finite[1]
            kept[:sinks] = False
            tokens.append(np.flatnonzero(kept).astype(np.int32))
            exact.append(np.flatnonzero(~kept))
            for line in pair:
                line[sphere.CODED], line[sphere.CODED_AT], line[sphere.INDICES] = len(tokens[-1]), at, index
                # Bytes of a part begin a group of eight indices.
                index += -(-g.heads * len(tokens[-1]) * int(line[sphere.WIDTH]) // 8) * 8
            at += len(tokens[-1])
        indices = xp.zeros(max(8, index), np.uint8)
        numbers = device.put(np.concatenate([*tokens, [0]]).astype(np.int32))
        for dim, book in self._books.items():
            mine = parts[parts[:, sphere.WIDTH] == dim]
            if len(mine):
                most = int((mine[:, sphere.HEADS] * mine[:, sphere.CODED]).max())
                sphere.quantize_kernel[device.lines_of(len(mine), most, sphere.shared_bytes(dim))](
                    vectors, device.put(mine), numbers, norms, *book.turn, book.borders, indices
                )
        packed = xp.empty(len(indices) // 8 * self._bits, np.uint8)
        sphere.pack_kernel[device.loop_of(len(indices) // 8)](indices, np.int32(self._bits), packed)
        bytes_, cache = device.get(packed), device.get(words)
        return [
            self._payload(job, parts[2 * i : 2 * i + 2], tokens[i], exact[i], stored, bytes_, cache)
            for i, job in enumerate(jobs)
        ]

    def _payload(self, job: Job, parts: np.ndarray, coded: np.ndarray, exact: np.ndarray, norms: np.ndarray,
                 packed: np.ndarray, cache: np.ndarray) -> bytes:  # fmt: skip
        unit, heads, where = job.unit, job.unit.geometry.heads, job.places[0]
        escapes = exact[turboquant._sinks(unit) :]
        out = [len(escapes).to_bytes(4, "little"), escapes.astype("<u4").tobytes()]
        for line, pages in zip(parts, (where.keys, where.values), strict=True):
            rows = [[pages.place(head, job.slot + token) for token in exact.tolist()] for head in range(heads)]
            at = np.array(rows, np.int64).reshape(heads, len(exact), 1) + np.arange(line[sphere.WIDTH])
            out.append(cache[at].tobytes())
        for line in parts:
            out.append(_norms(norms, line, (heads, unit.tokens))[:, coded].astype("<u2").tobytes())
        for line in parts:
            start = int(line[sphere.INDICES]) // 8 * self._bits
            size = -(-heads * len(coded) * int(line[sphere.WIDTH]) * self._bits // 8)
            out.append(packed[start : start + size].tobytes())
        return b"".join(out)


class SphereEncoder:
    """Encodes units whose vectors fit in shared memory; see `jobs.UnitEncoder`."""

    def __init__(self, decoder: SphereDecoder) -> None:
        self._decoder = decoder

    def encode(self, jobs: Sequence[EncodeJob]) -> list[bytes | None]:
        """See `UnitEncoder.encode`; the codec ignores references."""
        out: list[bytes | None] = [None] * len(jobs)
        kinds: dict[LayerGeometry, list[int]] = {}
        for number, job in enumerate(jobs):
            g = job.unit.geometry
            shapes = (g.heads, job.unit.tokens, g.k_dim), (g.heads, job.unit.tokens, g.v_dim)
            if {g.k_dim, g.v_dim} <= set(self._decoder._books) and (job.keys.shape, job.values.shape) == shapes:
                kinds.setdefault(g, []).append(number)
        for numbers in kinds.values():
            units = [jobs[number].unit for number in numbers]
            _, places = uploaded([[(jobs[number].keys, jobs[number].values)] for number in numbers], units)
            some = [Job(memoryview(b""), unit, where) for unit, where in zip(units, places, strict=True)]
            for number, payload in zip(numbers, self._decoder.encode(some), strict=True):
                out[number] = payload
        return out


def _norms(norms: np.ndarray, line: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    start = int(line[sphere.NORMS])
    return norms[start : start + shape[0] * shape[1]].reshape(shape)
