"""`python -m evalengine report`: a run, several compared, or the list of a folder's runs, as one HTML file."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from evalengine.command import Namespace
from evalengine.errors import ConfigError, EvalEngineError, readable


def main(arguments: Namespace) -> int:
    """Runs `report` with its words; returns the exit code."""
    target = Path(arguments.output) if arguments.output else None
    if target is not None:
        _check(target)
    from evalengine.report.runs import named_runs

    runs = named_runs(arguments.runs)
    if arguments.table or arguments.model_index or arguments.log_to:
        return _other_form(runs, arguments, target)
    if len(runs) == 1 and holds_runs(Path(runs[0])):
        from evalengine.report.html.index_page import write_index

        path, count = write_index(Path(runs[0]), target)
        print(f"{path}: {count} run{'' if count == 1 else 's'}")
        return 0
    if len(runs) == 1:
        from evalengine.report.html.run_page import write_run_report

        path, size = write_run_report(runs[0], target)
    else:
        path = target or Path("comparison.html")
        size = _write_comparison(runs, path, arguments.allow)
    print(f"{path}: {size / 1e6:.1f} MB")
    return 0


def _other_form(names: Sequence[str], arguments: Namespace, target: Path | None) -> int:
    """A table or a model index in place of a page."""
    if sum(map(bool, (arguments.table, arguments.model_index, arguments.log_to))) > 1:
        raise ConfigError("report: --table, --model-index and --log-to are several things: give one of them")
    if arguments.log_to:
        return _log(names, arguments.log_to)
    if arguments.model_index and (len(names) > 1 or target is not None):
        raise ConfigError(
            "report: --model-index FILE: is of one run and names its own file: give neither -o nor other runs"
        )
    from evalengine.report.runs import load_run

    runs = [load_run(name) for name in names]
    if arguments.model_index:
        from evalengine.report.model_index import write_model_index

        path = Path(arguments.model_index)
        _check(path)
        count = write_model_index(runs[0], path)
        print(f"{path}: {count} result{'' if count == 1 else 's'}")
        return 0
    from evalengine.report.results_table import TABLES, results_sheet

    text = TABLES[arguments.table](results_sheet(runs)) + "\n"
    if target is None:
        sys.stdout.write(text)
        return 0
    write_text(target, text)
    print(target)
    return 0


def _log(names: Sequence[str], tracker: str) -> int:
    """Logs each run. Raises `ConfigError` for a tracker that there is not, `EvalEngineError` if it refuses."""
    from evalengine.config_run import tracker_problems
    from evalengine.report.tracking import log_run

    if problems := list(tracker_problems("report: --log-to", tracker)):
        raise ConfigError(problems)
    for name in names:
        print(f"{name}: {log_run(name, tracker)}")
    return 0


def write_text(target: Path, text: str) -> None:
    """A file that appears whole or not at all. Raises `EvalEngineError` if the disk refuses."""
    from evalengine.records.folder import write_failed, write_whole

    try:
        write_whole(target, lambda path: path.write_bytes(text.encode("utf-8", "backslashreplace")))
    except OSError as error:
        raise write_failed(target, error) from error


def holds_runs(path: Path) -> bool:
    """Whether this is a folder of runs and none itself. A single output of lm-eval in it stands for itself."""
    from evalengine.records.lm_eval_file import results_files
    from evalengine.report.folders import is_run_folder
    from evalengine.report.run_names import runs_below

    with readable(path):
        if not path.is_dir() or is_run_folder(path) or results_files(path):
            return False
        foreign = [child for child in path.iterdir() if child.is_dir() and results_files(child)]
        return bool(runs_below(path)) or len(foreign) > 1


def leave_list(folder: Path) -> None:
    """The list of all runs beside a finished one, anew."""
    from evalengine.report.html.index_page import leave_index
    from evalengine.report.run_names import root_of

    leave_index(root_of(folder))


def leave_report(folder: Path) -> None:
    """A finished run's `report.html`. The run is worth more than its page: a failure is said, and passes."""
    try:
        from evalengine.report.html.run_page import write_run_report

        write_run_report(folder)
        return
    except EvalEngineError as error:
        why = str(error)
    except Exception:
        traceback.print_exc()
        why = "a bug in the report, shown above"
    cure = f"the run is whole; try again: python -m evalengine report {folder}"
    print(f"evalengine: no report.html ({why}); {cure}", file=sys.stderr)


def _write_comparison(names: Sequence[str], path: Path, allow: bool) -> int:
    """The comparison's page, of different models as `compare` has it; two runs of unlike modes show their noise floor
    too."""
    from evalengine.report.compare_cli import compared
    from evalengine.report.html.comparison_page import comparison_page
    from evalengine.report.html.noise_floor import noise_floor_section
    from evalengine.report.leaderboard.models import are_models
    from evalengine.report.noise_floor import is_pair, noise_floor
    from evalengine.report.runs import load_run

    runs = [load_run(name) for name in names]
    if not allow and are_models(runs):
        from evalengine.report.html.leaderboard_page import leaderboard_page
        from evalengine.report.leaderboard.compose import board

        return leaderboard_page(board(runs)).write(path)
    if len(runs) > 2:
        from evalengine.report.html.matrix_page import matrix_page
        from evalengine.report.matrix import matrix

        return matrix_page(matrix(runs, allow)).write(path)
    page = comparison_page(compared(runs[0], runs[1], allow))
    if is_pair(runs[0], runs[1]):
        noise_floor_section(page, noise_floor(runs[0], runs[1]))
    return page.write(path)


def _check(target: Path) -> None:
    with readable(f"report: -o {target}"):
        if target.is_dir():
            raise ConfigError(f"report: -o {target}: a folder; name a file in it, such as {target / 'report.html'}")
        if not target.parent.is_dir():
            raise ConfigError(f"report: -o {target}: there is no folder {target.parent}; make it, or name another file")
