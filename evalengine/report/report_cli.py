"""`python -m evalengine report`: one run, or several compared, as one HTML file that needs nothing else."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from evalengine.command import Parser
from evalengine.errors import ConfigError, EvalEngineError, readable

ABOUT = "Writes one self-contained HTML file: of one run everything it left, of several their comparison."
EXIT_CODES = "Exit codes: 0 written, 1 the disk refused, 2 a run cannot be read or compared, or bad usage."


def main(argv: Sequence[str]) -> int:
    """Runs `report` with the words after it; returns the exit code."""
    parser = Parser("report", description=ABOUT, epilog=EXIT_CODES)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run folder, an experiment's folder (its runs) or an "
                        "lm-eval output folder; of several also baselines")  # fmt: skip
    parser.add_argument("-o", "--output", metavar="FILE", help="the file (one run: report.html in its folder; several: "
                        "comparison.html here)")  # fmt: skip
    parser.add_argument("--allow", action="store_true", help="compare unlike runs on the requests that they share")
    arguments = parser.parse_intermixed_args(list(argv))
    target = Path(arguments.output) if arguments.output else None
    if target is not None:
        _check(target)
    from evalengine.report.runs import named_runs

    runs = named_runs(arguments.runs)
    if len(runs) == 1:
        from evalengine.report.html.run_page import write_run_report

        path, size = write_run_report(runs[0], target)
    else:
        path = target or Path("comparison.html")
        size = _write_comparison(runs, path, arguments.allow)
    print(f"{path}: {size / 1e6:.1f} MB")
    return 0


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
    """The comparison's page; two runs of unlike modes show their noise floor too."""
    from evalengine.report.compare_cli import compared
    from evalengine.report.html.comparison_page import comparison_page
    from evalengine.report.html.noise_floor import noise_floor_section
    from evalengine.report.noise_floor import is_pair, noise_floor
    from evalengine.report.runs import load_run

    runs = [load_run(name) for name in names]
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
