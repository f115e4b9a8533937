"""Adapters of LMCache and SGLang over an archive, with those packages' own classes where they are installed."""

import asyncio
import json

import numpy as np
import pytest

import pltpack
from pltpack.dumps import open_dumps
from pltpack.dumps.token_chains import sglang_chain
from pltpack.errors import IdentityError, UnsupportedError
from pltpack.serve.follow import FollowedArchive
from pltpack.serve.paged_archive import PagedArchive, Spool
from pltpack.snapshot import Identity, Snapshot

HEADS, DIM, LAYERS, PAGE = 2, 16, 3, 32


def talk(seed=0, count=100, **identity):
    rng = np.random.default_rng(seed)
    arrays = [
        (rng.standard_normal((HEADS, count, DIM)).astype(np.float32),
         rng.standard_normal((HEADS, count, DIM)).astype(np.float32))
        for _ in range(LAYERS)
    ]  # fmt: skip
    identity = {"keys": "rotated", "tp_rank": 0, "tp_size": 1} | identity
    return Snapshot.from_arrays(f"talk-{seed}", rng.integers(0, 999, count), arrays, Identity(**identity))


@pytest.fixture
def archive(tmp_path):
    pltpack.compress([talk(0), talk(1)], tmp_path / "archive", quality="lossless")
    return tmp_path / "archive"


def chain(tokens):
    return [(name, at * PAGE, (at + 1) * PAGE) for at, name in enumerate(sglang_chain(tokens, PAGE))]


def test_pages_of_an_archive_are_found_by_their_names(archive):
    pages = PagedArchive(FollowedArchive(archive, lambda identity: identity), chain)
    snapshot = talk(1)
    for at, name in enumerate(sglang_chain(snapshot.tokens, PAGE)):
        assert name in pages
        for layer, pair in enumerate(pages.page(name)):
            for found, wanted in zip(pair, snapshot.layer(layer, at * PAGE, (at + 1) * PAGE), strict=True):
                np.testing.assert_array_equal(found, wanted)
    assert "0" * 64 not in pages and pages.page("0" * 64) is None


def test_a_damaged_session_is_a_miss_and_not_offered_again(archive):
    for shard in (archive / "shards").iterdir():
        data = bytearray(shard.read_bytes())
        data[-9] ^= 1
        shard.write_bytes(bytes(data))
    pages = PagedArchive(FollowedArchive(archive, lambda identity: identity), chain)
    names = sglang_chain(talk(1).tokens, PAGE)
    assert any(pages.page(name) is None for name in names)
    assert not all(name in pages for name in names)


def test_new_generations_are_followed(archive):
    followed = FollowedArchive(archive, lambda identity: identity)
    pages = PagedArchive(followed, chain)
    name = sglang_chain(talk(2).tokens, PAGE)[0]
    assert name not in pages
    pltpack.append(archive, [talk(2)])
    followed.refresh()
    assert name in pages and pages.page(name) is not None


def test_other_tenants_pages_are_not_found(tmp_path):
    pltpack.compress([talk(0, salt="a")], tmp_path / "archive", quality="lossless")
    name = sglang_chain(talk(0).tokens, PAGE)[0]
    followed = FollowedArchive(tmp_path / "archive", lambda identity: identity)
    assert name not in PagedArchive(followed, chain) and name in PagedArchive(followed, chain, "a")


def test_a_spool_keeps_files_whole_and_in_its_folder(tmp_path):
    spool = Spool(tmp_path / "spool")
    assert spool.write("a.bin", b"12", b"34") and spool.write("a.bin", b"other")
    assert spool.read("a.bin", 4) == b"1234" and spool.read("a.bin", 3) is None and spool.read("b.bin", 1) is None
    assert not spool.write("../evil.bin", b"x") and not spool.has("../evil.bin")
    assert spool.names(".bin") == ["a.bin"] and not (tmp_path / "evil.bin").exists()


# SGLang.


class Pool:
    """What a page of SGLang's host pool of keys and values is in its layout ``page_first`` (pool_host/mha.py)."""

    layout, page_size, layer_num, head_num, head_dim = "page_first", PAGE, LAYERS, HEADS, DIM

    def __init__(self, torch, dtype=None):
        self.dtype = dtype or torch.float32
        self.kv_buffer = torch.zeros(2, 4 * PAGE, LAYERS, HEADS, DIM, dtype=self.dtype)

    def get_data_page(self, index, flat=True):
        return self.kv_buffer[:, index : index + PAGE].flatten()

    def set_from_flat_data_page(self, index, page):
        self.kv_buffer[:, index : index + PAGE] = page.reshape(2, PAGE, LAYERS, HEADS, DIM)


