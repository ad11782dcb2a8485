"""Related documents: from a column of the rows to the statistics of gate and compare, and why it matters."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evalengine.config.schema import Config, DatasetConfig, TaskConfig
from evalengine.config.shipped import available, outline
from evalengine.errors import ConfigError
from evalengine.integrations.exports.tables import comparison_markdown
from evalengine.records.lm_eval import Sample, sample_row
from evalengine.records.manifest import IDENTITY_KEYS, run_identity
from evalengine.report.compare.as_json import comparison_json
from evalengine.report.compare.compare import compare
from evalengine.report.compare.metric_deltas import metric_deltas
from evalengine.report.compare.report import report as report_of
from evalengine.report.gate.evidence import Mean
from evalengine.report.gate.policies import Limits
from evalengine.report.html.comparison_page import comparison_page
from evalengine.report.leaderboard.compose import board
from evalengine.report.leaderboard.formats import board_json, board_lines, comma_separated, latex, markdown
from evalengine.report.leaderboard.page import leaderboard_page
from evalengine.report.read.baseline import load_baseline, to_text
from evalengine.report.read.lm_eval import newest, outcome_of
from evalengine.report.stats import significance as permutation
from evalengine.report.stats.clusters import across_tasks, cautions, cluster_names
from evalengine.report.stats.metric_interval import interval_cautions, mean_interval
from evalengine.report.stats.paired import paired
from evalengine.report.stats.significance import mcnemar, sign_flip
from evalengine.tasks.base import Task
from evalengine.tasks.registry import load_task
from evalengine.tasks.rows import Rows
from evalengine.tasks.rows import cluster_names as relations
from tests.parity.shipped_rows import rows_of
from tests.report.gate_runs import METRIC, make_run
from tests.report.model_runs import model
from tests.run_double import bind_again, generated, write_run

ROWS = [
    {"question": f"{i} + {i}?", "answer": f"#### {2 * i}", "passage": f"p{i // 2}", "page": i // 3} for i in range(6)
]
KEY = ("sums", *METRIC)


def task(folder: Path, rows: list[dict[str, Any]], cluster: str | None) -> Task:
    """A loaded GSM8K task over the rows, with this column of clusters."""
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = TaskConfig(
        "gsm8k:GSM8K", dataset=DatasetConfig(path=str(file)), split="test", num_fewshot=0, cluster=cluster
    )
    loaded = load_task("sums", config)
    loaded.load()
    return loaded


def test_a_column_names_the_clusters(tmp_path: Path) -> None:
    assert task(tmp_path, ROWS, None).clusters is None
    assert task(tmp_path, ROWS, "passage").clusters == ["p0", "p0", "p1", "p1", "p2", "p2"]
    numbered = task(tmp_path, ROWS, "page")
    assert numbered.clusters == ["0", "0", "0", "1", "1", "1"]
    assert (numbered.fingerprint()["cluster"], numbered.fingerprint(limit=2)["clusters"]) == ("page", 1)


@pytest.mark.parametrize(
    ("row", "column", "message"),
    [
        ({}, "video", "has no 'video'"),
        ({"passage": None}, "passage", "has no 'passage'"),
        ({"passage": ["a"]}, "passage", 'has ["a"], neither text nor number, as its'),
        ({"passage": True}, "passage", "has true, neither"),
    ],
)
def test_a_row_without_a_cluster_is_refused_with_its_place(
    row: dict[str, Any], column: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        task(tmp_path, [*ROWS[:3], {**ROWS[3], **row}], column)
    assert f"tasks.sums.cluster={column}: {tmp_path}/rows.jsonl:4: row 3 {message}" in str(caught.value)
    assert "tasks.sums.cluster=null" in str(caught.value) and "'passage'" in str(caught.value)


def test_clusters_change_no_identity_and_no_sample_without_them() -> None:
    extra = dict.fromkeys(IDENTITY_KEYS, "x")
    settings = ({}, {"cluster": "passage"}, {"items": "all"})
    runs = [Config(tasks={"sums": TaskConfig(**own)}) for own in settings]
    identities = [run_identity(config, {**extra, "numerics": "exact"}) for config in runs]
    assert identities[0] == identities[1] == identities[2] and "cluster" not in identities[0]["tasks"]["sums"]
    sample = Sample(0, {}, "t", [], [], [], "none", {}, "", "", "")
    assert "doc_cluster" not in sample_row(sample)
    assert sample_row(replace(sample, doc_cluster="p0")) == {**sample_row(sample), "doc_cluster": "p0"}


def test_shipped_tasks_name_columns_that_their_rows_have() -> None:
    """The tasks' settings are read from their outlines, which are what Hydra composes (unit/test_task_outline.py)."""
    outlined = [outline(name).tasks for name in available("task")]
    named = {name: task.cluster for tasks in outlined for name, task in tasks.items()}
    assert {name: column for name, column in named.items() if column} == {
        "hellaswag": "source_id", "boolq": "passage", "drop": "passage",
    }  # fmt: skip
    assert all(isinstance(rows_of(name)[0]["passage"], str) for name in ("boolq", "drop"))
    items = {name: task.items for tasks in outlined for name, task in tasks.items() if task.items}
    assert {name.partition("_")[0] for name in items} == {"mgsm", "gsm8k", "humaneval"} == {*items.values()}
    assert len([name for name in items if items[name] == "mgsm"]) == 33, "eleven languages, three forms"


