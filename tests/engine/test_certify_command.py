"""The command `verify`: its exit codes, its certificate, and what it refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from evalengine import CONTRACT_VERSION
from evalengine.__main__ import main
from evalengine.certify import axes, certificate, kernels, proof
from evalengine.certify.cases import EFFORTS
from evalengine.cli import commands
from evalengine.engine import settings
from evalengine.engine.load.loader import Checkpoint
from evalengine.layers import kernel_support
from evalengine.layers.exact import ExactOps
from evalengine.verification import exact_kernels
from evalengine.verification.verdict_cache import sources_sha256
from tests.engine.certify_double import CPU, TINY
from tests.engine.certify_double import elsewhere as elsewhere  # The fixture is used by every test here.


def run_cli(*arguments: str) -> int:
    """Runs `evalengine verify` in this process; returns its exit code."""
    return main(["verify", *arguments])


@pytest.fixture
def small(small_checkpoint: Checkpoint) -> tuple[str, ...]:
    """Words for a small random model on the CPU."""
    return (*CPU, f"model.path={small_checkpoint.path}", "model.name=small", "model.load_format=dummy")


def test_the_command_end_to_end_with_a_new_process(
    small: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "made" / "certificate.json"
    words = ("engine", *small, "--quick", "--axes", "order", "decode", "restart", "graphs")
    assert run_cli(*words, "--out", str(out)) == 0
    stdout, stderr = capsys.readouterr()
    assert "verdict: IDENTICAL: 0 differing bytes in " in stdout.splitlines()[-1]
    assert "graphs" in stdout and "skipped" in stdout and "fast (control)" in stdout
    assert "verify: order: order 2: 0 of " in stderr
    content = json.loads(out.read_text())
    assert content["verdict"] == "IDENTICAL" and content["total"]["differing_bytes"] == 0
    assert list(content["axes"]) == ["order", "decode", "graphs", "restart"]
    assert content["axes"]["restart"]["schedules"][0]["new_process"] is True
    assert content["axes"]["restart"]["logprobs"] > 300
    assert content["total"]["logprobs"] == sum(axis["logprobs"] for axis in content["axes"].values())
    control = content["negative_control"]
    assert control["differing_logprobs"] > 0 and control["attention_backend"] == "sdpa"
    assert content["subject"]["numerics"] == "exact" and len(content["subject"]["weights_sha256"]) == 64
    assert content["contract_version"] == CONTRACT_VERSION
    assert content["kernels"] is None and content["libraries"]["torch"]
    assert sorted(out.parent.iterdir()) == [out, out.with_suffix(".md")]
    assert content["requests"]["of_tasks"] == {"arithmetic": 1} and content["requests"]["answers_cut_at"] == 10
    assert content["subject"]["tasks"] == ["arithmetic"]
    page = out.with_suffix(".md").read_text()
    assert page.startswith("# IDENTICAL: small, arithmetic\n\nNo schedule changed a bit. 0 differing bytes in ")
    assert content["code"]["commit"] in page and content["libraries"]["torch"] in page
    counts = f"{control['differing_bytes']:,} differing bytes in {control['logprobs']:,} logprobs"
    line = f"fast (control) with sdpa attention: {counts}"
    assert (
        control["differing_bytes"] > 0 and line in stdout.splitlines() and f"| Control | {line} |" in page.splitlines()
    )
    assert content["code"]["kernels_sha256"] == sources_sha256()
    assert f"| Kernels | sha256 {sources_sha256()} |" in page
    assert "| restart | A new process | 1 |" in page and content["requests"]["answers_sha256"] in page
    assert len(page.splitlines()) < 50, "one page"
    table = [line for line in page.splitlines() if line.endswith((" identical |", " skipped |"))]
    assert len(table) == 4 and max(map(len, table)) <= 120
    assert "- skipped: graphs: no CUDA graphs at this numerics level on this device" in page.splitlines()


def test_a_difference_is_shown_and_exits_1(
    small: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = ExactOps.log_softmax

    def log_softmax(self: ExactOps, logits: Tensor) -> Tensor:
        result = real(self, logits)
        return torch.nextafter(result, torch.zeros(())) if len(logits) > 64 else result

    monkeypatch.setattr(ExactOps, "log_softmax", log_softmax)
    monkeypatch.setitem(EFFORTS, "quick", TINY)
    monkeypatch.setattr(proof.Prover, "_control", lambda self: proof.Control("control", attention_backend="sdpa"))
    out = tmp_path / "c.json"
    assert run_cli("engine", *small, "--quick", "--axes", "order", "--out", str(out)) == 1
    stdout = capsys.readouterr().out
    assert "verdict: DIFFERENT" in stdout and "first difference: order, order 2: request " in stdout
    assert proof.NONE_FOUND.split(":")[0] in " ".join(stdout.split()), "a silent control is said"
    page = out.with_suffix(".md").read_text()
    assert (
        page.startswith("# DIFFERENT: small, arithmetic\n") and "\n- first difference: order, order 2: request " in page
    )
    assert re.search(r"^\| order \| Order of the requests \| 1 \| \d+ \| [1-9]\d* \| DIFFERENT \|$", page, re.MULTILINE)
    difference = json.loads(out.read_text())["first_difference"]
    assert difference["expected"] != difference["found"] and difference["schedule"] == "order, order 2"


@pytest.mark.parametrize("name", ["c.md", "certificates", "folder.json"])
def test_a_certificate_that_could_not_be_written_is_refused_before_anything_runs(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A certificate's name must end in .json: c.md would be overwritten by its own page in Markdown."""
    (tmp_path / "folder.json").mkdir()
    assert run_cli(*CPU, "model.path=/nowhere", "--out", str(tmp_path / name)) == 2
    assert f"{name}: name a file that ends in .json" in capsys.readouterr().err