def sglang_backend(archive, pool, **extra):
    storage = pytest.importorskip("sglang.srt.mem_cache.hicache_storage")
    factory = pytest.importorskip("sglang.srt.mem_cache.storage.backend_factory").StorageBackendFactory
    extra = {"backend_name": "pltpack", "module_path": "pltpack.serve.sglang", "class_name": "PltpackStorage",
             "archive": str(archive), **extra}  # fmt: skip
    config = storage.HiCacheStorageConfig(0, 1, 0, 1, 0, 1, False, False, True, "org/small", extra_config=extra)
    backend = factory.create_backend("dynamic", config, pool)
    backend.register_mem_pool_host(pool)
    return backend


def test_sglang_loads_pages_into_its_pool(archive):
    torch = pytest.importorskip("torch")
    pool = Pool(torch)
    backend = sglang_backend(archive, pool)
    snapshot = talk(1)
    keys = sglang_chain(snapshot.tokens, PAGE)
    assert backend.batch_exists([*keys, "0" * 64]) == 3
    assert backend.batch_exists_v2(keys).kv_hit_pages == 3
    assert backend.batch_get_v1([*keys, "0" * 64], torch.arange(4 * PAGE)) == [True, True, True, False]
    for layer in range(LAYERS):
        for half, wanted in enumerate(snapshot.layer(layer, 0, 3 * PAGE)):
            np.testing.assert_array_equal(pool.kv_buffer[half, : 3 * PAGE, layer].numpy(), wanted.transpose(1, 0, 2))
    assert not backend.set("1" * 64, pool.get_data_page(0))


def test_sglang_keeps_new_pages_as_its_own_files(archive, tmp_path):
    torch = pytest.importorskip("torch")
    pool, snapshot = Pool(torch), talk(5)
    backend = sglang_backend(archive, pool, spool=str(tmp_path / "spool"))
    for layer in range(LAYERS):
        for half, array in enumerate(snapshot.layer(layer, 0, 3 * PAGE)):
            pool.kv_buffer[half, : 3 * PAGE, layer] = torch.from_numpy(np.ascontiguousarray(array.transpose(1, 0, 2)))
    keys = sglang_chain(snapshot.tokens, PAGE)
    assert backend.batch_set_v1(keys, torch.arange(3 * PAGE)) == [True] * 3
    pool.kv_buffer.zero_()
    assert backend.batch_get_v1(keys, torch.arange(3 * PAGE)) == [True] * 3
    (tmp_path / "spool.tokens.json").write_text(json.dumps(snapshot.tokens.tolist()))
    options = {"page": str(PAGE), "layers": str(LAYERS), "heads": str(HEADS), "dtype": "F32", "layout": "page_first"}
    (found,) = open_dumps(tmp_path / "spool", options=options)
    for layer in range(LAYERS):
        for a, b in zip(found.layer(layer), snapshot.layer(layer, 0, 3 * PAGE), strict=True):
            np.testing.assert_array_equal(a, b)


def test_sglang_refuses_another_dtype(archive):
    torch = pytest.importorskip("torch")
    with pytest.raises(IdentityError, match=r"layers\[0\]\.dtype"):
        sglang_backend(archive, Pool(torch, torch.bfloat16))


# LMCache.


class Backend:
    """The part of LMCache's CPU backend that connectors use: memory for chunks."""

    def __init__(self, config, metadata):
        self.config, self.metadata = config, metadata

    def allocate(self, shapes, dtypes, form):
        import torch
        from lmcache.v1.memory_management import MemoryObjMetadata, TensorMemoryObj

        shape, dtype = shapes[0], dtypes[0]
        size = shape.numel() * dtype.itemsize
        about = MemoryObjMetadata(shape=shape, dtype=dtype, address=0, phy_size=size, ref_count=1, fmt=form,
                                  shapes=list(shapes), dtypes=list(dtypes))  # fmt: skip
        return TensorMemoryObj(torch.zeros(size, dtype=torch.uint8), about, None)


