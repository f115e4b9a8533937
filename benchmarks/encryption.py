"""What encryption costs: CPU seconds of encoding and decoding with and without it, in one process, turn by turn.

Usage: python -m benchmarks.encryption [DUMPS...] [--quality TIER]... [--repeats 5] [--profile FILE]

DUMPS are by default the sessions in fixtures/. Encoding is `compress`, decoding opens the archive and reads every
session whole, three times in each turn. The least of the repeats is taken of each.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pltpack
from pltpack.dumps import open_dumps
from pltpack.format.sealing import using_key
from pltpack.snapshot import Snapshot

ROOT = Path(__file__).parents[1]
#: Times that an archive is read in a turn.
DECODES = 3


def cpu_seconds(work: Callable[[], object]) -> float:
    """CPU seconds of the process, all threads."""
    begin = time.process_time()
    work()
    return time.process_time() - begin


def read_all(path: Path) -> None:
    with pltpack.open(path) as archive:
        for name in archive.sessions:
            archive.read(name)


def compare(
    sessions: list[Snapshot], quality: str, repeats: int, folder: Path, profile: Path | None
) -> dict[str, list[float]]:
    """The least CPU seconds: encoding without and with encryption, decoding likewise; and the sizes."""
    times: dict[str, list[list[float]]] = {"encode": [[], []], "decode": [[], []]}
    sizes = [0.0, 0.0]
    for repeat in range(repeats + 1):
        for encrypt in (False, True) if repeat % 2 else (True, False):
            path = folder / f"{quality}-{repeat}-{encrypt:d}"
            encode = cpu_seconds(functools.partial(pltpack.compress, sessions, path, quality=quality, profile=profile,
                                                   encrypt=encrypt))  # fmt: skip
            decode = min(cpu_seconds(functools.partial(read_all, path)) for _ in range(DECODES))
            sizes[encrypt] = float(sum(file.stat().st_size for file in path.rglob("*") if file.is_file()))
            shutil.rmtree(path)
            # The first turn compiles and warms up.
            if repeat:
                times["encode"][encrypt].append(encode)
                times["decode"][encrypt].append(decode)
    return {**{name: [min(each) for each in pair] for name, pair in times.items()}, "bytes": sizes}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("dumps", nargs="*", type=Path)
    parser.add_argument("--quality", action="append")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--profile", type=Path)
    options = parser.parse_args()
    worst = 0.0
    with tempfile.TemporaryDirectory() as temp, using_key(os.urandom(32)):
        if not options.dumps:
            from benchmarks.capture import unpack

            unpack(ROOT / "fixtures" / "sessions.tar.zst", Path(temp))
            options.dumps = [Path(temp) / "dumps"]
        opened = [snapshot.load() if hasattr(snapshot, "load") else snapshot for snapshot in open_dumps(options.dumps)]
        for quality in options.quality or ["lossless", "q4"]:
            profile = options.profile if quality in ("near", "balanced", "small") else None
            found = compare(opened, quality, options.repeats, Path(temp), profile)
            for name in ("encode", "decode"):
                plain, sealed = found[name]
                worst = max(worst, sealed / plain - 1)
                more = 100 * (sealed / plain - 1)
                print(f"{quality} {name}: {plain:.3f} s of CPU, encrypted {sealed:.3f} s ({more:+.1f} %)")
            plain, sealed = found["bytes"]
            more = 100 * (sealed / plain - 1)
            print(f"{quality}: {plain / 1e6:.2f} MB, encrypted {sealed / 1e6:.2f} MB ({more:+.2f} %)")
    return 0 if worst < 0.05 else 1


if __name__ == "__main__":
    sys.exit(main())
