"""What being scraped costs a loader: CPU seconds of scrapes over those of loading, in one process.

``python -m benchmarks.scraping ARCHIVE [--loads 200] [--profile P]``: loads every session again and again, scraping
between the loads, and states what share of a core scrapes take at Prometheus's usual interval of 15 seconds, and at 1
second; and what it costs to count one span of one stage.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import pltpack
from pltpack.serve.counters import Counters
from pltpack.serve.metrics import LoaderCollector, exposition


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("archive", type=Path)
    parser.add_argument("--loads", type=int, default=200)
    parser.add_argument("--profile", type=Path)
    given = parser.parse_args()
    with pltpack.open(given.archive, profile=given.profile) as archive:
        loader = archive.loader()
        collector = LoaderCollector(loader)
        hits = [loader.lookup(archive.shard(name).tokens) for name in archive.sessions]
        hits = [hit for hit in hits if hit]
        for hit in hits[:2]:
            loader.load(hit)
        exposition(collector)
        loading = scraping = 0.0
        for index in range(given.loads):
            begin = time.process_time()
            loader.load(hits[index % len(hits)])
            loading += time.process_time() - begin
            begin = time.process_time()
            size = len(exposition(collector))
            scraping += time.process_time() - begin
    counters, count = Counters(), 20_000
    begin = time.process_time()
    for _ in range(count):
        counters.span("decode", 1e-3)
    per_span = (time.process_time() - begin) / count
    each = scraping / given.loads
    print(json.dumps({
        "loads": given.loads, "cpu_seconds_per_load": loading / given.loads, "cpu_seconds_per_scrape": each,
        "bytes_per_scrape": size, "share_scraped_after_every_load": scraping / loading,
        "share_of_a_core_at_15_seconds": each / 15, "share_of_a_core_at_1_second": each,
        "cpu_seconds_per_counted_span": per_span,
    }, indent=1))  # fmt: skip


if __name__ == "__main__":
    main()
