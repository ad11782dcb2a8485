"""The sizes of a model that the kernels' schedules depend on. This module imports no schedule and no Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from evalengine.kernels.attention_variant import AttentionVariant, Latent
from evalengine.kernels.mixture_variant import Mixture
from evalengine.kernels.recurrent_variant import Recurrence
from evalengine.kernels.row_variants import LLAMA, RowVariants


class LinearShape(NamedTuple):
    """A linear layer's weight [n, k], and whether a bias is added to its products."""

    n: int
    k: int
    biased: bool = False


@dataclass(frozen=True)
class Shapes:
    """Element counts of one decoder-only model."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    attention_bias: bool = False  # whether q, k and v have a bias
    attention_output_bias: bool = False  # whether o_proj has a bias
    variants: tuple[AttentionVariant, ...] = ()  # of the layers' attention, each once; none: plain attention
    gated: bool = True  # whether the feed-forward has a gate in addition to `up_proj`
    mlp_bias: bool = False  # whether its products have biases
    row_variants: RowVariants = LLAMA
    dense: bool = True  # whether some layer has one feed-forward for all tokens
    mixture: Mixture | None = None  # what the layers have that have experts
    latent: Latent | None = None  # what keys and values are products of, if not of the hidden state
    output_gate: bool = False  # whether attention's output has a gate
    recurrent_kinds: tuple[Recurrence, ...] = ()  # the layers' replacements of attention, each once

    def heads_of_rank(self, ranks: int) -> tuple[int, int]:
        """Query and KV heads that each of so many ranks holds; where there are fewer KV heads than ranks, several ranks
        hold the same one."""
        return self.num_heads // ranks, max(1, self.num_kv_heads // ranks)

    def linear_layers(self, ranks: int = 1) -> dict[str, LinearShape]:
        """One layer's weights, projections merged as the engine merges them, by name. Each of several ranks has its own
        rows of every weight, with the whole of k."""
        heads, kv_heads = self.heads_of_rank(ranks)
        hidden, inner = self.hidden_size, self.intermediate_size
        gates = heads * self.output_gate
        layers = {"qkv_proj": LinearShape((heads + gates + 2 * kv_heads) * self.head_dim, hidden, self.attention_bias)}
        value_dim = self.head_dim
        if self.latent is not None:
            layers, value_dim = self._latent_layers(heads), self.latent.value_dim
        layers["o_proj"] = LinearShape(hidden // ranks, self.num_heads * value_dim, self.attention_output_bias)
        if self.dense:
            layers["gate_up_proj"] = LinearShape((1 + self.gated) * inner // ranks, hidden, self.mlp_bias)
            layers["down_proj"] = LinearShape(hidden // ranks, inner, self.mlp_bias)
        for kind in self.recurrent_kinds:
            name = type(kind).__name__
            layers[f"{name} in_proj"] = LinearShape(kind.of_rank(ranks).projected, hidden, kind.bias)
            layers[f"{name} out_proj"] = LinearShape(hidden // ranks, kind.features, kind.bias)
        if self.mixture is None:
            return layers
        if not self.mixture.router.wide:
            layers["gate"] = LinearShape(self.mixture.router.experts, hidden, self.mixture.router.bias)
        if shared := self.mixture.shared_size:
            layers["shared gate_up_proj"] = LinearShape(2 * shared // ranks, hidden, self.mlp_bias)
            layers["shared down_proj"] = LinearShape(hidden // ranks, shared, self.mlp_bias)
        if self.mixture.shared_gate:
            layers["shared_expert_gate"] = LinearShape(1, hidden)
        return layers

    def _latent_layers(self, heads: int) -> dict[str, LinearShape]:
        """Latent attention's products before its output's, for so many heads of a rank."""
        assert self.latent is not None
        latent, q_rank = self.latent, self.latent.q_rank
        rows = (q_rank or 0) + latent.kv_rank + latent.rotary_dim
        expanded = self.head_dim - latent.rotary_dim + latent.value_dim
        return {
            "a_proj": LinearShape(rows, self.hidden_size, self.attention_bias),
            "q_b_proj": LinearShape(heads * self.head_dim, self.hidden_size if q_rank is None else q_rank),
            "kv_b_proj": LinearShape(heads * expanded, latent.kv_rank),
        }

    def expert_layers(self, ranks: int = 1) -> dict[str, LinearShape]:
        """The weights of one expert, likewise; none without experts."""
        if self.mixture is None:
            return {}
        hidden, inner, bias = self.hidden_size, self.mixture.intermediate_size, self.mixture.bias
        return {
            "gate_up_proj": LinearShape(2 * inner // ranks, hidden, bias),
            "down_proj": LinearShape(hidden // ranks, inner, bias),
        }
