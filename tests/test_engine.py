"""Encoding by an engine's workers: whoever encodes, an archive has the same bytes."""

from __future__ import annotations

import pickle
import socket
from pathlib import Path

import near_common
import numpy as np
import profiles_common
import pytest

import pltpack
from pltpack.archive import distributed, distributed_worker
from pltpack.archive.engine import open_engine
from pltpack.dumps.reopened import DumpFile
from pltpack.errors import DumpError, EngineError, PltpackError, UnsupportedError
from pltpack.quality import passes
from pltpack.snapshot import Snapshot


class Pickling:
    """An engine of one worker in this process, which gets nothing but bytes and forgets a part now and then."""

    def __init__(self):
        self.calls, self.sent = [], []

    def share(self, value):
        self.sent.append(pickle.dumps(value))
        return _Shared(self.sent[-1])

    def in_order(self, work, calls, cpus=1):
        for call in calls:
            self.calls.append(work.__name__)
            if len(self.calls) % 3 == 0:
                distributed_worker._made.__init__()
            data = [a.data if isinstance(a, _Shared) else pickle.dumps(a) for a in call]
            self.sent += data
            arguments = [pickle.loads(each) for each in data]
            yield pickle.loads(pickle.dumps(work(*arguments)))


class _Here:
    """A source that holds an open file."""

    def __init__(self, source, file):
        self.layer, self.file = source.layer, file


class _Shared:
    def __init__(self, data):
        self.data = data


