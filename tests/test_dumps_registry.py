"""How dumps are found and sniffed, where tokens come from, and writes that happen whole or not at all."""

from __future__ import annotations

import dataclasses
import json
import os

import numpy as np
import pytest
from dumps_common import FORMATS, assert_same, make, target
from hypothesis import given, settings
from hypothesis import strategies as st

from pltpack.dumps import dump_format, format_names, open_dumps, registry, write_dump
from pltpack.dumps.base import DumpFormat
from pltpack.dumps.tokens import token_ids
from pltpack.errors import ConflictError, DumpError, NotFoundError, PltpackError, UnsupportedError
from pltpack.names import session_from_file


def plain_safetensors(path, **arrays):
    from safetensors.numpy import save_file

    save_file(arrays, path)


@pytest.mark.parametrize("format", FORMATS)
def test_content_tells_the_format(tmp_path, format):
    (file,) = write_dump(make(), target(tmp_path, format), format)
    renamed = file.rename(file.with_name("no-suffix"))
    assert registry.sniff_format(renamed).format_id == format
    assert_same(make(), *open_dumps(renamed))
    assert_same(make(), *open_dumps(str(renamed), format=format))


def test_unknown_format_names():
    for call in (lambda: open_dumps([], format="gguf"), lambda: write_dump(make(), "x", "gguf")):
        with pytest.raises(NotFoundError, match=r"'gguf' \(known: safetensors, hdf5, transformers"):
            call()
    assert not os.path.exists("x")


@pytest.mark.parametrize("format", FORMATS)
def test_forced_format_does_not_fit(tmp_path, format):
    file = tmp_path / "noise"
    file.write_bytes(bytes(range(256)) * 9)
    with pytest.raises(PltpackError, match="noise"):
        list(open_dumps(file, format=format))
    other = FORMATS[FORMATS.index(format) - 1]
    (dump,) = write_dump(make(), target(tmp_path / "out", other), other)
    with pytest.raises(PltpackError, match=dump.name):
        list(open_dumps(dump, format=format))


def test_a_named_file_of_no_format(tmp_path):
    file = tmp_path / "weights.bin"
    file.write_bytes(b"hello")
    with pytest.raises(DumpError, match=r"weights.bin: is of no known dump format \(safetensors, hdf5, transformers"):
        list(open_dumps(file))
    plain_safetensors(tmp_path / "c.safetensors", s=np.arange(3, dtype=np.int32))
    with pytest.raises(DumpError, match="no known dump format"):
        list(open_dumps(tmp_path / "c.safetensors"))
    with pytest.raises(NotFoundError):
        list(open_dumps(tmp_path / "missing"))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DumpError, match="not a regular file"):
        list(open_dumps(tmp_path / "pipe"))


def test_folders_are_walked_in_order(tmp_path):
    write_dump([make("b"), make("a")], tmp_path, "safetensors")
    write_dump([make("z"), make("y")], tmp_path / "nested" / "deep" / "many.h5", "hdf5")
    write_dump(make("t"), tmp_path / "nested", "transformers")
    write_dump(make("hidden"), tmp_path / ".cache", "safetensors")
    (tmp_path / ".half-written.safetensors").write_bytes(b"x")
    (tmp_path / "notes.md").write_text("x")
    (tmp_path / "a.tokens.json").write_text("[1]")
    plain_safetensors(tmp_path / "continuations.safetensors", a=np.arange(3, dtype=np.int32))
    assert [snapshot.session for snapshot in open_dumps(tmp_path)] == ["a", "b", "t", "y", "z"]


@pytest.mark.parametrize(
    "name, content", [("x.bin", b"\0" * 99), ("x.safetensors", b"\0" * 99), ("x", b"\x89HDF\r\n\x1a\n" + b"x" * 99)]
)
def test_an_unknown_or_damaged_file_in_a_folder_is_not_skipped(tmp_path, name, content):
    write_dump(make("a"), tmp_path, "safetensors")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DumpError, match=name):
        list(open_dumps(tmp_path))


def test_foreign_caches_in_a_folder_are_not_skipped(tmp_path):
    write_dump(make("a"), tmp_path, "safetensors")
    plain_safetensors(tmp_path / "mlx.safetensors", **{"0.0": np.zeros((1, 2, 3, 4), np.float32)})
    with pytest.raises(DumpError, match=r"mlx\.safetensors"):
        list(open_dumps(tmp_path))


