"""The page about an archive: what it says is so, and nothing that an archive holds can run in it."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import json
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from cli_common import IDENTITY, done, done_json, run, write_dump, write_dumps
from profiles_common import IDENTITY as CALIBRATED
from profiles_common import LAYERS, random_profile, save_profile, session, started, unit_of

import pltpack
from pltpack.archive import head_errors
from pltpack.archive.figures import Figures
from pltpack.archive.guard_record import GuardRecord, Trial
from pltpack.archive.provenance import provenance
from pltpack.codec.expected_error import expected_errors, unit_steps
from pltpack.codec.rows import from_rows
from pltpack.report import gather, page
from pltpack.report.markup import element, text
from pltpack.report.trie_map import nice_step

#: What a hostile dump may call its session or its model.
HOSTILE = "</script><script>window.pwned=1</script><img src=x onerror=window.pwned=1>\"'\u202e&{}"


class Parsed(html.parser.HTMLParser):
    """Elements with attributes, and the text outside of scripts and styles."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._inside = ""
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside not in ("script", "style"):
            self.text += data


def written(archive: Path, out: Path, *options: object) -> str:
    done("report", archive, "-o", out, *options)
    return out.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def lossy(dumps: Path) -> Path:
    path = dumps.parent / "q2"
    done("compress", dumps, "-o", path, "--quality", "q2")
    return path


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    identity = {**IDENTITY, "model": HOSTILE}
    for seed in (1, 2):
        ids = np.random.default_rng(0).integers(0, 1000, 96)
        path = write_dump(folder / "dumps", f"plain-{seed}", ids, seed, identity)
        rename(path, f"{HOSTILE}{seed}")
    done("compress", folder / "dumps", "-o", folder / "archive")
    return folder / "archive"


def rename(dump: Path, session: str) -> None:
    from safetensors import safe_open
    from safetensors.numpy import save_file

    with safe_open(dump, "np") as opened:
        metadata = {**opened.metadata(), "session": session}
        save_file({name: opened.get_tensor(name) for name in opened.keys()}, dump, metadata)  # noqa: SIM118


def scores_of(path: Path, archive: Path, sessions: list[str]) -> Path:
    stats = done_json("inspect", archive)["stats"]
    figures = {"kl": 0.0125, "ppl_change_pct": 1.5, "top1_pct": 97.25}
    rows = {name: {**figures, "kl": 0.001 * (3 - number)} for number, name in enumerate(sessions)}
    size = {"archive_bytes": stats["archive_bytes"], "bits_per_element": stats["bits_per_element"]}
    own = {"name": "q2", "family": "group", "total": {**figures, **size}, "sessions": rows}
    other = {"name": HOSTILE, "family": HOSTILE, "sessions": {},
             "total": {**figures, "kl": 0.1, "archive_bytes": 10, "bits_per_element": 0.5}}  # fmt: skip
    exact = {"name": "lossless", "family": "lossless", "sessions": {},
             "total": {**figures, "kl": 0.0, "archive_bytes": 99, "bits_per_element": 11.0}}  # fmt: skip
    path.write_text(json.dumps({"scores": [own, other, exact]}))
    return path


