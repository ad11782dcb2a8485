"""What goes into the engine and what comes out: plain data, no tensors on a device.

A request is token ids and what is wanted of them. Two shapes are enough: `GenerateRequest` samples new tokens,
`ScoreRequest` asks for the log-likelihood of given ones (a rolling log-likelihood is a `ScoreRequest` per window).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from evalengine.errors import ConfigError

FinishReason = Literal["stop", "length"]
MIN_TEMPERATURE = 1e-6  # its reciprocal times a logprob stays far inside float64; colder is greedy in all but name


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are chosen. temperature 0 is greedy; ties go to the lowest token id.

    `seed` and `noise_key` alone set the noise (with the position and the token id): never the batch slot.
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

    def __post_init__(self) -> None:
        problems = []
        if self.max_tokens < 1:
            problems.append(f"max_tokens={self.max_tokens}: must be at least 1")
        if not (self.temperature == 0 or MIN_TEMPERATURE <= self.temperature < math.inf):
            problems.append(
                f"temperature={self.temperature}: must be 0 (greedy), or finite and at least {MIN_TEMPERATURE}"
            )
        if self.top_k < 0:
            problems.append(f"top_k={self.top_k}: must be 0 (off) or positive")
        if not 0 < self.top_p <= 1:
            problems.append(f"top_p={self.top_p}: must lie in (0, 1]")
        if self.logprobs < 0:
            problems.append(f"logprobs={self.logprobs}: must be 0 or positive")
        if isinstance(self.stop, str) or any(not s for s in self.stop):
            problems.append(f"stop={self.stop!r}: must be a sequence of non-empty strings")
        if problems:
            raise ConfigError(problems)


@dataclass(frozen=True)
class GenerateRequest:
    """Sample up to `params.max_tokens` tokens after `prompt_ids`."""

    request_id: int
    prompt_ids: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True)
class ScoreRequest:
    """Log-likelihood of `continuation_ids` after `context_ids` (at least one token each).

    Requests with equal contexts that are submitted together share the context's computation.
    """

    request_id: int
    context_ids: list[int]
    continuation_ids: list[int]
    logprobs: int = 0  # alternatives reported per position


Request = GenerateRequest | ScoreRequest


@dataclass
class RequestOutput:
    """One finished request. For a `ScoreRequest`, `token_ids` is the continuation."""

    request_id: int
    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: np.ndarray  # float32 [len(token_ids)]: natural log-probability of each token, before temperature
    finish_reason: FinishReason
    text: str = ""  # generated text, cut before the stop string; empty for a ScoreRequest
    is_greedy: bool = False  # every token is the arg max (lowest id among ties)
    top_logprobs: list[dict[int, float]] | None = None  # per position: token id -> logprob, best first
    error: str | None = (
        None  # why it failed (a non-finite activation): a score is then NaN, a generation ends before it
    )

    @property
    def sum_logprob(self) -> float:
        """The log-likelihood: the correctly rounded float64 sum of the float32 logprobs."""
        return math.fsum(self.logprobs.tolist())
