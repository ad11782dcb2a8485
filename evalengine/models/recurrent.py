"""What layers have in the place of attention: gated delta rule, Mamba-2, short convolution.

T tokens, H hidden. Each takes the normed residual and the layer's pools of states, and returns the branch's output.
"""

from __future__ import annotations

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
from evalengine.models.spec import ModelSpec


class GatedDeltaNet(nn.Module):
    """Projections; a convolution over q, k and v; the gated delta rule; its norm, gated by z; the last projection."""

    def __init__(self, spec: ModelSpec, variant: GatedDelta, ops: Ops, *, whole: bool) -> None:
        super().__init__()
        heads, features = variant.num_value_heads, variant.features
        self.sizes = {"qkv": variant.channels, "z": features, "b": heads, "a": heads}
        names = {
            f"in_proj_{name}": size for name, size in (variant.parts | {"z": features, "b": heads, "a": heads}).items()
        }
        self.in_proj = MergedLinear(ops, spec.hidden_size, names)
        channels = {f"conv_{name}": size for name, size in variant.parts.items()}
        self.conv = CausalConv(ops, channels, variant.taps, bias=False, silu=True)
        self.A_log, self.dt_bias = HeadVector(ops, heads), HeadVector(ops, heads)
        self.rule = GatedDeltaRule(ops, variant)
        self.norm = GatedNorm(ops, variant.value_dim, variant.value_dim, spec.rms_norm_eps, gate_first=False)
        self.out_proj = OutputLinear(ops, features, spec.hidden_size, whole=whole)

    def forward(self, x: Tensor, states: States, metadata: AttentionMetadata) -> Tensor:
        mixed, z, b, a = self.in_proj(x).split(list(self.sizes.values()), -1)
        mixed = self.conv(mixed, states.conv, metadata)
        out = self.rule(mixed, a, b, (self.A_log.weight, self.dt_bias.weight), states.recurrent, metadata)
        return self.out_proj(self.norm(out.flatten(1), z))


class Mamba2Mixer(nn.Module):
    """Projections; a convolution over x, B and C; the state space; a norm of what z gates; the last projection."""

    def __init__(self, spec: ModelSpec, variant: Mamba2, ops: Ops, *, whole: bool) -> None:
        super().__init__()
        heads, features = variant.num_heads, variant.features
        self.sizes = {"z": features, "xBC": variant.channels, "dt": heads}
        names = {f"in_proj_{name}": size for name, size in ({"z": features} | variant.parts | {"dt": heads}).items()}
        self.in_proj = MergedLinear(ops, spec.hidden_size, names, bias=variant.bias)
        channels = {f"conv_{name}": size for name, size in variant.parts.items()}
        self.conv = CausalConv(ops, channels, variant.taps, bias=variant.conv_bias, silu=True)
        self.A_log, self.dt_bias, self.D = HeadVector(ops, heads), HeadVector(ops, heads), HeadVector(ops, heads)
        self.scan = Mamba2Scan(ops, variant)
        self.norm = GatedNorm(ops, features, features // variant.num_groups, spec.rms_norm_eps, gate_first=True)
        self.out_proj = OutputLinear(ops, features, spec.hidden_size, bias=variant.bias, whole=whole)

    def forward(self, x: Tensor, states: States, metadata: AttentionMetadata) -> Tensor:
        z, mixed, dt = self.in_proj(x).split(list(self.sizes.values()), -1)
        mixed = self.conv(mixed, states.conv, metadata)
        heads = self.A_log.weight, self.dt_bias.weight, self.D.weight
        out = self.scan(mixed, dt, heads, states.recurrent, metadata)
        return self.out_proj(self.norm(out.flatten(1), z))


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


def mixer(spec: ModelSpec, variant: Recurrence, ops: Ops, *, whole: bool) -> nn.Module:
    """The module of a recurrence. whole: every rank gets all of its output (`OutputLinear`)."""
    if isinstance(variant, GatedDelta):
        return GatedDeltaNet(spec, variant, ops, whole=whole)
    if isinstance(variant, Mamba2):
        return Mamba2Mixer(spec, variant, ops, whole=whole)
    return ShortConvMixer(spec, variant, ops, whole=whole)
