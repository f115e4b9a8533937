"""Tiers that a model makes again: token texts, the range coder, and archives of small models with random weights."""

from __future__ import annotations

import dataclasses
import json
import lzma
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pltpack
from pltpack.codec import range_coder, token_texts
from pltpack.codec.recompute import RecomputeCodec, pack
from pltpack.errors import FormatError, IdentityError, NotFoundError, PromiseError, UnsupportedError
from pltpack.snapshot import Identity, Snapshot
from tests.archives import equal_bits, session
from tests.cli_common import done, done_json, run
from tests.tiny_models import save_model

ROOT = Path(__file__).parents[1]


class TestRangeCoder:
    @settings(max_examples=60)
    @given(st.lists(st.tuples(st.integers(1, 1 << 32), st.integers(0, 1 << 32), st.integers(0, 1 << 32)), max_size=40))
    def test_symbols_come_back_at_their_information(self, drawn: list[tuple[int, int, int]]) -> None:
        symbols = []
        for total, a, b in drawn:
            low, high = sorted((a % (total + 1), b % (total + 1)))
            symbols.append((low, max(1, high - low), total) if low < total else (total - 1, 1, total))
        state = range_coder.begin_encoding()
        out = np.zeros(range_coder.SYMBOL_BYTES * len(symbols) + range_coder.END_BYTES, np.uint8)
        for symbol in symbols:
            range_coder.encode(state, out, *symbol)
        data = out[: range_coder.end_encoding(state, out)].copy()
        bits = sum(math.log2(total / frequency) for _, frequency, total in symbols)
        assert 8 * len(data) < bits + 9 + 1e-3 * len(symbols)
        state = np.zeros(3, np.uint64)
        range_coder.begin_decoding(state, data)
        for start, frequency, total in symbols:
            assert start <= range_coder.slot(state, total) < start + frequency
            range_coder.consume(state, data, start, frequency, total)

    def test_a_carry_goes_through_bytes_of_ones(self) -> None:
        # The last of many intervals again and again: the low end is all ones until something moves it.
        symbols = [((1 << 20) - 1, 1, 1 << 20)] * 12 + [(1, 1, 2)] * 9 + [(0, 1, 3)]
        state, out = range_coder.begin_encoding(), np.zeros(200, np.uint8)
        for symbol in symbols:
            range_coder.encode(state, out, *symbol)
        data = out[: range_coder.end_encoding(state, out)].copy()
        state = np.zeros(3, np.uint64)
        range_coder.begin_decoding(state, data)
        for start, frequency, total in symbols:
            assert start <= range_coder.slot(state, total) < start + frequency
            range_coder.consume(state, data, start, frequency, total)


texts_of = st.lists(
    st.lists(st.one_of(st.integers(0, 9), st.integers(0, (1 << 31) - 1)), max_size=60).map(
        lambda ids: np.array(ids, np.int32)
    ),
    max_size=5,
)


class TestTokenTexts:
    @settings(max_examples=60)
    @given(texts_of)
    def test_texts_come_back_and_the_reference_decoder_agrees(self, texts: list[np.ndarray]) -> None:
        data, lengths = token_texts.encode(texts), [len(text) for text in texts]
        assert all(np.array_equal(a, b) for a, b in zip(token_texts.decode(data, lengths), texts, strict=True))
        assert reference_texts(data, lengths) == [text.tolist() for text in texts]

    def test_repeats_take_next_to_nothing(self) -> None:
        text = np.random.default_rng(0).integers(0, 50_000, 400).astype(np.int32)
        once, twice = len(token_texts.encode([text])), len(token_texts.encode([text, text, text]))
        assert once > 700
        assert twice - once < 60

    def test_real_tokens_take_less_than_from_a_general_compressor(self, real_dumps: Path) -> None:
        texts = [snapshot.tokens for snapshot in pltpack.open_dumps(real_dumps)]
        raw = b"".join(np.ascontiguousarray(text, "<i4").tobytes() for text in texts)
        assert len(token_texts.encode(texts)) <= 1.15 * len(lzma.compress(raw, preset=9))

    def test_bytes_stay_as_they_are(self) -> None:
        texts = [np.array(ids, np.int32) for ids in ([5, 7, 5, 7, 5, 7, 300], [5, 7, 5, 7, 2], [])]
        assert token_texts.encode(texts).hex() == PINNED

    @settings(max_examples=40)
    @given(st.binary(max_size=80), st.lists(st.integers(0, 40), max_size=4))
    def test_damaged_bytes_give_an_error_or_some_tokens(self, data: bytes, lengths: list[int]) -> None:
        try:
            texts = token_texts.decode(data, lengths)
        except ValueError:
            return
        assert [len(text) for text in texts] == lengths
        assert all((text >= 0).all() for text in texts)


