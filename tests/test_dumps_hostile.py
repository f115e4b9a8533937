"""Damaged and hostile dumps: one clear error that names the file, and no allocation beyond what the file can back."""

from __future__ import annotations

import json
import resource
import struct
import tempfile
import zlib
from pathlib import Path

import h5py
import numpy as np
import pytest
from dumps_common import FORMATS, make, target
from hypothesis import given, settings
from hypothesis import strategies as st

from pltpack.dumps import open_dumps, write_dump
from pltpack.dumps.safetensors_header import MAX_HEADER
from pltpack.errors import DumpError, PltpackError, UnsupportedError


def read_all(path):
    """Every byte of every session."""
    for snapshot in open_dumps(path):
        for index in range(len(snapshot.identity.layers)):
            snapshot.layer(index)


def refused(path):
    """Read a file that may be damaged; True if it was refused with a pltpack error naming it."""
    try:
        read_all(path)
    except PltpackError as error:
        assert str(path) in str(error), error
        return True
    return False


# safetensors


def build(path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype, shape, first, last):
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, last]}


def good_header():
    return {
        "__metadata__": {"pltpack.dump": "1", "session": "s"},
        "tokens": entry("I32", [2], 0, 8),
        "layers.0.keys": entry("BF16", [1, 2, 3], 8, 20),
        "layers.0.values": entry("BF16", [1, 2, 3], 20, 32),
    }


def test_the_unbroken_file_is_read(tmp_path):
    assert not refused(build(tmp_path / "s.safetensors", good_header(), bytes(32)))


@pytest.mark.parametrize("length", [0, 1, MAX_HEADER, MAX_HEADER + 1, 1 << 40, (1 << 64) - 1])
def test_absurd_header_lengths(tmp_path, length):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert refused(build(tmp_path / "s.safetensors", good_header(), bytes(32), length))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10


CHANGES = [
    ({"layers.0.keys": entry("BF16", [1, 2, 3], 10, 22)}, "hole or overlaps"),
    ({"layers.0.keys": entry("BF16", [1, 2, 3], 4, 16)}, "hole or overlaps"),
    ({"layers.0.values": entry("BF16", [1, 2, 2], 20, 28)}, "end at byte"),
    ({"layers.0.values": entry("BF16", [1, 2, 3], 20, 40)}, "has 20 bytes"),
    ({"layers.0.values": entry("BF16", [1, 2, 3], 32, 20)}, "-12 bytes"),
    ({"layers.0.values": entry("BF16", [1 << 62, 1 << 62, 0], 20, 20)}, "end at byte"),
    ({"layers.0.values": entry("BF16", [1 << 62, 1 << 62, 8], 20, 32)}, "has 12 bytes"),
    ({"layers.0.values": entry("BF16", [-1, -2, 3], 20, 32)}, "malformed"),
    ({"layers.0.values": entry("BF16", [True, 2, 3], 20, 32)}, "malformed"),
    ({"layers.0.values": entry("BF16", [1.0, 2, 3], 20, 32)}, "malformed"),
    ({"layers.0.values": entry("BF16", [1 << 64, 2, 3], 20, 32)}, "malformed"),
    ({"layers.0.values": entry("BF16", [1] * 17, 20, 22)}, "malformed"),
    ({"layers.0.values": {"dtype": "BF16"}}, "not described"),
    ({"layers.0.values": 7}, "not described"),
    ({"layers.0.values": entry("BF16", [1, 2, 3], 20, 32) | {"x": 1}}, "not described"),
    ({"layers.0.values": entry("U16", [1, 2, 3], 20, 32)}, "has dtype U16"),
    ({"layers.0.values": entry("F32", [1, 1, 3], 20, 32)}, "keys are BF16 but values are F32"),
    ({"layers.0.values": entry("BF16", [2, 1, 3], 20, 32)}, "1 key heads but 2"),
    ({"layers.0.values": entry("BF16", [1, 3, 2], 20, 32)}, "holds 3 tokens"),
    ({"layers.0.values": entry("BF16", [6], 20, 32)}, "1 axes"),
    ({"layers.0.values": None, "layers.0.other": entry("BF16", [1, 2, 3], 20, 32)}, "'layers.0.values' is missing"),
    ({"layers.0.values": None, "layers.1.values": entry("BF16", [1, 2, 3], 20, 32)}, "is missing"),
    ({"tokens": entry("I32", [1], 0, 4), "extra": entry("I32", [1], 4, 8)}, "1 token ids"),
    ({"tokens": entry("I64", [1], 0, 8)}, "1 token ids"),
    ({"tokens": entry("F32", [2], 0, 8)}, "has dtype F32"),
    ({"tokens": entry("I32", [1, 2], 0, 8)}, "not a flat array"),
    ({"tokens": None, "extra": entry("F32", [2], 0, 8)}, "no token ids"),
    ({"__metadata__": {"session": ""}}, "session name"),
    ({"__metadata__": {"session": "\ud800"}}, "not valid Unicode"),
    ({"__metadata__": {"session": 1}}, "object of strings"),
    ({"__metadata__": []}, "object of strings"),
    ({"__metadata__": {"pltpack.dump": "2"}}, "version '2'"),
    ({"__metadata__": {"identity": "["}}, "identity is not valid JSON"),
    ({"__metadata__": {"identity": "[]"}}, "not a JSON object"),
    ({"__metadata__": {"identity": '{"models": "x"}'}}, "unknown field"),
    ({"__metadata__": {"identity": '{"model": 5}'}}, "wrong type"),
    ({"__metadata__": {"identity": '{"rope": {"theta": NaN}}'}}, "JSON does not have"),
    ({"__metadata__": {"identity": '{"model": "\\ud800"}'}}, "JSON does not have"),
    ({"__metadata__": {"identity": '{"layers": []}'}}, None),
    (
        {"__metadata__": {"identity": '{"layers": [{"heads": 1, "k_dim": 3, "v_dim": 4, "dtype": "BF16"}]}'}},
        "layer 0 differs",
    ),
]


