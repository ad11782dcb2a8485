"""The levels on CUDA: `native`, the contract's arithmetic on tensor cores, and `fast`, with cuBLAS products.

All but the matrix products and attention is `CudaOps`, by the Triton kernels. In each of them a row's result depends on
that row alone, whatever the batch, so `native` may use them; and they are the quickest, so `fast` does. Rounding is
where transformers' eager code rounds: see each kernel.

`native`'s linear layers are `kernels.matmul` (one float32 chain over K, then one rounding), its attention is
`kernels.attention`. Every schedule of a kernel gives the same bits, so each shape gets its quickest one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from evalengine.errors import EvalEngineError
from evalengine.kernels import (
    activation,
    attention,
    causal_conv,
    copy_slots,
    expert_groups,
    expert_matmul,
    expert_rows,
    fp8_rows,
    gated_delta,
    kv_cache,
    layer_norm,
    log_softmax,
    log_softmax_parts,
    mamba2,
    matmul,
    matmul_schedules,
    packed_matmul,
    qkv,
    rms_norm,
    rope,
    routing,
    softcap,
    softmax_parts,
)
from evalengine.kernels.attention_batch import KVCache
from evalengine.kernels.mixture_variant import Router
from evalengine.kernels.packed_rows import PackedFragments, PackedRows, fragments_of
from evalengine.kernels.recurrent_variant import (
    DeltaInputs,
    DeltaState,
    GatedDelta,
    Mamba2,
    Mamba2Inputs,
    ScanState,
)
from evalengine.kernels.shapes import Shapes
from evalengine.layers.embedding import rows_per_slice
from evalengine.layers.fast import FastOps
from evalengine.layers.metadata import AttentionMetadata
from evalengine.layers.ops import Groups, HeadNorms, Heads, Ops, Pools, PreparedWeight
from evalengine.layers.variants import Activation, Fp8Rows, Norm
from evalengine.verification import packed, verify
from evalengine.version import CONTRACT_VERSION

# Up to so many rows our products are quicker than cuBLAS on GPUs where their schedules were measured: for one row of
# Qwen3-0.6B on an H200 cuBLAS takes 9.3 us for q, k and v and 6.4 for the down projection, ours 4.5 and 5.6.
FEW_ROWS = 16

NO_NORM = Norm(eps=0.0)


def _sequences(metadata: AttentionMetadata) -> tuple[Tensor, Tensor, Tensor]:
    """A step's sequences as the kernels of recurrences read them."""
    assert metadata.state_slots is not None, "the model has recurrent layers"
    return metadata.cu_seqlens_q, metadata.seqlens_k, metadata.state_slots


