"""Reads to the device by kvikio, which needs a driver: in the simulator, with a stand-in that reads to its arrays."""

from __future__ import annotations

import concurrent.futures
import gc
import inspect
import logging
import os
import sys
import threading
import time
import types
import weakref

import gpu_common  # noqa: F401 - before pltpack.gpu
import numpy as np
import profiles_common as toy
import pytest
from loader_common import damage, loader_threads, open_files

import pltpack
from pltpack.errors import UnsupportedError
from pltpack.format.sealing import using_key
from pltpack.format.tables import FLAG_REFERENCE
from pltpack.gpu import direct
from pltpack.gpu.lanes import Lanes
from pltpack.serve import Contiguous, MissError
from pltpack.serve.plan import pieces_of, units_of
from pltpack.serve.staged import arrived, begin_reads, ranges
from pltpack.snapshot import DTYPES

IDS = np.arange(3, 15)


class IOFuture:
    """As kvikio's."""

    def __init__(self, handle):
        self._handle = handle

    def get(self) -> int:
        """Bytes that were read."""
        return self._handle.result(20)

    def done(self) -> bool:
        """Whether they are there, or never will be."""
        return self._handle.done()


class StandIn:
    """What the stand-in was asked for, and how it is to fail."""

    def __init__(self):
        self.fault, self.tried, self.reads, self.open, self.most = None, 0, 0, 0, 0
        self.gate = threading.Event()
        self.gate.set()
        self.pool = concurrent.futures.ThreadPoolExecutor(2)
        outer = self

        class CuFile:
            def __init__(self, file, flags="r"):
                outer.tried += 1
                outer.trip("open")
                assert flags == "r"
                self._fd = os.open(file, os.O_RDONLY)
                outer.open += 1
                outer.most = max(outer.most, outer.open)

            def close(self) -> None:
                os.close(self._fd)
                outer.open -= 1

            def pread(self, buf, size=None, file_offset=0, task_size=None):
                outer.tried += 1
                outer.trip("pread")
                outer.reads += 1
                assert file_offset % 4096 == 0 and size == task_size == buf.nbytes
                return IOFuture(outer.pool.submit(self._read, buf, size, file_offset))

            def _read(self, buf, size, offset):
                assert outer.gate.wait(20)
                outer.trip("get")
                data = os.pread(self._fd, size - (outer.fault == "short"), offset)
                buf[: len(data)] = np.frombuffer(data, np.uint8)
                return len(data)

        self.module = types.SimpleNamespace(CuFile=CuFile)

    def trip(self, where):
        """Fail there, if that is asked for."""
        if self.fault == where:
            raise RuntimeError(f"no {where} today")


@pytest.fixture
def kvikio(monkeypatch):
    found = StandIn()
    monkeypatch.setitem(sys.modules, "kvikio", found.module)
    yield found
    found.gate.set()
    found.pool.shutdown()


@pytest.fixture
def messages():
    """What the loader logs, by logger."""
    found, logs = [], [logging.getLogger(name) for name in ("pltpack.serve", "pltpack.gpu")]

    def take(record):
        found.append((record.name, record.getMessage()))
        return False

    for log in logs:
        log.addFilter(take)
    yield found
    for log in logs:
        log.removeFilter(take)


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """Small archives by tier."""
    folder = tmp_path_factory.mktemp("archives")
    for quality in ("lossless", "q3"):
        sessions = [toy.session("a", IDS), toy.session("b", np.concatenate([IDS[:8], [40, 41, 42, 43]]))]
        pltpack.compress(sessions, folder / quality, quality=quality, block=4, near=False)
    return folder


@pytest.fixture
def alone(tmp_path):
    """An archive of one session, to be damaged."""
    pltpack.compress([toy.session("a", IDS)], tmp_path / "archive", quality="lossless", block=4)
    return tmp_path / "archive"


def equal(loaded, snapshot, tokens):
    """Whether a load gave the words that the CPU reads."""
    return len(loaded) == len(toy.LAYERS) and all(
        np.array_equal(np.asarray(mine).view(np.uint16), np.ascontiguousarray(theirs).view(np.uint16))
        for layer in loaded for mine, theirs in zip(layer[1:], snapshot.layer(layer.layer, 0, tokens), strict=True)
    )  # fmt: skip


