"""How a layer without attention mixes its tokens, as data: what kernels, layers and the memory plan need of it.

The recurrences are those of `reference`; a sequence's state is float32 after every token (docs/numerics.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Literal, NamedTuple

import torch
from torch import Tensor

# As `models.rope.LATER`: a field enters a run's identity where it is not the default.
_LATER = {"later": True}
PoolShape = tuple[tuple[int, ...], torch.dtype]  # a slot's shape in a pool of states, and the pool's dtype


def ring_rows(taps: int) -> int:
    """P, the rows of a convolution's ring of inputs (`causal_conv`): a power of two, at least 16 and at least 2 K."""
    return max(16, 1 << (2 * taps - 1).bit_length())


def most_dropped(taps: int) -> int:
    """How many tokens a step may have after its first one so that all of them can be dropped: P - K. Such a step does
    not overwrite the K - 1 inputs before it."""
    return ring_rows(taps) - taps


class DeltaInputs(NamedTuple):
    """The outputs of a gated delta rule for T tokens."""

    mixed: Tensor  # [T, C]: q, k and v side by side
    a: Tensor  # [T, Hv]
    b: Tensor  # [T, Hv]
    a_log: Tensor  # float32 [Hv]
    dt_bias: Tensor  # float32 [Hv]


class DeltaState(NamedTuple):
    """The pools of the gated delta rule in chunks (`gated_delta`): the state before each slot's open chunk, and that
    chunk's rows, of which there are at most 64."""

    state: Tensor  # float32 [R, Hv, V, K]
    x: Tensor  # float32 [R, Hv, V, 64]: what each row adds, but for the rows before it
    inverse: Tensor  # float32 [R, Hv, 64, 64]: T
    keys: Tensor  # [R, Hk, 64, K] in the activations' dtype
    key_norms: Tensor  # float32 [R, Hk, 64]: the factors of their norms
    gate_sums: Tensor  # float32 [R, Hv, 64]: from the chunk's first row on


class Mamba2Inputs(NamedTuple):
    """The outputs of a selective state space for T tokens."""

    mixed: Tensor  # [T, C]: x, B and C side by side
    dt: Tensor  # [T, H]
    a_log: Tensor  # float32 [H]
    dt_bias: Tensor  # float32 [H]
    d: Tensor  # float32 [H]


class ScanState(NamedTuple):
    """The pools of the selective state space in chunks (`mamba2`): the state before each slot's open chunk, and that
    chunk's rows, of which there are at most 64."""

    state: Tensor  # float32 [R, H, P, N]
    x: Tensor  # [R, H, 64, P] in the activations' dtype
    b: Tensor  # [R, G, 64, N] in the activations' dtype
    steps: Tensor  # float32 [R, H, 64]: dt, clamped
    gate_sums: Tensor  # float32 [R, H, 64]: from the chunk's first row on


