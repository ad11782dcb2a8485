"""Random requests and schedules over mixtures of experts whose routers have planted ties: prefix hits, chunk borders
and preemptions change no bit; of `fast` numerics, which promise none, they do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evalengine import LLM
from evalengine.engine.load.loader import Checkpoint
from evalengine.engine.request import GenerateRequest, Request, RequestOutput, SamplingParams, ScoreRequest
from evalengine.engine.stats import EngineStats
from evalengine.errors import ConfigError
from tests.engine.test_mixtures import edited, with_ties
from tests.engine.test_schedule_invariance import differing, one_by_one
from tests.fuzz.cases import Case, cases
from tests.parity.families import make

FAMILIES = ("qwen3-moe", "gpt-oss", "mixtral", "deepseek-v3", "ernie-moe", "glm4-moe")
LONGEST = 96
Outputs = dict[int, RequestOutput]


def random_requests(case: Case) -> list[Request]:
    """Several on a common beginning, and some without; generations, greedy and sampled, and scores."""
    common = [case.randrange(3, 200) for _ in range(case.choice([7, 16, 33, 48]))]
    made: list[Request] = []
    for i in range(case.randint(4, 7)):
        own = [case.randrange(3, 200) for _ in range(case.choice([1, 2, 9, 17, 30]))]
        prompt = common + own if case.random() < 0.7 else own
        if case.random() < 0.6:
            heat, length = case.choice([0.0, 0.9]), case.choice([1, 3, 8])
            params = SamplingParams(max_tokens=length, temperature=heat, ignore_eos=True)
            made.append(GenerateRequest(i, prompt, params))
        else:
            made.append(ScoreRequest(i, prompt, [case.randrange(3, 200) for _ in range(case.choice([1, 4, 8]))]))
    return made


def random_schedule(case: Case) -> dict[str, Any]:
    block = case.choice([1, 3, 7, 16, 64])
    return {
        "block_size": block,
        "num_kv_blocks": case.choice([1, 1, 8]) * (-(-LONGEST // block) + 1),  # few: sequences are preempted
        "max_num_seqs": case.choice([2, 3, 64]),
        "max_num_batched_tokens": case.choice([5, 11, 64, 4096]),
        "enable_prefix_caching": case.random() < 0.8,
    }


def crowd(case: Case) -> tuple[list[Request], dict[str, Any]]:
    """Generations that grow out of a pool in which they began together."""
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    requests = [GenerateRequest(i, [case.randrange(3, 200) for _ in range(9)], params) for i in range(5)]
    pool = {"block_size": 7, "num_kv_blocks": -(-LONGEST // 7) + 1, "enable_prefix_caching": True}
    return [*requests], {**pool, "max_num_seqs": 64, "max_num_batched_tokens": 11}


def outputs_of(
    checkpoint: Checkpoint, requests: Iterable[Request], schedule: dict[str, Any], **mode: Any
) -> tuple[Outputs, EngineStats]:
    """Two passes over the requests, of which the second may find its prefixes, in a pool that was full of NaN."""
    try:
        llm = LLM(checkpoint, max_model_len=LONGEST, **schedule, **mode)
    except ConfigError:  # layers of several kinds: a pool in which one sequence does not fit
        return outputs_of(checkpoint, requests, {**schedule, "num_kv_blocks": 2 * schedule["num_kv_blocks"]}, **mode)
    with llm:
        llm.runner.fill_pool(float("nan"))
        found = {output.request_id: output for output in llm.run(requests)}
        again = {output.request_id: output for output in llm.run(requests)}
        assert not differing(again, found) or not mode["batch_invariant"], "a second pass gives other bytes"
        llm.block_manager.check([])
        return found, replace(llm.stats)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    made: dict[str, Checkpoint] = {}
    for name in FAMILIES:
        path: Path = tmp_path_factory.mktemp(name)
        make(name, path)
        made[name] = edited(path, with_ties)
    return made


def test_no_schedule_changes_a_bit_of_a_mixture(folders: dict[str, Checkpoint]) -> None:
    happened = EngineStats()
    for case in cases("mixtures", 10):
        name, requests, schedule = case.choice(FAMILIES), random_requests(case), random_schedule(case)
        if not happened.num_steps:
            name, (requests, schedule) = "qwen3-moe", crowd(case)
        with case.named((name, schedule)):
            expected = one_by_one(folders[name], requests, batch_invariant=True, max_model_len=LONGEST)
            case.shuffle(requests)
            found, stats = outputs_of(folders[name], requests, schedule, batch_invariant=True)
            assert not differing(found, expected)
            happened = happened.plus(stats)
    assert happened.num_cached_tokens > 0 and happened.num_preemptions > 0


def test_fast_numerics_show_what_would_be_seen(folders: dict[str, Checkpoint]) -> None:
    """The control: the same comparison finds other bytes where nothing is promised."""
    parts = 0
    for case in cases("mixtures, fast", 5):
        name, requests, schedule = case.choice(FAMILIES), random_requests(case), random_schedule(case)
        mode = {"batch_invariant": False, "dtype": "bfloat16"}
        alone = one_by_one(folders[name], requests, max_model_len=LONGEST, **mode)
        parts += len(differing(outputs_of(folders[name], requests, schedule, **mode)[0], alone))
    assert parts > 0
