"""`pytest --results FILE` writes what passed in each file, with GPU, versions and commit: evidence of a run."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from evalengine.bench.environment import environment


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", type=Path, help="write what passed, file by file, to this JSON file")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--results")
    if path and not hasattr(config, "workerinput"):  # xdist's workers report to the main process
        config.pluginmanager.register(_Results(path.absolute(), config.getoption("markexpr")), "results-file")


class _Results:
    def __init__(self, path: Path, marks: str) -> None:
        self._path, self._marks, self._started = path, marks, time.time()
        self._outcomes: dict[str, Counter[str]] = {}
        self._reasons: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        file = report.nodeid.split("::")[0]
        self._outcomes.setdefault(file, Counter())[report.outcome] += 1
        if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
            self._reasons[str(report.longrepr[2]).removeprefix("Skipped: ")] += 1

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        total: Counter[str] = sum(self._outcomes.values(), Counter())
        content: dict[str, Any] = {
            "environment": environment(["python", "-m", "pytest", *(["-m", self._marks] if self._marks else [])]),
            "exit_status": int(exitstatus),
            "seconds": round(time.time() - self._started),
            **{outcome: total[outcome] for outcome in ("passed", "failed", "skipped")},
            "skipped_because": dict(self._reasons),
            "files": {file: dict(outcomes) for file, outcomes in sorted(self._outcomes.items())},
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
