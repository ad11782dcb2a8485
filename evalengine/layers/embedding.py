"""The two ends of a model: the embedding table, and the projection onto the vocabulary.

T tokens, n rows of interest, H hidden, V vocabulary, v the part of it that this rank holds.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from evalengine.layers.base import Layer
from evalengine.layers.ops import Ops, PreparedWeight

# Bytes of one slice of logits. lm_head's weights are read once a slice (1.2 GB for Qwen3-8B, 0.3 ms on an H200), so
# slices are large where memory is; a CPU's caches suit small ones.
LOGITS_BYTES, CPU_LOGITS_BYTES = 512 << 20, 64 << 20


class VocabEmbedding(Layer):
    """Looks up token ids in the embedding table, of which each rank owns a range of ids."""

    def __init__(self, ops: Ops, vocab_size: int, hidden_size: int) -> None:
        super().__init__(ops)
        self.shape, self.ids = (vocab_size, hidden_size), ops.vocabulary_range(vocab_size)
        self.weight = self.new_parameter(len(self.ids), hidden_size)

    def checkpoint_shards(self, name: str) -> dict[str, tuple[int, ...]]:
        return {name: self.shape}

    def weight_loader(self, param: nn.Parameter, loaded_weight: Tensor, shard: str) -> None:
        param.copy_(loaded_weight[self.ids.start : self.ids.stop])

    def forward(self, ids: Tensor) -> Tensor:
        """int64 [T] -> [T, H]. All ranks but one add zeros to a row, so no order of adding changes a bit."""
        if self.ops.tp.size == 1:
            return self.ops.embedding(ids, self.weight)
        if not self.ids:
            return self.ops.tp.sum(
                torch.zeros(len(ids), self.shape[1], dtype=self.ops.activation_dtype, device=ids.device)
            )
        own = ids - self.ids.start
        is_here = (own >= 0) & (own < len(self.ids))
        rows = self.ops.embedding(own.clamp_(0, len(self.ids) - 1), self.weight)
        return self.ops.tp.sum(rows.masked_fill_(~is_here[:, None], 0))


class LMHead(Layer):
    """Projects hidden states to float32 logits, with its own weight or, if tied, the embedding's."""

    def __init__(self, ops: Ops, vocab_size: int, hidden_size: int, tied_to: VocabEmbedding | None = None) -> None:
        super().__init__(ops)
        self.shape, self.ids = (vocab_size, hidden_size), ops.vocabulary_range(vocab_size)
        self.tied = tied_to is not None
        self.weight: nn.Parameter | None = (
            self.new_parameter(len(self.ids), hidden_size) if tied_to is None else tied_to.weight
        )
        self.prepared: PreparedWeight = None

    def checkpoint_shards(self, name: str) -> dict[str, tuple[int, ...]]:
        return {} if self.tied else {name: self.shape}

    def weight_loader(self, param: nn.Parameter, loaded_weight: Tensor, shard: str) -> None:
        param.copy_(loaded_weight[self.ids.start : self.ids.stop])

    def finalize(self) -> None:
        assert self.weight is not None, "finalize() runs once"
        if self.ids:
            self.prepared = self.ops.prepare_weight(self.weight, lm_head=True)
        self.weight = None

    def forward(self, hidden: Tensor) -> Tensor:
        """[n, H] -> float32 [n, v]: the logits of this rank's token ids."""
        if not self.ids:
            return torch.empty(len(hidden), 0, dtype=torch.float32, device=hidden.device)
        return self.ops.lm_head(hidden, self.prepared)

    def whole(self, logits: Tensor) -> Tensor:
        """Every rank's logits [n, v] -> those of the whole vocabulary, [n, V], on each rank."""
        return self.ops.tp.gather(logits, [len(ids) for ids in self.ops.vocabulary_ranges(self.shape[0])])

    def read_out(self, logits: Tensor, rows: Tensor | None, columns: Tensor) -> tuple[Tensor, Tensor]:
        """`Ops.read_out` over the whole vocabulary, from this rank's part [n, v] of the logits. All ranks get the
        same result."""
        if self.ops.tp.size == 1:
            return self.ops.read_out(logits, rows, columns)
        return self.ops.read_out_part(logits, rows, columns, self.ops.vocabulary_ranges(self.shape[0]))


def rows_per_slice(vocab_size: int, device: torch.device) -> int:
    """How many rows go through lm_head at once, so that their float32 logits fill no more than a slice."""
    size = CPU_LOGITS_BYTES if device.type == "cpu" else LOGITS_BYTES
    return max(1, size // (4 * vocab_size))
