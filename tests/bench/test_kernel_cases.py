"""`benchmarks rows` and `benchmarks attention`: every kernel is measured, and no wrong result gets a time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import attention, attention_cascade, expert_matmul, measure, packed_matmul, recurrent, row_cases, rows
from benchmarks.report import Failure, Timing
from evalengine.kernels import matmul
from evalengine.kernels.mixture_variant import Router
from evalengine.kernels.recurrent_variant import GatedDelta, Mamba2
from tests.references import reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # Triton interprets the kernels on a CPU


def fake_timer(**seconds: float) -> tuple[measure.Timer, list[str]]:
    """A timer that runs each function once and returns the seconds named for it, else 1; and the names so far timed."""
    timed: list[str] = []

    def timer(functions: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
        for name, function in functions.items():
            function()
            timed.append(name)
        return {name: seconds.get(name.replace(" ", "_").replace("-", "_"), 1.0) for name in functions}

    return timer, timed


TINY = rows.RowShapes(
    rows=3, sampled=3, hidden=(24,), intermediate=(20,), vocab=(37,), heads=((4, 2, 16),), dtype=torch.float16
)


def test_rows_measures_every_kernel() -> None:
    timer, timed = fake_timer(ours=2.0, copy_by_the_driver=1.9, copy_by_a_kernel=1.8)  # the quicker copy counts
    lines = list(rows.measure(timer, DEVICE, TINY))
    assert [line for line in lines if isinstance(line, Failure)] == []
    judged = ["rms_norm", "residual add + rms_norm", "log_softmax", "log_softmax gather", "silu_and_mul"]
    comparisons = [line for line in lines if isinstance(line, Timing)]
    assert [line.what for line in comparisons if line.target == 0.85] == [*judged, "q/k norm + RoPE + KV write"]
    reported = ["mean", "softmax", "Gumbel noise", "sampling", "sampling", "RoPE", "KV write"]
    assert [line.what for line in comparisons if line.target is None] == reported
    assert len({(line.what, line.case) for line in comparisons}) == len(comparisons) == 13
    assert timed == ["ours", "copy by the driver", "copy by a kernel"] * 13
    assert all(line.ratio == pytest.approx(0.9) for line in comparisons)
    moved = {line.what: line.work for line in comparisons}
    assert moved["rms_norm"] == 2 * (3 * 24 * 2 + 24)  # x, the output and the weight have 2 bytes each
    assert moved["mean"] == 2 * (3 * 24 + 3)
    assert moved["log_softmax gather"] == 3 * 37 * 4 + 3 * (8 + 8 + 4)  # logits once; a row has an index, two results
    assert moved["Gumbel noise"] == 3 * 37 * 8 + 3 * (8 + 8)  # noise is float64; a row has a key and a position
    assert moved["sampling"] == 3 * 37 * 4 + 3 * (8 + 8 + 8)  # at least logprobs once; a row has key, position, token
    q, k, v = 3 * 4 * 16, 3 * 2 * 16, 3 * 2 * 16
    assert moved["RoPE"] == 2 * (2 * q + 2 * 3 * 8)
    assert moved["KV write"] == 2 * 2 * (k + v) + 3 * 8
    assert moved["q/k norm + RoPE + KV write"] == 2 * (2 * (q + k + v) + 2 * 16 + 2 * 3 * 8) + 3 * 8


def test_rows_prints_no_time_for_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    right = row_cases.silu_and_mul
    monkeypatch.setattr(row_cases, "silu_and_mul", lambda gate_up: right(gate_up) * 1.1)
    timer, timed = fake_timer(ours=2.0)
    lines = [line for line in rows.measure(timer, DEVICE, TINY) if line.what == "silu_and_mul"]
    assert len(lines) == 1 and isinstance(lines[0], Failure) and lines[0].wrong
    assert len(timed) == 36  # the wrong result was never timed


@pytest.mark.parametrize(
    "build",
    [
        lambda: row_cases.of_mean(70, 24, torch.float16, DEVICE),
        lambda: row_cases.of_gumbel_noise(3, 37, DEVICE),
        lambda: row_cases.of_sample(3, 37, 0, 1.0, DEVICE),
        lambda: row_cases.of_sample(3, 37, 5, 0.9, DEVICE),
        lambda: row_cases.of_rope(3, (4, 2, 16), torch.float16, DEVICE),
        lambda: row_cases.of_store_kv(3, (4, 2, 16), torch.float16, DEVICE),
    ],
    ids=["mean", "Gumbel noise", "sampling", "sampling with filters", "RoPE", "KV write"],
)
def test_one_wrong_row_is_seen(build: Callable[[], row_cases.RowCase]) -> None:
    """The last row of the first and of the last output is spoilt, whole: a truth may hold some of the columns only."""
    case = build()
    outputs = measure.run_poisoned(case.run)
    case.check(outputs)
    for index in {0, len(outputs) - 1}:
        wrong = [output.clone() for output in outputs]
        wrong[index][-1] = wrong[index][-1].roll(1, 0) if wrong[index].ndim == 4 else wrong[index][-1] * 1.1 + 1
        with pytest.raises(measure.WrongResult):
            case.check(wrong)


@pytest.fixture
def small_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """`benchmarks attention` with shapes that Triton's interpreter can compute."""
    sizes = {"Q_HEADS": 2, "KV_HEADS": 1, "HEAD_DIM": 16, "DTYPE": torch.float16, "LARGE_COPY_BYTES": 1 << 20}
    for name, value in sizes.items():
        monkeypatch.setattr(attention, name, value)
    monkeypatch.setattr(attention, "DECODES", {(2, 70): 0.5})
    monkeypatch.setattr(attention, "DECODE_PAGES", (64,))
    monkeypatch.setattr(attention, "WINDOWS", ((2, 150, 40),))
    monkeypatch.setattr(attention, "PREFILLS", ((1, 33),))


