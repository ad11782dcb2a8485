"""`fast`'s paged attention by the flash-attn package (Dao-AILab, 2.8), an optional extra.

    T tokens in the batch, S sequences, P pages a sequence, Hq/Hkv heads, D head_dim, B pages of `block_size` tokens.

Decodes go through `flash_attn_with_kvcache`, which splits the KV range; all other sequences (whole prompts, chunks,
and prompts behind a cached prefix) through `flash_attn_varlen_func`. Both read the pools through the block table.
The package multiplies what is before a window in the window's first block with weights of 0, so that pages that were
given back must hold finite numbers.
"""

from __future__ import annotations

import importlib
import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor

from evalengine.kernels.attention_batch import KVCache
from evalengine.kernels.attention_variant import AttentionVariant
from evalengine.layers.metadata import AttentionMetadata

PAGE_MULTIPLE = 256  # tokens; flash-attn says "Paged KV cache block size must be divisible by 256"
DTYPES = (torch.bfloat16, torch.float16)
LARGEST_HEAD_DIM, HEAD_DIM_MULTIPLE = 256, 8
FIX = "pip install 'evalengine[flash]' (or: pip install flash-attn --no-build-isolation)"


@cache
def package() -> Any:
    """The module `flash_attn`. Raises ImportError if it cannot be imported."""
    return importlib.import_module("flash_attn")


def installation_problems() -> list[str]:
    """A sentence with a fix if the package cannot be used; empty if it can."""
    try:
        functions = (package().flash_attn_varlen_func, package().flash_attn_with_kvcache)
    except (ImportError, AttributeError) as error:  # absent, built for another torch, or another package
        if isinstance(error, ModuleNotFoundError) and error.name == "flash_attn":
            return [f"the flash-attn package is not installed: {FIX}"]
        return [f"the flash-attn package cannot be imported ({error}): {FIX}"]
    if any("block_table" not in inspect.signature(function).parameters for function in functions):
        return [f"the flash-attn package here is too old to read a paged KV cache: {FIX}"]
    return []


def shape_problems(dtype: torch.dtype | None, head_dim: int | None, block_size: int | None) -> list[str]:
    """A sentence with a fix for each value that the package does not cover. None: not known, or not fixed yet."""
    problems = []
    if dtype is not None and dtype not in DTYPES:
        name = str(dtype).removeprefix("torch.")
        problems.append(f"flash-attn computes in bfloat16 or float16, and this run's dtype is {name}; take triton")
    if head_dim is not None and (head_dim > LARGEST_HEAD_DIM or head_dim % HEAD_DIM_MULTIPLE):
        problems.append(
            f"flash-attn takes a head_dim that is a multiple of {HEAD_DIM_MULTIPLE} up to {LARGEST_HEAD_DIM}, and this "
            f"model's is {head_dim}; take triton, or auto"
        )
    if block_size is not None and block_size % PAGE_MULTIPLE:
        problems.append(
            f"flash-attn reads KV pages of a multiple of {PAGE_MULTIPLE} tokens, and engine.block_size={block_size}; "
            "set engine.block_size=auto, or take triton"
        )
    return problems


def variant_problems(variant: AttentionVariant) -> list[str]:
    """A sentence with a fix if the package does not compute a layer's attention."""
    if not variant.sinks:
        return []
    return ["flash-attn knows no attention sinks, and this model's attention has them; take triton, or auto"]


def paged_attention(
    q: Tensor, kv: KVCache, metadata: AttentionMetadata, variant: AttentionVariant, sinks: Tensor | None = None
) -> Tensor:
    """Causal attention of q [T, Hq, D] over the pools -> [T, Hq, D]; float16 or bfloat16."""
    n = metadata.num_decodes
    if n == len(metadata.query_lens):
        return _decode(q, kv, metadata, variant)
    if n == 0:
        return _prefill(q, kv, metadata, variant)
    parts = (_decode(q[:n], kv, metadata, variant), _prefill(q[n:], kv, metadata, variant))
    return torch.cat(parts)


def _arguments(variant: AttentionVariant) -> dict[str, Any]:
    """The variant as the package's arguments. Its window counts the keys before a query, without the query's own."""
    before = -1 if variant.window is None else variant.window - 1
    return {"softmax_scale": variant.scale, "window_size": (before, 0), "softcap": variant.softcap or 0.0}


def _decode(q: Tensor, kv: KVCache, metadata: AttentionMetadata, variant: AttentionVariant) -> Tensor:
    """Attention of the first `num_decodes` sequences, which have a row each."""
    n = metadata.num_decodes
    output: Tensor = package().flash_attn_with_kvcache(
        q[:, None],
        *kv,
        cache_seqlens=metadata.seqlens_k[:n],
        block_table=metadata.block_table[:n],
        causal=True,
        **_arguments(variant),
    )
    return output[:, 0]


def _prefill(q: Tensor, kv: KVCache, metadata: AttentionMetadata, variant: AttentionVariant) -> Tensor:
    """Attention of the other sequences. The causal mask is aligned to the last token, so a chunk sees its prefix."""
    output: Tensor = package().flash_attn_varlen_func(
        q,
        *kv,
        cu_seqlens_q=metadata.prefill_cu_seqlens_q,
        cu_seqlens_k=metadata.prefill_cu_seqlens_k,
        # The package reads 1 as "one row in every sequence", and here a sequence may have none.
        max_seqlen_q=max(2, metadata.max_query_len),
        max_seqlen_k=metadata.max_prefill_kv_len,
        causal=True,
        **_arguments(variant),
        block_table=metadata.block_table[metadata.num_decodes :],
    )
    return output
