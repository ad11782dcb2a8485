"""The matrix of an experiment as SVG, for light and dark pages: a README can show it."""

from __future__ import annotations

from evalengine.report.compare.matrix_scores import leading_metrics, look, score_text, what_differs
from evalengine.report.html.markup import Markup, tag
from evalengine.report.numbers import counted
from evalengine.report.sweep.sweep import Sweep, most, verdict

WIDTH, HEIGHT, GAP, TOP = 112, 46, 3, 104  # a cell's size, the space between cells and above the matrix: pixels
LETTER = 7.6  # pixels of a character of the labels, at most
LEGEND = (
    "Green: equal bits. Pale: same tokens, other logprobs. Yellow: other outputs, no score beyond chance. Red: beyond.",
    "Counts are of requests that differ; on the diagonal each run's score.",
)
STYLE = """
text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; fill: #1b2126; }
.title { font-size: 16px; font-weight: 600; } .soft { fill: #56616b; } .small { font-size: 11px; }
.middle { text-anchor: middle; } .end { text-anchor: end; }
.paper { fill: #fbfbfa; } .same { fill: #bfe0dc; } .tokens { fill: #e3f1ef; } .some { fill: #f6eccb; }
.other { fill: #f3c9b3; } .self { fill: #e9ecee; }
@media (prefers-color-scheme: dark) {
text { fill: #e4e8ea; } .soft { fill: #a3adb5; }
.paper { fill: #14181b; } .same { fill: #1c5a54; } .tokens { fill: #17322f; } .some { fill: #4a3f17; }
.other { fill: #74391f; } .self { fill: #262c31; }
}
"""


def picture(sweep: Sweep) -> str:
    """The matrix as SVG: equal bits in one colour, differing ones in another with how much differs."""
    labels = [cell.label for cell in sweep.cells]
    left = 48 + int(max(map(len, labels)) * LETTER)
    size = len(sweep.cells)
    about = sweep.cells[0].run
    lines = [f"{verdict(sweep).partition('; fast flips')[0]}.", f"{most(sweep)}." if sweep.floors else ""]
    height = TOP + size * (HEIGHT + GAP) + 76
    model = about.manifest.model.name or about.name
    heading = f"{'+'.join(sweep.tasks)}, {model}: {len(about.items)} requests a run"
    letters = max(len(heading) * 1.2, *(len(line) * 0.9 for line in (*LEGEND, *lines)))
    width = max(left + size * (WIDTH + GAP) + 16, 32 + int(letters * LETTER))
    drawn = [
        tag("title", f"{sweep.name}: {verdict(sweep)}"),
        tag("style", Markup(STYLE)),
        tag("rect", class_="paper", width=width, height=height, rx=6),
        tag("text", heading, x=16, y=30, class_="title"),
        *(tag("text", line, x=16, y=50 + 19 * n, class_="soft") for n, line in enumerate(LEGEND)),
        *(_row(sweep, number, label, left) for number, label in enumerate(labels, 1)),
        *(
            tag("text", str(n), x=left + (n - 1) * (WIDTH + GAP) + WIDTH // 2, y=TOP - 8, class_="soft middle")
            for n in range(1, size + 1)
        ),
        *(
            tag("text", line[:1].upper() + line[1:], x=16, y=TOP + size * (HEIGHT + GAP) + 28 + 20 * i, class_="soft")
            for i, line in enumerate(lines)
        ),
    ]
    return (
        tag(
            "svg",
            *drawn,
            xmlns="http://www.w3.org/2000/svg",
            view_box=f"0 0 {width} {height}",
            width=width,
            height=height,
        )
        + "\n"
    )


def _row(sweep: Sweep, row: int, label: str, left: int) -> Markup:
    y = TOP + (row - 1) * (HEIGHT + GAP)
    cells = [
        tag("text", label, x=left - 30, y=y + HEIGHT // 2 + 5, class_="end"),
        tag("text", str(row), x=left - 10, y=y + HEIGHT // 2 + 5, class_="end soft"),
    ]
    for column in range(1, len(sweep.cells) + 1):
        x = left + (column - 1) * (WIDTH + GAP)
        look, big, small = _cell(sweep, row, column)
        cells.append(tag("rect", class_=look, x=x, y=y, width=WIDTH, height=HEIGHT, rx=3))
        middle = y + (HEIGHT // 2 + 5 if not small else HEIGHT // 2)
        cells.append(tag("text", big, x=x + WIDTH // 2, y=middle, class_="middle"))
        if small:
            cells.append(tag("text", small, x=x + WIDTH // 2, y=middle + 15, class_="middle small soft"))
    return tag("g", *cells)


def _cell(sweep: Sweep, row: int, column: int) -> tuple[str, str, str]:
    """(class, large text, small text) of a cell."""
    if row == column:
        run = sweep.cells[row - 1].run
        metrics = leading_metrics([cell.run for cell in sweep.cells])
        return "self", score_text(run, metrics[0]) if metrics else "", ""
    comparison = sweep.matrix.pairs.get((min(row, column), max(row, column)))
    if comparison is None:
        return "self", "unlike", ""
    word, _ = what_differs(comparison)
    if comparison.verdict == "IDENTICAL":
        return look(comparison), word, ""
    big = word if comparison.verdict == "SAME TOKENS" else counted(comparison.outputs, "output")
    return look(comparison), big, f"logprobs {len(comparison.differences)}/{comparison.common}"
