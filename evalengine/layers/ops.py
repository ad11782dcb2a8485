"""The arithmetic a model is made of, behind one interface: a numerics level is one implementation of `Ops`.

    T tokens, K input features, N output features, H hidden, I intermediate, Hq/Hkv heads, D head_dim, V vocabulary,
    B pages of `block_size` tokens.

Layers hold an `Ops` and call nothing else, so `fast`, `exact` and (on CUDA) `native` share every model, loader and
scheduler. Level by level the rounding points are those of the numerics contract; each implementation quotes its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from evalengine.layers.metadata import AttentionMetadata

PreparedWeight = Any  # what `prepare_weight` returns: opaque to the layers


class Ops(ABC):
    """One numerics level on one device. Every method is a pure function of its arguments."""

    name: str  # "fast" | "exact" | "native"

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype  # of weights and KV cache
        self.device = device

    @property
    def activation_dtype(self) -> torch.dtype:
        """Of the residual stream and of every op's output (exact: float32)."""
        return self.dtype

    @abstractmethod
    def prepare_weight(self, weight: Tensor, *, lm_head: bool = False) -> PreparedWeight:
        """[N, K] in `dtype` -> whatever this level multiplies with; called once, after loading."""

    @abstractmethod
    def linear(self, x: Tensor, weight: PreparedWeight, bias: Tensor | None = None) -> Tensor:
        """[T, K] -> [T, N]: x @ W^T + bias."""

    @abstractmethod
    def lm_head(self, x: Tensor, weight: PreparedWeight) -> Tensor:
        """[T, H] -> float32 logits [T, V]."""

    @abstractmethod
    def embedding(self, ids: Tensor, table: Tensor) -> Tensor:
        """int64 [T], [V, H] -> [T, H] in `activation_dtype`."""

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """[..., H] -> [..., H]: x / sqrt(mean(x^2) + eps) * weight."""

    @abstractmethod
    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """The residual stream: the rounded sum."""

    @abstractmethod
    def rope_table(self, inv_freq: Tensor, max_positions: int, scaling: float) -> tuple[Tensor, Tensor]:
        """float32 [D/2] -> cos, sin [max_positions, D/2], times `scaling`; on `device`."""

    @abstractmethod
    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[T, heads, D] and cos, sin [T, D/2] -> [T, heads, D], half-split (NeoX) pairs."""

    @abstractmethod
    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2 I] -> [T, I]: silu(first half) * second half."""

    @abstractmethod
    def store_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
        """[T, Hkv, D] into the [B, block_size, Hkv, D] pools, at the slots (-1: skipped)."""

    @abstractmethod
    def attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float
    ) -> Tensor:
        """[T, Hq, D] against the pools -> [T, Hq, D], causal, GQA by Hq // Hkv."""

    @abstractmethod
    def log_softmax(self, logits: Tensor) -> Tensor:
        """float32 [T, V] -> float32 [T, V]."""
