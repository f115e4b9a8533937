"""``pltpack serve-metrics``: an archive's figures for Prometheus."""

from __future__ import annotations

import contextlib
from pathlib import Path

import click

from pltpack_cli.options import archive_argument, json_option, profile_option
from pltpack_cli.output import print_json


@click.command("serve-metrics", short_help="Serve an archive's figures to Prometheus.")
@archive_argument
@click.option("--port", type=click.IntRange(0, 65535), default=9464, show_default=True, metavar="PORT",
              help="Port to listen on; 0 for any free one.")  # fmt: skip
@click.option("--host", default="127.0.0.1", show_default=True, metavar="ADDRESS", help="Address to listen on.")
@click.option("--once", is_flag=True, help="Print the metrics and end, for a textfile collector.")
@click.option("--dashboards", is_flag=True, help="Print where the Grafana dashboard and the alert rules are, and end.")
@profile_option
@json_option
def serve_metrics(
    archive: Path, port: int, host: str, once: bool, dashboards: bool, profile: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Serve an archive's four figures, sizes and guard decisions to Prometheus, until interrupted.

    A new generation of the archive is looked at by the next scrape. A loader has metrics of its own, in its process.
    """
    from pltpack.serve.metrics import DASHBOARDS, ArchiveCollector, MetricsServer, exposition, need_metrics

    if dashboards:
        print_json({"dashboards": DASHBOARDS}) if as_json else click.echo(DASHBOARDS)
        return
    need_metrics()
    collector = ArchiveCollector(archive, profile)
    if once:
        print_json(collector.numbers()) if as_json else click.echo(exposition(collector), nl=False)
        return
    with MetricsServer(collector, port, host) as server:
        print_json({"url": server.url}) if as_json else click.echo(server.url)
        # To interrupt it is how it is stopped.
        with contextlib.suppress(KeyboardInterrupt):
            server.wait()
