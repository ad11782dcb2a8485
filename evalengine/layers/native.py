"""`native`: the contract's arithmetic on CUDA, on tensor cores.

Linear layers are `kernels.matmul` (one float32 chain over K, then one rounding), attention is `kernels.attention`, and
all other ops are those of `CudaOps`, which `fast` uses, too. Every schedule of a kernel gives the same bits, so each
shape gets its quickest one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from evalengine.errors import EvalEngineError
from evalengine.kernels import attention, matmul, packed_matmul
from evalengine.kernels.packed_rows import PackedRows
from evalengine.kernels.shapes import Shapes
from evalengine.layers.cuda import CudaOps
from evalengine.layers.embedding import rows_per_slice
from evalengine.layers.ops import Groups, PreparedWeight
from evalengine.verification import packed, verify
from evalengine.version import CONTRACT_VERSION


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
        return packed.verified(weight, self._scratch, biased) if self.device.type == "cuda" else weight

    def linear(self, x: Tensor, weight: PreparedWeight, bias: Tensor | None = None) -> Tensor:
        if isinstance(weight, PackedRows):
            assert self._scratch is not None
            return packed_matmul.linear(x, weight, bias, self._scratch)
        return matmul.linear(x, weight, bias)

    def expert_linear(self, x: Tensor, weight: PreparedWeight, bias: Tensor | None, groups: Groups) -> Tensor:
        if isinstance(weight, PackedRows):
            assert self._scratch is not None
            return packed_matmul.expert_linear(x, weight, bias, groups, self._scratch)
        return super().expert_linear(x, weight, bias, groups)

    def lm_head(self, x: Tensor, weight: PreparedWeight) -> Tensor:
        """Logits in float32, not rounded to the weights' dtype, because logprobs are computed from them."""
        return matmul.linear(x, weight, out_dtype=torch.float32)
