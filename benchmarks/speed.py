"""Speed of whole archives beside zstd -3 and memcpy, on the same bytes in the same run.

`compress` is timed from arrays in memory to a synced archive on disk, `read` from the archive (in the page cache) to
arrays in memory; nothing is shared between sessions, so that every byte goes through the codec. zstd runs in one thread
over the same raw bytes, memory to memory. Each figure is the best of several rounds, interleaved with the others.

Usage: python benchmarks/speed.py DUMPS... [--tier lossless]... [--rounds 3] [--sessions N]
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import zstandard

import pltpack
from pltpack.snapshot import Snapshot


def in_memory(snapshot: Snapshot) -> Snapshot:
    """The same snapshot with its arrays loaded."""
    layers = [tuple(np.ascontiguousarray(x) for x in snapshot.layer(i)) for i in range(len(snapshot.identity.layers))]
    return Snapshot.from_arrays(snapshot.session, snapshot.tokens, layers, snapshot.identity)


def seconds(work: Callable[[], object]) -> float:
    """Wall-clock seconds of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def read_all(archive: pltpack.Archive) -> None:
    """Decode every session into memory."""
    for session in archive.sessions:
        archive.read(session)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("dumps", nargs="+")
    parser.add_argument("--tier", action="append")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sessions", type=int)
    args = parser.parse_args()
    snapshots = [in_memory(s) for s in list(pltpack.open_dumps(args.dumps))[: args.sessions]]
    raw = b"".join(x.tobytes() for s in snapshots for i in range(len(s.identity.layers)) for x in s.layer(i))
    target = np.empty(len(raw), np.uint8)
    compressor, decompressor = zstandard.ZstdCompressor(level=3), zstandard.ZstdDecompressor()
    packed = compressor.compress(raw)
    tiers = args.tier or ["lossless", "q4", "q3", "q2", "turboquant-4"]
    best: dict[str, float] = {}

    def keep(name: str, took: float) -> None:
        best[name] = min(took, best.get(name, took))

    sizes = {"zstd -3": len(packed)}
    with tempfile.TemporaryDirectory() as name:
        for round_number in range(args.rounds + 1):
            keep("memcpy", seconds(lambda: np.copyto(target, np.frombuffer(raw, np.uint8))))
            keep("zstd -3 compress", seconds(lambda: compressor.compress(raw)))
            keep("zstd -3 decompress", seconds(lambda: decompressor.decompress(packed)))
            for tier in tiers:
                path = Path(name) / tier
                shutil.rmtree(path, ignore_errors=True)
                took = seconds(lambda p=path, t=tier: pltpack.compress(snapshots, p, quality=t, dedup=False))
                with pltpack.open(path) as archive:
                    read = seconds(lambda a=archive: read_all(a))
                    sizes[tier] = archive.stats()["archive_bytes"]
                if round_number:  # The first round compiles.
                    keep(f"{tier} compress", took)
                    keep(f"{tier} read", read)
    rates = {name: len(raw) / took / 1e6 for name, took in best.items()}
    rows = []
    for name, rate in rates.items():
        beside = rates["zstd -3 compress" if name.endswith(" compress") else "zstd -3 decompress"]
        rows.append({"what": name, "MB/s raw": round(rate), "of zstd -3": round(rate / beside, 2)})
    for row in rows:
        print(f"{row['what']:24s} {row['MB/s raw']:8d} MB/s  {row['of zstd -3']:6.2f} x zstd -3")
    bits = {name: 16 * size / len(raw) for name, size in sizes.items()}
    machine = platform.processor() or platform.machine()
    print(json.dumps({"machine": machine, "raw_bytes": len(raw), "bits_per_element": bits, "rates": rows}))


if __name__ == "__main__":
    main()
