"""The engine's requests and outputs: plain data, no tensors on a device.

A request is token ids and a question about them. Two kinds are enough: `GenerateRequest` samples new tokens,
`ScoreRequest` requests the log-likelihood of given ones (a rolling log-likelihood is a `ScoreRequest` per window).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge, Le, Predicate
from pydantic import BeforeValidator, InstanceOf, PlainValidator

from evalengine.config.schema import NonEmpty, Real, Share, Whole
from evalengine.errors import ConfigError
from evalengine.models.processors import LogitsProcessors, Natural, TokenIdTuple, Unicode, as_tuple, of_plain, read_ids
from evalengine.records.schema import Answer
from evalengine.util.validation import LARGEST, must, read_fields

FinishReason = Literal["stop", "length"]
MIN_TEMPERATURE = 1e-6  # 1/T times a logprob stays far inside float64; a colder sample is as good as greedy
TokenIds = Annotated[list[int], PlainValidator(read_ids)]
Integer = Annotated[Whole, Ge(-LARGEST - 1), Le(LARGEST)]
Positive = Annotated[Whole, Ge(1), Le(LARGEST)]
Temperature = Annotated[
    Real, Predicate(lambda value: value == 0 or MIN_TEMPERATURE <= value <= sys.float_info.max),
    must(f"be 0 (greedy), or at least {MIN_TEMPERATURE}"),
]  # fmt: skip
Stops = Annotated[
    tuple[Annotated[str, Predicate(bool)], ...],
    BeforeValidator(lambda stop: (stop,) if isinstance(stop, str) else as_tuple(stop)),
    must("be a non-empty string, or a list of them"),
]
# NumPy's truth values as Python's.
Flag = Annotated[bool, BeforeValidator(lambda flag: bool(flag) if isinstance(flag, np.bool_) else flag)]


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are chosen. temperature 0 is greedy; ties go to the lowest token id.

    `seed` and `noise_key` alone set the noise (with the position and the token id): never the batch slot.

    Raises: ConfigError that lists every field of another type or out of range. Nothing is rounded or parsed: 2.5 and
    "3" are no numbers of tokens. NumPy's and torch's scalars are taken.
    """

    max_tokens: Positive = 256
    temperature: Temperature = 0.0
    top_k: Natural = 0  # 0: off
    top_p: Share = 1.0
    stop: Stops = ()  # stop strings, removed from the text; the tokens up to the completing one stay
    stop_token_ids: TokenIdTuple | None = None  # None: the model's end-of-sequence ids
    ignore_eos: Flag = False
    seed: Integer = 0
    noise_key: Unicode | None = None  # e.g. "task/document/repeat"; None: the prompt's token ids
    logprobs: Natural = 0  # alternatives reported per position, in addition to the chosen token
    processors: InstanceOf[LogitsProcessors] | None = None  # None: the model's; LogitsProcessors(): none
    # The token id or text that ends a thinking: stop strings hold behind it, and `RequestOutput.text` begins there.
    think_end_token: Annotated[Natural | NonEmpty, must("be a token id, a non-empty text, or None")] | None = None
    n: Positive = 1  # samples of a prompt (`LLM.generate`); a `GenerateRequest` is one of them

    def __post_init__(self) -> None:
        read_fields(self)
        if self.n > 1 and self.temperature == 0:
            raise ConfigError(f"n={self.n}: at temperature=0 all samples are the same one; set a temperature")

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any]) -> SamplingParams:
        """These fields in plain values, as `asdict` gives them. Raises TypeError for one that there is not."""
        processors = plain.get("processors")
        return cls(**{**plain, "processors": None if processors is None else of_plain(processors)})


@dataclass(frozen=True)
class GenerateRequest:
    """A request for up to `params.max_tokens` new tokens after `prompt_ids`, any sequence or array of integers.

    `sample` numbers requests that are otherwise equal: each number has different noise. `partial` is the start of
    the answer, as an engine of the same model computed it with fewer `max_tokens`: the output is the whole answer.

    Raises: ConfigError that lists every field of another type.
    """

    request_id: Integer
    prompt_ids: TokenIds
    params: InstanceOf[SamplingParams] = field(default_factory=SamplingParams)
    sample: Natural = 0
    partial: Answer | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        read_fields(self)
        if self.params.n > 1:
            raise ConfigError(f"params: n={self.params.n}: a request is one sample; make {self.params.n} of them, with "
                              "sample=0, 1, ...")  # fmt: skip


