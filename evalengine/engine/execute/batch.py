"""A step as integers: everything that a rank needs to compute it, and the requester of each number of its results.

T tokens, S sequences, n wanted rows, m wanted tokens (m >= n: several requests may share a row), g next tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from evalengine.engine.schedule.scheduler import Chunk
from evalengine.engine.schedule.scoring import Scoring
from evalengine.engine.schedule.sequence import Generating, Sequence, Status, Top
from evalengine.layers.metadata import Download
from evalengine.layers.shared_blocks import SharedPages


@dataclass(frozen=True)
class Batch:
    """The step's tokens and where their KV lies, in the order of its chunks."""

    ids: np.ndarray  # int64 [T]: token ids, or references below 0 to what the last step chose (`LastTokens`)
    query_lens: list[int]  # [S]
    kv_lens: list[int]  # [S]
    tables: list[list[list[int]]]  # of each block table: the page ids of each sequence
    rope_starts: list[int]  # [S]: `Sequence.rope_start`
    slots: list[int]  # each sequence's place in the pools of states, which only recurrent layers have
    start_slots: list[int]  # likewise, where its state before the step is: `Sequence.start_slot`
    shared: SharedPages | None = None  # what attention reads once for several decodes

    @classmethod
    def of(cls, chunks: SequenceOf[Chunk], shared: SharedPages | None = None) -> Batch:
        ids: list[int] = []
        for c in chunks:
            ids.extend(c.seq.token_ids[c.start : c.end])
            unknown = range(max(c.start, c.seq.num_tokens), c.end)
            ids.extend(c.guesses or (-1 - c.seq.device_row for _ in unknown))
        lengths = [c.end - c.start for c in chunks], [c.end for c in chunks]
        tables = [list(rows) for rows in zip(*(c.seq.block_tables for c in chunks), strict=True)]
        rope_starts = [c.seq.rope_start for c in chunks]
        slots = [c.seq.state_slot for c in chunks], [c.seq.start_slot for c in chunks]
        return cls(np.array(ids, dtype=np.int64), *lengths, tables, rope_starts, *slots, shared)


def _none(*shape: int) -> np.ndarray:
    return np.empty(shape, dtype=np.int64)


@dataclass(frozen=True)
class LogitsIndices:
    """The rows and tokens to read out of the step's hidden states; all arrays are int64."""

    rows: np.ndarray = field(default_factory=lambda: _none(0))  # [n]: rows of the batch, ascending
    columns: np.ndarray = field(default_factory=lambda: _none(0))  # [m]: token ids; `layers.ops.GREEDY`: the best
    row_of: np.ndarray = field(default_factory=lambda: _none(0))  # [m]: each token's place in `rows`, ascending
    next_tokens: np.ndarray = field(default_factory=lambda: _none(0))  # [g]: places in `columns`
    # [k, 2]: the place in `columns` and the place in `rows` of each next token that is sampled or processed.
    chosen: np.ndarray = field(default_factory=lambda: _none(0, 2))
    tops: dict[int, int] = field(default_factory=dict)  # place in `rows`, ascending -> how many alternatives


@dataclass
class NextToken:
    """The next token of a generating sequence, from the logits of its last position."""

    seq: Generating
    position: int
    greedy_id: int  # the model's most probable token; V if a logprob is NaN
    token: int  # the chosen token
    logprob: float
    top: Top = field(default_factory=dict)
    error: str | None = None
    guess: int | None = None  # the token at `position`, if it was guessed: where it was wrong, this result is void


@dataclass
class ScoredTokens:
    """The logprobs at some wanted positions of a scoring sequence."""

    seq: Scoring
    positions: range
    greedy_ids: np.ndarray  # int64: each position's most probable token; V where a logprob is NaN
    logprobs: np.ndarray  # float32: one for each of `Scoring.columns(positions)`
    top: list[Top] = field(default_factory=list)
    error: str | None = None


Result = NextToken | ScoredTokens


@dataclass(frozen=True)
class SequenceShare:
    """One sequence's share of a step's wanted rows and tokens."""

    seq: Sequence
    positions: range
    rows: slice
    columns: slice
    guess: int | None = None  # the token at the share's only position, if it was guessed


