"""examples/*.py, run in an empty folder: with short answers here, and as they are by the slow tests."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import evalengine
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


@pytest.fixture
def short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts the answers of evaluations that do not set how long they may be."""
    whole = evalengine.evaluate

    def evaluate(model: Any, tasks: Any, **settings: Any) -> Any:
        return whole(model, tasks, **{"task": {"generation": {"max_gen_toks": 8}}, **settings})

    monkeypatch.setattr(evalengine, "evaluate", evaluate)


def test_every_example_is_run() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == set(SHOWN)


@pytest.mark.parametrize("name", SHOWN)
def test_example(name: str, run_here: Callable[..., Outcome], short_answers: None) -> None:
    """The script ends well, and its output shows what it is for."""
    check_example(name, run_here)


@pytest.mark.slow  # the same scripts, with answers three times as long
@pytest.mark.parametrize("name", SHOWN)
def test_example_as_it_is(name: str, run_here: Callable[..., Outcome]) -> None:
    check_example(name, run_here)


def check_example(name: str, run: Callable[..., Outcome]) -> None:
    if name == "lm_eval_harness" and importlib.util.find_spec("lm_eval") is None:
        pytest.skip("needs pip install 'evalengine[lm-eval]'")
    done = run(name)
    assert done.code == 0, done.err
    assert [line for line in SHOWN[name] if line not in done.out] == []
    if name == "batch_invariant_transformers":  # The ordinary mode must differ, or the script shows nothing.
        assert "ordinary mode: 0 logits differ" not in done.out


def test_the_gate_of_the_example_can_fail(run_here: Callable[..., Outcome], short_answers: None) -> None:
    """The gate fails on the committed baseline, which has sixteen documents: the example's run has four."""
    with pytest.raises(ConfigError, match="A has 16 requests, B 4"):
        run_here("ci_gate", str(ROOT / "results" / "reference" / "arithmetic.json"))
