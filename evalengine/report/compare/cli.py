"""`python -m evalengine compare`: are two runs the same; if not, where, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from evalengine.command import Namespace
from evalengine.errors import ConfigError, EvalEngineError
from evalengine.report.compare.as_json import comparison_json, matrix_json
from evalengine.report.compare.comparability import incomparable
from evalengine.report.compare.compare import LEVELS, Comparison, compare
from evalengine.report.compare.matrix import matrix, matrix_report
from evalengine.report.compare.report import report
from evalengine.report.compare.weight_files import differing_weights
from evalengine.report.html.comparison_page import comparison_page
from evalengine.report.html.matrix_page import matrix_page
from evalengine.report.html.page import Page
from evalengine.report.leaderboard.cli import as_models, compare_models
from evalengine.report.read.load import load_run
from evalengine.report.read.names import named_runs
from evalengine.report.read.run import Run
from evalengine.report.terminal.printing import print_findings


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


def compared(a: Run, b: Run, allow: bool) -> Comparison:
    """Two runs compared, and their weights where they differ and can be read.

    Raises `ConfigError` for unlike runs (unless `allow`), and for runs that share no request.
    """
    why = incomparable(a, b)
    if not a.items.keys() & b.items.keys():
        raise ConfigError(_refusal(a, b, why, "They have no request in common."))
    if why and not allow:
        raise ConfigError(_refusal(a, b, why, "--allow compares them on the requests that they share."))
    return replace(compare(a, b), tensors=differing_weights(a, b))


def _two(a: Run, b: Run, arguments: Namespace) -> int:
    comparison = compared(a, b, arguments.allow)
    if arguments.html:
        _write(comparison_page(comparison), arguments.html)
    print_findings("compare", report(comparison), comparison_json(comparison), arguments.json)
    return 0 if comparison.within(arguments.level) else 1


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


def _refusal(a: Run, b: Run, why: Sequence[str], cure: str) -> str:
    reasons = "".join(f"\n  - {line}" for line in why)
    return f"compare: {a.source} (A) and {b.source} (B) are not comparable{':' if why else '.'}{reasons}\n{cure}"
