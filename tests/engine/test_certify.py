"""`verify engine`: it passes on the exact level, and a fault in any op, cache or id is caught and shown."""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from evalengine.certify import axes, proof, schedules
from evalengine.certify.cases import Case
from evalengine.certify.fault_injection import FEW_ROWS, split_few_rows
from evalengine.certify.proof import Proof, Prover
from evalengine.certify.schedules import Variant
from evalengine.certify.subject import Subject
from evalengine.engine.execute.batch import NextToken, ScoredTokens
from evalengine.engine.execute.model_runner import ModelRunner
from evalengine.engine.kv_layout import KVGroup
from evalengine.engine.llm import LLM
from evalengine.engine.schedule.block_manager import BlockManager, Hit
from evalengine.engine.schedule.scheduler import Scheduler
from evalengine.errors import EvalEngineError
from evalengine.kernels.attention_batch import KVCache
from evalengine.layers.exact import ExactOps
from evalengine.layers.fast import FastOps
from evalengine.models.spec import Block
from tests.engine.certify_double import CPU
from tests.engine.certify_double import elsewhere as elsewhere  # The fixture is used by every test here.
from tests.engine.certify_double import prove as prove
from tests.engine.certify_double import tiny_subject as tiny_subject

QUICK = ("batch", "chunks", "prefix", "preemption")
ALL = tuple(name for name in axes.AXES if name != "restart")


# `order`, `ids`, `mixed`, `busy`, `decode`, `graphs` and `restart` pass in quick tests below and of the command.
@pytest.mark.parametrize("names", [QUICK, pytest.param(ALL, marks=pytest.mark.slow)], ids=["quick", "all"])
def test_every_axis_passes_and_the_control_differs(names: tuple[str, ...], prove: Callable[..., Proof]) -> None:
    proven = prove(*names)
    assert proven.verdict == "IDENTICAL" and proven.total.differing_bytes == 0
    assert [axis.name for axis in proven.axes] == [*names]
    for axis in proven.axes:
        assert bool(axis.trials) != bool(axis.skipped) and not axis.missed
        assert axis.tally.logprobs or axis.skipped
    stats = {trial.variant.label: trial.stats for axis in proven.axes for trial in axis.trials}
    assert stats["max_num_seqs=8"].largest_batch == 8 and stats["max_num_seqs=1"].largest_batch == 1
    assert any(s.num_preemptions for s in stats.values())
    assert proven.control.tally.differing_logprobs, "the comparison can see a difference"


