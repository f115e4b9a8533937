"""``torch.save`` files and `DynamicCache` objects."""

from __future__ import annotations

import collections
import io
import pickle
import resource
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from dumps_common import ROPE, assert_same, make
from hypothesis import given, settings
from hypothesis import strategies as st

from pltpack.dumps import from_dynamic_cache, open_dumps, to_dynamic_cache, write_dump
from pltpack.dumps.torch_arrays import to_numpy, to_torch
from pltpack.errors import DumpError, PltpackError, UnsupportedError
from pltpack.snapshot import DTYPES, Identity, LayerGeometry, Snapshot

torch = pytest.importorskip("torch")

IDS = [3, 1, 4, 1, 5]


def pairs(dtype=None, layers=3, count=5, batch=1):
    """Random (keys, values) per layer, ``[batch, 2, count, 4]``."""
    generator = torch.Generator().manual_seed(1)
    shape = (batch, 2, count, 4)
    return [
        tuple(torch.randn(shape, generator=generator).to(dtype or torch.bfloat16) for _ in range(2))
        for _ in range(layers)
    ]


def saved(folder, content, name="cache.pt", **options):
    torch.save(content, folder / name, **options)
    return folder / name


def assert_holds(snapshot, expected, ids=IDS):
    assert snapshot.tokens.tolist() == ids
    assert len(snapshot.identity.layers) == len(expected)
    for index, pair in enumerate(expected):
        for array, tensor in zip(snapshot.layer(index), pair, strict=True):
            assert array.tobytes() == to_numpy(tensor if tensor.ndim == 3 else tensor[0]).tobytes()
        for array, tensor in zip(snapshot.layer(index, 1, 3), pair, strict=True):
            whole = to_numpy(tensor if tensor.ndim == 3 else tensor[0])
            assert array.tobytes() == np.ascontiguousarray(whole[:, 1:3]).tobytes()


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_lists_of_every_dtype(tmp_path, name):
    kv = pairs(getattr(torch, name))
    path = saved(tmp_path, kv)
    (tmp_path / "cache.tokens.json").write_text(str(IDS))
    for given_path in (path, tmp_path):
        (found,) = open_dumps(given_path)
        assert found.session == "cache"
        assert_holds(found, kv)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda kv: {"input_ids": torch.tensor([IDS]), "past_key_values": kv},
        lambda kv: {"input_ids": torch.tensor(IDS, dtype=torch.int32), "past_key_values": tuple(kv)},
        lambda kv: {"token_ids": IDS, "past_key_values": [list(pair) for pair in kv]},
        lambda kv: {"token_ids": [IDS], "past_key_values": [(k, v, None) for k, v in kv]},
        lambda kv: {"tokens": torch.tensor(IDS), "keys": [k for k, _ in kv], "values": [v for _, v in kv]},
        lambda kv: collections.OrderedDict(tokens=IDS, key_cache=[k for k, _ in kv], value_cache=[v for _, v in kv]),
    ],
)
def test_dicts(tmp_path, wrap):
    kv = pairs()
    (found,) = open_dumps(saved(tmp_path, wrap(kv)))
    assert_holds(found, kv)


def test_three_axes_views_and_names(tmp_path):
    base = torch.randn(5, 2, 8)
    kv = [(base.transpose(0, 1)[..., :4], base.transpose(0, 1)[..., 4:]) for _ in range(2)]
    identity = {"model": "m", "rope": ROPE, "keys": "rotated"}
    content = {"tokens": IDS, "past_key_values": kv, "session": "a/b", "identity": identity}
    (found,) = open_dumps(saved(tmp_path, content))
    assert (found.session, found.identity.model, found.identity.rope) == ("a/b", "m", ROPE)
    assert_holds(found, kv)


