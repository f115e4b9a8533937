"""What the model feels: continue from rebuilt caches and compare the next-token distributions.

For each session the true continuation is fed to the model twice, over the original cache and over the rebuilt one.
Prints per tier: bits per element on disk, KL(original || rebuilt) in nats per token, perplexity change, top-1
agreement. Needs the extra ``eval``.

Usage: python -m benchmarks.quality [--model DIR] [--dumps DIR --continuations FILE] [--no-dedup] [TIER]...
       (or: make demo-quality)
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from benchmarks.baselines import cache_size, fp8
from benchmarks.demo import TIERS, WORK, on_disk, unpacked
from benchmarks.model import DEFAULT, ensure
from pltpack.quality.capture import CONTINUATIONS

if TYPE_CHECKING:
    import torch

Layers = list[tuple["torch.Tensor", "torch.Tensor"]]


def load_model(folder: Path) -> Any:
    """The model in float32, ready for inference."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def load_layers(path: Path) -> Layers:
    """Keys and values [H_kv, T, D] of each layer of a dump."""
    from safetensors.torch import load_file

    found = load_file(path)
    count = sum(name.endswith(".keys") for name in found)
    return [(found[f"layers.{i}.keys"], found[f"layers.{i}.values"]) for i in range(count)]


def log_probabilities(model: Any, layers: Layers, continuation: torch.Tensor) -> torch.Tensor:
    """Next-token log-probabilities [C, vocabulary] while `continuation` [C] is read after the cache."""
    import torch
    from transformers.cache_utils import DynamicCache

    cache = DynamicCache()
    for index, (keys, values) in enumerate(layers):
        cache.update(keys[None].float(), values[None].float(), index)
    with torch.no_grad():
        logits = model(continuation[None].long(), cache=cache, use_cache=True).logits[0]
    return logits.log_softmax(-1)


def score(model: Any, original: Layers, rebuilt: Layers, continuation: torch.Tensor) -> dict[str, float]:
    """One session's distortion: ``kl`` in nats per token, both mean negative log-likelihoods, ``top1`` agreement."""
    before, after = (log_probabilities(model, layers, continuation) for layers in (original, rebuilt))
    nll = [-lp[:-1].gather(1, continuation[1:, None].long()).mean().item() for lp in (before, after)]
    return {
        "kl": (before.exp() * (before - after)).sum(-1).mean().item(),
        "nll": nll[0],
        "nll_rebuilt": nll[1],
        "top1": (before.argmax(-1) == after.argmax(-1)).float().mean().item(),
    }


def score_all(
    model: Any, dumps: Path, continuations: Mapping[str, torch.Tensor], rebuilt: Callable[[Path], Layers]
) -> dict[str, float]:
    """Means over all sessions; `rebuilt` gives the layers that stand for a dump."""
    scores = []
    for session, continuation in continuations.items():
        path = dumps / f"{session}.safetensors"
        scores.append(score(model, load_layers(path), rebuilt(path), continuation))
    mean = {key: sum(s[key] for s in scores) / len(scores) for key in scores[0]}
    return {**mean, "perplexity_change": math.expm1(mean["nll_rebuilt"] - mean["nll"])}


def cast_to_fp8(path: Path) -> Layers:
    """A dump's layers after a cast to fp8 e4m3 and back."""
    import torch

    return [(k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)) for k, v in load_layers(path)]


def rows(
    model: Any, dumps: Path, continuations: Mapping[str, torch.Tensor], tiers: Iterable[str], dedup: bool
) -> Iterable[tuple[str, float, dict[str, float]]]:
    """Name, bits per element and scores of each tier, then of the fp8 cast."""
    import pltpack

    paths = sorted(dumps.glob("*.safetensors"))
    _, elements = cache_size(paths)
    for tier in tiers:
        with tempfile.TemporaryDirectory() as scratch:
            archive, again = Path(scratch) / "archive", Path(scratch) / "rebuilt"
            pltpack.compress([dumps], archive, quality=tier, dedup=dedup)
            pltpack.decompress(archive, again)
            scores = score_all(model, dumps, continuations, lambda path, again=again: load_layers(again / path.name))
            yield tier, 8 * on_disk(archive) / elements, scores
    yield "fp8 e4m3 cast", 8 * fp8(paths) / elements, score_all(model, dumps, continuations, cast_to_fp8)


def main() -> None:
    from safetensors.torch import load_file

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tiers", nargs="*", default=TIERS, metavar="TIER")
    parser.add_argument("--model", type=Path, default=DEFAULT, help="model folder; made if absent")
    parser.add_argument("--dumps", type=Path, help="folder of dumps (default: the sessions in fixtures/)")
    parser.add_argument("--continuations", type=Path, help="default: beside the dumps' folder")
    parser.add_argument("--no-dedup", action="store_true", help="store every session alone")
    args = parser.parse_args()
    dumps = args.dumps or unpacked(WORK)
    continuations = load_file(args.continuations or dumps.parent / CONTINUATIONS)
    out = Table("stored as", "bits/element", "KL, nats", "perplexity", "top-1")
    for name, bits, scores in rows(load_model(ensure(args.model)), dumps, continuations, args.tiers, not args.no_dedup):
        cells = (f"{bits:.3f}", f"{scores['kl']:.5f}", f"{100 * scores['perplexity_change']:+.2f} %")
        out.add_row(name, *cells, f"{100 * scores['top1']:.1f} %")
    Console().print(out)


if __name__ == "__main__":
    main()
