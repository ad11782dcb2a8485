"""HumanEval and MBPP against lm-eval's own definitions, over made-up rows in the data sets' shapes.

lm-eval scores by `code_eval` of Hugging Face's `evaluate`, which is fetched from the Hub when it is used. Here a
stand-in written from its published definition takes its place: the candidate, a line end and the test are one program,
which is right if it raises nothing, and pass@k is the product form of Chen et al. 2021 (arXiv 2107.03374), figure 3. It
runs the programs in this process; evalengine runs each in a process of its own.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evalengine.config.compose import compose_jobs
from evalengine.config.schema import DatasetConfig
from evalengine.harness.metrics import summarize
from evalengine.harness.outcome import sample_hashes, task_hash
from evalengine.integrations.sandbox.run import problem, run_programs
from evalengine.tasks.code import CodeTask
from evalengine.tasks.instance import Instance, Response
from evalengine.tasks.registry import load_task
from tests.parity.agreement import ITERATIONS, FakeChat, answer_task, as_json, evaluate_by_lm_eval, fake_rng
from tests.parity.local_tasks import lm_eval_task_file

pytest.importorskip("lm_eval", reason="needs lm-eval (pip install evalengine[lm-eval])")
pytest.importorskip("evaluate", reason="needs evaluate, which lm-eval's tasks import")

HUMANEVAL = ("humaneval", "humaneval_plus", "humaneval_instruct", "humaneval_64", "humaneval_64_instruct")
MBPP = ("mbpp", "mbpp_plus", "mbpp_instruct", "mbpp_plus_instruct")
DOCS = (6, 2)  # documents; the second number where each is sampled 64 times
CASES = [
    *((name, None, False) for name in (*HUMANEVAL[:-1], *MBPP)),
    ("humaneval_instruct", None, True),
    *(
        pytest.param(*case, marks=pytest.mark.slow)  # each takes two or three seconds
        for case in (
            ("humaneval_64_instruct", None, False),
            ("mbpp_instruct", None, True),
            ("mbpp_plus_instruct", None, True),
            ("mbpp", 2, False),
        )
    ),
]
Row = dict[str, Any]
Answered = list[tuple[Row, list[Instance], list[Response]]]


def humaneval_row(n: int) -> Row:
    return {
        "task_id": f"HumanEval/{n}",
        "prompt": f'import math\n\n\ndef add{n}(a, b):\n    """ >>> add{n}(1, 2)\n    {3 + n}\n    """\n',
        "canonical_solution": f"    return a + b + {n}\n",
        "test": f"\n\nMETADATA = {{}}\n\n\ndef check(candidate):\n    assert candidate(1, 2) == {3 + n}\n",
        "entry_point": f"add{n}",
    }


def mbpp_row(n: int) -> Row:
    calls = [f"assert add{n}({i}, 2) == {i + 2 + n}" for i in range(3 + n % 2)]
    row = {"task_id": n, "code": f"def add{n}(a, b):\r\n  return a + b + {n}", "test_list": calls}
    return {**row, "text": f"Write a function add{n} to add.", "test_setup_code": "", "challenge_test_list": []}


def mbpp_plus_row(n: int) -> Row:
    row = {name: value for name, value in mbpp_row(n).items() if name in ("task_id", "code", "test_list")}
    return {
        **row,
        "prompt": f"Write a function add{n} to add.",
        "source_file": "x.ipynb",
        "test_imports": [],
        "test": "#",
    }


def files_of(name: str, folder: Path) -> dict[str, str]:
    make = humaneval_row if name in HUMANEVAL else mbpp_plus_row if "plus" in name else mbpp_row
    files = {split: str(folder / f"{split}.jsonl") for split in ("test", "train", "validation", "prompt")}
    for file in files.values():
        Path(file).write_text(
            "\n".join(json.dumps(make(n)) for n in range(10, 10 + DOCS[name.startswith("humaneval_64")])),
            encoding="utf-8",
        )
    return files


class Programmer:
    """The made-up model: it answers the same prompt differently each time, and some answers are right.

    Code that follows the fence in the same line loses its first word to lm-eval, which takes it for the language."""

    def __init__(self, name: str) -> None:
        self._name, self._asked = name, Counter[str]()

    def __call__(self, context: str) -> str:
        self._asked[context] += 1
        rng = fake_rng(context, str(self._asked[context]))
        number = re.findall(r"add(\d+)", context)[-1]
        bodies = [f"    return a + b + {number}\n", f"    return math.fsum([a, b, {number}])\n", "    return a\n",
                  "    raise SystemExit(0)\n", "    return (\n", "    yield 1\n", ""]  # fmt: skip
        body = rng.choice(bodies[:2] if int(number) % 2 else bodies)
        if self._name in HUMANEVAL:
            endless = "instruct" not in self._name
            return body + rng.choice(["", "# done", "x = 1 / 0\n"] if endless else ["", "```\nIt adds.", "\n```"])
        code = f"import math\ndef add{number}(a, b):\n{body or '    pass'}"
        sure = [f"\n{code}\n```"] if int(number) % 2 else []
        ends = [
            f"\n{code}\n```",
            f"{code}\n```",
            f"\n{code}```python\nx\n```",
            code,
            f"python\n{code}\n```\nand\n```\nno\n```",
            "``` ",
        ]
        return rng.choice(sure or [*ends, f"Sure:\n```python\n{code}\n```"]) if "instruct" in self._name else code


class CodeEval:
    """Implements `code_eval`'s published definition, within this process."""

    def compute(self, references: list[str], predictions: list[list[str]], k: list[int]) -> tuple[dict[str, Any], Any]:
        totals = [len(candidates) for candidates in predictions]
        rights = [sum(self._passes(f"{candidate}\n{test}") for candidate in candidates)
                  for test, candidates in zip(references, predictions, strict=True)]  # fmt: skip
        estimates = {}
        for j in k:
            if all(total >= j for total in totals):
                estimates[f"pass@{j}"] = np.mean([self._estimate(n, c, j) for n, c in zip(totals, rights, strict=True)])
        return estimates, None

    @staticmethod
    def _passes(program: str) -> bool:
        try:
            exec(compile(program, "<candidate>", "exec", dont_inherit=True), {})
        except BaseException:
            return False
        return True

    @staticmethod
    def _estimate(n: int, c: int, k: int) -> float:
        return 1.0 if n - c < k else float(1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))


