"""The benchmarks: arithmetic of ratios, the report, the checks before a time, and the command's errors."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from evalengine.__main__ import main
from evalengine.bench import attention, breakdown, cli, forward, measure, row_cases, rows
from evalengine.bench.models import published_spec
from evalengine.bench.report import Comparison, Failure, Report, markdown, summary, table, write
from evalengine.commands.bench import BENCH, BENCHES, MODELS
from evalengine.layers import create_ops

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # where the kernels run
ABOUT: dict[str, Any] = {
    "command": "python -m evalengine bench",
    "date": "2026-01-01T00:00:00+00:00",
    "code": {"commit": "abc", "dirty": True},
    "gpu": "Some GPU (80 GB)",
    "driver": "1.2",
    "cuda": "13.0",
    "libraries": {"torch": "2.11", "flash-attn": None},
}


def fake_timer(**seconds: float) -> tuple[measure.Timer, list[str]]:
    """A timer that runs each function once and gives the seconds named for it, else 1; and what it was given."""
    asked: list[str] = []

    def timer(functions: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
        for name, function in functions.items():
            function()
            asked.append(name)
        return {name: seconds.get(name.replace(" ", "_"), 1.0) for name in functions}

    return timer, asked


# -- ratios and verdicts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "ours", "theirs", "target", "ratio", "passed", "verdict"),
    [
        ("speed", 2.0, 1.9, 0.85, 0.95, True, "reached"),
        ("speed", 2.0, 1.7, 0.85, 0.85, True, "reached"),
        ("speed", 2.0, 1.36, 0.85, 0.68, False, "missed by 20.0%"),
        ("time", 1.0, 2.0, 1.03, 0.5, True, "reached"),
        ("time", 2.06, 2.0, 1.03, 1.03, True, "reached"),
        ("time", 2.266, 2.0, 1.03, 1.133, False, "missed by 10.0%"),
        ("time", 9.0, 1.0, None, 9.0, None, "reported"),
    ],
)
def test_ratio_and_verdict(
    kind: Any, ours: float, theirs: float, target: float | None, ratio: float, passed: bool | None, verdict: str
) -> None:
    line = Comparison("what", "case", ours, "beside", theirs, kind, target)
    assert line.ratio == pytest.approx(ratio)
    assert (line.passed, line.verdict) == (passed, verdict)


def a_report() -> Report:
    lines = [
        Comparison("rows", "8 | 9", 2e-4, "copy", 1e-4, "speed", 0.85, work=4e8, unit="TB/s"),
        Comparison("step", "decode", 2e-3, "fast", 2e-3, "time", 1.03),
        Failure("rows", "wrong one", "relative error 1.0e+00"),
    ]
    return Report(list(lines), {"profile": {"kernel": 1.5}})


def test_table_says_times_rates_targets_and_failures() -> None:
    missed, reached, wrong = table(a_report().lines)[2:]
    assert missed == (
        "| rows | 8 / 9 | 200.0 us, 2.00 TB/s | copy | 100.0 us, 4.00 TB/s | 0.500 | ≥ 0.85 | missed by 41.2% |"
    )
    assert reached == "| step | decode | 2.00 ms | fast | 2.00 ms | 1.000 | ≤ 1.03 | reached |"
    assert "WRONG RESULT: relative error" in wrong and " us" not in wrong  # no time beside a wrong result
    assert summary(a_report()) == "1 of 2 targets reached; 1 lines without a time."


def test_report_is_written_as_json_and_markdown(tmp_path: Path) -> None:
    json_file, table_file = write(a_report(), ABOUT, tmp_path / "new" / "folder", "speed")
    assert json_file.name == "speed-some-gpu-80-gb.json" and table_file.name == "speed-some-gpu-80-gb.md"
    content = json.loads(json_file.read_text())
    assert content["environment"] == ABOUT and content["explanations"] == {"profile": {"kernel": 1.5}}
    assert [line.get("passed") for line in content["lines"]] == [False, True, None]
    assert content["lines"][0]["ratio"] == 0.5 and "seconds" not in content["lines"][2]
    text = table_file.read_text()
    assert text == markdown(a_report(), ABOUT) and text.startswith("# Speed on Some GPU (80 GB)\n")
    assert "flash-attn absent" in text and "commit abc (with changes)" in text


# -- a check before every time ---------------------------------------------------------------------------------------


def test_check_close_sees_one_wrong_element() -> None:
    truth = torch.randn(64, 128, dtype=torch.float64)
    result = truth.half()
    measure.check_close("x", result, truth)
    result[40, 7] += 0.05
    with pytest.raises(measure.WrongResult, match=r"x: relative error"):
        measure.check_close("x", result, truth)
    result[40, 7] = torch.nan
    with pytest.raises(measure.WrongResult):
        measure.check_close("x", result, truth)


@pytest.mark.gpu
def test_poison_shows_an_element_that_is_not_written() -> None:
    def run(written: int) -> list[torch.Tensor]:
        out, ids = torch.empty(1 << 20, device="cuda"), torch.empty(1 << 20, dtype=torch.int64, device="cuda")
        out[:written], ids[:written] = 1, 1
        return [out, ids]

    out, ids = measure.run_poisoned(lambda: run((1 << 20) - 1))
    assert out[-1].isnan() and ids[-1] == -1 and out[:-1].eq(1).all()
    out, ids = measure.run_poisoned(lambda: run(1 << 20))
    assert out.eq(1).all() and ids.eq(1).all()


def test_a_case_that_breaks_becomes_a_line() -> None:
    def wrong() -> list[Any]:
        raise measure.WrongResult("off by 3")

    def broken() -> list[Any]:
        raise RuntimeError("first line\nsecond")

    assert measure.guarded("what", "case", wrong) == [Failure("what", "case", "off by 3")]
    assert measure.guarded("what", "case", broken) == [Failure("what", "case", "RuntimeError: first line", wrong=False)]


# -- rows and attention under the interpreter ------------------------------------------------------------------------

TINY = rows.Sizes(
    rows=3, sampled=3, hidden=(24,), intermediate=(20,), vocab=(37,), heads=((4, 2, 16),), dtype=torch.float16
)


def test_rows_measures_every_kernel() -> None:
    timer, asked = fake_timer(ours=2.0, copy_by_the_driver=1.9, copy_by_a_kernel=1.8)  # the quicker one counts
    lines = list(rows.measure(timer, DEVICE, TINY))
    assert [line for line in lines if isinstance(line, Failure)] == []
    judged = ["rms_norm", "residual add + rms_norm", "log_softmax", "log_softmax gather", "silu_and_mul"]
    comparisons = [line for line in lines if isinstance(line, Comparison)]
    assert [line.what for line in comparisons if line.target == 0.85] == [*judged, "q/k norm + RoPE + KV write"]
    reported = ["mean", "softmax", "Gumbel noise", "sampling", "sampling", "RoPE", "KV write"]
    assert [line.what for line in comparisons if line.target is None] == reported
    assert len({(line.what, line.case) for line in comparisons}) == len(comparisons) == 13
    assert asked == ["ours", "copy by the driver", "copy by a kernel"] * 13
    assert all(line.ratio == pytest.approx(0.9) for line in comparisons)
    moved = {line.what: line.work for line in comparisons}
    assert moved["rms_norm"] == 2 * (3 * 24 * 2 + 24)  # x, the output, the weight: 2 bytes each
    assert moved["mean"] == 2 * (3 * 24 + 3)
    assert moved["log_softmax gather"] == 3 * 37 * 4 + 3 * (8 + 8 + 4)  # logits once, an index, two results
    assert moved["Gumbel noise"] == 3 * 37 * 8 + 3 * (8 + 8)  # float64; a key and a position
    assert moved["sampling"] == 3 * 37 * 4 + 3 * (8 + 8 + 8)  # the floor: logprobs once, key, position, token
    q, k, v = 3 * 4 * 16, 3 * 2 * 16, 3 * 2 * 16
    assert moved["RoPE"] == 2 * (2 * q + 2 * 3 * 8)
    assert moved["KV write"] == 2 * 2 * (k + v) + 3 * 8
    assert moved["q/k norm + RoPE + KV write"] == 2 * (2 * (q + k + v) + 2 * 16 + 2 * 3 * 8) + 3 * 8


def test_rows_prints_no_time_for_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    right = row_cases.silu_and_mul
    monkeypatch.setattr(row_cases, "silu_and_mul", lambda gate_up: right(gate_up) * 1.1)
    timer, asked = fake_timer(ours=2.0)
    lines = [line for line in rows.measure(timer, DEVICE, TINY) if line.what == "silu_and_mul"]
    assert len(lines) == 1 and isinstance(lines[0], Failure) and lines[0].wrong
    assert len(asked) == 36  # never timed


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
    """The last row of the first output, and that of the last; the whole row, as a truth may be of some columns only."""
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
    sizes = {"Q_HEADS": 2, "KV_HEADS": 1, "HEAD_DIM": 16, "DTYPE": torch.float16, "LARGE_COPY_BYTES": 1 << 20}
    for name, value in sizes.items():
        monkeypatch.setattr(attention, name, value)
    monkeypatch.setattr(attention, "DECODES", {(2, 70): 0.5})
    monkeypatch.setattr(attention, "DECODE_PAGES", (64,))
    monkeypatch.setattr(attention, "PREFILLS", ((1, 33),))


@pytest.mark.usefixtures("small_attention")
def test_decode_is_compared_with_the_bytes_it_must_read() -> None:
    timer, _ = fake_timer(ours=4e-9, copy_by_the_driver=1e-6)
    decode = next(iter(attention.measure(timer, DEVICE)))
    assert isinstance(decode, Comparison), decode
    assert decode.work == 2 * 2 * 70 * 16 * 2  # k and v, two sequences of 70 tokens, one head of 16, 2 bytes
    assert decode.ratio == pytest.approx(decode.work / 4e-9 / ((1 << 20) / 1e-6))
    assert (decode.beside, decode.target) == ("copy bandwidth", 0.5)


@pytest.mark.usefixtures("small_attention")
def test_prefill_is_judged_by_sdpas_quickest_kernel() -> None:
    timer, _ = fake_timer(ours=0.5, SDPA_flash=0.4)
    lines = [line for line in attention.measure(timer, DEVICE) if line.what == "causal prefill attention"]
    measured = {line.beside: line for line in lines if isinstance(line, Comparison)}
    targets = {name: line.target for name, line in measured.items() if line.target}
    assert targets == {"SDPA flash": 0.75}
    assert measured["SDPA flash"].ratio == pytest.approx(0.8)
    assert measured["SDPA flash"].work == 4 * 2 * 16 * (33 * 34 / 2)  # two products, causal
    assert not any(line.wrong for line in lines if isinstance(line, Failure))  # what cannot run here says so


@pytest.mark.usefixtures("small_attention")
@pytest.mark.parametrize("rows_of_each", [1, 33])
def test_attention_is_checked_at_both_ends(rows_of_each: int) -> None:
    batch = attention.Batch.random(2, rows_of_each, 33, 64, DEVICE, seed=1)
    output = batch.attend()
    batch.check("attention", output)
    for row in (0, -1):
        wrong = output.clone()
        wrong[row, 1] *= 1.1
        with pytest.raises(measure.WrongResult, match="sequence"):
            batch.check("attention", wrong)


# -- the forward step ------------------------------------------------------------------------------------------------

SMALL = replace(
    published_spec("Qwen3-0.6B"), vocab_size=101, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=2,
    num_kv_heads=1, head_dim=16, dtype=torch.float32,
)  # fmt: skip


def small_step(block_size: int, seed: int, workload: forward.Workload) -> forward.Step:
    mode = forward.Mode("fast", SMALL, create_ops("fast", SMALL.dtype, CPU), block_size)
    forward.randomize(mode.model, seed)
    mode.model.finalize(workload.tokens)
    pool = torch.randn(2 * 2 * 1024 * 16, generator=torch.Generator().manual_seed(1))
    return forward.Step(mode, workload, pool)


@torch.inference_mode()
@pytest.mark.parametrize("workload", [forward.Workload("decode", 3, 1, 256), forward.Workload("prefill", 2, 512, 512)])
def test_a_step_is_the_same_for_every_page_size(workload: forward.Workload) -> None:
    """The modes of the benchmark have pages of their own, and one KV pool: a token's slot must not depend on them."""
    one, other = small_step(64, 0, workload), small_step(256, 0, workload)
    assert one.metadata.slot_mapping.equal(other.metadata.slot_mapping)
    assert one.metadata.slot_mapping.unique().numel() == workload.sequences * workload.rows
    assert forward.check_agree(one.logits(), other.logits()) < 1e-5
    greedy, logprobs = one()
    logits = one.logits()
    assert greedy.equal(logits.argmax(-1))
    assert torch.allclose(logprobs, logits.log_softmax(-1).gather(1, one.targets[:, None]).squeeze(1), atol=1e-5)


