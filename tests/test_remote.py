"""Archives in object stores: over HTTP to an S3 server on loopback, with faults in between."""

from __future__ import annotations

import re
import time
from pathlib import Path

import numpy as np
import pytest
from archives import equal_bits, session

import pltpack
from benchmarks import remote as program
from pltpack.archive.settings import Settings
from pltpack.archive.writer import GenerationWriter
from pltpack.errors import ConflictError, EncryptionError, FormatError, StoreError, UnsupportedError
from pltpack.format.manifest import NAME
from pltpack.format.sealing import using_key
from pltpack.store import LocalStore, open_store
from pltpack.store.location import Url, located
from pltpack.store.patience import ChangedError, Patience
from pltpack.store.remote import RemoteStore

pytest.importorskip("s3fs")
pytest.importorskip("moto")
from remote_common import FaultyProxy, at, served


@pytest.fixture(scope="module")
def server():
    with served() as proxy:
        yield proxy


@pytest.fixture
def proxy(server: FaultyProxy):
    server.rate = 0.0
    server.log.clear()
    yield server
    server.rate = 0.0


def ids(seed: int, count: int = 100) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 500, count)


def test_an_archive_lives_at_a_url(proxy: FaultyProxy, tmp_path: Path):
    store = at(proxy.url, "whole")
    shared = ids(1)
    first = [session("a", shared), session("b", [*shared, 3, 4, 5])]
    stats = pltpack.compress(first, store, quality="lossless")
    assert stats["sessions"] == 2 and stats["shared_tokens"] > 0
    later = session("c", [*shared[:64], *ids(2)])
    pltpack.append(store, [later])
    assert pltpack.verify(store, against=[*first, later])["differences"] == []
    with pltpack.open(at(proxy.url, "whole")) as archive:
        for snapshot in (*first, later):
            assert equal_bits(archive.read(snapshot.session), snapshot)
        part = archive.read("c", layers=range(1, 2), tokens=slice(10, 90))
        for x, y in zip(part.layer(0), later.layer(1, 10, 90), strict=True):
            assert np.array_equal(x.view(np.uint16), y.view(np.uint16))
    packed = pltpack.compact(store)
    assert packed["sessions"] == 3 and len(packed["removed"]) >= 4
    files = {name for name, _ in store.objects.listed(5.0)}
    manifest = store.load().manifest
    assert files == {NAME, *(e.file for e in (*manifest.libraries, *manifest.sessions))}
    assert pltpack.gc(store) == []
    pltpack.export_session(store, "c", tmp_path / "c.session")
    assert pltpack.import_session(at(proxy.url, "other"), tmp_path / "c.session") == "c"
    pltpack.import_session(tmp_path / "local", tmp_path / "c.session")
    pltpack.decompress(at(proxy.url, "other"), tmp_path / "out")
    assert equal_bits(next(iter(pltpack.open_dumps(tmp_path / "out"))), later)


def test_the_bytes_are_those_of_a_folder(proxy: FaultyProxy, tmp_path: Path):
    sessions = [session("a", ids(3)), session("b", ids(4))]
    store = at(proxy.url, "bytes")
    pltpack.compress(sessions, store, quality="q4")
    pltpack.compress(sessions, tmp_path / "local", quality="q4")
    local, far = LocalStore(tmp_path / "local").load().manifest, store.load().manifest
    for mine, theirs in zip((*local.libraries, *local.sessions), (*far.libraries, *far.sessions), strict=True):
        assert (mine.bytes, mine.head_sha256, mine.payload_sha256) == (theirs.bytes, theirs.head_sha256,
                                                                        theirs.payload_sha256)  # fmt: skip
        data = store.objects.get(theirs.file, 5.0)[0]
        assert data == (tmp_path / "local" / mine.file).read_bytes()
        (tmp_path / "copy" / theirs.file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "copy" / theirs.file).write_bytes(data)
    (tmp_path / "copy" / NAME).write_bytes(store.objects.get(NAME, 5.0)[0])
    # What was downloaded is an archive like any other.
    pltpack.append(tmp_path / "copy", [session("c", ids(5))])
    assert pltpack.verify(tmp_path / "copy", against=sessions)["differences"] == []


@pytest.fixture
def key():
    pytest.importorskip("cryptography")
    with using_key(bytes(range(32))):
        yield


