"""The four figures, and the guard's record that quality is taken from."""

from __future__ import annotations

import json
import math

import archives
import numpy as np
import pytest
from cli_common import done, done_json
from hypothesis import given, settings
from hypothesis import strategies as st

import pltpack
from pltpack.archive.figures import Figures, figures
from pltpack.archive.guard_record import KEY, GuardRecord, Trial, _parsed

PREFIX = list(range(64))


@pytest.fixture(scope="module", params=["lossless", "q4"])
def path(request, tmp_path_factory):
    sessions = [archives.session(f"s{i}", PREFIX + [100 + i] * (20 + i)) for i in range(3)]
    out = tmp_path_factory.mktemp("figures") / request.param
    pltpack.compress(sessions, out, quality=request.param, block=4)
    return out


def test_figures_are_what_files_and_tables_say(path):
    with pltpack.open(path) as archive:
        stats = archive.stats()
        shards = [archive.shard(name) for name in archive.sessions]
        tail = sum(int(shard.units["length"].sum()) for shard in shards)
        tokens = sum(len(shard.tokens) for shard in shards)
        exact = sum(int(shard.exact_runs["length"].sum()) for shard in shards)
        per_token = sum(layer.elements_per_token for layer in archive.identity.layers)
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file() and file.name != ".lock")
    assert stats["ratio"] == stats["raw_bytes"] / size
    assert stats["dedup_hit_rate"] == exact / tokens > 0.5
    assert stats["tail_bits_per_element"] == 8 * tail / ((tokens - exact) * per_token) > 0
    lossless = path.name == "lossless"
    assert stats["kl"] == (0.0 if lossless else None)
    assert stats["ppl_change_pct"] == (0.0 if lossless else None)
    assert stats["scored_sessions"] == (3 if lossless else 0)


def test_text_and_json_agree_to_the_last_digit(path):
    stats = done_json("inspect", path, "--json")["stats"]
    text = done("inspect", path)
    shown = Figures.of(stats).shown()
    for name in ("ratio", "tail_bits_per_element", "dedup_hit_rate"):
        assert shown[name] in text
        digits = shown[name].rstrip("x %")
        value = stats[name] * (100 if name == "dedup_hit_rate" else 1)
        assert digits == f"{value:.{len(digits.partition('.')[2])}f}"
    assert (shown["kl"] in text) == (path.name == "lossless")


def test_nothing_stored_has_figures_too():
    found = figures(0, 100, 0, 0, 8, [])
    assert (found.ratio, found.dedup_hit_rate, found.tail_bits_per_element, found.kl) == (0, 0, 0, None)


numbers = st.none() | st.floats(-1e3, 1e3)
trials = st.builds(
    Trial, st.sampled_from(["small", "near", "lossless"]), st.sampled_from(["holds", "kl", "range"]), numbers, numbers,
    numbers, numbers, numbers, st.integers(0, 1 << 20), numbers,
)  # fmt: skip


@settings(max_examples=40)
@given(st.lists(trials, min_size=1, max_size=4), st.dictionaries(st.sampled_from(["kl", "ppl_pct"]), st.floats(0, 9)))
def test_a_record_comes_back_as_it_was_written(tried, limits):
    record = GuardRecord("small", tried[-1].tier, "captured", limits, {"energy": 2.5}, tuple(tried))
    again = _parsed(record.text())
    assert again == record
    assert again.last.ppl_change_pct == record.last.ppl_change_pct


def test_what_is_not_finite_is_no_number():
    trial = Trial("small", "not a number", kl=math.nan, nll=math.inf, nll_rebuilt=1.0)
    text = GuardRecord("small", "small", None, {}, {"energy": math.inf}, (trial,)).text()
    assert json.loads(text)["tried"][0]["kl"] is None
    again = _parsed(text)
    assert not again.last.measured and np.isnan(again.range["energy"])


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"asked":1}', "[" * 70 + "]" * 70, '{"tried":[]}',
     GuardRecord("a", "b", None, {}, {}, (Trial("t", "holds"),)).text().replace('"tokens":0', '"tokens":-1'),
     GuardRecord("a", "b", None, {}, {}, (Trial("t", "holds"),)).text().replace('"kl":null', '"kl":"x"'),
     GuardRecord("a", "b", None, {}, {}, (Trial("t" * 2000, "holds"),)).text()],
)  # fmt: skip
def test_a_record_of_another_kind_is_refused(text):
    class Shard:
        class container:  # noqa: N801
            metadata = {KEY: text}  # noqa: RUF012
            path = "shards/one.pltshard"

    from pltpack.archive.guard_record import record_of

    with pytest.raises(pltpack.PltpackError, match=r"one\.pltshard.*x-guard"):
        record_of(Shard)
