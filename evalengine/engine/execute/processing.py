"""Logits processors at work: one generating sequence's memory of its tokens, and the arithmetic on a step's rows.

    n rows, V vocabulary.

Rounding points (NUMERICS.md): the repetition penalty is one float32 product or quotient, IEEE's, of the logit and the
float32 penalty, computed by NumPy on the host: torch divides otherwise on CUDA (by the reciprocal, for a scalar). Only
the logits of tokens that were seen are moved there. All other processors set logprobs to -inf.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from evalengine.models.processors import LogitsProcessors

NOTHING_LEFT = "its logits processors forbid every token (model.generation_config=none ignores the checkpoint's)"


class Processing:
    """One sequence's logits processors: which tokens they penalise or forbid next.

    Their state is a function of the token ids alone. These only ever grow, so each is looked at once.
    """

    def __init__(self, processors: LogitsProcessors, eos_ids: Sequence[int], num_prompt_tokens: int) -> None:
        self.penalty = np.float32(processors.repetition_penalty)
        self.seen = np.empty(0, dtype=np.int64)  # token ids, each once, where there is a penalty
        self.forbidden: set[int] = set()  # token ids that must not come next
        self._processors = processors
        self._eos_ids = eos_ids
        self._num_prompt_tokens = num_prompt_tokens
        words = [w for w in processors.bad_words_ids if not (len(w) == 1 and w[0] in eos_ids)]
        self._always = frozenset((*processors.suppress_tokens, *(w[0] for w in words if len(w) == 1)))
        self._words = [w for w in words if len(w) > 1]
        self._followers: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)  # n - 1 tokens -> their followers
        self._taken = 0  # tokens looked at

    def advance(self, token_ids: list[int]) -> None:
        """Brings the state up to the whole sequence so far, whose next token is to be chosen."""
        processors = self._processors
        if self.penalty != 1:
            self.seen = np.union1d(self.seen, np.array(token_ids[self._taken :], dtype=np.int64))
        self.forbidden = set(self._always)
        if size := processors.no_repeat_ngram_size:
            for end in range(max(self._taken, size - 1), len(token_ids)):
                self._followers[tuple(token_ids[end - size + 1 : end])].add(token_ids[end])
            if len(token_ids) >= size:
                self.forbidden |= self._followers.get(tuple(token_ids[len(token_ids) - size + 1 :]), set())
        for *before, last in self._words:
            if token_ids[-len(before) :] == before:
                self.forbidden.add(last)
        num_new = len(token_ids) - self._num_prompt_tokens
        too_short = (
            num_new < processors.min_new_tokens if processors.min_new_tokens else len(token_ids) < processors.min_length
        )
        if too_short:
            self.forbidden.update(self._eos_ids)
        if num_new == 0:
            self.forbidden.update(processors.begin_suppress_tokens)
        self._taken = len(token_ids)


def penalise(logits: Tensor, states: Sequence[Processing | None]) -> None:
    """Applies the repetition penalty to float32 [n, V] in place.

    states: each row's processors, advanced to its tokens; None for a row without any.
    """
    penalised = [(row, state) for row, state in enumerate(states) if state is not None and len(state.seen)]
    if not penalised:
        return
    counts = [len(state.seen) for _, state in penalised]
    rows = torch.from_numpy(np.repeat([row for row, _ in penalised], counts)).to(logits.device)
    columns = torch.from_numpy(np.concatenate([state.seen for _, state in penalised])).to(logits.device)
    penalties = np.repeat(np.array([state.penalty for _, state in penalised], dtype=np.float32), counts)
    scores = logits[rows, columns].cpu().numpy()
    with np.errstate(all="ignore"):  # an infinity or a NaN comes from the model, and fails the request later
        scores = np.where(scores < 0, scores * penalties, scores / penalties)
    logits[rows, columns] = torch.from_numpy(scores).to(logits.device)


def forbid(logprobs: Tensor, states: Sequence[Processing | None]) -> None:
    """Sets every forbidden token's logprob to -inf in float32 [n, V], in place; states as for `penalise`."""
    cells = [(row, token) for row, state in enumerate(states) if state is not None for token in state.forbidden]
    if cells:
        rows, columns = torch.tensor(cells, device=logprobs.device).unbind(-1)
        logprobs[rows, columns] = float("-inf")
