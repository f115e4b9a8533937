"""How compressing by a Ray cluster scales: wall time and CPU seconds on clusters of 1, 2, … machines of one core.

    python -m benchmarks.ray_scaling DUMP... [--quality TIER] [--profile P] [--workers 1 2]

Each cluster has a head without cores, where the driver is, and one node with one core per worker, all on this machine
(`ray.cluster_utils.Cluster`). A small archive is written first, so that workers have started and compiled. What the
driver's process spends is serial: its share of all CPU seconds bounds what more workers can gain, whatever cores this
machine has. Every archive is compared with that of the local engine, byte by byte.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import pltpack


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dumps", nargs="+", type=Path)
    parser.add_argument("--quality", default="lossless")
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--store-mb", type=int, default=128, help="object store of each node")
    given = parser.parse_args()
    dumps = [file for path in given.dumps for file in (sorted(path.glob("*.safetensors")) if path.is_dir() else [path])]
    settings = {"quality": given.quality, "profile": given.profile}
    with tempfile.TemporaryDirectory() as folder:
        local = Path(folder, "local")
        before = time.process_time()
        pltpack.compress(dumps, local, **settings)
        print(f"local: {time.process_time() - before:.2f} CPU s", flush=True)
        rows = [measured(count, dumps, local, settings, given.store_mb) for count in given.workers]
    for row in rows:
        print(json.dumps(row))


def measured(workers: int, dumps: list[Path], local: Path, settings: dict[str, Any], store_mb: int) -> dict[str, Any]:
    """One cluster's figures."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray.cluster_utils import Cluster

    size = store_mb << 20
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": size})
    try:
        for _ in range(workers):
            cluster.add_node(num_cpus=1, object_store_memory=size)
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, log_to_driver=False)
        out = local.with_name(f"ray-{workers}")
        # As many sessions as workers, and more: each has compiled what it needs.
        pltpack.compress(dumps[: 2 * workers], out, engine="ray", **settings)
        shutil.rmtree(out)
        stages = Stages()
        worked, own, wall = worker_seconds(), time.process_time(), time.perf_counter()
        pltpack.compress(dumps, out, engine="ray", progress=stages, **settings)
        wall, own, worked = time.perf_counter() - wall, time.process_time() - own, worker_seconds() - worked
        equal = contents(out) == contents(local)
    finally:
        ray.shutdown()
        cluster.shutdown()
    return {"workers": workers, "equal": equal, "wall_s": round(wall, 2), "driver_cpu_s": round(own, 2),
            "worker_cpu_s": round(worked, 2), "serial_fraction": round(own / (own + worked), 4),
            "driver_cpu_s_before_encoding": round(stages.serial, 2), "cores": os.cpu_count()}  # fmt: skip


class Stages:
    """The driver's CPU seconds until encoding begins."""

    def __init__(self) -> None:
        self._begun, self.serial = time.process_time(), 0.0

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage == "encode" and not self.serial:
            self.serial = time.process_time() - self._begun


def worker_seconds() -> float:
    """CPU seconds of all Ray workers of this machine so far."""
    total = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if b"ray::" in (process / "cmdline").read_bytes():
                # Fields after the name in brackets: user and system time are the 14th and 15th of all.
                fields = (process / "stat").read_text().rpartition(")")[2].split()
                total += int(fields[11]) + int(fields[12])
        except OSError:
            continue
    return total / os.sysconf("SC_CLK_TCK")


def contents(archive: Path) -> dict[str, bytes]:
    """All files of an archive."""
    return {os.fspath(path.relative_to(archive)): path.read_bytes() for path in archive.rglob("*") if path.is_file()}


if __name__ == "__main__":
    main()
