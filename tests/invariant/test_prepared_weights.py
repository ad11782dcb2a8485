"""Weights that the aten mode prepares once: which are kept, that writes to them are noticed, and when they go."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from evalengine.errors import ConfigError
from evalengine.invariant import is_batch_invariant_mode, mode, set_batch_invariant_mode
from evalengine.invariant.prepared import DEFAULT_LIMIT, PreparedWeights
from evalengine.kernels import exact_aten
from tests.bitwise import assert_bitwise_equal
from tests.random_tensors import randn


def fresh(x: Tensor, weight: Tensor) -> Tensor:
    """F.linear by a copy of the weight, which was never seen."""
    return exact_aten.product(x, exact_aten.prepare(weight.detach().clone().t())).to(x.dtype)


def kept() -> int:
    """The number of prepared weights that the mode keeps."""
    return len(mode._weights)


def warm(x: Tensor, weight: Tensor) -> None:
    """Uses the weight often enough for its prepared form to be kept."""
    for _ in range(3):
        F.linear(x, weight)
    assert kept() == 1


def write_data(weight: Tensor) -> None:
    weight.data.mul_(2)


def write_data_as_a_lora_merge_does(weight: Tensor) -> None:
    weight.data += randn(*weight.shape, seed=9).to(weight.dtype)


def write_numpy(weight: Tensor) -> None:
    weight.detach().view(torch.int16).numpy()[0, 0] ^= 1


def write_one_row(weight: Tensor) -> None:
    with torch.no_grad():
        weight[3] = 0


def swap_rows(weight: Tensor) -> None:
    weight.data.copy_(weight.data.flip(0))


def swap_columns(weight: Tensor) -> None:
    weight.data.copy_(weight.data.flip(1))


def new_data(weight: Tensor) -> None:
    weight.data = randn(*weight.shape, seed=5).to(weight.dtype)


WRITES = [
    write_data, write_data_as_a_lora_merge_does, write_numpy, write_one_row, swap_rows, swap_columns, new_data,
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("write", WRITES)
def test_what_is_written_into_a_weight_is_noticed(write: Callable[[Tensor], None], dtype: torch.dtype) -> None:
    x, weight = randn(3, 90, dtype=dtype), torch.nn.Parameter(randn(34, 90, seed=1, dtype=dtype))
    with torch.no_grad(), set_batch_invariant_mode():
        warm(x, weight)
        old_product = F.linear(x, weight)
        assert_bitwise_equal(old_product, fresh(x, weight))
        write(weight)
        for _ in range(4):  # The weight is seen, then kept, then taken from the kept ones.
            assert_bitwise_equal(F.linear(x, weight), fresh(x, weight))
        assert not torch.equal(old_product, F.linear(x, weight))


@pytest.mark.parametrize("inside", [True, False])
def test_weights_of_inference_mode_have_no_version_and_are_noticed_too(inside: bool) -> None:
    x = randn(3, 90)
    with torch.inference_mode(inside):
        weight = randn(34, 90, seed=1)
    with set_batch_invariant_mode():
        with torch.inference_mode():
            warm(x, weight)
            product = F.linear(x, weight)
        with torch.no_grad():
            assert_bitwise_equal(F.linear(x, weight), product)  # The form kept in inference mode serves here.
            with torch.inference_mode():
                weight.mul_(0.3)
            assert_bitwise_equal(F.linear(x, weight), fresh(x, weight))
        assert_bitwise_equal(F.linear(x.requires_grad_(not inside), weight).detach(), fresh(x.detach(), weight))


def test_what_is_kept_goes_with_the_weight_and_with_the_mode() -> None:
    x = randn(3, 90)
    with torch.no_grad():
        with set_batch_invariant_mode():
            weight, other_weight = randn(34, 90, seed=1), randn(34, 90, seed=2)
            warm(x, weight)
            size = mode._weights.size
            assert size >= 12 * 34 * 90
            for _ in range(2):
                F.linear(x, other_weight)
                F.linear(x, other_weight[:20])  # This is another view of the same storage.
            assert kept() == 3
            del other_weight
            gc.collect()
            assert (kept(), mode._weights.size) == (1, size)
            with set_batch_invariant_mode(False):
                assert (kept(), mode._weights.size) == (0, 0)
            warm(x, weight)
        assert (kept(), mode._weights.size) == (0, 0)


def test_a_caller_that_comes_again_may_keep_them() -> None:
    """A step of the engine enters the mode and leaves it; the next one finds the weights prepared."""
    x, weight = torch.randn(2, 8), torch.randn(4, 8)
    for _ in range(2):
        with set_batch_invariant_mode(keep_weights=True):
            F.linear(x, weight)
    assert kept() == 1 and not is_batch_invariant_mode()
    with set_batch_invariant_mode(keep_weights=True):
        del weight
        gc.collect()
        assert kept() == 0
        again = torch.randn(4, 8)
        F.linear(x, again), F.linear(x, again)
    assert kept() == 1
    with set_batch_invariant_mode():
        assert kept() == 1
    assert kept() == 0


def test_operands_met_once_are_not_kept() -> None:
    with torch.no_grad(), set_batch_invariant_mode():
        for seed in range(9):
            y = randn(30, 30, seed=seed)
            y @ y.t()
            del y
        assert kept() == 0


def test_the_bound_is_kept_and_restored() -> None:
    x, weights = randn(3, 90), [randn(34, 90, seed=seed) for seed in range(4)]
    bytes_of_one = 34 * 90 * 12 + 34 * 8
    with torch.no_grad(), set_batch_invariant_mode(weight_cache_bytes=2 * bytes_of_one):
        for _ in range(3):
            for weight in weights:
                assert_bitwise_equal(F.linear(x, weight), fresh(x, weight))
        assert kept() == 2 and mode._weights.size <= 2 * bytes_of_one
        with set_batch_invariant_mode(weight_cache_bytes=0):
            assert kept() == 0
            for _ in range(3):
                assert_bitwise_equal(F.linear(x, weights[0]), fresh(x, weights[0]))
            assert kept() == 0
        with set_batch_invariant_mode():
            assert mode._weights.limit == 2 * bytes_of_one  # The bound is the outer one again.
    assert mode._weights.limit == DEFAULT_LIMIT
    for wrong in (-1, 1.5, "1 GB", True):
        with pytest.raises(ConfigError, match="give a number of bytes"):
            set_batch_invariant_mode(weight_cache_bytes=wrong)
    assert not is_batch_invariant_mode()


def test_nan_and_odd_layouts_are_kept_bit_for_bit() -> None:
    weights = PreparedWeights()
    strided = randn(37, 95)[1:34, 2:93]
    strided[3, 3] = torch.nan
    for b in (strided.t(), strided, randn(7, 5)[:, :3], randn(1, 5).t(), randn(5, 3, dtype=torch.bfloat16)):
        num_kept = len(weights)
        for _ in range(3):
            prepared = weights.right(b)
        assert len(weights) == num_kept + 1
        assert torch.equal(prepared.limb.isnan(), exact_aten.prepare(b).limb.isnan())
        assert torch.equal(prepared.limb.nan_to_num(), exact_aten.prepare(b).limb.nan_to_num())


def test_several_threads() -> None:
    """Threads that share prepared weights each get the right ones, within the bound."""
    weights, tensors = PreparedWeights(limit=200_000), [randn(40, 30, seed=seed) for seed in range(30)]
    truth = [exact_aten.prepare(x).limb for x in tensors]
    failures: list[object] = []

    def work(seed: int) -> None:
        for step in range(300):
            at = (seed * 7 + step) % len(tensors)
            if not torch.equal(weights.right(tensors[at]).limb, truth[at]):
                failures.append(at)
            scratch = randn(40, 30, seed=step)
            weights.right(scratch), weights.right(scratch)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert not failures and weights.size <= 200_000
    tensors.clear()
    gc.collect()
    assert (len(weights), weights.size) == (0, 0)