PINNED = "1531cf30cf100a"


def reference_texts(data: bytes, lengths: list[int]) -> list[list[int]]:
    sys.path.insert(0, str(ROOT / "spec"))
    try:
        from reference_tokens import decode_texts
    finally:
        sys.path.remove(str(ROOT / "spec"))
    return decode_texts(data, lengths)


class TestState:
    def test_sessions_are_found_and_tenants_do_not_share_a_stream(self) -> None:
        ids = [np.arange(n, dtype=np.int32) % 7 for n in (30, 0, 70_000, 12)]
        state, places = pack([[ids[0], ids[1], ids[2]], [ids[3]]])
        codec = RecomputeCodec()
        codec.start(state, Identity())
        for tokens, place in zip(ids, [*places[0], *places[1]], strict=True):
            assert np.array_equal(codec.session(place, len(tokens)), tokens)
        # The long session fills streams of its own, and the other tenant's begins another.
        assert state["texts"].tolist() == [1, 1, 1, 1]
        assert len(pack([[ids[0], ids[0]]])[0]["texts"]) == 1
        assert len(pack([[ids[0]], [ids[0]]])[0]["texts"]) == 2

    @pytest.mark.parametrize("change", [
        {"bytes": np.array([1], np.uint32)}, {"texts": np.array([9], np.uint32)}, {"tokens": np.zeros(1, np.int32)},
        {"tokens": np.array([1 << 20], np.uint32)}, {"streams": np.zeros((2, 2), np.uint8)},
    ])  # fmt: skip
    def test_states_that_do_not_fit_are_refused(self, change: dict[str, np.ndarray]) -> None:
        state, _ = pack([[np.arange(9, dtype=np.int32)]])
        with pytest.raises(ValueError, match="recompute state"):
            RecomputeCodec().start(state | change, Identity())

    def test_a_session_that_ends_within_a_text_is_refused(self) -> None:
        codec = RecomputeCodec()
        codec.start(pack([[np.arange(9, dtype=np.int32)]])[0], Identity())
        for text, tokens in ((0, 5), (1, 9), (0, 10)):
            with pytest.raises(ValueError, match="texts"):
                codec.session(text, tokens)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    return save_model(tmp_path_factory.mktemp("tiny") / "model", tokenizer=False)


@pytest.fixture(scope="module")
def snapshots(tiny: Path) -> list[Snapshot]:
    """Caches of the small model in bfloat16; the second begins like the first."""
    from pltpack.quality.capture import CaptureOptions, capture_session
    from pltpack.quality.model import load_model
    from pltpack.quality.prompts import Prompt

    model, rng = load_model(tiny), np.random.default_rng(1)
    first = rng.integers(0, 64, 80)
    ids = {"one": first, "two": np.concatenate([first[:40], rng.integers(0, 64, 20)]), "three": first[:1]}
    prompts = [Prompt(name, tokens.astype(np.int32), None) for name, tokens in ids.items()]
    return [capture_session(model, prompt, CaptureOptions()) for prompt in prompts]


def rebuilder(folder: Path, **settings: bool):
    from pltpack.quality.recompute import Rebuilder

    return Rebuilder(folder, **settings)


def written(snapshots: list[Snapshot], out: Path, model: Path, **settings) -> Path:
    from pltpack.quality.recompute import compress

    compress(snapshots, out, model, **settings)
    return out


def rebuilt(archive: Path, model: Path) -> dict[str, Snapshot]:
    with pltpack.open(archive, rebuild=rebuilder(model)) as opened:
        return {name: opened.read(name) for name in opened.sessions}


