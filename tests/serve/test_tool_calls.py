"""Calls of tools: read out of the answers of models whose template shows a known format, else text."""

from __future__ import annotations

import tests.serve.needs  # noqa: F401  # first

# isort: split

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evalengine.engine.request import RequestOutput
from evalengine.engine.text.detokenizer import Detokenizer
from evalengine.serve.tool_calls import FORMATS, find_format, offered, with_objects
from tests.e2e.command import with_more_template
from tests.serve.running import Running, running

HERMES, MISTRAL, LLAMA = FORMATS
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("add", "sub")]
ADD = '{"name": "add", "arguments": {"a": 3, "b": [4.5, "ü"]}}'
SUB = '{"name": "sub", "arguments": {}}'
ADDED, SUBTRACTED = ("add", {"a": 3, "b": [4.5, "ü"]}), ("sub", {})


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"<tool_call>\n{ADD}\n</tool_call>", "", [ADDED]),
        (f"Well.\n<tool_call>{ADD}</tool_call>\n<tool_call>{SUB}</tool_call>\n", "Well.\n", [ADDED, SUBTRACTED]),
        (ADD, ADD, []),
        (f"<tool_call>{ADD}", None, []),  # cut off
        (f"<tool_call>{ADD[:-1]}</tool_call>", None, []),
        (f"<tool_call>{ADD}</tool_call> and more", None, []),
        (f"<tool_call>{ADD} and more</tool_call>", None, []),
        ('<tool_call>{"name": "mul", "arguments": {}}</tool_call>', None, []),  # was not offered
        ('<tool_call>{"name": ["add"], "arguments": {}}</tool_call>', None, []),
        ('<tool_call>{"name": "add", "arguments": "3"}</tool_call>', None, []),
        ('<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', None, []),
        ('<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>', None, []),
        ('<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>', None, []),  # half of a character
        ('<tool_call>{"name": "add"}</tool_call>', None, []),
        ("<tool_call><function=add></function></tool_call>", None, []),
        (f"<tool_call>{'[' * 100_000}</tool_call>", None, []),
    ],
)  # fmt: skip
def test_hermes(text: str, content: str | None, calls: list[Any]) -> None:
    assert HERMES.calls(text, text, ("add", "sub")) == (text if content is None else content, calls)


def test_llama() -> None:
    call = ADD.replace("arguments", "parameters")
    for text in (call, f"<|python_tag|>{call}", f" {call}\n"):
        assert LLAMA.calls(text, text, ("add",)) == ("", [ADDED])
    both = f"{call}; {call}"
    assert LLAMA.calls(both, both, ("add",)) == ("", [ADDED, ADDED])
    for text in ("", "The sum is 7.", f"I call {call}", f"{call}.", ADD, call[:-1], '{"name": "add"}', "[1]", "3"):
        assert LLAMA.calls(text, text, ("add",)) == (text, [])


def test_mistral() -> None:
    """The mark is a special token: the answer's own text does not show it."""
    for before in ("", "Let me see."):
        raw = f"{before}[TOOL_CALLS] [{ADD}, {SUB}]</s>"
        shown = raw.replace("[TOOL_CALLS]", "").replace("</s>", "")
        assert MISTRAL.calls(shown, raw, ("add", "sub")) == (before, [ADDED, SUBTRACTED])
    visible = f"[TOOL_CALLS][{ADD}]"
    assert MISTRAL.calls(visible, visible, ("add",)) == ("", [ADDED])
    for raw in (f"[{ADD}]", f"[TOOL_CALLS] {ADD}", f"[TOOL_CALLS] [{ADD}] and more", "[TOOL_CALLS] [", "[TOOL_CALLS]"):
        shown = raw.replace("[TOOL_CALLS]", "")
        assert MISTRAL.calls(shown, raw, ("add",)) == (shown, [])


def test_the_template_tells_the_format() -> None:
    shown = {
        "hermes": "return a json object within <tool_call></tool_call> XML tags:",
        "mistral": '{{- "[TOOL_CALLS] [" }}',
        "llama3_json": '{"name": function name, "parameters": dictionary of argument name and its value}.',
    }
    for name, template in shown.items():
        found = find_format(template)
        assert found is not None and found.name == name
    assert find_format("{{ messages }}") is None and find_format(None) is None


def test_what_a_client_sends_back_is_what_templates_read() -> None:
    function = {"name": "add", "arguments": '{"a": 3}'}
    message = with_objects({"role": "assistant", "tool_calls": [{"id": "1", "function": function}]})
    assert message["tool_calls"] == [{"id": "1", "function": {"name": "add", "arguments": {"a": 3}}}]
    for odd in ({"tool_calls": "x"}, {"tool_calls": [3, {"function": 3}, {"function": {"arguments": "{"}}]}, {}):
        assert with_objects(odd) == odd
    assert offered([{}, {"function": 3}, {"function": {"name": 3}}, *TOOLS]) == ("add", "sub")  # type: ignore[list-item]


