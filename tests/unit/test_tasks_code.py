"""What code tasks make of answers, and of the verdicts on them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from evalengine.cli.tasks import needs
from evalengine.config.compose import compose_jobs
from evalengine.config.schema import DatasetConfig
from evalengine.config.shipped import outline
from evalengine.errors import ConfigError
from evalengine.tasks.code import CodeTask, HumanEval, HumanEvalInstruct, MBPPInstruct, first_block
from evalengine.tasks.instance import ProgramLimits, ProgramVerdict, Response
from evalengine.tasks.lm_eval_yaml import returned
from evalengine.tasks.metric import pass_at_k
from evalengine.tasks.registry import load_task
from evalengine.util.plain_files import Tagged

DOC = {"prompt": "def f():\n", "test": "def check(g):\n    assert g()", "entry_point": "f"}


def task_of(name: str, *settings: str) -> CodeTask:
    """The shipped task, without its rows."""
    composed = compose_jobs([f"task={name}", *settings])[0].config if settings else outline(name)
    config = replace(composed.tasks[name], dataset=DatasetConfig(path="none"))
    task = load_task(name, config)
    assert isinstance(task, CodeTask)
    return task


def test_pass_at_k_is_code_evals() -> None:
    """code_eval's product form: 1 - prod(1 - k / i), i = n - c + 1 ... n."""
    for n in range(1, 40):
        for c in range(n + 1):
            for k in range(1, n + 1):
                expected = 1.0 if n - c < k else 1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1))
                assert math.isclose(pass_at_k(n, c, k), expected, rel_tol=1e-12, abs_tol=1e-14)


def test_the_program_is_the_code_and_its_tests() -> None:
    task = task_of("humaneval")
    assert task.program(DOC, "    return 1") == "def f():\n    return 1\ndef check(g):\n    assert g()\ncheck(f)"
    instruct = task_of("humaneval_instruct")
    assert isinstance(instruct, HumanEvalInstruct) and not isinstance(task, HumanEvalInstruct)
    assert instruct.code(DOC, "    return 1\n```\nDone.") == "def f():\n    return 1\n"
    assert instruct.gen_prefix(DOC) == "Here is the completed function:\n```python\ndef f():\n\n"


@pytest.mark.parametrize(
    ("text", "code"),
    [("x = 1\n```", " = 1"), ("\nx = 1\n```\nso", "x = 1"), ("python\nx = 1```", "x = 1"), ("x = 1", ""), ("", "")],
)
def test_what_is_read_as_code(text: str, code: str) -> None:
    """As in lm-eval, the first text loses its first word, and the fourth has no code: its block has no end."""
    assert task_of("mbpp_plus_instruct").code({}, text) == code
    assert (first_block(f"```{text}") or "") == code


def test_one_value_a_document_from_its_verdicts() -> None:
    def responses(*outcomes: str) -> list[Response]:
        return [Response("x", verdict=ProgramVerdict(outcome)) for outcome in outcomes]

    key = ("pass@1", "create_test")
    task = task_of("humaneval")
    assert task.process_results(DOC, responses("passed")) == {key: 1.0}
    for outcome in ("failed", "timeout", "memory", "refused"):
        assert task.process_results(DOC, responses(outcome)) == {key: 0.0}
    assert task.process_results(DOC, [Response("x")]) == {key: 0.0}, "the rehearsal has no verdicts"
    hot = ("task.repeats=3", "task.generation.temperature=1", "task.pass_at=[1,2]")
    scores = task_of("humaneval", *hot).process_results(DOC, responses("passed", "failed", "timeout"))
    assert scores == {(f"pass@{k}", "create_test"): pytest.approx(v) for k, v in ((1, 1 / 3), (2, 2 / 3), (3, 1.0))}
    mbpp = task_of("mbpp_plus_instruct", *hot[:2]).process_results({}, responses("passed", "failed", "failed"))
    assert mbpp == {("pass_at_1", "extract_code"): pytest.approx(1 / 3), ("pass@3", "extract_code"): 1.0}
    assert [*task_of("humaneval_64").metrics] == [f"pass@{k}" for k in (2, 8, 16, 32, 64)]


def test_limits_and_python_are_part_of_what_a_task_is() -> None:
    task, patient = task_of("humaneval"), task_of("humaneval", "task.code_timeout=10")
    assert task.limits == ProgramLimits() and patient.limits == ProgramLimits(cpu_seconds=10, wall_seconds=100)
    assert task.definition() != patient.definition() and "python" in task.definition()


def test_the_list_of_tasks_says_what_it_needs() -> None:
    (job,) = compose_jobs(["task=[mbpp,gsm8k]"])
    assert [*needs(job.config.tasks["mbpp"])] == ["allow_code_execution=true", "evalengine[lm-eval]"]
    assert [*needs(job.config.tasks["gsm8k"])] == []
    (job,) = compose_jobs(["task=humaneval_64"])
    metrics = HumanEval.metrics_of(job.config.tasks["humaneval_64"])
    assert [*metrics] == [f"pass@{k}" for k in (2, 8, 16, 32, 64)]


def test_settings_that_a_code_task_does_not_take() -> None:
    """Each is refused by its name."""
    (job,) = compose_jobs(["task=humaneval"])
    config = job.config.tasks["humaneval"]
    template = replace(config.template, metric_list=[{"metric": "exact_match"}], output_type="loglikelihood")
    with pytest.raises(ConfigError) as caught:
        HumanEval("mine", replace(config, template=template))
    assert "template.metric_list" in str(caught.value) and "template.output_type" in str(caught.value)
    with pytest.raises(ConfigError, match="must be less than or equal to 86400"):
        compose_jobs(["task=humaneval", "task.code_timeout=100000"])
    assert MBPPInstruct.runs_programs and not config.template.fewshot_config.samples


def test_exemplars_are_read_from_a_function_that_only_returns_them(tmp_path: Path) -> None:
    """Nothing of the file is run: running it would leave a trace."""
    trace = tmp_path / "trace"
    (tmp_path / "utils.py").write_text(
        f"open({str(trace)!r}, 'w')\n"
        "def plain():\n    return [{'text': 'a', 'is_fewshot': True}]\n"
        f"def works():\n    return [open({str(trace)!r}, 'w')]\n"
        "def longer():\n    x = 1\n    return [x]\n"
    )
    assert returned(Tagged("!function", "utils.plain"), tmp_path) == [{"text": "a", "is_fewshot": True}]
    for name in ("utils.works", "utils.longer", "utils.absent", "other.plain"):
        with pytest.raises(ValueError, match=f"!function {name}: "):
            returned(Tagged("!function", name), tmp_path)
    assert not trace.exists()
