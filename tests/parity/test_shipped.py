"""The shipped tasks' requests, targets, hashes and results over made-up rows equal those of lm-eval's own tasks."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evalengine.config.compose import compose_jobs
from evalengine.config.schema import Config, DatasetConfig
from evalengine.tasks.base import Task
from evalengine.tasks.lm_eval_yaml import _read
from evalengine.tasks.registry import load_task
from tests.parity.agreement import answer_task, check_equal, evaluate_by_lm_eval, fake_chat, fake_rng
from tests.parity.local_tasks import lm_eval_task_file, task_manager
from tests.parity.shipped_rows import MAKERS, THINGS, rows_of

pytest.importorskip("lm_eval", reason="needs lm-eval (pip install evalengine[lm-eval])")


def files_of(rows: list[dict[str, Any]], folder: Path) -> dict[str, str]:
    """Writes every split that a task may name; exemplars and documents share rows. Returns split -> file."""
    parts = {"train": rows[8:], "validation": rows[:14], "test": rows[:14], "team_allocation": rows[:14]}
    files = {}
    for split, part in parts.items():
        files[split] = str(folder / f"{split}.jsonl")
        Path(files[split]).write_text("\n".join(map(json.dumps, part)), encoding="utf-8")
    return files


# The choice that gives a task, for tasks whose choice is not their name.
CHOSEN = {
    "bbh_cot_fewshot_navigate": "bbh/navigate",
    "mmlu_pro_computer_science": "mmlu_pro/computer_science",
    "leaderboard_musr_team_allocation": "musr/team_allocation",
    "mgsm_direct_de": "mgsm/direct_de",
    "mgsm_native_cot_te": "mgsm/native_cot_te",
    "mgsm_en_cot_zh": "mgsm/en_cot_zh",
}


@functools.cache
def _composed(choice: str) -> Config:
    """What choosing the task gives, composed once for all its forms: Hydra takes a third of a test's time."""
    (job,) = compose_jobs([f"task={choice}"])
    return job.config


def our_task(choice: str, name: str, files: dict[str, str], shots: int, **arguments: Any) -> Task:
    config = replace(_composed(choice).tasks[name], num_fewshot=shots)
    dataset = DatasetConfig(path="none/none", files=files, where=config.dataset.where)
    return load_task(name, replace(config, dataset=dataset), **arguments)


def speak(context: str) -> str:
    """Returns the made-up model's answer, in one of the forms that the tasks' filters read, or in none."""
    rng = fake_rng(context)
    thing = rng.choice([*THINGS, context.split(" ")[-1]])
    forms = [
        "{}",
        " The {}",
        "the {}!",
        "It is {}",
        "3",
        " AN {}",
        "\\boxed{{{}}}",
        "the answer is (B).",
        "The answer is (C). Or (D).",
        "Letter: B",
        f"It is {context.split('(B) ')[-1].split(chr(10))[0].upper()}!",
        "so the answer is Yes. Q",
        "so, {}'s",
        "$\\boxed{{3}}$",
        "x $k=2$.",
        "Die Antwort lautet 5.",
        "సమాధానం 7.",
        "The answer is {}",
        "The answer is 12.",
        "",
        "1 May 1990",
        "{} Ann hat",
    ]
    return rng.choice(forms).format(thing)


# (number of exemplars, whether there is a chat template, whether exemplars are messages of their own)
FORMS = [(0, False, True), (3, False, True), (2, True, True), (2, True, False)]
# These tasks take only some of FORMS, as test_members.py or another task of their class has the same plain prompts.
FEWER = {name: slice(2, 3) for name in ("aime25", "mgsm_direct_de", "mgsm_native_cot_te", "mgsm_en_cot_zh")}
FEWER |= {"aime24": slice(1), "drop": slice(1, 3)}


# Every task stays quick without exemplars and with a chat; test_templated.py has all four forms quick, over its cases.
ASKED = [
    pytest.param(name, *form, marks=pytest.mark.slow if form in FORMS[1::2] and name not in FEWER else ())
    for name in MAKERS
    for form in FORMS[FEWER.get(name, slice(None))]
]


@pytest.mark.parametrize(("name", "shots", "chat", "multiturn"), ASKED)
def test_a_shipped_task_is_lm_eval_s(name: str, shots: int, chat: bool, multiturn: bool, tmp_path: Path) -> None:
    """Requests, targets, hashes, version and results of a shipped task equal those of lm-eval's task."""
    files = files_of(rows_of(name), tmp_path)
    system = "Be brief." if chat else None
    arguments: dict[str, Any] = {"fewshot_as_multiturn": multiturn, "system_instruction": system}
    if name == "lambada_openai":
        shots = 0  # lm-eval draws exemplars from the evaluated documents, the asked one among them
    if name.startswith(("truthfulqa", "gpqa", "aime")):
        shots = 0  # lm-eval fixes the number, whatever the setting
    reference = evaluate_by_lm_eval(lm_eval_task_file(name, files), shots, speak, apply_chat_template=chat, **arguments)
    task = our_task(CHOSEN.get(name, name), name, files, shots, chat=fake_chat if chat else None, **arguments)
    assert task.version == float(reference["versions"][name])
    check_equal(reference, name, task, answer_task(task, speak))


def test_every_shipped_task_names_lm_eval_s_dataset() -> None:
    (job,) = compose_jobs([f"task=[{','.join(CHOSEN.get(name, name) for name in MAKERS)}]"])
    for name in MAKERS:
        content = _read(Path(task_manager().task_index[name].yaml_path), ())
        task = job.config.tasks[name]
        assert (task.dataset.path, task.dataset.name) == (content["dataset_path"], content.get("dataset_name")), name