def test_clusters_of_a_set_are_shared_by_the_tasks_that_name_it_and_no_others() -> None:
    rows = Rows([{"passage": "A" * 500, "n": 1}, {"passage": "B", "n": 2}], "here")
    assert relations(rows, TaskConfig(), "t") is None
    assert relations(rows, TaskConfig(cluster="n"), "t") == ["1", "2"]
    passages = relations(rows, TaskConfig(cluster="passage"), "t")
    assert passages is not None and len(passages[0]) == 16 and passages[1] == "B", "a long one by its hash"
    assert relations(rows, TaskConfig(items="all"), "t") == ["all#0", "all#1"]
    assert relations(rows, TaskConfig(items="all", cluster="n"), "t") == ["all#1", "all#2"]
    assert across_tasks("de", ["all#0", "all#1"]) == across_tasks("en", ["all#0", "all#1"])
    assert across_tasks("de", ["0", "1"]) == ["de 0", "de 1"] and across_tasks("de", ["C#", "1"])[0] == "de C#"


def test_few_clusters_and_few_successes_are_said() -> None:
    """Intervals of few effective clusters, or of few shares above 0, cover less than they say."""
    even, uneven = [str(i // 4) for i in range(100)], ["large"] * 60 + [str(i) for i in range(40)]
    scores = [float(i % 3 == 0) for i in range(100)]
    assert cautions(scores, None) == cautions(scores, even) == []
    (said,) = cautions(scores, uneven)
    assert "41 clusters as uneven as 2.1 equal ones are few" in said
    (rare,) = cautions([0.5, 0.25] + [0.0] * 98, None)
    assert rare.startswith("as few as 1.8 documents make the score") and cautions([0.5] * 40 + [0.2] * 60, None) == []
    a, b = make_run({"sums": scores}), make_run({"sums": [1.0, *scores[1:]]}, total=-1.6)
    names = {"sums": dict(enumerate(uneven))}
    mean = Mean("sums", "f1,none", ((KEY, 1.0),), Limits(margin=2.0), {KEY: True})
    evidence = mean.evidence(replace(a, clusters=names), b, 1)
    assert evidence.what == "100 documents in 41 clusters" and evidence.cautions == (said,)


@pytest.mark.parametrize("unseen", [False, True])
def test_every_output_of_a_difference_says_why_its_interval_may_be_too_narrow(unseen: bool) -> None:
    names = {} if unseen else {"t": {doc: str(doc // 10) for doc in range(80)}}
    old, new = ([float(doc % 3 == 0 and doc >= lost) for doc in range(80)] for lost in (0, 12))
    if unseen:
        old, new = [0.5] * 80, [0.45] * 80
    a, b = (replace(model(name, {"t": values}), clusters=names) for values, name in ((old, "a"), (new, "b")))
    items = {key: replace(item, output_sha256="other", text="B") for key, item in b.items.items()}
    b = replace(b, items=items)
    few = "8 clusters are few; intervals and bounds may be too narrow"
    if unseen:
        few = "a change larger than 0.05 in fewer than 3 in 80 documents would not have been seen"
    c = compare(a, b)
    lines = [line for line in report_of(c) if isinstance(line, str)]
    assert f"t, acc, none: {few}." in lines
    assert comparison_json(c)["metrics"][0]["paired"]["cautions"] == [few]
    assert few in comparison_page(c).render() and few in comparison_markdown(c).replace("\\", "")
    models = board([a, b], ["a", "b"])
    assert f"t acc ({'' if unseen else 'a, b, '}b against a): {few}" in models.notes
    assert board_json(models)["metrics"][0]["tests"][0]["cautions"] == [few]
    for text in (markdown(models), latex(models), comma_separated(models), leaderboard_page(models).render()):
        assert few in text.replace("\\", "")
    assert any(few in line for line in board_lines(models) if isinstance(line, str))


def test_a_groups_interval_has_the_cautions_of_its_tasks() -> None:
    scores = {task: [1.0] * 30 + [0.0] * 30 for task in ("x", "y")}
    names = {"x": {doc: f"c{doc % 3}" for doc in range(60)}}
    a = replace(model("a", scores), clusters=names, groups={"g": ["x", "y"]})
    key = ("g", "acc", "none")
    a = replace(a, results={**a.results, key: (0.5, None)}, higher_is_better={**a.higher_is_better, key: True})
    few = "x: 3 clusters are few; intervals and bounds may be too narrow"
    assert interval_cautions(a, key) == [few]
    models = board([a, replace(a, name="b")], ["a", "b"])
    assert any(note.endswith(f"(a, b): {few}") for note in models.notes)
    mean = next(row for row in csv.DictReader(io.StringIO(comma_separated(models))) if row["task"] == "g")
    assert mean["row"] == "score" and mean["cautions"] == few
    (group,) = board_json(models)["groups"]
    assert [score["cautions"] for score in group["means"][0]["scores"]] == [[few], [few]]
    average = board([replace(run, groups={}) for run in models.runs], ["a", "b"]).groups[0].means[0].scores[0]
    assert average is not None and average.cautions == (few,), "an average of tasks is in no run"


def clustered_folder(path: Path) -> Path:
    """A run's folder whose samples hold clusters of two."""
    write_run(path, [generated(doc) for doc in range(8)])
    (file,) = path.glob("samples_*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps({**row, "doc_cluster": f"p{row['doc_id'] // 2}"}) + "\n" for row in rows))
    bind_again(path)
    return path


def test_a_run_and_its_baseline_hold_the_clusters(tmp_path: Path) -> None:
    from evalengine.report.read.load import load_run

    run = load_run(clustered_folder(tmp_path / "run"))
    assert run.clusters == {"sums": {doc: f"p{doc // 2}" for doc in range(8)}}
    file = tmp_path / "kept.json"
    file.write_text(to_text(run))
    assert load_baseline(file).clusters == run.clusters
    plain = to_text(replace(run, clusters={}))
    assert '"clusters"' not in plain, "files of runs without clusters stay as they were"
    assert outcome_of(*newest(run.source), {"sums": "generate_until"})["clusters"] == run.clusters


def test_either_run_may_name_the_clusters_and_the_baselines_count() -> None:
    bare = make_run({"sums": [1.0] * 4})
    a, b = (replace(bare, clusters={"sums": dict(enumerate(names))}) for names in ("aabb", "abcd"))
    assert cluster_names(a, b, "sums", range(4)) == list("aabb")
    assert cluster_names(bare, b, "sums", [1, 3]) == list("bd")
    assert cluster_names(bare, bare, "sums", range(4)) is None
    with pytest.raises(ConfigError, match="1 of 4 documents have no cluster"):
        cluster_names(replace(bare, clusters={"sums": {0: "a", 1: "a", 2: "b"}}), b, "sums", range(4))


def test_gate_and_compare_count_clusters() -> None:
    """Eight losses in two clusters are two coins, not eight: p is 1/4, not 1/256."""
    old, new = [1.0] * 40, [0.0] * 8 + [1.0] * 32
    a, b = make_run({"sums": old}), make_run({"sums": new})
    groups = {"sums": {doc: str(doc // 4) for doc in range(40)}}
    related = replace(a, clusters=groups)
    mean = Mean("sums", "f1,none", ((KEY, 1.0),), Limits(), {KEY: True})
    evidence = [mean.evidence(run, b, 1) for run in (a, related)]
    assert (evidence[0].p, evidence[0].test) == (2**-8, "exact McNemar") and evidence[1].p >= 0.25
    assert "40 documents in 10 clusters" in evidence[1].change
    assert evidence[1].bound.bound > evidence[0].bound.bound and evidence[1].least.loss > evidence[0].least.loss
    deltas = [metric_deltas(run, b)[0].paired for run in (a, related)]
    assert deltas[0] is not None and (deltas[0].clusters, deltas[0].p_value) == (40, 2**-7)
    assert deltas[1] is not None and deltas[1].clusters == 10 and deltas[1].p_value > 0.4
    lines = [line for line in report_of(compare(related, replace(b, name="b"))) if isinstance(line, str)]
    assert (
        "sums, exact_match, strict-match: 40 documents in 10 clusters of related ones; interval, p and MDE take each "
        in ("".join(lines))
    )
    assert deltas[1] is not None and asdict(deltas[1]) == asdict(
        paired(old, new, clusters=list(groups["sums"].values()))
    )


def test_a_runs_own_interval_counts_clusters() -> None:
    scores = [1.0] * 60 + [0.0] * 20
    whole, related = mean_interval(scores), mean_interval(scores, clusters=[str(i // 10) for i in range(80)])
    assert whole is not None and related is not None and related[0] < whole[0] and related[1] > whole[1]
    assert mean_interval(scores, clusters=[str(i) for i in range(80)]) == whole
    assert mean_interval(scores, clusters=["one"] * 80) is None


def test_the_interval_of_related_answers_covers() -> None:
    """100 groups of 5 that share most of their difficulty; 3 sigma of 500 draws are 2.9 points."""
    rng, inside = np.random.default_rng(0), np.zeros(2)
    names = [str(i // 5) for i in range(500)]
    for _ in range(500):
        shared = np.repeat(rng.random(100) < 0.7, 5)
        scores = np.where(rng.random(500) < 0.7, shared, rng.random(500) < 0.7).astype(float).tolist()
        for place, clusters in enumerate((names, None)):
            bounds = mean_interval(scores, clusters=clusters)
            inside[place] += bounds is not None and bounds[0] <= 0.7 <= bounds[1]
    assert inside[0] / 500 >= 0.92 and inside[1] / 500 < 0.85


@pytest.mark.parametrize(("size", "alone"), [(2, 0.075), (10, 0.2)])
def test_related_documents_raise_false_alarms_only_without_clusters(
    size: int, alone: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups that flip together, and no difference: the test without clusters cries wolf, the clustered one does not.
    3 sigma of 500 draws at 5 % are 2.9 points."""
    monkeypatch.setattr(permutation, "FLIPS", 0)  # each test draws 999 flips
    rng, draws, wrong = np.random.default_rng(size), 500, np.zeros(2)
    for _ in range(draws):
        groups = rng.choice([-1.0, 0.0, 1.0], 40, p=[0.15, 0.7, 0.15])
        wins, losses = (size * int(np.count_nonzero(groups == sign)) for sign in (1, -1))
        wrong += [sign_flip(size * groups)[0] <= 0.05, mcnemar(wins, losses)[0] <= 0.05]
    assert wrong[0] / draws <= 0.05 + 0.029 and wrong[1] / draws > alone, wrong
