"""Reads the wanted tokens and logprobs out of a step's hidden states.

    n wanted rows, m wanted tokens (m >= n: several requests may share a row), g next tokens, V vocabulary.

Only the wanted rows go through lm_head, a slice at a time, so that [n, V] logits never exist at once. The host waits
for nothing: `Pending.results` fetches the device's results, a step later if need be. The tokens that the step chose
stay on the device, where the next step takes them (`LastTokens`).

With several ranks each holds the logits of its own part of the vocabulary. All of them find the same tokens and
logprobs; only tokens that are sampled or processed are chosen by rank 0, which has the sequences, and broadcast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from evalengine.engine.execute.batch import LogitsIndices
from evalengine.kernels import sampling
from evalengine.layers.kernel_support import kernel_problems
from evalengine.layers.metadata import upload
from evalengine.layers.ops import GREEDY, Ops
from evalengine.models.causal_lm import CausalLM


class LastTokens:
    """A row for every sequence whose token the last step chooses (`Sequence.device_row`).

    A step that is launched before these tokens are known on the host refers to row r by the token id -1 - r.
    """

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self._vocab_size = vocab_size
        self._has_kernel = not kernel_problems(device)

    def put(self, tokens: Tensor) -> None:
        """Keeps the tokens, int64 [n], of rows 0 ... n - 1. Those past the rows are of a step with guesses, after which
        every token is known on the host."""
        fitting = tokens[: len(self.tokens)]
        self.tokens[: len(fitting)].copy_(fitting)

    def resolve(self, ids: Tensor) -> Tensor:
        """Token ids in place of the references among `ids`, int64 [T]. A row whose logits were not finite holds
        `vocab_size`, which becomes the largest id."""
        if self._has_kernel:
            from evalengine.kernels.last_tokens import resolve

            return resolve(ids, self.tokens, self._vocab_size - 1)
        token_ids = torch.where(ids < 0, self.tokens[(-1 - ids).clamp_(min=0)], ids)
        return token_ids.clamp_(max=self._vocab_size - 1)


# Rows that are sampled, or whose best tokens are looked for, are handled in parts of a slice: sampling with top-k and
# top-p takes 88 bytes for each of a row's logits, and slices are sized by the 4 bytes of a logit itself.
SHARE = 4
# A part of `LogitsIndices.chosen` and a copy of its logits [k, V] -> the tokens chosen, int64 [k].
Choose = Callable[[slice, Tensor], Tensor]


@dataclass(frozen=True)
class Top:
    """The best tokens of some wanted rows."""

    rows: list[int]  # places among the step's wanted rows
    ids: Tensor  # int64 [len(rows), k], best first
    values: Tensor  # float32


@dataclass(frozen=True)
class DeviceResults:
    """A step's results, on the device."""

    greedy: Tensor  # int64 [n]: each wanted row's most probable token
    logprobs: Tensor  # float32 [m]
    next_tokens: Tensor  # int64 [g]
    tops: list[Top] = field(default_factory=list)

    @property
    def tensors(self) -> list[Tensor]:
        return [self.greedy, self.logprobs, self.next_tokens, *(x for top in self.tops for x in (top.ids, top.values))]


class ReadOut:
    """One model's lm_head and the reading of its logits."""

    def __init__(self, model: CausalLM, ops: Ops, rows_per_slice: int, last: LastTokens) -> None:
        self.model, self.ops, self.rows_per_slice, self._last = model, ops, rows_per_slice, last

    @property
    def _rows_at_once(self) -> int:
        return max(1, self.rows_per_slice // SHARE)

    def launch(self, wanted: LogitsIndices, hidden: Tensor, choose: Choose | None) -> DeviceResults | None:
        """Reads out what is wanted of the step's hidden states [T, H]; None if nothing is wanted.

        The next tokens are left where the next step finds them on the device. choose: chooses the tokens of
        `LogitsIndices.chosen` on rank 0; None on the other ranks.
        """
        if not len(wanted.rows):
            return None
        arrays = [wanted.rows, wanted.columns, wanted.row_of, wanted.next_tokens]
        rows, columns, row_of, generating = upload(arrays, self.ops.device)
        slices = []
        for first in range(0, len(rows), self.rows_per_slice):
            part = slice(first, min(first + self.rows_per_slice, len(rows)))
            slices.append(self._slice(wanted, part, hidden[rows[part]], columns, row_of, choose))
        greedy, tokens, logprobs = (torch.cat(parts) for parts in zip(*(s.results for s in slices), strict=True))
        next_tokens = tokens[generating]
        self._last.put(next_tokens)
        return DeviceResults(greedy, logprobs, next_tokens, [top for s in slices for top in s.tops])

    def _slice(
        self, wanted: LogitsIndices, part: slice, hidden: Tensor, columns: Tensor, row_of: Tensor, choose: Choose | None
    ) -> _Slice:
        """part: the slice of the wanted rows; hidden: their hidden states."""
        low, high = np.searchsorted(wanted.row_of, [part.start, part.stop])
        logits, own, rows = self.model.compute_logits(hidden), columns[low:high], row_of[low:high] - part.start
        first, end = np.searchsorted(wanted.chosen[:, 1], [part.start, part.stop])
        if first < end:
            places, chosen = upload([*(wanted.chosen[first:end] - [low, part.start]).T], self.ops.device)
            picked = [
                self._choose(slice(i, min(i + self._rows_at_once, end)), logits, chosen[i - first :], choose)
                for i in range(first, end, self._rows_at_once)
            ]
            own = own.index_put((places,), torch.cat(picked))
        greedy, logprobs = self.model.read_out(logits, None if len(own) == len(logits) else rows, own)
        tokens = torch.where(own == GREEDY, greedy[rows], own)
        return _Slice((greedy, tokens, logprobs), self._tops(wanted, part, logits))

    def _choose(self, which: slice, logits: Tensor, rows: Tensor, choose: Choose | None) -> Tensor:
        """Chooses the tokens of a part of `LogitsIndices.chosen`, int64.

        rows: rows of the logits, of which the part's come first.
        """
        count = which.stop - which.start
        scores = self.model.whole_logits(logits[rows[:count]])
        tokens = choose(which, scores) if choose is not None else torch.empty_like(rows[:count])
        return self.ops.tp.broadcast(tokens)

    def _tops(self, wanted: LogitsIndices, part: slice, logits: Tensor) -> list[Top]:
        """The best tokens of the slice's rows that want any, some rows at a time."""
        asking = [row for row in wanted.tops if part.start <= row < part.stop]
        size, tops = self._rows_at_once, []
        for rows in (asking[i : i + size] for i in range(0, len(asking), size)):
            (own,) = upload([np.array(rows, dtype=np.int64) - part.start], self.ops.device)
            most = max(wanted.tops[row] for row in rows)
            logprobs = self.ops.log_softmax(self.model.whole_logits(logits[own]))
            tops.append(Top(rows, *sampling.top(logprobs, most)))
        return tops


@dataclass(frozen=True)
class _Slice:
    results: tuple[Tensor, Tensor, Tensor]  # each row's most probable token, int64; tokens, int64; logprobs, float32
    tops: list[Top]