@pytest.mark.parametrize("with_model", [False, True])
def test_tokens_alone_give_the_cache_bit_for_bit(snapshots, tiny: Path, tmp_path: Path, with_model: bool) -> None:
    archive = written(snapshots, tmp_path / "a", tiny, with_model=with_model)
    found = rebuilt(archive, tiny)
    assert all(equal_bits(found[snapshot.session], snapshot) for snapshot in snapshots)
    with pltpack.open(archive) as opened:
        assert sum(len(opened.shard(name).units) for name in opened.sessions) == 0
        assert all(opened.shard(name).recipe.exact for name in opened.sessions)


def test_what_a_cheap_run_gets_wrong_is_stored(snapshots, tiny: Path, tmp_path: Path) -> None:
    pltpack.compress(snapshots, tmp_path / "alone", quality="lossless", dedup=False)
    for predictor in ("bfloat16", "int8"):
        archive = written(snapshots, tmp_path / predictor, tiny, quality="lossless+model", predictor=predictor)
        found = rebuilt(archive, tiny)
        assert all(equal_bits(found[snapshot.session], snapshot) for snapshot in snapshots)
        with pltpack.open(archive) as opened, pltpack.open(tmp_path / "alone") as alone:
            sizes = [int(of.shard("one").units["length"].sum()) for of in (opened, alone)]
            assert 0 < sizes[0] < sizes[1]
            part = opened.shard("one")
            assert (part.units["flags"] == 2).all()
    with pltpack.open(archive, rebuild=rebuilder(tiny)) as opened:
        part = opened.read("one", layers=range(1, 3), tokens=slice(10, 33))
    assert np.array_equal(part.layer(0)[0], snapshots[0].layer(1)[0][:, 10:33])


def test_other_caches_are_refused_or_stored_as_differences(snapshots, tiny: Path, tmp_path: Path) -> None:
    layers = [tuple(array.copy() for array in snapshots[0].layer(index)) for index in range(3)]
    layers[1][0][:, 7] *= 2
    changed = Snapshot.from_arrays("one", snapshots[0].tokens, layers, snapshots[0].identity)
    with pytest.raises(PromiseError, match="layer 1 differs"):
        written([changed], tmp_path / "a", tiny)
    assert not (tmp_path / "a").exists()
    archive = written([changed], tmp_path / "b", tiny, quality="lossless+model", predictor="float32")
    assert equal_bits(rebuilt(archive, tiny)["one"], changed)
    with pltpack.open(archive) as opened:
        assert opened.shard("one").units["layer"].tolist() == [1]


def test_without_its_model_nothing_is_decoded_but_all_is_checked(snapshots, tiny: Path, tmp_path: Path) -> None:
    archive = written(snapshots, tmp_path / "a", tiny)
    with pltpack.open(archive) as opened:
        assert np.array_equal(opened.shard("two").tokens, snapshots[1].tokens)
        with pytest.raises(UnsupportedError, match=r"'one' is made again by a model .*--model"):
            opened.read("one")
        assert opened.describe()["sessions"][0]["codec"] == "recompute"
    assert pltpack.verify(archive)["not_rebuilt"] == ["one", "two", "three"]
    report = pltpack.verify(archive, against=snapshots, rebuild=rebuilder(tiny))
    assert report["not_rebuilt"] == [] and report["differences"] == []
    other = save_model(tmp_path / "other", tokenizer=False, seed=5)
    with pytest.raises(IdentityError, match="'weights' differs"):
        rebuilt(archive, other)
    with pytest.raises(NotFoundError):
        rebuilder(tmp_path)
    coded = written(snapshots, tmp_path / "b", tiny, with_model=True)
    with pltpack.open(coded) as opened, pytest.raises(UnsupportedError, match="--model"):
        opened.shard("one").tokens  # noqa: B018
    assert pltpack.verify(coded)["not_rebuilt"] == ["one", "two", "three"]