class TestPage:
    def test_it_loads_nothing(self, archive: Path, tmp_path: Path) -> None:
        source = written(archive, tmp_path / "r.html")
        parsed = Parsed(source)
        for tag, attributes in parsed.elements:
            assert tag not in {"iframe", "object", "embed", "base", "form", "img"}
            addresses = [value or "" for name, value in attributes.items() if name in ("src", "href")]
            assert all(address.startswith("data:") for address in addresses)
        assert not re.search(r"https?://|//[a-z]+\.|@import|url\(", source)

    def test_only_its_own_script_may_run(self, archive: Path, tmp_path: Path) -> None:
        source = written(archive, tmp_path / "r.html")
        (script,) = re.findall(r"<script>(.*?)</script>", source, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        (policy,) = [a["content"] or "" for tag, a in Parsed(source).elements if tag == "meta" and "http-equiv" in a]
        assert f"script-src 'sha256-{digest}'" in policy
        assert policy.startswith("default-src 'none'")
        assert not any(name.startswith("on") for _, attributes in Parsed(source).elements for name in attributes)

    @pytest.mark.parametrize("quality", ["lossless", "q2"])
    def test_figures_are_those_of_json_to_the_last_digit(
        self, quality: str, dumps: Path, archive: Path, lossy: Path, tmp_path: Path
    ) -> None:
        path = archive if quality == "lossless" else lossy
        shown = Figures.of(done_json("inspect", path)["stats"]).shown()
        seen = Parsed(written(path, tmp_path / "r.html")).text
        assert shown["ratio"].replace("x", "×") in seen
        for name in ("dedup_hit_rate", "tail_bits_per_element", "kl"):
            assert shown[name] in seen

    def test_a_session_has_a_row_and_a_place_in_the_map(self, archive: Path, tmp_path: Path) -> None:
        parsed = Parsed(written(archive, tmp_path / "r.html"))
        rows = [attributes for tag, attributes in parsed.elements if attributes.get("scope") == "row"]
        assert len(rows) >= 3
        blocks = [a["data-tip"] or "" for _, a in parsed.elements if "map-exact" in (a.get("class") or "")]
        assert [tip for tip in blocks if "2 sessions" in tip and "tokens 0–64" in tip]

    def test_hostile_names_are_text(self, hostile: Path, tmp_path: Path) -> None:
        scores = scores_of(tmp_path / "s.json", hostile, [f"{HOSTILE}{seed}" for seed in (1, 2)])
        parsed = Parsed(written(hostile, tmp_path / "r.html", "--scores", scores))
        assert sum(tag == "script" for tag, _ in parsed.elements) == 1
        assert not any(tag == "img" for tag, _ in parsed.elements)
        assert parsed.text.count("<script>window.pwned=1</script>") >= 4
        assert "\u202e" not in parsed.text
        assert "\\u202e" in parsed.text

    def test_without_sessions_of_note_it_says_so(self, lossy: Path, tmp_path: Path) -> None:
        seen = Parsed(written(lossy, tmp_path / "r.html")).text
        assert "Not measured. Score the archive" in seen
        assert "Not measured, and there is no profile" in seen
        assert "No guard looked at these sessions" in seen

    def test_guard_decisions_are_shown(self, lossy: Path) -> None:
        record = GuardRecord(
            "small", "lossless", "captured", {"kl": 0.025, "ppl_pct": 2.0}, {"energy": 51.5},
            (Trial("small", "kl", kl=0.31, nll=2.0, nll_rebuilt=2.1, tokens=128), Trial("lossless", "holds")),
        )  # fmt: skip
        with pltpack.open(lossy) as opened:
            found = gather(opened)
        found["archive"]["sessions"][0]["guard"] = record.to_json()
        seen = Parsed(page(found, "0")).text
        assert "stepped 1 up (100.0 %)" in seen
        assert "small (kl) → lossless" in seen
        assert "energy 51.5" in seen

    def test_it_is_replaced_whole_or_stays(self, archive: Path, lossy: Path, tmp_path: Path) -> None:
        out = tmp_path / "r.html"
        before = written(archive, out)
        bad = tmp_path / "scores.json"
        bad.write_text('{"scores": [{"name": 1}]}')
        result = run("report", lossy, "-o", out, "--scores", bad)
        assert result.exit_code == 2
        assert "scores.json: not what pltpack score --json prints" in result.stderr
        assert out.read_text(encoding="utf-8") == before
        assert sorted(path.name for path in tmp_path.iterdir()) == ["r.html", "scores.json"]
        assert written(lossy, out) != before

    def test_it_replaces_pages_only(self, archive: Path, tmp_path: Path) -> None:
        key = tmp_path / "key"
        key.write_bytes(b"k" * 32)
        for taken, fact in ((key, "does not begin with"), (archive / "MANIFEST.json", "folder of an archive")):
            before = taken.read_bytes()
            for command in (("report", archive, "-o", taken), ("inspect", archive, "--trie", "--svg", taken)):
                result = run(*command)
                assert result.exit_code == 2
                assert fact in result.stderr and str(taken) in result.stderr
                assert taken.read_bytes() == before
        done("verify", archive)


class TestScores:
    def test_the_archive_is_found_by_its_size(self, lossy: Path, tmp_path: Path) -> None:
        scores = scores_of(tmp_path / "s.json", lossy, ["alpha", "beta", "gamma"])
        assert done_json("report", lossy, "-o", tmp_path / "r.html", "--scores", scores)["scored"] is True
        seen = Parsed((tmp_path / "r.html").read_text(encoding="utf-8")).text
        assert "q2: this archive" in seen
        assert "KL 0.01250 nats, perplexity +1.50 %" in seen
        assert "0.0030" in seen

    @pytest.mark.parametrize(
        "content",
        ["", "[]", '{"scores": 3}', '{"scores": [3]}', "\x00", "[" * 100000,
         '{"scores": [{"name": "a", "family": "b", "total": {"kl": 1e999, "ppl_change_pct": 0, "top1_pct": 0},'
         ' "sessions": {}}]}',
         '{"scores": [{"name": "a", "family": "b", "total": {"kl": 1, "ppl_change_pct": 0, "top1_pct": 0,'
         ' "bits_per_element": -1}, "sessions": {}}]}'],
    )  # fmt: skip
    def test_other_files_are_one_clear_error(self, content: str, archive: Path, tmp_path: Path) -> None:
        (tmp_path / "s.json").write_text(content)
        result = run("report", archive, "-o", tmp_path / "r.html", "--scores", tmp_path / "s.json")
        assert result.exit_code == 2
        assert "s.json: not what pltpack score --json prints" in result.stderr
        assert not (tmp_path / "r.html").exists()

    def test_a_missing_file_is_named(self, archive: Path, tmp_path: Path) -> None:
        result = run("report", archive, "-o", tmp_path / "r.html", "--scores", tmp_path / "none")
        assert result.exit_code == 2
        assert "none: no such file" in result.stderr


class TestProvenance:
    def test_bytes_add_up_to_the_archive(self, archive: Path, lossy: Path) -> None:
        for path in (archive, lossy):
            with pltpack.open(path) as opened:
                found, stats = provenance(opened), opened.stats()
            size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file() and file.name != ".lock")
            assert sum(found["bytes"].values()) == size == stats["archive_bytes"]
            assert all(part >= 0 for part in found["bytes"].values())
            assert abs(found["saved"]["exact"] + found["saved"]["near"] - stats["saved_bytes"]) <= 2
            assert sum(row["bytes"] for row in found["codecs"]) == sum(
                found["bytes"][part] for part in ("library", "own", "predicted", "corrections")
            )

    def test_spans_are_the_prefix_that_is_shared(self, archive: Path) -> None:
        with pltpack.open(archive) as opened:
            spans = provenance(opened)["spans"]
        for name in ("alpha", "beta"):
            (span,) = spans[name]
            assert (span["start"], span["length"], span["kind"], span["shift"]) == (0, 64, "exact", 0)
        assert spans["gamma"] == []


