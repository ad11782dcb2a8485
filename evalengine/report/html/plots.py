"""Plots as inline SVG: histogram, horizontal bars, intervals, calibration. Colours come from page.css by class."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from evalengine.report.html.markup import Child, Markup, tag

WIDTH, HEIGHT = 320, 180  # the drawing's size; about its CSS pixels, in three columns and on a phone
LEFT, RIGHT, TOP, BOTTOM = 40, 8, 16, 34  # margins around the plotted area


@dataclass(frozen=True)
class Series:
    """A layer of a histogram. style: "" (accent), "bad" or "second"."""

    name: str
    counts: Sequence[float]
    style: str = ""


@dataclass(frozen=True)
class Axis:
    """A linear axis from `low` to `high`, drawn from `start` to `end` (pixels)."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return round(self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start), 2)


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round values (1, 2 or 5 times a power of ten apart) within [low, high]."""
    step = 10.0 ** math.floor(math.log10((high - low) / about))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= about)
    return [round(i * step, 12) for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def spoken(value: float) -> str:
    """A number as people write it: 12,000, 0.25, 1e-07."""
    return f"{value:,.0f}" if value == int(value) and abs(value) < 1e12 else f"{value:.4g}"


def percent(share: float) -> str:
    """A share of 1 with one digit: 12.5 %."""
    return f"{share * 100:.1f} %"


def histogram(
    edges: Sequence[float], layers: Sequence[Series], x_label: str, noun: str, rule: float | None = None
) -> Markup:
    """Stacked counts between `edges` [n + 1]; edges halfway between whole numbers hold whole numbers.

    noun: what is counted ("requests"). rule: a dashed line at this x.
    """
    totals = [sum(layer.counts[i] for layer in layers) for i in range(len(edges) - 1)]
    whole = all(edge % 1 == 0.5 for edge in edges)
    x = Axis(edges[0], edges[-1], LEFT, WIDTH - RIGHT)
    y = Axis(0, max(1.0, *totals), HEIGHT - BOTTOM, TOP)
    drawn: list[Markup] = []
    for i, (low, high) in enumerate(pairwise(edges)):
        counts = ", ".join(f"{spoken(s.counts[i])} {s.name or noun}" for s in layers)
        first, last = (low + 0.5, high - 0.5) if whole else (low, high)
        span = spoken(first) if first == last else f"{spoken(first)} to {spoken(last)}"
        drawn += _stack(x, y, (low, high), [(s.counts[i], s.style) for s in layers], f"{span}: {counts}")
    line = tag("path", d=f"M{x(rule)} {TOP}V{HEIGHT - BOTTOM}", class_="rule") if rule is not None else None
    frame = _frame(x, y, x_label, noun, whole=(whole, True))
    return _plot(f"Histogram of {x_label}", *frame, *drawn, line)


def _stack(
    x: Axis, y: Axis, span: tuple[float, float], parts: Sequence[tuple[float, str]], title: str
) -> Iterator[Markup]:
    """One bin: its layers' (count, style), from below."""
    base, width = 0.0, x(span[1]) - x(span[0])
    for count, style in parts:
        if count:
            height = max(y(base) - y(base + count), 0.8)
            shape = {"x": x(span[0]), "y": y(base + count), "width": round(width - (0.6 if width > 3 else 0), 2)}
            yield tag("rect", tag("title", title), class_=f"mark {style}".strip(), height=round(height, 2), **shape)
        base += count


def bars(rows: Sequence[tuple[str, float, str]], total: float, noun: str) -> Markup:
    """Horizontal bars: (label, count, style), with each count and its share of `total` > 0."""
    step, top = 30, 4
    x = Axis(0, total, 0, WIDTH - 4)
    drawn: list[Markup] = []
    for place, (label, count, style) in enumerate(rows):
        at = top + place * (step + 6)
        drawn.append(tag("text", label, x=0, y=at + 10))
        figures = f"{spoken(count)}  ({percent(count / total)})"
        drawn.append(tag("text", figures, x=WIDTH - 4, y=at + 10, class_="end value"))
        drawn.append(tag("rect", x=0, y=at + 16, width=WIDTH - 4, height=6, rx=1, class_="track"))
        if count:
            drawn.append(
                tag("rect", x=0, y=at + 16, width=max(x(count), 1), height=6, rx=1, class_=f"mark {style}".strip())
            )
    return _plot(f"Counts of {noun}", *drawn, height=top + len(rows) * (step + 6))


