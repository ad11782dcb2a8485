"""A step as integers: all that a rank must be told to compute it.

T tokens, S sequences, n wanted rows, m wanted tokens (m >= n: several requests may share a row), g next tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np

from evalengine.engine.scheduler import Chunk


@dataclass(frozen=True)
class Batch:
    """The step's tokens and where their KV lies, in the order of its chunks."""

    ids: np.ndarray  # int64 [T]: token ids, or references below 0 to what the last step chose (`LastTokens`)
    query_lens: list[int]  # [S]
    kv_lens: list[int]  # [S]
    pages: list[list[int]]  # page ids of each sequence

    @classmethod
    def of(cls, chunks: SequenceOf[Chunk]) -> Batch:
        ids: list[int] = []
        for c in chunks:
            ids.extend(c.seq.token_ids[c.start : c.end])
            ids.extend(-1 - c.seq.device_row for _ in range(max(c.start, c.seq.num_tokens), c.end))
        lengths = [c.end - c.start for c in chunks], [c.end for c in chunks]
        return cls(np.array(ids, dtype=np.int64), *lengths, [c.seq.block_table for c in chunks])


def _none(*shape: int) -> np.ndarray:
    return np.empty(shape, dtype=np.int64)


@dataclass(frozen=True)
class Wanted:
    """The rows and tokens to read out of the step's hidden states; all arrays are int64."""

    rows: np.ndarray = field(default_factory=lambda: _none(0))  # [n]: rows of the batch, ascending
    columns: np.ndarray = field(default_factory=lambda: _none(0))  # [m]: token ids; `layers.ops.GREEDY`: the best
    row_of: np.ndarray = field(default_factory=lambda: _none(0))  # [m]: each token's place in `rows`, ascending
    next_tokens: np.ndarray = field(default_factory=lambda: _none(0))  # [g]: places in `columns`
    # [k, 2]: the place in `columns` and the place in `rows` of each next token that is sampled or processed.
    chosen: np.ndarray = field(default_factory=lambda: _none(0, 2))
    tops: dict[int, int] = field(default_factory=dict)  # place in `rows`, ascending -> how many alternatives
