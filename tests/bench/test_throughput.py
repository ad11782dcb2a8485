"""`bench throughput`: a run on the CPU, its rounds and failures, and how the modes share a GPU's memory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from evalengine.__main__ import main
from evalengine.bench import throughput, timed_engine
from evalengine.bench.throughput import PROFILED_STEPS, STEADY_STEPS, _Enough, _Window
from evalengine.bench.throughput_cli import _without_folders, record_name
from evalengine.bench.workload_files import generation
from evalengine.bench.workloads import Workload
from evalengine.certify.model import open_checkpoint
from evalengine.cli.commands import SHAPES
from evalengine.config.schema import ModelConfig
from evalengine.engine.llm import LLM
from tests.bench.workload_lines import SCORE, a_row, write_lines, write_rows


def test_a_run_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two modes and two workloads: the rows hold all times, rounds alternate, and files of rows are compared with."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    write_lines(tmp_path / "choices.jsonl.gz", *[{**SCORE, "segments": [], "context": [i, 1]} for i in range(1, 4)])
    compare = write_rows(
        tmp_path / "vllm.json", a_row("fast", 1e-3, engine="vllm", preset="asset:tinymath", requests=3)
    )
    words = ["--models", "asset:tinymath", "--workloads", "random,choices", "--files", str(tmp_path), "--requests", "3",
             "--max-model-len", "24", "--rounds", "2", "--output", str(tmp_path / "out"),
             "--compare", str(compare)]  # fmt: skip
    assert main(["bench", "throughput", *words]) == 0
    out = capsys.readouterr().out
    assert "time / vllm, fast's" in out and "3 runs of " in out and "the invariant mode gave the same bytes" in out
    report_file = tmp_path / "out" / "throughput-asset-tinymath-no-gpu.json"
    written = json.loads(report_file.read_text())
    assert str(tmp_path) not in json.dumps(written), "no path of this machine's"
    assert written["arrangement"] == {"asset:tinymath": throughput.BY_TURNS} and not written["failures"]
    rows = written["rows"]
    order = [(r["workload"], r["round"], r["mode"]) for r in rows]
    turns = [(i, m) for i in range(3) for m in (("invariant", "fast") if i % 2 == 0 else ("fast", "invariant"))]
    assert order == [(w, *turn) for w in ("random", "choices") for turn in turns], "short runs have three rounds"
    for row in rows:
        assert row["requests"] == 3 and row["wall_s"] >= row["time_to_first_result_s"] > 0 and row["steps"] > 0
        assert row["floor_s"] > 0 and row["gpu_busy_share"] is None and row["peak_memory_bytes"] is None
        assert row["output_tokens"] == (36 if row["workload"] == "random" else 0)
    assert rows[0]["digest"] == rows[3]["digest"] and rows[0]["cut_requests"] == 3
    assert report_file.with_suffix(".md").read_text().startswith("# Throughput on no GPU\n")
    second_words = ["--compare", str(report_file), "--one-by-one", "--workloads", "choices"]
    assert main(["bench", "throughput", *words[:-2], *second_words]) == 0
    assert "time / evalengine, earlier's" in capsys.readouterr().out


def test_a_run_that_fails_is_written_down_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def breaks(engine: timed_engine.TimedEngine, workload: Workload) -> None:
        if engine.mode == "invariant" or workload.name == "batch1":
            raise RuntimeError("it broke")

    monkeypatch.setattr(timed_engine.TimedEngine, "warm_up", breaks)
    words = ["--models", "asset:tinymath", "--workloads", "random,batch1", "--requests", "1", "--max-model-len", "8"]
    assert main(["bench", "throughput", *words, "--output", str(tmp_path)]) == 1
    assert "not measured: asset:tinymath, batch1, fast: RuntimeError: it broke" in capsys.readouterr().out
    written = json.loads((tmp_path / "throughput-asset-tinymath-no-gpu.json").read_text())
    assert [(r["workload"], r["mode"]) for r in written["rows"]] == [("random", "fast")] * 3
    assert len(written["failures"]) == 3


@pytest.mark.parametrize(
    ("models", "sizes", "name"),
    [
        (SHAPES.split(","), [1], "throughput"),
        (["shape:qwen3-32b"], [2], "throughput-qwen3-32b-tp2"),
        (["shape:qwen3.5-4b", "folder/Qwen3-8B/"], [1, 2, 4], "throughput-qwen3-5-4b-qwen3-8b-tp1-2-4"),
    ],
)
def test_a_record_is_named_after_its_models_and_numbers_of_gpus(models: list[str], sizes: list[int], name: str) -> None:
    assert record_name(models, sizes) == name


def test_a_long_run_has_as_many_rounds_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(throughput, "SHORT_RUN_S", 0.0)
    for rounds in (1, 2):
        measured = throughput.Measured({}, {})
        throughput.measure(a_plan(rounds=rounds, modes=("fast",)), measured, lambda row: None)
        assert [row["round"] for row in measured.rows] == list(range(rounds))


def a_plan(**options: Any) -> timed_engine.ThroughputPlan:
    """A plan of one preset, tinymath, with one batch of three requests."""
    checkpoint = open_checkpoint(ModelConfig(name="tinymath", path="asset:tinymath"))
    batch = Workload("random", [generation(i, [1 + i, 2], 2) for i in range(3)], [generation(0, [9], 2)])
    return timed_engine.ThroughputPlan([timed_engine.Preset("tinymath", checkpoint, 16, [batch])], **options)


def test_engines_that_do_not_fit_together_come_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    start, started = timed_engine.TimedEngine.__init__, []

    def second_fails(engine: Any, preset: Any, mode: str, plan: Any, num_kv_blocks: int | None) -> None:
        started.append((mode, num_kv_blocks is not None))
        if num_kv_blocks is not None and mode == "fast":
            raise torch.OutOfMemoryError("no room")
        start(engine, preset, mode, plan, num_kv_blocks)

    monkeypatch.setattr(timed_engine.TimedEngine, "__init__", second_fails)
    measured = throughput.Measured({}, {})
    throughput.measure(a_plan(), measured, lambda row: None)
    assert started == [("invariant", True), ("fast", True), ("invariant", False), ("fast", False)]
    assert measured.arrangement == {"tinymath": throughput.ONE_BY_ONE} and not measured.failures
    assert [row["mode"] for row in measured.rows] == ["invariant"] * 3 + ["fast"] * 3


@pytest.mark.parametrize(("free", "together"), [(100 << 30, True), (4 << 30, False)])
def test_memory_decides_whether_the_modes_take_turns(
    free: int, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve = throughput.preset_settings

    def on_a_gpu(*words: Any) -> Any:
        return replace(resolve(*words), device=torch.device("cuda"), block_size=4)

    plan = a_plan()
    monkeypatch.setattr(throughput, "preset_settings", on_a_gpu)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
    assert throughput._pools(plan.presets[0], plan) == ({"invariant": 4, "fast": 4} if together else {})
    assert throughput._pools(plan.presets[0], a_plan(one_by_one=True)) == {}


def test_steady_decode_alone_is_profiled() -> None:
    sizes: dict[str, Any] = {"max_model_len": 128, "num_kv_blocks": 32, "block_size": 16, "device": "cpu"}
    with LLM(a_plan().presets[0].checkpoint, batch_invariant=False, **sizes) as llm:
        window, recorder = _Window(llm), Recorder(llm)
        window.profiler = recorder  # type: ignore[assignment]
        with pytest.raises(_Enough):
            list(llm.run([generation(i, [1 + i, 2, 3], 100) for i in range(3)], window))
        assert recorder.began == 1 + STEADY_STEPS, "after the step of the prompts"
        assert llm.stats.num_steps == recorder.began + PROFILED_STEPS
        assert len(llm.generate([[1, 2]])) == 1, "the engine goes on"


class Recorder:
    """A profiler that notes when it was started."""

    def __init__(self, llm: LLM) -> None:
        self.llm, self.began = llm, 0

    def start(self) -> None:
        self.began = self.llm.stats.num_steps


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--workloads", "gsm8k"], "--workloads gsm8k: there is no such workload; there are random, batch1, long, "),
        (["--workloads", "random,"], "give names with commas between them"),
        (["--models", "shape:qwen3-9b"], "shape:qwen3-9b: no such shape"),
        (["--modes", "exact"], "--modes exact: there are invariant and fast"),
        (["--requests", "0"], "greater than or equal to 1"),
        (["--files", "nowhere"], "--files nowhere: no *.jsonl.gz there"),
        (["--compare", "nowhere.json"], "--compare nowhere.json: cannot be read"),
        (["--models", "asset:tinymath", "--max-model-len", "4096"], "--max-model-len 4096: must be in 2 ... 1024"),
    ],
)
def test_bad_usage_exits_2_with_one_line(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "throughput", "--output", str(tmp_path), *words]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and captured.out == ""


def test_help_and_published_words(capsys: pytest.CaptureFixture[str]) -> None:
    """The words that are published with the results name no folder of this machine."""
    assert main(["bench", "throughput", "--help"]) == 0
    assert "--workloads NAME,..." in capsys.readouterr().out
    words = ["--files", "/home/x/w", "--output=/home/x/o", "--models", "/home/x/m,shape:qwen3-8b", "--rounds", "2"]
    expected = ["--files", "w", "--output=o", "--models", "m,shape:qwen3-8b", "--rounds", "2"]
    assert _without_folders(words) == expected