def test_a_cache_that_other_kernels_make_is_told(snapshots, tiny: Path, tmp_path: Path, monkeypatch) -> None:
    from pltpack.quality.recompute import Predictor

    values, archive = Predictor.values, written(snapshots[:1], tmp_path / "a", tiny)
    stored = written(snapshots[:1], tmp_path / "b", tiny, quality="lossless+model")

    def noisy(self, tokens, identity):
        found = values(self, tokens, identity)
        found[2][1].view(np.uint16)[0, 3, 0] ^= 1
        return found

    monkeypatch.setattr(Predictor, "values", noisy)
    with pytest.raises(PromiseError, match="another cache of session 'one'"):
        rebuilt(archive, tiny)
    with pltpack.open(archive, rebuild=rebuilder(tiny, strict=False)) as opened:
        assert not equal_bits(opened.read("one"), snapshots[0])
    # A difference needs the very values it was taken from.
    with pytest.raises(PromiseError, match="another cache"), pltpack.open(
        stored, rebuild=rebuilder(tiny, strict=False)
    ) as opened:
        opened.read("one")


def test_a_model_that_is_not_the_same_twice_is_refused(snapshots, tiny: Path, tmp_path: Path, monkeypatch) -> None:
    from pltpack.quality import token_model

    ends, count = token_model._ends, iter(range(10**6))
    monkeypatch.setattr(token_model, "_ends", lambda logits: ends(logits + 1e-3 * next(count) * (np.arange(64) % 2)))
    with pytest.raises(PromiseError, match="same probabilities twice"):
        written(snapshots[:1], tmp_path / "a", tiny, with_model=True)


