"""Logits processors: what they choose is what their definition says, and no schedule changes it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch

from evalengine import LLM, SamplingParams
from evalengine.engine.execute.processing import NOTHING_LEFT, Processing, forbid, penalise
from evalengine.engine.load.loader import Checkpoint
from evalengine.engine.request import GenerateRequest, Request, ScoreRequest
from evalengine.errors import ConfigError
from evalengine.models.processors import LogitsProcessors, RequestProcessors, of_plain
from tests.engine.test_schedule_invariance import ALONE, Schedule, differing, one_by_one, run

CHOICES = (
    LogitsProcessors(repetition_penalty=1.3),
    RequestProcessors(
        0.7, suppress_tokens=tuple(range(1000)), logit_bias=((1009, 4), (1005, -3)), frequency_penalty=1.5
    ),
    LogitsProcessors(no_repeat_ngram_size=2, begin_suppress_tokens=tuple(range(500))),
    LogitsProcessors(repetition_penalty=1.1, no_repeat_ngram_size=1, min_new_tokens=4, bad_words_ids=((7,), (8, 9))),
    None,
)


def requests(count: int = 10) -> list[Request]:
    """Generations with and without processors, greedy and sampled, some with a common prefix, among scores."""
    rng = random.Random(5)
    shared = [rng.randrange(1, 1000) for _ in range(33)]
    batch: list[Request] = []
    for i in range(count):
        suffix = [rng.randrange(1, 1000) for _ in range(rng.choice([1, 7, 31, 64]))]
        prompt = shared + suffix if i % 2 else suffix
        if i % 5 == 4:
            batch.append(ScoreRequest(i, prompt, suffix[:3]))
            continue
        params = SamplingParams(
            max_tokens=9,
            temperature=0.8 * (i % 3 == 2),
            top_p=0.9,
            top_k=40 * (i % 4),
            ignore_eos=True,
            processors=CHOICES[i % len(CHOICES)],
        )
        batch.append(GenerateRequest(i, prompt, params))
    return batch


SCHEDULES = {
    "together": Schedule(),
    "chunks of 11": Schedule(max_num_batched_tokens=11, block_size=3, num_kv_blocks=400, order=3),
    "preempted": Schedule(num_kv_blocks=8, block_size=16, enable_prefix_caching=False, order=1),
    "preempted, from the cache": Schedule(num_kv_blocks=8, block_size=16, order=2),
    "three at a time": Schedule(max_num_seqs=3, order=4),
}


@pytest.fixture(scope="module")
def alone(small_checkpoint: Checkpoint) -> dict[int, Any]:
    """Each request's output when it runs by itself in `exact`."""
    return one_by_one(small_checkpoint, requests(), batch_invariant=True)


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_schedule_changes_a_bit(small_checkpoint: Checkpoint, alone: dict[int, Any], name: str) -> None:
    outputs = run(small_checkpoint, requests(), SCHEDULES[name], batch_invariant=True)
    assert not differing(outputs, alone)


def test_the_comparison_can_fail(small_checkpoint: Checkpoint, alone: dict[int, Any]) -> None:
    """In `fast` a schedule does change bits; and without processors, each kind of request that had some differs."""
    fast = {"batch_invariant": False, "dtype": "bfloat16"}
    outputs, chunked = (
        run(small_checkpoint, requests(), s, **fast) for s in (ALONE, Schedule(max_num_batched_tokens=37))
    )
    assert differing(outputs, chunked)
    plain = [
        replace(r, params=replace(r.params, processors=LogitsProcessors())) if isinstance(r, GenerateRequest) else r
        for r in requests()
    ]
    changed = differing(run(small_checkpoint, plain, Schedule(), batch_invariant=True), alone)
    assert {i % len(CHOICES) for i in changed} == {0, 1, 2, 3}


