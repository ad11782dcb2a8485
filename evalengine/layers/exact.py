"""`exact`: every op's output is float32, rounded once from float64. Its sums are exact, so their order cannot matter.

Weights and KV have values of the run's dtype; the arithmetic is `evalengine.kernels.exact`'s.
"""

from __future__ import annotations

import torch
from torch import Tensor

from evalengine.errors import EvalEngineError
from evalengine.kernels import exact, exact_attention, exact_mixture, exact_recurrent, exact_rows
from evalengine.kernels.attention_batch import KVCache
from evalengine.kernels.attention_variant import AttentionVariant
from evalengine.kernels.recurrent_variant import DeltaInputs, GatedDelta, Mamba2, Mamba2Inputs
from evalengine.layers.attention import store_kv
from evalengine.layers.metadata import AttentionMetadata
from evalengine.layers.ops import Groups, Ops, Pools, PreparedWeight
from evalengine.layers.variants import Fp8Rows, Norm


class ExactOps(Ops):
    """The exact level. Raises `EvalEngineError`, at construction, for a device whose float64 product is not exact."""

    name = "exact"

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dtype, device)
        try:
            exact.self_test(device)
        except RuntimeError as error:
            raise EvalEngineError(
                f"numerics=exact cannot run on engine.device={device}: {error}; use another device, "
                "or batch_invariant=false"
            ) from error

    @property
    def activation_dtype(self) -> torch.dtype:
        return torch.float32

    def prepare_weight(self, weight: Tensor, *, lm_head: bool = False) -> PreparedWeight:
        return exact.quantize_weight(weight.detach())

    linear = staticmethod(exact.linear)
    lm_head = staticmethod(exact.linear)

    def embedding(self, ids: Tensor, table: Tensor) -> Tensor:
        return table[ids].float()

    rms_norm = staticmethod(exact.rms_norm)

    def norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm) -> Tensor:
        if norm.kind == "layer":
            return exact_rows.layer_norm(x, weight, bias, norm.eps)
        return exact.rms_norm(x, weight, norm.eps, norm.offset)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return exact.add(x, residual)

    scale = staticmethod(exact_rows.scale)

    def fp8_rows(self, x: Tensor, rule: Fp8Rows) -> Tensor:
        return exact_rows.fp8_rows(x, rule.group, rule.scale, rule.power)

    softcap = staticmethod(exact_rows.softcap)

    def rope_table(
        self, inv_freq: Tensor, max_positions: int, scaling: float, *, wide: bool = False
    ) -> tuple[Tensor, Tensor]:
        cos, sin = exact.rope_table(inv_freq, max_positions, scaling)
        return cos.to(self.device), sin.to(self.device)

    rope = staticmethod(exact.apply_rope)
    silu_and_mul = staticmethod(exact.silu_and_mul)
    activation = staticmethod(exact_rows.activation)
    xielu = staticmethod(exact_rows.xielu)

    def store_kv(self, k: Tensor, v: Tensor, kv: KVCache, slot_mapping: Tensor) -> None:
        store_kv(k, v, *kv, slot_mapping)

    def attention(
        self, q: Tensor, kv: KVCache, metadata: AttentionMetadata, variant: AttentionVariant, sinks: Tensor | None
    ) -> Tensor:
        return exact_attention.paged_attention(
            q, *kv, metadata.block_table, metadata.query_lens, metadata.kv_lens, variant, sinks
        )

    def causal_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, ring: Tensor, metadata: AttentionMetadata, *, silu: bool
    ) -> Tensor:
        return exact_recurrent.causal_conv(
            x, weight, bias, ring, metadata.query_lens, metadata.kv_lens, metadata.slots, silu=silu
        )

    def gated_delta(
        self, x: DeltaInputs, state: Pools, closes: int, metadata: AttentionMetadata, variant: GatedDelta
    ) -> Tensor:
        return exact_recurrent.gated_delta(*x, state[0], metadata.query_lens, metadata.kv_lens, metadata.slots, variant)

    def mamba2(
        self, x: Mamba2Inputs, state: Pools, closes: int, metadata: AttentionMetadata, variant: Mamba2
    ) -> Tensor:
        return exact_recurrent.mamba2(*x, state[0], metadata.query_lens, metadata.kv_lens, metadata.slots, variant)

    def gated_norm(
        self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, group: int, *, gate_first: bool, rounded_once: bool
    ) -> Tensor:
        return exact_recurrent.gated_norm(x, gate, weight, eps, group, gate_first=gate_first)

    multiply = staticmethod(exact_recurrent.multiply)

    def scale_columns(self, x: Tensor, factors: Tensor) -> Tensor:
        return exact_recurrent.multiply(x, factors.expand_as(x))

    def log_softmax(self, logits: Tensor) -> Tensor:
        return exact.log_softmax(logits)

    route = staticmethod(exact_mixture.route)

    def prepare_experts(self, weight: Tensor) -> PreparedWeight:
        return [exact.quantize_weight(expert) for expert in weight.detach()]

    def expert_linear(self, x: Tensor, weight: PreparedWeight, bias: Tensor | None, groups: Groups) -> Tensor:
        return exact_mixture.expert_linear(x, weight, bias, groups)

    combine = staticmethod(exact_mixture.combine)
    gate = staticmethod(exact_mixture.gate)
