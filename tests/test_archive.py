"""The main corridor: compress, read back, share prefixes, append, compact, export, import."""

from __future__ import annotations

import dataclasses
import json
import shutil

import numpy as np
import pytest
from archives import IDENTITY, equal_bits, relative_error, session
from hypothesis import given, settings
from hypothesis import strategies as st

import pltpack
from pltpack.errors import (
    ConflictError,
    DumpError,
    FormatError,
    IdentityError,
    NotFoundError,
    PltpackError,
    UnsupportedError,
)
from pltpack.snapshot import Identity, Snapshot

LOSSY = {"q4": 0.12, "q3": 0.25, "q2": 0.5, "turboquant-4": 0.15, "turboquant-3": 0.25, "turboquant-2": 0.45}
PREFIX = list(range(100, 116))


def family():
    """Sessions of every kind that sharing has to deal with (blocks of 4)."""
    return [
        session("first", [*PREFIX, 1, 2, 3]),
        session("noisy", [*PREFIX, 7, 8], noise=1),
        session("extends-first", [*PREFIX, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
        session("equal", [*PREFIX, 1, 2, 3]),
        session("inside", PREFIX[:10]),
        session("one", [100]),
        session("empty", []),
        session("alone", [5, 6, 7, 8, 9, 10]),
        session("tenant", [*PREFIX, 1, 2, 3], salt="acme"),
        session("tenant-2", [*PREFIX, 1, 2, 3, 4], salt="acme", noise=2),
    ]


@pytest.fixture(scope="module", params=["lossless", *LOSSY])
def made(request, tmp_path_factory):
    """An archive of the family in every tier."""
    path = tmp_path_factory.mktemp("made") / "archive"
    sessions = family()
    stats = pltpack.compress(sessions, path, quality=request.param, block=4)
    return request.param, path, sessions, stats


def test_every_session_comes_back(made):
    tier, path, sessions, _ = made
    with pltpack.open(path) as archive:
        assert archive.sessions == [s.session for s in sessions]
        for original in sessions:
            rebuilt = archive.read(original.session)
            assert rebuilt.tokens.tolist() == original.tokens.tolist()
            assert rebuilt.identity == original.identity
            if tier == "lossless":
                assert equal_bits(rebuilt, original)
            else:
                assert relative_error(original, rebuilt) < LOSSY[tier]


def test_prefixes_are_stored_once(made):
    _, path, _, stats = made
    with pltpack.open(path) as archive:
        shared = {row["session"]: row["shared_tokens"] for row in archive.describe()["sessions"]}
    assert shared == {
        "first": 16, "noisy": 16, "extends-first": 16, "equal": 16, "inside": 8, "one": 0, "empty": 0, "alone": 0,
        "tenant": 16, "tenant-2": 16,
    }  # fmt: skip
    assert stats["shared_tokens"] == sum(shared.values())
    assert stats["dedup_hit_rate"] == pytest.approx(stats["shared_tokens"] / stats["tokens"])


def test_tenants_share_nothing_with_others(made):
    _, path, _, _ = made
    with pltpack.open(path) as archive:
        nodes = {}
        for row in archive.describe()["sessions"]:
            for run in row["mapping"]:
                nodes.setdefault((run["library"], run["node"]), set()).add(row["session"].startswith("tenant"))
    assert all(len(kinds) == 1 for kinds in nodes.values())


def test_random_access_equals_whole_read(made):
    _, path, _, _ = made
    with pltpack.open(path) as archive:
        whole = archive.read("extends-first")
        for layers in (range(0, 1), range(1, 3), None):
            for tokens in (slice(0, 5), slice(3, 17), slice(15, 25), slice(24, None), None):
                part = archive.read("extends-first", layers=layers, tokens=tokens)
                start, stop, _ = (tokens or slice(None)).indices(len(whole))
                assert part.tokens.tolist() == whole.tokens[start:stop].tolist()
                for index, layer in enumerate(layers or range(3)):
                    for x, y in zip(part.layer(index), whole.layer(layer, start, stop), strict=True):
                        assert x.tobytes() == np.ascontiguousarray(y).tobytes()


def test_verify_passes_and_compares(made):
    tier, path, sessions, _ = made
    report = pltpack.verify(path, against=sessions)
    assert report["differences"] == []
    assert set(report["compared"]) == {s.session for s in sessions}
    assert tier != "lossless" or all(row["exact_tier"] and row["bit_exact"] for row in report["compared"].values())
    # Sessions without tokens have no unit, so nothing in them is lossy.
    lossy = [report["compared"][s.session] for s in sessions if len(s) > 4]
    assert tier == "lossless" or not any(row["exact_tier"] or row["bit_exact"] for row in lossy)


def test_stats_count_every_byte(made):
    _, path, sessions, stats = made
    size = sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
    assert stats["archive_bytes"] == size
    assert stats["raw_bytes"] == sum(s.raw_bytes for s in sessions)
    assert stats["bits_per_element"] == pytest.approx(8 * size / sum(s.elements for s in sessions))


def test_same_input_same_bytes(made, tmp_path):
    tier, path, sessions, _ = made
    pltpack.compress(sessions, tmp_path / "again", quality=tier, block=4)
    files = sorted(p.relative_to(path) for p in path.rglob("*") if p.is_file())
    assert files == sorted(p.relative_to(tmp_path / "again") for p in (tmp_path / "again").rglob("*") if p.is_file())
    assert all((path / f).read_bytes() == (tmp_path / "again" / f).read_bytes() for f in files)


def test_other_values_under_equal_tokens_are_not_shared(tmp_path):
    sessions = [session("a", [*PREFIX, 1]), session("b", [*PREFIX, 2]), session("other", [*PREFIX, 3], weights=1)]
    for tier in ("q2", "turboquant-2", "lossless"):
        pltpack.compress(sessions, tmp_path / tier, quality=tier, block=4)
        with pltpack.open(tmp_path / tier) as archive:
            rebuilt = archive.read("other")
            if tier == "lossless":
                assert equal_bits(rebuilt, sessions[2])
            else:
                shared = {row["session"]: row["shared_tokens"] for row in archive.describe()["sessions"]}
                assert shared == {"a": 16, "b": 16, "other": 0}
                assert relative_error(sessions[2], rebuilt) < LOSSY[tier]


def test_one_foreign_token_ends_sharing_in_lossy_tiers(tmp_path):
    clean = session("a", [*PREFIX, 1])
    layers = [tuple(x.copy() for x in clean.layer(i)) for i in range(3)]
    layers[2][1][:, 9] += 1
    odd = Snapshot.from_arrays("odd", [*PREFIX, 2], layers, IDENTITY)
    pltpack.compress([clean, odd], tmp_path / "a", quality="q2", block=4)
    with pltpack.open(tmp_path / "a") as archive:
        assert archive.shard("odd").mapped_tokens == 0
        assert relative_error(odd, archive.read("odd")) < LOSSY["q2"]


def test_no_dedup_shares_nothing(tmp_path):
    stats = pltpack.compress(family(), tmp_path / "a", quality="lossless", dedup=False, block=4)
    assert stats["shared_tokens"] == 0
    with pltpack.open(tmp_path / "a") as archive:
        assert all(equal_bits(archive.read(s.session), s) for s in family())


@pytest.mark.parametrize("tier", ["lossless", "q3"])
def test_append_shares_with_what_is_there_and_promotes_private_prefixes(tmp_path, tier):
    path = tmp_path / "a"
    pltpack.compress([session("s0", [*PREFIX, 1])], path, quality=tier, block=4)
    stats = pltpack.append(path, [session("s1", [*PREFIX, 2])])
    assert stats["shared_tokens"] == 32
    stats = pltpack.append(path, [session("s2", [*PREFIX, 3], noise=5), session("s3", [*PREFIX, 3, 4, 5, 6, 7])])
    assert stats["shared_tokens"] == 64
    with pltpack.open(path) as archive:
        assert archive.manifest.generation == 3
        # The third generation found its prefix in the second one's segment and stored nothing of it again.
        assert sum(len(lib.nodes) for lib in archive.libraries) == 1
        for name, ids, noise in (("s1", [*PREFIX, 2], None), ("s2", [*PREFIX, 3], 5)):
            original = session(name, ids, noise=noise)
            if tier == "lossless":
                assert equal_bits(archive.read(name), original)
            else:
                assert relative_error(original, archive.read(name)) < LOSSY[tier]


def test_append_in_another_tier_keeps_both_promises(tmp_path):
    path = tmp_path / "a"
    pltpack.compress([session("a", [*PREFIX, 1]), session("b", [*PREFIX, 2])], path, quality="q2", block=4)
    exact = [session("c", [*PREFIX, 3]), session("d", [*PREFIX, 4], noise=3)]
    pltpack.append(path, exact, quality="lossless")
    lossy = [session("e", [*PREFIX, 5])]
    pltpack.append(path, lossy)
    report = pltpack.verify(path, against=[*exact, *lossy])
    assert report["differences"] == []
    assert report["compared"]["c"]["bit_exact"]
    assert report["compared"]["d"]["bit_exact"]


@pytest.mark.parametrize("tier", ["lossless", "q4"])
def test_compact_merges_segments_and_keeps_every_bit(tmp_path, tier):
    path = tmp_path / "a"
    sessions = family()
    pltpack.compress(sessions[:3], path, quality=tier, block=4)
    pltpack.append(path, sessions[3:7])
    pltpack.append(path, sessions[7:], quality="turboquant-4")
    with pltpack.open(path) as archive:
        before = {name: archive.read(name) for name in archive.sessions}
        assert len(archive.libraries) > 1
    stats = pltpack.compact(path)
    assert stats["removed"]
    with pltpack.open(path) as archive:
        assert len(archive.libraries) == 1
        assert archive.manifest.generation == 4
        assert all(equal_bits(archive.read(name), snapshot) for name, snapshot in before.items())
    pltpack.verify(path)
    assert pltpack.gc(path) == []
    pltpack.append(path, [session("later", [*PREFIX, 1, 2, 9])])
    pltpack.verify(path)


def test_export_and_import(made, tmp_path):
    _, path, _, _ = made
    with pltpack.open(path) as archive:
        whole = archive.read("extends-first")
    file = pltpack.export_session(path, "extends-first", tmp_path / "one.pltsession")
    assert pltpack.import_session(tmp_path / "new", file) == "extends-first"
    target = tmp_path / "other"
    pltpack.compress([session("x", [1, 2, 3])], target, quality="q3", block=4)
    pltpack.import_session(target, file)
    with pytest.raises(ConflictError, match="in the archive already"):
        pltpack.import_session(target, file)
    for folder in (tmp_path / "new", target):
        with pltpack.open(folder) as archive:
            assert equal_bits(archive.read("extends-first"), whole)
        pltpack.verify(folder)
        assert pltpack.gc(folder) == []
    with pytest.raises(ConflictError):
        pltpack.export_session(path, "first", file)
    with pytest.raises(NotFoundError, match="no session"):
        pltpack.export_session(path, "nobody", tmp_path / "none")


def test_decompress_writes_dumps_that_compress_again(tmp_path):
    pltpack.compress(family(), tmp_path / "a", quality="lossless", block=4)
    written = pltpack.decompress(tmp_path / "a", tmp_path / "dumps")
    assert len(written) == len(family())
    assert all(path.exists() for path in written)
    assert all(equal_bits(a, b) for a, b in zip(
        sorted(pltpack.open_dumps([tmp_path / "dumps"]), key=lambda s: s.session),
        sorted(family(), key=lambda s: s.session), strict=True))  # fmt: skip
    assert pltpack.verify(tmp_path / "a", against=[tmp_path / "dumps"])["differences"] == []
    with pytest.raises(ConflictError):
        pltpack.decompress(tmp_path / "a", tmp_path / "dumps")
    pltpack.decompress(tmp_path / "a", tmp_path / "part", sessions=["first"], layers=range(1, 3), tokens=slice(4, 9))
    (part,) = pltpack.open_dumps([tmp_path / "part"])
    assert (len(part), len(part.identity.layers)) == (5, 2)


def test_a_failed_compress_leaves_nothing(tmp_path):
    good, bad = session("a", [1, 2, 3]), session("b", [1, 2, 3])

    class Broken:
        def layer(self, index, start, stop):
            raise OSError("the disk went away")

    bad = dataclasses.replace(bad, source=Broken())
    with pytest.raises(OSError, match="went away"):
        pltpack.compress([good, bad], tmp_path / "a", quality="lossless")
    assert list(tmp_path.iterdir()) == []
    pltpack.compress([good], tmp_path / "a", quality="lossless")
    before = {p: p.read_bytes() for p in (tmp_path / "a").rglob("*") if p.is_file()}
    with pytest.raises(OSError, match="went away"):
        pltpack.append(tmp_path / "a", [bad])
    pltpack.gc(tmp_path / "a")
    assert before == {p: p.read_bytes() for p in (tmp_path / "a").rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("model", dataclasses.replace(IDENTITY, model="other")),
        ("rope", dataclasses.replace(IDENTITY, rope={**IDENTITY.rope, "theta": 1e6})),
        ("weights", dataclasses.replace(IDENTITY, weights="abc")),
        ("tokenizer", dataclasses.replace(IDENTITY, tokenizer="abc")),
        ("keys", dataclasses.replace(IDENTITY, keys="unrotated")),
        ("tp_size", dataclasses.replace(IDENTITY, tp_size=2)),
        ("tp_rank", dataclasses.replace(IDENTITY, tp_rank=1)),
    ],
)
def test_another_identity_never_joins_and_never_loads(tmp_path, field, other):
    base = session("a", [1, 2, 3])
    foreign = Snapshot.from_arrays("b", base.tokens, [base.layer(i) for i in range(3)], other)
    with pytest.raises(IdentityError, match=f"'{field}' differs") as caught:
        pltpack.compress([base, foreign], tmp_path / "a", quality="lossless")
    assert caught.value.exit_code == 2
    pltpack.compress([base], tmp_path / "a", quality="lossless")
    with pytest.raises(IdentityError, match=f"'{field}' differs"):
        pltpack.append(tmp_path / "a", [foreign])
    with pytest.raises(IdentityError, match=f"'{field}' differs"):
        pltpack.open(tmp_path / "a", identity=foreign.identity)


def test_dtype_and_geometry_are_part_of_identity(tmp_path):
    base = session("a", [1, 2, 3])
    as_f16 = [tuple(x.astype(np.float16) for x in base.layer(i)) for i in range(3)]
    wider = [(np.concatenate([k, k]), np.concatenate([v, v])) for k, v in (base.layer(i) for i in range(3))]
    cases = ((as_f16, r"layers\[0\].dtype"), (wider, r"layers\[0\].heads"), (as_f16[:2], "3 layers against 2"))
    for layers, field in cases:
        foreign = Snapshot.from_arrays("b", base.tokens, layers, IDENTITY)
        with pytest.raises(IdentityError, match=field):
            pltpack.compress([base, foreign], tmp_path / "a", quality="lossless")


def test_salt_is_checked_when_loading(tmp_path):
    pltpack.compress([session("a", [1, 2]), session("b", [1, 2], salt="acme")], tmp_path / "a", quality="lossless")
    loader = family()[0].identity
    with pltpack.open(tmp_path / "a", identity=loader) as archive:
        archive.read("a")
        with pytest.raises(IdentityError, match="'salt' differs"):
            archive.read("b")


def test_unknown_fields_are_taken_only_when_told_to(tmp_path):
    pltpack.compress([session("a", [1, 2])], tmp_path / "a", quality="lossless")
    loader = dataclasses.replace(family()[0].identity, weights="abc")
    with pytest.raises(IdentityError, match="--accept-unknown weights"):
        pltpack.open(tmp_path / "a", identity=loader)
    with pltpack.open(tmp_path / "a", identity=loader, accept_unknown=["weights"]) as archive:
        archive.read("a")
    with pytest.raises(IdentityError, match="'model' differs"):
        pltpack.open(tmp_path / "a", identity=Identity(model="other"), accept_unknown=["model"])


def test_bad_requests(tmp_path):
    base = session("a", [1, 2, 3])
    with pytest.raises(DumpError):
        pltpack.compress([], tmp_path / "a")
    with pytest.raises(NotFoundError, match="quality tier"):
        pltpack.compress([base], tmp_path / "a", quality="best")
    with pytest.raises(UnsupportedError, match="block"):
        pltpack.compress([base], tmp_path / "a", block=0)
    with pytest.raises(ConflictError):
        pltpack.compress([base, base], tmp_path / "a")
    assert list(tmp_path.iterdir()) == []
    pltpack.compress([base], tmp_path / "a")
    with pytest.raises(ConflictError, match="use append"):
        pltpack.compress([base], tmp_path / "a")
    with pytest.raises(ConflictError):
        pltpack.append(tmp_path / "a", [base])
    with pytest.raises(FormatError, match="not an archive"):
        pltpack.open(tmp_path)
    with pltpack.open(tmp_path / "a") as archive:
        for layers, tokens in ((range(2, 2), None), (range(0, 4), None), (None, slice(2, 9)), (None, slice(0, 3, 2))):
            with pytest.raises(UnsupportedError, match="range"):
                archive.read("a", layers=layers, tokens=tokens)


def test_two_writers_conflict(tmp_path):
    from pltpack.format import durable

    pltpack.compress([session("a", [1, 2, 3])], tmp_path / "a")
    with durable.writer_lock(tmp_path / "a"), pytest.raises(ConflictError, match="another writer"):
        pltpack.append(tmp_path / "a", [session("b", [1])])


def test_hostile_session_names(tmp_path):
    names = ["../../etc/passwd", "a/b", ".hidden", "ünïcode ✓", "%2e%2e", "shards/x", " "]
    pltpack.compress([session(n, [1, 2]) for n in names], tmp_path / "a")
    pltpack.decompress(tmp_path / "a", tmp_path / "out")
    assert {s.session for s in pltpack.open_dumps([tmp_path / "out"])} == set(names)
    assert {p.name for p in tmp_path.iterdir()} == {"a", "out"}
    for name in ("", "x" * 201, "nul\0", "\ud800"):
        with pytest.raises(UnsupportedError):
            pltpack.compress([session(name, [1])], tmp_path / "b")


def test_every_flip_and_truncation_is_harmless_or_one_clear_error(tmp_path):
    source = tmp_path / "source"
    sessions = [session("a", [*PREFIX[:8], 1]), session("b", [*PREFIX[:8], 2], noise=1)]
    pltpack.compress(sessions, source, quality="lossless", block=4)
    files = [p.relative_to(source) for p in source.rglob("*") if p.is_file() and p.stat().st_size]
    rng = np.random.default_rng(0)
    work = tmp_path / "work"
    shutil.copytree(source, work)
    harmless = 0
    for file in files:
        data = (source / file).read_bytes()
        places = range(len(data)) if len(data) < 600 else sorted(rng.choice(len(data), 250, replace=False))
        cuts = [int(c) for c in rng.integers(0, len(data), 12)]
        damaged = [data[:i] + bytes([data[i] ^ (1 << int(rng.integers(8)))]) + data[i + 1 :] for i in places]
        for content in [*damaged, *(data[:c] for c in cuts)]:
            (work / file).write_bytes(content)
            try:
                report = pltpack.verify(work, against=sessions)
            except PltpackError as error:
                assert str(error)
                assert error.path
            else:
                assert report["differences"] == []
                assert all(row["bit_exact"] for row in report["compared"].values())
                harmless += 1
        (work / file).write_bytes(data)
    # Only white space of the manifest may change unnoticed.
    assert harmless < 60


def test_containers_are_safetensors_files(made):
    from safetensors.numpy import load_file

    _, path, _, _ = made
    for file in [*path.glob("*.pltlib"), *path.glob("shards/*.pltshard")]:
        assert "unit.payload" in load_file(file)


def test_manifest_is_readable_json(made):
    _, path, sessions, _ = made
    body = json.loads((path / "MANIFEST.json").read_text())["body"]
    assert body["generation"] == 1
    assert [s["session"] for s in body["sessions"]] == [s.session for s in sessions]


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2), max_size=14), min_size=1, max_size=5),
    st.integers(1, 5),
    st.integers(0, 4),
)
def test_any_family_survives_compress_append_compact(tmp_path_factory, ids, block, first):
    path = tmp_path_factory.mktemp("any") / "a"
    sessions = [session(f"s{i}", tokens, noise=i if i % 2 else None) for i, tokens in enumerate(ids)]
    first = min(max(first, 1), len(sessions))
    pltpack.compress(sessions[:first], path, quality="lossless", block=block)
    if sessions[first:]:
        pltpack.append(path, sessions[first:])
    for _ in range(2):
        with pltpack.open(path) as archive:
            assert all(equal_bits(archive.read(s.session), s) for s in sessions)
        pltpack.compact(path)
    pltpack.verify(path)
