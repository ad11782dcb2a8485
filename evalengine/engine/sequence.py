"""A sequence: one stream of tokens on its way through the engine, and what is still wanted of it.

A `GenerateRequest` is one sequence that grows. `ScoreRequest`s become sequences of fixed tokens with `targets`: at
position p the logits give the log-probability of each target token there. One sequence may serve several requests (the
first tokens of all choices that share a context), and one request several sequences (its first token, and the rest).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from typing import Any

import numpy as np

from evalengine.engine.processing import Processing
from evalengine.engine.request import FinishReason, GenerateRequest, RequestOutput, ScoreRequest

_ids = count()


class Status(Enum):
    WAITING = 0
    RUNNING = 1
    FINISHED = 2


@dataclass(eq=False)
class PendingScore:
    """A `ScoreRequest` whose token logprobs arrive in any order."""

    request: ScoreRequest
    logprobs: np.ndarray = field(init=False)
    missing: int = field(init=False)
    is_greedy: bool = True
    top: list[dict[int, float]] = field(init=False)
    error: str | None = None

    def __post_init__(self) -> None:
        self.missing = len(self.request.continuation_ids)
        self.logprobs = np.full(self.missing, np.nan, dtype=np.float32)
        self.top = [{} for _ in range(self.missing)]

    def take(self, index: int, logprob: float, is_greedy: bool, top: dict[int, float], error: str | None) -> None:
        """Continuation token number `index` has this logprob."""
        self.logprobs[index] = logprob
        self.is_greedy &= is_greedy
        self.top[index] = dict(list(top.items())[: self.request.logprobs])
        self.error = self.error or error
        self.missing -= 1

    def output(self) -> RequestOutput:
        assert self.missing == 0
        return RequestOutput(
            request_id=self.request.request_id,
            prompt_ids=self.request.context_ids,
            token_ids=self.request.continuation_ids,
            logprobs=self.logprobs,
            finish_reason="length",
            is_greedy=self.is_greedy,
            top_logprobs=self.top if self.request.logprobs else None,
            error=self.error,
        )


@dataclass(frozen=True)
class Target:
    """`pending`'s continuation token number `index` is `token_id`."""

    pending: PendingScore
    index: int
    token_id: int


@dataclass(eq=False)
class Sequence:
    """Token ids, how many of them have their KV in the pool, and the pages it lies in."""

    token_ids: list[int]
    request: GenerateRequest | None = None  # None: a scoring sequence
    targets: dict[int, list[Target]] = field(default_factory=dict)  # position -> what its logits are wanted for
    then: list[Sequence] = field(default_factory=list)  # submitted when this one has finished (they share its tokens)
    num_prompt_tokens: int = field(init=False)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # of the latest admission
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)  # of its full pages, as far as they were needed
    status: Status = Status.WAITING
    logprobs: list[float] = field(default_factory=list)
    top: list[dict[int, float]] = field(default_factory=list)
    all_greedy: bool = True
    finish_reason: FinishReason = "length"
    error: str | None = None
    detokenizer: Any = None
    processing: Processing | None = None  # None: its tokens are chosen from the model's own logits
    seq_id: int = field(default_factory=lambda: next(_ids))

    def __post_init__(self) -> None:
        assert self.token_ids, "a sequence has at least one token"
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def first_wanted_position(self) -> int:
        """The first position whose logits are still wanted: a prefix-cache hit must end before it."""
        return self.num_tokens - 1 if self.request is not None else min(self.targets)

    def wanted_positions(self, start: int, end: int) -> list[int]:
        """Positions in [start, end) whose logits this step must produce, ascending."""
        if self.request is not None:
            return [self.num_tokens - 1] if end == self.num_tokens else []
        return sorted(p for p in self.targets if start <= p < end)

    def append(self, token: int, logprob: float, is_greedy: bool, top: dict[int, float]) -> None:
        """The next generated token."""
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        self.top.append(top)
        self.all_greedy &= is_greedy

    def output(self) -> RequestOutput:
        """The finished `GenerateRequest`."""
        assert self.request is not None and self.status is Status.FINISHED
        return RequestOutput(
            request_id=self.request.request_id,
            prompt_ids=self.request.prompt_ids,
            token_ids=self.output_ids,
            logprobs=np.array(self.logprobs, dtype=np.float32),
            finish_reason=self.finish_reason,
            text=self.detokenizer.text(self.output_ids) if self.detokenizer else "",
            is_greedy=self.all_greedy,
            top_logprobs=self.top if self.request.params.logprobs else None,
            error=self.error,
        )