def test_preemption_happens_in_these_schedules(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(num_kv_blocks=8, block_size=16)
    list(llm.run(requests()))
    assert llm.stats.num_preemptions > 0 and llm.stats.num_cached_tokens > 0


def test_the_logprobs_are_the_raw_models(make_llm: Callable[..., LLM]) -> None:
    """Logprobs, alternatives and `is_greedy` come from the model's logits, before processors change them."""
    llm = make_llm()
    params = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=2, processors=CHOICES[0])
    (output,) = llm.generate([[5, 6, 7]], params)
    (scored,) = llm.score([([5, 6, 7], output.token_ids)], logprobs=2)
    assert output.logprobs.tobytes() == scored.logprobs.tobytes() and output.top_logprobs == scored.top_logprobs
    assert output.is_greedy == scored.is_greedy
    (plain,) = llm.generate([[5, 6, 7]], replace(params, processors=None))
    forbidden = LogitsProcessors(suppress_tokens=(plain.token_ids[0],))
    (output,) = llm.generate([[5, 6, 7]], replace(params, processors=forbidden))
    assert plain.is_greedy and not output.is_greedy, "is_greedy: of the raw model"
    assert output.token_ids[0] == list(plain.top_logprobs[0])[1], "the best that is left"


def test_processors_that_happen_to_do_nothing_change_nothing(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    idle = LogitsProcessors(no_repeat_ngram_size=200, bad_words_ids=((1, 2, 3, 4, 5, 6, 7),), min_length=1)
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_tokens=8, ignore_eos=True, temperature=temperature, top_k=9, top_p=0.8)
        plain = llm.generate([[5, 6, 7], [8]], params)
        with_idle = llm.generate([[5, 6, 7], [8]], replace(params, processors=idle))
        assert [o.token_ids for o in with_idle] == [o.token_ids for o in plain]


