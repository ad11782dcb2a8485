"""`pytest --results FILE`: outcomes by file and skip reasons, also from several workers; the line about GPU records."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from evalengine.records.manifest_data import Code
from tests.results_file import GPU_PATH, _Results, describe_gpu_record

ROOT = Path(__file__).parents[2]
TESTS = """
import pytest

@pytest.mark.parametrize("x", [1, 2, 3])
def test_one(x):
    assert x < 3

@pytest.mark.skip(reason="needs two of them")
def test_two():
    pass

@pytest.fixture
def broken():
    raise OSError

def test_three(broken):
    pass
"""


# Two workers start three processes that import torch; the file is written by the same code from the same reports.
@pytest.mark.parametrize("workers", ["0", pytest.param("2", marks=pytest.mark.slow)])
def test_outcomes_by_file(workers: str, tmp_path: Path) -> None:
    """Outcomes are counted by file and skips by reason, in one process and with two workers."""
    (tmp_path / "test_a.py").write_text(TESTS)
    (tmp_path / "test_b.py").write_text("def test_b():\n    pass\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = .\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.results_file", "-n", workers]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "EVALENGINE_COMMIT": "1" * 40}
    done = subprocess.run(
        [*command, "--results", "made/out.json"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    results = json.loads((tmp_path / "made" / "out.json").read_text())
    assert (results["passed"], results["failed"], results["skipped"]) == (3, 2, 1), done.stdout + done.stderr
    assert results["files"] == {"test_a.py": {"passed": 2, "failed": 2, "skipped": 1}, "test_b.py": {"passed": 1}}
    assert results["skipped_because"] == {"needs two of them": 1} and results["exit_status"] == done.returncode == 1
    machine = results["environment"]
    assert machine["libraries"]["torch"] and machine["libraries"]["triton"] and machine["gpu"] and "driver" in machine
    assert machine["command"] == "python -m pytest" and re.fullmatch("[0-9a-f]{40}", machine["code"]["commit"])
    assert results["workers"] == max(1, int(workers))
    assert set(results["seconds_of_files"]) == {"test_a.py", "test_b.py"}
    assert len(results["seconds_of_slowest_tests"]) == 6 and results["unfinished"] == []
    assert done.stdout.count("GPU tests: ") == 1, done.stdout


def test_an_interrupted_run_lists_what_did_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVALENGINE_COMMIT", "1" * 40)
    results = _Results(tmp_path / "out.json", "gpu", 2)
    results.pytest_xdist_node_collection_finished(["test_a", "test_b", "test_c"])
    for name, when in (("test_a", "setup"), ("test_a", "call"), ("test_a", "teardown"), ("test_b", "setup")):
        results.pytest_runtest_logreport(pytest.TestReport(name, ("", 0, ""), {}, "passed", None, when))
    results.pytest_sessionfinish(2)
    assert json.loads((tmp_path / "out.json").read_text())["unfinished"] == ["test_b", "test_c"]


@pytest.mark.parametrize("commit", ["", "7c1cf2e2"])
def test_a_record_needs_the_full_commit(commit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is raised before the run, which takes minutes."""
    monkeypatch.setattr("tests.results_file.code_version", lambda: Code("0", commit or None, None))
    with pytest.raises(pytest.UsageError, match=r"not 40 hex digits.* EVALENGINE_COMMIT"):
        _Results(Path("results.json"), "", None)


def git(folder: Path, *arguments: str) -> str:
    names = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    done = subprocess.run(["git", "-C", str(folder), *names, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def write_record(folder: Path, name: str, date: str, commit: str | None, passed: int = 7) -> None:
    path = folder / "results" / "reference" / f"gpu-tests-{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    machine = {"date": date, "code": {"commit": commit}, "gpu": "NVIDIA H200"}
    path.write_text(json.dumps({"environment": machine, "passed": passed, "failed": 0}))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A git repository with a file in each folder of the GPU path."""
    for name in GPU_PATH:
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "a.py").write_text("1")
    git(tmp_path, "init", "-q")
    commit_all(tmp_path)
    return tmp_path


def commit_all(folder: Path) -> str:
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "m")
    return git(folder, "rev-parse", "HEAD")


def test_the_newest_committed_record_and_the_files_changed_since(checkout: Path) -> None:
    old = git(checkout, "rev-parse", "HEAD")
    (checkout / GPU_PATH[0] / "a.py").write_text("2")
    new = commit_all(checkout)
    write_record(checkout, "h200", "2026-11-23T03:19:27+00:00", new)
    write_record(checkout, "a100", "2026-11-22T03:19:27+00:00", old, passed=5)
    for name in (*GPU_PATH[1:], "docs"):  # all folders of the GPU path but one, and a folder outside it
        (checkout / name).mkdir(exist_ok=True)
        (checkout / name / "b.py").write_text("1")
    commit_all(checkout)
    write_record(checkout, "uncommitted", "2026-11-24T00:00:00+00:00", old, passed=1)
    expected = f"GPU tests: 7 passed, 0 failed on NVIDIA H200 at {new[:12]}; "
    assert describe_gpu_record(checkout) == expected + f"{len(GPU_PATH) - 1} files of the GPU path changed since"


@pytest.mark.parametrize("content", [None, "", "[]", '{"environment": {}}', "null"])
def test_without_a_readable_record_the_line_says_so(content: str | None, checkout: Path) -> None:
    if content is not None:
        write_record(checkout, "h200", "", None)
        (checkout / "results" / "reference" / "gpu-tests-h200.json").write_text(content)
        commit_all(checkout)
    assert describe_gpu_record(checkout).startswith("GPU tests: no record (")


def test_a_commit_that_the_clone_lacks_and_a_machine_without_git(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_record(checkout, "h200", "2026-11-23", "0123456789" * 4)
    commit_all(checkout)
    known = "GPU tests: 7 passed, 0 failed on NVIDIA H200 at 012345678901; changes since are unknown: "
    assert describe_gpu_record(checkout).startswith(known + "this clone does not have that commit")
    monkeypatch.setenv("PATH", "")
    assert describe_gpu_record(checkout) == known + "git is not available here"


def test_a_copy_without_its_git_folder(tmp_path: Path) -> None:
    write_record(tmp_path, "h200", "2026-11-23", "0123456789" * 4)
    assert describe_gpu_record(tmp_path).endswith("git is not available here")
