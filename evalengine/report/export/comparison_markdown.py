"""Two runs compared, as Markdown: the sentence to decide by, what changed, and what went from right to wrong."""

from __future__ import annotations

from evalengine.report.compare.compare import Comparison
from evalengine.report.compare.headline import changed_words, headline
from evalengine.report.compare.regressions import facts, regressions
from evalengine.report.leaderboard.formats import escaped, markdown_table
from evalengine.report.leaderboard.sheets import Sheet

MOST = 20  # regressions in the table
LONGEST = 200  # characters of a cell
HEAD = ["Document", "Question", "Target", "A", "B", "Parts at"]


def comparison_markdown(c: Comparison) -> str:
    """The sentence, the counts, and a table of regressions, each followed by an empty line."""
    words = changed_words(c)
    parts = [f"**{escaped(headline(c))}.**", f"{escaped(words[0].upper() + words[1:])}."]
    found = regressions(c)
    if found:
        named = [(one.name, dict(facts(one, LONGEST))) for one in found[:MOST]]
        rows = [
            [name, *(known.get(title.lower(), known.get(title, "")) for title in HEAD[1:])] for name, known in named
        ]
        more = f"The first {MOST} of {len(found)}." if len(found) > MOST else ""
        sheet = Sheet("Right to wrong", HEAD, rows, tuple(range(len(HEAD))), note=more)
        parts += [f"### Right to wrong: {len(found):,}", markdown_table(sheet), "### Results"]
    return "\n\n".join(parts) + "\n\n"
