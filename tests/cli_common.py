"""Small dumps, and two ways to run the command line: in this process and in its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from click.testing import CliRunner, Result
from safetensors.numpy import save_file

from pltpack_cli.main import program

IDENTITY = {
    "model": "toy",
    "rope": {"type": "default", "theta": 10000.0, "dim": 8, "style": "half"},
    "keys": "rotated",
}
LAYERS, HEADS, DIM = 3, 2, 8
PREFIX, LENGTHS = 64, {"alpha": 80, "beta": 100, "gamma": 40}


def write_dump(folder: Path, name: str, tokens: np.ndarray, seed: int, identity: dict[str, Any]) -> Path:
    """A dump with one session; equal tokens from position 0 have equal values."""
    tensors = {"tokens": tokens.astype(np.int32)}
    for layer in range(LAYERS):
        for part, kind in enumerate(("keys", "values")):
            columns = [
                np.random.default_rng([int(token), t, layer, part, 0 if t < PREFIX else seed]).normal(size=(HEADS, DIM))
                for t, token in enumerate(tokens)
            ]
            tensors[f"layers.{layer}.{kind}"] = np.stack(columns, axis=1).astype(ml_dtypes.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.safetensors"
    save_file(tensors, path, {"pltpack.dump": "1", "session": name, "identity": json.dumps(identity)})
    return path


def write_dumps(folder: Path, identity: dict[str, Any] | None = None) -> Path:
    """Two sessions with a common prefix of 64 tokens, and one alone."""
    for seed, (name, length) in enumerate(LENGTHS.items(), start=1):
        own = np.random.default_rng(seed).integers(0, 1000, length)
        common = np.random.default_rng(0 if name != "gamma" else 9).integers(0, 1000, PREFIX)
        write_dump(folder, name, np.concatenate([common, own])[:length], seed, identity or IDENTITY)
    return folder


def run(*args: object) -> Result:
    return CliRunner().invoke(program, [str(arg) for arg in args], prog_name="pltpack")


def done(*args: object) -> str:
    result = run(*args)
    assert result.exit_code == 0, result.output
    return result.stdout


def done_json(*args: object) -> dict[str, Any]:
    data = json.loads(done(*args, "--json"))
    assert isinstance(data, dict)
    return data


def start(*args: object, code: str | None = None, **options: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, *(["-c", code] if code else ["-m", "pltpack_cli"]), *(str(arg) for arg in args)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    return subprocess.Popen(command, **options)
