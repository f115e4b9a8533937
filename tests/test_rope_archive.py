"""Archives of models with the rotary embeddings that version 1.2 adds, and those that earlier versions made of them."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest
from archives import K_DIM, equal_bits, session

import pltpack
from pltpack.archive import embeddings
from pltpack.codec import rope
from pltpack.errors import UnsupportedError
from pltpack.snapshot import Snapshot

sys.path.append(str(Path(__file__).parents[1] / "spec"))
import reference_decoder

YARN = {"type": "yarn", "theta": 10000.0, "factor": 8.0, "original_max_position": 64, "style": "half"}
TYPES = {
    "yarn": YARN,
    "dynamic": {"type": "dynamic", "theta": 10000.0, "factor": 4.0, "original_max_position": 64, "length": 200},
    "longrope": {
        "type": "longrope", "theta": 10000.0, "original_max_position": 64, "length": 200,
        "short_factor": [1.0] * (K_DIM // 2), "long_factor": [1.0 + i for i in range(K_DIM // 2)],
    },
    "default": {"type": "default", "theta": 10000.0},
}  # fmt: skip
IDS = np.random.default_rng(0).integers(0, 500, 200)


def rotated(name: str, ids: np.ndarray, parameters: dict) -> Snapshot:
    """A session whose keys turn as the parameters say."""
    plain = session(name, ids)
    layers = []
    turn = rope.Rotation.of(parameters, "rotated", K_DIM)
    for layer in range(len(plain.identity.layers)):
        keys, values = plain.layer(layer)
        # Slow channels with an offset, as models have them: what un-rotation lays bare.
        keys = turn.rotate(0.1 * keys.astype(np.float32) + 4 * np.sin(np.arange(K_DIM, dtype=np.float32)), 0)
        layers.append((keys.astype(values.dtype), values))
    return Snapshot.from_arrays(name, ids, layers, dataclasses.replace(plain.identity, rope=parameters))


def minors(path: Path) -> list[int]:
    with pltpack.open(path) as archive:
        return [library.minor for library in archive.libraries]


def read(path: Path, name: str) -> Snapshot:
    with pltpack.open(path) as archive:
        found = archive.read(name)
        layers = [found.layer(layer) for layer in range(len(found.identity.layers))]
        return Snapshot.from_arrays(name, found.tokens, layers, found.identity)


def key_error(given: Snapshot, found: Snapshot) -> float:
    keys, other = (x.layer(1)[0].astype(np.float64) for x in (given, found))
    return float(np.sqrt(np.square(keys - other).mean() / np.square(keys).mean()))


def check_reference(path: Path, out: Path, *names: str) -> None:
    assert reference_decoder.main([str(path), str(out)]) == 0
    for name in names:
        (other,) = pltpack.open_dumps([out / f"{name}.safetensors"])
        assert equal_bits(read(path, name), other)


@pytest.mark.parametrize("kind", TYPES)
def test_keys_are_coded_without_their_embedding(kind: str, tmp_path: Path) -> None:
    given = rotated("s", IDS, TYPES[kind])
    pltpack.compress([given], tmp_path / "archive", quality="q2")
    assert minors(tmp_path / "archive") == [0 if kind == "default" else 2]
    check_reference(tmp_path / "archive", tmp_path / "out", "s")
    # As if the embedding were unknown: the same keys, not laid bare.
    unknown = dataclasses.replace(given, identity=dataclasses.replace(given.identity, rope={**TYPES[kind], "theta": 0}))
    pltpack.compress([unknown], tmp_path / "unknown", quality="q2")
    errors = [key_error(given, read(tmp_path / name, "s")) for name in ("archive", "unknown")]
    assert errors[0] < 0.6 * errors[1]


@pytest.mark.parametrize("kind", TYPES)
def test_lossless_archives_need_no_new_version(kind: str, tmp_path: Path) -> None:
    given = rotated("s", IDS, TYPES[kind])
    pltpack.compress([given], tmp_path / "archive", quality="lossless")
    assert minors(tmp_path / "archive") == [0]
    assert equal_bits(given, read(tmp_path / "archive", "s"))


@pytest.fixture
def former(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Snapshot]:
    """An archive as writers made it that did not know the type, and what they read from it."""
    given = [rotated("s", IDS, YARN), rotated("t", np.concatenate([IDS[:64], IDS[100:150]]), YARN)]
    with monkeypatch.context() as patch:
        patch.delitem(rope._KINDS, "yarn")
        patch.setattr(embeddings, "_ADDED", ())
        rope._shared.cache_clear()
        pltpack.compress(given, tmp_path / "former", quality="q2")
        found = read(tmp_path / "former", "s")
    rope._shared.cache_clear()
    return tmp_path / "former", found


def test_archives_of_earlier_versions_are_read_as_they_were_made(former: tuple[Path, Snapshot], tmp_path: Path) -> None:
    path, found = former
    assert minors(path) == [0]
    assert equal_bits(found, read(path, "s"))
    check_reference(path, tmp_path / "out", "s", "t")
    # The present writer goes on with the codec state that is there.
    pltpack.append(path, [rotated("u", np.concatenate([IDS[:150], IDS[:30]]), YARN)])
    assert set(minors(path)) == {0}
    check_reference(path, tmp_path / "more", "s", "t", "u")
    pltpack.compact(path)
    assert minors(path) == [0]
    assert equal_bits(found, read(path, "s"))


def test_segments_that_differ_in_it_are_not_merged(former: tuple[Path, Snapshot], tmp_path: Path) -> None:
    path, found = former
    pltpack.append(path, [rotated("u", IDS[50:], YARN)], quality="q3")
    assert sorted(minors(path)) == [0, 2]
    check_reference(path, tmp_path / "out", "s", "t", "u")
    with pytest.raises(UnsupportedError, match="'yarn' were coded without it, and cannot become one"):
        pltpack.compact(path)
    assert equal_bits(found, read(path, "s"))