def test_forbidden_tokens_are_never_sampled(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    allowed = (17, 400, 401)
    banned = tuple(i for i in range(llm.spec.vocab_size) if i not in allowed)
    for more in ({}, {"top_k": 200}, {"top_p": 0.99}, {"top_k": 2, "top_p": 0.5}):
        params = SamplingParams(
            max_tokens=20, temperature=3.0, ignore_eos=True, processors=LogitsProcessors(suppress_tokens=banned), **more
        )
        (output,) = llm.generate([[5]], params)
        assert set(output.token_ids) <= set(allowed)


def test_a_request_that_may_take_no_token_fails(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    processors = LogitsProcessors(suppress_tokens=tuple(range(llm.spec.vocab_size)))
    outputs = {
        o.request_id: o
        for o in llm.run(
            [
                GenerateRequest(0, [5], SamplingParams(max_tokens=3, processors=processors)),
                GenerateRequest(1, [5], SamplingParams(max_tokens=3, ignore_eos=True)),
            ]
        )
    }
    assert outputs[0].error == NOTHING_LEFT and not outputs[0].token_ids
    assert outputs[1].error is None and len(outputs[1].token_ids) == 3


def test_the_models_own_hold_unless_the_request_has_others(small_checkpoint: Checkpoint) -> None:
    """The processors of the model's checkpoint hold, unless the request has its own."""
    spec = replace(small_checkpoint.spec, processors=CHOICES[0])
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    with LLM(small_checkpoint, num_kv_blocks=64) as llm:
        plain = llm.generate([[5, 6]], params)[0].token_ids
        penalised = llm.generate([[5, 6]], replace(params, processors=CHOICES[0]))[0].token_ids
    with LLM(replace(small_checkpoint, spec=spec), num_kv_blocks=64) as llm:
        assert llm.generate([[5, 6]], params)[0].token_ids == penalised != plain
        assert llm.generate([[5, 6]], replace(params, processors=LogitsProcessors()))[0].token_ids == plain
        with pytest.raises(ConfigError, match="outside the vocabulary"):
            llm.generate([[5]], replace(params, processors=LogitsProcessors(suppress_tokens=(10**6,))))


def test_the_penalty_is_one_ieee_rounding() -> None:
    """The penalty equals float64's quotient or product, rounded once: it is no reciprocal and no fused step."""
    rng = np.random.default_rng(0)
    logits = torch.from_numpy((rng.standard_normal((3, 500)) * 20).astype(np.float32))
    states = [Processing(LogitsProcessors(repetition_penalty=p), (), 1) for p in (1.1, 0.9)]
    tokens = [rng.integers(0, 500, 300).tolist() for _ in states]
    for state, ids in zip(states, tokens, strict=True):
        state.advance(ids[:100])
        state.advance(ids)
    penalised = logits.clone()
    penalise(penalised, [states[0], None, states[1]])
    expected = logits.numpy().copy()
    for row, p, ids in ((0, np.float32(1.1), tokens[0]), (2, np.float32(0.9), tokens[1])):
        for i in set(ids):
            wide = np.float64(expected[row, i])
            expected[row, i] = np.float32(wide * np.float64(p) if wide < 0 else wide / np.float64(p))
    assert penalised.numpy().tobytes() == expected.tobytes()
    by_reciprocal = logits.numpy()[0] * np.float32(1 / 1.1)
    assert (by_reciprocal != logits.numpy()[0] / np.float32(1.1)).any(), "what CUDA would have computed"


def test_biases_and_penalties_are_openais_formula() -> None:
    """logit + bias - (c * frequency + [c > 0] * presence) over generated tokens, in float64, rounded as documented."""
    rng = np.random.default_rng(1)
    logits = (rng.standard_normal((2, 300)) * 9).astype(np.float32)
    bias = {int(i): float(rng.uniform(-100, 100)) for i in rng.integers(0, 300, 40)}
    prompt, output = rng.integers(0, 300, 50).tolist(), rng.integers(0, 60, 90).tolist()
    processors = RequestProcessors(1.1, logit_bias=tuple(bias.items()), presence_penalty=0.7, frequency_penalty=-0.31)
    state = Processing(processors, (), len(prompt))
    state.advance(prompt)
    assert state.terms == bias, "nothing is generated yet"
    state.advance(prompt + output[:30])
    state.advance(prompt + output)
    changed = torch.from_numpy(logits.copy())
    penalise(changed, [None, state])
    assert changed[0].numpy().tobytes() == logits[0].tobytes()
    for token in range(300):
        z, count = logits[1, token], output.count(token)
        if token in prompt + output:
            z = z * np.float32(1.1) if z < 0 else z / np.float32(1.1)
        if token in bias or count:
            z = z + np.float32(bias.get(token, 0.0) - (count * -0.31 + (0.7 if count else 0.0)))
        assert changed[1, token].item() == z


def test_the_plain_values_of_processors_give_them_again() -> None:
    for processors in CHOICES[:4]:
        assert of_plain(json.loads(json.dumps(asdict(processors)))) == processors


@pytest.mark.parametrize("wrong", [
    {"logit_bias": ((5, 101.0),)}, {"logit_bias": ((5, float("nan")),)}, {"logit_bias": ((-1, 1.0),)},
    {"logit_bias": ((5, 1.0), (5, 2.0))}, {"logit_bias": {5: 1.0}}, {"presence_penalty": 2.1},
    {"frequency_penalty": "1"},
])  # fmt: skip
def test_values_that_cannot_be_meant_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        RequestProcessors(**wrong)


def test_state_is_a_function_of_the_tokens_alone() -> None:
    processors = LogitsProcessors(1.2, 3, ((4,), (1, 2)), 9, 0, (6,), (7,))
    rng = random.Random(1)
    tokens = [rng.randrange(4) for _ in range(60)]
    stepwise = Processing(processors, (0,), 5)
    for end in range(5, len(tokens)):
        stepwise.advance(tokens[:end])
        fresh = Processing(processors, (0,), 5)
        fresh.advance(tokens[:end])
        assert stepwise.forbidden == fresh.forbidden and (stepwise.seen == fresh.seen).all()
        followers = {tokens[i + 2] for i in range(end - 2) if tokens[i : i + 2] == tokens[end - 2 : end]}
        expected = {4, 6} | followers | ({0} if end < 9 else set()) | ({7} if end == 5 else set())
        assert stepwise.forbidden == expected | ({2} if tokens[end - 1] == 1 else set())


@pytest.mark.gpu
def test_cpu_and_cuda_give_the_same_bytes() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 5000, generator=generator) * 30
    results = []
    for device in ("cpu", "cuda"):
        more = {"logit_bias": ((7, -1.5),), "frequency_penalty": 0.3}
        states = [Processing(RequestProcessors(1.1 + i, 2, suppress_tokens=(i,), **more), (), 1) for i in range(4)]
        rows = logits.to(device)
        rows = rows.clone()
        for i, state in enumerate(states):
            state.advance(list(range(i, 3000, i + 1)))
        penalise(rows, states)
        forbid(rows, states)
        results.append(rows.cpu().numpy().tobytes())
    assert results[0] == results[1]
