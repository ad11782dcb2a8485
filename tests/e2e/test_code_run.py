"""Runs of a task whose answers are programs: refused unless allowed, scored after generation, and resumed there."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from evalengine.config.compose import compose_jobs
from evalengine.engine.llm import LLM
from evalengine.errors import ConfigError
from evalengine.harness.plan import prepare
from evalengine.report.html.samples import _facts
from evalengine.report.read.load import load_run_data
from tests.e2e.command import Run, call, finish, finished, runs, start
from tests.unit.hostile_programs import wait_for

ADD = "def add(a, b):\n    return {body}\n# The answer goes on with this line: "
TEST = "def check(candidate):\n    assert candidate(1, 2) == 3"
SETTINGS = ("task=humaneval", "task.generation.max_gen_toks=4", "engine.device=cpu", "progress=false")
ALLOWED = (*SETTINGS, "allow_code_execution=true", "task.code_timeout=1")


pytestmark = pytest.mark.usefixtures("kernel_isolates")


def rows(folder: Path, *bodies: str) -> str:
    """Writes a document for each function body, whose text ends in a comment that the model's few words continue;
    returns the setting that names their folder."""
    (folder / "humaneval").mkdir(parents=True)
    lines = [
        json.dumps({"task_id": f"{n}", "prompt": ADD.format(body=body), "test": TEST, "entry_point": "add"})
        for n, body in enumerate(bodies)
    ]
    (folder / "humaneval" / "test.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return f"data_dir={folder}"


def outcomes(run: Run) -> list[str]:
    """How each record's program ended, after checking that the samples say the same."""
    ends = [record.outcome for record in run.records]
    assert [[outcome] for outcome in ends] == [sample["outcomes"] for sample in run.samples("humaneval")]
    return [str(outcome) for outcome in ends]


def test_programs_are_run_only_where_that_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(*_: object, **__: object) -> None:
        raise AssertionError("weights are loaded")

    monkeypatch.setattr(LLM, "_load", loaded)
    data = rows(tmp_path / "data", "a + b")
    done = call(*SETTINGS, data, f"output_dir={tmp_path / 'out'}")
    assert done.code == 2 and not (tmp_path / "out").exists()
    assert done.err.startswith("evalengine: allow_code_execution=false: humaneval runs programs that the model wrote; ")
    wrong = call(*SETTINGS, data, "allow_code_execution=yes_please")
    assert wrong.code == 2 and "allow_code_execution=yes_please: must be false, true or without_isolation" in wrong.err
    alien = call("task=arithmetic", "task.code_timeout=2")
    assert alien.code == 2 and "code_timeout=2: this task runs no programs" in alien.err
    assert call("tasks", "humaneval", "--show", "1", data).code == 0, "prompts are shown without it"


def test_a_run_scores_its_programs_and_says_how_each_ended(tmp_path: Path) -> None:
    data = rows(
        tmp_path / "data", "a + b", "a - b", "__import__('sys').exit(0)", "[1] * (1 << 40)", "sum(iter(int, 1))"
    )
    run = finished(tmp_path / "out", *ALLOWED, data)
    expected = ["passed", "failed: AssertionError", "failed: SystemExit: 0", "memory", "timeout: 1 s of processor time"]
    assert outcomes(run) == expected
    assert run.results["humaneval"]["pass@1,create_test"] == 0.2
    programs = run.manifest["programs"]
    assert programs["outcomes"] == {"humaneval": {"passed": 1, "failed": 2, "timeout": 1, "memory": 1}}
    assert programs["isolated"] is True and programs["limits"]["humaneval"]["cpu_seconds"] == 1
    assert run.manifest["identity"]["definitions"]["humaneval"]["limits"]["cpu_seconds"] == 1
    assert "allow_code_execution" not in run.manifest["identity"], "a permission is no part of a result"
    data_of_run = load_run_data(run.folder)
    facts = [_facts(data_of_run, item) for item in data_of_run.run.items.values()]
    assert [dict(sample_facts)["program"] for sample_facts in facts] == expected, "each sample on the page says it"
    page = (run.folder / "report.html").read_text(encoding="utf-8")
    assert "humaneval ran 5 generated programs: 1 passed, 2 failed, 1 timeout, 1 memory." in page
    rewritten = call("report", str(run.folder))
    assert rewritten.code == 0


@pytest.mark.slow  # eight seconds; killed runs are resumed in test_resume, killed programs end in test_programs_left
def test_a_run_killed_while_programs_run_goes_on_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed run takes its programs along; resumed, it runs programs and generates nothing again."""
    mark = f"3.{os.getpid():09}"  # Seconds that the first program sleeps; no other process sleeps so long.
    sleeps = f"__import__('subprocess').run(['sleep', '{mark}'])"
    words = (*ALLOWED, rows(tmp_path / "data", sleeps, "a + b"), f"output_dir={tmp_path / 'out'}")
    process = start(*words)
    assert wait_for(mark, there=True, seconds=120), finish(process, 1)
    process.send_signal(signal.SIGKILL)
    finish(process)
    assert wait_for(mark, there=False), "its programs end with it"
    (killed,) = runs(tmp_path / "out")
    assert len((killed.folder / "journal.jsonl").read_text().splitlines()) == 2
    request_counts: list[int] = []
    real = LLM.run

    def counted(self: LLM, requests: object, *rest: object) -> object:
        request_counts.append(len(requests))  # type: ignore[arg-type]
        return real(self, requests, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(LLM, "run", counted)
    done = call(*words)
    assert done.code == 0 and "2 of them answered by the interrupted run" in done.out, done.err
    assert request_counts == [0], "nothing is generated again"
    (run,) = runs(tmp_path / "out")
    assert run.folder == killed.folder and outcomes(run) == ["failed: AssertionError", "passed"]
    assert "humaneval: 2 generated programs, 1 passed, 1 failed" in done.out


def test_samples_of_a_document_give_pass_at_k(tmp_path: Path) -> None:
    data = rows(tmp_path / "data", "a + b", "a - b")
    several = ("task.repeats=3", "task.pass_at=[1,2]", "task.generation.temperature=1.0")
    run = finished(tmp_path / "out", *ALLOWED, data, *several)
    values = {name: value for name, value in run.results["humaneval"].items() if "," in name and "stderr" not in name}
    num_passed = [sum(outcome == "passed" for outcome in sample["outcomes"]) for sample in run.samples("humaneval")]
    assert values.keys() == {f"pass@{k},create_test" for k in (1, 2, 3)} and num_passed[1] == 0 < num_passed[0]
    assert values["pass@1,create_test"] == pytest.approx(sum(num_passed) / 6)


def test_what_scores_nothing_needs_no_permission(tmp_path: Path) -> None:
    """`verify` and `explain` prepare the same prompts without permission, because they run no program."""
    (job,) = compose_jobs([*SETTINGS, rows(tmp_path / "data", "a + b")])
    with pytest.raises(ConfigError, match="allow_code_execution=false: humaneval runs programs"):
        prepare(job.config)
    assert [task.name for task in prepare(job.config, scores=False)[1]] == ["humaneval"]
