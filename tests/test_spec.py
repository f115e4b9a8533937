"""The rules of the specification: each broken archive gives one error that names the file, in both decoders."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xxhash
from click.testing import CliRunner

import pltpack
from benchmarks import broken
from benchmarks.surgery import Surgery
from pltpack.errors import FormatError, UnsupportedError
from pltpack.format import container, json_text, manifest, state, tables
from pltpack_cli.main import program

ROOT = Path(__file__).parents[1]
GOLDEN, BROKEN = ROOT / "fixtures" / "golden", ROOT / "fixtures" / "broken"
INDEX = json.loads((BROKEN / "index.json").read_text())

sys.path.append(str(ROOT / "spec"))
import reference_container  # noqa: E402
import reference_decoder  # noqa: E402
from reference_xxh3 import xxh3_64  # noqa: E402


@pytest.fixture
def archive(name, tmp_path):
    """The broken archive: a stored one as it is, another one made now."""
    if INDEX[name]["stored"]:
        return BROKEN / name
    broken.make(name, GOLDEN, tmp_path / "archive")
    return tmp_path / "archive"


@pytest.mark.parametrize("name", INDEX)
def test_a_broken_archive_gives_one_error_that_names_the_file(name, archive):
    result = CliRunner().invoke(program, ["verify", str(archive)])
    lines = result.stderr.splitlines()
    assert result.exit_code == 2
    assert len(lines) == 1
    where = archive if INDEX[name]["file"] == "." else archive / INDEX[name]["file"]
    assert lines[0].startswith(f"pltpack: error: {where}: {INDEX[name]['error']}")
    assert result.stdout == ""


@pytest.mark.parametrize("name", INDEX)
def test_the_reference_decoder_refuses_it_too(name, archive, tmp_path, capsys):
    assert reference_decoder.main([str(archive), str(tmp_path / "out")]) == 2
    printed = capsys.readouterr()
    assert re.fullmatch(rf"error: {re.escape(str(archive))}/[^\n]+\n", printed.err)
    assert printed.out == ""


def test_every_recipe_is_in_the_index_and_enough_are_stored():
    assert set(broken.load_recipes()) == set(INDEX)
    stored = {name for name, entry in INDEX.items() if entry["stored"]}
    assert stored == {path.name for path in BROKEN.iterdir() if path.is_dir()}
    assert len(stored) >= 12


def test_bombs_are_refused_without_taking_memory(tmp_path):
    bombs = ("manifest-many-lists", "manifest-deep-body", "header-many-lists", "metadata-states-deep", "state-bomb",
             "state-header-deep", "lossless-frame-size", "tensor-shape-huge", "node-units-many")  # fmt: skip
    for name in bombs:
        broken.make(name, GOLDEN, tmp_path / name)
    code = """
import resource, sys
import pltpack
pltpack.verify(sys.argv[1])  # everything is loaded and compiled
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for name in sys.argv[2:]:
    try:
        pltpack.verify(name)
    except pltpack.PltpackError:
        continue
    raise SystemExit(f"{name} was read")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    sound = GOLDEN / broken.BASES["lossless"] / "archive"
    command = [sys.executable, "-c", code, sound, *(tmp_path / name for name in bombs)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) * 1024 < 300 << 20


def test_a_unit_read_alone_is_checked_by_its_checksum():
    with pltpack.open(BROKEN / "payload-flip") as opened:
        with pytest.raises(FormatError, match="does not match its checksum"):
            opened.read("b")
        opened.read("a")


def test_what_is_marked_ignorable_is_ignored(tmp_path):
    golden = GOLDEN / broken.BASES["lossless"]
    surgery = Surgery(golden / "archive")
    surgery.body.update({"version": [1, 7], "x-note": {"of": ["a", "later", "version"]}})
    for part in surgery.parts.values():
        part.metadata.update({"format_version": "1.7", "x-note": "anything"})
        part.tensors["x-extra"] = np.arange(9, dtype=np.uint8)
    surgery.save(tmp_path / "archive")
    pltpack.verify(tmp_path / "archive")
    pltpack.decompress(tmp_path / "archive", tmp_path / "package")
    pltpack.decompress(golden / "archive", tmp_path / "original")
    reference_decoder.decode(tmp_path / "archive", tmp_path / "reference")
    for path in (tmp_path / "original").iterdir():
        assert path.read_bytes() == (tmp_path / "package" / path.name).read_bytes()
        assert path.read_bytes() == (tmp_path / "reference" / path.name).read_bytes()


