"""``pltpack inspect``: what an archive holds, as a tree."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pltpack_cli.options import PATH, archive_argument, json_option, profile_option
from pltpack_cli.output import count, mapped, number, plain, print_json, print_rich, quality_rows, size
from pltpack_cli.trie import print_trie, trie_of, with_sessions, write_svg

if TYPE_CHECKING:
    from rich.tree import Tree


@click.command(short_help="Show what an archive holds, as a tree.")
@archive_argument
@click.option("--session", "sessions", multiple=True, metavar="ID", help="Only this session; may be repeated.")
@click.option("--trie", is_flag=True, help="Draw the trie: what sessions share, how probable it is, what it saves.")
@click.option("--svg", type=PATH, metavar="FILE", help="With --trie: write the drawing to an SVG file.")
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=50,
    show_default=True,
    metavar="N",
    help="With --trie: draw at most N nodes, those that save and take most.",
)
@click.option(
    "--tokenizer",
    type=PATH,
    metavar="DIR",
    help="With --trie: show tokens as text; a tokenizer.json, or the folder that it is in.",
)
@profile_option
@json_option
def inspect(
    archive: Path, sessions: tuple[str, ...], trie: bool, svg: Path | None, limit: int, tokenizer: Path | None,
    profile: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Show what an archive holds: identity, library segments, sessions with sizes, codec and mapping table.

    With --trie, instead, the tree of what sessions share: nodes of the library and the sessions behind them, each with
    the probability of its first token, the information of all its tokens, visits, and the bytes that sharing it saves.
    """
    import pltpack
    from pltpack.errors import NotFoundError
    from pltpack.store import open_store

    if not trie and (svg is not None or tokenizer is not None):
        raise click.UsageError("--svg and --tokenizer need --trie")
    store = open_store(archive)
    outline = store.outline()
    if outline is not None and store.secret() is None and not trie and not sessions:
        _print_outline(archive, outline, as_json)
        return
    with pltpack.open(store, profile=profile) as opened:
        for session in sessions:
            if session not in opened.sessions:
                raise NotFoundError(f"no session {session!r}", archive)
        description = opened.describe() if as_json or not trie else None
        view = trie_of(opened, tokenizer) if trie else None
    if description is not None and sessions:
        description["sessions"] = [entry for entry in description["sessions"] if entry["session"] in sessions]
    if view is not None:
        if sessions:
            view["nodes"] = with_sessions(view["nodes"], sessions)
        if svg is not None:
            write_svg(view, limit, str(archive), svg)
    if description is not None and as_json:
        print_json(description if view is None else {**description, "trie": view})
    elif view is not None:
        print_trie(view, limit, str(archive))
    elif description is not None:
        _print_tree(description)


def _print_outline(archive: Path, outline: Mapping[str, Any], as_json: bool) -> None:
    """What is seen of an encrypted archive without its key."""
    if as_json:
        print_json({"path": archive, "encrypted": outline})
        return
    files = outline["files"]
    total = sum(file["bytes"] for file in files)
    click.echo(f"{plain(archive)}: encrypted with key {plain(outline['key'])}, generation {outline['generation']}, "
               f"{count(len(files), 'file')}, {size(total)} (give the key to see more)")  # fmt: skip
    for file in files:
        click.echo(f"  {plain(file['file'])}  {size(file['bytes'])}")


