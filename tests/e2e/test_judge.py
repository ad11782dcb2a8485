"""A judge: the verdicts of real runs, and their bytes whenever they are asked."""

from __future__ import annotations

import json
import math
import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from evalengine.engine.llm import LLM
from evalengine.errors import EvalEngineError
from evalengine.harness import runner
from evalengine.harness.judging import digest_of
from evalengine.records.folder import RunFolder
from evalengine.records.journal import Entry, Journal
from evalengine.report.html.samples import Truncator, _texts
from evalengine.report.read.load import load_run_data
from tests.e2e.command import SHORT, Run, call, finish, finished, runs, start

ROWS = 8
JUDGE = {
    "model": "self",
    "template": "Question: {{question}}\nAnswer: {{response}}\nIs it {{gold}}?\nGrade:",
    "scale": [1, 2, 3],
}
COLUMNS = ("question", "gold", "grade", "other")


def write_task(folder: Path, judge: dict[str, Any] = JUDGE, backwards: bool = False, **more: Any) -> str:
    """Writes a task of generated answers with this judge; returns its file."""
    folder.mkdir(parents=True, exist_ok=True)
    asked = "A hall has {} rows with {} seats each. How many seats?"
    rows = [(asked.format(n + 2, n + 5), str((n + 2) * (n + 5)), 1 + n % 3, "7") for n in range(ROWS)]
    lines = [json.dumps(dict(zip(COLUMNS, row, strict=True))) + "\n" for row in rows]
    (folder / "rows.jsonl").write_text("".join(reversed(lines) if backwards else lines))
    task = {
        "task": "seats",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}},
        "test_split": "test",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_target": "{{gold}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 6},
        "judge": judge,
        **more,
    }
    (folder / "seats.yaml").write_text(json.dumps(task))  # JSON is YAML
    return str(folder / "seats.yaml")


def words(file: str, out: Path, *settings: str) -> list[str]:
    return [f"task={file}", f"output_dir={out}", "engine.device=cpu", "progress=false", "resume=never", *settings]


def judged(file: str, out: Path, *settings: str) -> Run:
    before = {run.folder for run in runs(out)}
    done = call(*words(file, out, *settings))
    assert done.code == 0, done.err
    (new,) = (run for run in runs(out) if run.folder not in before)
    return new


def of_judge(run: Run) -> Run:
    """The run of the judge of a judged run."""
    found = Run(run.folder / run.manifest["judge"]["run"])
    assert found.digest == run.manifest["judge"]["digest"]
    return found


def bits(run: Run) -> dict[tuple[tuple[int, ...], tuple[int, ...]], bytes]:
    """(prompt, label) -> the bytes of the label's logprobs, whatever the documents' order."""
    records = of_judge(run).records
    return {(tuple(r.prompt_ids), tuple(r.output_ids)): r.logprobs.tobytes() for r in records}


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_task(tmp_path_factory.mktemp("task"), {**JUDGE, "labels": "grade"})


