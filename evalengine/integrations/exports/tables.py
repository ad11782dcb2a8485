"""Runs in a table for a document: tasks as rows, runs as columns, value ± standard error; before it, for two runs, the
sentence to decide by, what changed, and what went from right to wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from evalengine.errors import ConfigError
from evalengine.report.compare.comparability import are_models
from evalengine.report.compare.compare import Comparison, compared
from evalengine.report.compare.headline import asked_for, changed_words, headline
from evalengine.report.compare.report import cautions, facts, regressions, value_text
from evalengine.report.leaderboard.models import labels
from evalengine.report.numbers import arrow, counted
from evalengine.report.read.groups import groups_first
from evalengine.report.read.run import Run, ScoreKey, direction
from evalengine.report.stats.metric_interval import cut_words
from evalengine.util.sheet import Sheet, escaped, latex_table, markdown_table

NEEDS = "% needs \\usepackage{booktabs}; made by evalengine report"
TABLES: dict[str, Callable[[Sheet], str]] = {
    "md": markdown_table,
    "latex": lambda sheet: f"{NEEDS}\n{latex_table(sheet)}",
}
MOST = 20  # regressions in the table
LONGEST = 200  # characters of a cell
FACTS = ("question", "target", "A", "B", "diverges")  # of a regression, as `facts` names them


def table(runs: Sequence[Run], form: str, allow: bool) -> str:
    """The results of the runs. In Markdown, the comparison of two comparable runs comes first; allow: of unlike ones,
    too."""
    text = TABLES[form](results_sheet(runs)) + "\n"
    if form != "md" or len(runs) != 2:
        return text
    try:
        return comparison_markdown(compared(runs[0], runs[1], allow or are_models(runs))) + text
    except ConfigError:
        return text


def results_sheet(runs: Sequence[Run]) -> Sheet:
    """Every task, metric and filter that some run has a result for, in the order in which they are first met, a group
    above its tasks; a cell is empty where a run has no result. The sheet's note says how each run was computed, and its
    digest."""
    names = labels(runs)
    met = list(dict.fromkeys(key for run in runs for key in run.results))
    subtasks = {name: tasks for run in reversed(runs) for name, tasks in run.groups.items()}
    keys = [key for task in groups_first((key[0] for key in met), subtasks) for key in met if key[0] == task]
    rows = [[*_words(runs, key), *(_cell(run, key) for run in runs)] for key in keys]
    origins = [f"{name}: {_made(run)}." for name, run in zip(names, runs, strict=True)]
    named = dict(zip(names, runs, strict=True))
    cut = [f"{', '.join(key)}: {words}." for key in keys if (words := cut_words(key, named))]
    note = " ".join([*origins, "± is one standard error, of documents taken as unrelated.", *cut])
    return Sheet("Results", ["Task", "Metric", "Filter", *names], rows, (0, 1, 2), note=note)


def _words(runs: Sequence[Run], key: ScoreKey) -> list[str]:
    task, metric, name = key
    return [task, f"{metric} {arrow(direction(runs, key))}".rstrip(), "" if name == "none" else name]


def _cell(run: Run, key: ScoreKey) -> str:
    if key not in run.results:
        return ""
    value, stderr = run.results[key]
    return value_text(value) + ("" if stderr is None else f" ± {value_text(stderr)}")


def _made(run: Run) -> str:
    """`exact numerics, digest 28bdce46b423, 200 requests`."""
    level = run.manifest.numerics or run.identity.get("numerics")
    how = f"{level} numerics" if level else run.program
    digest = f"digest {run.digest[:12]}" if run.digest else "no digest"
    return f"{how}, {digest}, {counted(len(run.items), 'request')}"


def comparison_markdown(c: Comparison) -> str:
    """The sentence, the counts, and a table of regressions, each followed by an empty line. Runs are called what
    `results_sheet` calls them."""
    words, (a, b) = changed_words(c), labels([c.a, c.b])
    parts = [f"**{escaped(headline(c, (a, b)))}.**", f"{escaped(words[0].upper() + words[1:])}."]
    parts += [escaped(why) for metric in asked_for(c) for why in cautions(metric)]
    found = regressions(c)
    if found:
        named = [(one.name, dict(facts(one, LONGEST))) for one in found[:MOST]]
        rows = [[name, *(known.get(fact, "") for fact in FACTS)] for name, known in named]
        head = ["Document", "Question", "Target", a, b, "Diverges"]
        more = f"The first {MOST} of {len(found)}." if len(found) > MOST else ""
        sheet = Sheet("Right to wrong", head, rows, tuple(range(len(head))), note=more)
        parts += [f"### Right to wrong: {len(found):,}", markdown_table(sheet), "### Results"]
    return "\n\n".join(parts) + "\n\n"
