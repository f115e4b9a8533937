"""Scores: the protocol against a few lines of its own, the baselines' sizes and errors, and the command."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

import pltpack
from pltpack.errors import DumpError, IdentityError, NotFoundError, UnsupportedError
from pltpack.quality.agreement import require_agreement
from pltpack.quality.baselines import Fp8, Kivi, Raw, Zstd, grouped, kivi
from pltpack.quality.pca import Basis, Pca, coded, frequencies
from pltpack.quality.plot import plot
from pltpack.quality.probes import (
    BRANCHES,
    CUT_TOKENS,
    at_branches,
    at_ends,
    at_fractions,
    held_back,
    read_continuations,
)
from pltpack.quality.rebuilt import FromSnapshots, Rate, check_rebuilt, in_memory, of_archives, of_tiers, prefix
from pltpack.quality.scoring import Score
from pltpack.snapshot import Identity, Snapshot
from tests.cli_common import done, done_json, run
from tests.profiles_common import save_profile, session

BF16 = ml_dtypes.bfloat16
ROPE = {"type": "default", "theta": 10000.0, "dim": 8, "style": "half"}
SHORT = ("rain-gauge", "frost")


def snapshot(tokens=40, heads=2, dim=8, layers=3, seed=0, session="one", dtype=BF16, ids=None) -> Snapshot:
    rng = np.random.default_rng(seed)
    shape = (heads, tokens, dim)
    pairs = [tuple(rng.normal(size=shape).astype(dtype) for _ in range(2)) for _ in range(layers)]
    identity = Identity(rope=ROPE, keys="rotated")
    return Snapshot.from_arrays(session, np.arange(tokens) if ids is None else ids, pairs, identity)


def error(a: Snapshot, b: Snapshot) -> float:
    parts = [
        np.square(x.astype(np.float32) - y.astype(np.float32)).mean()
        for index in range(len(a.identity.layers))
        for x, y in zip(a.layer(index), b.layer(index), strict=True)
    ]
    return float(np.mean(parts)) ** 0.5


class TestProbes:
    def test_ends_take_the_continuation(self) -> None:
        (probe,) = at_ends([snapshot()], {"one": np.array([7, 8, 9]), "other": np.array([1, 2])})
        assert (probe.session, probe.cut, probe.text.tolist()) == ("one", 40, [7, 8, 9])

    def test_tail_is_the_sessions_own(self) -> None:
        (probe,) = held_back([snapshot()], 5)
        assert (probe.cut, probe.text.tolist()) == (35, [35, 36, 37, 38, 39])

    def test_fractions_continue_with_the_session_and_what_follows(self) -> None:
        half, late = at_fractions([snapshot()], ["0.5", "0.95"], {"one": np.array([7, 8])})
        assert (half.place, half.cut, half.text.tolist()) == ("0.5", 20, [*range(20, 40), 7, 8])
        assert (late.cut, late.text.tolist()) == (38, [38, 39, 7, 8])
        (long,) = at_fractions([snapshot(tokens=600, dim=1, heads=1, layers=1)], ["0.1"])
        assert len(long.text) == CUT_TOKENS

    def test_branches_are_where_tokens_part(self) -> None:
        common, mine, theirs = np.arange(20), np.arange(100, 110), np.arange(200, 220)
        a = snapshot(tokens=30, session="a", ids=np.concatenate([common, mine]))
        b = snapshot(tokens=40, session="b", ids=np.concatenate([common, theirs]))
        c = snapshot(tokens=28, session="c", ids=np.concatenate([common, theirs[:8]]))
        lone = snapshot(tokens=10, session="lone", ids=np.arange(500, 510))
        found = at_branches([a, b, c, lone])
        # Where another session ends is a place to go on from, too.
        assert sorted((p.session, p.cut) for p in found) == [("a", 20), ("b", 20), ("b", 28), ("c", 20)]
        assert all(p.place == BRANCHES for p in found)
        assert found[0].text.tolist() == mine.tolist()

    def test_salts_do_not_branch_off_from_each_other(self) -> None:
        a = snapshot(session="a")
        b = dataclasses.replace(a, session="b", tokens=np.concatenate([a.tokens[:20], a.tokens[20:] + 100]))
        assert len(at_branches([a, b])) == 2
        salted = dataclasses.replace(b, identity=dataclasses.replace(b.identity, salt="x"))
        assert at_branches([a, salted]) == []

    @pytest.mark.parametrize(
        ("make", "kind", "fact"),
        [
            (lambda s: at_ends([s], {}), NotFoundError, "no continuation"),
            (lambda s: at_ends([s], {"one": np.array([1])}), DumpError, "too short"),
            (lambda s: held_back([s], 40), DumpError, "too short"),
            (lambda s: held_back([s], 400), DumpError, "too short"),
            (lambda s: held_back([s], 1), UnsupportedError, "tail of 1"),
            (lambda s: at_fractions([s], ["1.5"]), UnsupportedError, "fraction"),
            (lambda s: at_fractions([s], ["nan"]), UnsupportedError, "fraction"),
            (lambda s: at_fractions([s], ["half"]), UnsupportedError, "fraction"),
            (lambda s: at_fractions([s], ["0.01"]), DumpError, "too short"),
        ],
    )
    def test_what_cannot_be_scored_is_refused(self, make, kind, fact) -> None:
        with pytest.raises(kind, match=fact):
            make(snapshot())

    def test_broken_continuations_are_one_error(self, tmp_path: Path) -> None:
        path = tmp_path / "c.safetensors"
        with pytest.raises(NotFoundError):
            read_continuations(path)
        path.write_bytes(b"\xff" * 100)
        with pytest.raises(DumpError, match=r"c\.safetensors"):
            read_continuations(path)
        save_file({"one": np.zeros((2, 2), np.int32)}, path)
        with pytest.raises(DumpError, match="not a list of ids"):
            read_continuations(path)


class TestBaselines:
    @given(
        bits=st.sampled_from([2, 4]), tokens=st.integers(1, 70), dim=st.integers(1, 70), heads=st.integers(1, 3),
        scale=st.sampled_from([1e-6, 1.0, 300.0]), seed=st.integers(0, 99),
    )  # fmt: skip
    @settings(max_examples=40)
    def test_kivi_takes_its_bits_and_errs_by_half_a_step(self, bits, tokens, dim, heads, scale, seed) -> None:
        rng = np.random.default_rng(seed)
        keys, values = (rng.normal(size=(heads, tokens, dim)).astype(np.float32) * np.float32(scale) for _ in range(2))
        near_keys, near_values, total = kivi(keys, values, bits)
        groups = heads * dim * math.ceil(tokens / 32) + heads * tokens * math.ceil(dim / 32)
        assert total == bits * 2 * keys.size + 32 * groups
        for array, near, axis in ((keys, near_keys, 1), (values, near_values, 2)):
            assert near.shape == array.shape and near.dtype == array.dtype
            for start in range(0, array.shape[axis], 32):
                span = [slice(None)] * 3
                span[axis] = slice(start, start + 32)
                part, again = array[tuple(span)], near[tuple(span)]
                step = np.ptp(part, axis=axis, keepdims=True) / (2**bits - 1)
                # Scale and zero point are fp16, of 11 bits, and of 2**-24 at the least.
                slack = np.abs(part).max() * 2.0**-9 + 2.0**bits * 2.0**-24
                assert (np.abs(part - again) <= step / 2 + slack).all()

    def test_full_groups_take_five_and_three_bits(self) -> None:
        array = np.random.default_rng(0).normal(size=(3, 64, 64)).astype(BF16)
        for bits, expected in ((4, 5.0), (2, 3.0)):
            assert kivi(array, array, bits)[2] / (2 * array.size) == expected

    def test_levels_are_few_and_reach_both_ends(self) -> None:
        array = np.arange(32, dtype=np.float32).reshape(1, 32, 1)
        near, groups = grouped(array, 1, 2, 32)
        assert groups == 1
        assert np.unique(near).tolist() == pytest.approx([0, 31 / 3, 62 / 3, 31], abs=0.02)

    def test_hostile_values_stay_in_place(self) -> None:
        array = np.array([np.inf, -np.inf, 1e38, 0], np.float32).reshape(1, 4, 1)
        with np.errstate(all="ignore"):
            near, _ = grouped(array, 1, 4, 32)
        assert near.shape == array.shape

    def test_bits_of_the_plain_ones(self) -> None:
        one = snapshot(tokens=64, dim=32)
        bits = {}
        for baseline in (Raw(), Zstd(3), Fp8(), Kivi(4), Kivi(2)):
            again = baseline.rebuild(one)
            assert check_rebuilt(one, again) == (baseline.family in ("raw", "zstd"))
            bits[baseline.name] = baseline.rate().bits
        assert bits["raw"] == 16
        assert 8 < bits["zstd -3"] < 16
        assert (bits["fp8 e4m3"], bits["KIVI int4"], bits["KIVI int2"]) == (8, 5, 3)

    def test_rate_runs_over_all_snapshots(self) -> None:
        baseline = Fp8()
        for seed in range(3):
            baseline.rebuild(snapshot(seed=seed))
        assert baseline.rate().elements == 3 * snapshot().elements
        assert baseline.rate().bits == 8

    def test_fp8_saturates(self) -> None:
        large = Snapshot.from_arrays("one", [1], [(np.full((1, 1, 1), 1e4, BF16),) * 2])
        assert float(Fp8().rebuild(large).layer(0)[0].item()) == 448


def structured(seed: int, tokens: int = 96) -> Snapshot:
    """A cache whose layers and channels all follow three signals, as a PCA likes it; the first tokens are outliers."""
    rng = np.random.default_rng(seed)
    mixing = np.random.default_rng(77).normal(size=(3, 2, 3, 2, 8))
    signal = rng.normal(size=(tokens, 3))
    signal[:4] *= 50
    noise = rng.normal(size=(tokens, 2, 3, 2, 8)) * 0.05
    x = (np.einsum("ts,spLhd->tpLhd", signal, mixing) + noise).astype(np.float32)
    pairs = []
    for layer in range(3):
        keys, values = (x[:, part, layer].transpose(1, 0, 2) for part in range(2))
        from pltpack.codec.rope import Rotation

        rotation = Rotation.of(ROPE, "rotated", 8)
        pairs.append((rotation.rotate(keys, 0).astype(BF16), values.astype(BF16)))
    return Snapshot.from_arrays(f"s{seed}", np.arange(tokens), pairs, Identity(rope=ROPE, keys="rotated"))


@pytest.fixture(scope="module")
def basis() -> Basis:
    return Basis((structured(seed) for seed in range(1, 5)), finest=0.02)


class TestPca:
    def test_finer_steps_take_more_bytes_and_err_less(self, basis: Basis) -> None:
        one, found = structured(9), []
        for step in (1.0, 0.5, 0.2):
            pca = Pca(basis, step)
            again = pca.rebuild(one)
            assert again.identity.layers == one.identity.layers
            assert np.array_equal(again.tokens, one.tokens)
            found.append((pca.rate().session_bits, error(one, again)))
        bits, errors = zip(*found, strict=True)
        assert list(bits) == sorted(bits) and list(errors) == sorted(errors, reverse=True)
        # Three signals in 48 channels: a step of half a deviation takes far less than a bit, beside the exact tokens.
        sinks = 4 * one.raw_bytes / len(one)
        streams = bits[1] / 8 * one.elements - sinks
        assert streams * 8 / one.elements < 1.0

    def test_first_tokens_are_exact(self, basis: Basis) -> None:
        one = structured(9)
        again = Pca(basis, 1.0).rebuild(one)
        assert check_rebuilt(prefix(one, 4), prefix(again, 4))
        assert not check_rebuilt(one, again)

    def test_small_steps_give_the_values_back(self, basis: Basis) -> None:
        one = structured(9)
        # Below this, bf16 itself rounds; the smallest components are left out.
        assert error(one, Pca(basis, 0.02).rebuild(one)) < 0.1 * error(one, Pca(basis, 1.0).rebuild(one)) + 0.01

    def test_profile_is_counted_apart(self, basis: Basis) -> None:
        pca = Pca(basis, 0.5)
        pca.rebuild(structured(9))
        rate = pca.rate()
        assert rate.profile_bytes == pca.profile_bytes > 0
        assert rate.bits > rate.session_bits

    @given(seed=st.integers(0, 99), far=st.integers(-40000, 40000))
    @settings(max_examples=25)
    def test_what_is_counted_can_be_decoded(self, seed: int, far: int) -> None:
        from pltpack.codec import rans

        rng = np.random.default_rng(seed)
        spread = [0, 0.2, 1, 3, 10, 100]
        tables = frequencies(np.rint(rng.normal(size=(500, 6)) * spread))
        levels = np.rint(rng.normal(size=(64, 6)) * spread)
        levels[3, 2] = far
        stream, escaped = coded(levels, tables)
        symbols = np.empty((6, 64), np.uint8)
        rans.decode(stream, np.arange(6), rans.decode_tables(tables), symbols)
        again = symbols.astype(np.int32) - 127
        again[symbols == 255] = escaped
        assert np.array_equal(again.T, levels)

    def test_nothing_to_learn_from(self) -> None:
        with pytest.raises(UnsupportedError, match="too few"):
            Basis([])
        with pytest.raises(UnsupportedError, match="too few"):
            Basis([snapshot(tokens=4)])

    def test_steps_finer_than_the_basis_are_refused(self, basis: Basis) -> None:
        with pytest.raises(ValueError, match=r"0\.01"):
            Pca(basis, 0.01)


class TestAgreement:
    def test_only_what_both_know_is_compared(self) -> None:
        one = snapshot().identity
        require_agreement(one, dataclasses.replace(one, weights="w", tp_rank=0))
        require_agreement(dataclasses.replace(one, weights="w"), one)
        require_agreement(one, dataclasses.replace(one, rope={**ROPE, "more": 1}))

    @pytest.mark.parametrize(
        ("change", "field"),
        [({"rope": {**ROPE, "theta": 1.0}}, "rope"), ({"keys": "unrotated"}, "keys"), ({"layers": ()}, None)],
    )
    def test_what_differs_is_named(self, change, field) -> None:
        one = snapshot().identity
        other = dataclasses.replace(one, **change)
        if field is None:
            return require_agreement(one, other)
        with pytest.raises(IdentityError, match=field):
            require_agreement(one, other)


def test_rate_counts_the_profile_apart() -> None:
    rate = Rate(1000, 16000, 8000, 400)
    assert (rate.bits, rate.session_bits, rate.ratio) == (1, 0.6, 16)
    assert rate.to_json()["bits_without_profile"] == 0.6


def test_prefix_cuts_everything() -> None:
    whole = dataclasses.replace(snapshot(), importance=np.ones(40, np.float32))
    part = in_memory(prefix(whole, 10))
    assert len(part) == 10 and part.layer(0)[0].shape == (2, 10, 8)
    assert len(prefix(whole, 10).importance) == 10


class TestRebuilt:
    def test_tiers_become_archives_of_their_own(self, tmp_path: Path) -> None:
        one = snapshot(tokens=64)
        # No tier here takes a profile, so a missing one does no harm.
        with of_tiers([one], ["q4", "lossless", "q4"], profile=tmp_path / "none", dedup=False) as found:
            assert [(c.name, c.family) for c in found] == [("q4", "group"), ("lossless", "lossless")]
            assert [check_rebuilt(one, c.rebuild(one)) for c in found] == [False, True]
            stats = found[0].archive.stats()
            assert (found[0].rate().bits, found[0].rate().ratio) == (stats["bits_per_element"], stats["ratio"])
            half = prefix(one, 20)
            assert len(found[1].rebuild(half)) == 20 and check_rebuilt(half, found[1].rebuild(half))

    def test_archives_of_one_quality_are_told_apart(self, tmp_path: Path) -> None:
        for name in "ab":
            pltpack.compress([snapshot()], tmp_path / name, quality="lossless")
        with of_archives([tmp_path / "a"]) as alone, of_archives([tmp_path / "a", tmp_path / "b"]) as both:
            assert [c.name for c in alone] == ["lossless"]
            assert [c.name for c in both] == ["a", "b"]

    def test_a_profile_serves_the_archives_that_name_it(self, tmp_path: Path) -> None:
        (tmp_path / "p").mkdir()
        mine, other = (save_profile(tmp_path / "p" / f"{n}.safetensors", seed=n) for n in (1, 2))
        one = session("one", np.arange(20, 80))
        pltpack.compress([one], tmp_path / "a", external_profile=mine)
        pltpack.compress([one], tmp_path / "b", profile=other)
        with of_archives([tmp_path / "a", tmp_path / "b"], mine) as found:
            for candidate in found:
                assert len(candidate.rebuild(one)) == 60
        with of_archives([tmp_path / "a"], other) as (lost,), pytest.raises(NotFoundError, match="not found"):
            lost.rebuild(one)
        (tmp_path / "p" / "1.safetensors").rename(tmp_path / "a" / "1.safetensors")
        with of_archives([tmp_path / "a"], other) as (candidate,):
            assert len(candidate.rebuild(one)) == 60, "the archive's own folder is looked through as well"

    def test_others_caches_are_refused(self, tmp_path: Path) -> None:
        pltpack.compress([snapshot()], tmp_path / "a", quality="lossless")
        with of_archives([tmp_path / "a"]) as (candidate,):
            with pytest.raises(NotFoundError):
                candidate.rebuild(snapshot(session="two"))
            with pytest.raises(DumpError, match="other tokens"):
                candidate.rebuild(snapshot(ids=np.arange(40) + 1))
            with pytest.raises(DumpError, match="other tokens"):
                candidate.rebuild(snapshot(tokens=41))
            with pytest.raises(IdentityError, match="layers"):
                candidate.rebuild(snapshot(layers=2))

    def test_arrays_in_memory(self) -> None:
        one = snapshot()
        found = FromSnapshots("mine", "mine", {"one": one})
        assert check_rebuilt(prefix(one, 7), found.rebuild(prefix(one, 7))) and found.rate() is None
        with pytest.raises(NotFoundError):
            found.rebuild(snapshot(session="two"))
        with pytest.raises(DumpError, match="other tokens"):
            found.rebuild(snapshot(ids=np.arange(40) + 1))


class TestUsage:
    @pytest.mark.parametrize(
        ("more", "fact"),
        [
            ([], "either --continuations"),
            (["--tail", 5, "--continuations", "x"], "either --continuations"),
            (["--tail", 5], "nothing to score"),
            (["--tail", 5, "--tiers", "q4", "--text", "x"], "--baselines too"),
            (["--tail", 1, "--tiers", "q4"], "--tail"),
        ],
    )
    def test_wrong_options(self, more, fact) -> None:
        result = run("score", "--model", "m", "--original", "d", *more)
        assert result.exit_code == 2
        assert fact in result.output

    def test_plots_are_checked_before_the_work(self, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        common = ("score", "--model", "m", "--original", "d", "--tail", 5, "--tiers", "q4", "--plot")
        for name, fact in (("a.jpg", ".png or .svg"), ("no/a.png", "does not exist")):
            result = run(*common, tmp_path / name)
            assert result.exit_code == 2
            assert fact in result.output

    def test_no_model(self, tmp_path: Path) -> None:
        from tests.cli_common import write_dumps

        dumps = write_dumps(tmp_path / "dumps")
        result = run("score", "--model", tmp_path, "--original", dumps, "--tail", 5, "--tiers", "q4", "--json")
        assert result.exit_code == 2
        assert json.loads(result.stdout)["error"]["type"] == "NotFoundError"


@pytest.fixture(scope="module")
def archive(real_dumps: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("score") / "q2"
    pltpack.compress([real_dumps / f"{name}.safetensors" for name in SHORT], out, quality="q2", dedup=False)
    return out


@pytest.fixture(scope="module")
def continuations(real_dumps: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first tokens of the shipped continuations, of two sessions."""
    from pltpack.quality.capture import CONTINUATIONS

    found = read_continuations(real_dumps.parent / CONTINUATIONS)
    path = tmp_path_factory.mktemp("texts") / "continuations.safetensors"
    save_file({name: found[name][:24] for name in SHORT}, path)
    return path