def _print_tree(description: Mapping[str, Any]) -> None:
    from rich.text import Text
    from rich.tree import Tree

    from pltpack.archive.figures import Figures

    def add(parent: Tree, label: str, fact: str = "") -> Tree:
        return parent.add(Text.assemble((plain(label), "bold"), "  " if fact else "", plain(fact)))

    stats = description["stats"]
    blocks = f"blocks of {count(description['block'], 'token')}"
    head = f"generation {description['generation']}, {stats['quality']}, {blocks}"
    root = Tree(Text.assemble((plain(description["path"]), "bold"), "  ", head))
    add(root, "size", f"{size(stats['archive_bytes'])} of {size(stats['raw_bytes'])} raw")
    figures = Figures.of(stats).shown()
    add(root, "saved", f"ratio {figures['ratio']}, {number(stats['bits_per_element'], 3)} bits/element, "
        f"tail {figures['tail_bits_per_element']}, dedup hit rate {figures['dedup_hit_rate']}")  # fmt: skip
    for label, value in quality_rows(stats, figures):
        add(root, label, value)
    identity = add(root, "identity", f"sha256 {description['identity_sha256'][:16]}…")
    for field, value in description["identity"].items():
        add(identity, field, _layers(value) if field == "layers" else _value(value))
    segments = description["libraries"]
    libraries = add(root, "library", f"{count(len(segments), 'segment')}, {size(stats['library_bytes'])}")
    if stats["profile_bytes"]:
        add(libraries, "profile", size(stats["profile_bytes"]))
    for segment in segments:
        _add_library(add, libraries, segment)
    shown = description["sessions"]
    part = f"{len(shown)} of " if len(shown) < stats["sessions"] else ""
    sessions = add(root, "sessions", f"{part}{count(stats['sessions'], 'session')}, {count(stats['tokens'], 'token')}")
    for entry in shown:
        _add_session(add, sessions, entry)
    print_rich(root)


def _add_library(add: Callable[..., Tree], parent: Tree, segment: Mapping[str, Any]) -> None:
    codecs = ", ".join(_codec(state) for state in segment["codecs"])
    branch = add(parent, segment["file"], f"{size(segment['bytes'])}, {codecs}")
    for node in segment["nodes"]:
        start, tokens = node["position"], node["tokens"]
        behind = "" if node["parent"] is None else f", behind node {node['parent']}"
        add(branch, f"node {node['node']}", f"tokens {start}:{start + tokens}, {count(node['sessions'], 'session')}, "
            f"{count(node['units'], 'unit')}, {size(node['bytes'])}{behind}")  # fmt: skip


def _add_session(add: Callable[..., Tree], parent: Tree, entry: Mapping[str, Any]) -> None:
    salt = "" if entry["salt"] is None else f"salt {entry['salt']}, "
    branch = add(parent, entry["session"], f"{salt}{count(entry['tokens'], 'token')}{mapped(entry)}, {_codec(entry)}, "
                 f"raw {size(entry['raw_bytes'])}, shard {size(entry['bytes'])}")  # fmt: skip
    add(branch, entry["file"], count(entry["units"], "unit")
        + (f", corrections {size(entry['correction_bytes'])}" if entry["correction_bytes"] else ""))  # fmt: skip
    if entry["guard"] is not None:
        add(branch, "guard", _guard(entry["guard"]))
    for row in entry["mapping"]:
        start, length = row["session_start"], row["length"]
        shift = f", moved by {row['position_shift']}" if row["position_shift"] else ""
        add(branch, f"tokens {start}:{start + length}",
            f"from {row['library']}, node {row['node']}, its token {row['node_start']}{shift}")  # fmt: skip


def _guard(record: Mapping[str, Any]) -> str:
    """Asked for, kept, and what each tier on the way was found to be."""
    steps = []
    for trial in record["tried"]:
        kl = trial["predicted_kl"] if trial["kl"] is None else trial["kl"]
        word = "predicted KL" if trial["kl"] is None else "KL"
        measured = "" if kl is None else f" ({word} {kl:.5f})"
        steps.append(f"{trial['tier']} {trial['reason']}{measured}")
    return f"asked for {record['asked']}, kept {record['kept']}: {', '.join(steps)}"


def _codec(state: Mapping[str, Any]) -> str:
    settings = ", ".join(f"{key}={value}" for key, value in state["config"].items())
    shown = f"{state['codec']} ({settings})" if settings else str(state["codec"])
    return f"{shown} with profile {state['profile'][:16]}…" if "profile" in state else shown


def _layers(layers: Sequence[Mapping[str, Any]]) -> str:
    runs = []
    for layer, same in itertools.groupby(layers):
        window = f", window {layer['window']}" if "window" in layer else ""
        runs.append(f"{len(list(same))} × ({count(layer['heads'], 'head')}, K {layer['k_dim']}, V {layer['v_dim']}, "
                    f"{layer['dtype']}{window})")  # fmt: skip
    return ", ".join(runs)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={item}" for key, item in value.items())
    return str(value)
