"""From a step's hidden states to what its sequences wanted of them: tokens and logprobs.

    n wanted rows, m wanted tokens (m >= n: several requests may share a row), V vocabulary.

Only the wanted rows go through lm_head, a slice at a time, so that [n, V] logits never exist at once. The host waits
for nothing: what the device will have found is fetched by `Pending.results`, a step later if need be.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from evalengine.engine.generating import Generating
from evalengine.engine.last_tokens import LastTokens
from evalengine.engine.processing import NOTHING_LEFT, forbid, penalise
from evalengine.engine.scheduler import Chunk
from evalengine.engine.scoring import Scoring
from evalengine.engine.sequence import Sequence, Status, Top
from evalengine.kernels import sampling
from evalengine.layers.ops import GREEDY, Ops
from evalengine.layers.upload import Download, upload
from evalengine.models.decoder import DecoderForCausalLM

# Rows that are sampled, or whose best tokens are looked for, go through in parts of a slice: with top-k and top-p a
# sample takes 88 bytes for each of a row's logits, and its 4 bytes are what slices are measured by.
SHARE = 4


@dataclass
class NextToken:
    """What a generating sequence's last position gave."""

    seq: Generating
    position: int
    greedy_id: int  # the model's most probable token; V if a logprob is NaN
    token: int  # the chosen one
    logprob: float
    top: Top = field(default_factory=dict)
    error: str | None = None


@dataclass
class Scores:
    """What some wanted positions of a scoring sequence gave."""

    seq: Scoring
    positions: range
    greedy_ids: np.ndarray  # int64, of each position; V where a logprob is NaN
    logprobs: np.ndarray  # float32, of `Scoring.columns(positions)`
    top: list[Top] = field(default_factory=list)
    error: str | None = None


Result = NextToken | Scores


@dataclass(frozen=True)
class Part:
    """One sequence's share of a step's wanted rows and tokens."""

    seq: Sequence
    positions: range
    rows: slice
    columns: slice


class Wanted:
    """What a step's sequences want to know, in the order of its chunks."""

    def __init__(self, chunks: SequenceOf[Chunk]) -> None:
        self.parts: list[Part] = []
        columns: list[np.ndarray] = []
        rows: list[int] = []
        first = num_columns = 0
        for chunk in chunks:
            if positions := chunk.seq.wanted(chunk.start, chunk.end):
                own = chunk.seq.columns(positions)
                place = slice(len(rows), len(rows) + len(positions)), slice(num_columns, num_columns + len(own))
                self.parts.append(Part(chunk.seq, positions, *place))
                rows.extend(range(first + positions.start - chunk.start, first + positions.stop - chunk.start))
                columns.append(own)
                num_columns += len(own)
            first += chunk.end - chunk.start
        self.rows = np.array(rows, dtype=np.int64)  # [n], of the batch
        self.columns = np.concatenate(columns) if columns else np.empty(0, dtype=np.int64)  # [m] token ids

    @cached_property
    def row_of(self) -> np.ndarray:
        """int64 [m]: each wanted token's row among the wanted ones, ascending."""
        counts = np.ones(len(self.rows), dtype=np.int64)
        for part in self.parts:
            if (own := part.columns.stop - part.columns.start) > len(part.positions):
                counts[part.rows] = own
        return np.repeat(np.arange(len(self.rows)), counts)

    @cached_property
    def generating(self) -> list[tuple[Part, Generating]]:
        return [(part, part.seq) for part in self.parts if isinstance(part.seq, Generating)]

    @cached_property
    def with_alternatives(self) -> dict[int, int]:
        """The wanted rows whose best tokens are asked for, ascending, and how many."""
        asking = [part for part in self.parts if part.seq.num_logprobs]
        return {row: p.seq.num_logprobs for p in asking for row in range(p.rows.start, p.rows.stop)}


