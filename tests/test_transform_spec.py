"""Layer groups and profiles as the specification has them: versions, places of a profile, and the reference decoder."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pltpack
from benchmarks import golden_profiles
from benchmarks.golden_profiles import drawn_profile, far_apart, header_of, save_profile
from benchmarks.golden_sessions import Shape, drawn, ids
from pltpack.archive.profiles import digest
from pltpack.archive.segments import fresh
from pltpack.codec import registry
from pltpack.codec.base import Codec, KeyValue, Unit
from pltpack.dumps import open_dumps
from pltpack.errors import IdentityError, NotFoundError
from pltpack.snapshot import DTYPES, Snapshot

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "fixtures" / "golden"

sys.path.append(str(ROOT / "spec"))
import reference_decoder  # noqa: E402
import reference_numbers  # noqa: E402
import reference_profile  # noqa: E402
import reference_transform  # noqa: E402


def versions(archive: Path) -> dict[str, str]:
    """Format version of each container, by the end of its name."""
    with pltpack.open(archive) as opened:
        segments = [*opened.libraries, *map(opened.shard, opened.sessions)]
        return {segment.container.path.name: segment.container.metadata["format_version"] for segment in segments}


def test_units_of_moved_scales_make_version_1_3_wherever_they_go(tmp_path):
    archive = tmp_path / "archive"
    shutil.copytree(GOLDEN / "062-transform-scaled" / "archive", archive)
    before = versions(archive)
    assert before["loud.pltshard"] == "1.3"
    pltpack.export_session(archive, "loud", tmp_path / "loud.pltsession")
    pltpack.import_session(tmp_path / "other", tmp_path / "loud.pltsession")
    pltpack.compact(archive)
    for path in (archive, tmp_path / "other"):
        found = versions(path)
        (name,) = (name for name in found if name.startswith("loud"))
        assert found[name] == "1.3"
        reference_decoder.decode(path, tmp_path / path.name / "decoded")


def test_only_containers_with_layer_groups_or_profiles_are_of_version_1_1(tmp_path):
    found = versions(GOLDEN / "045-transform-append" / "archive")
    assert found.pop("third.pltshard") == "1.0"
    exact = [name for name, version in found.items() if version == "1.0"]
    assert exact == ["library-000003.pltlib"], "the segment that the lossless session brought"
    assert set(found.values()) == {"1.0", "1.1"}
    assert set(versions(GOLDEN / "046-transform-compacted" / "archive").values()) == {"1.0", "1.1"}
    for folder in GOLDEN.iterdir():
        body = json.loads((folder / "archive" / "MANIFEST.json").read_bytes())["body"]
        assert body["version"] == [1, 0]
        found = set(versions(folder / "archive").values())
        if json.loads((folder / "case.json").read_text()).get("free"):
            assert "1.2" in found, "what predicts is of version 1.2"
        elif not (folder / "decoded").exists():
            assert found <= {"1.0"}


def test_a_compacted_archive_holds_a_profile_once(tmp_path):
    shutil.copytree(GOLDEN / "045-transform-append" / "archive", tmp_path / "archive")
    before = {name: _session(tmp_path / "archive", name) for name in ("first", "second", "third")}
    pltpack.compact(tmp_path / "archive")
    pltpack.compact(tmp_path / "archive")
    with pltpack.open(tmp_path / "archive") as archive:
        (library,) = archive.libraries
        profiles = [index for index in range(len(library.states)) if library.profile_digest(index)]
        assert len(profiles) == 2
        assert sorted(map(library.embeds, profiles)) == [False, True]
        assert len({library.profile_digest(index) for index in profiles}) == 1
        for name, expected in before.items():
            assert far_apart(archive.read(name), expected, golden_profiles.exact_mask(archive, name)) is None


def _session(archive: Path, name: str) -> Snapshot:
    with pltpack.open(archive) as opened:
        return opened.read(name)


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """The golden archive of an external profile, and the profile in another place."""
    monkeypatch.delenv("PLTPACK_PROFILE_PATH", raising=False)
    shutil.copytree(GOLDEN / "040-transform-external" / "archive", tmp_path / "archive")
    (tmp_path / "away").mkdir()
    (tmp_path / "archive" / "profile.safetensors").rename(tmp_path / "away" / "p.safetensors")
    return tmp_path / "archive", tmp_path / "away" / "p.safetensors"


def test_an_external_profile_is_looked_for_in_three_places(outside, tmp_path, monkeypatch, capsys):
    archive, profile = outside
    with pltpack.open(archive) as opened, pytest.raises(NotFoundError, match="is not found"):
        opened.read("first")
    assert reference_decoder.main([str(archive), str(tmp_path / "none")]) == 2
    assert "is not found" in capsys.readouterr().err
    assert reference_decoder.main([str(archive), str(tmp_path / "given"), str(profile)]) == 0
    with pltpack.open(archive, profile=profile) as opened:
        given = opened.read("first")
    monkeypatch.setenv("PLTPACK_PROFILE_PATH", f"{tmp_path / 'nowhere'}:{profile.parent}")
    assert reference_decoder.main([str(archive), str(tmp_path / "path")]) == 0
    found = _session(archive, "first")
    for layer in range(3):
        for a, b in zip(given.layer(layer), found.layer(layer), strict=True):
            assert a.tobytes() == b.tobytes()
    assert (tmp_path / "path" / "first.safetensors").read_bytes() == (
        tmp_path / "given" / "first.safetensors").read_bytes()  # fmt: skip


def test_another_profile_is_refused(outside, tmp_path, capsys):
    archive, _ = outside
    session = next(iter(open_dumps([GOLDEN / "040-transform-external" / "inputs" / "first.safetensors"])))
    other = tmp_path / "other.safetensors"
    save_profile(other, drawn_profile(session, layer_group=1, seed=9), session)
    with pltpack.open(archive, profile=other) as opened, pytest.raises(IdentityError):
        opened.read("first")
    assert reference_decoder.main([str(archive), str(tmp_path / "out"), str(other)]) == 2
    assert "another one" in capsys.readouterr().err


def test_a_session_file_of_an_external_profile_decodes_alone(outside, tmp_path, monkeypatch):
    archive, profile = outside
    monkeypatch.setenv("PLTPACK_PROFILE_PATH", str(profile.parent))
    expected = _session(archive, "first")
    pltpack.export_session(archive, "first", tmp_path / "first.pltsession")
    monkeypatch.delenv("PLTPACK_PROFILE_PATH")
    pltpack.import_session(tmp_path / "imported", tmp_path / "first.pltsession")
    assert set(versions(tmp_path / "imported").values()) == {"1.1"}
    mine = _session(tmp_path / "imported", "first")
    assert all(a.tobytes() == b.tobytes() for layer in range(3)
               for a, b in zip(mine.layer(layer), expected.layer(layer), strict=True))  # fmt: skip


# --- the reference decoder, unit by unit ------------------------------------------------------------------------


def both(codec: Codec, arrays: dict[str, np.ndarray], session: Snapshot, unit: Unit, payload: bytes,
         reference: list[KeyValue] | None = None) -> tuple[Snapshot, Snapshot, np.ndarray]:  # fmt: skip
    """What package and reference decoder make of a payload, and which tokens are exact."""
    identity = session.identity
    mine = [fresh(geometry, unit.tokens) for geometry in unit.layers]
    codec.decode_span(memoryview(payload), unit, mine, reference)
    units = [
        reference_numbers.Unit(unit.layer + i, g.heads, g.k_dim, g.v_dim, g.dtype, unit.tokens, unit.position)
        for i, g in enumerate(unit.layers)
    ]
    words = None if reference is None else [tuple(p.view(f"u{p.itemsize}") for p in pair) for pair in reference]
    other = reference_transform.Transform({}, arrays, identity.to_json()).decode(payload, units, words)
    theirs = [(k.view(a.dtype), v.view(b.dtype)) for (k, v), (a, b) in zip(other, mine, strict=True)]
    exact = np.zeros((len(mine), unit.tokens), bool)
    exact[:, header_of(payload, unit.tokens)[1]] = True
    tokens = session.tokens[unit.position : unit.position + unit.tokens]
    made = [Snapshot.from_arrays("s", tokens, found, identity) for found in (mine, theirs)]
    return made[0], made[1], exact


def started(arrays: dict[str, np.ndarray], session: Snapshot, step: float) -> Codec:
    codec = registry.codec("transform", {"step": step})
    codec.start(arrays, session.identity)
    return codec


def unit_of(session: Snapshot, start: int, stop: int) -> tuple[Unit, list[KeyValue]]:
    layers = session.identity.layers
    return (
        Unit(0, layers[0], start, stop - start, 0, layers),
        [tuple(map(np.ascontiguousarray, session.layer(layer, start, stop))) for layer in range(len(layers))],
    )


@settings(deadline=None, max_examples=15)
@given(
    st.lists(st.tuples(st.integers(1, 2), st.integers(1, 6), st.integers(1, 5)), min_size=1, max_size=3),
    st.lists(st.sampled_from(sorted(DTYPES)), min_size=3, max_size=3),
    st.integers(0, 30),
    st.integers(0, 8),
    st.integers(1, 12),
    st.floats(0.002, 8),
)
def test_both_decoders_agree_on_any_geometry(shapes, dtypes, rank, start, count, step):
    parts = [drawn("s", ids(20), layers=tuple(shapes), dtype=dtype) for dtype in dtypes]
    session = Snapshot.from_arrays("s", ids(20), [parts[i].layer(i) for i in range(len(shapes))], parts[0].identity)
    arrays = drawn_profile(session, layer_group=len(shapes), rank=rank)
    codec = started(arrays, session, step)
    unit, values = unit_of(session, start, start + count)
    values[0][1][0, 0, 0] = np.nan
    mine, theirs, exact = both(codec, arrays, session, unit, codec.encode_span(unit, values))
    assert exact[:, 0].all()
    assert far_apart(mine, theirs, exact) is None
    for layer, pair in enumerate(values):
        for array, given_ in zip(mine.layer(layer), pair, strict=True):
            assert array[:, exact[layer]].tobytes() == given_[:, exact[layer]].tobytes()


def test_escapes_and_low_bits_mean_the_same_to_both():
    session = drawn("s", ids(30), layers=((2, 6, 4), (1, 4, 4)), dtype="F32")
    arrays = drawn_profile(session)
    # Far larger than the profile expects: symbols do not reach.
    values = [tuple(np.ascontiguousarray(part * np.float32(40)) for part in session.layer(i)) for i in range(2)]
    loud = Snapshot.from_arrays("s", session.tokens, values, session.identity)
    codec = started(arrays, session, 0.01)
    unit, values = unit_of(loud, 4, 30)
    payload = codec.encode_span(unit, values)
    _, exact, _ = header_of(payload, unit.tokens)
    _, escapes, low = np.frombuffer(payload, "<u4", 3, 5 + 2 * len(exact) + 13).tolist()
    assert escapes > 10
    assert low > 100
    mine, theirs, mask = both(codec, arrays, session, unit, payload)
    assert far_apart(mine, theirs, mask) is None
    assert all(np.abs(a - b).max() < 1 for i in range(2) for a, b in zip(mine.layer(i), values[i], strict=True))


def test_a_reference_takes_the_place_of_the_mean():
    shapes: tuple[Shape, ...] = ((2, 6, 4),)
    session, other = drawn("s", ids(20), layers=shapes), drawn("s", ids(20), layers=shapes, noise=1)
    arrays = drawn_profile(session, layer_group=1)
    codec = started(arrays, session, 0.5)
    unit, values = unit_of(session, 5, 20)
    _, reference = unit_of(other, 5, 20)
    reference[0][0][1, 3, 2] = np.inf
    payload = codec.encode_span(unit, values, reference)
    assert payload[0] == 1
    assert len(payload) < 0.8 * len(codec.encode_span(unit, values))
    mine, theirs, exact = both(codec, arrays, session, unit, payload, reference)
    assert far_apart(mine, theirs, exact) is None
    with pytest.raises(ValueError, match="reference"):
        both(codec, arrays, session, unit, payload)


@settings(deadline=None, max_examples=12)
@given(
    st.lists(st.tuples(st.integers(1, 2), st.integers(1, 6), st.integers(1, 5)), min_size=1, max_size=3),
    st.sampled_from(sorted(DTYPES)),
    st.integers(1, 30),
    st.sampled_from([0.0, 0.05, 1.0, 50.0]),
    st.floats(0.01, 4),
    st.booleans(),
)
def test_predictions_mean_the_same_to_both(shapes, dtype, rank, noise, step, broken):
    session = drawn("s", ids(20), layers=tuple(shapes), dtype=dtype)
    arrays = drawn_profile(session, layer_group=len(shapes), rank=rank)
    codec = started(arrays, session, step)
    codec._classes = np.arange(20, dtype=np.uint8) % 12
    unit, values = unit_of(session, 3, 20)
    unit = dataclasses.replace(unit, near=True)
    rng = np.random.default_rng(len(shapes))
    reference = [tuple((a.astype(np.float32) + noise * rng.normal(size=a.shape)).astype(a.dtype) for a in pair)
                 for pair in values]  # fmt: skip
    if broken:
        reference[0][0][0, 5, 0] = np.nan
    values[-1][1][0, 8, 0] = np.nan
    payload = codec.encode_span(unit, values, reference)
    assert payload[0] == 3
    mine, theirs, exact = both(codec, arrays, session, unit, payload, reference)
    assert exact[:, 8].all()
    assert far_apart(mine, theirs, exact) is None
    classes = payload[5 + 2 * int(exact[0].sum()) + 9 :][:9]
    assert any(classes) or noise >= 1


def test_the_digest_is_the_package_s():
    session = drawn("s", ids(8))
    arrays = drawn_profile(session)
    assert reference_profile.digest_of(arrays) == digest(arrays)
