"""`benchmarks harness`, `cache` and `served` time real processes, and say what failed in them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.arguments import OWN
from benchmarks.served import other_answers
from benchmarks.served_sides import Answer, waited_seconds
from benchmarks.whole_run import timed, without_places
from evalengine.errors import EvalEngineError

FEW = ["limit=2", "task.generation.max_gen_toks=4", "engine.device=cpu"]


def test_a_run_is_timed_beside_its_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert OWN["harness"]([*FEW, "--rounds", "1", "--output", str(tmp_path)]) == 0
    (table,), (file,) = tmp_path.glob("harness-*.md"), tmp_path.glob("harness-*.json")
    assert capsys.readouterr().out.strip() in table.read_text()
    (taken,) = json.loads(file.read_text())["rounds"]
    # The run and its engine alone are two processes at two times, so whatever else the machine does may slow either.
    assert taken["whole_s"] > 0 and taken["alone_s"] > taken["start_s"] + taken["steps_s"] > 0
    assert taken["page_bytes"] > 10_000


def test_a_server_is_timed_beside_its_engine(tmp_path: Path) -> None:
    pytest.importorskip("fastapi", reason="needs fastapi: pip install 'evalengine[serve]'")
    words = ["engine.device=cpu", "--requests", "7", "--clients", "3", "--tokens", "4", "--logprobs", "--rounds", "1"]
    assert OWN["served"]([*words, "--output", str(tmp_path)]) == 0
    (file,) = tmp_path.glob("served-*.json")
    (taken,) = json.loads(file.read_text())["rounds"]
    assert taken["output_tokens"] == 28 and taken["other_answers"] == 0 and taken["ratio"] > 0


def test_the_busiest_threads_waiting_counts() -> None:
    before = {"1": (10, 7), "2": (0, 0)}
    after = {"1": (10 + 10**9, 7 + 10**9), "2": (2 * 10**9, 3 * 10**9), "3": (5, 9 * 10**9)}
    assert waited_seconds(before, after) == 3


def test_answers_of_a_server_that_are_not_the_engines_are_counted() -> None:
    answers: list[Answer] = [["a", [5], [-0.5], "length"], ["b", [6], [-0.25], "stop"]]
    assert other_answers(answers, answers) == 0
    assert other_answers(answers, [[*answer[:2], None, answer[3]] for answer in answers]) == 0
    assert other_answers(answers, answers[::-1]) == 2
    assert other_answers(answers, [["a", [5], [-0.5000001], "length"], answers[1]]) == 1


def test_a_process_that_fails_is_an_error_with_its_reason() -> None:
    with pytest.raises(EvalEngineError, match=r"bench x: `python -m evalengine limit=0 ...` failed: .*limit=0"):
        timed("bench x", ["-m", "evalengine", "limit=0", "output_dir=/nowhere"])


def test_a_published_command_names_no_folders_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "b.gguf").touch()
    kept = ["task=lm_eval/gsm8k", "model.path=Qwen/Qwen3-8B", "limit=5", "task=[a,lm_eval/b]"]
    told = without_places([f"data_dir={tmp_path}", f"model.path={tmp_path / 'b.gguf'}", *kept])
    assert told == [f"data_dir={tmp_path.name}", "model.path=b.gguf", *kept]
