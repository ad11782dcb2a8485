"""`benchmarks transformers`: both sides of every case are timed, and no wrong result gets a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import transformers_model
from benchmarks.report import Failure, Timing
from benchmarks.transformers_model import RunShape, measure
from evalengine.invariant import is_batch_invariant_mode
from tests.invariant.cuda_operands import DEVICE

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
         "vocab_size": 61}  # fmt: skip
SIZES = RunShape(rows=3, tokens=7, padding=2, num_layers=2, dtype=torch.float32, config=SMALL)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_model, "TURNS", 1)
    monkeypatch.setattr(transformers_model, "CALLS", 1)


def test_every_case_is_timed_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    sides: list[bool] = []
    real = transformers_model._wait
    monkeypatch.setattr(
        transformers_model, "_wait", lambda device: (sides.append(is_batch_invariant_mode()), real(device))
    )
    lines = list(measure(torch.device(DEVICE), ["Qwen3-0.6B"], SIZES))
    timings = [line for line in lines if isinstance(line, Timing)]
    assert len(lines) == len(timings) == 8 and all(line.seconds > 0 < line.reference_seconds for line in timings)
    assert [line.target for line in timings] == [1.15, 1.15, None, 1.3, None, None, None, None]
    assert timings[1].case == "Qwen3-0.6B, 2 layers, 3 x 7 tokens, padded"
    assert sides == [True, True, False, False] * 8 and not is_batch_invariant_mode()


def test_no_time_for_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    real = transformers_model._cases

    def wrong(*args: Any) -> dict[str, Any]:
        def call(case: Callable[[], Tensor]) -> Tensor:
            return case() * 2 if is_batch_invariant_mode() else case()

        return {name: (partial(call, case), target) for name, (case, target) in real(*args).items()}

    monkeypatch.setattr(transformers_model, "_cases", wrong)
    lines = list(measure(torch.device(DEVICE), ["Qwen3-0.6B"], SIZES))
    assert len(lines) == 2 and all(isinstance(line, Failure) and "differ by" in line.reason for line in lines)
    assert not is_batch_invariant_mode()
