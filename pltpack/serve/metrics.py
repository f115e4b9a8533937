"""Prometheus metrics of archives and of loaders (docs/metrics.md lists them).

Nothing is counted for Prometheus alone: collectors read, when they are scraped, what `pltpack.archive.figures` and the
loader's counters say anyhow. Needs the extra ``metrics`` (prometheus_client), imported on first use.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pltpack.archive.figures import Figures
from pltpack.archive.guard_record import record_of
from pltpack.archive.reader import Archive
from pltpack.errors import ConflictError, PltpackError, UnsupportedError
from pltpack.store import open_store

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

    from pltpack.serve.loader import Loader

log = logging.getLogger("pltpack.serve")

#: Folder of the Grafana dashboard and the alert rules.
DASHBOARDS = Path(__file__).with_name("dashboards")

#: Metric -> member of an archive's statistics, and what it is. The first five are the four figures.
ARCHIVE_GAUGES = {
    "pltpack_compression_ratio": ("ratio", "Raw bytes of keys and values over all bytes of the archive."),
    "pltpack_kl_nats": ("kl", "Mean KL divergence of the sessions whose quality is known, nats a token."),
    "pltpack_perplexity_change_percent": ("ppl_change_pct", "Change of perplexity of the same sessions."),
    "pltpack_dedup_hit_rate": ("dedup_hit_rate", "Tokens whose values come from the library, over all tokens."),
    "pltpack_tail_bits_per_element": ("tail_bits_per_element", "Bits per element of what no other session has."),
    "pltpack_worst_kl_nats": ("worst_kl", "Largest KL divergence of a session whose quality is known."),
    "pltpack_scored_sessions": ("scored_sessions", "Sessions whose quality is known."),
    "pltpack_sessions": ("sessions", "Sessions of the archive."),
    "pltpack_tokens": ("tokens", "Tokens of all sessions."),
    "pltpack_raw_bytes": ("raw_bytes", "Keys and values as dumped."),
    "pltpack_archive_bytes": ("archive_bytes", "Manifest, library and shards."),
    "pltpack_bits_per_element": ("bits_per_element", "Bits per element, everything counted."),
    "pltpack_generation": ("generation", "Generation of the archive."),
    "pltpack_guarded_sessions": ("guarded", "Sessions with a guard's record."),
    "pltpack_stepped_up_sessions": ("stepped_up", "Sessions that a guard moved to a better tier."),
}


def need_metrics() -> None:
    """Check that the extra ``metrics`` is installed.

    Raises
    ------
    UnsupportedError
        Saying what to install.
    """
    try:
        import prometheus_client  # noqa: F401
    except ImportError:
        raise UnsupportedError("prometheus_client is not installed: pip install 'pltpack[metrics]'") from None


def archive_numbers(archive: Archive) -> dict[str, Any]:
    """What `ARCHIVE_GAUGES` names: an archive's statistics, its generation, and what guards decided."""
    records = [record_of(archive.shard(name)) for name in archive.sessions]
    guarded = [record for record in records if record is not None]
    return {
        **archive.stats(), "generation": archive.manifest.generation, "guarded": len(guarded),
        "stepped_up": sum(record.kept != record.asked for record in guarded),
    }  # fmt: skip


def archive_metrics(numbers: Mapping[str, Any], name: str) -> Iterator[Metric]:
    """Gauges of an archive's numbers, labelled by its path; what is not known is left out."""
    from prometheus_client.core import GaugeMetricFamily

    for metric, (member, text) in ARCHIVE_GAUGES.items():
        if numbers[member] is not None:
            gauge = GaugeMetricFamily(metric, text, labels=["archive"])
            gauge.add_metric([name], numbers[member])
            yield gauge


