"""Metrics: the figures to the last digit everywhere, counters of a loader, and a real Prometheus that scrapes them."""

from __future__ import annotations

import functools
import json
import re
import shutil
import signal
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path

import archives
import pytest
from cli_common import done, done_json, run, start
from loader_common import damage

import pltpack
from pltpack.archive.figures import Figures
from pltpack.archive.guard import ProfileGuard
from pltpack.errors import ConflictError, FormatError
from pltpack.serve import MissError
from pltpack.serve.metrics import (
    ARCHIVE_GAUGES,
    DASHBOARDS,
    ArchiveCollector,
    LoaderCollector,
    MetricsServer,
    exposition,
    register,
)

prometheus_client = pytest.importorskip("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families  # noqa: E402

FOUR = ("ratio", "kl", "ppl_change_pct", "dedup_hit_rate", "tail_bits_per_element")
PREFIX = list(range(40))


@pytest.fixture
def path(tmp_path):
    sessions = [archives.session(f"s{i}", [*PREFIX, *([80 + i] * (10 + i))]) for i in range(3)]
    pltpack.compress(sessions, tmp_path / "a", quality="lossless", block=4, guard=ProfileGuard())
    return tmp_path / "a"


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted((k, v) for k, v in sample.labels.items() if k != "archive"))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_json_and_prometheus_agree_to_the_last_digit(path):
    stats = done_json("inspect", path)["stats"]
    found = samples(done("serve-metrics", path, "--once"))
    for metric, (member, _) in ARCHIVE_GAUGES.items():
        if member in stats:
            assert found[metric, ()] == stats[member], metric
    assert {member for member, _ in ARCHIVE_GAUGES.values()} >= set(FOUR)
    assert found["pltpack_up", ()] == 1
    assert found["pltpack_kl_nats", ()] == 0 and found["pltpack_guarded_sessions", ()] == 3
    with pltpack.open(path) as archive:
        loader = archive.loader()
        same = samples(exposition(LoaderCollector(loader)))
    assert all(same[key] == value for key, value in found.items() if key[0] != "pltpack_up")
    assert Figures.of(stats) == ArchiveCollector(path).figures()
    assert done_json("serve-metrics", path, "--once")["ratio"] == stats["ratio"]


def test_unknown_quality_is_left_out_not_zero(tmp_path):
    pltpack.compress([archives.session("s", PREFIX)], tmp_path / "a", quality="q2", block=4)
    found = samples(exposition(ArchiveCollector(tmp_path / "a")))
    assert ("pltpack_kl_nats", ()) not in found and found["pltpack_scored_sessions", ()] == 0


def test_a_new_generation_and_a_lost_archive_are_seen(path):
    collector = ArchiveCollector(path)
    before = samples(exposition(collector))
    pltpack.append(path, [archives.session("more", [1, 2, 3])])
    after = samples(exposition(collector))
    assert (before["pltpack_generation", ()], after["pltpack_generation", ()]) == (1, 2)
    assert after["pltpack_sessions", ()] == 4
    shutil.rmtree(path)
    assert samples(exposition(collector)) == {("pltpack_up", ()): 0}
    with pytest.raises(FormatError):
        ArchiveCollector(path)
    assert run("serve-metrics", path).exit_code == 2


def test_a_loader_counts_what_it_does(path):
    with pltpack.open(path) as archive:
        loader, registry = archive.loader(memory=1 << 20), prometheus_client.CollectorRegistry()
        collector = register(loader, registry)
        hit = loader.lookup([*PREFIX, *[80] * 10])
        loader.load(hit)
        loader.lookup([999])
        damage(archive.shard("s1"), 0)
        with pytest.raises(MissError):
            loader.load(loader.lookup([*PREFIX, *[81] * 11]))
        loader.report(hit, 4.5)
        found = samples(prometheus_client.generate_latest(registry).decode())
        stored = sum(len(block) for block in (PREFIX, [80] * 8, PREFIX, [81] * 8))
        assert found["pltpack_loader_lookups_total", (("result", "found"),)] == 2
        assert found["pltpack_loader_lookups_total", (("result", "not found"),)] == 1
        assert found["pltpack_loader_tokens_total", (("result", "found"),)] == stored
        assert found["pltpack_loader_tokens_total", (("result", "not found"),)] == 50 + 51 + 1 - stored
        assert found["pltpack_loader_loads_total", (("source", "stored"),)] == 2
        assert sum(v for k, v in found.items() if k[0] == "pltpack_loader_misses_total") == 1
        assert found["pltpack_loader_misses_total", (("reason", next(iter(loader.misses))),)] == 1
        for stage in ("read", "check", "decode", "scatter"):
            assert found["pltpack_loader_stage_seconds_total", (("stage", stage),)] > 0
        assert found["pltpack_loader_read_bytes_total", ()] == loader.read_bytes > 0
        assert found["pltpack_loader_resident_bytes", ()] == loader.centroids["bytes"] > 0
        assert found["pltpack_loader_queue_depth", ()] == found["pltpack_loader_running_loads", ()] == 0
        assert found["pltpack_loader_alerts_total", (("level", "alert"),)] == 1
        assert found["pltpack_loader_barred_sessions", ()] == 1
        assert found["pltpack_loader_perplexity_rise_percent", ()] == 4.5
        stream = loader.stream(loader.lookup(PREFIX))
        stream.wait(0)
        del stream
    del loader, archive
    registry.unregister(collector)


