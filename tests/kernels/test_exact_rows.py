"""The exact level's row ops of other families: near float64, and a row's bytes depend on nothing but the row."""

from __future__ import annotations

import random
from collections.abc import Callable

import mpmath
import numpy as np
import pytest
import torch
from torch import Tensor

from evalengine.kernels import exact, exact_math, exact_rows
from evalengine.kernels.row_variants import Xielu
from tests.bitwise import assert_bitwise_equal, count_differing
from tests.random_tensors import randn
from tests.references import reference

mpmath.mp.dps = 40


def vector(x: Tensor, seed: int) -> Tensor:
    """A weight or a bias for x [..., H]."""
    return randn(x.shape[-1], seed=seed)


XIELU = Xielu(0.75, 0.8125, 0.5, -9.98377799987793e-07)
ROW_OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "rms_norm with an offset": lambda x: exact.rms_norm(x, vector(x, 9), 1e-6, 1.0),
    "layer_norm": lambda x: exact_rows.layer_norm(x, vector(x, 9), vector(x, 8), 1e-6),
    "layer_norm without a bias": lambda x: exact_rows.layer_norm(x, vector(x, 9), None, 1e-6),
    "scale": lambda x: exact_rows.scale(x, 0.22),
    "softcap": lambda x: exact_rows.softcap(x, 3.0),
    "xielu": lambda x: exact_rows.xielu(x, XIELU),
    **{
        f"{kind}{', gated' if gated else ''}": lambda x, kind=kind, gated=gated: exact_rows.activation(
            torch.cat((x, x.flip(1)), -1) if gated else x, kind, gated=gated
        )
        for kind in ("silu", "gelu", "gelu_tanh", "relu2")
        for gated in (True, False)
    },
}
TRUTHS: dict[str, Callable[[Tensor], Tensor]] = {
    "rms_norm with an offset": lambda x: reference.rms_norm(x, vector(x, 9), 1e-6, 1.0),
    "layer_norm": lambda x: reference.layer_norm(x, vector(x, 9), vector(x, 8), 1e-6),
    "layer_norm without a bias": lambda x: reference.layer_norm(x, vector(x, 9), None, 1e-6),
    "scale": lambda x: x.double() * 0.22,
    "softcap": lambda x: reference.softcap(x, 3.0),
    "xielu": lambda x: reference.xielu(x, *XIELU),
    **{
        f"{kind}{', gated' if gated else ''}": lambda x, kind=kind, gated=gated: (
            reference.activation(x, kind) * (x.flip(1).double() if gated else 1)
        )
        for kind in ("silu", "gelu", "gelu_tanh", "relu2")
        for gated in (True, False)
    },
}