def test_logprobs_are_asked_of_the_axis_mixed(capsys: pytest.CaptureFixture[str]) -> None:
    """`--logprobs` is refused without the axis `mixed`, which alone goes on until so many are compared."""
    assert run_cli("engine", *CPU, "--axes", "order", "--logprobs", "9") == 2
    assert "--logprobs=9: only the axis mixed" in capsys.readouterr().err


def test_kernels_that_failed_or_were_dropped_are_shown_and_exit_1(
    small: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The settings say `native` but run `exact` here, beside a planted verdict on the kernels."""
    drop = {"kernel": "matmul", "schedule": {"block_m": 64}, "where": "M1", "reason": "3 of 9 elements differ"}
    verdict = {"schedules": 3, "checked": 4, "dropped": [drop], "failed": [], "cached": False, "seconds": 1.0}
    real, out = settings.resolve_settings, tmp_path / "c.json"

    def as_native(config: Any, invariant: bool, numerics: str, spec: Any) -> Any:
        return replace(real(config, invariant, numerics, spec), numerics="native")

    monkeypatch.setattr(settings, "resolve_settings", as_native)
    monkeypatch.setattr(kernels, "schedules_verdict", lambda *args: verdict)
    monkeypatch.setitem(EFFORTS, "quick", TINY)
    words = (*small, "--quick", "--axes", "order", "--out", str(out))
    assert run_cli(*words) == 0
    stdout = capsys.readouterr().out
    assert "kernels: dropped: matmul (block_m=64) at M1: 3 of 9 elements differ" in stdout
    assert "kernels: failed" not in stdout and "\nverdict: IDENTICAL" in stdout
    verdict["failed"] = ["read_out V9: 1 of 2 elements differ"]
    assert run_cli(*words) == 1
    stdout = capsys.readouterr().out
    assert "kernels: failed: read_out V9: 1 of 2 elements differ" in stdout and "\nverdict: FAILED" in stdout
    assert json.loads(out.read_text())["verdict"] == "FAILED"


def test_exact_kernels_have_the_bits_of_every_machine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_cli("kernels", *CPU) == 0
    out = capsys.readouterr().out
    assert "exact: 22 kernels against the bits of every other machine, 0 failed" in out and kernels.NEEDS_CUDA in out
    real = exact_kernels.exact.silu
    monkeypatch.setattr(exact_kernels.exact, "silu", lambda x: torch.nextafter(real(x), torch.zeros(())))
    assert run_cli("kernels", *CPU) == 1
    out = capsys.readouterr().out
    assert out.count("failed: ") == 1 and "failed: silu: its bits hash to " in out


def test_a_cpu_needs_no_triton(small: tuple[str, ...]) -> None:
    program = (
        "import sys; sys.modules['triton'] = None; from evalengine.__main__ import main; "
        "from evalengine.certify.cases import EFFORTS, Effort; "
        f"EFFORTS['quick'] = {TINY!r}; "
        "sys.exit(main(['verify', '--quick', *sys.argv[1:], '--axes', 'ids']))"
    )
    done = subprocess.run([sys.executable, "-c", program, *small], capture_output=True, text=True)
    assert done.returncode == 0 and "verdict: IDENTICAL" in done.stdout, done.stderr


@pytest.mark.parametrize("part", ["engine", "kernels"])
@pytest.mark.parametrize(
    ("device", "capability", "triton", "message"),
    [
        ("cuda:9", (9, 0), True, "engine.device=cuda:9: this machine has 1 CUDA devices"),
        ("cudafoo", (9, 0), True, "engine.device=cudafoo: must be auto, cpu, cuda or cuda:<number>"),
        ("auto", (7, 5), True, "numerics=native: the kernels need bfloat16 tensor cores"),
        ("cuda", (9, 0), False, "numerics=native: the kernels are written in Triton, which is not installed"),
    ],
)
def test_what_the_settings_refuse_is_bad_usage(
    part: str, device: str, capability: tuple[int, int], triton: bool, message: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(kernel_support, "find_spec", lambda name: object() if triton else None)
    monkeypatch.setattr(kernels, "kernels_verdict", lambda *args, **options: pytest.fail("it ran"))
    assert run_cli(part, f"engine.device={device}") == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err


def test_axes_of_the_command_are_the_axes_there_are() -> None:
    assert set(commands.AXES) == set(axes.AXES) and len(commands.AXES) == len(axes.AXES)


@pytest.mark.parametrize("name", axes.AXES)
def test_what_an_axis_varies_fits_into_the_table(name: str) -> None:
    assert 0 < len(certificate._about(name)) <= 70


@pytest.mark.slow
def test_the_default_on_a_cpu_takes_about_two_minutes() -> None:
    command = [sys.executable, "-m", "evalengine", "verify", *CPU]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
