"""``pltpack convert`` and ``pltpack warm``: caches in the format that an engine loads."""

from __future__ import annotations

from pathlib import Path

import click

from pltpack_cli.identities import engine_options, known_identity
from pltpack_cli.options import (
    FORMAT,
    IDENTITY_FIELDS,
    PATH,
    PLACE,
    archive_argument,
    dump_options,
    inexact_option,
    json_option,
    key_option,
    profile_option,
    rebuilder,
    write_options,
)  # fmt: skip
from pltpack_cli.output import count, plain, print_json, size
from pltpack_cli.progress import progress_bars

_accept_unknown = click.option(
    "--accept-unknown", multiple=True, type=click.Choice(IDENTITY_FIELDS), metavar="FIELD",
    help="With --for, take caches that do not record this field; may be repeated.",
)  # fmt: skip


@click.command(short_help="Dumps or an archive in another format.")
@click.argument("source", metavar="SRC", type=PLACE)
@key_option
@click.argument("output", metavar="DST", type=PATH)
@click.option("--to", type=FORMAT, required=True, help="Format to write.")
@write_options
@_accept_unknown
@click.option("--session", "sessions", multiple=True, metavar="ID", help="Only this session; may be repeated.")
@dump_options
@profile_option
@json_option
def convert(
    source: Path, output: Path, to: str, to_options: dict[str, str], target: Path | None,
    accept_unknown: tuple[str, ...], sessions: tuple[str, ...], format_: str | None, tokens: Path | None,
    from_options: dict[str, str], model: Path | None, known: Path | None, profile: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Write SRC (a dump, a folder of dumps, or an archive, which may be a URL) to the new folder DST in another format.

    Keys are brought into the order of channels that the engine's RoPE pairs, exactly; where the identity does not tell
    how, or the caches are not of the model named by --for, this exits with 2 and says which field it is.
    """
    from pltpack.archive.convert import convert as run
    from pltpack.archive.convert import is_archive

    with progress_bars() as progress:
        files = run(source, output, to=to, to_options=engine_options(to_options, to, target),
                    target=known_identity(target, None), accept_unknown=accept_unknown,
                    sessions=sessions or None, format=format_, tokens=tokens,
                    options=from_options, identity=known_identity(model, known), profile=profile,
                    rebuild=rebuilder(source, model, False) if is_archive(source) else None,
                    progress=progress)  # fmt: skip
    if as_json:
        print_json({"output": output, "format": to, "files": files})
    else:
        written = sum(file.stat().st_size for file in files)
        click.echo(f"{plain(output)}: {count(len(files), 'file')}, {size(written)}")


@click.command(short_help="Write the files with which an engine starts warm.")
@archive_argument
@click.option("--engine", type=FORMAT, required=True, metavar="NAME", help="Engine that loads it: llama.cpp, mlx, ...")
@click.option("--session", "sessions", multiple=True, metavar="ID", help="The whole of this session; may be repeated.")
@click.option("--prompt-tokens", "prompts", type=PATH, multiple=True, metavar="FILE",
              help="JSON list of token ids: the longest stored prefix of it, in whole blocks; repeatable.")  # fmt: skip
@click.option("-o", "--output", type=PATH, required=True, metavar="FILE",
              help="File to write or to replace; a folder of files where several are asked for.")  # fmt: skip
@write_options
@_accept_unknown
@click.option("--recompute-at-cut", type=click.IntRange(min=0), metavar="N",
              help="With --prompt-tokens, tokens left to the engine where it leaves its session.")  # fmt: skip
@click.option("--salt", metavar="TENANT", help="With --prompt-tokens, look in this tenant's sessions.")
@profile_option
@click.option("--model", type=PATH, metavar="DIR",
              help="Folder of the model, for sessions that it makes again.")  # fmt: skip
@inexact_option
@json_option
def warm(
    archive: Path, engine: str, sessions: tuple[str, ...], prompts: tuple[Path, ...], output: Path,
    to_options: dict[str, str], target: Path | None, accept_unknown: tuple[str, ...], recompute_at_cut: int | None,
    salt: str | None, profile: Path | None, model: Path | None, inexact: bool, as_json: bool,
) -> None:  # fmt: skip
    """Write one session, or what is stored of a prompt, as the file that an engine loads.

    At least one token of a prompt is left for the engine, which needs one to say what comes next. Exits with 2 if
    nothing of it is stored. Several files, named after the sessions or the prompts' files, go to the folder named by
    --output; the archive is opened and its profile prepared once for all.
    """
    from pltpack.serve.engine_file import warm_file, warm_files

    settings = {"options": engine_options(to_options, engine, target), "target": known_identity(target, None),
                "accept_unknown": accept_unknown, "salt": salt, "profile": profile,
                "recompute_at_cut": recompute_at_cut, "rebuild": rebuilder(archive, model, inexact)}  # fmt: skip
    several = len(sessions) + len(prompts) > 1
    if several:
        results = warm_files(archive, engine, output, sessions=sessions, prompts=prompts, **settings)
    elif sessions or prompts:
        chosen = {"session": sessions[0]} if sessions else {"prompt": prompts[0]}
        results = [warm_file(archive, engine, output, **chosen, **settings)]
    else:
        raise click.UsageError("give either --session or --prompt-tokens")
    if as_json:
        print_json(results if several else results[0])
        return
    for result in results:
        of = f" of {result['prompt_tokens']}" if result["prompt_tokens"] is not None else ""
        click.echo(f"{plain(result['file'])}: {count(result['tokens'], 'token')}{of}, {size(result['bytes'])}")
