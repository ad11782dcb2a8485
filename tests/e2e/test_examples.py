"""examples/*.py, run as they are: in an empty folder, without a network, and one of them in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from evalengine.errors import ConfigError
from tests.e2e.command import ROOT, Outcome

SHOWN = {  # Script -> lines of its output that show what it is for.
    "quickstart": ("verdict: IDENTICAL (every bit of 4 outputs and their logprobs)", "one digest: True"),
    "own_model_and_data": ("3 requests of 3 documents; numerics exact on cpu", "target answers"),
    "ci_gate": ("gate bitwise: PASS (1 of 1 checks)", "gate tokens: PASS (1 of 1 checks)"),
    "batch_invariant_transformers": ("batch-invariant mode: 0 logits differ",),
    "lm_eval_harness": ("|doubles|",),
}


@pytest.fixture
def run_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Outcome]:
    """Runs examples/NAME.py in this process, which saves the seconds of importing torch."""

    def run(name: str, *words: str) -> Outcome:
        script = ROOT / "examples" / f"{name}.py"
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [str(script), *words])
        code: object = 0
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as end:
            code = end.code
        return Outcome(int(str(code)), *capsys.readouterr())

    return run


def in_a_process(name: str, folder: Path) -> Outcome:
    """Runs examples/`name`.py in `folder`, without a network and without CUDA."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py")]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    return Outcome(done.returncode, done.stdout, done.stderr)


def test_every_example_is_run() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == set(SHOWN)


@pytest.mark.parametrize("name", SHOWN)
def test_example(name: str, tmp_path: Path, run_here: Callable[..., Outcome]) -> None:
    """The script ends well, and its output shows what it is for."""
    if name == "lm_eval_harness" and importlib.util.find_spec("lm_eval") is None:
        pytest.skip("needs pip install 'evalengine[lm-eval]'")
    alone = name == "batch_invariant_transformers"  # It changes torch for the process that it runs in.
    done = in_a_process(name, tmp_path) if alone else run_here(name)
    assert done.code == 0, done.err
    assert [line for line in SHOWN[name] if line not in done.out] == []
    if name == "batch_invariant_transformers":  # The ordinary mode must differ, or the script shows nothing.
        assert "ordinary mode: 0 logits differ" not in done.out


def test_the_gate_of_the_example_can_fail(run_here: Callable[..., Outcome]) -> None:
    """The gate fails on the committed baseline, which has sixteen documents: the example's run has four."""
    with pytest.raises(ConfigError, match="A has 16 requests, B 4"):
        run_here("ci_gate", str(ROOT / "results" / "reference" / "arithmetic.json"))
