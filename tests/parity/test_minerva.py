"""MATH has the prompts, hashes and results of lm-eval's tasks, and scores a spread of answers as lm-eval does.

Needs lm-eval and math-verify (`pip install evalengine[math]`). lm-eval runs in a process of its own, since it changes
the ANTLR that the process has loaded (tests/parity/minerva_theirs.py).
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evalengine.config.schema import DatasetConfig
from evalengine.config.shipped import outline
from evalengine.errors import ConfigError
from evalengine.tasks import math_worker, minerva
from evalengine.tasks.base import Task
from evalengine.tasks.instance import Response
from evalengine.tasks.lm_eval_yaml import installed_content
from evalengine.tasks.minerva import MathScorer, Minerva
from evalengine.tasks.registry import load_task
from tests.parity.agreement import answer_task, check_equal, fake_chat
from tests.parity.minerva_theirs import FINAL, VERDICTS, speak, spread
from tests.parity.shipped_rows import minerva_rows

for module in ("lm_eval", "math_verify"):
    pytest.importorskip(module, reason="needs lm-eval and math-verify (pip install evalengine[math])")

MATH500 = "minerva_math500"
NAMES = [*outline("minerva_math").tasks, MATH500]
CASES = [
    *({"name": name, "shots": 4, "chat": False} for name in NAMES),
    {"name": "minerva_math_algebra", "shots": 0, "chat": False},
    {"name": MATH500, "shots": 2, "chat": True},
]


@pytest.fixture(scope="module")
def scorer() -> MathScorer:
    return MathScorer()


def rows_for(name: str) -> list[dict[str, Any]]:
    """Returns 10 rows with the task's columns: MATH-500 has an answer beside the solution, and others."""
    if name != MATH500:
        return minerva_rows()[:10]
    rows = [{**row, "subject": row["type"], "unique_id": f"test/{n}.json"} for n, row in enumerate(minerva_rows())]
    keys = ("problem", "solution", "answer", "subject", "level", "unique_id")
    return [{key: {**row, "answer": "its own"}[key] for key in keys} for row in rows[:10]]


def write_rows(folder: Path, name: str) -> dict[str, str]:
    """Writes the task's rows to files of a new folder; returns split -> file."""
    folder.mkdir()
    files = {split: str(folder / f"{split}.jsonl") for split in ("train", "test")}
    for file in files.values():
        Path(file).write_text("\n".join(map(json.dumps, rows_for(name))), encoding="utf-8")
    return files


@pytest.fixture(scope="module")
def lm_eval_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """lm-eval's evaluations of all CASES, by their JSON."""
    folder = tmp_path_factory.mktemp("theirs")
    for name in (MATH500, "subjects"):
        write_rows(folder / name, name)
    (folder / "asked.json").write_text(json.dumps(CASES))
    command = [sys.executable, "-m", "tests.parity.minerva_theirs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    results: dict[str, Any] = json.loads((folder / "theirs.json").read_text())
    return results


def our_task(name: str, files: dict[str, str], shots: int, **arguments: Any) -> Task:
    config = outline(f"minerva_math/{name.removeprefix('minerva_math_')}" if "_math_" in name else name).tasks[name]
    dataset = DatasetConfig(path="none/none", files=files)
    return load_task(name, replace(config, dataset=dataset, num_fewshot=shots), **arguments)


@pytest.mark.slow  # importing and indexing lm-eval in another process takes 20 seconds
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['name']}-{case['shots']}-{case['chat']}")
def test_a_subject_is_lm_eval_s(case: dict[str, Any], lm_eval_results: dict[str, Any], tmp_path: Path) -> None:
    """Requests, hashes and results of a subject, or of MATH-500, equal lm-eval's, and some answers are right."""
    name, result = case["name"], lm_eval_results[json.dumps(case)]
    chat = fake_chat if case["chat"] else None
    task = our_task(name, write_rows(tmp_path / "ours", name), case["shots"], chat=chat, fewshot_as_multiturn=True)
    assert task.version == float(result["versions"][name])
    check_equal(result, name, task, answer_task(task, speak))
    num_right = sum(sample["math_verify"] for sample in result["samples"][name])
    assert num_right > 0 or name == MATH500, "an answer that is right is among them"


def test_every_task_names_lm_eval_s_dataset_and_settings() -> None:
    for name in NAMES:
        config = outline("minerva_math").tasks.get(name) or outline(name).tasks[name]
        file = installed_content(f"minerva_math/{name}.yaml")
        assert (config.dataset.path, config.dataset.name) == (file["dataset_path"], file["dataset_name"])
        assert (config.version, config.num_fewshot) == (file["metadata"]["version"], file["num_fewshot"])
        assert [*Minerva.metrics] == [entry["metric"] for entry in file["metric_list"]]
        assert config.generation.until == file["generation_kwargs"]["until"]


def test_exemplars_are_lm_eval_s_four(tmp_path: Path) -> None:
    """Prompts have lm-eval's four exemplars, or those of `fewshot_file`."""
    task = our_task("minerva_math_algebra", write_rows(tmp_path / "ours", "minerva_math_algebra"), 4)
    task.load()
    ((request,), *_) = task.instances(1)
    assert request.context.count("Problem:\n") == 5 and request.context.count("I hope it is correct.") == 4
    mine = tmp_path / "mine.jsonl"
    mine.write_text(json.dumps({"problem": "1 + 1?", "solution": "Two."}) + "\n")
    files = write_rows(tmp_path / "more", "minerva_math_algebra")
    config = replace(outline("minerva_math/algebra").tasks["minerva_math_algebra"], fewshot_file=str(mine))
    own = load_task(
        "minerva_math_algebra", replace(config, dataset=DatasetConfig(path="none/none", files=files), num_fewshot=1)
    )
    own.load()
    ((request,), *_) = own.instances(1)
    assert request.context.startswith("Problem:\n1 + 1?\n\nSolution: Two.\n\nProblem:\nWhat")


