"""Rotary position embedding as data: a base, how its frequencies are stretched, and which part of a head it turns.

    D head_dim, R the dimensions of a head that are turned.

The engine turns pairs (i, i + D/2) of whole heads. Other layouts are brought to it when weights are loaded, by the
order of q's and k's rows (`head_order`): a part of the head, and pairs side by side. Scores q . k are sums over a head,
so an order that both share changes them by the rounding of that sum at most; dimensions that are not turned get the
angle 0, whose cosine and sine, 1 and 0, leave every number as it is. So one kernel serves all, layers without positions
too.
"""

from __future__ import annotations

import decimal
import math
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

RopeType = Literal["default", "linear", "llama3", "factors", "yarn"]


# The metadata of a field that models of a run's identity did not have at first: it enters the identity where it is not
# the default, so that the identities of models which do not use it stay as they were.
LATER = {"later": True}


def in_use(spec: Any) -> list[str]:
    """The names of a dataclass's fields, but of those that came later and have their default."""
    return [f.name for f in fields(spec) if not f.metadata.get("later") or getattr(spec, f.name) != f.default]


def text_of(spec: Any) -> str:
    """A dataclass's `repr` with the fields `in_use`. Dummy weights are named by a hash of it."""
    shown = {f.name for f in fields(spec) if f.repr}
    return f"{type(spec).__name__}({', '.join(f'{n}={getattr(spec, n)!r}' for n in in_use(spec) if n in shown)})"


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding: the base and how its frequencies are stretched."""

    theta: float
    type: RopeType = "default"
    factor: float = 1.0  # used by linear, llama3 and yarn scaling only
    low_freq_factor: float = 1.0  # used by llama3 RoPE scaling only, as the next one is
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192  # used by llama3, yarn, `long_factors` and `query_beta`
    freq_factors: tuple[float, ...] | None = None  # type factors divides each frequency by one
    rotary_dim: int | None = field(default=None, metadata=LATER)  # R; None: the whole head. 0: no positions
    at_end: bool = field(default=False, metadata=LATER)  # whether a checkpoint's heads end with the part that is turned
    interleaved: bool = field(default=False, metadata=LATER)  # whether the checkpoint's pairs stand side by side
    wide: bool = field(
        default=False, metadata=LATER
    )  # whether cos, sin and their products stay float32 (OLMo 2, ERNIE, Cohere 2)
    attention_factor: float = field(default=1.0, metadata=LATER)  # multiplies cos and sin
    beta_fast: float = field(default=32.0, metadata=LATER)  # used by yarn only, as the next two are
    beta_slow: float = field(default=1.0, metadata=LATER)
    truncate: bool = field(default=True, metadata=LATER)
    # LongRoPE: in place of `freq_factors`, of requests of more than `original_max_position_embeddings` tokens in all.
    long_factors: tuple[float, ...] | None = field(default=None, metadata=LATER)
    # Queries are multiplied by 1 + beta * ln(1 + floor(position / original_max_position_embeddings)) after they turned.
    query_beta: float = field(default=0.0, metadata=LATER)

    def __repr__(self) -> str:
        return text_of(self)

    def turned(self, head_dim: int) -> int:
        """R."""
        return head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def of_long_requests(self) -> RopeSpec:
        """This RoPE with the factors of long requests."""
        return replace(self, freq_factors=self.long_factors)

    def inv_freq(self, head_dim: int) -> Tensor:
        """The inverse frequencies, float32 [D / 2], by transformers' formulas; 0 for pairs that are not turned.

        The powers are rounded from 40 decimal digits, since torch's float32 `pow` gives other bits on another
        instruction set (12 of 2160 values over common bases and head sizes, AVX2 against scalar). The rest is IEEE
        arithmetic.
        """
        turned = self.turned(head_dim)
        frequencies = torch.zeros(head_dim // 2)
        frequencies[: turned // 2] = self._scaled(self._unscaled(turned), turned)
        return frequencies

    def query_factors(self, max_positions: int) -> Tensor | None:
        """The factor of the queries at each position, float32 [max_positions]; None if it is 1."""
        original = self.original_max_position_embeddings
        if not self.query_beta or max_positions <= original:
            return None
        with decimal.localcontext(decimal.Context(prec=40)):  # logarithms differ between machines, as powers do
            beta = decimal.Decimal(self.query_beta)
            grown = [float(1 + beta * decimal.Decimal(1 + n).ln()) for n in range(-(-max_positions // original))]
        return torch.tensor(grown).repeat_interleave(original)[:max_positions]

    def _unscaled(self, turned: int) -> Tensor:
        exponents = torch.arange(0, turned, 2, dtype=torch.float32) / turned
        with decimal.localcontext(decimal.Context(prec=40)):
            powers = [float(decimal.Decimal(self.theta) ** decimal.Decimal(e)) for e in exponents.tolist()]
        return 1.0 / torch.tensor(powers, dtype=torch.float32)

    def _scaled(self, inv_freq: Tensor, turned: int) -> Tensor:
        if self.type == "linear":
            return inv_freq / self.factor
        if self.type == "factors":
            return inv_freq / torch.tensor(self.freq_factors, dtype=torch.float32)
        if self.type == "llama3":
            return self._llama3(inv_freq)
        return self._yarn(inv_freq, turned) if self.type == "yarn" else inv_freq

    def _llama3(self, inv_freq: Tensor) -> Tensor:
        """Llama 3.1's scaling: frequencies of long wavelengths are divided by `factor`, those of short ones unchanged,
        and those between blended."""
        context = self.original_max_position_embeddings
        wavelength = 2 * math.pi / inv_freq
        blend = (context / wavelength - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blended = (1 - blend) * inv_freq / self.factor + blend * inv_freq
        long, short = wavelength > context / self.low_freq_factor, wavelength < context / self.high_freq_factor
        return torch.where(long, inv_freq / self.factor, torch.where(short, inv_freq, blended))

    def _yarn(self, inv_freq: Tensor, turned: int) -> Tensor:
        """YaRN (Peng et al. 2023, arXiv:2309.00071, section 3.2): a ramp over the frequencies' index, from those that
        turn more than `beta_fast` times within the original context, which are unchanged, to those below `beta_slow`,
        which are divided by `factor`."""

        def index_of(rotations: float) -> float:
            context = self.original_max_position_embeddings
            return turned * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = index_of(self.beta_fast), index_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, turned - 1)
        high += 0.001 * (low == high)
        ramp = ((torch.arange(turned // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
        unscaled = 1 - ramp
        return inv_freq / self.factor * (1 - unscaled) + inv_freq * unscaled

    def head_order(self, head_dim: int) -> Tensor | None:
        """int64 [D]: which of a checkpoint's dimensions of a head each of the engine's is; None for the same order."""
        turned = self.turned(head_dim)
        if turned == 0 or (turned == head_dim and not self.interleaved):
            return None
        every = torch.arange(head_dim)
        pairs, plain = (every[-turned:], every[:-turned]) if self.at_end else (every[:turned], every[turned:])
        first, second = (pairs[0::2], pairs[1::2]) if self.interleaved else pairs.chunk(2)
        half = len(plain) // 2
        return torch.cat([first, plain[:half], second, plain[half:]])


NO_ROPE = RopeSpec(theta=1.0, rotary_dim=0)
