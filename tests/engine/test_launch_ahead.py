"""Steps launched before the last step's tokens are known give the bytes, pages and endings of steps that wait.

The tests run on a CPU, where a step is done when it is launched; but the engine takes its results late, as it does from
a GPU.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from evalengine.engine.llm import LLM
from evalengine.engine.load.loader import Checkpoint
from evalengine.engine.request import GenerateRequest, Request, RequestOutput, SamplingParams, ScoreRequest
from evalengine.models.processors import LogitsProcessors
from tests.bitwise import assert_bitwise_equal

STOP_IDS = tuple(range(0, 900, 7))


def go_ahead(llm: LLM) -> None:
    """Makes the LLM launch a step before the last one's results are taken, as on a device that computes by itself."""
    assert llm.runner is not None
    llm.runner.is_asynchronous = True


def requests(seed: int) -> list[Request]:
    """Generations that end by EOS, a stop string, a stop id or their number; sampled ones and scores among them."""
    rng = random.Random(seed)
    shared = [rng.randrange(1, 1000) for _ in range(rng.choice([3, 16, 33]))]
    batch: list[Request] = []
    for i in range(14):
        suffix = [rng.randrange(1, 1000) for _ in range(rng.choice([1, 2, 15, 16, 31]))]
        prompt = shared + suffix if rng.random() < 0.5 else suffix
        if i % 7 == 6:
            batch.append(ScoreRequest(i, prompt, suffix))
            continue
        endings: list[dict[str, Any]] = [{"ignore_eos": True}, {}, {"stop": ("e", "1")}, {"stop_token_ids": STOP_IDS}]
        sampled = i % 7 == 5  # Sampled requests end soon.
        params = SamplingParams(
            max_tokens=2 if sampled else rng.choice([1, 2, 9, 30]),
            temperature=0.8 if sampled else 0.0,
            seed=seed,
            **rng.choice(endings),
        )
        batch.append(GenerateRequest(i, prompt, params))
    return batch


def run(llm: LLM, batch: list[Request]) -> dict[int, RequestOutput]:
    """The requests' outputs by id; every step's page tables are checked."""
    return {output.request_id: output for output in llm.run(batch, lambda _: check(llm))}


def check(llm: LLM) -> None:
    """Asserts that the block manager's pages are consistent with the sequences that run."""
    llm.block_manager.check(llm.scheduler.sequences)


SETTINGS: dict[str, Any] = {"device": "cpu", "block_size": 16, "num_kv_blocks": 64, "max_model_len": 128}
SCHEDULES: list[dict[str, Any]] = [
    {},
    {"max_num_seqs": 3},
    {"max_num_seqs": 1},
    {"block_size": 1, "num_kv_blocks": 130},
    {"block_size": 16, "num_kv_blocks": 9},
    {"enable_prefix_caching": False},
    {"max_num_batched_tokens": 5},
    {"max_num_batched_tokens": 1, "max_num_seqs": 1},  # Prompts go through the graph for one token, too.
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])  # other requests, the same schedules
def test_bytes_pages_and_endings_are_those_of_steps_that_wait(
    small_checkpoint: Checkpoint, schedule: dict[str, Any], seed: int
) -> None:
    batch = requests(seed)
    settings = {**SETTINGS, **schedule}
    one_layer = replace(small_checkpoint, spec=replace(small_checkpoint.spec, num_layers=1))
    with LLM(one_layer, **settings) as llm:
        expected = run(llm, batch)
    with LLM(one_layer, **settings) as llm:
        go_ahead(llm)
        for _ in range(2):  # The second run has a warm prefix cache.
            outputs = run(llm, batch)
            assert outputs.keys() == expected.keys()
            for key, output in outputs.items():
                assert output.token_ids == expected[key].token_ids and output.text == expected[key].text
                assert output.finish_reason == expected[key].finish_reason
                assert_bitwise_equal(output.logprobs, expected[key].logprobs)
            assert llm.block_manager.num_free_blocks == llm.num_kv_blocks
        assert llm.stats.num_steps_ahead > 0, "no step was launched ahead: this test shows nothing"


