"""A step's integers on the device: which token belongs to which sequence, and where its KV lies.

    T tokens in the batch, S sequences, P pages a sequence at most.

The engine builds the metadata and the model's forward takes it as an argument: there is no global state. Integers go to
the device, and results come back, without making the host wait for earlier work (`upload`, `Download`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from evalengine.kernels.attention_batch import SharedBlocks
from evalengine.kernels.recurrent_variant import ChunkTable, chunk_table
from evalengine.layers.shared_blocks import SharedPages

ALIGNMENT = 128  # bytes; arrays in the copied buffer are aligned for kernels as torch's allocator aligns tensors


def upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """A tensor for each array, in one copy from pinned memory.

    A copy from memory that is not pinned would wait for everything that the stream was given before. Torch keeps the
    pinned memory until the copy has been made. On a CPU the tensors are the arrays themselves.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    sizes = [-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays]
    host = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
    parts = host.split(sizes)
    for part, array in zip(parts, arrays, strict=True):
        part.numpy()[: array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return [
        part[: array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for part, array in zip(host.to(device, non_blocking=True).split(sizes), arrays, strict=True)
    ]


class Download:
    """Copies tensors to the host once the device has computed them."""

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        """device: the tensors' device. Without tensors, `read` waits for its work all the same."""
        self._event: torch.cuda.Event | None = None
        self._host = list(tensors)
        if device.type == "cuda":
            self._host = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
            for host, tensor in zip(self._host, tensors, strict=True):
                host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(device))

    def read(self) -> list[np.ndarray]:
        """The tensors as arrays; waits until they are copied."""
        if self._event is not None:
            self._event.synchronize()
        return [tensor.numpy() for tensor in self._host]


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
    shared: SharedBlocks | None = None  # what decodes have in the same pages, if attention is to read it once for all
    plans: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)  # data of kernels, made once a step
    layers: Sequence[AttentionMetadata] = ()  # what each layer takes, if they have several block tables
    # Of a model with recurrent layers: each sequence's place in the pool of states (-1: padding), on device and host.
    state_slots: Tensor | None = None  # int32 [S]
    slots: Sequence[int] = ()
    start_slots: Tensor | None = None  # int32 [S]: where the states before the step are; None: in the same slots

    @classmethod
    def build(
        cls,
        query_lens: list[int],
        kv_lens: list[int],
        pages: Sequence[list[int]],
        block_size: int,
        device: torch.device,
        shared: SharedPages | None = None,
    ) -> AttentionMetadata:
        """The metadata of sequences with these numbers of new tokens, numbers of tokens and page ids."""
        return cls.build_each(query_lens, kv_lens, [pages], block_size, device, shared)[0]

    @classmethod
    def build_each(
        cls,
        query_lens: list[int],
        kv_lens: list[int],
        tables: Sequence[Sequence[list[int]]],
        block_size: int,
        device: torch.device,
        shared: SharedPages | None = None,
    ) -> list[AttentionMetadata]:
        """`build` for each of several block tables, which name the page ids of the same tokens in different layers.

        shared: what decodes share in the layers without a window; those with one do not ask.
        """
        new = np.array(query_lens, dtype=np.int64)
        width = max(-(-n // block_size) for n in kv_lens)
        positions = token_positions(query_lens, kv_lens)
        rows, columns, offsets = np.repeat(np.arange(len(new)), new), positions // block_size, positions % block_size
        arrays = [np.concatenate([[0], new.cumsum()], dtype=np.int32), np.array(kv_lens, dtype=np.int32)]
        for pages in tables:
            table = np.zeros((len(pages), width), dtype=np.int32)
            for row, ids in zip(table, pages, strict=True):
                row[: len(ids)] = ids[:width]
            arrays += [table[rows, columns].astype(np.int64) * block_size + offsets, table]
        if shared is not None:
            arrays += shared.arrays
        starts, lengths, *own = upload(arrays, device)
        blocks = None
        if shared is not None:
            *own, tiles, members, count, tokens = own
            blocks = SharedBlocks(tiles, members, count, tokens, most_tiles=len(tiles))
        return [
            cls(slots, starts, lengths, table, query_lens, kv_lens, blocks)
            for slots, table in zip(own[::2], own[1::2], strict=True)
        ]

    @classmethod
    def of_layers(cls, tables: list[AttentionMetadata], table_of: Sequence[int]) -> AttentionMetadata:
        """The metadata of a step whose layers take those of these block tables, each by its number."""
        if len(tables) == 1:
            return tables[0]
        return replace(tables[0], layers=[tables[table] for table in table_of])

    def of_layer(self, layer: int) -> AttentionMetadata:
        """The metadata of a layer, by its number."""
        return self.layers[layer] if self.layers else self

    @cached_property
    def num_decodes(self) -> int:
        """How many sequences, from the first on, have exactly one row."""
        return next((s for s, n in enumerate(self.query_lens) if n != 1), len(self.query_lens))

    @cached_property
    def max_query_len(self) -> int:
        """The most rows of a sequence that is no decode."""
        return max(self.query_lens[self.num_decodes :], default=0)

    @cached_property
    def longest_query(self) -> int:
        """The most rows of a sequence."""
        return max(self.query_lens, default=0)

    @cached_property
    def max_decode_kv_len(self) -> int:
        return max(self.kv_lens[: self.num_decodes], default=0)

    @cached_property
    def max_prefill_kv_len(self) -> int:
        return max(self.kv_lens[self.num_decodes :], default=0)

    @cached_property
    def chunks(self) -> ChunkTable | None:
        """Of recurrences, in the sequences that are no decodes; None if all are."""
        return self._chunks(closed=False)

    @cached_property
    def closed_chunks(self) -> ChunkTable | None:
        """Those that another one follows in this step."""
        return self._chunks(closed=True)

    def _chunks(self, *, closed: bool) -> ChunkTable | None:
        n = self.num_decodes
        if n == len(self.query_lens):
            return None

        def on_device(columns: list[list[int]]) -> list[Tensor]:
            return upload([np.array(column, dtype=np.int32) for column in columns], self.seqlens_k.device)

        return chunk_table(self.query_lens[n:], self.kv_lens[n:], on_device, closed=closed)

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
