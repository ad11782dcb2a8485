"""docs/inspect.md as it stands: its command lines, one after the other, in a folder of their own."""

from __future__ import annotations

import pytest

pytest.importorskip("inspect_ai", reason="needs inspect_ai: pip install 'evalengine[inspect]'")

import os
import shutil
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

from inspect_ai.log import read_eval_log

from tests.e2e.command import ROOT, SHORT, call
from tests.unit.test_docs_in_shells import commands

TASK = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate

@task
def sums():
    samples = [Sample(input=f"What is {n} plus 4?", target=str(n + 4)) for n in range(3)]
    return Task(dataset=samples, solver=generate(max_tokens=8), scorer=includes())
"""


def test_the_command_lines_of_the_page(tmp_path: Path) -> None:
    if not entry_points(group="inspect_ai", name="evalengine"):
        pytest.skip("needs evalengine installed: its entry points tell inspect_ai of it")
    install, evaluate, compare, report = commands(ROOT / "docs" / "inspect.md")
    assert install == "pip install -e '.[inspect]'"
    (tmp_path / "my_task.py").write_text(TASK)
    shell(evaluate, tmp_path)
    (log,) = tmp_path.glob("logs/*_sums_*.eval")
    for name in "ab":
        shutil.copy(log, tmp_path / "logs" / f"{name}.eval")
    assert "Every output and every answer is the same" in shell(compare, tmp_path)
    (kept,) = tmp_path.glob("answers/*")
    assert call("check", str(kept)).code == 0, "the run is finished when the command ends"
    assert call("limit=2", SHORT, f"output_dir={tmp_path}/results").code == 0
    assert "2 samples" in shell(report, tmp_path)
    assert read_eval_log(str(tmp_path / "log.json")).status == "success"


def shell(line: str, folder: Path) -> str:
    """What a command line of the page prints, by this interpreter, with this checkout."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(["bash", "-c", line], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
