"""What one forward pass says to its attention layers: which token belongs to which sequence, and where its KV lies.

    T tokens in the batch, S sequences, P pages a sequence at most.

The engine builds it, the model's forward takes it as an argument: there is no global state.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class AttentionMetadata:
    """One step's ragged batch.

    Sequence s owns the rows cu_seqlens_q[s] : cu_seqlens_q[s + 1] of the batch; they are the last `query_lens[s]` of
    its `kv_lens[s]` tokens, in order (causal).
    """

    slot_mapping: Tensor  # int64 [T]: page * block_size + offset of each token's KV; -1 is skipped
    cu_seqlens_q: Tensor  # int32 [S + 1]
    seqlens_k: Tensor  # int32 [S]: tokens visible to the sequence's last row (the new ones included)
    block_table: Tensor  # int32 [S, P]: page ids, padded with 0
    query_lens: list[int]  # the same on the host: no device synchronisation in a layer
    kv_lens: list[int]