def test_plot_is_the_same_every_time_and_names_every_point(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")

    def score(name: str, family: str, bits: float, kl: float) -> Score:
        row = {"kl": kl, "nll": 1.0, "nll_rebuilt": 1.0, "ppl_change_pct": 0, "top1_pct": 99, "bit_exact": not kl}
        return Score(name, family, Rate(bits * 1000, 16000, 8000), {"end": {"one": row}}, 16000)

    lossy = [score("q4", "group", 4, 0.001), score("q3", "group", 3, 0.004), score("int4", "KIVI", 5, 0.01)]
    exact = [score("raw", "raw", 16, 0), score("zstd", "zstd", 12, 0), score("mine", "mine", 11, 0)]
    for number, some in enumerate((lossy, exact, lossy + exact)):
        for suffix in ("svg", "png"):
            first, second = (tmp_path / f"{number}-{again}.{suffix}" for again in "ab")
            plot(some, first, "title")
            plot(some, second, "title")
            assert first.read_bytes() == second.read_bytes()
        text = (tmp_path / f"{number}-a.svg").read_text()
        assert all(f">{one.name}<" in text for one in some)


@pytest.mark.slow
@pytest.mark.timeout(600)
class TestWithTheModel:
    def protocol(self, model, dumps: Path, rebuilt: Path, name: str, text: np.ndarray) -> dict[str, float]:
        """The protocol once more, from files, with nothing of pltpack in it."""
        import torch
        from safetensors.torch import load_file
        from transformers.cache_utils import DynamicCache

        found = []
        for folder in (dumps, rebuilt):
            tensors, cache = load_file(folder / f"{name}.safetensors"), DynamicCache()
            for index in range(sum(key.endswith(".keys") for key in tensors)):
                pair = (tensors[f"layers.{index}.{part}"][None].float() for part in ("keys", "values"))
                cache.update(*pair, index)
            with torch.no_grad():
                out = model(torch.from_numpy(text)[None].long(), cache=cache, use_cache=True)
            found.append(out.logits[0].log_softmax(-1))
        before, after = found
        following = torch.from_numpy(text[1:]).long()[:, None]
        nll = [-one[:-1].gather(1, following).mean().item() for one in found]
        return {
            "kl": (before.exp() * (before - after)).sum(-1).mean().item(),
            "ppl_change_pct": 100 * math.expm1(nll[1] - nll[0]),
            "top1_pct": 100 * (before.argmax(-1) == after.argmax(-1)).float().mean().item(),
        }

    def test_figures_are_those_of_the_protocol(
        self, model, model_dir: Path, real_dumps: Path, archive: Path, continuations: Path, tmp_path: Path
    ) -> None:
        plots = [tmp_path / "plot.png", tmp_path / "plot.svg"]
        report = done_json(
            "score", "--model", model_dir, "--original", real_dumps, "--archive", archive, "--tiers", "lossless",
            "--no-dedup", "--continuations", continuations, *(part for path in plots for part in ("--plot", path)),
        )  # fmt: skip
        q2, lossless = report["scores"]
        pltpack.decompress(archive, tmp_path / "rebuilt")
        texts = read_continuations(continuations)
        expected = {name: self.protocol(model, real_dumps, tmp_path / "rebuilt", name, texts[name]) for name in SHORT}
        assert set(q2["sessions"]) == set(SHORT)
        for name in SHORT:
            assert {key: q2["sessions"][name][key] for key in expected[name]} == expected[name]
        assert q2["total"]["kl"] == sum(q2["sessions"][name]["kl"] for name in q2["sessions"]) / 2 > 0
        size = sum(path.stat().st_size for path in archive.rglob("*") if path.is_file())
        raw = sum(s.raw_bytes for s in pltpack.open_dumps(
            [real_dumps / f"{name}.safetensors" for name in SHORT]))  # fmt: skip
        assert q2["total"]["archive_bytes"] == size
        assert q2["total"]["ratio"] == raw / size
        assert q2["total"]["bits_per_element"] == pytest.approx(16 * size / raw)
        assert lossless["total"]["bit_exact"] and lossless["total"]["kl"] == 0 and not q2["total"]["bit_exact"]
        assert plots[0].read_bytes()[:4] == b"\x89PNG" and b"<svg" in plots[1].read_bytes()

    def test_tails_and_cuts(self, model_dir: Path, real_dumps: Path) -> None:
        text = done("score", "--model", model_dir, "--original", real_dumps, "--session", SHORT[0], "--tail", 16,
                    "--cut-at", "0.9", "--tiers", "turboquant-2")  # fmt: skip
        assert "turboquant-2" in text and "cut at 0.9" in text

    def test_other_models_caches_are_refused(self, model_dir: Path, tmp_path: Path) -> None:
        from tests.cli_common import write_dumps

        dumps = write_dumps(tmp_path / "dumps")
        result = run("score", "--model", model_dir, "--original", dumps, "--tail", 5, "--tiers", "q4", "--json")
        error = json.loads(result.stdout)["error"]
        assert (result.exit_code, error["type"]) == (2, "IdentityError")
        assert "differs" in error["message"] and str(dumps) in error["path"]
