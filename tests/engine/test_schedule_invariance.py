"""No axis of the schedule changes a bit of the exact level; the fast level shows that the tests can see one.

A request's reference is itself alone, in one chunk, without a prefix cache. Everything compares float32 bytes.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evalengine import LLM, SamplingParams
from evalengine.engine.load.loader import Checkpoint
from evalengine.engine.request import GenerateRequest, Request, RequestOutput, ScoreRequest
from evalengine.integrations.ray.work import cost


@dataclass(frozen=True)
class Schedule:
    """One way to run the same requests."""

    block_size: int = 16
    num_kv_blocks: int = 256
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 4096
    enable_prefix_caching: bool = True
    num_threads: int = 1
    order: int = 0  # The requests are shuffled by this seed.
    nan_pool: bool = True
    preempts: bool = False  # Whether a sequence must be preempted.


ALONE = Schedule(block_size=64, num_kv_blocks=64, max_num_seqs=1, enable_prefix_caching=False, nan_pool=False)


def mixed_requests(seed: int, count: int = 9) -> list[Request]:
    """Generations (greedy and sampled), choices with a shared context, and long scores that cross page borders."""
    rng = random.Random(seed)
    shared = [rng.randrange(1, 1000) for _ in range(rng.choice([15, 16, 17, 37]))]
    requests: list[Request] = []
    for i in range(count):
        suffix = [rng.randrange(1, 1000) for _ in range(rng.choice([1, 2, 7, 31, 64, 65, 130]))]
        prompt = shared + suffix if rng.random() < 0.5 else suffix
        if i % 3 == 0:
            temperature = rng.choice([0.0, 0.0, 0.8])
            requests.append(
                GenerateRequest(
                    i,
                    prompt,
                    SamplingParams(
                        max_tokens=rng.choice([1, 5, 12]),
                        temperature=temperature,
                        top_p=0.9,
                        ignore_eos=True,
                        logprobs=i % 2,
                    ),
                )
            )
        else:
            continuation = [rng.randrange(1, 1000) for _ in range(rng.choice([1, 2, 5, 33]))]
            requests.append(ScoreRequest(i, shared if rng.random() < 0.5 else prompt, continuation))
    return requests


def run(
    checkpoint: Checkpoint, requests: list[Request], schedule: Schedule, **mode: object
) -> dict[int, RequestOutput]:
    """The outputs of the requests by id, run under the schedule; the pool's pages must all be free at the end."""
    order = list(requests)
    random.Random(schedule.order).shuffle(order)
    engine = {name: value for name, value in asdict(schedule).items() if name not in ("order", "nan_pool", "preempts")}
    with LLM(checkpoint, **engine, **mode) as llm:
        llm.runner.fill_pool(float("nan") if schedule.nan_pool else 0.0)
        outputs = {o.request_id: o for o in llm.run(order)}
        llm.block_manager.check([])
        assert llm.stats.num_preemptions > 0 or not schedule.preempts, "no sequence was preempted"
    return outputs


def one_by_one(checkpoint: Checkpoint, requests: list[Request], **mode: object) -> dict[int, RequestOutput]:
    """The output of every request run alone, its prompt in one chunk, with no prefix cache."""
    with LLM(checkpoint, block_size=64, num_kv_blocks=16, max_num_seqs=1, enable_prefix_caching=False, **mode) as llm:
        return {r.request_id: next(iter(llm.run([r]))) for r in requests}


def differing(left: dict[int, RequestOutput], right: dict[int, RequestOutput]) -> list[int]:
    """Requests whose tokens or logprob bytes differ."""
    assert left.keys() == right.keys()
    return [
        i
        for i in left
        if left[i].token_ids != right[i].token_ids or left[i].logprobs.tobytes() != right[i].logprobs.tobytes()
    ]


