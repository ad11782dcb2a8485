"""The bodies of requests: OpenAI's fields, and vLLM's for what OpenAI's have no word for.

A field that would change the answer and is not built is refused unless it has the value at which it changes nothing;
an unknown field is refused, too: an answer in which a setting was ignored is worse than none.
"""

from __future__ import annotations

from itertools import islice
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError, model_validator

from evalengine.models.processors import LARGEST_BIAS, LARGEST_PENALTY
from evalengine.serve.errors import MOST_PROBLEMS, ApiError

T = TypeVar("T", bound=BaseModel)
CURES = {
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
    user: Any = None  # who asks, what for and at which price changes no answer
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
    """What completions and chats have in common."""

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
    """What pydantic found, in words for who wrote the body."""
    if item["type"] == "extra_forbidden":
        return "no such field here, or it is not built"
    if item["type"] == "none_required":
        return CURES.get(item["loc"][0], "not built; leave it out")
    if item["type"] == "literal_error":
        return f"not built: {str(item['msg'])[0].lower()}{str(item['msg'])[1:]}"
    return str(item["msg"])