def interval(value: float, low: float, high: float, bounds: tuple[float, float], rule: float | None = None) -> Markup:
    """A value with its interval on a scale shared by a table's rows: drawn small, for a cell.

    What lies outside `bounds` is drawn at the edge. rule: a line at this x.
    """
    axis = Axis(*bounds, 4, 156)

    def x(value: float) -> float:
        return axis(min(max(value, bounds[0]), bounds[1]))

    drawn = (
        tag("path", d="M4 9H156", class_="axis"),
        tag("path", d=f"M{x(rule)} 1V17", class_="rule") if rule is not None else None,
        tag("path", d=f"M{x(low)} 9H{x(high)}", class_="whisker"),
        tag("circle", cx=x(value), cy=9, r=4, class_="mark"),
    )
    label = f"{spoken(value)}, from {spoken(low)} to {spoken(high)}"
    return tag("svg", tag("title", label), *drawn, view_box="0 0 160 18", class_="bar", role="img", aria_label=label)


def calibration(points: Sequence[tuple[float, float, float, float, int]]) -> Markup:
    """A reliability diagram. points: (mean confidence, share correct, its interval's low and high, count) per bin."""
    x, y = Axis(0, 1, LEFT, WIDTH - RIGHT), Axis(0, 1, HEIGHT + 40 - BOTTOM, TOP)
    drawn = [tag("path", d=f"M{x(0)} {y(0)}L{x(1)} {y(1)}", class_="rule")]
    biggest = max((count for *_, count in points), default=1)
    for confidence, share, low, high, count in points:
        about = tag("title", f"confidence {confidence:.3f}: {percent(share)} of {spoken(count)} correct, "
                             f"95 % interval {percent(low)} to {percent(high)}")  # fmt: skip
        drawn.append(tag("path", about, d=f"M{x(confidence)} {y(low)}V{y(high)}", class_="whisker thin"))
        radius = round(2.5 + 5 * math.sqrt(count / biggest), 2)
        drawn.append(tag("circle", about, cx=x(confidence), cy=y(share), r=radius, class_="mark"))
    frame = _frame(x, y, "confidence: probability of the chosen answer", "share correct", shares=True)
    return _plot("Share correct by confidence", *frame, *drawn, height=HEIGHT + 40)


def series(points: Sequence[tuple[float, tuple[float, float] | None, str]], x_label: str, y_label: str) -> Markup:
    """Values in their order, each with its interval. points: (value, interval or None, title)."""
    finite = [(n, point) for n, point in enumerate(points, 1) if math.isfinite(point[0])]
    ends = [end for _, (value, bounds, _) in finite for end in (value, *(bounds or ()))] or [0.0]
    room = 0.06 * (max(ends) - min(ends)) or abs(max(ends)) * 0.05 or 0.05
    x = Axis(0.5, len(points) + 0.5, LEFT, WIDTH - RIGHT)
    y = Axis(min(ends) - room, max(ends) + room, HEIGHT - BOTTOM, TOP)
    drawn: list[Markup] = []
    for n, (value, bounds, title) in finite:
        about = tag("title", title)
        if bounds is not None:
            drawn.append(tag("path", about, d=f"M{x(n)} {y(bounds[0])}V{y(bounds[1])}", class_="whisker"))
        drawn.append(tag("circle", about, cx=x(n), cy=y(value), r=3.5, class_="mark"))
    return _plot(f"{y_label} of {len(points)} runs", *_frame(x, y, x_label, y_label, whole=(True, False)), *drawn)


def legend(*entries: tuple[str, str]) -> Markup:
    """A legend for a figure's note. entries: (name, style) of each series."""
    return tag("span", *(tag("span", tag("i", class_=style or None), name) for name, style in entries), class_="legend")


def _frame(
    x: Axis, y: Axis, x_label: str, y_label: str, shares: bool = False, whole: tuple[bool, bool] = (False, False)
) -> Iterator[Markup]:
    """Horizontal rules and the labels of both axes. whole: whether x and y are labelled at whole numbers only."""
    bottom = y.start
    across, up = ([t for t in ticks(a.low, a.high) if not w or t == int(t)] for a, w in zip((x, y), whole, strict=True))
    for value in up:
        text = f"{value * 100:.0f} %" if shares else spoken(value)
        yield tag("path", d=f"M{LEFT} {y(value)}H{WIDTH - RIGHT}", class_="axis")
        yield tag("text", text, x=LEFT - 6, y=y(value) + 4, class_="end")
    for value in across:
        yield tag("text", spoken(value), x=x(value), y=bottom + 15, class_="middle")
    yield tag("text", x_label, x=(LEFT + WIDTH - RIGHT) / 2, y=bottom + 30, class_="middle label")
    yield tag("text", y_label, x=LEFT, y=TOP - 2, class_="label")


def _plot(title: str, *drawn: Child, height: float = HEIGHT) -> Markup:
    return tag("svg", *drawn, view_box=f"0 0 {WIDTH} {height}", class_="plot", role="img", aria_label=title)
