"""The streaming loader on a device, in the simulator: values, destinations, and loads that come to nothing."""

from __future__ import annotations

import dataclasses
import gc
import logging

import gpu_common  # noqa: F401 - before pltpack.gpu
import numpy as np
import profiles_common as toy
import pytest
from loader_common import damage, loader_threads

import pltpack
from pltpack.codec import delta
from pltpack.errors import UnsupportedError
from pltpack.gpu.lanes import Lanes
from pltpack.serve import Contiguous, MissError, Paged
from pltpack.snapshot import DTYPES

IDS = np.arange(3, 15)


def sessions():
    """Two sessions that share 8 tokens."""
    return [toy.session("a", IDS), toy.session("b", np.concatenate([IDS[:8], [40, 41, 42, 43]]))]


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """Small archives by tier."""
    folder = tmp_path_factory.mktemp("archives")
    profile = toy.save_profile(folder / "profile.safetensors")
    for quality in ("lossless", "q3", "balanced"):
        more = {"profile": profile} if quality == "balanced" else {}
        pltpack.compress(sessions(), folder / quality, quality=quality, block=4, near=False, **more)
    return folder


def words(array):
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


def apart(layers, snapshot, tokens):
    """How far loaded layers are from what the CPU reads, in units in the last place."""
    return max(
        int(np.abs(delta.ordered(words(np.asarray(mine))).astype(int) - delta.ordered(words(theirs)).astype(int)).max())
        for layer in layers for mine, theirs in zip(layer[1:], snapshot.layer(layer.layer, 0, tokens), strict=True)
    )  # fmt: skip


@pytest.mark.parametrize("quality", ["lossless", "q3", "balanced"])
def test_values_on_the_device_are_the_cpus(archives, quality):
    most = 2 if quality == "balanced" else 0
    with pltpack.open(archives / quality) as archive, archive.loader(device="cuda:0", depth=3) as loader:
        for session in archive.sessions:
            snapshot = archive.read(session)
            hit = loader.lookup(snapshot.tokens)
            assert hit.tokens == 12
            assert apart(loader.load(hit), snapshot, 12) <= most
        # Units that are cut in the middle, and the shared ones, which are there by now.
        assert apart(loader.load(hit.first(10)), snapshot, 10) <= most
        assert loader.centroids["hits"] > 0 and 0 < loader.centroids["bytes"] <= loader.centroids["budget"]
        assert loader._device.backend.lanes.pinned["used"] == 0


def test_predicted_units_and_corrections_come_from_the_cpu(tmp_path):
    mine = toy.session("a", IDS)
    # Nearly the same words behind the same tokens: differences to what is shared.
    layers = [tuple(x.copy() for x in mine.layer(i, 0, 12)) for i in range(len(toy.LAYERS))]
    layers[1][0].view(np.uint16)[:, 2, 1] ^= 1
    again = pltpack.Snapshot.from_arrays("b", IDS, layers, mine.identity)
    pltpack.compress([mine, again], tmp_path / "archive", quality="lossless", block=4)
    with pltpack.open(tmp_path / "archive") as archive, archive.loader(device="cuda") as loader:
        assert any((archive.shard(name).units["flags"] != 0).any() for name in archive.sessions)
        for name in archive.sessions:
            hit = dataclasses.replace(loader.lookup(IDS), session=name)
            assert apart(loader.load(hit), archive.read(name), 12) == 0


@pytest.mark.parametrize("quality", ["lossless", "q3", "balanced"])
def test_centroids_stay_on_the_device_encoded(archives, quality, monkeypatch):
    """Where there is no room for them decoded, or only for others: they need no reading and no copying."""
    sent, upload = [], Lanes.upload
    monkeypatch.setattr(Lanes, "upload", lambda self, host: sent.append(host.nbytes) or upload(self, host))
    with pltpack.open(archives / quality) as archive:
        snapshot = archive.read("a")
        shared = sum(int(library.units["length"].sum()) for library in archive.libraries)
        with archive.loader(device="cuda:0", memory=int(shared / 0.8) + 1, workers=1) as loader:
            hit, figures = loader.lookup(IDS), []
            for _ in range(2):
                sent.clear()
                before = loader.read_bytes
                assert apart(loader.load(hit), snapshot, 12) <= (2 if quality == "balanced" else 0)
                figures.append((sum(sent), loader.read_bytes - before))
            kept = loader.centroids
            assert shared == kept["encoded_bytes"] == kept["bytes"] <= kept["budget"]
            assert kept["encoded_hits"] >= 1 and kept["hits"] == 0
            # Small lossless units are decoded on the host.
            assert figures[0][0] - figures[1][0] > shared / 2 and figures[0][1] - figures[1][1] == shared
            loader.pin(hit)
            loader.load(hit)
            assert loader.centroids["bytes"] > loader.centroids["budget"]
            loader.unpin(hit)
            assert loader.centroids["bytes"] == shared
        assert held(loader) == (0, 0)