@torch.inference_mode()
def test_steps_of_different_weights_do_not_agree() -> None:
    workload = forward.Workload("decode", 3, 1, 256)
    one, other = small_step(64, 0, workload), small_step(64, 1, workload)
    with pytest.raises(measure.WrongResult, match="logits differ"):
        forward.check_agree(one.logits(), other.logits())


@pytest.fixture
def forward_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """`forward.measure` with `fast` in both places, since the kernels need a GPU, and with made-up times."""
    seconds = {"native": 1.5, "fast": 1.0}
    monkeypatch.setattr(
        forward, "create_ops", lambda level, dtype, device, backend="sdpa": create_ops("fast", dtype, device)
    )
    monkeypatch.setattr(forward, "captured", lambda step: step)
    monkeypatch.setattr(forward, "compare_gpu_seconds", lambda functions, **_: {k: seconds[k] for k in functions})
    monkeypatch.setattr(forward, "wall_seconds", lambda functions: {k: seconds[k] / 2 for k in functions})
    monkeypatch.setattr(forward, "breakdown", lambda step, layers: {"launches": layers, "rows": len(step()[0])})
    workloads = (forward.Workload("decode", 3, 1, 256), forward.Workload("prefill", 1, 512, 512))
    monkeypatch.setattr(forward, "WORKLOADS", workloads)