@dataclass(frozen=True)
class GatedDelta:
    """A gated delta rule (Qwen3.5, Qwen3-Next, OLMo-Hybrid): a state [key_dim, value_dim] for each value head, behind a
    convolution.

    Value heads num_value_heads // num_key_heads in a row share a query and a key.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    taps: int  # of the convolution over q, k and v
    # Of sigmoid(b), a power of two: 2 lets the state's eigenvalues be negative.
    beta_scale: float = field(default=1.0, metadata=_LATER)
    norm_eps: float | None = field(default=None, metadata=_LATER)  # of the output's norm; None: the model's

    bias = False  # of the projections

    def of_rank(self, ranks: int) -> GatedDelta:
        """The variant that one of so many ranks computes: its part of the heads."""
        return replace(self, num_key_heads=self.num_key_heads // ranks, num_value_heads=self.num_value_heads // ranks)

    def uneven(self, ranks: int) -> list[str]:
        """The sizes that so many ranks cannot share equally."""
        heads = {"key heads": self.num_key_heads, "value heads": self.num_value_heads}
        return [f"{size} {what} of the gated delta rule" for what, size in heads.items() if size % ranks]

    @property
    def parts(self) -> dict[str, int]:
        """Channels of the convolution."""
        keys = self.num_key_heads * self.key_dim
        return {"q": keys, "k": keys, "v": self.features}

    @property
    def channels(self) -> int:
        return sum(self.parts.values())

    @property
    def features(self) -> int:
        """Features that the output's projection takes."""
        return self.num_value_heads * self.value_dim

    @property
    def projected(self) -> int:
        """Features of the input's projection: q, k, v, the gate z, and a and b of each value head."""
        return self.channels + self.features + 2 * self.num_value_heads

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """A sequence's state, the keys' dimension last."""
        return self.num_value_heads, self.value_dim, self.key_dim

    def state_pools(self, dtype: torch.dtype, *, chunked: bool) -> list[PoolShape]:
        """Of the state; chunked: of `DeltaState`. dtype: of the activations."""
        heads, values, keys = self.state_shape
        if not chunked:
            return [(self.state_shape, torch.float32)]
        before = [self.state_shape, (heads, values, 64), (heads, 64, 64)]
        after = [(self.num_key_heads, 64), (heads, 64)]
        return [*_wide(before), ((self.num_key_heads, 64, keys), dtype), *_wide(after)]

    @property
    def chunk_bytes(self) -> int:
        """Bytes that a chunk of a step takes while it is computed: A, B and T, and three terms of M and K'."""
        return self.num_value_heads * 64 * (3 * 4 * 64 + 3 * 2 * (64 + self.key_dim))


@dataclass(frozen=True)
class Mamba2:
    """A selective state space (Granite 4 hybrids, Nemotron-H, Falcon-H1): a state [head_dim, state_dim] for each head,
    behind a convolution.

    Heads num_heads // num_groups in a row share B and C. The output is gated by silu(z) alone, or before its norm, or
    after it.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    taps: int  # of the convolution over x, B and C
    conv_bias: bool
    bias: bool  # of the projections
    dt_limits: tuple[float, float | None]  # of the time step, after softplus; None: no upper one
    gated: Literal["alone", "before norm", "after norm"] = field(default="before norm", metadata=_LATER)
    # Whether the norm is rounded at its end only, not before its weight, too.
    norm_rounded_once: bool = field(default=False, metadata=_LATER)

    def of_rank(self, ranks: int) -> Mamba2:
        """The variant that one of so many ranks computes: its part of the heads; several ranks may hold a group."""
        return replace(self, num_heads=self.num_heads // ranks, num_groups=max(1, self.num_groups // ranks))

    def uneven(self, ranks: int) -> list[str]:
        """The sizes that so many ranks cannot share equally."""
        heads = [f"{self.num_heads} heads of Mamba-2"] if self.num_heads % ranks else []
        if max(ranks, self.num_groups) % min(ranks, self.num_groups):
            heads.append(f"{self.num_groups} groups of Mamba-2")
        return heads

    @property
    def parts(self) -> dict[str, int]:
        """Channels of the convolution."""
        group = self.num_groups * self.state_dim
        return {"x": self.features, "B": group, "C": group}

    @property
    def channels(self) -> int:
        return sum(self.parts.values())

    @property
    def features(self) -> int:
        """Features that the output's projection takes."""
        return self.num_heads * self.head_dim

    @property
    def projected(self) -> int:
        """Features of the input's projection: the gate z, x, B, C and each head's time step."""
        return self.features + self.channels + self.num_heads

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """A sequence's state, B's and C's dimension last."""
        return self.num_heads, self.head_dim, self.state_dim

    def state_pools(self, dtype: torch.dtype, *, chunked: bool) -> list[PoolShape]:
        """Of the state; chunked: of `ScanState`. dtype: of the activations."""
        heads, values, columns = self.state_shape
        if not chunked:
            return [(self.state_shape, torch.float32)]
        rows = [((heads, 64, values), dtype), ((self.num_groups, 64, columns), dtype)]
        return [(self.state_shape, torch.float32), *rows, *_wide([(heads, 64)] * 2)]

    @property
    def chunk_bytes(self) -> int:
        """Bytes that a step's chunk of 64 tokens takes while it is computed: its start state, C B, and the tokens' time
        steps, gates and sums of gates."""
        heads, values, columns = self.state_shape
        return 4 * (heads * values * columns + self.num_groups * 64 * 64 + 3 * 64 * heads)