class CudaOps(Ops):
    """All ops but `prepare_weight`, `linear`, `lm_head` and `attention`, which each level has of its own. Products of
    experts are the contract's at both levels: no library's kernel serves a few rows an expert as well as many."""

    fused = True
    chunked = True
    vocabulary_block = softmax_parts.CHUNK

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm.rms_norm(x, weight, eps)

    def norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm) -> Tensor:
        if norm.kind == "layer":
            return layer_norm.layer_norm(x, weight, bias, norm.eps)
        return rms_norm.rms_norm(x, weight, norm.eps, offset=norm.offset, cast_first=norm.cast_first)

    def fp8_rows(self, x: Tensor, rule: Fp8Rows) -> Tensor:
        return fp8_rows.fp8_rows(x, rule.group, rule.scale, rule.power)

    def softcap(self, logits: Tensor, cap: float) -> Tensor:
        return softcap.softcap(logits, cap)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return rms_norm.add_rms_norm(x, residual, weight, eps)

    def add_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm
    ) -> tuple[Tensor, Tensor]:
        if norm.kind == "layer":
            return layer_norm.add_layer_norm(x, residual, weight, bias, norm.eps)
        return rms_norm.add_rms_norm(x, residual, weight, norm.eps, offset=norm.offset, cast_first=norm.cast_first)

    def gather_add_rms_norm(self, part: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        peers = self.tp.peers
        result = None if peers is None else peers.add_rms_norm(part, residual, weight, eps)
        return super().gather_add_rms_norm(part, residual, weight, eps) if result is None else result

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rope.rope(x, cos, sin)

    silu_and_mul = staticmethod(activation.silu_and_mul)
    xielu = staticmethod(activation.xielu)

    def activation(self, x: Tensor, kind: Activation, *, gated: bool) -> Tensor:
        if kind == "clamped_swiglu":
            return expert_rows.clamped_swiglu(x)
        return activation.gated(x, kind) if gated else activation.activation(x, kind)

    def gather_silu_and_mul(self, gate_up: Tensor) -> Tensor:
        peers = self.tp.peers
        result = None if peers is None else peers.silu_and_mul(gate_up)
        return super().gather_silu_and_mul(gate_up) if result is None else result

    copy_slots = staticmethod(copy_slots.copy_slots)

    def store_kv(self, k: Tensor, v: Tensor, kv: KVCache, slot_mapping: Tensor) -> None:
        kv_cache.store_kv(k, v, *kv, slot_mapping)

    def qk_norm_rope_store(
        self, heads: Heads, norms: HeadNorms | None, cos: Tensor, sin: Tensor, kv: KVCache, slot_mapping: Tensor
    ) -> Tensor:
        q_weight, k_weight, norm = norms or (None, None, NO_NORM)
        assert norm.kind == "rms", "q and k have RMS norms"
        return qkv.qk_norm_rope_store(
            *heads, q_weight, k_weight, norm.eps, cos, sin, *kv, slot_mapping,
            offset=norm.offset, cast_first=norm.cast_first,
        )  # fmt: skip

    def causal_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, ring: Tensor, metadata: AttentionMetadata, *, silu: bool
    ) -> Tensor:
        step = *_sequences(metadata), metadata.longest_query, metadata.start_slots
        return causal_conv.causal_conv(x, weight, bias, ring, *step, silu=silu)

    def gated_delta(
        self, x: DeltaInputs, state: Pools, closes: int, metadata: AttentionMetadata, variant: GatedDelta
    ) -> Tensor:
        step = *_sequences(metadata), metadata.num_decodes, metadata.closed_chunks
        return gated_delta.gated_delta(x, DeltaState(*state), *step, variant, closes, metadata.start_slots)

    def mamba2(
        self, x: Mamba2Inputs, state: Pools, closes: int, metadata: AttentionMetadata, variant: Mamba2
    ) -> Tensor:
        step = *_sequences(metadata), metadata.num_decodes, metadata.chunks
        return mamba2.mamba2(x, ScanState(*state), *step, variant, closes, metadata.start_slots)

    def gated_norm(
        self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, group: int, *, gate_first: bool, rounded_once: bool
    ) -> Tensor:
        return rms_norm.gated_norm(x, gate, weight, eps, group, gate_first=gate_first, rounded_once=rounded_once)

    def log_softmax(self, logits: Tensor) -> Tensor:
        return log_softmax.log_softmax(logits)

    def read_out(self, logits: Tensor, rows: Tensor | None, columns: Tensor) -> tuple[Tensor, Tensor]:
        return log_softmax.read_out(logits, rows, columns)

    def read_out_part(
        self, logits: Tensor, rows: Tensor | None, columns: Tensor, ranges: list[range]
    ) -> tuple[Tensor, Tensor]:
        """Every rank gathers the chunks' maxima and sums and merges them in order, then looks for the most probable
        token and the wanted ones among its own token ids. A rank that does not have a token adds zeros for it."""
        ids, vocabulary, n = ranges[self.tp.rank], ranges[-1].stop, len(logits)
        own = log_softmax_parts.statistics(logits)
        chunks = [-(-len(part) // softmax_parts.CHUNK) for part in ranges]
        statistics = self.tp.gather(own.flatten(0, 1), chunks).unflatten(0, (2, n))
        greedy, logprobs = log_softmax_parts.read_out_part(logits, statistics, ids.start, vocabulary, rows, columns)
        # One sum serves both: float64 holds every token id and every float32, and adding zeros to a number keeps it.
        combined = self.tp.sum(torch.cat([greedy.double(), logprobs.double()]))
        return combined[:n].long(), combined[n:].float()

    def route(self, logits: Tensor, choice_bias: Tensor | None, router: Router) -> tuple[Tensor, Tensor]:
        return routing.route(logits, choice_bias, router, self.dtype)

    def group(self, ids: Tensor, experts: int) -> Groups:
        return expert_groups.group(ids, experts, expert_matmul.height(self.dtype, ids.numel(), experts))

    def expert_linear(self, x: Tensor, weight: PreparedWeight, bias: Tensor | None, groups: Groups) -> Tensor:
        return expert_matmul.expert_linear(x, weight, bias, groups)

    combine = staticmethod(expert_rows.combine)
    gate = staticmethod(expert_rows.gate)


class NativeOps(CudaOps):
    """The native level. Weights stay as loaded; packed ones stay packed where their kernels have the dense bytes."""

    name = "native"
    capturable = True
    _scratch: Tensor | None = None  # where a packed weight is unpacked for a step of many rows
    attention = staticmethod(attention.paged_attention)  # type: ignore[assignment]

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dtype, device)
        self.keeps_packed = packed_matmul.is_supported(device)

    def verify_kernels(self, shapes: Shapes, *, block_size: int) -> dict[str, Any]:
        verdict = verify.verify(
            shapes,
            self.dtype,
            self.device,
            contract_version=CONTRACT_VERSION,
            lm_head_rows=rows_per_slice(shapes.vocab_size, self.device),
            page_sizes=(block_size,),
            vocabulary=self.vocabulary_ranges(shapes.vocab_size),
            rank=self.tp.rank,
        )
        if verdict["failed"]:
            raise EvalEngineError(
                f"numerics=native cannot keep its promise on this GPU: {'; '.join(verdict['failed'])}. "
                "Use numerics=exact, and report this with the output of `python -m evalengine verify kernels`"
            )
        return verdict if self._scratch is None else {**verdict, "packed": packed.packed_verdict()}

    def prepare_weight(self, weight: Tensor, *, lm_head: bool = False) -> PreparedWeight:
        return weight.detach()

    def prepare_packed(self, weight: PackedRows, *, biased: bool) -> PreparedWeight:
        """Makes room to unpack it, and compares its product's kernel with the dense one where its form is new."""
        if self._scratch is None or len(self._scratch) < weight.shape.numel():
            self._scratch = None
            self._scratch = torch.empty(weight.shape.numel(), dtype=self.dtype, device=self.device)
        return packed.verified(weight, self._scratch, biased) if self.device.type == "cuda" else fragments_of(weight)

    def linear(self, x: Tensor, weight: PreparedWeight, bias: Tensor | None = None) -> Tensor:
        if isinstance(weight, PackedFragments):
            assert self._scratch is not None
            return packed_matmul.linear(x, weight, bias, self._scratch)
        return matmul.linear(x, weight, bias)

    def expert_linear(self, x: Tensor, weight: PreparedWeight, bias: Tensor | None, groups: Groups) -> Tensor:
        if isinstance(weight, PackedFragments):
            assert self._scratch is not None
            return packed_matmul.expert_linear(x, weight, bias, groups, self._scratch)
        return super().expert_linear(x, weight, bias, groups)

    def lm_head(self, x: Tensor, weight: PreparedWeight) -> Tensor:
        """Logits in float32, not rounded to the weights' dtype, because logprobs are computed from them."""
        return matmul.linear(x, weight, out_dtype=torch.float32)


class CudaFastOps(CudaOps, FastOps):
    """`CudaOps` has the element-wise and row-wise ops, `FastOps` the products of many rows and attention."""

    def __init__(self, dtype: torch.dtype, device: torch.device, attention_backend: str) -> None:
        super().__init__(dtype, device, attention_backend)
        self.capturable = attention_backend != "sdpa"  # sdpa groups sequences by the lengths on the host
        tuned = device.type == "cuda" and matmul_schedules.is_tuned(torch.cuda.get_device_name(device))
        self._few_rows = FEW_ROWS if tuned and dtype != torch.float32 else 0

    def linear(self, x: Tensor, weight: PreparedWeight, bias: Tensor | None = None) -> Tensor:
        return matmul.linear(x, weight, bias) if len(x) <= self._few_rows else super().linear(x, weight, bias)

    def lm_head(self, x: Tensor, weight: PreparedWeight) -> Tensor:
        if len(x) <= self._few_rows:
            return matmul.linear(x, weight, out_dtype=torch.float32)
        return super().lm_head(x, weight)
