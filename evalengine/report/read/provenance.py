"""When a run was made, under which id, and by which command: what its page and every table of runs say of it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from evalengine.command import PROGRAM
from evalengine.plain_files import read_json
from evalengine.records.lm_eval_file import results_files
from evalengine.report.read.run import Run

LATEST_DATE = 253402300799  # 9999-12-31: what a file says beyond it is no date


@dataclass(frozen=True)
class Provenance:
    """None where the run does not say: lm-eval records no command, a run from Python has none."""

    started: datetime | None  # in UTC
    run_id: str | None
    command: str | None  # as a shell takes it

    @property
    def date(self) -> str:
        """`2026-01-02 03:04 UTC`, or "" where it is not known."""
        return "" if self.started is None else f"{self.started:%Y-%m-%d %H:%M} UTC"


def provenance(run: Run) -> Provenance:
    """Of a run folder, an lm-eval folder or a baseline. Runs from before manifests held the date have it in their
    results file, as lm-eval's have."""
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
    """The words after `python -m evalengine`, with it, as a shell takes them; None for what are no words."""
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        return None
    return " ".join([PROGRAM, *map(shlex.quote, words)])


def _results_date(run: Run) -> Any:
    try:
        results = read_json(results_files(run.source)[-1])
    except (OSError, ValueError, IndexError):
        return None
    return results.get("date") if isinstance(results, dict) else None