@pytest.fixture(scope="module")
def reference(task: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """In one batch."""
    return judged(task, tmp_path_factory.mktemp("reference"), "engine.max_num_seqs=32")


def test_the_score_is_that_of_the_likeliest_label(reference: Run) -> None:
    """Worked out from the records of the judge's run alone."""
    sums: dict[int, list[float]] = {}
    for record in of_judge(reference).records:
        sums.setdefault(record.doc_id, []).append(math.fsum(record.logprobs.tolist()))
    verdicts = [1 + max(range(3), key=of_doc.__getitem__) for _, of_doc in sorted(sums.items())]
    rows = [row for row in reference.samples("seats") if row["filter"] == "judge"]
    assert [row["filtered_resps"] for row in rows] == [[str(verdict)] for verdict in verdicts]
    assert [row["score"] for row in rows] == verdicts
    assert reference.results["seats"]["score,judge"] == math.fsum(verdicts) / ROWS
    assert "exact_match,none" in reference.results["seats"]  # the task's own metrics stay
    table = reference.manifest["judge"]["tasks"]["seats"]["agreement"]["table"]
    assert table == [[sum(1 + n % 3 == i and v == j for n, v in enumerate(verdicts)) for j in (1, 2, 3)]
                     for i in (1, 2, 3)]  # fmt: skip


def test_odd_line_ends_and_names_that_begin_alike_leave_each_task_its_own_verdicts(tmp_path: Path) -> None:
    """A text's U+2028 or form feed stands in the samples as it is, and `seats_long` begins as `seats` does."""
    odd = {**JUDGE, "template": "\u2028 \x85 \x0c {{question}} {{response}}:", "scale": ["bad", "good"]}
    own = write_task(tmp_path / "own", odd)
    other = write_task(tmp_path / "other", {**odd, "scale": [7, 8]}, task="seats_long")
    run = judged(f"[{own},{other}]", tmp_path / "out")
    for task, labels in (("seats", {"bad", "good"}), ("seats_long", {"7", "8"})):
        rows = [row for row in run.samples(task) if row["filter"] == "judge"]
        assert len(rows) == ROWS and {row["filtered_resps"][0] for row in rows} <= labels
        assert {item.split("/")[0] for row in rows for item in row["judge"]["items"]} == {task}


def test_a_sample_shows_the_judges_prompt_and_its_items(reference: Run) -> None:
    (row,) = (r for r in reference.samples("seats") if r["filter"] == "judge" and r["doc_id"] == 2)
    (prompt,) = row["judge"]["prompts"]
    assert prompt == f"Question: {row['doc']['question']}\nAnswer: {row['resps'][0][0]}\nIs it 28?\nGrade:"
    assert row["judge"]["items"] == ["seats/2/0", "seats/2/1", "seats/2/2"]
    assert row["judge"]["run"] == reference.manifest["judge"]["run"]
    page = (reference.folder / "report.html").read_text(encoding="utf-8")
    assert "Judged by tinymath" in page and "kappa of the verdicts with 8 given labels" in page
    panel = _texts(load_run_data(reference.folder), "seats", 2, Truncator(1000, 1000))
    assert ["judge", row["filtered_resps"][0], [["score", str(row["score"])]]] in panel[4]
    assert ["judge's prompt", prompt] in panel[6]
    assert [f"judge's items in {row['judge']['run']}", "seats/2/0, seats/2/1, seats/2/2"] in panel[6]


def test_a_bundled_task_is_judged_by_the_command_line_alone(tmp_path: Path) -> None:
    own = ["judge.model=asset:tinymath", "judge.scale=yes_no", r"judge.template='{{question}}\n{{response}}\nRight?'"]
    run = finished(tmp_path, "limit=2", SHORT, *own)
    assert {"exact_match,strict-match", "score,judge"} <= run.results["arithmetic"].keys()
    (row, *_) = (row for row in run.samples("arithmetic") if row["filter"] == "judge")
    assert row["judge"]["prompts"] == [f"{row['doc']['question']}\n{row['resps'][0][0]}\nRight?"]


def test_verdicts_have_the_same_bytes_whenever_they_are_asked(task: str, reference: Run, tmp_path: Path) -> None:
    """Alone, in another order, by another process, from a cache that is filled and from one that is full."""
    cache = f"cache={tmp_path / 'cache'}"
    alone = judged(task, tmp_path / "alone", "engine.max_num_seqs=1", "engine.enable_prefix_caching=false")
    assert of_judge(alone).leaves == of_judge(reference).leaves and alone.digest == reference.digest
    for name in ("fill", "full"):
        run = judged(task, tmp_path / name, cache)
        assert of_judge(run).leaves == of_judge(reference).leaves, name
        assert of_judge(run).manifest["cache"]["hits"] == (3 * ROWS if name == "full" else 0)
    backwards = judged(write_task(tmp_path / "b", {**JUDGE, "labels": "grade"}, backwards=True), tmp_path / "back")
    assert bits(backwards) == bits(reference) and len(bits(reference)) == 3 * ROWS
    done = finish(start(*words(task, tmp_path / "again")))
    assert done.code == 0, done.err
    (again,) = runs(tmp_path / "again")
    assert of_judge(again).digest == of_judge(reference).digest


def test_the_inverse_fast_verdicts_do_depend_on_the_batch(task: str, tmp_path: Path) -> None:
    """The same comparison sees a difference where there is one."""
    fast = "batch_invariant=false", "engine.dtype=bfloat16"
    alone, together = (judged(task, tmp_path / n, f"engine.max_num_seqs={n}", *fast) for n in ("1", "32"))
    assert of_judge(alone).leaves != of_judge(together).leaves


def test_receipts_of_verdicts_are_proved_and_checked(reference: Run, tmp_path: Path) -> None:
    done = call("check", str(reference.folder), "--sample", "3")
    assert done.code == 0, done.err
    assert done.out.count("every bit agrees") == 2 and done.out.endswith("verdict: AGREES\n")
    assert f"digest: {reference.digest}\n" in done.out and f"digest: {of_judge(reference).digest}\n" in done.out
    receipt = tmp_path / "receipt.json"
    item = reference.samples("seats")[-1]["judge"]["items"][1]
    assert call("prove", str(of_judge(reference).folder), "--item", item, "-o", str(receipt)).code == 0
    assert call("check", str(receipt), "--model", "asset:tinymath").code == 0


def test_a_judged_metric_is_compared_and_gated_as_any(task: str, reference: Run, tmp_path: Path) -> None:
    again = judged(task, tmp_path / "again", "engine.max_num_seqs=3")
    done = call("compare", str(reference.folder), str(again.folder))
    assert done.code == 0 and "verdict: IDENTICAL" in done.out
    assert call("gate", str(reference.folder), str(again.folder)).code == 0
    done = call("gate", str(reference.folder), str(again.folder), "--policy", "accuracy", "--json", "-")
    assert "score,judge" in done.out or '"score"' in done.out, done.out + done.err


@pytest.mark.parametrize("harm", ["edit", "delete", "exchange"])
def test_the_judges_files_are_part_of_the_evidence(harm: str, reference: Run, tmp_path: Path) -> None:
    run = Run(Path(shutil.copytree(reference.folder.parent, tmp_path / "out")) / reference.folder.name)
    verdicts = of_judge(run).folder
    if harm == "edit":
        (file,) = verdicts.glob("samples_*.jsonl")
        file.write_text(file.read_text().replace("1", "2"))
    else:
        shutil.rmtree(verdicts)
    if harm == "exchange":
        finished(tmp_path / "other", "limit=1", SHORT).folder.rename(verdicts)
    said = {"edit": "not the file that the run wrote", "delete": "missing: the run of the judge", "exchange": "digest"}
    for command in (
        *(["compare", str(reference.folder), str(run.folder)], ["report", str(run.folder)]),
        ["gate", str(reference.folder), str(run.folder), "--policy", "bitwise"],
    ):
        done = call(*command)
        assert done.code == 2 and str(verdicts) in done.out + done.err and said[harm] in done.out + done.err
    assert digest_of(run.folder) == digest_of(reference.folder), "the answers need no judge"


def test_another_judge_is_another_run(task: str, reference: Run, tmp_path: Path) -> None:
    """The same answers, and scores that are not comparable: the judge is part of the identity."""
    other = judged(task, tmp_path, "judge.scale=[1,2,3,4]")
    assert other.leaves == reference.leaves and other.folder.name[-8:] != reference.folder.name[-8:]
    done = call("compare", str(reference.folder), str(other.folder))
    assert "tasks.seats.judge.scale is [1, 2, 3] in A and [1, 2, 3, 4] in B" in done.out + done.err


def test_the_first_models_memory_is_given_back_before_the_judge_loads(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = []
    load, released = LLM._load, LLM._release

    def loading(self: LLM) -> None:
        events.append(f"load {Path(self.checkpoint.source).name}")
        load(self)

    def release(self: LLM) -> None:
        events.append("free")
        released(self)

    monkeypatch.setattr(LLM, "_load", loading)
    monkeypatch.setattr(LLM, "_release", release)
    copy = tmp_path / "copy"
    shutil.copytree(str(files("evalengine.assets") / "tinymath"), copy)
    run = judged(task, tmp_path / "out", f"judge.model={copy}", "limit=2")
    assert events == ["load asset:tinymath", "free", f"load {copy.name}", "free"]
    assert of_judge(run).manifest["model"]["name"] == "copy"
    events.clear()
    judged(task, tmp_path / "out", "limit=2")
    assert events == ["load asset:tinymath", "free"]  # one engine where the model judges itself


def test_a_run_killed_while_it_is_judged_goes_on(
    task: str, reference: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between verdicts, and between the judge's end and its own: nothing is asked twice, and no byte differs."""
    append = Journal.append

    def dies(self: Journal, entry: Entry) -> None:
        if "judge" in self.path.parts and len(self.finished) == 5:
            raise EvalEngineError("killed")
        append(self, entry)

    def dies_late(folder: RunFolder, *more: Any) -> str:
        if "judge" not in folder.path.parts:
            raise EvalEngineError("killed late")
        return write(folder, *more)

    write, same = runner.finish_run, [word for word in words(task, tmp_path) if word != "resume=never"]
    with monkeypatch.context() as patched:
        patched.setattr(Journal, "append", dies)
        assert "killed" in call(*same).err
    with monkeypatch.context() as patched:
        patched.setattr(runner, "finish_run", dies_late)
        assert "killed late" in call(*same).err
    (verdicts,) = tmp_path.glob("*/judge/*/digest.txt")
    written = verdicts.stat().st_mtime_ns
    done = call(*same)
    assert done.code == 0, done.err
    (finished,) = runs(tmp_path)
    assert finished.digest == reference.digest and of_judge(finished).digest == of_judge(reference).digest
    assert of_judge(finished).folder == verdicts.parent and verdicts.stat().st_mtime_ns == written
    assert of_judge(finished).manifest["counts"]["resumed_requests"] == 5


def test_pairs_against_a_column_and_against_a_run(reference: Run, tmp_path: Path) -> None:
    """Equal answers must tie: what the judge prefers is then the place, and all of it is seen as flipped."""
    template = "Question: {{question}}\nA:{{response_a}}\nB:{{response_b}}\nBetter:"
    pairs = {"model": "self", "template": template, "scale": "pairs", "against": "other"}
    column = judged(write_task(tmp_path / "task", pairs, metric_list=[]), tmp_path / "column")
    rows = column.samples("seats")
    assert [row["filter"] for row in rows] == ["judge"] * ROWS  # the judge alone scores it
    assert len(of_judge(column).records) == ROWS * 2 * 3
    for row in rows:
        first, second = row["judge"]["prompts"]
        answer = row["resps"][0][0]
        assert first.endswith(f"A:{answer}\nB:7\nBetter:") and second.endswith(f"A:7\nB:{answer}\nBetter:")
        assert (row["win_rate"] == 0.5) or not row["flipped"]
    itself = judged(
        write_task(tmp_path / "task2", {**pairs, "against": str(reference.folder)}, metric_list=[]), tmp_path / "run"
    )
    (told,) = (m["judge"]["tasks"]["seats"] for m in [itself.manifest])
    assert itself.results["seats"]["win_rate,judge"] == 0.5
    preferred = [row for row in itself.samples("seats") if row["flipped"]]
    assert told == {"verdicts": ROWS, "flipped": len(preferred)} and preferred
    assert itself.manifest["identity"]["judge"]["against"] == {"seats": reference.digest}
    assert len({prompt for row in itself.samples("seats") for prompt in row["judge"]["prompts"]}) == ROWS


def test_a_written_verdict_and_labels_of_given_texts(tmp_path: Path) -> None:
    judge = {**JUDGE, "extract": "Grade: ([0-9])", "generation": {"max_gen_toks": 4}, "labels": "grade",
             "labelled": "other"}  # fmt: skip
    run = judged(write_task(tmp_path / "task", judge), tmp_path / "out")
    records = of_judge(run).records
    assert len(records) == 2 * ROWS and {record.kind for record in records} == {"generate_until"}
    told = run.manifest["judge"]["tasks"]["seats"]
    unread = [row for row in run.samples("seats") if row["filter"] == "judge" and row["unread"]]
    assert told["verdicts"] == ROWS and told["unread"] == len(unread) > 0  # tinymath writes no grades
    assert all(row["filtered_resps"][0] == "[invalid]" and row["score"] == 1 for row in unread)
    assert sum(map(sum, told["agreement"]["table"])) <= ROWS


def test_every_sample_of_a_document_is_judged(tmp_path: Path) -> None:
    sampled = {"until": ["\n"], "max_gen_toks": 6, "do_sample": True, "temperature": 1.0}
    run = judged(write_task(tmp_path, generation_kwargs=sampled, repeats=2), tmp_path / "out")
    rows = [row for row in run.samples("seats") if row["filter"] == "judge"]
    assert all(row["score"] == sum(map(int, row["filtered_resps"])) / 2 for row in rows)
    assert run.manifest["judge"]["tasks"]["seats"]["verdicts"] == 2 * ROWS == len(of_judge(run).records) / 3
    assert "pass@2,none" in run.results["seats"]


def test_empty_answers_are_reported_and_never_correct(tmp_path: Path) -> None:
    """The model's answers begin with a space, which ends them here."""
    judge = {**JUDGE, "labels": "grade"}
    file = write_task(tmp_path, judge, generation_kwargs={"until": [" "], "max_gen_toks": 4}, metric_list=[])
    done = call(*words(file, tmp_path / "out", "limit=3"))
    assert done.code == 0, done.err
    assert "tasks.seats.judge: 3 of 3 answers are empty" in done.err
    (run,) = runs(tmp_path / "out")
    assert run.results["seats"]["score,judge"] == 1.0 and run.results["seats"]["empty_answer"] == 3
    assert [sample["filtered_resps"] for sample in run.samples("seats")] == [["[empty]"]] * 3
    assert run.manifest["judge"]["tasks"]["seats"]["empty"] == 3
    assert sum(map(sum, run.manifest["judge"]["tasks"]["seats"]["agreement"]["table"])) == 0
    assert "seats: 3 of 3 answers are empty: the lowest value" in done.out
    assert call("check", str(run.folder)).code == 0


def test_a_judge_is_not_shown_an_unfinished_thinking(tmp_path: Path) -> None:
    file = write_task(tmp_path, metric_list=[])
    run = judged(file, tmp_path / "out", "limit=2", "model.think_end_token='</think>'")
    assert run.results["seats"]["score,judge"] == 1.0 and run.results["seats"]["thinking_truncated"] == 2
    rows = [json.loads(line) for line in (run.folder / "judge" / "seats.jsonl").read_text().splitlines()]
    assert [row["responses"] for row in rows] == [[""]] * 2
    assert all(record.text for record in run.records)
