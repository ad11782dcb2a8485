"""`python -m evalengine compare`: are two runs the same; if not, where, and why. And what it does with runs of
different models: when its options apply, and where the tables go. A view is imported where it is requested."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from evalengine.errors import ConfigError, EvalEngineError
from evalengine.plain_text import warn
from evalengine.records.evidence import file_problems, repeated
from evalengine.records.folder import write_text_file
from evalengine.report.compare.as_json import comparison_json, write_json
from evalengine.report.compare.comparability import are_models
from evalengine.report.compare.compare import LEVELS, compared
from evalengine.report.compare.report import report
from evalengine.report.read.load import load_run
from evalengine.report.read.names import all_runs, inputs, skipped_note
from evalengine.report.read.run import Run
from evalengine.util.command import Namespace
from evalengine.util.plugins import load
from evalengine.util.sheet import Line
from evalengine.util.tables import print_lines

FORMATS = {"markdown": "markdown", "latex": "latex", "csv": "comma_separated"}  # form -> a function of `formats`
SUFFIXES = {".md": "markdown", ".tex": "latex", ".csv": "csv", ".html": "page", ".svg": "history"}
ASKING = ("models", "format", "output", "names", "by", "history")  # options that only a comparison of models has


def main(arguments: Namespace) -> int:
    """Runs `compare` with its arguments; returns the exit code."""
    paths = all_runs(arguments.runs)
    if len(arguments.runs) == 1 and (skipped := skipped_note(arguments.runs[0])):
        warn(skipped)
    if problems := [*_path_problems(arguments)]:
        raise ConfigError(problems)
    runs = [load_run(path) for path in paths]
    if len(paths) < 2:
        raise ConfigError(f"compare: {paths[0]}: one run alone cannot be compared; name at least two")
    if as_models(arguments, runs):
        return compare_models(runs, arguments)
    arguments.level = arguments.level or LEVELS[0]
    return _many(runs, arguments) if arguments.matrix or len(runs) > 2 else _two(runs[0], runs[1], arguments)


def _two(a: Run, b: Run, arguments: Namespace) -> int:
    comparison = compared(a, b, arguments.allow)
    within, lines = comparison.within(arguments.level), [*report(comparison)]
    if arguments.level != LEVELS[0]:
        lines.insert(-1, f"--level {arguments.level}: {'passed' if within else 'failed'}")
    _write_page(arguments, "evalengine.report.html.comparison_page:comparison_page", comparison)
    _tell(arguments, lambda: comparison_json(comparison), lines)
    return 0 if within else 1


def _many(runs: Sequence[Run], arguments: Namespace) -> int:
    from evalengine.report.compare.matrix import matrix, matrix_json, matrix_report

    comparisons = matrix(runs, arguments.allow)
    _write_page(arguments, "evalengine.report.html.matrix_page:matrix_page", comparisons)
    _tell(arguments, lambda: matrix_json(comparisons), matrix_report(comparisons))
    if comparisons.refused:
        return ConfigError.exit_code
    return 0 if comparisons.within(arguments.level) else 1


def _write_page(arguments: Namespace, page: str, comparison: Any) -> None:
    """Write the page that --html names. page: the function that makes it, as in `plugins.load`."""
    if arguments.html:
        with _usage("--html"):
            load(page)(comparison).write(Path(arguments.html))


def _tell(arguments: Namespace, content: Callable[[], dict[str, Any]], lines: Iterable[Line]) -> None:
    """Write the JSON that --json names, and print the lines unless standard output is the JSON's."""
    if arguments.json:
        write_json("compare", content(), arguments.json)
    if arguments.json != "-":
        print_lines(lines)


def as_models(arguments: Namespace, runs: Sequence[Run]) -> bool:
    """Whether this is a comparison of models: one was requested, or weights differ and nothing else was requested."""
    if _asked(arguments):
        if arguments.as_runs or arguments.matrix or arguments.level:
            raise ConfigError("compare: --runs, --matrix and --level compare runs; -o, --format, --names, --by, "
                              "--history and --models compare models: give either")  # fmt: skip
        return True
    as_runs = arguments.as_runs or arguments.matrix or arguments.level or arguments.allow
    return not as_runs and are_models(runs)


def compare_models(runs: Sequence[Run], arguments: Namespace) -> int:
    """Prints or writes the comparison. Returns 0; but 1 where the models were found to be different without an option
    that requires it: a script that compares two runs must not accept different weights as equal."""
    from evalengine.report.leaderboard import formats
    from evalengine.report.leaderboard.compose import board
    from evalengine.report.leaderboard.models import labels, steps

    targets = [(Path(name), SUFFIXES[Path(name).suffix]) for name in arguments.output or []]
    names = labels(runs) if arguments.names is None else _names(arguments.names, len(runs))
    if arguments.history and (at := steps(runs, names)) is not None:
        order = sorted(range(len(runs)), key=at.__getitem__)
        runs, names = [runs[place] for place in order], [names[place] for place in order]
    comparison = board(runs, names, arguments.by)
    if arguments.html:
        targets.append((Path(arguments.html), "page"))
    for path, form in targets:
        with _usage(str(path)):
            if form == "page":
                from evalengine.report.leaderboard.page import leaderboard_page

                leaderboard_page(comparison, arguments.history, path.parent).write(path)
            elif form == "history":
                from evalengine.report.leaderboard.history import history_picture

                write_text_file(path, history_picture(comparison))
            else:
                write_text_file(path, getattr(formats, FORMATS[form])(comparison))
    if arguments.format:
        sys.stdout.write(getattr(formats, FORMATS[arguments.format])(comparison))
    else:
        _tell(arguments, lambda: formats.board_json(comparison), formats.board_lines(comparison))
    return 0 if _asked(arguments) else 1


def _asked(arguments: Namespace) -> bool:
    return any(getattr(arguments, name) for name in ASKING)


def _names(given: str, count: int) -> list[str]:
    names = [name.strip() for name in given.split(",")]
    if len(names) != count or not all(names) or len(set(names)) < len(names):
        raise ConfigError(f"compare: --names {given}: {count} models need {count} different names, with commas "
                          "between them")  # fmt: skip
    return names


def _path_problems(arguments: Namespace) -> Iterator[str]:
    """Return the problems of the files that the options name."""
    named = [(f"-o {name}", name, SUFFIXES) for name in arguments.output or []]
    named += [(f"--json {name}", name, {}) for name in [arguments.json] if name not in (None, "-")]
    named += [(f"--html {name}", name, {}) for name in [arguments.html] if name is not None]
    sources = [*inputs(arguments.runs)]
    for words, name, endings in named:
        yield from file_problems(f"compare: {words}", Path(name), endings, sources)
    yield from repeated("compare", [Path(name) for _, name, _ in named])


@contextmanager
def _usage(what: str) -> Iterator[None]:
    """A file that cannot be written is bad usage, since exit code 1 says that runs differ."""
    try:
        yield
    except EvalEngineError as error:
        raise ConfigError(f"compare: {what}: {error}") from error
