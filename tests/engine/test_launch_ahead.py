"""Steps launched before the last one's tokens are known: the bytes, pages and endings of steps that wait.

On a CPU, with a stand-in for the CUDA graphs that computes eagerly and hands its tokens over late.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from evalengine.engine.cuda_graphs import Decoded, Unread
from evalengine.engine.llm import LLM
from evalengine.engine.loader import Checkpoint
from evalengine.engine.model_runner import ModelRunner
from evalengine.engine.request import GenerateRequest, Request, RequestOutput, SamplingParams, ScoreRequest
from evalengine.engine.scheduler import Chunk
from tests.bitwise import assert_bitwise_equal

STOP_IDS = tuple(range(0, 900, 7))


@dataclass(frozen=True)
class Late(Unread):
    """Tokens that are computed already, though nobody was told."""

    tokens: list[tuple[int, float]] = field(default_factory=list)

    def read(self) -> list[tuple[int, float]]:
        return self.tokens


class LateGraphs:
    """`DecodeGraphs` without CUDA."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.last: dict[int, int] = {}  # sequence -> its token in the last step
        self.ahead = 0  # sequences that were computed with a token that the engine did not know

    def has(self, num_seqs: int, kv_len: int) -> bool:
        return True

    def run(self, chunks: Sequence[Chunk]) -> Decoded | None:
        if any(c.end - c.start != 1 for c in chunks):
            return None
        ids = []
        for c in chunks:
            known = c.start < c.seq.num_tokens
            self.ahead += not known
            ids.append(c.seq.token_ids[c.start] if known else self.last[c.seq.seq_id])
        runner, positions = self.runner, [c.start for c in chunks]
        metadata = runner._metadata(list(chunks))
        hidden = runner.model(torch.tensor(ids), torch.tensor(positions), runner.kv_caches, metadata)
        logits = runner.model.compute_logits(hidden)
        greedy, logprobs = runner.ops.read_out(logits, None, torch.full((len(ids),), -1))
        self.last = {c.seq.seq_id: min(token, 1023) for c, token in zip(chunks, greedy.tolist(), strict=True)}
        stage: Any = None
        return Decoded(hidden, Late(len(ids), stage, list(zip(greedy.tolist(), logprobs.tolist(), strict=True))))


def requests(seed: int) -> list[Request]:
    """Generations that end by EOS, a stop string, a stop id or their number; sampled ones and scores among them."""
    rng = random.Random(seed)
    shared = [rng.randrange(1, 1000) for _ in range(rng.choice([3, 16, 33]))]
    made: list[Request] = []
    for i in range(14):
        own = [rng.randrange(1, 1000) for _ in range(rng.choice([1, 2, 15, 16, 31]))]
        prompt = shared + own if rng.random() < 0.5 else own
        if i % 7 == 6:
            made.append(ScoreRequest(i, prompt, own))
            continue
        endings: list[dict[str, Any]] = [{"ignore_eos": True}, {}, {"stop": ("e", "1")}, {"stop_token_ids": STOP_IDS}]
        sampled = i % 7 == 5  # they end soon: a step that samples waits for its tokens
        params = SamplingParams(
            max_tokens=2 if sampled else rng.choice([1, 2, 9, 30]),
            temperature=0.8 if sampled else 0.0,
            seed=seed,
            **rng.choice(endings),
        )
        made.append(GenerateRequest(i, prompt, params))
    return made


def run(llm: LLM, made: list[Request]) -> dict[int, RequestOutput]:
    return {output.request_id: output for output in llm.run(made, lambda _: check(llm))}


def check(llm: LLM) -> None:
    llm.block_manager.check([*llm.scheduler.running, *llm.scheduler.waiting])


SETTINGS: dict[str, Any] = {"device": "cpu", "block_size": 16, "num_kv_blocks": 64, "max_model_len": 128}
SCHEDULES: list[dict[str, Any]] = [
    {},
    {"max_num_seqs": 3},
    {"max_num_seqs": 1},
    {"block_size": 1, "num_kv_blocks": 130},
    {"block_size": 16, "num_kv_blocks": 9},
    {"enable_prefix_caching": False},
    {"max_num_batched_tokens": 5},
    {"max_num_batched_tokens": 1, "max_num_seqs": 1},  # prompts go through the graph of one token, too
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_bytes_pages_and_endings_are_those_of_steps_that_wait(
    small_checkpoint: Checkpoint, schedule: dict[str, Any], seed: int
) -> None:
    made = requests(seed)
    settings = {**SETTINGS, **schedule}
    with LLM(small_checkpoint, **settings) as llm:
        expected = run(llm, made)
    with LLM(small_checkpoint, **settings) as llm:
        graphs = with_late_graphs(llm)
        for _ in range(2):  # the second time over a warm prefix cache
            found = run(llm, made)
            assert found.keys() == expected.keys()
            for key, output in found.items():
                assert output.token_ids == expected[key].token_ids and output.text == expected[key].text
                assert output.finish_reason == expected[key].finish_reason
                assert_bitwise_equal(output.logprobs, expected[key].logprobs)
            assert llm.block_manager.num_free_blocks == llm.num_kv_blocks
        few_at_once = schedule.get("max_num_batched_tokens") == 5
        assert graphs.ahead > 0 or few_at_once, "no step was launched ahead: this test shows nothing"


def test_tokens_that_became_known_late_are_in_the_prefix_cache(small_checkpoint: Checkpoint) -> None:
    """A prompt that goes on where an answer ended finds the answer's pages, too."""
    cached = []
    for late in (False, True):
        with LLM(small_checkpoint, **{**SETTINGS, "block_size": 4}) as llm:
            if late:
                with_late_graphs(llm)
            (answer,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=30, ignore_eos=True))
            assert (llm.stats.num_steps_ahead > 0) == late
            llm.generate([[5, 6, 7, *answer.token_ids, 9]], SamplingParams(max_tokens=1))
            cached.append(llm.stats.num_cached_tokens)
    assert cached[0] == cached[1] == 32  # all but the last token, whose KV nobody needed


