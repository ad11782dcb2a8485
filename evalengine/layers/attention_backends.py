"""Chooses the code that computes attention at the `fast` level: flash-attn, our Triton kernels, or torch's SDPA.

The contract's levels have one attention each; only `fast` has a choice, which can change its results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from evalengine.kernels.attention_batch import KVCache
from evalengine.kernels.attention_variant import AttentionVariant
from evalengine.layers import fast_attention, flash_attention
from evalengine.layers.kernel_support import capability_problems, head_dim_problems, kernel_problems
from evalengine.layers.metadata import AttentionMetadata

# q, the pools, the batch, the variant and its sinks (None without) -> the output
AttentionFunction = Callable[[Tensor, KVCache, AttentionMetadata, AttentionVariant, Tensor | None], Tensor]
Variants = Sequence[AttentionVariant]
BACKENDS = ("flash_attn", "triton", "sdpa")
HOPPER = (9, 0)  # compute capability


def attention_function(backend: str) -> AttentionFunction:
    """The function behind a backend, one of `BACKENDS` for which `backend_problems` finds nothing."""
    if backend == "flash_attn":
        return flash_attention.paged_attention
    if backend == "triton":
        from evalengine.kernels.attention import paged_attention

        return paged_attention
    assert backend == "sdpa", backend
    return fast_attention.paged_attention


def variant_problems(backend: str, variant: AttentionVariant) -> list[str]:
    """A sentence with a fix for each reason why a backend cannot compute a layer's attention."""
    return flash_attention.variant_problems(variant) if backend == "flash_attn" else []


def possible_backends(
    device: torch.device, dtype: torch.dtype | None, head_dim: int | None, block_size: int | None, variants: Variants
) -> list[str]:
    """The backends that can serve the variants of attention that a model has, the fastest first (`sdpa` always can).
    None: not known; for block_size, free to suit the backend."""
    names = fastest_first(device)
    return [name for name in names if not backend_problems(name, device, dtype, head_dim, block_size, variants)]


def fastest_first(device: torch.device) -> tuple[str, ...]:
    """The backends in the order in which `auto` tries them.

    On an H200 our kernels have 1.05 to 1.19 times flash-attn 2's speed in decode and 1.45 to 1.54 times in prefill
    (results/reference/speed-nvidia-h200.md); on other GPUs the two have not been compared.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) == HOPPER:
        return ("triton", "flash_attn", "sdpa")
    return BACKENDS


def backend_problems(
    backend: str,
    device: torch.device,
    dtype: torch.dtype | None,
    head_dim: int | None,
    block_size: int | None,
    variants: Variants = (),
) -> list[str]:
    """A sentence with a fix for each reason that keeps a backend from serving; arguments: `possible_backends`."""
    if backend == "sdpa":
        return []
    if device.type != "cuda":
        return [f"it runs on CUDA only, and this run's device is {device}; take sdpa, or auto"]
    if backend == "triton":
        return [*kernel_problems(device), *head_dim_problems(head_dim)]
    return [
        *capability_problems(device),
        *flash_attention.installation_problems(),
        *flash_attention.shape_problems(dtype, head_dim, block_size),
        *dict.fromkeys(problem for variant in variants for problem in variant_problems(backend, variant)),
    ]
