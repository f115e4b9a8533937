"""Peak memory of compress and decompress on a large dump, each in a process of its own.

The dump is one long session (the worst case: no session boundary to stop at), made of random bfloat16 values. With a
profile its values come from the profile: chance coefficients through its bases, so that the rate is a usual one.

Usage: python benchmarks/memory.py [--gigabytes 4] [--tier lossless]... [--profile FILE] [--folder DIR]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np

LAYERS, HEADS, DIM = 30, 3, 64
#: Tokens that are written at once; drawn values repeat after so many.
PIECE = 1 << 12
BYTES_PER_TOKEN = LAYERS * HEADS * DIM * 2 * 2


def make_dump(path: Path, gigabytes: float, profile: str | None = None) -> int:
    """Write the dump as a stream; returns its number of tokens."""
    identity: dict = {"model": "memory", "keys": "unrotated"}
    values = rotation = None
    if profile is not None:
        from pltpack.codec.rope import Rotation

        identity, values = drawn_values(profile)
        rotation = Rotation.of(identity["rope"], "rotated", DIM)
    tokens = int(gigabytes * 1e9 / BYTES_PER_TOKEN)
    entries = {"tokens": ("I32", [tokens], 4 * tokens)}
    for layer in range(LAYERS):
        for kind in ("keys", "values"):
            entries[f"layers.{layer}.{kind}"] = ("BF16", [HEADS, tokens, DIM], HEADS * tokens * DIM * 2)
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
        for block in range(LAYERS * 2 * HEADS):
            # Written in pieces, so that this process stays small too.
            for start in range(0, tokens, PIECE):
                rows = min(PIECE, tokens - start)
                if values is None:
                    drawn = rng.standard_normal((rows, DIM), dtype=np.float32)
                else:
                    drawn = values[:rows, block * DIM : (block + 1) * DIM]
                    if rotation is not None and block // HEADS % 2 == 0:
                        drawn = rotation.rotate(drawn[None], start)[0]
                file.write(drawn.astype(ml_dtypes.bfloat16).tobytes())
    return tokens


def drawn_values(file: str) -> tuple[dict, np.ndarray]:
    """The identity of a profile, and rows ``[PIECE, rows]`` drawn as it expects them, keys un-rotated."""
    from pltpack.archive import profiles
    from pltpack.codec.coefficients import OCTAVE
    from pltpack.codec.profile import Profile

    arrays, identity = profiles.load(file)
    profile, rng = Profile(arrays, identity.layers), np.random.default_rng(0)
    found = np.tile(profile.mean, (PIECE, 1))
    for group in profile.groups:
        scales = np.exp2(profile.shared_log[group.component] / OCTAVE).astype(np.float32)
        basis = profile.unwhitened(profile.shared(group), range(group.start, group.stop))
        drawn = rng.laplace(size=(PIECE, len(scales))).astype(np.float32)
        found[:, group.first : group.last] += (drawn * scales) @ basis
    return identity.to_json(), found


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
    parser.add_argument("--profile", help="of a model of this shape, for calibrated tiers")
    parser.add_argument("--folder")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        # A child's peak begins with its parent's size, so that this process has to stay small.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            tokens = pool.submit(make_dump, folder / "long.safetensors", args.gigabytes, args.profile).result()
        more = ["--profile", args.profile] if args.profile else []
        for tier in args.tier or (["balanced"] if args.profile else ["lossless", "q4"]):
            row = {"tier": tier, "tokens": tokens, "dump_bytes": (folder / "long.safetensors").stat().st_size}
            archive = str(folder / "archive")
            dump = str(folder / "long.safetensors")
            row["compress"] = run(["compress", dump, "-o", archive, "--quality", tier, *more])
            row["decompress"] = run(["decompress", archive, "-o", str(folder / "out")])
            print(json.dumps(row), flush=True)
            shutil.rmtree(archive)
            shutil.rmtree(folder / "out")


if __name__ == "__main__":
    main()