@pytest.mark.parametrize(
    "content, fact",
    [
        (pairs(batch=2), "layer 0: keys hold a batch of 2"),
        (pairs(torch.float64), "dtype float64 is not a KV cache dtype"),
        ([], "no list of"),
        ({}, "no list of"),
        (7, "no list of"),
        (torch.zeros(3), "no list of"),
        ({"keys": [torch.zeros(1, 2, 5, 4)], "values": []}, "not of one length"),
        ({"past_key_values": pairs()[0]}, "not a pair"),
        ([(torch.zeros(1, 2, 5, 4), None)], "not a pair"),
        ([(torch.zeros(1, 2, 5, 4), 5)], "not a pair"),
        ([(torch.zeros(2, 4), torch.zeros(2, 4))], "2 axes"),
        ([(torch.zeros(1, 2, 5, 4), torch.zeros(1, 1, 5, 4))], "2 key heads but 1"),
        ([(torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 5, 4).half())], "keys are F32"),
        ([(torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 6, 4))], "holds 6 tokens"),
        ([(torch.zeros(1, 2, 5, 0), torch.zeros(1, 2, 5, 4))], "key dimension of 0"),
        ([(torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 5, 4), torch.tensor(4))], "sliding layer"),
        ([(torch.zeros(1).expand(1, 1 << 15, 5, 1 << 6),) * 2], "not a pair of plain tensors"),
        ([(torch.zeros(1, 2, 5, 4).to_sparse(),) * 2], "pickled objects .*sparse"),
        (pairs(), "no token ids"),
        ({"tokens": IDS[:4], "past_key_values": pairs()}, "4 token ids"),
        ({"tokens": torch.tensor(IDS).float(), "past_key_values": pairs()}, "not a tensor of integers"),
        ({"tokens": torch.tensor([IDS, IDS]), "past_key_values": pairs()}, "not a flat array"),
        ({"tokens": torch.tensor([-1] * 5), "past_key_values": pairs()}, "outside"),
        ({"tokens": ["a"] * 5, "past_key_values": pairs()}, "not a list of integers"),
        ({"tokens": "12345", "past_key_values": pairs()}, "not a tensor of integers"),
        ({"tokens": IDS, "past_key_values": pairs(), "session": 5}, "'session' is not a string"),
        ({"tokens": IDS, "past_key_values": pairs(), "identity": [1]}, "not a JSON object"),
        ({"tokens": IDS, "past_key_values": pairs(), "identity": {"rope": {1: torch.zeros(1)}}}, "JSON does not have"),
    ],
)
def test_contents_that_are_no_cache(tmp_path, content, fact):
    path = saved(tmp_path, content)
    with pytest.raises(PltpackError, match=fact) as error:
        list(open_dumps(path))
    assert str(path) in str(error.value)


def test_pickled_objects_are_refused_with_the_way_out(tmp_path):
    from transformers import DynamicCache

    cache = DynamicCache()
    cache.update(*pairs()[0], 0)
    for content in (cache, {"input_ids": IDS, "past_key_values": cache}):
        with pytest.raises(
            DumpError, match=r"pickled objects \(transformers\S*DynamicCache\).*torch.save\(\{'input_ids'"
        ):
            list(open_dumps(saved(tmp_path, content)))


