"""A sequence: one stream of tokens on its way through the engine, and what is still wanted of it.

A `GenerateRequest` is a `Generating` sequence that grows. `ScoreRequest`s become `Scoring` sequences of fixed tokens.
One of them may serve several requests (the first tokens of all choices that share a context), and one request several
sequences (its first token, and the rest).

Both kinds answer the same questions: which positions' logits are wanted of a chunk, which tokens' logprobs there, what
comes after a launch, and what a result completes.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from itertools import count
from typing import Any

import numpy as np

from evalengine.engine.processing import Processing
from evalengine.engine.request import FinishReason, GenerateRequest, RequestOutput, ScoreRequest
from evalengine.layers.ops import GREEDY

_ids = count()
_GREEDY_ALONE = np.array([GREEDY], dtype=np.int64)
Top = dict[int, float]  # token id -> logprob, best first


class Status(Enum):
    WAITING = 0
    RUNNING = 1
    LEAVING = 2  # its last step is launched: nothing more is scheduled, its pages and results are still to be taken
    FINISHED = 3


@dataclass(eq=False)
class Sequence(ABC):
    """Token ids, how many of them have their KV in the pool, and the pages it lies in."""

    token_ids: list[int]
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)  # of its full pages, as far as they were asked for
    num_computed_tokens: int = 0
    num_recorded_tokens: int = 0  # how many the prefix cache knows of
    num_cached_tokens: int = 0  # of those that are computed, how many the prefix cache gave when it was admitted last
    num_in_flight: int = 0  # tokens that launched steps will append, and that nobody on the host knows yet
    device_row: int = 0  # where the last launched step leaves its token on the device
    status: Status = Status.WAITING
    seq_id: int = field(default_factory=lambda: next(_ids))

    def __post_init__(self) -> None:
        assert self.token_ids, "a sequence has at least one token"
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        """Those that are known."""
        return len(self.token_ids)

    @property
    def num_expected_tokens(self) -> int:
        """Those that are known and those on their way."""
        return len(self.token_ids) + self.num_in_flight

    @property
    def num_logprobs(self) -> int:
        """Alternatives wanted at each of its wanted positions."""
        return 0

    @property
    def then(self) -> SequenceOf[Sequence]:
        """What is to be admitted next, once all of this one is computed."""
        return ()

    @property
    @abstractmethod
    def request_ids(self) -> set[int]:
        """The requests that it serves."""

    @property
    @abstractmethod
    def first_wanted_position(self) -> int:
        """The first position whose logits are still wanted: a prefix-cache hit must end before it."""

    @abstractmethod
    def wanted(self, start: int, end: int) -> range:
        """The positions in [start, end) whose logits a step over these tokens must produce."""

    @abstractmethod
    def columns(self, positions: range) -> np.ndarray:
        """The tokens whose logprobs are wanted, int64: one at each of the wanted positions, or several at a single one.
        `GREEDY` stands for the most probable."""

    @abstractmethod
    def launched(self, end: int) -> bool:
        """A step that computes its tokens up to `end` is on its way. Whether that was its last one, by what is known
        without the step's results."""


@dataclass(eq=False)
class Generating(Sequence):
    """A `GenerateRequest`: samples one token after another until one of them ends it."""

    request: GenerateRequest = field(kw_only=True)
    max_output_tokens: int = field(kw_only=True)
    stop_ids: frozenset[int] = field(kw_only=True)  # that end it
    detokenizer: Any = None
    processing: Processing | None = None  # None: its tokens are chosen from the model's own logits
    logprobs: list[float] = field(default_factory=list)
    top: list[Top] = field(default_factory=list)
    all_greedy: bool = True
    finish_reason: FinishReason = "length"
    error: str | None = None

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_logprobs(self) -> int:
        return self.request.params.logprobs

    @property
    def request_ids(self) -> set[int]:
        return {self.request.request_id}

    @property
    def first_wanted_position(self) -> int:
        return self.num_tokens - 1

    @cached_property
    def takes_argmax(self) -> bool:
        """Whether its next token is always the raw model's most probable one."""
        return self.processing is None and self.request.params.temperature == 0

    @cached_property
    def noise_key(self) -> int:
        """64 bits of (seed, what is sampled): the same in every batch, engine and process."""
        params = self.request.params
        name = params.noise_key
        if name is None:
            name = "ids:" + ",".join(map(str, self.request.prompt_ids))
        if self.request.sample:
            name += f"\0sample {self.request.sample}"
        digest = hashlib.sha256(f"{params.seed}\0{name}".encode()).digest()
        return int.from_bytes(digest[:8], "little", signed=True)

    def wanted(self, start: int, end: int) -> range:
        return range(end - 1, end) if end >= self.num_tokens else range(0)

    def columns(self, positions: range) -> np.ndarray:
        return _GREEDY_ALONE[: len(positions)]

    def launched(self, end: int) -> bool:
        if end < self.num_tokens:
            return False
        self.num_in_flight += 1
        return len(self.logprobs) + self.num_in_flight >= self.max_output_tokens

    def append(self, token: int, logprob: float, is_greedy: bool, top: Top) -> None:
        """The next generated token has become known."""
        self.token_ids.append(token)
        self.num_in_flight -= 1
        self.logprobs.append(logprob)
        self.top.append(top)
        self.all_greedy &= is_greedy

    def is_complete(self) -> bool:
        """Whether its last token ends it."""
        token = self.token_ids[-1]
        if (self.detokenizer is not None and self.detokenizer.stops_at(token)) or token in self.stop_ids:
            self.finish_reason = "stop"
            return True
        return len(self.logprobs) >= self.max_output_tokens

    def output(self) -> RequestOutput:
        """The finished request."""
        assert self.status is Status.FINISHED
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


