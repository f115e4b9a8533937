"""``pltpack export-session`` and ``pltpack import-session``: one session as one self-contained file."""

from __future__ import annotations

from pathlib import Path

import click

from pltpack_cli.options import PATH, archive_argument, json_option, profile_option
from pltpack_cli.output import plain, print_json, size


@click.command("export-session", short_help="Write one session as a self-contained file.")
@archive_argument
@click.argument("session")
@click.option("-o", "--output", type=PATH, required=True, metavar="FILE", help="File to write; must not exist.")
@profile_option
@json_option
def export_session(archive: Path, session: str, output: Path, profile: Path | None, as_json: bool) -> None:
    """Write SESSION of an archive, with what it shares, as one file that needs nothing else."""
    import pltpack

    file = Path(pltpack.export_session(archive, session, output, profile))
    written = file.stat().st_size
    if as_json:
        print_json({"session": session, "file": file, "bytes": written})
    else:
        click.echo(f"{plain(file)}: session {plain(session)}, {size(written)}")


@click.command("import-session", short_help="Add an exported session to an archive.")
@archive_argument
@click.argument("file", type=PATH)
@json_option
def import_session(archive: Path, file: Path, as_json: bool) -> None:
    """Add the session in FILE, written by export-session, to an archive; makes the archive if there is none."""
    import pltpack

    session = pltpack.import_session(archive, file)
    if as_json:
        print_json({"session": session, "archive": archive})
    else:
        click.echo(f"session {plain(session)} added to {plain(archive)}")
