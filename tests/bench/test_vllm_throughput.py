"""benchmarks/vllm_throughput.py with a stand-in for vLLM: our requests, lm-eval's calls, and a file for `--compare`."""

from __future__ import annotations

import ast
import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from benchmarks import vllm_throughput
from evalengine.bench.throughput_compare import read_others
from evalengine.bench.workloads import VOCAB_SIZE, make_workload
from evalengine.engine.request import GenerateRequest

SCRIPT = Path(vllm_throughput.__file__)
FILES = SCRIPT.with_name("workloads")


def our_ids(name: str, most: int) -> list[list[int]]:
    files = {name: FILES / f"{name}.jsonl.gz"} if name != "random" else {}
    requests = make_workload(name, files, "a model", VOCAB_SIZE, 4096, most).requests
    return [r.prompt_ids if isinstance(r, GenerateRequest) else [*r.context_ids, *r.continuation_ids] for r in requests]


@pytest.mark.parametrize("name", ["random", "gsm8k", "mmlu", "hellaswag"])
def test_both_engines_have_the_same_requests(name: str) -> None:
    requests, others = vllm_throughput.workload(name, FILES, 300)
    assert [request.ids for request in requests] == our_ids(name, 300) and len(requests) >= 256
    assert len(others) == 256 and not {tuple(r.ids) for r in requests} & {tuple(r.ids) for r in others}
    assert all((request.output_tokens is None) == (name in ("mmlu", "hellaswag")) for request in requests)


class FakeVllm(ModuleType):
    """Notes each call, and answers with as many tokens as are wanted; `short`: with one less."""

    def __init__(self, short: int = 0) -> None:
        super().__init__("vllm")
        self.__version__, self.short = "0.26.0", short
        self.calls: list[Any] = []
        self.SamplingParams, self.LLM = SimpleNamespace, self.start

    def start(self, **settings: Any) -> FakeVllm:
        self.calls.append((settings, os.environ.get("VLLM_BATCH_INVARIANT")))
        return self

    def reset_prefix_cache(self) -> None:
        self.calls.append("reset")

    def generate(self, prompts: list[dict[str, list[int]]], params: list[Any], use_tqdm: bool) -> list[Any]:
        self.calls.append([(len(p["prompt_token_ids"]), vars(q)) for p, q in zip(prompts, params, strict=True)])
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[1] * (q.max_tokens - self.short))]) for q in params]


def run(monkeypatch: pytest.MonkeyPatch, output: Path, *words: str, short: int = 0) -> FakeVllm:
    fake = FakeVllm(short)
    monkeypatch.setitem(sys.modules, "vllm", fake)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    fixed = ["--model", "m", "--preset", "qwen3-8b", "--files", str(FILES), "--output", str(output)]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *fixed, *words])
    vllm_throughput.main()
    return fake


def test_calls_are_lm_evals_and_the_file_is_one_to_compare_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    output = tmp_path / "vllm.json"
    fake = run(monkeypatch, output, "--workloads", "random:5,hellaswag:5", "--rounds", "2")
    (settings, invariant), *calls = fake.calls
    assert settings["load_format"] == "dummy" and settings["skip_tokenizer_init"] and invariant == "0"
    assert [call if call == "reset" else len(call) for call in calls] == [5, 5, "reset", 5, "reset", 5] * 2
    generated, scored = calls[3], calls[9]
    for call in (generated, scored):
        lengths = [length for length, _ in call]
        assert lengths == sorted(lengths, reverse=True) and call in (calls[5], calls[11])
    assert all(q["ignore_eos"] and q["temperature"] == 0 and q["max_tokens"] >= 100 for _, q in generated)
    assert all(q["prompt_logprobs"] == 1 and q["max_tokens"] == 1 for _, q in scored)
    (column,) = read_others(output)
    assert column.label == "vllm 0.26.0, ordinary"
    assert {case for case, _ in column.seconds} == {("qwen3-8b", name, 5) for name in ("random", "hellaswag")}
    first = json.loads(output.read_text())["rows"][0]
    assert first["prompt_tokens"] == sum(map(len, our_ids("random", 5))) and first["output_tokens"] > 0


def test_the_invariant_mode_is_set_before_vllm_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = run(monkeypatch, tmp_path / "vllm.json", "--workloads", "random:2", "--batch-invariant")
    assert fake.calls[0][1] == "1"
    assert json.loads((tmp_path / "vllm.json").read_text())["rows"][0]["mode"] == "batch-invariant"


def test_a_short_answer_or_an_unknown_workload_ends_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    output = tmp_path / "vllm.json"
    with pytest.raises(SystemExit, match="was answered by"):
        run(monkeypatch, output, "--workloads", "random:2", short=1)
    with pytest.raises(SystemExit, match=r"no nothing\.jsonl\.gz"):
        run(monkeypatch, output, "--workloads", "nothing")
    assert not output.exists()


def test_it_runs_where_evalengine_is_not_installed() -> None:
    imports = [
        node for node in ast.walk(ast.parse(SCRIPT.read_text())) if isinstance(node, (ast.Import, ast.ImportFrom))
    ]
    names = {alias.name for node in imports for alias in node.names} | {getattr(node, "module", "") for node in imports}
    assert not [name for name in names if name and name.split(".")[0] in ("evalengine", "benchmarks")]