schedules = st.builds(
    Schedule,
    block_size=st.sampled_from([1, 3, 16, 64, 256]),
    num_kv_blocks=st.just(0),  # The test sets a pool just large enough, or roomy.
    max_num_seqs=st.sampled_from([1, 2, 5, 64]),
    max_num_batched_tokens=st.sampled_from([11, 64, 4096]),
    enable_prefix_caching=st.booleans(),
    num_threads=st.sampled_from([1, 2]),
    order=st.integers(0, 100),
    nan_pool=st.booleans(),
)


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(schedule=schedules, tight=st.booleans(), seed=st.integers(0, 3))
def test_exact_bits_do_not_depend_on_the_schedule(small_checkpoint, schedule, tight, seed):
    requests = mixed_requests(seed)
    longest = max(cost(r) for r in requests)
    pages = -(-longest // schedule.block_size) + (2 if tight else 400 // schedule.block_size + 8)
    schedule = Schedule(**{**vars(schedule), "num_kv_blocks": pages})
    expected = _references(small_checkpoint, seed, requests)
    outputs = run(small_checkpoint, requests, schedule, batch_invariant=True)
    assert not differing(outputs, expected), schedule


_cache: dict[int, dict[int, RequestOutput]] = {}


def _references(checkpoint: Checkpoint, seed: int, requests: list[Request]) -> dict[int, RequestOutput]:
    """The outputs of requests run one by one, made once for a seed."""
    if seed not in _cache:
        _cache[seed] = one_by_one(checkpoint, requests, batch_invariant=True)
    return _cache[seed]


def test_one_token_a_step_changes_nothing(small_checkpoint):
    requests = mixed_requests(1, 3)
    outputs = run(small_checkpoint, requests, Schedule(max_num_batched_tokens=1), batch_invariant=True)
    assert not differing(outputs, one_by_one(small_checkpoint, requests, batch_invariant=True))


def test_the_inverse_fast_float32_does_depend_on_it(small_checkpoint):
    """The same comparison finds differing logprobs in the ordinary mode, or it proves nothing."""
    mode = {"batch_invariant": False, "dtype": "float32"}
    requests = mixed_requests(0, 24)
    expected = one_by_one(small_checkpoint, requests, **mode)
    outputs = run(small_checkpoint, requests, Schedule(max_num_batched_tokens=37, num_threads=2), **mode)
    assert differing(outputs, expected)


def test_generated_tokens_score_the_same_bits(small_checkpoint):
    """Decode against prefill: generated tokens have the logprobs that scoring them gives."""
    prompts = [r for r in mixed_requests(1, 24) if isinstance(r, GenerateRequest)]
    outputs = run(small_checkpoint, prompts, Schedule(), batch_invariant=True)
    scores: list[Request] = [ScoreRequest(i, o.prompt_ids, o.token_ids) for i, o in outputs.items()]
    scored = run(small_checkpoint, scores, Schedule(max_num_batched_tokens=29), batch_invariant=True)
    assert not differing(scored, outputs)


def test_preemption_really_happens_and_changes_nothing(small_checkpoint):
    requests: list[Request] = [
        GenerateRequest(i, [i + 1] * 20, SamplingParams(max_tokens=30, ignore_eos=True)) for i in range(6)
    ]
    with LLM(small_checkpoint, block_size=4, num_kv_blocks=30, max_num_seqs=6) as llm:
        tight = {o.request_id: o for o in llm.run(requests)}
        assert llm.stats.num_preemptions > 3
    assert not differing(tight, one_by_one(small_checkpoint, requests, batch_invariant=True))


def test_a_warm_prefix_cache_changes_nothing(small_checkpoint):
    requests = mixed_requests(2)
    with LLM(small_checkpoint, block_size=16, num_kv_blocks=256) as llm:
        cold = {o.request_id: o for o in llm.run(requests)}
        cached = llm.stats.num_cached_tokens
        warm = {o.request_id: o for o in llm.run(requests)}
        assert llm.stats.num_cached_tokens > cached
    assert not differing(cold, warm)


def test_the_number_of_logprobs_asked_for_changes_none(small_checkpoint):
    prompt = list(range(1, 40))
    outs = []
    for n in (0, 1, 20):
        request = GenerateRequest(0, prompt, SamplingParams(max_tokens=6, ignore_eos=True, logprobs=n))
        outs.append(run(small_checkpoint, [request], ALONE, batch_invariant=True))
    assert not differing(outs[0], outs[1]) and not differing(outs[0], outs[2])


def test_an_unrelated_long_neighbour_changes_nothing(small_checkpoint):
    """Tiles picked from the batch's longest query, in other engines, change an unrelated row."""
    probe = ScoreRequest(0, list(range(1, 10)), [5, 6, 7])
    alone = run(small_checkpoint, [probe], ALONE, batch_invariant=True)
    for length in (1, 63, 64, 65, 257, 400):
        neighbour = ScoreRequest(1, [3] * length, [4])
        outputs = run(small_checkpoint, [probe, neighbour], Schedule(), batch_invariant=True)
        assert outputs[0].logprobs.tobytes() == alone[0].logprobs.tobytes(), length


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_change_nothing(small_checkpoint, threads):
    requests = mixed_requests(3, 6)
    outputs = run(small_checkpoint, requests, Schedule(num_threads=threads), batch_invariant=True)
    assert not differing(outputs, one_by_one(small_checkpoint, requests, batch_invariant=True))
    assert all(np.isfinite(o.logprobs).all() for o in outputs.values())
