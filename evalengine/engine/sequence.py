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
        `layers.ops.GREEDY` stands for the most probable."""

    @abstractmethod
    def launched(self, end: int) -> bool:
        """A step that computes its tokens up to `end` is on its way. Whether that was its last one, by what is known
        without the step's results."""
