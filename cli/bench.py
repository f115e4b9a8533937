"""``pltpack bench``: how fast the parts of pltpack are on an archive of one's own."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click

from pltpack_cli.live import live_steps
from pltpack_cli.options import (
    PATH,
    PLACE,
    Span,
    archive_argument,
    json_option,
    key_option,
    profile_option,
    quiet_option,
)
from pltpack_cli.output import count, number, plain, print_json, print_rows, size


@click.group(short_help="Measure speed on an archive.")
def bench() -> None:
    """Measure how fast the parts of pltpack are on an archive of your own; every part takes --json."""


@bench.command(short_help="The trie: what sessions share, time to build and to look up.")
@archive_argument
@quiet_option
@json_option
def trie(archive: Path, quiet: bool, as_json: bool) -> None:
    """Put the tokens of all sessions into a trie, look each up, and find repeats behind exact prefixes."""
    import pltpack
    from pltpack.trie.measure import measure

    with pltpack.open(archive) as opened, live_steps("pltpack bench trie", quiet or as_json) as panel:
        panel.archive(archive.name, opened.stats())
        panel.step("read token ids")
        shards = [opened.shard(session) for session in opened.sessions]
        panel.step("build, look up, match")
        result = measure([shard.tokens for shard in shards], [shard.entry.salt for shard in shards])
    if as_json:
        print_json(result)
    else:
        _print_trie(result)


def _print_trie(result: dict[str, Any]) -> None:
    lookup = result["lookup_seconds"]
    print_rows([
        ("sessions", f"{result['sessions']:,}, {count(result['tokens'], 'token')}"),
        ("exact prefixes", f"{count(result['stored_tokens'], 'token')} stored, ratio "
         f"{number(result['dedup_ratio'], 3, 'x')}, hit rate {number(100 * result['hit_rate'], 1, ' %')}"),
        ("build", f"{number(1000 * result['build_seconds'], 2, ' ms')}, {count(result['nodes'], 'node')}"),
        ("look-up", "none" if lookup is None else f"median {number(1e6 * lookup['median'], 1, ' µs')}, "
         f"worst {number(1e6 * lookup['worst'], 1, ' µs')}"),
        ("repeats elsewhere", f"{count(result['matched_tokens'], 'token')}, found in "
         f"{number(1000 * result['match_seconds'], 2, ' ms')}"),
    ])  # fmt: skip


@bench.command(short_help="The loader: time to first token, cold and warm.")
@click.argument("archives", metavar="ARCHIVE...", type=PLACE, nargs=-1, required=True)
@key_option
@click.option("--model", "folder", type=PATH, required=True, metavar="DIR", help="Transformers model of the caches.")
@click.option("--session", metavar="ID", help="The session to start from. [default: the longest]")
@click.option("--depth", "depths", type=Span(), default="1:8", show_default=True, metavar="A:B",
              help="Units in flight, from A up to and without B.")  # fmt: skip
@click.option("--read-speed", type=click.FloatRange(min=0.001), default=200.0, show_default=True,
              metavar="MB/S", help="Disk that the throttled figures stand for.")  # fmt: skip
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, metavar="N",
              help="Runs of which the median is taken.")  # fmt: skip
@click.option("--plot", "plot_file", type=PATH, metavar="PNG", help="Write what the stages did when, .png or .svg.")
@profile_option
@quiet_option
@json_option
def loader(
    archives: tuple[Path, ...], folder: Path, session: str | None, depths: slice, read_speed: float, repeats: int,
    plot_file: Path | None, profile: Path | None, quiet: bool, as_json: bool,
) -> None:  # fmt: skip
    """Time how soon a model gives a session's next token: cold, from raw safetensors, and from each ARCHIVE.

    The session's last token is the rest of the prompt. Several archives should hold the same sessions.
    """
    import contextlib

    import pltpack
    from pltpack.quality.model import load_model
    from pltpack.quality.plot import check_plot
    from pltpack.serve.gantt import gantt

    wanted = range(1 if depths.start is None else depths.start, 8 if depths.stop is None else depths.stop)
    if plot_file is not None:
        check_plot(plot_file)
    if not wanted or wanted.start < 1:
        raise click.BadParameter("depths begin at 1", param_hint="--depth")
    if math.isnan(read_speed):
        raise click.BadParameter("is not a number", param_hint="--read-speed")
    network = load_model(folder).network
    from pltpack.serve.measure import measure

    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(pltpack.open(path, profile=profile)) for path in archives]
        panel = stack.enter_context(live_steps("pltpack bench loader", quiet or as_json))
        for path, archive in zip(archives, opened, strict=True):
            panel.archive(path.name, archive.stats())
        measured = measure(network, opened, session, wanted, repeats, 1e6 * read_speed, panel.step)
    if plot_file is not None:
        gantt(measured.timelines, plot_file)
    if as_json:
        print_json(measured.figures)
    else:
        _print_loader(measured.figures)


def _print_loader(found: dict[str, Any]) -> None:
    speed = f"at {found['bytes_per_second'] / 1e6:g} MB/s"
    print_rows([
        ("session", f"{plain(found['session'])}, {count(found['tokens'], 'token')}"),
        ("cold", f"{_ms(found['cold_seconds'])} to the first token"),
        ("raw safetensors", f"{_ms(found['raw_seconds'])}, {_ms(found['raw_throttled_seconds'])} {speed}, "
         f"{size(found['raw_bytes'])}"),
    ])  # fmt: skip
    for archive in found["archives"]:
        same = "the same" if archive["first_token_is_the_cold_one"] else "another"
        print_rows([
            (plain(archive["quality"]), f"{plain(archive['archive'])}, {same} first token as cold"),
            *[(f"  depth {row['depth']}", f"{_ms(row['seconds'])}, {number(row['sooner'], 1, 'x')} sooner than cold; "
               f"{_ms(row['throttled_seconds'])} {speed}, {_ms(row['throttled_load_seconds'])} of loading alone")
              for row in archive["depths"]],
        ])  # fmt: skip
    latency = found["latency"]
    print_rows([
        ("further tokens", f"{_ms(latency['plain_seconds'])} over a plain cache, {_ms(latency['warm_seconds'])} over a "
         f"loaded one ({100 * latency['change']:+.1f} %)"),
    ])  # fmt: skip


def _ms(seconds: float) -> str:
    return number(1e3 * seconds, 1, " ms")
