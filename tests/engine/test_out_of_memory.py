"""A step that does not fit the device's memory is scheduled anew, smaller: the run goes on with the same bytes."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from evalengine.engine.execute.batch import Batch
from evalengine.engine.execute.model_runner import ModelRunner
from evalengine.engine.llm import LLM
from evalengine.engine.request import GenerateRequest, Request, RequestOutput, SamplingParams, ScoreRequest
from evalengine.errors import EvalEngineError
from tests.bitwise import assert_bitwise_equal

PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)
SHARED = list(range(3, 40))  # It ends inside a page, so that sharing it copies the page.


def requests() -> list[Request]:
    """Generations and scores that share prefixes."""
    generations: list[Request] = [GenerateRequest(i, [*SHARED[: 20 + i], 50 + i], PARAMS) for i in range(6)]
    return [*generations, *(ScoreRequest(10 + i, SHARED, [7 + i, 8, 9]) for i in range(4))]


def answers(llm: LLM) -> dict[int, RequestOutput]:
    """The outputs of all requests by id."""
    return {output.request_id: output for output in llm.run(requests())}


def limit_memory(monkeypatch: pytest.MonkeyPatch, most: int, after_copies: bool) -> list[int]:
    """Makes a step of more tokens than `most` fail, before or after its pages are copied; returns the sizes tried."""
    real, sizes_tried = ModelRunner.compute, []

    def compute(self: ModelRunner, copies: Any, batch: Batch, *arguments: Any) -> Any:
        sizes_tried.append(len(batch.ids))
        if len(batch.ids) > most:
            if after_copies:
                self._copy_pages(copies)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
        return real(self, copies, batch, *arguments)

    monkeypatch.setattr(ModelRunner, "compute", compute)
    return sizes_tried


# Quick are both places of the failure with the most shrinking, and the step ahead with some; the rest repeats them.
QUICK = [(1, False, False), (5, True, True)]


@pytest.mark.parametrize(
    ("most", "after_copies", "ahead"),
    [
        pytest.param(*values, marks=() if values in QUICK else pytest.mark.slow)
        for values in itertools.product([1, 5, 30], [False, True], [False, True])
    ],
)
def test_the_run_goes_on_with_the_same_bytes(
    most: int,
    after_copies: bool,
    ahead: bool,
    make_llm: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = [answers(llm := make_llm()), answers(llm)]  # The second run finds prefixes, and copies pages.
    sizes_tried = limit_memory(monkeypatch, most, after_copies)
    llm = make_llm()
    assert llm.runner is not None
    llm.runner.is_asynchronous = ahead
    with caplog.at_level(logging.WARNING):
        outputs = [answers(llm), answers(llm)]
    for answered, expected_answers in zip(outputs, expected, strict=True):
        assert answered.keys() == expected_answers.keys()
        for key, output in answered.items():
            assert output.error is None and output.token_ids == expected_answers[key].token_ids
            assert_bitwise_equal(output.logprobs, expected_answers[key].logprobs)
    assert max(sizes_tried) > most and llm.stats.num_shrunk_steps == sum(size > most for size in sizes_tried)
    assert caplog.text.count("out of memory in a step of") == 1
    assert llm.block_manager.num_free_blocks == llm.num_kv_blocks


def test_a_step_of_one_token_that_does_not_fit_ends_the_run(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm()
    with monkeypatch.context() as patch:
        limit_memory(patch, 0, False)
        with pytest.raises(EvalEngineError, match=r"(?s)Tried to allocate.*a step of 1 tokens: lower engine"):
            answers(llm)
    llm.reconfigure(num_kv_blocks=llm.num_kv_blocks)
    assert answers(llm).keys() == answers(make_llm()).keys(), "the engine is usable afterwards"


def fail_once_computed(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Makes a step of more tokens than `most` fail once all layers have written their KV, as for want of its logits."""
    real = ModelRunner.compute

    def compute(self: ModelRunner, copies: Any, batch: Batch, *arguments: Any) -> Any:
        results = real(self, copies, batch, *arguments)
        if len(batch.ids) > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
        return results

    monkeypatch.setattr(ModelRunner, "compute", compute)


def test_a_page_that_the_failed_step_overwrote_is_not_copied_again(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second request takes the very page that the first one copies a token from."""
    one = SamplingParams(max_tokens=1, ignore_eos=True)
    before = GenerateRequest(0, SHARED[:10], one)
    both: list[Request] = [GenerateRequest(1, [*SHARED[:9], 60], one), GenerateRequest(2, list(range(70, 90)), one)]
    outputs = []
    for fails in (False, True):
        llm = make_llm(block_size=4, num_kv_blocks=8)
        list(llm.run([before]))
        with monkeypatch.context() as patch:
            if fails:
                fail_once_computed(patch, 20)
            outputs.append({output.request_id: output for output in llm.run(both)})
        assert llm.stats.num_shrunk_steps == fails and llm.stats.num_cached_tokens >= 9
    for key, output in outputs[1].items():
        assert_bitwise_equal(output.logprobs, outputs[0][key].logprobs)


def test_a_prefix_that_the_failed_step_never_wrote_is_not_kept_for_another(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request that was to write it is dropped before the step is scheduled anew."""
    first, second = (GenerateRequest(i, [*SHARED, 60 + i], PARAMS) for i in range(2))
    expected = next(make_llm().run([second]))
    limit_memory(monkeypatch, 30, after_copies=False)
    llm = make_llm()
    assert llm.runner is not None
    llm.runner.fill_pool(float("nan"))

    def drop_the_first() -> list[Request]:
        llm.scheduler.drop({first.request_id})
        return []

    (output,) = llm.run([first, second], more=drop_the_first)
    assert output.error is None and llm.stats.num_shrunk_steps
    assert_bitwise_equal(output.logprobs, expected.logprobs)
