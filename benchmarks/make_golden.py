"""Make the golden archives of ``fixtures/golden`` and the index of broken ones in ``fixtures/broken``.

Usage: python -m benchmarks.make_golden [--dumps FOLDER] [--check]

A number that exists is never written again: golden archives are frozen, so that later versions are held to them.
`--check` writes nothing: it makes every archive anew and tells which would differ on this machine.

A golden folder holds the dumps that went in (``inputs``, unless another one has the same), the archive, and
``case.json``: the steps that made it and the SHA-256 of each decoded dump and of its tensors. If a profile was used, it
is there too, and so are the decoded dumps.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import pltpack
from benchmarks import broken
from benchmarks.golden_cases import CASES
from benchmarks.golden_sessions import RealDumps
from benchmarks.golden_steps import PROFILE, Case, Step, run
from pltpack.dumps import open_dumps, write_dump
from pltpack.names import session_to_file

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "fixtures" / "golden"


def build(case: Case, folder: Path) -> None:
    """Write a golden folder."""
    inputs = {snapshot.session: snapshot for step in case.steps for snapshot in step.sessions}
    if case.inputs is None:
        write_dump(list(inputs.values()), folder / "inputs", "safetensors")
    external = any(step.options.get("profile") == "external" for step in case.steps)
    if case.profile is not None and case.inputs is None and not external:
        (folder / PROFILE).write_bytes(case.profile)
    run(case, folder / "archive")
    if case.profile is not None:
        # Values of a calibrated codec are held to a tolerance, not to a digest.
        pltpack.decompress(folder / "archive", folder / "decoded")
    (folder / "archive" / ".lock").unlink(missing_ok=True)
    steps = [
        {"command": step.command, "sessions": [s.session for s in step.sessions], "options": step.options}
        for step in case.steps
    ]
    description = {
        "title": case.title,
        "references": case.references,
        "inputs": case.inputs,
        "steps": steps,
        "sessions": decoded_digests(folder / "archive"),
    }
    if case.free:
        description["free"] = True
    (folder / "case.json").write_text(json.dumps(description, indent=1, sort_keys=True) + "\n")


def load(folder: Path) -> Case:
    """The case of a golden folder, its sessions read from ``inputs``."""
    description = json.loads((folder / "case.json").read_text())
    place = GOLDEN / description["inputs"] if description["inputs"] else folder
    inputs, profile = place / "inputs", place / PROFILE
    profile = profile if profile.exists() else place / "archive" / PROFILE
    steps = []
    for step in description["steps"]:
        paths = [inputs / f"{session_to_file(name)}.safetensors" for name in step["sessions"]]
        sessions = tuple(open_dumps(paths)) if paths else ()
        steps.append(Step(step["command"], sessions, step["options"]))
    found = profile.read_bytes() if profile.exists() else None
    free = description.get("free", False)
    return Case(description["title"], steps, description["references"], description["inputs"], found, free)


def decoded_digests(archive: Path) -> dict[str, Any]:
    """Per session: its dump's file name and SHA-256, and the SHA-256 of each tensor."""
    out = {}
    with tempfile.TemporaryDirectory() as temp:
        pltpack.decompress(archive, Path(temp) / "out")
        with pltpack.open(archive) as opened:
            for session in opened.sessions:
                name = f"{session_to_file(session)}.safetensors"
                snapshot = opened.read(session)
                tensors = {"tokens": _digest(np.ascontiguousarray(snapshot.tokens, "<i4"))}
                for index in range(len(snapshot.identity.layers)):
                    keys, values = snapshot.layer(index)
                    tensors[f"layers.{index}.keys"] = _digest(keys)
                    tensors[f"layers.{index}.values"] = _digest(values)
                data = (Path(temp) / "out" / name).read_bytes()
                out[session] = {"file": name, "sha256": hashlib.sha256(data).hexdigest(), "tensors": tensors}
    return out


def _digest(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def difference(a: Path, b: Path) -> str | None:
    """The first file that two folders do not have in common, byte by byte."""
    names = {path.relative_to(root).as_posix() for root in (a, b) for path in root.rglob("*") if path.is_file()}
    for name in sorted(names):
        if not ((a / name).is_file() and (b / name).is_file() and (a / name).read_bytes() == (b / name).read_bytes()):
            return name
    return None


def make(number: str, real: RealDumps, check: bool) -> str:
    """Make one golden archive, unless it is there; returns what was done."""
    target = GOLDEN / number
    with tempfile.TemporaryDirectory() as temp:
        again = Path(temp) / "again"
        if target.exists():
            if check:
                build(load(target), again)
                found = difference(again, target)
                return f"would differ here: {found}" if found else "same here"
            return "frozen"
        if check:
            return "missing"
        case = CASES[number](real)
        build(case, Path(temp) / "new")
        # What one machine does not make twice cannot be held against another.
        build(load(Path(temp) / "new"), again)
        found = difference(Path(temp) / "new", again)
        if found:
            raise SystemExit(f"{number}: {found} differs when made from its inputs again")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(Path(temp) / "new", target)
    return f"made, {sum(path.stat().st_size for path in target.rglob('*') if path.is_file())} bytes"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dumps", type=Path, default=ROOT / ".cache" / "sessions" / "dumps", help="real dumps")
    parser.add_argument("--check", action="store_true", help="write nothing, tell what would differ")
    arguments = parser.parse_args()
    real = RealDumps(arguments.dumps)
    for number in CASES:
        print(f"{number}: {make(number, real, arguments.check)}", flush=True)
    if not arguments.check:
        print(f"broken: {broken.write_index(GOLDEN, ROOT / 'fixtures' / 'broken')}")


if __name__ == "__main__":
    sys.exit(main())