class ArchiveCollector:
    """Metrics of an archive on disk: looked at anew when there is a new generation.

    Parameters
    ----------
    path : path-like
    profile : path-like, optional
        The profile of an archive that refers to one outside; see `Archive`.

    Raises
    ------
    PltpackError
        If it cannot be read now. Later it is ``pltpack_up`` that says so.
    """

    def __init__(self, path: str | os.PathLike[str], profile: str | os.PathLike[str] | None = None) -> None:
        self._store, self._profile = open_store(path), profile
        self.path: Any = self._store.location
        self._lock = threading.Lock()
        self._known: tuple[int, dict[str, Any]] | None = None
        self.numbers()

    def numbers(self) -> dict[str, Any]:
        """See `archive_numbers`."""
        with self._lock:
            generation = self._store.load().manifest.generation
            if self._known is None or self._known[0] != generation:
                with Archive(self._store, profile=self._profile) as archive:
                    found = archive.in_one_generation(lambda: archive_numbers(archive))
                self._known = found["generation"], found
            return self._known[1]

    def figures(self) -> Figures:
        """The four figures."""
        return Figures.of(self.numbers())

    def collect(self) -> Iterator[Metric]:
        """What a scrape gets."""
        from prometheus_client.core import GaugeMetricFamily

        up = GaugeMetricFamily("pltpack_up", "Whether the archive can be read.", labels=["archive"])
        try:
            yield from archive_metrics(self.numbers(), str(self.path))
            up.add_metric([str(self.path)], 1)
        except (PltpackError, OSError) as error:
            log.warning("metrics of an archive: %s", error)
            up.add_metric([str(self.path)], 0)
        yield up


class LoaderCollector:
    """Metrics of a loader in this process, and of its archive; holds neither of them.

    Parameters
    ----------
    loader : Loader
    """

    #: Counter -> name among the loader's counters, its label, and what it is.
    COUNTERS = {  # noqa: RUF012
        "pltpack_loader_lookups": ("lookups", "result", "Look-ups of prompts, by whether something was stored."),
        "pltpack_loader_tokens": ("tokens", "result", "Tokens of prompts that were looked up, by whether they were "
                                  "stored."),
        "pltpack_loader_loads": ("loads", "source", "Loads begun: stored, or raw where a session is barred."),
        "pltpack_loader_stage_seconds": ("stage_seconds", "stage", "Seconds of work by stage, over all threads."),
        "pltpack_loader_alerts": ("alerts", "level", "Sessions barred for their quality."),
        "pltpack_loader_fallbacks": ("fallbacks", "kind", "Look-ups of barred sessions, by what took their place."),
    }  # fmt: skip
    #: Labels that are there from the start, so that rates can be taken of their first increase.
    ALWAYS = {  # noqa: RUF012
        "lookups": ("found", "not found"), "tokens": ("found", "not found"), "loads": ("stored", "raw"),
        "stage_seconds": ("read", "check", "decode", "scatter"), "alerts": ("alert", "critical"),
        "fallbacks": ("better copy", "raw", "recompute"),
    }  # fmt: skip
    REASONS = ("bad unit", "bad shard", "missing file", "missing profile", "stale", "identity", "read error",
               "out of memory", "timeout", "cancelled", "error")  # fmt: skip

    def __init__(self, loader: Loader) -> None:
        self._loader = weakref.ref(loader)
        self._lock = threading.Lock()
        self._known: tuple[int, dict[str, Any]] | None = None

    def collect(self) -> Iterator[Metric]:
        """What a scrape gets; nothing when the loader is gone."""
        loader = self._loader()
        if loader is None:
            return
        name = str(loader.archive.path)
        yield from self._counted(loader, name)
        yield from self._gauges(loader, name)
        try:
            yield from archive_metrics(self._numbers(loader), name)
        except (PltpackError, OSError) as error:
            log.warning("metrics of an archive: %s", error)

    def _numbers(self, loader: Loader) -> dict[str, Any]:
        archive = loader.archive
        with self._lock:
            if self._known is None or self._known[0] != archive.manifest.generation:
                found = archive.in_one_generation(lambda: archive_numbers(archive))
                self._known = found["generation"], found
            return self._known[1]

    def _counted(self, loader: Loader, name: str) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily

        for metric, (counted, label, text) in self.COUNTERS.items():
            found = loader.counters.of(counted)
            counter = CounterMetricFamily(metric, text, labels=["archive", label])
            for value in dict.fromkeys((*self.ALWAYS[counted], *found)):
                counter.add_metric([name, value], found.get(value, 0))
            yield counter
        misses = loader.misses
        text = "Loads that came to nothing."
        counter = CounterMetricFamily("pltpack_loader_misses", text, labels=["archive", "reason"])
        for reason in dict.fromkeys((*self.REASONS, *misses)):
            counter.add_metric([name, reason], misses.get(reason, 0))
        yield counter
        kept = loader.centroids
        for metric, count, text in (
            ("pltpack_loader_read_bytes", loader.read_bytes, "Payload bytes read."),
            ("pltpack_loader_centroid_hits", kept["hits"], "Library units that were there, decoded."),
            ("pltpack_loader_centroids_decoded", kept["decoded"], "Library units that had to be decoded."),
            ("pltpack_loader_evictions", kept["evicted"], "Centroids freed for others."),
        ):
            counter = CounterMetricFamily(metric, text, labels=["archive"])
            counter.add_metric([name], count)
            yield counter

    def _gauges(self, loader: Loader, name: str) -> Iterator[Metric]:
        from prometheus_client.core import GaugeMetricFamily

        kept, (running, queued) = loader.centroids, loader.in_flight()
        worst = loader.guard.worst()
        for metric, value, text in (
            ("pltpack_loader_resident_bytes", kept["bytes"], "Centroids in memory, decoded or encoded."),
            ("pltpack_loader_resident_budget_bytes", kept["budget"], "Most bytes of centroids that are not pinned."),
            ("pltpack_loader_running_loads", running, "Loads under way."),
            ("pltpack_loader_queue_depth", queued, "Units that wait between stages."),
            ("pltpack_loader_barred_sessions", len(loader.guard.all_barred()), "Sessions barred for their quality."),
            ("pltpack_loader_perplexity_rise_percent", worst, "Largest rise of perplexity that was last reported of a "
             "session."),
        ):  # fmt: skip
            if value is not None:
                gauge = GaugeMetricFamily(metric, text, labels=["archive"])
                gauge.add_metric([name], value)
                yield gauge