def test_tokens_that_became_known_late_are_in_the_prefix_cache(small_checkpoint: Checkpoint) -> None:
    """A prompt that goes on where an answer ended finds the answer's pages, too."""
    cached = []
    for late in (False, True):
        with LLM(small_checkpoint, **{**SETTINGS, "block_size": 4}) as llm:
            if late:
                go_ahead(llm)
            (answer,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=30, ignore_eos=True))
            assert (llm.stats.num_steps_ahead > 0) == late
            llm.generate([[5, 6, 7, *answer.token_ids, 9]], SamplingParams(max_tokens=1))
            cached.append(llm.stats.num_cached_tokens)
    assert cached[0] == cached[1] == 32  # All but the last token, whose KV no step needed.


def test_no_step_is_launched_beyond_a_sequences_last_token(small_checkpoint: Checkpoint) -> None:
    """Ends by max_tokens or max_model_len are known before the tokens are, so no step computes beyond them."""
    for settings, params in (({}, {"max_tokens": 20}), ({"max_model_len": 24}, {"max_tokens": 500})):
        computed = []
        for late in (False, True):
            with LLM(small_checkpoint, **{**SETTINGS, **settings}) as llm:
                if late:
                    go_ahead(llm)
                llm.generate([[5, 6, 7], [9]], SamplingParams(ignore_eos=True, **params))
                assert (llm.stats.num_steps_ahead > 0) == late
                computed.append((llm.stats.num_computed_tokens, llm.stats.num_steps))
        assert computed[0] == computed[1]


def test_an_iterator_whose_last_answer_was_taken_ends_though_the_engine_is_closed(small_checkpoint: Checkpoint) -> None:
    with LLM(small_checkpoint, **SETTINGS) as llm:
        (answer,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=9, ignore_eos=True))
        go_ahead(llm)
        stop = SamplingParams(max_tokens=9, ignore_eos=False, stop_token_ids=(answer.token_ids[4],))
        iterator = llm.run([GenerateRequest(0, [5, 6, 7], stop)])
        assert next(iterator).finish_reason == "stop" and llm._in_flight is not None
        llm.close()
        assert list(iterator) == []


def test_a_waiting_request_is_admitted_when_another_ends(small_checkpoint: Checkpoint) -> None:
    """The prompts share pages, so that one more fits whenever another ends, though few pages of the pool are free."""
    shared = [7 * i % 900 + 3 for i in range(64)]
    prompts = [[*shared, 11 + i] for i in range(12)]
    with LLM(small_checkpoint, **{**SETTINGS, "num_kv_blocks": 4 + 6}) as llm:
        (answer,) = llm.generate([prompts[0]], SamplingParams(max_tokens=12, ignore_eos=True))
        expected = llm.generate(prompts, SamplingParams(max_tokens=12, stop_token_ids=tuple(answer.token_ids[5:])))
        waiting_steps = llm.stats.num_steps
        llm.reconfigure()
        go_ahead(llm)
        llm.generate([prompts[0]], SamplingParams(max_tokens=12, ignore_eos=True))
        outputs = llm.generate(prompts, SamplingParams(max_tokens=12, stop_token_ids=tuple(answer.token_ids[5:])))
        assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
        assert llm.stats.num_steps <= waiting_steps + len(prompts)  # One step in vain is allowed for each that ends.


def test_what_is_left_behind_by_an_abandoned_run_harms_no_other(small_checkpoint: Checkpoint) -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    with LLM(small_checkpoint, **SETTINGS) as llm:
        expected = llm.generate([[5, 6, 7], [9]], params)
        go_ahead(llm)
        for steps in range(1, 6):
            iterator = llm.run([GenerateRequest(0, [5, 6, 7], SamplingParams(max_tokens=steps, ignore_eos=True)),
                                GenerateRequest(1, [9], params)])  # fmt: skip
            next(iterator)
            assert llm._in_flight is not None or steps == 1
            iterator.close()  # type: ignore[attr-defined]
            check(llm)
            for output, expected_output in zip(llm.generate([[5, 6, 7], [9]], params), expected, strict=True):
                assert output.token_ids == expected_output.token_ids
                assert_bitwise_equal(output.logprobs, expected_output.logprobs)