def test_coding_with_the_model_takes_its_cross_entropy(tiny: Path) -> None:
    import torch

    from pltpack.quality import token_model
    from pltpack.quality.model import load_model

    model, generator = load_model(tiny), torch.Generator().manual_seed(0)
    ids = [3]
    with torch.no_grad():
        for _ in range(90):
            p = model.network(torch.tensor([ids])).logits[0, -1].softmax(-1)
            ids.append(int(torch.multinomial(p, 1, generator=generator)))
        logs = model.network(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    entropy = -sum(float(logs[i, token]) for i, token in enumerate(ids[1:])) / math.log(2)
    data = token_model.encode(model, np.array(ids, np.int32))
    # The first token is coded without the model, and streams end with whole bytes.
    assert 8 * len(data) <= 1.02 * entropy + math.log2(64) + 1 + 8


def test_archives_are_appended_compacted_and_passed_on(snapshots, tiny: Path, tmp_path: Path) -> None:
    from pltpack.quality.recompute import append

    archive = written(snapshots[:1], tmp_path / "a", tiny, quality="lossless+model")
    append(archive, snapshots[1:2], tiny)
    append(archive, snapshots[2:], tiny, with_model=True)
    pltpack.compact(archive)
    with pltpack.open(archive) as opened:
        assert len(opened.libraries) == 1
    found = rebuilt(archive, tiny)
    assert all(equal_bits(found[snapshot.session], snapshot) for snapshot in snapshots)
    pltpack.export_session(archive, "two", tmp_path / "two.tar")
    assert pltpack.import_session(tmp_path / "new", tmp_path / "two.tar") == "two"
    assert equal_bits(rebuilt(tmp_path / "new", tiny)["two"], snapshots[1])
    with pltpack.open(tmp_path / "new") as opened:
        # No other session's tokens go along.
        assert opened.libraries[0].state(0)["tokens"].tolist() == [len(snapshots[1])]


def test_tiers_do_not_mix_in_one_archive(snapshots, tiny: Path, tmp_path: Path) -> None:
    from pltpack.quality.recompute import append

    made = written(snapshots[:1], tmp_path / "made", tiny)
    pltpack.compress(snapshots[1:2], tmp_path / "stored", quality="lossless")
    with pytest.raises(UnsupportedError, match="do not mix"):
        pltpack.append(made, snapshots[1:2], quality="lossless")
    with pytest.raises(UnsupportedError, match="does not mix"):
        append(tmp_path / "stored", snapshots[:1], tiny, quality="recompute")
    pltpack.export_session(made, "one", tmp_path / "one.tar")
    with pytest.raises(UnsupportedError, match="do not mix"):
        pltpack.import_session(tmp_path / "stored", tmp_path / "one.tar")
    with pytest.raises(UnsupportedError, match="--model"):
        pltpack.append(made, snapshots[1:2])
    with pytest.raises(UnsupportedError, match="--model"):
        pltpack.compress(snapshots, tmp_path / "c", quality="recompute")


def test_tenants_tokens_stay_apart(snapshots, tiny: Path, tmp_path: Path) -> None:
    tenants = [dataclasses.replace(snapshot.identity, salt=snapshot.session) for snapshot in snapshots[:2]]
    mine = [dataclasses.replace(s, identity=identity) for s, identity in zip(snapshots, tenants, strict=False)]
    archive = written(mine, tmp_path / "a", tiny)
    with pltpack.open(archive) as opened:
        assert opened.libraries[0].state(0)["texts"].tolist() == [1, 1]
    found = rebuilt(archive, tiny)
    assert all(equal_bits(found[snapshot.session], snapshot) for snapshot in mine)


def test_a_loader_finds_nothing_to_load_and_says_why(snapshots, tiny: Path, tmp_path: Path) -> None:
    archive = written(snapshots, tmp_path / "a", tiny)
    with pltpack.open(archive) as opened, opened.loader() as loader:
        assert not loader.lookup(snapshots[0].tokens)
        assert loader.misses == {"recompute": 3}


def test_damage_is_one_clear_error(snapshots, tiny: Path, tmp_path: Path) -> None:
    from pltpack.archive.recompute import Recipe

    path, good = Path("x.pltshard"), Recipe("sha256:" + "0" * 64, "int8", True, 256, 3)
    assert Recipe.parse(good.to_text(), path) == good
    for change in ({"weights": "md5"}, {"predictor": "float8"}, {"exact": 1}, {"run": 0}, {"run": 1 << 20},
                   {"text": -1}, {"text": "0"}):  # fmt: skip
        with pytest.raises(FormatError, match="recompute"):
            Recipe.parse(dataclasses.replace(good, **change).to_text(), path)
    for text in ("", "[]", "{}", good.to_text()[:-1] + ',"more":1}'):
        with pytest.raises(FormatError, match="recompute"):
            Recipe.parse(text, path)


def test_the_reference_decoder_refuses_in_one_line(snapshots, tiny: Path, tmp_path: Path) -> None:
    for with_model in (False, True):
        archive = written(snapshots, tmp_path / f"a{with_model}", tiny, with_model=with_model)
        result = subprocess.run([sys.executable, ROOT / "spec" / "reference_decoder.py", archive,
                                 tmp_path / f"out{with_model}"], capture_output=True, text=True)  # fmt: skip
        assert result.returncode == 2
        assert "session 'one' is made again by a model" in result.stderr
        assert len(result.stderr.splitlines()) == 1


def test_from_the_command_line(snapshots, tiny: Path, tmp_path: Path) -> None:
    dumps = tmp_path / "dumps"
    for snapshot in snapshots:
        pltpack.write_dump(snapshot, dumps)
    stats = done_json("compress", dumps, "-o", tmp_path / "a", "--quality", "recompute", "--model", tiny)
    assert stats["quality"] == "recompute" and stats["sessions"] == 3
    assert "without --model" in done("verify", tmp_path / "a")
    done("verify", tmp_path / "a", "--model", tiny, "--against", dumps)
    done("decompress", tmp_path / "a", "-o", tmp_path / "out", "--model", tiny)
    for file in dumps.iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()
    for arguments, code in (
        (("compress", dumps, "-o", tmp_path / "b", "--quality", "recompute"), 2),
        (("compress", dumps, "-o", tmp_path / "b", "--quality", "q4", "--model", tiny, "--with-model"), 2),
        (("compress", dumps, "-o", tmp_path / "b", "--quality", "recompute", "--model", tiny, "--target-bits", 2), 2),
        (("decompress", tmp_path / "a", "-o", tmp_path / "c"), 2),
        (("decompress", tmp_path / "a", "-o", tmp_path / "c", "--inexact"), 2),
        (("decompress", tmp_path / "a", "-o", tmp_path / "c", "--model", tmp_path), 2),
    ):
        assert run(*arguments).exit_code == code, arguments
    assert not (tmp_path / "b").exists() and not (tmp_path / "c").exists()


@pytest.mark.parametrize("quality", ["recompute", "lossless+model"])
def test_engines_start_warm_from_what_the_model_makes(snapshots, tiny: Path, tmp_path: Path, quality: str) -> None:
    archive, one = written(snapshots, tmp_path / "a", tiny, quality=quality), snapshots[0].tokens
    warm = ("warm", archive, "--engine", "safetensors")

    def made(name: str, *arguments: object) -> Snapshot:
        done(*warm, "-o", tmp_path / name, "--model", tiny, *arguments)
        (found,) = pltpack.open_dumps([tmp_path / name])
        return found

    assert equal_bits(made("whole", "--session", "two"), snapshots[1])
    (tmp_path / "prompt").write_text(json.dumps([*map(int, one[:70]), 1, 2]))
    found = made("part", "--prompt-tokens", tmp_path / "prompt")
    assert np.array_equal(found.tokens, one[:64])
    assert np.array_equal(found.layer(1)[0].view(np.uint16), snapshots[0].layer(1, 0, 64)[0].view(np.uint16))
    (tmp_path / "other").write_text(json.dumps([int(one[0]) ^ 1, *range(40)]))
    for arguments, fact in (
        (("--session", "two"), "--model"),
        (("--session", "two", "--inexact"), "--model"),
        (("--session", "two", "--model", tmp_path), "model"),
        (("--prompt-tokens", tmp_path / "other", "--model", tiny), "nothing of this prompt"),
        (("--prompt-tokens", tmp_path / "prompt", "--model", tiny, "--salt", "x"), "nothing of this prompt"),
    ):
        refused = run(*warm, "-o", tmp_path / "none", *arguments)
        assert refused.exit_code == 2 and fact in refused.output
    assert not (tmp_path / "none").exists()


def test_models_do_not_make_caches_of_other_shapes(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match="'layers"):
        written([session("one", range(20))], tmp_path / "a", tiny)


@pytest.mark.parametrize("quality", ["recompute", "lossless+model"])
def test_an_encrypted_archive_tells_nothing_and_gives_everything_back(
    snapshots, tiny: Path, tmp_path: Path, quality: str
) -> None:
    pytest.importorskip("cryptography")
    from pltpack.archive.extract import verify
    from pltpack.errors import EncryptionError
    from pltpack.format.sealing import using_key
    from pltpack.quality import recompute

    archive = tmp_path / "a"
    with using_key(bytes(range(32))):
        written(snapshots[:2], archive, tiny, quality=quality, encrypt=True)
        recompute.append(archive, snapshots[2:], tiny)
        pltpack.compact(archive)
        found = rebuilt(archive, tiny)
        assert all(equal_bits(found[snapshot.session], snapshot) for snapshot in snapshots)
        verify(archive)
        pltpack.export_session(archive, "two", tmp_path / "two")
        pltpack.import_session(tmp_path / "b", tmp_path / "two")
        assert equal_bits(rebuilt(tmp_path / "b", tiny)["two"], snapshots[1])
    for file in (path for path in archive.rglob("*") if path.is_file()):
        data = file.read_bytes()
        assert not any(word in data for word in (b"lossless", b"bfloat16", b'"two"', b"rope"))
        assert not file.name.startswith(("one", "two", "three"))
    with pytest.raises(EncryptionError):
        pltpack.open(archive)


def test_convert_makes_sessions_again(snapshots, tiny: Path, tmp_path: Path) -> None:
    from tests.cli_common import run

    archive = written(snapshots[:1], tmp_path / "a", tiny)
    refused = run("convert", archive, tmp_path / "out", "--to", "safetensors")
    assert refused.exit_code == 2 and "--model" in refused.stderr
    done = run("convert", archive, tmp_path / "out", "--to", "safetensors", "--model", tiny)
    assert done.exit_code == 0, done.output
    assert all(equal_bits(snapshot, snapshots[0]) for snapshot in pltpack.open_dumps(tmp_path / "out"))
