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
from evalengine.kernels import attention, matmul
from evalengine.kernels.shapes import Shapes
from evalengine.layers.cuda import CudaOps
from evalengine.layers.embedding import rows_per_slice
from evalengine.layers.ops import PreparedWeight
from evalengine.verification import verify
from evalengine.version import CONTRACT_VERSION


class NativeOps(CudaOps):
    """The native level. Weights stay as loaded."""

    name = "native"
    capturable = True
    attention = staticmethod(attention.paged_attention)  # type: ignore[assignment]

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
        return verdict

    def prepare_weight(self, weight: Tensor, *, lm_head: bool = False) -> PreparedWeight:
        return weight.detach()

    def linear(self, x: Tensor, weight: PreparedWeight, bias: Tensor | None = None) -> Tensor:
        return matmul.linear(x, weight, bias)

    def lm_head(self, x: Tensor, weight: PreparedWeight) -> Tensor:
        """Logits in float32, not rounded to the weights' dtype, because logprobs are computed from them."""
        return matmul.linear(x, weight, out_dtype=torch.float32)
