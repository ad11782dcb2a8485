"""Calls of tools: read out of the answers of models whose template shows a known format, else text."""

from __future__ import annotations

import tests.serve.needs  # noqa: F401  # first

# isort: split

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evalengine.engine.request import RequestOutput
from evalengine.engine.text.detokenizer import Detokenizer
from evalengine.integrations.openai_server.errors import ApiError
from evalengine.integrations.openai_server.grammars import of_tools
from evalengine.integrations.openai_server.tool_calls import FORMATS, find_format, offered, with_objects
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


PARAMETERS = {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "required": ["a"],
              "additionalProperties": False, "$defs": {"n": {"enum": [1, 22]}}}  # fmt: skip
QUOTED = 'é"\\n'  # as a name that must be escaped
NUMBERED = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("add", QUOTED)]


def test_an_answer_that_must_call_calls(tooled: tuple[Any, Running]) -> None:
    """`required` and a named function: any answer that the grammar allows is read as whole calls."""
    grammar = pytest.importorskip("evalengine.engine.text.grammar")
    pytest.importorskip("llguidance", reason="needs llguidance: pip install 'evalengine[serve]'")
    fmt, server = tooled
    spec, tokenizer, rng = server.llm.spec, server.llm.tokenizer, random.Random(2)
    ends, counts = [*spec.eos_token_ids], []
    for named in (None, None, None, QUOTED):
        text = of_tools(NUMBERED, named, fmt, {}).text
        compiled = grammar.compiled(tokenizer, text, spec.vocab_size, ends)
        constraint, ids = compiled.constraint(spec.vocab_size, ends, None), []
        while not (allowed := constraint.allowed(ids))[ends].all() or (
            rng.random() < 0.5 and allowed.sum() != len(ends)
        ):
            allowed[ends] = False
            ids.append(rng.choice(allowed.nonzero()[0].tolist()))
            assert len(ids) < 1000
        answer = tokenizer.decode(ids)
        content, calls = fmt.calls(answer, answer, ("add", QUOTED))
        assert not content and calls and all(arguments in ({"a": 1}, {"a": 22}) for _, arguments in calls), answer
        assert named is None or [name for name, _ in calls] == [named]
        counts.append(len(calls))
    assert max(counts) > 1


def test_tool_choice(tooled: tuple[Any, Running]) -> None:
    pytest.importorskip("llguidance", reason="needs llguidance: pip install 'evalengine[serve]'")
    _, server = tooled
    body: dict[str, Any] = {"tools": NUMBERED, "max_tokens": 60}
    free = server.chat("3 plus 4.5?", **body | {"max_tokens": 9})["choices"][0]
    assert "tool_calls" not in free["message"], "by itself the model calls nothing"
    named = {"type": "function", "function": {"name": "add"}}
    choice = server.chat("3 plus 4.5?", tool_choice=named, **body)["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "add" and choice["finish_reason"] == "tool_calls"
    assert not choice["message"]["content"]

    messages = [{"role": "user", "content": "a"}]
    for wrong, param in (
        ({"tool_choice": {"type": "function", "function": {"name": "mul"}}}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required", "tools": [{"function": {"name": "f", "parameters": {"not": {}}}}]}, "tools"),
        ({"tool_choice": "required", "tools": [{"function": {"name": "f", "parameters": {"type": "array"}}}]}, "tools"),
    ):
        answer = server.post("/v1/chat/completions", {"messages": messages, "tools": NUMBERED, **wrong})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


def test_a_mark_that_is_a_special_token_is_that_token() -> None:
    tool = [{"function": {"name": "f"}}]
    assert of_tools(tool, None, MISTRAL, {"[TOOL_CALLS]": 5}).text.startswith('start: <[5]> " [" call')
    assert of_tools(tool, "f", MISTRAL, {}).text.startswith('start: "[TOOL_CALLS]" " [" call  "]"')
    with pytest.raises(ApiError, match="no known format of tool calls"):
        of_tools(tool, None, None, {})


def test_other_choices_are_refused(served: Running) -> None:
    for field, value in (
        ("tool_choice", "any"),
        ("tool_choice", {"type": "function"}),
        ("tool_choice", "required"),  # without tools
        ("parallel_tool_calls", False),
    ):
        body = {"messages": [{"role": "user", "content": "a"}], field: value}
        refused = served.post("/v1/chat/completions", body)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == field, refused.text
        assert refused.json()["error"]["message"].startswith(f"{field}: ")


def test_a_long_stream_with_tools_gives_its_content_before_the_call(tmp_path: Path) -> None:
    """Growing text stops before the call's mark, and holds back what may be its beginning."""
    from evalengine.integrations.openai_server.token_texts import GrowingText

    with running() as server:
        tokenizer = server.llm.tokenizer
    text = f"a < b.<tool_call>{ADD}</tool_call>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    growing = GrowingText(tokenizer, ("<tool_call>",))
    given = "".join(growing.more(ids[:end]) for end in range(1, len(ids)))
    assert given == "a < b." and growing.rest("a < b.") == ""
    assert growing.rest(text) == text.removeprefix("a < b."), "a call that is not whole is given after all"
