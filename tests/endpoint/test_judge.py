"""A judge beside an endpoint: ours over its answers, its verdicts over ours, and both behind APIs."""

from __future__ import annotations

import tests.serve.needs  # noqa: F401  # first

# isort: split

import json
from pathlib import Path
from typing import Any

import pytest

from evalengine.report.read.load import load_run
from tests.e2e.command import Run, call
from tests.endpoint.fake import Fake, answered, scripted
from tests.serve.running import serving

COUNT = 4
# The fake endpoint adds the numbers that it is shown: 1 for a right answer.
RIGHT = ['judge.template="{{ 1 if response.strip() == answer else 0 }} + 0 ?"', "judge.scale=[0,1]",
         "judge.extract='([01])'", "judge.model=theirs"]  # fmt: skip


@pytest.fixture
def task(tmp_path: Path) -> list[str]:
    rows = [{"question": f"What is {n} + {n + 1} ?", "answer": str(2 * n + 1)} for n in range(COUNT)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file: dict[str, Any] = {"task": "sums", "dataset_path": f"{tmp_path}/rows.jsonl", "test_split": "test",
                            "doc_to_text": "{{question}}", "doc_to_target": "{{answer}}",
                            "generation_kwargs": {"max_gen_toks": 4}}  # fmt: skip
    (tmp_path / "sums.yaml").write_text(json.dumps(file))
    return [f"task={tmp_path}/sums.yaml", "progress=false", "engine.device=cpu"]


def only(folder: Path) -> Run:
    (found,) = [path for path in folder.iterdir() if path.is_dir()]
    return Run(found)


def test_an_endpoints_answers_are_judged_here_and_the_verdicts_can_be_checked(tmp_path: Path, task: list[str]) -> None:
    own = ["judge.model=asset:tinymath", "judge.scale=yes_no", 'judge.template="{{question}} {{response}} Right?"']
    with serving(Fake(wrong_every=2).app) as url:
        words = [*task, f"model.api={url}/v1", "model.name=theirs", "endpoint.repeats=2", *own]
        done = call(*words, f"output_dir={tmp_path}/out")
    assert done.code == 0, done.err
    folder = only(tmp_path / "out").folder
    told = json.loads(next(folder.glob("results_*.json")).read_text())["endpoint"]["judge"]
    verdicts = Run(folder / told["run"])
    assert told["digest"] == verdicts.digest and f"digest {verdicts.digest[:16]}" in done.out
    assert len(verdicts.records) == 2 * COUNT
    assert load_run(folder).results["sums", "score", "judge"][0] in [n / COUNT for n in range(COUNT + 1)]
    assert call("check", str(verdicts.folder), "--with", "model.path=asset:tinymath").code == 0


def test_a_judge_behind_an_api_says_what_it_cannot_prove(tmp_path: Path, task: list[str]) -> None:
    fake = Fake(fail_first=1)
    with serving(fake.app) as url:
        done = call(*task, f"judge.api={url}/v1", *RIGHT, f"output_dir={tmp_path}/out")
    assert done.code == 0, done.err
    assert f"behind {url}/v1: no one can check its verdicts" in done.out
    run = only(tmp_path / "out")
    rows = [row for row in run.samples("sums") if row["filter"] == "judge"]
    right = [float(row["resps"][0][0].strip() == row["doc"]["answer"]) for row in rows]
    assert [row["score"] for row in rows] == right and not any(row["unread"] for row in rows)
    assert run.manifest["judge"]["digest"] is None and len({body["prompt"] for body in fake.bodies}) <= 2
    done = call("check", str(run.folder), "--sample", "2")
    assert done.code == 0 and "no verdict can be computed again" in done.out, done.err


def test_both_behind_apis(tmp_path: Path, task: list[str]) -> None:
    with serving(Fake().app) as url:
        done = call(*task, f"model.api={url}/v1", "model.name=theirs", f"judge.api={url}/v1", *RIGHT,
                    f"output_dir={tmp_path}/out")  # fmt: skip
    assert done.code == 0, done.err
    assert load_run(only(tmp_path / "out").folder).results["sums", "score", "judge"][0] == 1.0


def test_what_an_endpoint_cannot_judge_is_said_before_anything_is_asked(tmp_path: Path, task: list[str]) -> None:
    own = ['judge.template="{{response}}"', "judge.scale=yes_no", "model.api=http://127.0.0.1:9/v1", "model.name=x"]
    done = call(*task, *own, "judge.model=self", f"output_dir={tmp_path}/out")
    assert done.code == 2 and "judge.model=self: the model is behind an API" in done.err, done.err
    done = call(*task, *own, "judge.model=x", "judge.api=nowhere", f"output_dir={tmp_path}/out")
    assert "judge.extract: is not set, and an endpoint (api) only writes" in done.err, done.err
    assert "judge.api=nowhere: must be an address" in done.err and not (tmp_path / "out").exists()


def test_our_answers_are_judged_against_an_endpoints(tmp_path: Path, task: list[str]) -> None:
    with serving(Fake().app) as url:
        assert call(*task, f"model.api={url}/v1", "model.name=theirs", f"output_dir={tmp_path}/theirs").code == 0
    pair = ["judge.model=self", "judge.scale=pairs", f"judge.against={only(tmp_path / 'theirs').folder}",
            "judge.template='{{question}} A {{response_a}} B {{response_b}} Better:'"]  # fmt: skip
    done = call(*task, *pair, f"output_dir={tmp_path}/ours")
    assert done.code == 0, done.err
    rows = [row for row in only(tmp_path / "ours").samples("sums") if row["filter"] == "judge"]
    assert len(rows) == COUNT
    for row in rows:
        answer = row["doc"]["answer"]  # the endpoint's are right
        assert row["judge"]["prompts"][0] == f"{row['doc']['question']} A {row['resps'][0][0]} B {answer} Better:"
    (tmp_path / "rows.jsonl").write_text((tmp_path / "rows.jsonl").read_text().replace("What is 1", "What is one"))
    done = call(*task, *pair, f"output_dir={tmp_path}/other")
    assert done.code == 2 and "has not answered document 1 of sums, or another document there" in done.err, done.err


@pytest.mark.parametrize("judging", [False, True], ids=["of an answer", "of a verdict"])
def test_a_rejected_request_leaves_the_verdicts_on_the_others(tmp_path: Path, task: list[str], judging: bool) -> None:
    """Document 1 has no answer, or no verdict; the right answer to document 2 is judged as its own."""

    def answer(prompt: str) -> tuple[int, bytes]:
        judged = "+ 0 ?" in prompt
        if judged == judging and prompt.startswith("0 + 0" if judged else "What is 1"):
            return 400, b'{"error": {"message": "flagged"}}'
        numbers = [int(word) for word in prompt.split() if word.isdecimal()]
        wrong = judging and not judged and numbers[0] == 1
        return answered("nothing" if wrong else str(sum(numbers)))

    with scripted(answer) as url:
        done = call(*task, f"model.api={url}/v1", "model.name=theirs", f"judge.api={url}/v1", *RIGHT,
                    "apply_chat_template=true", f"output_dir={tmp_path}/out")  # fmt: skip
    assert done.code == 0, done.err
    folder = only(tmp_path / "out").folder
    run = load_run(folder)
    assert run.scores["sums", "score", "judge"] == {0: 1.0, 2: 1.0, 3: 1.0}
    assert run.results["sums", "score", "judge"][0] == 1.0
    words = "documents without a verdict: 1" if judging else "rejected 1 of 4 documents"
    assert words in done.out and words in (folder / "report.html").read_text(), done.out
