"""A metric over checkpoints: a curve with its 95 % intervals, as a separate picture or on a page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from evalengine.report.html.markup import Node, markup, tag
from evalengine.report.leaderboard.board import Contest, Score
from evalengine.report.leaderboard.compose import Board
from evalengine.report.leaderboard.sheets import between, signed, titled, value_with_unit
from evalengine.report.numbers import in_range

WIDTH, HEIGHT = 640, 240  # a curve's size in its own file
PAGE_WIDTH = 380  # a curve's width on a page: about its CSS pixels, next to another and on a phone
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 34, 40
FIGURES = 4  # characters for which an x label has room at least
STYLE = """
text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; fill: #56616b; }
.title { font-size: 14px; font-weight: 600; fill: #1b2126; } .end { text-anchor: end; } .middle { text-anchor: middle; }
.paper { fill: #fbfbfa; } .axis { stroke: #dfe3e6; fill: none; } .band { fill: #0b6e69; fill-opacity: 0.14; }
.line { stroke: #0b6e69; stroke-width: 2; fill: none; } .mark { fill: #0b6e69; }
.whisker { stroke: #0b6e69; stroke-width: 1; stroke-opacity: 0.5; fill: none; }
.rule { stroke: #8b959e; stroke-dasharray: 3 3; fill: none; }
@media (prefers-color-scheme: dark) {
text { fill: #a3adb5; } .title { fill: #e4e8ea; } .paper { fill: #14181b; } .axis { stroke: #2c3338; }
.band { fill: #5cc2b8; fill-opacity: 0.2; } .line, .whisker { stroke: #5cc2b8; } .mark { fill: #5cc2b8; }
}
"""


@dataclass(frozen=True)
class Axis:
    """A linear axis from `low` to `high`, drawn from `start` to `end` (pixels)."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return round(self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start), 2)


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round values (1, 2 or 5 times a power of ten apart) within [low, high]."""
    step = 10.0 ** math.floor(math.log10((high - low) / about))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= about)
    return [round(i * step, 12) for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def is_history(board: Board) -> bool:
    """Whether all models name their training steps, as checkpoints of one training do."""
    return board.steps is not None and len(board.runs) > 2


def history_picture(board: Board) -> str:
    """Every metric's curve, one below the other, as an SVG file that fits light and dark pages."""
    drawn = [entry for entry in board.tested if _points(board, entry)]
    panels = [
        tag("g", *_curve(board, entry, WIDTH), transform=f"translate(0 {n * HEIGHT})") for n, entry in enumerate(drawn)
    ]
    height = max(1, len(drawn)) * HEIGHT + 8
    paper = tag("rect", class_="paper", width=WIDTH, height=height, rx=6)
    whole = (tag("style", STYLE), paper, *panels)
    space = "http://www.w3.org/2000/svg"
    drawing = tag("svg", *whole, xmlns=space, view_box=f"0 0 {WIDTH} {height}", width=WIDTH, height=height)
    return f"{markup(drawing)}\n"


def history_plot(board: Board, contest: Contest) -> Node:
    """One metric's curve for a page, whose style sheet colours it."""
    label = f"{titled(contest)} over {'training steps' if board.steps else 'the models'}"
    curve = _curve(board, contest, PAGE_WIDTH)
    return tag("svg", *curve, view_box=f"0 0 {PAGE_WIDTH} {HEIGHT}", class_="plot wide", role="img", aria_label=label)


def curves(board: Board) -> list[Contest]:
    """The metrics for which at least two models have a value."""
    return [contest for contest in board.tested if len(_points(board, contest)) > 1]


def _points(board: Board, contest: Contest) -> list[tuple[float, int, Score]]:
    """(x, place of the model, its score), from left to right."""
    xs: Sequence[float] = board.steps if board.steps is not None else range(1, len(board.runs) + 1)
    scored = enumerate(zip(xs, contest.scores, strict=True))
    points = [(float(x), n, score) for n, (x, score) in scored if score is not None]
    return sorted((point for point in points if in_range(point[2].value)), key=lambda point: point[0])


def _curve(board: Board, contest: Contest, width: int) -> Iterator[Node]:
    points = _points(board, contest)
    ends = [end for _, _, score in points for end in (score.value, *(score.interval or ()))]
    ends += [end for _, bounds in _changes(contest, points) for end in bounds]
    low, high = min(ends), max(ends)
    room = 0.08 * (high - low) or abs(high) * 0.05 or 0.05
    low, high = low - room, high + room
    if contest.share:
        low, high = max(low, 0.0), min(high, 1.0)
    first, last = points[0][0], points[-1][0]
    pad = 0.0 if last > first else 1.0
    x = Axis(first - pad, last + pad, LEFT, width - RIGHT)
    y = Axis(low, high, HEIGHT - BOTTOM, TOP)
    yield tag("text", titled(contest), x=LEFT, y=18, class_="title")
    yield from _grid(board, contest, x, y, points)
    banded = _changes(contest, points) or [
        (px, score.interval) for px, _, score in points if score.interval is not None
    ]
    if len(banded) == len(points) > 1:
        start = y(points[0][2].value)
        yield tag("path", d=f"M{x(points[0][0])} {start}H{x(points[-1][0])}", class_="rule")
        above = " ".join(f"{x(px)},{y(bounds[1])}" for px, bounds in banded)
        below = " ".join(f"{x(px)},{y(bounds[0])}" for px, bounds in reversed(banded))
        yield tag("polygon", points=f"{above} {below}", class_="band")
    if len(points) > 1:
        yield tag("path", d="M" + "L".join(f"{x(px)} {y(score.value)}" for px, _, score in points), class_="line")
    for px, place, score in points:
        title = f"{board.names[place]}: {value_with_unit(contest, score)} {between(contest, score)}".rstrip()
        if score.interval is not None:
            yield tag("path", d=f"M{x(px)} {y(score.interval[0])}V{y(score.interval[1])}", class_="whisker")
        yield tag("circle", tag("title", title), cx=x(px), cy=y(score.value), r=4, class_="mark")


def _changes(contest: Contest, points: Sequence[tuple[float, int, Score]]) -> list[tuple[float, tuple[float, float]]]:
    """(x, the first value plus the interval of the paired change since it) for each point; empty where a change was not
    tested in the metric's own units."""
    first = points[0]
    tests = {(test.a - 1, test.b - 1): test.result for test in contest.tests if not test.nats}
    band = [(first[0], (first[2].value, first[2].value))]
    for px, place, _ in points[1:]:
        forward, backward = tests.get((first[1], place)), tests.get((place, first[1]))
        if forward is not None:
            low, high = forward.ci_low, forward.ci_high
        elif backward is not None:
            low, high = -backward.ci_high, -backward.ci_low
        else:
            return []
        if not (math.isfinite(low) and math.isfinite(high)):
            return []
        band.append((px, (first[2].value + low, first[2].value + high)))
    return band


def _grid(
    board: Board, contest: Contest, x: Axis, y: Axis, points: Sequence[tuple[float, int, Score]]
) -> Iterator[Node]:
    """Rules with their values, and the models' places below."""
    for value in ticks(y.low, y.high, 6):
        yield tag("path", d=f"M{LEFT} {y(value)}H{x.end}", class_="axis")
        yield tag("text", signed(value, contest.share, sign=False), x=LEFT - 8, y=y(value) + 4, class_="end")
    free = -1e9
    for px, place, _ in points:
        label = _short(board.steps[place]) if board.steps is not None else board.names[place]
        half = 3.5 * max(FIGURES, len(label))
        if x(px) - half > free:
            at = min(max(x(px), half), x.end + RIGHT - half)
            yield tag("text", label, x=round(at, 2), y=HEIGHT - BOTTOM + 17, class_="middle")
            free = x(px) + half
    if board.steps is not None:
        yield tag("text", "step", x=(x.start + x.end) / 2, y=HEIGHT - 6, class_="middle")


def _short(step: int) -> str:
    """A step for a label: 12,000 as 12k where nothing is lost."""
    for size, unit in ((1_000_000, "M"), (1_000, "k")):
        if step >= size and step % (size // 10) == 0:
            return f"{step / size:g}{unit}"
    return f"{step:,}"
