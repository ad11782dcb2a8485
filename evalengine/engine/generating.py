"""The sequence of a `GenerateRequest`: it samples one token after another until one of them ends it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from evalengine.engine.processing import Processing
from evalengine.engine.request import FinishReason, GenerateRequest, RequestOutput
from evalengine.engine.sequence import Sequence, Status, Top
from evalengine.layers.ops import GREEDY

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
