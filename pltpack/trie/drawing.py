"""Draw a tree of nodes: which ones fit a limit, and the tree as an SVG file."""

from __future__ import annotations

import bisect
import html
import math
from collections.abc import Sequence
from typing import NamedTuple

_ROW, _INDENT, _LEFT, _TOP = 30, 26, 16, 56
_BAR, _GAP, _CHARACTER = 150, 18, 6.7
#: From what anyone would have guessed to what nobody would, by bits per token.
_COLOURS = ("#dbe9f6", "#b3d3e8", "#7fb8da", "#4a97c9", "#2171b5", "#08458a")
_BORDERS = (0.5, 1.0, 2.0, 4.0, 8.0)


class Row(NamedTuple):
    """One node of a drawing.

    Attributes
    ----------
    parent : int
        Index of the parent among the rows, or -1; less than the row's own.
    label, facts : str
        What it is, and what is to be known of it.
    saved : int
        Bytes saved: the length of its bar.
    bits_per_token : float or None
        Information of its tokens: its colour. None where it has none.
    """

    parent: int
    label: str
    facts: str
    saved: int
    bits_per_token: float | None


def largest(parents: Sequence[int], weights: Sequence[float], limit: int) -> list[int]:
    """Nodes to draw where there is room for `limit`: the heaviest, each with all nodes above it; in order.

    Parameters
    ----------
    parents : sequence of int
        Per node, the index of its parent, less than its own, or -1.
    weights : sequence of float
    limit : int
    """
    kept: set[int] = set()
    for node in sorted(range(len(parents)), key=lambda node: (-weights[node], node)):
        path = []
        step = node
        while step >= 0 and step not in kept:
            path.append(step)
            step = parents[step]
        if len(kept) + len(path) <= limit:
            kept.update(path)
    return sorted(kept)


def svg(title: str, rows: Sequence[Row]) -> str:
    """The tree as an SVG document: a row per node, indented, with a bar for the bytes that it saves.

    Parameters
    ----------
    title : str
    rows : sequence of Row
        Parents before children, every subtree in one piece.
    """
    depths: list[int] = []
    for row in rows:
        depths.append(depths[row.parent] + 1 if row.parent >= 0 else 0)
    texts = [_LEFT + _INDENT * depth + 22 + _CHARACTER * (len(row.label) + len(row.facts) + 2)
             for row, depth in zip(rows, depths, strict=True)]  # fmt: skip
    bars = math.ceil(max([*texts, _LEFT + 9 * len(title) - _BAR], default=0)) + _GAP
    width, height = bars + _BAR + 110, _TOP + _ROW * len(rows) + 46
    most = max((row.saved for row in rows), default=0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="DejaVu Sans Mono, Menlo, Consolas, monospace" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _text(_LEFT, 24, title, size=15, weight="bold"),
        _text(bars, _TOP - 12, "bytes saved", fill="#555555"),
    ]
    for index, (row, depth) in enumerate(zip(rows, depths, strict=True)):
        x, y = _LEFT + _INDENT * depth, _TOP + _ROW * index + _ROW // 2
        if row.parent >= 0:
            above_x, above_y = _LEFT + _INDENT * (depth - 1) + 6, _TOP + _ROW * row.parent + _ROW // 2 + 7
            parts.append(f'<path d="M{above_x} {above_y}V{y}H{x}" fill="none" stroke="#999999"/>')
        parts.append(f'<rect x="{x}" y="{y - 6}" width="12" height="12" rx="2" fill="{_colour(row.bits_per_token)}" '
                     'stroke="#666666"/>')  # fmt: skip
        parts.append(_text(x + 20, y + 4, row.label, row.facts))
        if row.saved > 0:
            length = max(2, round(_BAR * row.saved / most))
            parts.append(f'<rect x="{bars}" y="{y - 6}" width="{length}" height="12" fill="#2f9e6e"/>')
            parts.append(_text(bars + length + 6, y + 4, f"{row.saved:,}", fill="#555555"))
    parts.append(_legend(height - 18))
    parts.append("</svg>\n")
    return "\n".join(parts)


def _legend(y: int) -> str:
    parts = [_text(_LEFT, y, "bits per token:", fill="#555555")]
    for index, colour in enumerate(_COLOURS):
        x = _LEFT + 112 + 66 * index
        parts.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" rx="2" fill="{colour}" stroke="#666666"/>')
        low = _BORDERS[index - 1] if index else 0
        parts.append(_text(x + 17, y, f"{low:g}–{_BORDERS[index]:g}" if index < len(_BORDERS) else f"{low:g}+",
                           fill="#555555"))  # fmt: skip
    return "\n".join(parts)


def _colour(bits: float | None) -> str:
    return "#ffffff" if bits is None else _COLOURS[bisect.bisect_right(_BORDERS, bits)]


def _text(x: float, y: float, text: str, more: str = "", fill: str = "#1a1a1a", size: int = 11,
          weight: str = "") -> str:  # fmt: skip
    bold = f' font-weight="{weight}"' if weight else ""
    tail = f'<tspan fill="#555555">  {_escaped(more)}</tspan>' if more else ""
    return (f'<text x="{x}" y="{y}" font-size="{size}" fill="{fill}"{bold} xml:space="preserve">{_escaped(text)}{tail}'
            "</text>")  # fmt: skip


def _escaped(text: str) -> str:
    """Text as XML allows it: control characters and lone surrogates are shown as escapes."""
    printable = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
    return html.escape(printable)
