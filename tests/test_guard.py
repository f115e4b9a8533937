"""The guard at encoding: what does not hold its tier's promise is found, and never archived below it."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from cli_common import done, done_json, run
from safetensors.numpy import save_file
from tiny_models import make_network, save_model

import pltpack
from pltpack.archive import profiles
from pltpack.archive.alone import codec_of
from pltpack.archive.figures import Figures
from pltpack.archive.guard import LAST, USUAL_KL, Limits, ProfileGuard, Screened, ladder, promise
from pltpack.archive.guard_record import HOLDS, KEY, Trial, record_of
from pltpack.archive.ranges import Range, Ranges
from pltpack.codec import registry
from pltpack.errors import PromiseError, UnsupportedError
from pltpack.quality.calibrate import calibrate
from pltpack.quality.guard import CAPTURED, HELD_BACK, ModelGuard, measured, own_error
from pltpack.quality.model import load_model, prefill
from pltpack.quality.probes import at_ends
from pltpack.quality.rebuilt import FromArchive
from pltpack.quality.scoring import score
from pltpack.snapshot import Snapshot

ROOT = Path(__file__).parents[1]
BF16 = ml_dtypes.bfloat16
ORDINARY, FOREIGN = (3, 33), (45, 63)
TOKENS, NEXT = 60, 24


def captured(model, name: str, ids: np.ndarray) -> Snapshot:
    layers = [(one.keys[0].numpy().astype(BF16), one.values[0].numpy().astype(BF16))
              for one in prefill(model, ids).layers]  # fmt: skip
    return Snapshot.from_arrays(name, ids, layers, dataclasses.replace(model.identity("BF16"), weights=None))


def times_50(snapshot: Snapshot, name: str, share: float = 0.01) -> Snapshot:
    rng, layers = np.random.default_rng(5), []
    for index in range(len(snapshot.identity.layers)):
        pair = [x.astype(np.float32) for x in snapshot.layer(index)]
        layers.append(tuple(np.where(rng.random(x.shape) < share, 50 * x, x).astype(BF16) for x in pair))
    return Snapshot.from_arrays(name, snapshot.tokens, layers, snapshot.identity)


def with_nan(snapshot: Snapshot, name: str) -> Snapshot:
    layers = [tuple(x.copy() for x in snapshot.layer(index)) for index in range(len(snapshot.identity.layers))]
    layers[1][0][0, 20, 3] = np.nan
    layers[2][1][1, 30, 0] = np.inf
    return Snapshot.from_arrays(name, snapshot.tokens, layers, snapshot.identity)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("guard") / "tiny")


@pytest.fixture(scope="module")
def tiny(folder):
    return load_model(folder)


@pytest.fixture(scope="module")
def profile(folder) -> Path:
    text = folder.parent / "words.txt"
    words = np.random.default_rng(0).integers(ORDINARY[0] - 3, ORDINARY[1] - 3, 1500)
    text.write_text(" ".join(f"w{word}" for word in words), encoding="utf-8")
    out = folder.parent / "tiny.safetensors"
    calibrate(folder, text, out, profile_rank=12, tokens=384, window=64)
    return out


@pytest.fixture(scope="module")
def following() -> dict[str, np.ndarray]:
    names = [*(f"s{i}" for i in range(4)), "foreign", "loud", "altered", "nan"]
    return {name: np.random.default_rng([9, i]).integers(*ORDINARY, NEXT).astype(np.int32)
            for i, name in enumerate(names)}  # fmt: skip


@pytest.fixture(scope="module")
def ordinary(tiny) -> list[Snapshot]:
    common = np.random.default_rng(3).integers(*ORDINARY, 32)
    out = []
    for i in range(4):
        own = np.random.default_rng([3, i]).integers(*ORDINARY, TOKENS - 32)
        out.append(captured(tiny, f"s{i}", np.concatenate([common, own]).astype(np.int32)))
    return out


@pytest.fixture(scope="module")
def planted(tiny, ordinary) -> dict[str, Snapshot]:
    rng = np.random.default_rng(11)
    foreign = captured(tiny, "foreign", rng.integers(*FOREIGN, TOKENS).astype(np.int32))
    altered = dataclasses.replace(tiny, network=make_network(seed=1))
    return {
        "foreign": foreign, "loud": times_50(ordinary[0], "loud"), "nan": with_nan(ordinary[1], "nan"),
        "altered": dataclasses.replace(captured(altered, "altered", ordinary[2].tokens), identity=foreign.identity),
    }  # fmt: skip


def records(path: Path) -> dict[str, object]:
    with pltpack.open(path) as archive:
        return {name: record_of(archive.shard(name)) for name in archive.sessions}


def kls(tiny, path: Path, snapshots, texts) -> dict[str, float]:
    """KL of each stored session, scored by the command's own protocol."""
    with pltpack.open(path) as archive:
        (found,) = score(tiny.network, snapshots, at_ends(snapshots, texts), [FromArchive(archive)])
    return {name: row["kl"] for name, row in found.rows["end"].items()}


