"""What a finished run leaves for people: its page, and the list of all runs beside it."""

from __future__ import annotations

from pathlib import Path

from evalengine.errors import EvalEngineError
from evalengine.plain_text import warn, warn_of_bug


def write_list(folder: Path) -> None:
    """Writes anew the list of all runs beside a finished one."""
    from evalengine.report.html.index_page import refresh_index
    from evalengine.report.read.names import root_of

    refresh_index(root_of(folder))


def write_page(folder: Path) -> None:
    """Writes a finished run's `report.html`. A failure is only printed, since the run is whole without its page."""
    try:
        from evalengine.report.html.run_page import write_run_report

        write_run_report(folder)
        return
    except EvalEngineError as error:
        why = str(error)
    except Exception:
        warn_of_bug()
        why = "a bug in the report, shown above"
    cure = f"the run is whole; try again: python -m evalengine report {folder}"
    warn(f"no report.html ({why}); {cure}")