def register(loader: Loader, registry: CollectorRegistry | None = None) -> LoaderCollector:
    """Expose a loader in a registry, prometheus_client's own by default; ``registry.unregister`` takes it out again.

    Raises
    ------
    UnsupportedError
        If prometheus_client is not installed.
    """
    need_metrics()
    import prometheus_client

    collector = LoaderCollector(loader)
    (registry or prometheus_client.REGISTRY).register(collector)
    return collector


class MetricsServer:
    """Metrics of an archive over HTTP; a context manager.

    Parameters
    ----------
    collector : ArchiveCollector or LoaderCollector
    port : int
        0 for any free one.
    host : str
        Address to listen on.

    Raises
    ------
    UnsupportedError
        If prometheus_client is not installed.
    ConflictError
        If the address cannot be used.

    Attributes
    ----------
    url : str
    """

    def __init__(self, collector: Any, port: int = 9464, host: str = "127.0.0.1") -> None:
        need_metrics()
        from prometheus_client import CollectorRegistry, start_http_server

        registry = CollectorRegistry()
        registry.register(collector)
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except (OSError, OverflowError) as error:
            raise ConflictError(f"cannot listen on {host}:{port} ({error})") from None
        self.url = f"http://{host}:{self._server.server_port}/metrics"

    def wait(self) -> None:
        """Serve until somebody closes it."""
        self._thread.join()

    def close(self) -> None:
        """Stop serving; harmless when repeated."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def exposition(collector: Any) -> str:
    """What a scrape of a collector gets, as text."""
    need_metrics()
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(collector)
    return generate_latest(registry).decode()
