"""What the length limit cut stands wherever a score does: each command, page, table and file that shows one."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import yaml

from evalengine import compare
from evalengine.report.html.index_page import write_index
from evalengine.report.python.results import load_run as for_python
from evalengine.report.read.load import load_run
from evalengine.report.stats.metric_interval import cut_of
from tests.e2e.command import call
from tests.report.page_content import nodes
from tests.report.test_index import rows, titles
from tests.report.written_run import Doc, write_generations
from tests.run_double import bind_again

KEY = ("sums", "exact_match", "strict-match")
WORDS = "40.0 % cut at the limit: 0.2500 on these, 0.8333 on the finished ones (1 to 1 tokens, median 1"
OTHERS = "20.0 % cut at the limit: 0.5000 on these, 0.7500 on the finished ones"


def write(path: Path, cut: int, right: tuple[int, ...], weights: str = "a" * 64) -> Path:
    docs = [Doc(f"{n}", score=float(n in right), finish="length" if n < cut else "stop") for n in range(10)]
    write_generations(path, docs, weights=weights, shift=cut / 8)
    file = path / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["counts"]["length_limited"] = cut
    manifest["identity"]["tasks"] = {"sums": {"generation": {"max_gen_toks": 1}}}
    file.write_text(json.dumps(manifest))
    bind_again(path)
    return path


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """10 documents each: of A's 4 were cut, of which 1 is right, and 5 of its others are; of B's 2, 1 and 6."""
    return write(tmp_path / "runs" / "a", 4, (0, 4, 5, 6, 7, 8)), write(tmp_path / "runs" / "b", 2, (0, *range(2, 8)))


@pytest.fixture
def models(tmp_path: Path) -> tuple[Path, Path]:
    """The same as runs of two models."""
    return (write(tmp_path / "models" / "a", 4, (0, 4, 5, 6, 7, 8)),
            write(tmp_path / "models" / "b", 2, (0, *range(2, 8)), "b" * 64))  # fmt: skip


def test_two_runs(runs: tuple[Path, Path], tmp_path: Path) -> None:
    a, b = map(str, runs)
    file = tmp_path / "c.json"
    done = call("compare", a, b, "--json", str(file), "--html", str(tmp_path / "c.html"))
    assert f"A {WORDS}, of 1 allowed); B {OTHERS}" in done.out, done.out + done.err
    (metric,) = json.loads(file.read_text())["metrics"]
    assert metric["cut"]["a"] == {"count": 4, "total": 10, "cut": 0.25, "finished": 5 / 6}
    assert WORDS in (tmp_path / "c.html").read_text()
    for form in ("md", "latex"):
        table = call("report", a, b, "--table", form).out
        assert "40.0" in table and "0.8333 on the finished ones" in table


def test_the_gate_says_it_of_both_by_a_baseline_too(runs: tuple[Path, Path], tmp_path: Path) -> None:
    a, b = map(str, runs)
    baseline = tmp_path / "baseline.json"
    assert call("baseline", a, "-o", str(baseline)).code == 0
    assert cut_of(load_run(baseline), KEY) == cut_of(load_run(a), KEY)
    for base in (a, str(baseline)):
        done = call("gate", base, b, "--policy", "accuracy", "--summary", str(tmp_path / "summary.md"))
        assert "baseline 40.0 % cut at the" in done.out and f"run {OTHERS}" in done.out, done.out + done.err
    assert "baseline 40.0 % cut at the limit" in (tmp_path / "summary.md").read_text()
    whole = call("gate", a, a, "--policy", "accuracy")
    assert whole.code == 0 and "run 40.0 % cut at the limit" in whole.out


def test_models(models: tuple[Path, Path], tmp_path: Path) -> None:
    files = {suffix: tmp_path / f"models.{suffix}" for suffix in ("csv", "md", "tex", "html")}
    done = call("compare", *map(str, models), *(word for file in files.values() for word in ("-o", str(file))))
    assert "Finished" in done.out and "40.0 %" in done.out and "83.3" in done.out, done.out + done.err
    rows = [row for row in csv.DictReader(files["csv"].read_text().splitlines()) if row["row"] == "score"]
    assert [(float(row["cut"]), float(row["value_cut"])) for row in rows] == [(0.4, 0.25), (0.2, 0.5)]
    assert "Cut at the limit" in files["md"].read_text() and "Cut at the limit" in files["tex"].read_text()
    frame = compare(*models).metrics
    assert not any(isinstance(cell, (dict, list)) for cell in frame.values.flat)
    assert frame[["value", "cut", "value_finished"]].values.tolist() == [[0.6, 0.4, 5 / 6], [0.7, 0.2, 0.75]]
    assert (frame.ci_low < frame.value).all() and frame[["rank_best", "rank_worst"]].values.tolist() == [[1, 2], [1, 2]]
    sheet = next(nodes(files["html"], is_="sheet"))
    assert "Cut" in sheet["head"] and any({"40.0 %", "83.3"} <= {str(cell) for cell in row} for row in sheet["rows"])


def test_files_for_others(runs: tuple[Path, Path], tmp_path: Path) -> None:
    a = str(runs[0])
    samples, index = tmp_path / "samples.csv", tmp_path / "index.yaml"
    assert call("report", a, "--samples", str(samples)).code == 0
    rows = csv.DictReader(samples.read_text(encoding="utf-8").splitlines())
    assert [row["cut"] for row in rows] == ["True"] * 4 + ["False"] * 6
    assert call("report", a, "--model-index", str(index)).code == 0
    assert "40.0 % cut at the limit" in index.read_text()
    assert yaml.safe_load(index.read_text())


def test_python_and_the_list_of_runs(runs: tuple[Path, Path]) -> None:
    found = for_python(runs[0])
    assert WORDS in repr(found)
    (row,) = found.metrics.to_dict("records")
    assert (row["cut"], row["value_finished"]) == (0.4, 5 / 6)
    assert list(found.samples["cut"]) == [True] * 4 + [False] * 6
    page, _ = write_index(runs[0].parent)
    place = titles(page).index("Cut")
    assert sorted(row[place] for row in rows(page)) == [2, 4]
    frame = compare(*runs).metrics[["cut_a", "cut_b", "value_finished_a", "value_finished_b"]]
    assert frame.values.tolist() == [[0.4, 0.2, 5 / 6, 0.75]]


def test_runs_that_were_not_cut_have_no_word_of_it(tmp_path: Path) -> None:
    a, b = (write(tmp_path / name, 0, right) for name, right in (("a", (1, 2)), ("b", (1, 3))))
    for done in (call("compare", str(a), str(b)), call("gate", str(a), str(b), "--policy", "accuracy")):
        assert "cut at the limit" not in done.out and "tokens, median" not in done.out