def lmcache_connector(archive, dtype="float32", **extra):
    torch = pytest.importorskip("torch")
    manager = pytest.importorskip("lmcache.v1.storage_backend.connector")
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.metadata import LMCacheMetadata

    config = LMCacheEngineConfig.from_defaults(chunk_size=PAGE)
    config.pre_caching_hash_algorithm = "sha256_cbor"
    config.remote_storage_plugins = ["pltpack"]
    config.extra_config = {
        "remote_storage_plugin.pltpack.module_path": "pltpack.serve.lmcache",
        "remote_storage_plugin.pltpack.class_name": "PltpackRemoteConnector",
        "pltpack.archive": str(archive), **extra,
    }  # fmt: skip
    metadata = LMCacheMetadata("org/small", 1, 1, 0, 0, getattr(torch, dtype), (LAYERS, 2, PAGE, HEADS, DIM),
                               chunk_size=PAGE)  # fmt: skip
    made = manager.ConnectorManager("plugin://pltpack", asyncio.new_event_loop(), Backend(config, metadata), config,
                                    metadata, "pltpack")  # fmt: skip
    adapter = next(adapter for adapter in made.adapters if adapter.can_parse("plugin://pltpack"))
    return adapter.create_connector(made.context), config, metadata


def keys_of(config, metadata, tokens):
    from lmcache.v1.token_database import ChunkedTokenDatabase

    return [key for _, _, key in ChunkedTokenDatabase(config, metadata).process_tokens(tokens=tokens.tolist())]


def chunk_values(memory):
    return memory.tensor.reshape(2, LAYERS, -1, HEADS, DIM).numpy()


def test_lmcache_gets_chunks_of_the_archive(archive):
    connector, config, metadata = lmcache_connector(archive)
    snapshot = talk(1)
    keys = keys_of(config, metadata, snapshot.tokens)
    assert len(keys) >= 3
    for at, key in enumerate(keys[:3]):
        assert connector.exists_sync(key)
        values = chunk_values(asyncio.run(connector.get(key)))
        for layer in range(LAYERS):
            for half, wanted in enumerate(snapshot.layer(layer, at * PAGE, (at + 1) * PAGE)):
                np.testing.assert_array_equal(values[half, layer], wanted.transpose(1, 0, 2))
    (other, *_) = keys_of(config, metadata, talk(7).tokens)
    assert not connector.exists_sync(other) and asyncio.run(connector.get(other)) is None


def test_lmcache_keeps_new_chunks_as_its_own_files(archive, tmp_path):
    connector, config, metadata = lmcache_connector(archive, **{"pltpack.spool": str(tmp_path / "spool")})
    import torch
    from lmcache.v1.memory_management import MemoryFormat

    snapshot = talk(5)
    backend = Backend(config, metadata)
    keys = keys_of(config, metadata, snapshot.tokens)[:3]
    for at, key in enumerate(keys):
        memory = backend.allocate([torch.Size([2, LAYERS, PAGE, HEADS * DIM])], [torch.float32], MemoryFormat.KV_2LTD)
        for layer in range(LAYERS):
            for half, array in enumerate(snapshot.layer(layer, at * PAGE, (at + 1) * PAGE)):
                chunk_values(memory)[half, layer] = array.transpose(1, 0, 2)
        asyncio.run(connector.put(key, memory))
        found = chunk_values(asyncio.run(connector.get(key)))
        np.testing.assert_array_equal(found, chunk_values(memory))
    assert len(asyncio.run(connector.list())) == 3
    (tmp_path / "spool.tokens.json").write_text(json.dumps(snapshot.tokens.tolist()))
    options = {"chunk": str(PAGE), "heads": str(HEADS), "hash": "sha256_cbor"}
    (found,) = open_dumps(tmp_path / "spool", options=options)
    assert found.identity.model == "org/small"
    for layer in range(LAYERS):
        for a, b in zip(found.layer(layer), snapshot.layer(layer, 0, 3 * PAGE), strict=True):
            np.testing.assert_array_equal(a, b)


def test_lmcache_refuses_another_dtype_and_no_archive(archive):
    with pytest.raises(IdentityError, match=r"layers\[0\]\.dtype"):
        lmcache_connector(archive, "bfloat16")
    with pytest.raises(UnsupportedError, match=r"pltpack\.archive"):
        lmcache_connector(archive, **{"pltpack.archive": None})
