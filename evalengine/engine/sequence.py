"""A sequence: one stream of tokens on its way through the engine, and what is still wanted of it.

A `GenerateRequest` is a sequence that grows (`generating.py`); `ScoreRequest`s become sequences of fixed tokens
(`scoring.py`). Both answer the same questions: which positions' logits are wanted of a chunk, which tokens' logprobs
there, and whether anything is left to compute after a launch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from enum import Enum
from itertools import count

import numpy as np

_ids = count()
Top = dict[int, float]  # token id -> logprob, best first


class Status(Enum):
    WAITING = 0
    RUNNING = 1
    LEAVING = 2  # the last step is launched; the pages and results are still to be taken
    FINISHED = 3


@dataclass(eq=False)
class Sequence(ABC):
    """Token ids, how many of them have their KV in the pool, and the pages it lies in."""

    token_ids: list[int]
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)  # the full pages' hashes, as far as they were needed
    num_computed_tokens: int = 0
    num_recorded_tokens: int = 0  # how many tokens the prefix cache knows of
    num_cached_tokens: int = 0  # how many tokens the prefix cache gave at the last admission
    num_in_flight: int = 0  # tokens that launched steps will append, not known on the host yet
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
    def then(self) -> SequenceOf[Sequence]:
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

    @abstractmethod
    def launched(self, end: int) -> bool:
        """Notes that a step which computes the tokens up to `end` is launched. Returns whether that is the sequence's
        last step, as far as is known without the step's results."""
