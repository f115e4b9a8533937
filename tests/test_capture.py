"""Capture: what a model computes is what the dumps hold, with an identity that is true and files that are whole."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cli_common import done_json, run
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from tiny_models import WORDS, make_network, save_model

import pltpack
from pltpack.errors import ConflictError, DumpError, IdentityError, NotFoundError, UnsupportedError
from pltpack.quality.capture import CONTINUATIONS, CaptureOptions, capture
from pltpack.quality.digests import tokenizer_digest, weights_digest

PROMPT = list(range(3, 33))
OTHER = [5, 4, 3, 2, 9]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "run" / "dumps"


def tensors_and_metadata(path: Path) -> tuple[dict, dict]:
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


def test_dumps_hold_what_the_model_computes(tiny: Path, out: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    sessions = {"a": {"prompt": PROMPT, "continuation": [7, 8]}, "b/1": {"prompt": OTHER}}
    result = capture(tiny, sessions, out)
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    for name, file in (("a", "a"), ("b/1", "b%2F1")):
        prompt = sessions[name]["prompt"]
        with torch.no_grad():
            cache = model.model(torch.tensor([prompt]), use_cache=True).cache
        found, metadata = tensors_and_metadata(out / f"{file}.safetensors")
        parts = {f"layers.{i}.{kind}" for i in range(3) for kind in ("keys", "values")}
        assert found.keys() == {"tokens"} | parts
        assert found["tokens"].tolist() == prompt
        assert found["tokens"].dtype == torch.int32
        for index, layer in enumerate(cache.layers):
            assert torch.equal(found[f"layers.{index}.keys"], layer.keys[0].bfloat16())
            assert torch.equal(found[f"layers.{index}.values"], layer.values[0].bfloat16())
        assert (metadata["pltpack.dump"], metadata["session"]) == ("1", name)
    continuations = load_file(out.parent / CONTINUATIONS)
    assert {name: ids.tolist() for name, ids in continuations.items()} == {"a": [7, 8]}
    assert continuations["a"].dtype == np.int32
    assert [(s["session"], s["tokens"]) for s in result["sessions"]] == [("a", 30), ("b/1", 5)]
    assert result["bytes"] == sum(file.stat().st_size for file in out.iterdir())


def test_identity_is_full_and_the_archive_keeps_it(tiny: Path, out: Path) -> None:
    result = capture(tiny, {"a": PROMPT}, out, name="tiny-1", options=CaptureOptions("F16"))
    (snapshot,) = pltpack.open_dumps(out)
    identity = snapshot.identity
    assert identity.digest() == result["identity_digest"]
    assert identity.model == "tiny-1"
    assert (identity.weights, identity.tokenizer) == (weights_digest(tiny), tokenizer_digest(tiny))
    assert identity.rope == {"type": "default", "theta": 10000.0, "dim": 8, "style": "half"}
    assert (identity.keys, identity.tp_rank, identity.tp_size) == ("rotated", 0, 1)
    assert [(g.heads, g.k_dim, g.v_dim, g.dtype, g.window) for g in identity.layers] == [(2, 8, 8, "F16", None)] * 3
    pltpack.compress([out], out.parent / "archive", quality="lossless")
    with pltpack.open(out.parent / "archive") as archive:
        assert archive.identity == identity


def test_a_model_of_other_weights_is_refused(tiny: Path, out: Path, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", seed=1)
    capture(tiny, {"a": PROMPT}, out, name="m")
    capture(other, {"b": PROMPT}, out, name="m")
    first, second = pltpack.open_dumps(out)
    with pytest.raises(IdentityError, match="'weights' differs"):
        first.identity.require_same(second.identity)


def test_dtypes_and_values_that_do_not_fit(tiny: Path, out: Path, tmp_path: Path) -> None:
    from pltpack.snapshot import DTYPES
    from pltpack_cli.capture import capture as command

    choice = next(parameter for parameter in command.params if parameter.name == "dtype").type
    assert list(choice.choices) == ["BF16", "F16", "F32", "F8_E4M3", "F8_E5M2"]
    assert set(choice.choices) == set(DTYPES)
    for dtype in choice.choices:
        capture(tiny, {dtype: PROMPT}, out, options=CaptureOptions(dtype))
    assert {s.session: s.identity.layers[0].dtype for s in pltpack.open_dumps(out)} == {d: d for d in DTYPES}

    network = make_network()
    network.model.layers[1].self_attn.v_proj.weight.mul_(1e6)
    network.save_pretrained(tmp_path / "loud")
    with pytest.raises(UnsupportedError, match="session 'x', layer 1: values do not fit F16"):
        capture(tmp_path / "loud", {"x": PROMPT}, out, options=CaptureOptions("F16"))
    assert not (out / "x.safetensors").exists()


def test_log_probabilities_are_those_of_the_next_token(tiny: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(tiny)(torch.tensor([PROMPT])).logits[0]
    wanted = logits.log_softmax(-1).sort(-1, descending=True)
    capture(tiny, {"a": PROMPT}, out, options=CaptureOptions(logprobs=5))
    # The way for logits that are too many to hold at once.
    monkeypatch.setattr("pltpack.quality.model._LOGIT_BYTES", 0)
    monkeypatch.setattr("pltpack.quality.model._ROWS", 7)
    capture(tiny, {"b": PROMPT}, out, options=CaptureOptions(logprobs=5))
    capture(tiny, {"c": PROMPT}, out)
    a, b, plain = pltpack.open_dumps(out)
    for snapshot in (a, b):
        assert snapshot.logprob_ids.dtype == np.int32
        np.testing.assert_array_equal(snapshot.logprob_ids, wanted.indices[:, :5])
        np.testing.assert_allclose(snapshot.logprobs, wanted.values[:, :5], atol=1e-5)
        for index in range(3):
            for got, bare in zip(snapshot.layer(index), plain.layer(index), strict=True):
                assert got.tobytes() == bare.tobytes()
    assert plain.logprobs is None
    with pytest.raises(UnsupportedError, match="65 log-probabilities of a vocabulary of 64"):
        capture(tiny, {"d": PROMPT}, out, options=CaptureOptions(logprobs=65))


def test_importance_is_the_same_whatever_else_is_captured(tiny: Path, out: Path) -> None:
    options = CaptureOptions(importance=True, seed=3)
    capture(tiny, {"a": PROMPT, "b": OTHER}, out, options=options)
    alone = out.parent / "alone"
    capture(tiny, {"b": OTHER}, alone, options=options)
    capture(tiny, {"b": OTHER}, out.parent / "reseeded", options=CaptureOptions(importance=True))
    b, again = list(pltpack.open_dumps(out))[1], next(pltpack.open_dumps(alone))
    reseeded = next(pltpack.open_dumps(out.parent / "reseeded"))
    assert b.importance.dtype == np.float32
    assert (b.importance > 0).all()
    np.testing.assert_array_equal(b.importance, again.importance)
    assert not np.array_equal(b.importance, reseeded.importance)


def test_nothing_is_overwritten_unasked(tiny: Path, out: Path) -> None:
    capture(tiny, {"a": {"prompt": PROMPT, "continuation": [7]}}, out)
    before = (out / "a.safetensors").read_bytes()
    with pytest.raises(ConflictError, match=r"a\.safetensors: exists already"):
        capture(tiny, {"b": OTHER, "a": OTHER}, out)
    assert not (out / "b.safetensors").exists(), "told before anything is run"
    with pytest.raises(ConflictError, match="continuation of session 'a' already"):
        capture(tiny, {"a": {"prompt": OTHER, "continuation": [9]}}, out.parent / "elsewhere")
    capture(tiny, {"b": {"prompt": OTHER, "continuation": [9]}}, out)
    capture(tiny, {"a": {"prompt": OTHER, "continuation": [8]}}, out, force=True)
    assert (out / "a.safetensors").read_bytes() != before
    found = load_file(out.parent / CONTINUATIONS)
    assert {name: ids.tolist() for name, ids in found.items()} == {"a": [8], "b": [9]}
    assert sorted(file.name for file in out.iterdir()) == ["a.safetensors", "b.safetensors"]


def test_a_file_that_holds_no_continuations_is_left_alone(tiny: Path, out: Path, tmp_path: Path) -> None:
    save_file({"x": np.zeros((2, 2), np.float32)}, tmp_path / "other.safetensors")
    before = (tmp_path / "other.safetensors").read_bytes()
    with pytest.raises(DumpError, match=r"other\.safetensors: is no file of continuations"):
        capture(tiny, {"a": {"prompt": PROMPT, "continuation": [7]}}, out, force=True,
                continuations=tmp_path / "other.safetensors")  # fmt: skip
    assert (tmp_path / "other.safetensors").read_bytes() == before


BAD_PROMPTS = [
    ("p.json", "[]", "not a JSON object of sessions"),
    ("p.json", "{", "not valid JSON"),
    ("p.json", '{"a": {"continuation": [1]}}', "exactly one of prompt, text, messages"),
    ("p.json", '{"a": {"prompt": [1], "text": "w1"}}', "exactly one of"),
    ("p.json", '{"a": {"prompt": []}}', "empty prompt"),
    ("p.json", '{"a": {"prompt": [1, "2"]}}', "not a list of integers"),
    ("p.json", '{"a": {"prompt": [1, -2]}}', "outside 0 to"),
    ("p.json", '{"a": {"prompt": [64]}}', "token 64, but the model knows 64"),
    ("p.json", '{"a": {"prompt": 5}}', "neither text nor a list"),
    ("p.json", json.dumps({"a": [1] * 97}), "needs 97 positions, but the model has 96"),
    ("p.json", '{"": [1]}', "session name of 0 bytes"),
    ("p.json", "{}", "no prompts"),
    ("p.jsonl", '{"prompt": [1], "id": 1}\n{"prompt": [2], "id": 1}', "'1' is named twice"),
    ("p.jsonl", '\n{"prompt": [1]}\n[1]', "line of session 'p-2' is not a JSON object"),
    ("p.jsonl", '{"messages": "hello"}', "messages are not a list of objects"),
    ("p.jsonl", '{"messages": [{"role": "user"}]}', "the chat template refuses the messages"),
    ("p.txt", b"\xff", "not UTF-8"),
]


@pytest.mark.parametrize(("name", "text", "fact"), BAD_PROMPTS, ids=range(len(BAD_PROMPTS)))
def test_bad_prompts_are_one_clear_error(tiny: Path, tmp_path: Path, name: str, text: str | bytes, fact: str) -> None:
    file = tmp_path / name
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    result = run("capture", "--model", tiny, "--prompts", file, "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert fact in result.stderr
    assert not list(tmp_path.glob("out/*"))


def test_prompt_files_of_every_kind(tiny: Path, tmp_path: Path, out: Path) -> None:
    (tmp_path / "s.json").write_text(json.dumps({"ids": {"prompt": [4, 5], "continuation": "w0 w1"}, "bare": "w9"}))
    lines = [{"text": "w0\u2028w1", "session": "named"}, {"messages": [{"role": "user", "content": "w5"}]}]
    (tmp_path / "l.jsonl").write_text("\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n")
    (tmp_path / "one.txt").write_text(" ".join(WORDS[:4]))
    (tmp_path / "long.md").write_text(" ".join(WORDS[:6]))
    from pltpack.quality.model import load_tokenizer
    from pltpack.quality.prompts import read_prompts

    tokenizer = load_tokenizer(tiny)
    found = read_prompts([tmp_path / name for name in ("s.json", "l.jsonl", "one.txt")], tokenizer)
    found += read_prompts([tmp_path / "long.md"], tokenizer, window=3)
    plain = {p.session: (p.tokens.tolist(), None if p.continuation is None else p.continuation.tolist()) for p in found}
    assert plain == {
        "ids": ([4, 5], [3, 4]),
        "bare": ([0, 12], None),
        "named": ([0, 3, 4], None),
        "l-1": ([4, 8, 5, 6], None),
        "one": ([0, 3, 4, 5, 6], None),
        "long-0": ([0, 3, 4], [5, 6, 7, 8]),
        "long-1": ([5, 6, 7], [8]),
        "long-2": ([8], None),
    }


def test_command_prints_what_it_wrote(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(json.dumps({"a": {"prompt": PROMPT, "continuation": [1]}}))
    arguments = ("capture", "--model", tiny, "--prompts", tmp_path / "p.json")
    result = done_json(*arguments, "-o", tmp_path / "dumps", "--dtype", "f32", "--logprobs", 2, "--importance")
    assert result["tokens"] == 30
    assert result["continuations"] == str(tmp_path / CONTINUATIONS)
    (snapshot,) = pltpack.open_dumps(tmp_path / "dumps")
    assert snapshot.logprobs.shape == (30, 2)
    assert snapshot.importance.shape == (30,)
    again = run(*arguments, "-o", tmp_path / "dumps")
    assert again.exit_code == 2
    assert "--force" in again.stderr
    shown = run(*arguments, "-o", tmp_path / "dumps", "--force")
    assert shown.exit_code == 0
    assert "1 session, 30 tokens" in shown.stdout


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_missing_extra_is_named(tiny: Path, tmp_path: Path, missing: str) -> None:
    (tmp_path / "p.txt").write_text("w1")
    code = f"import sys; sys.modules[{missing!r}] = None; from pltpack_cli.main import main; main()"
    command = [sys.executable, "-c", code, "capture", "--model", tiny, "--prompts", tmp_path / "p.txt", "-o", tmp_path]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert done.returncode == 2
    assert f"{missing} is not installed" in done.stderr
    assert "pip install 'pltpack[eval]'" in done.stderr


def test_models_that_cannot_be_used(tiny: Path, out: Path, tmp_path: Path) -> None:
    def refused(folder: Path, error: type[Exception], fact: str, prompts=None) -> None:
        with pytest.raises(error, match=fact):
            capture(folder, prompts or {"a": [1]}, out)
        assert not out.exists()

    refused(tmp_path / "none", NotFoundError, "no such model folder")
    refused(tmp_path, NotFoundError, "holds no transformers model")
    copy = tmp_path / "copy"
    shutil.copytree(tiny, copy)
    tensors = load_file(copy / "model.safetensors")
    # The layout "pt" is what transformers asks of a weights file.
    save_file({k: v for k, v in tensors.items() if "v_proj" not in k}, copy / "model.safetensors", {"format": "pt"})
    refused(copy, DumpError, r"no weights for 'model\.layers\.0\.self_attn\.v_proj\.weight' \(3 missing\)")
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    refused(copy, UnsupportedError, "not a model that transformers can load")
    bare = save_model(tmp_path / "bare", tokenizer=False)
    refused(bare, UnsupportedError, "holds no tokenizer", {"a": "text"})
    with pytest.raises(UnsupportedError, match="device 'abacus' cannot be used"):
        capture(bare, {"a": [1]}, out, device="abacus")
    assert capture(bare, {"a": [1]}, out)["tokens"] == 1
    assert next(pltpack.open_dumps(out)).identity.tokenizer is None


def test_weights_digest_is_that_of_the_content(tiny: Path, tmp_path: Path) -> None:
    split = save_model(tmp_path / "split", shard="20KB")
    assert len(list(split.glob("*.safetensors"))) > 2
    assert weights_digest(split) == weights_digest(tiny)
    copy = tmp_path / "copy"
    shutil.copytree(tiny, copy)
    tensors = load_file(copy / "model.safetensors")
    tensors["model.norm.weight"] = np.nextafter(tensors["model.norm.weight"], np.float32(2))
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    assert weights_digest(copy) != weights_digest(tiny)
    index = json.loads((split / "model.safetensors.index.json").read_text())
    index["weight_map"]["x"] = "../tiny/model.safetensors"
    (split / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(DumpError, match="not a file of this folder"):
        weights_digest(split)


def test_tokenizer_digest_ignores_how_it_was_used(tiny: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny, copy)
    data = json.loads((copy / "tokenizer.json").read_text())
    data["truncation"] = {"max_length": 5}
    (copy / "tokenizer.json").write_text(json.dumps(data, indent=4))
    assert tokenizer_digest(copy) == tokenizer_digest(tiny)
    data["model"]["vocab"]["w0"], data["model"]["vocab"]["w1"] = 4, 3
    (copy / "tokenizer.json").write_text(json.dumps(data))
    assert tokenizer_digest(copy) != tokenizer_digest(tiny)
    (copy / "tokenizer.json").unlink()
    assert tokenizer_digest(copy) is None
    (copy / "vocab.json").write_text("{}")
    first = tokenizer_digest(copy)
    (copy / "merges.txt").write_text("a b")
    assert len({first, tokenizer_digest(copy), None}) == 3
