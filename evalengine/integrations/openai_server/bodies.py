"""The bodies of requests: OpenAI's fields, and vLLM's for what OpenAI's have no word for.

A field that would change the answer and is not built is refused unless it has the value at which it changes nothing;
an unknown field is refused, too: an answer in which a setting was ignored is worse than none.

A long body does not stop the other threads. The standard library's reader of JSON keeps the interpreter's lock until it
is done: 0.1 s for a million numbers, seconds for millions of lists, whose garbage collection stops all threads, too.
`read_json` walks the lists and objects of a long body in Python, reads strings and runs of numbers with the library,
and gives up beyond `MOST_VALUES`.
"""

from __future__ import annotations

import json
import re
from itertools import islice
from json import JSONDecodeError
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError, model_validator

from evalengine.integrations.openai_server.errors import MOST_PROBLEMS, ApiError
from evalengine.models.processors import LARGEST_BIAS, LARGEST_PENALTY
from evalengine.util.plain_files import MAX_JSON_DEPTH, parse_json
from evalengine.util.validation import is_unicode

SHORT = 1 << 16  # bytes: the library reads so many in 2 ms at most
MOST_VALUES = 1 << 17  # in a body: strings, names, lists, objects, true, false and null; numbers are not counted
_SPACE = re.compile(r"[ \t\n\r]*")
_NUMBERS = re.compile(r"[-+.0-9eE, \t\n\r]{1,65536}")

T = TypeVar("T", bound=BaseModel)
FIXES = {
    "functions": "not built; tools are",
    "function_call": "not built; tool_choice is",
    "reasoning_effort": "not built; chat_template_kwargs gives it to a template that reads it",
}
MOST_UNKNOWN = 10  # unknown fields of one object that are looked at
MOST_BIASES = 1024  # tokens of `logit_bias`


class _FirstError(FailFast):
    """One error of a list is enough: it may have millions of elements."""

    __hash__ = object.__hash__  # as a part of a union needs


Bias = Annotated[float, Field(ge=-LARGEST_BIAS, le=LARGEST_BIAS)]
Tokens = Annotated[list[int], _FirstError()]
Texts = Annotated[list[str], _FirstError()]
Objects = Annotated[list[dict[str, Any]], _FirstError()]
Prompts = str | Tokens | Texts | Annotated[list[Tokens], _FirstError()]


class _Object(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _with_few_unknown(cls, value: Any) -> Any:
        """A body of unknown fields alone has one error for each of them: a few are enough."""
        if not isinstance(value, dict) or len(value) <= len(cls.model_fields):
            return value
        unknown = islice((name for name in value if name not in cls.model_fields), MOST_UNKNOWN)
        return {name: value[name] for name in cls.model_fields if name in value} | {
            name: value[name] for name in unknown
        }


class _Body(_Object):
    model: str | None = None  # null: the model that is served
    user: Any = None  # the client, its purpose and its price change no answer
    metadata: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None


class StreamOptions(_Object):
    """Whether a stream ends with the tokens' counts."""

    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None
    continuous_usage_stats: Literal[False] = False


class SamplingBody(_Body):
    """Fields that completions and chats have in common."""

    temperature: float | None = None  # null: 1, as OpenAI's
    top_p: float | None = None
    top_k: int | None = None  # 0, -1: off
    n: int | None = Field(None, ge=1)
    seed: int | None = None
    stop: str | Texts | None = None
    stop_token_ids: Tokens | None = None
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0)
    repetition_penalty: float | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: int | None = Field(None, ge=0)
    frequency_penalty: float | None = Field(None, ge=-LARGEST_PENALTY, le=LARGEST_PENALTY)
    presence_penalty: float | None = Field(None, ge=-LARGEST_PENALTY, le=LARGEST_PENALTY)
    logit_bias: dict[str, Bias] | None = Field(None, max_length=MOST_BIASES)  # token id -> bias
    skip_special_tokens: Literal[True] = True
    include_stop_str_in_output: Literal[False] = False


class CompletionBody(SamplingBody):
    """`POST /v1/completions`."""

    prompt: Prompts
    max_tokens: int | None = Field(None, ge=0)  # null: 16, as OpenAI's
    logprobs: int | None = Field(None, ge=0)
    echo: bool | None = None
    best_of: int | None = None
    suffix: Literal[""] | None = None
    add_special_tokens: bool = True


class FunctionName(_Object):
    """Names a function."""

    name: str


class NamedTool(_Object):
    """The one tool that an answer must call."""

    type: Literal["function"]
    function: FunctionName


class ChatBody(SamplingBody):
    """`POST /v1/chat/completions`."""

    messages: Objects = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)  # null: as many as there is room for
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0)
    tools: Objects | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: Literal[True] | None = None  # how many calls are written is for the model to say
    chat_template_kwargs: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    modalities: Annotated[list[Literal["text"]], _FirstError()] | None = None
    audio: None = None
    function_call: None = None
    functions: None = None
    moderation: None = None
    prediction: None = None
    reasoning_effort: None = None
    verbosity: None = None
    web_search_options: None = None
    add_generation_prompt: Literal[True] = True
    continue_final_message: Literal[False] = False