@dataclass(frozen=True)
class ShortConv:
    """A convolution between two gates (LFM2): C * conv(B * x). Its only state is the convolution's."""

    channels: int
    taps: int
    bias: bool

    def of_rank(self, ranks: int) -> ShortConv:
        """The variant that one of so many ranks computes: its part of the channels."""
        return replace(self, channels=self.channels // ranks)

    def uneven(self, ranks: int) -> list[str]:
        """The sizes that so many ranks cannot share equally."""
        return [f"{self.channels} channels of the short convolution"] if self.channels % ranks else []

    @property
    def features(self) -> int:
        """Features that the output's projection takes."""
        return self.channels

    @property
    def projected(self) -> int:
        """Features of the input's projection: B, C and x."""
        return 3 * self.channels

    def state_pools(self, dtype: torch.dtype, *, chunked: bool) -> list[PoolShape]:
        return []

    chunk_bytes = 0


Recurrence = GatedDelta | Mamba2 | ShortConv


def drops_guesses(kinds: Sequence[Recurrence], *, chunked: bool) -> bool:
    """Whether the states can drop wrong guesses: a recurrence's cannot where it is updated token by token."""
    return chunked or all(isinstance(kind, ShortConv) for kind in kinds)


def most_guesses(kind: Recurrence, position: int) -> int:
    """How many guesses a step may compute behind a known token at this position, so that the states can drop them.

    A convolution's ring holds so many (`most_dropped`). A recurrence in chunks overwrites the rows of its open chunk,
    but the step that begins the next chunk closes it: guesses stay in the known token's chunk.
    """
    most = most_dropped(kind.taps)
    return most if isinstance(kind, ShortConv) else min(most, 63 - position % 64)


def may_start_elsewhere(start: int, end: int) -> bool:
    """Whether a step that computes the tokens [start, end) of a sequence, its last step, may read the state before it
    in another slot than its own, where other sequences read it in the same step: kernels of decodes look in one slot
    only, and a chunk that is full is closed in its slot.
    """
    return end - start > 1 and start % 64 > 0


def _wide(shapes: Sequence[tuple[int, ...]]) -> list[PoolShape]:
    return [(shape, torch.float32) for shape in shapes]


class ChunkTable(NamedTuple):
    """Chunks of a step's sequences, one sequence after another: programs that have a chunk each are numbered so."""

    sequence: Tensor  # int32 [N]: the sequence of each chunk
    number: Tensor  # int32 [N]: which of its sequence's chunks in the step it is
    first: Tensor  # int32 [S]: each sequence's first chunk
    sequences: Tensor  # int32 [s]: those that have any


def chunk_table(
    query_lens: list[int],
    kv_lens: list[int],
    on_device: Callable[[list[list[int]]], Iterable[Tensor]],
    *,
    closed: bool,
) -> ChunkTable:
    """The chunks of sequences with these numbers of new tokens and of all tokens; closed: without each one's last.
    on_device: columns as tensors."""
    lengths = zip(query_lens, kv_lens, strict=True)
    counts = [-(-total // 64) - (total - new) // 64 - closed if new else 0 for new, total in lengths]
    sequences = [s for s, count in enumerate(counts) for _ in range(count)]
    numbers = [c for count in counts for c in range(count)]
    first = [end - count for end, count in zip(accumulate(counts), counts, strict=True)]
    return ChunkTable(*on_device([sequences, numbers, first, [s for s, count in enumerate(counts) if count]]))