@pytest.mark.parametrize("change, fact", CHANGES)
def test_broken_headers(tmp_path, change, fact):
    header = {name: value for name, value in (good_header() | change).items() if value is not None}
    path = build(tmp_path / "s.safetensors", header, bytes(32))
    if fact is None:
        return read_all(path)
    with pytest.raises(PltpackError, match=fact) as error:
        read_all(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("ids", [[-1, 0], [0, -(1 << 31)]])
def test_negative_token_ids(tmp_path, ids):
    path = build(tmp_path / "s.safetensors", good_header(), np.array(ids, "<i4").tobytes() + bytes(24))
    with pytest.raises(DumpError, match="outside"):
        read_all(path)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b" {}",
        b'{"a":1}',
        b"\xff\xfe",
        b'{"__metadata__":{},"__metadata__":{}}',
        b'{"a":' + b"[" * 200_000,
        b'{"a":' + b"{}," * 1_100_000,
        b'{"a":[' + b"0," * 9_000_000,
        b'{"a":{"dtype":"BF16","shape":[' + b"9" * 5000 + b"]}}",
    ],
)
def test_json_attacks(tmp_path, text):
    assert refused(build(tmp_path / "s.safetensors", text, bytes(8)))


def test_more_layers_than_allowed(tmp_path):
    header = {"tokens": entry("I32", [0], 0, 0)}
    for index in range(4097):
        header |= {f"layers.{index}.{part}": entry("BF16", [1, 0, 1], 0, 0) for part in ("keys", "values")}
    with pytest.raises(DumpError, match="4097 layers"):
        read_all(build(tmp_path / "s.safetensors", header))


@pytest.mark.parametrize("shape", [[1, 0, 1 << 21], [1 << 21, 0, 1], [1 << 20, 0, 1 << 20], [0, 2, 3], [1, 2, 0]])
def test_absurd_geometry_without_data(tmp_path, shape):
    header = {"tokens": entry("I32", [shape[1]], 0, 4 * shape[1])}
    header |= {f"layers.0.{part}": entry("BF16", shape, 4 * shape[1], 4 * shape[1]) for part in ("keys", "values")}
    assert refused(build(tmp_path / "s.safetensors", header, bytes(4 * shape[1])))


