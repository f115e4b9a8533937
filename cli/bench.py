"""``pltpack bench``: how fast the parts of pltpack are on an archive of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pltpack_cli.options import archive_argument, json_option
from pltpack_cli.output import count, number, print_json, print_rows


@click.group(short_help="Measure speed on an archive.")
def bench() -> None:
    """Measure how fast the parts of pltpack are on an archive of your own; every part takes --json."""


@bench.command(short_help="The trie: what sessions share, time to build and to look up.")
@archive_argument
@json_option
def trie(archive: Path, as_json: bool) -> None:
    """Put the tokens of all sessions into a trie, look each up, and find repeats behind exact prefixes."""
    import pltpack
    from pltpack.trie.measure import measure

    with pltpack.open(archive) as opened:
        shards = [opened.shard(session) for session in opened.sessions]
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
