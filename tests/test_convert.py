"""`convert`, `warm` and ``decompress --to``: from one engine to another, or a reason why not."""

from __future__ import annotations

import dataclasses
import json
import resource

import numpy as np
import pytest
from cli_common import done, run
from engines_common import GGUF, HALF, MODEL, TOKENS, unpacked

import pltpack
from pltpack.archive.convert import check_target, convert
from pltpack.dumps.registry import open_dumps
from pltpack.errors import DumpError, IdentityError, NotFoundError
from pltpack.serve.engine_file import warm_file


@pytest.fixture
def model(tmp_path):
    """A model's folder as far as identities need it."""
    folder = tmp_path / "smollm2"
    folder.mkdir()
    config = {"model_type": "llama", "num_hidden_layers": 30, "num_key_value_heads": 3, "num_attention_heads": 9,
              "hidden_size": 576, "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"}}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_cache_of_one_engine_goes_to_another(tmp_path):
    """llama.cpp's file as mlx-lm's: the values that mlx-lm itself computes, up to what 4-bit weights make of them."""
    pltpack.compress([unpacked("llama-f16.bin", tmp_path)], tmp_path / "a", quality="lossless", identity=GGUF)
    (file,) = convert(tmp_path / "a", tmp_path / "mlx", to="mlx", target=MODEL)
    (tmp_path / "mlx" / f"{file.name}.tokens.json").write_text(json.dumps(TOKENS))
    (ours,) = open_dumps(file)
    (theirs,) = open_dumps(unpacked("mlx-padded-plain.safetensors", tmp_path))
    for index in (0, 15, 29):
        for a, b in zip(ours.layer(index), theirs.layer(index), strict=True):
            a, b = a.astype(np.float32), b.astype(np.float32)
            assert np.linalg.norm(a - b) < 0.1 * np.linalg.norm(b)
    (back,) = convert(file, tmp_path / "back", to="llama.cpp", identity=MODEL, to_options={"arch": "llama"},
                      target=GGUF)  # fmt: skip
    assert back.read_bytes() == unpacked("llama-f16.bin", tmp_path).read_bytes()


@pytest.mark.parametrize("field, change", [
    ("rope", {"rope": {**HALF, "theta": 10000.0}}),
    ("layers", {"layers": MODEL.layers[:29]}),
    (r"layers\[0\]\.heads", {"layers": tuple(dataclasses.replace(layer, heads=9) for layer in MODEL.layers)}),
])  # fmt: skip
def test_another_model_is_refused(tmp_path, field, change):
    file = unpacked("mlx-sliced-plain.safetensors", tmp_path)
    with pytest.raises(IdentityError, match=f"identity field '{field}' differs"):
        convert(file, tmp_path / "out", to="transformers", identity=MODEL, target=dataclasses.replace(MODEL, **change))
    assert not (tmp_path / "out").exists()
    check_target(MODEL, dataclasses.replace(GGUF, model="other"))
    with pytest.raises(IdentityError, match="take it with --accept-unknown rope"):
        check_target(dataclasses.replace(MODEL, rope=None), MODEL)


def test_the_stored_prefix_of_a_prompt(tmp_path):
    pltpack.compress([unpacked("llama-q8_0.bin", tmp_path)], tmp_path / "a", quality="lossless", identity=GGUF, block=4)
    prompt = np.array([*TOKENS[:10], 1, 2, 3])
    found = warm_file(tmp_path / "a", "llama.cpp", tmp_path / "warm.bin", prompt=prompt)
    assert (found["tokens"], found["prompt_tokens"]) == (8, 13)
    (ours,) = open_dumps(tmp_path / "warm.bin", identity=GGUF, options={"quantized": "integers"})
    (whole,) = open_dumps(unpacked("llama-q8_0.bin", tmp_path), identity=GGUF, options={"quantized": "integers"})
    assert ours.tokens.tolist() == TOKENS[:8]
    for index in range(60):
        for a, b in zip(ours.layer(index), whole.layer(index, 0, 8), strict=True):
            assert a.tobytes() == b.tobytes()
    # A prompt that is stored to its end leaves the engine its last token.
    found = warm_file(tmp_path / "a", "llama.cpp", tmp_path / "warm.bin", prompt=np.array(TOKENS))
    assert found["tokens"] == 11
    with pytest.raises(NotFoundError, match="nothing of this prompt of 3 tokens is stored"):
        warm_file(tmp_path / "a", "llama.cpp", tmp_path / "no.bin", prompt=np.array([9, 9, 9]))
    assert not (tmp_path / "no.bin").exists()


