"""The `exact` numerics level: every op's bits are the same on every machine, at any batch, order or thread count.

    M, T rows (tokens), K input features, N output features, V vocabulary, D head_dim, I intermediate size.

Inputs are bf16, fp16 or float32 tensors; outputs are float32, rounded once from float64 (to nearest even; float32
subnormals and -0 become +0). Sums are sums of integers below 2^53 times one power of two, so any BLAS, split or thread
count gives the same result; everything else is `exact_math`. Cutting rows and columns into tiles is schedule, never
arithmetic. A row that holds an infinity or a NaN becomes NaN as a whole, and no other row does.

Measured on one Zen 3 core at 2.4 GHz (AVX2; best of 12, other work on the machine), ms, exact against stock float32:
linear N576 K1536 at M = 1 / 16 / 256 / 1024: 0.45 / 1.9 / 23 / 95 against 0.07 / 0.46 / 5.0 / 20 (38 GFLOP/s, float64);
log_softmax 512 x 49152: 353 against 91; silu_and_mul 1024 x 1536: 18; rms_norm 1024 x 576: 2.3; at one row the cost is
the calls: linear 0.17, rms_norm 0.20, silu_and_mul 0.15.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from evalengine.kernels import exact_math as em
from evalengine.kernels.exact_aten_rows import as_rows, from_rows
from evalengine.kernels.exact_product import LEFT_BITS, RIGHT_BITS, SEGMENT, left_limbs, product
from evalengine.kernels.exact_wide import lower_limb, wide_product, wide_rows
from evalengine.kernels.limits import MAX_VOCABULARY

_ROW_BLOCK = 128  # rows of one matrix product, two limbs stacked
_PRODUCT_ELEMENTS = 1 << 19  # elements of one matrix product's result


@dataclass(frozen=True)
class ExactWeight:
    """A weight matrix on a grid of its own per output row: `limb[n] * scale[n]`, and W wide rows in two limbs."""

    limb: Tensor  # float64 [N, K], integers of at most RIGHT_BITS bits
    scale: Tensor  # float64 [N], powers of two
    wide: Tensor  # int64 [W], ascending: the rows that are wide (`exact_wide`)
    pair: Tensor  # float64 [2, W, K]: their limbs, and their second limbs in units of 2^-27


def quantize_weight(weight: Tensor) -> ExactWeight:
    """[N, K] -> one limb per element, two in wide rows; each row is scaled by the exponent of its largest magnitude."""
    rows, columns = weight.shape
    limb = torch.empty(rows, columns, dtype=torch.float64, device=weight.device)
    scale = torch.empty(rows, dtype=torch.float64, device=weight.device)
    wide, lower = [], []
    for tile in em.tiles(rows, columns):
        part = weight[tile]
        size = em.magnitude(part)
        absmax = em.largest(size)
        unit_exponent = em.exponent(absmax) - RIGHT_BITS
        inverse, c = em.pow2(-unit_exponent), em.grid(absmax, RIGHT_BITS)
        torch.add(em.widen(part), c, out=limb[tile])
        limb[tile].sub_(c)
        index = wide_rows(part, size, absmax)
        wide.append(index + tile.start)
        lower.append(lower_limb(em.widen(part[index]), limb[tile][index], absmax[index]).mul_(inverse[index]))
        limb[tile].mul_(inverse)
        scale[tile] = em.pow2(unit_exponent).squeeze(-1)
    every = torch.cat(wide)
    return ExactWeight(limb, scale, every, torch.stack((limb[every], torch.cat(lower))))


def linear(x: Tensor, weight: ExactWeight, bias: Tensor | None = None) -> Tensor:
    """[..., K] -> float32 [..., N]: x @ W^T + bias, activations in two limbs, weights in one, one rounding.

    Per row of x: e the exponent of its largest magnitude, hi = rint(x * 2^(17-e)), lo = rint((x * 2^(17-e) - hi) *
    2^18); y = (hi.W + (lo.W) * 2^-18) * 2^(e-17) * scale + bias. The row's power of two is left in the limbs
    (multiplying by it is exact, before the sums or after). The columns of wide rows of W are `wide_product`s.
    """
    n, k = weight.limb.shape
    rows = x.reshape(-1, k)
    wide_bias = None if bias is None else em.widen(bias)
    out = torch.empty(rows.shape[0], n, dtype=torch.float32, device=x.device)
    for start in range(0, rows.shape[0], _ROW_BLOCK):
        block, target = rows[start : start + _ROW_BLOCK], out[start : start + _ROW_BLOCK]
        absmax = em.row_absmax(block)
        limbs = left_limbs(em.widen(block), absmax, 3 if len(weight.wide) else 2)
        step = max(1024, _PRODUCT_ELEMENTS // (2 * block.shape[0]))
        for column in range(0, n, step):
            cut = slice(column, column + step)
            y = product(limbs[:2], absmax, weight.limb[cut].t()).mul_(weight.scale[cut])
            if wide_bias is not None:
                y.add_(wide_bias[cut])
            em.store_float32(y, target[:, cut])
        if len(weight.wide):
            _wide_columns(limbs, absmax, weight, wide_bias, target)
    return out.view(*x.shape[:-1], n)


def _wide_columns(limbs: Tensor, absmax: Tensor, weight: ExactWeight, bias: Tensor | None, out: Tensor) -> None:
    """Writes the columns of wide rows of the weight into out [M, N]; limbs [3, M, K], absmax [M, 1], bias float64."""
    step = max(512, _PRODUCT_ELEMENTS // (6 * limbs.shape[1]))
    for start in range(0, len(weight.wide), step):
        cut = slice(start, start + step)
        index = weight.wide[cut]
        scale = weight.scale[index]
        y = wide_product(limbs, absmax, weight.pair[:, cut], torch.ones_like(scale).unsqueeze(0)).mul_(scale)
        if bias is not None:
            y.add_(bias[index])
        out[:, index] = em.round_float32(y)


def bmm(a: Tensor, b: Tensor) -> Tensor:
    """[B, M, K] x [B, K, N] -> float32 [B, M, N]: `linear`'s arithmetic, b[i]^T instead of the weight.

    A row's bits depend on its own a[i, m] and b[i], not on B or M; zeros that pad K change nothing, wherever they are.
    """
    out = torch.empty(*a.shape[:-1], b.shape[-1], dtype=torch.float32, device=a.device)
    for left, right, target in zip(a, b, out, strict=True):
        target.copy_(linear(left, quantize_weight(right.t())))
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """[..., H] -> float32 [..., H]: x * rsqrt(mean(x^2) + eps) * (weight + offset).

    Squares of float32 numbers are exact in float64; they are summed on the grid of 2^(2e-44), e the exponent of the
    row's largest magnitude.
    """
    hidden = x.shape[-1]
    rows = x.reshape(-1, hidden)
    out = torch.empty(rows.shape, dtype=torch.float32, device=x.device)
    wide_weight = em.widen(weight).add_(offset)
    for tile in em.tiles(*rows.shape):
        wide = em.widen(rows[tile])
        mean_square = em.row_sum_of_squares(wide).mul_(1.0 / hidden)
        wide.mul_(em.rsqrt(mean_square.add_(eps))).mul_(wide_weight)
        em.store_float32(wide, out[tile])
    return out.view(x.shape)


def mean(x: Tensor, dim: int | Sequence[int], keepdim: bool = False) -> Tensor:
    """Mean over `dim` (one axis or several) -> float32: the sum on the grid of 2^(e-44), exact, times 1 / count.

    e is the exponent of the largest magnitude; zeros that pad a row change its sum in no bit.
    """
    axes = sorted({axis % x.ndim for axis in ([dim] if isinstance(dim, int) else dim)})
    rows, outer_shape = as_rows(x, axes)
    out = torch.empty(rows.shape[0], dtype=torch.float32, device=x.device)
    for tile in em.tiles(*rows.shape):
        wide = em.widen(rows[tile])
        sums = em.row_sum(wide, em.grid(em.row_absmax(wide), em.SUM_BITS))
        em.store_float32(sums.mul_(1.0 / rows.shape[1]).squeeze(-1), out[tile])
    return from_rows(out, outer_shape, axes, keepdim)


def _softmax(x: Tensor, dim: int, finish: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
    """`finish(z - max, exp(z - max), sum of exp)` for each row along `dim`; the sum is exact on a grid of 2^-44."""
    if x.ndim == 0:
        return _softmax(x[None], 0, finish)[0]
    moved = x.movedim(dim, -1)
    columns = moved.shape[-1]
    assert columns <= MAX_VOCABULARY, f"softmax over {columns} numbers: the exact level sums at most {MAX_VOCABULARY}"
    rows = moved.reshape(-1, columns)
    out = torch.empty(rows.shape, dtype=torch.float32, device=x.device)
    for tile in em.tiles(*rows.shape):
        block = rows[tile]
        top = block.amax(-1, keepdim=True).to(torch.float64)
        top.masked_fill_(~(top.abs() < torch.inf), torch.nan)
        pieces = []
        total = torch.zeros(block.shape[0], dtype=torch.int64, device=x.device)
        for piece in block.split(em.TILE, -1):
            shifted = piece.to(torch.float64).sub_(top)
            p = em.exp(shifted)
            total.add_(em.unit_sum(p))
            pieces.append((shifted, p))
        norm = em.unit_total(total).unsqueeze(-1)
        for (shifted, p), target in zip(pieces, out[tile].split(em.TILE, -1), strict=True):
            em.store_float32(finish(shifted, p, norm), target)
    return out.view(moved.shape).movedim(-1, dim).contiguous()


def log_softmax(x: Tensor, dim: int = -1) -> Tensor:
    """z - max - log(sum(exp(z - max))) along `dim` -> float32, at most 2^19 numbers a row."""
    return _softmax(x, dim, lambda shifted, p, norm: shifted.sub_(em.log(norm)))


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """exp(z - max) / sum(exp(z - max)) along `dim` -> float32, at most 2^19 numbers a row."""
    return _softmax(x, dim, lambda shifted, p, norm: p.mul_(em.reciprocal(norm)))


def elementwise(function: Callable[..., Tensor], *operands: Tensor) -> Tensor:
    """`function` of equally shaped operands, taken in float64 tile by tile -> float32 of their shape."""
    shape = operands[0].shape
    flat = [operand.reshape(-1) for operand in operands]
    out = torch.empty(flat[0].shape, dtype=torch.float32, device=flat[0].device)
    for tile in em.tiles(out.shape[0], 1):
        em.store_float32(function(*(em.widen(operand[tile]) for operand in flat)), out[tile])
    return out.view(shape)


def add(x: Tensor, y: Tensor) -> Tensor:
    """x + y -> float32."""
    return elementwise(Tensor.add_, x, y)


def wide_silu(x: Tensor) -> Tensor:
    """float64 x * sigmoid(x)."""
    return em.sigmoid(x).mul_(x)


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x) -> float32."""
    return elementwise(wide_silu, x)


