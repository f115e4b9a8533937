"""Kill writers with SIGKILL at random moments and check that no archive is ever hurt.

Each round forks a child that runs compress, append, compact or import on real archive files and kills it after a random
delay. Then the archive must open at the old or the new generation, verify must pass bit by bit, the same operation must
succeed when repeated, and gc must leave nothing behind.

Usage: python benchmarks/crash.py [--kills 200] [--seed 0] [--sessions 6] [--tokens 256]
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np

import pltpack
from pltpack.format.manifest import NAME, Manifest
from pltpack.snapshot import Identity, Snapshot

Operation = Callable[[Path], object]


def sessions(count: int, tokens: int, seed: int) -> list[Snapshot]:
    """Sessions that share half their tokens, with bfloat16 caches of 4 layers, 2 heads and 32 dimensions."""
    rng = np.random.default_rng(seed)
    shared_ids = rng.integers(0, 1000, tokens // 2)
    shared = [rng.standard_normal((2, 2, tokens // 2, 32)) for _ in range(4)]
    out = []
    for index in range(count):
        own_ids = rng.integers(0, 1000, tokens - tokens // 2)
        layers = []
        for layer in shared:
            own = rng.standard_normal((2, 2, tokens - tokens // 2, 32))
            keys, values = np.concatenate([layer, own], axis=2).astype(ml_dtypes.bfloat16)
            layers.append((keys, values))
        identity = Identity(model="crash", keys="unrotated")
        out.append(Snapshot.from_arrays(f"s{index}", np.concatenate([shared_ids, own_ids]), layers, identity))
    return out


class Scenario:
    """One operation on one archive: what was there before, and what must be there after.

    Parameters
    ----------
    name : str
    before : Path or None
        Archive that the operation starts from; None if it makes one.
    operation : callable
        Takes the archive's path.
    old, new : set of str
        Sessions before and after.
    """

    def __init__(self, name: str, before: Path | None, operation: Operation, old: set[str], new: set[str]) -> None:
        self.name, self.before, self.operation, self.old, self.new = name, before, operation, old, new
        self.seconds = 0.0
        self.generation = 1 if before is None else 1 + Manifest.load(before).generation

    def prepare(self, archive: Path) -> None:
        """Put the old generation in place."""
        if self.before is not None:
            shutil.copytree(self.before, archive)


def kill_once(scenario: Scenario, folder: Path, delay: float) -> str:
    """Run the operation in a child, kill it after `delay` seconds, and check the archive.

    Returns
    -------
    str
        ``old`` or ``new``: the generation found. An archive that is neither raises.
    """
    archive = folder / "archive"
    scenario.prepare(archive)
    child = os.fork()
    if child == 0:
        try:
            scenario.operation(archive)
        finally:
            os._exit(0)
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    found = check(scenario, archive)
    if found == "old":
        scenario.operation(archive)
        assert check(scenario, archive) == "new"
    pltpack.gc(archive)
    check_clean(archive)
    left = [path.name for path in folder.iterdir() if path != archive]
    # A killed compress or import leaves its hidden temporary folder or file; the next run of the same kind removes
    # folders, and neither is ever taken for an archive.
    assert all(".tmp-" in name for name in left), left
    return found


def check(scenario: Scenario, archive: Path) -> str:
    """Open and verify; which generation is it?"""
    if not archive.exists():
        assert scenario.before is None, "the old archive is gone"
        return "old"
    report = pltpack.verify(archive, against=[s for s in SNAPSHOTS if s.session in names_of(archive)])
    assert not report["differences"], report
    assert all(row["bit_exact"] for row in report["compared"].values()), report
    with pltpack.open(archive) as opened:
        new = opened.manifest.generation == scenario.generation
        assert opened.manifest.generation in (scenario.generation - 1, scenario.generation)
    assert names_of(archive) == (scenario.new if new else scenario.old)
    return "new" if new else "old"


def names_of(archive: Path) -> set[str]:
    """Session names of an archive."""
    with pltpack.open(archive) as opened:
        return set(opened.sessions)


def check_clean(archive: Path) -> None:
    """After gc the folder holds what the manifest names, the manifest and the lock, and nothing else."""
    with pltpack.open(archive) as opened:
        named = {entry.file for entry in (*opened.manifest.libraries, *opened.manifest.sessions)}
    found = {path.relative_to(archive).as_posix() for path in archive.rglob("*") if path.is_file()}
    assert found - {NAME, ".lock"} == named, found ^ named


SNAPSHOTS: list[Snapshot] = []


def run(kills: int, seed: int, count: int, tokens: int, folder: Path) -> dict[str, dict[str, int]]:
    """Run `kills` rounds in `folder`; counts of generations found per operation.

    Raises
    ------
    AssertionError, PltpackError
        At the first archive that was hurt.
    """
    random_delay = random.Random(seed)
    SNAPSHOTS[:] = sessions(count, tokens, seed)
    half = count // 2
    first, second = SNAPSHOTS[:half], SNAPSHOTS[half:]
    all_names, first_names = {s.session for s in SNAPSHOTS}, {s.session for s in first}
    base, both, exported = folder / "base", folder / "both", folder / "last.pltsession"
    alone = folder / "alone"
    pltpack.compress(first, base, quality="lossless")
    pltpack.compress(first[:1], alone, quality="lossless")
    pltpack.compress(first, both, quality="lossless")
    pltpack.append(both, second)
    pltpack.export_session(both, second[-1].session, exported)
    imported = first_names | {second[-1].session}
    scenarios = [
        Scenario("compress", None, lambda a: pltpack.compress(SNAPSHOTS, a, quality="lossless"), set(), all_names),
        Scenario("append", base, lambda a: pltpack.append(a, second), first_names, all_names),
        # The only session's shard is written anew, as the others share its prefix.
        Scenario("rewrite", alone, lambda a: pltpack.append(a, second), {first[0].session},
                 {first[0].session, *(s.session for s in second)}),
        Scenario("compact", both, pltpack.compact, all_names, all_names),
        Scenario("import", base, lambda a: pltpack.import_session(a, exported), first_names, imported),
    ]
    for scenario in scenarios:
        work = folder / f"time-{scenario.name}"
        work.mkdir()
        scenario.prepare(work / "archive")
        scenario.operation(work / "archive")  # Compiles what is not compiled yet.
        shutil.rmtree(work / "archive")
        scenario.prepare(work / "archive")
        start = time.perf_counter()
        scenario.operation(work / "archive")
        scenario.seconds = time.perf_counter() - start
        shutil.rmtree(work)
    found: dict[str, collections.Counter[str]] = {s.name: collections.Counter() for s in scenarios}
    for number in range(kills):
        scenario = scenarios[number % len(scenarios)]
        work = folder / f"kill-{number}"
        work.mkdir()
        outcome = kill_once(scenario, work, random_delay.uniform(0, 1.3 * scenario.seconds))
        found[scenario.name][outcome] += 1
        shutil.rmtree(work)
    return {name: dict(counter) for name, counter in found.items()}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sessions", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=256)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        found = run(args.kills, args.seed, args.sessions, args.tokens, Path(folder))
    print(json.dumps({"kills": args.kills, "generation_found": found, "seconds": time.perf_counter() - start}))


if __name__ == "__main__":
    main()