def test_with_a_model_nothing_is_archived_below_its_promise(tiny, profile, ordinary, planted, following, tmp_path):
    sessions = [*ordinary, *planted.values()]
    guard = ModelGuard(tiny, following)
    stats = pltpack.compress(sessions, tmp_path / "a", quality="small", profile=profile, guard=guard)
    found = records(tmp_path / "a")
    assert list(found) == [s.session for s in sessions], "in the order in which they were given"
    for name in ("loud", "nan"):
        assert (found[name].kept, found[name].tried[0].reason) == (LAST, "range")
    assert (found["altered"].kept, found["altered"].tried[0].reason) in [(LAST, "other model"), (LAST, "range")]
    assert found["foreign"].range["energy"] > 1.3
    after = kls(tiny, tmp_path / "a", sessions, following)
    plain = pltpack.compress(sessions[:4], tmp_path / "plain", quality="small", profile=profile)
    before = kls(tiny, tmp_path / "plain", sessions[:4], following)
    for name, record in found.items():
        assert record.continuation == CAPTURED and record.asked == "small" and record.limits["kl"] == 0.025
        assert record.last.reason == HOLDS
        assert all(trial.reason != HOLDS for trial in record.tried[:-1])
        # Over a cache with a NaN the model says nothing, however it is stored.
        assert after[name] <= 0.025 or name == "nan", "never below the promise"
        assert (after[name] == 0) == (record.kept == LAST) or name == "nan"
        if record.last.measured and record.kept != LAST:
            assert record.last.kl == pytest.approx(after[name], rel=1e-3, abs=1e-7)
            assert record.last.tokens == NEXT
    # Ordinary sessions step up only as their own scores, without a guard, say.
    for name, kl in before.items():
        assert (found[name].kept != "small") == (kl > 0.025 or "perplexity" in {t.reason for t in found[name].tried})
    assert stats["guard"]["sessions"] == 8
    assert stats["guard"]["stepped_up"] == sum(record.kept != "small" for record in found.values()) >= 3
    assert stats["scored_sessions"] == 8
    after["nan"] = 0.0
    assert stats["kl"] == pytest.approx(np.mean(list(after.values())), rel=1e-3)
    assert plain["kl"] is None
    assert pltpack.verify(tmp_path / "a")
    manifest = json.loads((tmp_path / "a" / "MANIFEST.json").read_text())["body"]
    assert (manifest["generation"], manifest["quality"]) == (1, "small")
    named = {entry["file"] for entry in (*manifest["libraries"], *manifest["sessions"])}
    present = {p.relative_to(tmp_path / "a").as_posix() for p in (tmp_path / "a").rglob("*.plt*")}
    assert present == named, "what was tried and given up is not there"
    command = [sys.executable, "spec/reference_decoder.py", tmp_path / "a", tmp_path / "again"]
    reference = subprocess.run(command, cwd=ROOT)
    assert reference.returncode == 0 and len(list((tmp_path / "again").iterdir())) == 8


