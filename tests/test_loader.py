"""The streaming loader: look-up, stages, destinations, misses, centroids."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import logging
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import near_common
import numpy as np
import profiles_common
import pytest
from archives import HEADS, IDENTITY, K_DIM, LAYERS, V_DIM, session
from hypothesis import given, settings
from hypothesis import strategies as st
from loader_common import bits, damage, loader_threads, open_files, same

import pltpack
from pltpack.archive import segments
from pltpack.errors import IdentityError, UnsupportedError
from pltpack.serve import Contiguous, Hit, MissError, Paged, layered, plan
from pltpack.serve import stream as stream_module
from pltpack.serve.centroids import Centroids
from pltpack.serve.channel import Channel
from pltpack.serve.pages import LAYOUTS
from pltpack.serve.staged import Reads
from pltpack.snapshot import Identity

RNG = np.random.default_rng(3)
PREFIX = RNG.integers(0, 500, 40).tolist()
TAILS = [RNG.integers(0, 500, size).tolist() for size in (24, 50, 9)]
BF16 = np.dtype(ml_dtypes.bfloat16)


def family():
    out = [session(f"s{i}", PREFIX + tail, noise=i) for i, tail in enumerate(TAILS)]
    return [*out, session("other", PREFIX + TAILS[0] + [7] * 40, salt="tenant", weights=5)]


@pytest.fixture(scope="module", params=["lossless", "q4"])
def path(request, tmp_path_factory):
    out = tmp_path_factory.mktemp("loader") / request.param
    pltpack.compress(family(), out, quality=request.param, block=4)
    return out


@pytest.fixture
def fresh(tmp_path):
    pltpack.compress(family(), tmp_path / "a", quality="lossless", block=4)
    return tmp_path / "a"


# Look-up


def test_the_longest_prefix_is_found_in_whole_blocks(path):
    with pltpack.open(path) as archive:
        loader = archive.loader()
        assert loader.lookup(PREFIX + TAILS[1]) == Hit("s1", 88, 4, 1)
        assert loader.lookup(PREFIX + TAILS[1][:13] + [600]).tokens == 52
        assert loader.lookup(PREFIX + TAILS[2] + [600] * 9) == Hit("s2", 48, 4, 1)
        assert loader.lookup(PREFIX[:39]).tokens == 36
        hit = loader.lookup([999, *PREFIX])
        assert not hit and hit.tokens == 0
        assert not loader.lookup([])
        with pytest.raises(UnsupportedError, match="nothing"):
            loader.stream(hit)


def test_another_tenants_sessions_are_not_found(path):
    prompt = PREFIX + TAILS[0] + [7] * 40
    with pltpack.open(path) as archive:
        assert archive.loader().lookup(prompt).tokens == 64
        mine = archive.loader(identity=Identity(salt="tenant"))
        assert mine.lookup(prompt) == Hit("other", 104, 4, 1)
        assert archive.loader(identity=Identity(salt="nobody")).lookup(prompt).tokens == 0
    with pltpack.open(path, identity=Identity(salt="tenant")) as archive:
        loader = archive.loader()
        assert same(loader.load(loader.lookup(prompt)), archive.snapshot("other"), 104)


@pytest.mark.parametrize(("field", "value"), [("model", "other"), ("weights", "sha256:0"), ("keys", "unrotated")])
def test_an_identity_that_differs_is_refused_by_its_field(path, field, value):
    with pltpack.open(path) as archive:
        with pytest.raises(IdentityError, match=field):
            archive.loader(identity=dataclasses.replace(IDENTITY, **{field: value}))
        if field == "weights":
            archive.loader(identity=Identity(weights=value), accept_unknown=["weights"])


@settings(max_examples=40)
@given(st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=6), st.lists(st.integers(0, 2), max_size=14))
def test_look_up_is_what_comparing_every_text_says(texts, prompt):
    class Text:
        def __init__(self, tokens):
            self.tokens = np.array(tokens, np.int32)

    from pltpack.serve.prefixes import PrefixIndex

    index = PrefixIndex({str(i): Text(text) for i, text in enumerate(texts)}, 2, 1)

    def shared(text):
        count = 0
        while count < min(len(text), len(prompt)) and text[count] == prompt[count]:
            count += 1
        return count - count % 2

    hit = index.lookup(prompt)
    assert hit.tokens == max(map(shared, texts), default=0)
    assert not hit or shared(texts[int(hit.session)]) == hit.tokens
    if hit:
        assert index.without(hit.session).lookup(prompt).tokens <= hit.tokens


# Values


@pytest.mark.parametrize("depth", [1, 3, 7])
@pytest.mark.parametrize("mapped", [False, True])
def test_loads_are_what_the_archive_reads(path, depth, mapped):
    with pltpack.open(path) as archive:
        loader = archive.loader(depth=depth, workers=2, mapped=mapped)
        for tokens in (PREFIX + TAILS[0], PREFIX + TAILS[1], PREFIX[:21]):
            hit = loader.lookup(tokens)
            assert same(loader.load(hit), archive.snapshot(hit.session), hit.tokens)
            part = hit.first(hit.tokens - 3)
            assert same(loader.load(part), archive.snapshot(hit.session), part.tokens)
        assert loader.misses == {}
    assert not loader_threads()


def test_predicted_and_grouped_units_load_as_the_archive_reads_them(tmp_path):
    profile = profiles_common.save_profile(tmp_path / "p.safetensors", near_common.IDENTITY)
    tiers = {"lossless": {"quality": "lossless"}, "q3": {"quality": "q3"}, "transform": {"profile": profile}}
    for name, tier in tiers.items():
        pltpack.compress(near_common.family(), tmp_path / name, **tier)
        with pltpack.open(tmp_path / name) as archive:
            assert any(len(archive.shard(s).predicted_runs) for s in archive.sessions), name
            loader = archive.loader()
            for session_name in archive.sessions:
                whole = archive.snapshot(session_name)
                hit = loader.lookup(whole.tokens)
                assert hit.tokens == len(whole) - len(whole) % 32
                assert same(loader.load(hit), archive.read(session_name), hit.tokens), (name, session_name)


def test_a_loader_made_ready_has_loaded_units_of_every_kind(tmp_path):
    pltpack.compress(near_common.family(), tmp_path / "a", quality="lossless")
    with pltpack.open(tmp_path / "a") as archive, archive.loader() as loader:
        loaded: list[Hit] = []
        whole, loader.load = loader.load, lambda hit: loaded.append(hit) or whole(hit)
        loader.prepare()
        shards = {name: archive.shard(name) for name in archive.sessions}
        kinds = {flags for shard in shards.values() for flags in shard.units["flags"]}
        held = [shards[hit.session] for hit in loaded if hit.session in shards]
        assert {flags for shard in held for flags in shard.units["flags"]} == kinds
        # What the mapping only predicts is decoded by other code than the rest.
        assert any(shard.predicts(0, hit.tokens) for hit in loaded if (shard := shards.get(hit.session)) is not None)
        assert len(loaded) < len(shards) + len(kinds)


def _spans(stream, stage):
    return {span.label for span in stream.timeline.spans if span.stage == stage}


@pytest.mark.parametrize("finite", [True, False])
def test_layers_of_predicted_units_come_one_after_the_other(tmp_path, finite, monkeypatch):
    """Their references lie in the same layers, also where a token of one layer is not finite."""
    family = near_common.family()
    if not finite:
        # In one layer and one head: no layer of these tokens may be predicted.
        for index, one in enumerate(family):
            arrays = [tuple(x.copy() for x in one.layer(layer)) for layer in range(2)]
            arrays[1][1][0, ::37, 3], arrays[1][0][0, 20::53, 5] = np.nan, np.inf
            family[index] = pltpack.Snapshot.from_arrays(one.session, one.tokens, arrays, one.identity)
    profile = profiles_common.save_profile(tmp_path / "p.safetensors", near_common.IDENTITY)
    pltpack.compress(family, tmp_path / "a", profile=profile)
    wholes, whole = [], layered.reference_values
    monkeypatch.setattr(layered, "reference_values", lambda *a, **k: wholes.append(1) or whole(*a, **k))
    with pltpack.open(tmp_path / "a") as archive:
        snapshots = {name: archive.read(name) for name in archive.sessions}
        assert sum(bool(archive.shard(name).units["flags"].any()) for name in snapshots) >= 2
        for memory, workers in ((0, 1), (1 << 30, 3), (1 << 30, 1)):
            loader = archive.loader(workers=workers, memory=memory)
            for name, snapshot in snapshots.items():
                hit = loader.lookup(snapshot.tokens)
                for part in (hit, hit.first(hit.tokens - 3), hit.first(50)):
                    with loader.stream(part) as stream:
                        assert same(list(stream), snapshot, part.tokens), name
                        assert {"0", "1"} <= _spans(stream, "scatter")
            loader.close()
    assert (len(wholes) > 0) == (not finite)


@pytest.mark.parametrize("memory", [0, 1 << 30])
@pytest.mark.parametrize("workers", [1, 3])
def test_layers_of_one_unit_come_one_after_the_other(tmp_path, memory, workers):
    profile = profiles_common.save_profile(tmp_path / "p.safetensors", group=3)
    ids = np.random.default_rng(2).integers(0, 500, 90)
    sessions = [profiles_common.session("a", ids), profiles_common.session("b", [*ids[:70], *ids[:50]])]
    pltpack.compress(sessions, tmp_path / "a", profile=profile, block=8, near=False)
    with pltpack.open(tmp_path / "a") as archive:
        assert len(archive.shard("b").exact_runs) and archive.shard("a").units["layer_count"].max() == 3
        loader = archive.loader(depth=2, workers=workers, memory=memory)
        for name in ("a", "b", "a"):
            tokens = archive.snapshot(name).tokens
            hit = loader.lookup(tokens)
            for part in (hit, hit.first(hit.tokens - 3), hit.first(20)):
                with loader.stream(part) as stream:
                    assert same(list(stream), archive.read(name), part.tokens)
                    assert {"0", "1", "2"} <= _spans(stream, "scatter")
        assert (loader.centroids["hits"] > 0) == (memory > 0)
        damage(archive.shard("a"), 0)
        with pytest.raises(MissError, match="bad unit"):
            loader.load(loader.lookup(archive.snapshot("a").tokens))
    assert not loader_threads()


def test_all_workers_decode_the_layers_of_a_step(tmp_path, monkeypatch):
    profile = profiles_common.save_profile(tmp_path / "p.safetensors", group=3)
    pltpack.compress([profiles_common.session("a", np.arange(40))], tmp_path / "a", profile=profile, block=8)
    # The third layer comes alone.
    together, finish = threading.Barrier(2, timeout=20), layered.LayeredStep.finish

    def meet(step, layers, out):
        if layers.start < 2:
            together.wait()
        finish(step, layers, out)

    monkeypatch.setattr(layered.LayeredStep, "finish", meet)
    with pltpack.open(tmp_path / "a") as archive, archive.loader(workers=2) as loader:
        assert same(loader.load(loader.lookup(np.arange(40))), archive.read("a"), 40)


def test_a_begun_unit_gives_its_layers_in_any_order(tmp_path):
    codec = profiles_common.started(profiles_common.random_profile(group=3), step=0.5)
    arrays = profiles_common.values_of(np.arange(70))
    unit = profiles_common.unit_of(range(3), 70)
    payload = memoryview(codec.prepare(profiles_common.session("s", np.arange(70))).encode_span(unit, arrays))
    whole, apart = profiles_common.empty_like(arrays), profiles_common.empty_like(arrays)
    codec.decode_span(payload, unit, whole)
    begun = codec.begin_span(payload, unit)
    for layers in (range(2, 3), range(0, 2), range(1, 2)):
        begun.finish(layers, apart[layers.start : layers.stop])
    for first, second in zip(whole, apart, strict=True):
        assert all(np.array_equal(bits(a), bits(b)) for a, b in zip(first, second, strict=True))


def test_long_layers_are_cut(path, monkeypatch):
    monkeypatch.setattr("pltpack.serve.plan.PIECE_TOKENS", 10)
    with pltpack.open(path) as archive:
        loader = archive.loader(depth=2, workers=2)
        hit = loader.lookup(PREFIX + TAILS[1])
        with loader.stream(hit) as stream:
            assert same(list(stream), archive.snapshot("s1"), 88)
            assert sum(span.stage == "decode" for span in stream.timeline.spans) == 9 * LAYERS


# Order, depth, time


def test_layers_come_in_order_and_no_more_than_depth_are_under_way(path):
    with pltpack.open(path) as archive:
        loader = archive.loader(depth=1)
        with loader.stream(loader.lookup(PREFIX)) as stream:
            deadline = time.monotonic() + 10
            while "scatter" not in stream.timeline.busy() and time.monotonic() < deadline:
                time.sleep(0.005)
            time.sleep(0.05)
            assert {span.label for span in stream.timeline.spans} == {"0"}
            assert next(stream).layer == 0
            assert next(stream).layer == 1
            stages = [(span.stage, span.label) for span in stream.timeline.spans]
            assert stages.index(("read", "1")) > stages.index(("scatter", "0"))
            assert [layer.layer for layer in stream] == [2]


def test_deeper_loads_read_ahead_of_a_slow_consumer(path):
    with pltpack.open(path) as archive:
        loader = archive.loader(depth=3)
        with loader.stream(loader.lookup(PREFIX)) as stream:
            deadline = time.monotonic() + 10
            while not stream.complete and time.monotonic() < deadline:
                time.sleep(0.005)
            assert stream.complete
            assert stream.wait(2).layer == 2
            assert stream.wait(0).layer == 0


def test_a_load_that_takes_too_long_is_a_miss(path, caplog):
    with pltpack.open(path) as archive:
        loader = archive.loader(read_bytes_per_second=1000)
        hit = loader.lookup(PREFIX)
        begin = time.monotonic()
        with pytest.raises(MissError) as caught:
            loader.load(hit, timeout=0.2)
        assert caught.value.reason == "timeout"
        assert 0.15 < time.monotonic() - begin < 5
        assert loader.misses == {"timeout": 1}
        assert loader.lookup(PREFIX) == hit
        assert not loader_threads()
    assert len(caplog.records) == 1 and "timeout" in caplog.text


def test_a_read_that_hangs_does_not_hold_its_caller(path, monkeypatch):
    hang = threading.Event()
    monkeypatch.setattr(Reads, "read", lambda *_: hang.wait(30))
    try:
        with pltpack.open(path) as archive:
            loader = archive.loader(timeout=0.1)
            begin = time.monotonic()
            with pytest.raises(MissError, match="timeout"):
                loader.load(loader.lookup(PREFIX))
            assert time.monotonic() - begin < 5
            hang.set()
    finally:
        hang.set()
    deadline = time.monotonic() + 5
    while loader_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not loader_threads()


def test_loads_side_by_side(path):
    with pltpack.open(path) as archive:
        loader = archive.loader(depth=2, memory=1 << 16)
        prompts = [PREFIX + tail for tail in TAILS]

        def work(index: int) -> bool:
            hit = loader.lookup(prompts[index % 3])
            return same(loader.load(hit), archive.snapshot(hit.session), hit.tokens)

        with ThreadPoolExecutor(6) as pool:
            assert all(pool.map(work, range(60)))
        assert loader.misses == {}
    assert not loader_threads()


def test_cancelling_wakes_who_waits(path):
    with pltpack.open(path) as archive:
        loader = archive.loader(read_bytes_per_second=1000)
        stream = loader.stream(loader.lookup(PREFIX))
        threading.Timer(0.1, stream.cancel).start()
        with pytest.raises(MissError, match="cancelled"):
            stream.wait(2)
        stream.close()
        with pytest.raises(MissError):
            next(stream)
        assert loader.misses == {"cancelled": 1}
        assert not loader_threads()


def test_closing_an_archive_ends_its_loads(path):
    archive = pltpack.open(path)
    loader = archive.loader(read_bytes_per_second=1000)
    stream = loader.stream(loader.lookup(PREFIX))
    archive.close()
    assert not loader_threads()
    with pytest.raises(MissError):
        next(stream)
    with pytest.raises(UnsupportedError, match="closed"):
        loader.lookup(PREFIX)


def test_reading_is_as_slow_as_told(path):
    with pltpack.open(path) as archive:
        size = sum(int(archive.shard("s1").units["length"].sum()) for _ in "1")
        loader = archive.loader(read_bytes_per_second=size / 0.2)
        begin = time.perf_counter()
        loader.load(loader.lookup(PREFIX + TAILS[1]))
        assert time.perf_counter() - begin >= 0.19


# Destinations


def test_contiguous_arrays_of_the_stored_dtype_or_wider(path):
    torch = pytest.importorskip("torch")
    with pltpack.open(path) as archive:
        loader = archive.loader()
        hit = loader.lookup(PREFIX + TAILS[1])
        whole = [archive.snapshot("s1").layer(i, 0, hit.tokens) for i in range(LAYERS)]
        for make in (
            lambda dim: np.zeros((LAYERS, HEADS, 100, dim), BF16),
            lambda dim: np.zeros((LAYERS, HEADS, 100, dim), np.float32),
            lambda dim: torch.zeros(LAYERS, HEADS, 100, dim, dtype=torch.bfloat16),
            lambda dim: torch.zeros(LAYERS, HEADS, 100, dim),
        ):
            keys, values = make(K_DIM), make(V_DIM)
            for layer, k, v in loader.load(hit, (keys, values)):
                for mine, theirs in ((k, whole[layer][0]), (v, whole[layer][1])):
                    got = mine.float().numpy() if isinstance(mine, torch.Tensor) else mine.astype(np.float32)
                    assert np.array_equal(got, theirs.astype(np.float32))
            assert not np.asarray(keys[0, 0, hit.tokens :].sum().item())
        per_layer = [np.zeros((HEADS, 88, K_DIM), BF16) for _ in range(LAYERS)]
        loader.load(hit, Contiguous(per_layer, np.zeros((LAYERS, HEADS, 88, V_DIM), BF16)))
        assert np.array_equal(bits(per_layer[1]), bits(whole[1][0]))


@pytest.mark.parametrize(
    ("keys", "values", "fact"),
    [
        (np.zeros((LAYERS, HEADS, 10, K_DIM), BF16), np.zeros((LAYERS, HEADS, 100, V_DIM), BF16), "40 or more"),
        (np.zeros((2, HEADS, 99, K_DIM), BF16), np.zeros((LAYERS, HEADS, 99, V_DIM), BF16), "2 layers"),
        (np.zeros((LAYERS, HEADS, 99, K_DIM), np.float16), np.zeros((LAYERS, HEADS, 99, V_DIM), BF16), "exactly"),
        (np.zeros((LAYERS, HEADS, 99, 5), BF16), np.zeros((LAYERS, HEADS, 99, V_DIM), BF16), "99, 5"),
    ],
)
def test_destinations_that_do_not_fit_are_refused_before_anything_is_read(path, keys, values, fact):
    with pltpack.open(path) as archive:
        loader = archive.loader()
        with pytest.raises(UnsupportedError, match=fact):
            loader.load(loader.lookup(PREFIX), (keys, values))
        assert loader.misses == {}
        assert not loader_threads()


def _pool(axes: str, dim: int, blocks: int, size: int, rng) -> np.ndarray:
    lengths = {"2": 2, "L": LAYERS, "B": blocks, "N": size, "S": blocks * size + 3, "H": HEADS, "D": dim, "C": 2 * dim}
    words = rng.integers(0, 1 << 15, [lengths[axis] for axis in axes]).astype(np.uint16)
    return words.view(BF16)


def _at(arrays, axes: str, layer: int, half: int, block: int, inside: int, size: int, dim: int) -> np.ndarray:
    """Where a token's heads ``[H, D]`` are, by the layout's letters alone."""
    array = arrays if "L" in axes else arrays[layer]
    if "2" not in axes and "C" not in axes:
        array = array[half]
    index = {"2": half, "L": layer, "B": block, "N": inside, "S": block * size + inside}
    index["C"] = slice(half * dim, (half + 1) * dim)
    out = array[tuple(index.get(axis, slice(None)) for axis in axes)]
    kept = [axis for axis in axes if axis in "HDC"]
    return out if kept[0] == "H" else out.T


@pytest.fixture(scope="module")
def square(tmp_path_factory):
    """An archive whose keys and values have one width, as paged layouts in one array need."""
    rng = np.random.default_rng(0)
    layers = [tuple(rng.standard_normal((HEADS, 50, 8)).astype(BF16) for _ in "kv") for _ in range(LAYERS)]
    out = tmp_path_factory.mktemp("square") / "a"
    snapshot = pltpack.Snapshot.from_arrays("s", np.arange(50), layers, Identity(model="toy"))
    pltpack.compress([snapshot], out, quality="lossless", block=8)
    return out


@pytest.mark.parametrize("layout", [*LAYOUTS, "LBHNC", "2LBNHD"])
def test_pages_get_the_blocks_of_the_table_and_no_others(square, layout):
    axes, size, dim = LAYOUTS.get(layout, layout), 4, 8
    rng = np.random.default_rng(1)
    apart = "2" not in axes and "C" not in axes

    def pool():
        return tuple(_pool(axes, dim, 20, size, rng) for _ in "kv") if apart else _pool(axes, dim, 20, size, rng)

    arrays = pool() if "L" in axes else [pool() for _ in range(LAYERS)]
    table = rng.permutation(20)[:12]
    flat = [arrays] if "L" in axes else list(arrays)
    before = [np.array(a) for entry in flat for a in (entry if apart else [entry])]
    with pltpack.open(square) as archive:
        loader = archive.loader()
        hit = loader.lookup(np.arange(47))
        assert hit.tokens == 40
        pages = Paged(arrays, table, layout, size)
        assert [layer.layer for layer in loader.stream(hit, into=pages)] == list(range(LAYERS))
        assert pages.touched() == tuple(sorted(table[:10]))
        snapshot = archive.read("s")
    after = [a for entry in flat for a in (entry if apart else [entry])]
    old = iter(before)
    rebuilt = [tuple(next(old) for _ in entry) if apart else next(old) for entry in flat]
    expected = rebuilt[0] if "L" in axes else rebuilt
    for layer in range(LAYERS):
        for half, values in enumerate(snapshot.layer(layer, 0, 40)):
            for token in range(40):
                block, inside = int(table[token // size]), token % size
                _at(expected, axes, layer, half, block, inside, size, dim)[...] = values[:, token]
    assert all(np.array_equal(bits(a), bits(b)) for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize(
    ("table", "layout", "size", "fact"),
    [
        ([0, 1, 1], "vllm", 16, "twice"), ([0, 1], "vllm", 16, "32 of 40"), ([0, 1, 99], "vllm", 16, "outside 0:5"),
        ([0, -1, 2], "vllm", 16, "outside"), ([0, 1, 2], "vllm", 8, "24 of 40"), (range(5), "vllm", 8, "is .16, 2, 8."),
        ([0, 1, 2], "BHN", 16, "not known"), ([0, 1, 2], "vllm-flash", 16, "axes"),
    ],
)  # fmt: skip
def test_block_tables_that_do_not_fit_are_refused(square, table, layout, size, fact):
    arrays = [np.zeros((5, HEADS, 16, 16), BF16) for _ in range(LAYERS)]
    with pltpack.open(square) as archive:
        loader = archive.loader()
        with pytest.raises(UnsupportedError, match=fact):
            loader.load(loader.lookup(np.arange(47)), Paged(arrays, list(table), layout, size))
    assert not any(array.any() for array in arrays)


def test_reading_overlaps_with_decoding_from_depth_two_on(square, monkeypatch):
    real = stream_module.decode_layers

    def slow(*arguments):
        time.sleep(0.04)
        return real(*arguments)

    monkeypatch.setattr(stream_module, "decode_layers", slow)
    with pltpack.open(square) as archive:
        size = int(archive.shard("s").units["length"].sum())
        seconds = {}
        for depth in (1, 3):
            loader = archive.loader(depth=depth, read_bytes_per_second=size / (0.04 * LAYERS), memory=0)
            hit, times = loader.lookup(np.arange(50)), []
            for _ in range(3):
                begin = time.perf_counter()
                loader.load(hit)
                times.append(time.perf_counter() - begin)
            seconds[depth] = min(times)
    # Three times 80 ms, against 40 ms and three times 40 ms.
    assert seconds[1] > 1.3 * seconds[3]


# Misses


def test_a_bad_unit_is_one_logged_miss_and_live_blocks_stay(square, tmp_path, caplog):
    import shutil

    shutil.copytree(square, tmp_path / "a")
    rng = np.random.default_rng(1)
    pools = [_pool("BHNC", 8, 20, 4, rng) for _ in range(LAYERS)]
    before = [pool.copy() for pool in pools]
    with pltpack.open(tmp_path / "a") as archive:
        last = len(archive.shard("s").units) - 1
        file = damage(archive.shard("s"), last)
        loader = archive.loader()
        hit = loader.lookup(np.arange(50))
        table = list(range(3, 15))
        with caplog.at_level(logging.INFO), pytest.raises(MissError) as caught:
            loader.load(hit, Paged(pools, table, "vllm", 4))
        miss = caught.value
        assert (miss.session, miss.reason) == ("s", "bad unit")
        assert str(file) in str(miss) and "checksum" in str(miss)
        assert set(miss.blocks) <= set(table)
        for pool, old in zip(pools, before, strict=True):
            changed = np.flatnonzero((bits(pool) != bits(old)).any(axis=(1, 2, 3)))
            assert set(changed.tolist()) <= set(miss.blocks)
        # The damaged layer was not written at all.
        assert np.array_equal(bits(pools[-1]), bits(before[-1]))
        assert loader.misses == {"bad unit": 1}
        assert len([r for r in caplog.records if r.name == "pltpack.serve"]) == 1
        # One bad file must not keep requests busy for ever.
        assert not loader.lookup(np.arange(50))
    assert not loader_threads()


def test_after_a_miss_the_next_best_session_is_offered(fresh):
    with pltpack.open(fresh) as archive:
        damage(archive.shard("s1"), 0)
        loader = archive.loader()
        hit = loader.lookup(PREFIX + TAILS[1])
        assert hit.session == "s1"
        with pytest.raises(MissError):
            loader.load(hit)
        again = loader.lookup(PREFIX + TAILS[1])
        assert again.session != "s1" and again.tokens == 40
        assert same(loader.load(again), archive.snapshot(again.session), 40)


def test_missing_and_shortened_files_are_misses(fresh):
    with pltpack.open(fresh) as archive:
        shard = archive.shard("s1")
        with open(shard.container.path, "r+b") as file:
            file.truncate(shard.container._payload_at + 10)
        archive.shard("s0").container.path.unlink()
        loader = archive.loader()
        with pytest.raises(MissError) as caught:
            loader.load(loader.lookup(PREFIX + TAILS[1]))
        assert caught.value.reason == "bad unit"
    with pltpack.open(fresh) as archive:
        loader = archive.loader()
        assert loader.lookup(PREFIX + TAILS[0]).tokens == 40
        assert loader.misses == {"missing file": 1, "bad shard": 1}


def test_no_memory_or_a_fault_of_ours_is_a_miss_too(path, monkeypatch, caplog):
    with pltpack.open(path) as archive:
        loader = archive.loader()
        hit = loader.lookup(PREFIX)
        arrays = np.zeros((LAYERS, HEADS, 40, K_DIM), np.float32), np.zeros((LAYERS, HEADS, 40, V_DIM), np.float32)
        for error, reason in ((MemoryError, "out of memory"), (ZeroDivisionError, "error"), (OSError, "read error")):

            def fail(*_, error=error):
                raise error("no")

            with monkeypatch.context() as patch:
                patch.setattr(stream_module, "decode_layers", fail)
                with pytest.raises(MissError) as caught:
                    loader.load(hit, arrays)
            assert caught.value.reason == reason
            assert not arrays[0].any()
        assert loader.misses == {"out of memory": 1, "error": 1, "read error": 1}
        assert loader.lookup(PREFIX) == hit
        assert same(loader.load(hit), archive.snapshot(hit.session), 40)


def test_a_profile_that_is_missing_is_a_miss(tmp_path):
    profile = profiles_common.save_profile(tmp_path / "p.safetensors", group=3)
    sessions = [profiles_common.session("a", np.arange(64))]
    pltpack.compress(sessions, tmp_path / "a", external_profile=profile)
    profile.unlink()
    with pltpack.open(tmp_path / "a") as archive:
        loader = archive.loader()
        with pytest.raises(MissError) as caught:
            loader.load(loader.lookup(np.arange(64)))
        assert caught.value.reason == "missing profile"
        assert not loader.lookup(np.arange(64))


def test_hits_of_another_generation_and_threads_that_do_not_start_are_misses(path, monkeypatch):
    with pltpack.open(path) as archive:
        loader = archive.loader()
        hit = loader.lookup(PREFIX)
        for wrong in (dataclasses.replace(hit, generation=9), dataclasses.replace(hit, session="nobody")):
            with pytest.raises(MissError) as caught:
                loader.stream(wrong)
            assert caught.value.reason == "stale"

        def refuse(thread):
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            stream = loader.stream(hit)
        with pytest.raises(MissError, match="start new thread"):
            next(stream)
        stream.close()
        assert same(loader.load(hit), archive.snapshot(hit.session), 40)


def test_loads_go_on_where_the_archive_was_compacted(fresh):
    with pltpack.open(fresh) as archive:
        loader = archive.loader()
        hit = loader.lookup(PREFIX + TAILS[1])
        pltpack.append(fresh, [session("late", PREFIX + [3] * 30)])
        pltpack.compact(fresh)
        pltpack.gc(fresh)
        # Files that are open stay readable.
        assert same(loader.load(hit), archive.snapshot("s1"), 88)
    with pltpack.open(fresh) as archive:
        assert archive.loader().lookup(PREFIX + [3] * 30).session == "late"


def test_a_miss_by_a_newer_generation_is_no_reason_to_leave_a_session_out(fresh, monkeypatch):
    monkeypatch.setattr("pltpack.archive.reader.MAX_OPEN", 0)
    with pltpack.open(fresh) as archive:
        loader = archive.loader()
        hit = loader.lookup(PREFIX + TAILS[1])
        pltpack.append(fresh, [session("late", PREFIX + [3] * 30)])
        pltpack.compact(fresh)
        pltpack.gc(fresh)
        with pytest.raises(MissError, match="missing file"):
            loader.load(hit)
        again = loader.lookup(PREFIX + TAILS[1])
        assert again.generation > hit.generation and again.tokens == 88
        assert same(loader.load(again), archive.snapshot("s1"), 88)


def test_a_thousand_loads_leave_nothing_behind(fresh):
    with pltpack.open(fresh) as archive:
        loader = archive.loader(depth=2)
        hit = loader.lookup(PREFIX + TAILS[0])
        pages = [np.zeros((30, HEADS, 4, K_DIM + V_DIM), BF16) for _ in range(LAYERS)]

        def cycle(index: int) -> None:
            kind = index % 5
            if kind == 0:
                loader.load(hit)
            elif kind == 1:
                loader.load(hit, Paged(pages, range(20), "vllm", 4))
            elif kind == 2:
                next(loader.stream(hit))
            elif kind == 3:
                with loader.stream(hit) as stream:
                    stream.cancel()
            else:
                with pytest.raises(MissError):
                    loader.load(hit, timeout=0)

        logging.getLogger("pltpack.serve").setLevel(logging.CRITICAL)
        try:
            for index in range(100):
                cycle(index)
            gc.collect()
            files, threads = open_files(), threading.active_count()
            tracemalloc.start()
            before = tracemalloc.get_traced_memory()[0]
            for index in range(1000):
                cycle(index)
            gc.collect()
            grown = tracemalloc.get_traced_memory()[0] - before
            tracemalloc.stop()
        finally:
            logging.getLogger("pltpack.serve").setLevel(logging.NOTSET)
        deadline = time.monotonic() + 5
        while loader_threads() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert open_files() <= files
        assert threading.active_count() <= threads
        assert grown < 200_000
        assert len(loader._running) <= 1


# Centroids


class _Record(dict):
    pass


class _Segment:
    def __init__(self, name: str) -> None:
        self.entry = type("Entry", (), {"head_sha256": name})
        self.decoded = self.read = 0

    def checked_payload(self, record):
        self.read += 1
        return bytes([record["node"]]) * record["length"]

    def bytes_with(self, record):
        return record["size"]

    def decode_span(self, record, payload):
        self.decoded += 1
        size = record["size"]
        assert len(payload) == record["length"]
        return [(np.full((1, size, 1), payload[0], np.uint8), np.zeros((1, 0, 1), np.uint8))]


def _record(node: int, offset: int = 0, size: int = 10, length: int = 9) -> _Record:
    return _Record(node=node, offset=offset, size=size, length=length)


def test_centroids_are_freed_oldest_first_and_pinned_ones_never():
    kept, segment = Centroids(30), _Segment("a")
    for node in (0, 1, 2):
        kept.get(segment, _record(node))
    kept.get(segment, _record(0))
    assert segment.decoded == 3
    kept.get(segment, _record(3))
    assert [kept.holds(segment, _record(node)) for node in range(4)] == [True, False, True, True]
    kept.pin([("a", 2)])
    for node in (4, 5, 6, 7):
        kept.get(segment, _record(node))
    assert [kept.holds(segment, _record(node)) for node in range(8)] == [False, False, True, *[False] * 2, *[True] * 3]
    assert kept.stats()["bytes"] == 40 and kept.stats()["pinned"] == 1
    kept.unpin([("a", 2)])
    assert kept.stats()["bytes"] <= 30
    assert not kept.holds(segment, _record(2)) or kept.stats()["bytes"] <= 30
    kept.get(segment, _record(9, size=31, length=31))
    assert not kept.holds(segment, _record(9))
    assert kept.get(segment, _record(7))[0][0][0, 0, 0] == 7


def test_centroids_that_must_go_stay_encoded_for_another_round():
    kept, segment = Centroids(30), _Segment("a")
    small = [_record(node, length=2) for node in range(9)]
    for record in small[:3]:
        kept.get(segment, record)
    # 24 of 30 bytes are two centroids with their payloads; the third one's made the first a payload.
    assert [kept.find(segment, record) is None for record in small[:3]] == [True, False, False]
    assert all(kept.holds(segment, record) for record in small[:3])
    assert (kept.stats()["bytes"], kept.stats()["encoded_bytes"], kept.stats()["evicted"]) == (26, 6, 0)
    assert kept.get(segment, small[0])[0][0][0, 0, 0] == 0
    assert (segment.decoded, segment.read, kept.stats()["encoded_hits"]) == (4, 3, 1)
    # Nobody asks for the others while many come by: they go after all.
    for record in small[3:]:
        kept.get(segment, record)
    assert not any(kept.holds(segment, record) for record in small[1:3]) and kept.stats()["evicted"] > 0
    # What is too large decoded is kept encoded, and a pinned one loses neither.
    kept.pin([("a", 20)])
    for record in (_record(20, size=31, length=2), _record(21, size=31, length=2), *small):
        kept.get(segment, record)
    assert kept.find(segment, _record(20)) is not None
    read, large = segment.read, _record(22, size=31, length=2)
    for _ in range(2):
        assert kept.get(segment, large)[0][0].shape[1] == 31 and segment.read == read + 1


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("gpu"), st.integers(0, 4), st.integers(0, 2))),
    st.integers(0, 60),
    st.sampled_from([2, 4, 12]),
)
def test_centroids_keep_to_their_budget(steps, budget, length):
    kept, segment, pins = Centroids(budget), _Segment("a"), []
    for what, node, unit in steps:
        if what == "g":
            assert kept.get(segment, _record(node, unit, length=length))[0][0][0, 0, 0] == node
        elif what == "p":
            kept.pin([("a", node)])
            pins.append(node)
        elif node in pins:
            kept.unpin([("a", node)])
            pins.remove(node)
        held = {(n, u): unit for (_, n), units in kept._units.items() for u, unit in units.items()}
        sizes = {place: 10 * (unit.values is not None) + length * (unit.encoded is not None)
                 for place, unit in held.items()}  # fmt: skip
        assert all(sizes.values()) and sum(size for (n, _), size in sizes.items() if n not in pins) <= budget
        assert kept.stats()["bytes"] == sum(sizes.values())


def test_shared_prefixes_are_decoded_once(path):
    with pltpack.open(path) as archive:
        loader = archive.loader(memory=1 << 20)
        assert loader.centroids["budget"] == int(0.8 * (1 << 20))
        for index in (0, 1):
            hit = loader.lookup(PREFIX + TAILS[index])
            assert same(loader.load(hit), archive.snapshot(hit.session), hit.tokens)
        first = loader.centroids
        assert first["decoded"] > 0 and first["hits"] >= first["decoded"]
        loader.load(loader.lookup(PREFIX + TAILS[0]))
        assert loader.centroids["decoded"] == first["decoded"]
        loader.pin(hit)
        assert loader.centroids["pinned"] > 0
        loader.unpin(hit)
        assert loader.centroids["pinned"] == 0
        nothing = archive.loader(memory=0)
        assert same(nothing.load(hit), archive.snapshot(hit.session), hit.tokens)
        assert nothing.centroids["bytes"] == 0


def test_library_paths_are_found_without_their_sessions(fresh):
    with pltpack.open(fresh) as archive:
        whole = archive.read("s0")
        for name in ("s0", "s1", "s2"):
            archive.shard(name).container.path.unlink()
    with pltpack.open(fresh) as archive:
        loader = archive.loader()
        hit = loader.lookup(PREFIX + TAILS[0])
        assert hit.session.startswith("library:") and hit.tokens == 40
        assert loader.misses == {"missing file": 3}
        got = loader.load(hit)
        # One of the sessions' values: they differ in last bits.
        for layer in got:
            mine, theirs = (a.astype(np.float32) for a in (layer.keys, whole.layer(layer.layer, 0, 40)[0]))
            assert np.allclose(mine, theirs, rtol=0.02)
        assert not archive.loader(identity=Identity(salt="nobody")).lookup(PREFIX)


# Parts


def test_channels_end_when_their_writers_have_left():
    channel = Channel[int](2, writers=2)
    assert channel.put(1) and channel.put(2)
    waiting = threading.Thread(target=channel.put, args=(3,))
    waiting.start()
    channel.leave()
    assert [channel.get() for _ in range(3)] == [1, 2, 3]
    waiting.join()
    channel.leave()
    assert channel.get() is None
    # A reader that makes several items of one keeps it open for the others.
    held = Channel[int](1)
    held.put(1)
    held.leave()
    assert held.get(hold=True) == 1
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(held.get)
        assert not other.done()
        held.put_first([5, 6])
        held.leave()
        assert other.result(timeout=10) == 5
    assert [held.get(), held.get()] == [6, None]
    full = Channel[int](1)
    full.put(1)
    threading.Timer(0.05, full.cancel).start()
    assert not full.put(2)
    assert full.get() is None


@pytest.mark.parametrize(
    "wrong",
    [{"depth": 0}, {"depth": 65}, {"workers": 0}, {"memory": -1}, {"device": "tpu"}, {"device": "cuda:99"}],
)
def test_settings_out_of_range_are_refused(path, wrong):
    with pltpack.open(path) as archive, pytest.raises(UnsupportedError):
        archive.loader(**wrong)


def test_an_archives_own_reading_does_without_the_loaders_copies(path):
    with pltpack.open(path) as archive:
        loader = archive.loader()
        loader.load(loader.lookup(PREFIX))
        assert all(library.resident is None for library in archive.libraries)
        assert all(isinstance(s.container, segments.Container) for s in (*archive.libraries, archive.shard("s0")))


# Odd arguments


@pytest.mark.parametrize("into", [5, "x", (1, 2), (1,), [1, 2], {}, ([1], [2])])
def test_what_is_no_destination_is_named(path, into):
    with pltpack.open(path) as archive:
        loader = archive.loader()
        hit = loader.lookup(PREFIX)
        with pytest.raises(UnsupportedError, match=r"load|destination"):
            loader.stream(hit, into)


@pytest.mark.parametrize(
    "settings",
    [{"depth": "x"}, {"depth": 2.5}, {"depth": True}, {"depth": 0}, {"workers": "x"}, {"memory": -1}, {"timeout": "x"},
     {"read_bytes_per_second": 0}, {"device": 5}, {"identity": 5}],
)  # fmt: skip
def test_settings_of_a_wrong_kind_are_named(path, settings):
    with pltpack.open(path) as archive, pytest.raises(UnsupportedError, match=next(iter(settings))):
        archive.loader(**settings)


@pytest.mark.parametrize(
    "part", [{"layers": [0, 2]}, {"layers": 3}, {"layers": slice(0, 1)}, {"tokens": 5}, {"tokens": [0, 3]},
             {"tokens": slice("a", 3)}, {"tokens": slice(0.5, 3)}],
)  # fmt: skip
def test_parts_of_a_wrong_kind_are_named(path, part):
    with pltpack.open(path) as archive, pytest.raises(UnsupportedError, match=f"{next(iter(part))} must be"):
        archive.read(archive.sessions[0], **part)


def test_a_hit_is_cut_to_any_number_of_tokens(path):
    with pltpack.open(path) as archive:
        loader = archive.loader()
        hit = loader.lookup(PREFIX)
        odd = hit.first(33)
        assert same(loader.load(odd), archive.snapshot(hit.session), 33)
        for wrong in ("x", None, 33.5, True):
            with pytest.raises(UnsupportedError, match="whole number"):
                hit.first(wrong)
        for nothing in (hit.first(-1), 5, None):
            with pytest.raises(UnsupportedError, match="load"):
                loader.stream(nothing)


def test_a_hit_of_another_archive_is_a_miss(tmp_path: Path) -> None:
    """Names, generations and lengths may be equal; tokens tell."""
    loaders = []
    for name, first in (("a", 0), ("b", 1000)):
        pltpack.compress([session("s", list(range(first, first + 64)))], tmp_path / name, quality="lossless")
        loaders.append(pltpack.open(tmp_path / name).loader())
    hit = loaders[1].lookup(np.arange(1000, 1064))
    assert hit.tokens == 64
    for asked in (hit, hit.first(40)):
        with pytest.raises(MissError, match="or is another"):
            loaders[0].load(asked)
    assert len(loaders[1].load(hit.first(40))) == len(loaders[1].archive.identity.layers)
    assert len(loaders[1].load(hit, timeout=float("inf"))) == len(loaders[1].archive.identity.layers)


@pytest.mark.parametrize("blocks", [[1.5, 2.0], ["a"], [None], [2**70]], ids=str)
def test_block_tables_are_whole_numbers(blocks: list[object]) -> None:
    with pytest.raises(UnsupportedError, match="whole numbers"):
        Paged([], blocks)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("least", "most", "lengths"),
    [(1, 1 << 30, (1, 1, 1)), (1, 1 << 30, (2, 1)), (1, 1, (1, 1, 1)), (1 << 30, 1 << 30, (1, 1, 1))],
)
def test_small_layers_are_loaded_together(path, monkeypatch, least, most, lengths):
    monkeypatch.setattr(plan, "LEAST_BYTES", least)
    monkeypatch.setattr(plan, "TOGETHER_BYTES", most)
    monkeypatch.setattr(plan, "LAYERS_TOGETHER", lengths[:1] + lengths[:1])
    monkeypatch.setattr(plan, "PIECE_TOKENS", 32)
    with pltpack.open(path) as archive:
        pieces = plan.pieces_of(archive.shard("s1"), 88, together=True)
        steps = [list(group) for _, group in itertools.groupby(pieces, lambda piece: piece.step)]
        assert [len(step[0].layers) for step in steps] == list(lengths)
        assert all([(piece.start, piece.stop) for piece in step] == [(0, 32), (32, 64), (64, 88)] for step in steps)
        loader = archive.loader()
        assert same(loader.load(loader.lookup(PREFIX + TAILS[1])), archive.snapshot("s1"), 88)
