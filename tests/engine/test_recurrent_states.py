"""Recurrent layers' states: shared at the ends of prefixes, begun with zeros, never behind a wrong guess."""

from __future__ import annotations

from pathlib import Path

import pytest

from evalengine import LLM, SamplingParams
from evalengine.engine.load.loader import Checkpoint
from evalengine.engine.request import GenerateRequest, Request, RequestOutput, ScoreRequest
from evalengine.errors import ConfigError
from tests.engine.test_schedule_invariance import differing, one_by_one
from tests.parity.families import VOCAB, make
from tests.parity.random_models import without_tokenizer

COMMON = [3 + (5 * j + j * j) % (VOCAB - 3) for j in range(45)]
GREEDY = SamplingParams(max_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module", params=["qwen3.5", "lfm2", "granite-hybrid"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder: Path = tmp_path_factory.mktemp("model")
    make(request.param, folder)
    return without_tokenizer(folder)


def prompt(number: int, tokens: int) -> list[int]:
    return [3 + (7 * number + 11 * j) % (VOCAB - 3) for j in range(tokens)]


def requests() -> list[Request]:
    """Six sequences on one prefix, three of which share more of it; and one of its own."""
    shared = [GenerateRequest(i, COMMON + prompt(0, 9) * (i % 2) + prompt(i, 2 + i), GREEDY) for i in range(6)]
    return [*shared, ScoreRequest(6, COMMON, prompt(6, 4)), GenerateRequest(7, prompt(7, 30), GREEDY)]


def run(checkpoint: Checkpoint, **settings: int) -> tuple[dict[int, RequestOutput], int, int]:
    """The outputs, how many tokens were found in the cache, and how many sequences were preempted."""
    with LLM(checkpoint, batch_invariant=True, max_model_len=96, **settings) as llm:
        assert llm.runner is not None
        llm.runner.fill_pool(float("nan"))
        outputs = {output.request_id: output for output in llm.run(requests())}
        return outputs, llm.stats.num_cached_tokens, llm.stats.num_preemptions


@pytest.fixture(scope="module")
def expected(checkpoint: Checkpoint) -> dict[int, RequestOutput]:
    return one_by_one(checkpoint, requests(), batch_invariant=True, max_model_len=96)


@pytest.mark.parametrize(("block_size", "max_num_batched_tokens"), [(1, 64), (4, 13), (16, 64), (16, 7), (44, 200)])
def test_followers_begin_at_the_end_of_their_prefix(
    checkpoint: Checkpoint, expected: dict[int, RequestOutput], block_size: int, max_num_batched_tokens: int
) -> None:
    outputs, cached, _ = run(checkpoint, block_size=block_size, max_num_batched_tokens=max_num_batched_tokens)
    assert not differing(outputs, expected)
    assert cached >= 3 * (len(COMMON) // block_size * block_size), "hardly any state was found again"


def test_a_preempted_sequence_is_computed_again(checkpoint: Checkpoint, expected: dict[int, RequestOutput]) -> None:
    outputs, _, preempted = run(checkpoint, block_size=8, num_kv_blocks=16)
    assert not differing(outputs, expected) and preempted


def test_another_state_is_seen(checkpoint: Checkpoint, expected: dict[int, RequestOutput]) -> None:
    """The control: copies that hold another sequence's state change what follows."""
    with LLM(checkpoint, batch_invariant=True, max_model_len=96, block_size=16) as llm:
        runner = llm.runner
        assert runner is not None
        copy = runner.copy_states
        runner.copy_states = lambda copies: copy([(0 if source >= 256 else source, to) for source, to in copies])
        list(llm.run(requests()[7:]))  # leaves a state in a slot
        outputs = {output.request_id: output for output in llm.run(requests())}
    assert differing(outputs, expected)


def test_nothing_is_guessed(checkpoint: Checkpoint) -> None:
    """A state cannot go back behind a wrong guess."""
    with LLM(checkpoint, batch_invariant=True, max_model_len=96, speculation="always") as llm:
        assert llm.scheduler.drafter is None


def test_two_ranks_are_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(
        ConfigError, match=r"tensor_parallel_size=2: 2 ranks cannot share this model's recurrent layers"
    ):
        LLM(checkpoint, batch_invariant=True, max_model_len=96, tensor_parallel_size=2)
