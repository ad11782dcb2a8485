"""What `LLM` computes in fast mode (float32): what stops a generation, what is scored, what is sampled."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from evalengine import LLM, SamplingParams
from evalengine.engine.request import GenerateRequest, Request, ScoreRequest
from evalengine.errors import ConfigError

PROMPTS = [[5, 6, 7], [8], list(range(40, 77)), [9, 9, 9, 9]]


def reference_logprobs(llm: LLM, ids: list[int]) -> torch.Tensor:
    """float32 [len(ids), V]: the log-probabilities at every position, from one request for each position."""
    rows = []
    for end in range(1, len(ids) + 1):
        out = llm.generate([ids[:end]], SamplingParams(max_tokens=1, logprobs=llm.spec.vocab_size, ignore_eos=True))
        row = torch.zeros(llm.spec.vocab_size)
        for token, value in out[0].top_logprobs[0].items():
            row[token] = value
        rows.append(row)
    return torch.stack(rows)


def test_greedy_takes_the_most_probable_token_and_reports_its_logprob(llm):
    (out,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=5, ignore_eos=True, logprobs=3))
    assert len(out.token_ids) == len(out.logprobs) == len(out.top_logprobs) == 5
    rows = reference_logprobs(llm, [5, 6, 7, *out.token_ids[:-1]])[2:]
    assert out.token_ids == rows.argmax(-1).tolist()
    np.testing.assert_allclose(out.logprobs, rows.amax(-1).numpy(), atol=1e-5)
    for token, top in zip(out.token_ids, out.top_logprobs, strict=True):
        assert next(iter(top)) == token and len(top) == 3
        assert list(top.values()) == sorted(top.values(), reverse=True)
    assert out.is_greedy and out.finish_reason == "length" and out.logprobs.dtype == np.float32


def test_score_equals_the_model_run_token_by_token(llm):
    context, continuation = [5, 6, 7], [1, 2, 3, 4]
    rows = reference_logprobs(llm, context + continuation[:-1])[2:]
    expected = [rows[i, t].item() for i, t in enumerate(continuation)]
    (out,) = llm.score([(context, continuation)])
    np.testing.assert_allclose(out.logprobs, expected, atol=1e-5)
    assert out.sum_logprob == math.fsum(out.logprobs.tolist())
    assert not out.is_greedy
    greedy = llm.generate([context], SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids
    assert llm.score([(context, greedy)])[0].is_greedy


@pytest.mark.parametrize("caching", [True, False])
def test_choices_that_share_a_context_score_like_separate_requests(make_llm, caching):
    llm = make_llm(batch_invariant=False, dtype="float32", enable_prefix_caching=caching)
    context = list(range(30, 63))
    pairs = [(context, c) for c in ([1], [2], [1, 5, 9], [2], [7, 7], list(range(20)))]
    together = llm.score(pairs)
    for pair, out in zip(pairs, together, strict=True):
        (alone,) = llm.score([pair])
        np.testing.assert_allclose(out.logprobs, alone.logprobs, atol=1e-5)
        assert out.token_ids == pair[1] and out.is_greedy == alone.is_greedy


def test_score_rolling_scores_every_token_once(make_llm):
    llm = make_llm(batch_invariant=False, dtype="float32", max_model_len=32)
    text = list(range(100, 180))
    (windows,) = llm.score_rolling([text])
    assert [t for w in windows for t in w.token_ids] == text
    assert [len(w.token_ids) for w in windows] == [32, 32, 16]
    assert all(len(w.prompt_ids) + len(w.token_ids) - 1 <= 32 for w in windows)
    assert len(windows[-1].prompt_ids) == 17  # The last window keeps a full-size context.
    assert llm.score_rolling([[]]) == [[]]


def test_all_shapes_run_in_one_batch(llm):
    """A generation, a score of two tokens and a score of one run in one batch."""
    requests = [
        GenerateRequest(7, [5, 6], SamplingParams(max_tokens=6, ignore_eos=True)),
        ScoreRequest(3, [5, 6], [1, 2]),
        ScoreRequest(9, [4], [2]),
    ]
    outputs = {o.request_id: o for o in llm.run(requests)}
    assert set(outputs) == {3, 7, 9}
    np.testing.assert_allclose(outputs[3].logprobs, llm.score([([5, 6], [1, 2])])[0].logprobs, atol=1e-5)


def test_stop_string_ends_generation_and_is_cut(llm):
    free = llm.generate(["Question: a"], SamplingParams(max_tokens=12, ignore_eos=True))[0]
    tokenizer = llm.tokenizer
    stop = tokenizer.decode(free.token_ids[3:5])
    assert stop
    (out,) = llm.generate(["Question: a"], SamplingParams(max_tokens=12, ignore_eos=True, stop=(stop,)))
    assert out.finish_reason == "stop" and len(out.token_ids) <= 5
    assert stop in tokenizer.decode(out.token_ids) and stop not in tokenizer.decode(out.token_ids[:-1])
    assert out.text == tokenizer.decode(free.token_ids).split(stop)[0]
    assert len(out.logprobs) == len(out.token_ids)


def test_end_of_sequence_and_stop_token_ids(llm):
    """A stop token id ends a generation, unless `ignore_eos` is set."""
    free = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=6, ignore_eos=True))[0]
    stop_id = free.token_ids[0]
    (out,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=6, stop_token_ids=(stop_id,)))
    assert out.token_ids == [stop_id] and out.finish_reason == "stop"
    (out,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=6, stop_token_ids=(stop_id,), ignore_eos=True))
    assert out.finish_reason == "length" and len(out.token_ids) == 6


def test_generation_ends_at_max_model_len(make_llm):
    llm = make_llm(batch_invariant=False, dtype="float32", max_model_len=20)
    (out,) = llm.generate([list(range(15))], SamplingParams(max_tokens=100, ignore_eos=True))
    assert len(out.token_ids) == 5 and out.finish_reason == "length"


def test_sampling_depends_on_seed_and_key_alone(llm):
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=3, ignore_eos=True)
    first = [o.token_ids for o in llm.generate(PROMPTS, params)]
    reordered = [o.token_ids for o in llm.generate(list(reversed(PROMPTS)), params)][::-1]
    assert first == reordered
    assert [
        o.token_ids
        for o in llm.generate(PROMPTS, SamplingParams(max_tokens=8, temperature=1.0, seed=4, ignore_eos=True))
    ] != first
    keyed = [SamplingParams(max_tokens=8, temperature=1.0, noise_key=str(i), ignore_eos=True) for i in range(4)]
    assert len({tuple(o.token_ids) for o in llm.generate([[5, 6, 7]] * 4, keyed)}) == 4


def test_sampled_tokens_report_their_untempered_logprob(llm):
    (out,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4, temperature=2.0, ignore_eos=True))
    (scored,) = llm.score([([5, 6, 7], out.token_ids)])
    np.testing.assert_allclose(out.logprobs, scored.logprobs, atol=1e-5)


def test_noise_changes_from_position_to_position(llm):
    (out,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=8, temperature=1e3, ignore_eos=True))
    assert len(set(out.token_ids)) > 4  # At this temperature all 1024 tokens are nearly as probable.


def test_many_wanted_rows_go_through_lm_head_in_slices(llm):
    pair = (list(range(1, 20)), list(range(30, 41)))
    unsliced = llm.score([pair])[0].logprobs
    llm.runner.read_out.rows_per_slice = 2
    np.testing.assert_allclose(llm.score([pair])[0].logprobs, unsliced, atol=1e-5)


def test_one_token_that_is_not_greedy_is_enough(llm):
    """`is_greedy` is False if any token, also the first, is not the most probable one."""
    greedy = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=1, ignore_eos=True))[0].token_ids[0]
    wrong = (greedy + 1) % 1000
    greedy_rest = llm.generate([[5, 6, 7, wrong]], SamplingParams(max_tokens=2, ignore_eos=True))[0].token_ids
    assert not llm.score([([5, 6, 7], [wrong, *greedy_rest])])[0].is_greedy
    assert llm.score([([5, 6, 7, wrong], greedy_rest)])[0].is_greedy
    for seed in range(40):  # Some seed samples a first token that is not greedy and a last one that is.
        params = SamplingParams(max_tokens=2, temperature=1.0, top_k=2, seed=seed, ignore_eos=True, logprobs=1)
        (out,) = llm.generate([[5, 6, 7]], params)
        is_best = [token in top for token, top in zip(out.token_ids, out.top_logprobs, strict=True)]
        if is_best == [False, True]:
            assert not out.is_greedy
            return
    pytest.fail("no seed gave the sample that the test needs")


def test_each_request_gets_the_number_of_alternatives_it_asked_for(llm):
    requests = [ScoreRequest(n, [5, 6, 7], [1 + n], logprobs=n) for n in range(4)]
    outputs = {o.request_id: o for o in llm.run(requests)}
    assert outputs[0].top_logprobs is None
    assert [len(outputs[n].top_logprobs[0]) for n in (1, 2, 3)] == [1, 2, 3]


def test_a_stop_on_the_last_allowed_token_is_a_stop(llm):
    free = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=1, ignore_eos=True))[0]
    params = SamplingParams(max_tokens=1, stop_token_ids=tuple(free.token_ids))
    assert llm.generate([[5, 6, 7]], params)[0].finish_reason == "stop"


def test_requests_join_those_that_run(make_llm: Callable[..., LLM]) -> None:
    """Requests that `more` adds are answered as if present from the beginning; `more` is called last when all outputs
    are taken."""
    requests = [GenerateRequest(i, [5 + i, 6, 7], SamplingParams(max_tokens=3 + i)) for i in range(6)]
    together = {out.request_id: out for out in make_llm().run(requests)}
    later, taken_at_calls, outputs = [*requests[2:]], [], []

    def more() -> list[Request]:
        taken_at_calls.append(len(outputs))
        return [later.pop()] if later else []

    for output in make_llm(max_num_seqs=2).run(requests[:2], more=more):
        outputs.append(output)
    assert len(outputs) == 6 and taken_at_calls[-1] == 6
    for output in outputs:
        expected = together[output.request_id]
        assert output.token_ids == expected.token_ids and output.logprobs.tobytes() == expected.logprobs.tobytes()
    with pytest.raises(ConfigError, match="token ids must be in"):
        list(make_llm().run(requests[:1], more=lambda: [GenerateRequest(9, [10**6])]))


def test_decodes_stand_before_prompts_and_the_longest_first(make_llm):
    """The order in which kernels get the sequences of a step; results go to whom they belong to all the same."""
    llm = make_llm(batch_invariant=True, numerics="exact", max_num_batched_tokens=40)
    steps: list[list[tuple[int, int]]] = []
    llm.runner.on_batch = lambda schedule: steps.append([(c.end - c.start, c.end) for c in schedule.chunks])
    prompts = [list(range(3, 3 + length)) for length in (5, 21, 2, 33, 13, 17)]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    together = llm.generate(prompts, params)
    llm.runner.on_batch = None
    for step in steps:
        decodes = [end for count, end in step if count == 1]
        assert decodes == sorted(decodes, reverse=True)
        assert [count > 1 for count, _ in step] == sorted(count > 1 for count, _ in step)
    assert any(step[0][0] == 1 < step[-1][0] for step in steps), "no step mixes them"
    for prompt, out in zip(prompts, together, strict=True):
        (alone,) = llm.generate([prompt], params)
        assert alone.token_ids == out.token_ids and alone.logprobs.tobytes() == out.logprobs.tobytes()
