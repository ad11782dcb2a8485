"""The parts that all product kernels share: the contract's arithmetic, written only here, and the order of tiles.

M rows, N columns, K the reduced dimension.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def multiply_add(a, b, acc, SWAP: tl.constexpr):
    """Adds a [BLOCK_M, BLOCK_K] times b [BLOCK_K, BLOCK_N] to acc [BLOCK_M, BLOCK_N]; SWAP: all of them transposed."""
    return tl.dot(b if SWAP else a, a if SWAP else b, acc, input_precision="ieee")


@triton.jit
def rounded(
    acc, bias_ptr, first_column, N,
    BLOCK_N: tl.constexpr, SWAP: tl.constexpr, INPUT: tl.constexpr, OUTPUT: tl.constexpr, ROUND_PRODUCT: tl.constexpr,
):  # fmt: skip
    """The chains' results, with the bias of their columns, in the output's dtype."""
    if ROUND_PRODUCT:
        acc = acc.to(INPUT).to(tl.float32)
    if bias_ptr is not None:
        column = first_column + tl.arange(0, BLOCK_N)
        bias = tl.load(bias_ptr + column, mask=column < N, other=0.0).to(tl.float32)
        bias = tl.broadcast_to(bias[:, None] if SWAP else bias[None, :], acc.shape)
        # An addition, written as 1 * acc + bias: Triton turns the sum of a tl.dot outside a loop and a tensor into a
        # tl.dot that starts from the tensor, and a chain that starts from the bias has other bits than one that ends
        # with it (seen on an H200, in a kernel of one block of K).
        acc = tl.fma(acc, tl.full(acc.shape, 1.0, tl.float32), bias)
    return acc.to(OUTPUT)


@triton.jit
def tile_position(tile, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """A tile's number -> its row block and its column block; each group of GROUP_M row blocks goes column by column."""
    row_blocks = tl.cdiv(M, BLOCK_M)
    group_size = GROUP_M * tl.cdiv(N, BLOCK_N)
    first = tile // group_size * GROUP_M
    height = tl.minimum(row_blocks - first, GROUP_M)
    return first + tile % group_size % height, tile % group_size // height


@triton.jit
def load(pointers, inside, before_end, MASK: tl.constexpr, EVEN_K: tl.constexpr):
    """A tile of an operand; masked elements are 0."""
    if not EVEN_K:
        tile = tl.load(pointers, mask=inside & before_end, other=0.0)
    elif MASK:
        tile = tl.load(pointers, mask=inside, other=0.0)
    else:
        tile = tl.load(pointers)
    return tile
