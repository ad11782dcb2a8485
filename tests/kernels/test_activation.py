"""SiLU has the bytes of torch's CUDA kernels on a GPU; in the interpreter it is equal up to exp's last ulp."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from evalengine.kernels import activation, device_math
from evalengine.kernels.launching.launch import launch
from evalengine.kernels.row_variants import Xielu
from tests.bitwise import assert_bitwise_equal, count_differing
from tests.references import reference

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
IGNORE_INTERPRETER = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy warns of overflow and infinity * 0
GELUS = ["gelu", "gelu_tanh"]
NOT_FINITE = [float("nan"), float("inf"), float("-inf")]
TINY = {torch.float32: 2.0**-149, torch.float16: 2.0**-24, torch.bfloat16: 2.0**-133}  # the least positive numbers
SHAPES = [(0, 64), (5, 0), (1, 1), (7, 3), (2, 1023), (3, 1025), (2, 1536)]


# The initial values, rounded to bfloat16; larger ones; an eps above 0.
XIELUS = [Xielu(0.8, 0.8, 0.5, -9.98377799987793e-07), Xielu(1.9375, 2.71875, 0.5, -1e-6), Xielu(0.1, 0.6, 0.5, 0.01)]


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3).to(DEVICE, dtype)


def assert_agrees(actual: Tensor, expected: Tensor) -> None:
    """Compares bytes on CUDA (any NaN equals any NaN), and to a few ulp in the interpreter: its exp and fma differ."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    assert torch.equal(actual.isnan(), expected.isnan())
    if CUDA:
        assert_bitwise_equal(actual.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0))
    else:
        eps = torch.finfo(actual.dtype).eps
        torch.testing.assert_close(actual, expected, rtol=4 * eps, atol=torch.finfo(actual.dtype).tiny, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_bytes_of_torch(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """silu and silu_and_mul equal torch's, by `assert_agrees`."""
    tokens, width = shape
    gate_up = randn(tokens, 2 * width, dtype=dtype)
    gate, up = gate_up.chunk(2, -1)
    assert_agrees(activation.silu_and_mul(gate_up), F.silu(gate) * up)
    assert_agrees(activation.silu(gate), F.silu(gate).contiguous())


@IGNORE_INTERPRETER
@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
def test_every_input(dtype: torch.dtype) -> None:
    """silu equals torch's on all 65,536 numbers of a 16-bit dtype: infinities, NaN and subnormals, too."""
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype).to(DEVICE)
    assert_agrees(activation.silu(x), F.silu(x))
    up = randn(2**16, dtype=dtype)
    pairs = torch.stack((x, up), 1).view(2**8, 2**8, 2).transpose(1, 2).reshape(2**8, 2**9)
    assert_agrees(activation.silu_and_mul(pairs).flatten(), F.silu(x) * up)


@triton.jit
def _both_ways(x_ptr, shorter_ptr, longer_ptr, FORM: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at).to(tl.float32)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    if FORM == "quotient":
        shorter, longer = activation.times_sigmoid(x, x, dtype), tl.div_rn(x, 1.0 + device_math.exp(x * -1.0))
    elif FORM == "silu":
        shorter = activation.rounded_times_sigmoid(x, x, dtype).to(tl.float32)
        longer = activation.times_sigmoid(x, x, dtype).to(dtype).to(tl.float32)
    elif FORM == "gelu_tanh":
        z = tl.fma(x * x * x, 0.044715, x) * 1.5957691216057308
        shorter = activation.rounded_times_sigmoid(x, z, dtype).to(tl.float32)
        longer = activation.times_sigmoid(x, z, dtype).to(dtype).to(tl.float32)
    else:
        one = tl.full((BLOCK,), 1.0, tl.float32)
        shorter = activation.rounded_times_sigmoid(one, x, dtype).to(tl.float32)
        longer = activation.times_sigmoid(one, x, dtype).to(dtype).to(tl.float32)
    tl.store(shorter_ptr + at, shorter)
    tl.store(longer_ptr + at, longer)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", ["quotient", "silu", "gelu_tanh", "sigmoid"])
def test_short_forms_have_the_bytes_of_long_ones(form: str, dtype: torch.dtype) -> None:
    """For all 65,536 numbers of a 16-bit dtype: Newton's step those of IEEE division, approximations those of it."""
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype).to(DEVICE)
    shorter, longer = torch.empty((2, 2**16), device=DEVICE)
    launch(_both_ways, (2**6, 1, 1), (x, shorter, longer), (form, 2**10), 4, 1)
    assert_agrees(shorter, longer)