def test_evictions_are_counted(path):
    with pltpack.open(path) as archive:
        everything = archive.loader()
        everything.load(everything.lookup(PREFIX))
        needed = everything.centroids["bytes"]
        assert everything.centroids["evicted"] == 0 < needed
        other = [archives.session(f"o{i}", [*range(200, 240), 90 + i]) for i in range(2)]
        pltpack.append(path, other)
    with pltpack.open(path) as archive:
        small = archive.loader(memory=int(needed * 1.5 / 0.8))
        for prompt in (PREFIX, list(range(200, 240))):
            small.load(small.lookup(prompt))
        assert small.centroids["evicted"] == 1
        assert small.centroids["bytes"] <= 1.5 * needed


def test_the_server_answers_and_says_when_it_cannot(path):
    with MetricsServer(ArchiveCollector(path), 0) as server:
        with urllib.request.urlopen(server.url) as answer:
            assert b"pltpack_compression_ratio{" in answer.read()
        port = int(server.url.rsplit(":", 1)[1].split("/")[0])
        with pytest.raises(ConflictError, match=str(port)):
            MetricsServer(ArchiveCollector(path), port)
    # A background job's SIGINT is ignored, and that is inherited.
    heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = start("serve-metrics", path, "--port", 0, preexec_fn=heed)
    try:
        url = process.stdout.readline().decode().strip()
        with urllib.request.urlopen(url) as answer:
            assert b"pltpack_up{" in answer.read()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    finally:
        process.kill()


def test_dashboard_and_rules_name_only_metrics_that_there_are(path):
    with pltpack.open(path) as archive:
        loader = archive.loader()
        known = {key[0] for key in samples(exposition(LoaderCollector(loader)))} | {"pltpack_up"}
    # These are there only once something is known.
    known |= {"pltpack_loader_perplexity_rise_percent"}
    for file in DASHBOARDS.iterdir():
        named = set(re.findall(r"\bpltpack_[a-z_]+", file.read_text()))
        assert named and named <= known, file.name
    assert Path(done("serve-metrics", path, "--dashboards").strip()) == DASHBOARDS
    board = json.loads((DASHBOARDS / "grafana.json").read_text())
    places = [panel["gridPos"] for panel in board["panels"]]
    cells = [(p["x"] + i, p["y"] + j) for p in places for i in range(p["w"]) for j in range(p["h"])]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24, "panels do not overlap"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (apt-get install prometheus)")
