"""The mode on a CPU: how it is entered, nests and ends, and what it refuses."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from evalengine.errors import ConfigError
from evalengine.invariant import (
    COVERED_OPS,
    CoverageAudit,
    UncoveredOpError,
    is_batch_invariant_mode,
    set_batch_invariant_mode,
)
from evalengine.invariant.cpu import CPUOverrides
from evalengine.verification.verdict_cache import sources_sha256
from tests.bitwise import assert_bitwise_equal
from tests.random_tensors import randn


def differs_from_stock() -> bool:
    """Whether the overrides are live: a float32 product whose exact value stock torch misses somewhere."""
    a, b = randn(64, 900), randn(900, 64, seed=1)
    return not torch.equal(torch.mm(a, b), torch.mm(a, b, out=torch.empty(64, 64)))


def test_plain_call_context_nesting_and_exceptions() -> None:
    """The mode is entered by a call or as a context, nests, and is restored after an exception."""
    assert not differs_from_stock()
    with set_batch_invariant_mode():
        assert differs_from_stock()
        with set_batch_invariant_mode(False):
            assert not differs_from_stock()
            with set_batch_invariant_mode(True):
                assert differs_from_stock()
            assert not differs_from_stock()
        assert differs_from_stock()
        with pytest.raises(KeyError), set_batch_invariant_mode(False):
            raise KeyError
        assert differs_from_stock()
    assert not differs_from_stock()
    set_batch_invariant_mode(True)
    assert differs_from_stock() and is_batch_invariant_mode()
    set_batch_invariant_mode(False)
    assert not differs_from_stock() and not is_batch_invariant_mode()


def test_installing_is_silent() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with set_batch_invariant_mode():
            pass


def test_autocast_and_gradients_pass_through() -> None:
    x, weight = randn(5, 90), randn(33, 90, seed=1).requires_grad_()
    with set_batch_invariant_mode():
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            whole = F.linear(x, weight)
            assert whole.dtype == torch.bfloat16
            assert_bitwise_equal(F.linear(x[:1], weight), whole[:1])
        F.linear(x, weight).sum().backward()
    torch.testing.assert_close(weight.grad, x.sum(0).expand(33, -1))


def test_scaled_dot_product_attention_takes_the_math_path_and_goes_back() -> None:
    q, k, v = (randn(2, 4, 7, 16, seed=s) for s in range(3))
    math_path, fused = "_safe_softmax", "_scaled_dot_product_flash_attention_for_cpu"
    with torch.no_grad():
        for _ in range(2):
            assert met(lambda: F.scaled_dot_product_attention(q, k, v)) & {math_path, fused} == {fused}
            with set_batch_invariant_mode():
                assert met(lambda: F.scaled_dot_product_attention(q, k, v)) & {math_path, fused} == {math_path}


def test_fused_attention_is_refused() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q = randn(1, 2, 5, 16)
    with set_batch_invariant_mode():
        with (
            sdpa_kernel(SDPBackend.FLASH_ATTENTION),
            pytest.raises(ConfigError, match=r"math path.*remove sdpa_kernel"),
        ):
            F.scaled_dot_product_attention(q, q, q)
        F.scaled_dot_product_attention(q, q, q)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        F.scaled_dot_product_attention(q, q, q)


def test_compiled_functions_run_eagerly_in_the_mode() -> None:
    """A compiler would pick kernels of its own for `mm`, by shape and timing, which no override reaches."""
    compiled_graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        compiled_graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    x, weight = randn(5, 90), randn(33, 90, seed=1)
    function = torch.compile(lambda x: F.linear(x, weight).softmax(-1), backend=backend, fullgraph=True)
    with torch.no_grad():
        with set_batch_invariant_mode():
            assert_bitwise_equal(function(x), F.linear(x, weight).softmax(-1))
            assert_bitwise_equal(function(x[:1]), function(x)[:1])
            assert not compiled_graphs
        function(x)
        assert len(compiled_graphs) == 1  # Outside the mode the compiler is back.
        with set_batch_invariant_mode():
            assert_bitwise_equal(function(x), F.linear(x, weight).softmax(-1))  # The compiled graph is not used.
    assert len(compiled_graphs) == 1


def test_the_mode_cannot_be_entered_inside_a_compiled_function() -> None:
    def function(x: Tensor) -> Tensor:
        with set_batch_invariant_mode():
            return x @ x.t()

    torch._dynamo.reset()
    with pytest.raises(ConfigError, match="enter it outside the compiled function"):
        torch.compile(function, backend="eager")(randn(3, 4))
    assert not is_batch_invariant_mode()


def test_the_cpu_side_needs_no_triton() -> None:
    """Nor does the hash of the kernels' sources, by which verdicts on them are kept."""
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch; torch.cuda.is_available = lambda: False\n"
        "from evalengine import set_batch_invariant_mode; set_batch_invariant_mode()\n"
        "from evalengine.verification.verdict_cache import sources_sha256\n"
        "print((torch.ones(1, 3) @ torch.ones(3, 1)).item(), sources_sha256(), flush=True)\n"
        "import evalengine.invariant.cuda"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["3.0", sources_sha256()]
    assert "triton" in done.stderr.splitlines()[-1]  # The CUDA side does need Triton, which was really out of reach.


def test_the_table_lists_the_overrides() -> None:
    """COVERED_OPS lists every override of the CPU; all other ops in it need none there."""
    assert {"mm", "addmm", "bmm", "baddbmm", "_softmax", "_log_softmax", "mean.dim"} <= set(COVERED_OPS)
    assert all(op.note and op.devices for op in COVERED_OPS.values())
    on_cpu = {name for name, op in COVERED_OPS.items() if "cpu" in op.devices}
    refused = {"_scaled_dot_product_flash_attention_for_cpu"}
    # Covered without an override: torch's kernel already gives a row the same bits in any batch.
    torchs_own = {"cumsum", "cumsum_", "cumprod", "cumprod_", "index_add", "index_add_"}
    assert on_cpu - torchs_own == set(CPUOverrides().kernels()) - refused


def met(call: object) -> set[str]:
    """The names of the ops that a call runs, covered or not."""
    audit = CoverageAudit()
    with contextlib.suppress(UncoveredOpError), audit:
        call()
    return set(audit.met)