@IGNORE_INTERPRETER
def test_float32_edges() -> None:
    """silu equals torch's on zeros, subnormals, infinities, NaN and where exp over- or underflows."""
    small, large = [0.0, -0.0, 1e-45, -1e-38, 1e-30], [-17.0, -87.5, -88.5, -89.0, -104.0, 3e38]
    x = torch.tensor([*small, *large, torch.inf, -torch.inf, torch.nan], device=DEVICE)
    assert_agrees(activation.silu(x), F.silu(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_accuracy(dtype: torch.dtype) -> None:
    """silu_and_mul, which rounds twice, is within 1.5 eps of float64, relative to the result."""
    gate_up = randn(5, 2 * 131, dtype=dtype)
    truth = reference.silu_and_mul(gate_up)
    error = (activation.silu_and_mul(gate_up).double() - truth).abs()
    assert (error <= 1.5 * torch.finfo(dtype).eps * truth.abs() + torch.finfo(dtype).tiny).all()


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
def test_rounding_points_matter(dtype: torch.dtype) -> None:
    """A silu that is not rounded before the product gives other bytes, so that equality with torch can fail."""
    gate_up = randn(5, 2 * 131, dtype=dtype)
    gate, up = gate_up.float().chunk(2, -1)
    assert count_differing((F.silu(gate) * up).to(dtype), activation.silu_and_mul(gate_up)) > 50


@IGNORE_INTERPRETER
@pytest.mark.parametrize("act", GELUS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_gelu_against_float64_and_torch(shape: tuple[int, int], dtype: torch.dtype, act: str) -> None:
    """Both GELUs, alone and gated, are within a rounding of float64 and of torch's, whose formulas they compute."""
    tokens, width = shape
    gate_up = randn(tokens, 2 * width, dtype=dtype)
    gate, up = gate_up.chunk(2, -1)
    alone, gated = activation.activation(gate, act), activation.gated(gate_up, act)
    assert alone.is_contiguous() and gated.shape == shape and gated.dtype == dtype
    assert_bitwise_equal(gated, alone * up)
    unit = torch.finfo(dtype).eps / 2
    truth = reference.activation(gate, act)
    # 1 + erf, or 1 + tanh in torch's form, loses the bits of a small sum; the absolute error stays that of float32.
    assert ((alone - truth).abs() <= 1.01 * unit * truth.abs() + 4 * 2.0**-24 * gate.double().abs() + TINY[dtype]).all()
    eager = F.gelu(gate, approximate="tanh" if act == "gelu_tanh" else "none")
    error = (alone.double() - eager.double()).abs()
    assert (error <= 2.02 * unit * truth.abs() + 8 * 2.0**-24 * gate.double().abs() + TINY[dtype]).all()


@IGNORE_INTERPRETER
@pytest.mark.parametrize("act", GELUS)
@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
def test_gelu_of_every_input(dtype: torch.dtype, act: str) -> None:
    """All 65,536 numbers of a 16-bit dtype: finite ones are near float64, an infinity stays one, -inf * 0 is NaN.

    That is by the formula: torch's vectorised gelu(inf) is NaN on some processors (an Intel Xeon)."""
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype).to(DEVICE)
    out = activation.activation(x, act)
    assert torch.equal(out.isnan(), x.isnan() | (x == -math.inf)) and torch.equal(out.isinf(), x == math.inf)
    finite = x[out.isfinite()]
    truth = reference.activation(finite, act)
    bound = torch.finfo(dtype).eps / 2 * 1.01 * truth.abs() + 4 * 2.0**-24 * finite.double().abs() + TINY[dtype]
    assert ((out[out.isfinite()] - truth).abs() <= bound).all()
    assert count_differing(out, activation.silu(x)) > 1_000  # in most of bfloat16, far or near 0, they agree


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
def test_a_squared_relu_is_torchs(dtype: torch.dtype) -> None:
    """A NaN and the infinities, too."""
    x = torch.cat([randn(1031, dtype=dtype), torch.tensor([0.0, -0.0, 1e-5, *NOT_FINITE]).to(DEVICE, dtype)])
    expected = F.relu(x).square()
    assert_bitwise_equal(activation.activation(x, "relu2"), expected)
    assert_bitwise_equal(activation.gated(torch.stack([x, x.flip(0)]).view(1, -1), "relu2")[0], expected * x.flip(0))


@IGNORE_INTERPRETER
@pytest.mark.parametrize("numbers", XIELUS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_xielu_against_float64_and_alone(dtype: torch.dtype, numbers: Xielu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a rounding of float64 far from 0, near it and beyond eps; an element has its bytes at any place."""
    x = torch.cat([randn(1500, dtype=torch.float32), randn(1500, dtype=torch.float32) * 1e-5]).to(dtype).view(40, 75)
    out = activation.xielu(x, numbers)
    truth = reference.xielu(x, *numbers)
    line = numbers.beta * x.double()  # of the other sign than the rest of a negative x's, which it cancels
    terms = (truth - line).abs() + line.abs()
    bound = torch.finfo(dtype).eps / 2 * 1.01 * truth.abs() + 6 * 2.0**-24 * terms + TINY[dtype]
    assert out.dtype == dtype and ((out.double() - truth).abs() <= bound).all()
    assert count_differing(out, x) > 2_000, "it is not the identity"
    odd = torch.tensor([0.0, -0.0, *NOT_FINITE], dtype=dtype, device=DEVICE)
    assert torch.equal(activation.xielu(odd, numbers).double().isfinite(), reference.xielu(odd, *numbers).isfinite())
    assert_bitwise_equal(activation.xielu(x.t(), numbers), out.t())
    assert_bitwise_equal(activation.xielu(x[3:4, 5:9], numbers), out[3:4, 5:9])
    monkeypatch.setattr(activation, "BLOCK", 16)
    monkeypatch.setattr(activation, "WARPS", 1)
    assert_bitwise_equal(activation.xielu(x, numbers), out)


@pytest.mark.parametrize("act", GELUS)
def test_a_gelu_depends_on_nothing_else(act: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gate_up = randn(3, 2 * 37, dtype=torch.float32)
    alone, gated = activation.activation(gate_up, act), activation.gated(gate_up, act)
    assert_bitwise_equal(activation.activation(gate_up.t(), act), alone.t())
    assert_bitwise_equal(activation.gated(gate_up[1:2], act), gated[1:2])
    monkeypatch.setattr(activation, "BLOCK", 16)
    monkeypatch.setattr(activation, "WARPS", 1)
    assert_bitwise_equal(activation.activation(gate_up, act), alone)
    assert_bitwise_equal(activation.gated(gate_up, act), gated)
    for refused in (activation.activation, activation.gated):
        with pytest.raises(AssertionError, match="relu is none of the activations"):
            refused(gate_up, "relu")


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides(dtype: torch.dtype) -> None:
    """Slices and transposes give the bytes of contiguous copies."""
    wide = randn(5, 300, dtype=dtype)
    contiguous = activation.silu_and_mul(wide[:, 3:265].contiguous())
    assert_bitwise_equal(activation.silu_and_mul(wide[:, 3:265]), contiguous)
    assert_bitwise_equal(activation.silu_and_mul(wide.t().contiguous().t()[:, 3:265]), contiguous)
    assert_bitwise_equal(activation.silu(wide.t()), activation.silu(wide).t())


def test_an_element_depends_on_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """An element has the same bytes at any place in a row (unlike torch's CPU silu), with any neighbours and blocks."""
    gate_up = randn(3, 2 * 37, dtype=torch.float32)
    together = activation.silu_and_mul(gate_up)
    order = torch.randperm(37, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    shuffled = torch.cat((gate_up[:, :37][:, order], gate_up[:, 37:][:, order]), -1)
    assert_bitwise_equal(activation.silu_and_mul(shuffled), together[:, order])
    assert count_differing(together[:, order], together) > 50
    assert_bitwise_equal(activation.silu_and_mul(gate_up[1:2]), together[1:2])
    poisoned = gate_up.clone()
    poisoned[0] = poisoned[:, 5] = torch.nan
    assert_bitwise_equal(activation.silu_and_mul(poisoned)[1:, 6:], together[1:, 6:])
    for block, warps in ((16, 1), (4096, 8)):
        monkeypatch.setattr(activation, "BLOCK", block)
        monkeypatch.setattr(activation, "WARPS", warps)
        assert_bitwise_equal(activation.silu_and_mul(gate_up), together)


@pytest.mark.gpu
def test_beyond_two_to_the_31_elements() -> None:
    """The last row of a tensor of more than 2^31 elements is right, and no other row is written over."""
    tokens, width = 2**17 + 1, 2**14
    if torch.cuda.mem_get_info()[0] < 5 * tokens * width * 2:
        pytest.skip("needs 21 GB of GPU memory")
    gate_up = torch.zeros(tokens, 2 * width, dtype=torch.bfloat16, device=DEVICE)
    gate_up[-1] = randn(2 * width, dtype=torch.bfloat16)
    gate, up = gate_up[-1].chunk(2, -1)
    out = activation.silu_and_mul(gate_up)
    assert_bitwise_equal(out[-1], F.silu(gate) * up)
    assert not out[:-1].any()
    assert_bitwise_equal(activation.silu(gate_up)[-1], F.silu(gate_up[-1]))
