"""`verify`: equal schedules pass; one that is wrong or does not run is dropped with a warning and never chosen again.

Under the interpreter a dot product is numpy's, whose order of additions follows the tile, so the data there are small
integers, whose sums are exact.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from evalengine.kernels import log_softmax, matmul, matmul_schedules, softmax
from evalengine.kernels.matmul_device import Gpu
from evalengine.kernels.shapes import LinearShape, Shapes
from evalengine.layers.cuda import NativeOps
from evalengine.layers.embedding import rows_per_slice
from evalengine.layers.parallel import TensorParallel
from evalengine.verification import comparisons, operands, verify
from evalengine.verification.comparisons import verify_rows
from evalengine.verification.verdict import MODULES, KernelsVerdict, count_differing
from tests.verification.tiny_shapes import SHAPE, TINY, chosen, verified
from tests.verification.verify_double import DEVICE
from tests.verification.verify_double import alone as alone  # The fixture is used by every test here.


@pytest.fixture
def untuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedules as on a GPU without a table: one for 1 to 16 rows, another for thousands."""
    monkeypatch.setattr(matmul_schedules, "_tuned", lambda name: {})
    monkeypatch.setattr(matmul_schedules, "_choose", matmul_schedules._choose.__wrapped__)  # No choice is remembered.


def check_matmul(
    dtype: torch.dtype = torch.float16, rows: int = 33, out: torch.dtype | None = None, biased: bool = False
) -> KernelsVerdict:
    """The verdict on the products of SHAPE."""
    verdict = KernelsVerdict()
    comparisons.verify_matmul(verdict, [LinearShape(*SHAPE, biased)], dtype, DEVICE, out, max_rows=rows)
    return verdict


