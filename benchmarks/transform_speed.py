"""Speed of the calibrated codec beside a cold prefill of the same tokens, memcpy and zstd -3, in one run.

For each session: prefill by transformers (float32, all cores), encoding with a profile, and decoding of the whole
session from an archive, beside memcpy and zstd -3, in raw bytes of cache per second. Needs the extra ``eval``.

Usage: python -m benchmarks.transform_speed --model DIR --profile P [--quality TIER] [--rounds 3] DUMPS
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import zstandard


def best(work: Callable[[], object], rounds: int) -> float:
    """Seconds of the fastest of some rounds, after one that does not count."""
    work()
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return min(taken)


def measure(model_dir: Path, profile: Path, dumps: Path, quality: str, rounds: int) -> dict[str, object]:
    """Seconds and rates over all dumps of a folder."""
    import torch

    import pltpack
    from pltpack.archive import profiles
    from pltpack.codec import registry
    from pltpack.codec.base import Unit
    from pltpack.quality.model import load_model

    model = load_model(model_dir)
    snapshots = list(pltpack.open_dumps([dumps]))
    tokens = sum(len(snapshot) for snapshot in snapshots)
    raw = sum(sum(k.nbytes + v.nbytes for k, v in map(s.layer, range(len(s.identity.layers)))) for s in snapshots)

    def prefill() -> None:
        with torch.no_grad():
            for snapshot in snapshots:
                model.network.model(torch.from_numpy(snapshot.tokens.astype(np.int64))[None], use_cache=True)

    seconds = {"prefill": best(prefill, 1)}
    with tempfile.TemporaryDirectory() as scratch:
        archive = Path(scratch) / "archive"
        pltpack.compress([dumps], archive, quality=quality, profile=profile, dedup=False)
        start = time.perf_counter()
        pltpack.compress([dumps], Path(scratch) / "again", quality=quality, profile=profile, dedup=False)
        seconds["compress, profile and files included"] = time.perf_counter() - start
        with pltpack.open(archive) as opened:
            seconds["decode"] = best(lambda: [opened.read(name) for name in opened.sessions], rounds)
    arrays, _ = profiles.load(profile)
    codec = registry.tier(quality)
    codec.start(arrays, snapshots[0].identity)

    def encode(snapshot: pltpack.Snapshot) -> None:
        ready = codec.prepare(snapshot, (len(snapshot),))
        for group in codec.layer_groups(len(snapshot.identity.layers)):
            shapes = snapshot.identity.layers[group.start : group.stop]
            for at in range(0, len(snapshot), 256):
                stop = min(at + 256, len(snapshot))
                unit = Unit(group.start, shapes[0], at, stop - at, 0, tuple(shapes))
                ready.encode_span(unit, [snapshot.layer(layer, at, stop) for layer in group])

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        seconds["encode, sessions in parallel"] = best(lambda: list(pool.map(encode, snapshots)), 2)
    block = np.random.default_rng(0).integers(0, 255, raw, np.uint8)
    target = np.empty_like(block)
    seconds["memcpy"] = best(lambda: np.copyto(target, block), rounds)
    frames = [zstandard.ZstdCompressor(level=3).compress(p.read_bytes()) for p in sorted(dumps.glob("*.safetensors"))]
    seconds["zstd -3 decompress"] = best(
        lambda: [zstandard.ZstdDecompressor().decompress(frame) for frame in frames], rounds
    )
    return {
        "machine": platform.processor() or platform.machine(), "quality": quality, "tokens": tokens, "raw_bytes": raw,
        "seconds": seconds,
        "times faster than prefill": {k: round(seconds["prefill"] / v, 2) for k, v in seconds.items()},
        "GB/s raw": {k: round(raw / v / 1e9, 3) for k, v in seconds.items()},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dumps", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--quality", default="balanced")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print(json.dumps(measure(args.model, args.profile, args.dumps, args.quality, args.rounds), indent=1))


if __name__ == "__main__":
    main()
