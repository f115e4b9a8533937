"""Bars of parts of a whole: what became of the bytes, what they are, where tokens came from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pltpack.report.amounts import percent
from pltpack.report.markup import Markup, element, joined


class Part(NamedTuple):
    """A part of a whole: its colour is the one that the style gives its class."""

    name: str
    class_: str
    amount: float
    shown: str
    more: str = ""


def steps(rows: Sequence[tuple[str, float, str, str]]) -> Markup:
    """A bar a row, each as long as its amount: ``(label, amount, shown, what changed)``."""
    most = max((amount for _, amount, _, _ in rows), default=0) or 1
    return element("div", *(
        element(
            "div",
            element("span", label, class_="step-label"),
            element("span", element("i", class_="bar", style=f"width:{100 * amount / most:.2f}%"), class_="track"),
            element("span", element("b", shown), " ", element("small", more), class_="step-value"),
            class_="step",
        )
        for label, amount, shown, more in rows
    ), class_="steps")  # fmt: skip


def stacked(label: str, parts: Sequence[Part]) -> Markup:
    """One bar of parts that add up, with a legend that names them all."""
    whole = sum(part.amount for part in parts) or 1
    seen = [part for part in parts if part.amount > 0]
    bar = joined(
        element("i", class_=f"part {part.class_}", style=f"flex-grow:{part.amount / whole:.6f}",
                data_tip=f"{part.name}: {part.shown}, {percent(part.amount, whole)}")
        for part in seen
    )  # fmt: skip
    legend = joined(
        element("li", element("i", class_=f"key {part.class_}"), element("b", part.name),
                element("span", f"{part.shown} · {percent(part.amount, whole)}"),
                *([element("small", part.more)] if part.more else []))
        for part in seen
    )  # fmt: skip
    spoken = "; ".join(f"{part.name} {percent(part.amount, whole)}" for part in seen)
    return joined([
        element("p", label, class_="bar-title"),
        element("div", bar, class_="stack", role="img", aria_label=f"{label}: {spoken}"),
        element("ul", legend, class_="legend"),
    ])  # fmt: skip