class ReadOut:
    """lm_head and what follows, of one model."""

    def __init__(self, model: DecoderForCausalLM, ops: Ops, rows_per_slice: int, last: LastTokens) -> None:
        self.model, self.ops, self.rows_per_slice, self._last = model, ops, rows_per_slice, last

    @property
    def _rows_at_once(self) -> int:
        return max(1, self.rows_per_slice // SHARE)

    def launch(self, chunks: SequenceOf[Chunk], hidden: Tensor) -> Pending:
        """hidden [T, H]: the step's rows. The next tokens are left where the next step finds them on the device."""
        wanted = Wanted(chunks)
        if not wanted.parts:
            return Pending(wanted, Download([], self.ops.device), [])
        places = np.array([part.columns.start for part, _ in wanted.generating], dtype=np.int64)
        arrays = [wanted.rows, wanted.columns, wanted.row_of, places]
        rows, columns, row_of, generating = upload(arrays, self.ops.device)
        slices = []
        for first in range(0, len(rows), self.rows_per_slice):
            part = slice(first, min(first + self.rows_per_slice, len(rows)))
            slices.append(self._slice(wanted, part, hidden[rows[part]], columns, row_of))
        greedy, tokens, logprobs = (torch.cat(each) for each in zip(*(s.found for s in slices), strict=True))
        next_tokens = tokens[generating]
        self._last.put(next_tokens)
        for row, (_, seq) in enumerate(wanted.generating):
            seq.device_row = row
        tops = [top for s in slices for top in s.tops]
        fetched = [greedy, logprobs, next_tokens, *(tensor for top in tops for tensor in (top.ids, top.values))]
        return Pending(wanted, Download(fetched, self.ops.device), [top.rows for top in tops])

    def _slice(self, wanted: Wanted, part: slice, hidden: Tensor, columns: Tensor, row_of: Tensor) -> _Slice:
        """part: of the wanted rows, whose hidden states are given."""
        low, high = np.searchsorted(wanted.row_of, [part.start, part.stop])
        logits, own, rows = self.model.compute_logits(hidden), columns[low:high], row_of[low:high] - part.start
        here = [(p, seq) for p, seq in wanted.generating if part.start <= p.rows.start < part.stop]
        if hot := [(p, seq) for p, seq in here if not seq.takes_argmax]:
            places = np.array([p.columns.start - low for p, _ in hot], dtype=np.int64)
            chosen = np.array([p.rows.start - part.start for p, _ in hot], dtype=np.int64)
            on_device = upload([places, chosen], self.ops.device)
            size = self._rows_at_once
            picked = [
                self._choose(hot[i : i + size], logits[on_device[1][i : i + size]]) for i in range(0, len(hot), size)
            ]
            own = own.index_put((on_device[0],), torch.cat(picked))
        greedy, logprobs = self.ops.read_out(logits, None if len(own) == len(logits) else rows, own)
        tokens = torch.where(own == GREEDY, greedy[rows], own)
        return _Slice((greedy, tokens, logprobs), self._tops(wanted, part, logits))

    def _choose(self, hot: list[tuple[Part, Generating]], scores: Tensor) -> Tensor:
        """The next token of rows whose temperature is positive, or where processors come before the choice, int64 [n].

        scores: a copy of their logits, float32 [n, V].
        """
        states = [seq.processing for _, seq in hot]
        for (_, seq), state in zip(hot, states, strict=True):
            if state is not None:
                state.advance(seq.token_ids)
                seq.error = NOTHING_LEFT if len(state.forbidden) == scores.shape[1] else None
        penalise(scores, states)
        logprobs = self.ops.log_softmax(scores)
        forbid(logprobs, states)
        sampled = [row for row, (_, seq) in enumerate(hot) if seq.request.params.temperature > 0]
        if len(sampled) == len(hot):
            return self._sample(hot, logprobs)
        tokens = sampling.argmax_lowest(logprobs)
        if sampled:
            (rows,) = upload([np.array(sampled)], self.ops.device)
            tokens[rows] = self._sample([hot[row] for row in sampled], logprobs[rows])
        return tokens

    def _sample(self, hot: list[tuple[Part, Generating]], logprobs: Tensor) -> Tensor:
        """float32 [n, V] -> int64 [n], each row by its request's temperature, top-k, top-p and noise."""
        params = [seq.request.params for _, seq in hot]
        keys = np.array([seq.noise_key for _, seq in hot], dtype=np.int64)
        positions = np.array([part.positions.stop for part, _ in hot], dtype=np.int64)  # those that are being filled
        return sampling.sample(
            logprobs,
            torch.tensor([p.temperature for p in params], dtype=torch.float64),
            torch.tensor([p.top_k for p in params]),
            torch.tensor([p.top_p for p in params], dtype=torch.float64),
            *upload([keys, positions], self.ops.device),
        )

    def _tops(self, wanted: Wanted, part: slice, logits: Tensor) -> list[_Top]:
        """The best tokens of the slice's rows that want any, some rows at a time."""
        found = [row for row in wanted.with_alternatives if part.start <= row < part.stop]
        size, tops = self._rows_at_once, []
        for rows in (found[i : i + size] for i in range(0, len(found), size)):
            (own,) = upload([np.array(rows, dtype=np.int64) - part.start], self.ops.device)
            most = max(wanted.with_alternatives[row] for row in rows)
            tops.append(_Top(rows, *sampling.top(self.ops.log_softmax(logits[own]), most)))
        return tops


@dataclass(frozen=True)
class _Slice:
    found: tuple[Tensor, Tensor, Tensor]  # int64 and float32: each row's most probable token, then tokens and logprobs
    tops: list[_Top]


@dataclass(frozen=True)
class _Top:
    rows: list[int]  # among the step's wanted ones
    ids: Tensor  # int64 [len(rows), k], best first
    values: Tensor  # float32


@dataclass(frozen=True)
class Pending:
    """A step's results on their way to the host."""

    wanted: Wanted
    download: Download
    top_rows: list[list[int]]

    def results(self) -> list[Result]:
        """Of the sequences that have not finished meanwhile, by a token of the step before. Waits for the step."""
        fetched = self.download.read()
        if not self.wanted.parts:
            return []
        greedy, logprobs, tokens, *tops = fetched
        top = self._alternatives(tops)
        next_tokens = iter(tokens.tolist())
        results: list[Result] = []
        for part in self.wanted.parts:
            seq, own = part.seq, logprobs[part.columns]
            first = part.rows.start
            if isinstance(seq, Generating):
                found = int(greedy[first]), next(next_tokens), float(own[0]), top.get(first, {}), seq.error
                results.append(NextToken(seq, part.positions.start, *found))
            elif isinstance(seq, Scoring):
                alternatives = [top.get(row, {}) for row in range(first, part.rows.stop)] if top else []
                results.append(Scores(seq, part.positions, greedy[part.rows], own, alternatives))
        return [result for result in results if result.seq.status is not Status.FINISHED]

    def _alternatives(self, arrays: list[np.ndarray]) -> dict[int, Top]:
        """By wanted row: the most probable tokens, as many as its sequence asked for."""
        found: dict[int, Top] = {}
        for rows, ids, values in zip(self.top_rows, arrays[::2], arrays[1::2], strict=True):
            for row, its_ids, its_values in zip(rows, ids.tolist(), values.tolist(), strict=True):
                count = self.wanted.with_alternatives[row]
                found[row] = dict(zip(its_ids[:count], its_values[:count], strict=True))
        return found
