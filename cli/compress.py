"""``pltpack compress`` and ``pltpack append``: dumps in, archive out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from pltpack_cli.guard import guard_options
from pltpack_cli.identities import known_identity
from pltpack_cli.live import live_writing
from pltpack_cli.options import (
    PATH,
    PLACE,
    TIER,
    archive_argument,
    budget_option,
    device_option,
    dump_options,
    dumps_argument,
    json_option,
    key_option,
    model_options,
    near_options,
    no_dedup_option,
    quiet_option,
    refuse_idle_key,
    target_options,
    worker_options,
)  # fmt: skip
from pltpack_cli.output import print_json, print_stats

if TYPE_CHECKING:
    from pltpack.archive.guard import Guard
    from pltpack.archive.settings import Target


_admitted = budget_option("Units that may go to the library; those that share most per byte do. [default: no limit]")


@click.command(short_help="Dumps in, a new archive out.")
@dumps_argument
@click.option("-o", "--output", type=PLACE, required=True, metavar="ARCHIVE",
              help="Archive to write, a folder or a URL (s3://BUCKET/NAME); must not exist.")  # fmt: skip
@click.option("--quality", type=TIER, help="Quality tier, see above. "
              "[default: balanced with a profile, fixed-step if it was made of dumps alone, else q4]")  # fmt: skip
@click.option("--profile", type=PATH, metavar="FILE",
              help="Profile of the model, from pltpack calibrate; it goes into the archive.")  # fmt: skip
@click.option("--external-profile", type=PATH, metavar="FILE",
              help="The same, but the archive only names it, and needs it to be read.")  # fmt: skip
@model_options
@target_options
@no_dedup_option
@near_options
@_admitted
@click.option("--encrypt", is_flag=True, help="Encrypt all that is stored (AES-256-GCM), with the key of --key-file.")
@key_option
@click.option("--block", type=click.IntRange(min=1), default=32, show_default=True, metavar="TOKENS",
              help="Tokens per block, the unit of sharing and paging; 16 to 32 are recommended.")  # fmt: skip
@guard_options
@dump_options
@device_option
@worker_options
@quiet_option
@json_option
def compress(
    dumps: tuple[Path, ...], output: Path, quality: str | None, profile: Path | None, external_profile: Path | None,
    with_model: bool, predictor: str | None, target_kl: float | None, target_bits: float | None,
    target_bytes: int | None, no_dedup: bool, no_near: bool,
    window: int, tau: float, library_budget: int | None, block: int, format_: str | None, tokens: Path | None,
    from_options: dict[str, str], model: Path | None, known: Path | None, device: str, engine: str, address: str | None,
    guard: Guard | None, quiet: bool, encrypt: bool, as_json: bool,
) -> None:  # fmt: skip
    """Compress dumps (files, or folders of files) into a new archive.

    \b
    Tiers:
      near, balanced, small  KL divergence up to 0.003, 0.01 or 0.025, as a profile predicts it
      fixed-step             with a profile made of dumps alone, which predicts no KL divergence
      lossless               bit-exact, for every dtype
      q4, q3, q2, q1         about 4 to 1 bits a value, finer for tokens that matter, first 4 exact
      turboquant-4, -3, -2   the per-vector baseline: random rotation, Lloyd-Max levels
      recompute              token ids alone; --model makes the cache, here and to read it
      lossless+model         bit-exact: what differs from a cheaper run of --model

    Exits with 3 and writes nothing if a tier's promise or a target cannot be kept; what is written takes at most 3 %
    more than --target-bits or --target-bytes.
    """
    import pltpack

    given = click.get_current_context().get_parameter_source("key_file")
    if given is ParameterSource.COMMANDLINE and not encrypt:
        raise click.UsageError("--key-file needs --encrypt: nothing would be encrypted")
    if _needs_model(quality, model, with_model, predictor):
        _refuse(profile=profile, external_profile=external_profile, target_kl=target_kl, target_bits=target_bits,
                target_bytes=target_bytes, library_budget=library_budget, guard=guard,
                engine=None if engine == "local" else engine)  # fmt: skip
        from pltpack.quality import recompute

        assert model is not None
        with live_writing(f"pltpack compress → {output}", quiet or as_json) as progress:
            stats = recompute.compress(
                dumps, output, model, quality=str(quality), with_model=with_model, predictor=predictor, block=block,
                format=format_, tokens=tokens, options=from_options, identity=known_identity(model, known),
                encrypt=encrypt, progress=progress,
            )  # fmt: skip
        print_json(stats) if as_json else print_stats(stats, output)
        return
    with live_writing(f"pltpack compress → {output}", quiet or as_json) as progress:
        stats = pltpack.compress(
            dumps, output, quality=quality, dedup=not no_dedup, block=block, format=format_, tokens=tokens,
            options=from_options, identity=known_identity(model, known),
            profile=profile, external_profile=external_profile, target=_target(target_kl, target_bits, target_bytes),
            near=not no_near, window=window, tau=tau, library_budget=library_budget, guard=guard, device=device,
            engine=engine, address=address, encrypt=encrypt, progress=progress,
        )  # fmt: skip
    if as_json:
        print_json(stats)
        return
    print_stats(stats, output)
    if 2 * stats["profile_bytes"] > stats["archive_bytes"]:
        click.echo("hint: the profile is more than half of this archive; --external-profile FILE leaves it outside")


@click.command(short_help="Add the sessions of dumps to an archive.")
@archive_argument
@dumps_argument
@click.option("--quality", type=TIER, help="Quality tier of the new sessions. [default: the archive's own]")
@click.option("--profile", type=PATH, metavar="FILE",
              help="Profile for the new sessions, or the one that the archive names. [default: the archive's own]")
@model_options
@target_options
@no_dedup_option
@near_options
@_admitted
@click.option("--recompute-tokens", type=click.IntRange(1000, 5000), metavar="TOKENS",
              help="Tokens predicted from a part of the library, after which it is looked at whether the mean of all "
              "that it served would pay. [default: 2000, never in tiers with a profile]")  # fmt: skip
@guard_options
@dump_options
@device_option
@worker_options
@quiet_option
@json_option
def append(
    archive: Path, dumps: tuple[Path, ...], quality: str | None, profile: Path | None, with_model: bool,
    predictor: str | None, target_kl: float | None,
    target_bits: float | None, target_bytes: int | None, no_dedup: bool, no_near: bool, window: int,
    tau: float, library_budget: int | None, recompute_tokens: int | None, format_: str | None, tokens: Path | None,
    from_options: dict[str, str], model: Path | None, known: Path | None, guard: Guard | None, device: str,
    engine: str, address: str | None, quiet: bool, as_json: bool,
) -> None:  # fmt: skip
    """Add the sessions of dumps to an archive, as a new generation of it."""
    import pltpack

    with pltpack.open(archive) as opened:
        refuse_idle_key(opened)
        tier = quality or opened.manifest.quality
    if _needs_model(tier, model, with_model, predictor):
        from pltpack.quality import recompute

        _refuse(profile=profile, target_kl=target_kl, target_bits=target_bits, target_bytes=target_bytes,
                library_budget=library_budget, recompute_tokens=recompute_tokens, guard=guard,
                engine=None if engine == "local" else engine)  # fmt: skip
        assert model is not None
        with live_writing(f"pltpack append → {archive}", quiet or as_json) as progress:
            stats = recompute.append(
                archive, dumps, model, quality=tier, with_model=with_model, predictor=predictor, format=format_,
                tokens=tokens, options=from_options, identity=known_identity(model, known), progress=progress,
            )  # fmt: skip
        print_json(stats) if as_json else print_stats(stats, archive)
        return
    with live_writing(f"pltpack append → {archive}", quiet or as_json) as progress:
        stats = pltpack.append(
            archive, dumps, quality=quality, dedup=False if no_dedup else None, format=format_, tokens=tokens,
            options=from_options, identity=known_identity(model, known), profile=profile,
            target=_target(target_kl, target_bits, target_bytes), near=not no_near,
            window=window, tau=tau, recompute_tokens=recompute_tokens, library_budget=library_budget,
            guard=guard, device=device, engine=engine, address=address, progress=progress,
        )  # fmt: skip
    print_json(stats) if as_json else print_stats(stats, archive)


def _needs_model(quality: str | None, model: Path | None, with_model: bool, predictor: str | None) -> bool:
    """Whether the tier is one that a model writes; options that say otherwise are mistakes."""
    from pltpack.codec.registry import MODEL_TIERS
    from pltpack.errors import UnsupportedError

    if quality not in MODEL_TIERS:
        if with_model or predictor is not None:
            raise click.UsageError(f"--with-model and --predictor go with --quality {' or '.join(MODEL_TIERS)}")
        return False
    if model is None:
        raise UnsupportedError(f"tier {quality!r} needs the model that made the caches: give its folder with --model")
    return True


def _refuse(**given: Any) -> None:
    """Options that tiers of a model do not take."""
    for name, value in given.items():
        if value is not None:
            raise click.UsageError(f"--{name.replace('_', '-')} does not go with tiers that need a model")


def _target(kl: float | None, bits: float | None, size: int | None) -> Target | None:
    from pltpack.archive.settings import Target

    given = [name for name, value in (("kl", kl), ("bits", bits), ("bytes", size)) if value is not None]
    if len(given) > 1:
        raise click.UsageError(f"--target-{given[0]} and --target-{given[1]} exclude each other")
    return Target(kl, bits, size) if given else None
