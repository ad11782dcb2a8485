"""What k samples of a document give together."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import pytest

from evalengine.config.compose import compose_jobs
from evalengine.config.schema import GenerationConfig, TaskConfig
from evalengine.errors import ConfigError
from evalengine.harness.metrics import summarize
from evalengine.tasks.base import Task
from evalengine.tasks.filters import majority_vote
from evalengine.tasks.generation import MATCH, Repeated
from evalengine.tasks.instance import Response
from evalengine.tasks.registry import load_task

HOT = GenerationConfig(temperature=0.7)


def right(answer: str) -> float:
    return float(answer == "18")


def their_vote(answers: Sequence[str]) -> str:
    """lm-eval's majority_vote, then take_first."""
    from lm_eval.filters.selection import MajorityVoteFilter, TakeFirstFilter

    voted = MajorityVoteFilter().apply([list(answers)], [{}])
    (first,) = TakeFirstFilter().apply(list(voted), [{}])
    return str(first)


def test_pass_at_j_is_the_share_of_draws_that_hold_a_right_one() -> None:
    answers = ["18", "20", "18", "[invalid]", "7"]
    values = Repeated(5, (1, 2, 5)).scores(MATCH, [{"exact_match": right(answer)} for answer in answers])
    for j in (1, 2, 5):
        draws = [any(map(right, draw)) for draw in combinations(answers, j)]
        assert values[f"pass@{j}"] == pytest.approx(sum(draws) / len(draws))
    assert values["avg@5"] == values["pass@1"] == 0.4


def test_votes_and_ties_are_lm_evals() -> None:
    pytest.importorskip("lm_eval", reason="needs lm-eval (pip install evalengine[lm-eval])")
    rng = random.Random(3)
    for _ in range(300):
        answers = rng.choices(["18", "20", "[invalid]", ""], k=rng.randint(2, 7))
        assert majority_vote(answers, {}) == [their_vote(answers)], answers
    assert majority_vote(["20", "18"], {}) == ["20"], "of equals the first"


def gsm8k(tmp_path: Path, count: int, **settings: object) -> Task:
    rows = "".join(f'{{"question": "q{n}", "answer": "#### {n}"}}\n' for n in range(count))
    (tmp_path / "test.jsonl").write_text(rows)
    config = TaskConfig("gsm8k:GSM8K", split="test", generation=HOT, **settings)  # type: ignore[arg-type]
    task = load_task("mine", config, data_dir=None)
    object.__setattr__(task.config.dataset, "path", str(tmp_path))
    task.load()
    return task


def test_the_standard_error_is_clustered_by_document(tmp_path: Path) -> None:
    task = gsm8k(tmp_path, 30, repeats=4)
    rng = random.Random(1)
    shares = [rng.choice([0.05, 0.5, 0.95]) for _ in task.docs]
    samples = [[float(rng.random() < share) for _ in range(4)] for share in shares]
    per_doc = [
        task.process_results(doc, [Response(f"#### {n}" if hit else "#### x") for hit in hits])
        for n, (doc, hits) in enumerate(zip(task.docs, samples, strict=True))
    ]
    metrics = summarize(task, per_doc)
    flat = [hit for hits in samples for hit in hits]
    mean, groups = sum(flat) / len(flat), len(samples)
    # The cluster-robust error of a mean, sqrt(G / (G - 1) sum_g (sum_i (x_gi - mean))^2) / N (Liang & Zeger 1986).
    squares = sum(sum(hit - mean for hit in hits) ** 2 for hits in samples)
    clustered = math.sqrt(groups / (groups - 1) * squares) / len(flat)
    assert metrics["avg@4,strict-match"] == pytest.approx(mean)
    assert metrics["avg@4_stderr,strict-match"] == pytest.approx(clustered)
    naive = math.sqrt(mean * (1 - mean) / (len(flat) - 1))
    assert clustered > 1.3 * naive, "as if all samples were documents, it would be too small"


def test_metrics_and_their_names(tmp_path: Path) -> None:
    task = gsm8k(tmp_path, 1, repeats=8, pass_at=[2, 1])
    names = ["exact_match", "pass@1", "pass@2", "pass@8", "maj@8", "avg@8"]
    assert [*task.metrics] == names and all(task.higher_is_better().values())
    answers = [Response(f"#### {n}") for n in (5, 0, 0, 7, 0, 8, 9, 5)]
    scores = task.process_results(task.docs[0], answers)
    assert [name for name, kind in scores if kind == "strict-match"] == names
    assert scores["maj@8", "strict-match"] == 1.0 and scores["avg@8", "strict-match"] == 3 / 8
    assert [*gsm8k(tmp_path, 1).metrics] == ["exact_match"], "one sample: lm-eval's metrics alone"
    (requests,) = gsm8k(tmp_path, 1, repeats=3).instances()
    assert [(request.index, request.repeat) for request in requests] == [(0, 0), (0, 1), (0, 2)]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"repeats": 4, "generation": GenerationConfig()}, "repeats=4: at temperature 0 all answers are one; set a t"),
        ({"repeats": 4, "generation": GenerationConfig(repeats=2, temperature=1.0)}, "generation.repeats=2 says other"),
        ({"repeats": 4, "generation": HOT, "pass_at": [1, 5]}, "pass_at=[1, 5]: 5 must be in 1 ... 4"),
        ({"cls": "wikitext:WikiText", "repeats": 2}, "repeats: is for tasks that generate text"),
    ],
)
def test_repeats_that_cannot_be_are_refused(settings: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_task("mine", TaskConfig(**{"cls": "gsm8k:GSM8K", "split": "test", **settings}))  # type: ignore[arg-type]
    (message,) = error.value.problems
    assert problem in message


def test_lm_evals_repeats_become_ours(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "task: mine\ndataset_path: json\ndataset_kwargs: {data_files: {test: rows.jsonl}}\ntest_split: test\n"
        "doc_to_text: q\ndoc_to_target: a\nrepeats: 64\ngeneration_kwargs: {temperature: 0.2, do_sample: true}\n"
    )
    (tmp_path / "rows.jsonl").write_text('{"q": "1 + 1", "a": "2"}\n')
    (job,) = compose_jobs([f"task={tmp_path}/mine.yaml", "task.pass_at=[1,8]"])
    (config,) = job.config.tasks.values()
    assert (config.repeats, config.pass_at, config.generation.repeats) == (64, [1, 8], None)
    (fewer,) = compose_jobs([f"task={tmp_path}/mine.yaml", "task.repeats=8"])
    assert fewer.config.tasks["mine"].repeats == 8
