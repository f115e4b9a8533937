"""Golden archives: package and reference decoder give the frozen values, and encoding gives the frozen bytes."""

from __future__ import annotations

import copy
import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest

import pltpack
from benchmarks import golden_profiles, make_golden
from benchmarks.golden_cases import CASES
from pltpack.archive.library import Library
from pltpack.archive.segments import Segment
from pltpack.archive.shard import Shard
from pltpack.codec import coefficients, exact_tokens, rate, scaling
from pltpack.codec.base import KeyValue, Unit
from pltpack.codec.coefficients import Order
from pltpack.codec.payload import Reader
from pltpack.codec.transform import EXACT, TransformCodec
from pltpack.codec.unit_head import exact_rows, pack_nibbles, read_logs, unpack_nibbles
from pltpack.dumps import open_dumps
from pltpack.format.tables import FLAG_REFERENCE
from pltpack.snapshot import DTYPES, Snapshot

ROOT = Path(__file__).parents[1]
FOLDERS = sorted(path for path in (ROOT / "fixtures" / "golden").iterdir() if path.is_dir())
CALIBRATED = [path for path in FOLDERS if (path / "decoded").is_dir()]
FREE = [path for path in FOLDERS if json.loads((path / "case.json").read_text()).get("free")]
#: What writers make of the inputs now has a golden archive of its own.
SUPERSEDED = [path for path in FOLDERS if "superseded" in json.loads((path / "case.json").read_text())]
FIXED = [path for path in FOLDERS if path not in (*FREE, *SUPERSEDED)]

sys.path.append(str(ROOT / "spec"))
import reference_decoder  # noqa: E402

each = pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
each_fixed = pytest.mark.parametrize("folder", FIXED, ids=lambda path: path.name)
each_free = pytest.mark.parametrize("folder", FREE, ids=lambda path: path.name)


def description(folder: Path) -> dict:
    return json.loads((folder / "case.json").read_text())


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def near(folder: Path, decoded: Path) -> None:
    """What a calibrated codec's golden archive decodes to is what is stored, up to the tolerance of spec/codecs.md."""
    found = {snapshot.session: snapshot for snapshot in open_dumps([decoded])}
    with pltpack.open(folder / "archive") as archive:
        assert set(found) == set(archive.sessions)
        for expected in open_dumps([folder / "decoded"]):
            exact = golden_profiles.exact_mask(archive, expected.session)
            assert exact[:, 0].all(), "the first token is exact"
            chained = golden_profiles.predicts(archive, expected.session)
            assert golden_profiles.far_apart(found[expected.session], expected, exact, chained) is None
            assert found[expected.session].identity == expected.identity


@each
def test_the_package_decodes_it(folder, tmp_path):
    expected = description(folder)["sessions"]
    pltpack.verify(folder / "archive")
    pltpack.decompress(folder / "archive", tmp_path / "out")
    if folder in CALIBRATED:
        near(folder, tmp_path / "out")
        return
    assert digests(tmp_path / "out") == {entry["file"]: entry["sha256"] for entry in expected.values()}
    with pltpack.open(folder / "archive") as archive:
        assert set(archive.sessions) == set(expected)
        for name, entry in expected.items():
            snapshot = archive.read(name)
            for tensor, digest in entry["tensors"].items():
                if tensor == "tokens":
                    array = snapshot.tokens
                else:
                    _, layer, part = tensor.split(".")
                    array = snapshot.layer(int(layer))[part == "values"]
                assert hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest() == digest


@each
def test_the_reference_decoder_decodes_it(folder, tmp_path):
    reference_decoder.decode(folder / "archive", tmp_path / "out")
    if folder in CALIBRATED:
        near(folder, tmp_path / "out")
        return
    expected = description(folder)["sessions"]
    assert digests(tmp_path / "out") == {entry["file"]: entry["sha256"] for entry in expected.values()}


@each
def test_lossless_sessions_are_their_inputs(folder):
    case = make_golden.load(folder)
    inputs = {snapshot.session: snapshot for step in case.steps for snapshot in step.sessions}
    with pltpack.open(folder / "archive") as archive:
        for name, snapshot in inputs.items():
            assert np.array_equal(archive.shard(name).tokens, snapshot.tokens)
            assert archive.snapshot(name).identity == snapshot.identity
            if {step.options.get("quality", step.options.get("codec")) for step in case.steps
                if snapshot in step.sessions} == {"lossless"}:  # fmt: skip
                for layer in range(len(snapshot.identity.layers)):
                    for mine, theirs in zip(snapshot.layer(layer), archive.snapshot(name).layer(
                            layer, 0, len(snapshot)), strict=True):  # fmt: skip
                        assert mine.tobytes() == np.ascontiguousarray(theirs).tobytes()


