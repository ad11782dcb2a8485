"""`bench throughput`: its workloads and their files, the floor's arithmetic, comparisons, and a run on the CPU."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from evalengine.__main__ import main
from evalengine.bench import throughput, timed_engine
from evalengine.bench.busy import HEAD, PROFILED_STEPS, STEADY_STEPS, _Enough, _Window, busy_share
from evalengine.bench.floor import Ceilings, Work, floor_seconds, measure_ceilings, work_of
from evalengine.bench.throughput_cli import _without_folders
from evalengine.bench.throughput_compare import read_others
from evalengine.bench.throughput_report import differing_digests, table_rows
from evalengine.bench.workload_files import generation, read_workload, workload_files
from evalengine.bench.workloads import IN_CODE, VOCAB_SIZE, Workload, fitted, make_workload
from evalengine.certify.model import open_checkpoint
from evalengine.config import ModelConfig
from evalengine.engine.llm import LLM
from evalengine.engine.request import GenerateRequest, Request, ScoreRequest
from evalengine.errors import ConfigError
from evalengine.models.spec import ModelSpec, RopeSpec

SEGMENT = {"kind": "segment", "ids": [5, 6]}
GENERATE = {"kind": "generate", "prompt": [1, 2], "max_tokens": 3}
SCORE = {"kind": "loglikelihood", "segments": [1, 0], "context": [7], "continuations": [[8], [9, 3]]}


def write_lines(path: Path, *lines: Any) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_bytes(gzip.compress("\n".join(texts).encode()))
    return path


def workload(name: str, files: dict[str, Path] | None = None, most: int | None = None, **limits: int) -> Workload:
    sizes = {"vocab_size": VOCAB_SIZE, "max_model_len": 40960, **limits}
    return make_workload(name, files or {}, "qwen3-8b", sizes["vocab_size"], sizes["max_model_len"], most)


# -- workloads -------------------------------------------------------------------------------------------------------


def test_random_is_the_one_that_other_engines_were_timed_on() -> None:
    found = workload("random")
    assert (len(found.requests), found.prompt_tokens, found.output_tokens, found.num_cut) == (256, 144_628, 133_292, 0)
    assert [r.request_id for r in found.requests] == list(range(256))


def test_a_warm_up_has_other_requests_as_many_at_most() -> None:
    for name in IN_CODE:
        found = workload(name, most=3)
        assert len(found.warm_up) == len(found.requests) <= 3
        prompts = [[r.prompt_ids for r in part if isinstance(r, GenerateRequest)] for part in
                   (found.requests, found.warm_up)]  # fmt: skip
        assert not any(prompt in prompts[1] for prompt in prompts[0])


def test_shapes_of_the_workloads_in_code() -> None:
    shapes = {name: [(len(r.prompt_ids), r.params.max_tokens) for r in workload(name).requests] for name in IN_CODE}  # type: ignore[union-attr]
    assert shapes["batch1"] == [(1024, 256)] and shapes["long"] == [(16384, 128)] * 16
    rows = workload("gsm8k_cot").requests
    assert len(rows) == 512 and all(isinstance(r, GenerateRequest) for r in rows)
    work = work_of(rows, 256)
    assert work.prompt_tokens < 512 * 100 + 8 * 120, "the exemplars are computed once"


def test_lengths_and_ids_are_cut_to_what_the_model_takes() -> None:
    small = workload("random", most=8, vocab_size=1000, max_model_len=64)
    assert small.num_cut == len(small.requests) == 8
    for request in (*small.requests, *small.warm_up):
        assert isinstance(request, GenerateRequest) and max(request.prompt_ids) < 1000
        assert len(request.prompt_ids) + request.params.max_tokens <= 64
    kept, cut = fitted([ScoreRequest(0, list(range(50)), [7, 8]), ScoreRequest(1, [1], list(range(99)))], 32)
    scores = [r for r in kept if isinstance(r, ScoreRequest)]
    assert cut == 2 and scores[0].context_ids == list(range(20, 50)) and scores[0].continuation_ids == [7, 8]
    assert scores[1].context_ids == [1] and scores[1].continuation_ids == list(range(31))


def test_a_workload_has_its_own_cut_for_a_preset(tmp_path: Path) -> None:
    files = {"gsm8k": write_lines(tmp_path / "gsm8k.jsonl.gz", *[GENERATE] * 300)}
    sizes = [len(make_workload("gsm8k", files, p, 99, 99, None).requests) for p in ("qwen3-0.6b", "qwen3-8b")]
    assert sizes == [300, 256] and len(workload("gsm8k", files, most=5).requests) == 5


# -- files -----------------------------------------------------------------------------------------------------------


def test_a_file_s_lines_become_requests(tmp_path: Path) -> None:
    write_lines(tmp_path / "own.jsonl.gz", SEGMENT, GENERATE, "", {"kind": "segment", "ids": [4]}, SCORE)
    (path,) = workload_files(tmp_path).values()
    assert read_workload(path, 10) == [
        generation(0, [1, 2], 3),
        ScoreRequest(1, [4, 5, 6, 7], [8]),
        ScoreRequest(2, [4, 5, 6, 7], [9, 3]),
    ]
    warm_up = workload("own", {"own": path}, vocab_size=10).warm_up
    assert warm_up[2] == ScoreRequest(2, [5, 6, 7, 8], [0, 4]), "every id one higher"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2: "),
        ("[" * 100_000, "nested too deeply"),
        ([1], "no object whose kind is segment, generate, loglikelihood"),
        ({"kind": "rolling"}, "no object whose kind is"),
        ({"kind": "generate", "prompt": [1]}, "a generate without max_tokens"),
        ({**GENERATE, "segmets": [0]}, "a generate has no 'segmets'"),
        ({**SEGMENT, "segments": [0]}, "a segment has no 'segments'"),
        ({**GENERATE, "prompt": [1, 10]}, "token id 10 is beyond the model's vocabulary, 0 ... 9"),
        ({**GENERATE, "prompt": [True]}, "prompt: must be a list of token ids"),
        ({**GENERATE, "prompt": [-1]}, "prompt: must be a list of token ids"),
        ({**GENERATE, "prompt": []}, "line 2: nothing stands before the first token"),
        ({**GENERATE, "max_tokens": 0}, "max_tokens: must be an integer from 1 to"),
        ({**GENERATE, "max_tokens": 1.5}, "max_tokens: must be an integer from 1 to"),
        ({**SCORE, "segments": [0, 1]}, "line 2: segment 1 is not in the file, which has 1"),
        ({**GENERATE, "max_tokens": 1 << 70}, "max_tokens: must be an integer from 1 to"),
        ({**SCORE, "segments": 0}, "segments: must be a list"),
        ({**SCORE, "segments": [], "continuations": []}, "continuations: must be a list of at least one"),
        ({**SCORE, "segments": [], "continuations": [[]]}, "continuations: one of them is empty"),
        ({**SCORE, "segments": [], "continuations": [[11]]}, "token id 11 is beyond"),
    ],
)
def test_a_damaged_line_is_named(line: Any, said: str, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "bad.jsonl.gz", SEGMENT, line, GENERATE)
    with pytest.raises(ConfigError) as caught:
        read_workload(path, 10)
    assert said in str(caught.value) and str(path) in str(caught.value)


def test_a_segment_s_repeats_are_counted_before_they_are_made(tmp_path: Path) -> None:
    lines = {"kind": "segment", "ids": [1] * 70_000}, {**GENERATE, "segments": [0] * 256}
    with pytest.raises(ConfigError, match="line 2: its segments have more than 16,777,216 tokens"):
        read_workload(write_lines(tmp_path / "x.jsonl.gz", *lines), 10)


def test_a_file_that_is_no_gzip_or_empty_is_named(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl.gz", *[GENERATE] * 99)
    whole = path.read_bytes()
    for content, said in (
        (whole[:-9], "cannot be read as gzip"),
        (whole[:20] + b"\0" * 20 + whole[40:], "cannot be read as gzip"),
        (b"{}", "cannot be read as gzip"),
        (gzip.compress(b"\n"), "it holds no request"),
    ):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=said):
            read_workload(path, 10)
    path.unlink()
    with pytest.raises(ConfigError, match=r"no \*\.jsonl\.gz there"):
        workload_files(tmp_path)


# -- the floor -------------------------------------------------------------------------------------------------------

TINY = ModelSpec(
    architecture="Qwen3ForCausalLM",
    vocab_size=100,
    hidden_size=8,
    intermediate_size=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    rms_norm_eps=1e-6,
    rope=RopeSpec(theta=1e4),
    max_position_embeddings=64,
    tie_word_embeddings=False,
    attention_bias=False,
    attention_output_bias=False,
    qk_norm=True,
    dtype=torch.bfloat16,
    bos_token_id=None,
    eos_token_ids=(),
)


def test_work_counts_a_shared_prefix_once() -> None:
    # [1 2 3] and [1 2 4 5] share two tokens: 5 are computed. Sorted, the first has 3 of its own and the second 2.
    # Pairs: 1+2+3 and 3+4. Decode steps: 2 and 4, one sequence at a time 6, else the longer's 4.
    # KV read: steps of 3+1, 3+2 and of 2+1, 2+2, 2+3, 2+4.
    generations: list[Request] = [generation(0, [1, 2, 3], 3), generation(1, [1, 2, 4, 5], 5)]
    assert work_of(generations, 2) == Work(5, 13, 2, 4, 9 + 18)
    assert work_of(generations, 1).decode_steps == 6
    # Fed: [1 2], [1 2 8] and [1 2 8] for [8], [8 9], [8 7]: 3 tokens. Scored after [1 2] and [1 2 8]: two rows.
    scores: list[Request] = [ScoreRequest(i, [1, 2], ids) for i, ids in enumerate(([8], [8, 9], [8, 7]))]
    assert work_of(scores, 256) == Work(3, 6, 2, 0, 0)


def test_floor_of_a_hand_worked_example() -> None:
    # A layer: q, k, v and o 8 x (8 + 2 x 4) + 8 x 8 = 192, the MLP 3 x 8 x 16 = 384, norms 2 x 8 + 2 x 4 = 24: 600.
    # Two layers and the last norm: 1,208. lm_head: 800. A token's KV: 2 x 2 layers x 4 numbers x 2 bytes = 32.
    work = Work(prompt_tokens=10, pairs=55, prompt_rows=2, decode_steps=3, kv_tokens_read=40)
    flops = 2 * 1208 * 10 + 4 * 2 * 4 * 2 * 55 + 2 * 800 * 2
    moved = 3 * (1208 + 800) * 2 + 40 * 32
    found = floor_seconds(work, TINY, 2, Ceilings(copy_bytes_per_s=1000.0, matmul_flops_per_s=100.0))
    assert found == pytest.approx(flops / 100 + moved / 1000, rel=1e-12)


def test_ceilings_are_measured() -> None:
    found = measure_ceilings(torch.device("cpu"), torch.bfloat16)
    assert found.copy_bytes_per_s > 1e6 and found.matmul_flops_per_s > 1e6


def test_busy_share_is_a_union_over_the_time_after_the_head() -> None:
    assert busy_share([]) is None and HEAD == 0.1
    assert busy_share([(0, 50), (20, 60), (90, 100)]) == pytest.approx((50 + 10) / 90)
    assert busy_share([(0, 100)]) == 1.0


# -- comparing -------------------------------------------------------------------------------------------------------


def a_row(mode: str, wall: float, **other: Any) -> dict[str, Any]:
    row = {"engine": "evalengine", "mode": mode, "preset": "qwen3-8b", "workload": "random", "round": 0,
           "requests": 256, "output_tokens": 1000, "wall_s": wall, "floor_s": 1.0, "digest": mode}  # fmt: skip
    return {**row, **other}


def write_rows(path: Path, *rows: Any) -> Path:
    path.write_text(json.dumps({"what": "", "rows": rows}))
    return path


def test_runs_are_compared_where_preset_workload_and_requests_agree(tmp_path: Path) -> None:
    theirs = [
        a_row("fast", 4.0, engine="vllm"),
        a_row("fast", 9.0, engine="vllm", requests=128),
        a_row("fast", 9.0, engine="other", preset="qwen3-0.6b"),
        a_row("invariant", 3.0),
        a_row("invariant", 5.0, round=1),
    ]
    others = read_others(write_rows(tmp_path / "theirs.json", *theirs))
    ours = [a_row("invariant", 2.0), a_row("invariant", 3.0, round=1), a_row("fast", 2.0), a_row("fast", 2.0)]
    headings, lines = table_rows(ours, others)
    assert headings[-2:] == ["time / vllm, fast's", "time / evalengine, earlier's"], "no column without a match"
    assert lines == [
        [
            "qwen3-8b",
            "random",
            "256",
            "2.500",
            "2.000",
            "400 tok/s",
            "500 tok/s",
            "0.800",
            "0.40 / 0.50",
            "0.62 / 0.50 of 4.000 s",
            "0.62 / - of 4.000 s",
        ]
    ]
    _, lines = table_rows([a_row("fast", 2.0, output_tokens=0)], others)
    assert lines[0][3:9] == ["-", "2.000", "-", "128 req/s", "-", "- / 0.50"]


def test_rounds_with_other_bytes_are_found() -> None:
    rows = [a_row("invariant", 1.0), a_row("invariant", 1.0, round=1), a_row("fast", 1.0, digest="x")]
    assert differing_digests(rows) == []
    assert differing_digests([*rows, a_row("invariant", 1.0, digest="x")]) == [("qwen3-8b", "random")]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "has no rows"),
        ('{"rows": []}', "has no rows"),
        ('{"rows": [1]}', "row 0: is no object"),
        (json.dumps({"rows": [a_row("fast", 0.0)]}), "row 0: wall_s: must be a number of seconds above 0"),
        (json.dumps({"rows": [a_row("fast", 1.0, requests="2")]}), "row 0: requests: must be an integer"),
        (json.dumps({"rows": [a_row("fast", 1.0, preset=None)]}), "row 0: preset: must be a text"),
    ],
)
def test_a_damaged_file_to_compare_with_is_named(content: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "theirs.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=said):
        read_others(path)


# -- the command -----------------------------------------------------------------------------------------------------


def test_a_run_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert "time / vllm, fast's" in out and "the invariant mode gave the same bytes in all 3 rounds" in out
    own = tmp_path / "out" / "throughput-asset-tinymath-no-gpu.json"
    written = json.loads(own.read_text())
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
    assert own.with_suffix(".md").read_text().startswith("# Throughput on no GPU\n")
    again = ["--compare", str(own), "--one-by-one", "--workloads", "choices"]
    assert main(["bench", "throughput", *words[:-2], *again]) == 0
    assert "time / evalengine, earlier's" in capsys.readouterr().out


def test_a_run_that_fails_is_written_down_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def breaks(engine: timed_engine.Engine, workload: Workload) -> None:
        if engine.mode == "invariant" or workload.name == "batch1":
            raise RuntimeError("it broke")

    monkeypatch.setattr(timed_engine.Engine, "warm_up", breaks)
    words = ["--models", "asset:tinymath", "--workloads", "random,batch1", "--requests", "1", "--max-model-len", "8"]
    assert main(["bench", "throughput", *words, "--output", str(tmp_path)]) == 1
    assert "not measured: asset:tinymath, batch1, fast: RuntimeError: it broke" in capsys.readouterr().out
    written = json.loads((tmp_path / "throughput-asset-tinymath-no-gpu.json").read_text())
    assert [(r["workload"], r["mode"]) for r in written["rows"]] == [("random", "fast")] * 3
    assert len(written["failures"]) == 3


def test_a_long_run_has_as_many_rounds_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(throughput, "SHORT_RUN_S", 0.0)
    for rounds in (1, 2):
        measured = throughput.Measured({}, {})
        throughput.measure(a_plan(rounds=rounds, modes=("fast",)), measured, lambda row: None)
        assert [row["round"] for row in measured.rows] == list(range(rounds))


def a_plan(**options: Any) -> timed_engine.Plan:
    checkpoint = open_checkpoint(ModelConfig(name="tinymath", path="asset:tinymath"))
    batch = Workload("random", [generation(i, [1 + i, 2], 2) for i in range(3)], [generation(0, [9], 2)])
    return timed_engine.Plan([timed_engine.Preset("tinymath", checkpoint, 16, [batch])], **options)


def test_engines_that_do_not_fit_together_come_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    start, started = timed_engine.Engine.__init__, []

    def second_fails(engine: Any, preset: Any, mode: str, plan: Any, num_kv_blocks: int | None) -> None:
        started.append((mode, num_kv_blocks is not None))
        if num_kv_blocks is not None and mode == "fast":
            raise torch.OutOfMemoryError("no room")
        start(engine, preset, mode, plan, num_kv_blocks)

    monkeypatch.setattr(timed_engine.Engine, "__init__", second_fails)
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
    ("words", "said"),
    [
        (["--workloads", "gsm8k"], "--workloads gsm8k: there is no such workload; there are random, batch1, long, "),
        (["--workloads", "random,"], "give names with commas between them"),
        (["--models", "shape:qwen3-9b"], "shape:qwen3-9b: no such shape"),
        (["--modes", "exact"], "--modes exact: there are invariant and fast"),
        (["--requests", "0"], "must be an integer of at least 1"),
        (["--files", "nowhere"], "--files nowhere: no *.jsonl.gz there"),
        (["--compare", "nowhere.json"], "--compare nowhere.json: cannot be read"),
        (["--models", "asset:tinymath", "--max-model-len", "4096"], "--max-model-len 4096: must lie in 2 ... 1024"),
    ],
)
def test_bad_usage_exits_2_with_one_line(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "throughput", "--output", str(tmp_path), *words]) == 2
    captured = capsys.readouterr()
    assert said in captured.err and captured.err.count("\n") == 1 and captured.out == ""


def test_help_and_published_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "throughput", "--help"]) == 0
    assert "--workloads NAME,..." in capsys.readouterr().out
    words = ["--files", "/home/x/w", "--output=/home/x/o", "--models", "/home/x/m,shape:qwen3-8b", "--rounds", "2"]
    expected = ["--files", "w", "--output=o", "--models", "m,shape:qwen3-8b", "--rounds", "2"]
    assert _without_folders(words) == expected