@pytest.mark.usefixtures("small_attention")
def test_decode_is_compared_with_the_bytes_it_must_read() -> None:
    timer, _ = fake_timer(ours=4e-9, copy_by_the_driver=1e-6)
    decode = next(iter(attention.measure(timer, DEVICE)))
    assert isinstance(decode, Timing), decode
    assert decode.work == 2 * 2 * 70 * 16 * 2  # k and v have two sequences of 70 tokens, one head of 16, 2 bytes each
    assert decode.ratio == pytest.approx(decode.work / 4e-9 / ((1 << 20) / 1e-6))
    assert (decode.reference, decode.target) == ("copy bandwidth", 0.5)


@pytest.mark.usefixtures("small_attention")
def test_a_windowed_decode_is_compared_with_a_context_as_long_as_the_window() -> None:
    timer, _ = fake_timer(ours=6e-6, context_40=5e-6)
    (line,) = (line for line in attention.measure(timer, DEVICE) if line.what == "decode attention, window")
    assert isinstance(line, Timing), line
    assert line.reference == "context 40" and line.ratio == pytest.approx(1.2) and line.passed is False
    assert line.work == 2 * 2 * 40 * 16 * 2  # two sequences' k and v of 40 tokens, one head of 16, 2 bytes each


@pytest.mark.usefixtures("small_attention")
def test_prefill_is_judged_by_sdpas_quickest_kernel() -> None:
    timer, _ = fake_timer(ours=0.5, SDPA_flash=0.4)
    lines = [line for line in attention.measure(timer, DEVICE) if line.what == "causal prefill attention"]
    measured = {line.reference: line for line in lines if isinstance(line, Timing)}
    targets = {name: line.target for name, line in measured.items() if line.target}
    assert targets == {"SDPA flash": 0.75}
    assert measured["SDPA flash"].ratio == pytest.approx(0.8)
    assert measured["SDPA flash"].work == 4 * 2 * 16 * (33 * 34 / 2)  # each of two products has the causal pairs only
    assert not any(line.wrong for line in lines if isinstance(line, Failure))  # a kernel that cannot run here says so