@each_fixed
def test_its_units_are_encoded_to_the_same_bytes(folder):
    case = make_golden.load(folder)
    inputs = {snapshot.session: snapshot for step in case.steps for snapshot in step.sessions}
    with pltpack.open(folder / "archive") as archive:
        shards = {name: archive.shard(name) for name in archive.sessions}
        for name, shard in shards.items():
            for record in shard.units:
                assert encoded(shard, record, inputs[name], shard) == shard.checked_payload(record)
        for library in archive.libraries:
            for node in range(len(library.nodes)):
                sharers = [inputs[name] for name, shard in shards.items() if maps_to(shard, library, node)]
                payloads = [library.checked_payload(record) for record in library.units_of(node)]
                # A compacted or appended archive does not say whose values a node has; one of those that share it.
                assert any(
                    [encoded(library, record, owner, None) for record in library.units_of(node)] == payloads
                    for owner in sharers
                )


def maps_to(shard: Shard, library: Library, node: int) -> bool:
    return any(shard.libraries[run["library"]] is library and run["node"] == node for run in shard.runs)


def encoded(segment: Segment, record: np.void, snapshot: Snapshot, shard: Shard | None) -> bytes:
    """A unit's payload, encoded anew from the input."""
    start, layer = segment.position_of(record), int(record["layer"])
    stop, end = start + int(record["token_count"]), len(snapshot)
    reference = None
    if segment.codec_of(record).spans:
        return encoded_span(segment, record, snapshot)
    if shard is None:
        node = segment.nodes[record["node"]]
        end = int(node["position"]) + int(node["length"])
    elif record["flags"] & FLAG_REFERENCE:
        run = next(run for run in shard.runs if run["session_start"] <= start < run["session_start"] + run["length"])
        end = int(run["session_start"]) + int(run["length"])
        reference = mapped(shard, run, layer, start, stop)
    unit = Unit(layer, snapshot.identity.layers[layer], start, stop - start, end - stop)
    keys, values = snapshot.layer(layer, start, stop)
    return segment.codec_of(record).encode(unit, keys, values, reference)


