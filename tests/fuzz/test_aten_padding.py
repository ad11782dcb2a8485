"""Every op that the aten mode covers on a CPU, in random batches and paddings: a row has the bits it has alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from evalengine.invariant import COVERED_OPS, set_batch_invariant_mode
from tests.bitwise import assert_bitwise_equal
from tests.fuzz.cases import Case, cases

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Op = Callable[[Tensor], Tensor]


def numbers(case: Case, *shape: int, dtype: torch.dtype) -> Tensor:
    """Normal numbers, some rows much larger than others, perhaps with zeros."""
    generator = torch.Generator().manual_seed(case.getrandbits(32))
    x = torch.randn(shape, generator=generator) * 4.0 ** torch.randint(-3, 4, (*shape[:-1], 1), generator=generator)
    if case.random() < 0.3:
        x = x.masked_fill(torch.rand(shape, generator=generator) < case.random(), 0)
    return x.to(dtype)


def length(case: Case) -> int:
    return case.choice([1, 2, 3, 7, 8, 9, 16, 31, 65, 127, 128, 129, 200])


def beside(case: Case, x: Tensor, axis: int, left: int, right: int, values: str) -> Tensor:
    """x with `left` and `right` more entries along an axis: "zero", "large" ones, "-inf" or "nan"."""

    def more(count: int) -> Tensor:
        shape = [*x.shape]
        shape[axis] = count
        if values == "large":
            return (numbers(case, *shape, dtype=torch.float32) * 64).to(x.dtype).clamp(-6e4, 6e4)
        return torch.full(shape, {"zero": 0.0, "-inf": -torch.inf, "nan": torch.nan}[values], dtype=x.dtype)

    return torch.cat((more(left), x, more(right)), axis)


def row_ops(case: Case, k: int, dtype: torch.dtype) -> dict[str, Op]:
    """aten op -> a function of [n, K] that computes each row from that row alone."""
    n = case.randint(1, 40)
    weight, bias = numbers(case, n, k, dtype=dtype), numbers(case, n, dtype=dtype)
    scale, shift = numbers(case, k, dtype=dtype), numbers(case, k, dtype=dtype)
    index = torch.arange(k)
    return {
        "mm": lambda x: F.linear(x, weight),
        "addmm": lambda x: F.linear(x, weight, bias),
        "addmm_": lambda x: bias.expand(len(x), n).clone().addmm_(x, weight.t(), beta=0.5),
        "bmm": lambda x: torch.bmm(x[:, None], weight.t().expand(len(x), k, n))[:, 0],
        "baddbmm": lambda x: torch.baddbmm(bias.expand(len(x), 1, n), x[:, None], weight.t().expand(len(x), k, n))[
            :, 0
        ],
        "baddbmm_": lambda x: bias.expand(1, len(x), n).clone().baddbmm_(x[None], weight.t()[None])[0],
        "mv": lambda x: torch.stack([weight @ row for row in x]),
        "addmv": lambda x: torch.stack([torch.addmv(bias, weight, row) for row in x]),
        "_grouped_mm": lambda x: torch._grouped_mm(
            x, weight.t()[None].expand(2, k, n), offs=torch.tensor([len(x) // 2, len(x)], dtype=torch.int32)
        ),
        "_softmax": lambda x: x.softmax(-1),
        "_safe_softmax": lambda x: torch.ops.aten._safe_softmax(x, -1),
        "_log_softmax": lambda x: x.log_softmax(-1),
        "mean": lambda x: torch.stack([row.mean() for row in x]),
        "mean.dim": lambda x: x.mean(-1),
        "sum": lambda x: torch.stack([row.sum() for row in x]),
        "sum.dim_IntList": lambda x: x.sum(-1, dtype=torch.float32),
        "linalg_vector_norm": lambda x: torch.cat((x.norm(dim=-1), x.norm(1, dim=-1))).view(2, -1).t(),
        "var.correction": lambda x: x.var(-1, correction=0),
        "std.correction": lambda x: x.std(-1, correction=0),
        "var_mean.correction": lambda x: torch.stack(torch.var_mean(x, -1, correction=0), -1),
        "std_mean.correction": lambda x: torch.stack(torch.std_mean(x, -1, correction=0), -1),
        "logsumexp": lambda x: x.logsumexp(-1),
        "native_layer_norm": lambda x: F.layer_norm(x, (k,), scale, shift),
        "native_group_norm": lambda x: torch.ops.aten.native_group_norm(
            x.reshape(len(x), k, 1), scale, shift, len(x), k, 1, 1, 1e-5
        )[0][..., 0],
        "cumsum": lambda x: x.cumsum(-1),
        "cumsum_": lambda x: x.t().clone().cumsum_(0).t(),
        "cumprod": lambda x: x.cumprod(-1),
        "cumprod_": lambda x: x.clone().cumprod_(-1),
        "index_add": lambda x: torch.zeros_like(x).index_add(1, index // 2, x),
        "index_add_": lambda x: torch.zeros_like(x).index_add_(
            0, torch.arange(len(x)).repeat(2), torch.cat((x, x / 3))
        ),
        "silu": F.silu,
        "silu_": lambda x: F.silu(x.clone(), inplace=True),
        "sigmoid": torch.sigmoid,
        "sigmoid_": lambda x: x.clone().sigmoid_(),
        "gelu": F.gelu,
        "gelu_": lambda x: torch.ops.aten.gelu_(x.clone(), approximate="tanh"),
        "glu": lambda x: F.glu(torch.cat((x, x.flip(1)), 1), 1),
        "rsqrt": lambda x: x.abs().rsqrt(),
        "rsqrt_": lambda x: x.abs().rsqrt_(),
    }


def test_every_covered_op_is_here() -> None:
    on_cpu = {name for name, op in COVERED_OPS.items() if "cpu" in op.devices}
    assert set(row_ops(Case("all"), 3, torch.float32)) == on_cpu


def test_rows_among_other_rows_have_the_bits_of_rows_alone() -> None:
    """In the batches a row stands elsewhere, among others, beside rows of NaN, in another layout."""
    for case in cases("aten_rows", 8):
        dtype, k, rows = case.choice(DTYPES), length(case), case.randint(1, 9)
        x = numbers(case, rows, k, dtype=dtype)
        before, after = case.randint(0, 9), case.randint(0, 9)
        batch = beside(case, x, 0, before, after, case.choice(["zero", "large", "nan"]))
        order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(case.getrandbits(32)))
        places = torch.argsort(order)[before : before + rows]
        batch = batch[order]
        if case.random() < 0.3:
            batch = batch.t().contiguous().t()
        with set_batch_invariant_mode(), torch.no_grad():
            for name, op in row_ops(case, k, dtype).items():
                with case.named((name, dtype, rows, k, before, after)):
                    alone = torch.cat([op(row[None]) for row in x])
                    assert_bitwise_equal(op(batch)[places], alone)


def test_zeros_beside_a_row_change_no_bit() -> None:
    """K is padded on either side, by zeros for sums and -inf for exponentials; b's rows behind zeros are arbitrary."""
    for case in cases("aten_padded_k", 30):
        dtype, k, rows, n = case.choice(DTYPES), length(case), case.randint(1, 9), case.randint(1, 40)
        left, right = case.choice([0, 1, 5, 63, 128]), case.choice([0, 1, 8, 129, 8192])
        x, b = numbers(case, rows, k, dtype=dtype), numbers(case, k, n, dtype=dtype)
        wide, zeros = beside(case, x, 1, left, right, "-inf"), beside(case, x, 1, left, right, "zero")
        behind = beside(case, b, 0, left, right, "large")
        own = slice(left, left + k)
        with set_batch_invariant_mode(), torch.no_grad(), case.named((dtype, rows, k, n, left, right)):
            assert_bitwise_equal(zeros @ behind, x @ b)
            assert_bitwise_equal(torch.bmm(zeros.expand(3, -1, -1), behind.expand(3, -1, -1))[2], x @ b)
            assert_bitwise_equal(torch.bmm(torch.stack((zeros, zeros)), torch.stack((behind, behind * 0)))[0], x @ b)
            for op in (torch.softmax, torch.log_softmax, torch.ops.aten._safe_softmax):
                assert_bitwise_equal(op(wide, -1)[:, own], op(x, -1))
            assert_bitwise_equal(wide.logsumexp(-1), x.logsumexp(-1))
            for reduce in (torch.sum, torch.norm):
                assert_bitwise_equal(reduce(zeros, dim=-1), reduce(x, dim=-1))
            assert_bitwise_equal(zeros.norm(1, dim=-1), x.norm(1, dim=-1))
            assert_bitwise_equal(zeros.cumsum(-1)[:, own], x.cumsum(-1))


