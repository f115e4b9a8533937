"""The trie as a map: a row a session, tokens from left to right, what sessions share as one block over their rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pltpack.report.amounts import count, size
from pltpack.report.markup import Markup, element, joined

#: Rows that are drawn, and paths that are listed.
MOST_ROWS, MOST_PATHS = 60, 8
_ROW, _DENSE = 24, 14
#: Blocks that take no larger a part of the width have no room for text.
_NARROW = 0.12


def trie_map(nodes: Sequence[Mapping[str, Any]], sessions: Mapping[str, int], spans: Mapping[str, Any]) -> Markup:
    """The map, for at most `MOST_ROWS` sessions: those that share most tokens, in the order of the trie.

    Parameters
    ----------
    nodes : sequence of mapping
        As `pltpack.archive.trie_view.trie_view` gives them.
    sessions : mapping of str to int
        Tokens of each session.
    spans : mapping
        As `pltpack.archive.provenance.provenance` gives them.
    """
    order = [node["session"] for node in nodes if node["kind"] == "session"]
    shared = {name: sum(span["length"] for span in spans[name]) for name in order}
    kept = set(sorted(order, key=lambda name: -shared[name])[:MOST_ROWS])
    rows = [name for name in order if name in kept]
    longest = max((sessions[name] for name in rows), default=1) or 1
    height = _ROW if len(rows) <= 30 else _DENSE
    facts = {(node["library"], node["node"]): node for node in nodes if node["kind"] == "library"}
    most = max((node["saved_bytes"] for node in facts.values()), default=0) or 1
    drawing = joined([
        *(_row(index, name, sessions[name], longest, height) for index, name in enumerate(rows)),
        *(_block(block, facts, most, longest, height) for block in _blocks(rows, spans)),
    ])  # fmt: skip
    names = joined(
        element("span", name, data_tip=f"{name}: {count(sessions[name], 'token')}", style=f"height:{height}px")
        for name in rows
    )
    left = len(order) - len(rows)
    return joined([
        element("div", element("div", names, class_="map-names"),
                element("div", drawing, class_="map-rows", style=f"height:{len(rows) * height}px"),
                class_="map dense" if height == _DENSE else "map", role="img",
                aria_label=f"{count(len(rows), 'session')} as rows of up to {longest:,} tokens; blocks over several "
                "rows are what they share"),
        element("div", *_ticks(longest), class_="map-axis"),
        *([element("p", f"Not drawn: {count(left, 'session')} that share less.", class_="note")] if left else []),
    ])  # fmt: skip


def _blocks(rows: Sequence[str], spans: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Spans with the first and last row, those that are equal in neighbouring rows as one."""
    out: list[dict[str, Any]] = []
    open_: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row, name in enumerate(rows):
        now: dict[tuple[Any, ...], dict[str, Any]] = {}
        for span in spans[name]:
            key = tuple(span[field] for field in ("kind", "library", "node", "start", "length"))
            block = open_.get(key) if span["kind"] == "exact" else None
            if block is None:
                block = {**span, "row": row}
                out.append(block)
            block["last"] = row
            now[key] = block
        open_ = now
    return out


def _row(index: int, name: str, tokens: int, longest: int, height: int) -> Markup:
    style = f"top:{index * height}px;height:{height}px;width:{100 * tokens / longest:.3f}%"
    return element("i", class_="map-own", style=style, data_tip=f"{name}: {count(tokens, 'token')} in all")


def _block(block: Mapping[str, Any], facts: Mapping[Any, Any], most: int, longest: int, height: int) -> Markup:
    node = facts.get((block["library"], block["node"]))
    rows = block["last"] - block["row"] + 1
    start, stop = block["start"], block["start"] + block["length"]
    style = (f"top:{block['row'] * height}px;height:{rows * height}px;left:{100 * start / longest:.3f}%;"
             f"width:{100 * block['length'] / longest:.3f}%")  # fmt: skip
    name = label(block["library"], block["node"])
    if block["kind"] == "near":
        moved = f", moved by {block['shift']:+,} positions" if block["shift"] else ""
        tip = f"near window, tokens {start:,}–{stop:,}: predicted from node {name}{moved}"
        return element("i", class_="map-near", style=style, data_tip=tip)
    visits, saved = (node["visits"], node["saved_bytes"]) if node else (rows, 0)
    strength = 0.3 + 0.7 * (saved / most) ** 0.5
    kept = f"saves {size(saved)}" if saved else "kept for predictions"
    tip = f"node {name}, tokens {start:,}–{stop:,}: {count(visits, 'session')}, {kept}"
    if node and node["information"] is not None and node["tokens"]:
        tip += f", {node['information'] / node['tokens']:.2f} bits a token"
    if node and node.get("text"):
        tip += f"\n“{node['text']}”"
    wide = rows > 1 and block["length"] > _NARROW * longest
    shown = f"{visits} × {block['length']:,} tokens, {kept}" if wide else ""
    class_ = "map-exact kept" if not saved else "map-exact hot" if strength > 0.65 else "map-exact"
    return element("i", element("span", shown), class_=class_, style=f"{style};--heat:{strength:.3f}", data_tip=tip)


def label(library: str, node: int) -> str:
    """A node's name: its segment's number and its own."""
    segment = library.removeprefix("library-").removesuffix(".pltlib").lstrip("0")
    return f"{segment or 0}.{node}"


def _ticks(longest: int) -> list[Markup]:
    step = nice_step(longest)
    parts = []
    for at in range(0, longest + 1, step):
        last, place = at + step > longest, 100 * at / longest
        # A label that would leave the drawing stands left of its place.
        side = f"right:{100 - place:.3f}%" if place > 85 else f"left:{place:.3f}%"
        parts.append(element("span", f"{at:,} tokens" if last else f"{at:,}", style=side,
                             class_="before" if place > 85 else None))  # fmt: skip
    return parts


def nice_step(longest: int) -> int:
    """Distance between round places of which about four fit into `longest`."""
    power = 10 ** max(len(str(longest)) - 2, 0)
    return next(factor * power for factor in (1, 2, 5, 10, 20, 50) if longest <= 5 * factor * power)


def hot_paths(nodes: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Library nodes that save most, at most `MOST_PATHS`."""
    saving = [node for node in nodes if node["kind"] == "library" and node["saved_bytes"]]
    return sorted(saving, key=lambda node: -node["saved_bytes"])[:MOST_PATHS]
