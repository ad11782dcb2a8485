"""The arithmetic a model is made of, behind one interface: a numerics level is one implementation of `Ops`.

    T tokens, K input features, N output features, H hidden, I intermediate, Hq/Hkv heads, D head_dim, V vocabulary,
    B pages of `block_size` tokens, E experts, of which each token has k.

Layers hold an `Ops` and call nothing else, so `fast`, `exact` and (on CUDA) `native` share every model, loader and
scheduler. At each level the rounding points are those of the numerics contract, which its implementation quotes. The
fused forms at the end are defined by the ops that they combine, and give the same bytes.

What a level computes of recurrences without a form for them is plain torch. Shapes and states are those of
`kernels.causal_conv`, `gated_delta`, `mamba2` and `rms_norm.gated_norm`. Products and rounding are those of
transformers' eager code where it computes token by token, in float32 or the activations' wider dtype.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from evalengine.kernels import sampling
from evalengine.kernels.attention_batch import KVCache
from evalengine.kernels.attention_variant import AttentionVariant
from evalengine.kernels.exact_recurrent import initial_states, push_inputs, steps
from evalengine.kernels.mixture_variant import Router
from evalengine.kernels.packed_rows import PackedRows
from evalengine.kernels.recurrent_variant import DeltaInputs, GatedDelta, Mamba2, Mamba2Inputs
from evalengine.kernels.row_variants import Xielu
from evalengine.kernels.shapes import Shapes
from evalengine.layers.metadata import AttentionMetadata
from evalengine.layers.parallel import SINGLE, TensorParallel, vocabulary_ranges
from evalengine.layers.variants import Activation, Fp8Rows, Norm

GREEDY = -1  # as a column of `read_out`: the row's most probable token
PreparedWeight = Any  # the type of `prepare_weight`'s result, opaque to the layers
Heads = tuple[Tensor, Tensor, Tensor]  # q [T, Hq, D], k and v [T, Hkv, D]
HeadNorms = tuple[Tensor, Tensor, Norm]  # the weights [D] of norms over each head of q and of k, and what they are
Pools = tuple[Tensor, ...]  # of a recurrence's states
Groups = Any  # the type of `group`'s result, likewise


class Ops(ABC):
    """One numerics level on one device. Every method is a pure function of its arguments.

    What has a body here is plain torch; a level overrides it where it computes otherwise.
    """

    name: str  # "fast" | "exact" | "native"
    # Whether the fused forms are separate kernels, for callers that do not need the parts. With False on an
    # instance every part is a separate op, with the same bytes. All ranks must agree on it.
    fused: bool = False
    # Whether the kernels of a decode step depend on shapes alone, not on values in tensors on the device or in the
    # lists of `AttentionMetadata`. If so, a step can be captured as a CUDA graph and replayed for other lengths.
    capturable: bool = False
    # Tensor parallelism: this process's rank; whether products may be summed over ranks; and the number of token ids
    # that reductions over the vocabulary take at once, which no border between two ranks may cut.
    tp: TensorParallel = SINGLE
    sums_cross_ranks: bool = False
    vocabulary_block: int = 1
    # Whether recurrences are computed in chunks, and store the rows of the open one with their states.
    chunked: bool = False
    # Whether products take packed weights; and whether layers are made without storage for their weights, for now.
    keeps_packed: bool = False
    without_storage: bool = False

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype  # the dtype of weights and KV cache
        self.device = device

    @property
    def activation_dtype(self) -> torch.dtype:
        """The dtype of the residual stream and of every op's output (exact: float32)."""
        return self.dtype

    @property
    def fuses_gathers(self) -> bool:
        """Whether ranks gather in one with neighbouring ops: a layer may then return this rank's columns alone."""
        return self.fused and self.tp.size > 1 and not self.sums_cross_ranks

    def vocabulary_ranges(self, vocab_size: int) -> list[range]:
        """Each rank's token ids."""
        return vocabulary_ranges(vocab_size, self.tp.size, self.vocabulary_block)

    def vocabulary_range(self, vocab_size: int) -> range:
        """This rank's token ids."""
        return self.vocabulary_ranges(vocab_size)[self.tp.rank]

    def verify_kernels(self, shapes: Shapes, *, block_size: int) -> dict[str, Any] | None:
        """Compares the schedules that the kernels may take for a model's shapes on this device. Returns the verdict as
        plain JSON values; None for a level without a choice. Raises `EvalEngineError` if the level cannot keep its
        promise."""
        return None

    def problems(self, variant: AttentionVariant) -> list[str]:
        """A sentence for each reason why this level cannot compute a layer's attention."""
        return []

    @abstractmethod
    def prepare_weight(self, weight: Tensor, *, lm_head: bool = False) -> PreparedWeight:
        """[N, K] in `dtype` -> the form that this level multiplies with; called once, after loading."""

    def prepare_packed(self, weight: PackedRows, *, biased: bool) -> PreparedWeight:
        """[N, K], or [E, N, K] of experts, at a level that `keeps_packed` -> the form that it multiplies with. biased:
        whether its products have biases."""
        raise AssertionError("this level's weights are unpacked as they are read")

    @abstractmethod
    def linear(self, x: Tensor, weight: PreparedWeight, bias: Tensor | None = None) -> Tensor:
        """[T, K] -> [T, N]: x @ W^T + bias."""

    @abstractmethod
    def lm_head(self, x: Tensor, weight: PreparedWeight) -> Tensor:
        """[T, H] -> float32 logits [T, V]."""

    def embedding(self, ids: Tensor, table: Tensor) -> Tensor:
        """int64 [T], [V, H] -> [T, H] in `activation_dtype`."""
        return F.embedding(ids, table)

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """[..., H] -> [..., H]: x / sqrt(mean(x^2) + eps) * weight."""

    @abstractmethod
    def norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm) -> Tensor:
        """[..., H] -> [..., H]: the norm that `norm` describes. A plain one is `rms_norm`.

        weight: [H]; of a layer norm without a bias also [G, H] for x [T, G, H], a row for each head."""

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """The residual stream's rounded sum."""
        return x + residual

    def scale(self, x: Tensor, factor: float) -> Tensor:
        """Any shape: x * factor, in float32 with float32(factor) (exact: both float64), rounded once."""
        return x * factor

    def scale_rows(self, x: Tensor, factors: Tensor) -> Tensor:
        """[T, heads, D] times [T], of one dtype: the rounded product of the two numbers, at every level."""
        return x * factors[:, None, None]

    def fp8_rows(self, x: Tensor, rule: Fp8Rows) -> Tensor:
        """[..., K] -> [..., K]: the numbers as those of FP8 times their scales, rounded to `activation_dtype`."""
        k = x.shape[-1]
        size = k if rule.group is None else min(rule.group, k)
        groups = F.pad(x.float(), (0, -k % size)).unflatten(-1, (-1, size))
        scale = torch.full_like(groups[..., :1], rule.scale or 0.0)
        if rule.scale is None:
            scale = (groups.abs().amax(-1, keepdim=True) / 448).clamp(min=2.0**-126)
        odd = ~(scale < torch.inf)
        if rule.power:
            mantissa, exponent = torch.frexp(scale)
            scale = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())
        scale = scale.masked_fill(odd, torch.nan)
        numbers = (groups / scale).clamp(-448, 448).masked_fill(groups.isinf(), torch.nan)
        return (numbers.to(torch.float8_e4m3fn).float() * scale).flatten(-2)[..., :k].to(x.dtype)

    @abstractmethod
    def softcap(self, logits: Tensor, cap: float) -> Tensor:
        """float32, any shape: cap * tanh(logits / cap)."""

    def rope_table(
        self, inv_freq: Tensor, max_positions: int, scaling: float, *, wide: bool = False
    ) -> tuple[Tensor, Tensor]:
        """float32 [D/2] -> cos, sin [max_positions, D/2] of the float32 angles, times `scaling`; on `device`. wide:
        they stay float32, and `rope` rounds but its result; else they have the model's dtype, in which `rope` rounds
        its products, too."""
        positions = torch.arange(max_positions, dtype=torch.float32, device=self.device)
        angles = positions[:, None] * inv_freq.to(self.device)
        dtype = torch.float32 if wide else self.dtype
        return (angles.cos() * scaling).to(dtype), (angles.sin() * scaling).to(dtype)

    @abstractmethod
    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[T, heads, D] and cos, sin [T, D/2] -> [T, heads, D], half-split (NeoX) pairs."""

    @abstractmethod
    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2 I] -> [T, I]: silu(first half) * second half."""

    @abstractmethod
    def activation(self, x: Tensor, kind: Activation, *, gated: bool) -> Tensor:
        """[T, 2 I] -> [T, I] if gated, kind(first half) * second half; else [T, I] -> [T, I], kind(x)."""

    def xielu(self, x: Tensor, numbers: Xielu) -> Tensor:
        """Any shape -> xIELU of x, in float32 (exact: float64), rounded once."""
        wide = x.float()
        curve = torch.expm1(wide.clamp(max=numbers.eps)) - wide
        out = torch.where(wide > 0, numbers.alpha_p * wide * wide, numbers.alpha_n * curve) + numbers.beta * wide
        return out.to(x.dtype)

    def copy_slots(self, pool: Tensor, copies: Tensor) -> None:
        """Copies slots of pool [L, R, ...]: copies, int64 [n, 2], has (source, destination) of each; no destination is
        in another copy."""
        for layer in pool:
            layer[copies[:, 1]] = layer[copies[:, 0]]

    @abstractmethod
    def store_kv(self, k: Tensor, v: Tensor, kv: KVCache, slot_mapping: Tensor) -> None:
        """Writes k and v [T, Hkv, D] into the pools, at the slots (-1: skipped)."""

    @abstractmethod
    def attention(
        self, q: Tensor, kv: KVCache, metadata: AttentionMetadata, variant: AttentionVariant, sinks: Tensor | None
    ) -> Tensor:
        """Causal attention of q [T, Hq, D] over the pools -> [T, Hq, D]; Hq // Hkv query heads share a KV head.

        sinks: [Hq] if the variant has them. The variant is one for which `problems` finds nothing. Before the window
        of a sequence's first query the pools may hold anything (its pages may have been given back), and the block
        table may name any page there.
        """

    # -- recurrences, in plain torch where a level has no separate form. Pools of states are as in
    # `layers.recurrent.States`; what a step's sequences leave there is written.

    def causal_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, ring: Tensor, metadata: AttentionMetadata, *, silu: bool
    ) -> Tensor:
        """[T, C], weight [C, K], bias [C] -> [T, C], over each sequence's tokens and the K - 1 before them."""
        return causal_conv(x, weight, bias, ring, metadata, silu=silu)

    def gated_delta(
        self, x: DeltaInputs, state: Pools, closes: int, metadata: AttentionMetadata, variant: GatedDelta
    ) -> Tensor:
        """The gated delta rule over each sequence's tokens, from its state on -> [T, Hv, V]. state: the variant's
        `state_pools`; closes: `States.closes`."""
        return gated_delta(x, state[0], metadata, variant)

    def mamba2(
        self, x: Mamba2Inputs, state: Pools, closes: int, metadata: AttentionMetadata, variant: Mamba2
    ) -> Tensor:
        """Mamba 2's scan over each sequence's tokens, from its state on -> [T, H, P]."""
        return mamba2(x, state[0], metadata, variant)

    def gated_norm(
        self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, group: int, *, gate_first: bool, rounded_once: bool
    ) -> Tensor:
        """[T, W] twice, weight [W] or [group] -> [T, W]: RMS norms of groups, gated by SiLU before or after.

        rounded_once: at its end, not before the weight, too (exact always is)."""
        return gated_norm(x, gate, weight, eps, group, gate_first=gate_first, rounded_once=rounded_once)

    def multiply(self, x: Tensor, y: Tensor) -> Tensor:
        """Any shape twice: x * y, rounded once."""
        return x * y

    def scale_columns(self, x: Tensor, factors: Tensor) -> Tensor:
        """[T, N], float32 [N] -> [T, N]: each column times its factor, in float32, rounded once."""
        return (x * factors).to(x.dtype)

    @abstractmethod
    def log_softmax(self, logits: Tensor) -> Tensor:
        """float32 [T, V] -> float32 [T, V]."""

    # -- mixtures of experts -----------------------------------------------------------------------------------------

    @abstractmethod
    def route(self, logits: Tensor, choice_bias: Tensor | None, router: Router) -> tuple[Tensor, Tensor]:
        """[T, E], float32 [E] -> the experts of each token in order of rank, integers [T, k], and their weights,
        float32 [T, k]. A row of logits that is not finite has weights of NaN."""

    def group(self, ids: Tensor, experts: int) -> Groups:
        """The experts [T, k] that `route` chose, in the form in which `expert_linear` takes them."""
        return ids

    def prepare_experts(self, weight: Tensor) -> PreparedWeight:
        """[E, N, K] in `dtype` -> the form that `expert_linear` multiplies with; called once, after loading."""
        return weight.detach()

    @abstractmethod
    def expert_linear(self, x: Tensor, weight: PreparedWeight, bias: Tensor | None, groups: Groups) -> Tensor:
        """[T, K], or [T, k, K] for a row each choice; bias [E, N] -> [T, k, N]: `linear` of each token's row with each
        of its experts."""

    @abstractmethod
    def combine(self, x: Tensor, weights: Tensor) -> Tensor:
        """[T, k, H], float32 [T, k] -> [T, H]: the sum of weight * row in order of rank, rounded once."""

    @abstractmethod
    def gate(self, x: Tensor, logits: Tensor) -> Tensor:
        """[T, H], contiguous, and [T, 1] or [T, H] -> [T, H]: x * sigmoid(logit), each rounded (exact: once)."""

    # -- fused forms -------------------------------------------------------------------------------------------------

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """x and residual [T, H], weight [H] -> `rms_norm` of `add(x, residual)`, and that sum, the new residual."""
        total = self.add(x, residual)
        return self.rms_norm(total, weight, eps), total

    def add_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm
    ) -> tuple[Tensor, Tensor]:
        """x and residual [T, H] -> `norm` of `add(x, residual)`, and that sum, the new residual."""
        if norm.is_plain:
            return self.add_rms_norm(x, residual, weight, norm.eps)
        total = self.add(x, residual)
        return self.norm(total, weight, bias, norm), total

    def gather_add_rms_norm(self, part: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """`add_rms_norm` of the ranks' parts [T, h] side by side, and residual [T, H]."""
        return self.add_rms_norm(self.tp.gather_features(part), residual, weight, eps)

    def gather_silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2 i] of this rank -> the ranks' `silu_and_mul` side by side, [T, I]. As after `gather_features`, the next
        gather may overwrite the result."""
        return self.tp.gather_features(self.silu_and_mul(gate_up))

    def qk_norm_rope_store(
        self, heads: Heads, norms: HeadNorms | None, cos: Tensor, sin: Tensor, kv: KVCache, slot_mapping: Tensor
    ) -> Tensor:
        """Returns q [T, Hq, D], normed over each head (if there are norms; RMS norms only) and rotated. k is treated
        likewise and stored in the pools with v."""
        q, k, v = heads
        if norms is not None:
            q_weight, k_weight, norm = norms
            q, k = self.norm(q, q_weight, None, norm), self.norm(k, k_weight, None, norm)
        self.store_kv(self.rope(k, cos, sin), v, kv, slot_mapping)
        return self.rope(q, cos, sin)

    def read_out(self, logits: Tensor, rows: Tensor | None, columns: Tensor) -> tuple[Tensor, Tensor]:
        """float32 [n, V]; int64 [k] twice -> each row's most probable token, int64 [n], and the logprobs of the tokens
        (rows[i], columns[i]), float32 [k]. A column `GREEDY` stands for the row's most probable token. Without rows,
        columns [n] has one for each row.

        Among equals the lowest id counts. A row that holds a NaN has V for its token and NaN for its logprobs.
        """
        logprobs = self.log_softmax(logits)
        if rows is None:
            rows = torch.arange(len(logits), device=logits.device)
        greedy = sampling.argmax_lowest(logprobs)
        columns = torch.where(columns == GREEDY, greedy[rows], columns)
        return greedy, logprobs[rows, columns.clamp(max=logprobs.shape[1] - 1)]

    def read_out_part(
        self, logits: Tensor, rows: Tensor | None, columns: Tensor, ranges: list[range]
    ) -> tuple[Tensor, Tensor]:
        """`read_out` of rows whose logits lie on several ranks, [n, v] on this one; ranges: each rank's token ids.

        Every rank calls it with the same rows and columns and gets the same result.
        """
        return self.read_out(self.tp.gather(logits, [len(ids) for ids in ranges]), rows, columns)


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, ring: Tensor, step: AttentionMetadata, *, silu: bool
) -> Tensor:
    outputs, start = [x[:0]], 0
    own = weight[:, None].to(x.dtype).contiguous()
    for n, total, slot in zip(step.query_lens, step.kv_lens, step.slots, strict=True):
        whole = push_inputs(ring[slot], x[start : start + n], total, weight.shape[1])
        out = F.conv1d(whole.t()[None], own, bias, groups=len(weight))[0].t()
        outputs.append(F.silu(out) if silu else out)
        start += n
    return torch.cat(outputs)


def gated_delta(inputs: DeltaInputs, state: Tensor, step: AttentionMetadata, variant: GatedDelta) -> Tensor:
    mixed, a, b, a_log, dt_bias = inputs
    heads, values, keys = variant.state_shape
    wide = torch.promote_types(mixed.dtype, torch.float32)
    size = variant.num_key_heads * keys
    q, k, v = mixed.to(wide).split([size, size, heads * values], -1)
    q, k = (x.unflatten(-1, (-1, keys)) for x in (q, k))
    q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(heads // variant.num_key_heads, 1) for x in (q, k))
    v, q = v.unflatten(-1, (-1, values)), q / keys**0.5
    decay = (-a_log.exp() * F.softplus(a.to(wide) + dt_bias)).exp()
    beta, out = b.sigmoid().to(wide) * variant.beta_scale, torch.empty_like(v)
    states, at = initial_states(state, step.query_lens, step.kv_lens, step.slots)
    states = states.to(wide)
    for active, rows in steps(step.query_lens, mixed.device):
        own, key = states[active] * decay[rows][..., None, None], k[rows][:, :, None]
        delta = (v[rows] - (own * key).sum(-1)) * beta[rows][..., None]
        own = own + delta[..., None] * key
        states[active] = own
        out[rows] = (own * q[rows][:, :, None]).sum(-1)
    state[at] = states.to(state.dtype)
    return out.to(mixed.dtype)


def mamba2(inputs: Mamba2Inputs, state: Tensor, step: AttentionMetadata, variant: Mamba2) -> Tensor:
    mixed, dt, a_log, dt_bias, d = inputs
    heads, width, columns = variant.state_shape
    wide = torch.promote_types(mixed.dtype, torch.float32)
    size = variant.num_groups * columns
    x, b, c = mixed.to(wide).split([heads * width, size, size], -1)
    x = x.unflatten(-1, (-1, width))
    b, c = (y.unflatten(-1, (-1, columns)).repeat_interleave(heads // variant.num_groups, 1) for y in (b, c))
    time = F.softplus(dt.to(wide) + dt_bias).clamp(*variant.dt_limits)
    decay, out = (time * -a_log.exp()).exp(), torch.empty_like(x)
    states, at = initial_states(state, step.query_lens, step.kv_lens, step.slots)
    states = states.to(wide)
    for active, rows in steps(step.query_lens, mixed.device):
        own = states[active] * decay[rows][..., None, None]
        own = own + (time[rows][..., None] * x[rows])[..., None] * b[rows][:, :, None]
        states[active] = own
        out[rows] = (own * c[rows][:, :, None]).sum(-1) + d[:, None] * x[rows]
    state[at] = states.to(state.dtype)
    return out.to(mixed.dtype)


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, group: int, *, gate_first: bool, rounded_once: bool
) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    own, factor = x.to(wide), F.silu(gate.to(wide))
    own = own * factor if gate_first else own
    groups = own.unflatten(-1, (-1, group))
    normed = (groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + eps)).flatten(-2)
    out = weight.repeat(x.shape[1] // len(weight)) * (normed if rounded_once else normed.to(x.dtype))
    return (out if gate_first else out * factor).to(x.dtype)