class Bomb:
    """Runs code when it is unpickled by a careless reader."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def test_no_pickled_code_is_run(tmp_path):
    trace = tmp_path / "trace"
    paths = [saved(tmp_path, [Bomb(str(trace))]), tmp_path / "plain.pt", tmp_path / "plain"]
    for path in paths[1:]:
        path.write_bytes(pickle.dumps(Bomb(str(trace))))
    for path in paths:
        with pytest.raises(DumpError, match="run"):
            list(open_dumps(path))
    assert not trace.exists()


def test_old_torch_files_are_refused(tmp_path):
    path = saved(tmp_path, pairs(), _use_new_zipfile_serialization=False)
    with pytest.raises(UnsupportedError, match=r"before 1\.6"):
        list(open_dumps(path))


def rezip(path, change=lambda name, data: data, **options):
    """Write a torch file anew, member by member."""
    with zipfile.ZipFile(path) as old:
        members = [(name, change(name, old.read(name))) for name in old.namelist()]
    with zipfile.ZipFile(path, "w", **options) as new:
        for name, data in members:
            new.writestr(name, data)


def test_compressed_members_are_refused(tmp_path):
    path = saved(tmp_path, {"tokens": IDS, "past_key_values": pairs()})
    rezip(path, compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(DumpError, match="compressed members"):
        list(open_dumps(path))


@pytest.mark.parametrize(
    "changes", [[(b"K\x07", b"M\x00\x08")], [(b"K\x07", b"M\x00\x08"), (b"K*", b"J\xff\xff\xff\x7f")]]
)
def test_storages_shorter_than_declared_are_refused(tmp_path, changes):
    # 7 and 42 are the token count and the element count that only these tensors have.
    path = saved(tmp_path, {"tokens": [1] * 7, "past_key_values": [(torch.zeros(1, 2, 7, 3),) * 2]})

    def swell(name, data):
        if name.endswith("data.pkl"):
            for old, new in changes:
                assert old in data
                data = data.replace(old, new)
        return data

    rezip(path, swell)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DumpError, match=r"cache\.pt"):
        list(open_dumps(path))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


@pytest.fixture(scope="module")
def sample():
    """The bytes of a small torch file."""
    out = io.BytesIO()
    torch.save({"tokens": IDS, "past_key_values": pairs(layers=2)}, out)
    return out.getvalue()


def read_or_refuse(data):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.pt")
        path.write_bytes(data)
        try:
            for snapshot in open_dumps(path):
                for index in range(len(snapshot.identity.layers)):
                    snapshot.layer(index)
        except PltpackError as error:
            assert str(path) in str(error), error


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_flipped_bytes_are_harmless_or_refused(sample, data):
    changed = bytearray(sample)
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    read_or_refuse(changed)


def test_truncations_are_refused(sample, tmp_path):
    path = tmp_path / "x.pt"
    for size in range(0, len(sample), 61):
        path.write_bytes(sample[:size])
        with pytest.raises(DumpError):
            list(open_dumps(path))


_STREAM = """
import resource, sys, torch
from pltpack.dumps import open_dumps
(s,) = open_dumps(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for index in range(len(s.identity.layers)):
    s.layer(index)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_large_file_is_read_in_bounded_memory(tmp_path):
    layer = torch.zeros(1, 8, 65_536, 64, dtype=torch.bfloat16)
    kv = [(layer.clone(), layer.clone()) for _ in range(5)]
    path = saved(tmp_path, {"tokens": torch.zeros(65_536, dtype=torch.int32), "past_key_values": kv})
    del kv
    assert path.stat().st_size > 640 << 20
    run = subprocess.run([sys.executable, "-c", _STREAM, str(path)], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 560 << 10


# In memory


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_tensors_keep_every_bit(name):
    rng = np.random.default_rng(0)
    array = rng.integers(0, 256, (3, 4, 5, DTYPES[name].itemsize), dtype=np.uint8).view(DTYPES[name])[..., 0]
    assert to_numpy(to_torch(array)).tobytes() == np.ascontiguousarray(array).tobytes()
    assert to_numpy(to_torch(array).transpose(0, 1)).tobytes() == np.ascontiguousarray(array.swapaxes(0, 1)).tobytes()


@pytest.mark.parametrize("count", [0, 1, 6])
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_dynamic_cache_round_trip(count, dtype):
    pytest.importorskip("transformers")
    original = make("x", count, [(2, 8, 6, dtype), (1, 3, 3, dtype)], model="m", rope=ROPE)
    cache = to_dynamic_cache(original)
    assert cache.get_seq_length() == count
    assert_same(original, from_dynamic_cache(cache, original.tokens, "x", Identity(model="m", rope=ROPE)))
    assert_same(original, from_dynamic_cache(cache, torch.tensor(original.tokens)[None], "x", original.identity))


def test_cache_goes_on_after_loading():
    pytest.importorskip("transformers")
    cache = to_dynamic_cache(make("x", 6, [(2, 4, 4, "BF16")] * 2), dtype=torch.float32)
    more = torch.ones(1, 2, 3, 4)
    for index in range(2):
        keys, _ = cache.update(more, more, index)
        assert keys.shape == (1, 2, 9, 4) and keys.dtype == torch.float32
    assert cache.get_seq_length() == 9


def test_snapshot_is_independent_of_the_cache(tmp_path):
    from transformers import DynamicCache

    cache = DynamicCache()
    for index, pair in enumerate(pairs()):
        cache.update(*pair, index)
    snapshot = from_dynamic_cache(cache, IDS)
    write_dump(snapshot, tmp_path, "transformers")
    cache.reset()
    assert_holds(snapshot, pairs())
    (found,) = open_dumps(tmp_path)
    assert_holds(found, pairs())


def test_sliding_layers():
    from transformers.cache_utils import Cache, DynamicSlidingWindowLayer

    def cache_of(count):
        cache = Cache(layers=[DynamicSlidingWindowLayer(sliding_window=8) for _ in range(2)])
        for index, pair in enumerate(pairs(layers=2, count=count)):
            cache.update(*pair, index)
        return cache

    snapshot = from_dynamic_cache(cache_of(5), IDS)
    assert [layer.window for layer in snapshot.identity.layers] == [8, 8]
    again = to_dynamic_cache(snapshot)
    assert again.layers[0].is_sliding and again.get_seq_length() == 5
    with pytest.raises(UnsupportedError, match="keeps only 7 of 12 tokens"):
        from_dynamic_cache(cache_of(12), range(12))


def test_a_long_session_fills_a_sliding_layer_as_the_model_would():
    from transformers.cache_utils import DynamicSlidingWindowLayer

    keys, values = pairs(torch.float32, layers=1, count=12)[0]
    identity = Identity(layers=(LayerGeometry(2, 4, 4, "F32", window=8),))
    snapshot = Snapshot.from_arrays("s", range(12), [(to_numpy(keys[0]), to_numpy(values[0]))], identity)
    layer = to_dynamic_cache(snapshot).layers[0]
    expected = DynamicSlidingWindowLayer(sliding_window=8)
    expected.update(keys, values)
    assert torch.equal(layer.keys, expected.keys) and torch.equal(layer.values, expected.values)
    assert layer.cumulative_length == expected.cumulative_length == 12
    assert layer.get_mask_sizes(1) == expected.get_mask_sizes(1)
    one = torch.ones(1, 2, 1, 4)
    assert torch.equal(layer.update(one, one)[0], expected.update(one, one)[0])


def test_static_cache_gives_its_filled_part():
    from transformers.cache_utils import Cache, StaticLayer

    cache = Cache(layers=[StaticLayer(max_cache_len=20)])
    keys, values = pairs(layers=1)[0]
    cache.update(keys, values, 0, {"cache_position": torch.arange(5)})
    assert_holds(from_dynamic_cache(cache, IDS), [(keys, values)])


def test_caches_that_a_snapshot_cannot_hold():
    from transformers import DynamicCache

    cache = DynamicCache()
    with pytest.raises(DumpError, match="no layers"):
        from_dynamic_cache(cache, [])
    cache.update(*pairs(batch=2)[0], 0)
    with pytest.raises(UnsupportedError, match="not one session"):
        from_dynamic_cache(cache, IDS)
    cache = DynamicCache()
    cache.update(*pairs()[0], 0)
    with pytest.raises(DumpError, match="5 tokens but 4 token ids"):
        from_dynamic_cache(cache, IDS[:4])
    with pytest.raises(DumpError, match="outside"):
        from_dynamic_cache(cache, [-1] * 5)
    cache.layers[0].indexer_keys = torch.zeros(1, 5, 4)
    with pytest.raises(UnsupportedError, match="indexer keys"):
        from_dynamic_cache(cache, IDS)
    with pytest.raises(UnsupportedError, match="no layers"):
        from_dynamic_cache([], IDS)
    with pytest.raises(UnsupportedError, match="un-rotated"):
        to_dynamic_cache(make(keys="unrotated"))
