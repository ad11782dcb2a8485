"""Which answers a request can have. What a journal or a cache holds for it must be one that an engine could give.

A hash finds damage, not a forgery that writes the hash anew. The token ids and logprobs of a forged answer show in the
run's digest; its text, its ending and whether it is greedy do not, and so are derived from the tokens where possible.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from evalengine.engine.request import GenerateRequest, Request
from evalengine.engine.schedule.sequence import Generating
from evalengine.engine.submission import generating_sequence
from evalengine.models.spec import ModelSpec
from evalengine.records.schema import Answer

ROUNDING = 1e-2  # rounding moves a logprob by less than this: the logarithm of a probability of 1 above 0, too


@dataclass(eq=False)  # not frozen, which takes three times as long to make: a run can have 56,000
class ExpectedAnswer:
    """The properties that any answer to one request must have."""

    vocab_size: int
    scored: list[int] | None = None  # the tokens to be scored; None: tokens are generated
    room: int = 0  # how many tokens can be generated
    alternatives: int = 0  # how many for each token
    # generated tokens -> their text, stop strings cut; how they end the generation, None for tokens that do not
    said: Callable[[Sequence[int]], str] | None = None
    ending: Callable[[Sequence[int]], str | None] | None = None

    @classmethod
    def of(cls, request: Request, spec: ModelSpec, max_model_len: int, tokenizer: Any) -> ExpectedAnswer:
        """The requests that an engine of this model, context and tokenizer can answer."""
        if not isinstance(request, GenerateRequest):
            return cls(spec.vocab_size, request.continuation_ids, alternatives=request.logprobs)
        whole = replace(request, partial=None)  # the answer is held against all of its tokens
        sequence = partial(generating_sequence, whole, spec, tokenizer, max_model_len)
        return cls(
            spec.vocab_size,
            room=min(request.params.max_tokens, max_model_len - len(request.prompt_ids)),
            alternatives=request.params.logprobs,
            said=lambda ids: str(sequence().detokenizer.text(ids)),
            ending=lambda ids: _ending(sequence(), ids),
        )

    def problem(self, answer: Answer) -> str | None:
        """Why this cannot be the request's answer; None if it can."""
        ids, logprobs, finish_reason, text = answer.output_ids, answer.logprobs, answer.finish_reason, answer.text
        if len(logprobs) != len(ids):
            return f"it has {len(ids)} output ids and {len(logprobs)} logprobs"
        # A request that met NaN or infinity failed and was not recorded; a token that was ruled out has -inf.
        if ids and not logprobs.max() <= ROUNDING:
            return "its logprobs are no logarithms of probabilities"
        if (problem := self._top_problem(len(ids), answer.top_ids, answer.top_logprobs)) is not None:
            return problem
        if self.scored is not None:
            if (ids, finish_reason, text) != (self.scored, "length", ""):
                return "it scores other tokens than the request's"
            return self._greedy_problem(logprobs, answer.is_greedy)
        if any(not 0 <= token < self.vocab_size for token in ids):
            return f"its output ids are not all between 0 and {self.vocab_size - 1}"
        if not 1 <= len(ids) <= self.room:
            return f"it has {len(ids)} output ids, where 1 to {self.room} are generated"
        if finish_reason != "stop" and (finish_reason != "length" or len(ids) < self.room):
            return "its finish reason is not that of its output"
        if self.ending is not None and self.ending(ids) != finish_reason:
            return "its finish reason is not that of its output"
        return None if self.said is None or self.said(ids) == text else "its text is not that of its output ids"

    def _greedy_problem(self, logprobs: np.ndarray, is_greedy: bool) -> str | None:
        """Whether each token is the most probable one is known where its probability is above 1/2, or below the share
        that the most probable of so many has at least."""
        lowest = float(logprobs.min())
        if (lowest > math.log(0.5) + ROUNDING and not is_greedy) or (
            lowest < -math.log(self.vocab_size) - ROUNDING and is_greedy
        ):
            return "its logprobs say otherwise whether its tokens are the most probable ones"
        return None

    def _top_problem(self, tokens: int, ids: np.ndarray | None, values: np.ndarray | None) -> str | None:
        """Why the alternatives cannot be this request's; None if they can."""
        if ids is None or values is None:
            return "it has no alternatives" if self.alternatives else None
        if ids.shape != (tokens, self.alternatives) or values.shape != ids.shape:
            return f"its alternatives are not {self.alternatives} a token"
        if ids.size and not 0 <= ids.min() <= ids.max() < self.vocab_size:
            return "its alternatives are no tokens of the model"
        if any(len({*row}) < self.alternatives for row in ids.tolist()):
            return "its alternatives name a token twice"
        falls = bool((np.diff(values, axis=1) <= 0).all())
        high = values.size > 0 and not values.max() <= ROUNDING  # also for NaN
        return "the logprobs of its alternatives are not in order" if high or not falls else None


def _ending(sequence: Generating, ids: Sequence[int]) -> str | None:
    """How these tokens end the generation, by the engine's own code; None if some of them do earlier, or none does."""
    for number, token in enumerate(ids, 1):
        sequence.append(token, 0.0, True, {})
        if sequence.is_complete():
            return sequence.finish_reason if number == len(ids) else None
    return None
