"""The main job with the real model: what it computes is captured, packed, unpacked, and given back to it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.baselines import cache_tensors, tensors
from benchmarks.demo import relative_error
from pltpack.dumps import open_dumps
from pltpack.quality.capture import CONTINUATIONS, capture
from pltpack.quality.probes import at_ends, read_continuations
from pltpack.quality.rebuilt import of_archives
from pltpack.quality.scoring import score

ROOT = Path(__file__).parents[1]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SESSIONS = ("rain-gauge-follow-up", "battery-code")


@pytest.fixture(scope="module")
def captured(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dumps of two sessions, captured now."""
    texts = json.loads((ROOT / "fixtures" / "sessions.json").read_text())
    out = tmp_path_factory.mktemp("captured") / "dumps"
    capture(model_dir, {name: texts[name] for name in SESSIONS}, out, name="SmolLM2-135M-Instruct")
    return out


def packed_and_back(dumps: Path, folder: Path, tier: str) -> tuple[dict, Path]:
    import pltpack

    stats = pltpack.compress([dumps], folder / "archive", quality=tier)
    pltpack.decompress(folder / "archive", folder / "rebuilt")
    return stats, folder / "rebuilt"


def test_fixtures_are_what_the_model_computes(captured: Path, real_dumps: Path) -> None:
    shipped = [real_dumps / f"{name}.safetensors" for name in SESSIONS]
    # Kernels differ between machines and move a value across a rounding boundary of bf16 now and then.
    assert relative_error(shipped, captured) < 1e-3


def test_lossless_is_bit_exact_and_shares_the_system_prompt(captured: Path, tmp_path: Path) -> None:
    stats, rebuilt = packed_and_back(captured, tmp_path, "lossless")
    assert stats["sessions"] == 2
    assert stats["shared_tokens"] >= 2 * 128
    for path in captured.glob("*.safetensors"):
        before, after = tensors(path), tensors(rebuilt / path.name)
        assert before.keys() == after.keys()
        assert all(before[name].tobytes() == after[name].tobytes() for name in before), path.name


def test_q4_is_hardly_felt_by_the_model(model, captured: Path, tmp_path: Path) -> None:
    _, rebuilt = packed_and_back(captured, tmp_path, "q4")
    originals = list(open_dumps(captured))
    ends = at_ends(originals, read_continuations(captured.parent / CONTINUATIONS))
    with of_archives([tmp_path / "archive"]) as candidates:
        (scores,) = score(model, originals, ends, candidates)
    assert 0 < scores.total()["kl"] < 0.01
    for path in captured.glob("*.safetensors"):
        before, after = cache_tensors(path), cache_tensors(rebuilt / path.name)
        assert all(np.array_equal(before[name][:, :4], after[name][:, :4]) for name in before), "sinks are exact"


def test_tokens_alone_give_the_cache_back(model_dir: Path, captured: Path, tmp_path: Path) -> None:
    import pltpack
    from pltpack.quality.recompute import Rebuilder, compress

    path = captured / f"{SESSIONS[0]}.safetensors"
    stats = compress([path], tmp_path / "archive", model_dir)
    assert stats["ratio"] > 400
    pltpack.decompress(tmp_path / "archive", tmp_path / "rebuilt", rebuild=Rebuilder(model_dir))
    assert (tmp_path / "rebuilt" / path.name).read_bytes() == path.read_bytes()


def test_a_run_in_bfloat16_leaves_less_than_half_of_lossless(model_dir: Path, captured: Path, tmp_path: Path) -> None:
    import pltpack
    from pltpack.quality.recompute import Rebuilder, compress

    path = captured / f"{SESSIONS[0]}.safetensors"
    stats = compress([path], tmp_path / "archive", model_dir, quality="lossless+model")
    assert stats["bits_per_element"] < 5
    pltpack.decompress(tmp_path / "archive", tmp_path / "rebuilt", rebuild=Rebuilder(model_dir))
    assert (tmp_path / "rebuilt" / path.name).read_bytes() == path.read_bytes()


def test_coding_with_the_model_reaches_its_cross_entropy(model_dir: Path, captured: Path) -> None:
    import torch

    from pltpack.quality import token_model
    from pltpack.quality.model import load_model

    loaded = load_model(model_dir)
    tokens = next(iter(open_dumps(captured / f"{SESSIONS[0]}.safetensors"))).tokens[:100]
    with torch.no_grad():
        logs = loaded.network(torch.as_tensor(tokens.astype(np.int64))[None]).logits[0].double().log_softmax(-1)
    entropy = -float(logs[:-1].gather(1, torch.as_tensor(tokens[1:, None].astype(np.int64))).sum()) / np.log(2)
    # A bit for the first token, and whole bytes.
    assert 8 * len(token_model.encode(loaded, tokens)) <= 1.02 * entropy + 9


def test_generation_goes_on_from_a_cache_that_was_packed(model, model_dir: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoTokenizer
    from transformers.cache_utils import DynamicCache

    import pltpack

    text = json.loads((ROOT / "fixtures" / "sessions.json").read_text())["frost"]["prompt"]
    prompt = AutoTokenizer.from_pretrained(model_dir)(text).input_ids
    # The last prompt token is fed after the cache, so that its logits give the first new token.
    original = DynamicCache()
    with torch.no_grad():
        model.model(torch.tensor([prompt[:-1]]), cache=original, use_cache=True)

    snapshot = pltpack.from_dynamic_cache(original, prompt[:-1], "frost")
    pltpack.compress([snapshot], tmp_path / "archive", quality="lossless")
    with pltpack.open(tmp_path / "archive") as archive:
        rebuilt = pltpack.to_dynamic_cache(archive.read("frost"))

    for before, after in zip(original.layers, rebuilt.layers, strict=True):
        assert torch.equal(before.keys, after.keys)
        assert torch.equal(before.values, after.values)

    def greedy(cache: DynamicCache) -> list[int]:
        token, out = prompt[-1], []
        for _ in range(8):
            with torch.no_grad():
                logits = model(torch.tensor([[token]]), cache=cache, use_cache=True).logits
            token = int(logits[0, -1].argmax())
            out.append(token)
        return out

    assert greedy(rebuilt) == greedy(original)
