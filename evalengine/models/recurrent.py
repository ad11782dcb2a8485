"""Layers without attention: gated delta rule, Mamba-2, short convolution.

T tokens, H hidden. Each takes the normed residual and the layer's pools of states, and returns the branch's output.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from evalengine.kernels.recurrent_variant import GatedDelta, Mamba2, Recurrence, ShortConv
from evalengine.layers.linear import MergedLinear, OutputLinear
from evalengine.layers.metadata import AttentionMetadata
from evalengine.layers.ops import Ops
from evalengine.layers.recurrent import (
    CausalConv,
    GatedDeltaRule,
    GatedNorm,
    HeadVector,
    Mamba2Scan,
    Multiply,
    States,
)
from evalengine.layers.rows import ActivationLayer, ScaleColumns, scales
from evalengine.models.spec import Block, ModelSpec, Multipliers


class GatedDeltaNet(nn.Module):
    """Projections; a convolution over q, k and v; the gated delta rule; its norm, gated by z; the last projection."""

    def __init__(self, spec: ModelSpec, variant: GatedDelta, ops: Ops, *, whole: bool) -> None:
        super().__init__()
        heads, features = variant.num_value_heads, variant.features
        sizes = variant.parts | {"z": features, "b": heads, "a": heads}
        self.in_proj = MergedLinear(ops, spec.hidden_size, {f"in_proj_{name}": size for name, size in sizes.items()})
        own = variant.of_rank(ops.tp.size)
        self.split = own.channels, own.features, own.num_value_heads, own.num_value_heads
        channels = {f"conv_{name}": size for name, size in variant.parts.items()}
        self.conv = CausalConv(ops, channels, variant.taps, bias=False, silu=True)
        self.A_log, self.dt_bias = HeadVector(ops, heads), HeadVector(ops, heads)
        self.rule = GatedDeltaRule(ops, variant)
        eps = spec.rms_norm_eps if variant.norm_eps is None else variant.norm_eps
        self.norm = GatedNorm(ops, features, variant.value_dim, eps, gate_first=False, repeated=True)
        self.out_proj = OutputLinear(ops, features, spec.hidden_size, whole=whole)

    def forward(self, x: Tensor, states: States, metadata: AttentionMetadata) -> Tensor:
        mixed, z, b, a = self.in_proj(x).split(self.split, -1)
        mixed = self.conv(mixed, states.conv, metadata)
        out = self.rule(mixed, a, b, (self.A_log.weight, self.dt_bias.weight), states, metadata)
        return self.out_proj(self.norm(out.flatten(1), z))


class Mamba2Mixer(nn.Module):
    """Projections; a convolution over x, B and C; the state space; z's gate, and a norm, if it has one; the last
    projection."""

    def __init__(
        self, spec: ModelSpec, variant: Mamba2, multipliers: Multipliers | None, ops: Ops, *, whole: bool
    ) -> None:
        super().__init__()
        heads, features, groups = variant.num_heads, variant.features, min(ops.tp.size, variant.num_groups)
        sizes = {"z": features} | variant.parts | {"dt": heads}
        self.in_proj = MergedLinear(
            ops,
            spec.hidden_size,
            {f"in_proj_{name}": size for name, size in sizes.items()},
            bias=variant.bias,
            parts={"in_proj_B": groups, "in_proj_C": groups},
        )
        own = variant.of_rank(ops.tp.size)
        self.split = own.features, own.channels, own.num_heads
        channels = {f"conv_{name}": size for name, size in variant.parts.items()}
        shared = {"conv_B": groups, "conv_C": groups}
        self.conv = CausalConv(ops, channels, variant.taps, bias=variant.conv_bias, silu=True, parts=shared)
        self.A_log, self.dt_bias, self.D = HeadVector(ops, heads), HeadVector(ops, heads), HeadVector(ops, heads)
        self.scan = Mamba2Scan(ops, variant)
        self.gate, self.norm = None, None
        if variant.gated == "alone":
            self.gate = ActivationLayer(ops)
        else:
            self.norm = GatedNorm(
                ops,
                features,
                features // variant.num_groups,
                spec.rms_norm_eps,
                gate_first=variant.gated == "before norm",
                rounded_once=variant.norm_rounded_once,
            )
        self.out_proj = OutputLinear(ops, features, spec.hidden_size, bias=variant.bias, whole=whole)
        factors = multipliers or Multipliers()
        self.scale_in, self.scale_out = scales(ops, factors.recurrence_in, factors.recurrence_out)
        self.scale_projected = None
        if set(factors.projected) != {1.0}:  # transformers' are of the weights' dtype
            rounded = torch.tensor(factors.projected, dtype=ops.dtype).tolist()
            widths = [self.in_proj.local_rows(name) for name in self.in_proj.sizes]
            self.scale_projected = ScaleColumns(ops, list(zip(widths, rounded, strict=True)))

    def forward(self, x: Tensor, states: States, metadata: AttentionMetadata) -> Tensor:
        projected = self.in_proj(x if self.scale_in is None else self.scale_in(x))
        if self.scale_projected is not None:
            projected = self.scale_projected(projected)
        z, mixed, dt = projected.split(self.split, -1)
        mixed = self.conv(mixed, states.conv, metadata)
        heads = self.A_log.weight, self.dt_bias.weight, self.D.weight
        out = self.scan(mixed, dt, heads, states, metadata).flatten(1)
        if self.gate is not None:
            out = self.gate(torch.cat([z, out], 1))
        elif self.norm is not None:
            out = self.norm(out, z)
        out = self.out_proj(out)
        return out if self.scale_out is None else self.scale_out(out)


class ShortConvMixer(nn.Module):
    """out_proj(C * conv(B * x)), with B, C and x projected from the input."""

    def __init__(self, spec: ModelSpec, variant: ShortConv, ops: Ops, *, whole: bool) -> None:
        super().__init__()
        names = dict.fromkeys(("in_proj_B", "in_proj_C", "in_proj_x"), variant.channels)
        self.in_proj = MergedLinear(ops, spec.hidden_size, names, bias=variant.bias)
        self.gate_in, self.gate_out = Multiply(ops), Multiply(ops)
        self.conv = CausalConv(ops, {"conv": variant.channels}, variant.taps, bias=variant.bias, silu=False)
        self.out_proj = OutputLinear(ops, variant.features, spec.hidden_size, bias=variant.bias, whole=whole)

    def forward(self, x: Tensor, states: States, metadata: AttentionMetadata) -> Tensor:
        b, c, own = self.in_proj(x).chunk(3, -1)
        mixed = self.conv(self.gate_in(b, own), states.conv, metadata)
        return self.out_proj(self.gate_out(c, mixed))


def mixer(spec: ModelSpec, block: Block, variant: Recurrence, ops: Ops, *, whole: bool) -> nn.Module:
    """The module of a layer's recurrence. whole: every rank gets all of its output (`OutputLinear`)."""
    if isinstance(variant, GatedDelta):
        return GatedDeltaNet(spec, variant, ops, whole=whole)
    if isinstance(variant, Mamba2):
        return Mamba2Mixer(spec, variant, block.multipliers, ops, whole=whole)
    return ShortConvMixer(spec, variant, ops, whole=whole)
