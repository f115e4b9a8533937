"""The command line reaches the archive and comes back, and shows what it found."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from cli_common import IDENTITY, LAYERS, LENGTHS, PREFIX, done, done_json, run, write_dump, write_dumps
from safetensors.numpy import load_file, save_file

from pltpack.snapshot import Identity
from pltpack_cli.options import IDENTITY_FIELDS


def assert_same_file(mine: Path, theirs: Path) -> None:
    a, b = load_file(mine), load_file(theirs)
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype
        assert a[name].tobytes() == b[name].tobytes()


class TestCorridor:
    def test_lossless_comes_back_bit_by_bit(self, dumps: Path, archive: Path, tmp_path: Path) -> None:
        text = done("decompress", archive, "-o", tmp_path / "out")
        assert "3 files" in text
        for name in LENGTHS:
            assert_same_file(tmp_path / "out" / f"{name}.safetensors", dumps / f"{name}.safetensors")

    def test_default_quality_is_q4(self, dumps: Path, tmp_path: Path) -> None:
        stats = done_json("compress", dumps, "-o", tmp_path / "a")
        assert stats["quality"] == "q4"
        rule = "[default: balanced with a profile, fixed-step if it was made of dumps alone, else q4]"
        assert rule in " ".join(done("compress", "--help").split())

    def test_stats_for_people_and_machines_agree(self, dumps: Path, tmp_path: Path) -> None:
        stats = done_json("compress", dumps, "-o", tmp_path / "a", "--quality", "lossless")
        text = done("compress", dumps, "-o", tmp_path / "b", "--quality", "lossless")
        assert stats["tokens"] == sum(LENGTHS.values())
        assert stats["shared_tokens"] == 2 * PREFIX
        assert f"{stats['raw_bytes']:,} bytes" in text
        assert f"{stats['tokens']:,} ({stats['shared_tokens']:,} shared)" in text
        assert f"{stats['ratio']:.2f}x" in text

    def test_no_dedup_and_block(self, dumps: Path, tmp_path: Path) -> None:
        stats = done_json("compress", dumps, "-o", tmp_path / "a", "--quality", "lossless", "--no-dedup", "--block", 16)
        assert stats["shared_tokens"] == 0
        assert done_json("inspect", tmp_path / "a")["block"] == 16

    def test_append_compact_gc(self, dumps: Path, tmp_path: Path) -> None:
        target = tmp_path / "a"
        done("compress", dumps / "alpha.safetensors", "-o", target, "--quality", "lossless")
        stats = done_json("append", target, dumps / "beta.safetensors", dumps / "gamma.safetensors")
        assert (stats["sessions"], stats["quality"]) == (3, "lossless")
        before = done_json("inspect", target)
        for segment in before["libraries"]:
            for node in segment["nodes"]:
                rows = [row for entry in before["sessions"] for row in entry["mapping"]]
                behind = [row for row in rows if (row["library"], row["node"]) == (segment["file"], node["node"])]
                assert node["sessions"] == len(behind) > 0
        after = done_json("compact", target)
        assert after["sessions"] == 3
        assert len(done_json("inspect", target)["libraries"]) == 1 <= len(before["libraries"])
        assert done("gc", target).strip() == "0 files removed"
        (target / "library-000099.pltlib").write_bytes(b"left over")
        assert done_json("gc", target) == {"removed": ["library-000099.pltlib"]}
        assert done_json("verify", target, "--against", dumps)["differences"] == []

    def test_export_and_import(self, dumps: Path, archive: Path, tmp_path: Path) -> None:
        file = tmp_path / "beta.session"
        exported = done_json("export-session", archive, "beta", "-o", file)
        assert exported == {"session": "beta", "file": str(file), "bytes": file.stat().st_size}
        assert done_json("import-session", tmp_path / "other", file)["session"] == "beta"
        done("decompress", tmp_path / "other", "-o", tmp_path / "out")
        assert_same_file(tmp_path / "out" / "beta.safetensors", dumps / "beta.safetensors")

    def test_tokens_file_serves_dumps_without_ids(self, dumps: Path, tmp_path: Path) -> None:
        tensors = load_file(dumps / "alpha.safetensors")
        ids = tensors.pop("tokens").tolist()
        layers = {f"layers.{i}.key": tensors[f"layers.{i}.keys"][None] for i in range(LAYERS)}
        layers |= {f"layers.{i}.value": tensors[f"layers.{i}.values"][None] for i in range(LAYERS)}
        save_file(layers, tmp_path / "cache.safetensors")
        (tmp_path / "ids.json").write_text(json.dumps(ids))
        compress = ("compress", tmp_path / "cache.safetensors", "-o", tmp_path / "a", "--quality", "lossless")
        refused = run(*compress)
        assert refused.exit_code == 2
        stats = done_json(*compress, "--tokens", tmp_path / "ids.json", "--from", "transformers")
        assert stats["tokens"] == LENGTHS["alpha"]


class TestPartsAndIdentity:
    def test_random_access(self, dumps: Path, archive: Path, tmp_path: Path) -> None:
        report = done_json("decompress", archive, "-o", tmp_path / "out", "--session", "beta", "--layers", "1:",
                           "--tokens", "60:70")  # fmt: skip
        assert report["files"] == [str(tmp_path / "out" / "beta.safetensors")]
        part, whole = load_file(report["files"][0]), load_file(dumps / "beta.safetensors")
        assert part["tokens"].tolist() == whole["tokens"][60:70].tolist()
        assert len(part) == 1 + 2 * (LAYERS - 1)
        assert part["layers.0.keys"].tobytes() == whole["layers.1.keys"][:, 60:70].tobytes()

    @pytest.mark.parametrize(("layers", "count"), [(":1", 1), ("0:2", 2), (":", 3)])
    def test_layer_spans(self, archive: Path, tmp_path: Path, layers: str, count: int) -> None:
        done("decompress", archive, "-o", tmp_path / "out", "--session", "gamma", "--layers", layers)
        assert len(load_file(tmp_path / "out" / "gamma.safetensors")) == 1 + 2 * count

    def test_other_format(self, archive: Path, tmp_path: Path) -> None:
        done("decompress", archive, "-o", tmp_path / "all.h5", "--to", "hdf5")
        assert done_json("verify", archive, "--against", tmp_path / "all.h5")["differences"] == []

    def test_identity_must_match(self, dumps: Path, archive: Path, tmp_path: Path) -> None:
        other = tmp_path / "identity.json"
        other.write_text(json.dumps(IDENTITY | {"model": "other"}))
        refused = run("decompress", archive, "-o", tmp_path / "out", "--identity", other)
        assert refused.exit_code == 2
        assert "'model' differs: 'toy' against 'other'" in refused.stderr
        assert not (tmp_path / "out").exists()
        done("decompress", archive, "-o", tmp_path / "out", "--identity", dumps / "alpha.safetensors")

    def test_unknown_field_needs_consent(self, archive: Path, tmp_path: Path) -> None:
        mine = tmp_path / "identity.json"
        mine.write_text(json.dumps(IDENTITY | {"weights": "sha256:ab"}))
        command = ("decompress", archive, "-o", tmp_path / "out", "--identity", mine)
        refused = run(*command)
        assert refused.exit_code == 2
        assert "--accept-unknown weights" in refused.stderr
        done(*command, "--accept-unknown", "weights")

    def test_inspect_output_serves_as_identity(self, archive: Path, tmp_path: Path) -> None:
        (tmp_path / "inspect.json").write_text(done("inspect", archive, "--json"))
        done("decompress", archive, "-o", tmp_path / "out", "--identity", tmp_path / "inspect.json")

    @pytest.mark.parametrize("text", ["[]", "{", '{"identity": {"colour": "red"}}', '{"layers": 7}'])
    def test_bad_identity_names_its_file(self, archive: Path, tmp_path: Path, text: str) -> None:
        (tmp_path / "bad.json").write_text(text)
        result = run("decompress", archive, "-o", tmp_path / "out", "--identity", tmp_path / "bad.json")
        assert result.exit_code == 2
        assert result.stderr.startswith(f"pltpack: error: {tmp_path / 'bad.json'}: ")

    def test_identity_fields_are_the_librarys(self) -> None:
        assert set(IDENTITY_FIELDS) == set(Identity.__dataclass_fields__)


class TestInspectAndVerify:
    def test_tree(self, archive: Path) -> None:
        text = done("inspect", archive)
        assert "3 × (2 heads, K 8, V 8, BF16)" in text
        assert "tokens 0:64  from library-000001.pltlib" in text
        assert "library-000001.pltlib" in text
        assert all(name in text for name in LENGTHS)
        assert "\x1b" not in text

    def test_one_session(self, archive: Path) -> None:
        text = done("inspect", archive, "--session", "beta")
        assert "1 of 3 sessions" in text
        assert "alpha" not in text
        described = done_json("inspect", archive, "--session", "beta")
        assert [entry["session"] for entry in described["sessions"]] == ["beta"]
        assert run("inspect", archive, "--session", "delta").exit_code == 2

    def test_names_from_files_cannot_steer_the_terminal(self, tmp_path: Path) -> None:
        write_dumps(tmp_path / "dumps", IDENTITY | {"model": "evil\x1b[2J\nmodel [bold]x[/bold]"})
        done("compress", tmp_path / "dumps", "-o", tmp_path / "a", "--quality", "lossless")
        text = done("inspect", tmp_path / "a")
        assert "\x1b" not in text
        assert "evil\\x1b[2J\\nmodel [bold]x[/bold]" in text

    def test_tenants_are_shown(self, tmp_path: Path) -> None:
        for seed, name in enumerate(("mine", "open")):
            salted = {**IDENTITY, "salt": "acme [bold]\n"} if name == "mine" else IDENTITY
            write_dump(tmp_path / "dumps", name, np.arange(40), seed, salted)
        done("compress", tmp_path / "dumps", "-o", tmp_path / "a", "--quality", "lossless")
        described = done_json("inspect", tmp_path / "a")["sessions"]
        assert {entry["session"]: entry["salt"] for entry in described} == {"mine": "acme [bold]\n", "open": None}
        text = done("inspect", tmp_path / "a")
        assert "mine  salt acme [bold]\\n, 40 tokens" in text
        assert "open  40 tokens" in text

    def test_difference_exits_with_1(self, dumps: Path, archive: Path, tmp_path: Path) -> None:
        changed = load_file(dumps / "alpha.safetensors")
        changed["layers.2.values"][1, 70, 3] += 1
        metadata = {"pltpack.dump": "1", "session": "alpha", "identity": json.dumps(IDENTITY)}
        save_file(changed, tmp_path / "alpha.safetensors", metadata)
        result = run(
            "verify", archive, "--against", tmp_path / "alpha.safetensors", dumps / "beta.safetensors", "--json"
        )
        assert result.exit_code == 1
        report = json.loads(result.stdout)
        assert report["compared"]["alpha"]["max_abs_difference"] == pytest.approx(1, rel=0.02)
        assert report["compared"]["beta"]["bit_exact"]
        assert result.stderr.startswith("pltpack: difference: session 'alpha'")
        text = run("verify", archive, "--against", tmp_path).stdout
        assert "alpha: differs by up to" in text
        assert "(of keys or values, in the worst layer)" in text

    def test_missing_session_is_a_difference(self, archive: Path, tmp_path: Path) -> None:
        write_dump(tmp_path, "delta", np.arange(5), 1, IDENTITY)
        result = run("verify", archive, "--against", tmp_path)
        assert result.exit_code == 1
        assert "delta: cannot be compared" in result.stdout

    def test_damage_exits_with_2(self, dumps: Path, tmp_path: Path) -> None:
        done("compress", dumps, "-o", tmp_path / "a", "--quality", "lossless")
        shard = tmp_path / "a" / "shards" / "beta.pltshard"
        data = bytearray(shard.read_bytes())
        data[-100] ^= 1
        shard.write_bytes(data)
        result = run("verify", tmp_path / "a")
        assert result.exit_code == 2
        assert result.stderr.startswith(f"pltpack: error: {shard}: ")
        assert len(result.stderr.splitlines()) == 1

    def test_two_archives_are_a_mistake(self, archive: Path) -> None:
        result = run("verify", archive, archive)
        assert result.exit_code == 2
        assert "--against" in result.stderr