def test_math_500_is_sampled_several_times(tmp_path: Path) -> None:
    """Each of the two metrics has pass@k and avg@k; an answer in a box is right for math_verify alone."""
    config = outline(MATH500).tasks[MATH500]
    dataset = DatasetConfig(path="none/none", files=write_rows(tmp_path / "rows", MATH500))
    generation = replace(config.generation, temperature=1.0)
    task = load_task(
        MATH500, replace(config, dataset=dataset, repeats=4, pass_at=[1], generation=generation, num_fewshot=0)
    )
    task.load()
    doc = task.docs[0]
    final = f"Final Answer: The final answer is ${doc['answer']}$. I hope it is correct."
    texts = ("so", final, f"\\boxed{{{doc['answer']}}}", "")
    assert len(task.instances(1)[0]) == len(texts)
    values = task.process_results(doc, [Response(text=text) for text in texts])
    assert {name: value for (name, _), value in values.items()} == {
        "exact_match": 0.0, "math_verify": 0.0,
        "exact_match pass@1": 0.25, "exact_match pass@4": 1.0, "exact_match avg@4": 0.25,
        "math_verify pass@1": 0.5, "math_verify pass@4": 1.0, "math_verify avg@4": 0.5,
    }  # fmt: skip
    assert {name for name, _ in values} == {*task.metrics} == {*task.higher_is_better()}


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in (1, 2, 3))])
def test_answers_are_scored_as_by_lm_eval_with_the_antlr_that_it_asks_for(part: int, scorer: MathScorer) -> None:
    """Answers that are right, written otherwise, wrong, malformed or empty get the verdicts written with ANTLR 4.11."""
    expected = json.loads(VERDICTS.read_text(encoding="utf-8"))["verdicts"]
    right, count = [0, 0], 0
    assert [*expected] == [*spread()]
    for solution, answers in [*spread().items()][part::4]:
        gold = scorer.ask({"solution": solution})["answer"]
        scores = [scorer.scores({"solution": solution, "answer": gold}, answer) for answer in answers]
        pairs = [(int(score["exact_match"]), int(score["math_verify"])) for score in scores]
        assert [gold, " ".join(f"{exact}{verified}" for exact, verified in pairs)] == expected[solution]
        right = [right[0] + sum(pair[0] for pair in pairs), right[1] + sum(pair[1] for pair in pairs)]
        count += len(pairs)
    assert all(count / 12 < some < count / 2 for some in right), "both sides of both metrics are reached"


def test_without_the_older_encoding_sympy_reads_nothing() -> None:
    """Our reading of ANTLR is needed: the unchanged ANTLR 4.9 cannot read sympy's parser, and lm-eval refuses it."""
    code = (
        f"import sys; sys.path.insert(0, {str(Path(math_worker.__file__).parent)!r})\n"
        "import math_worker, antlr4\n"
        "from sympy.parsing.latex import _parse_latex_antlr as latex\n"
        "print(latex.LaTeXParser)\n"
        "math_worker.scorer(sys.argv[1])"
    )
    file = str(minerva.installed_file(minerva.SCORER))
    done = subprocess.run([sys.executable, "-c", code, file], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "None\n" and "antlr4-python3-runtime==4.11" in done.stderr


@pytest.mark.slow  # each of the two metrics takes its five seconds
def test_an_answer_that_takes_too_long_is_wrong(scorer: MathScorer, caplog: pytest.LogCaptureFixture) -> None:
    doc = {"solution": "$\\boxed{2}$", "answer": "2"}
    with caplog.at_level(logging.WARNING):
        assert scorer.scores(doc, FINAL.format("$2^{9^{9^{9^9}}}$")) == minerva.WRONG
    assert "was ended after five seconds" in caplog.text


def test_an_answer_that_ends_the_worker_is_wrong(scorer: MathScorer, caplog: pytest.LogCaptureFixture) -> None:
    doc = {"solution": "$\\boxed{2}$", "answer": "2"}
    scorer.ask({})
    assert scorer._worker is not None
    scorer._worker.kill()
    with caplog.at_level(logging.WARNING):
        assert scorer.scores(doc, FINAL.format("$2$")) == minerva.WRONG, "the answer that it died over"
    assert "comparing an answer ended the process that compares (exit code -9)" in caplog.text
    assert scorer.scores(doc, FINAL.format("$2$")) == {"exact_match": 1.0, "math_verify": 1.0}, "another one started"


def test_rows_and_packages_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row without an answer and a package that is not installed are named."""
    files = write_rows(tmp_path / "rows", "minerva_math_algebra")
    Path(files["test"]).write_text('{"problem": "2?", "solution": "It is 2."}\n')
    with pytest.raises(ConfigError, match=r"row 0 is not as expected: its solution has no \\boxed{} answer"):
        our_task("minerva_math_algebra", files, 4).load()
    monkeypatch.setattr(Minerva, "packages", ("no_such_package", "nor_this"))
    with pytest.raises(ConfigError, match=r"no_such_package, nor_this are not installed: .*'evalengine\[math\]'"):
        our_task("minerva_math_algebra", files, 4)
