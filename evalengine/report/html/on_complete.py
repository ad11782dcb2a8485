"""The pages that a finished run writes: its report, and the list of all runs next to it. A failure is only printed,
since the run is whole without them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from evalengine.errors import EvalEngineError
from evalengine.plain_text import warn, warn_of_bug


def write_list(folder: Path) -> None:
    """Rewrites the list of all runs next to a finished one."""
    from evalengine.report.read.names import root_of

    refresh_index(root_of(folder))


def refresh_index(root: Path) -> None:
    """Writes the list of the runs in a folder anew."""

    def write() -> None:
        from evalengine.report.html.index_page import write_index

        write_index(root)

    _tried(write, "new index.html", "the list of runs", f"try again: python -m evalengine report {root}")


def write_page(folder: Path) -> None:
    """Writes a finished run's `report.html`."""

    def write() -> None:
        from evalengine.report.html.run_page import write_run_report

        write_run_report(folder)

    fix = f"the run is whole; try again: python -m evalengine report {folder}"
    _tried(write, "report.html", "the report", fix)


def _tried(write: Callable[[], None], what: str, where: str, fix: str) -> None:
    """Writes; or says that there is no `what`, why, and the fix. where: what has a bug if it raises another error."""
    try:
        write()
        return
    except EvalEngineError as error:
        why = str(error)
    except Exception:
        warn_of_bug()
        why = f"a bug in {where}, shown above"
    warn(f"no {what} ({why}); {fix}")
