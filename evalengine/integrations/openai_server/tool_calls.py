"""The calls of tools in a model's answer. Which way a model writes them its chat template says: the template of a known
format shows the model its marks. An answer whose calls are not whole, or of no tool that was offered, stays text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NoReturn

Call = tuple[str, dict[str, Any]]  # a function's name, its arguments
ID_LENGTH = 9  # hexadecimal digits: Mistral's templates take ids of nine letters and digits alone


@dataclass(frozen=True)
class CallShape:
    """The text around the JSON of calls, for answers that must call: as the models' templates write it."""

    begin: str = ""  # of the answer
    opening: str = ""  # of each call
    closing: str = ""
    between: str = ""  # two calls
    end: str = ""  # of the answer
    mark: str = ""  # a text before `begin`, which tokenizers may have as a special token


@dataclass(frozen=True)
class ToolFormat:
    """One way to write calls."""

    name: str
    sign: str  # in the chat templates of models that write so
    opening: str | None  # the text before which an answer is content alone; None: a stream gives it whole
    # (what is read, the answer with its special tokens' texts) -> (the content before the calls, the calls as they
    # stand). Raises ValueError for what is no whole call.
    read: Callable[[str, str], tuple[str, list[Any]]]
    shape: CallShape
    arguments: str = "arguments"  # the field of a call that holds them

    def calls(self, text: str, raw: str, offered: Collection[str]) -> tuple[str, list[Call]]:
        """The content, and the calls of an answer; all of it, and none, where they are not whole.

        text: the answer as it is shown. raw: the same with special tokens. offered: the functions' names.
        """
        try:
            content, found = self.read(text, raw)
            return content, [self._call(one, offered) for one in found]
        except (ValueError, RecursionError):
            return text, []

    def _call(self, value: Any, offered: Collection[str]) -> Call:
        if not isinstance(value, dict) or value.get("name") not in offered:
            raise ValueError("no function that was offered")
        arguments = value.get(self.arguments)
        if not isinstance(arguments, dict):
            raise ValueError("arguments are a JSON object")
        _text_of(arguments).encode()  # refuses what JSON cannot carry: 1e999, and half of a surrogate pair
        return value["name"], arguments


def _hermes(text: str, raw: str) -> tuple[str, list[Any]]:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one or more, at the end."""
    content, opening, rest = text.partition(HERMES_OPENING)
    found = []
    while opening:
        value, end = _json(rest)
        closed, mark, rest = rest[end:].partition("</tool_call>")
        between, opening, rest = rest.partition(HERMES_OPENING)
        if not mark or closed.strip() or between.strip():
            raise ValueError("no whole call")
        found.append(value)
    return content, found


def _llama(text: str, raw: str) -> tuple[str, list[Any]]:
    """`{"name": ..., "parameters": {...}}`, several with `;` between them, and nothing else."""
    rest, found = text.strip().removeprefix("<|python_tag|>").strip(), []
    while rest:
        value, end = _json(rest)
        found.append(value)
        rest = rest[end:].lstrip().removeprefix(";").lstrip()
    return "", found


def _mistral(text: str, raw: str) -> tuple[str, list[Any]]:
    """`[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`; the mark is a special token, which no text shows."""
    _, opening, rest = raw.partition("[TOOL_CALLS]")
    if not opening:
        return text, []
    found, end = _json(rest)
    before, _, after = text.rpartition(rest[:end].strip())
    if not isinstance(found, list) or after.strip():
        raise ValueError("no list of calls at the end")
    return before.rstrip().removesuffix("[TOOL_CALLS]").rstrip(), found


def _json(text: str) -> tuple[Any, int]:
    """The JSON value that a text begins with, behind white space, and where it ends."""
    blank = len(text) - len(text.lstrip())
    value, end = _DECODER.raw_decode(text, blank)
    return value, end


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


HERMES_OPENING = "<tool_call>"
_DECODER = json.JSONDecoder(parse_constant=_no_number)
FORMATS = (
    ToolFormat("hermes", HERMES_OPENING, HERMES_OPENING, _hermes,
               CallShape(opening=f"{HERMES_OPENING}\n", closing="\n</tool_call>", between="\n")),
    ToolFormat("mistral", "[TOOL_CALLS]", None, _mistral,
               CallShape(mark="[TOOL_CALLS]", begin=" [", between=", ", end="]")),
    ToolFormat("llama3_json", '"parameters": dictionary of argument name', None, _llama,
               CallShape(between="; "), "parameters"),
)  # fmt: skip


def find_format(template: str | None) -> ToolFormat | None:
    """The format that a chat template shows its model; None for one that is not known."""
    return next((one for one in FORMATS if template is not None and one.sign in template), None)


def entries(calls: list[Call], answer: str) -> list[dict[str, Any]]:
    """The calls in OpenAI's shape. answer: its name, of which the ids are made: the same each time."""
    said = []
    for number, (name, arguments) in enumerate(calls):
        digest = hashlib.sha256(f"{answer} {number}".encode()).hexdigest()
        function = {"name": name, "arguments": _text_of(arguments)}
        said.append({"id": digest[:ID_LENGTH], "type": "function", "function": function})
    return said


def _text_of(arguments: dict[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False, allow_nan=False)


def with_objects(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose calls hold their arguments as templates read them: an object, where a client sends its text."""
    calls = message.get("tool_calls")
    return message if not isinstance(calls, list) else {**message, "tool_calls": [_with_object(call) for call in calls]}


def _with_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def offered(tools: list[dict[str, Any]] | None) -> tuple[str, ...]:
    """The names of the functions that a request offers."""
    functions = [tool.get("function") for tool in tools or []]
    names = [one.get("name") for one in functions if isinstance(one, dict)]
    return tuple(name for name in names if isinstance(name, str))
