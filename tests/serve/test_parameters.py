"""Each parameter that OpenAI's client has: it does what it says, changes no answer, or is refused by its name."""

from __future__ import annotations

import tests.serve.needs  # noqa: F401  # first

# isort: split

import inspect
from dataclasses import replace
from typing import Any

import pytest

from evalengine.integrations.openai_server.bodies import CompletionBody, read_body
from evalengine.integrations.openai_server.request_bodies import completion_request
from evalengine.integrations.openai_server.settings import ServeSettings
from tests.serve.running import Running

openai = pytest.importorskip("openai", reason="needs openai: pip install openai")
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
USUAL: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "What is 3 plus 4?"}], "max_tokens": 3},
    COMPLETION: {"prompt": "3 + 4 =", "max_tokens": 3},
}
OF_THE_CLIENT = ("self", "extra_headers", "extra_query", "extra_body", "timeout")
# Values at which a field changes nothing, or only says who asks.
NEUTRAL: dict[str, list[Any]] = {
    "frequency_penalty": [0, 0.0],
    "presence_penalty": [0],
    "logit_bias": [{}],
    "user": ["me"],
    "metadata": [{"run": "1"}],
    "safety_identifier": ["x"],
    "prompt_cache_key": ["x"],
    "prompt_cache_options": [{"ttl": "1h"}],
    "prompt_cache_retention": ["24h"],
    "service_tier": ["auto", "default"],
    "store": [False],
    "response_format": [{"type": "text"}],
    "modalities": [["text"]],
    "parallel_tool_calls": [True],
    "tool_choice": ["auto", "none"],
    "best_of": [1],
    "suffix": [""],
    "n": [1],
    "stop": [[]],
}
# What changes an answer, or its shape, and is honoured (each has a test of its own in this folder).
HONOURED: dict[str, Any] = {
    "max_tokens": 2, "seed": 7, "temperature": 0.5, "top_p": 0.9, "n": 2, "stop": "\n", "stream": True,
    "messages": [{"role": "user", "content": "a"}], "prompt": "a", "model": "tinymath", "echo": True,
    "frequency_penalty": -2, "presence_penalty": 2, "logit_bias": {"5": 100},
}  # fmt: skip
# What asks for something that is not built.
REFUSED: dict[str, Any] = {
    "store": True, "service_tier": "flex",
    "response_format": {"type": "xml"}, "modalities": ["text", "audio"], "audio": {"voice": "x"},
    "functions": [{"name": "f"}], "function_call": "auto", "prediction": {"type": "content", "content": "x"},
    "reasoning_effort": "low", "verbosity": "low", "web_search_options": {}, "moderation": {"a": 1},
    "parallel_tool_calls": False, "tool_choice": "any", "best_of": 2, "suffix": "x",
    "stream_options": {"include_usage": True}, "top_logprobs": 2, "tools": [{"type": "function"}],
}  # fmt: skip
BY_ENDPOINT: dict[str, dict[str, Any]] = {
    CHAT: {"logprobs": True, "max_completion_tokens": 3},
    COMPLETION: {"logprobs": 2},
}


def parameters(path: str) -> list[str]:
    """The parameters that OpenAI's client has for the endpoint."""
    client = openai.resources.chat.completions if path == CHAT else openai.resources.completions
    return [name for name in inspect.signature(client.Completions.create).parameters if name not in OF_THE_CLIENT]


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_no_parameter_is_ignored(served: Running, path: str) -> None:
    usual = served.post(path, USUAL[path]).content
    for name in parameters(path):
        for value in NEUTRAL.get(name, []):
            answer = served.post(path, {**USUAL[path], name: value})
            assert answer.content == usual, f"{name}={value!r}: {answer.text}"
        if name in NEUTRAL or name in REFUSED:
            assert served.post(path, {**USUAL[path], name: None}).content == usual, f"{name}=null"
        honoured = {**HONOURED, **BY_ENDPOINT[path]}
        if name in honoured:
            answer = served.post(path, {**USUAL[path], name: honoured[name]})
            assert answer.status_code == 200, answer.text
            same = name in ("model", "max_completion_tokens")
            assert (answer.content == usual) == same, f"{name} does nothing"
        if name in REFUSED or name not in {**honoured, **NEUTRAL}:
            answer = served.post(path, {**USUAL[path], name: REFUSED.get(name, {"what": "is that"})})
            error = answer.json()["error"]
            assert answer.status_code == 400 and error["param"] == name and name in error["message"], answer.text


