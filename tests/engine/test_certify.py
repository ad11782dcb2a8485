"""`verify engine`: it passes on the exact level, and a fault in any op, cache or id is caught and shown."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from evalengine.__main__ import main
from evalengine.certify import again, axes, cases, certificate, cli, exact_kernels, kernels, proof, schedules
from evalengine.certify.busy import busy_neighbour
from evalengine.certify.cases import EFFORTS, Case, affordable, build_cases, pool_pages
from evalengine.certify.compare import Answer, Comparison
from evalengine.certify.model import open_checkpoint
from evalengine.certify.proof import Proof, Prover
from evalengine.certify.schedules import Variant
from evalengine.certify.subject import Subject, open_subject, read_settings
from evalengine.config import ModelConfig
from evalengine.engine import settings
from evalengine.engine.block_manager import BlockManager
from evalengine.engine.llm import LLM
from evalengine.engine.loader import Checkpoint
from evalengine.engine.model_runner import ModelRunner
from evalengine.engine.request import GenerateRequest, ScoreRequest
from evalengine.engine.scheduler import Scheduler
from evalengine.errors import ConfigError, EvalEngineError
from evalengine.layers import attention_backends
from evalengine.layers.exact import ExactOps

ROOT = Path(__file__).parents[2]
CPU = ("engine.device=cpu", "numerics=exact")
TINY = cases.Effort(100, (2, 18, 90), (15,), 6, 4, (40,), 30, 1, 1, 0, 2, 9)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Certificates go to results/ below the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture
def prove(small_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Proof]:
    """Runs axes on the small random model with tiny requests, and two documents of the default task."""
    monkeypatch.setitem(EFFORTS, "tiny", TINY)

    def run(*names: str, logprobs: int | None = None) -> Proof:
        subject = Subject((*CPU, "engine.max_model_len=256"), "tiny")
        _, tasks = open_subject(subject.config, None)
        return Prover(subject, small_checkpoint, tasks, logprobs).prove(names)

    return run


def test_every_axis_passes_and_the_control_differs(prove: Callable[..., Proof]) -> None:
    found = prove(*(name for name in axes.AXES if name != "restart"))
    assert found.verdict == "IDENTICAL" and found.total.differing_bytes == 0
    assert [axis.name for axis in found.axes] == [name for name in axes.AXES if name != "restart"]
    for axis in found.axes:
        assert bool(axis.trials) != bool(axis.skipped) and not axis.missed
        assert axis.comparison.logprobs or axis.skipped
    stats = {trial.variant.label: trial.stats for axis in found.axes for trial in axis.trials}
    assert stats["max_num_seqs=8"].largest_batch == 8 and stats["max_num_seqs=1"].largest_batch == 1
    assert any(s.num_preemptions for s in stats.values())
    assert found.control.comparison.differing_logprobs, "the comparison can see a difference"


def test_a_linear_layer_that_depends_on_the_batch_is_caught(
    prove: Callable[..., Proof], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = ExactOps.linear

    def linear(self: ExactOps, x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
        y = real(self, x, weight, bias)
        return y * (1 + 2**-20) if len(x) > 100 else y  # another kernel for large batches

    monkeypatch.setattr(ExactOps, "linear", linear)
    found = prove("batch")
    assert found.verdict == "DIFFERENT"
    labels = [t.variant.label for t in found.axes[0].trials if t.comparison.differing_logprobs]
    assert labels and "max_num_seqs=1" not in labels
    first = found.total.first_difference
    assert first is not None and first.schedule == f"batch, {labels[0]}" and " of id " in first.found
    assert first.found != first.expected


def test_stale_pages_that_are_read_are_caught(prove: Callable[..., Proof], monkeypatch: pytest.MonkeyPatch) -> None:
    real = ExactOps.attention

    def attention(self: ExactOps, q: Tensor, k_cache: Tensor, v_cache: Tensor, *rest: Any) -> Tensor:
        return real(self, q, k_cache, v_cache, *rest) + 0 * v_cache[-1, -1, 0, 0].float()

    monkeypatch.setattr(ExactOps, "attention", attention)
    assert prove("order").verdict == "IDENTICAL"
    found = prove("nan")
    assert found.verdict == "DIFFERENT"
    assert "not a finite number" in str(found.total.first_difference) or "nan" in str(found.total.first_difference)


def test_a_prefix_hit_that_is_too_long_is_caught(prove: Callable[..., Proof], monkeypatch: pytest.MonkeyPatch) -> None:
    """A hit inside a page that takes one token too many over from the other request."""
    real = BlockManager._match

    def match(self: BlockManager, seq: Any) -> Any:
        shared, copy_from, length = real(self, seq)
        too_long = copy_from is not None and len(shared) * self.block_size + length < seq.first_wanted_position
        return shared, copy_from, length + 1 if too_long and length + 1 < self.block_size else length

    monkeypatch.setattr(BlockManager, "_match", match)
    (axis,) = prove("prefix").axes
    assert axis.comparison.differing_logprobs


def test_logprobs_that_depend_on_how_many_are_asked_for_are_caught(
    prove: Callable[..., Proof], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = ModelRunner.execute

    def execute(self: ModelRunner, schedule: Any) -> Any:
        results = real(self, schedule)
        for result in results:
            if result.top:
                result.tokens = [(token, float(np.float32(value * (1 + 2**-22)))) for token, value in result.tokens]
        return results

    monkeypatch.setattr(ModelRunner, "execute", execute)
    assert prove("ids").verdict == "IDENTICAL" and prove("asked").verdict == "DIFFERENT"


def test_an_axis_that_was_not_exercised_is_no_proof(
    prove: Callable[..., Proof], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = LLM.reconfigure
    monkeypatch.setattr(LLM, "reconfigure", lambda self, **s: real(self, **{**s, "num_kv_blocks": 400}))
    found = prove("preemption")
    assert found.verdict == "INCOMPLETE" and not found.total.differing_logprobs
    assert "without a preemption" in found.axes[0].missed[0]


def test_a_scheduler_that_makes_small_batches_is_no_proof(
    prove: Callable[..., Proof], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Scheduler.__init__
    monkeypatch.setattr(Scheduler, "__init__", lambda self, pool, seqs, budget: real(self, pool, min(seqs, 2), budget))
    found = prove("batch")
    assert found.verdict == "INCOMPLETE" and not found.total.differing_logprobs
    assert found.axes[0].missed == [f"max_num_seqs={n}: without {n} sequences in a step" for n in (3, 8)]
    assert found.incomplete == [f"batch: not exercised: {missed}" for missed in found.axes[0].missed]


def test_a_budget_and_a_cache_that_are_ignored_are_no_proof(
    prove: Callable[..., Proof], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Scheduler.__init__
    monkeypatch.setattr(Scheduler, "__init__", lambda self, pool, seqs, budget: real(self, pool, seqs, 1 << 16))
    (axis,) = prove("chunks").axes
    assert [missed.split(":")[0] for missed in axis.missed] == [f"max_num_batched_tokens={n}" for n in (17, 64, 100)]
    monkeypatch.setattr(Scheduler, "__init__", real)
    monkeypatch.setattr(BlockManager, "_match", lambda self, seq: ([], None, 0))
    (axis,) = prove("prefix").axes
    assert [m.split(":")[0] for m in axis.missed] == ["cold and warm", "warm, chunks of 100", "hit inside a page"]


def test_a_control_that_finds_nothing_is_no_proof(prove: Callable[..., Proof], monkeypatch: pytest.MonkeyPatch) -> None:
    assert prove("ids").verdict == "IDENTICAL"
    alone = {"max_num_seqs": 1, "max_num_batched_tokens": schedules.LARGE, "enable_prefix_caching": False}
    monkeypatch.setattr(proof, "control", lambda work: iter([schedules.Variant("alone again", work.cases, alone)]))
    found = prove("ids")
    assert found.verdict == "INCOMPLETE" and found.incomplete == [proof.NONE_FOUND]


def test_fewer_logprobs_than_asked_for_are_no_proof(prove: Callable[..., Proof]) -> None:
    found = prove("ids", logprobs=10**6)
    assert found.verdict == "INCOMPLETE"
    assert found.incomplete == [f"{found.total.logprobs:,} logprobs compared, 1,000,000 wanted"]


def test_random_schedules_go_on_until_enough_is_compared(prove: Callable[..., Proof]) -> None:
    few, more = prove("mixed"), prove("mixed", logprobs=400)
    assert len(few.axes[0].trials) == 1 and few.total.logprobs < 400 <= more.total.logprobs


def test_a_model_that_fails_alone_is_no_reference(prove: Callable[..., Proof], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ExactOps, "lm_head", lambda self, x, w: torch.full((len(x), 1024), float("nan")))
    with pytest.raises(EvalEngineError, match="run alone: not a finite number"):
        prove("order")


def test_cases_are_made_alike_everywhere_and_cross_the_borders() -> None:
    built = build_cases(EFFORTS["gpu"], opened("shape:qwen3-8b", 2), 40960)
    assert built == build_cases(EFFORTS["gpu"], opened("shape:qwen3-8b", 2), 40960)
    assert 500 < max(case.room for case in build_cases(EFFORTS["gpu"], opened("shape:qwen3-8b", 2), 1000)) <= 1000
    assert [case.key for case in built] == [case.request.request_id for case in built] == list(range(len(built)))
    assert sum(case.new_tokens > 1 for case in built) >= 512, "a decode step of 512 sequences"
    lengths = {case.length for case in built}
    assert min(lengths) == 1 and max(lengths) == 3200 and {1023, 1024, 1025, 2048, 2049} <= lengths
    requests = [case.request for case in built]
    assert any(isinstance(r, GenerateRequest) and r.params.temperature > 0 for r in requests)
    scored = sum(len(r.continuation_ids) for r in requests if isinstance(r, ScoreRequest))
    assert scored > 8000, "a dozen schedules make 100,000 logprobs"
    assert max(max(case.prompt) for case in built) > 100_000, "random ids are of the whole vocabulary"


def test_a_slow_schedule_takes_fewer_requests() -> None:
    built = build_cases(EFFORTS["cpu"], opened("asset:tinymath"), 1024)
    few = affordable(built, 50, max_num_seqs=1, max_num_batched_tokens=1 << 16)
    assert 0 < len(few) < len(built) and few == [case for case in built if case in few]
    assert sum(case.new_tokens for case in few) <= 50
    assert affordable(built, 0, 1, 1) == built[:1]
    assert pool_pages(built, 16) >= sum(-(-case.length // 16) for case in built)


def test_comparison_counts_bytes_and_shows_the_first() -> None:
    comparison = Comparison()
    expected = Answer([1, 2, 3], np.array([-1.0, -0.0, np.nan], np.float32))
    comparison.add("s", "r", expected, Answer([1, 2, 3], expected.logprobs.copy()))
    assert (comparison.logprobs, comparison.differing_logprobs) == (3, 0), "the same NaN is equal"
    comparison.add("s", "r", expected, Answer([1, 2, 3], np.array([-1.0, 0.0, np.nan], np.float32)))
    assert (comparison.differing_logprobs, comparison.differing_bytes) == (1, 1), "-0 is not +0"
    assert str(comparison.first_difference) == "s: r, token 1: 0 (00000000) of id 2 against -0 (80000000) of id 2 alone"
    comparison.add("s", "r", expected, Answer([1, 7], expected.logprobs[:2], "gone"))
    assert (comparison.differing_logprobs, comparison.differing_bytes) == (3, 9), "another token, and a missing one"
    comparison.add("s", "r", Answer([], expected.logprobs[:0]), expected)
    assert comparison.logprobs == 12 and comparison.differing_logprobs == 6, "what should not be there differs"


def test_answers_hash_covers_every_field() -> None:
    answer = Answer([1, 2], np.array([-1.0, -2.0], np.float32))
    others = [
        {0: Answer([1, 3], answer.logprobs)},
        {0: Answer([1, 2], np.nextafter(answer.logprobs, np.float32(0)))},
        {1: answer},
        {0: answer, 1: answer},
    ]
    hashes = {certificate.answers_sha256(x) for x in [{0: answer}, *others]}
    assert len(hashes) == 5


def opened(path: str, layers: int | None = None) -> Checkpoint:
    return open_checkpoint(ModelConfig(name=path, path=path), layers)


def test_shapes() -> None:
    for name, layers, heads in (("qwen3-0.6b", 28, 16), ("qwen3-8b", 36, 32)):
        spec = opened(f"shape:{name}").spec
        assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (layers, heads, 8, 128)
        assert spec.dtype == torch.bfloat16 and opened(f"shape:{name}", 2).spec.num_layers == 2
    assert opened("shape:qwen3-0.6b").spec.tie_word_embeddings
    assert abs(opened("shape:qwen3-8b").spec.num_parameters / 8.19e9 - 1) < 0.001
    for arguments in (("shape:qwen9", None), ("shape:qwen3-8b", 0), ("shape:qwen3-8b", 99), ("asset:tinymath", 2)):
        with pytest.raises(ConfigError, match=r"model.path=|--layers="):
            opened(*arguments)


def run_cli(*arguments: str) -> int:
    return main(["verify", *arguments])


def test_the_command_end_to_end_with_a_new_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "made" / "certificate.json"
    words = ("engine", *CPU, "--quick", "--axes", "order", "decode", "restart", "graphs")
    assert run_cli(*words, "--out", str(out)) == 0
    stdout, stderr = capsys.readouterr()
    assert "verdict: IDENTICAL: 0 differing bytes in " in stdout.splitlines()[-1]
    assert "graphs" in stdout and "skipped" in stdout and "fast (control)" in stdout
    assert "verify: order: order 2: 0 of " in stderr
    content = json.loads(out.read_text())
    assert content["verdict"] == "IDENTICAL" and content["total"]["differing_bytes"] == 0
    assert list(content["axes"]) == ["order", "decode", "graphs", "restart"]
    assert content["axes"]["restart"]["schedules"][0]["new_process"] is True
    assert content["axes"]["restart"]["logprobs"] > 300
    assert content["total"]["logprobs"] == sum(axis["logprobs"] for axis in content["axes"].values())
    assert content["negative_control"]["differing_logprobs"] > 0
    assert content["subject"]["numerics"] == "exact" and len(content["subject"]["weights_sha256"]) == 64
    assert content["contract_version"] == 1 and content["kernels"] is None and content["libraries"]["torch"]
    assert sorted(out.parent.iterdir()) == [out, out.with_suffix(".md")]
    assert content["requests"]["of_tasks"] == {"arithmetic": 1} and content["requests"]["answers_cut_at"] == 10
    assert content["subject"]["tasks"] == ["arithmetic"]
    page = out.with_suffix(".md").read_text()
    assert page.startswith("# IDENTICAL: tinymath, arithmetic\n\nNo schedule changed a bit. 0 differing bytes in ")
    assert content["code"]["commit"] in page and content["libraries"]["torch"] in page
    assert "| restart | Another process | 1 |" in page and content["requests"]["answers_sha256"] in page


def test_a_difference_is_shown_and_exits_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = ExactOps.log_softmax

    def log_softmax(self: ExactOps, logits: Tensor) -> Tensor:
        result = real(self, logits)
        return torch.nextafter(result, torch.zeros(())) if len(logits) > 64 else result

    monkeypatch.setattr(ExactOps, "log_softmax", log_softmax)
    monkeypatch.setitem(EFFORTS, "quick", TINY)
    monkeypatch.setattr(proof.Prover, "_control", lambda self: proof.AxisResult("control"))
    out = tmp_path / "c.json"
    assert run_cli("engine", *CPU, "--quick", "--axes", "order", "--out", str(out)) == 1
    stdout = capsys.readouterr().out
    assert "verdict: DIFFERENT" in stdout and "first difference: order, order 2: request " in stdout
    assert proof.NONE_FOUND.split(":")[0] in " ".join(stdout.split()), "a silent control is said"
    first = json.loads(out.read_text())["first_difference"]
    assert first["expected"] != first["found"] and first["schedule"] == "order, order 2"


@pytest.mark.parametrize("name", ["c.md", "certificates", "folder.json"])
def test_a_certificate_that_could_not_be_written_is_refused_before_anything_runs(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """c.md would be overwritten by the certificate's own Markdown."""
    (tmp_path / "folder.json").mkdir()
    assert run_cli(*CPU, "model.path=/nowhere", "--out", str(tmp_path / name)) == 2
    assert f"{name}: name a file that ends in .json" in capsys.readouterr().err


