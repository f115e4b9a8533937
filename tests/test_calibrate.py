"""Calibration: profiles true of the model, with the same bytes run after run, and resumed where interrupted."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from cli_common import done, done_json, run, write_dumps
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import make_network, save_model

import pltpack
from benchmarks.capture import unpack
from pltpack.archive import profiles
from pltpack.archive.settings import Target
from pltpack.codec import importance
from pltpack.codec.coefficients import Tables
from pltpack.codec.dual import dual
from pltpack.codec.profile import NAMES, Profile
from pltpack.errors import ConflictError, FormatError, IdentityError, NotFoundError, UnsupportedError
from pltpack.quality import bases, calibrate, entropy_fit, importance_fit, kl_fit, passes, sensitivity
from pltpack.quality.calibration_text import cut_windows
from pltpack.quality.model import load_model
from pltpack.quality.probes import at_ends, read_continuations
from pltpack.quality.rebuilt import of_archives
from pltpack.quality.rows import Blocks, from_bits, joined, log_norms, parted, to_bits
from pltpack.quality.scoring import score
from pltpack.quality.windows import Windows
from pltpack.snapshot import LayerGeometry

LAYERS = [LayerGeometry(2, 8, 8, "BF16"), LayerGeometry(1, 4, 6, "BF16"), LayerGeometry(3, 8, 8, "BF16")]
SIZES = {"tokens": 384, "window": 64}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "words.txt"
    words = np.random.default_rng(0).integers(0, 60, 1500)
    file.write_text(" ".join(f"w{word}" for word in words), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def made(tiny: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    out = tmp_path_factory.mktemp("profiles") / "tiny.safetensors"
    return out, calibrate.calibrate(tiny, text, out, profile_rank=12, **SIZES)


def about(arrays: dict) -> dict:
    return json.loads(arrays["about"].tobytes())


def test_a_profile_is_whole_and_names_its_model(made: tuple[Path, dict]) -> None:
    path, report = made
    arrays, identity = profiles.load(path)
    Profile(arrays, identity.layers)
    assert set(arrays) == set(NAMES)
    assert identity.weights
    assert identity.layers[0].dtype == "BF16"
    assert profiles.digest(arrays) == report["digest"]
    assert arrays["basis.rank"].tolist() == [12] == [report["rank"]]
    assert about(arrays)["turn_ends"] == [2]
    assert report["tokens"] == 384
    assert not path.with_name(path.name + ".partial").exists()
    assert (arrays["tables"][:, [0, 1, 2, 63]] > 0).all(), "every value can be coded, if need be by the escape"
    # Real errors were measured, at falling quality.
    measured = about(arrays)["source"]["kl"]
    assert [row["tokens"] for row in measured] == [48, 48, 12], "whole windows' caches and short ones"
    assert 0 < measured[0]["kl"] < measured[1]["kl"]
    assert about(arrays)["kl"] == report["kl"]
    assert about(arrays)["kl_length"] == report["kl_length"] == list(Profile(arrays, identity.layers).length)
    assert report["kl_length"][1:] == [12, 48] and 0 <= report["kl_length"][0] <= kl_fit.MOST_POWER
    seconds = report["seconds"]
    assert 0 < seconds["model"] < seconds["all"] and seconds["rest"] == seconds["all"] - seconds["model"]


def test_whitened_keys_have_unit_variance(made: tuple[Path, dict], tiny: Path, text: Path) -> None:
    import torch

    from pltpack.codec.rows import to_rows
    from pltpack.quality.model import load_tokenizer

    arrays, identity = profiles.load(made[0])
    profile, network = Profile(arrays, identity.layers), make_network()
    blocks, white = Blocks(identity.layers), []
    for tokens in cut_windows([text], load_tokenizer(tiny), 6, 64):
        with torch.no_grad():
            cache = network.model(torch.tensor(tokens[None].astype(np.int64)), use_cache=True).past_key_values
        pairs = [(layer.keys[0].bfloat16().float().numpy(), layer.values[0].bfloat16().float().numpy())
                 for layer in cache.layers]  # fmt: skip
        rows = to_rows(pairs, identity.layers, identity, 0)[0][4:] - profile.mean
        parts = [profile.whiten(rows[:, a:b], i) for i, (a, b) in enumerate(_spans(blocks))]
        white.append(np.concatenate(parts, axis=1))
    found = np.concatenate(white)
    assert np.abs(found.mean(axis=0)).max() < 0.05 * found.std()
    assert np.square(found[:, blocks.is_key]).mean() == pytest.approx(1, rel=0.02)


def _spans(blocks: Blocks) -> list[tuple[int, int]]:
    return list(zip(blocks.layer_rows[:-1], blocks.layer_rows[1:], strict=True))


def test_the_same_bytes_again_after_an_interruption(
    made: tuple[Path, dict], tiny: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, whole, ran = tmp_path / "p.safetensors", passes._pass, []

    def interrupted(*args: object) -> object:
        if len(ran) == 4:
            raise KeyboardInterrupt
        ran.append(args[1])
        return whole(*args)

    monkeypatch.setattr(passes, "_pass", interrupted)
    with pytest.raises(KeyboardInterrupt):
        calibrate.calibrate(tiny, text, out, profile_rank=12, **SIZES)
    assert not out.exists()
    assert (tmp_path / "p.safetensors.partial").is_dir()

    monkeypatch.setattr(passes, "_pass", lambda *args: (ran.append(args[1]), whole(*args))[1])
    calibrate.calibrate(tiny, text, out, profile_rank=12, **SIZES)
    assert len(ran) == 6, "two windows were left"
    assert out.read_bytes() == made[0].read_bytes()


def test_windows_of_other_settings_are_not_taken(tmp_path: Path) -> None:
    blocks, x = Blocks(LAYERS), np.ones((8, Blocks(LAYERS).rows), np.float32)
    Windows(tmp_path / "w", {"seed": 0}, 2, blocks).put(0, x, x[:4])
    assert Windows(tmp_path / "w", {"seed": 0}, 2, blocks).missing() == [1]
    assert Windows(tmp_path / "w", {"seed": 1}, 2, blocks).missing() == [0, 1]


def test_a_folder_that_is_something_else_stays(tiny: Path, text: Path, tmp_path: Path) -> None:
    (tmp_path / "p.partial").mkdir()
    (tmp_path / "p.partial" / "thesis.txt").write_text("dear", encoding="utf-8")
    with pytest.raises(ConflictError, match="no work folder"):
        calibrate.calibrate(tiny, text, tmp_path / "p", **SIZES)
    assert (tmp_path / "p.partial" / "thesis.txt").exists()


def test_layer_groups_and_rank_trade_bytes(made: tuple[Path, dict], tiny: Path, text: Path, tmp_path: Path) -> None:
    report = calibrate.calibrate(tiny, text, tmp_path / "p", profile_rank=2, layer_group=2, **SIZES)
    arrays, _ = profiles.load(tmp_path / "p")
    assert arrays["basis.rank"].tolist() == [2, 2]
    assert about(arrays)["layer_group"] == 2
    assert report["bytes"] < made[1]["bytes"]


def test_from_dumps_variance_takes_the_place_of_sensitivity(tmp_path: Path) -> None:
    write_dumps(tmp_path / "dumps")
    report = done_json("calibrate", "--from-dumps", tmp_path / "dumps", "-o", tmp_path / "p", "--tokens", "4096")
    arrays, identity = profiles.load(tmp_path / "p")
    assert about(arrays)["kl"] == [0.0, 1.0]
    assert about(arrays)["source"]["kl"] == "not measured"
    assert report["kl"] is None
    profile = Profile(arrays, identity.layers)
    found = np.zeros((3, len(Blocks(identity.layers).widths)), np.float32)
    features = importance.features(found, np.ones(3), np.arange(3))
    assert importance.predict(profile.importance, features).tolist() == [0, 0, 0]
    width = identity.layers[0].k_dim
    root = arrays["whiten"][: width * width].reshape(width, width)
    assert np.array_equal(root, np.eye(width, dtype=np.float16) * root[0, 0])
    again = done_json("calibrate", "--from-dumps", tmp_path / "dumps", "-o", tmp_path / "q", "--tokens", "4096")
    assert again["digest"] == report["digest"]


def test_a_profile_of_dumps_alone_has_a_tier_of_its_own(tmp_path: Path) -> None:
    write_dumps(tmp_path / "dumps")
    done("calibrate", "--from-dumps", tmp_path / "dumps", "-o", tmp_path / "p", "--tokens", "4096")
    done("compress", tmp_path / "dumps", "-o", tmp_path / "a", "--profile", tmp_path / "p")
    with pltpack.open(tmp_path / "a") as archive:
        assert archive.manifest.quality == "fixed-step"
    near = ("--profile", tmp_path / "p", "--quality", "near")
    refused = run("compress", tmp_path / "dumps", "-o", tmp_path / "b", *near)
    assert refused.exit_code == 3
    assert "fixed-step" in refused.stderr and "bits or bytes" in refused.stderr
    done("compress", tmp_path / "dumps", "-o", tmp_path / "c", "--profile", tmp_path / "p", "--target-bits", "6")


def test_the_command_line_makes_a_profile(tiny: Path, text: Path, tmp_path: Path, made: tuple[Path, dict]) -> None:
    sizes = ("--tokens", "384", "--window", "64", "--profile-rank", "12")
    said = done("calibrate", "--model", tiny, "--text", text, "-o", tmp_path / "p", *sizes)
    assert made[1]["digest"] in said
    again = run("calibrate", "--model", tiny, "--text", text, "-o", tmp_path / "p")
    assert again.exit_code == 2
    assert "exists already" in again.stderr
    for wrong in (["--model", tiny], ["--text", text], ["--from-dumps", text, "--model", tiny]):
        refused = run("calibrate", "-o", tmp_path / "q", *wrong)
        assert refused.exit_code == 2
        assert "--from-dumps" in refused.stderr


def test_bad_input_is_named(tiny: Path, text: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("w1 w2", encoding="utf-8")
    with pytest.raises(UnsupportedError, match=r"short\.txt.*fewer than a window"):
        calibrate.calibrate(tiny, short, tmp_path / "p", **SIZES)
    with pytest.raises(NotFoundError, match="no text"):
        calibrate.calibrate(tiny, [], tmp_path / "p")
    with pytest.raises(NotFoundError):
        calibrate.calibrate(tiny, tmp_path / "none.txt", tmp_path / "p")
    with pytest.raises(UnsupportedError, match="windows of 4"):
        calibrate.calibrate(tiny, text, tmp_path / "p", window=4)
    with pytest.raises(UnsupportedError, match="rank"):
        calibrate.calibrate(tiny, text, tmp_path / "p", profile_rank=0)
    assert not list(tmp_path.glob("p*"))


def test_files_are_mixed_evenly(tmp_path: Path) -> None:
    for name, count in (("long", 1000), ("short", 100)):
        ids = [1 if name == "long" else 2] * count
        (tmp_path / f"{name}.json").write_text(json.dumps({name: {"prompt": ids}}), encoding="utf-8")
    files = [tmp_path / "long.json", tmp_path / "short.json"]
    assert cut_windows(files, None, 4, 50)[:, 0].tolist() == [1, 1, 2, 2]
    assert cut_windows(files, None, 10, 50)[:, 0].tolist() == [1] * 8 + [2] * 2


def test_profiles_are_found_by_digest(made: tuple[Path, dict], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, report = made
    digest = report["digest"]
    monkeypatch.setenv(profiles.PATH_VARIABLE, "")
    assert profiles.find(digest, given=path)[0] == path
    assert profiles.find(digest, folder=path.parent)[0] == path
    (tmp_path / "other.safetensors").write_bytes(b"not one")
    monkeypatch.setenv(profiles.PATH_VARIABLE, f"{tmp_path}:{path.parent}")
    assert profiles.find(digest)[0] == path
    with pytest.raises(NotFoundError, match="not found"):
        profiles.find("0" * 64)
    with pytest.raises(IdentityError, match="is profile"):
        profiles.find("0" * 64, given=path)


def test_a_liar_about_its_digest_is_not_taken(made: tuple[Path, dict], tmp_path: Path) -> None:
    arrays, identity = profiles.load(made[0])
    changed = {**arrays, "mean": arrays["mean"] + 1}
    profiles.save(tmp_path / "liar.safetensors", changed, identity)
    raw = (tmp_path / "liar.safetensors").read_bytes()
    mine, wanted = profiles.digest(changed), made[1]["digest"]
    (tmp_path / "liar.safetensors").write_bytes(raw.replace(mine.encode(), wanted.encode()))
    with pytest.raises(NotFoundError):
        profiles.find(wanted, folder=tmp_path)


@pytest.mark.parametrize("damage", ["truncated", "tables", "missing", "nan", "version", "identity"])
def test_damaged_profiles_are_refused_by_name(made: tuple[Path, dict], tmp_path: Path, damage: str) -> None:
    from safetensors import safe_open
    from safetensors.numpy import load_file, save_file

    bad = tmp_path / "bad.safetensors"
    if damage == "truncated":
        bad.write_bytes(made[0].read_bytes()[:-100])
    else:
        arrays = load_file(made[0])
        with safe_open(made[0], "np") as file:
            metadata = dict(file.metadata())
        if damage == "tables":
            arrays["tables"][0, 0] += 1
        elif damage == "missing":
            del arrays["local"]
        elif damage == "nan":
            arrays["mean"][0] = np.nan
        elif damage == "version":
            metadata["pltpack.profile"] = "2"
        else:
            metadata["identity"] = "[" * 100000
        save_file(arrays, bad, metadata)
    with pytest.raises((FormatError, UnsupportedError), match=r"bad\.safetensors"):
        profiles.load(bad)


def test_not_a_profile(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"a": np.zeros(3)}, tmp_path / "x.safetensors")
    with pytest.raises(UnsupportedError, match="is no profile"):
        profiles.load(tmp_path / "x.safetensors")
    with pytest.raises(NotFoundError):
        profiles.load(tmp_path / "none")


def test_sensitivity_is_the_gradients_second_moment() -> None:
    blocks, rng = Blocks(LAYERS), np.random.default_rng(1)
    mix = [rng.normal(size=(w, w)) * 10.0 ** rng.normal() for w in blocks.widths]
    g = blocks.multiply(rng.normal(size=(3000, blocks.rows)).astype(np.float32), mix)
    found = sensitivity.measure([g[:1000], g[1000:]].__getitem__, 2, blocks)
    assert sum(map(len, found.energy)) == 3000
    for root, inverse, matrix in zip(found.roots, found.inverse_roots, mix, strict=True):
        fisher = matrix.T @ matrix
        fisher += 0.1 * np.trace(fisher) / len(fisher) * np.eye(len(fisher))
        product = root @ root
        product *= np.trace(fisher) / np.trace(product)
        assert np.abs(product - fisher).max() < 0.1 * np.abs(fisher).max()
        assert np.allclose(root @ inverse, np.eye(len(root)), atol=1e-6)


def test_one_loud_token_does_not_decide() -> None:
    blocks, rng = Blocks([LayerGeometry(1, 8, 8, "BF16")]), np.random.default_rng(2)
    g = rng.normal(size=(500, 16)).astype(np.float32)
    quiet = sensitivity.measure([g].__getitem__, 1, blocks).roots[0]
    g[7, :8] = 300 * np.eye(8, dtype=np.float32)[0]
    loud = sensitivity.measure([g].__getitem__, 1, blocks).roots[0]
    assert 300**2 / 500 > 100
    assert np.square(loud[0, 0] / quiet[0, 0]) < 30


def test_tops_are_eigenvectors() -> None:
    rng = np.random.default_rng(3)
    x = (rng.normal(size=(2000, 120)) * 2.0 ** -np.arange(120).clip(0, 20)).astype(np.float32)
    covariance = x.T @ x / 2000
    truth = np.linalg.eigvalsh(covariance)[::-1][:8]
    start = x[:: 2000 // bases.sample_size(8)][: bases.sample_size(8)]
    found = [bases.subspace(few, 8, [lambda: x[:700], lambda: x[700:]], [(2, 9)]) for few in (start, start[:3])]
    for _, _, blocks in found:
        assert np.allclose(blocks[0], covariance[2:9, 2:9], rtol=1e-3, atol=1e-6)
    for values, vectors in (*(part[:2] for part in found), bases.eigen(covariance, 8)):
        # Of three rows to start from only the last are found less well.
        assert np.allclose(values[:5], truth[:5], rtol=1e-3)
        assert np.allclose(values[:7], truth[:7], rtol=1e-2 if values is found[1][0] else 1e-3)
        assert values[7] == pytest.approx(truth[7], rel=0.1)
        assert np.allclose(vectors.T @ vectors, np.eye(8), atol=1e-4)
    assert bases.is_wide(120, 40) and not bases.is_wide(120, 41)


def test_duals_of_rounded_bases_lose_nothing_in_their_span() -> None:
    rng = np.random.default_rng(4)
    basis = np.linalg.qr(rng.normal(size=(200, 40)))[0].T.astype(np.float32)
    entries, scale = bases.quantize_shared(np.ascontiguousarray(basis), np.full(40, 1e-3))
    rounded = entries * scale[:, None]
    assert 2 < len(np.unique(entries)) < 20, "few levels"
    x = rng.normal(size=(5, 40)).astype(np.float32) @ rounded
    assert np.abs(x @ rounded.T @ rounded - x).max() > 0.05, "products with the basis itself leak"
    assert np.allclose(x @ dual(rounded).T @ rounded, x, atol=1e-4)
    with pytest.raises(ValueError, match="depend on each other"):
        dual(np.zeros((2, 8), np.float32))


def test_importance_is_learned() -> None:
    rng = np.random.default_rng(5)
    features = [rng.normal(size=(200, 12)).astype(np.float32) for _ in range(8)]
    energy = [np.exp(3 * f[:, 0] + np.abs(f[:, 1]) + 0.1 * rng.normal(size=200)) for f in features]
    found = importance_fit.fit(features, energy)
    assert found.explained > 0.9
    assert 0.8 * found.possible < found.gain <= found.possible
    mean = np.concatenate([importance.predict(found.weights, f) for f in features]).mean()
    assert abs(mean) < 1e-3
    again = importance_fit.fit(features, energy)
    assert all(np.array_equal(found.weights[name], again.weights[name]) for name in found.weights)


def test_importance_of_long_sessions_takes_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(8)
    norms, ends = rng.normal(size=(20_000, 60)).astype(np.float32), range(700, 20_000, 900)
    shapes = {"mean": 65, "scale": 65, "linear": 65, "hidden": (8, 65), "bias": 8, "out": 8, "center": 1}
    weights = {name: rng.uniform(0.1, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}
    tracemalloc.start()
    try:
        found = importance.expected(weights, norms, ends=ends)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * norms.nbytes
    monkeypatch.setattr(importance, "_PIECE", len(norms))
    assert np.allclose(importance.expected(weights, norms, ends=ends), found, atol=1e-4)


def test_tables_code_what_they_counted_well() -> None:
    rng = np.random.default_rng(6)
    scales = 2.0 ** rng.uniform(-6, 3, 1600)
    coefficients = (rng.laplace(size=(4000, 1600)) * scales).astype(np.float32)
    logs = entropy_fit.as_logs(scales)
    counter = entropy_fit.Counter(logs)
    counter.add(coefficients, np.full(4000, importance.ORDINARY, np.uint8), 1.0)
    freqs, floor = counter.tables()
    assert (freqs.sum(axis=1) == 4096).all()
    # Rare symbols leave their slots to the zeros, largest magnitudes first, and are coded by the escape.
    assert (freqs[:, [0, 1, 2, 63]] > 0).all()
    pairs = np.minimum(freqs[:, 1:63:2], freqs[:, 2:63:2]) > 0
    assert (np.diff(pairs.astype(int), axis=1) <= 0).all()
    assert not pairs[0].all()
    kinds = Tables.of(freqs, floor).classes(logs)
    # What is not coded practically never differs from zero; what is coded does.
    silent = coefficients[:, kinds < 0]
    assert silent.size
    assert (np.abs(silent) > 0.5).mean() < 1e-4
    at = int(kinds.max()) - 12
    values = np.rint(coefficients[:, kinds == at]).astype(int)
    zero = (values >> Tables.of(freqs, floor).raw[at] == 0).mean()
    assert freqs[at, 0] / 4096 == pytest.approx(zero, abs=0.02)


@given(st.floats(-8, 8), st.floats(0.6, 1.8))
@settings(max_examples=20)
def test_the_line_of_kl_is_found(a: float, c: float) -> None:
    x = np.array([-6.0, -5.0, -3.5])
    assert kl_fit.fit_line(x, a + c * x) == pytest.approx([a, c], abs=1e-4)


@pytest.mark.parametrize(("octaves", "power"), [(1.0, 0.5), (0.0, 0.0), (-3.0, 0.0), (9.0, kl_fit.MOST_POWER)])
def test_the_dependence_on_length_is_found(octaves: float, power: float) -> None:
    assert kl_fit.fit_power(octaves, 12, 48) == power


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False, max_value=2.0**100, min_value=-(2.0**100)),
                min_size=1))  # fmt: skip
@settings(max_examples=50)
def test_bits_are_bfloat16(values: list[float]) -> None:
    import ml_dtypes

    x = np.array(values, np.float32)
    assert np.array_equal(to_bits(x), x.astype(ml_dtypes.bfloat16).view(np.uint16))
    assert np.array_equal(from_bits(to_bits(x)), x.astype(ml_dtypes.bfloat16).astype(np.float32))


def test_rows_and_arrays_are_the_same_numbers() -> None:
    rng = np.random.default_rng(7)
    keys = [rng.normal(size=(layer.heads, 5, layer.k_dim)).astype(np.float32) for layer in LAYERS]
    values = [rng.normal(size=(layer.heads, 5, layer.v_dim)).astype(np.float32) for layer in LAYERS]
    rows, blocks = joined(keys, values), Blocks(LAYERS)
    back = parted(rows, LAYERS)
    assert all(np.array_equal(a, b) for a, b in zip(keys + values, back[0] + back[1], strict=True))
    assert np.array_equal(rows[:, : LAYERS[0].k_dim], keys[0][0])
    norms = [np.linalg.norm(rows[:, a:b], axis=1) for a, b in zip(blocks.starts[:-1], blocks.starts[1:], strict=True)]
    assert np.allclose(log_norms(rows, blocks), np.log(norms).T, atol=1e-5)
    doubled = blocks.multiply(rows, [2 * np.eye(w) for w in blocks.widths])
    assert np.allclose(doubled, 2 * rows)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_real_model(model_dir: Path, tmp_path: Path) -> None:
    root = Path(__file__).parents[1]
    sessions, sizes = root / "fixtures" / "sessions.json", {"tokens": 2048, "window": 512, "profile_rank": 128}
    report = calibrate.calibrate(model_dir, sessions, tmp_path / "p", **sizes)
    assert report["share"] < 0.06
    arrays, _ = profiles.load(tmp_path / "p")
    measured = [row["kl"] for row in about(arrays)["source"]["kl"]]
    assert 0 < measured[0] < measured[1] < 0.2
    assert report["kl_length"][1:] == [96, 384]
    assert 2 in about(arrays)["turn_ends"]
    assert report["importance"]["r2"] > 0.3
    a_third_of_the_bits_at_less_kl(model_dir, tmp_path)


def a_third_of_the_bits_at_less_kl(model_dir: Path, folder: Path) -> None:
    """Even a small profile beats per-vector quantization, by the real model that goes on from the rebuilt caches."""
    unpack(Path(__file__).parents[1] / "fixtures" / "sessions.tar.zst", folder)
    originals = [dump for dump in pltpack.open_dumps([folder / "dumps"]) if dump.session in ("frost", "battery-code")]
    assert len(originals) == 2
    archives = [folder / "calibrated", folder / "per-vector"]
    bits = [
        pltpack.compress(originals, path, dedup=False, **how)["shard_bytes"]
        for path, how in zip(archives, ({"profile": folder / "p", "target": Target(bits=1.0)},
                                        {"quality": "turboquant-3"}), strict=True)
    ]  # fmt: skip
    assert bits[0] < bits[1] / 3
    ends = at_ends(originals, read_continuations(folder / "continuations.safetensors"))
    with of_archives(archives) as candidates:
        kl = [scores.total()["kl"] for scores in score(load_model(model_dir).network, originals, ends, candidates)]
    assert 0 < kl[0] < kl[1]