def test_a_field_that_openai_will_have_tomorrow_is_refused(served: Running) -> None:
    refused = served.post(CHAT, {**USUAL[CHAT], "telepathy": True}).json()["error"]
    assert refused["param"] == "telepathy" and "no such field here" in refused["message"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (COMPLETION, {"logprobs": 21}, "logprobs"),
        (COMPLETION, {"n": 2, "best_of": 1}, "best_of"),
        (COMPLETION, {"n": 2, "best_of": 3}, "best_of"),
        (COMPLETION, {"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options"),
        (COMPLETION, {"stream": True, "echo": True}, "echo"),
        (CHAT, {"presence_penalty": 2.1}, "presence_penalty"),
        (CHAT, {"frequency_penalty": "1"}, "frequency_penalty"),
        (CHAT, {"logit_bias": {"5": 100.5}}, "logit_bias"),
        (COMPLETION, {"logit_bias": {"1000000": 1}}, "logit_bias"),
        (COMPLETION, {"logit_bias": {"five": 1}}, "logit_bias"),
        (COMPLETION, {"logit_bias": {"5": 1, "05": 1}}, "logit_bias"),
        (COMPLETION, {"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ],
)
def test_what_cannot_be_honoured_together_is_refused(
    served: Running, path: str, fields: dict[str, Any], param: str
) -> None:
    refused = served.post(path, {**USUAL[path], **fields})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == param, refused.text


def test_a_stream_ends_with_its_usage_where_that_is_asked_for(served: Running) -> None:
    body = {**USUAL[CHAT], "stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}}
    *_, last, done, _ = served.post(CHAT, body).text.split("\n\n")
    assert done == "data: [DONE]" and '"choices":[],"usage":{"prompt_tokens":' in last
    without = served.post(CHAT, {**USUAL[CHAT], "stream": True}).text
    assert "usage" not in without


def test_a_model_is_found_by_its_name(served: Running) -> None:
    (listed,) = served.client.get("/v1/models").json()["data"]
    assert served.client.get(f"/v1/models/{listed['id']}").json() == listed
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
        assert client.models.retrieve("tinymath").model_dump(exclude={"max_model_len"})["id"] == "tinymath"
    for name in ("gpt-4", "org/name", "tinymath/x"):
        answer = served.client.get(f"/v1/models/{name}")
        assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(("method", "path", "allowed"), [("GET", COMPLETION, "POST"), ("DELETE", "/v1/models", "GET")])
def test_another_method_is_answered_with_those_that_the_path_takes(
    method: str, path: str, allowed: str, served: Running
) -> None:
    answer = served.client.request(method, path)
    assert answer.status_code == 405 and allowed in answer.headers["allow"].split(", ")
    assert answer.json()["error"]["message"] == "this path takes another method"


LONG = "a b " * 1000
OUT_OF_BOUNDS = [
    (COMPLETION, {"temperature": -1}, "temperature", "temperature=-1.0: must be 0"),
    (COMPLETION, {"top_p": 2}, "top_p", "top_p=2.0: must be in (0, 1]"),
    (COMPLETION, {"top_k": -2}, "top_k", "from -1 to 1024"),
    (COMPLETION, {"seed": 2**70}, "seed", "from -9223372036854775808 to 9223372036854775807"),
    (COMPLETION, {"stop": ["a", ""]}, "stop", "non-empty string"),
    (COMPLETION, {"stop_token_ids": [5000]}, "stop_token_ids", "0 ... 1023"),
    (COMPLETION, {"repetition_penalty": -1.0}, "repetition_penalty", "positive number"),
    (COMPLETION, {"min_tokens": -1}, "min_tokens", "from 0 to 1024"),
    (COMPLETION, {"max_tokens": -1}, "max_tokens", "from 0 to 1024"),
    (COMPLETION, {"max_tokens": 2**70}, "max_tokens", "from 0 to 1024"),
    (COMPLETION, {"n": 0}, "n", "from 1 to 1024"),
    (COMPLETION, {"logprobs": -1}, "logprobs", "from 0 to 20"),
    (COMPLETION, {"prompt_logprobs": 21}, "prompt_logprobs", "from 0 to 20"),
    (COMPLETION, {"prompt": [5000]}, "prompt", "0 ... 1023"),
    (COMPLETION, {"prompt": LONG}, "prompt", "shorten it"),
    (COMPLETION, {"prompt": [5] * 1024}, "prompt", "shorten it"),
    (CHAT, {"max_tokens": 0}, "max_tokens", "from 1 to 1024"),
    (CHAT, {"max_completion_tokens": 2**70, "max_tokens": None}, "max_completion_tokens", "from 1 to 1024"),
    (CHAT, {"messages": [{"role": "user", "content": LONG}]}, "messages", "shorten it"),
    (CHAT, {"chat_template_kwargs": {"unread": 1}}, "chat_template_kwargs", "unread"),
]


@pytest.mark.parametrize(("path", "fields", "param", "said"), OUT_OF_BOUNDS)
def test_an_error_names_the_field_its_bounds_and_what_a_client_can_do(
    served: Running, path: str, fields: dict[str, Any], param: str, said: str
) -> None:
    refused = served.post(path, {**USUAL[path], **fields})
    error = refused.json()["error"]
    assert refused.status_code == 400 and error["param"] == param and said in error["message"], refused.text
    assert "engine." not in refused.text and "model." not in error["message"], "settings of the server's operator"
    assert error["code"] == ("context_length_exceeded" if "shorten" in said else None)


def test_what_only_the_operator_can_change_is_logged(
    served: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = served.server.model
    monkeypatch.setattr(model, "limits", replace(model.limits, num_kv_blocks=2))
    refused = served.post(COMPLETION, {"prompt": "a", "max_tokens": 500})
    error = refused.json()["error"]
    assert refused.status_code == 400 and error["param"] == "max_tokens" and "lower max_tokens" in error["message"]
    assert "engine." not in refused.text and "raise engine.num_kv_blocks" in caplog.text
    monkeypatch.setattr(model.tokenizer, "encode", lambda *_, **__: (_ for _ in ()).throw(Exception("no such word")))
    refused = served.post(COMPLETION, {"prompt": "a"})
    assert refused.json()["error"]["param"] == "prompt" and "model." not in refused.text
    assert "set model.tokenizer" in caplog.text


def test_the_usual_length_is_within_the_servers_limit(served: Running) -> None:
    body = read_body(CompletionBody, {"prompt": [5]})
    for most, length in ((0, 16), (4, 4), (40, 16)):
        ask = completion_request(body, served.server.model, ServeSettings(max_tokens=most))
        assert ask.params is not None and ask.params.max_tokens == length
