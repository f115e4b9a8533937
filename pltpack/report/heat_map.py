"""Reconstruction error by layer and head as a heat map."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pltpack.report.amounts import percent
from pltpack.report.markup import Markup, element, joined

#: Rows of each kind that are drawn; of more heads, neighbours are put together and the largest error counts.
MOST_HEADS = 16

Errors = Sequence[Sequence[float | None]]


def heat_map(errors: Mapping[str, Any]) -> Markup:
    """Keys above values, a row a head, a column a layer.

    Parameters
    ----------
    errors : mapping
        ``keys`` and ``values``: per layer, per head, RMS error over RMS value; None where a value was lost.
    """
    known = [error for kind in ("keys", "values") for layer in errors[kind] for error in layer if error is not None]
    most = max(known, default=0.0) or 1.0
    panels = [_panel(kind, errors[kind], most) for kind in ("keys", "values")]
    layers = len(errors["keys"])
    step = max(1, -(-layers // 10))
    ticks = joined(
        element("span", f"{layer}", style=f"left:{100 * (layer + 0.5) / layers:.3f}%")
        for layer in range(0, layers, step)
    )  # fmt: skip
    scale = element("p", "0 ", element("i", class_="ramp"), f" {percent(most)} RMS error", class_="scale")
    return joined([
        element("div", *panels, element("div", element("b", "layer"), element("div", ticks, class_="heat-ticks"),
                                        class_="heat-axis"), class_="heat"), scale,
    ])  # fmt: skip


def _panel(kind: str, errors: Errors, most: float) -> Markup:
    heads = max((len(layer) for layer in errors), default=0)
    group = max(1, -(-heads // MOST_HEADS))
    rows = []
    for first in range(0, heads, group):
        name = f"{kind[0].upper()}{first}" + (f"–{min(first + group, heads) - 1}" if group > 1 else "")
        cells = joined(_cell(kind, index, first, layer[first : first + group], most)
                       for index, layer in enumerate(errors))  # fmt: skip
        rows.append(element("div", element("b", name), element("div", cells, class_="cells"), class_="heat-row"))
    title = "heads of keys" if kind == "keys" else "heads of values"
    return element("div", element("p", title, class_="heat-title"), *rows, class_="heat-panel", role="img",
                   aria_label=_spoken(kind, errors))  # fmt: skip


def _cell(kind: str, layer: int, head: int, errors: Sequence[float | None], most: float) -> Markup:
    if not errors:
        return element("i", class_="cell none")
    where = f"layer {layer}, {kind} of head {head}" + (f" to {head + len(errors) - 1}" if len(errors) > 1 else "")
    known = [error for error in errors if error is not None]
    if len(known) < len(errors):
        return element("i", class_="cell lost", data_tip=f"{where}: a value that is not finite was not kept")
    worst = max(known)
    return element("i", class_="cell", style=f"--heat:{worst / most:.3f}", data_tip=f"{where}: {percent(worst)}")


def _spoken(kind: str, errors: Errors) -> str:
    known = [(error, layer) for layer, heads in enumerate(errors) for error in heads if error is not None]
    if not known:
        return f"{kind}: no layers"
    worst, layer = max(known)
    mean = sum(error for error, _ in known) / len(known)
    return f"Error of {kind}: mean {percent(mean)}, largest {percent(worst)} in layer {layer}"