@pytest.mark.usefixtures("forward_on_cpu")
def test_forward_has_two_lines_and_a_breakdown_for_each_case() -> None:
    explanations: dict[str, Any] = {}
    lines = list(forward.measure(CPU, explanations, {"small": SMALL}))
    found = [(line.what, line.case, line.ratio, line.verdict) for line in lines if isinstance(line, Comparison)]
    cases = ["small, decode", "small, prefill"]
    kinds = ["forward step, GPU time", "forward step, eager"]
    assert found == [(kind, case, 1.5, "missed by 45.6%") for case in cases for kind in kinds]
    sides = [{name: {"launches": 2, "rows": n} for name in ("native", "fast")} for n in (3, 1)]
    assert explanations == dict(zip(cases, sides, strict=True))


@pytest.mark.usefixtures("forward_on_cpu")
def test_forward_gives_no_time_to_modes_that_disagree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward.Step, "logits", lambda step: torch.randn(4, 5))
    lines = list(forward.measure(CPU, {}, {"small": SMALL}))
    assert len(lines) == 2 and all(isinstance(line, Failure) and line.wrong for line in lines)


@pytest.mark.usefixtures("forward_on_cpu")
def test_forward_says_why_a_step_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "captured", lambda step: "it synchronises")
    first, second, *_ = forward.measure(CPU, {}, {"small": SMALL})
    assert isinstance(first, Failure) and "native cannot be captured: it synchronises" in first.reason
    assert isinstance(second, Comparison) and second.what == "forward step, eager"


