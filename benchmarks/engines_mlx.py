"""mlx-lm's side of the engine runs: prompts through it cold, their caches saved; and again from files.

Runs under an interpreter that has mlx and mlx-lm, and imports nothing of this project.

Usage: python benchmarks/engines_mlx.py capture|warm JOB.json
       python benchmarks/engines_mlx.py fixtures MODEL OUT      (the short files in fixtures/engines)
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

#: Tokens of the short files; some occur twice.
FIXTURE = [504, 3575, 282, 260, 6330, 314, 260, 3575, 30, 504, 6330, 30]


def fixtures(model_folder: str, out: Path) -> None:
    """Short caches of every class, in the layout of the mlx-lm at hand."""
    import mlx.core as mx
    from mlx_lm import load
    from mlx_lm.models import cache as caches

    # Version 0.32 keeps whole buffers, and the numbers as arrays.
    name = "padded" if len(caches.KVCache.state.fget.__code__.co_names) == 3 else "sliced"
    for dtype in (mx.bfloat16, mx.float32):
        model, _ = load(model_folder)
        model.set_dtype(dtype)
        for kind in ("q8", "q4") if dtype == mx.float32 else ("plain", "rotating"):
            cache = caches.make_prompt_cache(model)
            if kind == "rotating":
                cache = [caches.RotatingKVCache(max_size=64, keep=4) for _ in model.layers]
            model(mx.array([FIXTURE]), cache=cache)
            if kind in ("q8", "q4"):
                cache = [layer.to_quantized(group_size=64, bits=int(kind[1])) for layer in cache]
            caches.save_prompt_cache(str(out / f"mlx-{name}-{kind}.safetensors"), cache,
                                     {"model": "smollm2", "tokenizer_config": "{}"})  # fmt: skip


def main() -> None:
    if sys.argv[1] == "fixtures":
        fixtures(sys.argv[2], Path(sys.argv[3]))
        return
    import mlx.core as mx
    from mlx_lm import load
    from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache

    mode, job = sys.argv[1], json.loads(Path(sys.argv[2]).read_text())
    model, _ = load(job["model"])
    if job["dtype"] == "F32":
        model.set_dtype(mx.float32)
    mx.eval(model.parameters())

    def step(ids: list[int], cache: Any) -> int:
        logits = model(mx.array([ids]), cache=cache)[0, -1]
        return int(mx.argmax(logits).item())

    def prefill(ids: list[int]) -> Any:
        cache = make_prompt_cache(model)
        model(mx.array([ids]), cache=cache)
        mx.eval([layer.state[:2] for layer in cache])
        return cache

    step([1, 2, 3], make_prompt_cache(model))
    results = {}
    for name, ids in job["prompts"].items():
        file = str(Path(job["folder"]) / f"{name}.safetensors")
        begin, busy = time.perf_counter(), time.process_time()
        if mode == "capture":
            cache = prefill(ids[:-1])
            elapsed, worked = time.perf_counter() - begin, time.process_time() - busy
            save_prompt_cache(file, cache, {"model": job["model"], "tokenizer_config": "{}"})
            begin, busy = time.perf_counter() - elapsed, time.process_time() - worked
        else:
            cache = load_prompt_cache(file)
        held = int(cache[0].offset)
        tokens = [step(ids[held:], cache)]
        first, worked = time.perf_counter() - begin, time.process_time() - busy
        while len(tokens) < job["new_tokens"]:
            tokens.append(step(tokens[-1:], cache))
        results[name] = {"tokens": tokens, "seconds_to_first": first, "cpu_seconds_to_first": worked, "held": held}
    Path(job["result"]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
