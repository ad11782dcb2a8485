"""/v1/completions: what each field does, and that the numbers are the engine's own."""

from __future__ import annotations

import tests.serve.needs  # noqa: F401  # first

# isort: split

import json
import re
from typing import Any

import httpx
import numpy as np
import pytest

from evalengine import LLM, SamplingParams
from tests.e2e.command import ROOT
from tests.serve.running import QUESTION, Running

GREEDY = {"prompt": QUESTION, "temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("asset:tinymath", device="cpu", num_kv_blocks=64, block_size=64)


def events(served: Running, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """A stream's pieces; the last event must be the one that ends it."""
    with httpx.stream("POST", f"{served.url}{path}", json={**body, "stream": True}, timeout=120) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_completion_has_the_engines_text_and_every_bit_of_its_logprobs(served: Running, llm: LLM) -> None:
    answer = served.completion(**GREEDY, logprobs=2, return_token_ids=True)
    (output,) = llm.generate([QUESTION], SamplingParams(max_tokens=12, logprobs=2))
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (output.text, "length")
    assert choice["token_ids"] == output.token_ids
    said = choice["logprobs"]
    assert np.array(said["token_logprobs"], dtype=np.float32).tobytes() == output.logprobs.tobytes()
    assert "".join(said["tokens"]) == output.text
    assert said["text_offset"] == [len("".join(said["tokens"][:i])) for i in range(12)]
    for top, chosen in zip(said["top_logprobs"], said["token_logprobs"], strict=True):
        assert max(top.values()) == chosen, "a greedy token is the first of its alternatives, to the last bit"
    assert answer["usage"] == {"prompt_tokens": 26, "completion_tokens": 12, "total_tokens": 38}


def test_the_page_shows_the_answer_that_is_given(served: Running) -> None:
    """Its first question, and its answer to the byte: whoever follows the page sees the same."""
    page = (ROOT / "docs" / "serve.md").read_text(encoding="utf-8")
    asked = re.search(r"/v1/completions -d '(.*)'\n", page)
    assert asked is not None
    assert served.client.post("/v1/completions", content=asked[1]).text in page.splitlines()


def test_an_echo_has_the_prompts_logprobs(served: Running, llm: LLM) -> None:
    ids = llm.tokenizer.encode(QUESTION)
    (score,) = llm.score([(ids[:1], ids[1:])], logprobs=1)
    (choice,) = served.completion(**{**GREEDY, "max_tokens": 1}, echo=True, logprobs=1)["choices"]
    said = choice["logprobs"]
    assert choice["text"].startswith(QUESTION) and len(choice["text"]) > len(QUESTION)
    assert said["token_logprobs"][0] is None and said["top_logprobs"][0] is None
    assert np.array(said["token_logprobs"][1:-1], dtype=np.float32).tobytes() == score.logprobs.tobytes()
    greedy = [max(top.values()) == value for top, value in
              zip(said["top_logprobs"][1:-1], said["token_logprobs"][1:-1], strict=True)]  # fmt: skip
    assert score.top_logprobs is not None
    assert greedy == [next(iter(top)) == token for top, token in zip(score.top_logprobs, ids[1:], strict=True)]
    assert True in greedy and False in greedy
    (alone,) = served.completion(prompt=ids, max_tokens=0, echo=True, logprobs=1, temperature=0)["choices"]
    assert alone["text"] == QUESTION and alone["logprobs"]["token_logprobs"] == said["token_logprobs"][:-1]


def test_prompt_logprobs_lie_in_the_choice(served: Running, llm: LLM) -> None:
    ids = llm.tokenizer.encode(QUESTION)
    (score,) = llm.score([(ids[:1], ids[1:])], logprobs=1)
    (choice,) = served.completion(**{**GREEDY, "max_tokens": 1}, prompt_logprobs=1)["choices"]
    first, *rest = choice["prompt_logprobs"]
    assert first is None and choice["logprobs"] is None
    assert [said[str(token)]["logprob"] for said, token in zip(rest, ids[1:], strict=True)] == score.logprobs.tolist()
    ranks = [said[str(token)]["rank"] for said, token in zip(rest, ids[1:], strict=True)]
    assert set(ranks) == {1, None}


def test_prompts_may_be_texts_ids_and_lists_of_either(served: Running, llm: LLM) -> None:
    ids = [llm.tokenizer.encode(text) for text in (QUESTION, "What is 3 plus 4?")]
    texts = [QUESTION, "What is 3 plus 4?"]
    usual: dict[str, Any] = {"temperature": 0, "max_tokens": 4}
    of_texts = [choice["text"] for choice in served.completion(prompt=texts, **usual)["choices"]]
    assert of_texts == [choice["text"] for choice in served.completion(prompt=ids, **usual)["choices"]]
    assert of_texts == [served.completion(prompt=one, **usual)["choices"][0]["text"] for one in ids]
    assert of_texts == [output.text for output in llm.generate(texts, SamplingParams(max_tokens=4))]


def test_samples_have_a_seed_that_is_told(served: Running, llm: LLM) -> None:
    body = {"prompt": QUESTION, "max_tokens": 6, "n": 3}
    first, again = served.completion(**body), served.completion(**body)
    assert first == again and first["seed"] > 0
    texts = [choice["text"] for choice in first["choices"]]
    assert len({*texts}) > 1
    assert served.completion(**body, seed=first["seed"]) == {**first}
    assert served.completion(**body, seed=first["seed"] + 1)["choices"] != first["choices"]
    assert served.completion(prompt="Other", max_tokens=6, n=3)["seed"] != first["seed"]
    params = SamplingParams(max_tokens=6, temperature=1.0, n=3, seed=first["seed"])
    assert texts == [output.text for output in llm.generate([QUESTION], params)[0].outputs]
    equal = served.completion(prompt=[QUESTION, QUESTION], max_tokens=6, seed=first["seed"])
    assert [choice["text"] for choice in equal["choices"]] == texts[:2], "equal prompts are samples of their own"


def test_greedy_samples_are_one_answer(served: Running) -> None:
    before = served.llm.stats.num_generated_tokens
    choices = served.completion(**GREEDY, n=4)["choices"]
    assert len(choices) == 4 and len({choice["text"] for choice in choices}) == 1
    assert served.llm.stats.num_generated_tokens - before == 12


def test_a_stop_string_ends_and_is_cut(served: Running) -> None:
    whole = served.completion(**GREEDY)["choices"][0]["text"]
    stop = whole[7:11]
    (choice,) = served.completion(**GREEDY, stop=[stop, "never"])["choices"]
    assert choice["finish_reason"] == "stop" and choice["text"] == whole.partition(stop)[0]


@pytest.mark.parametrize(
    "further", [{}, {"logprobs": 1}, {"n": 2, "temperature": 1.0}, {"prompt": [QUESTION, "1 + 1 ="]}]
)
def test_a_stream_says_the_same(served: Running, further: dict[str, Any]) -> None:
    body = {**GREEDY, **further}
    whole = served.completion(**body)
    pieces = events(served, "/v1/completions", {**body, "stream_options": {"include_usage": True}})
    assert pieces[-1]["usage"] == whole["usage"] and pieces[-1]["choices"] == []
    assert {piece["id"] for piece in pieces} == {whole["id"]}
    for choice in whole["choices"]:
        own = [piece["choices"][0] for piece in pieces[:-1] if piece["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in own) == choice["text"]
        assert len(own) > 3 and [part["finish_reason"] for part in own[:-1]] == [None] * (len(own) - 1)
        assert own[-1]["finish_reason"] == choice["finish_reason"]
        if choice["logprobs"]:
            joined = {name: [one for part in own for one in part["logprobs"][name]] for name in choice["logprobs"]}
            assert joined == choice["logprobs"]


def test_a_stream_never_shows_a_stop_string(served: Running) -> None:
    whole = served.completion(**GREEDY)["choices"][0]["text"]
    stop = whole[5:13]
    pieces = events(served, "/v1/completions", {**GREEDY, "stop": stop})
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == whole.partition(stop)[0]


def test_the_seed_of_a_longer_answer_is_the_same(served: Running) -> None:
    short, long = (served.completion(prompt=QUESTION, max_tokens=size) for size in (3, 8))
    assert short["seed"] == long["seed"]
    assert long["choices"][0]["text"].startswith(short["choices"][0]["text"])


WIDE = "na\u00efve: 45 \u20ac, 3 \U0001f642\U0001f642 and <|im_end|>"


@pytest.mark.parametrize("as_ids", [False, True])
def test_offsets_index_into_the_text_where_characters_span_tokens(served: Running, llm: LLM, as_ids: bool) -> None:
    prompt = llm.tokenizer.encode(WIDE) if as_ids else WIDE
    (choice,) = served.completion(prompt=prompt, max_tokens=8, echo=True, logprobs=1, temperature=0)["choices"]
    said, text = choice["logprobs"], choice["text"]
    assert text.startswith(WIDE) and sum(token.startswith("bytes:") for token in said["tokens"]) >= 10
    for token, place in zip(said["tokens"], said["text_offset"], strict=True):
        if token.startswith("bytes:"):
            raw = bytes.fromhex(token.removeprefix("bytes:").replace("\\x", ""))
            assert raw in text[place].encode(), "a part of the character there"
        else:
            assert text.startswith(token, place), (token, place)


@pytest.mark.parametrize("stop", [[], ["e", " t"]])
def test_a_streams_offsets_are_those_of_the_whole(served: Running, stop: list[str]) -> None:
    """Nearly random tokens: bytes that are no characters, special tokens, and stop strings that cut tokens off."""
    body = {"prompt": "1", "max_tokens": 20, "temperature": 50.0, "n": 4, "logprobs": 0, "ignore_eos": True,
            "stop": stop}  # fmt: skip
    pieces = [piece["choices"][0] for piece in events(served, "/v1/completions", body)]
    seen = ""
    for choice in served.completion(**body)["choices"]:
        said, text, offsets = choice["logprobs"], choice["text"], choice["logprobs"]["text_offset"]
        parts = [piece["logprobs"] for piece in pieces if piece["index"] == choice["index"]]
        assert all(part["tokens"] for part in parts[:-1]), "no empty parts"
        assert {name: [one for part in parts for one in part[name]] for name in said} == said
        assert offsets == sorted(offsets) and offsets[-1] <= len(text)
        seen += "".join(said["tokens"])
        for token, place in zip(said["tokens"], offsets, strict=True):
            assert stop or token.startswith(("bytes:", "<|")) or text.startswith(token, place), (token, place)
    assert stop or seen.count("bytes:") > 3