class LogitsRequests:
    """The questions of a step's sequences, in the order of its chunks."""

    def __init__(self, chunks: SequenceOf[Chunk]) -> None:
        self.parts: list[SequenceShare] = []
        columns: list[np.ndarray] = []
        rows: list[int] = []
        first = num_columns = 0
        for chunk in chunks:
            for positions, guess in _asked(chunk):
                own = chunk.seq.columns(positions)
                place = slice(len(rows), len(rows) + len(positions)), slice(num_columns, num_columns + len(own))
                self.parts.append(SequenceShare(chunk.seq, positions, *place, guess))
                rows.extend(range(first + positions.start - chunk.start, first + positions.stop - chunk.start))
                columns.append(own)
                num_columns += len(own)
            first += chunk.end - chunk.start
        self.generating = [(part, part.seq) for part in self.parts if isinstance(part.seq, Generating)]
        self.choosing = [(part, seq) for part, seq in self.generating if not seq.takes_argmax]
        if columns:
            self._rows, self._columns = np.array(rows, dtype=np.int64), np.concatenate(columns)

    @cached_property
    def indices(self) -> LogitsIndices:
        """The same questions in integers, without the sequences."""
        if not self.parts:
            return LogitsIndices()
        asking = [part for part in self.parts if part.seq.num_logprobs]
        return LogitsIndices(
            self._rows,
            self._columns,
            self._row_of(),
            np.array([part.columns.start for part, _ in self.generating], dtype=np.int64),
            np.array([(p.columns.start, p.rows.start) for p, _ in self.choosing], dtype=np.int64).reshape(-1, 2),
            {row: p.seq.num_logprobs for p in asking for row in range(p.rows.start, p.rows.stop)},
        )

    def _row_of(self) -> np.ndarray:
        """int64 [m]: the wanted row that each wanted token is read from."""
        counts = np.ones(len(self._rows), dtype=np.int64)
        for part in self.parts:
            if (own := part.columns.stop - part.columns.start) > len(part.positions):
                counts[part.rows] = own
        return np.repeat(np.arange(len(self._rows)), counts)


def _asked(chunk: Chunk) -> list[tuple[range, int | None]]:
    """The positions whose logits a chunk needs, each with the token there if it is guessed: a guess makes every
    position of the chunk its own question."""
    if chunk.guesses:
        given = (None, *chunk.guesses)
        return [(range(p, p + 1), guess) for p, guess in zip(range(chunk.start, chunk.end), given, strict=True)]
    positions = chunk.seq.wanted(chunk.start, chunk.end)
    return [(positions, None)] if positions else []


@dataclass(frozen=True)
class Pending:
    """A step's results on their way to the host."""

    requests: LogitsRequests
    download: Download
    top_rows: list[list[int]]

    def results(self) -> list[Result]:
        """The results of the sequences that no token of the step before has finished meanwhile. Waits for the step."""
        fetched = self.download.read()
        if not self.requests.parts:
            return []
        greedy, logprobs, tokens, *tops = fetched
        top = self._alternatives(tops)
        next_tokens = iter(tokens.tolist())
        results: list[Result] = []
        for part in self.requests.parts:
            seq, own = part.seq, logprobs[part.columns]
            first = part.rows.start
            if isinstance(seq, Generating):
                values = int(greedy[first]), next(next_tokens), float(own[0]), top.get(first, {}), seq.error
                results.append(NextToken(seq, part.positions.start, *values, part.guess))
            elif isinstance(seq, Scoring):
                alternatives = [top.get(row, {}) for row in range(first, part.rows.stop)] if top else []
                results.append(ScoredTokens(seq, part.positions, greedy[part.rows], own, alternatives))
        return [result for result in results if result.seq.status is not Status.FINISHED]

    def _alternatives(self, arrays: list[np.ndarray]) -> dict[int, Top]:
        """Wanted row -> its most probable tokens, as many as its sequence requests."""
        alternatives: dict[int, Top] = {}
        for rows, ids, values in zip(self.top_rows, arrays[::2], arrays[1::2], strict=True):
            for row, row_ids, row_values in zip(rows, ids.tolist(), values.tolist(), strict=True):
                count = self.requests.indices.tops[row]
                alternatives[row] = dict(zip(row_ids[:count], row_values[:count], strict=True))
        return alternatives
