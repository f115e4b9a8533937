"""Make the encrypted golden archive of ``fixtures/encrypted``: as others, but never the same bytes twice.

Usage: python -m benchmarks.encrypted_golden

What exists is never written again. ``key`` is its key, in hexadecimal; ``case.json`` says what it decodes to.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path

import numpy as np

import pltpack
from pltpack.format.sealing import using_key
from pltpack.snapshot import Identity, Snapshot

FOLDER = Path(__file__).parents[1] / "fixtures" / "encrypted"
KEY = hashlib.sha256(b"a key for tests, known to everybody").digest()


def session(name: str, tokens: list[int], salt: str | None = None) -> Snapshot:
    """Values that follow from the tokens."""
    ids = np.array(tokens, np.int32)
    rng = np.random.default_rng(3)
    table = rng.standard_normal((2, 2, 64, 8)).astype(np.float16)
    layers = [(table[layer, 0][ids % 64][None], table[layer, 1][ids % 64][None]) for layer in range(2)]
    return Snapshot.from_arrays(name, ids, layers, Identity(model="toy", salt=salt))


def main() -> None:
    if FOLDER.exists():
        print("frozen")
        return
    text = [(7 * i) % 50 for i in range(80)]
    with using_key(KEY), tempfile.TemporaryDirectory() as temp:
        archive = FOLDER / "archive"
        first = [session("a", text), session("b", [*text[:64], 1, 2, 3]), session("c", text, "tenant")]
        pltpack.compress(first, archive, quality="lossless", encrypt=True, block=8)
        pltpack.append(archive, [session("d", [*text[:40], 9, 8])], quality="q4")
        (archive / ".lock").unlink(missing_ok=True)
        files = pltpack.decompress(archive, Path(temp) / "out")
        digests = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    (FOLDER / "key").write_text(KEY.hex() + "\n")
    (FOLDER / "case.json").write_text(json.dumps(digests, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
