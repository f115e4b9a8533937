"""What becomes of the library: nodes written anew as means, admission and eviction under a budget; values stay."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from archives import equal_bits, relative_error
from archives import session as plain_session
from cli_common import done_json, write_dumps
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from near_common import IDENTITY, family, passage, session
from profiles_common import save_profile

import pltpack
from pltpack.archive.means import Mean
from pltpack.archive.reader import Archive
from pltpack.archive.settings import Settings
from pltpack.archive.upkeep import Usage, node_tokens
from pltpack.codec.registry import tier
from pltpack.dumps import open_dumps
from pltpack.errors import UnsupportedError
from pltpack.snapshot import Snapshot

TIERS = ("lossless", "q4", "near")
SHARED = passage(1, 90)


@pytest.fixture(scope="module")
def profile(tmp_path_factory) -> Path:
    return save_profile(tmp_path_factory.mktemp("profile") / "p.safetensors", IDENTITY, kl=(-9.0, 1.0))


def compress(snapshots: list[Snapshot], path: Path, quality: str, profile: Path | None = None, **options) -> dict:
    return pltpack.compress(snapshots, path, quality=quality, profile=profile if quality == "near" else None, **options)


def relatives(first: int, count: int, context: float = 0.3) -> list[Snapshot]:
    """Sessions with one passage at many places: what is before it makes as much difference to each of them."""
    return [session(f"r{i}", [*passage(20 + i, 8 + i), *SHARED], context=context) for i in range(first, first + count)]


def shards(path: Path) -> int:
    return sum(file.stat().st_size for file in (path / "shards").iterdir())


def library_payload(path: Path) -> int:
    with pltpack.open(path) as archive:
        return sum(int(library.units["length"].sum()) for library in archive.libraries)


def library_nodes(path: Path) -> int:
    with pltpack.open(path) as archive:
        return sum(len(library.nodes) for library in archive.libraries)


def contents(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def read_all(path: Path) -> dict[str, Snapshot]:
    with pltpack.open(path) as archive:
        return {name: archive.read(name) for name in archive.sessions}


@pytest.fixture(scope="module")
def grown(tmp_path_factory) -> Path:
    """Archives whose library has predicted some 1,900 tokens."""
    folder = tmp_path_factory.mktemp("grown")
    for quality in ("lossless", "q4"):
        compress(relatives(0, 22), folder / quality, quality)
    return folder


@pytest.mark.parametrize("quality", ["lossless", "q4"])
def test_later_sessions_take_less_once_a_node_is_the_mean_of_what_it_served(grown, quality, tmp_path):
    with_mean, without = tmp_path / "mean", tmp_path / "old"
    for path, every in ((with_mean, 2000), (without, 5000)):
        shutil.copytree(grown / quality, path)
        stats = pltpack.append(path, relatives(22, 4), recompute_tokens=every)
        assert ("recomputed" in stats) == (every == 2000)
    later, before = relatives(26, 6), {path: shards(path) for path in (with_mean, without)}
    for path in before:
        pltpack.append(path, later, recompute_tokens=5000)
    mean, old = (shards(path) - size for path, size in before.items())
    assert mean < 0.97 * old
    pltpack.verify(with_mean)
    found = read_all(with_mean)
    for original in [*relatives(0, 26), *later]:
        if quality == "lossless":
            assert equal_bits(original, found[original.session])
        else:
            assert relative_error(original, found[original.session]) < 0.1


def test_old_shards_keep_the_old_node_and_the_mean_is_looked_at_once(grown, tmp_path):
    path = tmp_path / "a"
    shutil.copytree(grown / "q4", path)
    old = read_all(path)
    stats = pltpack.append(path, relatives(22, 4))
    # The node took in what stood before the passage in the session that it is from.
    assert [entry["tokens"] for entry in stats["recomputed"]] == [98]
    assert stats["recomputed"][0]["predicted_tokens"] == 21 * 90
    found = read_all(path)
    assert all(equal_bits(snapshot, found[name]) for name, snapshot in old.items())
    assert "recomputed" not in pltpack.append(path, relatives(26, 2))
    with Archive(path) as archive:
        used = {archive.shard("r27").libraries[row["library"]].entry.file for row in archive.shard("r27").runs}
        assert used == {archive.libraries[-1].entry.file}
        usage = Usage(archive)
        assert not usage.newest(archive.libraries[0], 0)
        assert usage.newest(archive.libraries[-1], 0)
        assert usage.predicted(archive.libraries[-1], 0) >= 2 * 90
        assert node_tokens(archive.libraries[-1], 0).tolist()[8:] == SHARED
        members = usage.members(archive.libraries[-1], 0)
        assert len(members) == 28
    pltpack.compact(path)
    found = read_all(path)
    assert all(equal_bits(snapshot, found[name]) for name, snapshot in old.items())


def test_a_mean_that_does_not_pay_is_not_written(tmp_path):
    """What the sessions have in common is all there is: the first session's values are as good as the mean's."""
    path = tmp_path / "a"
    compress(relatives(0, 22, context=0.001), path, "q4")
    assert "recomputed" not in pltpack.append(path, relatives(22, 4, context=0.001))


def test_nothing_is_written_anew_in_tiers_with_a_profile_unless_asked_for(profile):
    assert Settings("near").recompute is None
    assert Settings("near", recompute_tokens=1000).recompute == 1000
    assert Settings("q4").recompute == 2000


def test_calibrated_means_are_read_back(profile, tmp_path, monkeypatch):
    """Were they to cost nothing."""
    monkeypatch.setattr("pltpack.archive.upkeep.HOPE", 1e9)
    monkeypatch.setattr("pltpack.archive.upkeep._Upkeep._cost", lambda self, text: -(1 << 60))
    compress(relatives(0, 11), tmp_path / "a", "near", profile)
    before = read_all(tmp_path / "a")
    stats = pltpack.append(tmp_path / "a", relatives(11, 3), recompute_tokens=1000)
    assert [entry["sessions"] for entry in stats["recomputed"]] == [14]
    pltpack.append(tmp_path / "a", relatives(14, 2))
    with pltpack.open(tmp_path / "a") as archive:
        assert archive.shard("r14").libraries[-1] is archive.libraries[-1]
        assert (archive.shard("r14").runs["node"] == 0).all()
    pltpack.verify(tmp_path / "a")
    found = read_all(tmp_path / "a")
    assert all(equal_bits(snapshot, found[name]) for name, snapshot in before.items())
    compress(relatives(0, 16), tmp_path / "b", "near", profile, near=False)
    plain = read_all(tmp_path / "b")
    for original in relatives(0, 16):
        allowed = 1.05 * relative_error(original, plain[original.session]) + 1e-6
        assert relative_error(original, found[original.session]) <= allowed


@pytest.mark.parametrize("quality", ["q4", "near"])
def test_a_mean_is_that_of_its_members_at_one_position(quality, profile):
    from pltpack.archive.profiles import load

    codec = tier(quality)
    if quality == "near":
        codec.start(load(profile)[0], IDENTITY)
    members = relatives(0, 9)
    mean = Mean(IDENTITY, 11, len(SHARED), codec)
    for member in members:
        start = len(member) - len(SHARED)
        mean.add([member.layer(layer, start) for layer in range(2)], start, 0, len(member))
    base = session("base", [*passage(90, 11), *SHARED], context=0.0)
    common = session("common", [*passage(91, 11), *SHARED], context=0.3)
    for layer, (keys, values) in enumerate(mean.layers(base)):
        for found, own, other in zip((keys, values), base.layer(layer, 11), common.layer(layer, 11), strict=True):
            exact, one, many = (x.astype(np.float64) for x in (own, other, found))
            assert np.abs(many - exact).mean() < 0.6 * np.abs(one - exact).mean()


def test_members_that_are_not_finite_are_left_out():
    members = relatives(0, 2)
    mean = Mean(IDENTITY, 8, len(SHARED), tier("q4"))
    arrays = [members[1].layer(layer, 9) for layer in range(2)]
    wild = [(keys.copy(), values.copy()) for keys, values in arrays]
    wild[1][1][0, 5] = np.nan
    mean.add(wild, 9, 0, len(members[1]))
    mean.add([members[0].layer(layer, 8) for layer in range(2)], 8, 0, len(members[0]))
    for layer, (keys, values) in enumerate(mean.layers(members[0])):
        assert np.array_equal(keys, members[0].layer(layer, 8)[0])
        assert np.array_equal(values, members[0].layer(layer, 8)[1])


@pytest.mark.parametrize("wrong", [{"recompute_tokens": 999}, {"recompute_tokens": 5001}, {"library_budget": -1}])
def test_settings_out_of_range(wrong):
    with pytest.raises(UnsupportedError):
        Settings("q4", **wrong).check()


@settings(max_examples=6, suppress_health_check=list(HealthCheck))
@given(part=st.floats(0, 1.2), quality=st.sampled_from(TIERS))
def test_any_budget_gives_an_archive_with_the_same_values(profile, tmp_path_factory, part, quality):
    folder = tmp_path_factory.mktemp("budget")
    compress(family(), folder / "free", quality, profile)
    budget = int(part * library_payload(folder / "free"))
    stats = compress(family(), folder / "a", quality, profile, library_budget=budget)
    assert library_payload(folder / "a") == stats["admission"]["admitted_bytes"] <= budget
    assert library_nodes(folder / "a") == stats["admission"]["admitted_nodes"]
    assert stats["admission"]["refused_nodes"] + library_nodes(folder / "a") == library_nodes(folder / "free")
    pltpack.verify(folder / "a")
    free, found = read_all(folder / "free"), read_all(folder / "a")
    for original in family():
        if quality == "lossless":
            assert equal_bits(original, found[original.session])
        else:
            allowed = 1.3 * relative_error(original, free[original.session]) + 1e-6
            assert relative_error(original, found[original.session]) <= allowed


@pytest.mark.parametrize("quality", TIERS)
def test_without_a_budget_there_is_no_library_and_with_enough_of_it_no_difference(quality, profile, tmp_path):
    compress(family(), tmp_path / "free", quality, profile)
    compress(family(), tmp_path / "none", quality, profile, library_budget=0)
    compress(family(), tmp_path / "all", quality, profile, library_budget=1 << 40)
    compress(family(), tmp_path / "alone", quality, profile, dedup=False)
    assert library_nodes(tmp_path / "none") == 0
    shared, alone = ({name: file for name, file in contents(tmp_path / which).items() if name.startswith("shards")}
                     for which in ("none", "alone"))  # fmt: skip
    if quality != "lossless":  # What it learns from depends on what is shared.
        assert shared.keys() == alone.keys()
    assert contents(tmp_path / "all") == contents(tmp_path / "free")


def prefixed() -> list[Snapshot]:
    """Sessions that share prefixes of several lengths, nothing else."""
    rng = np.random.default_rng(3)
    ids = rng.integers(0, 50_000, 400)
    ends = {"a": 320, "b": 320, "c": 160, "d": 96, "e": 96}
    return [plain_session(name, [*ids[:end], *rng.integers(0, 50_000, 40)]) for name, end in ends.items()]


def test_budgets_of_prefixes_keep_parents_before_children(tmp_path):
    compress(prefixed(), tmp_path / "free", "q4")
    whole = library_payload(tmp_path / "free")
    for part in (0.3, 0.8):
        path = tmp_path / str(part)
        compress(prefixed(), path, "q4", library_budget=int(part * whole))
        with pltpack.open(path) as archive:
            for name in archive.sessions:
                rows = archive.shard(name).runs
                ends = rows["session_start"] + rows["length"]
                assert (rows["session_start"] == np.append(0, ends[:-1])).all()
        pltpack.append(path, [plain_session("f", prefixed()[0].tokens[:330])], library_budget=whole)
        assert library_payload(path) <= whole
        for original in prefixed():
            assert relative_error(original, read_all(path)[original.session]) < 0.1


@pytest.mark.parametrize("quality", ["lossless", "q4", "turboquant-4"])
@pytest.mark.parametrize("part", [0.0, 0.5, 1.0])
def test_eviction_moves_units_as_they_are(quality, part, tmp_path):
    path = tmp_path / "a"
    compress(prefixed(), path, quality)
    pltpack.append(path, [plain_session("f", [*prefixed()[0].tokens[:345], 1, 2, 3])])
    pltpack.compact(path)
    before, budget = read_all(path), int(part * library_payload(path))
    stats = pltpack.compact(path, library_budget=budget)
    report = stats["eviction"]
    assert library_payload(path) == report["kept_bytes"] <= max(budget, report["pinned_bytes"])
    assert library_nodes(path) == report["kept_nodes"]
    assert len(report["evicted"]) == report["evicted_nodes"]
    if part == 0.0:
        assert report["kept_nodes"] == report["pinned_nodes"]
        assert report["evicted_nodes"] > 1
    if part == 1.0:
        assert report["evicted_nodes"] == 0
    pltpack.verify(path)
    after = read_all(path)
    for name, snapshot in before.items():
        assert equal_bits(snapshot, after[name])
    pltpack.append(path, [plain_session("g", prefixed()[1].tokens)])
    assert relative_error(plain_session("g", prefixed()[1].tokens), read_all(path)["g"]) < 0.1


@pytest.mark.parametrize("quality", TIERS)
def test_what_predicts_or_is_corrected_stays(quality, profile, tmp_path):
    path = tmp_path / "a"
    rng = np.random.default_rng(0)
    noisy = plain_session("z", prefixed()[0].tokens, noise=int(rng.integers(99)))
    compress(family(), path, quality, profile)
    before = read_all(path)
    report = pltpack.compact(path, library_budget=0)["eviction"]
    assert report["pinned_nodes"] == report["kept_nodes"] > 0
    pltpack.verify(path)
    found = read_all(path)
    assert all(equal_bits(snapshot, found[name]) for name, snapshot in before.items())
    if quality == "lossless":
        compress([*prefixed(), noisy], tmp_path / "b", quality)
        report = pltpack.compact(tmp_path / "b", library_budget=0)["eviction"]
        assert report["pinned_nodes"] > 0
        for original in [*prefixed(), noisy]:
            assert equal_bits(original, read_all(tmp_path / "b")[original.session])


def test_what_shares_most_information_per_byte_goes_last(tmp_path):
    """Two prefixes of one length: the one that more sessions have stays."""
    popular, rare = passage(1, 96), passage(2, 96)
    texts = [(f"p{i}", [*popular, *passage(10 + i, 40)]) for i in range(4)]
    texts += [(f"q{i}", [*rare, *passage(20 + i, 40)]) for i in range(2)]
    path = tmp_path / "a"
    compress([plain_session(name, ids) for name, ids in texts], path, "q4", near=False)
    half = library_payload(path) * 6 // 10
    report = pltpack.compact(path, library_budget=half)["eviction"]
    assert [(entry["sessions"], entry["tokens"]) for entry in report["evicted"]] == [(2, 96)]
    limited = compress([plain_session(name, ids) for name, ids in texts], tmp_path / "b", "q4", library_budget=half)
    assert limited["admission"]["refused_nodes"] == 1
    with pltpack.open(tmp_path / "b") as archive:
        assert [len(archive.shard(name).runs) for name in archive.sessions] == [1, 1, 1, 1, 0, 0]


def test_real_sessions_keep_their_bits_when_nodes_leave(real_dumps, tmp_path):
    originals = list(open_dumps([real_dumps]))
    stats = pltpack.compress([real_dumps], tmp_path / "a", quality="lossless", library_budget=3_000_000)
    assert stats["admission"]["admitted_bytes"] <= 3_000_000
    pltpack.compact(tmp_path / "a", library_budget=1_000_000)
    found = read_all(tmp_path / "a")
    for original in originals:
        assert equal_bits(original, found[original.session])


def test_the_command_line(tmp_path):
    dumps = write_dumps(tmp_path / "dumps")
    stats = done_json("compress", dumps, "-o", tmp_path / "a", "--quality", "q4", "--library-budget", 0)
    assert stats["admission"]["admitted_nodes"] == 0
    done_json("compress", sorted(dumps.iterdir())[0], "-o", tmp_path / "b", "--quality", "q4")
    stats = done_json("append", tmp_path / "b", *sorted(dumps.iterdir())[1:], "--recompute-tokens", 1000,
                      "--library-budget", 1 << 30)  # fmt: skip
    assert stats["admission"]["budget"] == 1 << 30
    stats = done_json("compact", tmp_path / "b", "--library-budget", 0)
    assert stats["eviction"]["kept_nodes"] == stats["eviction"]["pinned_nodes"]


def test_other_codecs_take_nothing_from_what_the_transform_codec_coded(profile, tmp_path):
    """Its values may differ by a rounding from one machine to the next."""
    compress(family()[:2], tmp_path / "a", "near", profile)
    pltpack.append(tmp_path / "a", family()[2:], quality="q4")
    with pltpack.open(tmp_path / "a") as archive:
        for shard in map(archive.shard, ("edited", "twice")):
            assert all(shard.libraries[row["library"]] is not archive.libraries[0] for row in shard.runs)
