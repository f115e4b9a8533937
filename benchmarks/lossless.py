"""Rate and speed of the lossless codec on real dumps, beside zstd -3 on the same bytes in the same run.

    python benchmarks/lossless.py DUMP... [--threads 2]

DUMP is a safetensors dump or a folder of them. Units of one layer and up to 256 tokens; the codec learns from every
dump given; its state is counted as an archive stores it. Speeds are given per second of wall clock and of processor
time, since other work on the machine moves the first. The last line codes dumps that share a token prefix with the
dump before them as differences to it.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import zstandard

from pltpack.codec.base import LayerSample, Unit
from pltpack.codec.lossless import LosslessCodec
from pltpack.dumps import open_dumps
from pltpack.format import state as states
from pltpack.snapshot import Snapshot

UNIT_TOKENS = 256

#: Wall-clock and processor seconds.
Seconds = tuple[float, float]


class AllTokens:
    """Every token of every dump, layer by layer."""

    def __init__(self, snapshots: list[Snapshot]) -> None:
        self._snapshots = snapshots

    def layer(self, index: int) -> list[LayerSample]:
        return [
            LayerSample(Unit(index, s.identity.layers[index], 0, len(s)), *s.layer(index)) for s in self._snapshots
        ]


def units(snapshot: Snapshot, stop: int) -> Iterator[tuple[Unit, np.ndarray, np.ndarray]]:
    for start in range(0, stop, UNIT_TOKENS):
        end = min(start + UNIT_TOKENS, stop)
        for index, geometry in enumerate(snapshot.identity.layers):
            yield Unit(index, geometry, start, end - start), *snapshot.layer(index, start, end)


def best(action: Callable[[], object], repeats: int = 3) -> Seconds:
    times = []
    for _ in range(repeats):
        wall, processor = time.perf_counter(), time.process_time()
        action()
        times.append((time.perf_counter() - wall, time.process_time() - processor))
    return min(t[0] for t in times), min(t[1] for t in times)


def report(name: str, raw: int, size: int, elements: int, *times: Seconds) -> None:
    speeds = "  ".join(f"{raw / wall / 1e6:7.0f} {raw / processor / 1e6:7.0f}" for wall, processor in times)
    print(f"{name:26s} {8 * size / elements:8.4f} {raw / size:9.3f}  {speeds}")


def zstd_row(raw: bytes, elements: int) -> None:
    packed = zstandard.ZstdCompressor(level=3).compress(raw)
    encode = best(lambda: zstandard.ZstdCompressor(level=3).compress(raw))
    decode = best(lambda: zstandard.ZstdDecompressor().decompress(packed))
    report("zstd -3, one thread", len(raw), len(packed), elements, encode, decode)


def codec_row(codec: LosslessCodec, snapshots: list[Snapshot], state_bytes: int, threads: int) -> None:
    work = [item for s in snapshots for item in units(s, len(s))]
    outs = [(np.empty_like(k, order="C"), np.empty_like(v, order="C")) for _, k, v in work]
    with ThreadPoolExecutor(threads) as pool:
        payloads = list(pool.map(lambda item: codec.encode(*item), work))
        encode = best(lambda: list(pool.map(lambda item: codec.encode(*item), work)))

        def decode_all() -> None:
            list(pool.map(lambda job: codec.decode(memoryview(job[0]), job[1][0], *job[2]),
                          zip(payloads, work, outs, strict=True)))  # fmt: skip

        decode_all()
        decode = best(decode_all)
    for (_, k, v), (a, b) in zip(work, outs, strict=True):
        word = np.dtype(f"u{k.itemsize}")
        if not (np.array_equal(k.view(word), a.view(word)) and np.array_equal(v.view(word), b.view(word))):
            raise SystemExit("decoded values differ")
    raw = sum(s.raw_bytes for s in snapshots)
    size = state_bytes + sum(map(len, payloads))
    report(f"lossless, {threads} threads", raw, size, sum(s.elements for s in snapshots), encode, decode)


def reference_row(codec: LosslessCodec, snapshots: list[Snapshot]) -> None:
    elements = raw = pairs = 0
    jobs = []
    for first, second in itertools.pairwise(snapshots):
        n = min(len(first), len(second))
        differs = np.flatnonzero(first.tokens[:n] != second.tokens[:n])
        shared = int(differs[0]) if len(differs) else n
        if shared < UNIT_TOKENS:
            continue
        pairs += 1
        for (unit, keys, values), (_, *base) in zip(units(second, shared), units(first, shared), strict=True):
            out = (np.empty_like(keys, order="C"), np.empty_like(values, order="C"))
            jobs.append((unit, keys, values, (base[0], base[1]), out))
            elements += keys.size + values.size
            raw += keys.nbytes + values.nbytes
    if not pairs:
        return
    payloads = [codec.encode(*job[:4]) for job in jobs]
    encode = best(lambda: [codec.encode(*job[:4]) for job in jobs])
    decode = best(lambda: [codec.decode(memoryview(payload), job[0], *job[4], job[3])
                           for payload, job in zip(payloads, jobs, strict=True)])  # fmt: skip
    if not all(a.tobytes() == b.tobytes() for job in jobs for a, b in zip(job[1:3], job[4], strict=True)):
        raise SystemExit("decoded values differ")
    report(f"differences, {pairs} prefixes", raw, sum(map(len, payloads)), elements, encode, decode)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dumps", nargs="+", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    snapshots = [
        Snapshot.from_arrays(s.session, s.tokens, [tuple(np.array(a) for a in s.layer(i))
                                                   for i in range(len(s.identity.layers))], s.identity)
        for s in open_dumps(arguments.dumps)
    ]  # fmt: skip
    codec, identity = LosslessCodec(), snapshots[0].identity
    start = time.perf_counter()
    state = codec.learn(AllTokens(snapshots), identity)
    print(f"learnt in {time.perf_counter() - start:.1f} s")
    packed = states.pack(state).nbytes
    codec.start(states.unpack(states.pack(state)), identity)
    elements = sum(s.elements for s in snapshots)
    print(f"{len(snapshots)} sessions, {elements} elements, state {packed} bytes, {len(state['freqs'])} tables")
    raw = b"".join(a.tobytes() for s in snapshots for i in range(len(s.identity.layers)) for a in s.layer(i))
    print(f"{'':26s} {'bits':>8s} {'ratio':>9s}  encode MB/s of   decode MB/s of\n"
          f"{'':26s} {'/element':>8s} {'':9s}     wall     cpu      wall     cpu")  # fmt: skip
    zstd_row(raw, elements)
    codec_row(codec, snapshots, packed, arguments.threads)
    reference_row(codec, snapshots)


if __name__ == "__main__":
    main()
