"""The audit names every reduction that no override covers, and passes operations whose terms have no order."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from evalengine.invariant import (
    COVERED_OPS,
    CoverageAudit,
    UncoveredOpError,
    set_batch_invariant_mode,
)
from evalengine.invariant.audit import REDUCTIONS, UNEVEN_ON_CPU
from tests.random_tensors import randn

CAUGHT = {
    "softplus on cpu (float32)": F.softplus,
    "pow.Tensor_Scalar on cpu (float32)": lambda x: x.abs().pow(1.7),
    "pow.Scalar on cpu (float32)": lambda x: torch.pow(2.0, x),
    "elu on cpu (float32)": F.elu,
    "add.Tensor on cpu (bfloat16)": lambda x: torch.add(x.bfloat16(), x.bfloat16(), alpha=0.3),
    "linalg_vector_norm on cpu (float32)": lambda x: x.norm(3, dim=-1),
    "convolution on cpu (float32)": lambda x: F.conv1d(x[:, None], randn(2, 1, 3)),
    "logsumexp on cpu (float64)": lambda x: x.double().logsumexp(-1),
    "sum.dim_IntList on cpu (float64)": lambda x: x.double().sum(-1),
    "prod.dim_int on cpu (float32)": lambda x: x.prod(-1),
    "mean.dim on cpu (float64)": lambda x: x.double().mean(-1),
    "mm.out on cpu (float32)": lambda x: torch.mm(x, x.t(), out=torch.empty(7, 7)),
    "_logcumsumexp on cpu (float32)": lambda x: torch.ops.aten._logcumsumexp(x, -1),
    "_scaled_dot_product_flash_attention_for_cpu on cpu (float32)": lambda x: stock_attention(x[None, None]),
    "mse_loss on cpu (float32)": lambda x: F.mse_loss(x, x),
    "index_put_ on cpu (float32)": lambda x: x.clone().index_put_((torch.tensor([0, 0]),), x[:2], accumulate=True),
    "linalg_matrix_exp on cpu (float32)": lambda x: torch.linalg.matrix_exp(x[:, :7]),
    "multi_margin_loss on cpu (float32)": lambda x: F.multi_margin_loss(x, torch.arange(7)),
}


def stock_attention(x: Tensor) -> Tensor:
    """Attention outside the mode, by torch's fused kernel."""
    with set_batch_invariant_mode(False):
        return F.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("name", CAUGHT)
def test_the_audit_names_what_is_not_covered(name: str, guard: type) -> None:
    with guard(), set_batch_invariant_mode(), pytest.raises(UncoveredOpError) as caught, CoverageAudit():
        CAUGHT[name](randn(7, 90))
    assert list(caught.value.ops) == [f"aten::{name}"] and f"1 x aten::{name}" in str(caught.value)


def test_the_audit_lists_all_at_once_and_leaves_other_errors_alone() -> None:
    x = randn(3, 4)
    with pytest.raises(UncoveredOpError) as caught, CoverageAudit():
        x.prod(0), x.prod(0), x.prod()
    assert caught.value.ops == {"aten::prod.dim_int on cpu (float32)": 2, "aten::prod on cpu (float32)": 1}
    with pytest.raises(KeyError), CoverageAudit():
        x.prod()
        raise KeyError


def test_the_audit_sees_foreign_kernels() -> None:
    @torch.library.custom_op("evalengine_tests::double", mutates_args=())
    def double(x: Tensor) -> Tensor:
        return x * 2

    with torch.no_grad(), pytest.raises(UncoveredOpError, match="evalengine_tests::double on cpu"), CoverageAudit():
        double(randn(3))


def test_the_audit_passes_what_has_no_order() -> None:
    ids, x = torch.arange(12).view(3, 4), randn(3, 4)
    with torch.no_grad(), set_batch_invariant_mode(), CoverageAudit() as audit:
        ids.sum(), ids.cumsum(-1), x.amax(-1), x.argmax(-1), torch.zeros(0, 3).sum()
        x.norm(torch.inf, dim=-1), x.pow(2), x.sqrt(), torch.add(x, x, alpha=0.3), x.bfloat16() + x.bfloat16()
        wide = x.double()  # of which no sum is covered
        wide[:, :2].sum(-1), wide[:1].sum((0,)), wide[:2, :1].sum((0, 1))  # Two terms or fewer have one order.
        F.mse_loss(x, x, reduction="none"), x.clone().index_put_((torch.tensor([0, 1]),), x[:2])
    assert {"sum", "cumsum", "amax", "argmax", "mse_loss", "index_put_"} <= set(audit.met)


@pytest.mark.skipif(not hasattr(torch.Tag, "reduction"), reason="this torch does not tag its reductions")
def test_every_reduction_that_torch_tags_is_known() -> None:
    exact = {"all", "any", "amax", "amin", "aminmax", "argmax", "argmin", "count_nonzero", "max", "min"}
    packets = [getattr(torch.ops.aten, name) for name in dir(torch.ops.aten) if not name.startswith("__")]
    tagged = {
        packet.__name__
        for packet in packets
        if hasattr(packet, "overloads")
        for overload in packet.overloads()
        if torch.Tag.reduction in getattr(packet, overload).tags
    }
    assert tagged and tagged - exact <= REDUCTIONS
    assert {name.partition(".")[0] for name in COVERED_OPS} - {"rsqrt", "rsqrt_"} <= REDUCTIONS | UNEVEN_ON_CPU
