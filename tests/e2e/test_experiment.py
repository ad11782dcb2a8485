"""`experiment=noise_floor` on the default task: invariant runs have the same bits and fast ones do not; a kill costs
nothing that was finished; a kernel that depends on the batch is caught."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from evalengine.layers.exact import ExactOps
from tests.e2e.command import Run, call, finish, start

SETTINGS = (
    *("experiment=noise_floor", "limit=5", "task.generation.max_gen_toks=4", "engine.max_num_seqs=1,8"),
    *("engine.device=cpu", "engine.dtype=bfloat16", "progress=false"),
)
VERDICT = "verdict: 2 invariant runs: the same bits (1 digest); 2 fast runs: 2 digests; fast flips "


def result(output_dir: Path) -> dict[str, Any]:
    """The experiment's noise_floor.json."""
    (file,) = output_dir.glob("*/noise_floor.json")
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content


def run_folders(output_dir: Path) -> list[Path]:
    """The folders of the experiment's finished runs, in the sweep's order."""
    return sorted(path.parent for path in output_dir.glob("*/*/*/digest.txt"))


def test_invariant_cells_are_equal_and_fast_ones_are_not(tmp_path: Path) -> None:
    done = call(*SETTINGS, f"output_dir={tmp_path}")
    assert done.code == 0, done.err
    assert done.out.splitlines()[-1].startswith(VERDICT)
    report, folders = result(tmp_path), run_folders(tmp_path)
    assert report["invariant_runs_equal"] is True and report["groups"][0]["runs"] == [1, 2]
    assert [run["digest"] for run in report["runs"]] == [Run(folder).digest for folder in folders]
    assert [(f["invariant"], f["fast"], f["settings"]) for f in report["noise_floor"]] == [
        (1, 3, {"max_num_seqs": "1"}), (2, 4, {"max_num_seqs": "8"})
    ]  # fmt: skip
    assert [run["source"].split("/")[1] for run in report["runs"]] == [folder.name for folder in folders]
    for floor in report["noise_floor"]:
        assert floor["differing_requests"] > 0 and 0 < floor["logprobs"]["largest_change_nat"] < 1
        assert floor["logprobs"]["differing"] <= floor["logprobs"]["compared"]
    matrix = call("compare", "--matrix", *map(str, folders), "--json", "-")
    verdicts = {tuple(pair["pair"]): pair["verdict"] for pair in json.loads(matrix.out)["pairs"]}
    assert verdicts == {tuple(pair["pair"]): pair["verdict"] for pair in report["pairs"]}
    (sweep,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert (tmp_path / "index.html").read_text(encoding="utf-8").count("arithmetic") >= 4, "the list holds its runs"
    assert call("compare", str(sweep), "--json", "-").out == matrix.out, "an experiment's folder stands for its runs"
    assert verdicts[1, 2] == "IDENTICAL" and verdicts[3, 4] != "IDENTICAL"
    assert len(list(tmp_path.glob("*/noise_floor.svg"))) == 1
    pages = [(folder / "report.html").read_text(encoding="utf-8") for folder in folders]
    assert all("Noise floor" in page for page in pages)  # The first runs' pages show it, too.


def test_a_kernel_that_depends_on_the_batch_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = ExactOps.log_softmax

    def log_softmax(self: ExactOps, logits: Tensor) -> Tensor:
        logprobs = real(self, logits)
        return torch.nextafter(logprobs, torch.zeros(())) if len(logits) > 4 else logprobs

    monkeypatch.setattr(ExactOps, "log_softmax", log_softmax)
    done = call(*SETTINGS, f"output_dir={tmp_path}")
    assert done.code == 1
    assert done.out.splitlines()[-1].startswith("verdict: 2 invariant runs: DIFFERENT BITS (2 digests)")
    assert result(tmp_path)["invariant_runs_equal"] is False


@pytest.mark.slow  # quick: an interrupted sweep in unit/test_experiment.py, and a killed run in test_resume.py
def test_a_killed_sweep_is_taken_up(tmp_path: Path) -> None:
    process = start(*SETTINGS, f"output_dir={tmp_path}")
    deadline = time.monotonic() + 180
    while not list(tmp_path.glob("*/2-*/*/journal.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    finish(process)
    (finished_folder,) = run_folders(tmp_path)
    written = (finished_folder / "digest.txt").stat().st_mtime_ns
    done = call(*SETTINGS, f"output_dir={tmp_path}")
    assert done.code == 0, done.err
    assert done.err.count("finished before") == 1 and done.out.splitlines()[-1].startswith(VERDICT)
    assert (finished_folder / "digest.txt").stat().st_mtime_ns == written
    assert len(run_folders(tmp_path)) == 4 and len([*tmp_path.glob("noise_floor-*")]) == 1


@pytest.mark.gpu
def test_on_cuda_every_pair_of_runs_is_compared(tmp_path: Path) -> None:
    """On CUDA `native` runs name their GPU architecture and `fast` ones their attention backend; the manifests hold
    both, and the verdict on `native`'s kernels."""
    settings = [setting for setting in SETTINGS if setting != "engine.device=cpu"]
    done = call(*settings, "engine.device=cuda", f"output_dir={tmp_path}")
    assert done.code == 0, done.err
    report = result(tmp_path)
    assert report["refused"] == [] and len(report["pairs"]) == 6 and len(report["noise_floor"]) == 2
    assert [run["numerics"] for run in report["runs"]] == ["native", "native", "fast", "fast"]
    assert report["invariant_runs_equal"] is True
    # cuBLAS's products in so small a model may have native's bytes, so fast need not differ.
    assert all(floor["logprobs"]["compared"] > 0 for floor in report["noise_floor"])
    *native_runs, fast_alone, fast_batched = (Run(folder).manifest for folder in run_folders(tmp_path))
    for manifest in native_runs:
        verdict = manifest["engine"]["kernels"]
        assert verdict["schedules"] > 0 and verdict["checked"] > 0 and verdict["failed"] == []
        assert manifest["engine"]["attention_backend"] == "triton"
        assert manifest["identity"]["gpu_architecture"].startswith("sm_")
    for manifest in (fast_alone, fast_batched):
        assert manifest["engine"]["kernels"] is None
        assert manifest["engine"]["attention_backend"] == manifest["identity"]["attention_backend"] != "auto"