class PendingScore:
    """A `ScoreRequest` whose token logprobs arrive in any order."""

    def __init__(self, request: ScoreRequest) -> None:
        self.request = request
        self.missing = len(request.continuation_ids)
        self.logprobs = np.full(self.missing, np.nan, dtype=np.float32)
        self.is_greedy = True
        self.top: list[Top] | None = [{} for _ in range(self.missing)] if request.logprobs else None
        self.error: str | None = None

    def take(self, index: int, logprobs: np.ndarray, is_greedy: bool, top: SequenceOf[Top]) -> None:
        """Continuation tokens number `index` and on have these logprobs. top: of each; empty where none was wanted."""
        self.logprobs[index : index + len(logprobs)] = logprobs
        self.is_greedy &= is_greedy
        self.missing -= len(logprobs)
        if self.top is not None:
            for place, found in enumerate(top, start=index):
                self.top[place] = dict(list(found.items())[: self.request.logprobs])

    def output(self) -> RequestOutput:
        assert self.missing == 0
        return RequestOutput(
            request_id=self.request.request_id,
            prompt_ids=self.request.context_ids,
            token_ids=self.request.continuation_ids,
            logprobs=self.logprobs,
            finish_reason="length",
            is_greedy=self.is_greedy,
            top_logprobs=self.top,
            error=self.error,
        )


@dataclass(eq=False)
class Scoring(Sequence):
    """Fixed tokens, of which the last `len(targets)` positions' logits are wanted; or, where several requests share
    their context, the last one's for each of them.

    Its own number i of the targets is continuation token `first_index` + i of the only request, or that token of
    request number i.
    """

    pending: list[PendingScore] = field(kw_only=True)
    targets: np.ndarray = field(kw_only=True)  # int64: the tokens whose logprobs are wanted
    first_index: int = field(kw_only=True)
    children: list[Scoring] = field(default_factory=list)  # the rest of what follows this context

    def __post_init__(self) -> None:
        super().__post_init__()
        assert len(self.targets) == len(self.pending) or len(self.pending) == 1
        self._next_wanted = self.num_tokens - (1 if len(self.pending) > 1 else len(self.targets))
        self._first = self._next_wanted

    @property
    def then(self) -> SequenceOf[Sequence]:
        return self.children

    @property
    def num_logprobs(self) -> int:
        return max(p.request.logprobs for p in self.pending)

    @property
    def request_ids(self) -> set[int]:
        return {p.request.request_id for p in self.pending}

    @property
    def first_wanted_position(self) -> int:
        return self._next_wanted

    def wanted(self, start: int, end: int) -> range:
        return range(max(start, self._next_wanted), end)

    def columns(self, positions: range) -> np.ndarray:
        if len(self.pending) > 1:
            return self.targets if positions else self.targets[:0]
        return self.targets[positions.start - self._first : positions.stop - self._first]

    def launched(self, end: int) -> bool:
        return end == self.num_tokens

    def take(
        self, positions: range, greedy: np.ndarray, logprobs: np.ndarray, top: SequenceOf[Top], error: str | None
    ) -> list[RequestOutput]:
        """What these positions gave: each one's most probable token, and the logprobs of `columns(positions)`.

        Returns the outputs of the requests that they complete.
        """
        self._next_wanted = positions.stop
        is_target = greedy == self.columns(positions)
        if len(self.pending) == 1:
            found = [(self.first_index + positions.start - self._first, logprobs, bool(is_target.all()))]
        else:
            found = [(self.first_index, logprobs[i : i + 1], bool(is_target[i])) for i in range(len(self.pending))]
        complete = []
        for pending, (index, own, is_greedy) in zip(self.pending, found, strict=True):
            pending.take(index, own, is_greedy, top)
            pending.error = pending.error or error
            if pending.missing == 0:
                complete.append(pending.output())
        return complete

    def is_complete(self) -> bool:
        """Whether every wanted position's logits have been taken."""
        return self._next_wanted == self.num_tokens
