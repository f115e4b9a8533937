"""Options of a guard, which `compress` and `append` share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pltpack_cli.options import PATH
from pltpack_cli.output import count

if TYPE_CHECKING:
    from pltpack.archive.guard import Guard

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

_positive = click.FloatRange(min=0, min_open=True)


def guard_options(command: Decorated) -> Decorated:
    """``--guard`` with what it takes; the command gets `guard`, None if it was not asked for.

    Goes above `pltpack_cli.options.dump_options`, whose ``--model`` is the guard's, too.
    """

    @functools.wraps(command)
    def wrapped(
        *args: Any, guard: bool, model: Path | None, continuations: Path | None, guard_tail: int | None,
        guard_ppl: float | None, guard_lossless: float | None, guard_kl: float | None, guard_range: float | None,
        guard_refuse: bool, **others: Any,
    ) -> Any:  # fmt: skip
        limits = {"ppl_pct": guard_ppl, "lossless_pct": guard_lossless, "kl": guard_kl, "strange": guard_range}
        given = {name: value for name, value in limits.items() if value is not None}
        if guard_refuse:
            given["refuse"] = True
        if not guard and (given or continuations or guard_tail is not None):
            raise click.UsageError("--continuations and --guard-... need --guard")
        if model is None and (continuations or guard_tail is not None):
            raise click.UsageError("--continuations and --guard-tail need --model")
        found = _guard(model, continuations, guard_tail, given) if guard else None
        return command(*args, guard=found, model=model, **others)

    options = [
        click.option("--guard", is_flag=True,
                     help="Judge each session, by --model or else by what the profile predicts; what does not hold "
                     "its tier's promise takes a better one."),
        click.option("--continuations", type=PATH, metavar="FILE", help="With --model: the text that follows each "
                     "session, from pltpack capture. [default: the session's own last tokens]"),
        click.option("--guard-tail", type=click.IntRange(min=8), metavar="TOKENS",
                     help="Tokens to hold back of sessions without a continuation. [default: 128]"),
        click.option("--guard-ppl", type=_positive, metavar="PERCENT",
                     help="Change of perplexity up to which a session holds. [default: 2]"),
        click.option("--guard-lossless", type=_positive, metavar="PERCENT",
                     help="Change beyond which a session becomes lossless at once. [default: 5]"),
        click.option("--guard-kl", type=_positive, metavar="NATS",
                     help="KL divergence up to which a session holds. [default: what the tier promises, else 0.025]"),
        click.option("--guard-range", type=click.FloatRange(min=1, min_open=True), metavar="RATIO",
                     help="Magnitude over calibration's at which a session counts as another domain. [default: 1.3]"),
        click.option("--guard-refuse", is_flag=True,
                     help="Exit with 3 and write nothing instead of taking a better tier."),
    ]  # fmt: skip
    decorated: Any = wrapped
    for option in reversed(options):
        decorated = option(decorated)
    found: Decorated = decorated
    return found


def _guard(model: Path | None, continuations: Path | None, tail: int | None, given: Mapping[str, Any]) -> Guard:
    from pltpack.archive.guard import Limits, ProfileGuard

    limits = Limits(**given)
    if model is None:
        return ProfileGuard(limits)
    from pltpack.quality.guard import ModelGuard

    return ModelGuard(model, continuations, limits, **({} if tail is None else {"tail": tail}))


def guard_rows(stats: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a guard decided, for people: one line, and one for each session that took a better tier."""
    found = stats.get("guard")
    if found is None:
        return []
    kept = ", ".join(f"{amount:,} {tier}" for tier, amount in found["kept"].items())
    lines = [("guard", f"{count(found['sessions'], 'session')}: {kept}")]
    return lines + [
        ("  stepped up", f"{one['session']}: {one['asked']} to {one['kept']} ({one['reason']})")
        for one in found["decisions"]
    ]