@pytest.mark.parametrize("encrypt", [False, True])
def test_only_what_is_needed_is_read(proxy: FaultyProxy, key: None, encrypt: bool):
    store = at(proxy.url, f"ranges-{encrypt}")
    long = program.session("long", 20_000, 7)
    pltpack.compress([long], store, quality="lossless", encrypt=encrypt)
    size = store.load().manifest.sessions[0].bytes
    with pltpack.open(at(proxy.url, f"ranges-{encrypt}")) as archive:
        archive.shard("long")
        proxy.log.clear()
        part = archive.read("long", layers=range(1, 2), tokens=slice(9000, 9100))
        assert program.same(part, long, 9000, 9100, range(1, 2))
        spans = [re.fullmatch(r"bytes=(\d+)-(\d+)", span) for _, _, span in proxy.log]
        assert 1 <= len(spans) <= 2 and all(spans)
        assert sum(int(span[2]) - int(span[1]) + 1 for span in spans) < size / 20
        proxy.log.clear()
        whole = archive.read("long")
        assert program.same(whole, long, 0, len(long), range(program.LAYERS))
        # Coalesced: hundreds of units come in a few requests, and no byte twice.
        assert len(proxy.log) < len(archive.shard("long").units) / 10


@pytest.mark.parametrize("encrypt", [False, True])
def test_faults_change_nothing(proxy: FaultyProxy, key: None, encrypt: bool):
    proxy.counts.clear()
    seen = program.under_faults(proxy, 8 if encrypt else 15, np.random.default_rng(5), f"faults-{encrypt}", encrypt)
    assert seen["reads"] > 0 and len(proxy.counts) >= (2 if encrypt else 3)


def test_an_encrypted_archive_tells_the_store_nothing(proxy: FaultyProxy):
    pytest.importorskip("cryptography")
    store, shared = at(proxy.url, "sealed", key_bytes=bytes(range(32))), ids(30)
    sessions = [session("secret-a", shared), session("secret-b", [*shared, *ids(31)], salt="tenant")]
    pltpack.compress(sessions, store, quality="lossless", encrypt=True)
    later = session("secret-c", [*shared, *ids(32)])
    pltpack.append(store, [later])
    assert pltpack.verify(store, against=[*sessions, later])["differences"] == []
    objects = {name: store.objects.get(name, 5.0) for name, _ in store.objects.listed(5.0)}
    for name, (data, _) in objects.items():
        assert not any(word in data + name.encode() for word in (b"secret", b"tenant", b"toy"))
    for wrong, fact in ((None, "none is given"), (bytes(32), "the one given is")):
        with pytest.raises(EncryptionError, match=fact):
            pltpack.open(at(proxy.url, "sealed", key_bytes=wrong))
    pltpack.compact(store)


def test_what_is_altered_in_a_store_is_noticed(key: None):
    store, rng = open_store("memory://toy/altered"), np.random.default_rng(9)
    pltpack.compress([session("a", ids(33))], store, quality="lossless", encrypt=True)
    assert isinstance(store, RemoteStore)
    for name in [name for name, _ in store.objects.listed(5.0)]:
        data, version = store.objects.get(name, 5.0)
        for place in (0, len(data) - 1, *rng.integers(0, len(data), 6).tolist()):
            changed = bytearray(data)
            changed[place] ^= 1 << int(rng.integers(8))
            store.objects.replace(name, bytes(changed), version, 5.0)
            with (
                pytest.raises((FormatError, EncryptionError)),
                pltpack.open("memory://toy/altered") as archive,
            ):
                archive.read("a")
            _, version = store.objects.get(name, 5.0)
        store.objects.replace(name, data, version, 5.0)
    with pltpack.open("memory://toy/altered") as archive:
        assert equal_bits(archive.read("a"), session("a", ids(33)))


def test_two_writers_race(proxy: FaultyProxy):
    assert sum(program.races(proxy.url, 2).values()) == 2
    stores = [at(proxy.url, "race-new") for _ in range(2)]
    with stores[0].creating() as one, stores[1].creating() as two:
        winner = GenerationWriter(one, None, Settings("lossless"), lambda *_: None)
        loser = GenerationWriter(two, None, Settings("lossless"), lambda *_: None)
        winner.add([session("a", ids(8))])
        with pytest.raises(ConflictError, match="another writer"):
            loser.add([session("b", ids(9))])
    with pltpack.open(stores[0]) as archive:
        assert archive.sessions == ["a"]
    with pytest.raises(ConflictError, match="there already"):
        pltpack.compress([session("c", ids(8))], at(proxy.url, "race-new"))


def test_a_commit_whose_answer_is_lost_is_a_commit(proxy: FaultyProxy):
    store = at(proxy.url, "lost")
    pltpack.compress([session("a", ids(10))], store, quality="lossless")
    plain, lost = store.objects.replace, []

    def replace(name: str, data: bytes, version: str | None, timeout: float) -> None:
        plain(name, data, version, timeout)
        if name == NAME and not lost:
            lost.append(name)
            # Before the answer gets lost, another writer builds on this commit and compacts it.
            pltpack.append(at(proxy.url, "lost"), [session("c", ids(12))])
            pltpack.compact(at(proxy.url, "lost"))
            raise ConnectionResetError

    store.objects.replace = replace
    pltpack.append(store, [session("b", ids(11))])
    with pltpack.open(at(proxy.url, "lost")) as archive:
        assert archive.sessions == ["a", "b", "c"]
    pltpack.verify(at(proxy.url, "lost"))


