"""transformers' side of the engine runs: captured in this process, started warm by `pltpack.serve.warm_generate`.

Usage: python -m benchmarks.engines --engine transformers
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pltpack

if TYPE_CHECKING:
    from benchmarks.engines import Options

DTYPE = "F32"


def run(options: Options) -> dict[str, Any]:
    """Capture, compress, and warm-start in new processes."""
    from benchmarks.engines import BLOCK, compared, tiers

    cold = _process(options, "capture", "dumps")
    results: dict[str, Any] = {}
    for tier, settings in tiers(options.profile):
        archive = options.work / f"archive-{tier}"
        stats = pltpack.compress([options.work / "dumps"], archive, quality=tier, block=BLOCK, **settings)
        warm = _process(options, "warm", archive.name)
        results[tier] = {**compared(cold, warm, {}, {}), "ratio": stats["ratio"]}
    return results


def _process(options: Options, mode: str, folder: str) -> dict[str, Any]:
    job, result = options.work / f"{mode}.json", options.work / f"{mode}-result.json"
    job.write_text(json.dumps({
        "model": str(options.model), "prompts": options.prompts, "folder": str(options.work / folder),
        "new_tokens": options.new_tokens, "result": str(result), "threads": options.threads,
    }))  # fmt: skip
    command = [sys.executable, "-m", "benchmarks.engines_transformers", mode, str(job)]
    subprocess.run(command, check=True, env=dict(os.environ))
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def main() -> None:
    """One side of the run, in a process of its own."""
    import torch
    from transformers import DynamicCache

    from pltpack.quality.model import load_model
    from pltpack.serve.warm import warm_generate

    mode, job = sys.argv[1], json.loads(Path(sys.argv[2]).read_text())
    torch.set_num_threads(job["threads"])
    loaded = load_model(job["model"], dtype=DTYPE)
    network, results = loaded.network, {}
    with torch.no_grad():
        network(torch.tensor([[1, 2, 3]]))
    if mode == "warm":
        with pltpack.open(job["folder"]) as archive, archive.loader() as loader:
            # Once per process, as the model is loaded once.
            loader.prepare()
            for name, ids in job["prompts"].items():
                busy = time.process_time()
                warm_generate(network, loader, ids, 1, eos_token_id=())
                worked = time.process_time() - busy
                start = warm_generate(network, loader, ids, job["new_tokens"], eos_token_id=())
                results[name] = {"tokens": start.tokens, "seconds_to_first": start.seconds_to_first,
                                 "cpu_seconds_to_first": worked, "held": start.cached_tokens}  # fmt: skip
    else:
        for name, ids in job["prompts"].items():
            begin, busy = time.perf_counter(), time.process_time()
            cache = DynamicCache(config=network.config)
            with torch.no_grad():
                network(torch.tensor([ids[:-1]]), cache=cache, use_cache=True, logits_to_keep=1)
                elapsed, worked = time.perf_counter() - begin, time.process_time() - busy
                snapshot = pltpack.from_dynamic_cache(cache, ids[:-1], name, loaded.identity(DTYPE))
                pltpack.write_dump(snapshot, Path(job["folder"]))
                begin, busy = time.perf_counter() - elapsed, time.process_time() - worked
                first, tokens, batch = 0.0, [], torch.tensor([ids[-1:]])
                while len(tokens) < job["new_tokens"]:
                    logits = network(batch, cache=cache, use_cache=True, logits_to_keep=1).logits
                    tokens.append(int(logits[0, -1].argmax()))
                    if not first:
                        first, worked = time.perf_counter() - begin, time.process_time() - busy
                    batch = torch.tensor([tokens[-1:]])
            results[name] = {"tokens": tokens, "seconds_to_first": first, "cpu_seconds_to_first": worked,
                             "held": len(ids) - 1}  # fmt: skip
    Path(job["result"]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
