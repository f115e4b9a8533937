"""Peak memory of compress and decompress on a large dump, each in a process of its own.

The dump is one long session (the worst case: no session boundary to stop at), made of random bfloat16 values.

Usage: python benchmarks/memory.py [--gigabytes 4] [--tier lossless]... [--folder DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import ml_dtypes
import numpy as np

LAYERS, HEADS, DIM = 30, 3, 64
BYTES_PER_TOKEN = LAYERS * HEADS * DIM * 2 * 2


def make_dump(path: Path, gigabytes: float) -> int:
    """Write the dump as a stream; returns its number of tokens."""
    tokens = int(gigabytes * 1e9 / BYTES_PER_TOKEN)
    entries = {"tokens": ("I32", [tokens], 4 * tokens)}
    for layer in range(LAYERS):
        for kind in ("keys", "values"):
            entries[f"layers.{layer}.{kind}"] = ("BF16", [HEADS, tokens, DIM], HEADS * tokens * DIM * 2)
    identity = {"model": "memory", "keys": "unrotated"}
    header: dict = {"__metadata__": {"pltpack.dump": "1", "session": "long", "identity": json.dumps(identity)}}
    offset = 0
    for name, (dtype, shape, size) in entries.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text = text.ljust((len(text) + 7) // 8 * 8)
    rng = np.random.default_rng(0)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.write(rng.integers(0, 50000, tokens, dtype=np.int32).tobytes())
        for _ in range(LAYERS * 2 * HEADS):
            # Written in pieces, so that this process stays small too.
            for start in range(0, tokens, 1 << 16):
                rows = min(1 << 16, tokens - start)
                file.write(rng.standard_normal((rows, DIM), dtype=np.float32).astype(ml_dtypes.bfloat16).tobytes())
    return tokens


def run(arguments: list[str]) -> dict[str, float]:
    """Run the command line; seconds and peak resident bytes."""
    start = time.perf_counter()
    child = subprocess.Popen([sys.executable, "-m", "pltpack_cli", *arguments], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    if status:
        raise SystemExit(f"pltpack {arguments[0]} failed")
    return {"seconds": time.perf_counter() - start, "peak_bytes": usage.ru_maxrss * 1024}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=4)
    parser.add_argument("--tier", action="append")
    parser.add_argument("--folder")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        tokens = make_dump(folder / "long.safetensors", args.gigabytes)
        for tier in args.tier or ["lossless", "q4"]:
            row = {"tier": tier, "tokens": tokens, "dump_bytes": (folder / "long.safetensors").stat().st_size}
            archive = str(folder / "archive")
            row["compress"] = run(["compress", str(folder / "long.safetensors"), "-o", archive, "--quality", tier])
            row["decompress"] = run(["decompress", archive, "-o", str(folder / "out")])
            print(json.dumps(row), flush=True)
            shutil.rmtree(archive)
            shutil.rmtree(folder / "out")


if __name__ == "__main__":
    main()
