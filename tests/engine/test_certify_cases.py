"""The requests that `verify` makes for a model, and how their answers are compared and hashed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from evalengine.certify import certificate, schedules
from evalengine.certify.cases import EFFORTS, Case, affordable, build_cases, pool_pages
from evalengine.certify.model import open_checkpoint, shapes
from evalengine.certify.proof import Tally
from evalengine.certify.subject import Subject, open_subject, read_settings
from evalengine.config.schema import ModelConfig
from evalengine.engine.load.loader import Checkpoint
from evalengine.engine.request import GenerateRequest, RequestOutput, ScoreRequest
from evalengine.engine.states import state_bytes
from evalengine.errors import ConfigError
from evalengine.models.decoder import num_parameters, weight_counts
from tests.engine.certify_double import CPU


def test_cases_are_made_alike_everywhere_and_cross_the_borders() -> None:
    """Equal efforts make equal requests, whose lengths lie on both sides of the kernels' borders."""
    built = build_cases(EFFORTS["gpu"], opened("shape:qwen3-8b", 2), 40960)
    assert built == build_cases(EFFORTS["gpu"], opened("shape:qwen3-8b", 2), 40960)
    assert 500 < max(case.room for case in build_cases(EFFORTS["gpu"], opened("shape:qwen3-8b", 2), 1000)) <= 1000
    assert [case.key for case in built] == [case.request.request_id for case in built] == list(range(len(built)))
    assert sum(case.new_tokens > 1 for case in built) >= 512, "a decode step of 512 sequences"
    lengths = {case.length for case in built}
    assert min(lengths) == 1 and max(lengths) == 3200 and {1023, 1024, 1025, 2048, 2049} <= lengths
    requests = [case.request for case in built]
    assert any(isinstance(r, GenerateRequest) and r.params.temperature > 0 for r in requests)
    scored = sum(len(r.continuation_ids) for r in requests if isinstance(r, ScoreRequest))
    assert scored > 8000, "a dozen schedules make 100,000 logprobs"
    assert max(max(case.prompt) for case in built) > 100_000, "random ids are of the whole vocabulary"


@pytest.mark.parametrize(("effort", "room"), [("quick", 256), ("cpu", 256), ("gpu", 256), ("quick", 40960)])
def test_some_generations_share_whole_blocks(effort: str, room: int) -> None:
    """The axis `cascade` needs prompts with a whole block of 64 tokens, and decode steps after them."""
    built = build_cases(EFFORTS[effort], opened("shape:qwen3-8b", 2), room)
    shared = [case for case in schedules.siblings(built, 5, 65) if case.new_tokens >= 10]
    assert len(shared) >= 5 * 3 and max(len(case.prompt) for case in shared) >= 128


