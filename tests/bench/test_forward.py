"""`benchmarks forward`: whole steps, their comparison with each other, and the breakdown into kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks import breakdown, forward, measure
from benchmarks.kernels_and_steps import MODELS
from benchmarks.models import published_spec
from benchmarks.report import Failure, Timing
from evalengine.layers import create_ops
from evalengine.models.decoder import num_parameters

CPU = torch.device("cpu")

SMALL = replace(
    published_spec("Qwen3-0.6B"), vocab_size=101, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=2,
    num_kv_heads=1, head_dim=16, dtype=torch.float32,
)  # fmt: skip


def small_step(block_size: int, seed: int, workload: forward.StepShape) -> forward.Step:
    """A step of a small Qwen3, with pages of `block_size` tokens and weights drawn from `seed`."""
    mode = forward.Mode("fast", SMALL, create_ops("fast", SMALL.dtype, CPU), block_size)
    forward.randomize(mode.model, seed)
    mode.model.finalize(workload.tokens)
    pool = torch.randn(2 * 2 * 1024 * 16, generator=torch.Generator().manual_seed(1))
    return forward.Step(mode, workload, pool)


@torch.inference_mode()
@pytest.mark.parametrize(
    "workload", [forward.StepShape("decode", 3, 1, 256), forward.StepShape("prefill", 2, 512, 512)]
)
def test_a_step_is_the_same_for_every_page_size(workload: forward.StepShape) -> None:
    """The benchmark's modes share one KV pool and differ in page size: a token's slot must not depend on that size."""
    small_pages, large_pages = small_step(64, 0, workload), small_step(256, 0, workload)
    assert small_pages.metadata.slot_mapping.equal(large_pages.metadata.slot_mapping)
    assert small_pages.metadata.slot_mapping.unique().numel() == workload.sequences * workload.rows
    assert forward.check_agree(small_pages.logits(), large_pages.logits()) < 1e-5
    greedy, logprobs = small_pages()
    logits = small_pages.logits()
    assert greedy.equal(logits.argmax(-1))
    assert torch.allclose(
        logprobs, logits.log_softmax(-1).gather(1, small_pages.targets[:, None]).squeeze(1), atol=1e-5
    )


@torch.inference_mode()
def test_steps_of_different_weights_do_not_agree() -> None:
    workload = forward.StepShape("decode", 3, 1, 256)
    step, reseeded = small_step(64, 0, workload), small_step(64, 1, workload)
    with pytest.raises(measure.WrongResult, match="logits differ"):
        forward.check_agree(step.logits(), reseeded.logits())


@pytest.fixture
def forward_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """`forward.measure` with `fast` in both places, since the kernels need a GPU, and with made-up times."""
    seconds = {"native": 1.5, "fast": 1.0}
    monkeypatch.setattr(
        forward, "create_ops", lambda level, dtype, device, backend="sdpa": create_ops("fast", dtype, device)
    )
    monkeypatch.setattr(forward, "captured", lambda step: step)
    monkeypatch.setattr(forward, "compare_gpu_seconds", lambda functions, **_: {k: seconds[k] for k in functions})
    monkeypatch.setattr(forward, "wall_seconds", lambda functions: {k: seconds[k] / 2 for k in functions})
    monkeypatch.setattr(forward, "breakdown", lambda step, layers: {"launches": layers, "rows": len(step()[0])})
    workloads = (forward.StepShape("decode", 3, 1, 256), forward.StepShape("prefill", 1, 512, 512))
    monkeypatch.setattr(forward, "WORKLOADS", workloads)


@pytest.mark.usefixtures("forward_on_cpu")
def test_forward_has_two_lines_and_a_breakdown_for_each_case() -> None:
    explanations: dict[str, Any] = {}
    lines = list(forward.measure(CPU, explanations, {"small": SMALL}))
    comparisons = [(line.what, line.case, line.ratio, line.verdict) for line in lines if isinstance(line, Timing)]
    cases = ["small, decode", "small, prefill"]
    kinds = ["forward step, GPU time", "forward step, eager"]
    assert comparisons == [(kind, case, 1.5, "missed by 45.6%") for case in cases for kind in kinds]
    sides = [{name: {"launches": 2, "rows": n} for name in ("native", "fast")} for n in (3, 1)]
    assert explanations == dict(zip(cases, sides, strict=True))


@pytest.mark.usefixtures("forward_on_cpu")
def test_forward_gives_no_time_to_modes_that_disagree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward.Step, "logits", lambda step: torch.randn(4, 5))
    lines = list(forward.measure(CPU, {}, {"small": SMALL}))
    assert len(lines) == 2 and all(isinstance(line, Failure) and line.wrong for line in lines)


@pytest.mark.usefixtures("forward_on_cpu")
def test_forward_says_why_a_step_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "captured", lambda step: "it synchronises")
    first, second, *_ = forward.measure(CPU, {}, {"small": SMALL})
    assert isinstance(first, Failure) and "native cannot be captured: it synchronises" in first.reason
    assert isinstance(second, Timing) and second.what == "forward step, eager"


def test_wanted_rows_are_the_last_of_each_sequence() -> None:
    step = small_step(64, 0, forward.StepShape("prefill", 2, 512, 512))
    assert step.last.tolist() == [511, 1023] and step.positions[step.last].tolist() == [511, 511]


def test_qwen3_shapes_have_their_published_sizes() -> None:
    assert round(num_parameters(published_spec("Qwen3-0.6B")) / 1e9, 3) == 0.596
    assert round(num_parameters(published_spec("Qwen3-8B")) / 1e9, 2) == 8.19
    assert all(published_spec(name).dtype == torch.bfloat16 for name in MODELS)


def test_breakdown_finds_the_kernels_of_a_layer() -> None:
    layer = [("norm", 1.0), ("mm", 5.0), ("mm", 7.0), ("act", 2.0)]
    kernels = [("embed", 3.0), *layer * 9, ("norm", 1.0), ("head", 50.0)]
    result = breakdown.summarize(kernels, num_layers=9)
    assert result["one_layer_us"] == layer
    assert result["launches"] == 39 and result["kernels_us"] == 9 * 15 + 54
    assert list(result["by_kernel_us"].items())[:2] == [("mm", 108.0), ("head", 50.0)]


def test_breakdown_without_a_pattern_has_totals_only() -> None:
    kernels = [(f"kernel {i}", 1.0) for i in range(30)]
    assert "one_layer_us" not in breakdown.summarize(kernels, num_layers=6)
