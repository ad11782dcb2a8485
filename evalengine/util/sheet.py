"""A table as data, stated once, and its forms for documents: Markdown (GitHub) and LaTeX (booktabs).

`tables` prints a sheet, the report's `html.parts` puts it on a page, its `python.results` into a notebook.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from evalengine.plain_text import printable

_TEX = {
    **{char: f"\\{char}" for char in "&%$#_{}"},
    "~": "\\textasciitilde{}",
    "^": "\\textasciicircum{}",
    "\\": "\\textbackslash{}",
    "\u2212": "$-$",
    "↑": "$\\uparrow$",
    "↓": "$\\downarrow$",
    "±": "$\\pm$",
    "∞": "$\\infty$",
    "<": "$<$",
    ">": "$>$",
    "|": "$|$",
    "[": "{[}",
}


Ends = tuple[float, float, float]  # value, low, high


class Interval(str):
    """A cell's text that a page also draws: a value with its interval, on one scale with the column's others."""

    ends: Ends
    rule: float | None  # a line at this x, in the middle of the scale
    unit: str  # intervals of another unit have their own scale

    def __new__(cls, text: str, ends: Ends, rule: float | None = None, unit: str = "") -> Interval:
        cell = super().__new__(cls, text)
        cell.ends, cell.rule, cell.unit = ends, rule, unit
        return cell


@dataclass(frozen=True)
class Sheet:
    """A table. Cells are plain text, or an `Interval`; a heading may be a metric's or a setting's name."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Collection[int] = ()  # columns of words, set to the left; the others hold numbers
    best: frozenset[tuple[int, int]] = frozenset()  # (row, column) of what is best, set bold
    note: str = ""
    about: Mapping[str, str] = field(default_factory=dict)  # what a column holds, by its heading

    @property
    def notes(self) -> str:
        """The text below the table, where columns have no tooltips."""
        return " ".join(dict.fromkeys(text for text in (*self.about.values(), self.note) if text))

    def without(self, *headings: str) -> Sheet:
        """The table without these columns."""
        places = {n: place for place, n in enumerate(n for n, title in enumerate(self.head) if title not in headings)}
        return replace(
            self,
            head=[self.head[n] for n in places],
            rows=[[row[n] for n in places] for row in self.rows],
            words=[places[n] for n in self.words if n in places],
            best=frozenset((row, places[n]) for row, n in self.best if n in places),
        )


Line = Sheet | str  # a part of what a command says: a table, or one line


def markdown_table(sheet: Sheet) -> str:
    """One table as GitHub shows it, its note below."""
    note = f"\n\n{escaped(sheet.notes)}" if sheet.notes else ""
    rule = [":--" if n in sheet.words else "--:" for n in range(len(sheet.head))]
    rows = [map(escaped, sheet.head), rule, *_rows(sheet, escaped, "**%s**")]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows) + note


def latex_table(sheet: Sheet) -> str:
    """One table environment, its note in the caption; needs \\usepackage{booktabs}."""
    columns = "".join("l" if n in sheet.words else "r" for n in range(len(sheet.head)))
    note = f" {_tex(sheet.notes)}" if sheet.notes else ""
    rows = [" & ".join(cells) + " \\\\" for cells in _rows(sheet, _tex, "\\textbf{%s}")]
    return "\n".join([
        *("\\begin{table}", "\\centering", f"\\caption{{{_tex(sheet.title)}.{note}}}"),
        *(f"\\begin{{tabular}}{{{columns}}}", "\\toprule", " & ".join(map(_tex, sheet.head)) + " \\\\"),
        *("\\midrule", *rows, "\\bottomrule", "\\end{tabular}", "\\end{table}"),
    ])  # fmt: skip


def escaped(text: str) -> str:
    """A text from outside on one line of Markdown that renders as itself, with an entity only where Markdown, GitHub or
    HTML would see a meaning: the underscores in a metric's name, arrows and quotes stay as they are."""
    text = re.sub(r"&(?=#?\w+;)", "&amp;", printable(" ".join(text.split())))  # before the lines below make entities
    text = re.sub(r"[\\`*<|~@$]|://|!(?=\[)", _entities, text)
    text = re.sub(r"\[[-\u2212+]?\d[-\u2212+\d., ]*\](?![(\[:])|[\[\]]", _brackets, text)
    text = re.sub(r"(?<![^\W_])_|_(?![^\W_])", _entities, text)  # inside a word it is no emphasis
    text = re.sub(r"(?<!&)#(?=\w)|^(#|>|-(?= )|\+(?= )|\d+(?=[.)] ))", _entities, text)  # an issue, a heading, a list
    return re.sub(r"(?i)\bwww\.", lambda match: f"{match[0][:3]}&#46;", text)


def _brackets(match: re.Match[str]) -> str:
    """An interval, `[66.6, 81.9]`, is no link; any other bracket may be a link's."""
    return match[0] if len(match[0]) > 1 else _entities(match)


def _entities(match: re.Match[str]) -> str:
    return "".join(f"&#{ord(char)};" for char in match[0])


def _rows(sheet: Sheet, shown: Callable[[str], str], bold: str) -> Iterator[list[str]]:
    """The cells as a document shows them, the best set bold."""
    for place, row in enumerate(sheet.rows):
        yield [bold % shown(cell) if (place, n) in sheet.best else shown(cell) for n, cell in enumerate(row)]


def _tex(text: str) -> str:
    signed = re.sub(r"(?<![\w-])-(?=[\d∞])", "\u2212", printable(" ".join(text.split())))
    return "".join(_TEX.get(char, char) for char in signed)
