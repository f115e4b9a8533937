"""Broken archives: each recipe breaks one rule of spec/format.md or spec/codecs.md in a golden archive.

Digests and checksums are recomputed (`benchmarks.surgery`) unless they are what is broken, so that a reader gets to the
broken rule. The index in ``fixtures/broken`` holds the error that each must give; some are stored as archives there.
"""

from __future__ import annotations

import importlib
import json
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pltpack
from benchmarks.surgery import Surgery
from pltpack.errors import FormatError, PltpackError, UnsupportedError

Recipe = Callable[[Surgery], Any]

BASES = {
    "lossless": "034-small-lossless", "group": "035-small-q4", "turboquant": "036-small-turboquant-2",
    "symbols": "006-lossless-bf16", "transform": "047-small-transform",
    "near-lossless": "048-near-lossless", "near-group": "050-near-q4", "near-transform": "052-near-transform",
}  # fmt: skip
#: Recipe name -> (base, what breaks it).
RECIPES: dict[str, tuple[str, Recipe]] = {}
#: Recipes that are stored as archives too.
STORED = (
    "manifest-checksum", "manifest-path-parent", "manifest-version", "library-missing", "shard-cut", "head-flip",
    "payload-flip", "header-long", "tensor-hole", "tensor-overlap", "unit-order", "unit-flag", "run-outside",
    "run-tokens", "node-parent", "state-codec", "group-step", "reference-outside", "transform-groups-overlap",
    "profile-digest", "profile-cut", "transform-class", "prediction-uncovered", "prediction-rope-unknown",
)  # fmt: skip


def recipe(name: str, base: str = "lossless") -> Callable[[Recipe], Recipe]:
    """Register a recipe."""

    def register(function: Recipe) -> Recipe:
        assert name not in RECIPES
        RECIPES[name] = (base, function)
        return function

    return register


def load_recipes() -> dict[str, tuple[str, Recipe]]:
    """All recipes."""
    for part in ("manifest", "files", "tables", "predictions", "transform", "near"):
        importlib.import_module(f"benchmarks.broken_{part}")
    return RECIPES


def make(name: str, golden: Path, folder: Path) -> None:
    """Break a golden archive by a recipe; `folder` must not exist."""
    base, function = load_recipes()[name]
    surgery = Surgery(golden / BASES[base] / "archive")
    function(surgery)
    surgery.save(folder)


def error_of(archive: Path) -> PltpackError:
    """The error that a full read of an archive gives."""
    try:
        pltpack.verify(archive)
    except (FormatError, UnsupportedError) as error:
        return error
    raise AssertionError(f"{archive} was read without an error")


def write_index(golden: Path, folder: Path) -> str:
    """Write the index of ``fixtures/broken``, and store what is to be stored there and is not yet."""
    folder.mkdir(parents=True, exist_ok=True)
    index, added = {}, 0
    for name, (base, _) in load_recipes().items():
        with tempfile.TemporaryDirectory() as temp:
            archive = Path(temp) / "archive"
            make(name, golden, archive)
            error = error_of(archive)
            assert error.path is not None
            index[name] = {
                "base": BASES[base],
                "file": Path(error.path).relative_to(archive).as_posix(),
                # What follows depends on the codecs that are installed and on the version of Python.
                "error": re.split(r" \(known: |: \w+\.__init__", error.fact)[0],
                "stored": name in STORED,
            }
            if name in STORED and not (folder / name).exists():
                shutil.copytree(archive, folder / name)
                added += 1
    (folder / "index.json").write_text(json.dumps(index, indent=1, sort_keys=True) + "\n")
    return f"{len(index)} recipes, {added} of them newly stored"