def test_several_files_from_one_open_archive(tmp_path):
    dump = unpacked("llama-q8_0.bin", tmp_path)
    pltpack.compress([dump], tmp_path / "a", quality="lossless", identity=GGUF, block=4)
    prompt = tmp_path / "p.json"
    prompt.write_text(json.dumps([*TOKENS[:10], 1, 2, 3]))
    warm = ["warm", tmp_path / "a", "--engine", "llama.cpp", "--session", "llama-q8_0", "--prompt-tokens", prompt]
    found = json.loads(done(*warm, "-o", tmp_path / "out", "--json"))
    assert [row["tokens"] for row in found] == [12, 8]
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["llama-q8_0.bin", "p.bin"]
    assert (tmp_path / "out" / "llama-q8_0.bin").read_bytes() == dump.read_bytes()
    with pltpack.open(tmp_path / "a") as opened:
        warm_file(opened, "llama.cpp", tmp_path / "warm.bin", prompt=prompt)
        assert opened.sessions == ["llama-q8_0"]
    assert (tmp_path / "warm.bin").read_bytes() == (tmp_path / "out" / "p.bin").read_bytes()
    twice = run(*warm, "--prompt-tokens", prompt, "-o", tmp_path / "out")
    assert twice.exit_code == 2 and "two files would be named 'p'" in twice.stderr
    assert run(*warm, "-o", prompt).exit_code == 2


def test_from_the_command_line(tmp_path, model):
    file = unpacked("llama-f16.bin", tmp_path)
    arguments = ["--quality", "lossless", "--model", model, "--from-option", "arch=llama"]
    assert run("compress", file, "-o", tmp_path / "a", *arguments).exit_code == 0
    done = run("warm", tmp_path / "a", "--engine", "mlx", "--session", "llama-f16", "-o", tmp_path / "w.safetensors",
               "--for", model, "--json")  # fmt: skip
    assert done.exit_code == 0 and json.loads(done.stdout)["tokens"] == 12
    done = run("convert", tmp_path / "a", tmp_path / "back", "--to", "llama.cpp")
    assert done.exit_code == 0 and (tmp_path / "back" / "llama-f16.bin").read_bytes() == file.read_bytes()
    config = json.loads((model / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 10000.0
    (model / "config.json").write_text(json.dumps(config))
    archive, out = tmp_path / "a", tmp_path / "x"
    for command in (["convert", archive, out, "--to", "mlx"], ["decompress", archive, "-o", out, "--to", "mlx"],
                    ["warm", archive, "--engine", "mlx", "--session", "llama-f16", "-o", out]):  # fmt: skip
        done = run(*command, "--for", model)
        assert done.exit_code == 2 and "'rope' differs" in done.stderr
        assert not out.exists()
    done = run("convert", archive, out, "--to", "mlx", "--to-option", "colour=red")
    assert done.exit_code == 2 and "has no option 'colour'" in done.stderr


def test_an_archive_may_be_a_url(tmp_path, model):
    file = unpacked("llama-f16.bin", tmp_path)
    arguments = ["--quality", "lossless", "--model", model, "--from-option", "arch=llama"]
    assert run("compress", file, "-o", tmp_path / "a", *arguments).exit_code == 0
    assert run("convert", f"file://{tmp_path}/a", tmp_path / "back", "--to", "llama.cpp").exit_code == 0
    assert (tmp_path / "back" / "llama-f16.bin").read_bytes() == file.read_bytes()
    done = run("convert", "memory://nothing-is-here", tmp_path / "b", "--to", "llama.cpp")
    assert done.exit_code == 2 and "memory://nothing-is-here: not an archive" in done.stderr


@pytest.mark.parametrize(
    "to, message",
    [
        ("sglang-hicache", "--to-option page=N"),
        ("vllm-offload", "--to-option layout"),
        ("vllm-example", "keys as long as values"),
    ],
)
def test_what_a_writer_needs_is_said_as_its_own_option(tmp_path, to, message):
    from archives import session

    pltpack.compress([session("s", range(40))], tmp_path / "a", quality="lossless")
    done = run("convert", tmp_path / "a", tmp_path / "b", "--to", to)
    assert done.exit_code == 2 and message in done.stderr


def test_a_full_disk_is_told_of_the_file_that_was_asked_for(tmp_path):
    from archives import session

    pltpack.compress([session("s", range(40))], tmp_path / "a", quality="lossless")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(DumpError, match="File too large") as error:
            warm_file(tmp_path / "a", "mlx", tmp_path / "w.safetensors", session="s")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert error.value.path == str(tmp_path / "w.safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]
