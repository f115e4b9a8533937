"""Archives made with a profile: parts equal the whole, generations share it, targets are met, errors are clear."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from archives import relative_error
from cli_common import done, done_json, run
from profiles_common import IDENTITY, LAYERS, random_profile, save_profile, session, words

import pltpack
from pltpack.archive import profiles, spans
from pltpack.archive.decoding import span_pieces
from pltpack.archive.settings import Target
from pltpack.codec.profile import Profile
from pltpack.codec.transform import TransformCodec
from pltpack.dumps import open_dumps, write_dump
from pltpack.errors import (
    FormatError,
    IdentityError,
    NotFoundError,
    PromiseError,
    UnsupportedError,
)
from pltpack.snapshot import Snapshot

IDS = np.random.default_rng(3).integers(10, 200, 700)
#: Two that share 64 tokens, one longer than two units, one of four tokens, one without any.
SESSIONS = {
    "alpha": IDS[:100],
    "beta": np.concatenate([IDS[:64], IDS[300:390]]),
    "long": IDS[50:650],
    "short": IDS[400:404],
    "empty": IDS[:0],
}


def snapshots(*names: str) -> list[Snapshot]:
    return [session(name, SESSIONS[name]) for name in names or SESSIONS]


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_profile(tmp_path_factory.mktemp("profile") / "toy.safetensors")


@pytest.fixture(scope="module")
def archive(profile: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("archives") / "a"
    pltpack.compress(snapshots(), path, profile=profile)
    return path


@pytest.fixture
def copy(archive: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(archive, tmp_path / "copy"))


@pytest.fixture
def external(profile: Path, tmp_path: Path) -> Path:
    """An archive without its profile, and not beside it."""
    pltpack.compress(snapshots("alpha", "beta"), tmp_path / "external", external_profile=profile)
    return tmp_path / "external"


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The first positions of all units decoded from now on."""
    found: list[int] = []
    real = TransformCodec.decode_span

    def counted(self, payload, unit, out, reference=None):
        found.append(unit.position)
        return real(self, payload, unit, out, reference)

    monkeypatch.setattr(TransformCodec, "decode_span", counted)
    return found


def bits(snapshot: Snapshot) -> bytes:
    return b"".join(words(a).tobytes() for i in range(len(snapshot.identity.layers)) for a in snapshot.layer(i))


def everything(path: Path, **options) -> dict[str, bytes]:
    with pltpack.open(path, **options) as opened:
        return {name: bits(opened.read(name)) for name in opened.sessions}


def error(a: Snapshot, b: Snapshot) -> float:
    total = 0.0
    for layer in range(len(a.identity.layers)):
        for x, y in zip(a.layer(layer), b.layer(layer), strict=True):
            total += float(np.square(x.astype(np.float64) - y.astype(np.float64)).sum())
    return total


def files(path: Path) -> dict[str, bytes]:
    return {str(f.relative_to(path)): f.read_bytes() for f in sorted(path.rglob("*")) if f.is_file()}