class TestErrors:
    def test_measured_errors_are_those_of_the_values(self, dumps: Path, lossy: Path, tmp_path: Path) -> None:
        given = list(pltpack.dumps.open_dumps([dumps]))
        with pltpack.open(lossy) as opened:
            found = head_errors.measured(opened, given, lambda *_: None)
            energy, error = np.zeros(2), np.zeros(2)
            for dump in given:
                a, b = (x.layer(1)[1].astype(np.float64) for x in (dump, opened.read(dump.session)))
                changed = (a != b).any(axis=2)
                error += np.square(a - b).sum(axis=(1, 2))
                energy += (np.square(a).sum(axis=2) * changed).sum(axis=1)
        np.testing.assert_allclose(found["values"][1], np.sqrt(error / energy), rtol=1e-6)
        assert 0.05 < found["values"][1][0] < 0.6
        assert done_json("report", lossy, "-o", tmp_path / "r.html", "--against", dumps)["errors"] == "measured"
        seen = Parsed((tmp_path / "r.html").read_text(encoding="utf-8"))
        cells = [a["data-tip"] for _, a in seen.elements if a.get("class") == "cell"]
        assert f"layer 1, values of head 0: {100 * found['values'][1][0]:.1f} %" in cells

    def test_what_is_exact_has_none(self, dumps: Path, archive: Path, tmp_path: Path) -> None:
        seen = Parsed(written(archive, tmp_path / "r.html", "--against", dumps)).text
        assert "every value is kept bit for bit" in seen
        assert "bit-exact codecs" in Parsed(written(archive, tmp_path / "r.html")).text

    def test_other_dumps_are_refused(self, lossy: Path, tmp_path: Path) -> None:
        other = write_dumps(tmp_path / "other", {**IDENTITY, "model": "other"})
        result = run("report", lossy, "-o", tmp_path / "r.html", "--against", other)
        assert result.exit_code == 2
        assert "model" in result.stderr
        write_dump(tmp_path / "new", "delta", np.arange(40), 1, IDENTITY)
        result = run("report", lossy, "-o", tmp_path / "r.html", "--against", tmp_path / "new")
        assert result.exit_code == 2
        assert "delta" in result.stderr

    def test_lost_values_are_told(self) -> None:
        kept = np.array([[[1.0, np.inf], [2.0, 3.0]], [[1.0, 1.0], [1.0, 1.0]]], np.float32)
        lost = kept.copy()
        lost[0, 0, 1] = 5.0
        assert head_errors._ratios(head_errors._energies(kept, kept)) == [0.0, 0.0]
        assert head_errors._ratios(head_errors._energies(kept, lost)) == [None, 0.0]

    def test_the_profile_expects_what_comes(self) -> None:
        tokens, rng = 1500, np.random.default_rng(5)
        codec = started(random_profile(), step=0.25)
        profile = codec.profile
        before, after = empty_arrays(tokens), empty_arrays(tokens)
        steps: dict[int, int] = {}
        for group in profile.groups:
            layers = range(group.start, group.stop)
            unit = unit_of(layers, tokens, position=64)
            shared = profile.unwhitened(profile.shared(group), layers)
            scale = np.exp2(profile.shared_log[group.component] / 24)
            rows = (rng.normal(size=(tokens, len(scale))) * scale) @ shared
            for layer in layers:
                part = slice(profile.rows[layer], profile.rows[layer + 1])
                drawn = rng.normal(size=(tokens, part.stop - part.start)) * np.exp2(profile.local_log[part] / 24)
                inner = slice(part.start - group.first, part.stop - group.first)
                rows[:, inner] += drawn @ profile.unwhitened(profile.local(layer), range(layer, layer + 1))
            rows += profile.mean[group.first : group.last]
            mine = slice(group.start, group.stop)
            from_rows(rows.astype(np.float32), before[mine], LAYERS[mine], CALIBRATED, 64)
            payload = codec.encode_span(unit, before[mine])
            codec.decode_span(memoryview(payload), unit, after[mine])
            found, counts = np.unique(unit_steps(payload, tokens), return_counts=True)
            steps = dict(zip(found.tolist(), counts.tolist(), strict=True))
        expected = expected_errors(codec, steps)
        assert expected is not None
        for kind, name in enumerate(("keys", "values")):
            for layer in range(len(LAYERS)):
                error = head_errors._ratios(head_errors._energies(before[layer][kind], after[layer][kind]))
                np.testing.assert_allclose(error, expected[name][layer], rtol=0.15)


