"""`set_batch_invariant_mode` gives any torch model the engine's arithmetic, by overriding aten ops.

While the mode is on, every op of `COVERED_OPS` that gets float32, bf16 or fp16 tensors runs the project's own kernel:
on the CPU the `exact` one, its float32 result rounded to the input's dtype, on CUDA the `native` one. A row's bits then
no longer depend on how many rows there are; on the CPU neither on the thread count nor on the instruction set. float64,
integer and complex operands keep torch's own kernels. On CUDA each schedule of a product's kernel is compared with the
reference schedule before it is first used, and dropped if a byte differs (`cuda`).

    with set_batch_invariant_mode():
        logits = model(input_ids)

The mode is process-wide. Blocks of several threads and asyncio tasks may overlap in any order: the mode stays on until
the last of them has left (`mode`).

scaled_dot_product_attention is one kernel on CUDA, with any mask and the arithmetic of the engine's own attention. The
mode also sets two switches of torch, and puts them back: elsewhere, and for what that kernel does not cover (dropout,
values of another width than keys), scaled_dot_product_attention takes its math path (`bmm`, `_safe_softmax`, `bmm`, in
float32 for bf16 and fp16 inputs; the fused attention ops raise `ConfigError`), and functions under `torch.compile` run
eagerly (its compiler would lower `mm` to kernels that it picks by shape and by timing, past the overrides).

Padding on the CPU: a term of a product whose left factor is zero changes no bit, nor does a softmax's column at -inf.
So a row of a padded batch has the bits that it has alone, padded on the left or on the right, and a decoded token has
those of a prefill, wherever the model masks the padding and gives it no weight (a mask that is added must be large
enough for exp to give 0, and masked values must be finite). Limits remain: `softmax` and `log_softmax` take 2^19
columns, a sum of more than 2^22 numbers is cut at absolute places, a float32 product whose right operand's column
spreads over 2^8 and more loses to torch's in accuracy (docs/numerics.md has figures), and an op that counts padding as
data (a `mean` over the padded axis, a MoE's capacity, absolute position ids) depends on it by definition.

Padding on CUDA: zeros after the end of K and masked columns after the end of a softmax change nothing, so padding on
the right is harmless. Padding on the left shifts the columns, so it changes bits. Equal bits of prefill and decode are
not promised there.

`v @ x` of a vector and transposed matrices [B, K, N] may reach torch's dispatcher as `mv(x.mT, v)`, by strides and
gradients; on the CPU, where a left operand has more bits than a right one, that is another product: write `x.mT @ v`.

These ops are left to torch: `dot` (its result is one number, without rows), `addbmm`, `out=` variants (by which the
overrides reach torch's own kernels), convolutions, pooling, `prod`, `scatter_add`, batch norm, recurrent cells, losses
that add up, norms of other orders than 1, 2 and infinity, the fused layers of nn.MultiheadAttention; on the CPU the
element-wise ops whose vector body and scalar tail differ (softplus, mish, elu, exp2, cosh, sinh, atanh, atan2,
logaddexp, powers other than those by 0, 1/2, 1, 2, 3, -1 and -2, and in bf16 and fp16 sums with an alpha); on CUDA
`sum` of more than 64 terms, `cumsum`, `norm`, `var`, `logsumexp` and `group_norm`. Out of reach: kernels outside aten
(flash-attn, custom ops) and CUDA graphs captured before; `_grouped_mm` reads its offsets on the host, so it cannot be
captured. `CoverageAudit` names the ones that a model meets, and warns of rows padded on the left, which it does not
judge.

cos, sin, exp, log, tanh and float32 rsqrt gave equal bits at every length and offset tried on one CPU, so they need no
override there; across instruction sets they may differ. On CUDA torch computes every element of an element-wise op by
the same formula, in the vectorised body as in the tail; tests try lengths and offsets.
"""

from __future__ import annotations

from evalengine.invariant.audit import CoverageAudit, UncoveredOpError
from evalengine.invariant.mode import is_batch_invariant_mode, set_batch_invariant_mode
from evalengine.invariant.table import COVERED_OPS

__all__ = ["COVERED_OPS", "CoverageAudit", "UncoveredOpError", "is_batch_invariant_mode", "set_batch_invariant_mode"]