def encoded_span(segment: Segment, record: np.void, snapshot: Snapshot) -> bytes:
    """A unit's payload of the codec `transform`, coded anew from its own step, classes and quantized coefficients.

    How an encoder chooses these is not part of the format, and products of floating-point numbers decide the last of
    them: what it makes of them is integers throughout, and must be the same bytes on every machine.
    """
    unit, codec, payload = segment.unit(record), segment.codec_of(record), segment.checked_payload(record)
    arrays = [snapshot.layer(unit.layer + index, unit.position, unit.position + unit.tokens)
              for index in range(len(unit.layers))]  # fmt: skip
    log_step, exact, classes = golden_profiles.header_of(payload, unit.tokens)
    bases, coder = codec._bases_of(unit), codec.profile.coder
    start = 5 + 2 * len(exact) + (unit.tokens + 1) // 2
    reader = Reader(memoryview(payload)[start:])
    logs, shifts = bases.logs, b""
    if payload[0] & 4:
        logs, shifts = read_logs(reader, logs), payload[start : start + (scaling.count(logs) + 1) // 2]
    joint = np.where(np.isin(np.arange(unit.tokens), exact), EXACT, classes)
    order = Order.of(logs, rate.steps(log_step), joint, coder)
    values = coefficients.decode(reader, order, coder, (unit.tokens, len(bases.logs)))
    parts = [payload[: 5 + 2 * len(exact)], pack_nibbles(classes), shifts, coefficients.encode(values, order, coder)]
    if len(exact):
        parts.append(exact_tokens.encode(exact_rows(arrays)[exact], unit.position + exact,
                                         *codec._exact_layout(bases, unit.layers), coder))  # fmt: skip
    check_quantized(codec, unit, arrays, payload, snapshot)
    return b"".join(parts)


def check_quantized(
    codec: TransformCodec, unit: Unit, arrays: list[KeyValue], payload: bytes, snapshot: Snapshot
) -> None:
    """Encoded anew with the same step and classes, the unit is no farther from the input than it was."""
    log_step, exact, classes = golden_profiles.header_of(payload, unit.tokens)
    again = copy.copy(codec)
    again._log_step, again._classes, again._shifts = log_step, np.zeros(len(snapshot), np.uint8), {}
    if payload[0] & 4:
        start, count = 5 + 2 * len(exact) + (unit.tokens + 1) // 2, scaling.count(codec._bases_of(unit).logs)
        again._shifts[unit.layer] = unpack_nibbles(memoryview(payload)[start : start + (count + 1) // 2], count)
    again._classes[unit.position : unit.position + unit.tokens] = classes
    ordinary = np.setdiff1d(np.arange(unit.tokens), exact)
    errors = []
    for data in (payload, again.encode_span(unit, arrays)):
        out = [(np.empty_like(keys), np.empty_like(values)) for keys, values in arrays]
        codec.decode_span(memoryview(data), unit, out)
        apart = 0.0
        for mine, theirs in zip(out, arrays, strict=True):
            for x, y in zip(mine, theirs, strict=True):
                apart += np.square(x[:, ordinary].astype(np.float64) - y[:, ordinary].astype(np.float64)).sum()
        errors.append(apart)
    assert errors[1] <= 1.1 * errors[0] + 1e-9


def mapped(shard: Shard, run: np.void, layer: int, start: int, stop: int) -> KeyValue:
    """The mapped values of a token range, decoded unit by unit."""
    library, shape = shard.libraries[run["library"]], shard.identity.layers[layer]
    out = tuple(np.empty((shape.heads, stop - start, dim), DTYPES[shape.dtype]) for dim in (shape.k_dim, shape.v_dim))
    for record in library.units_of(int(run["node"])):
        at = library.position_of(record)
        low, high = max(at, start), min(at + int(record["token_count"]), stop)
        if record["layer"] == layer and low < high:
            for target, part in zip(out, library.decode(record), strict=True):
                target[:, low - start : high - start] = part[:, low - at : high - at]
    return out


@each_fixed
def test_making_it_again_gives_the_same(folder, tmp_path):
    case = make_golden.load(folder)
    make_golden.build(case, tmp_path / "again")
    learned: list[bool] = []
    with pltpack.open(folder / "archive") as old, pltpack.open(tmp_path / "again" / "archive") as new:
        assert old.sessions == new.sessions
        assert old.manifest.generation == new.manifest.generation
        for a, b in zip(old.libraries, new.libraries, strict=True):
            assert np.array_equal(a.nodes, b.nodes)
            assert np.array_equal(a.tokens, b.tokens)
            assert a.states == b.states
            learned += ["profile" not in entry for entry in a.states]
            learned += [np.array_equal(a.container.tables[f"codec.state.{i}"], b.container.tables[f"codec.state.{i}"])
                        for i in range(len(a.states))]  # fmt: skip
        for name in old.sessions:
            a, b = old.shard(name), new.shard(name)
            assert np.array_equal(a.runs, b.runs)
            for field in ("layer", "token_start", "token_count", "flags"):
                assert np.array_equal(a.units[field], b.units[field])
    # What codecs learn may depend on the machine's sums; all that follows from it may not.
    if all(learned):
        assert make_golden.difference(folder / "archive", tmp_path / "again" / "archive") is None


@each_free
def test_what_is_made_of_its_inputs_now_is_read_by_both_decoders(folder, tmp_path):
    case = make_golden.load(folder)
    make_golden.build(case, tmp_path / "again")
    archive = tmp_path / "again" / "archive"
    reference_decoder.decode(archive, tmp_path / "out")
    if folder not in CALIBRATED:
        pltpack.decompress(archive, tmp_path / "mine")
        assert digests(tmp_path / "mine") == digests(tmp_path / "out")
        return
    found = {snapshot.session: snapshot for snapshot in open_dumps([tmp_path / "out"])}
    with pltpack.open(archive) as opened:
        for name in opened.sessions:
            exact, chained = golden_profiles.exact_mask(opened, name), golden_profiles.predicts(opened, name)
            assert golden_profiles.far_apart(opened.read(name), found[name], exact, chained) is None


def test_predictions_of_every_kind_are_there():
    shifts, exact_beside, layers, segments, ropes = (set() for _ in range(5))
    own = kept = False
    for folder in FREE:
        with pltpack.open(folder / "archive") as archive:
            ropes.add((archive.identity.rope or {})["type"])
            for shard in map(archive.shard, archive.sessions):
                shifts |= {int(np.sign(run["position_shift"])) for run in shard.predicted_runs}
                exact_beside.add(bool(len(shard.predicted_runs)) and bool(len(shard.exact_runs)))
                layers |= {int(record["layer_count"]) for record in shard.units if record["flags"] & FLAG_REFERENCE}
                segments.add(len({int(run["library"]) for run in shard.runs}))
                nodes = [{(int(run["library"]), int(run["node"])) for run in runs}
                         for runs in (shard.exact_runs, shard.predicted_runs)]  # fmt: skip
                own |= bool(nodes[0] & nodes[1])
    for path in FOLDERS:
        with pltpack.open(path / "archive") as archive:
            kept |= any("x-logprob" in archive.shard(name).container.tables for name in archive.sessions)
    assert shifts == {-1, 0, 1} and exact_beside == {False, True} and own
    assert layers == {1, 2}
    assert segments >= {1, 2}
    assert ropes == {"default", "dynamic", "yarn", "longrope"}
    assert kept


def test_every_case_is_frozen():
    assert [folder.name for folder in FOLDERS] == sorted(CASES)


def test_every_mode_of_every_codec_is_there():
    first: dict[str, set[int]] = {}
    dtypes: dict[str, set[str]] = {}
    for folder in FOLDERS:
        with pltpack.open(folder / "archive") as archive:
            for segment in (*archive.libraries, *map(archive.shard, archive.sessions)):
                for record in segment.units:
                    codec = segment.codec_of(record).codec_id
                    first.setdefault(codec, set()).add(segment.checked_payload(record)[0])
                    dtypes.setdefault(codec, set()).add(segment.identity.layers[record["layer"]].dtype)
    assert first["lossless"] == set(range(8))
    assert first["group"] == {0, 1, 2, 5}
    assert first["transform"] == {0, 1, 3, 4}
    assert dtypes["lossless"] == dtypes["group"] == set(DTYPES)
    assert dtypes["transform"] >= {"BF16", "F16", "F32", "F8_E5M2"}
