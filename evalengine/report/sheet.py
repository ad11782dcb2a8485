"""A table as data, stated once, and its forms for documents: Markdown (GitHub) and LaTeX (booktabs).

`terminal.tables` prints a sheet, `html.parts` puts it on a page, `python.results` into a notebook.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from evalengine.plain_text import printable
from evalengine.report.numbers import MINUS

_TEX = {
    **{char: f"\\{char}" for char in "&%$#_{}"},
    "~": "\\textasciitilde{}",
    "^": "\\textasciicircum{}",
    "\\": "\\textbackslash{}",
    MINUS: "$-$",
    "↑": "$\\uparrow$",
    "↓": "$\\downarrow$",
    "±": "$\\pm$",
    "<": "$<$",
    ">": "$>$",
    "|": "$|$",
    "[": "{[}",
}


@dataclass(frozen=True)
class Sheet:
    """A table. Cells are plain text; a heading may be a metric's or a setting's name."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Collection[int] = ()  # columns of words, set to the left; the others hold numbers
    best: frozenset[tuple[int, int]] = frozenset()  # (row, column) of what is best, set bold
    note: str = ""


Line = Sheet | str  # a part of what a command says: a table, or one line


def markdown_table(sheet: Sheet) -> str:
    """One table as GitHub shows it, its note below."""
    note = f"\n\n{escaped(sheet.note)}" if sheet.note else ""
    return "\n".join(_markdown_rows(sheet)) + note


def latex_table(sheet: Sheet) -> str:
    """One table environment, its note in the caption; needs \\usepackage{booktabs}."""
    columns = "".join("l" if n in sheet.words else "r" for n in range(len(sheet.head)))
    note = f" {_tex(sheet.note)}" if sheet.note else ""
    rows = [" & ".join(_tex_cells(sheet, n, row)) + " \\\\" for n, row in enumerate(sheet.rows)]
    return "\n".join([
        *("\\begin{table}", "\\centering", f"\\caption{{{_tex(sheet.title)}.{note}}}"),
        *(f"\\begin{{tabular}}{{{columns}}}", "\\toprule", " & ".join(map(_tex, sheet.head)) + " \\\\"),
        *("\\midrule", *rows, "\\bottomrule", "\\end{tabular}", "\\end{table}"),
    ])  # fmt: skip


def escaped(text: str) -> str:
    """A text from outside as Markdown that shows it as it is."""
    text = printable(" ".join(text.split()))
    return "".join(f"\\{char}" if char in "\\`*_[]<>|#&~" else char for char in text)


def _markdown_rows(sheet: Sheet) -> Iterator[str]:
    yield f"| {' | '.join(map(escaped, sheet.head))} |"
    yield f"|{'|'.join(' :-- ' if n in sheet.words else ' --: ' for n in range(len(sheet.head)))}|"
    for place, row in enumerate(sheet.rows):
        cells = (f"**{escaped(cell)}**" if (place, n) in sheet.best else escaped(cell) for n, cell in enumerate(row))
        yield f"| {' | '.join(cells)} |"


def _tex_cells(sheet: Sheet, place: int, row: Sequence[str]) -> Iterator[str]:
    for n, cell in enumerate(row):
        text = _tex(cell)
        yield f"\\textbf{{{text}}}" if (place, n) in sheet.best else text


def _tex(text: str) -> str:
    return "".join(_TEX.get(char, char) for char in printable(" ".join(text.split())))