def test_logprobs_are_asked_of_the_axis_mixed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("engine", *CPU, "--axes", "order", "--logprobs", "9") == 2
    assert "--logprobs=9: only the axis mixed" in capsys.readouterr().err


def test_kernels_that_failed_or_were_dropped_are_shown_and_exit_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`exact` runs in the place of `native` here, beside a planted verdict."""
    drop = {"kernel": "matmul", "schedule": {"block_m": 64}, "where": "M1", "reason": "3 of 9 elements differ"}
    verdict = {"schedules": 3, "checked": 4, "dropped": [drop], "failed": [], "cached": False, "seconds": 1.0}
    real, out = settings.resolve_settings, tmp_path / "c.json"

    def said(config: Any, invariant: bool, numerics: str, spec: Any) -> Any:
        return replace(real(config, invariant, numerics, spec), numerics="native")

    monkeypatch.setattr(settings, "resolve_settings", said)
    monkeypatch.setattr(kernels, "schedules_verdict", lambda *args: verdict)
    monkeypatch.setitem(EFFORTS, "quick", TINY)
    words = (*CPU, "--quick", "--axes", "order", "--out", str(out))
    assert run_cli(*words) == 0
    stdout = capsys.readouterr().out
    assert "kernels: dropped: matmul (block_m=64) at M1: 3 of 9 elements differ" in stdout
    assert "kernels: failed" not in stdout and "\nverdict: IDENTICAL" in stdout
    verdict["failed"] = ["read_out V9: 1 of 2 elements differ"]
    assert run_cli(*words) == 1
    stdout = capsys.readouterr().out
    assert "kernels: failed: read_out V9: 1 of 2 elements differ" in stdout and "\nverdict: FAILED" in stdout
    assert json.loads(out.read_text())["verdict"] == "FAILED"


def test_exact_kernels_have_the_bits_of_every_machine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_cli("kernels", *CPU) == 0
    out = capsys.readouterr().out
    assert "exact: 10 kernels against the bits of every other machine, 0 failed" in out and kernels.NEEDS_CUDA in out
    real = exact_kernels.exact.silu
    monkeypatch.setattr(exact_kernels.exact, "silu", lambda x: torch.nextafter(real(x), torch.zeros(())))
    assert run_cli("kernels", *CPU) == 1
    out = capsys.readouterr().out
    assert out.count("failed: ") == 1 and "failed: silu: its bits hash to " in out


def test_a_tasks_requests_are_those_of_a_run(small_checkpoint: Checkpoint) -> None:
    subject = Subject((*CPU, "task=arithmetic", "limit=3", "task.num_fewshot=1"), "quick")
    _, tasks = open_subject(subject.config, None)
    asked = [case for case in subject.cases(small_checkpoint, tasks) if case.origin]
    assert sorted(case.origin for case in asked) == [f"arithmetic, document {i}: " for i in range(3)]
    assert asked[0].what.startswith(asked[0].origin + "generation after ")
    tokenizer = small_checkpoint.tokenizer
    for case in asked:
        assert isinstance(case.request, GenerateRequest) and case.request.params.stop == ("Question:", "\n\n")
        assert tokenizer.decode(case.request.prompt_ids).count("Question:") == 2
        assert case.request.params.max_tokens == EFFORTS["quick"].answer_tokens
    whole = Subject((*subject.words, "task.generation.max_gen_toks=30"), "quick")
    uncut = [case.request for case in whole.cases(small_checkpoint, open_subject(whole.config, None)[1]) if case.origin]
    assert all(isinstance(request, GenerateRequest) and request.params.max_tokens == 30 for request in uncut)
    with pytest.raises(ConfigError, match=r"engine.num_threads: verify varies .*\n.*resume: verify leaves no run"):
        read_settings(("engine.num_threads=1", "resume=never"))


def test_a_pool_that_half_of_the_prompts_fill() -> None:
    prompts = [[1] * 16 + [2] * 16, [1] * 16 + [3], [4] * 5, [5] * 64]
    built = [Case(i, ScoreRequest(i, prompt, [5])) for i, prompt in enumerate(prompts)]
    assert schedules.filled_pages(built[:3], 16) == 3, "[1] * 16 is one page"
    assert schedules.filled_pages(built, 16) == 4, "the last one needs four by itself"


def test_a_cpu_needs_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    program = (
        "import sys; sys.modules['triton'] = None; from evalengine.__main__ import main; "
        "sys.exit(main(['verify', '--quick', 'engine.device=cpu', '--axes', 'ids']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0 and "verdict: IDENTICAL" in done.stdout, done.stderr


@pytest.mark.parametrize("what", ["engine", "kernels"])
@pytest.mark.parametrize(
    ("device", "capability", "triton", "said"),
    [
        ("cuda:9", (9, 0), True, "engine.device=cuda:9: this machine has 1 CUDA devices"),
        ("cudafoo", (9, 0), True, "engine.device=cudafoo: must be auto, cpu, cuda or cuda:<number>"),
        ("auto", (7, 5), True, "numerics=native: the kernels need bfloat16 tensor cores"),
        ("cuda", (9, 0), False, "numerics=native: the kernels are written in Triton, which is not installed"),
    ],
)
def test_what_the_settings_refuse_is_bad_usage(
    what: str, device: str, capability: tuple[int, int], triton: bool, said: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(attention_backends, "find_spec", lambda name: object() if triton else None)
    monkeypatch.setattr(kernels, "kernels_verdict", lambda *args, **more: pytest.fail("it ran"))
    assert run_cli(what, f"engine.device={device}") == 2
    out, err = capsys.readouterr()
    assert out == "" and said in err


def test_the_busy_axis_runs_beside_its_neighbour(prove: Callable[..., Proof], monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the engine's requests run while the other process does, and it is gone afterwards."""
    started: list[subprocess.Popen] = []
    popen = subprocess.Popen

    def recorded(*arguments: Any, **options: Any) -> subprocess.Popen:
        started.append(popen(*arguments, **options))
        return started[-1]

    beside: list[list[bool]] = []
    run = proof.together

    def together(llm: LLM, variant: Variant) -> Any:
        beside.append([process.poll() is None for process in started])
        return run(llm, variant)

    monkeypatch.setattr(subprocess, "Popen", recorded)
    monkeypatch.setattr(proof, "together", together)
    monkeypatch.setitem(axes.AXES, "busy", lambda work: axes.busy(replace(work, device_type="cuda")))
    found = prove("busy")
    assert found.axes[0].comparison.logprobs and found.verdict == "IDENTICAL"
    assert beside[0] == [True] and len(started) == 1 and started[0].poll() is not None


