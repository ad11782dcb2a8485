"""`python -m evalengine report`: a run, several compared, or the list of a folder's runs, as one HTML file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from evalengine.config.check import tracker_problems
from evalengine.errors import ConfigError, readable
from evalengine.plain_text import say
from evalengine.records.folder import write_text_file
from evalengine.report.compare.beside import is_pair
from evalengine.report.compare.compare import compared
from evalengine.report.compare.matrix import matrix
from evalengine.report.export.every_eval import write_every_eval
from evalengine.report.export.files import write_model_index, write_samples
from evalengine.report.export.inspect_log import write_inspect_logs
from evalengine.report.export.shared import write_hub_results
from evalengine.report.export.tables import TABLES, comparison_markdown, results_sheet
from evalengine.report.export.tracking import log_run
from evalengine.report.html.comparison_page import comparison_page, noise_floor, noise_floor_section
from evalengine.report.html.index_page import write_index
from evalengine.report.html.matrix_page import matrix_page
from evalengine.report.html.run_page import write_run_report
from evalengine.report.leaderboard.compose import board
from evalengine.report.leaderboard.models import are_models
from evalengine.report.leaderboard.page import leaderboard_page
from evalengine.report.numbers import counted
from evalengine.report.read.load import load_run, load_run_data
from evalengine.report.read.names import holds_runs, named_runs
from evalengine.report.read.run import Run
from evalengine.util.command import Namespace

# option that names a file -> what is counted in it
FILES = {"model_index": "result", "samples": "sample", "inspect_log": "sample", "eval_results": "result",
         "every_eval": "result"}  # fmt: skip
WRITERS = {"model_index": write_model_index, "samples": write_samples, "eval_results": write_hub_results}


def main(arguments: Namespace) -> int:
    """Runs `report` with its arguments; returns the exit code."""
    target = Path(arguments.output) if arguments.output else None
    if target is not None:
        _check(target)
    runs = named_runs(arguments.runs)
    if arguments.table or arguments.log_to or _file_option(arguments):
        return _other_form(runs, arguments, target)
    if len(runs) == 1 and holds_runs(Path(runs[0])):
        path, count = write_index(Path(runs[0]), target)
        say(f"{path}: {counted(count, 'run')}")
        return 0
    if len(runs) == 1:
        path, size = write_run_report(runs[0], target)
    else:
        path = target or Path("comparison.html")
        size = _write_comparison(runs, path, arguments.allow)
    say(f"{path}: {size / 1e6:.1f} MB")
    return 0


def _other_form(names: Sequence[str], arguments: Namespace, target: Path | None) -> int:
    """Writes a table, a model index or samples, or logs the runs, in place of a page."""
    files = [getattr(arguments, option) for option in FILES]
    if sum(map(bool, (arguments.table, arguments.log_to, *files))) > 1:
        raise ConfigError("report: --table, --model-index, --samples, --inspect-log, --eval-results, --every-eval and "
                          "--log-to are several things: give one of them")  # fmt: skip
    if arguments.log_to:
        return _log(names, arguments.log_to)
    if option := _file_option(arguments):
        if len(names) > 1 or target is not None:
            option = f"--{option.replace('_', '-')}"
            raise ConfigError(
                f"report: {option} FILE: is of one run and names its own file: give neither -o nor other runs"
            )
        return _named_file(names[0], option, Path(getattr(arguments, option)))
    runs = [load_run(name) for name in names]
    text = TABLES[arguments.table](results_sheet(runs)) + "\n"
    if arguments.table == "md" and len(runs) == 2:
        text = f"{_in_markdown(runs, arguments.allow)}{text}"
    if target is None:
        sys.stdout.write(text)
        return 0
    write_text_file(target, text)
    say(target)
    return 0


def _file_option(arguments: Namespace) -> str | None:
    """The option that names a file of another program's form."""
    return next((option for option in FILES if getattr(arguments, option)), None)


def _named_file(name: str, option: str, path: Path) -> int:
    """Writes what the option says of a run to the file that it names."""
    if option == "every_eval":  # a folder is named
        path, count = write_every_eval(load_run_data(name), path)
    else:
        _check(path)
        count = write_inspect_logs(name, path) if option == "inspect_log" else WRITERS[option](load_run(name), path)
    say(f"{path}: {counted(count, FILES[option])}")
    return 0


def _in_markdown(runs: Sequence[Run], allow: bool) -> str:
    """What two runs show together, the sentence first; nothing for runs that cannot be compared."""
    try:
        return comparison_markdown(compared(runs[0], runs[1], allow or are_models(runs)))
    except ConfigError:
        return ""


def _log(names: Sequence[str], tracker: str) -> int:
    """Logs each run. Raises `ConfigError` for an unknown tracker, `EvalEngineError` if the tracker refuses."""
    if problems := list(tracker_problems("report: --log-to", tracker)):
        raise ConfigError(problems)
    for name in names:
        say(f"{name}: {log_run(name, tracker)}")
    return 0


def _write_comparison(names: Sequence[str], path: Path, allow: bool) -> int:
    """Writes the comparison's page, which for different models is the leaderboard, as in `compare`. Two runs of unlike
    modes show their noise floor too."""
    runs = [load_run(name) for name in names]
    if not allow and are_models(runs):
        return leaderboard_page(board(runs), beside=path.parent).write(path)
    if len(runs) > 2:
        return matrix_page(matrix(runs, allow)).write(path)
    page = comparison_page(compared(runs[0], runs[1], allow))
    if is_pair(runs[0], runs[1]):
        noise_floor_section(page, noise_floor(runs[0], runs[1]))
    return page.write(path)


def _check(target: Path) -> None:
    """Raises `ConfigError` for a file that cannot be written where it is named."""
    with readable(f"report: -o {target}"):
        if target.is_dir():
            raise ConfigError(f"report: -o {target}: a folder; name a file in it, such as {target / 'report.html'}")
        if not target.parent.is_dir():
            raise ConfigError(f"report: -o {target}: there is no folder {target.parent}; make it, or name another file")