@pytest.mark.parametrize("columns", [1, 7, 513, 9001])
@pytest.mark.parametrize("name", ROW_OPS)
def test_against_float64_and_alone(name: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every op is within 0.6 ulp of float64, and has the same bytes for a row alone and with smaller tiles."""
    x = randn(37, columns) * 5 + 1
    whole = ROW_OPS[name](x)
    truth = TRUTHS[name](x)
    assert whole.dtype == torch.float32
    ulp = torch.from_numpy(np.spacing(truth.abs().float().numpy())).double()
    assert ((whole - truth).abs() <= 0.6 * ulp + 1e-12 * x.abs()).all()
    for row in (0, 17, 36):
        assert_bitwise_equal(ROW_OPS[name](x[row : row + 1]), whole[row : row + 1])
    monkeypatch.setattr(exact_math, "TILE", 1000)
    assert_bitwise_equal(ROW_OPS[name](x), whole)
    assert ROW_OPS[name](x[:0]).shape == whole[:0].shape


def test_a_plain_variant_is_the_op_it_varies() -> None:
    x = randn(5, 96) * 4
    weight = randn(96, seed=1)
    assert_bitwise_equal(exact.rms_norm(x, weight, 1e-6, 0.0), exact.rms_norm(x, weight, 1e-6))
    rounded_early = exact.rms_norm(x, weight + 1, 1e-6)
    assert count_differing(exact.rms_norm(x, weight, 1e-6, 1.0), rounded_early) > 0
    assert_bitwise_equal(exact_rows.activation(x, "silu", gated=True), exact.silu_and_mul(x))
    assert_bitwise_equal(exact_rows.activation(x, "silu", gated=False), exact.silu(x))


@pytest.mark.parametrize("columns", [1, 512, 513, 9001])
def test_layer_norm_depends_on_no_order(columns: int) -> None:
    """Neither permuted columns nor the row's size change a normed number, even beside a mean of 1000 deviations."""
    x = (randn(3, columns) + 1000) * torch.tensor([[1.0], [1e-30], [1e30]])
    ones, order = torch.ones(columns), torch.randperm(columns, generator=torch.Generator().manual_seed(1))
    normed = exact_rows.layer_norm(x, ones, None, 0.0)
    assert_bitwise_equal(exact_rows.layer_norm(x[:, order], ones, None, 0.0), normed[:, order])
    assert columns == 1 or (normed.double().square().mean(-1) - 1).abs().max() < 1e-6
    assert columns < 512 or any(
        not torch.equal(torch.nn.functional.layer_norm(x[:, order], (columns,)), expected[:, order])
        for expected in [torch.nn.functional.layer_norm(x, (columns,))]
    ), "torch's own depends on no order here: this test shows nothing"


@pytest.mark.parametrize("shape", [(1, 1, 513), (7, 3, 65), (5, 8, 129)])
def test_layer_norm_of_each_head(shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight for each head gives each head's bytes, also where tiles begin within a token."""
    monkeypatch.setattr(exact_math, "TILE", 2 * shape[2])
    x, weight, bias = randn(*shape), randn(*shape[1:], seed=1), randn(*shape[1:], seed=2)
    for own in (None, bias):
        alone = [
            exact_rows.layer_norm(x[:, i], weight[i], None if own is None else own[i], 1e-5) for i in range(shape[1])
        ]
        assert_bitwise_equal(exact_rows.layer_norm(x, weight, own, 1e-5), torch.stack(alone, 1))


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_a_bad_number_spoils_its_own_row_only(bad: float) -> None:
    """A normed row with NaN or an infinity becomes NaN as a whole; element by element only the number itself counts."""
    for name, op in ROW_OPS.items():
        x = randn(5, 50)
        clean = op(x)
        x[2, 20] = bad
        spoilt = op(x)
        if "norm" in name:
            assert spoilt[2].isnan().all()
        assert_bitwise_equal(spoilt[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])
    capped = exact_rows.softcap(torch.tensor([bad]), 5.0)
    assert capped.isnan().all() if bad != bad else capped.item() == (5.0 if bad > 0 else -5.0)


def test_zeros_and_subnormals() -> None:
    """Constant rows give the bias, and zeros and subnormals +0."""
    weight, bias = randn(50), randn(50, seed=1)
    constant = torch.tensor([[0.0], [3.7], [-1e30], [1e-40]]).expand(4, 50)
    assert_bitwise_equal(exact_rows.layer_norm(constant, weight, bias, 1e-6), bias.expand(4, 50))
    assert_bitwise_equal(exact_rows.layer_norm(constant, weight, None, 0.0), torch.zeros(4, 50))
    tiny = torch.tensor([[-0.0, 0.0, 1e-40, -1e-40]])
    for result in (
        exact_rows.softcap(tiny, 30.0),
        exact_rows.scale(tiny, 7.0),
        *(exact_rows.activation(tiny, kind, gated=False) for kind in ("silu", "gelu", "gelu_tanh", "relu2")),
    ):
        assert_bitwise_equal(result, torch.zeros(1, 4))


def test_activations_against_mpmath() -> None:
    """Both GELUs and the tanh of the cap are within 0.6 ulp, over all exponents and far into the tails."""
    rng = random.Random(0)
    values = [rng.uniform(-13, 13) for _ in range(1500)] + [
        rng.choice((-1, 1)) * 2 ** rng.uniform(-60, 4) for _ in range(1500)
    ]
    x = torch.tensor([*values, 0.25, -0.25, 0.24999999, 1e-30, -13.9, 30.0, 88.0])
    root = mpmath.sqrt(mpmath.mpf(1) / 2)

    def gelu_tanh(v: mpmath.mpf) -> mpmath.mpf:
        return v / (1 + mpmath.exp(-2 * mpmath.sqrt(2 / mpmath.pi) * (v + mpmath.mpf("0.044715") * v**3)))

    def xielu(v: mpmath.mpf) -> mpmath.mpf:
        alpha_p, alpha_n, beta, eps = map(mpmath.mpf, XIELU)
        return (alpha_p * v**2 if v > 0 else alpha_n * (mpmath.expm1(min(v, eps)) - v)) + beta * v

    for actual, truth in (
        (exact_rows.activation(x, "gelu", gated=False), lambda v: v * mpmath.erfc(-v * root) / 2),
        (exact_rows.activation(x, "gelu_tanh", gated=False), gelu_tanh),
        (exact.elementwise(exact_math.tanh, x), mpmath.tanh),
        (exact_rows.xielu(x, XIELU), xielu),
    ):
        worst = 0.0
        for value, result in zip(x.tolist(), actual.tolist(), strict=True):
            expected = truth(mpmath.mpf(value))
            if abs(expected) > 2.0**-126:  # below, numbers become +0
                ulp = float(np.spacing(np.float32(abs(float(expected)))))
                worst = max(worst, float(abs(mpmath.mpf(result) - expected)) / ulp)
        assert worst <= 0.6  # the rounding to float32 alone is half an ulp


def test_tanh_is_odd_and_monotonic() -> None:
    x = torch.linspace(0.0, 12.0, 200_001)
    y = exact.elementwise(exact_math.tanh, x)
    assert_bitwise_equal(exact.elementwise(exact_math.tanh, -x)[1:], -y[1:])
    assert (y.diff() >= 0).all() and y[-1] == 1
