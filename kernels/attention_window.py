"""Paged attention over a window, by leaving out the pages before it: for levels to whom a chunk's place is schedule.

    S sequences, P pages a sequence.

`native` does not use it: its chunks and blocks are at absolute positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Reached:
    """A batch without the pages that no query reaches; every position is counted from its sequence's first page left.

    Causal masks and windows compare positions, so they are as before.
    """

    block_table: Tensor  # int32 [S, P]
    kv_lens: list[int]
    firsts: list[int]  # the lowest position that a query of each sequence sees; before it the pool may hold anything

    @classmethod
    def of(
        cls, block_table: Tensor, query_lens: list[int], kv_lens: list[int], page: int, window: int | None
    ) -> Reached:
        """block_table: int32 [S, P]; page: tokens of one."""
        if window is None:
            return cls(block_table, kv_lens, [0] * len(kv_lens))
        firsts = [max(0, kv - new + 1 - window) for new, kv in zip(query_lens, kv_lens, strict=True)]
        skipped = torch.tensor([first // page for first in firsts])
        columns = torch.arange(block_table.shape[1]) + skipped[:, None]
        columns.clamp_(max=max(block_table.shape[1] - 1, 0))  # pages past a sequence's end are never read
        before = [first // page * page for first in firsts]
        return cls(
            block_table.gather(1, columns.to(block_table.device)),
            [kv - start for kv, start in zip(kv_lens, before, strict=True)],
            [first - start for first, start in zip(firsts, before, strict=True)],
        )
