"""Prompts, hashes, extracted answers and results equal lm-eval's, on real rows and with a made-up model.

Needs lm-eval 0.4.13 (`pip install evalengine[lm-eval]`) and EVALENGINE_DATA, the folder with the tasks' rows.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from evalengine.config.compose import compose_jobs
from evalengine.config.schema import DatasetConfig, GenerationConfig, TaskConfig
from evalengine.harness.outcome import sample_hashes, task_hash
from evalengine.tasks.lm_eval_yaml import installed_file
from evalengine.tasks.registry import load_task
from tests.parity.agreement import answer_task, check_equal, evaluate_by_lm_eval, fake_chat, fake_rng
from tests.parity.local_tasks import DATA, lm_eval_task_file, rows_for

pytest.importorskip("lm_eval", reason="needs lm-eval (pip install evalengine[lm-eval])")
pytestmark = pytest.mark.skipif(DATA is None, reason="needs EVALENGINE_DATA, the folder with real rows")

TEXTS = (
    "#### {}",
    "#### {}.",
    "The answer is {}.",
    "so ${} in all",
    "It is {} then 7 (42)",
    "nothing",
    "{:,}\n#### {:,}",
)


def fake_text(context: str, golds: dict[str, int]) -> str:
    """Returns the made-up model's answer; in 7 of 10 cases it has the right number of the context's last question."""
    rng = fake_rng(context)
    question = next(q for q in golds if context.find(q, len(context) - len(q) - 60) >= 0)
    value = golds[question] if rng.random() < 0.7 else rng.randrange(5000)
    return rng.choice(TEXTS).format(value, value)


def our_config(name: str, files: dict[str, str], **changes: Any) -> TaskConfig:
    text = (Path(__file__).parents[2] / "conf" / "task" / f"{name}.yaml").read_text(encoding="utf-8")
    config = yaml.safe_load(text)
    config["dataset"] = DatasetConfig(path=config["dataset"]["path"], files=files)
    config["generation"] = GenerationConfig(**config.get("generation", {}))
    return dataclasses.replace(TaskConfig(**config), **changes)


@pytest.mark.parametrize(
    ("name", "shots", "chat", "multiturn"),
    [
        ("gsm8k", 5, False, True),
        ("gsm8k", 3, True, True),
        ("gsm8k", 3, True, False),
        ("gsm8k_cot", 8, False, True),
        ("hellaswag", 0, False, True),
        ("hellaswag", 10, False, True),
        ("hellaswag", 2, True, True),
        ("arc_easy", 0, False, True),
        ("arc_easy", 25, False, True),
        ("arc_challenge", 3, True, False),
        ("wikitext", 0, False, True),
    ],
)
def test_task_agrees_with_lm_eval(name: str, shots: int, chat: bool, multiturn: bool, tmp_path: Path) -> None:
    files = rows_for(name, tmp_path)
    system = "Be brief." if chat else None
    rows = [json.loads(line) for line in Path(files["test"]).read_text(encoding="utf-8").split("\n")]
    golds = {
        r["question"]: int(r["answer"].split("####")[1].replace(",", "")) for r in rows if name.startswith("gsm8k")
    }

    def speak(context: str) -> str:
        return fake_text(context, golds)

    reference = evaluate_by_lm_eval(
        *(lm_eval_task_file(name, files), shots, speak),
        apply_chat_template=chat,
        fewshot_as_multiturn=multiturn,
        system_instruction=system,
    )
    changes: dict[str, Any] = {"num_fewshot": shots}
    if name == "gsm8k_cot":
        changes["fewshot_file"] = str(tmp_path / "exemplars.yaml")
        samples = reference["configs"][name]["fewshot_config"]
        samples = samples["samples"] if isinstance(samples, dict) else samples.samples
        Path(changes["fewshot_file"]).write_text(yaml.safe_dump(samples), encoding="utf-8")
    task = load_task(
        name,
        our_config(name, files, **changes),
        chat=fake_chat if chat else None,
        fewshot_as_multiturn=multiturn,
        system_instruction=system,
    )
    check_equal(reference, name, task, answer_task(task, speak))


@pytest.mark.parametrize(
    ("shots", "chat", "multiturn"), [(0, False, True), (5, False, True), (3, True, True), (3, True, False)]
)
def test_several_contexts_agree_with_lm_eval(shots: int, chat: bool, multiturn: bool, tmp_path: Path) -> None:
    """WinoGrande on made-up rows: one text after each of two contexts; exemplars are drawn as without a test split."""
    names = ["Ann", "Bob", "Carla", "Dan"]
    rows = [
        {
            "sentence": f"{a} lent {b} {number} books because _ had {'many' if number % 2 else 'none'}.",
            "option1": a,
            "option2": b,
            "answer": str(1 + (number % 2 == 0)),
        }
        for number, (a, b) in enumerate((a, b) for a in names for b in names if a != b)
    ]
    files = {}
    for split, part in {"train": [*rows[4:], rows[5]], "validation": rows[:8]}.items():
        files[split] = str(tmp_path / f"{split}.jsonl")
        Path(files[split]).write_text("\n".join(map(json.dumps, part)), encoding="utf-8")
    system = "Be brief." if chat else None
    reference = evaluate_by_lm_eval(
        *(lm_eval_task_file("winogrande", {**files, "test": files["validation"]}), shots, str),
        apply_chat_template=chat,
        fewshot_as_multiturn=multiturn,
        system_instruction=system,
    )
    task = load_task(
        "winogrande",
        TaskConfig(
            cls="winogrande:WinoGrande",
            version=1.0,
            dataset=DatasetConfig(path="none/none", files=files),
            split="validation",
            fewshot_split="train",
            num_fewshot=shots,
        ),
        chat=fake_chat if chat else None,
        fewshot_as_multiturn=multiturn,
        system_instruction=system,
    )
    check_equal(reference, "winogrande", task, answer_task(task, str))


@pytest.mark.parametrize(
    ("name", "file", "shots"), [("gsm8k", "gsm8k/gsm8k.yaml", 5), ("arc_easy", "arc/arc_easy.yaml", 3)]
)
def test_lm_eval_s_own_file_is_the_shipped_task(name: str, file: str, shots: int, tmp_path: Path) -> None:
    """lm-eval's YAML file, unchanged, through our reader: prompts, hashes and scores of up to 300 rows are the same."""
    lines = (Path(str(DATA)) / name / "test.jsonl").read_text(encoding="utf-8").splitlines()
    files = {"train": lines[100:], "validation": lines[:1], "test": lines[:300]}  # exemplars among the evaluated rows
    for split, part in files.items():
        (tmp_path / f"{split}.jsonl").write_text("\n".join(part), encoding="utf-8")
    data = {"include": str(installed_file(file)), "dataset_path": str(tmp_path), "dataset_name": None}
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(data), encoding="utf-8")
    (job,) = compose_jobs([f"task={tmp_path / 'theirs.yaml'}", f"task.num_fewshot={shots}"])
    theirs = load_task(name, job.config.tasks[name])
    paths = {split: str(tmp_path / f"{split}.jsonl") for split in files}
    ours = load_task(name, our_config(name, paths, num_fewshot=shots))

    def speak(context: str) -> str:
        rng = fake_rng(context)
        return rng.choice(TEXTS).format(*[rng.choice([18, 3, 70000])] * 2)

    results = []
    for task in (ours, theirs):
        answers = answer_task(task, speak)
        hashes = [sample_hashes(doc, requests, task.target(doc)) for doc, requests, _ in answers]
        scores = [task.process_results(doc, responses) for doc, _, responses in answers]
        results.append((answers, task_hash(hashes, len(task.filters)), scores, task.version, task.aggregation()))
    assert results[0] == results[1] and len(results[0][0]) == 300