def test_the_rules_pass_promtool_and_fire_at_three_and_five_percent(tmp_path):
    rules = DASHBOARDS / "alerts.yml"
    subprocess.run(["promtool", "check", "rules", rules], check=True)
    found = 'pltpack_loader_lookups_total{archive="a",result="found"}'
    (tmp_path / "test.yml").write_text(f"""
rule_files: [{rules}]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - {{series: 'pltpack_loader_perplexity_rise_percent{{archive="a"}}', values: "2.9 3.1 5.1"}}
      - {{series: '{found}', values: "0+1x60"}}
      - {{series: '{found.replace("found", "not found")}', values: "0+9x60"}}
      - {{series: 'pltpack_loader_misses_total{{archive="a",reason="bad unit"}}', values: "0+1x60"}}
      - {{series: 'pltpack_loader_loads_total{{archive="a",source="stored"}}', values: "0+10x60"}}
    alert_rule_test:
      - {{eval_time: 0m, alertname: PltpackPerplexityRise}}
      - eval_time: 1m
        alertname: PltpackPerplexityRise
        exp_alerts: [{{exp_labels: {{archive: a, severity: warning}}, exp_annotations: {{
          summary: "Perplexity rose by 3.1 % over a session of a",
          description: "The session is barred; a better copy, raw caches or computing anew takes its place."}}}}]
      - {{eval_time: 1m, alertname: PltpackPerplexityRiseCritical}}
      - eval_time: 2m
        alertname: PltpackPerplexityRiseCritical
        exp_alerts: [{{exp_labels: {{archive: a, severity: critical}}, exp_annotations: {{
          summary: "Perplexity rose by 5.1 % over a session of a",
          description: "Store the session anew in a better tier, or lossless."}}}}]
      - eval_time: 50m
        alertname: PltpackHitRateLow
        exp_alerts: [{{exp_labels: {{archive: a, severity: warning}}, exp_annotations: {{
          summary: "Only 10% of prompts find something in a"}}}}]
      - eval_time: 50m
        alertname: PltpackMissRateHigh
        exp_alerts: [{{exp_labels: {{archive: a, severity: warning}}, exp_annotations: {{
          summary: "10% of loads from a come to nothing"}}}}]
""")
    done = subprocess.run(["promtool", "test", "rules", tmp_path / "test.yml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


class Prometheus:
    """A real server on a free port, that scrapes one address."""

    def __init__(self, folder: Path, target: str) -> None:
        (folder / "prometheus.yml").write_text(f"""
global: {{scrape_interval: 200ms, evaluation_interval: 200ms}}
rule_files: [{DASHBOARDS / "alerts.yml"}]
scrape_configs: [{{job_name: pltpack, static_configs: [{{targets: ["{target}"]}}]}}]
""")
        import socket

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._log = (folder / "log").open("wb")
        self._process = subprocess.Popen(
            ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
             f"--web.listen-address=127.0.0.1:{port}"], stdout=self._log, stderr=self._log)  # fmt: skip

    def get(self, path: str, **query: str):
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url) as answer:
            body = json.load(answer)
        assert body["status"] == "success", body
        return body["data"]

    def until(self, wanted, path: str, **query: str):
        """Ask until the answer is as wanted."""
        for _ in range(600):
            assert self._process.poll() is None, "prometheus has ended"
            try:
                found = self.get(path, **query)
                if wanted(found):
                    return found
            except OSError:
                pass
            time.sleep(0.1)
        raise AssertionError(f"{path} {query}")

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(60)
        self._log.close()


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus here (apt-get install prometheus)")
def test_a_real_prometheus_scrapes_a_real_loader(path, tmp_path):
    with pltpack.open(path) as archive:
        loader = archive.loader()
        prompt = [*PREFIX, *[80] * 10]
        loader.load(loader.lookup(prompt))
        with MetricsServer(LoaderCollector(loader), 0) as server:
            prometheus = Prometheus(tmp_path, server.url.removeprefix("http://").removesuffix("/metrics"))
            try:
                prometheus.until(lambda data: data["result"], "query", query="pltpack_compression_ratio")
                stats = archive.stats()
                for metric, (member, _) in ARCHIVE_GAUGES.items():
                    if member in stats:
                        (found,) = prometheus.get("query", query=metric)["result"]
                        assert float(found["value"][1]) == stats[member], metric
                loader.load(loader.lookup(prompt))
                loader.report(loader.lookup(prompt), 5.5)
                loads = "pltpack_loader_loads_total{source='stored'}"
                prometheus.until(lambda data: data["result"][0]["value"][1] == "2", "query", query=loads)
                fired = prometheus.until(lambda data: len(data["alerts"]) >= 2, "alerts")["alerts"]
                assert {alert["labels"]["alertname"] for alert in fired} == {
                    "PltpackPerplexityRise", "PltpackPerplexityRiseCritical"}  # fmt: skip
                board = json.loads((DASHBOARDS / "grafana.json").read_text())
                for expression in (target["expr"] for panel in board["panels"] for target in panel["targets"]):
                    query = expression.replace("$archive", ".*").replace("$__rate_interval", "30s")
                    assert prometheus.get("query", query=query)["result"], expression
            finally:
                prometheus.close()
