"""``pltpack calibrate``: a model and text in, a profile out."""

from __future__ import annotations

from pathlib import Path

import click

from pltpack_cli.options import PATH, json_option, worker_options
from pltpack_cli.output import count, number, print_json, print_rows, size
from pltpack_cli.progress import progress_bars

_COMPUTE = click.Choice(["F32", "BF16", "F16"], case_sensitive=False)


@click.command(short_help="Learn a model's profile from text, or from dumps.")
@click.option("--model", type=PATH, metavar="DIR", help="Folder of a transformers model.")
@click.option("--text", "texts", type=PATH, multiple=True, metavar="FILE",
              help="Calibration text or prompt file; may be repeated, files are mixed evenly.")  # fmt: skip
@click.option("--from-dumps", "dumps", type=PATH, multiple=True, metavar="DUMP",
              help="Learn from dumps instead, without a model; may be repeated.")  # fmt: skip
@click.option("-o", "--output", type=PATH, required=True, metavar="PROFILE", help="The profile, a safetensors file.")
@click.option("--tokens", type=click.IntRange(min=1), default=40960, show_default=True, metavar="N",
              help="Tokens to learn from.")  # fmt: skip
@click.option("--window", type=click.IntRange(min=16), default=1024, show_default=True, metavar="N",
              help="Tokens that the model reads at once.")  # fmt: skip
@click.option("--profile-rank", type=click.IntRange(min=1), metavar="K",
              help="Shared components of a layer group. [default: what 6 % of the model's bytes can hold]")  # fmt: skip
@click.option("--layer-group", type=click.IntRange(min=1), metavar="G",
              help="Layers that are transformed together. [default: all that fit]")  # fmt: skip
@click.option("--name", metavar="NAME", help="Model name for the identity. [default: the model folder's]")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of what is sampled.")
@click.option("--compute", type=_COMPUTE, default="F32", show_default=True, help="Dtype that the model computes in.")
@click.option("--device", default="cpu", show_default=True, help="Torch device that the model runs on.")
@worker_options
@click.option("--force", is_flag=True, help="Replace a profile that exists.")
@json_option
def calibrate(
    model: Path | None, texts: tuple[Path, ...], dumps: tuple[Path, ...], output: Path, tokens: int, window: int,
    profile_rank: int | None, layer_group: int | None, name: str | None, seed: int, compute: str, device: str,
    engine: str, address: str | None, force: bool, as_json: bool,
) -> None:  # fmt: skip
    """Learn what the calibrated codec needs to know of a model, once: its profile.

    The model reads the text and says by gradients how much it feels an error in each part of its cache. What each
    window gave is kept in PROFILE.partial until all is done; called again after an interruption, the command goes on
    from there. Needs torch and transformers: pip install 'pltpack[eval]'.

    With --from-dumps, errors are weighed by variance instead, and no model is needed.
    """
    from pltpack.quality.calibrate import calibrate as run
    from pltpack.quality.calibrate import calibrate_from_dumps

    if bool(dumps) == bool(model) or bool(texts) != bool(model):
        raise click.UsageError("give either --model with --text, or --from-dumps")
    with progress_bars() as progress:
        if model is None:
            result = calibrate_from_dumps(dumps, output, tokens=tokens, profile_rank=profile_rank,
                                          layer_group=layer_group, force=force, engine=engine,
                                          address=address, progress=progress)  # fmt: skip
        else:
            result = run(model, texts, output, tokens=tokens, window=window, profile_rank=profile_rank,
                         layer_group=layer_group, name=name, compute=compute, device=device, seed=seed, force=force,
                         engine=engine, address=address, progress=progress)  # fmt: skip
    if as_json:
        print_json(result)
        return
    share = f", {number(100 * result['share'], 2)} % of the model's BF16 bytes" if "share" in result else ""
    rows = [
        ("profile", str(output)),
        ("digest", result["digest"]),
        ("in an archive", size(result["bytes"]) + share),
        ("learned from", count(result["tokens"], "token")),
        ("components", f"{result['rank']:,} shared by groups of {count(result['layer_group'], 'layer')}"),
    ]
    if result["importance"]:
        found = result["importance"]
        rows.append(("importance", f"R2 {number(found['r2'], 2)} on held-out windows, {number(found['gain_bits'], 2)} "
                                   f"of {number(found['possible_bits'], 2)} bits per active component"))  # fmt: skip
    seconds = result["seconds"]
    passes = f", {number(seconds['model'], 0)} s for the model's passes and {number(seconds['rest'], 0)} s for the rest"
    print_rows([*rows, ("time", f"{number(seconds['all'], 0)} s" + (passes if model else ""))])
