"""Changed answers: another wrong choice is a changed answer wherever answers are counted."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from evalengine.__main__ import main
from evalengine.records.sealed import content_sha256
from evalengine.report.compare.compare import compare
from evalengine.report.compare.item_differences import changed_documents, flips, score_unchanged, tally
from evalengine.report.html.comparison_page import comparison_page
from evalengine.report.read.baseline import write_baseline
from evalengine.report.read.load import load_run
from evalengine.report.read.run import Run
from evalengine.report.sweep.sweep import Cell, floor_table, sweep
from evalengine.report.sweep.write import sweep_json
from tests.report.compared_runs import BASE, BIT, KEY, TASK, TOKEN, run
from tests.report.written_run import write_choices

COUNT = 20
OTHER_WRONG = (1, 4, 7, 13, 19)  # documents in which another wrong choice wins
ACC = ("pick", "acc", "none")


def sums(winners: Sequence[int]) -> list[list[float]]:
    """Log-likelihoods of four choices, of which the winner has the highest."""
    return [[-1.0 - (place != winner) - place / 100 for place in range(4)] for winner in winners]


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Twenty documents whose right choice is 3; A takes 1 throughout, B 2 in five of them, 3 in one."""
    targets = [3] * COUNT
    winners = [2 if doc in OTHER_WRONG else 3 if doc == 0 else 1 for doc in range(COUNT)]
    a = write_choices(tmp_path / "a", sums([1] * COUNT), targets)
    return a, write_choices(tmp_path / "b", sums(winners), targets, numerics="fast")