def zeros():
    """Keys and values of 12 tokens to be loaded to, by layer."""
    return [[np.zeros((g.heads, 12, getattr(g, name)), DTYPES[g.dtype]) for g in toy.LAYERS]
            for name in ("k_dim", "v_dim")]  # fmt: skip


def fail_after_reading(loader, hit):
    """A load that has no room for what it decodes."""
    loader._device.backend.limit = 1
    with pytest.raises(MissError) as miss:
        loader.load(hit, Contiguous(*zeros()))
    assert miss.value.reason == "out of memory"


@pytest.mark.parametrize("quality", ["lossless", "q3"])
def test_values_are_the_cpus_and_payloads_go_to_the_device_once(archives, quality, kvikio, monkeypatch):
    sent, upload = [], Lanes.upload
    monkeypatch.setattr(Lanes, "upload", lambda self, host: sent.append(host.nbytes) or upload(self, host))
    figures = []
    with pltpack.open(archives / quality) as archive:
        snapshot = archive.read("b")
        for wanted in (False, True):
            sent.clear()
            # Four tokens of its own behind eight of the library's.
            with archive.loader(device="cuda", memory=0, direct=wanted) as loader:
                hit = loader.lookup(snapshot.tokens)
                assert hit.session == "b" and equal(loader.load(hit), snapshot, 12)
                figures.append((sum(sent), loader.read_bytes, kvikio.reads > 0))
    assert figures[0][0] > 0 == figures[1][0] and figures[0][1] == figures[1][1]
    assert not figures[0][2] and figures[1][2]
    gc.collect()
    assert loader._device.backend.lanes.pinned["used"] == 0 and not direct._loose and not kvikio.open


def test_a_damaged_unit_is_a_miss_and_nothing_of_it_is_delivered(alone, kvikio, messages):
    pair = zeros()
    with pltpack.open(alone) as archive, archive.loader(device="cuda", direct=True) as loader:
        damage(archive.shard("a"), 0)
        with pytest.raises(MissError) as miss:
            loader.load(loader.lookup(IDS), Contiguous(*pair))
        assert miss.value.reason == "bad unit" and kvikio.reads and loader._reads.direct.usable
    assert [name for name, _ in messages] == ["pltpack.serve"] and not any(x.any() for part in pair for x in part)


@pytest.mark.parametrize("fault", ["open", "pread", "get", "short"])
def test_reads_that_fail_are_done_by_the_host(archives, kvikio, messages, fault):
    kvikio.fault = fault
    with (
        pltpack.open(archives / "lossless") as archive,
        archive.loader(device="cuda", memory=0, direct=True) as loader,
    ):
        hit = loader.lookup(IDS).first(4)
        assert equal(loader.load(hit), archive.read("a"), 4)
        assert [name for name, _ in messages] == ["pltpack.gpu"] and not loader.misses
        assert {"short": "bytes"}.get(fault, f"no {fault} today") in messages[0][1]
        tried, read = kvikio.tried, loader.read_bytes
        fail_after_reading(loader, hit)
        assert kvikio.tried == tried > 0 and loader.read_bytes > read
    gc.collect()
    assert not kvikio.open and not direct._loose


def test_a_file_that_ends_early_is_a_miss_and_no_reason_to_give_up(alone, kvikio, messages):
    with pltpack.open(alone) as archive, archive.loader(device="cuda", direct=True) as loader:
        hit = loader.lookup(IDS)
        os.truncate(archive.shard("a").container.path, 100)
        with pytest.raises(MissError):
            loader.load(hit)
        assert kvikio.reads and loader._reads.direct.usable
    assert [name for name, _ in messages] == ["pltpack.serve"]


def test_files_are_opened_once_and_closed_after_many_loads(alone, kvikio, messages):
    # Reads that earlier tests gave up hold their files until somebody looks.
    direct._forget_done()
    gc.collect()
    files = open_files()
    with pltpack.open(alone) as archive:
        with archive.loader(device="cuda", direct=True, workers=1) as loader:
            hit = loader.lookup(IDS).first(4)
            assert equal(loader.load(hit), archive.read("a"), 4)
            for _ in range(49):
                fail_after_reading(loader, hit)
                loader.stream(hit, Contiguous(*zeros())).close()
            loader._device.backend.limit = None
            assert equal(loader.load(hit), archive.read("a"), 4)
        assert kvikio.reads >= 51 and kvikio.most == 1 and not loader_threads()
        kvikio.pool.shutdown()
        direct._forget_done()
        gc.collect()
        assert not kvikio.open and not direct._loose and loader._device.backend.lanes.pinned["used"] == 0
    assert open_files() == files