@pytest.mark.usefixtures("small_attention")
@pytest.mark.parametrize("rows_of_each", [1, 33])
def test_attention_is_checked_at_both_ends(rows_of_each: int) -> None:
    """A wrong first row and a wrong last row are seen."""
    batch = attention.Batch.random(2, rows_of_each, 33, 64, DEVICE, seed=1)
    output = batch.attend()
    batch.check("attention", output)
    for row in (0, -1):
        wrong = output.clone()
        wrong[row, 1] *= 1.1
        with pytest.raises(measure.WrongResult, match="sequence"):
            batch.check("attention", wrong)


def test_experts_measures_every_product_and_their_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product of which a row has other bytes than the dense one gets no time."""
    torch.manual_seed(0)
    real = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *size, **kind: (real(*size, **kind) * 3).round())  # sums are exact
    sizes = expert_matmul.ExpertShapes((("tiny", Router(5, 2, normed=True), 32, 16),), (3,), torch.float16)
    timer, _ = fake_timer(ours=2.0, copy_by_the_driver=1.9, copy_by_a_kernel=1.8)
    monkeypatch.setattr(expert_matmul, "_choose", lambda *_: torch.tensor([[0, 3], [3, 1], [0, 1]]).int().to(DEVICE))
    lines = list(expert_matmul.measure(timer, DEVICE, sizes))
    assert [(line.what, line.case) for line in lines] == [
        ("experts", "tiny gate_up_proj, 3 tokens"),
        ("experts", "tiny down_proj, 3 tokens"),
        ("experts' choice", "tiny, 3 tokens"),
    ]
    assert [line.work for line in lines if isinstance(line, Timing)] == [3 * 32 * 32 * 2, 3 * 32 * 16 * 2, 9 * 32 * 2]
    right = expert_matmul.expert_matmul.expert_linear
    monkeypatch.setattr(expert_matmul.expert_matmul, "expert_linear", lambda *args: right(*args) + 1)
    (failure, *_) = expert_matmul.measure(timer, DEVICE, sizes)
    assert isinstance(failure, Failure) and "other bytes than the dense" in failure.reason


def test_packed_measures_every_form_and_checks_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter cannot run the product's kernel; here the weight is unpacked first."""
    sizes = packed_matmul.PackedShapes(((24, 128),), ((5, 2, 16, 64),), (3,), (3,), torch.float16)
    timer, _ = fake_timer(ours=2.0, copy_by_the_driver=1.9, copy_by_a_kernel=1.8)

    def real(x: Tensor, weight: Any, bias: None, groups: Any) -> Tensor:
        dense = packed_matmul.packed_matmul.unpack(weight, torch.empty(weight.shape, dtype=x.dtype))
        return (
            matmul.linear(x, dense)
            if groups is None
            else expert_matmul.expert_matmul.expert_linear(x, dense, bias, groups)
        )

    monkeypatch.setattr(packed_matmul.packed_matmul, "fused", real)
    lines = list(packed_matmul.measure(timer, DEVICE, sizes))
    assert [line for line in lines if isinstance(line, Failure)] == [] and len(lines) == 10
    read = [line.work for line in lines if isinstance(line, Timing) and line.target]
    assert read[:4] == [24 * (64 + 4), 24 * (64 + 4), 24 * (64 + 32), 24 * (128 + 4)]
    monkeypatch.setattr(packed_matmul.packed_matmul, "fused", lambda *args: real(*args) + 1)
    (failure, *_) = packed_matmul.measure(timer, DEVICE, sizes)
    assert isinstance(failure, Failure) and "other bytes than the dense" in failure.reason


@pytest.fixture
def small_cascade(monkeypatch: pytest.MonkeyPatch) -> None:
    """`benchmarks cascade` with shapes that Triton's interpreter can compute."""
    for name, value in {"Q_HEADS": 4, "KV_HEADS": 2, "HEAD_DIM": 16, "DTYPE": torch.float16}.items():
        monkeypatch.setattr(attention, name, value)
        monkeypatch.setattr(attention_cascade, name, value)
    cases = attention_cascade.Case(3, 64, 5, target=0.35), attention_cascade.Case(4, 64, 5, families=2)
    monkeypatch.setattr(attention_cascade, "CASES", cases)