def test_a_tight_limit_goes_up_tier_by_tier_and_keeps_what_holds(tiny, profile, ordinary, following, tmp_path):
    limits = Limits(kl=1e-5, errors=1e6)
    pltpack.compress(ordinary, tmp_path / "a", quality="small", profile=profile,
                     guard=ModelGuard(tiny, following, limits))  # fmt: skip
    tiers = ["small", "balanced", "near", "q4", LAST]
    for record in records(tmp_path / "a").values():
        tried = [trial.tier for trial in record.tried]
        assert tried == tiers[: len(tried)] and len(tried) > 1
        assert all(trial.reason == "kl" and trial.kl > 1e-5 for trial in record.tried[:-1])
    with pytest.raises(PromiseError, match=r"'s0' does not hold.*'small'.*KL"):
        pltpack.compress(ordinary, tmp_path / "b", quality="small", profile=profile,
                         guard=ModelGuard(tiny, following, dataclasses.replace(limits, refuse=True)))  # fmt: skip
    assert not (tmp_path / "b").exists()


def test_without_a_model_the_profile_decides(profile, ordinary, planted, tmp_path):
    sessions = [*ordinary, *planted.values()]
    pltpack.compress(sessions, tmp_path / "a", quality="balanced", profile=profile, guard=ProfileGuard())
    found = records(tmp_path / "a")
    for snapshot in ordinary:
        assert found[snapshot.session].kept == "balanced"
        assert 0 < found[snapshot.session].last.predicted_kl <= 0.0125
    assert found["foreign"].tried[0].reason == "range" and found["foreign"].kept == "near"
    assert found["loud"].kept == found["nan"].kept == LAST
    assert found["altered"].kept in ("near", LAST)
    with pltpack.open(tmp_path / "a") as archive:
        assert archive.stats()["kl"] == 0.0, "only what is exact is known"
        assert archive.stats()["scored_sessions"] == sum(r.kept == LAST for r in found.values())


@pytest.mark.parametrize("external", [False, True])
def test_the_profile_stays_for_sessions_to_come(profile, ordinary, planted, following, tiny, tmp_path, external):
    """Also where no session needs it: all refused by their range, or all written and then stepped up."""
    archive, where = tmp_path / "a", {"external_profile" if external else "profile": profile}
    pltpack.compress([planted["loud"]], archive, quality="balanced", guard=ProfileGuard(), **where)
    limits = Limits(kl=1e-30)
    given = {"profile": profile} if external else {}
    pltpack.append(archive, ordinary[:2], guard=ModelGuard(tiny, following, limits), **given)
    assert {record.kept for record in records(archive).values()} == {LAST}
    pltpack.compact(archive)
    with pltpack.open(archive, profile=profile) as found:
        (library,) = found.libraries
        held = {library.profile_digest(index) for index in range(len(library.states))}
        assert profiles.digest(profiles.load(profile)[0]) in held
    pltpack.append(archive, ordinary[2:], **given)
    assert pltpack.verify(archive, profile=profile if external else None)
    with pltpack.open(archive, profile=profile) as found:
        assert found.manifest.generation == 4
        codecs = {name: codec_of(found.shard(name)).codec_id for name in found.sessions}
    assert codecs == {"loud": LAST, "s0": LAST, "s1": LAST, "s2": "transform", "s3": "transform"}


def test_append_guards_too_and_commits_once(folder, profile, ordinary, planted, following, tmp_path):
    pltpack.compress(ordinary[:2], tmp_path / "a", quality="balanced", profile=profile)
    dumps = tmp_path / "dumps"
    dumps.mkdir()
    for snapshot in (ordinary[2], planted["loud"]):
        pltpack.write_dump([snapshot], dumps / f"{snapshot.session}.safetensors", "safetensors")
    save_file({name: following[name] for name in ("s2", "loud")}, tmp_path / "next.safetensors")
    stats = done_json("append", tmp_path / "a", dumps, "--guard", "--model", folder, "--continuations",
                      tmp_path / "next.safetensors")  # fmt: skip
    assert {"session": "loud", "asked": "balanced", "kept": LAST, "reason": "range"} in stats["guard"]["decisions"]
    with pltpack.open(tmp_path / "a") as archive:
        assert archive.manifest.generation == 2
        assert archive.sessions == ["s0", "s1", *sorted(["loud", "s2"])]
        assert record_of(archive.shard("s0")) is None
    before = records(tmp_path / "a")
    pltpack.compact(tmp_path / "a")
    assert records(tmp_path / "a") == before, "compact keeps what is known"
    text = done("inspect", tmp_path / "a")
    assert "asked for balanced, kept lossless: balanced range, lossless holds" in text
    stats = done_json("inspect", tmp_path / "a")["stats"]
    assert Figures.of(stats).shown()["kl"] in text
    pltpack.export_session(tmp_path / "a", "loud", tmp_path / "loud.pltsession")
    pltpack.import_session(tmp_path / "b", tmp_path / "loud.pltsession")
    assert records(tmp_path / "b") == {"loud": before["loud"]}