def test_the_surgery_alone_breaks_nothing(tmp_path):
    golden = GOLDEN / broken.BASES["lossless"] / "archive"
    Surgery(golden).save(tmp_path / "archive")
    pltpack.verify(tmp_path / "archive")
    reference_decoder.decode(tmp_path / "archive", tmp_path / "out")


def test_the_reference_decoder_runs_alone(tmp_path):
    for path in (ROOT / "spec").glob("*.py"):
        shutil.copy(path, tmp_path)
    golden = GOLDEN / broken.BASES["group"] / "archive"
    for source, code in ((golden, 0), (BROKEN / "head-flip", 2), (tmp_path / "nothing", 2)):
        command = [sys.executable, "-E", tmp_path / "reference_decoder.py", source, tmp_path / f"out-{source.name}"]
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert result.returncode == code, result.stderr
        assert len(result.stderr.splitlines()) == (code == 2)
    assert (tmp_path / "out-archive" / "a.safetensors").is_file()


def test_the_reference_decoder_imports_nothing_of_the_package():
    allowed = {"numpy", "zstandard"} | set(sys.stdlib_module_names)
    for path in (ROOT / "spec").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert name.split(".")[0] in allowed or name.startswith("reference_"), f"{path.name} imports {name}"


def test_the_text_gives_the_numbers_of_the_code():
    text = (ROOT / "spec" / "format.md").read_text()
    for name, record in (("unit.index", tables.UNIT), ("map", tables.RUN), ("trie.nodes", tables.NODE)):
        assert f"`{name}`, `U8 [n, {record.itemsize}]`" in text
    for what, number in (
        ("manifest", manifest.MAX_BYTES), ("tensors of a container without its payload", container.MAX_TABLE_BYTES),
        ("tokens of a session", tables.MAX_TOKENS), ("layers", tables.MAX_LAYERS),
    ):  # fmt: skip
        assert f"| {what} | 2^{number.bit_length() - 1}" in text
        assert number & (number - 1) == 0
    assert f"{container.MAX_HEADER_BYTES:,} bytes" in text
    assert (tables.MAX_UNIT_TOKENS, tables.MAX_UNIT_BYTES) == (1 << 16, 1 << 30)
    assert (state.MAX_STATE_BYTES, state.MAX_HEADER_BYTES) == (1 << 28, 1 << 20)
    assert (json_text.MAX_BRACKETS, json_text.MAX_COMMAS, json_text.MAX_DEPTH) == (1 << 20, 1 << 21, 64)
    assert "| 2^16, 2^30 |" in text
    assert "| 2^28, 2^20 bytes |" in text
    assert "| 2^20, 2^21, 64 |" in text


def nested(depth: int) -> str:
    """Arrays and objects by turns, with much beside them that nests nothing."""
    text = '"[[[{{{"'
    for level in range(depth):
        text = f"[1,[],{text},{{}}]" if level % 2 else f'{{"a":0,"[":{text}}}'
    return text


@pytest.mark.parametrize("depth", [0, 1, 63, 64])
def test_json_as_deep_as_the_text_allows(depth):
    assert json_text.parse(nested(depth)) == reference_container.parse_json(nested(depth)) == json.loads(nested(depth))


@pytest.mark.parametrize("text", [nested(65), "[" * 65 + "]" * 65, '{"":' * 65 + "0" + "}" * 65, nested(5000)])
def test_json_that_is_deeper_is_refused_by_both(text):
    with pytest.raises(ValueError, match="too deeply"):
        json_text.parse(text)
    with pytest.raises(reference_container.DamagedError):
        reference_container.parse_json(text)


def test_an_identity_too_deep_for_a_manifest_makes_no_archive(tmp_path):
    rope: dict[str, object] = {}
    for _ in range(64):
        rope = {"x": rope}
    values = np.zeros((1, 2, 4), np.float32)
    deep = pltpack.Snapshot.from_arrays("s", [1, 2], [(values, values)], pltpack.Identity(rope=rope))
    with pytest.raises(UnsupportedError, match="could not be read back"):
        pltpack.compress([deep], tmp_path / "a")
    assert not list(tmp_path.iterdir())


def test_the_reference_checksum_is_xxh3():
    rng = np.random.default_rng(0)
    for size in (*range(300), 1023, 1024, 1025, 1088, 2047, 2048, 2049, 70_001):
        data = rng.bytes(size)
        assert xxh3_64(data) == xxhash.xxh3_64_intdigest(data)