@pytest.mark.usefixtures("small_cascade")
def test_cascade_reads_once_and_is_timed_beside_reading_for_each() -> None:
    timer, timed = fake_timer(ours=0.25)
    first, second = attention_cascade.measure(timer, DEVICE)
    assert isinstance(first, Timing) and first.ratio == 0.25 and first.passed and first.work == 2 * (64 + 15) * 64
    assert isinstance(second, Timing) and second.passed is None and second.work == 2 * (128 + 20) * 64
    assert timed == ["ours", "read for each"] * 2
    batch = attention_cascade.batch_of(attention_cascade.Case(3, 64, 5), DEVICE)
    assert batch.metadata.shared is not None and batch.metadata.shared.tokens.tolist() == [[64]] * 3


@pytest.mark.usefixtures("small_cascade")
def test_cascade_prints_no_time_for_other_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    real = attention_cascade.Batch.attend

    def attend(self: attention_cascade.Batch) -> Tensor:
        return real(self) + (2**-10 if self.metadata.shared is None else 0)

    monkeypatch.setattr(attention_cascade.Batch, "attend", attend)
    timer, timed = fake_timer()
    lines = list(attention_cascade.measure(timer, DEVICE))
    assert not timed and all(isinstance(line, Failure) and "other bytes" in line.reason for line in lines)


def by_tokens(
    inputs: Any, state: Any, starts: Tensor, lengths: Tensor, slots: Tensor, decodes: int, chunks: Any, variant: Any,
    closes: int,
) -> Tensor:  # fmt: skip
    """Stand in for a recurrence's kernel, token by token: the interpreter takes 10 s for a step of the chunked one."""
    mixed, *others = inputs
    per_token, of_heads = (others[:-2], others[-2:]) if isinstance(variant, GatedDelta) else (others[:1], others[1:])
    outputs = []
    for first, last, slot in zip(starts[:-1], starts[1:], slots.tolist(), strict=True):
        rows = [x[first:last] for x in per_token]
        output, new = recurrent._truth(variant, mixed[first:last], rows, of_heads, state.state[slot])
        outputs.append(output)
        state.state[slot] = new
    return torch.cat(outputs).to(mixed.dtype)


