"""The short files that real engines wrote (fixtures/engines), and what is known of their model."""

from __future__ import annotations

import json
from pathlib import Path

import zstandard

from pltpack.snapshot import Identity, LayerGeometry

FOLDER = Path(__file__).parent.parent / "fixtures" / "engines"
#: What the files hold caches of.
TOKENS = [504, 3575, 282, 260, 6330, 314, 260, 3575, 30, 504, 6330, 30]
HALF = {"type": "default", "theta": 100000.0, "dim": 64, "style": "half"}
#: As its transformers folder gives it, and as its GGUF file does.
MODEL = Identity("smollm2", rope=HALF, keys="rotated", layers=(LayerGeometry(3, 64, 64, "F16"),) * 30)
GGUF = Identity("smollm2", rope={**HALF, "style": "interleaved", "permuted": True}, keys="rotated", layers=MODEL.layers)


def unpacked(name: str, folder: Path) -> Path:
    """A fixture in a folder, its tokens beside it."""
    file = folder / name
    file.write_bytes(zstandard.decompress((FOLDER / f"{name}.zst").read_bytes()))
    (folder / f"{name}.tokens.json").write_text(json.dumps(TOKENS))
    return file
