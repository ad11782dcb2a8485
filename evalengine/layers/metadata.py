"""Tells the attention layers of a forward pass which token belongs to which sequence, and where its KV lies.

    T tokens in the batch, S sequences, P pages a sequence at most.

The engine builds the metadata and the model's forward takes it as an argument: there is no global state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from evalengine.layers.upload import upload


@dataclass(frozen=True)
class AttentionMetadata:
    """One step's ragged batch.

    Sequence s owns the rows cu_seqlens_q[s] : cu_seqlens_q[s + 1] of the batch; they are the last `query_lens[s]` of
    its `kv_lens[s]` tokens, in order (causal). The first `num_decodes` sequences have one row each: kernels that split
    the KV range serve them, kernels that tile the rows serve the others, and each gets a slice of these tensors.
    """

    slot_mapping: Tensor  # int64 [T]: page * block_size + offset of each token's KV; -1 is skipped
    cu_seqlens_q: Tensor  # int32 [S + 1]
    seqlens_k: Tensor  # int32 [S]: tokens visible to the sequence's last row (the new ones included)
    block_table: Tensor  # int32 [S, P]: page ids, padded with 0
    query_lens: list[int]  # the lengths on the host, so that no layer waits for the device
    kv_lens: list[int]
    plans: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)  # data of kernels, made once a step

    @classmethod
    def build(
        cls,
        query_lens: list[int],
        kv_lens: list[int],
        pages: Sequence[list[int]],
        block_size: int,
        device: torch.device,
    ) -> AttentionMetadata:
        """The metadata of sequences with these numbers of new tokens, numbers of tokens and page ids."""
        new = np.array(query_lens, dtype=np.int64)
        width = max(-(-n // block_size) for n in kv_lens)
        table = np.zeros((len(pages), width), dtype=np.int32)
        for row, ids in zip(table, pages, strict=True):
            row[: len(ids)] = ids[:width]
        positions = token_positions(query_lens, kv_lens)
        page = table[np.repeat(np.arange(len(new)), new), positions // block_size].astype(np.int64)
        starts = np.concatenate([[0], new.cumsum()], dtype=np.int32)
        lengths = np.array(kv_lens, dtype=np.int32)
        arrays = [page * block_size + positions % block_size, starts, lengths, table]
        slot_mapping, cu_seqlens_q, seqlens_k, block_table = upload(arrays, device)
        return cls(slot_mapping, cu_seqlens_q, seqlens_k, block_table, query_lens, kv_lens)

    @cached_property
    def num_decodes(self) -> int:
        """How many sequences, from the first on, have exactly one row."""
        return next((s for s, n in enumerate(self.query_lens) if n != 1), len(self.query_lens))

    @cached_property
    def max_query_len(self) -> int:
        """The most rows of a sequence that is no decode."""
        return max(self.query_lens[self.num_decodes :], default=0)

    @cached_property
    def max_decode_kv_len(self) -> int:
        return max(self.kv_lens[: self.num_decodes], default=0)

    @cached_property
    def max_prefill_kv_len(self) -> int:
        return max(self.kv_lens[self.num_decodes :], default=0)

    @cached_property
    def prefill_cu_seqlens_q(self) -> Tensor:
        """int32 [S - num_decodes + 1], from 0: the rows past the decodes, by sequence."""
        return self.cu_seqlens_q[self.num_decodes :] - self.num_decodes

    @cached_property
    def prefill_cu_seqlens_k(self) -> Tensor:
        """int32 [S - num_decodes + 1], from 0: running sums of the lengths of the sequences that are no decodes.

        They are summed on the device, once a step for all layers; a copy from the host would wait for it.
        """
        return F.pad(self.seqlens_k[self.num_decodes :].cumsum(0, dtype=torch.int32), (1, 0))


def token_positions(query_lens: list[int], kv_lens: list[int]) -> np.ndarray:
    """int64 [T]: the place of each new token in its sequence, whose last tokens are the new ones."""
    new, lengths = np.array(query_lens, dtype=np.int64), np.array(kv_lens, dtype=np.int64)
    before = new.cumsum() - new  # rows of the sequences before each
    return np.repeat(lengths - new - before, new) + np.arange(new.sum())
