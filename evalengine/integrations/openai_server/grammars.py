"""From `response_format` and `tool_choice` to the grammar of an answer, and its check before it reaches the engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evalengine.engine.text import grammar
from evalengine.integrations.openai_server.errors import ApiError
from evalengine.integrations.openai_server.tool_calls import ToolFormat

MOST_CHARACTERS = 1 << 15  # of a grammar: one step of a text constant of this length takes 75 ms and 11 MB
# One space, or a line break and indentation. Without a bound a small model may write white space up to max_tokens.
JSON_OPTIONS = {"whitespace_pattern": r"( |\n {0,32})"}
NOT_INSTALLED = "llguidance is not installed on this server: pip install 'evalengine[serve]'"
_NAMES = {"text": ("type",), "json_object": ("type",), "json_schema": ("type", "json_schema")}
_NAMES_OF_A_SCHEMA = ("name", "description", "schema", "strict")


@dataclass(frozen=True)
class AnswerGrammar:
    """The grammar that an answer must follow, and the request's field that sets it."""

    text: str  # Lark, in llguidance's dialect
    param: str


def of_format(given: Mapping[str, Any] | None) -> AnswerGrammar | None:
    """The grammar of a `response_format`; None for text. Raises ApiError for what is none."""
    if given is None:
        return None
    kind = given.get("type")
    if not isinstance(kind, str) or kind not in _NAMES:
        raise _wrong(f"its type must be one of {', '.join(_NAMES)}")
    if further := sorted(given.keys() - {*_NAMES[kind]}):
        raise _wrong(f"{kind} has no field {further[0][:60]!r}")
    if kind == "text":
        return None
    schema: Any = {"type": "object"}
    if kind == "json_schema":
        described = given.get("json_schema")
        if not isinstance(described, dict) or not isinstance(described.get("schema"), dict):
            raise _wrong("json_schema must be an object whose schema is an object")
        if further := sorted(described.keys() - {*_NAMES_OF_A_SCHEMA}):
            raise _wrong(f"json_schema has no field {further[0][:60]!r}")
        if not isinstance(described.get("strict"), bool | None):
            raise _wrong("strict must be true or false")
        if not all(isinstance(described.get(name, ""), str) for name in ("name", "description")):
            raise _wrong("name and description must be texts")
        schema = described["schema"]
    return AnswerGrammar(_limited(f"start: {_json_rule(schema, 'response_format')}", "response_format"),
                         "response_format")  # fmt: skip


def of_tools(
    tools: list[dict[str, Any]] | None, named: str | None, tool_format: ToolFormat | None, special: Mapping[str, int]
) -> AnswerGrammar:
    """The grammar of an answer that calls tools: one call of the function `named`, or else one or more of any.

    special: the tokenizer's special tokens. Raises ApiError, also where the model's format of calls is not known.
    """
    functions = [tool.get("function") for tool in tools or []]
    some = [one for one in functions if isinstance(one, dict) and isinstance(one.get("name"), str)]
    if named is not None:
        some = [one for one in some if one["name"] == named]
    if not some:
        raise _wrong(
            "no function of tools has this name" if named is not None else "required needs tools", "tool_choice"
        )
    if tool_format is None:
        raise _wrong("the model's chat template has no known format of tool calls", "tool_choice")
    shape = tool_format.shape
    mark = f"<[{special[shape.mark]}]>" if shape.mark in special else _literal(shape.mark)
    further = "" if named is not None else f"({_literal(shape.between)} call)*"
    lines = [" ".join(["start:", mark, _literal(shape.begin), "call", further, _literal(shape.end)]),
             f"call: {' | '.join(f'call_{number}' for number in range(len(some)))}"]  # fmt: skip
    for number, one in enumerate(some):
        schema = {"type": "object"} if one.get("parameters") is None else one["parameters"]
        if not isinstance(schema, dict) or schema.get("type", "object") != "object":
            raise _wrong("the parameters of a function must be a schema of an object", "tools")
        before = f'{shape.opening}{{"name": {json.dumps(one["name"])}, "{tool_format.arguments}": '
        rule = _json_rule({"type": "object", **schema}, "tools")
        lines.append(f"call_{number}: {_literal(before)} {rule} {_literal('}' + shape.closing)}")
        text = _limited("\n".join(lines), "tools")
    return AnswerGrammar(text, "tools")


def _literal(text: str) -> str:
    return json.dumps(text) if text else ""


def _json_rule(schema: Mapping[str, Any], param: str) -> str:
    """A rule for JSON of a schema. The client's options for llguidance, which could make it ignore keywords, are
    replaced. Raises ApiError for a schema that is too long or too deep, without writing all of it."""
    parts, size = [], 0
    try:
        for part in json.JSONEncoder(allow_nan=False).iterencode({**schema, "x-guidance": JSON_OPTIONS}):
            parts.append(part)
            size += len(part)
            if size > MOST_CHARACTERS:
                raise _wrong(_TOO_LONG, param)
    except (ValueError, RecursionError) as error:
        raise _wrong("the schema is nested too deeply, or contains a number that JSON cannot express", param) from error
    return f"%json {''.join(parts)}"


_TOO_LONG = f"the schema has more than {MOST_CHARACTERS:,} characters of JSON"


def _limited(text: str, param: str) -> str:
    if len(text) > MOST_CHARACTERS:
        raise _wrong(_TOO_LONG, param)
    return text


def _wrong(why: str, param: str = "response_format") -> ApiError:
    return ApiError(400, f"{param}: {why}", param)


class Grammars:
    """Compiles the grammars of one model's requests.

    `compiled` may take seconds, so it is called in one its own thread: clients without a grammar do not wait for it.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        """tokenizer: the engine's own object, for which grammars are cached."""
        self._of_model = tokenizer, vocab_size, eos_ids
        self.library = grammar.library()
        self._problem = "" if self.library else NOT_INSTALLED
        if self.library:
            try:  # now: writing the tokenizer as JSON lets no other thread run
                grammar.token_table(tokenizer, vocab_size, eos_ids)
            except ValueError as error:
                self._problem = f"llguidance cannot read the model's tokenizer: {error}"

    def check_installed(self, param: str) -> str:
        """The library and its version. Raises ApiError if grammars cannot be had here."""
        if self._problem or self.library is None:
            raise _wrong(self._problem, param)
        return self.library

    def compiled(self, wanted: AnswerGrammar, count: int) -> grammar.Grammar:
        """The grammar, built for so many sequences, to be referenced until the engine has answered.

        Raises: ApiError for one that is not supported.
        """
        tokenizer, vocab_size, eos_ids = self._of_model
        found = grammar.compiled(tokenizer, wanted.text, vocab_size, eos_ids)
        if found.error or not found.begins():
            raise _wrong(f"not supported: {_first_line(found.error or 'no answer conforms to it')}", wanted.param)
        found.prepare(count)
        return found


def _first_line(error: str) -> str:
    """llguidance's first line, without its place in a grammar that the client has not written."""
    line = error.partition("\n")[0]
    _, found, said = line.partition("failed to compile JSON schema: ")
    return (said if found else line)[:300]