def contents(archive: Path) -> dict[str, bytes]:
    return {str(path.relative_to(archive)): path.read_bytes() for path in archive.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Sessions that share prefixes and repeat passages at other places."""
    begin = near_common.passage(11, 70)
    sharing = [near_common.session(f"p{index}", [*begin, *near_common.passage(20 + index, 30)]) for index in range(3)]
    return pltpack.write_dump([*sharing[:2], *near_common.family(), sharing[2]], tmp_path_factory.mktemp("dumps"))


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], Path]:
    """The same for a profile, with one."""
    folder, rng = tmp_path_factory.mktemp("profiled"), np.random.default_rng(3)
    shared = rng.integers(0, 50, 96)
    ids = [np.concatenate([shared, rng.integers(0, 50, 40)]) for _ in range(3)]
    ids.append(np.concatenate([rng.integers(0, 50, 32), shared]))
    sessions = [profiles_common.session(f"s{index}", each) for index, each in enumerate(ids)]
    return pltpack.write_dump(sessions, folder / "dumps"), profiles_common.save_profile(folder / "p.safetensors")


@pytest.mark.parametrize("quality", ["lossless", "q3", "turboquant-4"])
def test_same_bytes_as_threads(
    dumps: list[Path], tmp_path: Path, quality: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "CALL_BYTES", 1 << 14)
    engine = Pickling()
    for name, chosen in (("local", "local"), ("engine", engine)):
        pltpack.compress(dumps[:-2], tmp_path / name, quality=quality, engine=chosen)
        pltpack.append(tmp_path / name, dumps[-2:], engine=chosen)
    assert contents(tmp_path / "engine") == contents(tmp_path / "local")
    assert {"scan", "encode", "attempts"} <= set(engine.calls)
    assert ("judge" in engine.calls) == (quality != "lossless")
    with pltpack.open(tmp_path / "engine") as archive:
        shards = [archive.shard(name) for name in archive.sessions]
        assert any(len(shard.predicted_runs) for shard in shards) == (quality != "turboquant-4")
        assert sum(len(shard.exact_runs) > 0 for shard in shards) > 1


@pytest.mark.parametrize("quality", ["small", "balanced"])
@pytest.mark.parametrize("external", [False, True])
def test_same_bytes_with_a_profile(
    profiled: tuple[list[Path], Path], tmp_path: Path, quality: str, external: bool
) -> None:
    (dumps, profile), engine = profiled, Pickling()
    given = {"external_profile" if external else "profile": profile}
    for name, chosen in (("local", "local"), ("engine", engine)):
        pltpack.compress(dumps[:-1], tmp_path / name, quality=quality, engine=chosen, **given)
        pltpack.append(tmp_path / name, dumps[-1:], engine=chosen, profile=profile)
    assert contents(tmp_path / "engine") == contents(tmp_path / "local")
    assert "prepare" in engine.calls


@pytest.mark.parametrize("quality", ["lossless", "q3"])
def test_the_archive_key_stays_in_this_process(dumps: list[Path], tmp_path: Path, quality: str) -> None:
    pytest.importorskip("cryptography")
    from pltpack.format.sealing import using_key

    engine, key = Pickling(), bytes(range(100, 132))
    with using_key(key):
        for name, chosen in (("local", "local"), ("engine", engine)):
            pltpack.compress(dumps[:-2], tmp_path / name, quality=quality, engine=chosen, encrypt=True)
            pltpack.append(tmp_path / name, dumps[-2:], engine=chosen)
        with pltpack.open(tmp_path / "local") as local, pltpack.open(tmp_path / "engine") as other:
            for one, two in zip(_containers(local), _containers(other), strict=True):
                assert one.seal is not None and two.seal is not None and one.seal.header != two.seal.header
                assert one.payload(0, one.payload_bytes) == two.payload(0, two.payload_bytes)
                assert all(np.array_equal(one.tables[name], two.tables[name]) for name in one.tables | two.tables)
    assert {"encode", "attempts"} <= set(engine.calls)
    # What opens a part of the library goes along with it, and opens nothing else.
    assert any(b"FileSeal" in data for data in engine.sent) and not any(key in data for data in engine.sent)


def _containers(archive: pltpack.Archive) -> list:
    return [each.container for each in (*archive.libraries, *map(archive.shard, archive.sessions))]


def test_snapshots_in_memory_go_to_workers(tmp_path: Path) -> None:
    for name, engine in (("local", "local"), ("engine", Pickling())):
        pltpack.compress(near_common.family(), tmp_path / name, quality="q4", engine=engine)
    assert contents(tmp_path / "engine") == contents(tmp_path / "local")


def test_a_snapshot_that_cannot_go_is_refused(tmp_path: Path) -> None:
    session = near_common.family()[0]
    with open(__file__) as file, pytest.raises(UnsupportedError, match="cannot go to another process"):
        pltpack.compress([Snapshot(session.session, session.tokens, session.identity, _Here(session.source, file))],
                         tmp_path / "a", quality="q4", engine=Pickling())  # fmt: skip
    assert not (tmp_path / "a").exists()


def test_errors_of_dumps_are_the_same(dumps: list[Path], tmp_path: Path) -> None:
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(dumps[0].read_bytes()[:-100])
    told = []
    for engine in ("local", Pickling()):
        for given in ([bad], [dumps[0], dumps[0]]):
            with pytest.raises(PltpackError) as caught:
                pltpack.compress(given, tmp_path / "a", engine=engine)
            told.append((type(caught.value), str(caught.value)))
    assert told[:2] == told[2:]


def test_a_dump_of_another_size_is_refused(dumps: list[Path], tmp_path: Path) -> None:
    path = tmp_path / dumps[0].name
    path.write_bytes(dumps[0].read_bytes())
    (found,) = distributed.scanned(Pickling(), [path])
    file = found.source.file
    assert isinstance(file, DumpFile)
    found.layer(0)
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(DumpError, match="bytes here, not"):
        found.layer(0)


def test_one_list_of_tokens_serves_one_dump(tmp_path: Path) -> None:
    import safetensors.numpy

    layers = {f"layers.0.{side}": np.zeros((1, 4, 8), np.float16) for side in ("keys", "values")}
    for name in ("a", "b"):
        safetensors.numpy.save_file(layers, tmp_path / f"{name}.safetensors")
    (tmp_path / "ids").write_text("[1, 2, 3, 4]")
    told = []
    for engine in ("local", Pickling()):
        with pytest.raises(PltpackError) as caught:
            pltpack.compress([tmp_path / "a.safetensors", tmp_path / "b.safetensors"], tmp_path / "out",
                             tokens=tmp_path / "ids", engine=engine)  # fmt: skip
        told.append(str(caught.value))
    assert told[0] == told[1]


def test_rows_of_dumps_for_calibration(dumps: list[Path]) -> None:
    found = list(distributed.scanned(Pickling(), dumps))
    parts = [(snapshot, 0, 32) for snapshot in found]
    for mine, theirs in zip(passes.dump_rows(None, parts), passes.dump_rows(Pickling(), parts), strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert np.array_equal(a, b)


def test_engines_have_names() -> None:
    with pytest.raises(UnsupportedError, match="no engine"), open_engine("spark"):
        pass
    with pytest.raises(UnsupportedError, match="address"), open_engine("local", "localhost:6379"):
        pass
    with open_engine() as engine:
        assert engine is None


def test_a_cluster_that_does_not_answer() -> None:
    pytest.importorskip("ray")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(EngineError, match=f"at 127.0.0.1:{port}"), open_engine("ray", f"127.0.0.1:{port}"):
        pass