def empty_arrays(tokens: int) -> list[tuple[np.ndarray, np.ndarray]]:
    kind = ml_dtypes.bfloat16
    return [(np.empty((g.heads, tokens, g.k_dim), kind), np.empty((g.heads, tokens, g.v_dim), kind)) for g in LAYERS]


class TestMarkup:
    def test_text_cannot_become_markup(self) -> None:
        assert text("<a&\"'\x00\x1b\u202e>") == "&lt;a&amp;&quot;&#x27;\\x00\\x1b\\u202e&gt;"
        assert element("b", "<", title='"', class_="x", data_tip=None) == '<b title="&quot;" class="x">&lt;</b>'
        assert len(text("a" * 100_000)) <= 4000

    @pytest.mark.parametrize("longest", [1, 7, 40, 99, 100, 999, 1024, 812, 131072, 10**7])
    def test_axes_have_a_few_round_places(self, longest: int) -> None:
        step = nice_step(longest)
        assert step >= 1
        assert longest // step <= 5
        assert str(step).strip("0") in {"1", "2", "5"}


def test_tiers_of_one_profile_are_predicted_together(tmp_path: Path) -> None:
    ids = np.random.default_rng(3).integers(10, 200, 300)
    profile = save_profile(tmp_path / "toy.safetensors")
    pltpack.compress([session("a", ids[:100])], tmp_path / "a", profile=profile, quality="small")
    pltpack.append(tmp_path / "a", [session("b", ids[100:250])], quality="near")
    with pltpack.open(tmp_path / "a") as opened:
        both = head_errors.predicted(opened)
        assert len({id(library.codec(i)) for library in opened.libraries for i in range(len(library.states))}) == 2
    assert both is not None
    assert [len(heads) for heads in both["keys"]] == [layer.heads for layer in LAYERS]
    pltpack.append(tmp_path / "a", [session("c", ids[250:])], quality="q4")
    with pltpack.open(tmp_path / "a") as opened:
        assert head_errors.predicted(opened) is None