def wrong_for(schedule: matmul.MatmulSchedule, real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A `matmul` that flips the last bit of one element under the schedule."""

    def product(*args: Any, **options: Any) -> Tensor:
        c = real(*args, **options)
        if options.get("schedule") == schedule:
            c.view({2: torch.int16, 4: torch.int32}[c.element_size()])[-1, -1] ^= 1
        return c

    return product


@pytest.mark.parametrize(
    ("dtype", "out"), [(torch.float16, None), (torch.float16, torch.float32), (torch.float32, None)]
)
def test_equal_schedules_pass(dtype: torch.dtype, out: torch.dtype | None) -> None:
    verdict = check_matmul(dtype, out=out)
    assert not verdict.dropped and not verdict.failed
    assert verdict.checked > len(verdict.schedules) > 1, "one of them with masked rows and without"


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.usefixtures("untuned")
def test_a_schedule_wrong_only_where_rows_are_masked_or_only_where_not_is_dropped(
    masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One schedule serves 1 row and 15 rows, and where half a tile's rows are masked it is another kernel."""
    bad, real = chosen(1), matmul.matmul
    assert bad == chosen(15) and bad.masks_rows(1) and not bad.masks_rows(15)
    wrong = wrong_for(bad, real)

    def product(a: Tensor, *operands: Any, **options: Any) -> Tensor:
        return (wrong if bad.masks_rows(len(a)) == masked else real)(a, *operands, **options)

    monkeypatch.setattr(matmul, "matmul", product)
    (drop,) = check_matmul().dropped
    assert matmul.MatmulSchedule(**drop["schedule"]) == bad and drop["where"].startswith("M7 " if masked else "M15 ")


@pytest.mark.parametrize(("n", "rows"), [(256, 33), (256, 4000), (40, 4000)])
def test_a_persistent_schedule_is_compared_where_a_program_has_a_second_tile(
    n: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    persistent = matmul.MatmulSchedule("tma", 128, 128, 64, persistent=True)
    monkeypatch.setattr(matmul_schedules, "_choose", lambda *key: persistent if key[2] > 16 else matmul.REFERENCE)
    gpu = Gpu("GPU X", 4, True, None)
    rows_compared = dict(comparisons._chosen(gpu, n, 64, torch.float16, torch.float16, False, 8192, rows))
    looping_rows = {256: 383, 40: 639}[n]  # There are 4 programs, and N makes 2 tiles or 1.
    assert rows_compared[persistent] == (max(rows, looping_rows)) and persistent.loops(looping_rows, n, 4)
    assert not persistent.loops(looping_rows - 128, n, 4)
    few = dict(comparisons._chosen(gpu, n, 64, torch.float16, torch.float16, False, 100, rows))
    assert few[persistent] == min(rows, 100), "an engine of 100 rows has no second tile"


@pytest.mark.parametrize("biased", [False, True])
def test_a_schedule_wrong_only_with_a_bias_is_dropped_where_there_is_one(
    biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bias makes another kernel of a schedule, with another epilogue, other registers and another order of
    instructions."""
    bad, real = chosen(1), matmul.matmul
    wrong = wrong_for(bad, real)
    monkeypatch.setattr(
        matmul, "matmul", lambda *args, **options: (real if options["bias"] is None else wrong)(*args, **options)
    )
    dropped = check_matmul(biased=biased).dropped
    assert {matmul.MatmulSchedule(**drop["schedule"]) for drop in dropped} == ({bad} if biased else set())
    assert all("with a bias" in drop["where"] for drop in dropped)


@pytest.mark.parametrize("names", [(), ("attention_bias",), ("attention_bias", "attention_output_bias")])
def test_the_products_that_a_model_biases_are_compared_with_a_bias(
    names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[tuple[int, int, bool]] = []
    monkeypatch.setattr(verify, "verify_matmul", lambda verdict, more, *args: shapes.extend(more))
    for name in ("verify_attention", "verify_rows"):
        monkeypatch.setattr(verify, name, lambda *args: None)
    verified(replace(TINY, **dict.fromkeys(names, True)))
    attention_layers = [(64, 32, "attention_bias" in names), (32, 32, "attention_output_bias" in names)]
    assert shapes == [*attention_layers, (48, 32, False), (32, 24, False), (100, 32, False)]


@pytest.mark.usefixtures("untuned")
def test_a_wrong_schedule_is_dropped_and_never_chosen_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bad, for_many_rows = chosen(1), chosen(8192)
    assert len({bad, for_many_rows, matmul.REFERENCE}) == 3
    monkeypatch.setattr(matmul, "matmul", wrong_for(bad, matmul.matmul))
    with caplog.at_level(logging.WARNING):
        drop, same = check_matmul().dropped
    assert drop["schedule"] == same["schedule"] and (drop["where"][:3], same["where"][:3]) == ("M7 ", "M15")
    assert drop["kernel"] == "matmul" and "1 of " in drop["reason"]
    assert matmul.MatmulSchedule(**json.loads(json.dumps(drop["schedule"]))) == bad
    assert "is not used on this machine" in caplog.text and str(bad) in caplog.text
    assert chosen(1) == matmul.REFERENCE and chosen(8192) == for_many_rows


@pytest.mark.usefixtures("untuned")
def test_a_schedule_that_does_not_run_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    bad, real = chosen(1), matmul.matmul

    def product(*args: Any, **options: Any) -> Tensor:
        if options.get("schedule") == bad:
            raise RuntimeError("out of shared memory")
        return real(*args, **options)

    monkeypatch.setattr(matmul, "matmul", product)
    drop, _ = check_matmul().dropped
    assert drop["reason"] == "does not run: RuntimeError: out of shared memory" and chosen(1) == matmul.REFERENCE


def test_a_reference_that_differs_fails() -> None:
    """The reference takes the place of dropped schedules, so that dropping it would change nothing."""
    verdict, x = KernelsVerdict(), torch.ones(2, device=DEVICE)
    for module in MODULES:
        reference = MODULES[module].REFERENCE
        verdict.compare(module, reference, "here", lambda: x * 2, x)
        assert verdict.failed[-1] == f"{module}, the reference schedule (here): 2 of 2 elements differ"
    assert not verdict.dropped and verdict.checked == len(MODULES) == len(verdict.failed)


@pytest.mark.parametrize(
    ("error", "lasting"), [(RuntimeError("busy"), False), (OutOfResources(300_000, 232_448, "shared memory"), True)]
)
def test_an_error_that_may_pass_is_not_cached(error: Exception, lasting: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def product(a: Tensor, b: Tensor, bias: Any = None, out_dtype: Any = None, schedule: Any = None) -> Tensor:
        if schedule != matmul.REFERENCE:
            raise error
        return torch.zeros(len(a), b.shape[1], dtype=out_dtype or a.dtype, device=a.device)

    monkeypatch.setattr(matmul, "matmul", product)
    for name in ("verify_attention", "verify_rows"):
        monkeypatch.setattr(verify, name, lambda *args: None)
    first = verified()
    assert first["dropped"] and matmul_schedules.excluded
    second = verified()
    assert second["cached"] == lasting and second["dropped"] == first["dropped"]


def test_a_second_verdict_drops_what_the_first_one_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the drop, the cache would hold the second verdict for the next process as if nothing differed."""
    monkeypatch.setattr(matmul, "matmul", wrong_for(chosen(1), matmul.matmul))
    assert check_matmul().dropped == check_matmul().dropped != []


@pytest.mark.parametrize(("vocab_size", "most"), [(1 << 20, 127), (1 << 22, 31), (1000, comparisons.MAX_ROWS)])
def test_lm_head_is_compared_for_the_slices_it_computes(
    vocab_size: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []

    def product(a: Tensor, b: Tensor, bias: Any = None, out_dtype: Any = None, schedule: Any = None) -> Tensor:
        if out_dtype == torch.float32:
            rows.append(len(a))
        return torch.zeros(1, dtype=out_dtype or a.dtype)

    monkeypatch.setattr(matmul, "matmul", product)
    monkeypatch.setattr("evalengine.verification.verdict.count_differing", lambda *args: 0)
    monkeypatch.setattr(operands, "Random", lambda *args: lambda *shape: torch.zeros(1).expand(*shape))
    for name in ("verify_attention", "verify_rows"):
        monkeypatch.setattr(verify, name, lambda *args: None)
    rows_at_once = rows_per_slice(vocab_size, torch.device("cuda"))
    verified(replace(TINY, vocab_size=vocab_size), device=torch.device("cpu"), lm_head_rows=rows_at_once)
    assert max(rows) == most


def test_native_verifies_what_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """`native` verifies its slices of logits, its page size, and this rank's part of the vocabulary, cut between
    chunks."""
    parts: list[Any] = []
    layers: list[Any] = []
    monkeypatch.setattr(verify, "verify_matmul", lambda verdict, shapes, *more: layers.append((shapes, more[-1])))
    monkeypatch.setattr(verify, "verify_rows", lambda *args: None)
    monkeypatch.setattr(verify, "verify_attention", lambda *args: parts.append(args[4]))
    monkeypatch.setattr(verify, "verify_parted_read_out", lambda verdict, vocabulary, *args: parts.append(vocabulary))
    ops = NativeOps(torch.float16, DEVICE)
    ops.tp = TensorParallel(1, 2, group=SimpleNamespace())
    shapes = replace(TINY, vocab_size=10_000)
    assert ops.verify_kernels(shapes, block_size=16)["failed"] == []
    assert parts == [[range(4096), range(4096, 10_000)], 16]
    assert layers[0][0] == list(shapes.linear_layers(2).values())
    assert layers[1] == ([LinearShape(5904, 32)], rows_per_slice(10_000, DEVICE))


def test_minus_zero_and_a_nan_are_bytes_too() -> None:
    values = torch.tensor([0.0, 1.0, float("nan")])
    assert count_differing(values, values.clone()) == 0
    assert count_differing(values, torch.tensor([-0.0, 1.0, float("nan")])) == 1


def rows_verdict() -> KernelsVerdict:
    """The verdict on the kernels that work row by row, at small sizes."""
    verdict = KernelsVerdict()
    verify_rows(verdict, 96, 2, 1, 16, 101, torch.float16, DEVICE, rows=5, most_logits=800)
    return verdict


def test_fused_kernels_equal_their_parts() -> None:
    verdict = rows_verdict()
    assert not verdict.failed and not verdict.dropped and verdict.checked == 17


def test_a_fused_kernel_that_differs_fails(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    real = log_softmax.read_out
    monkeypatch.setattr(log_softmax, "read_out", lambda *args: (real(*args)[0], real(*args)[1] * (1 + 2**-20)))
    failed = rows_verdict().failed
    assert len(failed) == 4 and all(text in caplog.text for text in failed)
    assert failed[0].startswith("read_out V101, 7 rows, a column a row, against log_softmax: ")


def test_a_greedy_token_that_differs_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    real = log_softmax.read_out
    monkeypatch.setattr(log_softmax, "read_out", lambda *args: (real(*args)[0] + 1, real(*args)[1]))
    assert [text.split(": ")[1] for text in rows_verdict().failed] == ["the greedy token"] * 4


def test_a_softmax_schedule_that_differs_or_does_not_run_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    real, x = log_softmax.log_softmax, torch.zeros(3, 101, device=DEVICE)
    bad = softmax.choose(x)
    assert bad != softmax.REFERENCE

    def planted(x: Tensor, *, _schedule: softmax.SoftmaxSchedule) -> Tensor:
        if _schedule == bad and len(x) == 1:
            raise RuntimeError("too many blocks in cooperative launch")
        return real(x) + (2**-20 if _schedule == bad else 0)

    monkeypatch.setattr(log_softmax, "log_softmax", planted)
    verdict = rows_verdict()
    assert [drop["kernel"] for drop in verdict.dropped] == ["softmax"] * 2 and not verdict.failed
    assert "too many blocks" in verdict.dropped[1]["reason"]
    assert softmax.choose(x) == softmax.REFERENCE


@pytest.mark.gpu
def test_a_real_model_on_this_gpu() -> None:
    """On this GPU no schedule for a model of Qwen3-0.6B's sizes differs."""
    shapes = Shapes(1024, 3072, 16, 8, 128, 151936, attention_bias=True)
    verdict = verified(shapes, torch.bfloat16, lm_head_rows=rows_per_slice(151936, DEVICE), page_sizes=(16, 64))
    assert not verdict["dropped"] and not verdict["failed"] and verdict["schedules"] > 5
