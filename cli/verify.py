"""``pltpack verify``: whether an archive's bytes are as written, and its values those of the dumps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from pltpack_cli.identities import known_identity
from pltpack_cli.options import (
    PATH,
    archive_argument,
    dump_options,
    inexact_option,
    json_option,
    profile_option,
    rebuilder,
)
from pltpack_cli.output import count, plain, print_json
from pltpack_cli.progress import progress_bars


@click.command(short_help="Check an archive, also against dumps.")
@archive_argument
@click.argument("more", metavar="", type=PATH, nargs=-1)
@click.option("--against", multiple=True, type=PATH, metavar="DUMP",
              help="Decode and compare with this dump, a file or a folder; more DUMPs may follow.")  # fmt: skip
@dump_options
@profile_option
@inexact_option
@json_option
@click.pass_context
def verify(
    context: click.Context, archive: Path, more: tuple[Path, ...], against: tuple[Path, ...], format_: str | None,
    tokens: Path | None, from_options: dict[str, str], model: Path | None, known: Path | None, profile: Path | None,
    inexact: bool, as_json: bool,
) -> None:  # fmt: skip
    """Check all checksums of an archive and decode it; with --against, also compare its values with dumps.

    Exits with 1 if a session breaks its promise: a bit differs in an exact tier, tokens or identity are others, or it
    is missing; --json then prints the report all the same, with "differences". A damaged archive exits with 2.

    Of a lossy session two figures are given: the largest difference of any one value, and the relative rms error, which
    is the root mean square of the differences over that of the originals. It is taken of keys and of values, in each
    layer, over the elements that differ; the largest is shown. 0.05 means off by 5 % of their usual magnitude. What a
    model feels of that, pltpack score measures.
    """
    import pltpack
    from pltpack.errors import DifferenceError

    if more and not against:
        raise click.UsageError("more than one ARCHIVE; to compare with dumps, write --against DUMP...")
    against = (*against, *more)
    with progress_bars() as progress:
        report = pltpack.verify(archive, against=against or None, format=format_, tokens=tokens,
                                options=from_options, identity=known_identity(model, known), profile=profile,
                                rebuild=rebuilder(archive, model, inexact), progress=progress)  # fmt: skip
    print_json(report) if as_json else _print_report(report)
    if report.get("differences"):
        for difference in report["differences"]:
            click.echo(f"pltpack: difference: {plain(difference)}", err=True)
        context.exit(DifferenceError.exit_code)


def _print_report(report: Mapping[str, Any]) -> None:
    parts = f"{count(report['sessions'], 'session')} and {count(report['units'], 'unit')}"
    click.echo(f"generation {report['generation']}: {parts} are as written")
    if report["not_rebuilt"]:
        sessions = count(len(report["not_rebuilt"]), "session")
        click.echo(f"{sessions} to be made again by a model: values are not checked without --model")
    for session, row in report.get("compared", {}).items():
        if not row:
            verdict = "cannot be compared"
        elif row["bit_exact"]:
            verdict = "equal in every bit"
        else:
            verdict = (f"differs by up to {row['max_abs_difference']:.4g}, relative rms error "
                       f"{row['relative_rms_error']:.4g} (of keys or values, in the worst layer)")  # fmt: skip
        click.echo(f"{plain(session)}: {verdict}")