def test_windows_pass_and_pages_that_are_given_back_too_early_are_caught(
    prove: Callable[..., Proof], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = (Block(window=19), Block())
    assert prove(*QUICK, "nan", blocks=blocks).verdict == "IDENTICAL"

    def too_late(self: KVGroup, position: int, size: int) -> int:
        return 0 if self.window is None else position // size  # as if a query saw its own page alone

    monkeypatch.setattr(KVGroup, "first_seen", too_late)
    assert prove("prefix", blocks=blocks).verdict == "DIFFERENT"


def test_a_linear_layer_that_depends_on_the_batch_is_caught(
    prove: Callable[..., Proof], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = ExactOps.linear

    def linear(self: ExactOps, x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
        y = real(x, weight, bias)
        return y * (1 + 2**-20) if len(x) > 100 else y  # As if another kernel ran for large batches.

    monkeypatch.setattr(ExactOps, "linear", linear)
    proven = prove("batch")
    assert proven.verdict == "DIFFERENT"
    labels = [t.variant.label for t in proven.axes[0].trials if t.tally.differing_logprobs]
    assert labels and "max_num_seqs=1" not in labels
    difference = proven.total.first_difference
    assert difference is not None and difference.schedule == f"batch, {labels[0]}" and " of id " in difference.found
    assert difference.found != difference.expected


def test_stale_pages_that_are_read_are_caught(prove: Callable[..., Proof], monkeypatch: pytest.MonkeyPatch) -> None:
    real = ExactOps.attention

    def attention(self: ExactOps, q: Tensor, kv: KVCache, *arguments: Any) -> Tensor:
        return real(self, q, kv, *arguments) + 0 * kv[1][-1, -1, 0, 0].float()

    monkeypatch.setattr(ExactOps, "attention", attention)
    assert prove("order").verdict == "IDENTICAL"
    proven = prove("nan")
    assert proven.verdict == "DIFFERENT"
    assert "not a finite number" in str(proven.total.first_difference) or "nan" in str(proven.total.first_difference)


def test_a_prefix_hit_that_is_too_long_is_caught(prove: Callable[..., Proof], monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a hit inside a page takes one token too many over from the other request."""
    real = BlockManager._match

    def match(self: BlockManager, seq: Any) -> Any:
        hit = real(self, seq)
        room = hit.num_blocks * self.block_size + hit.num_copied < seq.first_wanted_position
        too_long = hit.copied and room and hit.num_copied + 1 < self.block_size
        return replace(hit, num_copied=hit.num_copied + 1) if too_long else hit

    monkeypatch.setattr(BlockManager, "_match", match)
    (axis,) = prove("prefix").axes
    assert axis.tally.differing_logprobs


def test_logprobs_that_depend_on_how_many_are_asked_for_are_caught(
    prove: Callable[..., Proof], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = ModelRunner.results

    def results_of(self: ModelRunner, launched: Any) -> Any:
        results = real(self, launched)
        for result in results:
            factor = np.float32(1 + 2**-22)
            if isinstance(result, ScoredTokens) and result.top:
                result.logprobs = result.logprobs * factor
            elif isinstance(result, NextToken) and result.top:
                result.logprob = float(np.float32(result.logprob) * factor)
        return results

    monkeypatch.setattr(ModelRunner, "results", results_of)
    assert prove("ids").verdict == "IDENTICAL" and prove("asked").verdict == "DIFFERENT"


def test_an_axis_that_was_not_exercised_is_no_proof(
    prove: Callable[..., Proof], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = LLM.reconfigure
    monkeypatch.setattr(LLM, "reconfigure", lambda self, **s: real(self, **{**s, "num_kv_blocks": 400}))
    proven = prove("preemption")
    assert proven.verdict == "INCOMPLETE" and not proven.total.differing_logprobs
    assert "without a preemption" in proven.axes[0].missed[0]


def test_a_scheduler_that_makes_small_batches_is_no_proof(
    prove: Callable[..., Proof], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Scheduler.__init__

    def small(self: Scheduler, pool: BlockManager, seqs: int, budget: int, **more: Any) -> None:
        real(self, pool, min(seqs, 2), budget, **more)

    monkeypatch.setattr(Scheduler, "__init__", small)
    proven = prove("batch")
    assert proven.verdict == "INCOMPLETE" and not proven.total.differing_logprobs
    assert proven.axes[0].missed == [f"max_num_seqs={n}: without {n} sequences in a step" for n in (3, 8)]
    assert proven.incomplete == [f"batch: not exercised: {missed}" for missed in proven.axes[0].missed]


def test_a_budget_and_a_cache_that_are_ignored_are_no_proof(
    prove: Callable[..., Proof], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Scheduler.__init__

    def large(self: Scheduler, pool: BlockManager, seqs: int, _: int, **more: Any) -> None:
        real(self, pool, seqs, 1 << 16, **more)

    monkeypatch.setattr(Scheduler, "__init__", large)
    (axis,) = prove("chunks").axes
    assert [missed.split(":")[0] for missed in axis.missed] == [f"max_num_batched_tokens={n}" for n in (17, 64, 100)]
    monkeypatch.setattr(Scheduler, "__init__", real)
    monkeypatch.setattr(BlockManager, "_match", lambda self, seq: Hit(0, [[] for _ in self.groups]))
    (axis,) = prove("prefix").axes
    assert [m.split(":")[0] for m in axis.missed] == ["cold and warm", "warm, chunks of 100", "hit inside a page"]


def test_a_control_that_finds_nothing_is_no_proof(prove: Callable[..., Proof], monkeypatch: pytest.MonkeyPatch) -> None:
    assert prove("ids").verdict == "IDENTICAL"
    alone = {"max_num_seqs": 1, "max_num_batched_tokens": schedules.LARGE, "enable_prefix_caching": False}
    monkeypatch.setattr(proof, "control", lambda work: iter([schedules.Variant("alone again", work.cases, alone)]))
    proven = prove("ids")
    assert proven.verdict == "INCOMPLETE" and proven.incomplete == [proof.NONE_FOUND]


def test_a_silent_control_is_followed_by_one_with_another_attention(
    prove: Callable[..., Proof], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU our own attention leaves a small model's ordinary mode without a difference; here every `auto` does."""
    asked: list[str] = []
    real = Prover._control_with

    def control_with(self: Prover, attention_backend: str) -> tuple[proof.Control, list[str]]:
        asked.append(attention_backend)
        if attention_backend == "sdpa":
            return real(self, attention_backend)
        return proof.Control("control", attention_backend="triton"), ["sdpa", "never asked"]

    monkeypatch.setattr(Prover, "_control_with", control_with)
    proved = prove("ids")
    assert proved.verdict == "IDENTICAL" and asked == ["auto", "sdpa"]
    assert proved.control.attention_backend == "sdpa" and proved.control.tally.differing_logprobs


def test_a_control_that_stays_silent_is_given_a_planted_fault(
    prove: Callable[..., Proof], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault is seen by the comparison of schedules itself; here it is all that differs, as the real control does
    not run."""
    real = Prover._control_with

    def control_with(
        self: Prover, attention_backend: str, fault_injected: bool = False
    ) -> tuple[proof.Control, list[str]]:
        if fault_injected:
            return real(self, attention_backend, fault_injected)
        return proof.Control("control", attention_backend="triton"), []

    monkeypatch.setattr(Prover, "_control_with", control_with)
    proved = prove("ids")
    assert proved.verdict == "IDENTICAL" and proved.control.fault_injected
    assert proved.control.tally.differing_logprobs > 0


@pytest.mark.parametrize("rows", [1, FEW_ROWS, FEW_ROWS + 1])
def test_the_planted_fault_changes_products_of_few_rows_alone(rows: int) -> None:
    torch.manual_seed(0)
    ops, x, weight = FastOps(torch.float32, torch.device("cpu")), torch.randn(rows, 331), torch.randn(40, 331)
    expected = ops.linear(x, weight)
    split_few_rows(ops)
    actual = ops.linear(x, weight)
    assert torch.equal(actual, expected) == (rows > FEW_ROWS) and torch.allclose(actual, expected, atol=1e-4)


def test_fewer_logprobs_than_asked_for_are_no_proof(prove: Callable[..., Proof]) -> None:
    proven = prove("ids", logprobs=10**6)
    assert proven.verdict == "INCOMPLETE"
    assert proven.incomplete == [f"{proven.total.logprobs:,} logprobs compared, 1,000,000 wanted"]


def test_random_schedules_go_on_until_enough_is_compared(prove: Callable[..., Proof]) -> None:
    by_default, until_400 = prove("mixed"), prove("mixed", logprobs=400)
    assert len(by_default.axes[0].trials) == 1 and by_default.total.logprobs < 400 <= until_400.total.logprobs


def test_a_model_that_fails_alone_is_no_reference(prove: Callable[..., Proof], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ExactOps, "lm_head", lambda self, x, w: torch.full((len(x), 1024), float("nan")))
    with pytest.raises(EvalEngineError, match="run alone: not a finite number"):
        prove("order")


def test_the_busy_axis_runs_beside_its_neighbour(prove: Callable[..., Proof], monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, the process starts before the first axis, is busy during its axis, and is gone afterwards."""
    neighbours: list[list[Any]] = []
    run = proof.batched

    def batched(llm: LLM, variant: Variant) -> Any:
        neighbours.append(multiprocessing.active_children())
        return run(llm, variant)

    monkeypatch.setattr(proof, "batched", batched)
    monkeypatch.setitem(axes.AXES, "busy", lambda work: axes.busy(replace(work, device_type="cuda")))
    proven = prove("order", "busy")
    assert proven.axes[1].tally.logprobs and proven.verdict == "IDENTICAL"
    assert [len(running) for running in neighbours] == [1, 1, 0, 0, 0], "the control's three schedules have none"
    assert not neighbours[0][0].is_alive()


def test_without_a_neighbour_the_axis_is_skipped_and_says_why(
    prove: Callable[..., Proof], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = proof.Neighbour
    monkeypatch.setattr(proof, "Neighbour", lambda device: real("cuda:77"))  # which no machine has
    monkeypatch.setitem(axes.AXES, "busy", lambda work: axes.busy(replace(work, device_type="cuda")))
    (axis,) = prove("busy").axes
    assert not axis.trials and axis.skipped is not None
    assert re.fullmatch(r"no other process could keep cuda:77 busy: \w+: .*CUDA.*", axis.skipped)


def test_a_new_process_that_fails_says_why() -> None:
    message = r"the same requests in a new process failed: .*no such shape"
    with (
        proof.in_a_new_process(Subject((*CPU, "model.path=shape:none"), "quick")) as answers,
        pytest.raises(EvalEngineError, match=message),
    ):
        answers()


def test_answers_of_a_new_process_are_compared(prove: Callable[..., Proof], monkeypatch: pytest.MonkeyPatch) -> None:
    """The process starts before the first axis. A logprob that differs by one unit in the last place is found."""
    reference: list[Any] = []
    events: list[str] = []
    real_alone, real_batched = proof.alone, proof.batched
    units = 0

    def alone(llm: LLM, cases: list[Case]) -> Any:
        answers = real_alone(llm, cases)
        reference[:] = [(case, answers[case.key]) for case in cases if case.key is not None]
        return answers

    def batched(llm: LLM, variant: Variant) -> Any:
        events.append(variant.label)
        return real_batched(llm, variant)

    @contextmanager
    def in_a_new_process(subject: Subject) -> Iterator[Callable[[], Any]]:
        events.append("start")
        last, answer = reference[-1]
        changed = answer.logprobs.copy()
        changed.view(np.int32)[-1] += units
        answers = [*reference[:-1], (last, replace(answer, logprobs=changed))]
        yield lambda: events.append("wait") or answers

    monkeypatch.setattr(proof, "alone", alone)
    monkeypatch.setattr(proof, "batched", batched)
    monkeypatch.setattr(proof, "in_a_new_process", in_a_new_process)
    assert prove("order", "restart").verdict == "IDENTICAL"
    assert events[:3] == ["start", "order 2", "wait"]
    units = 1
    proven = prove("restart")
    assert proven.verdict == "DIFFERENT" and proven.total.differing_logprobs == 1
