"""Rate, distortion and speed of the tiers q1 to q4 on real dumps, beside zstd -3 and a plain copy in the same run.

    python benchmarks/group.py DUMP... [--threads 2] [--tokens 4096] [--scales]

DUMP is a safetensors dump or a folder of them. Units of one layer and up to 256 tokens; the codec learns from evenly
spread runs of 64 tokens, `--tokens` per layer; its state is counted as an archive stores it. SNR is that of keys and of
values over all elements, sinks included. Speeds are per second of wall clock and of processor time, since other work
on the machine moves the first. `--scales` adds what an explicit scale per group of values would cost: the entropy of
the quantized values given the scale class (half octaves of the group's magnitude), plus the entropy of the classes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import zstandard

from pltpack.codec import levels, tokens
from pltpack.codec.base import LayerSample, Unit
from pltpack.codec.group import GroupCodec
from pltpack.codec.rope import Rotation
from pltpack.dumps import open_dumps
from pltpack.format import state as states
from pltpack.snapshot import Snapshot

UNIT_TOKENS = 256
RUN_TOKENS = 64

#: Wall-clock and processor seconds.
Seconds = tuple[float, float]
Work = list[tuple[Unit, np.ndarray, np.ndarray]]


class EvenRuns:
    """Runs of tokens at even distances through all dumps."""

    def __init__(self, snapshots: list[Snapshot], budget: int) -> None:
        runs = [(s, start) for s in snapshots for start in range(0, len(s), RUN_TOKENS)]
        keep = min(len(runs), max(1, budget // RUN_TOKENS))
        self._runs = [runs[i * len(runs) // keep] for i in range(keep)]

    def layer(self, index: int) -> list[LayerSample]:
        out = []
        for s, start in self._runs:
            stop = min(start + RUN_TOKENS, len(s))
            unit = Unit(index, s.identity.layers[index], start, stop - start, len(s) - stop)
            out.append(LayerSample(unit, *s.layer(index, start, stop)))
        return out


def units(snapshot: Snapshot) -> Iterator[tuple[Unit, np.ndarray, np.ndarray]]:
    for start in range(0, len(snapshot), UNIT_TOKENS):
        end = min(start + UNIT_TOKENS, len(snapshot))
        for index, geometry in enumerate(snapshot.identity.layers):
            unit = Unit(index, geometry, start, end - start, len(snapshot) - end)
            yield unit, *snapshot.layer(index, start, end)


def best(action: Callable[[], object], repeats: int = 5) -> Seconds:
    times = []
    for _ in range(repeats):
        wall, processor = time.perf_counter(), time.process_time()
        action()
        times.append((time.perf_counter() - wall, time.process_time() - processor))
    return min(t[0] for t in times), min(t[1] for t in times)


def report(name: str, raw: int, bits: float, snr: str, encode: Seconds | None, decode: Seconds) -> None:
    speeds = "  ".join(f"{raw / t[0] / 1e6:7.0f} {raw / t[1] / 1e6:7.0f}" if t else 15 * " " for t in (encode, decode))
    print(f"{name:24s} {bits:8.4f} {snr:>13s}  {speeds}", flush=True)


def plain_rows(raw: bytes, elements: int) -> None:
    packed = zstandard.ZstdCompressor(level=3).compress(raw)
    encode = best(lambda: zstandard.ZstdCompressor(level=3).compress(raw), 1)
    decode = best(lambda: zstandard.ZstdDecompressor().decompress(packed))
    report("zstd -3, one thread", len(raw), 8 * len(packed) / elements, "", encode, decode)
    source = np.frombuffer(raw, np.uint8)
    target = np.empty_like(source)
    report("memcpy, one thread", len(raw), 8 * len(raw) / elements, "", None, best(lambda: np.copyto(target, source)))


def tier_row(bits: int, snapshots: list[Snapshot], work: Work, budget: int, threads: int) -> GroupCodec:
    codec = GroupCodec(bits)
    state = codec.learn(EvenRuns(snapshots, budget), snapshots[0].identity)
    codec.start(state, snapshots[0].identity)
    outs = [(np.empty_like(k, order="C"), np.empty_like(v, order="C")) for _, k, v in work]
    with ThreadPoolExecutor(threads) as pool:
        payloads = list(pool.map(lambda item: codec.encode(*item), work))
        encode = best(lambda: list(pool.map(lambda item: codec.encode(*item), work)), 2)

        def decode_some(first: int) -> None:
            for i in range(first, len(work), threads):
                codec.decode(memoryview(payloads[i]), work[i][0], *outs[i])

        decode = best(lambda: list(pool.map(decode_some, range(threads))))
    size = states.pack(state).nbytes + sum(map(len, payloads))
    elements, raw = (sum(getattr(s, name) for s in snapshots) for name in ("elements", "raw_bytes"))
    snr = " / ".join(f"{ratio(work, outs, part):5.2f}" for part in (0, 1))
    report(f"q{bits}, {threads} threads", raw, 8 * size / elements, snr, encode, decode)
    return codec


def ratio(work: Work, outs: list[tuple[np.ndarray, np.ndarray]], part: int) -> float:
    """Signal-to-noise ratio of keys or values in dB."""
    signal = noise = 0.0
    for item, out in zip(work, outs, strict=True):
        x, y = item[1 + part].astype(np.float64), out[part].astype(np.float64)
        signal += float(np.sum(x * x))
        noise += float(np.sum(np.square(x - y)))
    return 10 * float(np.log10(signal / max(noise, 1e-300)))


def entropy(*columns: np.ndarray) -> float:
    """Entropy in bits of the first column, given the others."""
    key = np.zeros(columns[0].size, dtype=np.int64)
    for column in columns[1:]:
        key = key * 4096 + column.astype(np.int64) + 2048
    joint = np.unique(key * 65536 + columns[0].astype(np.int64) + 32768, return_counts=True)[1]
    given = np.unique(key, return_counts=True)[1]
    return float(given @ np.log2(given) - joint @ np.log2(joint)) / key.size


def scale_rows(codec: GroupCodec, state: dict[str, np.ndarray], work: Work, rotation: Rotation | None) -> None:
    """Entropy of quantized values: per head and token class, or with a scale per group in addition."""
    values, classes = [], []
    for unit, keys, _ in work[::7]:
        x = np.asarray(keys, dtype=np.float32)
        x = x if rotation is None else rotation.unrotate(x, unit.position)
        heads = unit.geometry.heads
        mean = x[:, tokens.FINEST :].mean(axis=1, keepdims=True)
        first = sum(2 * g.heads for g in [unit.geometry] * unit.layer)
        step = np.array([float(levels.step_of(int(c))) for c in state["steps"][first : first + heads]])
        q = np.clip(np.rint((x - mean) / step[:, None, None]), -2000, 2000)
        values.append(q.reshape(-1, q.shape[-1]))
        size = np.abs(q).mean(axis=(1, 2), keepdims=True)
        classes.append(np.broadcast_to(octave(size), q.shape).reshape(values[-1].shape))
    q, head = np.concatenate(values), np.concatenate(classes)
    print(f"q{codec.bits} keys, class per head: {entropy(q.ravel(), head.ravel()):.3f} bits")
    for width in (8, 16, 32, 64):
        if q.shape[1] % width:
            continue
        scale = octave(np.abs(q.reshape(len(q), -1, width)).mean(axis=2))
        spread = np.repeat(scale, width, axis=1)
        inside = entropy(q.ravel(), spread.ravel(), head.ravel())
        side = entropy(scale.ravel(), head[:, ::width].ravel()) / width
        print(f"  and a scale per {width:2d} values: {inside:.3f} + {side:.3f} = {inside + side:.3f} bits")


def octave(size: np.ndarray) -> np.ndarray:
    return np.rint(2 * np.log2(np.maximum(size, 0.1))).astype(np.int64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dumps", nargs="+", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--scales", action="store_true")
    options = parser.parse_args()
    snapshots = list(open_dumps(options.dumps))
    work = [item for s in snapshots for item in units(s)]
    raw = b"".join(np.ascontiguousarray(a).tobytes() for _, k, v in work for a in (k, v))
    identity = snapshots[0].identity
    print(f"{len(snapshots)} sessions, {len(raw) / 1e6:.0f} MB\n{'':24s} {'bits/el':>8s} {'SNR K / V dB':>13s}  "
          f"{'encode MB/s wall, cpu; decode MB/s wall, cpu':s}")  # fmt: skip
    plain_rows(raw, sum(s.elements for s in snapshots))
    for bits in (4, 3, 2, 1):
        codec = tier_row(bits, snapshots, work, options.tokens, options.threads)
        if options.scales:
            state = codec.learn(EvenRuns(snapshots, options.tokens), identity)
            scale_rows(codec, state, work, Rotation.of(identity.rope, identity.keys, identity.layers[0].k_dim))


if __name__ == "__main__":
    main()