def test_a_timeout_after_a_refused_commit_is_no_second_refusal(proxy: FaultyProxy):
    store = at(proxy.url, "twice")
    pltpack.compress([session("a", ids(14))], store, quality="lossless")
    try:
        store.objects.replace(NAME, b"", "another", 5.0)
    except ChangedError:
        # So busy that the request does not even begin.
        store.objects._fs.loop.call_soon_threadsafe(time.sleep, 1.5)
        with pytest.raises(TimeoutError):
            store.objects.get(NAME, 0.1)
    else:
        pytest.fail("a commit upon another state was done")


def test_a_dead_store_is_an_error_before_its_deadline(proxy: FaultyProxy):
    hasty = Patience(request_s=0.2, deadline_s=1.0, pause_s=0.01)
    pltpack.compress([session("a", ids(13))], at(proxy.url, "dead"), quality="lossless")
    proxy.rate = 1.0
    begin = time.monotonic()
    with pytest.raises(StoreError, match="s3://archives/dead: reading the manifest failed before its deadline"):
        pltpack.open(at(proxy.url, "dead", hasty))
    # Ten times as long as it should take would still be no hang; a busy machine is slow.
    assert time.monotonic() - begin < 20


def test_what_is_damaged_or_missing_is_an_error(proxy: FaultyProxy):
    store = at(proxy.url, "damaged")
    pltpack.compress([session("a", ids(14)), session("b", ids(15))], store, quality="lossless")
    with pytest.raises(FormatError, match="not an archive"):
        pltpack.open(at(proxy.url, "nothing"))
    entries = {entry.session: entry for entry in store.load().manifest.sessions}
    data, version = store.objects.get(entries["a"].file, 5.0)
    changed = bytearray(data)
    changed[len(data) // 2] ^= 1
    store.objects.replace(entries["a"].file, bytes(changed), version, 5.0)
    store.objects.delete(entries["b"].file, 5.0)
    with pltpack.open(store) as archive:
        with pytest.raises(FormatError):
            archive.read("a")
        with pytest.raises(FormatError, match=r"s3://archives/damaged/shards/b.*missing"):
            archive.read("b")


def test_readers_follow_a_compaction(proxy: FaultyProxy):
    store = at(proxy.url, "follow")
    sessions = [session("a", ids(16)), session("b", ids(17))]
    pltpack.compress(sessions[:1], store, quality="lossless")
    pltpack.append(store, sessions[1:])
    with pltpack.open(at(proxy.url, "follow")) as archive:
        pltpack.compact(store)
        for snapshot in sessions:
            assert equal_bits(archive.read(snapshot.session), snapshot)


def test_the_loader_reads_from_a_store(proxy: FaultyProxy):
    store = at(proxy.url, "loader")
    whole = program.session("a", 600, 1)
    pltpack.compress([whole], store, quality="lossless")
    with pltpack.open(store) as archive, archive.loader() as loader:
        layers = list(loader.stream(loader.lookup(whole.tokens)))
        assert len(layers) == program.LAYERS
        for index, layer in enumerate(layers):
            keys, values = whole.layer(index)
            assert np.array_equal(layer.keys, keys[:, :576]) and np.array_equal(layer.values, values[:, :576])


@pytest.mark.parametrize("encrypt", [False, True])
def test_memory_and_files(tmp_path: Path, key: None, encrypt: bool):
    snapshot, url = session("a", ids(20)), f"memory://toy/archive-{encrypt}"
    pltpack.compress([snapshot], url, quality="lossless", encrypt=encrypt)
    pltpack.append(url, [session("b", ids(21))])
    with pltpack.open(url) as archive:
        assert equal_bits(archive.read("a"), snapshot) and archive.sessions == ["a", "b"]
        assert (archive.manifest.seal is not None) == encrypt
    with pytest.raises(ConflictError):
        pltpack.compress([snapshot], url)
    pltpack.compress([snapshot], f"file://{tmp_path}/a%20b", quality="lossless")
    assert (tmp_path / "a b" / NAME).is_file()


def test_where_no_conditional_write_is_known_nothing_is_written(tmp_path: Path):
    url = f"dir::file://{tmp_path}"
    assert isinstance(located("s3://b/k/"), Url) and str(located("s3://b/k/") / "x") == "s3://b/k/x"
    for nothing in ("s3://", "memory:///", "file://"):
        with pytest.raises(UnsupportedError, match="names no archive"):
            located(nothing)
    with pytest.raises(UnsupportedError, match="conditional write"):
        pltpack.compress([session("a", ids(22))], "http://127.0.0.1:9/a")
    with pytest.raises(UnsupportedError):
        open_store(f"nosuch://{url}")
