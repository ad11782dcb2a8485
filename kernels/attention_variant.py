"""Variants of a layer's attention: everything but softmax(q k) v. This module imports no kernel and no Triton."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionVariant:
    """Causal attention of one layer, the same for all its heads.

    A query at position i sees the keys j <= i; with a window those with i - window < j <= i, so that a window of 1 is
    the query's own key. Scores are `scale q.k`; with a softcap c they are `c tanh(scale q.k / c)`. With sinks each
    query head has one more logit, which joins the softmax's maximum and sum and has no value; the layer hands these
    logits, [Hq], in addition to this.

    Raises ValueError for a scale or a softcap that is not a positive number and for a window below 1.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False

    def __post_init__(self) -> None:
        for name in ("scale", "softcap"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"attention's {name} must be a positive number; got {value}")
        if self.window is not None and self.window < 1:
            raise ValueError(f"attention's window must be 1 token or more; got {self.window}")

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing but the scale."""
        return self.window is None and self.softcap is None and not self.sinks

    def __str__(self) -> str:
        """The parts that are not a plain decoder's, in words: "window 4096, softcap 50.0"; "" if there are none."""
        parts = [f"{name} {value}" for name in ("window", "softcap") if (value := getattr(self, name)) is not None]
        return ", ".join([*parts, *(["sinks"] if self.sinks else [])])


@dataclass(frozen=True)
class Latent:
    """Keys and values that are products of one narrow vector a token (DeepSeek's multi-head latent attention).

    Every head has its own keys and values, expanded from the token's latent vector of `kv_rank` numbers, which is
    normed first; `rotary_dim` of a key's dimensions are no part of it: all heads share them, and RoPE turns them alone.
    q_rank: of the vector that queries are products of, likewise; None: of the hidden state itself.
    """

    kv_rank: int
    value_dim: int  # of a head's values; at most its keys', behind whose length they are padded with zeros
    rotary_dim: int
    q_rank: int | None = None