def test_wanted_rows_are_the_last_of_each_sequence() -> None:
    step = small_step(64, 0, forward.Workload("prefill", 2, 512, 512))
    assert step.last.tolist() == [511, 1023] and step.positions[step.last].tolist() == [511, 511]


def test_qwen3_shapes_have_their_published_sizes() -> None:
    assert round(published_spec("Qwen3-0.6B").num_parameters / 1e9, 3) == 0.596
    assert round(published_spec("Qwen3-8B").num_parameters / 1e9, 2) == 8.19
    assert all(published_spec(name).dtype == torch.bfloat16 for name in MODELS)


# -- the breakdown ---------------------------------------------------------------------------------------------------


def test_breakdown_finds_the_kernels_of_a_layer() -> None:
    layer = [("norm", 1.0), ("mm", 5.0), ("mm", 7.0), ("act", 2.0)]
    kernels = [("embed", 3.0), *layer * 9, ("norm", 1.0), ("head", 50.0)]
    result = breakdown.summarize(kernels, num_layers=9)
    assert result["one_layer_us"] == layer
    assert result["launches"] == 39 and result["kernels_us"] == 9 * 15 + 54
    assert list(result["by_kernel_us"].items())[:2] == [("mm", 108.0), ("head", 50.0)]


def test_breakdown_without_a_pattern_has_totals_only() -> None:
    kernels = [(f"kernel {i}", 1.0) for i in range(30)]
    assert "one_layer_us" not in breakdown.summarize(kernels, num_layers=6)


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["atention"], "bench atention: there is no such benchmark"),
        (["--models", "Qwen3-9B"], "bench --models Qwen3-9B: there are Qwen3-0.6B, Qwen3-8B"),
        (["--fast"], "unrecognized arguments: --fast"),
        (["--output"], "expected one argument"),
    ],
)
def test_bad_arguments_exit_2_with_one_line(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *argv]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and captured.out == ""


