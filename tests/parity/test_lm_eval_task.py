"""lm-eval's tasks inside our harness have the requests, answers, hashes and results that lm-eval gives them."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from evalengine.config.compose import compose_jobs
from evalengine.config.schema import Config
from evalengine.errors import ConfigError
from evalengine.harness.metrics import summarize
from evalengine.harness.outcome import sample_hashes, task_hash
from evalengine.integrations.lm_eval_tasks.task import bootstrap_stderr
from evalengine.records.lm_eval import TaskResult, group_results
from evalengine.tasks.base import Task
from evalengine.tasks.instance import Instance, Response
from evalengine.tasks.registry import load_task
from tests.parity.agreement import ITERATIONS, answer_task, as_json, evaluate_by_lm_eval, fake_chat, fake_rng
from tests.parity.lm_eval_rows import MORE, feed, write_rows
from tests.parity.shipped_rows import THINGS

pytest.importorskip("lm_eval", reason="needs lm-eval (pip install evalengine[lm-eval])")

Answered = list[tuple[Any, list[Instance], list[Response]]]
FIXED = ("truthfulqa", "gpqa", "squad_completion", "aime")  # lm-eval fixes 0 exemplars, whatever the setting
NO_SHOTS = ("lambada_openai", "wikitext", "iwslt2017-en-ar", *FIXED)


class Chat:
    """A chat template that can leave the last message open."""

    def __call__(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return fake_chat(messages, add_generation_prompt)

    def continued(self, messages: list[dict[str, str]]) -> str:
        return fake_chat(messages, False)


class Speaker:
    """The made-up model, which answers the same prompt differently each time."""

    def __init__(self) -> None:
        self._asked: Counter[str] = Counter()

    def __call__(self, context: str) -> str:
        self._asked[context] += 1
        rng = fake_rng(context, str(self._asked[context]))
        thing = rng.choice([*THINGS, "3", "11", context.split(" ")[-1]])
        forms = [" The {}", "It is {}", "#### {}", "The answer is {}.", "the answer is (B).", "red {}", "so {}'s\nQ"]
        return rng.choice(forms).format(thing)


def composed(folder: Path, *settings: str) -> Config:
    (job,) = compose_jobs([*settings, f"data_dir={folder}"])
    return job.config


def our_task(name: str, config: Config, **arguments: Any) -> Task:
    return load_task(name, config.tasks[name], data_dir=config.data_dir, **arguments)


def check(reference: dict[str, Any], name: str, task: Task, answered: Answered) -> dict[str, Any]:
    """Asserts equal requests, targets, filtered answers, hashes and results; returns the results."""
    from lm_eval.models.utils import normalize_gen_kwargs

    samples = reference["samples"][name]
    hashes = []
    for sample, (doc, instances, responses) in zip(samples, answered * len(task.filters), strict=True):
        first = [instance for instance in instances if instance.repeat == 0]
        for arguments, instance in zip(sample["arguments"], first, strict=True):
            assert arguments[0] == instance.context
            assert arguments[1:] == (instance.continuation,) or instance.kind != "loglikelihood"
            if (generation := instance.generation) is not None:
                wanted = normalize_gen_kwargs(arguments[1])
                assert wanted["until"] == [*generation.until]
                assert wanted["max_gen_toks"] == generation.max_gen_toks
                # DROP sets no temperature, and lm-eval's models are then greedy.
                assert wanted.get("temperature", 0.0) == generation.temperature
        assert sample["target"] == task.target(doc)
        assert as_json(sample["filtered_resps"]) == as_json(task.filtered(doc, responses)[sample["filter"]])
        hashes.append(sample_hashes(doc, instances, task.target(doc)))
        own_hashes = hashes[-1]
        assert own_hashes == (sample["doc_hash"], sample["prompt_hash"], sample["target_hash"])
    joined = "".join(s["doc_hash"] + s["prompt_hash"] + s["target_hash"] for s in samples)
    assert task_hash(hashes[: len(answered)], len(task.filters)) == hashlib.sha256(joined.encode()).hexdigest()
    results = summarize(task, [task.process_results(doc, responses) for doc, _, responses in answered], ITERATIONS)
    expected = {key: value for key, value in reference["results"][name].items() if "," in key}
    assert results.keys() == expected.keys() and results
    for key, value in expected.items():
        exact = isinstance(value, str)
        assert results[key] == (value if exact else pytest.approx(value, rel=1e-12, abs=0, nan_ok=True)), key
    assert task.higher_is_better() == {k: v for k, v in reference["higher_is_better"][name].items() if v is not None}
    assert task.version == reference["versions"][name] and task.num_fewshot == reference["n-shot"][name]
    return dict(results)


# Quick are the tasks whose kinds of request, metrics or exemplars differ, in one of two ways by turns; the
# rows of the others are in test_shipped.py, too.
QUICK = (
    *("cola", "mrpc", "cb", "wikitext", "gsm8k", "gsm8k_cot_self_consistency", "hellaswag", "iwslt2017-en-ar"),
    *("lambada_openai", "truthfulqa_mc2", "drop", "mmlu_pro_computer_science", "winogrande", "squad_completion"),
)
ASKED = [
    pytest.param(name, *way, marks=() if name in QUICK and QUICK.index(name) % 2 == turn else pytest.mark.slow)
    for name in MORE
    for turn, way in enumerate([(2, True), (0, False)])
]


@pytest.mark.parametrize(("name", "shots", "chat"), ASKED)
def test_a_task_is_lm_eval_s(
    name: str, shots: int, chat: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task chosen as lm_eval/NAME has lm-eval's requests, hashes and results, with exemplars and chat, too."""
    folder = write_rows(name, tmp_path / "data")
    shots = 0 if name.startswith(NO_SHOTS) else shots
    arguments: dict[str, Any] = {"system_instruction": "Be brief." if chat else None, "fewshot_as_multiturn": True}
    config = composed(folder, f"task=lm_eval/{name}", f"task.num_fewshot={shots}")
    task = our_task(name, config, chat=Chat() if chat else None, **arguments)
    answered = answer_task(task, Speaker())
    feed(monkeypatch, lambda *_: folder / name, tmp_path / "cache")
    reference = evaluate_by_lm_eval(name, shots, Speaker(), apply_chat_template=chat, **arguments)
    check(reference, name, task, answered)