def test_a_session_without_continuation_is_scored_by_its_own_end(tiny, profile, ordinary, tmp_path):
    short = captured(tiny, "short", ordinary[0].tokens[:20])
    pltpack.compress([ordinary[0], short], tmp_path / "a", quality="near", profile=profile, guard=ModelGuard(tiny))
    found = records(tmp_path / "a")
    assert found["s0"].continuation == HELD_BACK
    assert all(trial.tokens == TOKENS // 4 for trial in found["s0"].tried if trial.measured and trial.tier != LAST)
    assert (found["short"].kept, found["short"].tried[0].reason) == (LAST, "too short")


def test_tiers_without_a_profile_are_measured_as_well(tiny, ordinary, following, tmp_path):
    pltpack.compress(ordinary, tmp_path / "a", quality="q1", guard=ModelGuard(tiny, following))
    after = kls(tiny, tmp_path / "a", ordinary, following)
    for name, record in records(tmp_path / "a").items():
        assert record.limits["kl"] == USUAL_KL >= after[name]
        assert [t.tier for t in record.tried] == ["q1", "q2", "q3", "q4", LAST][: len(record.tried)]
    with pytest.raises(UnsupportedError, match="needs a profile"):
        pltpack.compress(ordinary, tmp_path / "b", quality="q1", guard=ProfileGuard())
    pltpack.compress(ordinary, tmp_path / "c", quality=LAST, guard=ProfileGuard())
    assert {r.kept for r in records(tmp_path / "c").values()} == {LAST}


def test_json_prometheus_and_report_agree_to_the_last_digit_shown(folder, ordinary, following, tmp_path):
    pytest.importorskip("prometheus_client")
    archive, dumps = tmp_path / "a", tmp_path / "dumps"
    dumps.mkdir()
    pltpack.write_dump(ordinary, dumps / "all.safetensors", "safetensors")
    save_file({s.session: following[s.session] for s in ordinary}, tmp_path / "next.safetensors")
    stats = done_json("compress", dumps, "-o", archive, "--quality", "q2", "--guard", "--model", folder,
                      "--continuations", tmp_path / "next.safetensors", "--guard-kl", 9, "--guard-ppl", 900,
                      "--guard-lossless", 900)  # fmt: skip
    scraped = {}
    for line in done("serve-metrics", archive, "--once").splitlines():
        if line.startswith("pltpack_"):
            scraped[line.partition("{")[0]] = float(line.rpartition(" ")[2])
    done("report", archive, "-o", tmp_path / "r.html")
    tiles = re.findall(r'<div class="tile">(.*?)</div>', (tmp_path / "r.html").read_text(encoding="utf-8"), re.DOTALL)
    page, text = " ".join(re.sub("<[^>]*>", "", " ".join(tiles)).split()), done("inspect", archive)
    inspected = done_json("inspect", archive)["stats"]
    for member, metric, factor, seen in (
        ("ratio", "pltpack_compression_ratio", 1, r"compression ratio ?([\d.]+)"),
        ("kl", "pltpack_kl_nats", 1, r"KL divergence ?([\d.]+)"),
        ("ppl_change_pct", "pltpack_perplexity_change_percent", 1, r"perplexity ([-+][\d.]+) %"),
        ("dedup_hit_rate", "pltpack_dedup_hit_rate", 100, r"dedup hit rate ?([\d.]+)"),
        ("tail_bits_per_element", "pltpack_tail_bits_per_element", 1, r"tail bits per element ?([\d.]+)"),
    ):
        assert stats[member] == inspected[member] == scraped[metric] != 0, member
        (shown,) = re.findall(seen, page)
        places, sign = len(shown.partition(".")[2]), "+" if shown[0] in "+-" else ""
        assert shown == f"{factor * scraped[metric]:{sign}.{places}f}", member
        assert shown in text, member


def test_another_models_session_that_says_so_is_refused(folder, profile, ordinary, tmp_path):
    other = dataclasses.replace(ordinary[0], identity=dataclasses.replace(ordinary[0].identity, weights="sha256:0"))
    with pytest.raises(pltpack.PltpackError, match="weights"):
        pltpack.compress([other], tmp_path / "a", quality="q4", guard=ModelGuard(folder))
    assert not (tmp_path / "a").exists()


def test_own_caches_are_told_from_others(tiny, ordinary):
    assert own_error(tiny, ordinary[0]) < 0.01
    assert own_error(dataclasses.replace(tiny, network=make_network(seed=1)), ordinary[0]) > 0.3


def test_measured_is_what_scores_say(tiny, ordinary, following):
    import torch

    from pltpack.quality.scoring import compare

    rng = torch.Generator().manual_seed(0)
    before, after = (torch.randn(NEXT, 63, generator=rng).log_softmax(-1) for _ in range(2))
    found, known = measured(before, after, following["s0"]), compare(before, after, following["s0"])
    for name in ("kl", "nll", "nll_rebuilt"):
        assert found[name] == pytest.approx(known[name], rel=1e-5)
    trial = Trial("small", HOLDS, **found)
    assert trial.ppl_change_pct == pytest.approx(known["ppl_change_pct"], rel=1e-4)
    changes = (before - after)[:-1].gather(1, torch.as_tensor(following["s0"][1:], dtype=torch.int64)[:, None])
    sampled = [torch.expm1(changes[torch.randint(NEXT - 1, (NEXT - 1,), generator=rng)].mean()) for _ in range(2000)]
    assert found["ppl_error_pct"] == pytest.approx(100 * float(torch.stack(sampled).std()), rel=0.4)


@pytest.mark.parametrize(
    ("tier", "aimed", "then"),
    [("small", 0.025, ["balanced", "near", "q4", LAST]), ("balanced", 0.01, ["near", "q4", LAST]),
     ("balanced", 0.02, ["balanced", "near", "q4", LAST]), ("near", 0.003, ["q4", LAST]),
     ("fixed-step", None, ["q4", LAST]), ("q2", None, ["q3", "q4", LAST]), ("q4", None, [LAST]),
     ("turboquant-3", None, ["turboquant-4", "q4", LAST]), (LAST, None, [])],
)  # fmt: skip
def test_the_ladder(tier, aimed, then):
    assert ladder(tier, aimed) == then
    assert all(name in registry.TIERS for name in then)
    assert (promise(tier) is None) == (tier not in ("small", "balanced", "near"))


def test_limits_and_usage(profile, ordinary, tmp_path):
    for bad in ({"ppl_pct": -1.0}, {"kl": float("nan")}, {"ppl_pct": 9.0}, {"strange": 1.0}, {"errors": -0.5}):
        with pytest.raises(UnsupportedError):
            ProfileGuard(Limits(**bad))
    with pytest.raises(UnsupportedError, match="bits and bytes"):
        pltpack.compress(ordinary, tmp_path / "a", quality="small", profile=profile, guard=ProfileGuard(),
                         target=pltpack.archive.settings.Target(bits=1.0))  # fmt: skip
    for options in (["--guard-kl", "0.1"], ["--guard-refuse"], ["--guard", "--continuations", "x"]):
        result = run("compress", tmp_path, "-o", tmp_path / "a", *options)
        assert result.exit_code == 2 and "need --" in result.stderr


def test_more_is_usual_where_a_turn_is_answered_next(tiny, profile, ordinary):
    guard = ProfileGuard()
    for energy, text, turn in ((1.1, False, False), (1.45, True, False), (1.7, True, True), (0.5, True, True)):
        assert guard.is_strange(Screened(Range(energy, 9.0, 0.0))) == text
        assert guard.is_strange(Screened(Range(energy, 9.0, 0.0), answered=True)) == turn
    most = ProfileGuard(Limits(strange=1.5, outside=1.6))
    assert not most.is_strange(Screened(Range(1.59, 9.0, 0.0), answered=True))
    assert most.is_strange(Screened(Range(1.61, 9.0, 0.0), answered=True)), "nothing beyond the outer limit is usual"
    ids = ordinary[0].tokens.copy()
    ids[[20, TOKENS - 3]] = json.loads(profiles.load(profile)[0]["about"].tobytes())["turn_ends"][0]
    guard.begin(*profiles.load(profile))
    assert guard.screen(captured(tiny, "chat", ids)).answered
    assert not guard.screen(ordinary[0]).answered


def test_ranges_of_ordinary_sessions(profile, ordinary, planted):
    arrays, identity = profiles.load(profile)
    ranges = Ranges(arrays, identity)
    found = {s.session: ranges.of(s) for s in [*ordinary, *planted.values()]}
    for snapshot in ordinary:
        assert not found[snapshot.session].outside() and not found[snapshot.session].strange()
    assert found["loud"].outside() and found["nan"].outside()
    assert found["nan"].not_finite == pytest.approx(2 / (TOKENS - 4))
    assert found["foreign"].strange()
    assert Range(float("nan"), 1.0, 0.0).outside() and Range(0.1, 1.0, 0.0).strange()
    assert KEY.startswith("x-")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_real_model_catches_what_is_planted(model_dir, real_dumps, tmp_path):
    from benchmarks.guard import altered, times_50
    from pltpack.quality.model import load_tokenizer
    from pltpack.quality.probes import read_continuations

    profile = tmp_path / "p.safetensors"
    calibrate(model_dir, ROOT / "fixtures" / "sessions.json", profile, tokens=1024, window=256, profile_rank=64)
    model = load_model(model_dir)
    texts = read_continuations(real_dumps.parent / "continuations.safetensors")
    ordinary = [s for s in pltpack.open_dumps([real_dumps]) if s.session in ("frost", "battery-code")]
    text = "Ἄνδρα μοι ἔννεπε, Μοῦσα, πολύτροπον, ὃς μάλα πολλὰ πλάγχθη, ἐπεὶ Τροίης ἱερὸν πτολίεθρον ἔπερσε· " * 3
    ids = np.array(load_tokenizer(model_dir)(text).input_ids, np.int32)[:240]
    layers = [(one.keys[0].numpy().astype(BF16), one.values[0].numpy().astype(BF16))
              for one in prefill(model, ids[:-64]).layers]  # fmt: skip
    greek = Snapshot.from_arrays("planted-greek", ids[:-64], layers, ordinary[0].identity)
    planted = [times_50(ordinary[0]), altered(model, ordinary[1]), greek]
    texts |= {"planted-times-50": texts[ordinary[0].session], "planted-altered-weights": texts[ordinary[1].session],
              "planted-greek": ids[-64:]}  # fmt: skip
    sessions = [*ordinary, *planted]
    pltpack.compress(sessions, tmp_path / "a", quality="small", profile=profile, guard=ModelGuard(model, texts))
    found, after = records(tmp_path / "a"), kls(model, tmp_path / "a", sessions, texts)
    assert found["planted-times-50"].kept == found["planted-altered-weights"].kept == LAST
    assert found["planted-greek"].range["energy"] > 1.3
    for name, record in found.items():
        assert after[name] <= 0.025, name
        assert record.last.reason == HOLDS
    pltpack.compress(sessions, tmp_path / "b", quality="small", profile=profile, guard=ProfileGuard())
    without = records(tmp_path / "b")
    assert without["planted-times-50"].kept == LAST
    assert without["planted-greek"].kept != "small" and without["planted-altered-weights"].kept != "small"
