"""`experiment=prompts`: what it sweeps, and which part of the variance it finds to be the prompt's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from evalengine.errors import ConfigError
from evalengine.report.read.run import Run
from evalengine.report.stats.measured import two_way
from evalengine.report.sweep.prompts import prompts_page, sensitivities, sentence
from evalengine.tasks.rows import content_hash, reordered
from tests.e2e.command import SHORT, call
from tests.report.gate_runs import make_run
from tests.report.page_content import content, words

KEY = ("t", "exact_match", "strict-match")


def runs(scores: np.ndarray) -> list[Run]:
    """A run for each column of scores [n, p]."""
    return [
        make_run({"t": column.tolist()}, prompts=f"p{number}", datasets={"t": {"sha256": "s"}})
        for number, column in enumerate(scores.T)
    ]


def test_the_experiment_leaves_a_page_and_its_list(tmp_path: Path) -> None:
    settings = ("limit=3", SHORT, "task.num_fewshot=1", f"output_dir={tmp_path}", "fewshot_seed=1,2", "progress=false")
    done = call("experiment=prompts", *settings)
    assert done.code == 0, done.err
    (folder,) = tmp_path.glob("prompts-*")
    content = json.loads((folder / "prompts.json").read_text())
    assert [run["prompt"] for run in content["runs"]] == ["fewshot_seed 1", "fewshot_seed 2"]
    assert f"verdict: {content['metrics'][0]['said']}" in done.out
    assert "Variance components" in (folder / "prompts.html").read_text()
    again = call("experiment=prompts", *settings[:2], *settings[3:])
    assert again.code == 2 and "arithmetic shows no exemplars, so fewshot_seed changes no prompt" in again.err
    other = call("experiment=prompts", *settings[:4], "fewshot_seed=1", "seed=1,2")
    assert other.code == 2 and "seed: experiment=prompts sweeps only fewshot_seed, " in other.err


def test_the_parts_are_those_of_the_scores() -> None:
    """One prompt of four loses a fifth of the documents that the others solve."""
    rng = np.random.default_rng(0)
    scores = np.repeat((rng.random((200, 1)) < 0.7).astype(float), 4, axis=1)
    scores[rng.random(200) < 0.2, 3] = 0.0
    (one,) = sensitivities(runs(scores))
    assert one.parts == two_way(scores) and one.key == KEY and one.means[0] - one.means[3] > 0.1
    assert one.parts.p_value < 1e-6 and one.of_a_score > 0.6 and one.by_prompt == pytest.approx(0.07, abs=0.02)
    assert "4 prompts give" in sentence(one) and "(significant: p = " in sentence(one)
    assert "(not significant over 200 documents: p = " in sentence(sensitivities(runs(scores[:, :2]))[0])
    page = prompts_page(runs(scores), list("abcd"), [one])
    assert "The prompts differ" in words(page)
    alike = runs(scores[:, :2])
    assert "No difference between" in words(prompts_page(alike, list("ab"), sensitivities(alike)))
    titles = [section["title"] for section in content(page)["sections"]]
    assert titles == ["Scores", "Variance components", "Runs"]


def test_related_documents_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made = runs(np.repeat(np.arange(8.0).reshape(4, 2) % 3, 3, axis=0))
    for run in made:
        run.clusters["t"] = {doc: str(doc // 3) for doc in range(12)}
    (one,) = sensitivities(made)
    assert one.documents == 4 and one.parts == two_way(np.arange(8.0).reshape(4, 2) % 3)


def test_equal_prompts_and_other_documents_are_refused() -> None:
    a, b = runs(np.zeros((4, 2)))
    b.identity["prompts"] = a.identity["prompts"]
    with pytest.raises(ConfigError, match="two of the runs have equal prompts"):
        sensitivities([a, b])
    b.identity["datasets"] = {"t": {"sha256": "other"}}
    with pytest.raises(ConfigError, match="the runs have different documents"):
        sensitivities([a, b])


@pytest.mark.parametrize(
    "row",
    [
        {"question": "?", "choices": ["a", "b", "c", "d"], "answer": 2},
        {"question": "?", "options": ["a", "b", "c", "d"], "answer": "C", "answer_index": 2},
    ],
)
def test_the_answer_moves_with_the_options(row: dict[str, object]) -> None:
    column, before = ("choices" if "choices" in row else "options"), content_hash([row])
    orders = set()
    for seed in range(20):
        other = reordered(row, seed)
        answer = other["answer"]
        place = "ABCD".index(answer) if isinstance(answer, str) else answer
        assert other[column][place] == "c" and sorted(other[column]) == ["a", "b", "c", "d"]
        assert other.get("answer_index", place) == place and reordered(row, seed) == other
        orders.add(tuple(other[column]))
    assert len(orders) > 10 and content_hash([row]) == before, "the row itself stays"


@pytest.mark.parametrize("row", [{"answer": 1}, {"choices": ["a"], "answer": 1}, {"choices": ["a"], "answer": True}])
def test_a_row_without_options_is_refused(row: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="choice_order is set"):
        reordered(row, 1)
