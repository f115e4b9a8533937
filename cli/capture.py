"""``pltpack capture``: a model and prompts in, dumps out."""

from __future__ import annotations

from pathlib import Path

import click

from pltpack_cli.options import PATH, json_option
from pltpack_cli.output import count, plain, print_json, print_rows, size
from pltpack_cli.progress import progress_bars

_DTYPES = click.Choice(["BF16", "F16", "F32", "F8_E4M3", "F8_E5M2"], case_sensitive=False)
_COMPUTE = click.Choice(["F32", "BF16", "F16"], case_sensitive=False)


@click.command(short_help="Run a model over prompts and dump its caches.")
@click.option("--model", type=PATH, required=True, metavar="DIR", help="Folder of a transformers model.")
@click.option("--prompts", type=PATH, required=True, multiple=True, metavar="FILE",
              help="Prompt file, see above; may be repeated.")  # fmt: skip
@click.option("-o", "--output", type=PATH, required=True, metavar="OUT", help="Folder for one dump per session.")
@click.option("--name", metavar="NAME", help="Model name for the identity. [default: the model folder's]")
@click.option("--dtype", type=_DTYPES, default="BF16", show_default=True, help="Dtype of the dumps.")
@click.option("--logprobs", type=click.IntRange(min=1), metavar="K",
              help="Also keep the K most probable next tokens after each token.")  # fmt: skip
@click.option("--importance", is_flag=True,
              help="Also measure how much each token matters to what the model says next; takes longer.")  # fmt: skip
@click.option("--window", type=click.IntRange(min=1), metavar="N", help="Split plain text into sessions of N tokens.")
@click.option("--continuations", type=PATH, metavar="FILE",
              help="Where continuations go. [default: OUT/../continuations.safetensors]")  # fmt: skip
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of what is sampled.")
@click.option("--compute", type=_COMPUTE, default="F32", show_default=True, help="Dtype that the model computes in.")
@click.option("--device", default="cpu", show_default=True, help="Torch device that the model runs on.")
@click.option("--force", is_flag=True, help="Replace dumps and continuations that exist.")
@json_option
def capture(
    model: Path, prompts: tuple[Path, ...], output: Path, name: str | None, dtype: str, logprobs: int | None,
    importance: bool, window: int | None, continuations: Path | None, seed: int, compute: str, device: str,
    force: bool, as_json: bool,
) -> None:  # fmt: skip
    """Run a model over prompts and write its KV caches, one safetensors dump per session.

    \b
    Prompt files:
      .json   {"session": {"prompt": TEXT or [IDS], "continuation": TEXT or [IDS]}, ...}
      .jsonl  one {"prompt" or "text" or "messages": ..., "continuation": ...} per line
      other   plain text, one session; with --window, one per N tokens

    The dumps name the model's weights and tokenizer by digest, so an archive of them fits that model only. Needs
    torch and transformers: pip install 'pltpack[eval]'.
    """
    from pltpack.quality.capture import CaptureOptions
    from pltpack.quality.capture import capture as run

    options = CaptureOptions(dtype, logprobs or 0, importance, seed=seed)
    with progress_bars() as progress:
        result = run(model, prompts, output, name=name, options=options, compute=compute, device=device,
                     window=window, continuations=continuations, force=force, progress=progress)  # fmt: skip
    if as_json:
        print_json(result)
        return
    sessions = count(len(result["sessions"]), "session")
    rows = [("dumps", f"{output}: {sessions}, {count(result['tokens'], 'token')}, {size(result['bytes'])}")]
    if result["continuations"]:
        rows.append(("continuations", plain(result["continuations"])))
    print_rows(rows)
