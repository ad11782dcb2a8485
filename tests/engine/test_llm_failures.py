"""What `LLM` refuses, how it reports numbers that are not finite, and its state after a failure or an early end."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from evalengine import LLM, SamplingParams
from evalengine.config.schema import ModelConfig
from evalengine.engine.request import GenerateRequest, ScoreRequest
from evalengine.errors import ConfigError, EvalEngineError

PROMPTS = [[5, 6, 7], [8], list(range(40, 77)), [9, 9, 9, 9]]


def test_refusals_come_before_anything_runs_and_all_at_once(make_llm):
    llm = make_llm(batch_invariant=False, max_model_len=64, num_kv_blocks=2)
    with pytest.raises(ConfigError) as caught:
        llm.generate([[], list(range(64)), [10**6], list(range(30))], SamplingParams(max_tokens=20))
    text = str(caught.value)
    for part in (
        "request 0: the prompt is empty",
        "request 1",
        "max_model_len=64",
        "request 2: token ids",
        "request 3",
        "the pool has 2",
    ):
        assert part in text
    assert llm.stats.num_steps == 0
    with pytest.raises(ConfigError, match="at least one token each"):
        llm.score([([], [1])])


def test_bad_settings_are_listed_together(small_checkpoint):
    with pytest.raises(ConfigError, match=r"max_num_seq\b.*known ones"):
        LLM(small_checkpoint, max_num_seq=3)
    with pytest.raises(ConfigError) as caught:
        LLM(small_checkpoint, max_num_seqs=0, dtype="int8")
    assert "engine.max_num_seqs=0" in str(caught.value) and "engine.dtype=int8" in str(caught.value)
    with pytest.raises(ConfigError, match=r"num_kv_blocks=1000000000: that pool takes .* at most \d+ fit"):
        LLM(small_checkpoint, num_kv_blocks=10**9)
    with pytest.raises(ConfigError, match="max_model_len=4096"):
        LLM(small_checkpoint, max_model_len=4096)
    with pytest.raises(ConfigError) as caught:
        SamplingParams(max_tokens=0, top_p=0.0, temperature=-1)
    assert all(part in str(caught.value) for part in ("max_tokens=0", "top_p=0.0", "temperature=-1"))
    with pytest.raises(ConfigError, match="temperature=nan"):
        SamplingParams(temperature=math.nan)
    with pytest.raises(ConfigError) as caught:
        LLM(small_checkpoint, batch_invariant=False, numerics="exact", device="cuda:99", max_model_len=4096)
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize("model", ["./nowhere", ModelConfig(name="t", path="./nowhere")])
def test_a_bad_model_and_bad_settings_are_listed_together(model):
    with pytest.raises(ConfigError) as caught:
        LLM(model, device="cpu", attention_backend="flash_attn", num_threads=0, max_model_len=9**9)
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "model.path=./nowhere",
        "engine.num_threads=0",
    ]
    with pytest.raises(ConfigError) as caught:
        LLM(model, device="cpu", attention_backend="flash_attn")
    missing, backend = caught.value.problems
    assert missing.startswith("model.path=./nowhere: no model found")
    assert backend.startswith("engine.attention_backend=flash_attn: batch_invariant=true (numerics=exact)")
    with pytest.raises(ConfigError, match="no model found") as caught:
        LLM(model, device="cpu")
    assert len(caught.value.problems) == 1


def test_a_non_finite_activation_fails_its_own_request_and_names_the_layer(llm):
    embedding = llm.runner.model.model.embed_tokens
    poisoned = embedding.weight.detach().clone()  # The tied lm_head keeps the healthy table.
    poisoned[11] = float("nan")
    embedding.weight = torch.nn.Parameter(poisoned, requires_grad=False)
    requests = [
        ScoreRequest(0, [5, 11], [3]),
        ScoreRequest(1, [5, 6], [3, 4]),
        GenerateRequest(2, [11], SamplingParams(max_tokens=3)),
    ]
    outputs = {o.request_id: o for o in llm.run(requests)}
    assert outputs[1].error is None and np.isfinite(outputs[1].logprobs).all()
    for failed in (0, 2):
        assert "embed_tokens" in outputs[failed].error
    (failed,) = llm.score([([5, 11], [3])])
    assert "embed_tokens" in failed.error and math.isnan(failed.sum_logprob)


@pytest.mark.parametrize(("lasting", "words"), [(False, "computed again, is finite"), (True, "output of lm_head")])
def test_a_number_that_is_not_finite_once_blames_no_op(llm, monkeypatch, lasting, words):
    """If the step is finite when computed again (a race in a kernel), the error says so; else it names the op."""
    real, calls = llm.runner.model.compute_logits, []

    def compute_logits(hidden):
        calls.append(len(hidden))
        logits = real(hidden)
        return logits * float("nan") if lasting or len(calls) == 1 else logits

    monkeypatch.setattr(llm.runner.model, "compute_logits", compute_logits)
    (output,) = llm.run([ScoreRequest(0, [5, 6], [3])])
    assert "not a finite number at token 1" in output.error and words in output.error


def test_leaving_the_iterator_takes_everything_back(llm):
    requests = [GenerateRequest(i, [i + 1, 2], SamplingParams(max_tokens=5 + i, ignore_eos=True)) for i in range(4)]
    for _ in llm.run(requests):
        break
    assert not llm.scheduler.has_work
    llm.block_manager.check([])
    assert len(llm.generate(PROMPTS, SamplingParams(max_tokens=2))) == len(PROMPTS)


def test_a_second_run_may_not_mix_with_an_unfinished_one(llm):
    requests = [GenerateRequest(i, [i + 1, 2], SamplingParams(max_tokens=2 + i, ignore_eos=True)) for i in range(3)]
    outputs = llm.run(requests)
    next(outputs)
    with pytest.raises(EvalEngineError, match="finish or close their iterator"):
        llm.generate([[9]])
    assert len(list(outputs)) == 2
    assert len(llm.generate([[9]], SamplingParams(max_tokens=1))) == 1
    together = llm.run([GenerateRequest(i, [i + 1, 2], SamplingParams(max_tokens=2)) for i in range(2)])
    next(together)  # Both are finished, and one is not yet yielded.
    with pytest.raises(EvalEngineError, match="finish or close their iterator"):
        llm.generate([[9]])
    assert len(list(together)) == 1


def test_closing_in_the_middle_of_a_run_is_said(llm):
    outputs = llm.run(
        [GenerateRequest(i, [i + 1], SamplingParams(max_tokens=1 + i, ignore_eos=True)) for i in range(3)]
    )
    next(outputs)
    llm.close()
    with pytest.raises(EvalEngineError, match="closed"):
        list(outputs)


def test_leaving_with_requests_still_waiting(make_llm):
    llm = make_llm(batch_invariant=False, max_num_seqs=1)
    for _ in llm.run([GenerateRequest(i, [i + 1, 2], SamplingParams(max_tokens=2)) for i in range(4)]):
        break
    assert not llm.scheduler.has_work and len(llm.generate([[9]], SamplingParams(max_tokens=1))) == 1


def test_no_sampling_params_for_a_prompt_is_refused(llm):
    with pytest.raises(ConfigError, match="0 given for 1 prompts"):
        llm.generate([[5]], [])
    assert len(llm.generate(np.array([5, 6]), SamplingParams(max_tokens=1))) == 1


def test_a_failed_construction_puts_the_thread_setting_back(small_checkpoint):
    num_threads = torch.get_num_threads()
    with pytest.raises(ConfigError):
        LLM(small_checkpoint, num_threads=num_threads + 1, num_kv_blocks=10**9)
    assert torch.get_num_threads() == num_threads


def test_a_failed_step_leaves_no_page_behind_that_was_never_computed(llm, monkeypatch):
    request = ScoreRequest(0, list(range(1, 70)), [3, 4])
    expected = llm.score([(list(range(1, 70)), [3, 4])])[0].logprobs
    llm.block_manager = llm.scheduler.block_manager = type(llm.block_manager)(256, 16)  # Its prefix cache is cold.

    def fail(schedule):
        raise RuntimeError("lost device")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="lost device"):
        patch.setattr(llm.runner, "launch", fail)
        list(llm.run([request]))
    llm.runner.kv_pool.fill_(float("nan"))
    llm.block_manager.check([])
    (out,) = llm.run([request])
    assert out.error is None
    np.testing.assert_allclose(out.logprobs, expected, atol=1e-5)


def test_close_gives_everything_back(small_checkpoint):
    num_threads = torch.get_num_threads()
    with LLM(small_checkpoint, batch_invariant=False, num_threads=num_threads + 1) as llm:
        assert torch.get_num_threads() == num_threads + 1
    assert torch.get_num_threads() == num_threads
    llm.close()
    with pytest.raises(EvalEngineError, match="closed"):
        llm.generate([[1]])