_last_context: tuple[object, list[int]] = None, []  # the last list that was given as a context, and its copy


def _read_context(value: object) -> list[int]:
    """The token ids of a context. The types of one that a document's choices share are checked once: for contexts of a
    thousand tokens that took a quarter of the time of planning."""
    global _last_context
    given, read = _last_context
    if value is given and value == read:
        return read
    ids = read_ids(value)
    if type(value) is list:  # arrays do not compare as lists do
        _last_context = value, ids
    return ids


@dataclass(frozen=True)
class ScoreRequest:
    """A request for the log-likelihood of `continuation_ids` after `context_ids` (a token each at least) by the raw
    model.

    Requests with equal contexts that are submitted together share the context's computation. Requests that are made one
    after another from one list as their context share one copy of it, too.

    Raises: ConfigError that lists every field of another type.
    """

    request_id: Integer
    context_ids: Annotated[list[int], PlainValidator(_read_context)]
    continuation_ids: TokenIds
    logprobs: Natural = 0  # alternatives reported per position

    @property
    def prompt_ids(self) -> list[int]:
        """The context, by the name that it has in every kind of request and in `RequestOutput`."""
        return self.context_ids

    def __post_init__(self) -> None:
        read_fields(self)


Request = GenerateRequest | ScoreRequest


@dataclass
class RequestOutput:
    """One finished request. For a `ScoreRequest`, `token_ids` is the continuation."""

    request_id: int
    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: np.ndarray  # float32 [len(token_ids)]: natural log-probability of each token, by the raw model
    finish_reason: FinishReason
    text: str = ""  # the text behind the thinking, cut before the stop string; empty for a ScoreRequest
    # Whether every token is the raw model's arg max (lowest id among ties). With logits processors in force, those of a
    # generation at temperature 0 need not be.
    is_greedy: bool = False
    top_logprobs: list[dict[int, float]] | None = None  # per position: token id -> logprob, best first
    # Why the request failed (a non-finite activation): a score is then NaN, a generation ends before that token.
    error: str | None = None
    others: list[RequestOutput] = field(default_factory=list)  # the prompt's further samples (`SamplingParams.n`)

    @classmethod
    def of(cls, request: Request, answer: Answer) -> RequestOutput:
        """The output of a request that was answered before."""
        top = None
        if answer.top_ids is not None and answer.top_logprobs is not None:
            tables = zip(answer.top_ids.tolist(), answer.top_logprobs.tolist(), strict=True)
            top = [dict(zip(ids, values, strict=True)) for ids, values in tables]
        return cls(
            request_id=request.request_id,
            prompt_ids=request.prompt_ids,
            token_ids=[*answer.output_ids],
            logprobs=answer.logprobs,
            finish_reason="stop" if answer.finish_reason == "stop" else "length",
            text=answer.text,
            is_greedy=answer.is_greedy,
            top_logprobs=top,
        )

    @property
    def answer(self) -> Answer:
        """The output without its request, as journals, caches and records keep it; its alternatives are arrays."""
        ids = values = None
        if self.top_logprobs is not None:
            ids = np.array([[*by_token] for by_token in self.top_logprobs], dtype=np.int32)
            values = np.array([[*by_token.values()] for by_token in self.top_logprobs], dtype=np.float32)
        said = self.finish_reason, self.text, self.is_greedy
        return Answer(self.token_ids, self.logprobs, *said, top_ids=ids, top_logprobs=values)

    @property
    def outputs(self) -> list[RequestOutput]:
        """All samples of the prompt, this one first."""
        return [self, *self.others]

    @property
    def sum_logprob(self) -> float:
        """The log-likelihood: the correctly rounded float64 sum of the float32 logprobs."""
        return math.fsum(self.logprobs.tolist())
