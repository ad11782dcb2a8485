"""A group that a user defines: its line in the table, its entry in the results, and what cannot be grouped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import evalengine
from tests.e2e.command import Run, call

TASK = """\
# @package tasks.{name}
cls: templated:Templated
dataset: {{path: {rows}}}
split: test
template:
  output_type: multiple_choice
  doc_to_text: "{{{{q}}}}"
  doc_to_choice: [" 1", " 2"]
  doc_to_target: gold
"""
SUITE = """\
# @package _global_
defaults: [one, two, arithmetic]
groups:
  pair:
    alias: both of them
    tasks: [one, two]
    aggregate_metric_list: [{metric: acc}]
"""
CUT = "tasks.arithmetic.generation.max_gen_toks=4"  # Its answers need not be right here.


@pytest.fixture
def search(tmp_path: Path) -> str:
    """Writes the tasks `one` (3 rows) and `two` (6 rows) and a suite with their group; returns the setting that finds
    them."""
    (tmp_path / "task").mkdir()
    for name, count in {"one": 3, "two": 6}.items():
        rows = tmp_path / f"{name}.jsonl"
        rows.write_text("\n".join(json.dumps({"q": f"{name} {n}", "gold": n % 2}) for n in range(count)))
        (tmp_path / "task" / f"{name}.yaml").write_text(TASK.format(name=name, rows=rows))
    (tmp_path / "task" / "suite.yaml").write_text(SUITE)
    return f"hydra.searchpath=[file://{tmp_path}]"


def test_a_group_is_reported_above_its_tasks(search: str, tmp_path: Path) -> None:
    done = call("task=suite", search, f"output_dir={tmp_path}/results", "progress=false", "limit=6", CUT)
    assert done.code == 0, done.err
    lines = [line for line in done.out.splitlines() if " acc  " in line or "exact_match" in line]
    starts = [" both of them  ", "   one  ", "   two  ", " arithmetic  "]
    assert [start for line in lines for start in starts if line.startswith(start)] == starts
    (folder,) = (tmp_path / "results").glob("pair+arithmetic-tinymath-*")
    results = Run(folder).results
    one, two = results["one"]["acc,none"], results["two"]["acc,none"]
    assert results["pair"]["acc,none"] == pytest.approx((3 * one + 6 * two) / 9)
    assert results["pair"]["acc_stderr,none"] >= 0 and results["pair"]["sample_len"] == 9
    assert results["pair"]["sample_count"] == {"acc,none": 9}
    assert (folder / "report.html").is_file()
    frame = evalengine.load_run(folder).metrics
    frame = frame[frame.metric != "acc_norm"]
    rows = frame[["task", "value", "documents"]].values.tolist()
    assert [row[0] for row in rows] == ["pair", "one", "two", "arithmetic"]
    assert rows[0][1:] == [pytest.approx((3 * one + 6 * two) / 9), 9] and [row[2] for row in rows[1:]] == [3, 6, 6]
    assert frame.stderr.iloc[0] == results["pair"]["acc_stderr,none"]
    table = call("report", str(folder), "--table", "md").out.splitlines()
    assert [*dict.fromkeys(line.split(" | ")[0] for line in table[2:8])] == ["| pair", "| one", "| two", "| arithmetic"]
    assert f" {results['pair']['acc,none']:.4f} ± {results['pair']['acc_stderr,none']:.4f} |" in table[2]
    assert call("compare", str(folder), str(folder)).code == 0


def test_a_tag_is_a_heading_without_a_mean(search: str, tmp_path: Path) -> None:
    file = tmp_path / "task" / "suite.yaml"
    file.write_text(file.read_text().replace("    aggregate_metric_list: [{metric: acc}]\n", ""))
    done = call("task=suite", search, f"output_dir={tmp_path}/results", "progress=false", "limit=3", CUT)
    assert done.code == 0, done.err
    lines = [line.rstrip() for line in done.out.splitlines()]
    assert lines[lines.index(" both of them") + 1].startswith("   one  ")
    (folder,) = (tmp_path / "results").glob("pair+arithmetic-tinymath-*")
    assert [*dict.fromkeys(evalengine.load_run(folder).metrics.task)] == ["one", "two", "arithmetic"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("tasks: [one, two]", "tasks: [one, three]", "groups.pair.tasks: three are not selected"),
        ("tasks: [one, two]", "tasks: [one, pair]", "groups: pair is part of pair"),
        ("tasks: [one, two]", "tasks: []", "groups.pair.tasks: names no task"),
        ("  pair:", "  one:", "groups.one: is a task's name, too"),
        ("{metric: acc}", "{metrics: acc}", "aggregate_metric_list[0].metric: is missing"),
        ("{metric: acc}", "{metric: acc, aggregation: median}", "aggregation=median: must be mean: no oth"),
    ],
)
def test_a_group_that_cannot_be(old: str, new: str, message: str, search: str, tmp_path: Path) -> None:
    """A group that cannot be reported is refused with the part of it that is wrong."""
    file = tmp_path / "task" / "suite.yaml"
    file.write_text(file.read_text().replace(old, new))
    done = call("task=suite", search, "--cfg")
    assert done.code == 2 and message in done.err, done.err