def test_a_shape_is_asked_no_task() -> None:
    assert Subject(("model.path=shape:qwen3-8b",), "gpu").task_names == []
    assert Subject((), "cpu").task_names == ["arithmetic"]


def test_without_a_neighbour_the_axis_is_skipped_and_says_why(
    prove: Callable[..., Proof], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "busy_neighbour", lambda device: busy_neighbour("nowhere"))
    monkeypatch.setitem(axes.AXES, "busy", lambda work: axes.busy(replace(work, device_type="cuda")))
    (axis,) = prove("busy").axes
    assert not axis.trials and axis.skipped is not None
    assert axis.skipped.startswith("no other process could keep nowhere busy: RuntimeError: Expected one of")


def test_a_new_process_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(EvalEngineError, match="the same requests in a new process failed"):
        again.in_a_new_process(Subject(CPU, "quick"), [])


def test_answers_survive_the_way_to_another_process(tmp_path: Path) -> None:
    answer = Answer([5, 6], np.array([np.nan, -0.0], np.float32))
    again._save(tmp_path / "a.npz", [(Case(3, ScoreRequest(3, [1], [5, 6])), answer)])
    found = again._load(tmp_path / "a.npz")
    assert found[3].token_ids == [5, 6] and found[3].logprobs.tobytes() == answer.logprobs.tobytes()