def gated(function: Callable[[Tensor], Tensor], gate_up: Tensor) -> Tensor:
    """[T, 2 I] -> float32 [T, I]: `function`, taken in float64, of the first half * second half, one rounding."""
    tokens, width = gate_up.shape[0], gate_up.shape[-1] // 2
    out = torch.empty(tokens, width, dtype=torch.float32, device=gate_up.device)
    for tile in em.tiles(tokens, width):
        gate, up = em.widen(gate_up[tile, :width]), em.widen(gate_up[tile, width:])
        em.store_float32(function(gate).mul_(up), out[tile])
    return out


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """[T, 2 I] -> float32 [T, I]: silu(first half) * second half, one rounding."""
    return gated(wide_silu, gate_up)


def rope_table(inv_freq: Tensor, max_positions: int, scaling: float) -> tuple[Tensor, Tensor]:
    """float32 [D/2] -> cos, sin float32 [max_positions, D/2] on the CPU, times `scaling` before the one rounding.

    The angle is float32(position * inv_freq), as transformers computes it. Positions below 2^20 / max(inv_freq).
    """
    frequencies = inv_freq.to("cpu", torch.float64)
    shape = (max_positions, frequencies.shape[0])
    cosines, sines = torch.empty(shape), torch.empty(shape)
    for tile in em.tiles(*shape):
        positions = torch.arange(max_positions, dtype=torch.float64)[tile]
        angle = em.widen(em.round_float32(positions[:, None] * frequencies))
        em.store_float32(em.cos(angle).mul_(scaling), cosines[tile])
        em.store_float32(em.sin(angle).mul_(scaling), sines[tile])
    return cosines, sines


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[T, heads, D] and cos, sin [T, D/2] -> float32 [T, heads, D]: halves x1 cos - x2 sin, x2 cos + x1 sin."""
    half = x.shape[-1] // 2
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    for tile in em.tiles(x.shape[0], x.shape[1] * x.shape[2]):
        wide = em.widen(x[tile])
        x1, x2 = wide[..., :half], wide[..., half:]
        c, s = em.widen(cos[tile]).unsqueeze(1), em.widen(sin[tile]).unsqueeze(1)
        em.store_float32((x1 * c).sub_(x2 * s), out[tile, :, :half])
        em.store_float32((x2 * c).add_(x1 * s), out[tile, :, half:])
    return out


def self_test(device: torch.device | str) -> None:
    """Multiplies integer matrices whose sums need 53 bits, and rounds to a grid; RuntimeError if a bit is missing.

    A BLAS that emulates float64 from shorter products fails here instead of giving other logprobs.
    """
    index = torch.arange(24 * SEGMENT).view(24, SEGMENT)
    left = 2**LEFT_BITS - index * 7919 % 4099
    right = 2**RIGHT_BITS - index.flip(0) * 104729 % 8388593
    expected = torch.stack([(left * row).sum(-1) for row in right], -1)  # sums of int64 are exact
    wide_left, wide_right = left.to(device, torch.float64), right.to(device, torch.float64)
    ok = int(expected.max()) > 2**52
    for rows in (1, 2, 24):
        product = torch.empty(rows, 24, dtype=torch.float64, device=device)
        torch.mm(wide_left[:rows], wide_right.t(), out=product)
        ok = ok and torch.equal(product.cpu(), expected[:rows].to(torch.float64))
    halves = torch.arange(-9, 10, dtype=torch.float64, device=device) * 0.5
    c = em.grid(torch.ones_like(halves), 1)  # a grid of unit 1 rounds to the nearest integer, ties to even
    ok = ok and torch.equal((halves + c).sub_(c).cpu(), halves.cpu().round())
    # torch 1.12's vectorised hardshrink turned NaN into zero, so a row that had failed would have looked plausible.
    ok = ok and bool(em.round_float32(torch.full_like(halves, torch.nan)).isnan().all())
    if not ok:
        raise RuntimeError(
            f"device {device}: its float64 arithmetic is not IEEE 754 (a 53-bit integer product came out wrong), "
            "so the exact numerics level cannot run on it; use device=cpu, or another numerics level"
        )