def test_a_slow_schedule_takes_fewer_requests() -> None:
    built = build_cases(EFFORTS["cpu"], opened("asset:tinymath"), 1024)
    few = affordable(built, 50, max_num_seqs=1, max_num_batched_tokens=1 << 16)
    assert 0 < len(few) < len(built) and few == [case for case in built if case in few]
    assert sum(case.new_tokens for case in few) <= 50
    assert affordable(built, 0, 1, 1) == built[:1]
    assert pool_pages(built, 16) >= sum(-(-case.length // 16) for case in built)


def answer_of(token_ids: list[int], logprobs: np.ndarray, error: str | None = None) -> RequestOutput:
    return RequestOutput(0, [], token_ids, logprobs, "length", error=error)


def test_comparison_counts_bytes_and_shows_the_first() -> None:
    tally = Tally()
    expected = answer_of([1, 2, 3], np.array([-1.0, -0.0, np.nan], np.float32))
    tally.add("s", "r", expected, answer_of([1, 2, 3], expected.logprobs.copy()))
    assert (tally.logprobs, tally.differing_logprobs) == (3, 0), "the same NaN is equal"
    tally.add("s", "r", expected, answer_of([1, 2, 3], np.array([-1.0, 0.0, np.nan], np.float32)))
    assert (tally.differing_logprobs, tally.differing_bytes) == (1, 1), "-0 is not +0"
    assert str(tally.first_difference) == "s: r, token 1: 0 (00000000) of id 2 against -0 (80000000) of id 2 alone"
    tally.add("s", "r", expected, answer_of([1, 7], expected.logprobs[:2], "gone"))
    assert (tally.differing_logprobs, tally.differing_bytes) == (3, 9), "another token, and a missing one"
    tally.add("s", "r", answer_of([], expected.logprobs[:0]), expected)
    assert tally.logprobs == 12 and tally.differing_logprobs == 6, "what should not be there differs"


def test_answers_hash_covers_every_field() -> None:
    answer = answer_of([1, 2], np.array([-1.0, -2.0], np.float32))
    changed_answers = [
        {0: answer_of([1, 3], answer.logprobs)},
        {0: answer_of([1, 2], np.nextafter(answer.logprobs, np.float32(0)))},
        {1: answer},
        {0: answer, 1: answer},
    ]
    hashes = {certificate.answers_sha256(x) for x in [{0: answer}, *changed_answers]}
    assert len(hashes) == 5


def opened(path: str, layers: int | None = None) -> Checkpoint:
    """The checkpoint that `path` names, cut to `layers` layers if that is given."""
    return open_checkpoint(ModelConfig(name=path, path=path), layers)


def test_shapes() -> None:
    """`shape:NAME` has the sizes of the named model; unknown shapes and impossible layer counts are refused."""
    for name, layers, heads in (("qwen3-0.6b", 28, 16), ("qwen3-8b", 36, 32)):
        spec = opened(f"shape:{name}").spec
        assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (layers, heads, 8, 128)
        assert spec.dtype == torch.bfloat16 and opened(f"shape:{name}", 2).spec.num_layers == 2
    assert opened("shape:qwen3-0.6b").spec.tie_word_embeddings
    assert abs(num_parameters(opened("shape:qwen3-8b").spec) / 8.19e9 - 1) < 0.001
    for name, billions, used in (("qwen3-30b-a3b", 30.53, 3.35), ("gpt-oss-20b-mxfp4", 20.91, 4.19)):  # with tables
        spec = opened(f"shape:{name}").spec
        unused = weight_counts(spec).experts * (1 - spec.mixture.router.chosen / spec.mixture.router.experts)
        weights = num_parameters(spec)
        assert (round(weights / 1e9, 2), round((weights - unused) / 1e9, 2)) == (billions, used), name
    # A layer's state: value heads of 128 x 128 numbers, and 16 inputs of 128 x (2 x 16 + value heads) channels.
    for name, layers, heads, billions in (("qwen3.5-0.8b", 18, 16, 0.75), ("qwen3.5-4b", 24, 32, 4.21)):
        spec = opened(f"shape:{name}").spec
        assert len(spec.recurrences) == layers and round(num_parameters(spec) / 1e9, 2) == billions
        state = 4 * heads * 128 * 128 + 2 * 16 * 128 * (2 * 16 + heads)
        # Of 64 rows in bfloat16: x, T, a key and its norm, and the gates' sums.
        rows = 64 * (heads * 4 * (128 + 64 + 1) + 16 * (2 * 128 + 4))
        assert state_bytes(spec, torch.bfloat16, chunked=False) == layers * state
        assert state_bytes(spec, torch.bfloat16, chunked=True) == layers * (state + rows)
    # 64 heads of 64 x 128 numbers, 16 inputs, and of 64 rows: x, B, and each head's time step and sum of gates.
    state = 4 * 64 * 64 * 128 + 2 * 16 * (64 * 64 + 2 * 128) + 64 * (2 * (64 * 64 + 128) + 64 * (4 + 4))
    assert state_bytes(opened("shape:granite-4-h").spec, torch.bfloat16, chunked=True) == 36 * state
    # Recurrent layers, layers, KV heads and parameters (the cards say 3 B, 0.5 B, 1.17 B and 15.7 B).
    for name, recurrent, layers, heads, billions in (
        ("granite-4-h", 36, 40, 8, 3.19),
        ("falcon-h1", 36, 36, 2, 0.52),
        ("lfm2", 10, 16, 8, 1.17),
        ("deepseek-v2-lite", 0, 27, 16, 15.71),
    ):
        spec = opened(f"shape:{name}").spec
        assert (len(spec.recurrences), spec.num_layers, spec.num_kv_heads) == (recurrent, layers, heads), name
        assert round(num_parameters(spec) / 1e9, 2) == billions, name
    for arguments in (("shape:qwen9", None), ("shape:qwen3-8b", 0), ("shape:qwen3-8b", 99), ("asset:tinymath", 2)):
        with pytest.raises(ConfigError, match=r"model.path=|--layers="):
            opened(*arguments)


@pytest.mark.parametrize("name", shapes())
def test_a_shape_of_few_layers_has_attention(name: str) -> None:
    """`--layers 2` of a hybrid has one attention layer, and the kind of layer before it."""
    whole, cut = opened(f"shape:{name}").spec, opened(f"shape:{name}", 2).spec
    assert cut.num_layers == 2 and opened(f"shape:{name}", 1).spec.num_layers == 1
    assert bool(cut.recurrences) == bool(whole.recurrences)
    assert replace(cut, num_layers=0, blocks=()) == replace(whole, num_layers=0, blocks=())


def test_a_tasks_requests_are_those_of_a_run(small_checkpoint: Checkpoint) -> None:
    subject = Subject((*CPU, "task=arithmetic", "limit=3", "task.num_fewshot=1"), "quick")
    _, tasks = open_subject(subject.config, None)
    task_cases = [case for case in subject.cases(small_checkpoint, tasks) if case.origin]
    assert sorted(case.origin for case in task_cases) == [f"arithmetic, document {i}: " for i in range(3)]
    assert task_cases[0].what.startswith(task_cases[0].origin + "generation after ")
    tokenizer = small_checkpoint.tokenizer
    for case in task_cases:
        assert isinstance(case.request, GenerateRequest)
        assert case.request.params.stop == ("Question:", "\n\n", "<|endoftext|>")  # The task's and the EOS token's.
        assert tokenizer.decode(case.request.prompt_ids).count("Question:") == 2
        assert case.request.params.max_tokens == EFFORTS["quick"].answer_tokens
    whole = Subject((*subject.words, "task.generation.max_gen_toks=30"), "quick")
    uncut = [case.request for case in whole.cases(small_checkpoint, open_subject(whole.config, None)[1]) if case.origin]
    assert all(isinstance(request, GenerateRequest) and request.params.max_tokens == 30 for request in uncut)
    with pytest.raises(ConfigError, match=r"engine.num_threads: verify varies .*\n.*resume: verify leaves no run"):
        read_settings(("engine.num_threads=1", "resume=never"))


def test_a_pool_that_half_of_the_prompts_fill() -> None:
    """`filled_pages` counts shared pages once, and at least the pages of the longest request."""
    prompts = [[1] * 16 + [2] * 16, [1] * 16 + [3], [4] * 5, [5] * 64]
    built = [Case(i, ScoreRequest(i, prompt, [5])) for i, prompt in enumerate(prompts)]
    assert schedules.filled_pages(built[:3], 16) == 3, "[1] * 16 is one page"
    assert schedules.filled_pages(built, 16) == 4, "the last one needs four by itself"


def test_a_shape_is_asked_no_task() -> None:
    """A model that is only a shape has no requests of tasks."""
    assert Subject(("model.path=shape:qwen3-8b",), "gpu").task_names == []
    assert Subject((), "cpu").task_names == ["arithmetic"]
