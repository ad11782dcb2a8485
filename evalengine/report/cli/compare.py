"""`python -m evalengine compare`: are two runs the same; if not, where, and why."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from evalengine.errors import ConfigError, EvalEngineError
from evalengine.report.cli.models import as_models, compare_models
from evalengine.report.compare.as_json import comparison_json, matrix_json
from evalengine.report.compare.compare import LEVELS
from evalengine.report.compare.matrix import matrix, matrix_report
from evalengine.report.compare.report import report
from evalengine.report.compare.two_runs import compared
from evalengine.report.html.comparison_page import comparison_page
from evalengine.report.html.matrix_page import matrix_page
from evalengine.report.html.page import Page
from evalengine.report.read.load import load_run
from evalengine.report.read.names import named_runs
from evalengine.report.read.run import Run
from evalengine.report.terminal.tables import print_findings
from evalengine.util.command import Namespace


def main(arguments: Namespace) -> int:
    """Runs `compare` with its arguments; returns the exit code."""
    paths = named_runs(arguments.runs)
    if len(paths) < 2:
        raise ConfigError(f"compare: {paths[0]}: one run alone cannot be compared; name at least two")
    runs = [load_run(path) for path in paths]
    if as_models(arguments, runs):
        return compare_models(runs, arguments)
    arguments.level = arguments.level or LEVELS[0]
    return _many(runs, arguments) if arguments.matrix or len(runs) > 2 else _two(runs[0], runs[1], arguments)


def _two(a: Run, b: Run, arguments: Namespace) -> int:
    comparison = compared(a, b, arguments.allow)
    if arguments.html:
        _write(comparison_page(comparison), arguments.html)
    within = comparison.within(arguments.level)
    lines = [*report(comparison)]
    if arguments.level != LEVELS[0]:
        lines.insert(-1, f"--level {arguments.level}: {'passed' if within else 'failed'}")
    print_findings("compare", lines, comparison_json(comparison), arguments.json)
    return 0 if within else 1


def _many(runs: Sequence[Run], arguments: Namespace) -> int:
    comparisons = matrix(runs, arguments.allow)
    if arguments.html:
        _write(matrix_page(comparisons), arguments.html)
    print_findings("compare", matrix_report(comparisons), matrix_json(comparisons), arguments.json)
    if comparisons.refused:
        return ConfigError.exit_code
    return 0 if comparisons.within(arguments.level) else 1


def _write(page: Page, target: str) -> None:
    """Writes a page. A page that cannot be written is bad usage, since exit code 1 says that runs differ."""
    try:
        page.write(Path(target))
    except EvalEngineError as error:
        raise ConfigError(f"compare: --html: {error}") from error