@pytest.mark.parametrize("layout", ["vllm", "sglang"])
def test_pages_and_arrays_of_the_caller(archives, layout):
    with pltpack.open(archives / "lossless") as archive, archive.loader(device="cuda") as loader:
        snapshot = archive.read("a")
        hit = loader.lookup(IDS)
        arrays = [[np.zeros((g.heads, 14, dim), DTYPES[g.dtype]) for g in toy.LAYERS for dim in (getattr(g, name),)]
                  for name in ("k_dim", "v_dim")]  # fmt: skip
        found = loader.load(hit, Contiguous(*arrays))
        assert apart(found, snapshot, 12) == 0 and not any(x[:, 12:].any() for pair in arrays for x in pair)
        with pytest.raises(UnsupportedError, match="bytes an element"):
            loader.load(hit, tuple([x.astype(np.float32) for x in part] for part in arrays))
        blocks, size = (5, 0, 3), 4
        if layout == "vllm":
            pools = [np.zeros((6, g.heads, size, g.k_dim + g.v_dim), DTYPES[g.dtype]) for g in toy.LAYERS]
            pages = Paged(pools, blocks, "vllm", size)
        else:
            pools = [tuple(np.zeros((6 * size + 1, g.heads, dim), DTYPES[g.dtype]) for dim in (g.k_dim, g.v_dim))
                     for g in toy.LAYERS]  # fmt: skip
            pages = Paged(pools, blocks, "sglang", size)
        loader.load(hit, pages)
        for index, (g, pool) in enumerate(zip(toy.LAYERS, pools, strict=True)):
            for half, theirs in enumerate(snapshot.layer(index, 0, 12)):
                if layout == "vllm":
                    part = (pool[..., : g.k_dim] if half == 0 else pool[..., g.k_dim :]).transpose(0, 2, 1, 3)
                else:
                    part = pool[half][:-1].reshape(6, size, g.heads, -1)
                    assert not pool[half][-1].any()
                mine = part[list(blocks)].reshape(12, g.heads, -1).transpose(1, 0, 2)
                assert np.array_equal(words(mine), words(theirs)) and not part[[1, 2, 4]].any()


def test_caches_of_transformers(archives):
    transformers = pytest.importorskip("transformers")
    with pltpack.open(archives / "lossless") as archive, archive.loader(device="cuda") as loader:
        cache = transformers.DynamicCache()
        loader.load(loader.lookup(IDS), cache)
        for index in range(len(toy.LAYERS)):
            for mine, theirs in zip((cache.layers[index].keys, cache.layers[index].values),
                                    archive.read("a").layer(index, 0, 12), strict=True):  # fmt: skip
                assert np.array_equal(mine[0].float().numpy(), theirs.astype(np.float32))


def fail(loader, reason, into=None, limit=None):
    """One load that must come to nothing."""
    loader._device.backend.limit = limit
    with pytest.raises(MissError) as miss, loader.stream(loader.lookup(IDS), into) as stream:
        if reason == "cancelled":
            stream.cancel()
        list(stream)
    assert miss.value.reason == reason and miss.value.blocks == ()


def held(loader):
    """Pinned buffers in use, and device bytes of buffers, once what nobody looks at is gone."""
    gc.collect()
    return loader._device.backend.lanes.pinned["used"], loader._device.backend.live_bytes


@pytest.fixture
def messages():
    """What is logged, as text: handlers of the test's own keep errors, and so what their frames held."""
    found, log = [], logging.getLogger("pltpack.serve")

    def take(record):
        found.append(record.getMessage())
        return False

    log.addFilter(take)
    yield found
    log.removeFilter(take)


@pytest.mark.parametrize("cycles", [30, pytest.param(1000, marks=pytest.mark.slow)])
def test_loads_that_fail_leave_nothing_behind(tmp_path, messages, cycles):
    pltpack.compress(sessions()[:1], tmp_path / "archive", quality="lossless", block=4)
    pool = [tuple(np.zeros((24, g.heads, dim), DTYPES[g.dtype]) for dim in (g.k_dim, g.v_dim)) for g in toy.LAYERS]
    pages = Paged(pool, (5, 0, 3), "sglang", 4)
    many = cycles * 9 // 10
    with pltpack.open(tmp_path / "archive") as archive:
        with archive.loader(device="cuda", workers=1) as loader:
            for cycle in range(many):
                # Before anything is read, while pieces are decoded, and whenever it happens.
                kinds = ("out of memory", None, 100), ("out of memory", pages, 100), ("cancelled", pages)
                fail(loader, *kinds[cycle % 3])
            assert held(loader) == (0, 0)
            assert loader.misses == {"out of memory": many // 3 * 2, "cancelled": many // 3}
        damage(archive.shard("a"), len(archive.shard("a").units) - 1)
        for _ in range(cycles - many):
            with archive.loader(device="cuda", workers=1) as loader:
                fail(loader, "bad unit")
        assert held(loader) == (0, 0)
    assert len(messages) == cycles and all("is a miss" in message for message in messages)
    assert not any(array.any() for pair in pool for array in pair) and not loader_threads()


def test_missing_files_are_misses(tmp_path):
    pltpack.compress(sessions()[:1], tmp_path / "archive", quality="lossless", block=4)
    with pltpack.open(tmp_path / "archive") as archive, archive.loader(device="cuda") as loader:
        for path in (tmp_path / "archive" / "shards").iterdir():
            path.unlink()
        assert not loader.lookup(IDS) and loader.misses == {"missing file": 1}


def test_pinned_buffers_are_used_again():
    lanes = Lanes()
    first = lanes.buffer(1000)
    address = first.ctypes.data
    assert lanes.pinned["used"] == 1
    del first
    gc.collect()
    again, other = lanes.buffer(2000), lanes.buffer(10)
    assert again.ctypes.data == address and other.ctypes.data != address
    assert lanes.pinned == {"used": 2, "free": 0, "free_bytes": 0}
