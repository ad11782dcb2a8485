"""The blocks that the decodes of each step share, and whether reading them once pays (`layers.shared_blocks`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from evalengine.config.schema import EngineConfig
from evalengine.engine.schedule.scheduler import Chunk
from evalengine.engine.settings import Settings
from evalengine.layers.shared_blocks import CHUNK, WORTHWHILE, SharedPages, find, serves
from evalengine.models.spec import ModelSpec


def least_saved(config: EngineConfig, settings: Settings, spec: ModelSpec) -> int | None:
    """The fewest tokens a step must save for what its decodes share to be read once; None: never.

    Layers with a window read all by themselves, so a model that has no others shares nothing.
    """
    is_ours = settings.attention_backend == "triton"
    windows = bool(spec.variants) and all(variant.window is not None for variant in spec.variants)
    if config.cascade_attention == "off" or not is_ours or not serves(settings.block_size) or windows:
        return None
    heads = spec.kv_heads_of_rank(settings.tensor_parallel_size)
    token = 2 * heads * spec.head_dim * settings.dtype.itemsize
    return 1 if config.cascade_attention == "always" else -(-WORTHWHILE // token)


class Sharing:
    """Finds what the decodes of one step after another share; on rank 0, which has the sequences.

    The first block table is that of the layers that see all keys, if there are any (`kv_layout`); where these layers
    have several, sequences share the same blocks in each. A sequence's lists of pages only grow, by pages that no other
    sequence has. So as long as the same lists come in the same order, what they share stays.
    """

    def __init__(self, page: int, least: int) -> None:
        self._page, self._least = page, least
        self._lists: list[list[list[int]]] = []
        self._found: SharedPages | None = None

    def of(self, chunks: Sequence[Chunk]) -> SharedPages | None:
        """The blocks that the decodes, the first of the chunks, share; None if it does not pay."""
        decodes = [c for c in chunks if c.end - c.start == 1]
        lists = [c.seq.block_tables for c in decodes]
        same = len(lists) == len(self._lists) and all(a is b for a, b in zip(lists, self._lists, strict=True))
        # A kernel looks a sequence's chunks up in `tokens`, so that has to be as wide as the longest is now.
        if same and self._found is not None:
            same = max(c.end for c in decodes) <= self._found.tokens.shape[1] * CHUNK
        if not same:
            self._lists, self._found = lists, self._find(decodes)
        return self._found

    def _find(self, decodes: list[Chunk]) -> SharedPages | None:
        lengths = np.array([c.end for c in decodes], dtype=np.int64)
        if len(lengths) < 2 or int(lengths.sum()) < self._least:
            return None
        whole = lengths // self._page
        table = np.zeros((len(decodes), max(1, int(whole.max()))), dtype=np.int32)
        for row, decode, count in zip(table, decodes, whole.tolist(), strict=True):
            row[:count] = decode.seq.block_tables[0][:count]
        found = find(table, lengths, self._page)
        return found if found is not None and found.saved >= self._least else None
