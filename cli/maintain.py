"""``pltpack compact`` and ``pltpack gc``: keep an archive small and its folder clean."""

from __future__ import annotations

from pathlib import Path

import click

from pltpack_cli.options import archive_argument, budget_option, json_option
from pltpack_cli.output import count, plain, print_json, print_stats
from pltpack_cli.progress import progress_bars


@click.command(short_help="Merge the library segments of an archive.")
@archive_argument
@budget_option("Units that may stay in the library; the others, which share least per byte, go to their sessions, but "
               "for what sessions are predicted from. [default: no limit]")  # fmt: skip
@json_option
def compact(archive: Path, library_budget: int | None, as_json: bool) -> None:
    """Merge the library segments that appends have left, as a new generation; nothing is encoded again."""
    import pltpack

    with progress_bars() as progress:
        stats = pltpack.compact(archive, progress=progress, library_budget=library_budget)
    if as_json:
        print_json(stats)
    else:
        print_stats(stats, archive)
        if "eviction" in stats:
            click.echo(f"{count(stats['eviction']['evicted_nodes'], 'node')} evicted")
        click.echo(f"{count(len(stats['removed']), 'file')} removed")


@click.command(short_help="Remove leftovers of interrupted writes.")
@archive_argument
@json_option
def gc(archive: Path, as_json: bool) -> None:
    """Remove files of the archive's folder that its manifest does not name: leftovers of interrupted writes."""
    import pltpack

    removed = pltpack.gc(archive)
    if as_json:
        print_json({"removed": removed})
        return
    for name in removed:
        click.echo(plain(name))
    click.echo(f"{count(len(removed), 'file')} removed")
