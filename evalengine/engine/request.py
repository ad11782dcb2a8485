"""The engine's requests and outputs: plain data, no tensors on a device.

A request is token ids and a question about them. Two kinds are enough: `GenerateRequest` samples new tokens,
`ScoreRequest` asks for the log-likelihood of given ones (a rolling log-likelihood is a `ScoreRequest` per window).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from evalengine.config.arguments import LARGEST, Fields, integer, is_unicode, token_ids
from evalengine.models.processors import LogitsProcessors, of_plain
from evalengine.records.schema import Answer

FinishReason = Literal["stop", "length"]
MIN_TEMPERATURE = 1e-6  # 1/T times a logprob stays far inside float64; a colder sample is as good as greedy
TOKEN_IDS = "token ids, a sequence of integers"


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are chosen. temperature 0 is greedy; ties go to the lowest token id.

    `seed` and `noise_key` alone set the noise (with the position and the token id): never the batch slot.

    Raises: ConfigError that lists every field of another type or out of range. Nothing is rounded or parsed: 2.5 and
    "3" are no numbers of tokens. NumPy's and torch's scalars are taken.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    stop: tuple[str, ...] = ()  # stop strings, cut from the text; the tokens up to the completing one are kept
    stop_token_ids: tuple[int, ...] | None = None  # None: the model's end-of-sequence ids
    ignore_eos: bool = False
    seed: int = 0
    noise_key: str | None = None  # e.g. "task/document/repeat"; None: the prompt's token ids
    logprobs: int = 0  # alternatives reported per position, besides the chosen token
    processors: LogitsProcessors | None = None  # None: the model's; LogitsProcessors(): none
    # The token id or text that ends a thinking: stop strings hold behind it, and `RequestOutput.text` begins there.
    think_end_token: str | int | None = None
    n: int = 1  # samples of a prompt (`LLM.generate`); a `GenerateRequest` is one of them

    def __post_init__(self) -> None:
        read = Fields(self)
        read.integer("max_tokens", 1)
        read.integer("n", 1)
        read.number(
            "temperature", MIN_TEMPERATURE, sys.float_info.max, f"0 (greedy), or at least {MIN_TEMPERATURE}", also=0.0
        )
        read.integer("top_k", 0, meaning=" (0: off)")
        read.number("top_p", sys.float_info.min, 1.0, "a number in (0, 1]")
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        good = isinstance(stop, list | tuple) and all(isinstance(s, str) and s for s in stop)
        read.take("stop", tuple(stop) if good else None, good, "a non-empty string, or a list of them")
        if self.stop_token_ids is not None:
            ids = token_ids(self.stop_token_ids)
            read.take("stop_token_ids", None if ids is None else tuple(ids), ids is not None, "token ids, or None")
        read.flag("ignore_eos")
        read.integer("seed", -LARGEST - 1)
        read.integer("logprobs", 0)
        if self.noise_key is not None:
            good = isinstance(self.noise_key, str) and is_unicode(self.noise_key)
            read.take("noise_key", self.noise_key, good, "text (Unicode), or None")
        end = self.think_end_token
        if end is not None and not (isinstance(end, str) and end and is_unicode(end)):
            good = not isinstance(end, str) and integer(end) is not None and integer(end) >= 0  # type: ignore[operator]
            read.take("think_end_token", integer(end), good, "a token id, a non-empty text, or None")
        good = self.processors is None or isinstance(self.processors, LogitsProcessors)
        read.take("processors", self.processors, good, "LogitsProcessors, or None")
        if not read.problems and self.n > 1 and self.temperature == 0:
            read.problems.append(f"n={self.n}: at temperature=0 all samples are the same one; set a temperature")
        read.check()

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any]) -> SamplingParams:
        """These fields in plain values, as `asdict` gives them. Raises TypeError for one that there is not."""
        processors = plain.get("processors")
        return cls(**{**plain, "processors": None if processors is None else of_plain(processors)})


@dataclass(frozen=True)
class GenerateRequest:
    """Asks for up to `params.max_tokens` new tokens after `prompt_ids`, any sequence or array of integers.

    `sample` numbers requests that are otherwise equal: each number has different noise. `begun` is the start of
    the answer, as an engine of the same model computed it with fewer `max_tokens`: the output is the whole answer.

    Raises: ConfigError that lists every field of another type.
    """

    request_id: int
    prompt_ids: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    sample: int = 0
    begun: Answer | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        read = Fields(self)
        read.integer("request_id", -LARGEST - 1)
        read.token_ids("prompt_ids", TOKEN_IDS)
        read.take("params", self.params, isinstance(self.params, SamplingParams), "SamplingParams")
        read.integer("sample", 0)
        if not read.problems and self.params.n > 1:
            read.problems.append(f"params: n={self.params.n}: a request is one sample; make {self.params.n} of them, "
                                 "with sample=0, 1, ...")  # fmt: skip
        read.check()


@dataclass(frozen=True)
class ScoreRequest:
    """Asks for the log-likelihood of `continuation_ids` after `context_ids` (a token each at least) by the raw model.

    Requests with equal contexts that are submitted together share the context's computation. Requests that are made one
    after another from one list as their context share one copy of it, too.

    Raises: ConfigError that lists every field of another type.
    """

    request_id: int
    context_ids: list[int]
    continuation_ids: list[int]
    logprobs: int = 0  # alternatives reported per position

    @property
    def prompt_ids(self) -> list[int]:
        """The context, by the name that it has in every kind of request and in `RequestOutput`."""
        return self.context_ids

    def __post_init__(self) -> None:
        read = Fields(self)
        read.integer("request_id", -LARGEST - 1)
        context = _read_context(self.context_ids)
        read.take("context_ids", context, context is not None, TOKEN_IDS)
        read.token_ids("continuation_ids", TOKEN_IDS)
        read.integer("logprobs", 0)
        read.check()


_last_context: tuple[object, list[int]] = None, []  # the last list that was given as a context, and its copy


def _read_context(value: object) -> list[int] | None:
    """`token_ids` of a context. The types of one that a document's choices share are checked once: for contexts of a
    thousand tokens that took a quarter of the time of planning."""
    global _last_context
    given, read = _last_context
    if value is given and value == read:
        return read
    ids = token_ids(value)
    if ids is not None and type(value) is list:  # arrays do not compare as lists do
        _last_context = value, ids
    return ids


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
