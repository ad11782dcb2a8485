"""The two ends of a model: the embedding table, and the projection onto the vocabulary.

T tokens, n rows of interest, H hidden, V vocabulary of this rank.
"""

from __future__ import annotations

from torch import Tensor, nn

from evalengine.layers.base import Layer, shard_rows
from evalengine.layers.ops import Ops, PreparedWeight


class VocabEmbedding(Layer):
    """Rows of a table; rank r of n owns the r-th of n equal ranges of token ids."""

    def __init__(self, ops: Ops, vocab_size: int, hidden_size: int, tp_rank: int = 0, tp_size: int = 1) -> None:
        super().__init__(ops)
        assert vocab_size % tp_size == 0, f"{vocab_size} token ids do not divide among {tp_size} ranks"
        self.shape, self.tp_rank, self.tp_size = (vocab_size, hidden_size), tp_rank, tp_size
        self.weight = self.new_parameter(vocab_size // tp_size, hidden_size)

    def checkpoint_shards(self, name: str) -> dict[str, tuple[int, ...]]:
        return {name: self.shape}

    def weight_loader(self, param: nn.Parameter, loaded_weight: Tensor, shard: str) -> None:
        param.copy_(shard_rows(loaded_weight, self.tp_rank, self.tp_size))

    def forward(self, ids: Tensor) -> Tensor:
        """int64 [T] -> [T, H]."""
        return self.ops.embedding(ids, self.weight)


class LMHead(Layer):
    """Hidden states to float32 logits, with its own weight or, when tied, the embedding's."""

    def __init__(
        self,
        ops: Ops,
        vocab_size: int,
        hidden_size: int,
        tied_to: VocabEmbedding | None = None,
        tp_rank: int = 0,
        tp_size: int = 1,
    ) -> None:
        super().__init__(ops)
        assert vocab_size % tp_size == 0, f"{vocab_size} token ids do not divide among {tp_size} ranks"
        self.shape, self.tp_rank, self.tp_size = (vocab_size, hidden_size), tp_rank, tp_size
        self.tied = tied_to is not None
        self.weight: nn.Parameter | None = (
            self.new_parameter(vocab_size // tp_size, hidden_size) if tied_to is None else tied_to.weight
        )
        self.prepared: PreparedWeight = None

    def checkpoint_shards(self, name: str) -> dict[str, tuple[int, ...]]:
        return {} if self.tied else {name: self.shape}

    def weight_loader(self, param: nn.Parameter, loaded_weight: Tensor, shard: str) -> None:
        param.copy_(shard_rows(loaded_weight, self.tp_rank, self.tp_size))

    def finalize(self) -> None:
        assert self.weight is not None, "finalize() runs once"
        self.prepared, self.weight = self.ops.prepare_weight(self.weight, lm_head=True), None

    def forward(self, hidden: Tensor) -> Tensor:
        """[n, H] -> float32 [n, V]."""
        return self.ops.lm_head(hidden, self.prepared)
