"""``pltpack report``: one page about an archive."""

from __future__ import annotations

from pathlib import Path

import click

from pltpack_cli.options import FORMAT, PATH, archive_argument, json_option, profile_option
from pltpack_cli.output import print_json, print_rows, size
from pltpack_cli.progress import progress_bars


@click.command(short_help="Write one page about an archive: what it holds, shares, costs.")
@archive_argument
@click.option("-o", "--output", type=PATH, required=True, metavar="HTML",
              help="Page to write; one that is there is replaced.")  # fmt: skip
@click.option("--scores", type=PATH, metavar="FILE", help="What pltpack score --json printed: the curve of rate and "
              "distortion, and each session's quality.")  # fmt: skip
@click.option("--against", "dumps", multiple=True, type=PATH, metavar="DUMP",
              help="Dumps to measure the error of each layer and head by; may be repeated.")  # fmt: skip
@click.option("--tokenizer", type=PATH, metavar="DIR",
              help="Show tokens as text; a tokenizer.json, or the folder that it is in.")  # fmt: skip
@click.option("--from", "format_", type=FORMAT, help="Format of the dumps. [default: told by their content]")
@click.option("--tokens", type=PATH, metavar="FILE", help="JSON file of token ids, for dumps that hold none.")
@profile_option
@json_option
def report(
    archive: Path, output: Path, scores: Path | None, dumps: tuple[Path, ...], tokenizer: Path | None,
    format_: str | None, tokens: Path | None, profile: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Write one self-contained page about an archive.

    It shows what was saved and where it came from, the trie, rate and distortion, the error of each layer and head,
    every session, and what the guard decided. The page loads nothing: mail it, or keep it beside the archive.
    """
    import pltpack
    from pltpack.dumps import open_dumps
    from pltpack.dumps.atomic import replacing
    from pltpack.report import gather, page
    from pltpack_cli.trie import decoder

    text = None if tokenizer is None else decoder(tokenizer)
    against = list(open_dumps(dumps, format=format_, tokens=tokens)) if dumps else []
    with pltpack.open(archive, profile=profile) as opened, progress_bars() as progress:
        found = gather(opened, scores=scores, against=against, text=text, progress=progress)
    with replacing(output, b"<!doctype html>") as temp:
        temp.write_text(page(found, pltpack.__version__), encoding="utf-8")
    errors = None if found["errors"] is None else found["errors"]["how"]
    if as_json:
        print_json({"report": output, "bytes": output.stat().st_size, "stats": found["archive"]["stats"],
                    "errors": errors, "scored": found["own_score"] is not None})  # fmt: skip
    else:
        print_rows([("report", f"{output}, {size(output.stat().st_size)}"),
                    ("head errors", errors or "not measured")])  # fmt: skip
