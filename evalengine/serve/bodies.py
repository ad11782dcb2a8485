"""The bodies of requests: OpenAI's fields, and vLLM's for what OpenAI's have no word for.

A field that would change the answer and is not built is refused unless it has the value at which it changes nothing;
an unknown field is refused, too: an answer in which a setting was ignored is worse than none.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from evalengine.serve.errors import ApiError

T = TypeVar("T", bound=BaseModel)
CURES = {
    "functions": "not built; tools are",
    "function_call": "not built; tool_choice is",
    "reasoning_effort": "not built; chat_template_kwargs gives it to a template that reads it",
}
Prompts = str | list[int] | list[str] | list[list[int]]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    model: str | None = None  # null: the model that is served
    user: Any = None  # who asks, what for and at which price changes no answer
    metadata: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None


class StreamOptions(BaseModel):
    """Whether a stream ends with the tokens' counts."""

    model_config = ConfigDict(strict=True, extra="forbid")

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
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0)
    repetition_penalty: float | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: int | None = Field(None, ge=0)
    frequency_penalty: Literal[0] | float | None = None
    presence_penalty: Literal[0] | float | None = None
    logit_bias: dict[str, Any] | None = None
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


class ChatBody(SamplingBody):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)  # null: as many as there is room for
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: Literal[True] | None = None  # how many calls are written is for the model to say
    chat_template_kwargs: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    modalities: list[Literal["text"]] | None = None
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
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(_Body):
    """`POST /detokenize`."""

    tokens: list[int]


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
        raise ApiError(400, "; ".join([*lines][:5]), names[0]) from error


def _words(item: Any) -> str:
    """What pydantic found, in words for who wrote the body."""
    if item["type"] == "extra_forbidden":
        return "no such field here, or it is not built"
    if item["type"] == "none_required":
        return CURES.get(item["loc"][0], "not built; leave it out")
    if item["type"] == "literal_error":
        return f"not built: {str(item['msg'])[0].lower()}{str(item['msg'])[1:]}"
    return str(item["msg"])