# Any format


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    """Format to the bytes of a small dump."""
    out = {}
    for format in FORMATS:
        folder = tmp_path_factory.mktemp(format)
        (file,) = write_dump(make("s", 6, [(2, 3, 4, "BF16")] * 2, model="m"), target(folder, format), format)
        out[format] = (file.name, file.read_bytes())
    return out


@pytest.mark.parametrize("format", FORMATS)
def test_every_truncation_is_refused(samples, tmp_path, format):
    name, data = samples[format]
    path = tmp_path / name
    for size in {*range(0, min(len(data), 400)), *range(0, len(data), max(1, len(data) // 150)), len(data) - 1}:
        path.write_bytes(data[:size])
        assert refused(path), size


@pytest.mark.parametrize("format", FORMATS)
@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_flipped_bytes_are_harmless_or_refused(samples, format, data):
    name, content = samples[format]
    changed = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        path.write_bytes(changed)
        refused(path)


@pytest.mark.parametrize("format", FORMATS)
@settings(deadline=None, max_examples=40)
@given(
    content=st.binary(max_size=200),
    prefix=st.sampled_from([b"", b"\x89HDF\r\n\x1a\n", b"\x09\0\0\0\0\0\0\0{", b"PK\3\4"]),
)
def test_noise_is_refused(format, content, prefix):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "noise")
        path.write_bytes(prefix + content)
        assert refused(path)
        with pytest.raises(PltpackError, match="noise"):
            list(open_dumps(path, format=format))


# HDF5


@pytest.fixture
def h5(tmp_path):
    """A sound file with one session, to be broken."""
    (path,) = write_dump(make("s", 6, [(2, 3, 4, "BF16")]), tmp_path / "s.h5", "hdf5")
    return path


def replace(file, name, data=None, **options):
    del file[name]
    dataset = file.create_dataset(name, data=data, **options)
    dataset.attrs["dtype"] = "BF16"


def test_links_to_elsewhere(h5, tmp_path):
    (other,) = write_dump(make("t"), tmp_path / "other.h5", "hdf5")
    for name in ("sessions", "sessions/s", "sessions/s/layers", "sessions/s/layers/0/keys", "sessions/s/tokens"):
        for link in (h5py.ExternalLink(other, "/sessions/t/tokens"), h5py.SoftLink("/elsewhere")):
            copy = tmp_path / "copy.h5"
            copy.write_bytes(h5.read_bytes())
            with h5py.File(copy, "a") as file:
                del file[name]
                file[name] = link
            with pytest.raises(DumpError, match=f"copy.h5: /{name} is a link to elsewhere"):
                read_all(copy)


def test_data_in_other_files(h5, tmp_path):
    (tmp_path / "secret").write_bytes(bytes(999))
    with h5py.File(h5, "a") as file:
        replace(
            file, "sessions/s/layers/0/keys", shape=(2, 6, 3), dtype="<u2", external=[(str(tmp_path / "secret"), 0, 72)]
        )
    with pytest.raises(DumpError, match="data in other files"):
        read_all(h5)
    with h5py.File(h5, "a") as file:
        del file["sessions/s/layers/0/keys"]
        layout = h5py.VirtualLayout((2, 6, 3), "<u2")
        layout[:] = h5py.VirtualSource(str(tmp_path / "x.h5"), "d", (2, 6, 3))
        file.create_virtual_dataset("sessions/s/layers/0/keys", layout).attrs["dtype"] = "BF16"
    with pytest.raises(DumpError, match="data in other files"):
        read_all(h5)


@pytest.mark.parametrize(
    "options",
    [
        {"shape": (1 << 19, 6, 3), "chunks": (1, 6, 3)},
        {"shape": (2, 6, 1 << 19), "chunks": (1, 6, 3)},
        {"shape": (2, 6, 1 << 40), "chunks": (1, 6, 3)},
        {"shape": (2, 1 << 40, 3), "chunks": (1, 64, 3)},
        {"shape": (2, 1 << 23, 3), "chunks": (1, 64, 3), "compression": "gzip"},
        {"shape": (2, 6, 3)},
    ],
)
def test_shapes_without_data(h5, options):
    with h5py.File(h5, "a") as file:
        replace(file, "sessions/s/layers/0/keys", dtype="<u2", **options)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert refused(h5)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


def test_chunks_that_swell(h5):
    chunk = (1, 1 << 18, 1 << 10)
    with h5py.File(h5, "a") as file:
        for name in ("keys", "values"):
            replace(file, f"sessions/s/layers/0/{name}", shape=chunk, chunks=chunk, dtype="<u2", compression="gzip")
            file[f"sessions/s/layers/0/{name}"].id.write_direct_chunk((0, 0, 0), zlib.compress(bytes(1 << 20)))
    with pytest.raises(PltpackError, match=r"chunks of more than|declares"):
        read_all(h5)


def test_unknown_filters(h5):
    with h5py.File(h5, "a") as file:
        del file["sessions/s/layers/0/keys"]
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_chunk((2, 6, 3))
        plist.set_filter(h5py.h5z.FILTER_SCALEOFFSET, h5py.h5z.FLAG_OPTIONAL, (2, 0))
        space = h5py.h5s.create_simple((2, 6, 3))
        name = b"sessions/s/layers/0/keys"
        dataset = h5py.Dataset(h5py.h5d.create(file.id, name, h5py.h5t.STD_U16LE, space, plist))
        dataset[:] = 1
        dataset.attrs["dtype"] = "BF16"
    with pytest.raises(UnsupportedError, match="filter 6"):
        read_all(h5)


@pytest.mark.parametrize("raw", [b"", b"ab", b"abcd", bytes(76)[:-1] + b"x", zlib.compress(bytes(99)), b"x" * 500])
@pytest.mark.parametrize("options", [{"fletcher32": True}, {"compression": "gzip"}, {"shuffle": True}])
def test_chunks_that_do_not_decode(h5, raw, options):
    with h5py.File(h5, "a") as file:
        replace(file, "sessions/s/layers/0/keys", np.ones((2, 6, 3), "<u2"), chunks=(2, 6, 3), **options)
        if raw:
            file["sessions/s/layers/0/keys"].id.write_direct_chunk((0, 0, 0), raw)
    assert refused(h5) == bool(raw)


def test_missing_chunks(h5):
    with h5py.File(h5, "a") as file:
        replace(file, "sessions/s/layers/0/keys", shape=(2, 6, 3), dtype="<u2", chunks=(1, 6, 3), compression="gzip")
        file["sessions/s/layers/0/keys"][0] = np.arange(18).reshape(6, 3)
    with pytest.raises(DumpError, match="lacks 1 of 2 chunks"):
        read_all(h5)


def test_a_string_heap_without_end(h5):
    data = bytearray(h5.read_bytes())
    heap = data.index(b"GCOL\x01")
    at = heap + 16
    while int.from_bytes(data[at : at + 2], "little"):
        at += 16 + (int.from_bytes(data[at + 8 : at + 16], "little") + 7) // 8 * 8
    data[at + 8 : at + 16] = bytes(8)
    h5.write_bytes(data)
    with pytest.raises(DumpError, match="string heap"):
        read_all(h5)
    size = len(data)
    forged = struct.pack("<4sIQ", b"GCOL", 1, 4096 * 16) * 4096
    h5.write_bytes(h5.read_bytes()[:heap] + forged + bytes(size))
    with pytest.raises(DumpError, match="heap"):
        read_all(h5)


def test_a_string_attribute_that_claims_gigabytes(tmp_path):
    for version in (("earliest", "latest"), ("v108", "latest"), ("latest", "latest")):
        path = tmp_path / f"{version[0]}.h5"
        with h5py.File(path, "w", libver=version) as file:
            group = file.create_group("sessions/s")
            group["tokens"] = np.arange(3)
            group.attrs["identity"] = "{}" + " " * 4321
            for name in ("keys", "values"):
                group[f"layers/0/{name}"] = np.zeros((1, 3, 2), "<f4")
        data = path.read_bytes()
        read_all(path)
        assert data.count(struct.pack("<I", 4323)) == 2  # in the attribute and in the heap
        at = data.index(struct.pack("<I", 4323), data.index(b"identity\0"))
        # The object header's checksum, where there is one, need not fit: the length is looked at first.
        path.write_bytes(data[:at] + struct.pack("<I", 0x7FFFFFFF) + data[at + 4 :])
        with pytest.raises(DumpError, match="string attribute of 2147483647 bytes"):
            read_all(path)


def test_attributes_of_other_types_are_not_converted(h5):
    with h5py.File(h5, "a") as file:
        del file["sessions/s"].attrs["identity"]
        kind = h5py.vlen_dtype(np.uint8)
        value = np.empty((), object)
        value[()] = np.frombuffer(b"{}", np.uint8)
        file["sessions/s"].attrs.create("identity", value, dtype=kind)
    with pytest.raises(DumpError, match="'identity' is not a string"):
        read_all(h5)


def attribute(file, name, value):
    file["sessions/s"].attrs[name] = value


@pytest.mark.parametrize(
    "change, fact",
    [
        (lambda f: f.pop("sessions"), "has no group /sessions"),
        (lambda f: f["sessions/s"].pop("tokens"), "no token ids"),
        (lambda f: f["sessions/s"].pop("layers"), "has no group /sessions/s/layers"),
        (lambda f: f["sessions/s/layers"].pop("0"), "layers are not named"),
        (lambda f: f["sessions/s/layers"].move("0", "1"), "layers are not named"),
        (lambda f: f["sessions/s/layers"].move("0", "00"), "layers are not named"),
        (lambda f: f["sessions/s/layers/0"].pop("keys"), "has no dataset /sessions/s/layers/0/keys"),
        (lambda f: f["sessions/s/layers/0/keys"].attrs.pop("dtype"), "without the attribute 'dtype'"),
        (lambda f: f["sessions/s/layers/0/keys"].attrs.modify("dtype", "F32"), "are F32 but stored as uint16"),
        (lambda f: f["sessions/s/layers/0/keys"].attrs.modify("dtype", "I4"), "dtype 'I4'"),
        (lambda f: f["sessions/s/layers/0/keys"].attrs.__setitem__("dtype", ["BF16"]), "not one string"),
        (lambda f: f["sessions/s/layers/0/keys"].attrs.__setitem__("dtype", 7), "not a string"),
        (lambda f: replace(f, "sessions/s/layers/0/keys", np.zeros((2, 5, 3), "<u2")), "does not hold"),
        (lambda f: replace(f, "sessions/s/layers/0/keys", np.zeros((1, 6, 3), "<u2")), "1 key heads but 2"),
        (lambda f: replace(f, "sessions/s/layers/0/keys", np.zeros((2, 18), "<u2")), "has the shape"),
        (lambda f: replace(f, "sessions/s/layers/0/keys", np.zeros((2, 6, 3), "S2")), "not numeric"),
        (lambda f: replace(f, "sessions/s/tokens", np.zeros(5, "<i4")), "the caches hold 6 tokens"),
        (lambda f: replace(f, "sessions/s/tokens", np.full(6, -1, "<i4")), "outside"),
        (lambda f: replace(f, "sessions/s/tokens", np.full(6, 1 << 31, "<u8")), "outside"),
        (lambda f: replace(f, "sessions/s/tokens", np.zeros(6, "<f4")), "not a flat array of integers"),
        (lambda f: f.__setitem__("sessions/s/importance", np.zeros(5, "<f4")), "importance"),
        (lambda f: f.__setitem__("sessions/s/importance", np.zeros(6, "<f8")), "float64"),
        (lambda f: f.__setitem__("sessions/s/logprobs", np.zeros((6, 2), "<f4")), "both"),
        (lambda f: attribute(f, "identity", "{"), "identity is not valid JSON"),
        (lambda f: attribute(f, "session", b"\xff\xfe"), "not a sound HDF5 dump|session"),
        (lambda f: attribute(f, "session", "x" * 1000), "session name of 1000 bytes"),
    ],
)
def test_broken_hdf5_sessions(h5, change, fact):
    with h5py.File(h5, "a") as file:
        change(file)
    with pytest.raises(PltpackError, match=fact) as error:
        read_all(h5)
    assert str(h5) in str(error.value)


def test_a_hard_linked_copy_of_a_session_is_a_duplicate(h5):
    with h5py.File(h5, "a") as file:
        file["sessions/t"] = file["sessions/s"]
    with pytest.raises(DumpError, match="session 's' is in"):
        read_all(h5)
