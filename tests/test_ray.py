"""The engine on a real Ray cluster of three nodes on this machine: same bytes, whoever dies."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import near_common
import pytest
from tiny_models import save_model

import pltpack
from pltpack.archive import distributed
from pltpack.archive.ray_engine import RayEngine
from pltpack.errors import DumpError, EngineError
from pltpack.quality.calibrate import calibrate, calibrate_from_dumps

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.slow

STORE = 80 << 20


@pytest.fixture(scope="module")
def cluster():
    """A head without cores, where this process is, and two nodes of one core each."""
    from ray.cluster_utils import Cluster

    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": STORE})
    try:
        for _ in range(2):
            made.add_node(num_cpus=1, object_store_memory=STORE)
        made.wait_for_nodes()
        ray.init(address=made.address, log_to_driver=False)
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    begin = near_common.passage(11, 70)
    sharing = [near_common.session(f"p{index}", [*begin, *near_common.passage(20 + index, 90)]) for index in range(4)]
    return pltpack.write_dump([*near_common.family(), *sharing], tmp_path_factory.mktemp("dumps"))


def contents(archive: Path) -> dict[str, bytes]:
    return {str(path.relative_to(archive)): path.read_bytes() for path in archive.rglob("*") if path.is_file()}


def workers(cluster) -> list[int]:
    """Processes of the cluster's nodes that are at a call."""
    raylets = {info.process.pid for node in cluster.list_all_nodes() for info in node.all_processes["raylet"]}
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            if parent in raylets and b"ray::_called" in (process / "cmdline").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue
    return found


class Killing:
    """A progress callback that kills while units are encoded, until once there was something to kill."""

    def __init__(self, kill) -> None:
        self.kill, self.killed = kill, None

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage == "encode" and not self.killed and total / 8 < done < total:
            self.killed = self.kill()


def test_same_bytes(cluster, dumps: list[Path], tmp_path: Path) -> None:
    for engine in ("local", "ray"):
        pltpack.compress(dumps[:-1], tmp_path / engine, quality="q4", engine=engine)
        pltpack.append(tmp_path / engine, dumps[-1:], engine=engine)
    assert contents(tmp_path / "ray") == contents(tmp_path / "local")


def test_killed_workers_change_nothing(
    cluster, dumps: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "CALL_BYTES", 1 << 12)
    pltpack.compress(dumps, tmp_path / "local", quality="lossless")

    def kill() -> list[int]:
        found = workers(cluster)
        for process in found:
            os.kill(process, signal.SIGKILL)
        return found

    progress = Killing(kill)
    pltpack.compress(dumps, tmp_path / "ray", quality="lossless", engine="ray", progress=progress)
    assert progress.killed, "a worker was at a call"
    assert contents(tmp_path / "ray") == contents(tmp_path / "local")


def test_errors_come_as_they_are(cluster, dumps: list[Path], tmp_path: Path) -> None:
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(dumps[0].read_bytes()[:-100])
    with pytest.raises(DumpError, match=r"bad\.safetensors"):
        pltpack.compress([dumps[1], bad], tmp_path / "a", engine="ray")
    assert not (tmp_path / "a").exists()


def test_a_call_that_always_kills_ends(cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pltpack.archive.ray_engine.RETRIES", 1)
    with pytest.raises(EngineError, match="workers failed 2 times"):
        list(RayEngine().in_order(signal.raise_signal, [(signal.SIGKILL,)]))


def _unknown() -> None:
    """Workers have no module of this name."""


def test_what_workers_cannot_import(cluster) -> None:
    with pytest.raises(EngineError, match="No module named 'test_ray'"):
        list(RayEngine().in_order(_unknown, [()]))


def test_more_cores_than_any_machine_has(cluster) -> None:
    assert list(RayEngine().in_order(abs, [(-1,), (-2,)], cpus=64)) == [1, 2]


def test_same_profile(cluster, dumps: list[Path], tmp_path: Path) -> None:
    model, text = save_model(tmp_path / "model"), tmp_path / "text.txt"
    text.write_text(" ".join(f"word {index} and other words" for index in range(400)))
    for engine in ("local", "ray"):
        given = {"tokens": 160, "profile_rank": 8, "engine": engine}
        calibrate(model, text, tmp_path / f"{engine}.p", window=32, **given)
        calibrate_from_dumps(dumps, tmp_path / f"{engine}.d", **given)
    for kind in ("p", "d"):
        assert (tmp_path / f"ray.{kind}").read_bytes() == (tmp_path / f"local.{kind}").read_bytes()


def test_a_lost_node_changes_nothing(
    cluster, dumps: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last test: a node of the cluster goes."""
    monkeypatch.setattr(distributed, "CALL_BYTES", 1 << 12)
    pltpack.compress(dumps, tmp_path / "local", quality="lossless")
    node = next(each for each in cluster.list_all_nodes() if each is not cluster.head_node)
    progress = Killing(lambda: cluster.remove_node(node, allow_graceful=False) or True)
    pltpack.compress(dumps, tmp_path / "ray", quality="lossless", engine="ray", progress=progress)
    assert progress.killed
    assert contents(tmp_path / "ray") == contents(tmp_path / "local")