def test_another_wrong_choice_is_another_answer(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = folders
    file, page = tmp_path / "c.json", tmp_path / "c.html"
    assert main(["compare", str(a), str(b), "--level", "answers", "--json", str(file), "--html", str(page)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "verdict: DIFFERENT (0 of 80 outputs differ; 6 documents changed: 1 score, 5 answers only)"
    assert any(re.fullmatch(r" pick +none +acc +1 +5", line) for line in lines), "wrong to right, wrong to wrong"
    assert any("1: choice 1" in line and "2: choice 2" in line and "wrong to wrong" in line for line in lines)
    saved = json.loads(file.read_text(encoding="utf-8"))
    assert not saved["within"]["answers"] and saved["answers"] == {"wrong to right": 1, "wrong to wrong": 5}
    assert saved["differing_in"]["score"] == 1 and saved["differing_in"]["answer"] == 5
    (counts,) = saved["answers_by_metric"]
    assert counts == {"task": "pick", "metric": "acc", "filter": "none", "wrong to right": 1, "wrong to wrong": 5}
    assert [(f["doc_id"], f["choice_a"], f["choice_b"]) for f in saved["flips"] if f["change"] == "wrong to wrong"] == [
        (doc, 1, 2) for doc in OTHER_WRONG
    ]
    html = page.read_text(encoding="utf-8")
    assert "1 score, 5 answers only" in html and '"wrong to wrong"' in html


def test_the_noise_floor_and_the_sweep_count_another_wrong_choice(folders: tuple[Path, Path], tmp_path: Path) -> None:
    a, b = map(load_run, folders)
    floor = compare(a, b)
    assert (floor.changed, floor.kinds["answer"]) == (6, 5)
    assert score_unchanged(floor.flips) == "5 from one wrong answer to another"
    swept = sweep("x", [Cell({"numerics": mode}, run_) for mode, run_ in (("exact", a), ("fast", b))])
    rows = [cell for row in floor_table(swept).rows for cell in row]
    assert "6 (5 at an equal score)" in rows
    floor_json = sweep_json(swept, tmp_path)["noise_floor"][0]
    assert floor_json["flipped_answers_by_change"] == {"wrong to right": 1, "wrong to wrong": 5}


def test_a_baseline_carries_the_choices(folders: tuple[Path, Path], tmp_path: Path) -> None:
    a, b = folders
    file = tmp_path / "baseline.json"
    assert main(["baseline", str(a), "-o", str(file)]) == 0
    kept = load_run(file)
    assert kept.choices == load_run(a).choices == {ACC: dict.fromkeys(range(COUNT), 1)}
    assert main(["compare", str(file), str(b), "--level", "answers"]) == 1
    c = compare(kept, load_run(b))
    assert c.answers == {"wrong to right": 1, "wrong to wrong": 5} and not any("which choice" in n for n in c.unchecked)
    assert [flip.answer_a for flip in c.flips] == ["1: choice 1"] * 6  # the file holds the likeliest choice's text


def test_an_older_baseline_says_that_it_does_not_know(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = folders
    file = tmp_path / "old.json"
    assert main(["baseline", str(a), "-o", str(file)]) == 0
    content = json.loads(file.read_text(encoding="utf-8"))
    for name in ("choices", "sha256"):
        del content[name]
    content["sha256"] = content_sha256(content)
    file.write_text(json.dumps(content), encoding="utf-8")
    c = compare(load_run(file), load_run(b))
    assert c.answers == {"wrong to right": 1}
    note = "pick: A does not say which choice acc took (its baseline was written without): another wrong one would pass"
    assert any(line.startswith(note) for line in c.unchecked)
    capsys.readouterr()
    main(["compare", str(file), str(b)])
    assert note in capsys.readouterr().out


def test_lm_evals_folders_tell_the_choices(folders: tuple[Path, Path], tmp_path: Path) -> None:
    def bare(folder: Path) -> Path:
        made = tmp_path / f"lm-{folder.name}"
        made.mkdir()
        for file in folder.glob("*_2026*.json*"):
            shutil.copy(file, made)
        (results,) = made.glob("results_*.json")
        content = json.loads(results.read_text(encoding="utf-8"))
        content["configs"]["pick"] = {"output_type": "multiple_choice", "target_delimiter": " "}
        results.write_text(json.dumps(content), encoding="utf-8")
        return made

    a, b = (bare(folder) for folder in folders)
    assert load_run(a).kind == "lm-eval" and load_run(a).choices == {ACC: dict.fromkeys(range(COUNT), 1)}
    assert compare(load_run(a), load_run(b)).answers == {"wrong to right": 1, "wrong to wrong": 5}
    assert main(["compare", str(a), str(b), "--level", "answers"]) == 1
    assert compare(load_run(a), load_run(folders[1])).answers == {"wrong to right": 1, "wrong to wrong": 5}


def scored(choice: int, score: float, metrics: Sequence[str] = ("acc",)) -> Run:
    """A run whose document 0 took this choice and has this score under every metric."""
    base = run(BIT, kind="loglikelihood")
    keys = [(TASK, metric, "none") for metric in metrics]
    return replace(
        base,
        scores={key: {0: score} for key in keys},
        results=dict.fromkeys(keys, (score, None)),
        higher_is_better=dict.fromkeys(keys, True),
        answers={(TASK, "none"): {0: f"{choice}: x"}},
        choices={key: {0: choice} for key in keys},
    )


@pytest.mark.parametrize(
    ("old", "new", "change"),
    [
        ((1, 1.0), (2, 0.0), "right to wrong"),
        ((1, 0.0), (2, 1.0), "wrong to right"),
        ((1, 0.0), (2, 0.0), "wrong to wrong"),
        ((1, 1.0), (2, 1.0), "right to right"),  # two choices may be right
        ((1, 0.0), (1, 0.0), None),
    ],
)
def test_what_a_change_is_called(old: tuple[int, float], new: tuple[int, float], change: str | None) -> None:
    flipped = list(flips(scored(*old), scored(*new), {}))
    assert [flip.change for flip in flipped] == ([] if change is None else [change])
    lower = [replace(scored(*pair), higher_is_better={(TASK, "acc", "none"): False}) for pair in (old, new)]
    swapped = {"right": "wrong", "wrong": "right"}
    expected = None if change is None else " to ".join(swapped[word] for word in change.split(" to "))
    assert [flip.change for flip in flips(*lower, {})] == ([] if expected is None else [expected])


def test_each_metric_has_its_own_choice_and_a_document_counts_once() -> None:
    metrics = ("acc", "acc_norm")
    a, b = scored(1, 0.0, metrics), scored(1, 0.0, metrics)
    b.choices[TASK, "acc_norm", "none"][0] = 2
    assert [(flip.metric, flip.change) for flip in flips(a, b, {})] == [("acc_norm", "wrong to wrong")]
    b.choices[TASK, "acc", "none"][0] = 3
    b.scores[TASK, "acc", "none"][0] = 1.0
    flipped = list(flips(a, b, {}))
    assert tally(flipped) == {
        (TASK, "acc", "none"): {"wrong to right": 1},
        (TASK, "acc_norm", "none"): {"wrong to wrong": 1},
    }
    assert changed_documents(flipped) == {"wrong to right": 1} and score_unchanged(flipped) == ""


def test_generated_answers_are_told_apart_as_well() -> None:
    changed = {**TOKEN, 1: ([2, 9], [-0.125, -2.0])}
    c = compare(run(BASE, scores={1: 0.0}), run(changed, scores={0: 0.0, 1: 0.0}, answers={0: "3"}))
    assert c.answers == {"right to wrong": 1, "wrong to wrong": 1}
    assert tally(c.flips) == {KEY: {"right to wrong": 1, "wrong to wrong": 1}}
    assert "1 score, 1 answer only" in comparison_page(c).render()


def test_plan_takes_a_baseline_of_choices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    winners, targets = sums([1, 2, 1, 0]), [1] * 4
    a, b = (write_choices(tmp_path / name, winners, targets, numerics=name) for name in ("exact", "fast"))
    file = tmp_path / "baseline.json"
    write_baseline(load_run(a), file)
    assert main(["plan", f"runs={file},{b}", "margin=5"]) == 0
    assert "pick: 0 of 4 scores flip" in capsys.readouterr().out
