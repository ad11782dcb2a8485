"""What the API takes and what it refuses: one ConfigError lists all that is wrong, before anything runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch

from evalengine import LLM, SamplingParams
from evalengine.engine.request import GenerateRequest, ScoreRequest
from evalengine.errors import ConfigError
from evalengine.models.processors import LogitsProcessors
from evalengine.util.validation import integer, number, shown, token_ids


def test_integers_of_every_library_and_nothing_else() -> None:
    for good in (3, np.int64(3), np.uint8(3), np.array(3), torch.tensor(3), torch.tensor(3, dtype=torch.int8)):
        assert integer(good) == 3 and type(integer(good)) is int
    for bad in (3.0, 1.7, "3", b"3", True, np.True_, torch.tensor(True), torch.tensor(3.0), np.float32(3), None, [3],
                np.datetime64(3, "ns"), 3 + 0j, torch.empty((), dtype=torch.int64, device="meta")):  # fmt: skip
        assert integer(bad) is None, bad
    for good in (2, 2.0, np.float32(2), torch.tensor(2.0), np.int8(2)):
        assert number(good) == 2.0 and type(number(good)) is float
    assert number(10**400) == math.inf
    for bad in ("2", True, None, 2 + 0j, [2.0]):
        assert number(bad) is None, bad


def test_token_ids_of_every_library_and_nothing_else() -> None:
    for good in ([3, 4], (3, 4), range(3, 5), np.array([3, 4]), np.array([3, 4], np.uint16), torch.tensor([3, 4]),
                 [np.int64(3), torch.tensor(4)]):  # fmt: skip
        ids = token_ids(good)
        assert ids == [3, 4] and {type(i) for i in ids or ()} == {int}
    assert token_ids([]) == []
    for bad in ([3, 4.0], [True, False], b"34", bytearray(b"34"), "34", {3, 4}, {3: 4}, None, 3, [[3, 4]], [None],
                np.array([3.0]), np.array([[3]]), np.array([True]), torch.tensor([True]), torch.tensor(3)):  # fmt: skip
        assert token_ids(bad) is None, bad


def test_a_context_that_is_given_twice_is_read_once_and_a_changed_one_anew() -> None:
    context = [5, 6]
    first, second = (ScoreRequest(number, context, [number]) for number in (1, 2))
    assert first.context_ids is second.context_ids == [5, 6] and first.context_ids is not context
    context.append(7)
    assert ScoreRequest(3, context, [1]).context_ids == [5, 6, 7] and first.context_ids == [5, 6]
    context[0] = 5.5  # type: ignore[call-overload]
    with pytest.raises(ConfigError, match="context_ids"):
        ScoreRequest(4, context, [1])
    for array in (np.array([5, 6]), torch.tensor([5, 6])):
        pair = [ScoreRequest(number, array, [1]).context_ids for number in (1, 2)]  # type: ignore[arg-type]
        assert pair == [[5, 6], [5, 6]]


def test_messages_stay_short() -> None:
    """Values in messages are cut, and stand on one line."""
    assert shown(10**6000) == "(int)" and len(shown("x" * 10**6)) < 50 and "\n" not in shown(torch.zeros(5, 5))


BAD_PARAMS: dict[str, tuple[Any, ...]] = {
    "max_tokens": (0, 2.5, "3", True, None, math.nan, [3]),
    "temperature": (-1, math.nan, math.inf, 1e-9, "1", True, None, 10**400),
    "top_k": (-1, 2.0, "5", False, None, 10**30),
    "top_p": (0, 1.5, math.nan, "0.9", True, None, -0.1),
    "stop": (b"x", ["x", ""], [3], {"x"}, {"x": 1}, None, 3, ""),
    "stop_token_ids": (3, "3", b"3", [1.7], [True], [[3]], {3}),
    "ignore_eos": (0, 1, "false", None),
    "seed": (1.5, "0", True, None, 10**5000, 2**63),
    "noise_key": (3, b"key", "\ud800"),
    "logprobs": (-1, True, 1.0, None),
    "processors": ({}, {"repetition_penalty": 1.1}, "none", LogitsProcessors),
    "think_end_token": (-1, 1.5, True, "", b"x", [3], "\ud800"),
    "n": (0, -1, 1.0, True, "2", None),
}


def test_every_field_of_sampling_params_is_checked_and_all_are_listed() -> None:
    assert BAD_PARAMS.keys() == asdict(SamplingParams()).keys()
    for name, values in BAD_PARAMS.items():
        for value in values:
            with pytest.raises(ConfigError, match=f"^{name}=") as caught:
                SamplingParams(**{name: value})
            assert len(caught.value.problems) == 1 and len(str(caught.value)) < 200
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**{name: values[0] for name, values in BAD_PARAMS.items()})
    assert sorted(problem.partition("=")[0] for problem in caught.value.problems) == sorted(BAD_PARAMS)


def test_sampling_params_are_plain_values() -> None:
    params = SamplingParams(
        max_tokens=np.int32(4),
        temperature=np.float64(0.5),
        top_k=torch.tensor(5),
        top_p=1,
        stop="x",
        stop_token_ids=np.array([1, 2]),
        ignore_eos=np.True_,
        seed=np.uint64(7),
    )
    assert params == SamplingParams(4, 0.5, 5, 1.0, ("x",), (1, 2), True, 7)
    assert {type(value) for value in asdict(params).values()} == {int, float, tuple, bool, type(None)}


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: GenerateRequest("0", [1.7], {}), ["request_id", "prompt_ids", "params"]),
        (lambda: GenerateRequest(True, b"ab"), ["request_id", "prompt_ids"]),
        (lambda: ScoreRequest(1.0, "ab", {3}, "2"), ["request_id", "context_ids", "continuation_ids", "logprobs"]),
    ],
)
def test_requests_are_checked(make: Callable[[], Any], names: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert [problem.partition("=")[0] for problem in caught.value.problems] == names


def test_arrays_are_prompts(llm: LLM) -> None:
    params = SamplingParams(max_tokens=3)
    expected = llm.generate([[5, 6, 7]], params)[0]
    for prompt in ((5, 6, 7), range(5, 8), np.array([5, 6, 7]), torch.tensor([5, 6, 7]), [np.int64(5), 6, 7]):
        (out,) = llm.generate(prompt, params)
        assert out.token_ids == expected.token_ids and out.prompt_ids == [5, 6, 7]
        assert {type(i) for i in out.prompt_ids} == {int}
    batch = llm.generate(torch.tensor([[5, 6, 7], [5, 6, 7]]), params)
    assert [o.token_ids for o in batch] == [expected.token_ids] * 2
    assert llm.generate([], params) == [] == llm.score([])
    (scored,) = llm.score([(np.array([5, 6, 7]), torch.tensor(expected.token_ids))])
    assert scored.token_ids == expected.token_ids
    assert llm.score_rolling("a text")[0][0].token_ids == llm.score_rolling(["a text"])[0][0].token_ids


@pytest.mark.parametrize(
    "prompts",
    [None, 5, b"text", {"prompt_token_ids": [5]}, {5, 6}, [1.7, 2.0], [[1.7]], [[[5]]], [b"text"], ["text", 5],
     [{"prompt": "x"}], [True, False], np.array([1.5]), np.array(5), np.zeros((2, 2, 2), int), [None], ["\ud800"]],
)  # fmt: skip
def test_what_is_neither_text_nor_ids_is_refused(llm: LLM, prompts: Any) -> None:
    for ask in (llm.generate, llm.score_rolling):
        with pytest.raises(ConfigError) as caught:
            ask(prompts)
        assert len(str(caught.value)) < 300
    assert llm.stats.num_steps == 0


@pytest.mark.parametrize(
    "pairs",
    [None, 5, "ab", ["ab"], [("a",)], [("a", "b", "c")], [("a", [5])], ([5, 6], [7, 8]), [([5], [1.5])], [([5], b"x")],
     [{"a": "b", "c": "d"}], [("a", "\ud800")], [([5], [True])]],
)  # fmt: skip
def test_what_is_no_pair_is_refused(llm: LLM, pairs: Any) -> None:
    with pytest.raises(ConfigError):
        llm.score(pairs)
    assert llm.stats.num_steps == 0


def test_all_bad_prompts_are_listed_at_once(llm: LLM) -> None:
    with pytest.raises(ConfigError) as caught:
        llm.generate([[1.7], [5], b"x", None], [SamplingParams()] * 4)
    assert [problem.partition(":")[0] for problem in caught.value.problems] == ["prompt 0", "prompt 2", "prompt 3"]
    with pytest.raises(ConfigError, match="prompt 1: params="):
        llm.generate([[5], [6]], [SamplingParams(), None])
    for params in ({}, "greedy", 5):
        with pytest.raises(ConfigError, match="sampling_params"):
            llm.generate([[5]], params)
    with pytest.raises(ConfigError, match="neither a GenerateRequest nor a ScoreRequest"):
        list(llm.run([GenerateRequest(0, [5]), [5], None]))
    with pytest.raises(ConfigError, match="requests="):
        list(llm.run(GenerateRequest(0, [5])))
    with pytest.raises(ConfigError, match="on_step="):
        list(llm.run([GenerateRequest(0, [5])], on_step=3))


def test_what_only_the_model_can_tell(llm: LLM) -> None:
    """Token ids and counts beyond the model's vocabulary are refused when the request is submitted."""
    vocab = llm.spec.vocab_size
    with pytest.raises(ConfigError) as caught:
        llm.generate(
            [[5], [6], [7]],
            [
                SamplingParams(logprobs=vocab + 1),
                SamplingParams(stop_token_ids=(vocab,)),
                SamplingParams(stop_token_ids=[-1]),
            ],
        )
    assert len(caught.value.problems) == 3
    request = GenerateRequest(0, [5, 6])
    request.prompt_ids.append(1.7)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="must be integers"):
        list(llm.run([request]))


@pytest.mark.parametrize("model", [None, 5, b"x", ["x"], {"path": "x"}])
def test_what_is_no_model_is_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match=r"^model="):
        LLM(model)