def test_a_folder_without_dumps(tmp_path):
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(DumpError, match="holds no dump"):
        list(open_dumps(tmp_path))


def test_one_session_in_two_files(tmp_path):
    write_dump(make("s"), tmp_path / "a", "safetensors")
    write_dump(make("s"), tmp_path / "b.h5", "hdf5")
    with pytest.raises(DumpError, match=r"b\.h5: session 's' is in .*s\.safetensors already"):
        list(open_dumps([tmp_path / "a", tmp_path / "b.h5"]))


@pytest.mark.parametrize("format", FORMATS)
def test_one_session_written_twice(tmp_path, format):
    with pytest.raises(DumpError, match="two snapshots are named 's'"):
        write_dump([make("s"), make("s", seed=1)], target(tmp_path, format), format)


# Names


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", ["../../up", "/etc/x", ".hidden", "..", "a\\b", "%2E", "a b", "日本", "CON:", "~"])
def test_no_name_leaves_the_folder(tmp_path, format, name):
    inner = tmp_path / "inner"
    (file,) = write_dump(make(name), target(inner, format), format)
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [file]
    assert file.is_relative_to(inner) and not file.name.startswith(".")
    if format != "hdf5":
        assert session_from_file(file.stem) == name
    assert [snapshot.session for snapshot in open_dumps(inner)] == [name]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", ["", "a\0b", "x" * 201, "\ud800", "é" * 90])
def test_impossible_names_are_refused(tmp_path, format, name):
    path = target(tmp_path, format)
    with pytest.raises(UnsupportedError, match="session"):
        write_dump(make(name), path, format)
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


@settings(deadline=None, max_examples=200)
@given(names=st.lists(st.text(min_size=1, max_size=12), min_size=2, max_size=2, unique=True))
def test_two_names_never_share_a_file(names):
    from pltpack.names import session_to_file

    try:
        first, second = map(session_to_file, names)
    except UnsupportedError:
        return
    assert first != second and "/" not in first + second


# Whole or not at all


class Failing:
    """A source that fails at its second layer."""

    def __init__(self, inner, error):
        self.inner, self.error = inner, error

    def layer(self, index, start, stop):
        if index:
            raise self.error
        return self.inner.layer(index, start, stop)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("error", [DumpError("broken"), OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_write_leaves_what_was_there(tmp_path, format, error):
    path = target(tmp_path, format)
    good = make(layers=[(1, 2, 2, "BF16")] * 3)
    (file,) = write_dump(good, path, format)
    before = file.read_bytes()
    bad = dataclasses.replace(good, source=Failing(good.source, error))
    with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else DumpError):
        write_dump(bad, path, format)
    assert file.read_bytes() == before
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [file]


@pytest.mark.parametrize("format", FORMATS)
def test_arrays_that_break_their_geometry_are_not_written(tmp_path, format):
    good, other = make(layers=[(1, 2, 2, "BF16")]), make(layers=[(1, 3, 2, "BF16")])
    with pytest.raises(DumpError, match="not as the identity says"):
        write_dump(dataclasses.replace(good, source=other.source), target(tmp_path, format), format)
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


@pytest.mark.parametrize("format", FORMATS)
def test_bad_tokens_are_not_written(tmp_path, format):
    for tokens in (np.array([1, 2, 3, 4, -5], np.int32), np.zeros(5, np.float32)):
        with pytest.raises(DumpError, match="session 's'"):
            write_dump(dataclasses.replace(make(), tokens=tokens), target(tmp_path, format), format)


def test_a_target_of_the_wrong_kind(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConflictError, match="not a folder"):
        write_dump(make(), tmp_path / "file", "safetensors")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConflictError, match="is a folder"):
        write_dump(make(), tmp_path / "folder", "hdf5")


def test_a_dump_can_be_rewritten_in_place(tmp_path):
    write_dump(make("s", 50), tmp_path, "safetensors")
    write_dump(open_dumps(tmp_path), tmp_path, "safetensors")
    assert_same(make("s", 50), *open_dumps(tmp_path))


# Tokens


def without_tokens(folder, session="s", count=5):
    """A transformers file that holds no token ids."""
    arrays = {f"layers.0.{part}": np.zeros((1, 2, count, 4), np.float32) for part in ("key", "value")}
    plain_safetensors(folder / f"{session}.safetensors", **arrays)
    return folder / f"{session}.safetensors"


