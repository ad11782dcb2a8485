"""`python -m evalengine report`: a run, several compared, or the list of a folder's runs, as one HTML file; tables and
files for other programs, any number of them in one call. And `python -m evalengine baseline`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from evalengine.config.check import tracker_problems
from evalengine.errors import ConfigError
from evalengine.plain_text import say, warn
from evalengine.records.evidence import PAGE, file_problems, repeated
from evalengine.records.folder import TextFile, write_text_file
from evalengine.report.compare.comparability import are_models
from evalengine.report.compare.compare import compared
from evalengine.report.compare.matrix import matrix
from evalengine.report.html.comparison_page import comparison_page
from evalengine.report.html.index_page import write_index
from evalengine.report.html.matrix_page import matrix_page
from evalengine.report.html.on_complete import refresh_index
from evalengine.report.html.run_page import write_run_report
from evalengine.report.leaderboard.compose import board
from evalengine.report.leaderboard.page import leaderboard_page
from evalengine.report.numbers import counted
from evalengine.report.read.baseline import write_baseline
from evalengine.report.read.load import load_run, load_run_data
from evalengine.report.read.names import INDEX, holds_runs, inputs, named_runs, root_of
from evalengine.report.read.run import UNBOUND
from evalengine.util.command import Namespace
from evalengine.util.plain_files import YAML_SUFFIXES
from evalengine.util.plugins import load


class Export(NamedTuple):
    """A form for another program."""

    endings: tuple[str, ...]  # of the file that the option names; none: it names a folder
    work: str  # "module:function": (the run, the path) -> its files, as `TextFile`s
    complete: bool = False  # whether it needs as complete a manifest as the page


EXPORTS = {  # by option
    "model_index": Export(YAML_SUFFIXES, "evalengine.integrations.exports.files:model_index"),
    "samples": Export((".csv",), "evalengine.integrations.exports.files:samples_csv"),
    "inspect_log": Export((".json",), "evalengine.integrations.exports.inspect_log:inspect_logs", complete=True),
    "eval_results": Export(YAML_SUFFIXES, "evalengine.integrations.exports.files:hub_results"),
    "every_eval": Export((), "evalengine.integrations.exports.every_eval:every_eval", complete=True),
}


def main(arguments: Namespace) -> int:
    """Runs `report` with its arguments; returns the exit code. Every file is made before the first is written."""
    target = None if arguments.output is None else Path(arguments.output)
    exports = {option: Path(path) for option in EXPORTS if (path := getattr(arguments, option)) is not None}
    names = named_runs(arguments.runs)
    table = arguments.table
    page = not (exports or table or arguments.log_to) or (target is not None and not table)
    if problems := [*_problems(arguments, names, exports, target, page)]:
        raise ConfigError(problems)
    files: list[TextFile] = []
    if exports:
        data = load_run_data(names[0], complete=any(EXPORTS[option].complete for option in exports))
        files = [file for option, path in exports.items() for file in load(EXPORTS[option].work)(data, path)]
    runs = [load_run(name) for name in names] if table or arguments.log_to else []
    text = load("evalengine.integrations.exports.tables:table")(runs, table, arguments.allow) if table else ""
    if table and target is not None:
        files.append(TextFile(target, text))
    paths = [*(file.path for file in files), *([target] if page and target else [])]
    if problems := repeated("report", paths):  # only now, since an option may write several files
        raise ConfigError(problems)
    note = partial(warn, whose="") if table and target is None else say  # standard output is the table's
    if page:
        note(_write_page(names, target, arguments.allow))
    for file in files:
        write_text_file(file.path, file.text)
        note(f"{file.path}: {file.holds}" if file.holds else file.path)
    if table and target is None:
        sys.stdout.write(text)
    for name, run in zip(names, runs, strict=True) if arguments.log_to else ():
        note(f"{name}: {load('evalengine.integrations.exports.tracking:log_run')(run, arguments.log_to)}")
    return 0


def _problems(
    arguments: Namespace, names: Sequence[str], exports: Mapping[str, Path], target: Path | None, page: bool
) -> Iterator[str]:  # fmt: skip
    """Problems of the paths that the options name, and of their combination."""
    sources = [*inputs(arguments.runs)]
    own_page = os.path.realpath(Path(names[0]) / PAGE) if page and len(names) == 1 else ""
    if target is not None and os.path.realpath(target) != own_page:
        yield from file_problems(f"report: -o {target}", target, (), sources)
    for option, path in exports.items():
        words, endings = f"report: --{option.replace('_', '-')} {path}", EXPORTS[option].endings
        if len(names) > 1:
            yield f"{words}: exports one run; {len(names)} are named"
        file = path if endings else path / "a file"
        yield from file_problems(words, file, endings, sources, new_folder=not endings)
    yield from tracker_problems("report: --log-to", arguments.log_to)


def _write_page(names: Sequence[str], target: Path | None, allow: bool) -> str:
    """Writes the page of a run, of a folder of runs, or of a comparison; returns its place and size in words. The page
    of different models is the leaderboard, as in `compare`; two runs of unlike modes show their noise floor too."""
    if len(names) == 1 and holds_runs(Path(names[0])):
        path, count = write_index(Path(names[0]), target)
        return f"{path}: {counted(count, 'run')}"
    if len(names) == 1:
        path, size = write_run_report(names[0], target)
        return f"{path}: {size / 1e6:.1f} MB"
    path, runs = target or Path("comparison.html"), [load_run(name) for name in names]
    if not allow and are_models(runs):
        page = leaderboard_page(board(runs), page_folder=path.parent)
    elif len(runs) > 2:
        page = matrix_page(matrix(runs, allow))
    else:
        page = comparison_page(compared(runs[0], runs[1], allow))
    return f"{path}: {page.write(path) / 1e6:.1f} MB"


def baseline(arguments: Namespace) -> int:
    """Runs `baseline RUN -o FILE`: writes the part of a run that later runs are held against, small enough for git;
    returns the exit code."""
    file, run = Path(arguments.output), load_run(arguments.run)
    if run.unbound:
        warn(f"{run.source}: {UNBOUND}")
    size = write_baseline(run, file, arguments.force)
    if (root_of(run.source) / INDEX).exists():
        refresh_index(root_of(run.source))  # it says of every run whether it equals the latest baseline
    say(f"{file}: {len(run.items)} items, {size / 1000:.1f} kB, digest {run.digest or f'none ({run.program})'}")
    return 0
