"""`fast`: plain torch, on a CPU or on CUDA without Triton. Nothing is promised about bits from one batch to another.

Element-wise arithmetic rounds where transformers' eager code rounds, so on equal inputs those ops are byte-equal to it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from evalengine.kernels.attention_batch import KVCache
from evalengine.kernels.attention_variant import AttentionVariant
from evalengine.kernels.mixture_variant import Router
from evalengine.layers import fast_attention, fast_mixture
from evalengine.layers.attention import store_kv
from evalengine.layers.attention_backends import attention_function, variant_problems
from evalengine.layers.ops import Groups, Ops, PreparedWeight
from evalengine.layers.variants import Activation, Norm

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
}


class FastOps(Ops):
    """The fast level. Weights stay as loaded, but the CPU's lm_head keeps a float32 copy, since logits are float32."""

    name = "fast"
    sums_cross_ranks = True
    attention = staticmethod(fast_attention.paged_attention)

    def __init__(self, dtype: torch.dtype, device: torch.device, attention_backend: str = "sdpa") -> None:
        super().__init__(dtype, device)
        self.attention = attention_function(attention_backend)  # type: ignore[assignment]
        self._backend = attention_backend

    def problems(self, variant: AttentionVariant) -> list[str]:
        problems = variant_problems(self._backend, variant)
        return [f"engine.attention_backend={self._backend}: {problem}" for problem in problems]

    def prepare_weight(self, weight: Tensor, *, lm_head: bool = False) -> PreparedWeight:
        return weight.detach().float() if lm_head and self.device.type == "cpu" else weight.detach()

    def linear(self, x: Tensor, weight: PreparedWeight, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, weight, bias)

    def lm_head(self, x: Tensor, weight: PreparedWeight) -> Tensor:
        if weight.dtype == torch.float32:
            return F.linear(x.float(), weight)
        return torch.mm(x, weight.t(), out_dtype=torch.float32)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x is normed in float32, rounded to the model dtype, then multiplied with the weight."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return weight * normed.to(x.dtype)

    def norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm) -> Tensor:
        """A layer norm with a bias is torch's own, as in StarCoder2 and GPT-NeoX; one without is Cohere's, by hand."""
        if norm.is_plain:
            return self.rms_norm(x, weight, norm.eps)
        if bias is not None:
            return F.layer_norm(x, x.shape[-1:], weight, bias, norm.eps)
        wide, factor = x.float(), weight.float()
        if norm.kind == "layer":
            wide = wide - wide.mean(-1, keepdim=True)
        if norm.offset:  # 0 + -0 would be +0
            factor = norm.offset + factor
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)
        return (normed * factor).to(x.dtype)

    def softcap(self, logits: Tensor, cap: float) -> Tensor:
        return torch.tanh(logits / cap) * cap

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Each product is rounded, and so is the sum; with a wide table only the sum is."""
        first, second = x.chunk(2, dim=-1)
        cos, sin = cos[:, None], sin[:, None]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """silu is rounded to the model dtype, then multiplied with the second half."""
        gate, up = gate_up.chunk(2, dim=-1)
        # On a CPU, silu's vector body and scalar tail round differently, so the memory layout must be transformers'.
        return F.silu(gate.contiguous()) * up

    def activation(self, x: Tensor, kind: Activation, *, gated: bool) -> Tensor:
        if not gated:
            return _ACTIVATIONS[kind](x)
        if kind == "clamped_swiglu":
            return fast_mixture.clamped_swiglu(x)
        gate, up = x.chunk(2, dim=-1)
        return _ACTIVATIONS[kind](gate.contiguous()) * up

    def store_kv(self, k: Tensor, v: Tensor, kv: KVCache, slot_mapping: Tensor) -> None:
        store_kv(k, v, *kv, slot_mapping)

    def log_softmax(self, logits: Tensor) -> Tensor:
        return torch.log_softmax(logits, dim=-1)

    def route(self, logits: Tensor, choice_bias: Tensor | None, router: Router) -> tuple[Tensor, Tensor]:
        return fast_mixture.route(logits, choice_bias, router, self.dtype)

    def expert_linear(self, x: Tensor, weight: PreparedWeight, bias: Tensor | None, groups: Groups) -> Tensor:
        return fast_mixture.expert_linear(x, weight, bias, groups)

    def combine(self, x: Tensor, weights: Tensor) -> Tensor:
        return (x.float() * weights.unsqueeze(-1)).sum(1).to(x.dtype)

    def gate(self, x: Tensor, logits: Tensor) -> Tensor:
        return torch.sigmoid(logits) * x
