"""The command line as a process of its own: its folder, its threads, its terminal, its reader."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("policy", "spins"), [(None, "2000"), ("active", None)])
def test_waiting_threads_sleep_whichever_name_imports_torch(policy: str | None, spins: str | None) -> None:
    """libgomp reads the variable when torch is imported; somebody's own policy holds."""
    program = """
import os, sys
class AtTorch:
    def find_spec(self, name, path, target=None):
        if name == "torch":
            print(os.environ.get("GOMP_SPINCOUNT"))
            sys.exit()
sys.meta_path.insert(0, AtTorch())
from evalengine import LLM
"""
    unset = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    environment = {**unset, "PYTHONPATH": str(ROOT), **({"OMP_WAIT_POLICY": policy} if policy else {})}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.stdout == f"{spins}\n", done.stderr


def test_as_a_process_from_another_folder(tmp_path: Path) -> None:
    """The command runs where the sources are not, and leaves nothing there."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "evalengine", "task=gsm9k"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "") and "did you mean gsm8k?" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_terminal_without_the_signs_fails_no_finished_run() -> None:
    """A sign that the terminal's encoding lacks is written as a question mark."""
    program = (
        "import evalengine.__main__ as m; import evalengine.cli.run as run; "
        "run.work = lambda arguments: print('value ± ↑') or 0; raise SystemExit(m.main(['limit=1']))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "value ? ?\n"), done.stderr


def test_a_reader_that_left_gets_no_traceback() -> None:
    command = [sys.executable, "-m", "evalengine", "--help"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1
