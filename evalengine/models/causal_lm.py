"""The engine's interface to a model, whether its layers are ours or transformers'.

    T tokens of a step, n rows of interest, H hidden, V vocabulary, Hkv KV heads, D head_dim, B pages of `block_size`
    tokens.

`models.decoder` computes the native families, `models.hf_module` the others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor, nn

from evalengine.layers.metadata import AttentionMetadata
from evalengine.layers.ops import Ops
from evalengine.layers.recurrent import LayerCache
from evalengine.models.spec import ModelSpec


class CausalLM(nn.Module, ABC):
    """A decoder over the engine's paged KV pool, and its vocabulary projection."""

    spec: ModelSpec
    ops: Ops
    capturable = True  # whether its decode steps can be captured as CUDA graphs, where the ops' kernels can
    layers_alike = True  # whether one layer's kernels are those of all, so that computing the first warms all up

    @abstractmethod
    def forward(
        self, input_ids: Tensor, positions: Tensor, kv_caches: list[LayerCache], metadata: AttentionMetadata
    ) -> Tensor:
        """Normed hidden states [T, H] of token ids and positions, int64 [T] each.

        kv_caches: of each layer a (k, v) pair of pools [B, block_size, Hkv, D], its `States`, or both. With fewer
        than layers, only the first so many layers are computed; only for models with `layers_alike`.
        """

    @abstractmethod
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[n, H] -> float32 logits [n, V]; with several ranks, of this rank's part of the vocabulary."""

    def whole_logits(self, logits: Tensor) -> Tensor:
        """Every rank's logits from `compute_logits` -> those of the whole vocabulary, [n, V]."""
        return logits

    def sample_layers(self) -> tuple[int, ...] | None:
        """One layer of each kind, two at least, by their numbers; None if the model has no separable layers."""
        return None

    def of_layers(self, layers: Sequence[int]) -> CausalLM:
        """The model with these of its layers only, over the same weights (`sample_layers`)."""
        raise AssertionError("this model has no separable layers")

    def read_out(self, logits: Tensor, rows: Tensor | None, columns: Tensor) -> tuple[Tensor, Tensor]:
        """`Ops.read_out` of logits from `compute_logits`."""
        return self.ops.read_out(logits, rows, columns)