@pytest.mark.parametrize("option", ["--tune", "--shapes=64,64"])
def test_matmul_has_a_command_of_its_own(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[str]] = []
    monkeypatch.setattr("evalengine.bench.matmul.main", lambda arguments: given.append(arguments.argv) or 7)
    assert main(["bench", "matmul", option, "--workers", "2"]) == 7
    assert given == [[option, "--workers", "2"]]
    assert main(["bench", "rows", option]) == 2 and len(given) == 1


def test_help_names_every_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in out for name in BENCHES)


def test_without_a_gpu_the_command_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "rows", "--output", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == (
        "evalengine: bench measures a CUDA device, and this machine has none that can be used.\n"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        ([], BENCHES),
        (["all"], BENCHES),
        (["rows", "attention"], ("attention", "rows")),
        (["rows", "all"], BENCHES),
    ],
)
def test_names_of_benchmarks(argv: list[str], names: tuple[str, ...]) -> None:
    assert tuple(BENCH.parse(argv).names) == names


def run_with(lines: list[Any], monkeypatch: pytest.MonkeyPatch, folder: Path) -> int:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("evalengine.bench.report._gpu_name", lambda: "Some GPU")
    monkeypatch.setattr(cli, "_lines", lambda name, models, collected: iter(lines))
    return main(["bench", "rows", "--output", str(folder)])


def test_a_missed_target_is_no_failure_but_a_wrong_result_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    missed, _, wrong = a_report().lines
    assert run_with([missed], monkeypatch, tmp_path) == 0
    assert "0 of 1 targets reached." in capsys.readouterr().out
    assert run_with([missed, wrong], monkeypatch, tmp_path) == 1
    written = json.loads((tmp_path / "speed-rows-some-gpu.json").read_text())
    assert len(written["lines"]) == 2 and written["environment"]["command"].startswith(
        "python -m evalengine bench rows"
    )