class TestReading:
    def test_sessions_come_back_near(self, archive: Path) -> None:
        with pltpack.open(archive) as opened:
            assert opened.sessions == list(SESSIONS)
            for original in snapshots():
                back = opened.read(original.session)
                assert np.array_equal(back.tokens, original.tokens)
                energy = error(original, Snapshot.from_arrays("z", original.tokens,
                               [(k * 0, v * 0) for k, v in (original.layer(i) for i in range(3))]))  # fmt: skip
                assert error(original, back) < 0.5 * energy or not len(original)
                if len(original):
                    for layer in range(3):
                        pairs = zip(original.layer(layer, 0, 1), back.layer(layer, 0, 1), strict=True)
                        assert all(np.array_equal(words(x), words(y)) for x, y in pairs)

    @pytest.mark.parametrize("name", ["alpha", "beta", "long", "short"])
    def test_parts_equal_the_whole(self, archive: Path, name: str) -> None:
        with pltpack.open(archive) as opened:
            whole = opened.read(name)
            size = len(whole)
            for layers in (range(0, 1), range(1, 2), range(2, 3), range(1, 3), range(0, 3)):
                for start, stop in ((0, size), (0, 1), (size - 1, size), (size // 3, size // 2 + 1)):
                    part = opened.read(name, layers=layers, tokens=slice(start, stop))
                    for index, layer in enumerate(layers):
                        for x, y in zip(part.layer(index), whole.layer(layer, start, stop), strict=True):
                            assert np.array_equal(words(x), words(y))

    def test_layers_on_demand_in_any_order(self, archive: Path) -> None:
        with pltpack.open(archive) as opened:
            whole = opened.read("long")
            lazy = opened.snapshot("long")
            for layer in (2, 0, 1, 0, 2, 1):
                for start, stop in ((0, 600), (100, 300), (599, 600), (5, 5)):
                    for x, y in zip(lazy.layer(layer, start, stop), whole.layer(layer, start, stop), strict=True):
                        assert np.array_equal(words(x), words(y))

    def test_a_unit_is_decoded_once_for_all_layers_in_order(self, archive: Path, decoded: list[int]) -> None:
        with pltpack.open(archive) as opened:
            lazy = opened.snapshot("long")
            for layer in range(3):
                lazy.layer(layer)
        assert sorted(decoded) == sorted([0, 256, 512] * 2)

    @pytest.mark.parametrize("memory", [1 << 28, 100_000, 0])
    def test_a_unit_is_decoded_once_where_layers_are_written_in_slices(
        self, archive: Path, decoded: list[int], memory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(spans, "MEMORY_BYTES", memory)
        with pltpack.open(archive) as opened:
            widest = max(layer.bytes_per_token for layer in opened.identity.layers)
        monkeypatch.setattr("pltpack.dumps.base._SLICE_BYTES", 256 * widest)
        pltpack.decompress(archive, tmp_path / "out", sessions=["long"])
        assert sorted(decoded) == sorted([0, 256, 512] * 2)
        (dump,) = open_dumps(tmp_path / "out")
        with pltpack.open(archive) as opened:
            assert bits(dump) == bits(opened.read("long"))

    @pytest.mark.parametrize("memory", [1 << 28, 0])
    def test_decompressing_equals_reading(self, archive: Path, memory: int, tmp_path: Path,
                                          monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
        monkeypatch.setattr(spans, "MEMORY_BYTES", memory)
        pltpack.decompress(archive, tmp_path / "out")
        whole = everything(archive)
        found = {dump.session: bits(dump) for dump in open_dumps(tmp_path / "out")}
        assert found == whole

    def test_reads_and_writes_of_the_spool_may_be_short(self, archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write, read = os.pwrite, os.preadv
        monkeypatch.setattr(spans, "MEMORY_BYTES", 0)
        monkeypatch.setattr(spans.os, "pwrite", lambda file, data, at: write(file, data[:100], at))
        monkeypatch.setattr(spans.os, "preadv", lambda file, into, at: read(file, [into[0][:999]], at))
        with pltpack.open(archive) as opened:
            assert bits(opened.snapshot("long")) == bits(opened.read("long"))

    def test_a_spool_that_lost_its_end_is_an_error(self, archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(spans, "MEMORY_BYTES", 0)
        monkeypatch.setattr(spans.os, "preadv", lambda file, into, at: 0)
        with pltpack.open(archive) as opened, pytest.raises(OSError, match="shorter") as caught:
            opened.snapshot("long").layer(0)
        assert caught.value.errno == errno.EIO

    def test_parts_of_sessions_are_dumped(self, archive: Path, tmp_path: Path) -> None:
        done("decompress", archive, "-o", tmp_path / "out", "--session", "long", "--layers", "1:3",
             "--tokens", "250:270")  # fmt: skip
        (dump,) = open_dumps(tmp_path / "out")
        with pltpack.open(archive) as opened:
            assert bits(dump) == bits(opened.read("long", range(1, 3), slice(250, 270)))


class TestWriting:
    def test_the_default_tier_needs_a_profile(self, archive: Path, tmp_path: Path) -> None:
        with pltpack.open(archive) as opened:
            assert opened.stats()["quality"] == "balanced"
        assert pltpack.compress(snapshots("alpha"), tmp_path / "q")["quality"] == "q4"
        with pytest.raises(UnsupportedError, match="needs a profile"):
            pltpack.compress(snapshots("alpha"), tmp_path / "n", quality="near")
        assert not (tmp_path / "n").exists()

    def test_shared_tokens_are_stored_once(self, archive: Path, profile: Path, tmp_path: Path) -> None:
        with pltpack.open(archive) as opened:
            stats = opened.stats()
            a, b = (opened.read(name, tokens=slice(0, 64)) for name in ("alpha", "beta"))
            assert bits(a) == bits(b)
        assert stats["shared_tokens"] == 2 * 64
        alone = pltpack.compress(snapshots(), tmp_path / "alone", profile=profile, dedup=False)
        assert alone["shared_tokens"] == 0
        assert alone["archive_bytes"] > stats["archive_bytes"] - 4096

    def test_the_same_bytes_again_and_on_one_core(self, archive: Path, profile: Path, tmp_path: Path,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
        pltpack.compress(snapshots(), tmp_path / "again", profile=profile)
        assert files(tmp_path / "again") == files(archive)
        monkeypatch.setattr(os, "cpu_count", lambda: 1)
        pltpack.compress(snapshots(), tmp_path / "one", profile=profile)
        assert files(tmp_path / "one") == files(archive)

    def test_the_profile_is_told_apart(self, archive: Path, external: Path) -> None:
        with pltpack.open(archive) as opened:
            stats = opened.stats()
        assert 1000 < stats["profile_bytes"] < stats["library_bytes"]
        inspected = done_json("inspect", archive)
        assert inspected["stats"]["profile_bytes"] == stats["profile_bytes"]
        (codec,) = inspected["libraries"][0]["codecs"]
        assert codec["embedded"]
        assert codec["profile"][:16] in done("inspect", archive)
        assert done_json("inspect", external)["stats"]["profile_bytes"] == 0

    def test_captured_importance_is_used(self, profile: Path, tmp_path: Path) -> None:
        plain = session("s", IDS[:200])
        marked = dataclasses.replace(plain, importance=np.exp2(12 * (np.arange(200) == 150)).astype(np.float32))
        sizes = []
        for name, snapshot in (("plain", plain), ("marked", marked)):
            pltpack.compress([snapshot], tmp_path / name, profile=profile, target=Target(bits=2))
            with pltpack.open(tmp_path / name) as opened:
                back = opened.read("s", tokens=slice(150, 151))
                arrays = [plain.layer(index, 150, 151) for index in range(3)]
                sizes.append(error(Snapshot.from_arrays("s", plain.tokens[150:151], arrays), back))
        assert sizes[1] < 0.1 * sizes[0]

    def test_all_dtypes(self, tmp_path: Path) -> None:
        for dtype in ("F32", "F16", "F8_E4M3", "F8_E5M2"):
            identity = dataclasses.replace(IDENTITY, layers=tuple(dataclasses.replace(g, dtype=dtype) for g in LAYERS))
            own = save_profile(tmp_path / f"{dtype}.safetensors", identity)
            pltpack.compress([session("s", IDS[:50], identity)], tmp_path / dtype, profile=own)
            with pltpack.open(tmp_path / dtype) as opened:
                assert opened.read("s").layer(0)[0].dtype == session("s", IDS[:1], identity).layer(0)[0].dtype
            pltpack.verify(tmp_path / dtype)


class TestGenerations:
    def test_the_same_tier_needs_no_profile_again(self, copy: Path) -> None:
        before = everything(copy)
        with pltpack.open(copy) as opened:
            old = opened.stats()
        stats = pltpack.append(copy, [session("more", IDS[:90])])
        assert stats["profile_bytes"] == old["profile_bytes"]
        assert stats["shared_tokens"] > old["shared_tokens"]
        after = everything(copy)
        assert {name: after[name] for name in before} == before
        assert pltpack.verify(copy)["sessions"] == len(SESSIONS) + 1

    def test_another_tier_shares_the_profile(self, copy: Path) -> None:
        with pltpack.open(copy) as opened:
            old = opened.stats()
        fine, coarse = session("fine", IDS[200:300]), session("coarse", IDS[200:300])
        pltpack.append(copy, [fine], quality="near")
        stats = pltpack.append(copy, [coarse], quality="small", dedup=False)
        assert stats["profile_bytes"] == old["profile_bytes"]
        with pltpack.open(copy) as opened:
            assert error(fine, opened.read("fine")) < 0.7 * error(coarse, opened.read("coarse"))
            digests = {library.profile_digest(0) for library in opened.libraries}
            assert len(digests) == 1
            assert [library.embeds(0) for library in opened.libraries] == [True, False, False]

    def test_sessions_map_to_units_of_an_earlier_generation(self, copy: Path, decoded: list[int]) -> None:
        pltpack.append(copy, [session("again", SESSIONS["alpha"])])
        # Two layer groups; each unit of the shared node is looked at once, not once a layer.
        assert decoded.count(0) == 2
        with pltpack.open(copy) as opened:
            assert opened.shard("again").mapped_tokens >= 64
            assert bits(opened.read("again", tokens=slice(0, 64))) == bits(opened.read("alpha", tokens=slice(0, 64)))

    def test_other_values_are_not_taken_for_the_same(self, copy: Path) -> None:
        other = session("other", SESSIONS["alpha"])
        for keys, values in other.source.arrays:
            keys[:, 40:] *= -1
            values[:, 40:] *= -1
        pltpack.append(copy, [other])
        with pltpack.open(copy) as opened:
            assert opened.shard("other").mapped_tokens == 0
            assert error(other, opened.read("other")) < 0.5 * error(other, session("x", SESSIONS["alpha"]))

    def test_a_profile_may_come_later(self, profile: Path, tmp_path: Path) -> None:
        path = tmp_path / "a"
        pltpack.compress(snapshots("alpha", "beta"), path, quality="lossless")
        with pytest.raises(UnsupportedError, match="needs a profile"):
            pltpack.append(path, [session("more", IDS[:90])], quality="balanced")
        stats = pltpack.append(path, [session("more", IDS[:150])], quality="balanced", profile=profile)
        assert stats["profile_bytes"] > 0
        with pltpack.open(path) as opened:
            shard = opened.shard("more")
            assert shard.mapped_tokens >= 64
            # Exact where it is mapped; layer groups and layers alone side by side.
            original = session("more", IDS[:150])
            assert bits(opened.read("more", tokens=slice(0, 64))) == b"".join(
                words(a).tobytes() for i in range(3) for a in original.layer(i, 0, 64))  # fmt: skip
            whole = opened.read("more")
            assert bits(opened.snapshot("more")) == bits(whole)
            assert {tuple(group) for group, _, _ in span_pieces(shard, range(3), 0, 150)} == {(0, 1), (2,)}
        pltpack.verify(path)

    def test_another_profile_joins(self, copy: Path, tmp_path: Path) -> None:
        second = save_profile(tmp_path / "second.safetensors", seed=9, group=3)
        before = everything(copy)
        pltpack.append(copy, [session("more", IDS[:150])], profile=second)
        with pltpack.open(copy) as opened:
            assert len({library.profile_digest(0) for library in opened.libraries}) == 2
            whole = opened.read("more")
            assert bits(opened.snapshot("more")) == bits(whole)
        after = everything(copy)
        assert {name: after[name] for name in before} == before
        pltpack.verify(copy)

    @pytest.mark.parametrize("kind", ["embedded", "external"])
    def test_compacting_and_collecting_keep_everything(self, kind: str, copy: Path, external: Path, profile: Path,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
        path = copy if kind == "embedded" else external
        if kind == "external":
            monkeypatch.setenv(profiles.PATH_VARIABLE, str(profile.parent))
        pltpack.append(path, [session("more", IDS[:90])], quality="near")
        before = everything(path)
        with pltpack.open(path) as opened:
            old = opened.stats()
        stats = pltpack.compact(path)
        assert stats["profile_bytes"] == old["profile_bytes"]
        assert (stats["profile_bytes"] > 0) == (kind == "embedded")
        assert everything(path) == before
        assert pltpack.gc(path) == []
        assert len(done_json("inspect", path)["libraries"]) == 1
        pltpack.verify(path)

    @pytest.mark.parametrize("kind", ["embedded", "external"])
    def test_sessions_move_with_their_profile(self, kind: str, copy: Path, external: Path, profile: Path,
                                              tmp_path: Path) -> None:  # fmt: skip
        path, own = (copy, None) if kind == "embedded" else (external, profile)
        before = everything(path, profile=own)
        if own is not None:
            with pytest.raises(NotFoundError, match="profile"):
                pltpack.export_session(path, "beta", tmp_path / "f")
        pltpack.export_session(path, "beta", tmp_path / "file", own)
        pltpack.import_session(tmp_path / "new", tmp_path / "file")
        pltpack.compress(snapshots("long"), tmp_path / "other", quality="lossless")
        pltpack.import_session(tmp_path / "other", tmp_path / "file")
        for made in ("new", "other"):
            assert everything(tmp_path / made)["beta"] == before["beta"]


class TestVerifying:
    def test_each_unit_is_decoded_once(self, profile: Path, tmp_path: Path, decoded: list[int]) -> None:
        path = tmp_path / "a"
        ids = IDS[:320]
        pltpack.compress([session("one", ids), session("two", ids)], path, profile=profile)
        with pltpack.open(path) as opened:
            assert all(len(opened.shard(name).units) == 0 for name in opened.sessions)
            units = sum(len(library.units) for library in opened.libraries)
        assert units == 4
        decoded.clear()
        assert pltpack.verify(path)["units"] == 4
        assert len(decoded) == units * (1 + 2), "the library's own, and as each session maps to them"

    def test_against_dumps(self, archive: Path, tmp_path: Path) -> None:
        write_dump(snapshots("alpha", "long"), tmp_path / "dumps")
        report = done_json("verify", archive, "--against", tmp_path / "dumps")
        assert report["differences"] == []
        assert not report["compared"]["alpha"]["bit_exact"]
        assert 0 < report["compared"]["alpha"]["relative_rms_error"] < 1

    def test_damage_is_found(self, copy: Path) -> None:
        path = copy / "shards" / "long.pltshard"
        data = bytearray(path.read_bytes())
        with pltpack.open(copy) as opened:
            start = data.find(opened.shard("long").checked_payload(opened.shard("long").units[1]))
        data[start + 40] ^= 1
        path.write_bytes(data)
        with pytest.raises(FormatError, match=r"long\.pltshard"):
            pltpack.verify(copy)
        with pltpack.open(copy) as opened, pytest.raises(FormatError, match=r"layers 0 to 1, tokens 256:512 does not"):
            opened.read("long")


class TestExternal:
    def test_places_that_are_searched(self, external: Path, archive: Path, profile: Path,
                                      monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
        wanted = {name: bits_ for name, bits_ in everything(archive).items() if name in ("alpha", "beta")}
        assert everything(external, profile=profile).keys() == wanted.keys()
        with pytest.raises(NotFoundError, match=r"profile [0-9a-f]{16}… is not found"):
            everything(external)
        monkeypatch.setenv(profiles.PATH_VARIABLE, f"/nowhere{os.pathsep}{profile.parent}")
        found = everything(external)
        monkeypatch.delenv(profiles.PATH_VARIABLE)
        shutil.copy(profile, external / "any-name.safetensors")
        assert everything(external) == found == everything(external, profile=profile)

    def test_a_missing_profile_is_one_clear_error(self, external: Path, tmp_path: Path) -> None:
        for arguments in (["decompress", external, "-o", tmp_path / "out"], ["verify", external]):
            result = run(*arguments)
            assert result.exit_code == 2
            (line,) = result.stderr.splitlines()
            assert "is not found" in line
            assert "--profile" in line
        assert not (tmp_path / "out").exists()

    def test_commands_take_a_profile(self, external: Path, profile: Path, tmp_path: Path) -> None:
        done("verify", external, "--profile", profile)
        done("inspect", external, "--profile", profile)
        done("decompress", external, "-o", tmp_path / "out", "--profile", profile)
        found = {dump.session: bits(dump) for dump in open_dumps(tmp_path / "out")}
        assert found == everything(external, profile=profile)
        done("export-session", external, "alpha", "-o", tmp_path / "file", "--profile", profile)
        write_dump([session("more", IDS[:90])], tmp_path / "dump")
        assert run("append", external, tmp_path / "dump").exit_code == 2
        stats = done_json("append", external, tmp_path / "dump", "--profile", profile)
        assert (stats["sessions"], stats["profile_bytes"]) == (3, 0)

    def test_another_profile_is_refused(self, external: Path, tmp_path: Path) -> None:
        other = save_profile(tmp_path / "other.safetensors", seed=1)
        with pytest.raises(IdentityError, match="but the archive was made with"):
            everything(external, profile=other)

    def test_embedded_or_external_not_both(self, profile: Path, tmp_path: Path) -> None:
        with pytest.raises(UnsupportedError, match="either embedded or external"):
            pltpack.compress(snapshots("alpha"), tmp_path / "a", profile=profile, external_profile=profile)


class TestRefusals:
    @pytest.mark.parametrize(("change", "field"), [
        ({"rope": {**IDENTITY.rope, "theta": 5.0}}, "rope"),
        ({"keys": "unrotated"}, "keys"),
        ({"layers": LAYERS[:2]}, "layers"),
        ({"layers": (*LAYERS[:2], dataclasses.replace(LAYERS[2], v_dim=4))}, r"layers\[2\].v_dim"),
    ])  # fmt: skip
    def test_a_profile_of_another_model(self, change, field, profile: Path, copy: Path, tmp_path: Path) -> None:
        identity = dataclasses.replace(IDENTITY, **change)
        own = save_profile(tmp_path / "own.safetensors", identity)
        with pytest.raises(IdentityError, match=field):
            pltpack.compress([session("s", IDS[:30], identity)], tmp_path / "a", profile=profile)
        assert not (tmp_path / "a").exists()
        before = files(copy)
        with pytest.raises(IdentityError, match=field):
            pltpack.append(copy, [session("s", IDS[:30])], profile=own)
        assert files(copy) == before

    def test_caches_of_another_dtype_are_served(self, profile: Path, tmp_path: Path) -> None:
        layers = tuple(dataclasses.replace(layer, dtype="F16") for layer in LAYERS)
        original = session("s", IDS[:30], dataclasses.replace(IDENTITY, layers=layers))
        pltpack.compress([original], tmp_path / "a", profile=profile, quality="near")
        with pltpack.open(tmp_path / "a") as archive:
            found = archive.read("s")
            assert {layer.dtype for layer in found.identity.layers} == {"F16"}
            assert relative_error(original, found) < 0.7

    def test_a_window_does_not_matter(self, profile: Path, tmp_path: Path) -> None:
        layers = tuple(dataclasses.replace(layer, window=64) for layer in LAYERS)
        identity = dataclasses.replace(IDENTITY, layers=layers)
        pltpack.compress([session("s", IDS[:30], identity)], tmp_path / "a", profile=profile)

    def test_files_that_are_no_profile(self, tmp_path: Path) -> None:
        write_dump(snapshots("alpha"), tmp_path / "dump")
        (dump,) = (tmp_path / "dump").iterdir()
        for path in (dump, tmp_path / "missing", tmp_path):
            result = run("compress", tmp_path / "dump", "-o", tmp_path / "a", "--profile", path)
            assert result.exit_code == 2
            assert str(path) in result.stderr
            assert len(result.stderr.splitlines()) == 1

    def test_a_state_of_another_digest(self, copy: Path) -> None:
        (library,) = copy.glob("*.pltlib")
        wanted = profiles.digest(random_profile())
        data = library.read_bytes()
        library.write_bytes(data.replace(wanted.encode(), b"0" * 64))
        with pytest.raises(FormatError):
            everything(copy)


class TestTargets:
    @pytest.mark.parametrize("dedup", [True, False])
    @pytest.mark.parametrize("size", [26_000, 45_000])
    def test_bytes(self, size: int, dedup: bool, profile: Path, tmp_path: Path) -> None:
        stats = pltpack.compress(snapshots(), tmp_path / "a", profile=profile, target=Target(size=size), dedup=dedup)
        assert 0.85 * size < stats["archive_bytes"] - stats["profile_bytes"] <= 1.03 * size

    def test_bytes_of_what_is_appended(self, copy: Path) -> None:
        with pltpack.open(copy) as opened:
            before = opened.stats()["archive_bytes"]
        stats = pltpack.append(copy, [session("more", IDS[100:500])], target=Target(size=20_000))
        assert 17_000 < stats["archive_bytes"] - before <= 20_600

    def test_an_estimate_too_low_is_made_good(self, profile: Path, tmp_path: Path,
                                              monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
        from pltpack.codec import rate

        real = rate.Size.bits
        monkeypatch.setattr(rate.Size, "bits", lambda self, log_step: 0.7 * real(self, log_step))
        stats = pltpack.compress(snapshots(), tmp_path / "a", profile=profile, target=Target(size=40_000))
        assert 34_000 < stats["archive_bytes"] - stats["profile_bytes"] <= 41_200
        assert len(list((tmp_path / "a").rglob("*.plt*"))) == 1 + len(SESSIONS)
        stats = pltpack.append(tmp_path / "a", [session("more", IDS[100:500])], target=Target(bits=2))
        assert len(list((tmp_path / "a").rglob("*.plt*"))) == 3 + len(SESSIONS)
        pltpack.verify(tmp_path / "a")

    def test_bits(self, profile: Path, tmp_path: Path) -> None:
        pltpack.compress(snapshots("long"), tmp_path / "a", profile=profile, target=Target(bits=1.5))
        with pltpack.open(tmp_path / "a") as opened:
            payload = int(opened.shard("long").units["length"].sum())
        found = 8 * payload / session("long", SESSIONS["long"]).elements
        assert 1.25 < found <= 1.03 * 1.5

    def test_a_smaller_divergence_takes_more(self, profile: Path, tmp_path: Path) -> None:
        sizes = []
        for kl in (1e-3, 1e-2, 1e-1):
            stats = pltpack.compress(snapshots("long"), tmp_path / str(kl), profile=profile, target=Target(kl=kl))
            sizes.append(stats["shard_bytes"])
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] > 1.3 * sizes[2]

    def test_on_the_command_line(self, profile: Path, tmp_path: Path) -> None:
        write_dump(snapshots("long", "alpha"), tmp_path / "dumps")
        common = ["compress", tmp_path / "dumps", "--profile", profile]
        stats = done_json(*common, "-o", tmp_path / "bytes", "--target-bytes", 20_000)
        assert stats["archive_bytes"] - stats["profile_bytes"] <= 20_600
        assert "of the library" in done(*common, "-o", tmp_path / "kl", "--target-kl", "0.005")
        done(*common, "-o", tmp_path / "bits", "--target-bits", "2")
        result = run(*common, "-o", tmp_path / "both", "--target-bits", "2", "--target-kl", "1")
        assert result.exit_code == 2
        assert "exclude each other" in result.stderr
        result = run(*common, "-o", tmp_path / "none", "--target-kl", "1e-9")
        assert result.exit_code == 2
        assert "target kl of 1e-09 is out of range (1e-06 to 1e+06)" in result.stderr

    def test_a_profile_larger_than_what_it_serves_is_pointed_out(self, tmp_path: Path) -> None:
        wide = dataclasses.replace(IDENTITY, layers=tuple(dataclasses.replace(one, heads=8) for one in LAYERS))
        write_dump([session("short", range(6), wide)], tmp_path / "dumps")
        profile = save_profile(tmp_path / "wide.safetensors", wide)
        for option, hint in (("--profile", True), ("--external-profile", False)):
            text = done("compress", tmp_path / "dumps", option, profile, "-o", tmp_path / option)
            assert ("more than half of this archive; --external-profile" in text) == hint

    @pytest.mark.parametrize(("option", "value", "message"), [
        ("--target-bytes", 500, "alone take"),
        ("--target-bytes", None, "% more than the target of"),
        ("--target-bits", 0.01, "% more than the target of 0.01 bits per element"),
        ("--target-kl", 2e-6, "at the finest step"),
    ])  # fmt: skip
    def test_out_of_reach(self, option, value, message, profile: Path, tmp_path: Path) -> None:
        write_dump(snapshots("long"), tmp_path / "dumps")
        if value is None:
            least = Target(kl=1e6)
            stats = pltpack.compress(snapshots("long"), tmp_path / "dumps" / "a", profile=profile, target=least)
            value = int((stats["archive_bytes"] - stats["profile_bytes"]) / 1.07)
            shutil.rmtree(tmp_path / "dumps" / "a")
        result = run("compress", tmp_path / "dumps", "--profile", profile, "-o", tmp_path / "a", option, value)
        assert (result.exit_code, len(result.stderr.splitlines())) == (3, 1), result.stderr
        assert message in result.stderr
        assert not (tmp_path / "a").exists()
        assert {p.name for p in tmp_path.iterdir()} == {"dumps"}

    def test_an_archive_stays_as_it_was(self, copy: Path) -> None:
        before = files(copy)
        for target in (Target(size=300), Target(bits=0.01), Target(kl=2e-6)):
            with pytest.raises(PromiseError):
                pltpack.append(copy, [session("more", IDS[100:200])], target=target)
            assert files(copy) == before

    def test_tiers_without_a_profile_have_no_rate_control(self, tmp_path: Path) -> None:
        for target in (Target(bits=2), Target(kl=0.1), Target(size=10_000)):
            with pytest.raises(UnsupportedError, match="targets need a profile"):
                pltpack.compress(snapshots("alpha"), tmp_path / "a", target=target)

    @pytest.mark.parametrize("target", [Target(1, 1), Target(bits=-1), Target(kl=float("nan")), Target(size=0)])
    def test_malformed_targets(self, target: Target, profile: Path, tmp_path: Path) -> None:
        with pytest.raises(UnsupportedError):
            pltpack.compress(snapshots("alpha"), tmp_path / "a", profile=profile, target=target)


def test_archives_of_one_profile_share_what_is_made_of_it(archive, profile, tmp_path):
    other = tmp_path / "small"
    pltpack.compress(snapshots("alpha"), other, profile=profile, quality="small")
    with pltpack.open(archive) as first, pltpack.open(other) as second:
        wanted = [second.read("alpha").layer(layer) for layer in range(len(LAYERS))]
        before = first.libraries[0].codec(0)
        assert next(before.all_bases()) is next(second.libraries[0].codec(0).all_bases())
        assert before.get_config() != second.libraries[0].codec(0).get_config()
    del first, second, before
    with pltpack.open(other) as alone:
        for layer, (keys, values) in enumerate(wanted):
            found = alone.read("alpha").layer(layer)
            np.testing.assert_array_equal(found[0].view(np.uint16), keys.view(np.uint16))
            np.testing.assert_array_equal(found[1].view(np.uint16), values.view(np.uint16))


def test_a_loader_made_ready_makes_nothing_of_the_profile_any_more(archive, monkeypatch):
    with pltpack.open(archive) as opened, opened.loader() as loader:
        loader.prepare()
        for name in ("shared", "local", "unwhitened"):
            monkeypatch.setattr(Profile, name, None)
        for session_name, tokens in SESSIONS.items():
            if len(tokens) >= 32:
                loader.load(loader.lookup(tokens))
                opened.read(session_name)


def test_a_profile_that_is_not_found_is_said_when_a_loader_is_made_ready(profile, tmp_path):
    pltpack.compress(snapshots("alpha"), tmp_path / "a", external_profile=profile)
    with pltpack.open(tmp_path / "a") as opened, pytest.raises(NotFoundError, match="profile"):
        opened.loader().prepare()
