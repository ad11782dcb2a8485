"""Runs a task with one made-up model by lm-eval and by evalengine, and checks that everything of both is equal."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evalengine.harness.metrics import summarize
from evalengine.harness.outcome import sample_hashes, task_hash
from evalengine.tasks.base import Task
from evalengine.tasks.instance import Response
from tests.parity.local_tasks import task_manager

Speak = Callable[[str], str]  # context -> the text that the made-up model writes
ITERATIONS = 100  # the bootstrap's samples for a standard error


def fake_rng(*texts: str) -> random.Random:
    """Returns a generator that is seeded by the texts alone."""
    return random.Random(hashlib.sha256("\0".join(texts).encode()).digest())


def fake_loglikelihood(context: str, continuation: str) -> tuple[float, bool]:
    """Returns the made-up model's log-likelihood, and whether it is greedy; both depend on the texts alone."""
    rng = fake_rng(context, continuation)
    return -rng.uniform(0, 5) * len(continuation), rng.random() < 0.5


def fake_chat(messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
    """Renders messages by the made-up model's chat template."""
    return "".join(f"<{m['role']}>{m['content']}</>" for m in messages) + "<assistant>" * add_generation_prompt


class FakeChat:
    """`fake_chat` in the form of a run's chat template, which can leave the last message open."""

    def __call__(self, messages: list[dict[str, str]]) -> str:
        return fake_chat(messages)

    def continued(self, messages: list[dict[str, str]]) -> str:
        return fake_chat(messages, add_generation_prompt=False)


def evaluate_by_lm_eval(config: Path | str, shots: int, speak: Speak, **arguments: Any) -> dict[str, Any]:
    """Returns lm-eval's evaluation of a task by the made-up model.

    config: the task's file, or a name that `task_manager` knows.
    """
    import lm_eval
    from lm_eval.api.model import LM

    class Fake(LM):
        tokenizer_name = "fake"

        def loglikelihood(self, requests: Any) -> list[tuple[float, bool]]:
            return [fake_loglikelihood(*request.args) for request in requests]

        def loglikelihood_rolling(self, requests: Any) -> list[float]:
            return [fake_loglikelihood("", request.args[0])[0] for request in requests]

        def generate_until(self, requests: Any) -> list[str]:
            return [speak(request.args[0]) for request in requests]

        def apply_chat_template(self, chat_history: Any, add_generation_prompt: bool = True) -> str:
            return fake_chat(chat_history, add_generation_prompt)

        def chat_template(self, chat_template: Any = False) -> str:
            return "fake"

    result = lm_eval.simple_evaluate(
        model=Fake(),
        tasks=[str(config)],
        task_manager=arguments.pop("task_manager", None) or task_manager(),
        num_fewshot=shots,
        bootstrap_iters=ITERATIONS,
        fewshot_random_seed=1234,
        **arguments,
    )
    assert isinstance(result, dict)
    return result


def answer_task(task: Task, speak: Speak) -> list[tuple[Any, list[Any], list[Response]]]:
    """Returns (document, its requests, the made-up model's responses) for every document of the task."""
    task.load()
    answered = []
    for doc, instances in zip(task.docs, task.instances(), strict=True):
        responses = []
        for instance in instances:
            if instance.kind == "generate_until":
                responses.append(Response(text=speak(instance.context)))
            else:
                rolling = instance.kind == "loglikelihood_rolling"
                pair = ("", instance.context) if rolling else (instance.context, instance.continuation)
                responses.append(Response("", *fake_loglikelihood(*pair)))
        answered.append((doc, instances, responses))
    return answered


def as_json(value: Any) -> Any:
    """Returns the value as JSON holds it, with lists for tuples."""
    return json.loads(json.dumps(value))


def check_equal(
    reference: dict[str, Any], name: str, task: Task, answered: list[tuple[Any, list[Any], list[Response]]]
) -> None:
    """Asserts that requests, targets, filtered answers, hashes and results equal those of `evaluate_by_lm_eval`."""
    from lm_eval.models.utils import normalize_gen_kwargs

    samples = reference["samples"][name]
    assert len(samples) == len(answered) * len(task.filters)
    hashes = []
    for sample, (doc, instances, responses) in zip(samples, answered * len(task.filters), strict=True):
        if instances[0].kind == "loglikelihood":
            requests = [(i.context, i.continuation) for i in instances]
        else:
            requests = [(i.context,) for i in instances]
        assert [tuple(a)[: len(requests[0])] for a in sample["arguments"]] == requests
        assert sample["target"] == task.target(doc)
        assert as_json(sample["filtered_resps"]) == as_json(task.filtered(doc, responses)[sample["filter"]])
        for arguments, instance in zip(sample["arguments"], instances, strict=True):
            if (generation := instance.generation) is not None:
                wanted = normalize_gen_kwargs(arguments[1])
                assert wanted["until"] == [*generation.until]
                assert (wanted["max_gen_toks"], wanted.get("temperature", 0.0)) == (
                    generation.max_gen_toks,
                    generation.temperature,
                )
        hashes.append(sample_hashes(doc, instances, task.target(doc)))
        assert hashes[-1] == (
            sample["doc_hash"],
            sample["prompt_hash"],
            sample["target_hash"],
        )
    joined = "".join(s["doc_hash"] + s["prompt_hash"] + s["target_hash"] for s in samples)
    assert task_hash(hashes[: len(answered)], len(task.filters)) == hashlib.sha256(joined.encode()).hexdigest()

    results = summarize(task, [task.process_results(doc, responses) for doc, _, responses in answered], ITERATIONS)
    expected = {k: v for k, v in reference["results"][name].items() if "," in k}
    assert set(results) == set(expected)
    for key, value in expected.items():
        assert results[key] == (value if isinstance(value, str) else pytest.approx(value, rel=1e-12, abs=0)), key
