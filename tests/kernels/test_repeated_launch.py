"""Repeated launches: Triton repeats those that the driver cannot; on a GPU repeats give the first launch's bytes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from evalengine.kernels import activation, matmul, rms_norm
from evalengine.kernels.launching import launch
from evalengine.layers.metadata import AttentionMetadata
from tests.bitwise import assert_bitwise_equal, count_differing
from tests.kernels.paged_batch import PagedBatch

GRID = (7, 2, 3)


def test_triton_repeats_what_the_driver_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton repeats the launch on its device, with the varying tensors replaced and the other arguments unchanged."""
    calls: list[tuple] = []
    current: list[int] = []  # the devices made current, the innermost last

    @contextmanager
    def device(index: int) -> Iterator[None]:
        current.append(index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)

    def run(*args: Any) -> None:
        assert current == [1], "Triton takes the current device's stream"
        calls.append(args)

    variant = launch._Variant({GRID: run}, (64, True), 1)  # `run` is no compiled kernel, so the driver cannot launch it
    assert variant.direct is None
    x, y, new = torch.zeros(2), torch.zeros(2), torch.ones(2)
    descriptor = SimpleNamespace(base=x, shape=[2], strides=[1])
    replayer = launch.Launch(variant, GRID, (x, 3, descriptor, None, y)).replayer(0, 2)
    replayer(new, y)
    ((first, number, second, nothing, last, *constants),) = calls
    assert first is new and number == 3 and second.base is y and second.shape == [2] and nothing is None and last is y
    assert constants == [64, True] and descriptor.base is x


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """`cache_launch` drops old entries beyond MAX_CACHED_LAUNCHES, never the newest."""
    monkeypatch.setattr(launch, "MAX_CACHED_LAUNCHES", 2)
    memory: dict[tuple, Any] = {}
    for i in range(5):
        launch.cache_launch(memory, (i,), print)
        assert 1 <= len(memory) <= 2 and (i,) in memory


def randn(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda", dtype=torch.float32).bfloat16()


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 17, 64, 129, 1024])
@pytest.mark.parametrize("biased", [False, True])
def test_products_repeated_with_other_operands(m: int, biased: bool) -> None:
    """Later calls repeat the first one's launch, with the reference's bytes for their own operands."""
    for seed in range(3):
        x, weight = randn(m, 576, seed=seed), randn(1536, 576, seed=seed + 10)
        bias = randn(1536, seed=seed + 20) if biased else None
        expected = matmul.matmul(x, weight.t(), bias, schedule=matmul.REFERENCE)
        assert_bitwise_equal(matmul.linear(x, weight, bias), expected)
    odd = randn(m, 577, seed=5)[:, 1:]  # the same shape, another alignment and stride
    assert_bitwise_equal(matmul.linear(odd, weight), matmul.linear(odd.contiguous(), weight))
    assert count_differing(matmul.linear(odd, weight), matmul.linear(x, weight)) > 0


@pytest.mark.gpu
def test_a_new_thread_repeats_a_launch_first() -> None:
    """A thread whose first CUDA call is a repeated launch gets the right bytes."""
    x, weight = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for shape in ((16, 512), (512, 512)))
    expected = matmul.linear(x, weight)
    assert_bitwise_equal(matmul.linear(x, weight), expected)
    results: list[Any] = []

    def work() -> None:
        try:
            results.append(matmul.linear(x, weight))
        except RuntimeError as error:
            results.append(error)

    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    for out in results:
        assert_bitwise_equal(out, expected)


@pytest.mark.gpu
def test_rows_repeated_with_other_operands() -> None:
    """Repeats of row kernels with other operands have the bytes of first launches."""
    for seed in range(3):
        x, residual, weight = randn(33, 576, seed=seed), randn(33, 576, seed=seed + 10), randn(576, seed=seed + 20)
        for operands, schedule in (((x, residual), (1, 2)), ((residual, x), (4, 8))):
            expected = rms_norm.add_rms_norm(*operands, weight, 1e-6, _schedule=schedule)
            for actual, wanted in zip(rms_norm.add_rms_norm(*operands, weight, 1e-6), expected, strict=True):
                assert_bitwise_equal(actual, wanted)
        strided = randn(33, 2 * 600, seed=seed)[:, :1152]
        assert_bitwise_equal(activation.silu_and_mul(strided), activation.silu_and_mul(strided.clone()))


@pytest.mark.gpu
@pytest.mark.parametrize("lens", [[(1, 40), (1, 1500), (1, 3)], [(1, 900), (70, 300), (1, 1)], [(200, 200)]])
def test_a_layer_repeats_the_layer_before(lens: list[tuple[int, int]]) -> None:
    """Three layers that share one batch's launches have the bytes that each has with a batch of its own."""
    shared = PagedBatch.random(lens, 8, 2, 128, 64, torch.bfloat16, stale=0.0)
    results = []
    for seed in range(3):
        layer = replace(
            shared, q=randn(*shared.q.shape, seed=seed), k_cache=randn(*shared.k_cache.shape, seed=seed + 10)
        )
        results.append(layer.run())
        page, query_lens, kv_lens = shared.k_cache.shape[1], [n for n, _ in lens], [kv for _, kv in lens]
        own = AttentionMetadata.build(query_lens, kv_lens, shared.pages, page, torch.device("cuda"))
        assert_bitwise_equal(results[-1], replace(layer, metadata=own).run())
    assert len(shared.metadata.plans) >= 1
    assert count_differing(results[0], results[2]) > 0


@pytest.mark.gpu
def test_every_variant_on_this_triton_goes_by_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver launches every kernel of a layer: with pointers, with tensor maps, or fused. No other test uses these
    shapes, so nothing is repeated from memory; kernels of clusters, which only Triton launches, are not among them."""
    monkeypatch.setattr(launch, "_variants", {})
    x, weight = randn(300, 592, seed=0), randn(1536, 592, seed=1)
    for schedule in ("pointer 64x64x64 w4 s4 g8", "tma 128x128x64 w4 s4 g8"):
        matmul.matmul(x, weight.t(), schedule=matmul.MatmulSchedule.parse(schedule))
    rms_norm.add_rms_norm(x, randn(300, 592, seed=2), randn(592, seed=3), 1e-6)
    activation.silu_and_mul(randn(300, 2 * 592, seed=4))
    PagedBatch.random([(1, 40), (70, 300), (1, 1500)], 8, 2, 128, 64, torch.bfloat16, stale=0.0).run()
    assert len(launch._variants) >= 5
    by_triton = [variant.compiled.name for variant in launch._variants.values() if variant.direct is None]
    assert not by_triton
