"""A sequence: one stream of tokens on its way through the engine, and what is still wanted of it.

A `GenerateRequest` is a sequence that grows: `Generating` samples one token after another until one of them ends it.
`ScoreRequest`s become sequences of fixed tokens (`scoring.py`). Both answer the same questions: which positions' logits
are wanted of a chunk, which tokens' logprobs there, and whether anything is left to compute after a launch.
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

from evalengine.engine.execute.processing import Processing
from evalengine.engine.request import FinishReason, GenerateRequest, RequestOutput
from evalengine.engine.schedule.prefix_index import CachedBlock
from evalengine.layers.ops import GREEDY

_ids = count()
Top = dict[int, float]  # token id -> logprob, best first


class Status(Enum):
    WAITING = 0
    RUNNING = 1
    DRAINING = 2  # the last step is launched; the pages and results are still to be taken
    FINISHED = 3


@dataclass(eq=False)
class ParentState:
    """A context's final state, which stays in its slot for the sequences that continue it. A sequence that has one step
    reads the state there (`may_start_elsewhere`); others copy it when they are admitted. The last one takes over the
    slot, unless its step would overwrite what others read."""

    slot: int
    num_tokens: int  # of the context
    children: list[Sequence]  # those not admitted yet
    blocks: list[CachedBlock]  # the context's last block in each group of layers, unless it is full


@dataclass(eq=False)
class Sequence(ABC):
    """Token ids, how many of them have their KV in the pool, and its pages."""

    token_ids: list[int]
    block_tables: list[list[int]] = field(default_factory=list)  # its pages in each of the layout's tables
    blocks: list[list[CachedBlock]] = field(default_factory=list)  # the same, by the layout's groups
    num_passed: list[int] = field(default_factory=list)  # of each group: the first blocks that it does not hold
    block_hashes: list[bytes] = field(default_factory=list)  # hashes of full pages, computed on demand
    num_computed_tokens: int = 0
    rope_start: int = 0  # the row of RoPE's table that is its position 0 (`RopeTable`)
    last_start: int = 0  # where the chunk that was launched last begins
    num_recorded_tokens: int = 0  # how many tokens the prefix cache knows of
    num_cached_tokens: int = 0  # how many tokens the prefix cache gave at the last admission
    num_in_flight: int = 0  # tokens that launched steps will append, not known on the host yet
    snapshot_at: int = 0  # where its state is worth a copy for other sequences; 0: nowhere
    parent_state: ParentState | None = None  # until it is admitted: the state that it continues
    state_slot: int = -1  # its place in the pools of states while it runs
    start_slot: int = -1  # the slot that its next step reads the state from: `state_slot`, or a shared one
    device_row: int = 0  # where the last launched step leaves its token on the device
    status: Status = Status.WAITING
    seq_id: int = field(default_factory=lambda: next(_ids))

    def __post_init__(self) -> None:
        assert self.token_ids, "a sequence has at least one token"
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        """The number of tokens that are known."""
        return len(self.token_ids)

    @property
    def num_expected_tokens(self) -> int:
        """The number of tokens that are known or being computed."""
        return len(self.token_ids) + self.num_in_flight

    @property
    def num_logprobs(self) -> int:
        """How many alternatives are wanted at each wanted position."""
        return 0

    @property
    def successors(self) -> SequenceOf[Sequence]:
        """The sequences to admit next, once all of this one is computed."""
        return ()

    @property
    @abstractmethod
    def request_ids(self) -> set[int]:
        """The ids of the requests that the sequence serves."""

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
        `layers.ops.GREEDY` stands for the most probable."""

    def ends_at(self, end: int) -> bool:
        """Whether a step that computes the tokens up to `end` is known to be its last."""
        return False

    @abstractmethod
    def launched(self, end: int) -> bool:
        """Notes that a step which computes the tokens up to `end` is launched. Returns whether that is the sequence's
        last step, from what is known without the step's results."""


_GREEDY_ALONE = np.array([GREEDY], dtype=np.int64)


@dataclass(eq=False)
class Generating(Sequence):
    """A sequence that grows by the tokens it samples."""

    request: GenerateRequest = field(kw_only=True)
    max_output_tokens: int = field(kw_only=True)
    stop_ids: frozenset[int] = field(kw_only=True)  # token ids that end the generation
    detokenizer: Any = None
    processing: Processing | None = None  # None: tokens are chosen from the model's own logits
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
        """64 bits made of the seed and the name of what is sampled: the same in every batch, engine and process."""
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
        """Adds the next generated token, once it is known on the host."""
        self.token_ids.append(token)
        self.num_in_flight -= 1
        self.logprobs.append(logprob)
        self.top.append(top)
        self.all_greedy &= is_greedy

    def is_complete(self) -> bool:
        """Whether the last token ends the generation; sets `finish_reason`."""
        token = self.token_ids[-1]
        if (self.detokenizer is not None and self.detokenizer.stops_at(token)) or token in self.stop_ids:
            self.finish_reason = "stop"
            return True
        return len(self.logprobs) >= self.max_output_tokens

    def output(self) -> RequestOutput:
        """The output of the finished request."""
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