def test_attention_over_padded_keys_has_the_bits_of_each_sequence_alone() -> None:
    """Scores of the padding are NaN until they are masked; its values are large; its queries are anything but NaN."""
    for case in cases("aten_attention", 20):
        dtype, heads, dim = case.choice(DTYPES), case.randint(1, 4), case.choice([1, 8, 20, 64])
        lengths = [case.randint(1, 40) for _ in range(case.randint(1, 6))]
        longest = max(lengths) + case.choice([0, 0, 1, 70, 130])
        sides = [case.randint(0, longest - own) for own in lengths]  # the padding on the left; the rest is on the right
        parts = [[numbers(case, heads, own, dim, dtype=dtype) for _ in range(3)] for own in lengths]
        batch = [
            torch.stack([
                beside(case, part[i], 1, left, longest - own - left, "large")
                for part, left, own in zip(parts, sides, lengths, strict=True)
            ])
            for i in range(3)
        ]  # fmt: skip
        positions = torch.arange(longest)
        real = torch.stack([
            (positions >= left) & (positions < left + own) for left, own in zip(sides, lengths, strict=True)
        ])  # fmt: skip
        seen = (positions[:, None] >= positions) & real[:, None, :]
        with set_batch_invariant_mode(), torch.no_grad(), case.named((dtype, heads, dim, lengths, sides, longest)):
            fused = F.scaled_dot_product_attention(*batch, attn_mask=seen[:, None])
            by_hand = eager(*batch, seen[:, None], poison=True)
            for row, (part, left, own) in enumerate(zip(parts, sides, lengths, strict=True)):
                alone = [x[None] for x in part]
                causal = torch.ones(own, own, dtype=torch.bool).tril()
                cut = slice(left, left + own)
                assert_bitwise_equal(fused[row, :, cut], F.scaled_dot_product_attention(*alone, is_causal=True)[0])
                assert_bitwise_equal(by_hand[row, :, cut], eager(*alone, causal, poison=False)[0])


def eager(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, *, poison: bool) -> Tensor:
    """Attention as transformers writes it; `poison` makes scores NaN that are not seen, before they are masked."""
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if poison:
        scores = scores.masked_fill(~seen, torch.nan)
    scores = torch.where(seen, scores, torch.finfo(scores.dtype).min)
    return scores.softmax(-1, torch.float32).to(q.dtype) @ v


def test_stock_torch_does_differ() -> None:
    """The inverse: the same comparison finds other bits without the mode."""
    differing = 0
    for case in cases("aten_inverse", 10):
        x, b = numbers(case, 5, 300, dtype=torch.float32), numbers(case, 300, 30, dtype=torch.float32)
        zeros, behind = beside(case, x, 1, 77, 0, "zero"), beside(case, b, 0, 77, 0, "large")
        differing += not torch.equal(zeros @ behind, x @ b)
        differing += any(not torch.equal(x[i : i + 1] @ b, (x @ b)[i : i + 1]) for i in range(5))
    assert differing
