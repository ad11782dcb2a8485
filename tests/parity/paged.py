"""A paged KV pool and its metadata, with which models run without the engine."""

from __future__ import annotations

import dataclasses
import random

import torch
from torch import Tensor

from evalengine.engine.states import state_pools
from evalengine.layers.metadata import AttentionMetadata
from evalengine.layers.recurrent import LayerCache, layer_cache
from evalengine.models.decoder import DecoderForCausalLM


class PagedRunner:
    """Runs ragged steps of several sequences; pages come in shuffled order, and the pool starts as NaN."""

    def __init__(
        self,
        model: DecoderForCausalLM,
        block_size: int = 16,
        num_blocks: int = 64,
        fill: float = float("nan"),
        most_sequences: int = 16,
    ):
        """most_sequences: that the pools of states have slots for."""
        spec, ops = model.spec, model.ops
        self.model, self.block_size, self.most_sequences = model, block_size, most_sequences
        pools, whole = state_pools(spec, ops, most_sequences)
        for pool in whole:
            pool.fill_(fill)
        self.caches: list[LayerCache] = []
        for layer in range(spec.num_layers):
            shape = (num_blocks, block_size, *spec.heads_of(spec.block(layer))[1:])
            k, v = (torch.full(shape, fill, dtype=ops.dtype, device=ops.device) for _ in range(2))
            self.caches.append((k, v))
            if layer in pools:
                self.caches[layer] = layer_cache((k, v), pools[layer], spec.block(layer).beside_attention)
        self.free = list(range(num_blocks))
        random.Random(0).shuffle(self.free)
        self.pages: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}

    @torch.inference_mode()
    def step(self, batch: dict[str, list[int]], first_position: int = 0) -> dict[str, Tensor]:
        """Runs each sequence's new tokens; returns each sequence's float32 logits [new tokens, V], on the CPU."""
        positions, kv_lens = [], []
        for name, tokens in batch.items():
            start = self.lengths.setdefault(name, 0)
            end = start + len(tokens)
            pages = self.pages.setdefault(name, [])
            while len(pages) * self.block_size < end:
                pages.append(self.free.pop())
            positions += range(first_position + start, first_position + end)
            kv_lens.append(end)
            self.lengths[name] = end
        device = self.model.ops.device
        query_lens = [len(tokens) for tokens in batch.values()]
        pages_of = [self.pages[name] for name in batch]
        metadata = AttentionMetadata.build(query_lens, kv_lens, pages_of, self.block_size, device)
        slots = [self.slot_of(name) for name in batch]
        on_device = torch.tensor(slots, dtype=torch.int32, device=device)
        metadata = dataclasses.replace(metadata, state_slots=on_device, slots=slots)
        ids = torch.tensor([token for tokens in batch.values() for token in tokens])
        hidden = self.model(ids.to(device), torch.tensor(positions, device=device), self.caches, metadata)
        logits = self.model.compute_logits(hidden).cpu().split(metadata.query_lens)
        return dict(zip(batch, logits, strict=True))

    def slot_of(self, name: str) -> int:
        """A sequence's place in the pools of states."""
        return self.most_sequences - 1 - list(self.pages).index(name)
