"""The sequences of `ScoreRequest`s: fixed tokens, whose logprobs are wanted.

One sequence may serve several requests (the first tokens of all choices that share a context), and one request several
sequences (its first token, and the rest).
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np

from evalengine.engine.request import RequestOutput, ScoreRequest
from evalengine.engine.schedule.sequence import Sequence, Top


class PendingScore:
    """A `ScoreRequest` whose token logprobs arrive in any order."""

    def __init__(self, request: ScoreRequest, rope_start: int = 0) -> None:
        self.request, self.rope_start = request, rope_start
        self.missing = len(request.continuation_ids)
        self.logprobs = np.full(self.missing, np.nan, dtype=np.float32)
        self.is_greedy = True
        self.top: list[Top] | None = [{} for _ in range(self.missing)] if request.logprobs else None
        self.error: str | None = None

    def take(self, index: int, logprobs: np.ndarray, is_greedy: bool, top: SequenceOf[Top]) -> None:
        """Notes the logprobs of the continuation's tokens from number `index` on.

        top: each token's alternatives; empty if none are wanted.
        """
        self.logprobs[index : index + len(logprobs)] = logprobs
        self.is_greedy &= is_greedy
        self.missing -= len(logprobs)
        if self.top is not None:
            for place, alternatives in enumerate(top, start=index):
                self.top[place] = dict(list(alternatives.items())[: self.request.logprobs])

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
    """A sequence of fixed tokens.

    With one request, the logits of the last `len(targets)` positions are wanted, and target i is the request's
    continuation token `first_index` + i. With several requests that share their context, only the last position's
    logits are wanted, and target i is continuation token `first_index` of request i.
    """

    pending: list[PendingScore] = field(kw_only=True)
    targets: np.ndarray = field(kw_only=True)  # int64: the tokens whose logprobs are wanted
    first_index: int = field(kw_only=True)
    children: list[Scoring] = field(default_factory=list)  # sequences with the rest of the continuations

    def __post_init__(self) -> None:
        super().__post_init__()
        assert len(self.targets) == len(self.pending) or len(self.pending) == 1
        self._next_wanted = self.num_tokens - (1 if len(self.pending) > 1 else len(self.targets))
        self._first = self._next_wanted

    @property
    def successors(self) -> SequenceOf[Sequence]:
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

    def ends_at(self, end: int) -> bool:
        return end == self.num_tokens

    def launched(self, end: int) -> bool:
        return self.ends_at(end)

    def take(
        self, positions: range, greedy: np.ndarray, logprobs: np.ndarray, top: SequenceOf[Top], error: str | None
    ) -> list[RequestOutput]:
        """Takes these positions' results: each one's most probable token, and the logprobs of `columns(positions)`.

        Returns the outputs of the requests that are complete now.
        """
        self._next_wanted = positions.stop
        is_target = greedy == self.columns(positions)
        if len(self.pending) == 1:
            shares = [(self.first_index + positions.start - self._first, logprobs, bool(is_target.all()))]
        else:
            shares = [(self.first_index, logprobs[i : i + 1], bool(is_target[i])) for i in range(len(self.pending))]
        complete = []
        for pending, (index, own, is_greedy) in zip(self.pending, shares, strict=True):
            pending.take(index, own, is_greedy, top)
            pending.error = pending.error or error
            if pending.missing == 0:
                complete.append(pending.output())
        return complete

    def is_complete(self) -> bool:
        """Whether every wanted position's logits have been taken."""
        return self._next_wanted == self.num_tokens
