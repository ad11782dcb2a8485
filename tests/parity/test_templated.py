"""A YAML file run by lm-eval and by evalengine gives equal requests, targets, hashes, filtered answers and results.

The rows are made up. Needs lm-eval (`pip install evalengine[lm-eval]`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from evalengine.config.compose import compose_jobs
from evalengine.tasks.base import Task
from evalengine.tasks.registry import load_task
from tests.parity.agreement import FakeChat, answer_task, check_equal, evaluate_by_lm_eval, fake_rng

pytest.importorskip("lm_eval", reason="needs lm-eval (pip install evalengine[lm-eval])")

ROWS = [
    {
        "question": f"What is {n} + {n}",
        "options": [f"{n} apples", f"{2 * n} apples", f"{3 * n} pears ü"],
        "gold": 1 if n % 3 else 2,
        "letter": "B" if n % 3 else "C",
        "both": [1, 2],
        "words": f"Two lots of {n} make {2 * n}",
        "nested": {"text": [str(n), str(2 * n)], "label": ["A", "B"]},
        "aliases": [f"{2 * n}", f"It is {2 * n}."],
        "topic": "odd_numbers" if n % 2 else "even_numbers",
    }
    for n in range(1, 25)
]
CHOICE = {
    "output_type": "multiple_choice",
    "doc_to_text": "Question: {{question}}?\nAnswer:",
    "doc_to_choice": "options",
    "doc_to_target": "gold",
}
TEXT = {
    "output_type": "generate_until",
    "doc_to_text": "Q: {{question}}?\nA:",
    "doc_to_target": "{{nested.text[1]}}",
    "generation_kwargs": {"until": ["Q:"], "max_gen_toks": 20, "do_sample": False},
}
NUMBER = {"function": "regex", "regex_pattern": r"(-?[0-9]+)|(none)", "group_select": -1}
CASES: dict[str, dict[str, Any]] = {
    "choice_column": {**CHOICE, "test_split": "test", "training_split": "train"},
    "choice_validation": {**CHOICE, "validation_split": "validation", "training_split": "train"},
    "choice_test_only": {**CHOICE, "test_split": "test"},
    "choice_same_split": {**CHOICE, "test_split": "test", "fewshot_split": "test"},
    "choice_templates": {
        **CHOICE,
        "test_split": "test",
        "fewshot_split": "train",
        "target_delimiter": "\n",
        "fewshot_delimiter": "\n##\n",
        "doc_to_text": "question",
        "doc_to_choice": "{{[options[0], options[1], topic]}}",
        "doc_to_target": "{{nested.label.index('B')}}",
        "description": "About {{topic.replace('_', ' ')}}.\n\n",
        "metric_list": [{"metric": name} for name in ("acc", "acc_norm", "acc_bytes", "exact_match")],
    },
    "choice_letters": {
        **CHOICE,
        "test_split": "test",
        "fewshot_split": "train",
        "fewshot_config": {"sampler": "first_n"},
        "doc_to_choice": ["A", "B", "C"],
        "doc_to_target": "letter",
        "description": "Letters.\n",
    },
    "choice_mapping": {**CHOICE, "test_split": "test", "doc_to_choice": {"a": "yes", "b": "no", "c": "maybe"}},
    "choice_integer": {**CHOICE, "test_split": "test", "training_split": "train", "doc_to_target": 1},
    "choice_several": {
        **CHOICE,
        "test_split": "test",
        "training_split": "train",
        "doc_to_target": "both",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}, {"metric": "exact_match"}],
    },
    "choice_contexts": {
        **CHOICE,
        "validation_split": "validation",
        "training_split": "train",
        "doc_to_text": "gold",
        "doc_to_target": "{{question}}",
        "metric_list": [{"metric": "acc"}],
    },
    "choice_samples": {
        **CHOICE,
        "validation_split": "validation",
        "fewshot_config": {"sampler": "first_n", "samples": ROWS[20:24], "doc_to_text": "Look: {{question}}\nAnswer:"},
    },
    "choice_replaced": {**CHOICE, "test_split": "test", "doc_to_text": "{{question|regex_replace('[0-9]+', 'N')}}\n"},
    "text_plain": {**TEXT, "test_split": "test", "training_split": "train"},
    "text_defaults": {
        **TEXT,
        "test_split": "test",
        "training_split": "train",
        "generation_kwargs": None,
        "fewshot_delimiter": "\n",
    },
    "text_filters": {
        **TEXT,
        "test_split": "test",
        "fewshot_split": "train",
        "fewshot_config": {"target_delimiter": " -> "},
        "filter_list": [
            {
                "name": "strict",
                "filter": [{"function": "regex", "regex_pattern": r"#### ([0-9]+)"}, {"function": "take_first"}],
            },
            {"name": "last", "filter": [NUMBER, {"function": "take_first"}]},
            {
                "name": "lower",
                "filter": [{"function": "lowercase"}, {"function": "remove_whitespace"}, {"function": "take_first"}],
            },
            {"name": "vote", "filter": [NUMBER, {"function": "majority_vote"}, {"function": "take_first"}]},
            {"name": "list", "filter": [NUMBER]},
        ],
        "metric_list": [
            {
                "metric": "exact_match",
                "aggregation": "mean",
                "higher_is_better": True,
                "ignore_case": True,
                "ignore_punctuation": True,
            }
        ],
    },
    "text_several": {
        **TEXT,
        "validation_split": "validation",
        "training_split": "train",
        "doc_to_target": "{{aliases}}",
        "repeats": 1,
        "metric_list": [{"metric": "exact_match", "regexes_to_ignore": ["[Ii]t is ", r"\."]}],
    },
    "text_begun": {
        **TEXT,
        "test_split": "test",
        "fewshot_split": "train",
        "gen_prefix": "The sum of {{nested.text[0]}}s is",
    },
    "text_begun_by_a_column": {**TEXT, "test_split": "test", "fewshot_split": "train", "gen_prefix": "words"},
    "text_begun_with_space": {
        **TEXT,
        "doc_to_text": "Q: {{question}}?\nA: ",
        "test_split": "test",
        "fewshot_split": "train",
        "gen_prefix": "So: ",
    },
    "choice_begun": {**CHOICE, "test_split": "test", "fewshot_split": "train", "gen_prefix": "It is"},
    "choice_begun_with_space": {**CHOICE, "test_split": "test", "fewshot_split": "train", "gen_prefix": "It is\n"},
    "likelihood_begun": {
        "output_type": "loglikelihood",
        "test_split": "test",
        "training_split": "train",
        "doc_to_text": "{{words.split(' ')[:-1]|join(' ')}}",
        "doc_to_target": "{{' '+words.split(' ')[-1]}}",
        "gen_prefix": "and",
    },
    "text_of_choices": {**TEXT, "test_split": "test", "doc_to_choice": "options", "doc_to_target": "gold"},
    "likelihood": {
        "output_type": "loglikelihood",
        "test_split": "test",
        "training_split": "train",
        "doc_to_text": "{{words.split(' ')[:-1]|join(' ')}}",
        "doc_to_target": "{{' '+words.split(' ')[-1]}}",
    },
    "rolling": {
        "output_type": "loglikelihood_rolling",
        "test_split": "test",
        "doc_to_text": "",
        "doc_to_target": "{{words}}",
    },
}
WITHOUT_SHOTS = ("rolling", "choice_several")  # lm-eval takes no list of indices as an exemplar's answer


def write(folder: Path, name: str, content: dict[str, Any]) -> Path:
    files = {}
    for split, rows in {"train": [*ROWS[10:], ROWS[3]], "validation": ROWS[:12], "test": ROWS[:12]}.items():
        files[split] = str(folder / f"{split}.jsonl")
        Path(files[split]).write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    base = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": files}, "metadata": {"version": 1.5}}
    file = folder / "own.yaml"
    file.write_text(yaml.safe_dump({**base, **content}, allow_unicode=True), encoding="utf-8")
    return file


def our_task(file: Path, shots: int, **arguments: Any) -> Task:
    (job,) = compose_jobs([f"task='{file}'", f"task.num_fewshot={shots}"])
    ((name, config),) = job.config.tasks.items()
    return load_task(name, config, **arguments)


def speak(context: str) -> str:
    rng = fake_rng(context)
    number = int("".join(filter(str.isdigit, context[-12:])) or 3)
    form = rng.choice(["{}", " {}. ", "#### {}", "It is {}.", "NONE", "{} apples", "7 or {}"])
    return form.format(number * rng.choice([1, 1, 2]))


# Every case stays quick in one of the four ways to write a prompt, and each way has six or seven of the cases.
WAYS = [(0, False, True), (3, False, True), (3, True, True), (2, True, False)]
ASKED = [
    pytest.param(name, *way, marks=() if place % len(WAYS) == turn else pytest.mark.slow)
    for place, name in enumerate(CASES)
    for turn, way in enumerate(WAYS)
]


@pytest.mark.parametrize(("name", "shots", "chat", "multiturn"), ASKED)
def test_a_file_means_what_it_means_to_lm_eval(
    name: str, shots: int, chat: bool, multiturn: bool, tmp_path: Path
) -> None:
    if name in WITHOUT_SHOTS:
        shots = 0
    file = write(tmp_path, name, CASES[name])
    system = "Be brief." if chat else None
    reference = evaluate_by_lm_eval(
        file,
        shots,
        speak,
        apply_chat_template=chat,
        fewshot_as_multiturn=multiturn,
        system_instruction=system,
    )
    task = our_task(
        file,
        shots,
        chat=FakeChat() if chat else None,
        fewshot_as_multiturn=multiturn,
        system_instruction=system,
    )
    assert task.version == reference["versions"][name] == 1.5
    answered = answer_task(task, speak)
    check_equal(reference, name, task, answered)
    assert len(answered) == 12
