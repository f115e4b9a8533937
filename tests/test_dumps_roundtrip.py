"""What is written is read back bit by bit, lazily, and by other programs too."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import pickle
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from dumps_common import FORMATS, ROPE, assert_same, make, target
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pltpack.dumps import open_dumps, write_dump
from pltpack.errors import DumpError
from pltpack.snapshot import DTYPES, LayerGeometry, Snapshot

LAYERS = st.lists(
    st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9), st.sampled_from(sorted(DTYPES))),
    min_size=1,
    max_size=12,
)


@pytest.mark.parametrize("format", FORMATS)
@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layers=LAYERS, count=st.integers(0, 40), extras=st.booleans(), seed=st.integers(0, 99), data=st.data())
def test_round_trip(format, layers, count, extras, seed, data):
    original = make("a/b %é", count, layers, seed, extras, model="m", rope=ROPE, keys="rotated", salt="t", tp_rank=0)
    with tempfile.TemporaryDirectory() as folder:
        path = target(Path(folder), format)
        assert all(file.is_file() for file in write_dump(original, path, format))
        (found,) = open_dumps(path)
        assert_same(original, found)
        start = data.draw(st.integers(0, count))
        stop = data.draw(st.integers(start, count))
        index = data.draw(st.integers(0, len(layers) - 1))
        for x, y in zip(original.layer(index, start, stop), found.layer(index, start, stop), strict=True):
            assert np.ascontiguousarray(x).tobytes() == y.tobytes()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_every_bit_pattern(tmp_path, format, dtype):
    item = DTYPES[dtype].itemsize
    every = np.arange(1 << min(16, 8 * item), dtype=np.uint32)
    if item == 4:
        every = every << 16 | 0x7F800001  # infinities and NaN payloads
    values = every.astype(f"<u{item}").view(DTYPES[dtype]).reshape(1, -1, 16)
    original = Snapshot.from_arrays("s", range(values.shape[1]), [(values, values[:, :, :3])])
    write_dump(original, target(tmp_path, format), format)
    assert_same(original, *open_dumps(target(tmp_path, format)))


@pytest.mark.parametrize("format", FORMATS)
def test_window_is_kept(tmp_path, format):
    snapshot = make(layers=[(1, 4, 4, "F16")] * 3)
    layers = tuple(
        dataclasses.replace(g, window=w) for g, w in zip(snapshot.identity.layers, (None, 7, 9), strict=True)
    )
    snapshot = dataclasses.replace(snapshot, identity=dataclasses.replace(snapshot.identity, layers=layers))
    write_dump(snapshot, target(tmp_path, format), format)
    (found,) = open_dumps(target(tmp_path, format))
    assert [layer.window for layer in found.identity.layers] == [None, 7, 9]


@pytest.mark.parametrize("format", FORMATS)
def test_many_layers_and_a_long_identity(tmp_path, format):
    original = make(layers=[(1, 1, 2, "F8_E4M3")] * 700, model="m" * 100_000)
    write_dump(original, target(tmp_path, format), format)
    assert_same(original, *open_dumps(target(tmp_path, format)))


@pytest.mark.parametrize("format", FORMATS)
def test_two_threads_and_a_copy_of_the_source(tmp_path, format):
    originals = [make(f"s{n}", 300, [(2, 8, 4, "BF16")] * 4, n) for n in range(4)]
    write_dump(originals, target(tmp_path, format), format)
    found = [pickle.loads(pickle.dumps(snapshot)) for snapshot in open_dumps(target(tmp_path, format))]

    def read(job):
        number, index, start = job
        expected, got = (s[number].layer(index, start, start + 90) for s in (originals, found))
        return all(np.ascontiguousarray(x).tobytes() == y.tobytes() for x, y in zip(expected, got, strict=True))

    jobs = [(n, i, start) for n in range(4) for i in range(4) for start in range(0, 200, 10)]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        assert all(pool.map(read, jobs))


@pytest.mark.parametrize("format", FORMATS)
def test_no_file_stays_open(tmp_path, format):
    write_dump([make(f"s{n:02}", seed=n) for n in range(9)], target(tmp_path, format), format)
    before = len(list(Path("/proc/self/fd").iterdir()))
    found = list(open_dumps(tmp_path))
    for snapshot in found:
        snapshot.layer(0)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


class SlowSource:
    """Makes any token range of any layer, and remembers the largest one it was asked for."""

    def __init__(self, geometry):
        self.geometry, self.largest = geometry, 0

    def layer(self, index, start, stop):
        g = self.geometry
        self.largest = max(self.largest, (stop - start) * g.bytes_per_token)
        row = (np.arange(start, stop, dtype=np.uint32) * 7 + index).astype("<u2").view(DTYPES["BF16"])
        shape = (g.heads, stop - start, g.k_dim)
        return np.broadcast_to(row[None, :, None], shape), np.broadcast_to(row[None, :, None], shape)


@pytest.mark.parametrize("format", FORMATS)
def test_writing_streams_parts_of_a_layer(tmp_path, format):
    geometry = LayerGeometry(4, 64, 64, "BF16")
    source = SlowSource(geometry)
    snapshot = make("big", 40_000)
    identity = dataclasses.replace(snapshot.identity, layers=(geometry, geometry))
    snapshot = dataclasses.replace(snapshot, identity=identity, source=source)
    write_dump(snapshot, target(tmp_path, format), format)
    assert source.largest <= 33 << 20 < 40_000 * geometry.bytes_per_token
    (found,) = open_dumps(target(tmp_path, format))
    for start in (0, 32_700, 39_990):
        for x, y in zip(snapshot.layer(1, start, start + 10), found.layer(1, start, start + 10), strict=True):
            assert np.ascontiguousarray(x).tobytes() == y.tobytes()


_STREAM = """
import resource, sys
import numpy
from pltpack.dumps import open_dumps
(s,) = open_dumps(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for index in range(len(s.identity.layers)):
    for start in range(0, len(s), 4096):
        keys, values = s.layer(index, start, min(start + 4096, len(s)))
        keys.view(numpy.uint16).max(), values.view(numpy.uint16).max()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def _sparse_dump(path, count, layers):
    """A safetensors dump whose data is one hole."""
    shape = [8, count, 64]
    size = 8 * count * 64 * 2
    header = {
        "__metadata__": {"session": "s"},
        "tokens": {"dtype": "I32", "shape": [count], "data_offsets": [0, 4 * count]},
    }
    end = 4 * count
    for index in range(layers):
        for part in ("keys", "values"):
            header[f"layers.{index}.{part}"] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
            end += size
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return end


def test_a_large_dump_is_read_in_little_memory(tmp_path):
    path = tmp_path / "s.safetensors"
    assert _sparse_dump(path, 65_536, 10) > 1 << 30
    run = subprocess.run([sys.executable, "-c", _STREAM, str(path)], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 64 << 10  # KiB


def test_opening_a_huge_dump_reads_tokens_only(tmp_path):
    path = tmp_path / "s.safetensors"
    size = _sparse_dump(path, 65_536, 400)
    assert size > 40 << 30
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (found,) = open_dumps(path)
    assert len(found) == 65_536 and len(found.identity.layers) == 400
    assert found.layer(399, 65_000, 65_003)[1].shape == (8, 3, 64)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


@pytest.mark.parametrize("format", FORMATS)
def test_a_file_replaced_behind_a_snapshot_is_noticed(tmp_path, format):
    path = target(tmp_path, format)
    (file,) = write_dump(make(), path, format)
    (found,) = open_dumps(path)
    found.layer(0)
    with open(file, "ab") as out:
        out.write(b"more")
    with pytest.raises(DumpError, match="changed"):
        found.layer(0)
    file.unlink()
    with pytest.raises(DumpError, match="No such file"):
        found.layer(0)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("span", [(-1, 2), (3, 2), (0, 6)])
def test_ranges_outside_are_refused(tmp_path, format, span):
    write_dump(make(), target(tmp_path, format), format)
    (found,) = open_dumps(target(tmp_path, format))
    with pytest.raises(ValueError, match="outside"):
        found.source.layer(0, *span)


def test_conversion_chain_loses_nothing(tmp_path):
    original = make("x", 70, [(2, 8, 6, "F8_E5M2"), (1, 3, 3, "F32")], extras=True, model="m", rope=ROPE)
    snapshots = [original]
    for step, format in enumerate(("hdf5", "transformers", "safetensors", "hdf5", "safetensors")):
        path = target(tmp_path / str(step), format)
        write_dump(snapshots, path, format)
        snapshots = open_dumps(path)
    assert_same(original, *snapshots)


def test_safetensors_library_reads_what_is_written(tmp_path):
    safetensors = pytest.importorskip("safetensors")
    pytest.importorskip("torch")
    original = make("x", 3, [(2, 8, 6, "BF16"), (1, 3, 3, "F32"), (1, 1, 1, "F8_E4M3")])
    write_dump(original, tmp_path, "safetensors")
    with safetensors.safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert str(file.get_tensor("layers.0.keys").dtype) == "torch.bfloat16"
        assert file.get_tensor("layers.0.values").shape == (2, 3, 6)
        assert file.get_tensor("tokens").tolist() == original.tokens.tolist()
        assert file.metadata()["pltpack.dump"] == "1" and file.metadata()["session"] == "x"


def test_dump_of_the_safetensors_library_is_read(tmp_path):
    torch = pytest.importorskip("torch")
    save_file = pytest.importorskip("safetensors.torch").save_file
    tensors = {"tokens": torch.arange(5, dtype=torch.int32)}
    for index in range(12):
        tensors |= {f"layers.{index}.{part}": torch.randn(3, 5, 4).bfloat16() for part in ("keys", "values")}
    save_file(
        tensors, tmp_path / "n.safetensors", {"pltpack.dump": "1", "identity": '{"model": "m", "keys": "rotated"}'}
    )
    (found,) = open_dumps(tmp_path)
    assert (found.session, found.identity.model, len(found.identity.layers)) == ("n", "m", 12)
    for index in range(12):
        for part, array in zip(("keys", "values"), found.layer(index), strict=True):
            expected = tensors[f"layers.{index}.{part}"].view(torch.uint16).numpy()
            np.testing.assert_array_equal(array.view(np.uint16), expected)


def test_hdf5_written_by_hand_is_read(tmp_path):
    h5py = pytest.importorskip("h5py")
    values = np.random.default_rng(0).standard_normal((2, 50, 4)).astype(">f4")
    with h5py.File(tmp_path / "a.h5", "w", userblock_size=1024) as file:
        for name in ("one", "two"):
            group = file.create_group(f"sessions/{name}")
            group["tokens"] = np.arange(50, dtype=np.int64)
            group.create_dataset("layers/0/keys", data=values, chunks=(1, 20, 4), compression="gzip", shuffle=True)
            group.create_dataset("layers/0/values", data=values.astype(">f4"))
    found = list(open_dumps(tmp_path / "a.h5"))
    assert [snapshot.session for snapshot in found] == ["one", "two"]
    keys, _ = found[1].layer(0, 10, 30)
    assert keys.dtype == np.float32 and keys.dtype.isnative
    np.testing.assert_array_equal(keys, values[:, 10:30])


def test_hdf5_chunks_do_not_swell_short_sessions(tmp_path):
    h5py = pytest.importorskip("h5py")
    layers = [(3, 64, 64, "BF16")] * 20
    counts = (1, 5, 255, 257, 300, 513, 600)
    originals = [make(f"s{count}", count, layers, count) for count in counts]
    write_dump(originals, tmp_path / "a.h5", "hdf5")
    raw = sum(snapshot.raw_bytes for snapshot in originals)
    # 1 KB per dataset for its header, and one file's superblock and groups.
    assert (tmp_path / "a.h5").stat().st_size <= 1.005 * raw + 1024 * 2 * len(layers) * len(counts)
    with h5py.File(tmp_path / "a.h5") as file:
        for count in counts:
            heads, run, dim = file[f"sessions/s{count}/layers/7/values"].chunks
            assert (heads, dim) == (3, 64) and run <= 256 and -(-count // run) == -(-count // 256)
    for original, found in zip(originals, sorted(open_dumps(tmp_path), key=len), strict=True):
        assert_same(original, found)


def test_hdf5_with_the_padded_chunks_of_older_files(tmp_path):
    h5py = pytest.importorskip("h5py")
    values = np.random.default_rng(0).standard_normal((2, 300, 4)).astype("<f4")
    with h5py.File(tmp_path / "a.h5", "w", libver=("v108", "latest")) as file:
        group = file.create_group("sessions/s")
        group["tokens"] = np.arange(300, dtype="<i4")
        for name in ("keys", "values"):
            dataset = group.create_dataset(f"layers/0/{name}", values.shape, "<f4", chunks=(2, 256, 4))
            dataset[:] = values
            dataset.attrs["dtype"] = "F32"
    (found,) = open_dumps(tmp_path)
    for start, stop in ((0, 300), (250, 260), (256, 300)):
        for array in found.layer(0, start, stop):
            np.testing.assert_array_equal(array, values[:, start:stop])


@pytest.mark.parametrize(
    "options",
    [
        {"chunks": (2, 7, 3)},
        {"chunks": (1, 50, 4), "compression": "gzip"},
        {"chunks": (2, 16, 4), "fletcher32": True},
        {"chunks": (1, 9, 3), "fletcher32": True, "shuffle": True, "compression": "gzip"},
        {"compact": True},
        {},
    ],
)
@pytest.mark.parametrize("dtype", ["<f4", "<f2", ">f2"])
def test_hdf5_storage_layouts(tmp_path, options, dtype):
    h5py = pytest.importorskip("h5py")
    options = dict(options)
    values = np.random.default_rng(0).standard_normal((2, 50, 4)).astype(dtype)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        group = file.create_group("sessions/s")
        group["tokens"] = np.arange(50)
        for name in ("keys", "values"):
            if options.get("compact"):
                plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
                plist.set_layout(h5py.h5d.COMPACT)
                layer = group.require_group("layers/0")
                kind = h5py.h5t.py_create(values.dtype)
                created = h5py.h5d.create(layer.id, name.encode(), kind, h5py.h5s.create_simple(values.shape), plist)
                h5py.Dataset(created)[...] = values
            else:
                group.create_dataset(f"layers/0/{name}", data=values, **options)
    (found,) = open_dumps(tmp_path)
    for start, stop in ((0, 50), (0, 0), (7, 8), (13, 44)):
        for array in found.layer(0, start, stop):
            assert array.dtype.isnative
            np.testing.assert_array_equal(array, values[:, start:stop])


def test_a_header_length_that_looks_like_a_pickle(tmp_path):
    for size in range(300):  # one of these gives a length of 0x0280 bytes
        original = make(model="m" * size)
        (file,) = write_dump(original, tmp_path, "transformers")
        head = file.read_bytes()[:2]
        if head[0] == 0x80 and 2 <= head[1] <= 5:
            break
    else:
        pytest.fail("no header of such a length was made")
    assert_same(original, *open_dumps(file))
    assert_same(original, *open_dumps(file, format="transformers"))