@pytest.fixture(scope="module", params=[fmt.name for fmt in FORMATS])
def tooled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Running]]:
    """The format, and a server whose template shows it."""
    (fmt,) = (one for one in FORMATS if one.name == request.param)
    shown = f"{{% for tool in tools or [] %}}{{{{ '{fmt.sign}' if false }}}}{{% endfor %}}"
    folder = with_more_template(tmp_path_factory.mktemp("tooled") / "model", shown)
    with running(f"model.path={folder}", "engine.max_model_len=512") as server:
        yield fmt, server


def says(server: Running, monkeypatch: pytest.MonkeyPatch, text: str, reason: str = "stop") -> None:
    """Has the engine answer every request with this text, token by token, as a model that was trained on tools does."""
    engine, tokenizer = server.server.engine.engine, server.llm.tokenizer
    right = engine.run

    def run(requests: Any, on_step: Any, more: Any) -> Iterator[RequestOutput]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        for output in right(requests, on_step, more):
            asked = Detokenizer(tokenizer, requests[0].params)
            output.token_ids, output.text, output.finish_reason = ids, asked.text(ids), reason
            output.logprobs = output.logprobs[:1].repeat(len(ids))
            yield output

    monkeypatch.setattr(engine, "run", run)


def chat(server: Running, **more: Any) -> Any:
    answer = server.chat("3 plus 4.5?", tools=TOOLS, max_tokens=1, **more)
    return answer["choices"][0]


def test_a_chat_calls_tools(tooled: tuple[Any, Running], monkeypatch: pytest.MonkeyPatch) -> None:
    fmt, server = tooled
    answers = {
        "hermes": f"Let me see.<tool_call>{ADD}</tool_call>",
        "mistral": f"Let me see.[TOOL_CALLS][{ADD}]",
        "llama3_json": ADD.replace("arguments", "parameters"),
    }
    says(server, monkeypatch, answers[fmt.name])
    choice = chat(server)
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert message["content"] == (None if fmt is LLAMA else "Let me see.")
    (call,) = message["tool_calls"]
    assert call["type"] == "function" and call["id"].isalnum() and len(call["id"]) == 9
    assert call["function"]["name"] == "add" and json.loads(call["function"]["arguments"]) == ADDED[1]
    assert chat(server) == choice, "the same call has the same id"

    body = {"messages": [{"role": "user", "content": "3 plus 4.5?"}], "tools": TOOLS, "max_tokens": 1}
    lines = server.post("/v1/chat/completions", {**body, "stream": True}).text.split("\n\n")
    parts = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    assert "".join(part["delta"].get("content") or "" for part in parts) == (message["content"] or "")
    (streamed,) = (part["delta"]["tool_calls"] for part in parts if "tool_calls" in part["delta"])
    assert streamed == [{"index": 0, **call}] and parts[-1]["finish_reason"] == "tool_calls"

    said = {**message, "role": "assistant"}
    told = {"role": "tool", "tool_call_id": call["id"], "content": "7.5"}
    again = server.post("/v1/chat/completions", {**body, "messages": [*body["messages"], said, told]})
    assert again.status_code == 200, again.text


def test_text_stays_text(tooled: tuple[Any, Running], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no whole call, and every answer of those who offer no tools."""
    fmt, server = tooled
    call = {"hermes": f"<tool_call>{ADD}</tool_call>", "mistral": f"[TOOL_CALLS][{ADD}]",
            "llama3_json": ADD.replace("arguments", "parameters")}[fmt.name]  # fmt: skip
    for text in ("The sum is 7.5.", call[:-3]):
        says(server, monkeypatch, text)
        choice = chat(server)
        assert choice["message"] == {"role": "assistant", "content": text} and choice["finish_reason"] == "stop"
        monkeypatch.undo()
    says(server, monkeypatch, call)
    for raw in (
        server.chat("3 plus 4.5?", max_tokens=1),
        server.chat("3?", tools=TOOLS, tool_choice="none", max_tokens=1),
    ):
        assert raw["choices"][0]["message"] == {"role": "assistant", "content": call}
    monkeypatch.undo()
    says(server, monkeypatch, call, "length")
    cut = chat(server)
    assert cut["finish_reason"] == "length" and cut["message"]["tool_calls"], "an answer that was cut off says so"


def test_other_choices_are_refused(served: Running) -> None:
    for field, value in (
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function"}),
        ("parallel_tool_calls", False),
    ):
        body = {"messages": [{"role": "user", "content": "a"}], field: value}
        refused = served.post("/v1/chat/completions", body)
        assert refused.status_code == 400 and f"{field}: not built" in refused.json()["error"]["message"], refused.text
        assert refused.json()["error"]["param"] == field


def test_a_long_stream_with_tools_gives_its_content_before_the_call(tmp_path: Path) -> None:
    """Growing text stops before the call's mark, and holds back what may be its beginning."""
    from evalengine.serve.token_texts import GrowingText

    with running() as server:
        tokenizer = server.llm.tokenizer
    text = f"a < b.<tool_call>{ADD}</tool_call>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    growing = GrowingText(tokenizer, ("<tool_call>",))
    given = "".join(growing.more(ids[:end]) for end in range(1, len(ids)))
    assert given == "a < b." and growing.rest("a < b.") == ""
    assert growing.rest(text) == text.removeprefix("a < b."), "a call that is not whole is given after all"
