"""`python -m evalengine compare`: are two runs the same; if not, where, and why."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table
from rich.text import Text

from evalengine.errors import ConfigError, EvalEngineError
from evalengine.report.comparability import incomparable
from evalengine.report.compare import LEVELS, compare
from evalengine.report.compare_json import comparison_json, matrix_json
from evalengine.report.compare_tables import printable, report
from evalengine.report.matrix import matrix, matrix_report
from evalengine.report.runs import Run, load_run

WIDTH = 240  # columns where there is no terminal: a cell that is cut cannot be searched
ABOUT = "Says whether runs are the same; if not, where they differ, why, and whether it matters."
EXIT_CODES = "Exit codes: 0 the same at --level, 1 different, 2 not comparable or bad usage."


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"compare: {message} (see compare --help)")


def main(argv: Sequence[str]) -> int:
    """Runs `compare` with the words after it; returns the exit code."""
    try:
        arguments = _parse(argv)
        runs = [load_run(path) for path in arguments.runs]
        return _many(runs, arguments) if arguments.matrix or len(runs) > 2 else _two(runs[0], runs[1], arguments)
    except SystemExit as exit:  # argparse's --help
        return int(exit.code or 0)
    except EvalEngineError as error:
        print(f"evalengine: {error}", file=sys.stderr)
        return error.exit_code


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(prog="python -m evalengine compare", description=ABOUT, epilog=EXIT_CODES, allow_abbrev=False)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run folder, an lm-eval output folder or a baseline")
    parser.add_argument("--level", choices=LEVELS, default="bitwise",
                        help="what must be the same for exit code 0: every bit (default), every output token, or every "
                        "answer and 0/1 score")  # fmt: skip
    parser.add_argument("--allow", action="store_true", help="compare unlike runs on the requests that they share")
    parser.add_argument("--json", metavar="FILE", help="write everything found there; - for standard output")
    parser.add_argument("--matrix", action="store_true", help="a table of all pairs (always so for more than two runs)")
    arguments = parser.parse_intermixed_args(argv)
    if len(arguments.runs) < 2:
        parser.error(f"{arguments.runs[0]}: one run alone cannot be compared; name at least two")
    return arguments


def _two(a: Run, b: Run, arguments: argparse.Namespace) -> int:
    why = incomparable(a, b)
    if not a.items.keys() & b.items.keys():
        raise ConfigError(_refusal(a, b, why, "They have no request in common."))
    if why and not arguments.allow:
        raise ConfigError(_refusal(a, b, why, "--allow compares them on the requests that they share."))
    comparison = compare(a, b)
    _print(report(comparison), comparison_json(comparison), arguments.json)
    return 0 if comparison.within(arguments.level) else 1


def _many(runs: Sequence[Run], arguments: argparse.Namespace) -> int:
    found = matrix(runs, arguments.allow)
    _print(matrix_report(found), matrix_json(found), arguments.json)
    if found.refused:
        return ConfigError.exit_code
    return 0 if found.within(arguments.level) else 1


def _refusal(a: Run, b: Run, why: Sequence[str], cure: str) -> str:
    reasons = "".join(f"\n  - {line}" for line in why)
    return f"compare: {a.source} (A) and {b.source} (B) are not comparable{':' if why else '.'}{reasons}\n{cure}"


def _print(lines: Iterable[Table | str], content: dict[str, Any], target: str | None) -> None:
    """JSON first: a full terminal must not cost the file. To standard output it goes alone."""
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    text = text.encode("utf-8", "backslashreplace").decode()  # a lone surrogate of a model's text: JSON's own escape
    if target == "-":
        sys.stdout.write(text)
        return
    if target:
        try:
            Path(target).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"compare: --json {target}: {error.strerror or error}; name another file") from error
    console = Console(file=sys.stdout, soft_wrap=True)
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    for line in lines:
        console.print(Text(printable(line)) if isinstance(line, str) else line)
