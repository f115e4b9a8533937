"""Mapping rows that only predict what own units hold: at other positions, of other tokens, in units of many layers."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pltpack
from benchmarks.near_archives import Builder, Node, Row
from benchmarks.surgery import Surgery
from pltpack.archive import mapped
from pltpack.archive.sampling import JobSamples, TokenRange
from pltpack.archive.transfer import export_session, import_session
from pltpack.codec import moving, registry
from pltpack.codec.base import KeyValue
from pltpack.codec.rope import Rotation
from pltpack.dumps import open_dumps
from pltpack.errors import FormatError
from pltpack.format import tables
from pltpack.snapshot import DTYPES, Identity, Snapshot
from tests import near_common
from tests.profiles_common import IDENTITY, random_profile, save_profile, session, words

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "spec"))
import reference_decoder  # noqa: E402

CODECS: dict[str, tuple[str, dict[str, Any]]] = {
    "lossless": ("lossless", {}), "q4": ("group", {"bits": 4}), "transform": ("transform", {"target_kl": 0.01}),
    "turboquant": ("turboquant", {"bits": 3}),
}  # fmt: skip


def started(name: str, identity: Identity) -> tuple[Any, dict[str, np.ndarray]]:
    codec = registry.codec(*CODECS[name])
    ranges = [TokenRange(snapshot, 0, len(snapshot)) for snapshot in sessions(identity)]
    return codec, random_profile(identity.layers) if codec.calibrated else codec.learn(JobSamples(ranges), identity)


def sessions(identity: Identity = IDENTITY) -> tuple[Snapshot, Snapshot, Snapshot]:
    """A source; one that repeats its parts elsewhere, one of them twice and one with edits; one that only begins so."""
    rng = np.random.default_rng(5)
    source = rng.integers(100, 900, 150).astype(np.int32)
    other = rng.integers(100, 900, 190).astype(np.int32)
    other[:30] = source[:30]
    other[45:95] = source[40:90]
    other[95:140] = source[45:90]
    other[150:180] = source[100:130]
    other[[160, 171]] = 7
    third = np.append(source[:30], rng.integers(100, 900, 20).astype(np.int32))
    return tuple(session(name, ids, identity) for name, ids in
                 (("source", source), ("other", other), ("third", third)))  # fmt: skip


def build(folder: Path, name: str, identity: Identity = IDENTITY, seed: int = 0, **more: Any) -> Builder:
    """An archive of `sessions`, its manifest not written."""
    source, other, third = sessions(identity)
    nodes = [Node(source, 0, 30), Node(source, 40, 90), Node(source, 100, 130)]
    codec, arrays = started(name, identity)
    builder = Builder(folder, codec, arrays, identity, nodes, np.random.default_rng(seed))
    builder.add(source, [Row(0, 30, 0, 0), Row(40, 50, 1, 0), Row(100, 30, 2, 0)], **more)
    builder.add(other, [Row(0, 30, 0, 0), Row(45, 50, 1, 0), Row(95, 45, 1, 5), Row(150, 30, 2, 0)], **more)
    builder.add(third, [Row(0, 30, 0, 0)], **more)
    return builder


def same(found: KeyValue, wanted: KeyValue, tokens: slice = slice(None)) -> bool:
    return all(np.array_equal(words(a), words(b[:, tokens])) for a, b in zip(found, wanted, strict=True))


def close(a: Snapshot, b: Snapshot) -> bool:
    """Whether values differ by no more than the tolerance of the codec ``transform``."""
    gaps = [
        np.abs(words(x).astype(int) - words(y).astype(int)).reshape(-1)
        for layer in range(len(a.identity.layers))
        for x, y in zip(a.layer(layer), b.layer(layer), strict=True)
    ]
    return bool((np.concatenate(gaps) <= 1).mean() > 0.998)


@pytest.fixture(scope="module", params=list(CODECS))
def made(request, tmp_path_factory) -> tuple[Path, dict[str, list[KeyValue]]]:
    builder = build(tmp_path_factory.mktemp(request.param) / "archive", request.param, exact_units=True)
    return builder.finish(), builder.expected


class TestReading:
    def test_sessions_are_what_their_units_hold(self, made):
        archive, expected = made
        with pltpack.open(archive) as opened:
            assert opened.shard("other").container.metadata["format_version"] == "1.2"
            assert len(opened.shard("other").predicted_runs) == 3
            assert len(opened.shard("source").predicted_runs) == 0
            for name, layers in expected.items():
                snapshot = opened.read(name)
                for index, wanted in enumerate(layers):
                    assert same(snapshot.layer(index), wanted)
                    assert same(opened.snapshot(name).layer(index), wanted)

    def test_parts_cut_through_rows_and_units(self, made):
        archive, expected = made
        rng = np.random.default_rng(1)
        with pltpack.open(archive) as opened:
            for name, layers in expected.items():
                total = layers[0][0].shape[1]
                for _ in range(25):
                    start = int(rng.integers(0, total))
                    stop = int(rng.integers(start + 1, total + 1))
                    first = int(rng.integers(0, len(layers)))
                    last = int(rng.integers(first + 1, len(layers) + 1))
                    part = opened.read(name, range(first, last), slice(start, stop))
                    for index in range(first, last):
                        assert same(part.layer(index - first), layers[index], slice(start, stop)), (name, start, stop)

    def test_a_reference_may_be_made_for_few_units_at_once(self, made, monkeypatch):
        archive, expected = made
        monkeypatch.setattr("pltpack.archive.decoding.REFERENCE_BYTES", 1)
        monkeypatch.setattr("pltpack.archive.reader.PIECE_TOKENS", 37)
        with pltpack.open(archive) as opened:
            snapshot = opened.read("other")
            assert all(same(snapshot.layer(i), wanted) for i, wanted in enumerate(expected["other"]))

    def test_few_decoded_units_are_kept(self, made, monkeypatch):
        archive, expected = made
        for limit in (0, 5000):
            with pltpack.open(archive) as opened:
                opened._decoded._limit = limit
                for name in ("other", "source", "other"):
                    snapshot = opened.read(name)
                    assert all(same(snapshot.layer(i), wanted) for i, wanted in enumerate(expected[name]))
                assert opened._decoded._size <= limit
                opened._decoded.clear()

    def test_layers_held_in_a_file(self, made, monkeypatch):
        archive, expected = made
        monkeypatch.setattr("pltpack.archive.spans.MEMORY_BYTES", 0)
        with pltpack.open(archive) as opened:
            snapshot = opened.snapshot("other")
            assert all(same(snapshot.layer(i), wanted) for i, wanted in enumerate(expected["other"]))

    def test_verify_and_statistics(self, made):
        archive, _ = made
        assert pltpack.verify(archive)["sessions"] == 3
        with pltpack.open(archive) as opened:
            stats = opened.stats()
            rows = {row["session"]: row for row in opened.describe()["sessions"]}
        assert stats["predicted_tokens"] == 125
        assert stats["shared_tokens"] == 110 + 30 + 30
        assert (rows["other"]["predicted_tokens"], rows["other"]["shared_tokens"]) == (125, 30)
        assert [row["position_shift"] for row in rows["other"]["mapping"]] == [0, 5, 50, 50]
        assert stats["saved_bytes"] < stats["raw_bytes"]

    def test_the_reference_decoder_agrees(self, made, tmp_path):
        archive, _ = made
        pltpack.decompress(archive, tmp_path / "package")
        reference_decoder.decode(archive, tmp_path / "reference")
        exact = not archive.parent.name.startswith("transform")
        for path in (tmp_path / "package").iterdir():
            mine, other = path.read_bytes(), (tmp_path / "reference" / path.name).read_bytes()
            assert mine == other or not exact
            (a,), (b,) = (open_dumps([folder / path.name]) for folder in (tmp_path / "package", tmp_path / "reference"))
            assert close(a, b)

    def test_compacting_and_session_files_keep_it(self, made, tmp_path):
        archive, expected = made
        export_session(archive, "other", tmp_path / "file")
        import_session(tmp_path / "again", tmp_path / "file")
        shutil.copytree(archive, tmp_path / "copy")
        pltpack.compact(tmp_path / "copy")
        for folder, names in ((tmp_path / "again", ["other"]), (tmp_path / "copy", list(expected))):
            pltpack.verify(folder)
            with pltpack.open(folder) as opened:
                assert opened.sessions == names
                assert opened.shard("other").container.metadata["format_version"] == "1.2"
                for name in names:
                    snapshot = opened.read(name)
                    assert all(same(snapshot.layer(i), wanted) for i, wanted in enumerate(expected[name]))


class TestMovedKeys:
    @pytest.mark.parametrize("dtype", ["F32", "BF16", "F16", "F8_E4M3", "F8_E5M2"])
    def test_lossless_sessions_come_back(self, tmp_path, dtype):
        layers = tuple(dataclasses.replace(layer, dtype=dtype) for layer in IDENTITY.layers)
        identity = dataclasses.replace(IDENTITY, layers=layers)
        archive = build(tmp_path / "archive", "lossless", identity, flags=1.0).finish()
        pltpack.decompress(archive, tmp_path / "package")
        reference_decoder.decode(archive, tmp_path / "reference")
        with pltpack.open(archive) as opened:
            for snapshot in sessions(identity):
                assert all(same(opened.read(snapshot.session).layer(i), snapshot.layer(i)) for i in range(3))
        for path in (tmp_path / "package").iterdir():
            assert path.read_bytes() == (tmp_path / "reference" / path.name).read_bytes()

    def test_keys_without_rotation_stay(self, tmp_path):
        identity = dataclasses.replace(IDENTITY, keys="unrotated")
        archive = build(tmp_path / "archive", "lossless", identity).finish()
        source = sessions(identity)[0]
        with pltpack.open(archive) as opened:
            shard = opened.shard("other")
            found = mapped.reference_values(shard.runs, shard.libraries, range(3), 50, 90)
        for index in range(3):
            assert same(found[index], source.layer(index), slice(45, 85))
        reference_decoder.decode(archive, tmp_path / "reference")

    def test_a_reference_is_rotated_to_the_sessions_positions(self, tmp_path):
        archive = build(tmp_path / "archive", "lossless").finish()
        source = sessions()[0]
        with pltpack.open(archive) as opened:
            shard = opened.shard("other")
            found = mapped.reference_values(shard.runs, shard.libraries, range(1, 3), 60, 130)
        for index, (keys, values) in enumerate(found, 1):
            rotation = Rotation.of(IDENTITY.rope, "rotated", keys.shape[2])
            assert rotation is not None
            for first, last, shift in ((60, 95, 5), (95, 130, 50)):
                k, v = source.layer(index, first - shift, last - shift)
                part = slice(first - 60, last - 60)
                moved = rotation.shift(k.astype(np.float32), first - shift, first).astype(k.dtype)
                assert same((keys[:, part], values[:, part]), (moved, v))

    @given(st.integers(0, 2**32), st.integers(1, 600), st.sampled_from(["half", "interleaved"]), st.integers(1, 6))
    @settings(max_examples=25, deadline=None)
    def test_compiled_bits_are_those_of_single_operations(self, seed, tokens, style, pairs):
        rng = np.random.default_rng(seed)
        rotation = Rotation.of({"theta": 500.0, "dim": 2 * pairs, "style": style}, "rotated", 12)
        assert rotation is not None
        bits = rng.integers(0, 1 << 16, (2, tokens + 9, 12), np.uint16)
        keys = bits.view(DTYPES["BF16"])[:, 4 : 4 + tokens]
        wide, elsewhere = keys.astype(np.float32), np.empty_like(keys)
        position, target = (int(n) for n in rng.integers(0, 1 << 20, 2))
        moving.move(keys, rotation, position, target, elsewhere)
        moving.move(keys, rotation, position, target)
        moving.move(wide, rotation, position, target)
        with np.errstate(over="ignore"):
            limit = np.float32(ml_dtypes.finfo(keys.dtype).max)
            wanted = np.clip(wide, -limit, limit).astype(keys.dtype)
        assert np.array_equal(words(keys), words(wanted))
        assert np.array_equal(words(elsewhere), words(wanted))

    def test_what_is_not_finite_becomes_zero(self):
        keys = np.random.default_rng(0).normal(size=(2, 5, 8)).astype(np.float32)
        keys[0, 1, 3], keys[1, 2, 0], keys[1, 4] = np.nan, -np.inf, np.finfo(np.float32).max
        whole = keys.copy()
        mapped.move_keys(keys, IDENTITY, 3, 9)
        assert np.isfinite(keys).all()
        # The pair that held it, and no other.
        assert (keys[0, 1] == 0).sum() == 2
        rotation = Rotation.of(IDENTITY.rope, "rotated", 8)
        assert rotation is not None
        assert np.array_equal(keys[0, 3], rotation.shift(whole[:, 3:4], 6, 12)[0, 0])


@given(st.integers(0, 2**32), st.sampled_from(["lossless", "transform"]))
@settings(max_examples=20, deadline=None)
def test_any_mapping_is_read_as_written(tmp_path_factory, seed, name):
    """Nodes, rows, edits and parts by chance; what is read is what the units hold, by either way of reading."""
    rng = np.random.default_rng(seed)
    source = session("source", rng.integers(0, 9, 60))
    starts = rng.integers(0, 50, 3).tolist()
    nodes = [Node(source, start, int(rng.integers(start + 1, 61))) for start in starts]
    ids, rows, at = [], [], 0
    for _ in range(int(rng.integers(1, 7))):
        gap = int(rng.integers(0, 6))
        index = int(rng.integers(0, 3))
        size = nodes[index].stop - nodes[index].start
        first = int(rng.integers(0, size))
        length = int(rng.integers(1, size - first + 1))
        rows.append(Row(at + gap, length, index, first))
        ids += [*rng.integers(0, 9, gap), *nodes[index].tokens[first : first + length]]
        at = len(ids)
    tokens = np.array(ids, np.int32)
    tokens[rng.random(len(ids)) < 0.02] = 8
    other = session("other", tokens)
    codec, arrays = started(name, IDENTITY)
    folder = tmp_path_factory.mktemp("chance") / "archive"
    builder = Builder(folder, codec, arrays, IDENTITY, nodes, rng, unit=int(rng.integers(1, 40)))
    builder.add(other, rows, flags=float(rng.random()), exact_units=bool(rng.integers(2)))
    archive = builder.finish()
    start = int(rng.integers(0, len(ids)))
    part = slice(start, int(rng.integers(start + 1, len(ids) + 1)))
    layers = range(int(rng.integers(0, 3)), 3)
    with pltpack.open(archive) as opened:
        found, whole = opened.read("other", layers, part), opened.snapshot("other")
        for index in layers:
            wanted = builder.expected["other"][index]
            assert same(whole.layer(index), wanted)
            assert same(found.layer(index - layers.start), wanted, part)


@pytest.mark.parametrize("quality", ["lossless", "q4", "q2", "transform"])
def test_both_decoders_read_what_is_written(quality, tmp_path):
    profile = {}
    if quality == "transform":
        profile["profile"] = save_profile(tmp_path / "profile.safetensors", near_common.IDENTITY)
    pltpack.compress(near_common.family(), tmp_path / "archive", quality=quality, **profile)
    with pltpack.open(tmp_path / "archive") as opened:
        assert opened.stats()["predicted_tokens"] > 200
        shards = [opened.shard(name) for name in opened.sessions]
        assert any((shard.predicted_runs["position_shift"] != 0).any() for shard in shards)
    pltpack.decompress(tmp_path / "archive", tmp_path / "package")
    reference_decoder.decode(tmp_path / "archive", tmp_path / "reference")
    for path in (tmp_path / "package").iterdir():
        other = tmp_path / "reference" / path.name
        assert quality == "transform" or path.read_bytes() == other.read_bytes()
        (a,), (b,) = open_dumps([path]), open_dumps([other])
        assert close(a, b)


# --- broken archives ---------------------------------------------------------------------------------------------


def _rows(surgery: Surgery) -> np.ndarray:
    return surgery.shard(1).table("map")


def _uncover(surgery: Surgery) -> None:
    """The last predicted row covers a token more than the units of one layer group do."""
    part = surgery.shard(1)
    units = part.table("unit.index").copy()
    inside = [i for i, u in enumerate(units) if u["token_start"] >= 150 and u["layer"] == 2]
    part.set_payload(inside[0], b"")
    part.replace("unit.index", np.delete(part.table("unit.index"), inside[0]))


def _version(minor: int) -> Any:
    def change(surgery: Surgery) -> None:
        surgery.shard(1).metadata["format_version"] = f"1.{minor}"

    return change


def _shift(surgery: Surgery, by: int) -> None:
    _rows(surgery)["position_shift"][1] += by


def _outside(surgery: Surgery) -> None:
    _rows(surgery)["node_start"][1] += 1
    _rows(surgery)["position_shift"][1] -= 1


def _short_row(surgery: Surgery) -> None:
    _rows(surgery)["length"][3] -= 1


def _identity(surgery: Surgery, **members: Any) -> None:
    identity = {**surgery.body["identity"], **members}
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    surgery.body["identity"] = identity
    for part in surgery.parts.values():
        part.metadata.update(identity=text, identity_sha256=hashlib.sha256(text.encode()).hexdigest())


def _unknown_rope(surgery: Surgery) -> None:
    _identity(surgery, rope={**surgery.body["identity"]["rope"], "type": "spiral"})


def _unknown_keys(surgery: Surgery) -> None:
    del surgery.body["identity"]["keys"]
    _identity(surgery)


def _tenant(surgery: Surgery) -> None:
    surgery.library.set_items("salts", ["s"])


BREAKS = {
    "shift-by-one": (lambda s: _shift(s, 1), "row does not fit its library node"),
    "shift-huge": (lambda s: _rows(s)["position_shift"].__setitem__(1, 2**31 - 1), "row does not fit its library node"),
    "shift-least": (lambda s: _rows(s)["position_shift"].__setitem__(1, -(2**31)), "row does not fit its library node"),
    "outside-node": (_outside, "row does not fit its library node"),
    "uncovered": (_uncover, "predicted tokens are in no unit of layer 2"),
    "reference-outside": (_short_row, "has a reference outside the mapping table"),
    "version-1.1": (_version(1), "breaks the rules"),
    "version-1.0": (_version(0), "breaks the rules"),
    "rope": (_unknown_rope, "moves keys whose rotary embedding is not known"),
    "keys": (_unknown_keys, "moves keys whose rotary embedding is not known"),
    "tenant": (_tenant, "another tenant's node"),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    return build(tmp_path_factory.mktemp("sound") / "archive", "lossless", flags=1.0).finish()


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_archive_gives_one_error_that_names_the_shard(name, sound, tmp_path, capsys):
    change, message = BREAKS[name]
    surgery = Surgery(sound)
    change(surgery)
    surgery.save(tmp_path / "archive")
    with pytest.raises(FormatError, match=message) as caught:
        pltpack.verify(tmp_path / "archive")
    assert str(caught.value.path).endswith(".pltshard")
    assert reference_decoder.main([str(tmp_path / "archive"), str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_other_tokens_need_own_units_and_the_version(tmp_path):
    """A row at its own position whose tokens differ is a prediction too."""
    source, *_ = sessions()
    ids = source.tokens.copy()
    ids[50] = 7
    twin = session("twin", ids)
    codec, arrays = started("lossless", IDENTITY)
    builder = Builder(tmp_path / "archive", codec, arrays, IDENTITY, [Node(source, 40, 90)], np.random.default_rng(2))
    builder.add(twin, [Row(40, 50, 0, 0)], flags=1.0)
    archive = builder.finish()
    with pltpack.open(archive) as opened:
        assert all(same(opened.read("twin").layer(i), twin.layer(i)) for i in range(3))
        assert opened.shard("twin").predicted_runs["position_shift"].tolist() == [0]
    for name, change in (("1.1", lambda s: s.shard().metadata.update(format_version="1.1")),
                         ("unit", lambda s: _drop(s.shard()))):  # fmt: skip
        surgery = Surgery(archive)
        change(surgery)
        surgery.save(tmp_path / name)
        with pytest.raises(FormatError, match="node of other tokens" if name == "1.1" else "in no unit of layer"):
            pltpack.verify(tmp_path / name)
        assert reference_decoder.main([str(tmp_path / name), str(tmp_path / f"{name}-out")]) == 2


def _drop(part: Any) -> None:
    units = part.table("unit.index")
    index = int(np.flatnonzero(units["flags"])[-1])
    part.set_payload(index, b"")
    part.replace("unit.index", np.delete(part.table("unit.index"), index))


def test_references_of_several_layers_need_the_version(tmp_path):
    archive = build(tmp_path / "archive", "transform", flags=1.0).finish()
    surgery = Surgery(archive)
    rows = surgery.shard(1).table("map")
    assert (surgery.shard(1).table("unit.index")["layer_count"] > 1).any()
    surgery.shard(1).replace("map", rows[rows["position_shift"] == 0])
    surgery.shard(1).metadata["format_version"] = "1.1"
    surgery.save(tmp_path / "broken")
    with pytest.raises(FormatError, match=r"unit \d+ of the index breaks the rules"):
        pltpack.verify(tmp_path / "broken")
    assert reference_decoder.main([str(tmp_path / "broken"), str(tmp_path / "out")]) == 2


def test_predicted_tokens_never_come_from_the_mapping_alone(sound):
    """Where own units hold all, other values in the library change only what refers to them."""
    with pltpack.open(sound) as opened:
        shard = opened.shard("other")
        assert (shard.units["flags"] & tables.FLAG_REFERENCE).any()
        other = sessions()[1]
        for index in range(3):
            found, mine = opened.read("other").layer(index), other.layer(index)
            moved = mapped.reference_values(shard.runs, shard.libraries, range(index, index + 1), 45, 140)[0]
            assert same(found, mine)
            assert not same(moved, mine, slice(45, 140))
