"""A ragged attention batch over a pool of shuffled pages, in which every slot past a sequence's end is NaN."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from evalengine.kernels import attention
from evalengine.kernels.attention_batch import AttentionSchedule
from evalengine.kernels.attention_variant import AttentionVariant
from evalengine.layers.metadata import AttentionMetadata
from tests.references import reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass
class PagedBatch:
    """Queries and a paged KV pool for the sequences of `lens`: (query_len, kv_len) each, decodes first.

    `pages` lists each sequence's pages; q is [tokens, heads, head_dim], a cache [pages, page, kv_heads, head_dim].
    """

    lens: list[tuple[int, int]]
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    metadata: AttentionMetadata
    pages: list[list[int]]
    variant: AttentionVariant
    sinks: Tensor | None = None

    @classmethod
    def random(
        cls, lens: list[tuple[int, int]], heads: int, kv_heads: int, head_dim: int, page: int, dtype: torch.dtype,
        seed: int = 0, stale: float = float("nan"), spread: float = 1.0, **variant: Any,
    ) -> PagedBatch:  # fmt: skip
        """Draws normal numbers times `spread`; slots that no sequence uses, or that all of its queries' windows leave
        behind, hold `stale`. `variant`: the fields of an `AttentionVariant` beside its scale."""
        generator = torch.Generator(DEVICE).manual_seed(seed)

        def randn(*shape: int) -> Tensor:
            return (torch.randn(shape, generator=generator, device=DEVICE) * spread).to(dtype)

        total = sum(-(-kv // page) for _, kv in lens) + 3
        order = torch.randperm(total, generator=torch.Generator().manual_seed(seed)).tolist()
        pages = [[order.pop() for _ in range(-(-kv // page))] for _, kv in lens]
        caches = torch.full((2, total, page, kv_heads, head_dim), stale, dtype=dtype, device=DEVICE)
        for (_, kv), table in zip(lens, pages, strict=True):
            positions = torch.arange(kv, device=DEVICE)
            rows = torch.tensor(table, device=DEVICE)[positions // page] if kv else positions
            caches[:, rows, positions % page] = randn(2, kv, kv_heads, head_dim)
        metadata = AttentionMetadata.build(
            [n for n, _ in lens], [kv for _, kv in lens], pages, page, torch.device(DEVICE)
        )
        q = randn(sum(n for n, _ in lens), heads, head_dim)
        form = AttentionVariant(head_dim**-0.5, **variant)
        sinks = randn(heads) if form.sinks else None
        if form.window is not None:
            for (new, kv), table in zip(lens, pages, strict=True):
                behind = torch.arange(max(0, kv - new + 1 - form.window), device=DEVICE)
                caches[:, torch.tensor(table, device=DEVICE)[behind // page] if kv else behind, behind % page] = stale
        return cls(lens, q, caches[0], caches[1], metadata, pages, form, sinks)

    def run(self, schedule: AttentionSchedule | None = None) -> Tensor:
        return attention.paged_attention(
            self.q, (self.k_cache, self.v_cache), self.metadata, self.variant, self.sinks, schedule
        )

    def part(self, which: list[tuple[int, int, int]]) -> PagedBatch:
        """Returns a batch of the query positions `which`, each (sequence, first, last + 1), over the same KV pool."""
        starts = [0]
        for n, _ in self.lens:
            starts.append(starts[-1] + n)
        rows = [torch.arange(first, end) - (self.lens[s][1] - self.lens[s][0]) + starts[s] for s, first, end in which]
        lens = [(end - first, end) for _, first, end in which]
        page = self.k_cache.shape[1]
        pages = [self.pages[s][: -(-end // page)] for s, _, end in which]
        metadata = AttentionMetadata.build(
            [n for n, _ in lens], [kv for _, kv in lens], pages, page, torch.device(DEVICE)
        )
        return replace(self, lens=lens, q=self.q[torch.cat(rows).to(DEVICE)], metadata=metadata, pages=pages)

    def truth(self) -> Tensor:
        """Return the float64 reference's output on the CPU: [tokens, heads, head_dim]."""
        m = self.metadata
        k, v = (cache.double().nan_to_num(nan=0.0) for cache in (self.k_cache, self.v_cache))
        batch = m.block_table, m.query_lens, m.kv_lens
        return reference.paged_attention(self.q, k, v, *batch, self.variant, self.sinks).cpu()