def test_no_step_is_launched_beyond_a_sequences_last_token(small_checkpoint: Checkpoint) -> None:
    """Ends by number, max_tokens or max_model_len, are known before the tokens are."""
    for settings, params in (({}, {"max_tokens": 20}), ({"max_model_len": 24}, {"max_tokens": 500})):
        computed = []
        for late in (False, True):
            with LLM(small_checkpoint, **{**SETTINGS, **settings}) as llm:
                if late:
                    with_late_graphs(llm)
                llm.generate([[5, 6, 7], [9]], SamplingParams(ignore_eos=True, **params))
                assert (llm.stats.num_steps_ahead > 0) == late
                computed.append((llm.stats.num_computed_tokens, llm.stats.num_steps))
        assert computed[0] == computed[1]


def test_an_iterator_whose_last_answer_was_taken_ends_though_the_engine_is_closed(small_checkpoint: Checkpoint) -> None:
    with LLM(small_checkpoint, **SETTINGS) as llm:
        (answer,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=9, ignore_eos=True))
        with_late_graphs(llm)
        stop = SamplingParams(max_tokens=9, ignore_eos=False, stop_token_ids=(answer.token_ids[4],))
        iterator = llm.run([GenerateRequest(0, [5, 6, 7], stop)])
        assert next(iterator).finish_reason == "stop" and llm._in_flight is not None
        llm.close()
        assert list(iterator) == []


def test_who_waits_is_admitted_when_somebody_ends(small_checkpoint: Checkpoint) -> None:
    """Of prompts that share their pages one more fits whenever another ends, though the pool has few free pages."""
    shared = [7 * i % 900 + 3 for i in range(64)]
    made = [[*shared, 11 + i] for i in range(12)]
    with LLM(small_checkpoint, **{**SETTINGS, "num_kv_blocks": 4 + 6}) as llm:
        (first,) = llm.generate([made[0]], SamplingParams(max_tokens=12, ignore_eos=True))
        expected = llm.generate(made, SamplingParams(max_tokens=12, stop_token_ids=tuple(first.token_ids[5:])))
        waiting_steps = llm.stats.num_steps
        llm.reconfigure()
        with_late_graphs(llm)
        llm.generate([made[0]], SamplingParams(max_tokens=12, ignore_eos=True))
        found = llm.generate(made, SamplingParams(max_tokens=12, stop_token_ids=tuple(first.token_ids[5:])))
        assert [o.token_ids for o in found] == [o.token_ids for o in expected]
        assert llm.stats.num_steps <= waiting_steps + len(made)  # a step in vain for each that ends


def with_late_graphs(llm: LLM) -> LateGraphs:
    assert llm.runner is not None
    graphs: Any = LateGraphs(llm.runner)
    llm.runner.graphs = graphs
    return graphs  # type: ignore[no-any-return]


def test_what_is_left_behind_by_an_abandoned_run_harms_no_other(small_checkpoint: Checkpoint) -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    with LLM(small_checkpoint, **SETTINGS) as llm:
        expected = llm.generate([[5, 6, 7], [9]], params)
        with_late_graphs(llm)
        for steps in range(1, 6):
            iterator = llm.run([GenerateRequest(0, [5, 6, 7], SamplingParams(max_tokens=steps, ignore_eos=True)),
                                GenerateRequest(1, [9], params)])  # fmt: skip
            next(iterator)
            assert llm._in_flight is not None or steps == 1
            iterator.close()  # type: ignore[attr-defined]
            check(llm)
            for one, other in zip(llm.generate([[5, 6, 7], [9]], params), expected, strict=True):
                assert one.token_ids == other.token_ids
                assert_bitwise_equal(one.logprobs, other.logprobs)


def test_a_sequence_that_is_not_finite_fails_alone(small_checkpoint: Checkpoint) -> None:
    """Its NaN token is fed to the step that was launched ahead; the others go on."""
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    with LLM(small_checkpoint, **SETTINGS) as llm:
        expected = llm.generate([[9, 10]], params)[0]
        graphs = with_late_graphs(llm)
        real, calls = graphs.run, []

        def broken(chunks: Sequence[Chunk]) -> Any:
            decoded = real(chunks)
            if decoded is not None:
                calls.append(len(chunks))
                if len(calls) == 4:
                    decoded.greedy.tokens[0] = (1024, float("nan"))
            return decoded

        graphs.run = broken
        made = [GenerateRequest(0, [5, 6], params), GenerateRequest(1, [9, 10], params)]
        outputs = {output.request_id: output for output in llm.run(made)}
        assert "not a finite number" in (outputs[0].error or "") and len(outputs[0].token_ids) < 12
        assert outputs[1].error is None and outputs[1].token_ids == expected.token_ids
        assert_bitwise_equal(outputs[1].logprobs, expected.logprobs)
