"""``pltpack inspect --trie``: the trie as text and as a drawing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pltpack_cli.output import count, number, plain, print_rich, short_size, size

if TYPE_CHECKING:
    from pltpack.archive.reader import Archive

#: Tokens, and characters of their text, that a line shows.
_TOKENS, _CHARACTERS = 6, 36


def trie_of(archive: Archive, tokenizer: Path | None) -> dict[str, Any]:
    """The view of an archive's trie, with text if a tokenizer is given."""
    from pltpack.archive.trie_view import trie_view

    text = None if tokenizer is None else decoder(tokenizer)
    return archive.in_one_generation(lambda: trie_view(archive, text))


def decoder(path: Path) -> Callable[[Sequence[int]], str]:
    """A tokenizer, as what turns token ids into text."""
    from pltpack.errors import DumpError, NotFoundError, UnsupportedError

    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise NotFoundError("there is no tokenizer.json", file)
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise UnsupportedError("text of tokens needs the package tokenizers (pip install tokenizers)") from None
    try:
        found = Tokenizer.from_file(str(file))
    except Exception as error:  # what tokenizers raises has no narrower type
        raise DumpError(f"not a tokenizer: {error}", file) from None
    return lambda ids: str(found.decode(list(ids), skip_special_tokens=False))


def with_sessions(nodes: Sequence[Mapping[str, Any]], sessions: Sequence[str]) -> list[dict[str, Any]]:
    """The nodes of some sessions and those above them."""
    kept: set[int] = set()
    for index, node in enumerate(nodes):
        step: int | None = index if node["session"] in sessions else None
        while step is not None and step not in kept:
            kept.add(step)
            step = nodes[step]["parent"]
    return _renumbered(nodes, sorted(kept))


def _renumbered(nodes: Sequence[Mapping[str, Any]], kept: Sequence[int]) -> list[dict[str, Any]]:
    place = {index: number for number, index in enumerate(kept)}
    return [{**nodes[index], "parent": place.get(nodes[index]["parent"])} for index in kept]


def _drawn(view: Mapping[str, Any], limit: int) -> list[dict[str, Any]]:
    """The nodes that are drawn: what saves most, then what takes most, with all above it."""
    from pltpack.trie.drawing import largest

    nodes = view["nodes"]
    parents = [-1 if node["parent"] is None else node["parent"] for node in nodes]
    return _renumbered(nodes, largest(parents, [node["saved_bytes"] + 1e-9 * node["bytes"] for node in nodes], limit))


def print_trie(view: Mapping[str, Any], limit: int, archive: str) -> None:
    """Print the tree."""
    from rich.text import Text
    from rich.tree import Tree

    drawn = _drawn(view, limit)
    root = Tree(Text.assemble((plain(archive), "bold"), "  ", _head(view)))
    branches: list[Tree] = []
    for node in drawn:
        above = root if node["parent"] is None else branches[node["parent"]]
        branches.append(above.add(Text.assemble((plain(_label(node)), "bold"), "  ", plain(_facts(node, size)))))
    left = len(view["nodes"]) - len(drawn)
    if left:
        root.add(Text(f"… {count(left, 'more node')} (--limit)"))
    print_rich(root)


def write_svg(view: Mapping[str, Any], limit: int, archive: str, path: Path) -> None:
    """Write the tree as an SVG file."""
    from pltpack.dumps.atomic import replacing
    from pltpack.trie.drawing import Row, svg

    rows = [
        Row(-1 if node["parent"] is None else node["parent"], _label(node), _facts(node, short_size),
            node["saved_bytes"], node["information"] / node["tokens"] if node["information"] is not None else None)
        for node in _drawn(view, limit)
    ]  # fmt: skip
    with replacing(path, b"<svg ") as temp:
        temp.write_text(svg(f"{archive}: {_head(view)}", rows), encoding="utf-8")


def _head(view: Mapping[str, Any]) -> str:
    nodes = view["nodes"]
    saved = sum(node["saved_bytes"] for node in nodes)
    shared = sum(node["kind"] == "library" for node in nodes)
    captured = view["captured_tokens"]
    how = "estimated from the archive's tokens"
    if captured:
        how = f"captured for {captured:,} of {count(view['tokens'], 'token')}, {how} for others"
        how = how if captured < view["tokens"] else "captured"
    return (f"{count(shared, 'library node')}, {count(len(nodes) - shared, 'session')}, saves {short_size(saved)}; "
            f"probabilities {how}")  # fmt: skip


def _label(node: Mapping[str, Any]) -> str:
    if node["kind"] == "session":
        return str(node["session"])
    segment = str(node["library"]).removeprefix("library-").removesuffix(".pltlib").lstrip("0")
    return f"node {segment}.{node['node']}"


def _facts(node: Mapping[str, Any], measured: Callable[[int], str]) -> str:
    start = node["position"]
    facts = [f"tokens {start}:{start + node['tokens']}" if node["kind"] == "library" else
             f"{count(node['tokens'], 'own token')}"]  # fmt: skip
    if node["probability"] is not None:
        facts.append(f"P {_probability(node['probability'])}, {number(node['information'], 1)} bits")
    if node["kind"] == "library":
        facts.append(count(node["visits"], "visit"))
    if node["predictions"]:
        facts.append(count(node["predictions"], "prediction"))
    facts.append(measured(node["bytes"]))
    if node["saved_bytes"]:
        facts.append(f"saves {measured(node['saved_bytes'])}")
    shown = _beginning(node)
    return ", ".join(facts) + (f": {shown}" if shown else "")


def _probability(p: float) -> str:
    return f"{p:.3f}" if p >= 0.001 else f"{p:.1e}"


def _beginning(node: Mapping[str, Any]) -> str:
    if "text" in node:
        text = node["text"]
        return repr(text if len(text) <= _CHARACTERS else text[:_CHARACTERS] + "…") if text else ""
    ids = " ".join(str(token) for token in node["first_tokens"][:_TOKENS])
    return ids + (" …" if node["tokens"] > _TOKENS else "")