def our_task(name: str, files: dict[str, str], shots: int | None, **arguments: Any) -> CodeTask:
    (job,) = compose_jobs([f"task={name}", *([] if shots is None else [f"task.num_fewshot={shots}"])])
    config = replace(job.config.tasks[name], dataset=DatasetConfig(path="none/none", files=files))
    task = load_task(name, config, **arguments)
    assert isinstance(task, CodeTask)
    return task


def judged(task: CodeTask, answered: Answered) -> Answered:
    """Returns the responses with the verdicts that a run gives them."""
    programs = {task.program(doc, answer.text): task.limits for doc, _, responses in answered for answer in responses}
    verdicts = run_programs(programs, isolated=True)
    return [
        (doc, instances, [replace(answer, verdict=verdicts[task.program(doc, answer.text)]) for answer in responses])
        for doc, instances, responses in answered
    ]


@pytest.mark.parametrize(("name", "shots", "chat"), CASES)
def test_a_code_task_is_lm_eval_s(
    name: str, shots: int | None, chat: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything that lm-eval computes for the task equals ours, and it does not without the programs' verdicts."""
    if (reason := problem(True)) is not None:
        pytest.skip(f"programs cannot be isolated here: {reason}")
    import evaluate

    monkeypatch.setattr(evaluate, "load", lambda *_: CodeEval())
    files = files_of(name, tmp_path)
    settings: dict[str, Any] = {"system_instruction": "Be brief." if chat else None, "fewshot_as_multiturn": True}
    reference = evaluate_by_lm_eval(
        lm_eval_task_file(name, files), shots, Programmer(name),  # type: ignore[arg-type]
        apply_chat_template=chat, confirm_run_unsafe_code=True, **settings,
    )  # fmt: skip
    task = our_task(name, files, shots, chat=FakeChat() if chat else None, **settings)
    answered = judged(task, answer_task(task, Programmer(name)))
    check(reference, name, task, answered)
    unjudged = [
        (doc, instances, [replace(answer, verdict=None) for answer in responses])
        for doc, instances, responses in answered
    ]
    with pytest.raises(AssertionError):  # a response without a verdict is wrong
        check(reference, name, task, unjudged)


def check(reference: dict[str, Any], name: str, task: CodeTask, answered: Answered) -> None:
    """Asserts equal requests, settings, targets, code, hashes, versions and results."""
    from lm_eval.models.utils import normalize_gen_kwargs

    samples, hashes = reference["samples"][name], []
    assert len(samples) == len(answered) == DOCS[len(answered[0][2]) > 1]
    for sample, (doc, instances, responses) in zip(samples, answered, strict=True):
        ((context, settings),) = sample["arguments"]
        wanted = normalize_gen_kwargs(settings)
        for instance in instances:
            generation = instance.generation
            assert generation is not None and instance.context == context
            assert wanted["until"] == [*generation.until] and wanted["max_gen_toks"] == generation.max_gen_toks
            assert wanted["temperature"] == generation.temperature and wanted.get("top_p", 1.0) == generation.top_p
        assert sample["target"] == task.target(doc) and sample["resps"] == [[response.text for response in responses]]
        assert as_json(sample["filtered_resps"]) == as_json(task.filtered(doc, responses)[sample["filter"]])
        hashes.append(sample_hashes(doc, instances, task.target(doc)))
        own_hashes = hashes[-1]
        assert own_hashes == (sample["doc_hash"], sample["prompt_hash"], sample["target_hash"])
    joined = "".join(s["doc_hash"] + s["prompt_hash"] + s["target_hash"] for s in samples)
    assert task_hash(hashes, 1) == hashlib.sha256(joined.encode()).hexdigest()
    results = summarize(task, [task.process_results(doc, responses) for doc, _, responses in answered], ITERATIONS)
    expected = {key: value for key, value in reference["results"][name].items() if "," in key}
    assert results.keys() == expected.keys()
    for key, value in expected.items():
        assert results[key] == (value if isinstance(value, str) else pytest.approx(value, rel=1e-12)), key
    values = [value for key, value in expected.items() if "stderr" not in key]
    assert any(0 < value < 1 for value in values), "some are right and some wrong, or nothing was compared"
    better = reference["higher_is_better"][name]
    assert all(better[metric] for metric in task.metrics) and {*task.higher_is_better().values()} == {True}
    assert task.version == float(reference["versions"][name]) and task.num_fewshot == reference["n-shot"][name]


def test_every_code_task_names_lm_eval_s_dataset() -> None:
    from evalengine.tasks.lm_eval_yaml import _read
    from tests.parity.local_tasks import task_manager

    (job,) = compose_jobs([f"task=[{','.join((*HUMANEVAL, *MBPP))}]"])
    for name, task in job.config.tasks.items():
        content = _read(Path(task_manager().task_index[name].yaml_path), ())
        assert (task.dataset.path, task.dataset.name) == (content["dataset_path"], content.get("dataset_name")), name
