"""examples/*.py, run as they are: a process each, in an empty folder, without a network."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHOWN = {  # Script -> lines of its output that show what it is for.
    "quickstart": ("verdict: IDENTICAL (every bit of 8 outputs and their logprobs)", "one digest: True"),
    "own_model_and_data": ("3 requests of 3 documents; numerics exact on cpu", "target answers"),
    "ci_gate": ("gate bitwise: PASS (1 of 1 checks)", "gate tokens: PASS (1 of 1 checks)"),
    "batch_invariant_transformers": ("batch-invariant mode: 0 logits differ",),
    "lm_eval_harness": ("|doubles|",),
}


def example(name: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs examples/`name`.py in `folder`, without a network and without CUDA."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py"), *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


def test_every_example_is_run() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == set(SHOWN)


@pytest.mark.parametrize("name", SHOWN)
def test_example(name: str, tmp_path: Path) -> None:
    """The script ends well, and its output shows what it is for."""
    if name == "lm_eval_harness" and importlib.util.find_spec("lm_eval") is None:
        pytest.skip("needs pip install 'evalengine[lm-eval]'")
    done = example(name, tmp_path)
    assert done.returncode == 0, done.stderr
    assert [line for line in SHOWN[name] if line not in done.stdout] == []
    if name == "batch_invariant_transformers":  # The ordinary mode must differ, or the script shows nothing.
        assert "ordinary mode: 0 logits differ" not in done.stdout


def test_the_gate_of_the_example_can_fail(tmp_path: Path) -> None:
    """The gate fails on the committed baseline, which has sixteen documents: the example's run has eight."""
    done = example("ci_gate", tmp_path, str(ROOT / "results" / "reference" / "arithmetic.json"))
    assert done.returncode != 0