def test_reconfigure_keeps_the_weights_and_starts_afresh(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(max_num_seqs=4)
    assert llm.runner is not None
    model, before = llm.runner.model, llm.generate([[1, 2, 3]])[0]
    llm.reconfigure(block_size=8, num_kv_blocks=99, max_num_seqs=2)
    assert llm.runner.model is model and (llm.num_kv_blocks, llm.settings.block_size) == (99, 8)
    assert llm.scheduler.max_num_seqs == 2 and llm.stats.num_steps == 0 and not llm.block_manager.by_hash
    assert llm.generate([[1, 2, 3]])[0].logprobs.tobytes() == before.logprobs.tobytes()
    for refused in ({"dtype": "float32"}, {"max_model_len": 9}, {"device": "cpu"}, {"max_num_seqs": 0}):
        with pytest.raises(ConfigError):
            llm.reconfigure(**refused)
    assert llm.config.max_num_seqs == 2, "a refused setting leaves the engine as it was"
    llm.close()
    with pytest.raises(EvalEngineError, match="closed"):
        llm.reconfigure(max_num_seqs=1)


def test_a_refused_pool_leaves_the_engine_as_it_was(make_llm: Callable[..., LLM]) -> None:
    threads = torch.get_num_threads()
    llm = make_llm(num_kv_blocks=50, num_threads=threads + 1)
    before, answer = (llm.config, llm.settings), llm.generate([[1, 2, 3]])[0]
    with pytest.raises(ConfigError, match="num_kv_blocks=1000000000"):
        llm.reconfigure(num_kv_blocks=10**9, block_size=8, num_threads=threads + 2)
    assert (llm.config, llm.settings) == before and llm.num_kv_blocks == 50
    assert llm.generate([[1, 2, 3]])[0].logprobs.tobytes() == answer.logprobs.tobytes()
    assert torch.get_num_threads() == threads + 1
    llm.close()
    assert torch.get_num_threads() == threads


def test_threads_come_back_even_from_an_engine_that_cannot_be_rebuilt(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = torch.get_num_threads()
    llm = make_llm(num_threads=threads + 1)

    def build(*args: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(LLM, "_build", build)
    with pytest.raises(MemoryError):
        llm.reconfigure(max_num_seqs=3)
    llm.close()
    assert torch.get_num_threads() == threads


def test_kernels_are_verified_for_every_page_size(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def verify_kernels(self: ExactOps, *, block_size: int, **shapes: int) -> dict[str, Any]:
        seen.append(block_size)
        if block_size == 32:
            raise EvalEngineError("no promise for 32")
        return {"block_size": block_size}

    monkeypatch.setattr(ExactOps, "verify_kernels", verify_kernels)
    llm = make_llm(block_size=16)
    llm.reconfigure(max_num_seqs=3)
    assert seen == [16], "nothing else asks for it"
    llm.reconfigure(block_size=8)
    assert seen == [16, 8] and llm.kernels_verdict == {"block_size": 8}
    with pytest.raises(EvalEngineError, match="no promise for 32"):
        llm.reconfigure(block_size=32)
    assert llm.settings.block_size == 8 and llm.generate([[1, 2, 3]])
    llm.reconfigure(block_size=16)
    assert seen == [16, 8, 32] and llm.kernels_verdict == {"block_size": 16}


def test_axes_of_the_command_are_the_axes_there_are() -> None:
    assert set(cli.AXES) == set(axes.AXES) and len(cli.AXES) == len(axes.AXES)


@pytest.mark.slow
def test_the_default_on_a_cpu_takes_about_two_minutes() -> None:
    command = [sys.executable, "-m", "evalengine", "verify", *CPU]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
