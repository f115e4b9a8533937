"""Real engines, cold and warm: caches captured, compressed, and started from again in a new process.

For each engine: 8 prompts that share their first 300 tokens are run cold and their caches saved; these become archives
of the tiers `lossless` and `balanced`; and a new process starts from what the archive gives back. Reported per tier:
whether the first token and a greedy continuation of 32 tokens equal the cold ones, and how many times sooner the first
token comes (model loaded in both; decoding the archive is counted as part of the warm start, opening and preparing it
is not: a serving process does that once, as it loads its model, and it is reported as `prepare_seconds`).

One module per engine, ``benchmarks/engines_<name>.py`` with dashes and dots as underscores: a program that the engine's
own interpreter runs, `capture` and `warm` (see `engines_mlx`), and is told by a row of `ENGINES` here how its files are
read and written; or, for engines that load archives themselves, a module with a function ``run(options) -> dict``.

Usage: python -m benchmarks.engines [--engine NAME]... [--sessions 8] [--profile FILE] [--python NAME=PATH]...
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pltpack
from benchmarks import model as models
from benchmarks.engines_vllm import real_prompts
from pltpack.dumps.model_config import model_identity
from pltpack.snapshot import Identity

ROOT = Path(__file__).parent.parent
PREFIX, NEW, BLOCK = 300, 32, 32


@dataclasses.dataclass(frozen=True)
class FileEngine:
    """An engine that saves and loads a file per prompt.

    Attributes
    ----------
    format : str
        Its dump format.
    suffix : str
        Of its files.
    packages : tuple of str
        What its interpreter needs, for pip.
    read, write : dict
        Options of the format.
    dtype : str
        What its cache is kept in.
    """

    format: str
    suffix: str
    packages: tuple[str, ...]
    read: dict[str, str]
    write: dict[str, str]
    dtype: str


ENGINES: dict[str, FileEngine | None] = {
    "llama.cpp": FileEngine("llama.cpp", ".bin", ("llama-cpp-python==0.3.36",), {"keys": "half"}, {"arch": "llama"},
                            "f16"),
    "mlx": FileEngine("mlx", ".safetensors", ("mlx==0.32.4", "mlx[cpu]==0.32.4", "mlx-lm==0.32.2"), {}, {}, "F32"),
    "transformers": None,
    "vllm": None,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Options:
    """What one engine's run gets: prompts by session, the model's folder, a profile or None, a place to work in."""

    prompts: dict[str, list[int]]
    model: Path
    gguf: Path
    profile: Path | None
    python: str
    work: Path
    new_tokens: int = NEW
    threads: int = 2


def module_name(engine: str) -> str:
    """``benchmarks.engines_<name>``."""
    return "engines_" + engine.replace(".", "_").replace("-", "_")


def tiers(profile: Path | None) -> list[tuple[str, dict[str, Any]]]:
    """Tiers to run, and what `pltpack.compress` needs for each."""
    rows: list[tuple[str, dict[str, Any]]] = [("lossless", {})]
    return rows if profile is None else [*rows, ("balanced", {"profile": profile})]


def compared(
    cold: dict[str, Any], warm: dict[str, Any], extra: dict[str, float], work: dict[str, float]
) -> dict[str, Any]:
    """Agreement of warm starts with cold ones, and the ratio of their times to the first token.

    Both in wall time and in CPU seconds of all threads: on a busy machine the latter are what can be compared. `extra`
    and `work` are what decoding to a file took, in wall and CPU seconds.
    """
    names = list(cold)
    ratios = [cold[n]["seconds_to_first"] / (warm[n]["seconds_to_first"] + extra.get(n, 0.0)) for n in names]
    cpu = "cpu_seconds_to_first"
    less = sorted(cold[n][cpu] / (warm[n][cpu] + work.get(n, 0.0)) for n in names)
    return {
        "sessions": len(names),
        "first_equal": sum(cold[n]["tokens"][0] == warm[n]["tokens"][0] for n in names),
        "all_equal": sum(cold[n]["tokens"] == warm[n]["tokens"] for n in names),
        "cold_seconds": sorted(cold[n]["seconds_to_first"] for n in names)[len(names) // 2],
        "warm_seconds": sorted(warm[n]["seconds_to_first"] + extra.get(n, 0.0) for n in names)[len(names) // 2],
        "times_sooner": sorted(ratios)[len(ratios) // 2],
        "times_sooner_least": min(ratios),
        "cpu_times_less": less[len(names) // 2],
        "cpu_times_less_least": less[0],
    }


def run_file_engine(name: str, engine: FileEngine, options: Options) -> dict[str, Any]:
    """Capture, compress, restore and warm-start one engine by files."""
    dumps, identity = options.work / "dumps", _identity(name, options)
    cold = worker(name, engine, "capture", dumps, options)
    for session, ids in options.prompts.items():
        (dumps / f"{session}{engine.suffix}.tokens.json").write_text(json.dumps(ids[:-1]))
    results: dict[str, Any] = {}
    for tier, settings in tiers(options.profile):
        archive, folder = options.work / f"archive-{tier}", options.work / f"warm-{tier}"
        folder.mkdir()
        read = {} if tier == "lossless" and name == "llama.cpp" else engine.read
        stats = pltpack.compress([dumps], archive, quality=tier, options=read, identity=identity, block=BLOCK,
                                 **settings)  # fmt: skip
        prepared, seconds, work = _warm_files(archive, name, folder, engine, options)
        warm = worker(name, engine, "warm", folder, options)
        results[tier] = {**compared(cold, warm, seconds, work), **prepared, "ratio": stats["ratio"]}
    results["prefix_only"] = _prefix_only(name, engine, options)
    return results


def _warm_files(
    archive: Path, name: str, folder: Path, engine: FileEngine, options: Options
) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """Write a file a prompt from an archive that is opened once, as who serves them would.

    Returns wall and CPU seconds of preparing the archive, and both of each file.
    """
    from pltpack.serve.engine_file import warm_file

    write = {**engine.write, "type": engine.dtype} if name == "llama.cpp" else engine.write
    target, seconds, work = _target(name, options), {}, {}
    begin, busy = time.perf_counter(), time.process_time()
    with pltpack.open(archive) as opened:
        opened.loader().prepare()
        prepared = {"prepare_seconds": time.perf_counter() - begin, "prepare_cpu_seconds": time.process_time() - busy}
        for session in options.prompts:
            begin, busy = time.perf_counter(), time.process_time()
            warm_file(opened, engine.format, folder / f"{session}{engine.suffix}", session=session, options=write,
                      target=target)  # fmt: skip
            seconds[session], work[session] = time.perf_counter() - begin, time.process_time() - busy
    return prepared, seconds, work


def _prefix_only(name: str, engine: FileEngine, options: Options) -> dict[str, int]:
    """Tokens that a new prompt gets which shares only the first 300 with the archive."""
    from pltpack.serve.engine_file import warm_file

    ids = [*next(iter(options.prompts.values()))[:PREFIX], *range(1000, 1032)]
    file = options.work / f"prefix{engine.suffix}"
    prompt = options.work / "prefix.json"
    prompt.write_text(json.dumps(ids))
    found = warm_file(options.work / "archive-lossless", engine.format, file, prompt=prompt,
                      options=engine.write if name != "llama.cpp" else {}, target=_target(name, options))  # fmt: skip
    return {"prompt_tokens": len(ids), "held": found["tokens"]}


def _identity(name: str, options: Options) -> Identity:
    return model_identity(options.gguf if name == "llama.cpp" else options.model)


def _target(name: str, options: Options) -> Identity:
    return _identity(name, options)


def worker(name: str, engine: FileEngine, mode: str, folder: Path, options: Options) -> dict[str, Any]:
    """Run one side of an engine in a process of its own; returns tokens and times by session."""
    folder.mkdir(exist_ok=True)
    job, result = options.work / f"{mode}.json", options.work / f"{mode}-result.json"
    job.write_text(json.dumps({
        "model": str(options.gguf if name == "llama.cpp" else _mlx_model(options)), "prompts": options.prompts,
        "folder": str(folder), "new_tokens": options.new_tokens, "result": str(result), "dtype": engine.dtype,
        "type": engine.dtype, "transposed": False, "threads": options.threads,
    }))  # fmt: skip
    program = Path(__file__).with_name(module_name(name) + ".py")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    subprocess.run([options.python, str(program), mode, str(job)], check=True, env=environment)
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def _mlx_model(options: Options) -> Path:
    """The model with its RoPE base where mlx-lm looks for it."""
    # Files name the model by its folder, which an identity must agree with.
    folder = options.work / "models" / options.model.resolve().name
    if not folder.exists():
        shutil.copytree(options.model, folder)
        config = json.loads((folder / "config.json").read_text())
        config["rope_theta"] = config["rope_parameters"]["rope_theta"]
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def ensure_python(name: str, engine: FileEngine, given: dict[str, str]) -> str:
    """An interpreter that has the engine's packages, made in ``.cache/engines`` if none is given."""
    if name in given:
        return given[name]
    folder = ROOT / ".cache" / "engines" / name
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        left_out = ("GGML_NATIVE", "LLAMA_BUILD_TESTS", "LLAMA_BUILD_EXAMPLES", "LLAMA_BUILD_SERVER",
                    "LLAMA_BUILD_TOOLS", "LLAVA_BUILD")  # fmt: skip
        flags = " ".join(f"-D{flag}=OFF" for flag in left_out)
        environment = {**os.environ, "CMAKE_ARGS": flags + " -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON"}
        command = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "-qq",
                   *engine.packages]  # fmt: skip
        subprocess.run(command, check=True, env=environment)
        (folder / "ready").touch()
    return str(python)


def ensure_gguf(folder: Path) -> Path:
    """The GGUF file of the model."""
    file = folder / models.GGUF
    if not file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            os.replace(models.download(Path(scratch)) / models.GGUF, file)
    return file


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", action="append", choices=list(ENGINES))
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--model", type=Path, default=ROOT / models.DEFAULT)
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    given = dict(pair.split("=", 1) for pair in args.python)
    folder = models.ensure(args.model)
    for name in args.engine or ENGINES:
        engine = ENGINES[name]
        with tempfile.TemporaryDirectory() as work:
            gguf = args.gguf or ensure_gguf(ROOT / ".cache" / "gguf")
            python = given.get(name, sys.executable) if engine is None else ensure_python(name, engine, given)
            options = Options(real_prompts(args.sessions), folder, gguf, args.profile, python, Path(work),
                              threads=args.threads)  # fmt: skip
            run = importlib.import_module("benchmarks." + module_name(name)).run if engine is None else None
            found = run(options) if run is not None else run_file_engine(name, engine, options)  # type: ignore[arg-type]
        print(json.dumps({"engine": name, **found}), flush=True)


if __name__ == "__main__":
    main()
