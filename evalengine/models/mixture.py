"""The feed-forward of a layer that has experts.

T tokens, H hidden, h this rank's columns.
"""

from __future__ import annotations

from torch import Tensor, nn

from evalengine.layers.experts import Combine, ExpertChoice, ExpertDown, ExpertGateUp, RouterLogits, SharedGate
from evalengine.layers.linear import MergedLinear, OutputLinear
from evalengine.layers.ops import Groups, Ops
from evalengine.layers.rows import ActivationLayer
from evalengine.models.spec import Block, ModelSpec


class Experts(nn.Module):
    """Every expert's gate, up and down projection."""

    def __init__(self, spec: ModelSpec, block: Block, ops: Ops) -> None:
        super().__init__()
        assert block.mixture is not None
        count, inner, bias = block.mixture.router.experts, block.mixture.intermediate_size, block.mixture.bias
        self.gate_up_proj = ExpertGateUp(ops, count, spec.hidden_size, inner, bias)
        self.activation = ActivationLayer(ops, block.activation)
        self.down_proj = ExpertDown(ops, count, inner, spec.hidden_size, bias)

    def forward(self, x: Tensor, groups: Groups) -> Tensor:
        """[T, H] -> [T, k, h]."""
        gate_up = self.gate_up_proj(x, groups)
        return self.down_proj(self.activation(gate_up), groups)


class SharedExpert(nn.Module):
    """The expert that every token has: a feed-forward whose output is this rank's columns, or its part of a sum."""

    def __init__(self, spec: ModelSpec, block: Block, ops: Ops) -> None:
        super().__init__()
        assert block.mixture is not None
        inner = block.mixture.shared_size
        sizes = dict.fromkeys(("gate_proj", "up_proj"), inner)
        self.gate_up_proj = MergedLinear(ops, spec.hidden_size, sizes, bias=block.mlp_bias)
        self.activation = ActivationLayer(ops, block.activation)
        self.down_proj = OutputLinear(ops, inner, spec.hidden_size, bias=block.mlp_bias, part=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_up_proj(x)))


class DecoderMixture(nn.Module):
    """Each token's experts, weighted, and the expert that all tokens share, if there is one."""

    def __init__(self, spec: ModelSpec, block: Block, ops: Ops, *, whole: bool) -> None:
        """whole: whether the output is needed whole on every rank (`OutputLinear`)."""
        super().__init__()
        assert block.mixture is not None
        self.ops, self.mixture = ops, block.mixture
        self.gate = RouterLogits(ops, self.mixture.router, spec.hidden_size)
        self.choice = ExpertChoice(ops, self.mixture.router)
        self.experts = Experts(spec, block, ops)
        if self.mixture.shared_size:
            self.shared_expert = SharedExpert(spec, block, ops)
        if self.mixture.shared_gate:
            self.shared_expert_gate = SharedGate(ops, spec.hidden_size)
        self.combine = Combine(ops, whole=whole)

    def forward(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H], or [T, h] if the gathers are fused."""
        ids, weights = self.choice(self.gate(x))
        parts = self.experts(x, self.ops.group(ids, self.mixture.router.experts))
        shared = self.shared_expert(x) if self.mixture.shared_size else None
        if self.mixture.shared_gate:
            shared = self.shared_expert_gate(x, shared)
        return self.combine(parts, weights, shared)