@pytest.mark.parametrize("sidecar", ["s.tokens.json", "s.safetensors.tokens.json"])
@pytest.mark.parametrize("content", [[5, 6, 7, 8, 2**31 - 1], {"s": [5, 6, 7, 8, 2**31 - 1], "t": "ignored"}])
def test_tokens_from_a_sidecar(tmp_path, sidecar, content):
    file = without_tokens(tmp_path)
    (tmp_path / sidecar).write_text(json.dumps(content))
    for path in (file, tmp_path):
        (found,) = open_dumps(path)
        assert found.tokens.tolist() == [5, 6, 7, 8, 2**31 - 1]


def test_tokens_from_a_file_for_all(tmp_path):
    (tmp_path / "in").mkdir()
    for name in ("s", "t"):
        without_tokens(tmp_path / "in", name)
    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps({"s": [1] * 5, "t": [2] * 5}))
    assert [int(s.tokens[0]) for s in open_dumps(tmp_path / "in", tokens=tokens)] == [1, 2]
    tokens.write_text(json.dumps([1] * 5))
    with pytest.raises(DumpError, match="one list of tokens cannot serve both 's' and 't'"):
        list(open_dumps(tmp_path / "in", tokens=tokens))


def test_missing_tokens(tmp_path):
    with pytest.raises(DumpError, match=r"no token ids; put a JSON list into s\.safetensors\.tokens\.json .*--tokens"):
        list(open_dumps(without_tokens(tmp_path)))
    with pytest.raises(NotFoundError, match="no such token file"):
        open_dumps(tmp_path, tokens=tmp_path / "nowhere.json")


@pytest.mark.parametrize(
    "content, fact",
    [
        ("[1,2,3,4]", "4 token ids but its caches hold 5"),
        ("[1,2,3,4,-5]", "outside"),
        ("[1,2,3,4,2147483648]", "outside"),
        ("[1,2,3,4,5.0]", "not a list of integers"),
        ("[1,2,3,4,true]", "not a list of integers"),
        ("[[1,2,3,4,5]]", "not a list of integers"),
        ('"12345"', "neither a list"),
        ('{"s": 5}', "neither a list"),
        ("[1,2,3,4,5", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("\xff", "not valid JSON"),
    ],
)
def test_bad_token_files(tmp_path, content, fact):
    file = without_tokens(tmp_path)
    (tmp_path / "s.tokens.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(DumpError, match=fact):
        list(open_dumps(file))


def test_token_arrays():
    assert token_ids(np.array([1, 2], np.uint64), "x").dtype == np.int32
    for bad in (np.array([1.0]), np.array([[1]]), np.array([2**31]), np.array([-1]), np.array([True]), "12", None):
        with pytest.raises(DumpError, match="x"):
            token_ids(bad, "x")


# Third parties


class RawFormat(DumpFormat):
    """A format of one line."""

    format_id = "raw"

    def sniff(self, path, head):
        return head.startswith(b"RAW")

    def read(self, path, tokens):
        yield dataclasses.replace(make(path.read_text()[3:]), tokens=tokens.require(path, path.stem, 5))

    def write(self, snapshots, path):
        path.write_text("RAW" + "".join(snapshot.session for snapshot in snapshots))
        return [path]


STORES = ["vllm-example", "vllm-offload", "lmcache", "sglang-hicache"]


def test_formats_of_third_parties(tmp_path, monkeypatch):
    from importlib.metadata import EntryPoint

    points = [
        EntryPoint("raw", f"{__name__}:RawFormat", "pltpack.dumps"),
        EntryPoint("hdf5", "nowhere:Evil", "pltpack.dumps"),
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: points if group == "pltpack.dumps" else [])
    registry._classes.cache_clear()
    try:
        assert format_names() == ["safetensors", "hdf5", "transformers", "llama.cpp", "mlx", *STORES, "raw"]
        assert type(dump_format("hdf5")).__name__ == "Hdf5Format"
        write_dump(make("abc"), tmp_path / "abc.raw", "raw")
        (tmp_path / "tokens.json").write_text("[1,2,3,4,5]")
        (found,) = open_dumps(tmp_path, tokens=tmp_path / "tokens.json")
        assert found.session == "abc" and found.tokens.tolist() == [1, 2, 3, 4, 5]
    finally:
        registry._classes.cache_clear()


def test_heavy_libraries_are_imported_when_needed():
    import subprocess
    import sys

    code = "import sys, pltpack.dumps; print({'torch', 'h5py', 'transformers', 'numba'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