def test_memory_that_is_still_written_to_is_kept(alone, kvikio):
    """By a read that nobody waits for any more."""
    with pltpack.open(alone) as archive, archive.loader(device="cuda", direct=True) as loader:
        reads, (source, at) = loader._reads.direct, archive.shard("a").container.in_file(0)
        kvikio.gate.clear()
        room = weakref.ref(reads.begin(source, at, 50)._room)
        reads.close()
        gc.collect()
        assert room() is not None and kvikio.open == 1
        kvikio.gate.set()
        there, host = reads.finish(reads.begin(source, at + 1, 50))
        assert bytes(host) == there.tobytes() == archive.shard("a").container.payload(1, 50)
        kvikio.pool.shutdown()
        reads.close()
        gc.collect()
        assert room() is None and not kvikio.open


def parts_of(archive, name, loader):
    """Of each piece of a session: whether a unit has a reference, and whether it is read to the device."""
    shard = loader._prefixes().sources[name]
    for piece in pieces_of(shard, 12):
        units = units_of(shard, piece)
        flags = any(record["flags"] & FLAG_REFERENCE for _, record in units)
        for part in arrived(begin_reads(list(ranges(units)), units, time.sleep)):
            assert bytes(part.data) == part.container._container.payload(part.offset, len(part.data))
            yield flags, part.there is not None


def test_units_with_a_reference_are_read_by_the_host(tmp_path, kvikio):
    mine = toy.session("a", IDS)
    layers = [tuple(x.copy() for x in mine.layer(i, 0, 12)) for i in range(len(toy.LAYERS))]
    layers[1][0].view(np.uint16)[:, 2, 1] ^= 1
    again = pltpack.Snapshot.from_arrays("b", IDS, layers, mine.identity)
    pltpack.compress([mine, again], tmp_path / "near", quality="lossless", block=4)
    with pltpack.open(tmp_path / "near") as archive, archive.loader(device="cuda", direct=True) as loader:
        found = {pair for name in archive.sessions for pair in parts_of(archive, name, loader)}
    assert found == {(True, False), (False, True)} and kvikio.reads


def test_encrypted_units_are_read_by_the_host(tmp_path, kvikio):
    pytest.importorskip("cryptography")
    with using_key(bytes(range(32))):
        pltpack.compress([toy.session("a", IDS)], tmp_path / "sealed", quality="lossless", block=4, encrypt=True)
        with pltpack.open(tmp_path / "sealed") as archive, archive.loader(device="cuda", direct=True) as loader:
            assert {direct for _, direct in parts_of(archive, "a", loader)} == {False} and not kvikio.tried


def test_what_cannot_be_is_refused(archives, monkeypatch):
    with pltpack.open(archives / "lossless") as archive:
        with pytest.raises(UnsupportedError, match="CUDA device, which 'cpu' is not"):
            archive.loader(direct=True)
        monkeypatch.setitem(sys.modules, "kvikio", None)
        with pytest.raises(UnsupportedError, match=r"pip install 'pltpack\[gds12\]'"):
            archive.loader(device="cuda", direct=True)


def test_the_real_package_takes_what_the_stand_in_takes(archives):
    """And a load succeeds, whether it can read here or not."""
    real = pytest.importorskip("kvikio")
    for theirs, ours, names in ((real.CuFile, StandIn().module.CuFile, ("__init__", "pread", "close")),
                                (real.cufile.IOFuture, IOFuture, ("__init__", "get", "done"))):  # fmt: skip
        for name in names:
            here, there = (inspect.signature(getattr(kind, name)).parameters.values() for kind in (ours, theirs))
            assert [(p.name, p.kind, p.default) for p in here] == [(p.name, p.kind, p.default) for p in there]
    with pltpack.open(archives / "lossless") as archive, archive.loader(device="cuda", direct=True) as loader:
        assert equal(loader.load(loader.lookup(IDS)), archive.read("a"), 12)
