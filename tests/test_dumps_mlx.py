"""mlx-lm prompt caches: both layouts, quantized and rotating, and the RoPE base that mlx-lm really used."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from engines_common import HALF, MODEL, TOKENS, unpacked
from safetensors import safe_open

import pltpack
from pltpack.archive.rotation_check import check_rotation, misfit
from pltpack.codec.rope import Rotation
from pltpack.dumps.registry import open_dumps, write_dump
from pltpack.dumps.safetensors_header import read_header
from pltpack.errors import DumpError, IdentityError, PltpackError, UnsupportedError
from pltpack.snapshot import Snapshot

NAMES = ["mlx-padded-plain", "mlx-padded-q8", "mlx-padded-rotating", "mlx-sliced-plain", "mlx-sliced-q4"]


def contents(file):
    """Every tensor as (dtype, shape, bytes), and the metadata."""
    header, data = read_header(file), file.read_bytes()
    tensors = {name: (e.dtype, e.shape, data[e.offset : e.offset + e.length]) for name, e in header.tensors.items()}
    return tensors, dict(header.metadata)


@pytest.mark.parametrize("name", NAMES)
def test_files_of_the_real_engine_come_back(tmp_path, name):
    file = unpacked(f"{name}.safetensors", tmp_path)
    pltpack.compress([file], tmp_path / "a", quality="lossless", identity=MODEL)
    options = {"layout": name.split("-")[1], "model": "smollm2", "keep": "4"}
    (written,) = pltpack.decompress(tmp_path / "a", tmp_path / "out", to="mlx", options=options)
    assert contents(written) == contents(file)
    with safe_open(written, "np") as opened:
        assert "0.model" in opened.metadata() or "1.model" in opened.metadata()


def test_values_of_all_files_agree(tmp_path):
    found = {name: next(open_dumps(unpacked(f"{name}.safetensors", tmp_path))) for name in NAMES}
    reference = found["mlx-padded-plain"]
    assert reference.tokens.tolist() == TOKENS and reference.identity.model == "smollm2"
    assert found["mlx-padded-rotating"].identity.layers[0].window == 64
    for name, tolerance in zip(NAMES, (0, 0.03, 1e-6, 1e-6, 0.2), strict=True):
        for index in (0, 29):
            for a, b in zip(found[name].layer(index), reference.layer(index), strict=True):
                a, b = a.astype(np.float32), b.astype(np.float32)
                assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b), (name, index)


def test_tokens_must_be_given(tmp_path):
    file = unpacked("mlx-sliced-plain.safetensors", tmp_path)
    (tmp_path / "mlx-sliced-plain.safetensors.tokens.json").unlink()
    with pytest.raises(DumpError, match=r"put a JSON list into mlx-sliced-plain\.safetensors\.tokens\.json or name a"):
        list(open_dumps(file))


def renamed_model(file, model):
    """The same file, captured with the model in a folder."""
    (found,) = open_dumps(file)
    (written,) = write_dump(found, file.parent / "renamed", "mlx", {"model": str(model)})
    (written.parent / f"{written.name}.tokens.json").write_text(json.dumps(TOKENS))
    return written


def test_the_base_that_mlx_lm_used_is_taken_from_the_models_own_file(tmp_path):
    """With a configuration of transformers 5, mlx-lm rotates by base 10000 whatever the model's own is."""
    config = {"model_type": "llama", "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"}}
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    file = renamed_model(unpacked("mlx-padded-plain.safetensors", tmp_path), folder)
    (found,) = open_dumps(file)
    assert found.identity.rope == {**HALF, "theta": 10000.0}
    (folder / "config.json").write_text(json.dumps({**config, "rope_theta": 100000.0}))
    (found,) = open_dumps(file)
    assert found.identity.rope == HALF


def test_a_wrong_base_is_refused_and_not_averaged_in(tmp_path):
    right = unpacked("mlx-padded-plain.safetensors", tmp_path)
    pltpack.compress([right], tmp_path / "a", quality="lossless", identity=MODEL)
    before = (tmp_path / "a" / "MANIFEST.json").read_bytes()
    folder = tmp_path / "wrong"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    wrong = renamed_model(right, folder)
    # The file's own model says 10000, against 100000 of the archive, with and without an identity from outside.
    for identity in (None, MODEL):
        with pytest.raises(IdentityError, match=r"'rope' differs|'model' differs"):
            pltpack.append(tmp_path / "a", [wrong], identity=identity)
    claimed = dataclasses.replace(MODEL, rope={**HALF, "theta": 10000.0})
    with pytest.raises(IdentityError, match="'rope'"):
        pltpack.append(tmp_path / "a", [right], identity=claimed)
    assert (tmp_path / "a" / "MANIFEST.json").read_bytes() == before


def test_keys_themselves_tell_a_wrong_base(tmp_path):
    (found,) = open_dumps(unpacked("mlx-padded-plain.safetensors", tmp_path), identity=MODEL)
    assert misfit(found) is None, "too few tokens occur twice to tell"
    # The engine's layer-0 keys once more, moved 300 positions on.
    keys, values = (array.astype(np.float32) for array in found.layer(0))
    gap = np.zeros((3, 300 - len(TOKENS), 64), np.float32)
    moved = Rotation.of(HALF, "rotated", 64).shift(keys, 0, 300)
    layer = np.concatenate([keys, gap, moved], axis=1), np.concatenate([values, gap, values], axis=1)
    ids = [*TOKENS, *range(10000, 10000 + gap.shape[1]), *TOKENS]
    fits = Snapshot.from_arrays("fits", ids, [layer], dataclasses.replace(MODEL, layers=()))
    assert misfit(fits) < 0.02
    check_rotation(fits)
    for rope in ({**HALF, "theta": 10000.0}, {**HALF, "style": "interleaved"}):
        identity = dataclasses.replace(fits.identity, rope=rope)
        wrong = dataclasses.replace(fits, identity=identity)
        assert misfit(wrong) > 0.2
        with pytest.raises(IdentityError, match="'rope' does not fit the keys"):
            check_rotation(wrong)


def test_caches_that_dropped_tokens_or_are_of_other_classes_are_refused(tmp_path):
    file = unpacked("mlx-padded-rotating.safetensors", tmp_path)
    data = file.read_bytes()
    header = read_header(file)
    for name, number, text in (("0.2", 9999, "keeps only"), ("0.5", 3, "begun to rotate"), ("0.2", 0, "claims 0")):
        at = header.tensors[name].offset
        file.write_bytes(data[:at] + number.to_bytes(4, "little") + data[at + 4 :])
        with pytest.raises(PltpackError, match=text):
            list(open_dumps(file))
    file.write_bytes(data.replace(b"RotatingKVCache", b"StrangerKVCache"))
    with pytest.raises(UnsupportedError, match="class 'StrangerKVCache'"):
        list(open_dumps(file))
