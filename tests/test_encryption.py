"""Encrypted archives: everything works with the key, nothing is told without it, and nothing can be altered."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import json
import shutil
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from archives import equal_bits, session
from cli_common import done, run
from hypothesis import given, settings
from hypothesis import strategies as st

import pltpack
from pltpack.errors import ConflictError, EncryptionError, FormatError, PltpackError, UnsupportedError
from pltpack.format import sealing
from pltpack.format.manifest import NAME
from pltpack.format.sealing import FileSeal, key_id, parse_key, using_key

pytest.importorskip("cryptography")

KEY, OTHER = bytes(range(32)), bytes(32)


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(sealing.KEY_VARIABLE, raising=False)
    monkeypatch.delenv(sealing.FILE_VARIABLE, raising=False)


def ids(seed: int, count: int = 80) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 500, count)


def sessions() -> list:
    shared = ids(1)
    return [session("secret-a", shared), session("secret-b", [*shared, 3, 4, 5]), session("c", shared, salt="tenant")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("encrypted") / "archive"
    with using_key(KEY):
        pltpack.compress(sessions(), path, quality="lossless", encrypt=True)
    return path


def test_a_whole_life(tmp_path: Path):
    path = tmp_path / "archive"
    first, later = sessions(), session("d", [*ids(1)[:64], *ids(2)])
    with using_key(KEY):
        assert pltpack.compress(first, path, quality="lossless", encrypt=True)["shared_tokens"] > 0
        pltpack.append(path, [later])
        pltpack.compact(path)
        assert pltpack.verify(path, against=[*first, later])["differences"] == []
        with pltpack.open(path) as archive, archive.loader() as loader:
            assert equal_bits(archive.read("secret-a"), first[0])
            part = archive.read("d", layers=range(1, 2), tokens=slice(10, 90))
            assert np.array_equal(part.layer(0)[0].view(np.uint16), later.layer(1, 10, 90)[0].view(np.uint16))
            assert len(loader.load(loader.lookup(later.tokens))) == len(later.identity.layers)
        pltpack.export_session(path, "d", tmp_path / "d.session")
        assert pltpack.import_session(tmp_path / "alone", tmp_path / "d.session") == "d"
        with pytest.raises(ConflictError):
            pltpack.import_session(path, tmp_path / "d.session")
        pltpack.compress(first, tmp_path / "plain", quality="lossless")
        with pytest.raises(UnsupportedError, match="encrypted for another archive"):
            pltpack.import_session(tmp_path / "plain", tmp_path / "d.session")
    for file in [*(p for p in path.rglob("*") if p.is_file()), tmp_path / "d.session"]:
        data = file.read_bytes()
        assert b"secret" not in data and b"tenant" not in data and b"toy" not in data, file
        assert "secret" not in str(file.relative_to(tmp_path))


@pytest.mark.parametrize("quality", ["q4", "turboquant-3"])
def test_other_tiers(tmp_path: Path, quality: str):
    with using_key(KEY):
        pltpack.compress(sessions(), tmp_path / "a", quality=quality, encrypt=True)
        pltpack.compress(sessions(), tmp_path / "b", quality=quality)
        pltpack.verify(tmp_path / "a")
        with pltpack.open(tmp_path / "a") as one, pltpack.open(tmp_path / "b") as two:
            for name in two.sessions:
                assert equal_bits(one.read(name), two.read(name))


def test_keys(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(EncryptionError, match=f"encrypted with key {key_id(KEY)}, and none is given"):
        pltpack.open(whole)
    with using_key(OTHER), pytest.raises(EncryptionError, match=f"the one given is {key_id(OTHER)}"):
        pltpack.open(whole)
    with pytest.raises(EncryptionError, match="no key to encrypt with"):
        pltpack.compress(sessions(), tmp_path / "a", encrypt=True)
    assert not (tmp_path / "a").exists()
    for text in (KEY.hex(), KEY.hex() + "\n", base64.b64encode(KEY).decode()):
        monkeypatch.setenv(sealing.KEY_VARIABLE, text)
        pltpack.open(whole).close()
    monkeypatch.delenv(sealing.KEY_VARIABLE)
    (tmp_path / "key").write_bytes(KEY)
    monkeypatch.setenv(sealing.FILE_VARIABLE, str(tmp_path / "key"))
    pltpack.open(whole).close()
    for bad in (b"", b"x" * 31, KEY.hex().encode()[:-1], b"zz" * 32):
        with pytest.raises(EncryptionError, match="not a key"):
            parse_key(bad)
    monkeypatch.setenv(sealing.FILE_VARIABLE, str(tmp_path))
    with pytest.raises(EncryptionError):
        pltpack.open(whole)


def test_the_command_line(dumps: Path, tmp_path: Path):
    key = tmp_path / "key"
    key.write_text(KEY.hex() + "\n")
    done("compress", dumps, "-o", tmp_path / "a", "--quality", "lossless", "--encrypt", "--key-file", key)
    shown = json.loads(done("inspect", tmp_path / "a", "--json"))
    assert set(shown) == {"path", "encrypted"} and set(shown["encrypted"]) == {"generation", "key", "cipher", "files"}
    assert "encrypted with key" in done("inspect", tmp_path / "a")
    assert len(json.loads(done("inspect", tmp_path / "a", "--json", "--key-file", key))["sessions"]) == 3
    assert run("verify", tmp_path / "a").exit_code == 2
    done("verify", tmp_path / "a", "--key-file", key, "--against", dumps)
    done("decompress", tmp_path / "a", "-o", tmp_path / "out", "--key-file", key)
    done("convert", tmp_path / "a", tmp_path / "converted", "--to", "transformers", "--key-file", key)
    forgotten = run("compress", dumps, "-o", tmp_path / "b", "--quality", "q4", "--key-file", key)
    assert forgotten.exit_code == 2 and "--encrypt" in forgotten.output and not (tmp_path / "b").exists()
    for command in (("bench", "loader"), ("score",)):
        assert "--key-file" in done(*command, "--help")
    done("compress", dumps, "-o", tmp_path / "plain", "--quality", "q4")
    before = (tmp_path / "plain" / NAME).read_bytes()
    (more,) = pltpack.write_dump(dataclasses.replace(next(pltpack.open_dumps([dumps])), session="later"), tmp_path)
    idle = run("append", tmp_path / "plain", more, "--key-file", key)
    assert idle.exit_code == 2 and "the archive is not encrypted" in idle.output
    assert (tmp_path / "plain" / NAME).read_bytes() == before
    done("append", tmp_path / "a", more, "--key-file", key)


def test_a_wrong_key_for_an_exported_session_names_its_file(whole: Path, tmp_path: Path):
    with using_key(KEY):
        pltpack.export_session(whole, "c", tmp_path / "c.session")
    for key in (None, OTHER):
        with using_key(key) if key else contextlib.nullcontext(), pytest.raises(EncryptionError) as error:
            pltpack.import_session(tmp_path / "new", tmp_path / "c.session")
        assert error.value.path == str(tmp_path / "c.session")
    assert not (tmp_path / "new").exists()


def test_no_nonce_is_used_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    used: Counter = Counter()
    plain = FileSeal.seal

    def seal(self: FileSeal, role: bytes, number: int, *rest: bytes) -> bytes:
        used[self.header["salt"], role, number] += 1
        return plain(self, role, number, *rest)

    monkeypatch.setattr(FileSeal, "seal", seal)
    with using_key(KEY):
        pltpack.compress(sessions(), tmp_path / "a", quality="lossless", encrypt=True)
        with pytest.raises(ConflictError):
            pltpack.append(tmp_path / "a", [session("d", ids(5)), sessions()[0]])
        pltpack.append(tmp_path / "a", [session("d", ids(5))])
        pltpack.append(tmp_path / "a", [session("e", [*ids(5), 1, 2])])
        pltpack.compact(tmp_path / "a")
    assert len(used) > 50 and max(used.values()) == 1


def test_swapped_and_rolled_back_parts_are_refused(tmp_path: Path):
    path = tmp_path / "a"
    with using_key(KEY):
        pltpack.compress([session("a", ids(7, 700)), session("b", ids(8, 700))], path, quality="lossless", encrypt=True)
        with pltpack.open(path) as archive:
            shard = archive.shard("a")
            units, at, file = shard.units.copy(), shard.container._payload_at, Path(shard.container.path)
        data = file.read_bytes()
        # Two units of one length would be told apart by their numbers; here each goes where the other was.
        first, second = (slice(at + int(units[i]["offset"]) + 16 * i,
                               at + int(units[i]["offset"]) + 16 * i + int(units[i]["length"]) + 16)
                         for i in (0, 1))  # fmt: skip
        swapped = data[: first.start] + data[second] + data[first] + data[second.stop :]
        assert len(swapped) == len(data)
        file.write_bytes(swapped)
        with pltpack.open(path) as archive, pytest.raises(FormatError, match="altered or moved"):
            archive.read("a")
        file.write_bytes(data)
        # A shard of the former generation, or of another archive with the same key, under the present one's name.
        pltpack.compress([session("a", ids(7, 700))], tmp_path / "other", quality="lossless", encrypt=True)
        other = next((tmp_path / "other" / "shards").iterdir()).read_bytes()
        file.write_bytes(other)
        with pltpack.open(path) as archive, pytest.raises(FormatError):
            archive.read("a")
        # The same with the manifest made to fit: it cannot be, without the key.
        body = json.loads((path / NAME).read_bytes())
        body["body"]["generation"] += 1
        body["sha256"] = hashlib.sha256(sealing.canonical(body["body"])).hexdigest()
        (path / NAME).write_text(json.dumps(body))
        with pytest.raises(FormatError, match="altered or moved"):
            pltpack.open(path)


@settings(max_examples=60)
@given(st.data())
def test_every_altered_byte_is_caught(whole: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject):
    files = sorted(p.relative_to(whole) for p in whole.rglob("*") if p.is_file() and p.name != ".lock")
    name = data.draw(st.sampled_from(files))
    original = (whole / name).read_bytes()
    at = data.draw(st.integers(0, len(original) - 1))
    bit = 1 << data.draw(st.integers(0, 7))
    copy = tmp_path_factory.getbasetemp() / "altered"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(whole, copy)
    changed = bytearray(original)
    changed[at] ^= bit
    (copy / name).write_bytes(bytes(changed))
    with using_key(KEY):
        try:
            pltpack.verify(copy)
        except PltpackError:
            return
        # White space between the members of the manifest's outer object is no part of what is said.
        assert name.name == NAME and json.loads(bytes(changed)) == json.loads(original)


GOLDEN = Path(__file__).parents[1] / "fixtures" / "encrypted"


def test_the_golden_archive_is_read_by_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    sys.path.insert(0, str(GOLDEN.parents[1] / "spec"))
    import reference_decoder

    wanted = json.loads((GOLDEN / "case.json").read_text())
    assert reference_decoder.main([str(GOLDEN / "archive"), str(tmp_path / "none")]) == 2
    assert "encrypted, and no key is given" in capsys.readouterr().err
    monkeypatch.setenv(sealing.FILE_VARIABLE, str(GOLDEN / "key"))
    pltpack.decompress(GOLDEN / "archive", tmp_path / "out")
    reference_decoder.decode(GOLDEN / "archive", tmp_path / "reference")
    for folder in (tmp_path / "out", tmp_path / "reference"):
        assert {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()} == wanted
    pltpack.verify(GOLDEN / "archive")
    monkeypatch.setenv(sealing.KEY_VARIABLE, OTHER.hex())
    assert reference_decoder.main([str(GOLDEN / "archive"), str(tmp_path / "wrong")]) == 2
    assert "is encrypted with key" in capsys.readouterr().err
