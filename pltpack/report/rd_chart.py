"""Rate against distortion: a curve a family of codecs, on two logarithmic axes, what is exact in a strip below."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from pltpack.report.amounts import nats
from pltpack.report.markup import Markup, element, joined
from pltpack.report.scores import Point

_HEIGHT, _STRIP, _BOTTOM, _LEFT, _RIGHT = 360, 34, 44, 9.0, 97.0
#: Colours there are; families beyond them share the last one.
_COLOURS = 7
#: Least distortion that has a place on the axis: rounding makes less.
_LEAST = 1e-6


def rd_chart(points: Sequence[Point], own: Point | None) -> Markup:
    """The chart as SVG, as wide as its place is; places are in percent of that.

    Parameters
    ----------
    points : sequence of Point
        Those without a rate are left out.
    own : Point or None
        The archive that the page is about.
    """
    rated = [(point, point.bits) for point in points if point.bits is not None]
    lossy = [point for point, _ in rated if point.total["kl"] > _LEAST]
    exact = [point for point, _ in rated if point.total["kl"] <= _LEAST]
    bits = [value for _, value in rated]
    x = _Axis(min(bits) / 1.35, max(bits) * 1.35, _LEFT, _RIGHT)
    plot = _HEIGHT if lossy else 24
    strip = _STRIP if exact else 0
    parts = [_text("0", 12, "↑ KL divergence, nats per token", "axis-title", "start")] if lossy else []
    if lossy:
        kls = [point.total["kl"] for point in lossy]
        y = _Axis(min(kls) / 1.8, max(kls) * 1.8, plot - 8, 30)
        parts += _grid(x, y, plot)
        parts += _curves(lossy, own, x, y)
    bottom = plot + strip
    for at in x.ticks():
        parts.append(_line(x.at(at), plot if lossy else 8, x.at(at), bottom, "grid"))
        parts.append(_text(f"{x.at(at):.2f}%", bottom + 18, f"{at:g}", "tick", "middle"))
    if exact:
        parts.append(_line(0, plot, _RIGHT, plot, "axis"))
        parts.append(_text("0", plot + strip / 2 + 4, "exact", "tick", "start"))
        for point in exact:
            named = _is(point, own) or len(exact) == 1
            parts += _point(point, own, x.at(point.bits or 1), plot + strip / 2, _COLOURS - 1, label=named)
    parts.append(_line(0, bottom, _RIGHT, bottom, "axis"))
    parts.append(_text(f"{_RIGHT:.1f}%", bottom + 38, "bits per element, profiles left out →", "axis-title", "end"))
    return element("svg", *parts, class_="rd", width="100%", height=bottom + _BOTTOM, role="img",
                   aria_label="KL divergence against bits per element: lower and further left is better")  # fmt: skip


class _Axis:
    """A logarithmic axis from one place to another."""

    def __init__(self, low: float, high: float, first: float, last: float) -> None:
        self.low, self.high, self._first, self._last = low, high, first, last

    def at(self, value: float) -> float:
        part = math.log(value / self.low) / math.log(self.high / self.low)
        return self._first + part * (self._last - self._first)

    def ticks(self) -> list[float]:
        found: list[float] = []
        for factors in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)):
            found = [factor * 10.0**power for power in range(-9, 10) for factor in factors
                     if self.low <= factor * 10.0**power <= self.high]  # fmt: skip
            if len(found) >= 3:
                break
        return found


def _grid(x: _Axis, y: _Axis, plot: int) -> list[Markup]:
    parts = [_line(x.at(at), 24, x.at(at), plot, "grid") for at in x.ticks()]
    for at in y.ticks():
        # Labels on the lines need no room beside them, which a phone does not have.
        parts.append(_line(0, y.at(at), _RIGHT, y.at(at), "grid"))
        parts.append(_text("0", y.at(at) - 4, f"{at:g}", "tick", "start"))
    return parts


def _curves(points: Sequence[Point], own: Point | None, x: _Axis, y: _Axis) -> list[Markup]:
    parts: list[Markup] = []
    marks: list[Markup] = []
    for number, family in enumerate(dict.fromkeys(point.family for point in points)):
        colour = min(number, _COLOURS - 1)
        curve = sorted((point for point in points if point.family == family), key=lambda point: point.bits or 0)
        places = [(x.at(point.bits or 1), y.at(point.total["kl"])) for point in curve]
        for (x1, y1), (x2, y2) in itertools.pairwise(places):
            parts.append(_line(x1, y1, x2, y2, f"curve c{colour}"))
        for point, (px, py) in zip(curve, places, strict=True):
            marks += _point(point, own, px, py, colour, label=True)
    return parts + marks


def _point(point: Point, own: Point | None, x: float, y: float, colour: int, label: bool) -> list[Markup]:
    mine = _is(point, own)
    figures = point.total
    tip = (f"{point.name}: {point.bits or 0:.3f} bits/element, KL {nats(figures['kl'])} nats, "
           f"perplexity {figures['ppl_change_pct']:+.2f} %, top-1 {figures['top1_pct']:.1f} %")  # fmt: skip
    parts = [element("circle", cx=f"{x:.2f}%", cy=f"{y:.1f}", r=9, class_="ring")] if mine else []
    parts.append(element("circle", element("title", tip), cx=f"{x:.2f}%", cy=f"{y:.1f}", r=5,
                         class_=f"dot c{colour}", data_tip=tip))  # fmt: skip
    if label:
        # Left of and below a falling curve there is room up to the next better one.
        side = ("start", 12, -8) if x < 30 or mine else ("end", -9, 14)
        name = point.name.removeprefix(f"{point.family} ")
        shown = f"{name}: this archive" if mine else name
        parts.append(element("text", shown, x=f"{x:.2f}%", y=f"{y:.1f}", dx=side[1], dy=side[2], text_anchor=side[0],
                             class_=f"name c{colour}{' mine' if mine else ''}"))  # fmt: skip
    return parts


def _is(point: Point, own: Point | None) -> bool:
    return own is not None and point is own


def _line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    return element("line", x1=f"{x1:.2f}%", y1=f"{y1:.1f}", x2=f"{x2:.2f}%", y2=f"{y2:.1f}", class_=class_)


def _text(x: str, y: float, shown: str, class_: str, anchor: str) -> Markup:
    return element("text", shown, x=x, y=f"{y:.1f}", class_=class_, text_anchor=anchor)


def rated(points: Sequence[Point]) -> Markup:
    """The points as a table for those who do not see the chart; empty without any."""
    rows = joined(
        element("tr", element("th", point.name, scope="row"), *(
            element("td", value, class_="n") for value in (
                "–" if point.bits is None else f"{point.bits:.3f}", nats(point.total["kl"]),
                f"{point.total['ppl_change_pct']:+.2f} %", f"{point.total['top1_pct']:.2f} %")))
        for point in points
    )  # fmt: skip
    head = element("tr", *(element("th", title, scope="col") for title in
                           ("stored as", "bits/element", "KL, nats", "perplexity", "top-1")))  # fmt: skip
    table = element("table", element("thead", head), element("tbody", rows), class_="plain")
    return element("details", element("summary", "The same as a table"), element("div", table, class_="scroll"))