def fla_delta(
    q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, A_log: Tensor, dt_bias: Tensor,
    initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None, **flags: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Stand in for both kernels of fla-core's gated delta rule. States: [S, Hv, K, V]; decodes have no cu_seqlens."""
    kernels = "use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "output_final_state"
    assert flags == dict.fromkeys(kernels, True) and all(x.is_contiguous() for x in (q, k, v, g, beta))
    starts = list(range(len(q) + 1)) if cu_seqlens is None else cu_seqlens.tolist()
    rows = [x.flatten(0, 1) for x in (q, k, v, g, beta)]
    zeros = torch.zeros(len(starts) - 1, v.shape[2], k.shape[3], v.shape[3], device=v.device)
    states = zeros if initial_state is None else initial_state
    results = [
        reference.gated_delta(*(x[first:last] for x in rows), A_log, dt_bias, states[s].mT)
        for s, (first, last) in enumerate(pairwise(starts))
    ]
    output = torch.cat([output for output, _ in results]).view(v.shape)
    return output.to(v.dtype), torch.stack([state.mT.float() for _, state in results])


def fla_conv(x: Tensor, weight: Tensor, *, initial_state: Tensor, cu_seqlens: Tensor, **flags: Any) -> list[Tensor]:
    """Stand in for fla-core's convolution. States: [S, C, K], of which the first input is unused."""
    assert flags == {"activation": "silu", "output_final_state": True}
    parts = enumerate(pairwise(cu_seqlens.tolist()))
    before = initial_state[..., 1:].mT
    return [torch.cat([reference.causal_conv(x[0, i:j], weight, None, before[s], silu=True) for s, (i, j) in parts])]


def fla_conv_step(x: Tensor, cache: Tensor, *, weight: Tensor, activation: str) -> list[Tensor]:
    starts, flags = torch.arange(len(x) + 1), {"activation": activation, "output_final_state": True}
    return fla_conv(x[None], weight, initial_state=cache, cu_seqlens=starts, **flags)


SMALL_CASES = ("decode, batch 2", "prefill, 2 x 3")
FLA_CASES = [(what, case) for what in ("recurrence, GatedDelta", "convolution") for case in SMALL_CASES]


@pytest.fixture
def small_recurrences(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`benchmarks recurrent` with small shapes and stubs of fla-core; returns that of `fla.ops.gated_delta_rule`."""
    sizes: dict[str, Any] = {"DELTA": GatedDelta(1, 2, 16, 8, 4), "DTYPE": torch.float16, "LARGE_COPY_BYTES": 1 << 10}
    sizes["MAMBA"] = Mamba2(2, 8, 1, 16, 4, conv_bias=True, bias=False, dt_limits=(0.0, None))
    sizes |= {"DECODES": ((2, 1),), "PREFILLS": ((2, 3),), "CONVOLUTION_TARGETS": {(2, 1): 1e-5, (2, 3): 1e-5}}
    for name, value in sizes.items():
        monkeypatch.setattr(recurrent, name, value)
    monkeypatch.setattr(recurrent.gated_delta, "gated_delta", by_tokens)
    monkeypatch.setattr(recurrent.mamba2, "mamba2", by_tokens)
    delta, convolution = ModuleType("fla.ops.gated_delta_rule"), ModuleType("fla.modules.convolution")
    vars(delta).update(chunk_gated_delta_rule=fla_delta, fused_recurrent_gated_delta_rule=fla_delta)
    vars(convolution).update(causal_conv1d=fla_conv, causal_conv1d_update=fla_conv_step)
    package = ModuleType("fla")
    package.__spec__ = ModuleSpec("fla", None)
    for module in (package, delta, convolution):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return delta


@pytest.mark.usefixtures("small_recurrences")
def test_recurrences_are_compared_with_fla() -> None:
    timer, timed = fake_timer(ours=2.0, fla_core=1.5)
    lines = list(recurrent.measure(timer, DEVICE))
    assert [line for line in lines if isinstance(line, Failure)] == []
    compared = [line for line in lines if isinstance(line, Timing) and line.reference == "fla-core"]
    assert [(line.what, line.case) for line in compared] == FLA_CASES
    assert all(line.ratio == 0.75 and line.passed is None for line in compared)
    assert len(lines) == 6 + 4 and timed.count("ours") == 6 + 4


def wrong(*args: Any, **settings: Any) -> tuple[Tensor, Tensor]:
    output, state = fla_delta(*args, **settings)
    output[-1, -1, -1] += output.abs().max()  # the last token's last head
    return output, state


def failing(*args: Any, **settings: Any) -> tuple[Tensor, Tensor]:
    raise RuntimeError("out of resource: shared memory")


@pytest.mark.parametrize(("kernel", "is_wrong", "reason"), [(wrong, True, "error"), (failing, False, "shared memory")])
def test_a_failure_of_fla_is_one_line(
    small_recurrences: ModuleType, kernel: Callable[..., Any], is_wrong: bool, reason: str
) -> None:
    """It gets no time, and all other lines are measured."""
    vars(small_recurrences).update(fused_recurrent_gated_delta_rule=kernel)
    timer, timed = fake_timer()
    lines = list(recurrent.measure(timer, DEVICE))
    (failure,) = (line for line in lines if isinstance(line, Failure))
    assert (failure.what, failure.case) == ("recurrence, GatedDelta", "decode, batch 2, fla-core")
    assert failure.wrong is is_wrong and reason in failure.reason
    assert len(lines) == 6 + 4 and timed.count("fla-core") == 3


@pytest.mark.usefixtures("small_recurrences")
def test_fla_may_be_absent_but_not_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package it has no line; if it cannot be imported, each of its lines says why."""
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", None)
    failures = [line for line in recurrent.measure(fake_timer()[0], DEVICE) if isinstance(line, Failure)]
    assert [line.what for line in failures] == ["recurrence, GatedDelta"] * 2
    assert all("import of fla.ops.gated_delta_rule" in line.reason and not line.wrong for line in failures)
    monkeypatch.setitem(sys.modules, "fla", None)
    lines = list(recurrent.measure(fake_timer()[0], DEVICE))
    assert len(lines) == 6 and all(isinstance(line, Timing) and line.reference != "fla-core" for line in lines)
