"""When a run was made, under which id, and by which command: for its page and every table of runs."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from evalengine.records.lm_eval_file import results_files
from evalengine.report.read.run import Run
from evalengine.util.command import PROGRAM
from evalengine.util.plain_files import read_json

LATEST_DATE = 253402300799  # 9999-12-31: a larger number in a file is no date


@dataclass(frozen=True)
class Provenance:
    """A run's origin; None where the run does not say: lm-eval records no command, a run from Python has none."""

    started: datetime | None  # in UTC
    run_id: str | None
    command: str | None  # as a shell takes it

    @property
    def date(self) -> str:
        """When the run began, `2026-01-02 03:04 UTC`; "" where that is not known."""
        return "" if self.started is None else f"{self.started:%Y-%m-%d %H:%M} UTC"


def provenance(run: Run) -> Provenance:
    """The provenance of a run folder, an lm-eval folder or a baseline. Runs from before manifests held the date have it
    in their results file, as lm-eval's runs do."""
    manifest = run.manifest
    started = parsed(manifest.started) or (None if run.kind == "baseline" else parsed(_results_date(run)))
    run_id, words = manifest.run_id, manifest.command
    return Provenance(started, run_id[:40] if run_id else None, command_line(words))


def parsed(value: Any) -> datetime | None:
    """A manifest's `started` (text), or lm-eval's `date` (UNIX seconds); None for anything else."""
    try:
        if isinstance(value, str):
            return datetime.strptime(value, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < LATEST_DATE:
            return datetime.fromtimestamp(value, timezone.utc)
    except ValueError:
        pass
    return None


def command_line(words: Any) -> str | None:
    """The command `python -m evalengine` with these words, as a shell takes it; None if they are no list of texts."""
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        return None
    return " ".join([PROGRAM, *map(shlex.quote, words)])


def _results_date(run: Run) -> Any:
    try:
        results = read_json(results_files(run.source)[-1])
    except (OSError, ValueError, IndexError):
        return None
    return results.get("date") if isinstance(results, dict) else None
