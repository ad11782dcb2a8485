"""Record a run (`pytest --results FILE`), and report how old the newest committed GPU record is.

A record has outcomes, skip reasons, durations, the GPU, versions and the commit. The report is one line at the end of a
run of the whole suite."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections import Counter, defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from evalengine.bench.environment import environment
from evalengine.records.manifest import code_version

ROOT = Path(__file__).parents[1]
RECORDS = "results/reference/gpu-tests-*.json"
# Code that runs on the GPU or schedules what runs there.
GPU_PATH = (
    *("kernels", "evalengine/kernels", "evalengine/layers", "evalengine/models"),
    *("evalengine/engine/execute", "evalengine/engine/schedule", "evalengine/verification"),
)
NUM_SLOWEST = 40  # tests whose seconds are recorded


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", type=Path, help="write outcomes, file by file, and the environment to this JSON file")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--results")
    if path and not hasattr(config, "workerinput"):  # xdist's workers report to the main process
        results = _Results(path.absolute(), config.getoption("markexpr"), config.getoption("numprocesses", None))
        config.pluginmanager.register(results, "results-file")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS:  # not a run of single files
        terminalreporter.write_line(describe_gpu_record(ROOT))


def describe_gpu_record(root: Path) -> str:
    """Return one line: the newest committed GPU record, and the number of files of the GPU path changed since."""
    tracked = _git(root, "ls-files", "--", RECORDS)
    paths = sorted(root.glob(RECORDS)) if tracked is None else [root / name for name in tracked.splitlines()]
    records = [record for path in paths if (record := _read(path)) is not None]
    if not records:
        return f"GPU tests: no record ({RECORDS}); run make test-gpu"
    newest = max(records, key=lambda record: record["environment"]["date"])
    machine, commit = newest["environment"], newest["environment"]["code"]["commit"]
    known = f"GPU tests: {newest['passed']} passed, {newest['failed']} failed on {machine['gpu']} at {commit[:12]}"
    if tracked is None:
        return f"{known}; changes since are unknown: git is not available here"
    changed = _git(root, "diff", "--name-only", commit, "HEAD", "--", *GPU_PATH)
    if changed is None:
        return f"{known}; changes since are unknown: this clone does not have that commit (git fetch --unshallow)"
    return f"{known}; {len(changed.splitlines())} files of the GPU path changed since"


def _read(path: Path) -> dict[str, Any] | None:
    """Return a record; None if it is malformed or lacks the full commit hash."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        machine = record["environment"]
        complete = isinstance(machine["date"], str) and _is_commit(machine["code"]["commit"])
        return record if complete and {"gpu"} <= set(machine) and {"passed", "failed"} <= set(record) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _longest(seconds: dict[str, float], count: int) -> dict[str, float]:
    return {name: round(seconds[name], 1) for name in sorted(seconds, key=lambda name: -seconds[name])[:count]}


def _is_commit(text: object) -> bool:
    return isinstance(text, str) and re.fullmatch(r"[0-9a-f]{40}", text) is not None


def _git(folder: Path, *arguments: str) -> str | None:
    """Return git's output; None if it fails or is not installed."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


class _Results:
    def __init__(self, path: Path, marks: str, workers: int | None) -> None:
        self._path, self._marks, self._workers = path, marks, workers
        self._started, self._code = time.time(), code_version()
        if not _is_commit(self._code.commit):
            raise pytest.UsageError(
                f"--results: the commit is {self._code.commit!r}, not 40 hex digits; without a git checkout set "
                "EVALENGINE_COMMIT to the output of `git rev-parse HEAD`"
            )
        self._outcomes: dict[str, Counter[str]] = {}
        self._reasons: Counter[str] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)  # by test: setup, call and teardown
        self._unfinished: set[str] = set()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._unfinished.update(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._unfinished.update(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration
        if report.when == "teardown":
            self._unfinished.discard(report.nodeid)
        if report.when != "call" and report.outcome == "passed":
            return
        file = report.nodeid.split("::")[0]
        self._outcomes.setdefault(file, Counter())[report.outcome] += 1
        if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
            self._reasons[str(report.longrepr[2]).removeprefix("Skipped: ")] += 1

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        total: Counter[str] = sum(self._outcomes.values(), Counter())
        of_files: defaultdict[str, float] = defaultdict(float)
        for test, seconds in self._seconds.items():
            of_files[test.split("::")[0]] += seconds
        command = ["python", "-m", "pytest", *(["-m", self._marks] if self._marks else [])]
        content: dict[str, Any] = {
            "environment": {**environment(command), "code": asdict(self._code)},
            "exit_status": int(exitstatus),
            "workers": self._workers or 1,
            "seconds": round(time.time() - self._started),
            **{outcome: total[outcome] for outcome in ("passed", "failed", "skipped")},
            "unfinished": sorted(self._unfinished),  # when the run was interrupted
            "skipped_because": dict(self._reasons),
            "files": {file: dict(outcomes) for file, outcomes in sorted(self._outcomes.items())},
            "seconds_of_files": _longest(of_files, len(of_files)),
            "seconds_of_slowest_tests": _longest(self._seconds, NUM_SLOWEST),
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
