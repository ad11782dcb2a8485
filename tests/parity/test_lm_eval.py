"""Prompts, hashes, extracted answers and results against lm-eval itself, on real rows and with a fake model.

Needs lm-eval 0.4.12 (`pip install evalengine[lm-eval]`) and EVALENGINE_DATA, the folder with the tasks' rows.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from evalengine.config import DatasetConfig, GenerationConfig, TaskConfig
from evalengine.harness.hashes import sample_hashes, task_hash
from evalengine.harness.metrics import summarize
from evalengine.tasks.base import Response, Task
from evalengine.tasks.registry import load_task
from tests.parity.local_tasks import DATA, rows_for, task_manager, their_task

lm_eval = pytest.importorskip("lm_eval", reason="needs lm-eval (pip install evalengine[lm-eval])")
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


def fake_rng(*texts: str) -> random.Random:
    return random.Random(hashlib.sha256("\0".join(texts).encode()).digest())


def fake_loglikelihood(context: str, continuation: str) -> tuple[float, bool]:
    rng = fake_rng(context, continuation)
    return -rng.uniform(0, 5) * len(continuation), rng.random() < 0.5


def fake_text(context: str, golds: dict[str, int]) -> str:
    rng = fake_rng(context)
    question = next(q for q in golds if context.find(q, len(context) - len(q) - 60) >= 0)
    value = golds[question] if rng.random() < 0.7 else rng.randrange(5000)
    return rng.choice(TEXTS).format(value, value)


def fake_chat(messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
    return "".join(f"<{m['role']}>{m['content']}</>" for m in messages) + "<assistant>" * add_generation_prompt


def our_config(name: str, files: dict[str, str], **changes: Any) -> TaskConfig:
    text = (Path(__file__).parents[2] / "conf" / "task" / f"{name}.yaml").read_text(encoding="utf-8")
    config = yaml.safe_load(text)
    config["dataset"] = DatasetConfig(path=config["dataset"]["path"], files=files)
    config["generation"] = GenerationConfig(**config.get("generation", {}))
    return dataclasses.replace(TaskConfig(**config), **changes)


def run_theirs(name: str, files: dict[str, str], shots: int, golds: dict[str, int], **arguments: Any) -> dict[str, Any]:
    from lm_eval.api.model import LM

    class Fake(LM):
        tokenizer_name = "fake"

        def loglikelihood(self, requests: Any) -> list[tuple[float, bool]]:
            return [fake_loglikelihood(*request.args) for request in requests]

        def loglikelihood_rolling(self, requests: Any) -> list[float]:
            return [fake_loglikelihood("", request.args[0])[0] for request in requests]

        def generate_until(self, requests: Any) -> list[str]:
            return [fake_text(request.args[0], golds) for request in requests]

        def apply_chat_template(self, chat_history: Any, add_generation_prompt: bool = True) -> str:
            return fake_chat(chat_history, add_generation_prompt)

        def chat_template(self, chat_template: Any = False) -> str:
            return "fake"

    config = their_task(name, files)
    result = lm_eval.simple_evaluate(
        model=Fake(),
        tasks=[str(config)],
        task_manager=task_manager(),
        num_fewshot=shots,
        bootstrap_iters=100,
        fewshot_random_seed=1234,
        **arguments,
    )
    assert isinstance(result, dict)
    return result


def run_ours(task: Task, golds: dict[str, int]) -> list[tuple[Any, list[Any], list[Response]]]:
    task.load()
    answered = []
    for doc, instances in zip(task.docs, task.instances(), strict=True):
        responses = []
        for instance in instances:
            if instance.kind == "generate_until":
                responses.append(Response(text=fake_text(instance.context, golds)))
            else:
                rolling = instance.kind == "loglikelihood_rolling"
                pair = ("", instance.context) if rolling else (instance.context, instance.continuation)
                responses.append(Response("", *fake_loglikelihood(*pair)))
        answered.append((doc, instances, responses))
    return answered


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
    theirs = run_theirs(
        name, files, shots, golds, apply_chat_template=chat, fewshot_as_multiturn=multiturn, system_instruction=system
    )
    changes: dict[str, Any] = {"num_fewshot": shots}
    if name == "gsm8k_cot":
        changes["fewshot_file"] = str(tmp_path / "exemplars.yaml")
        samples = theirs["configs"][name]["fewshot_config"]
        samples = samples["samples"] if isinstance(samples, dict) else samples.samples
        Path(changes["fewshot_file"]).write_text(yaml.safe_dump(samples), encoding="utf-8")
    task = load_task(
        name,
        our_config(name, files, **changes),
        chat=fake_chat if chat else None,
        fewshot_as_multiturn=multiturn,
        system_instruction=system,
    )
    check_equal(theirs, name, task, run_ours(task, golds))


@pytest.mark.parametrize(
    ("shots", "chat", "multiturn"), [(0, False, True), (5, False, True), (3, True, True), (3, True, False)]
)
def test_several_contexts_agree_with_lm_eval(shots: int, chat: bool, multiturn: bool, tmp_path: Path) -> None:
    """WinoGrande on rows of our own: one text after each of two contexts, exemplars drawn as without a test split."""
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
    theirs = run_theirs(
        *("winogrande", {**files, "test": files["validation"]}, shots, {}),
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
    check_equal(theirs, "winogrande", task, run_ours(task, {}))


def check_equal(
    theirs: dict[str, Any], name: str, task: Task, ours: list[tuple[Any, list[Any], list[Response]]]
) -> None:
    """Requests, targets, filtered answers, hashes and results."""
    samples = theirs["samples"][name]
    assert len(samples) == len(ours) * len(task.filters)
    hashes = []
    for sample, (doc, instances, responses) in zip(samples, ours * len(task.filters), strict=True):
        if instances[0].kind == "loglikelihood":
            sent = [(i.context, i.continuation) for i in instances]
        else:
            sent = [(i.context,) for i in instances]
        assert [tuple(a)[: len(sent[0])] for a in sample["arguments"]] == sent
        assert sample["target"] == task.target(doc)
        assert [f if not isinstance(f, list) else tuple(f) for f in sample["filtered_resps"]] == task.filtered(
            doc, responses
        )[sample["filter"]]
        hashes.append(sample_hashes(doc, instances, task.target(doc)))
        assert (hashes[-1].doc, hashes[-1].prompt, hashes[-1].target) == (
            sample["doc_hash"],
            sample["prompt_hash"],
            sample["target_hash"],
        )
    joined = "".join(s["doc_hash"] + s["prompt_hash"] + s["target_hash"] for s in samples)
    assert task_hash(hashes[: len(ours)], len(task.filters)) == hashlib.sha256(joined.encode()).hexdigest()

    results = summarize(task, [task.process_results(doc, responses) for doc, _, responses in ours])
    expected = {k: v for k, v in theirs["results"][name].items() if "," in k}
    assert set(results) == set(expected)
    for key, value in expected.items():
        assert results[key] == (value if isinstance(value, str) else pytest.approx(value, rel=1e-12, abs=0)), key
