"""Print results: numbers with units, aligned lines, JSON. Bytes are exact with binary units beside them."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import click

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


def short_size(count: float) -> str:
    """A byte count in three or four figures, with a binary unit."""
    step = 0
    while abs(count) >= 1023.95 and step < len(_UNITS) - 1:
        count /= 1024
        step += 1
    return f"{count:,.0f} {_UNITS[0]}" if step == 0 else f"{count:,.1f} {_UNITS[step]}"


def size(count: int) -> str:
    """A byte count, exact, and beside it in a binary unit where that is shorter."""
    return f"{count:,} bytes" + (f" ({short_size(count)})" if count >= 1024 else "")


def number(value: float, digits: int, suffix: str = "") -> str:
    """A figure with `digits` decimals."""
    return f"{value:,.{digits}f}{suffix}"


def count(amount: int, singular: str) -> str:
    """An amount with its noun."""
    return f"{amount:,} {singular}{'' if amount == 1 else 's'}"


def plain(text: object) -> str:
    """Text safe to print on a terminal: names come from files, so control characters are shown, not sent."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(text))


def print_rows(rows: Iterable[tuple[str, str]]) -> None:
    """Print label and value pairs, aligned."""
    table = list(rows)
    width = max((len(label) for label, _ in table), default=0)
    for label, value in table:
        click.echo(f"{label:<{width}}  {plain(value)}")


def print_json(data: Mapping[str, Any]) -> None:
    """Print one JSON object; numbers that JSON does not know become null."""
    click.echo(json.dumps(_jsonable(data), indent=2, allow_nan=False))


def _jsonable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | range):
        return [_jsonable(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):
        return _jsonable(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def mapped(facts: Mapping[str, Any]) -> str:
    """How many of an archive's or a session's tokens are shared and predicted, in parentheses, for people."""
    kinds = ("shared", "predicted")
    found = [f"{facts[f'{kind}_tokens']:,} {kind}" for kind in kinds if facts[f"{kind}_tokens"]]
    return f" ({', '.join(found)})" if found else ""


def print_stats(stats: Mapping[str, Any], archive: object) -> None:
    """Print what an archive holds and saves, for people; `stats` is what the library gives."""
    from pltpack.archive.figures import Figures
    from pltpack_cli.guard import guard_rows

    shown = Figures.of(stats).shown()
    print_rows([
        ("archive", str(archive)),
        ("quality", str(stats["quality"])),
        ("sessions", f"{stats['sessions']:,}"),
        ("tokens", f"{stats['tokens']:,}{mapped(stats)}"),
        ("raw", size(stats["raw_bytes"])),
        ("packed", size(stats["archive_bytes"])),
        ("  library", size(stats["library_bytes"])),
        *([("  profile", f"{size(stats['profile_bytes'])} of the library")] if stats["profile_bytes"] else []),
        ("  shards", size(stats["shard_bytes"])),
        ("ratio", shown["ratio"]),
        ("bits/element", number(stats["bits_per_element"], 3)),
        ("tail bits/element", shown["tail_bits_per_element"]),
        ("dedup hit rate", shown["dedup_hit_rate"]),
        *quality_rows(stats, shown),
        *([("saved by sharing", f"about {size(stats['saved_bytes'])}")] if stats["saved_bytes"] > 0 else []),
        *guard_rows(stats),
    ])  # fmt: skip


def quality_rows(stats: Mapping[str, Any], shown: Mapping[str, str]) -> list[tuple[str, str]]:
    """What is known of the quality of lossy sessions; nothing where nobody measured it."""
    if stats["kl"] is None:
        return []
    known = f"{stats['scored_sessions']:,} of {count(stats['sessions'], 'session')}"
    return [("KL", f"{shown['kl']} ({known})"), ("perplexity", shown["ppl_change_pct"])]


def print_rich(renderable: Any) -> None:
    """Print what rich draws: as wide as the terminal, in whole lines to a file or a pipe."""
    from rich.console import Console

    # rich itself would end the program on a closed pipe.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 10_000)
    with console.capture() as captured:
        console.print(renderable)
    click.echo(captured.get(), nl=False)