class TokenizeBody(_Body):
    """`POST /tokenize`."""

    prompt: str | None = None
    messages: Objects | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    tools: Objects | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(_Body):
    """`POST /detokenize`."""

    tokens: Tokens


def read_body(kind: type[T], value: Any) -> T:
    """The body that a JSON value is. Raises ApiError that names the fields at fault."""
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object")
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False, include_context=False)
        names = [".".join(map(str, item["loc"][:1])) for item in found]
        lines = dict.fromkeys(f"{name}: {_words(item)}" for name, item in zip(names, found, strict=True))
        raise ApiError(400, "; ".join([*lines][:MOST_PROBLEMS]), names[0]) from error


def _words(item: Any) -> str:
    """A problem that pydantic found, in words for the client."""
    if item["type"] == "extra_forbidden":
        return "no such field here, or it is not built"
    if item["type"] == "none_required":
        return FIXES.get(item["loc"][0], "not built; leave it out")
    if item["type"] == "literal_error":
        return f"not built: {str(item['msg'])[0].lower()}{str(item['msg'])[1:]}"
    return str(item["msg"])


_decode = json.JSONDecoder().raw_decode


def read_json(content: bytes) -> Any:
    """The value of a body in UTF-8, UTF-16 or UTF-32. All its strings are Unicode.

    Raises: ValueError if it is no JSON, holds half of a surrogate pair, or more than `MOST_VALUES` values.
    """
    text = content.decode(json.detect_encoding(content))
    if len(content) > SHORT:
        return _Reader(text).whole()
    value = parse_json(text)
    if "\\u" in text and not is_unicode(json.dumps(value, ensure_ascii=False)):
        raise ValueError(_HALF)
    return value


_HALF = "a text holds half of a surrogate pair, which is no character"


class _Reader:
    """Reads one text. Each method takes the place of a value's first character, or that behind a bracket, and returns
    the place behind the value, too."""

    def __init__(self, text: str) -> None:
        self._text, self._num_values = text, 0
        self._has_escapes = "\\u" in text

    def whole(self) -> Any:
        try:
            value, end = self._value(self._skip_space(0), 0)
        except ValueError as error:
            if "integer string" in str(error):  # Python's message names a function that raises the limit
                raise ValueError("it holds an integer of thousands of digits") from error
            raise
        if end != len(self._text):
            raise JSONDecodeError("Extra data", self._text, end)
        return value

    def _value(self, at: int, depth: int) -> tuple[Any, int]:
        first = self._text[at : at + 1]
        value: Any
        if first in ("[", "{"):
            if depth == MAX_JSON_DEPTH:
                raise ValueError("its values are nested too deeply")
            self._count()
            value, at = (self._list if first == "[" else self._object)(self._skip_space(at + 1), depth + 1)
        else:
            value, at = _decode(self._text, at)
            if type(value) not in (int, float):
                self._count()
            if self._has_escapes and isinstance(value, str) and not is_unicode(value):
                raise ValueError(_HALF)
        return value, self._skip_space(at)

    def _list(self, at: int, depth: int) -> tuple[list[Any], int]:
        values: list[Any] = []
        if self._text[at : at + 1] == "]":
            return values, at + 1
        while True:
            run = _NUMBERS.match(self._text, at)
            if run and (end := self._text.rfind(",", at, run.end())) > at:  # what is left begins with a value
                values += self._numbers(at, end)
                at = self._skip_space(end + 1)
                continue
            value, at = self._value(at, depth)
            values.append(value)
            if self._ends("]", at):
                return values, at + 1
            at = self._skip_space(at + 1)

    def _numbers(self, at: int, end: int) -> list[Any]:
        try:
            numbers: list[Any] = json.loads(f"[{self._text[at:end]}]")
        except JSONDecodeError as error:
            raise JSONDecodeError(error.msg, self._text, at + error.pos - 1) from error
        return numbers

    def _object(self, at: int, depth: int) -> tuple[dict[str, Any], int]:
        values: dict[str, Any] = {}
        if self._text[at : at + 1] == "}":
            return values, at + 1
        while True:
            if self._text[at : at + 1] != '"':
                raise JSONDecodeError("Expecting property name enclosed in double quotes", self._text, at)
            name, at = self._value(at, depth)
            if self._text[at : at + 1] != ":":
                raise JSONDecodeError("Expecting ':' delimiter", self._text, at)
            values[name], at = self._value(self._skip_space(at + 1), depth)
            if self._ends("}", at):
                return values, at + 1
            at = self._skip_space(at + 1)

    def _ends(self, bracket: str, at: int) -> bool:
        """Whether the list or object ends here. Raises JSONDecodeError if no comma stands here otherwise."""
        if (found := self._text[at : at + 1]) not in (bracket, ","):
            raise JSONDecodeError("Expecting ',' delimiter", self._text, at)
        return found == bracket

    def _skip_space(self, at: int) -> int:
        space = _SPACE.match(self._text, at)
        assert space is not None, "no space is a match, too"
        return space.end()

    def _count(self) -> None:
        self._num_values += 1
        if self._num_values > MOST_VALUES:
            raise ValueError(f"it holds more than {MOST_VALUES:,} strings, lists and objects; send several requests")
