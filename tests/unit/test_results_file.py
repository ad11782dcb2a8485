"""`pytest --results FILE`: outcomes by file, skips with their reasons, also from several workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.results_file", "-n", workers]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--results", "made/out.json"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    results = json.loads((tmp_path / "made" / "out.json").read_text())
    assert (results["passed"], results["failed"], results["skipped"]) == (3, 2, 1), done.stdout + done.stderr
    assert results["files"] == {"test_a.py": {"passed": 2, "failed": 2, "skipped": 1}, "test_b.py": {"passed": 1}}
    assert results["skipped_because"] == {"needs two of them": 1} and results["exit_status"] == done.returncode == 1
    assert results["environment"]["libraries"]["torch"] and results["environment"]["command"] == "python -m pytest"
