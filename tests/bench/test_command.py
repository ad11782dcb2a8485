"""`python -m benchmarks`: its arguments, its errors, its exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import kernels_and_steps
from benchmarks.__main__ import main
from benchmarks.arguments import KERNELS_AND_STEPS
from benchmarks.kernels_and_steps import BENCHES
from evalengine.bench import environment
from tests.bench.made_up_report import a_report


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["atention"], "benchmarks atention: there is no such benchmark"),
        (["--models", "Qwen3-9B"], "benchmarks --models Qwen3-9B: there are Qwen3-0.6B, Qwen3-8B"),
        (["--fast"], "No such option: --fast"),
        (["--output"], "requires an argument"),
    ],
)
def test_bad_arguments_exit_2_with_one_line(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and captured.out == ""


@pytest.mark.parametrize("option", ["--tune", "--shapes=64,64"])
def test_matmul_has_a_command_of_its_own(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forwarded: list[list[str]] = []
    monkeypatch.setattr("benchmarks.matmul.main", lambda arguments: forwarded.append(arguments.argv) or 7)
    assert main(["matmul", option, "--workers", "2"]) == 7
    assert forwarded == [[option, "--workers", "2"]]
    assert main(["rows", option]) == 2 and len(forwarded) == 1


def test_help_names_every_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in out for name in BENCHES)


def test_without_a_gpu_the_command_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["rows", "--output", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == (
        "evalengine: the benchmarks measure a CUDA device, and this machine has none that can be used.\n"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        ([], BENCHES),
        (["all"], BENCHES),
        (["rows", "attention"], ("attention", "rows")),
        (["rows", "all"], BENCHES),
    ],
)
def test_names_of_benchmarks(argv: list[str], names: tuple[str, ...]) -> None:
    """No name, or `all` among them, means every benchmark; names are put into the order of BENCHES."""
    assert tuple(KERNELS_AND_STEPS.parse(argv).names) == names


def run_with(lines: list[Any], monkeypatch: pytest.MonkeyPatch, folder: Path) -> int:
    """Runs `benchmarks rows` with these lines in the place of measured ones; returns the exit code."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("evalengine.bench.environment._gpu_name", lambda: "Some GPU")
    monkeypatch.setattr(kernels_and_steps, "_lines", lambda name, models, collected: iter(lines))
    return main(["rows", "--output", str(folder)])


def test_a_missed_target_is_no_failure_but_a_wrong_result_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    missed, _, wrong = a_report().lines
    assert run_with([missed], monkeypatch, tmp_path) == 0
    assert "0 of 1 targets reached." in capsys.readouterr().out
    assert run_with([missed, wrong], monkeypatch, tmp_path) == 1
    written = json.loads((tmp_path / "speed-rows-some-gpu.json").read_text())
    assert len(written["lines"]) == 2 and written["environment"]["command"].startswith("python -m benchmarks rows")


def test_a_record_names_the_packages_it_compares_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By their metadata, or else by the module's version; an absent package is listed, too."""
    (tmp_path / "fla_core-0.0.1.dist-info").mkdir()
    (tmp_path / "fla_core-0.0.1.dist-info/METADATA").write_text("Name: fla-core\nVersion: 0.0.1\n")
    (tmp_path / "made_up_kernels.py").write_text("__version__ = '0.0.2'\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(environment, "LIBRARIES", (*environment.LIBRARIES, "made-up-kernels", "absent-kernels"))
    libraries = environment.environment(["python"])["libraries"]
    assert [libraries[name] for name in ("fla-core", "made-up-kernels", "absent-kernels")] == ["0.0.1", "0.0.2", None]