def test_a_sequence_that_is_not_finite_fails_alone(
    small_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sequence's NaN token is fed to the step that was launched ahead; the other sequences go on."""
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    with LLM(small_checkpoint, **SETTINGS) as llm:
        expected = llm.generate([[9, 10]], params)[0]
        go_ahead(llm)
        assert llm.runner is not None
        real, calls = llm.runner.ops.read_out, []

        def broken(logits: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
            greedy, logprobs = real(logits, *arguments)
            calls.append(len(logits))
            if len(calls) == 4:
                greedy[0], logprobs[0] = logits.shape[1], float("nan")
            return greedy, logprobs

        monkeypatch.setattr(llm.runner.ops, "read_out", broken)
        batch = [GenerateRequest(0, [5, 6], params), GenerateRequest(1, [9, 10], params)]
        outputs = {output.request_id: output for output in llm.run(batch)}
        assert "not a finite number" in (outputs[0].error or "") and len(outputs[0].token_ids) == 3
        assert outputs[1].error is None and outputs[1].token_ids == expected.token_ids
        assert_bitwise_equal(outputs[1].logprobs, expected.logprobs)


def test_prompts_and_scores_go_ahead_too(small_checkpoint: Checkpoint) -> None:
    """Every step but the first is launched ahead; none is where the host must choose the next token."""
    batch: list[Request] = [ScoreRequest(i, [7 * i + 3] * (20 + i), [5, 6, 7 + i]) for i in range(20)]
    settings = {**SETTINGS, "max_num_batched_tokens": 16, "num_kv_blocks": 200}
    with LLM(small_checkpoint, **settings) as llm:
        expected = run(llm, batch)
        steps = llm.stats.num_steps
        llm.reconfigure()
        go_ahead(llm)
        outputs = run(llm, batch)
        assert llm.stats.num_steps == steps and llm.stats.num_steps_ahead == steps - 1
        for key, output in outputs.items():
            assert_bitwise_equal(output.logprobs, expected[key].logprobs)
        llm.reconfigure()
        go_ahead(llm)
        penalty = LogitsProcessors(repetition_penalty=1.3)
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=9, ignore_eos=True, processors=penalty))
        assert llm.stats.num_steps_ahead == 0


def test_samples_and_alternatives_go_ahead(small_checkpoint: Checkpoint) -> None:
    prompts = [[5, 6, 7], [9], [11] * 20]
    for params in ({"temperature": 1.0, "seed": 3, "top_k": 20}, {"logprobs": 3}, {"temperature": 0.7, "logprobs": 2}):
        sampling = SamplingParams(max_tokens=20, ignore_eos=True, **params)  # type: ignore[arg-type]
        with LLM(small_checkpoint, **SETTINGS) as llm:
            expected = llm.generate(prompts, sampling)
            llm.reconfigure()
            go_ahead(llm)
            outputs = llm.generate(prompts, sampling)
            assert llm.stats.num_steps_ahead == llm.stats.num_steps - 1
            for output, waited in zip(outputs, expected, strict=True):
                assert output.token_ids == waited.token_ids and output.top_logprobs == waited.top_logprobs
                assert_bitwise_equal(output.logprobs, waited.logprobs)


@pytest.mark.parametrize("fails", [1, 2, 3])
def test_a_launch_that_fails_takes_no_finished_output_with_it(
    small_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, fails: int
) -> None:
    """The first two of three prompts end with steps 1 and 2; their outputs are handed out before the launch's error."""
    batch = [GenerateRequest(i, [5 + i], SamplingParams(max_tokens=1 + i, ignore_eos=True)) for i in range(3)]
    with LLM(small_checkpoint, **SETTINGS) as llm:
        go_ahead(llm)
        assert llm.runner is not None
        real, calls = llm.runner.launch, []

        def launch(schedule: Any) -> Any:
            calls.append(schedule)
            if len(calls) == fails:
                raise RuntimeError("out of memory")
            return real(schedule)

        monkeypatch.setattr(llm.runner, "launch", launch)
        finished_ids: list[int] = []
        with pytest.raises(RuntimeError, match="out of memory"):
            for output in llm.run(batch):
                finished_ids.append(output.request_id)
        assert finished_ids == list(range(fails - 1))
        check(llm)
        assert llm.block_manager.num_free_blocks == llm.num_kv_blocks and not llm.scheduler.has_work
        monkeypatch.undo()
        assert len(list(llm.run(batch))) == 3