def mmlu_rows(folder: Path) -> list[str]:
    """Writes FOLDER/mmlu/<subject>/<split>.jsonl for every subject of mmlu_stem, in several sizes; returns them."""
    subjects = sorted(name for name in compose_jobs(["task=lm_eval/mmlu_stem"])[0].config.tasks)
    for number, name in enumerate(subjects):
        place = folder / "mmlu" / name.removeprefix("mmlu_")
        place.mkdir(parents=True)
        for split, size in (("dev", 5), ("test", 3 + number % 4), ("validation", 2)):
            rows = [
                {
                    "question": f"{THINGS[n]} {number}?",
                    "choices": ["a", "b", "c", str(n)],
                    "answer": n % 4,
                    "subject": name,
                }
                for n in range(size)
            ]
            (place / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return subjects


@pytest.mark.parametrize("shots", [0, pytest.param(3, marks=pytest.mark.slow)])  # single tasks have quick exemplars
def test_a_group_is_lm_eval_s(shots: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group chosen as lm_eval/NAME has lm-eval's tasks, metrics and standard errors."""
    subjects = mmlu_rows(tmp_path)
    config = composed(tmp_path, "task=lm_eval/mmlu_stem", f"task.num_fewshot={shots}")
    tasks = {name: (our_task(name, config),) for name in config.tasks}
    assert [*tasks] == subjects == sorted(config.groups["mmlu_stem"].tasks)
    runs = {name: (task, answer_task(task, Speaker())) for name, (task,) in tasks.items()}
    feed(monkeypatch, lambda path, name: tmp_path / path.split("/")[-1] / name, tmp_path / "cache")
    reference = evaluate_by_lm_eval("mmlu_stem", shots, Speaker())
    results = []
    for name, (task, answered) in runs.items():
        metrics = check(reference, name, task, answered)
        size = len(answered)
        results.append(TaskResult(name, 1.0, shots, metrics, task.higher_is_better(), {}, size, size, ""))
    (group,) = group_results(config.groups, results)
    expected = reference["results"]["mmlu_stem"]
    assert {key: pytest.approx(expected[key], rel=1e-12) for key in expected if "," in key} == group.metrics
    assert (
        group.metrics
        and group.effective == expected["sample_len"]
        and group.version == reference["versions"]["mmlu_stem"] == "2"
    )
    assert group.counts == expected["sample_count"]
    assert {name: config.tasks[name].alias for name in tasks} == {
        name: reference["results"][name]["alias"] for name in tasks
    }
    sizes = {len(answered) for _, answered in runs.values()}
    assert len(sizes) > 1  # with equal sizes an unweighted mean would pass, too


def test_a_group_within_a_group_a_tag_and_its_overrides() -> None:
    """Groups, nested groups, tags and tasks that are written out within a group all become tasks."""
    config = compose_jobs(["task=lm_eval/leaderboard"])[0].config
    assert len(config.tasks) == 39 and "leaderboard_bbh" in config.groups["leaderboard"].tasks
    tag = compose_jobs(["task=lm_eval/ai2_arc"])[0].config
    assert {*tag.tasks} == {"arc_easy", "arc_challenge"} and not tag.groups
    inline = compose_jobs(["task=lm_eval/flan_held_in"])[0].config
    assert "arc_easy_flan__arc_easy_prompt-0" in " ".join(inline.tasks)  # a task that is written out within the group


def test_what_cannot_be_honoured_is_refused_together(tmp_path: Path) -> None:
    """Settings that a task cannot honour are refused, all in one message."""

    def refusal(*settings: str) -> str:
        config = composed(tmp_path, *settings)
        with pytest.raises(ConfigError) as caught:
            our_task(*config.tasks, config)
        return str(caught.value)

    unsafe = refusal("task=lm_eval/humaneval", "task.num_fewshot=2", "task.fewshot_file=x.jsonl")
    assert "allow_code_execution=without_isolation" in unsafe and "fewshot_file" in unsafe and "num_fewshot=2" in unsafe
    assert "images or sounds" in refusal("task=lm_eval/mmmu_val_accounting")
    assert "scores given texts" in refusal("task=lm_eval/arc_easy", "task.generation.temperature=0.5")
    assert "generation_kwargs.num_beams=10" in refusal("task=lm_eval/code2text_go")
    assert "at temperature 0 all answers are one" in refusal("task=lm_eval/gsm8k", "task.repeats=2")
    assert "pass_at, code_timeout: lm-eval's task" in refusal("task=lm_eval/gsm8k", "task.pass_at=[1]")
    assert "repeats: are for tasks that generate" in refusal("task=lm_eval/arc_easy", "task.repeats=2")


def test_samples_and_a_prefix_of_the_run_s_own_are_asked_for(tmp_path: Path) -> None:
    folder = write_rows("gsm8k", tmp_path)
    settings = ("task.repeats=3", "task.generation.temperature=0.5", "task.gen_prefix=Well", "task.num_fewshot=0")
    config = composed(folder, "task=lm_eval/gsm8k", *settings)
    task = our_task("gsm8k", config)
    task.load()
    first = task.instances(1)[0]
    assert [request.repeat for request in first] == [0, 1, 2] and first[0].context.endswith("Answer: Well")


@pytest.mark.parametrize("iterations", [20, 100, 1000, 3000])
def test_the_bootstrap_is_lm_eval_s_draw_for_draw(iterations: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By processes of ours where there are several thousands of draws, and without lm-eval's pool, which may hang."""
    from lm_eval.api import metrics

    values = [fake_rng(str(number)).random() for number in range(7)]

    def spread_of(items: Sequence[float]) -> float:
        return max(items) - min(items)

    monkeypatch.setenv("DISABLE_MULTIPROC", "1")
    theirs = metrics.bootstrap_stderr(spread_of, values, iterations)
    monkeypatch.setattr("multiprocessing.Pool", lambda *_: pytest.fail("a pool was made"))
    monkeypatch.delenv("DISABLE_MULTIPROC")
    assert bootstrap_stderr(spread_of, values, iterations) == theirs > 0
