"""What later sessions share with the shards of earlier ones moves to the library, and everybody's values stay."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from archives import equal_bits, relative_error
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from near_common import IDENTITY, passage, session
from profiles_common import save_profile

import pltpack
from pltpack.archive.encoding import relative_error as encoding_error
from pltpack.archive.extract import verify
from pltpack.archive.publish import Movable
from pltpack.snapshot import Snapshot

sys.path.insert(0, str(Path(__file__).parent.parent / "spec"))

from reference_decoder import decode

TIERS = ("lossless", "q4", "q2", "turboquant-4", "near")
#: Largest relative error that a tier makes on these sessions.
LOSSY = {"q4": 0.1, "q2": 0.5, "turboquant-4": 0.2, "near": 0.6}


@pytest.fixture(scope="module")
def profile(tmp_path_factory) -> Path:
    return save_profile(tmp_path_factory.mktemp("profile") / "p.safetensors", IDENTITY, kl=(-9.0, 1.0))


def given_to(quality: str, profile: Path) -> dict[str, object]:
    return {"quality": quality, "profile": profile if quality == "near" else None}


def size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def turns() -> list[Snapshot]:
    """A conversation after one turn, after two, and after three."""
    ids = [*passage(1, 300), *passage(2, 190), *passage(3, 150)]
    return [session(f"turn-{number}", ids[:end]) for number, end in enumerate((300, 490, 640))]


def check(path: Path, sessions: list[Snapshot], quality: str) -> None:
    with pltpack.open(path) as archive:
        for each in sessions:
            if quality == "lossless":
                assert equal_bits(archive.read(each.session), each)
            else:
                assert relative_error(each, archive.read(each.session)) < LOSSY[quality]
    assert verify(path)["sessions"] == len(sessions)


@pytest.mark.parametrize("quality", TIERS)
def test_a_conversations_next_turn_takes_what_is_new_in_it(tmp_path, profile, quality):
    sessions = turns()
    together = pltpack.compress(sessions, tmp_path / "together", **given_to(quality, profile))
    pltpack.compress(sessions[:1], tmp_path / "a", **given_to(quality, profile))
    with pltpack.open(tmp_path / "a") as archive:
        before = archive.read("turn-0")
        for each in sessions[1:]:
            stats = pltpack.append(tmp_path / "a", [each])
        # A reader of an earlier generation goes on.
        assert len(archive.read("turn-0").layer(1)[0])
    assert stats["archive_bytes"] < 1.1 * together["archive_bytes"]
    assert size(tmp_path / "a") == stats["archive_bytes"], "replaced shards are gone"
    check(tmp_path / "a", sessions, quality)
    with pltpack.open(tmp_path / "a") as archive:
        for layer in range(2):
            for old, new in zip(before.layer(layer), archive.read("turn-0").layer(layer), strict=True):
                assert np.array_equal(old.view(np.uint16), new.view(np.uint16)), "units move as they are"
        assert archive.stats()["shared_tokens"] >= 2 * 288 + 480
        assert [entry.session for entry in archive.manifest.sessions] == ["turn-0", "turn-1", "turn-2"]
    compacted = pltpack.compact(tmp_path / "a")
    assert compacted["archive_bytes"] <= stats["archive_bytes"]
    check(tmp_path / "a", sessions, quality)


@pytest.mark.parametrize("quality", ["lossless", "q4"])
def test_the_reference_decoder_reads_what_was_moved(tmp_path, profile, quality):
    pltpack.compress(turns()[:1], tmp_path / "a", **given_to(quality, profile))
    pltpack.append(tmp_path / "a", turns()[1:2])
    decode(tmp_path / "a", tmp_path / "reference")
    pltpack.decompress(tmp_path / "a", tmp_path / "own")
    for file in sorted((tmp_path / "own").iterdir()):
        assert file.read_bytes() == (tmp_path / "reference" / file.name).read_bytes()


def test_a_passage_of_an_earlier_shard_predicts_a_new_session(tmp_path):
    quality = "lossless"
    first = session("first", [*passage(1, 40), *passage(2, 500)])
    second = session("second", [*passage(3, 70), *passage(2, 500), *passage(4, 30)])
    pltpack.compress([first], tmp_path / "a", quality=quality)
    alone = pltpack.compress([second], tmp_path / "b", quality=quality)
    before = size(tmp_path / "a")
    stats = pltpack.append(tmp_path / "a", [second])
    assert stats["predicted_tokens"] >= 490
    assert stats["archive_bytes"] - before < 0.75 * alone["archive_bytes"]
    check(tmp_path / "a", [first, second], quality)


def test_only_whole_units_that_stand_alone_move(tmp_path):
    new = passage(6, 110)
    pltpack.compress([session("twice", [*new, *passage(9, 40), *new])], tmp_path / "a", quality="lossless")
    with pltpack.open(tmp_path / "a") as archive:
        movable = Movable(archive.shard("twice"))
    assert movable.extents == [(110, 150)], "the first is in the library, the second is predicted"


def test_nothing_moves_for_nobody(tmp_path):
    pltpack.compress([session("one", passage(1, 200), salt="x")], tmp_path / "a", quality="lossless")
    before = {path.name for path in (tmp_path / "a").rglob("*")}
    pltpack.append(tmp_path / "a", [session("other tenant", passage(1, 200), salt="y")])
    pltpack.append(tmp_path / "a", [session("other text", passage(2, 200), salt="x")])
    pltpack.append(tmp_path / "a", [session("no sharing", passage(1, 200), salt="x")], dedup=False)
    with pltpack.open(tmp_path / "a") as archive:
        assert all(len(archive.shard(name).runs) == 0 for name in archive.sessions)
    assert before <= {path.name for path in (tmp_path / "a").rglob("*")}


def test_an_exact_session_does_not_share_what_another_tier_coded(tmp_path):
    first, second = turns()[:2]
    pltpack.compress([first], tmp_path / "a", quality="q2")
    pltpack.append(tmp_path / "a", [second], quality="lossless")
    with pltpack.open(tmp_path / "a") as archive:
        assert equal_bits(archive.read("turn-1"), second)
        assert relative_error(first, archive.read("turn-0")) < LOSSY["q2"]


@pytest.mark.parametrize("quality", ["lossless", "near"])
def test_what_moves_has_the_error_of_its_own_codec(tmp_path, profile, quality):
    """An append of another tier must not say of lossy units that they are exact, or as near as its own would be."""
    first = session("first", [*passage(1, 40), *passage(2, 300)])
    second = session("second", [*passage(3, 70), *passage(2, 300)])
    pltpack.compress([session("other", passage(8, 64))], tmp_path / "a", **given_to(quality, profile))
    pltpack.append(tmp_path / "a", [first], quality="q4")
    stats = pltpack.append(tmp_path / "a", [second], **given_to(quality, profile))
    assert stats["predicted_tokens"] > 200
    with pltpack.open(tmp_path / "a") as archive:
        moved = [(library, unit) for library in archive.libraries for unit in library.units
                 if library.state_entry(int(unit["state"])) == ("group", {"bits": 4})]  # fmt: skip
        assert moved
        for library, unit in moved:
            at, layer = library.position_of(unit), int(unit["layer"])
            kept = first.layer(layer, at, at + int(unit["token_count"]))
            true = encoding_error(kept, library.decode(unit))
            assert 0.5 * true < unit["error"] < 2 * true


def test_another_models_values_are_not_taken_for_the_sessions_own(tmp_path):
    first, other = turns()[0], session("other", turns()[1].tokens, seed=5)
    pltpack.compress([first], tmp_path / "a", quality="q2")
    pltpack.append(tmp_path / "a", [other])
    check(tmp_path / "a", [first, other], "q2")


def test_a_budget_leaves_no_room_for_what_would_move(tmp_path):
    pltpack.compress(turns()[:1], tmp_path / "a", quality="lossless")
    pltpack.append(tmp_path / "a", turns()[1:2], library_budget=1000)
    with pltpack.open(tmp_path / "a") as archive:
        assert sum(int(library.units["length"].sum()) for library in archive.libraries) <= 1000
    check(tmp_path / "a", turns()[:2], "lossless")


@settings(deadline=None, max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=2, max_size=4), st.randoms())
def test_any_order_of_passages_stays_exact(tmp_path_factory, plans, random):
    parts = [passage(n, 60 + 17 * n) for n in range(4)]
    sessions = [session(f"s{i}", [t for part in plan for t in parts[part]][random.randrange(9) :])
                for i, plan in enumerate(plans)]  # fmt: skip
    path = tmp_path_factory.mktemp("order") / "a"
    pltpack.compress(sessions[:1], path, quality="lossless", block=16)
    for each in sessions[1:]:
        pltpack.append(path, [each])
    check(path, sessions, "lossless")


@pytest.mark.parametrize("quality, seed, context", [("q4", 0, 0.3), ("q2", 0, 0.6), ("q1", 1, 0.05), ("near", 0, 0.3)])
def test_a_session_that_is_not_near_enough_keeps_its_own_values(tmp_path, profile, quality, seed, context):
    first = session("first", passage(1, 300))
    other = session("other", passage(1, 300), seed=seed, context=context)
    pltpack.compress([first], tmp_path / "a", **given_to(quality, profile))
    pltpack.append(tmp_path / "a", [other])
    pltpack.compress([other], tmp_path / "b", **given_to(quality, profile))
    with pltpack.open(tmp_path / "a") as archive, pltpack.open(tmp_path / "b") as alone:
        assert relative_error(other, archive.read("other")) < 1.1 * relative_error(other, alone.read("other"))
