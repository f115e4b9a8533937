"""``pltpack decompress``: an archive, or part of it, back as dumps."""

from __future__ import annotations

from pathlib import Path

import click

from pltpack_cli.identities import engine_options, identity_file, known_identity
from pltpack_cli.options import (
    FORMAT,
    IDENTITY_FIELDS,
    PATH,
    Span,
    archive_argument,
    device_option,
    inexact_option,
    json_option,
    profile_option,
    rebuilder,
    write_options,
)  # fmt: skip
from pltpack_cli.output import count, plain, print_json, size
from pltpack_cli.progress import progress_bars


@click.command(short_help="An archive, or part of it, back as dumps.")
@archive_argument
@click.option("-o", "--output", type=PATH, required=True, metavar="OUT",
              help="Folder to make (for hdf5, a file); must not exist.")  # fmt: skip
@click.option("--to", type=FORMAT, default="safetensors", show_default=True, help="Format to write.")
@write_options
@click.option("--session", "sessions", multiple=True, metavar="ID", help="Only this session; may be repeated.")
@click.option("--layers", type=Span(), help="Only these layers, B not included; numbered from 0 in the output.")
@click.option("--tokens", type=Span(), help="Only these token positions, B not included.")
@click.option("--identity", type=PATH, metavar="FILE",
              help="A dump, or a JSON file with an identity: the archive's must match it.")  # fmt: skip
@click.option("--accept-unknown", multiple=True, type=click.Choice(IDENTITY_FIELDS), metavar="FIELD",
              help="With --identity, take an archive that does not record this field; may be repeated.")  # fmt: skip
@profile_option
@click.option("--model", type=PATH, metavar="DIR",
              help="Folder of the model, for sessions that it makes again.")  # fmt: skip
@inexact_option
@device_option
@json_option
def decompress(
    archive: Path, output: Path, to: str, to_options: dict[str, str], target: Path | None, sessions: tuple[str, ...],
    layers: slice | None, tokens: slice | None,
    identity: Path | None, accept_unknown: tuple[str, ...], profile: Path | None, model: Path | None,
    inexact: bool, device: str, as_json: bool,
) -> None:  # fmt: skip
    """Write the sessions of an archive as dumps; values have their original dtype."""
    import pltpack

    with progress_bars() as progress:
        files = pltpack.decompress(
            archive, output, to=to, options=engine_options(to_options, to, target),
            target=known_identity(target, None), sessions=sessions or None, layers=_layers(archive, layers),
            tokens=tokens, identity=identity_file(identity), accept_unknown=accept_unknown, profile=profile,
            device=device, rebuild=rebuilder(archive, model, inexact), progress=progress,
        )  # fmt: skip
    if as_json:
        print_json({"output": output, "format": to, "files": files})
    else:
        click.echo(f"{plain(output)}: {count(len(files), 'file')}, {size(sum(file.stat().st_size for file in files))}")


def _layers(archive: Path, span: slice | None) -> range | None:
    import pltpack

    if span is None:
        return None
    if span.stop is not None:
        return range(span.start or 0, span.stop)
    with pltpack.open(archive) as opened:
        return range(span.start or 0, len(opened.identity.layers))
