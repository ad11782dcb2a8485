"""The answers that a request can have: every true answer, and none in which one thing is changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from evalengine import LLM
from evalengine.engine.expected import ExpectedAnswer
from evalengine.engine.request import GenerateRequest, Request, RequestOutput, SamplingParams, ScoreRequest

PROMPT = [40, 50, 60]
LONG, SHORT = 24, 6
DRAWN: dict[str, Any] = {"temperature": 1.0, "seed": 3, "ignore_eos": True}


def of(llm: LLM, request: Request) -> ExpectedAnswer:
    return ExpectedAnswer.of(request, llm.spec, llm.settings.max_model_len, llm.tokenizer)


def problem(expected: ExpectedAnswer, output: RequestOutput, **changes: Any) -> str | None:
    return expected.problem(replace(output.answer, **changes))


def answered(llm: LLM, request: Request) -> RequestOutput:
    (output,) = llm.run([request])
    return output


@pytest.fixture
def stopped(llm: LLM) -> tuple[ExpectedAnswer, RequestOutput]:
    """A generation that a stop string ends, and what its request expects."""
    free = answered(llm, GenerateRequest(0, PROMPT, SamplingParams(max_tokens=LONG, **DRAWN)))
    texts = [llm.tokenizer.decode(free.token_ids[:length]) for length in range(LONG)]
    stop = next(b.removeprefix(a) for a, b in pairwise(texts[3:]) if b.removeprefix(a) not in a)
    request = GenerateRequest(0, PROMPT, SamplingParams(max_tokens=LONG, stop=(stop,), **DRAWN))
    answer = answered(llm, request)
    assert answer.finish_reason == "stop" and 1 < len(answer.token_ids) < LONG
    return of(llm, request), answer


@pytest.mark.parametrize("params", [
    {}, {"temperature": 0.9, "seed": 3}, {"logprobs": 3}, {"ignore_eos": True}, {"stop": ("a", "1")},
    {"stop": ("a",), "think_end_token": "e"}, {"stop": ("a",), "think_end_token": 70}, {"stop_token_ids": (71, 72)},
])  # fmt: skip
def test_every_true_answer_can_be(llm: LLM, params: dict[str, Any]) -> None:
    for length in (1, SHORT, LONG):
        for first in range(4):
            request = GenerateRequest(0, [*PROMPT, 80 + first], SamplingParams(max_tokens=length, **params))
            assert problem(of(llm, request), answered(llm, request)) is None


def test_a_generation_ends_where_its_tokens_end_it(stopped: tuple[ExpectedAnswer, RequestOutput]) -> None:
    expected, answer = stopped
    assert problem(expected, answer) is None
    ids, logprobs = answer.token_ids, answer.logprobs
    assert problem(expected, answer, finish_reason="length") == "its finish reason is not that of its output"
    assert problem(expected, answer, output_ids=ids[:-1], logprobs=logprobs[:-1]), "it would have gone on"
    longer = {"output_ids": [*ids, ids[0]], "logprobs": np.append(logprobs, logprobs[:1])}
    assert problem(expected, answer, **longer) == "its finish reason is not that of its output", "it would have ended"
    assert problem(expected, answer, text="1") == "its text is not that of its output ids"


def test_a_generation_as_long_as_its_room_ends_one_way(llm: LLM, stopped: tuple[ExpectedAnswer, RequestOutput]) -> None:
    """At its last token, length and stop string are told apart by the tokens: scores count who ran out of room."""
    _, answer = stopped
    stop = llm.tokenizer.decode(answer.token_ids[-1:])
    for stops, reason, other in (((stop,), "stop", "length"), ((), "length", "stop")):
        params = SamplingParams(max_tokens=len(answer.token_ids), stop=stops, **DRAWN)
        request = GenerateRequest(0, PROMPT, params)
        true = answered(llm, request)
        assert true.finish_reason == reason and problem(of(llm, request), true) is None
        assert problem(of(llm, request), true, finish_reason=other) == "its finish reason is not that of its output"


CHANGES: dict[str, Callable[[np.ndarray, np.ndarray], Any]] = {
    "not 2 a token": lambda ids, values: (ids[:, :1], values[:, :1]),
    "no tokens of the model": lambda ids, values: (ids - 10**6, values),
    "name a token twice": lambda ids, values: (ids[:, [0, 0]], values),
    "not in order": lambda ids, values: (ids, values[:, ::-1]),
    "not in order ": lambda ids, values: (ids, np.full_like(values, np.nan)),
    "not in order  ": lambda ids, values: (ids, values + np.float32(50)),
    "has no alternatives": lambda ids, values: (None, None),
}


@pytest.mark.parametrize("why", CHANGES)
def test_alternatives(llm: LLM, why: str) -> None:
    for request in (GenerateRequest(0, PROMPT, SamplingParams(max_tokens=3, logprobs=2)),
                    ScoreRequest(0, PROMPT, [7, 8], logprobs=2)):  # fmt: skip
        answer = answered(llm, request)
        ids, values = CHANGES[why](answer.answer.top_ids, answer.answer.top_logprobs)
        assert problem(of(llm, request), answer) is None
        assert why.strip() in str(problem(of(llm, request), answer, top_ids=ids, top_logprobs=values))


def test_scores(llm: LLM) -> None:
    request = ScoreRequest(0, PROMPT, [7, 8])
    expected, answer = of(llm, request), answered(llm, request)
    assert problem(expected, answer) is None
    for changes in (
        {"output_ids": [7, 9]}, {"text": "a"}, {"finish_reason": "stop"}, {"logprobs": answer.logprobs[:1]},
        {"logprobs": np.float32([-1, 5])}, {"logprobs": np.float32([-1, np.nan])},
    ):  # fmt: skip
        assert problem(expected, answer, **changes), changes


def test_what_logprobs_say_of_greedy_choice(llm: LLM) -> None:
    """A token above one half is the most probable one; one below 1/vocabulary is not. Between them both can be."""
    expected, answer = of(llm, ScoreRequest(0, PROMPT, [7, 8])), answered(llm, ScoreRequest(0, PROMPT, [7, 8]))
    lowest = float(-np.log(llm.spec.vocab_size))
    for logprobs, possible in (((-0.1, -0.6), {True}), ((-0.1, lowest - 1), {False}), ((-0.1, -1.0), {True, False})):
        found = {greedy for greedy in (True, False)
                 if problem(expected, answer, logprobs=np.float32(logprobs), is_greedy=greedy) is None}  # fmt: skip
        assert found == possible
