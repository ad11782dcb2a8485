"""Logits processors at work: one generating sequence's memory of its tokens, and the arithmetic on a step's rows.

    n rows, V vocabulary.

Rounding points (NUMERICS.md): the repetition penalty is one float32 product or quotient, IEEE's, of the logit and the
float32 penalty, computed by NumPy on the host: torch divides otherwise on CUDA (by the reciprocal, for a scalar). Then
the bias and the presence and frequency penalties are one float32 sum of the logit and a term that is computed in
float64 and rounded once. Only the logits that these change are moved to the host. All other processors set logprobs to
-inf.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from evalengine.engine.text.grammar import Constraint
from evalengine.models.processors import LogitsProcessors, RequestProcessors

NOTHING_LEFT = "its logits processors forbid every token (model.generation_config=none ignores the checkpoint's)"
DEAD_END = "no token continues the answer in its grammar"


class Processing:
    """One sequence's logits processors: which tokens they penalise or forbid next.

    Their state is a function of the token ids alone. These only ever grow, so each is looked at once.
    """

    def __init__(
        self,
        processors: LogitsProcessors,
        eos_ids: Sequence[int],
        num_prompt_tokens: int,
        constraint: Constraint | None = None,
    ) -> None:
        """constraint: the grammar's, where the processors have one."""
        self.penalty = np.float32(processors.repetition_penalty)
        self.seen = np.empty(0, dtype=np.int64)  # token ids, each once, where there is a penalty
        self.forbidden: set[int] = set()  # token ids that must not come next
        self.terms: dict[int, float] = {}  # token id -> what is added to its logit
        self._processors = processors
        self._eos_ids = eos_ids
        self._num_prompt_tokens = num_prompt_tokens
        words = [w for w in processors.bad_words_ids if not (len(w) == 1 and w[0] in eos_ids)]
        self._always = frozenset((*processors.suppress_tokens, *(w[0] for w in words if len(w) == 1)))
        self._words = [w for w in words if len(w) > 1]
        self._followers: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)  # n - 1 tokens -> their followers
        self._of_request = processors if isinstance(processors, RequestProcessors) else RequestProcessors()
        self._bias = dict(self._of_request.logit_bias)
        self._counts: Counter[int] = Counter()  # generated tokens, where there is a penalty on them
        self._constraint = constraint
        self.allowed: np.ndarray | None = None  # bool [V]: the tokens that the grammar allows next; None: all
        self._taken = 0  # tokens looked at

    def advance(self, token_ids: list[int]) -> None:
        """Brings the state up to the whole sequence so far, whose next token is to be chosen."""
        processors = self._processors
        if self.penalty != 1:
            self.seen = np.union1d(self.seen, np.array(token_ids[self._taken :], dtype=np.int64))
        self._add_terms(token_ids)
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
        if self._constraint is not None:
            self.allowed = self._constraint.allowed(token_ids[self._num_prompt_tokens :])
        self._taken = len(token_ids)

    def nothing_left(self, vocab_size: int) -> str | None:
        """Why no token can come next; None if one can."""
        if self._constraint is None or self.allowed is None:
            return NOTHING_LEFT if len(self.forbidden) == vocab_size else None
        left = self.allowed.copy()
        left[[*self.forbidden]] = False
        return None if left.any() else ": ".join(filter(None, (DEAD_END, self._constraint.error)))

    def _add_terms(self, token_ids: list[int]) -> None:
        """Brings `terms` up to date; OpenAI's formula (`RequestProcessors`)."""
        presence, frequency = self._of_request.presence_penalty, self._of_request.frequency_penalty
        if presence or frequency:
            self._counts.update(token_ids[max(self._taken, self._num_prompt_tokens) :])
        penalties = {token: count * frequency + presence for token, count in self._counts.items()}
        self.terms = {token: self._bias.get(token, 0.0) - penalties.get(token, 0.0)
                      for token in self._bias.keys() | penalties.keys()}  # fmt: skip


def penalise(logits: Tensor, states: Sequence[Processing | None]) -> None:
    """Applies the penalties and biases to float32 [n, V] in place.

    states: each row's processors, advanced to its tokens; None for a row without any.
    """
    some = [(row, state) for row, state in enumerate(states) if state is not None]
    # Each (row, [ids], [values]): the repetition penalty first, then what is added.
    penalties = [(row, s.seen, np.full(len(s.seen), s.penalty)) for row, s in some if len(s.seen)]
    terms = [(row, np.array([*s.terms], dtype=np.int64), np.array([*s.terms.values()], dtype=np.float32))
             for row, s in some if s.terms]  # fmt: skip
    _change(logits, penalties, lambda z, p: np.where(z < 0, z * p, z / p))
    _change(logits, terms, np.add)


def _change(
    logits: Tensor,
    cells: list[tuple[int, np.ndarray, np.ndarray]],
    change: Callable[[np.ndarray, np.ndarray], np.ndarray],
) -> None:
    """Sets logits[row, id] = change(logits[row, id], value) on the host, for cells of (row, ids, float32 values)."""
    if not cells:
        return
    rows = torch.from_numpy(np.repeat([row for row, _, _ in cells], [len(ids) for _, ids, _ in cells]))
    columns = torch.from_numpy(np.concatenate([ids for _, ids, _ in cells]))
    places = rows.to(logits.device), columns.to(logits.device)
    with np.errstate(all="ignore"):  # an infinity or a NaN comes from the model, and fails the request later
        changed = change(logits[places].cpu().numpy(), np.concatenate([values for _, _, values in cells]))
    logits[places] = torch.from_numpy(changed).to(logits.device)


def forbid(logprobs: Tensor, states: Sequence[Processing | None]) -> None:
    """Sets every forbidden token's logprob to -inf in float32 [n, V], in place; states as for `penalise`."""
    cells = [(row, token) for row, state in enumerate(states) if state is not None for token in state.forbidden]
    if cells:
        rows, columns = torch.tensor(cells, device=logprobs.device).unbind(-1)
        logprobs[rows, columns] = float("-inf")
    masks = {row: s.allowed for row, s in enumerate(states) if s is not None and s.allowed is not None}
    if masks:
        some = torch.tensor([*masks], device=logprobs.device)
        blocked = torch.from_numpy(~np.stack([*masks.values()])).to(logprobs.device)
        logprobs[some] = logprobs[some].masked_fill(blocked, float("-inf"))
